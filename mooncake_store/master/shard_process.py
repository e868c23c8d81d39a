"""One shard as a process: `python -m mooncake_store.master.shard_process`, started by a master.

Settings come over the channel to the parent; without one it ends at once. One that is started ahead
loads what it will need, and waits for them. It serves clients and the
master on sockets that it inherits from the master, and ends when that does.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.clock import SystemClock
from mooncake_store.config.settings import MasterConfig
from mooncake_store.core.warmup import warmup
from mooncake_store.master.building import open_service, shard_server
from mooncake_store.master.counting import Counted, Term
from mooncake_store.master.shard_link import LocalShard
from mooncake_store.master.site import ShardPlace
from mooncake_store.program import kernels, logs
from mooncake_store.program.children import Parent
from mooncake_store.program.fence import Fence
from mooncake_store.program.garbage_collection import (
    hold_garbage_collection,
    settle_garbage_collection,
)
from mooncake_store.wire.cluster import ADMIN
from transfer_engine.errors import StoreError
from transfer_engine.rpc.server import Server, run

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["main"]


async def serve(parent: Parent, message: Mapping[str, Any], config: MasterConfig) -> None:
    """Serve one shard until the parent is gone."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    place = ShardPlace(message["shard"], config.shards)
    folder = Path(message["folder"]) if message["folder"] else None
    clock = SystemClock()
    term = None
    if message["term"] is not None:
        fd, counted = message["term"]
        term = Term(Fence(fd), None if counted is None else Counted(*counted))
    service, loading = await open_service(config, place, clock, folder, message["cluster"], term)
    link = LocalShard(service.site, service.shipping)
    link.place(message["bases"])
    async with (
        shard_server(config, service, message["cluster"], message["secret"]) as clients,
        Server(ADMIN, link.handle, secret=message["admin_secret"]) as master,
    ):
        await clients.serve([socket.socket(fileno=fd) for fd in message["clients"]])
        await master.serve([socket.socket(fileno=fd) for fd in message["admin"]])
        service.start()
        loading.add_done_callback(lambda _: settle_garbage_collection())
        parent.ready({"kept": service.site.kept, "keeps": service.site.keeps})
        parent.watch(lambda: loop.call_soon_threadsafe(stop.set))
        ending = loop.create_task(stop.wait())
        ends: set[asyncio.Future[Any]] = {ending, service.failure}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        service.stop()
        await asyncio.gather(clients.stop(grace_s=2.0), master.stop(grace_s=0.5))
        await asyncio.to_thread(service.close)
    if service.failure.done():
        service.failure.result()


def main() -> int:
    """Run one shard; returns the exit code."""
    hold_garbage_collection()
    parent = Parent()
    message = parent.message
    if message.get("ahead"):
        # Nobody waits yet, so what a shard needs is loaded before it is known which.
        warmup()
        parent.ready({})
        message = parent.wait()
    config = msgspec.convert(message["config"], MasterConfig)
    logs.configure(config.log_level, as_json=config.log_json)
    try:
        kernels.forget_stale_caches()
        run(serve(parent, message, config))
    except StoreError as error:
        parent.failed(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
