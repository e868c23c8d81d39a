"""Kernels that answer readers: gets with leases, probes and listing.

Layouts are those of `records.py`, places in `context` those of `context.py`. `alive[s]` is 1 while
replicas on segment s may be read, `dead[s]` once they are lost. All kernels are O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import (
    ABSENT,
    AWAY,
    COLD_HITS,
    DISK_HITS,
    HITS,
    HITS_BITS,
    HITS_MASK,
    HITS_WINDOWS,
    KERNEL,
    MISSES,
    NOT_FOUND,
    NOT_READY,
    OFF_MEMORY,
    OK,
    READ_BYTES,
    READABLE,
    REMOTE,
    UNREADY,
)
from mooncake_store.core.context import (
    ALIVE,
    BYTE,
    COLD_ROWS,
    DEAD,
    FOUND,
    HITS_WINDOW_NS,
    INT32,
    INT64,
    LEASE_UNTIL,
    NOTED,
    NOTES,
    OVERFLOW_ROWS,
    RING_HEADER,
    ROWS,
    SHARED,
    TABLE_A,
    TABLE_B,
    TALLY,
    UNSURE,
)
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.leases import grant
from mooncake_store.core.kernels.table import find, is_living
from mooncake_store.core.records import COLD, OVERFLOW, ROW
from mooncake_store.core.ring import HORIZON


@njit(**KERNEL, inline="always")
def first_offset(rows, row):
    """Where the first replica of a row begins on its segment."""
    return np.int64(rows[row].offset_low) | np.int64(rows[row].offset_high) << 32


@njit(**KERNEL, inline="always")
def living_replicas(rows, overflow, alive, row, replicas, first):
    """Write the readable replicas of a row from place `first` on; return the next place."""
    m = first
    if alive[rows[row].segment]:
        replicas[m].segment = rows[row].segment
        replicas[m].offset = first_offset(rows, row)
        replicas[m].unsure = 0
        m += 1
    link = rows[row].more
    while link >= 0:
        if overflow[link].state == READABLE and alive[overflow[link].segment]:
            replicas[m].segment = overflow[link].segment
            replicas[m].offset = overflow[link].offset
            replicas[m].unsure = 0
            m += 1
        link = overflow[link].next
    return m


@njit(**KERNEL)
def why_unreadable(context, rows, overflow, row):
    """What to answer to the get of a complete object without a living replica. O(replicas)."""
    dead = column(context, DEAD, BYTE)
    kept = rows[row].segment >= 0 and dead[rows[row].segment] == 0
    link = rows[row].more
    while not kept and link >= 0:
        kept = overflow[link].state == READABLE and dead[overflow[link].segment] == 0
        link = overflow[link].next
    return ABSENT if kept else NOT_FOUND


@njit(**KERNEL, inline="always")
def count_hit(rows, row, window):
    """Count a get in the current window."""
    seen = np.int64(rows[row].hits)
    if (seen >> HITS_BITS) != (window >> HITS_BITS):
        seen = window
    if seen & HITS_MASK < HITS_MASK:
        seen += 1
    rows[row].hits = seen


@njit(**KERNEL)
def get(context, client, now, ttl, digests, answers, replicas):
    """Answer gets: where the replicas are, with a lease of `ttl` for the client if that is above 0.

    Of less where long leases have no share left. The answer tells this lease, not a longer one of
    anybody. Rows read are added to NOTES. Returns how many replicas were written.
    """
    found = column(context, FOUND, INT32)
    notes = column(context, NOTES, INT64)
    rows = column(context, ROWS, ROW)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    alive = column(context, ALIVE, BYTE)
    lease_until = column(context, LEASE_UNTIL, INT64)
    shared = column(context, SHARED, INT64)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, rows, digests, found)
    window = ((now // context[HITS_WINDOW_NS]) & HITS_WINDOWS) << HITS_BITS
    m, hits, away, unready, nbytes, seen = 0, 0, 0, 0, 0, 0
    count = context[NOTED]
    for i in range(digests.shape[0]):
        row = found[i]
        status = NOT_FOUND
        first = m
        if row >= 0:
            if rows[row].state != READABLE:
                status = NOT_READY
            else:
                m = living_replicas(rows, overflow, alive, row, replicas, first)
                if m == first:
                    status = why_unreadable(context, rows, overflow, row)
        answers[i].replicas = m - first
        if m == first:
            answers[i].size = 0
            answers[i].checksum = 0
            answers[i].lease_ns = 0
            answers[i].generation = 0
            answers[i].status = status
            away += status == ABSENT
            unready += status == NOT_READY
            continue
        hits += 1
        nbytes += rows[row].size
        seen |= rows[row].flags
        answers[i].size = rows[row].size
        answers[i].checksum = rows[row].checksum
        answers[i].generation = rows[row].generation
        answers[i].status = OK
        answers[i].lease_ns = 0
        if ttl > 0:
            answers[i].lease_ns, _ = grant(context, rows, shared, row, client, 1, now, ttl)
            for j in range(first, m):
                at = replicas[j].segment
                lease_until[at] = max(lease_until[at], rows[row].lease_end)
        count_hit(rows, row, window)
        notes[count] = row
        count += 1
    context[NOTED] = count
    if ttl > 0:  # else it is a query: nobody reads
        header = column(context, RING_HEADER, INT64)
        header[HORIZON] = max(header[HORIZON], now + ttl)
        context[TALLY + HITS] += hits
        context[TALLY + MISSES] += digests.shape[0] - hits
        context[TALLY + AWAY] += away
        context[TALLY + UNREADY] += unready
        context[TALLY + READ_BYTES] += nbytes
        if seen & OFF_MEMORY:  # some of them lie below memory alone
            for i in range(count - hits, count):
                if rows[notes[i]].flags & OFF_MEMORY:
                    far = column(context, COLD_ROWS, COLD)[notes[i]].tiers == 1 << REMOTE
                    context[TALLY + (COLD_HITS if far else DISK_HITS)] += 1
    return m


@njit(**KERNEL)
def foreign(context, tenant, digests, out):
    """out[i] = 1 where a key is that of an object of another tenant; returns how many are. O(n)."""
    found = column(context, FOUND, INT32)
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, rows, digests, found)
    count = 0
    for i in range(digests.shape[0]):
        out[i] = found[i] >= 0 and cold[found[i]].tenant != tenant
        count += out[i]
    return count


@njit(**KERNEL)
def mark_unsure(context, answers, replicas):
    """Say of the replicas in the answer to a get just made which lie where others may. O(n)."""
    found, cold = column(context, FOUND, INT32), column(context, COLD_ROWS, COLD)
    unsure = column(context, UNSURE, INT64)
    m = 0
    for i in range(answers.shape[0]):
        for _ in range(answers[i].replicas):
            if np.int64(cold[found[i]].created_s) <= unsure[replicas[m].segment]:
                replicas[m].unsure = 1
            m += 1


@njit(**KERNEL)
def readable(context, found, out):
    """out[i] = whether the object can be read now."""
    rows = column(context, ROWS, ROW)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    alive = column(context, ALIVE, BYTE)
    for i in range(found.shape[0]):
        row = found[i]
        out[i] = False
        if row >= 0 and rows[row].state == READABLE:
            out[i] = is_living(rows, overflow, alive, row)


@njit(**KERNEL)
def exists(context, digests, out):
    """out[i] = whether digests[i] names an object that can be read now."""
    found = column(context, FOUND, INT32)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, column(context, ROWS, ROW), digests, found)
    readable(context, found[: digests.shape[0]], out)


@njit(**KERNEL)
def listing(rows, overflow, alive, cold, span, out):
    """Readable, named rows of tenant span[2] among rows span[0]..span[1]; returns how many."""
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state == READABLE and cold[row].tenant == span[2] and cold[row].name_ref != 0:
            if is_living(rows, overflow, alive, row):
                out[count] = row
                count += 1
    return count


@njit(**KERNEL)
def extents(context, chosen, out):
    """List row, segment and offset of every replica of chosen rows, living or not, as columns.

    Returns how many; -1 when there are more than `out` has room for.
    """
    rows = column(context, ROWS, ROW)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    m = 0
    for i in range(chosen.shape[0]):
        row = chosen[i]
        if rows[row].segment >= 0:
            if m == out.shape[1]:
                return -1
            out[0, m] = row
            out[1, m] = rows[row].segment
            out[2, m] = first_offset(rows, row)
            m += 1
        link = rows[row].more
        while link >= 0:
            if m == out.shape[1]:
                return -1
            out[0, m] = row
            out[1, m] = overflow[link].segment
            out[2, m] = overflow[link].offset
            m += 1
            link = overflow[link].next
    return m
