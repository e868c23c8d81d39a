"""Kernels that judge rows: what may be evicted, what needs attention, what lies where.

Layouts are those of `records.py`, places in `context` those of `context.py`. `dead[s]` is 1 once
replicas on segment s are lost. All kernels are O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import HARD_PIN, KERNEL, READABLE, SINK, TASK, UPSERT, WRITING
from mooncake_store.core.context import ROWS, TALLY
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.records import ROW


@njit(**KERNEL, inline="always")
def may_leave(rows, row, now):
    """Whether a row may be evicted now, its group left aside. O(1)."""
    return (
        rows[row].state == READABLE
        and rows[row].lease_end <= now
        and not rows[row].flags & (HARD_PIN | TASK | UPSERT)
    )


@njit(**KERNEL)
def eligible(context, ids, now, out):
    """out[i] = whether row ids[i] may be evicted now, groups left aside."""
    rows = column(context, ROWS, ROW)
    for i in range(ids.shape[0]):
        out[i] = may_leave(rows, ids[i], now)


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
def choose(context, ids, now, wanted, room, out):
    """Take the first of `ids` that may be evicted, until they make `wanted` bytes or are `room`.

    Only without groups. Returns (how many, their bytes).
    """
    rows = column(context, ROWS, ROW)
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
        if may_leave(rows, row, now):
            out[count] = row
            count += 1
            total += rows[row].size * rows[row].replicas
    return count, total


@njit(**KERNEL)
def row_bytes(context, ids, out):
    """out[i] = bytes that row ids[i] occupies in all its replicas."""
    rows = column(context, ROWS, ROW)
    for i in range(ids.shape[0]):
        out[i] = rows[ids[i]].size * rows[ids[i]].replicas


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
    replica, and one of the span[2] segments with targets[s] has none.
    """
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state != READABLE or rows[row].replicas >= cold[row].wanted:
            continue
        if rows[row].flags & (TASK | UPSERT) or rows[row].size > span[3] or rows[row].segment < 0:
            continue
        if barred[cold[row].tenant]:
            continue
        reachable = sources[rows[row].segment] != 0
        held = np.int64(targets[rows[row].segment])
        link = rows[row].more
        while link >= 0:
            reachable |= sources[overflow[link].segment] != 0
            held += targets[overflow[link].segment]
            link = overflow[link].next
        if reachable and held < span[2]:
            out[count] = row
            count += 1
    return count


@njit(**KERNEL)
def late_puts(rows, span, out):
    """Unfinished puts begun by span[2] among rows span[0]..span[1]; returns how many."""
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state == WRITING and rows[row].lease_end <= span[2]:
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
