"""What a shard tells of itself: totals of what is counted anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.core import codes as c
from mooncake_store.core.options import SECOND
from mooncake_store.core.placing import pin_room
from mooncake_store.core.records import Tier

if TYPE_CHECKING:
    from mooncake_store.core.state import ShardState

__all__ = ["ShardStats", "totals"]


@dataclass(frozen=True, slots=True)
class ShardStats:
    """Totals of a shard."""

    objects: int
    writing: int
    bytes_used: int
    """Bytes of all replicas, as asked for; those on absent segments as well."""
    bytes_allocated: int
    """Bytes that are not free: replicas as the allocator rounds them, and quarantine."""
    bytes_total: int
    """Bytes of the segments that are there: absent ones are not, nor what is allocated on them."""
    quarantined_bytes: int
    leased_bytes: int
    """As the last sweep over all rows saw them, a few seconds ago where there are millions."""
    leased_most: int
    """Bytes of them that one client has for itself; the one that has most, on `leased_host`."""
    leased_host: str
    leased_most_s: float
    """For how long yet the last lease of that client runs."""
    soft_pinned: int
    hard_pinned_bytes: int
    evicted_objects: int
    evicted_bytes: int
    expired_puts: int
    lost_objects: int
    tasks_unfinished: int
    replicas_missing: int
    """Of readable objects, compared with what they were put for; begun copies count as there."""
    room_bytes: int
    """The most that further objects could keep, were all evicted that ever may be.

    Leases and unfinished puts end, so they do not count; hard pins do.
    """
    pinnable_bytes: int
    """How much of that the client who asks could pin hard."""
    hits: int
    """Keys that gets found, of all time; those read under a lease that is held ask nobody."""
    misses: int
    misses_absent: int
    """Those of the misses that lie on absent segments: hits again once their workers are back."""
    read_bytes: int
    """Bytes of what was found."""
    written_bytes: int
    """Bytes of completed puts, each object counted once."""
    disk_total: int
    """Of `bytes_total`, what disks have; `disk_allocated` likewise."""
    disk_allocated: int
    disk_hits: int
    """Of the hits, those of objects that lay on disks alone."""
    cold_total: int
    cold_allocated: int
    cold_hits: int
    demoted_objects: int
    """Those that left memory for a disk, and their bytes..."""
    demoted_bytes: int
    promoted_objects: int
    """...and that were copied back."""
    promoted_bytes: int
    hauls_unfinished: int


def totals(state: ShardState, tasks_unfinished: int, tenant: int, client: int = 0) -> ShardStats:
    """Return the totals of a shard as they stand. O(segments), whatever the objects.

    Room is that of objects of a tenant, were there no quota, and what a client may pin of it.
    """
    space, tally = state.space, state.tally
    total, hard = space.total_bytes(), int(tally[c.HARD_BYTES])
    home = state.home_of(tenant)
    room = max(0, space.homes.watermark_bytes(home, below=state.offloads(tenant)) - hard)
    return ShardStats(
        objects=int(tally[c.OBJECTS]),
        writing=int(tally[c.UNFINISHED]),
        bytes_used=int(tally[c.BYTES]),
        bytes_allocated=space.used_bytes(),
        bytes_total=total,
        quarantined_bytes=sum(s.quarantined for s in space.all()),
        leased_bytes=state.leased.nbytes,
        leased_most=state.leased.most,
        leased_host=state.leased.host,
        leased_most_s=max(0, state.leased.until - state.now) / SECOND,
        soft_pinned=int(tally[c.SOFT_PINNED]),
        hard_pinned_bytes=hard,
        evicted_objects=state.totals.evicted_objects,
        evicted_bytes=state.totals.evicted_bytes,
        expired_puts=state.totals.expired_puts,
        lost_objects=state.totals.lost_objects,
        tasks_unfinished=tasks_unfinished,
        replicas_missing=int(tally[c.MISSING]),
        room_bytes=room,
        pinnable_bytes=max(0, min(room, pin_room(state, client))),
        hits=int(tally[c.HITS]),
        misses=int(tally[c.MISSES]),
        misses_absent=int(tally[c.AWAY]),
        read_bytes=int(tally[c.READ_BYTES]),
        written_bytes=int(tally[c.WRITTEN_BYTES]),
        disk_total=space.total_bytes(Tier.DISK),
        disk_allocated=space.used_bytes(Tier.DISK),
        disk_hits=int(tally[c.DISK_HITS]),
        cold_total=space.total_bytes(Tier.COLD),
        cold_allocated=space.used_bytes(Tier.COLD),
        cold_hits=int(tally[c.COLD_HITS]),
        demoted_objects=state.totals.demoted_objects,
        demoted_bytes=state.totals.demoted_bytes,
        promoted_objects=state.totals.promoted_objects,
        promoted_bytes=state.totals.promoted_bytes,
        hauls_unfinished=len(state.hauls),
    )
