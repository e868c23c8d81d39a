"""Hints: what clients know of the future of objects, and a shard does not.

A hint asks, and breaks no promise: of leases, of hard pins, of quotas, of room that eviction leaves
free. It is taken whole, taken for less time than was asked for, or refused with the reason.

- pin: a soft pin for a time, at a priority; it takes the place of the soft pin there was.
- retain: as if it were used now; with a priority, pinned at least so high for at least so long.
- prefetch: somebody reads it soon. What lies on disks alone is copied to memory, into spare room.
- demote: nobody reads it soon. It goes to a disk where there is one and else stays, but leaves
  before all others that are ordinary, until its next use. A pin of somebody counts for more.
- share: one replica more, made as missing ones are: in spare room, a few at a time, and again if
  it is lost. Where one is missing already, that is the one.

Priorities order what leaves: objects without a soft pin have 0, those with an ordinary one 1. The
lower priority leaves first, and among equals the coldest (`pinned.py`). When the pin ends an object
has 0 again.

Cost: O(keys) in columns, and for share O(segments) a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core.options import CLIPPED, DEFAULTS, PRIORITY_MAX, HintAction, Offload
from mooncake_store.core.reads import extents_of
from mooncake_store.core.records import REPLICAS_MAX, Flag, Status, Tier
from mooncake_store.core.removal import find_readable, set_soft_pins
from mooncake_store.core.tasks import spare_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.state import ShardState

    Rows = NDArray[np.int32]
    Statuses = NDArray[np.int16]

__all__ = ["hint"]


def hint(
    state: ShardState,
    tenant: int,
    digests: NDArray[np.uint64],
    action: HintAction,
    priority: int = 0,
    ttl_ns: int | None = None,
) -> Statuses:
    """Take a hint of readable objects of one tenant: 0, CLIPPED, or why not, for each key.

    `priority` is that of a pin (1 to PRIORITY_MAX) or of retain (0 as well), and `ttl_ns` of those
    with one; None is the shard's default. A key that comes twice is hinted once.
    """
    found, status = find_readable(state, digests)
    least = 1 if action == HintAction.PIN else 0
    if not least <= priority <= PRIORITY_MAX or (ttl_ns is not None and ttl_ns <= 0):
        status[:] = Status.INVALID_PARAMS
        return status
    strange = found >= 0
    strange[strange] = state.cold["tenant"][found[strange]] != tenant
    status[strange] = Status.NOT_FOUND
    there = np.flatnonzero(status == Status.OK)
    if len(there):
        # In the order of the request, in which they become hot.
        _, first, back = np.unique(found[there], return_index=True, return_inverse=True)
        turns = np.argsort(first)
        rows = found[there][first[turns]]
        if action == HintAction.PREFETCH:
            answers = _prefetch(state, rows)
        elif action == HintAction.DEMOTE:
            answers = _demote(state, rows)
        elif action == HintAction.SHARE:
            answers = _share(state, tenant, rows)
        else:
            answers = _keep(state, rows, action, priority, ttl_ns)
        by_row = np.empty_like(answers)
        by_row[turns] = answers
        status[there] = by_row[back]
    return status


def _keep(
    state: ShardState, rows: Rows, action: HintAction, priority: int, ttl_ns: int | None
) -> Statuses:
    """Pin or retain rows, of which none comes twice."""
    status = np.zeros(len(rows), np.int16)
    if priority == 0:
        state.use(rows)
        return status
    config = state.config
    ttl = config.soft_pin_ttl_ns if ttl_ns is None else min(ttl_ns, config.soft_pin_ttl_max_ns)
    ends, levels = np.full(len(rows), state.now + ttl), np.full(len(rows), priority - 1, np.uint8)
    if action == HintAction.RETAIN:
        pinned = (state.flags(rows) & c.SOFT_PIN) != 0
        ends[pinned] = np.maximum(ends[pinned], state.pin_ends[rows[pinned]])
        levels[pinned] = np.maximum(levels[pinned], state.cold["pin_level"][rows[pinned]])
    set_soft_pins(state, rows, ends, levels)
    if ttl_ns is not None and ttl < ttl_ns:
        status[:] = CLIPPED
    return status


def _prefetch(state: ShardState, rows: Rows) -> Statuses:
    away = (state.flags(rows) & Flag.OFF_MEMORY) != 0
    state.hauls.promote(rows[away & ((state.flags(rows) & c.TASK) == 0)])
    coming = (state.flags(rows) & c.TASK) != 0
    return np.where(away & ~coming, Status.NO_SPACE, Status.OK).astype(np.int16)


def _demote(state: ShardState, rows: Rows) -> Statuses:
    flags = state.flags(rows)
    pinned = (flags & (c.SOFT_PIN | c.HARD_PIN)) != 0
    here = ~pinned & ((flags & Flag.OFF_MEMORY) == 0)
    state.chill(rows[here])
    # What lies on a disk as well makes room without a copy once there is need of any.
    new = here & ((flags & (Flag.BELOW | Flag.TASK)) == 0)
    state.hauls.demote(rows[new & (state.offload_of(rows) != Offload.NONE)])
    return np.where(pinned, Status.PINNED, Status.OK).astype(np.int16)


def _share(state: ShardState, tenant: int, rows: Rows) -> Statuses:
    """Want one replica more of rows that lack none: the repair does the rest."""
    records = state.rows[rows]
    sizes, replicas = records["size"].astype(np.int64), records["replicas"].astype(np.int64)
    room = _spare_room(state, tenant)
    _, segments, _ = extents_of(state, rows.astype(np.int64))
    of = np.repeat(np.arange(len(rows)), replicas)
    left = replicas - np.bincount(of[state.space.dead[segments] != 0], minlength=len(rows))
    # What left memory is copied to disks alone, all else to wherever there is room.
    disks = np.where(state.space.tiers == Tier.DISK, room, 0)
    anywhere, below = (_has_place(some, sizes, segments, of) for some in (room, disks))
    fits = np.where(records["flags"] & Flag.OFF_MEMORY, below, anywhere)
    status = np.where(fits, Status.OK, Status.NO_SPACE).astype(np.int16)
    status[replicas >= REPLICAS_MAX] = Status.INVALID_PARAMS
    status[(state.flags(rows) & c.TASK) != 0] = Status.BUSY
    new = np.flatnonzero((status == Status.OK) & (state.cold["wanted"][rows] <= left))
    nbytes = np.cumsum(sizes[new])
    status[new[nbytes > room.sum()]] = Status.NO_SPACE
    quota = state.tenant_by_number[tenant].quota_bytes
    if quota is not None:
        status[new[nbytes > quota - int(state.tenant_use[tenant, 0])]] = Status.TENANT_QUOTA
    # What waits for copies is bounded by what tasks there may be.
    most = max(0, state.config.tasks_max // 2 - int(state.tally[c.MISSING]))
    status[new[most:]] = Status.TASK_LIMIT
    new = new[status[new] == Status.OK]
    state.journal.mark(rows[new])
    state.cold["wanted"][rows[new]] = left[new] + 1
    # Those that are lost and not swept yet count as there until they are.
    state.tally[c.MISSING] += np.count_nonzero(left[new] == replicas[new])
    return status


def _has_place(
    room: NDArray[np.int64],
    sizes: NDArray[np.int64],
    segments: NDArray[np.int64],
    of: NDArray[np.int64],
) -> NDArray[np.bool_]:
    """Which objects some segment has room for that holds none of their replicas.

    Of these `segments` says where each lies, and `of` whose it is.
    """
    roomy = np.sort(room[room > 0])
    held = np.bincount(of[room[segments] >= sizes[of]], minlength=len(sizes))
    out: NDArray[np.bool_] = len(roomy) - np.searchsorted(roomy, sizes) > held
    return out


def _spare_room(state: ShardState, tenant: int) -> NDArray[np.int64]:
    """The bytes that copies of the repair may take on each segment, of objects of a tenant."""
    homes, home = state.space.homes, state.home_of(tenant)
    room = np.zeros(len(state.space.alive), np.int64)
    cycle, _ = homes.turn(state.now, home)
    for segment in cycle + homes.further(state.now, DEFAULTS, home):
        if segment.usable_from <= state.now:
            room[segment.index] = max(0, spare_bytes(state, segment) - segment.used)
    return room
