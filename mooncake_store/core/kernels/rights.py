"""Kernels that make the rights which an answer brings, and judge what owners answered to writes.

A right is a tag and a stamp (`transfer_engine.kernels.rights`), for one replica at its place in the
whole segment. `keys` has two words for each segment, `asked` is 1 where a right is needed; else tag
and stamp are 0, and so they are where there is nothing to be read or written any more. `epoch` is
what the shard's clock is behind 1970, in ns. All kernels are O(n + replicas), a search of receipts
is O(log receipts) each.
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
from mooncake_store.core.kernels.cells import tag_in
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.reads import first_offset
from mooncake_store.core.kernels.table import find
from mooncake_store.core.records import COLD, OVERFLOW, ROW
from transfer_engine.kernels.rights import (
    GENERATION_BITS,
    READ,
    WRITE,
    WRITTEN,
    stamp_of,
    tag_of,
    tags_of,
)

MARGIN_MS = 250
"""So much before the lease a right to read ends, for clocks that do not agree."""
DRIFT_TICKS = 16
"""Ends of rights that differ by no more are the same: the shard may have been started again since,
on another host, where its clock is a little further."""
_MS = 1_000_000


@njit(cache=True, nogil=True)
def _make(keys, asked, kind, columns, replicas, out):
    """Write the rights to some replicas: out[i] = (tag, stamp).

    `columns` are offsets, lengths and stamps, and one for tags, of which nothing is read.
    """
    count, at = replicas.shape[0], 0
    while at < count:
        segment, stop = replicas[at].segment, at + 1
        while stop < count and replicas[stop].segment == segment:
            stop += 1
        if asked[segment]:
            offsets, lengths = columns[0, at:stop], columns[1, at:stop]
            stamps, tags = columns[2, at:stop], columns[3, at:stop]
            tags_of(keys[segment, 0], keys[segment, 1], offsets, lengths, kind, stamps, tags)
        else:
            columns[2, at:stop] = 0
        for i in range(at, stop):
            out[i, 0] = columns[3, i] if columns[2, i] else 0
            out[i, 1] = columns[2, i]
        at = stop


@njit(cache=True, nogil=True)
def to_read(now, epoch, keys, asked, answers, replicas, columns, out):
    """Make the rights to read what a get made just now has answered; see `_make`.

    Each ends a little before the lease that the answer tells.
    """
    m = 0
    for i in range(answers.shape[0]):
        stamp = np.int64(0)
        if answers[i].lease_ns > 0:
            end = (now + answers[i].lease_ns + epoch) // _MS - MARGIN_MS
            stamp = stamp_of(end, np.int64(answers[i].generation))
        for _ in range(answers[i].replicas):
            columns[0, m] = replicas[m].offset
            columns[1, m] = answers[i].size
            columns[2, m] = stamp
            m += 1
    _make(keys, asked, READ, columns, replicas, out)


@njit(**KERNEL)
def begun(context, row, generation):
    """Return the row of the unfinished put of this generation, beside a row or there; else -1."""
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    if row >= 0 and rows[row].state == READABLE and rows[row].flags & UPSERT:
        row = cold[row].twin - 1
    if row < 0 or rows[row].state != WRITING or rows[row].generation != generation:
        return np.int64(-1)
    return np.int64(row)


@njit(**KERNEL, inline="always")
def _stamp_to_write(context, rows, row, epoch):
    """The stamp of the rights to write what a put has begun: until others may give it up."""
    end = (rows[row].lease_end + context[DISCARD_NS] + epoch) // _MS
    return stamp_of(end, np.int64(rows[row].generation))


@njit(cache=True, nogil=True)
def to_write(context, epoch, keys, asked, digests, answers, replicas, columns, out):
    """Make the rights to write where a put was answered to lie; see `_make`.

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
        row = begun(context, found[i], answers[i].generation)
        stamp, size = np.int64(0), np.int64(0)
        if row >= 0:
            stamp, size = _stamp_to_write(context, rows, row, epoch), rows[row].size
        for _ in range(answers[i].replicas):
            columns[0, m] = replicas[m].offset
            columns[1, m] = size
            columns[2, m] = stamp
            m += 1
    _make(keys, asked, WRITE, columns, replicas, out)


@njit(**KERNEL)
def content_tags(context, digests, answers, out):
    """out[i] = the tag of the content that a get made just now has answered, 0 for none."""
    found = column(context, FOUND, INT32)
    rows = column(context, ROWS, ROW)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, rows, digests, found)
    for i in range(answers.shape[0]):
        row = found[i]
        out[i] = 0
        if row >= 0 and answers[i].status == OK and rows[row].generation == answers[i].generation:
            out[i] = tag_in(context, rows, row)


@njit(**KERNEL, inline="always")
def _has(receipts, tag):
    """Whether a tag is among receipts, which are sorted. O(log n)."""
    low, high = 0, receipts.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if receipts[middle] < tag:
            low = middle + 1
        else:
            high = middle
    return low < receipts.shape[0] and receipts[low] == tag


@njit(**KERNEL)
def _is_written(receipts, low, high, offset, length, stamp):
    """Whether the owner of a key has said that a place was written by a right of this stamp."""
    for step in range(2 * DRIFT_TICKS + 1):
        ticks = (step + 1) >> 1 if step & 1 else -(step >> 1)
        near = stamp + (np.int64(ticks) << GENERATION_BITS)
        if _has(receipts, tag_of(low, high, offset, length, WRITTEN, near)):
            return True
    return False


@njit(**KERNEL)
def unwritten(context, client, epoch, keys, asked, bases, digests, generations, receipts, out):
    """out[i] = 1 where a client's unfinished put lacks the receipt of a place, else 0.

    `receipts` are sorted: which is whose the tags say. What lies on a dead segment is lost anyway,
    and what is no unfinished put of this client is for others to refuse.
    """
    found = column(context, FOUND, INT32)
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    dead = column(context, DEAD, BYTE)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, rows, digests, found)
    for i in range(digests.shape[0]):
        out[i] = 0
        row = begun(context, found[i], generations[i])
        if row < 0 or cold[row].owner != client or rows[row].segment < 0:
            continue
        stamp, size = _stamp_to_write(context, rows, row, epoch), rows[row].size
        segment, offset = np.int64(rows[row].segment), first_offset(rows, row)
        link = rows[row].more
        while True:
            if asked[segment] and not dead[segment] and not out[i]:
                low, high = keys[segment, 0], keys[segment, 1]
                place = offset + bases[segment]
                out[i] = not _is_written(receipts, low, high, place, size, stamp)
            if link < 0:
                break
            segment, offset = np.int64(overflow[link].segment), overflow[link].offset
            link = overflow[link].next
