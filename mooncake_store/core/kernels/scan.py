"""Kernels that judge rows: what may be evicted, what needs attention, what lies where.

Layouts are those of `records.py`, places in `context` those of `context.py`. `dead[s]` is 1 once
replicas on segment s are lost. All kernels are O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import (
    BELOW,
    DOOMED,
    HARD_PIN,
    KERNEL,
    MEMORY,
    OFF_MEMORY,
    READABLE,
    SINK,
    TASK,
    UPSERT,
    WRITING,
)
from mooncake_store.core.context import BYTE, COLD_ROWS, OVERFLOW_ROWS, ROWS, TALLY, TIERS
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.records import COLD, OVERFLOW, ROW

ALL_TIERS = -1


@njit(**KERNEL, inline="always")
def may_leave(rows, cold, row, now, tier):
    """Whether a row may leave a tier now, on which it lies, its group left aside. O(1)."""
    flags = np.int64(rows[row].flags)
    return (
        rows[row].state == READABLE
        and rows[row].lease_end <= now
        and not flags & (HARD_PIN | TASK | UPSERT)
        and not (tier == MEMORY and flags & OFF_MEMORY)
        and not (tier > MEMORY and not (flags & BELOW and cold[row].tiers >> tier & 1))
    )


@njit(**KERNEL)
def eligible(context, ids, now, tier, out):
    """out[i] = whether row ids[i] may leave a tier, or all, now, groups left aside."""
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    for i in range(ids.shape[0]):
        out[i] = may_leave(rows, cold, ids[i], now, tier)


@njit(**KERNEL, inline="always")
def replicas_on(rows, overflow, tiers, row, tier):
    """How many replicas a row has on a tier, or in all. O(replicas), O(1) for all or one."""
    if tier == ALL_TIERS or rows[row].more < 0:
        return np.int64(rows[row].replicas)
    count = np.int64(rows[row].segment >= 0 and tiers[rows[row].segment] == tier)
    link = rows[row].more
    while link >= 0:
        count += tiers[overflow[link].segment] == tier
        link = overflow[link].next
    return count


@njit(**KERNEL)
def on_segments(rows, overflow, wanted, ids, out):
    """out[i] = whether row ids[i] has a replica on a segment s with wanted[s]."""
    for i in range(ids.shape[0]):
        row = ids[i]
        out[i] = rows[row].segment >= 0 and wanted[rows[row].segment] != 0
        link = rows[row].more
        while not out[i] and link >= 0:
            out[i] = wanted[overflow[link].segment] != 0
            link = overflow[link].next


@njit(**KERNEL)
def choose(context, ids, now, tier, wanted, room, out):
    """Take the first of `ids` that may leave a tier, or all, until they make `wanted` bytes of it.

    Or until they are `room`.

    Only without groups. Returns (how many, their bytes).
    """
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow, tiers = column(context, OVERFLOW_ROWS, OVERFLOW), column(context, TIERS, BYTE)
    sink = 0
    for i in range(ids.shape[0]):
        sink ^= rows[ids[i]].lease_end
    context[TALLY + SINK] = sink
    count = 0
    total = 0
    for i in range(ids.shape[0]):
        if total >= wanted or count >= room:
            break
        row = ids[i]
        if may_leave(rows, cold, row, now, tier):
            out[count] = row
            count += 1
            total += rows[row].size * replicas_on(rows, overflow, tiers, row, tier)
    return count, total


@njit(**KERNEL)
def row_bytes(context, ids, tier, out):
    """out[i] = bytes that row ids[i] occupies in its replicas on a tier, or in all."""
    rows = column(context, ROWS, ROW)
    overflow, tiers = column(context, OVERFLOW_ROWS, OVERFLOW), column(context, TIERS, BYTE)
    for i in range(ids.shape[0]):
        out[i] = rows[ids[i]].size * replicas_on(rows, overflow, tiers, ids[i], tier)


@njit(**KERNEL)
def sweep(rows, overflow, cold, dead, closed, span, out):
    """Find rows that need attention in rows span[0]..span[1]; returns how many.

    Late writers (span[2] = start before which a put is late), writers whose client is closed, and
    rows with a replica on a dead segment.
    """
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state == 0:
            continue
        wanted = False
        if rows[row].state == WRITING:
            wanted = rows[row].lease_end <= span[2] or closed[cold[row].owner] != 0
        wanted = wanted or (rows[row].segment >= 0 and dead[rows[row].segment] != 0)
        link = rows[row].more
        while not wanted and link >= 0:
            wanted = dead[overflow[link].segment] != 0
            link = overflow[link].next
        if wanted:
            out[count] = row
            count += 1
    return count


@njit(**KERNEL)
def short_of_replicas(rows, cold, overflow, sources, targets, barred, span, out):
    """Find readable objects that lack replicas, in rows span[0]..span[1]; returns how many.

    Only those that may be copied now: no task and no newer generation ties them, they are of
    span[3] bytes at most, their tenant t is not barred[t], a segment s with sources[s] has a
    replica, and one of the span[2] segments with targets[s] has none. For what lies on disks alone
    it is one of the span[4] segments where targets[s] is above 1.
    """
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state != READABLE or rows[row].replicas >= cold[row].wanted:
            continue
        if rows[row].flags & (TASK | UPSERT) or rows[row].size > span[3] or rows[row].segment < 0:
            continue
        if barred[cold[row].tenant]:
            continue
        least, most = 1, span[2]
        if rows[row].flags & OFF_MEMORY:
            least, most = 2, span[4]
        reachable = sources[rows[row].segment] != 0
        held = np.int64(targets[rows[row].segment] >= least)
        link = rows[row].more
        while link >= 0:
            reachable |= sources[overflow[link].segment] != 0
            held += targets[overflow[link].segment] >= least
            link = overflow[link].next
        if reachable and held < most:
            out[count] = row
            count += 1
    return count


@njit(**KERNEL)
def late_puts(rows, span, out):
    """Unfinished puts begun by span[2] among rows span[0]..span[1]; returns how many.

    But for those that the request which runs now is to overtake.
    """
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state != WRITING or rows[row].flags & DOOMED:
            continue
        if rows[row].lease_end <= span[2]:
            out[count] = row
            count += 1
    return count


@njit(**KERNEL)
def of_tenant(rows, cold, span, out):
    """Rows in use of tenant span[2] among rows span[0]..span[1]; returns how many."""
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state != 0 and cold[row].tenant == span[2]:
            out[count] = row
            count += 1
    return count
