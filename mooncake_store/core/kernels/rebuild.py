"""Kernels of a restart: which rows can be true, where they lie, and what they come to.

`restore.py` has millions of rows at once, and nobody is served before it is done. Layouts are those
of `records.py`, places in `context` those of `context.py`. All kernels are O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import (
    BYTES,
    HARD_PIN,
    KERNEL,
    MISSING,
    OBJECTS,
    READABLE,
    SOFT_PIN,
    SOFT_PINNED,
    UNFINISHED,
)
from mooncake_store.core.context import (
    COLD_ROWS,
    INT64,
    OVERFLOW_ROWS,
    PINS_USED,
    ROWS,
    TALLY,
    TENANT_USE,
)
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.reads import first_offset
from mooncake_store.core.kernels.writes import count_pinned
from mooncake_store.core.records import COLD, OVERFLOW, ROW


@njit(**KERNEL, inline="always")
def lies_inside(room, segment, offset, size):
    """Whether an extent lies on a segment that is known."""
    return 0 <= segment < room.shape[0] and 0 <= offset <= room[segment] - size


@njit(**KERNEL)
def judge_rows(context, chosen, room, tenants, right, counts):
    """Say which rows can be true: of a known tenant, and all their replicas inside segments.

    `room[s]` is how much segment s has, 0 where nobody knows it; `counts[s]` becomes how many
    replicas of these rows lie there.
    """
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    for i in range(chosen.shape[0]):
        row = chosen[i]
        size = rows[row].size
        good = size > 0 and rows[row].state <= READABLE and tenants[cold[row].tenant]
        good = good and lies_inside(room, rows[row].segment, first_offset(rows, row), size)
        replicas = 1
        link = rows[row].more
        while link >= 0:
            good = good and lies_inside(room, overflow[link].segment, overflow[link].offset, size)
            replicas += 1
            link = overflow[link].next
        right[i] = good and replicas == rows[row].replicas
        if right[i]:
            counts[rows[row].segment] += 1
            link = rows[row].more
            while link >= 0:
                counts[overflow[link].segment] += 1
                link = overflow[link].next


@njit(**KERNEL)
def list_extents(context, chosen, places, out):
    """List row, offset and size of the replicas of rows that can be true, as columns.

    Those on segment s begin at `places[s]`, which is where they end afterwards.
    """
    rows, overflow = column(context, ROWS, ROW), column(context, OVERFLOW_ROWS, OVERFLOW)
    for i in range(chosen.shape[0]):
        row = chosen[i]
        segment, offset = np.int64(rows[row].segment), first_offset(rows, row)
        link = rows[row].more
        while True:
            place = places[segment]
            out[0, place], out[1, place], out[2, place] = row, offset, rows[row].size
            places[segment] = place + 1
            if link < 0:
                break
            segment, offset = np.int64(overflow[link].segment), overflow[link].offset
            link = overflow[link].next


@njit(**KERNEL)
def sum_up(context, chosen):
    """Make the totals of a shard and its tenants, which are 0, those of its rows.

    Returns the most replicas that a row has.
    """
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    tenant_use = column(context, TENANT_USE, INT64)
    most = 0
    for i in range(chosen.shape[0]):
        row = chosen[i]
        replicas, flags = np.int64(rows[row].replicas), rows[row].flags
        nbytes = rows[row].size * replicas
        most = max(most, replicas)
        context[TALLY + BYTES] += nbytes
        tenant_use[2 * cold[row].tenant] += nbytes
        tenant_use[2 * cold[row].tenant + 1] += 1
        if flags & HARD_PIN:
            count_pinned(context, row, nbytes)
        if flags & SOFT_PIN:
            context[PINS_USED] = 1
        if rows[row].state == READABLE:
            context[TALLY + OBJECTS] += 1
            context[TALLY + MISSING] += max(np.int64(cold[row].wanted) - replicas, 0)
            if flags & SOFT_PIN:
                context[TALLY + SOFT_PINNED] += 1
        else:
            context[TALLY + UNFINISHED] += 1
    return most
