"""Running a master as a program: signals, the port file, exit.

    run_master(config, secret, on_ready)       # returns when told to stop, raises what broke
    run_standby(config, leader, secret, on_ready)       # likewise; a master once it is promoted

Nothing here knows of command lines: `mooncake master` and `LocalCluster` both end here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from typing import TYPE_CHECKING, Any

from mooncake_store.master.server import Master
from mooncake_store.program import kernels
from mooncake_store.program.garbage_collection import settle_garbage_collection
from mooncake_store.program.port_file import remove_port_file, write_port_file
from mooncake_store.standby.service import follow_until_promoted
from transfer_engine.rpc.server import run

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.server import Addresses
    from mooncake_store.program.children import Parent
    from mooncake_store.program.fence import Fence

__all__ = [
    "described",
    "lead",
    "run_master",
    "run_standby",
    "stop_of",
]

log = logging.getLogger(__name__)

STOP_S = 4.0


def described(addresses: Addresses) -> dict[str, Any]:
    """Return what a port file and `--json` say of a running master."""
    return {
        "address": str(addresses.master),
        "pid": os.getpid(),
        "shards": [str(shard) for shard in addresses.shards],
        "liveness": str(addresses.liveness),
    }


async def serve_master(
    config: MasterConfig,
    secret: bytes | None,
    on_ready: Callable[[dict[str, Any]], object],
    parent: Parent | None,
) -> None:
    """Serve until a signal, or until the parent is gone; raises what broke a shard."""
    await lead(config, secret, on_ready, stop_of(parent))


async def serve_standby(
    config: MasterConfig,
    leader: str,
    secret: bytes | None,
    on_ready: Callable[[dict[str, Any]], object],
) -> None:
    """Copy a leader until told to stop, or until promoted, and serve as a master from then on."""
    stop = stop_of(None)

    def following(address: str) -> None:
        facts = {"address": address, "pid": os.getpid(), "leads": False}
        if config.port_file:
            write_port_file(config.port_file, facts)
        on_ready(facts)

    promoted = await follow_until_promoted(config, leader, secret, stop, following)
    if promoted is not None:
        await lead(promoted, secret, lambda facts: on_ready({**facts, "leads": True}), stop)
    elif config.port_file:
        remove_port_file(config.port_file)


def stop_of(parent: Parent | None) -> asyncio.Event:
    """Return what is set by a signal, or when the parent is gone."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if parent is None:
        loop.add_signal_handler(signal.SIGINT, stop.set)
    else:
        parent.watch(lambda: loop.call_soon_threadsafe(stop.set))
    return stop


async def lead(
    config: MasterConfig,
    secret: bytes | None,
    on_ready: Callable[[dict[str, Any]], object],
    stop: asyncio.Event,
    fence: Fence | None = None,
) -> None:
    """Serve as a master until told to stop; raises what broke a shard."""
    loop = asyncio.get_running_loop()
    master = Master(config, secret=secret, fence=fence)
    facts = described(await master.start())
    assert master.failed is not None
    try:
        if config.port_file:
            write_port_file(config.port_file, facts)
        on_ready(facts)
        if master.loading is None:
            settle_garbage_collection()
        else:
            master.loading.add_done_callback(lambda _: settle_garbage_collection())
        endings = [loop.create_task(each.wait()) for each in (stop, master.handed_over)]
        ends: set[asyncio.Future[Any]] = {*endings, master.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for ending in endings:
            ending.cancel()
        log.info("a standby leads from here on" if master.handed_over.is_set() else "stopping")
    finally:
        if config.port_file:
            remove_port_file(config.port_file)
        await master.stop(STOP_S)
    if master.failed.done():
        master.failed.result()


def run_master(
    config: MasterConfig,
    secret: bytes | None,
    on_ready: Callable[[dict[str, Any]], object],
    parent: Parent | None = None,
) -> None:
    """Run a master on the main thread until SIGTERM, SIGINT, or the end of its parent."""
    kernels.forget_stale_caches()
    run(serve_master(config, secret, on_ready, parent))


def run_standby(
    config: MasterConfig,
    leader: str,
    secret: bytes | None,
    on_ready: Callable[[dict[str, Any]], object],
) -> None:
    """Run a standby of a leader on the main thread until SIGTERM or SIGINT."""
    kernels.forget_stale_caches()
    run(serve_standby(config, leader, secret, on_ready))
