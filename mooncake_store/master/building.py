"""From settings to a shard: the one place where configuration becomes a core and its service."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store import core
from mooncake_store.clock import AheadClock
from mooncake_store.core.options import Offload, Placement, ShardConfig
from mooncake_store.core.shard import Shard
from mooncake_store.credentials import gate_of
from mooncake_store.endpoint import split_offload, split_quota
from mooncake_store.journal.origin import Origin
from mooncake_store.master.counting import check_level
from mooncake_store.master.keeping import Keeper
from mooncake_store.master.liveness import LivenessTimes
from mooncake_store.master.registers import SEGMENT_NUMBERS
from mooncake_store.master.shard_link import slice_of
from mooncake_store.master.shard_service import ShardService
from mooncake_store.master.site import ShardPlace, ShardTimes
from mooncake_store.master.state_directory import AUTO
from mooncake_store.program import kernels
from mooncake_store.wire.shard import REMOVE, SHARD
from transfer_engine.errors import NoSpaceError
from transfer_engine.rpc.limits import ServerLimits
from transfer_engine.rpc.server import Server
from transfer_engine.rpc.spinning import BRIEF_BYTES_MAX
from transfer_engine.wire.frame import frame_bytes
from transfer_engine.wire.handshake import Identity

if TYPE_CHECKING:
    from mooncake_store.clock import Clock
    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.master.counting import Term
    from mooncake_store.program.fence import Fence
    from transfer_engine.wire.keyring import Secret

__all__ = [
    "build_service",
    "liveness_times",
    "open_service",
    "server_limits",
    "shard_config",
    "shard_server",
]

log = logging.getLogger(__name__)

_CORE = Path(core.__path__[0])
# Whoever removes a batch often has more to remove, and nothing else to do meanwhile.
_RUNS = frozenset({REMOVE.opcode})
_OFFLOADS = {"none": Offload.NONE, "evict": Offload.EVICT, "write": Offload.WRITE}
_PLACEMENTS = {"random": Placement.RANDOM, "free_ratio": Placement.FREE_RATIO}


def shard_config(config: MasterConfig, shard: int) -> ShardConfig:
    """Return the core's limits and times; shards differ in their seed only."""
    return ShardConfig(
        objects_max=config.objects_max,
        segments_max=SEGMENT_NUMBERS,
        lease_ttl_ns=config.default_lease_ttl_ns,
        lease_ttl_max_ns=config.lease_ttl_max_ns,
        put_discard_ns=config.put_discard_ns,
        put_release_ns=config.put_release_ns,
        soft_pin_ttl_ns=config.soft_pin_ttl_ns,
        soft_pin_ttl_max_ns=config.soft_pin_ttl_max_ns,
        hard_pin_share=config.hard_pin_share,
        writers_share=config.writers_share,
        high_watermark=config.high_watermark,
        eviction_ratio=config.eviction_ratio,
        evict_soft_pinned=config.evict_soft_pinned,
        eviction_policy=config.eviction_policy,
        allocator=config.allocator,
        placement=_PLACEMENTS[config.placement],
        offload=_OFFLOADS[config.offload],
        promotion_hits=config.promotion_hits,
        promotion_ahead=config.promotion_ahead,
        events_kept=config.events_kept,
        seed=shard,
        debug_integrity=config.debug_integrity,
    )


def liveness_times(config: MasterConfig) -> LivenessTimes:
    """Return after how much silence of a worker something is done about it."""
    return LivenessTimes(
        config.ping_interval_ns,
        config.suspect_after_pings * config.ping_interval_ns,
        config.client_ttl_ns,
        config.worker_grace_ns,
    )


async def open_service(
    config: MasterConfig,
    place: ShardPlace,
    clock: Clock,
    folder: Path | None,
    cluster: str,
    term: Term | None = None,
) -> tuple[ShardService, asyncio.Future[None]]:
    """Return the service of a shard with what is kept of it in the folder of the state, if any.

    And a future that ends when all kernels are loaded, with which the service fails. No request can
    have to wait for a compiler, but one that is early loads the few kernels that it needs itself.
    Where the service cannot be made nothing stays open.
    """
    loading = None
    if not kernels.loaded_before(_CORE):
        loading = load_kernels()
        await loading
    keeper = await _open_keeper(config, place, clock, folder, cluster)
    try:
        if keeper is not None and term is not None:
            if term.counted is None:
                keeper.counting.lead_alone()
            else:
                await asyncio.to_thread(keeper.counting.elect, term.counted)
        fence = None if term is None else term.fence
        service = build_service(config, place, clock, keeper, fence)
    except BaseException:
        if keeper is not None:
            await asyncio.to_thread(keeper.close)
        raise
    # Not before: what was kept would be read beside it on one interpreter, and take a third longer.
    loading = loading or load_kernels()
    _fail_with(service, loading)
    return service, loading


async def _open_keeper(
    config: MasterConfig, place: ShardPlace, clock: Clock, folder: Path | None, cluster: str
) -> Keeper | None:
    """Return who keeps a shard in the folder of the state, None where nothing is to be kept.

    What was kept before is read on a thread: seconds, where there are millions of objects.
    """
    if folder is None:
        return None
    where = folder / f"shard-{place.shard}"
    check_level(where, config.journal)
    if config.journal == "none":
        return None
    origin = Origin(cluster, place.shard, place.shards)
    limits = shard_config(config, place.shard)
    try:
        times = clock.now_ns(), clock.wall_ns()
        return await asyncio.to_thread(Keeper.open, limits, origin, where, config.journal, *times)
    except NoSpaceError as error:
        if config.state != AUTO:
            raise
        log.warning("nothing of the objects is kept for the next run: %s", error)
        return None


def build_service(
    config: MasterConfig,
    place: ShardPlace,
    clock: Clock,
    keeper: Keeper | None = None,
    fence: Fence | None = None,
) -> ShardService:
    """Return the service of one shard, on the running loop, not yet ticking."""
    times = ShardTimes(config.default_lease_ttl_ns, config.lease_ttl_max_ns, config.client_ttl_ns)
    shard = Shard(shard_config(config, place.shard)) if keeper is None else keeper.shard
    if keeper is not None and keeper.ahead_ns:
        clock = AheadClock(clock, keeper.ahead_ns)
    for quota in config.quotas:
        namespace, quota_bytes = split_quota(quota)
        shard.tenant(namespace, slice_of(quota_bytes, place.shard, place.shards)[1])
    for each in config.namespace_offloads:
        namespace, offload = split_offload(each)
        shard.set_offload(shard.tenant(namespace), _OFFLOADS[offload])
    service = ShardService(shard, place, times, clock, keeper, fence)
    service.site.clients.restore(service.site.now())
    return service


def load_kernels() -> asyncio.Future[None]:
    """Load on a thread what shards are made of; the result ends with it."""

    def load() -> None:
        from mooncake_store.core.warmup import warmup

        warmup()
        if not kernels.loaded_before(_CORE):
            kernels.note_loaded(_CORE)

    return asyncio.ensure_future(asyncio.to_thread(load))


def _fail_with(service: ShardService, loading: asyncio.Future[None]) -> None:
    """Let a service fail when its kernels cannot be loaded."""

    def ended(loading: asyncio.Future[None]) -> None:
        error = None if loading.cancelled() else loading.exception()
        if error is not None and not service.failure.done():
            service.failure.set_exception(error)

    loading.add_done_callback(ended)


def server_limits(config: MasterConfig) -> ServerLimits:
    """Return what the servers of a master grant their peers."""
    return ServerLimits(connections_max=config.connections_max)


def shard_server(
    config: MasterConfig, service: ShardService, cluster: str, secret: Secret | None
) -> Server:
    """Return the server of a shard, on the running loop, for clients of its cluster.

    Those of another one, which remember this port from when it was theirs, are refused. Each
    client is also granted a moment of its full attention.
    """
    return Server(
        SHARD,
        service.site.took.timed(service.handle),
        identity=Identity(SHARD.service, role="server", cluster=cluster),
        **gate_of(config, secret),
        limits=ServerLimits(
            connections_max=config.connections_max,
            awake_bytes_max=frame_bytes(BRIEF_BYTES_MAX),
            awake_opcodes=_RUNS,
        ),
    )
