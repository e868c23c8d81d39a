"""From settings to a shard: the one place where configuration becomes a core and its service."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.core.options import Placement, ShardConfig
from mooncake_store.core.shard import Shard
from mooncake_store.master.cluster import SEGMENT_NUMBERS
from mooncake_store.master.shard_service import ShardPlace, ShardService, ShardTimes
from transfer_engine.rpc.serving import ServerLimits

if TYPE_CHECKING:
    from mooncake_store.clock import Clock
    from mooncake_store.config import MasterConfig

__all__ = ["build_service", "load_kernels", "server_limits", "shard_config"]

_PLACEMENTS = {"random": Placement.RANDOM, "free_ratio": Placement.FREE_RATIO}


def shard_config(config: MasterConfig, shard: int) -> ShardConfig:
    """Return the core's limits and times; shards differ in their seed only."""
    return ShardConfig(
        objects_max=config.objects_max,
        segments_max=SEGMENT_NUMBERS,
        lease_ttl_max_ns=config.lease_ttl_max_ns,
        put_discard_ns=config.put_discard_ns,
        put_release_ns=config.put_release_ns,
        soft_pin_ttl_ns=config.soft_pin_ttl_ns,
        soft_pin_ttl_max_ns=config.soft_pin_ttl_max_ns,
        hard_pin_share=config.hard_pin_share,
        high_watermark=config.high_watermark,
        eviction_ratio=config.eviction_ratio,
        evict_soft_pinned=config.evict_soft_pinned,
        eviction_policy=config.eviction_policy,
        allocator=config.allocator,
        placement=_PLACEMENTS[config.placement],
        events_kept=config.events_kept,
        seed=shard,
        debug_integrity=config.debug_integrity,
    )


def build_service(config: MasterConfig, place: ShardPlace, clock: Clock) -> ShardService:
    """Return the service of one shard, on the running loop, not yet ticking."""
    times = ShardTimes(config.default_lease_ttl_ns, config.lease_ttl_max_ns, config.client_ttl_ns)
    return ShardService(Shard(shard_config(config, place.shard)), place, times, clock)


def load_kernels() -> None:
    """Load or compile what requests need, so that the first one is as fast as the rest."""
    from mooncake_store.core._exercise import exercise

    exercise()


def server_limits(config: MasterConfig) -> ServerLimits:
    """Return what the servers of a master grant their peers."""
    return ServerLimits(connections_max=config.connections_max)
