"""Running a master as a program: signals, the port file, exit.

    run_master(config, secret, on_ready)       # returns when told to stop, raises what broke
    run_standby(config, masters, secret, on_ready)      # likewise; a master once it is promoted

Nothing here knows of command lines: `mooncake master` and `LocalCluster` both end here.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.clock import SystemClock
from mooncake_store.master.server import Master
from mooncake_store.master.splitting import split_state
from mooncake_store.program import kernels
from mooncake_store.program.garbage_collection import settle_garbage_collection
from mooncake_store.program.port_file import remove_port_file, write_port_file
from mooncake_store.standby.service import follow_until_promoted
from transfer_engine.errors import StoreError
from transfer_engine.rpc.server import run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.server import Addresses
    from mooncake_store.master.standbys import Election
    from mooncake_store.masters import Masters
    from mooncake_store.program.children import Parent
    from transfer_engine.rpc.address import Address

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
    shards: Collection[int] | None = None,
) -> None:
    """Serve until a signal, or until the parent is gone; raises what broke a shard."""
    await lead(config, secret, on_ready, stop_of(parent), shards=shards)


async def serve_standby(
    config: MasterConfig,
    masters: Masters,
    secret: bytes | None,
    on_ready: Callable[[dict[str, Any]], object],
) -> None:
    """Copy whichever leads until told to stop, or until promoted; then serve as a master."""
    stop = stop_of(None)

    def following(address: str) -> None:
        facts = {"address": address, "pid": os.getpid(), "leads": False}
        if config.port_file:
            write_port_file(config.port_file, facts)
        on_ready(facts)

    promoted = await follow_until_promoted(config, masters, secret, stop, following)
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
    election: Election | None = None,
    shards: Collection[int] | None = None,
) -> None:
    """Serve as a master until told to stop; raises what broke a shard.

    `shards` are those that lead beside it when its pool begins; None is all.
    """
    ending = asyncio.ensure_future(stop.wait())
    told, ahead = "", None
    try:
        while True:
            master = Master(
                config,
                secret=secret,
                election=election,
                lead=shards,
                may_split=True,
                told=told,
                ahead=ahead,
            )
            address = await _lead_once(master, on_ready, ending)
            if address is None or ending.done() or not master.split.done():
                return
            ahead = master.ahead
            # Whoever goes on asking finds it where it was.
            config = msgspec.structs.replace(master.config, port=address.port)
            assert master.state_path is not None
            config, told = await _split(config, master.state_path, master.split.result())
            if ending.done():
                return  # another one may lead by now, or it was told to stop
    finally:
        ending.cancel()


async def _split(config: MasterConfig, state: Path, factor: int) -> tuple[MasterConfig, str]:
    """Split the shards of a master that was stopped; return what to go on with, and why not."""
    began, release_ns = time.monotonic(), config.put_release_ns
    try:
        made = await asyncio.to_thread(split_state, state, factor, SystemClock(), release_ns)
    except StoreError as error:
        log.error("the shards could not be split: %s", error)
        return config, str(error)
    log.info(
        "%d shards with %d objects were made of %d in %.2f s",
        made.shards, made.objects, config.shards, time.monotonic() - began,
    )  # fmt: skip
    return msgspec.structs.replace(config, shards=made.shards), ""


async def _lead_once(
    master: Master, on_ready: Callable[[dict[str, Any]], object], ending: asyncio.Future[Any]
) -> Address | None:
    """Serve until told to stop, or to split; return where it served, None if it never did."""
    config, loop = master.config, asyncio.get_running_loop()
    starting = loop.create_task(master.start())
    await asyncio.wait({ending, starting}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        master.await_no_host()
        await asyncio.wait({starting})
        if starting.exception() is not None:
            return None
    addresses = starting.result()
    facts = described(addresses)
    assert master.failed is not None
    try:
        if config.port_file:
            write_port_file(config.port_file, facts)
        on_ready(facts)
        if master.loading is None:
            settle_garbage_collection()
        else:
            master.loading.add_done_callback(lambda _: settle_garbage_collection())
        ends: set[asyncio.Future[Any]] = {ending, master.failed, master.split, master.handed_over}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        log.info("a standby leads from here on" if master.handed_over.done() else "stopping")
    finally:
        if config.port_file:
            remove_port_file(config.port_file)
        if master.split.done():
            master.hand_on()
        await master.stop(STOP_S)
    if master.failed.done():
        master.failed.result()
    return addresses.master


def run_master(
    config: MasterConfig,
    secret: bytes | None,
    on_ready: Callable[[dict[str, Any]], object],
    parent: Parent | None = None,
    shards: Collection[int] | None = None,
) -> None:
    """Run a master on the main thread until SIGTERM, SIGINT, or the end of its parent."""
    kernels.forget_stale_caches()
    run(serve_master(config, secret, on_ready, parent, shards))


def run_standby(
    config: MasterConfig,
    masters: Masters,
    secret: bytes | None,
    on_ready: Callable[[dict[str, Any]], object],
) -> None:
    """Run a standby of whichever master leads on the main thread until SIGTERM or SIGINT."""
    kernels.forget_stale_caches()
    run(serve_standby(config, masters, secret, on_ready))
