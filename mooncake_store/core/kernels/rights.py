"""Kernels that list the places which an answer gives rights to, and those that a put has to show.

Each place is a column of `transfer_engine.kernels.rights.granted`: its segment, where it begins in
that, its length, when the right ends in ms since 1970, and its generation. `asked` is 1 for each
segment where a right is needed; elsewhere, and where there is nothing to be read or written any
more, the end is 0. `epoch` is what the shard's clock is behind 1970, in ns. All kernels are
O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import KERNEL, OK, READABLE, UPSERT, WRITING
from mooncake_store.core.context import (
    BYTE,
    COLD_ROWS,
    DEAD,
    DISCARD_NS,
    FOUND,
    INT32,
    INT64,
    OVERFLOW_ROWS,
    ROWS,
    TABLE_A,
    TABLE_B,
)
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.reads import first_offset
from mooncake_store.core.kernels.table import find
from mooncake_store.core.records import COLD, OVERFLOW, ROW

MARGIN_MS = 250
"""So much before the lease a right to read ends, for clocks that do not agree."""
_MS = 1_000_000


@njit(**KERNEL, inline="always")
def _list(columns, at, segment, offset, length, end, generation):
    """Write a place into the columns."""
    columns[0, at] = segment
    columns[1, at] = offset
    columns[2, at] = length
    columns[3, at] = end
    columns[4, at] = generation


@njit(**KERNEL)
def to_read(now, epoch, asked, answers, replicas, columns):
    """List what a get made just now has answered; rights end a little before the lease."""
    m = 0
    for i in range(answers.shape[0]):
        ends = np.int64(0)
        if answers[i].lease_ns > 0:
            ends = (now + answers[i].lease_ns + epoch) // _MS - MARGIN_MS
        size, generation = answers[i].size, np.int64(answers[i].generation)
        for _ in range(answers[i].replicas):
            segment = np.int64(replicas[m].segment)
            end = ends if asked[segment] else np.int64(0)
            _list(columns, m, segment, replicas[m].offset, size, end, generation)
            m += 1


@njit(**KERNEL)
def begun(context, row, generation):
    """The row of the unfinished put of this generation, which `row` is or has beside it; or -1."""
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    if row >= 0 and rows[row].state == READABLE and rows[row].flags & UPSERT:
        row = cold[row].twin - 1
    if row < 0 or rows[row].state != WRITING or rows[row].generation != generation:
        return np.int64(-1)
    return np.int64(row)


@njit(**KERNEL)
def to_write(context, epoch, asked, digests, answers, replicas, columns):
    """List what puts of these keys were answered; rights end when others may give the put up.

    By the rows, as some of it may have been answered some time ago.
    """
    found = column(context, FOUND, INT32)
    rows = column(context, ROWS, ROW)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, rows, digests, found)
    m = 0
    for i in range(answers.shape[0]):
        if answers[i].status != OK:
            continue
        row, generation = np.int64(found[i]), np.int64(answers[i].generation)
        row = begun(context, row, generation)
        ends, size = np.int64(0), np.int64(0)
        if row >= 0:
            ends = (rows[row].lease_end + context[DISCARD_NS] + epoch) // _MS
            size = rows[row].size
        for _ in range(answers[i].replicas):
            segment = np.int64(replicas[m].segment)
            end = ends if asked[segment] else np.int64(0)
            _list(columns, m, segment, replicas[m].offset, size, end, generation)
            m += 1


@njit(**KERNEL)
def to_show(context, client, epoch, asked, bases, digests, generations, columns, whose):
    """List the places of a client's unfinished puts that were written by rights; returns how many.

    whose[j] says of which key place j is. What lies on a dead segment is lost anyway, and what is
    no unfinished put of this client is for others to refuse.
    """
    found = column(context, FOUND, INT32)
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    dead = column(context, DEAD, BYTE)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, rows, digests, found)
    m = 0
    for i in range(digests.shape[0]):
        generation = np.int64(generations[i])
        row = begun(context, np.int64(found[i]), generation)
        if row < 0 or cold[row].owner != client or rows[row].segment < 0:
            continue
        end = (rows[row].lease_end + context[DISCARD_NS] + epoch) // _MS
        segment, offset = np.int64(rows[row].segment), first_offset(rows, row)
        link = rows[row].more
        while True:
            if asked[segment] and not dead[segment]:
                place = offset + bases[segment]
                _list(columns, m, segment, place, rows[row].size, end, generation)
                whose[m] = i
                m += 1
            if link < 0:
                break
            segment, offset = np.int64(overflow[link].segment), overflow[link].offset
            link = overflow[link].next
    return m
