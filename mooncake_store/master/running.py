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
from mooncake_store.master.ahead import Ahead
from mooncake_store.master.merging import merge_state
from mooncake_store.master.server import Master
from mooncake_store.master.splitting import split_state
from mooncake_store.program import kernels
from mooncake_store.program.garbage_collection import settle_garbage_collection
from mooncake_store.program.port_file import remove_port_file, write_port_file
from mooncake_store.program.service_manager import beat, notify
from mooncake_store.standby.service import follow_until_promoted
from transfer_engine.errors import StoreError
from transfer_engine.rpc.server import run

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.resharding import Change
    from mooncake_store.master.server import Addresses
    from mooncake_store.master.standbys import Election
    from mooncake_store.masters import Masters
    from mooncake_store.program.children import Parent
    from transfer_engine.rpc.address import Address
    from transfer_engine.wire.keyring import Secret

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
    secret: Secret | None,
    on_ready: Callable[[dict[str, Any]], object],
    parent: Parent | None,
    shards: Collection[int] | None = None,
) -> None:
    """Serve until a signal, or until the parent is gone; raises what broke a shard."""
    await lead(config, secret, on_ready, stop_of(parent), shards=shards)


async def serve_standby(
    config: MasterConfig,
    masters: Masters,
    secret: Secret | None,
    on_ready: Callable[[dict[str, Any]], object],
) -> None:
    """Copy whichever leads until told to stop, or until promoted; then serve as a master."""
    stop = stop_of(None)

    def following(address: str) -> None:
        facts = {"address": address, "pid": os.getpid(), "leads": False}
        if config.port_file:
            write_port_file(config.port_file, facts)
        on_ready(facts)
        settle_garbage_collection()

    ahead = Ahead(config, secret)
    try:
        promoted = await follow_until_promoted(config, masters, secret, stop, following, ahead)
        if promoted is not None:
            leads = {"leads": True}
            await lead(promoted, secret, lambda f: on_ready(f | leads), stop, ahead=ahead)
        elif config.port_file:
            remove_port_file(config.port_file)
    finally:
        await ahead.forget_all()


def stop_of(parent: Parent | None) -> asyncio.Event:
    """Return what is set by a signal, or when the parent is gone.

    Without a parent, a service manager hears of this loop from now on, until it is to stop.
    """
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    if parent is not None:
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        parent.watch(lambda: loop.call_soon_threadsafe(stop.set))
        return stop
    beating = asyncio.ensure_future(beat())

    def asked() -> None:
        notify("STOPPING=1")
        beating.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked)
    return stop


async def lead(
    config: MasterConfig,
    secret: Secret | None,
    on_ready: Callable[[dict[str, Any]], object],
    stop: asyncio.Event,
    election: Election | None = None,
    shards: Collection[int] | None = None,
    ahead: Ahead | None = None,
) -> None:
    """Serve as a master until told to stop; raises what broke a shard.

    `shards` are those that lead beside it when its pool begins; None is all. They are started from
    what is `ahead`.
    """
    ending = asyncio.ensure_future(stop.wait())
    told = ""
    try:
        while True:
            master = Master(
                config,
                secret=secret,
                election=election,
                lead=shards,
                may_reshard=True,
                told=told,
                ahead=ahead,
            )
            address = await _lead_once(master, on_ready, ending)
            if address is None or ending.done() or not master.resharding.done():
                return
            ahead = master.ahead
            # Whoever goes on asking finds it where it was.
            config = msgspec.structs.replace(master.config, port=address.port)
            assert master.state_path is not None
            config, told = await _reshard(config, master.state_path, master.resharding.result())
            if ending.done():
                return  # another one may lead by now, or it was told to stop
    finally:
        ending.cancel()


async def _reshard(config: MasterConfig, state: Path, change: Change) -> tuple[MasterConfig, str]:
    """Make other shards of those of a master that was stopped.

    Returns what to go on with, and why not.
    """
    began, release_ns, clock = time.monotonic(), config.put_release_ns, SystemClock()
    to = state, change.factor, clock, release_ns
    try:
        if change.merges:
            made = await asyncio.to_thread(merge_state, *to, config.objects_max)
        else:
            made = await asyncio.to_thread(split_state, *to)
    except StoreError as error:
        log.error("there are no other shards than before: %s", error)
        return config, str(error)
    log.info(
        "of %d shards %d were made, with %d objects, in %.2f s",
        config.shards, made.shards, made.objects, time.monotonic() - began,
    )  # fmt: skip
    return msgspec.structs.replace(config, shards=made.shards), ""


async def _lead_once(
    master: Master, on_ready: Callable[[dict[str, Any]], object], ending: asyncio.Future[Any]
) -> Address | None:
    """Serve until told to stop, or to have other shards; return where, None if it never did."""
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
        ends: set[asyncio.Future[Any]] = {ending, master.failed, master.handed_over}
        ends.add(master.resharding)
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        log.info("a standby leads from here on" if master.handed_over.done() else "stopping")
    finally:
        if config.port_file:
            remove_port_file(config.port_file)
        if master.resharding.done():
            master.hand_on()
        await master.stop(STOP_S)
    if master.failed.done():
        master.failed.result()
    return addresses.master


def run_master(
    config: MasterConfig,
    secret: Secret | None,
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
    secret: Secret | None,
    on_ready: Callable[[dict[str, Any]], object],
) -> None:
    """Run a standby of whichever master leads on the main thread until SIGTERM or SIGINT."""
    kernels.forget_stale_caches()
    run(serve_standby(config, masters, secret, on_ready))
