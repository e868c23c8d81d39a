"""Kernels that answer readers: gets with leases, probes, lease upkeep and listing.

Layouts are those of `records.py`. `overflow` holds replicas after the first as chains that begin
at `ROW.more`; its entry 0 is the head of its free list (`next`) and counts the entries ever used
(`offset`). `alive[s]` is 1 while replicas on segment s may be read. `tally` and `tenant_use` are
running totals, because a sum over all rows would be a scan. All kernels are O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core._codes import (
    HITS,
    HOLDERS_MAX,
    HOT,
    HOT_COUNT_BITS,
    HOT_COUNT_MASK,
    HOT_WINDOWS,
    KERNEL,
    LEASE_EXPIRED,
    MISSES,
    NOT_FOUND,
    NOT_READY,
    OK,
    READ_BYTES,
    READABLE,
)
from mooncake_store.core._kernels_columns import column
from mooncake_store.core._kernels_table import find
from mooncake_store.core.context import (
    ALIVE,
    BYTE,
    FOUND,
    HOT_HITS,
    HOT_ROWS,
    HOT_WINDOW_NS,
    INT32,
    INT64,
    LEASE_UNTIL,
    NOTED,
    NOTES,
    OVERFLOW_ROWS,
    ROWS,
    TABLE_A,
    TABLE_B,
    TALLY,
)
from mooncake_store.core.records import OVERFLOW, ROW


@njit(**KERNEL, inline="always")
def living_replicas(rows, overflow, alive, row, replicas, first):
    """Write the readable replicas of a row from place `first` on; return the next place."""
    m = first
    if alive[rows[row].segment]:
        replicas[m].segment = rows[row].segment
        replicas[m].offset = rows[row].offset
        replicas[m].spare = 0
        m += 1
    link = rows[row].more
    while link >= 0:
        if overflow[link].state == READABLE and alive[overflow[link].segment]:
            replicas[m].segment = overflow[link].segment
            replicas[m].offset = overflow[link].offset
            replicas[m].spare = 0
            m += 1
        link = overflow[link].next
    return m


@njit(**KERNEL, inline="always")
def lease(rows, row, now, ttl):
    """Grant one more reader a lease; it never gets shorter by that."""
    if rows[row].lease_end <= now:
        rows[row].holders = 1
    elif rows[row].holders < HOLDERS_MAX:
        rows[row].holders += 1
    if now + ttl > rows[row].lease_end:
        rows[row].lease_end = now + ttl


@njit(**KERNEL, inline="always")
def count_hit(rows, row, window):
    """Count a get in the current window; return the hits so far."""
    seen = np.int64(rows[row].hits)
    if (seen >> HOT_COUNT_BITS) != (window >> HOT_COUNT_BITS):
        seen = window
    if seen & HOT_COUNT_MASK < HOT_COUNT_MASK:
        seen += 1
    rows[row].hits = seen
    return seen & HOT_COUNT_MASK


@njit(**KERNEL)
def get(context, now, ttl, stop_at_miss, digests, answers, replicas):
    """Answer gets: where the replicas are, with a lease of `ttl` if that is above 0.

    Rows read are added to NOTES, those that just became hot are in HOT_ROWS, and HOT of
    the totals counts them. Returns how many replicas were written.
    """
    found = column(context, FOUND, INT32)
    notes = column(context, NOTES, INT64)
    hot_rows = column(context, HOT_ROWS, INT32)
    rows = column(context, ROWS, ROW)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    alive = column(context, ALIVE, BYTE)
    lease_until = column(context, LEASE_UNTIL, INT64)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, rows, digests, found)
    hot_hits = context[HOT_HITS]
    window = 0
    if hot_hits > 0:
        window = ((now // context[HOT_WINDOW_NS]) & HOT_WINDOWS) << HOT_COUNT_BITS
    m, hot = 0, 0
    hits, misses, nbytes = 0, 0, 0
    count = context[NOTED]
    missed = False
    for i in range(digests.shape[0]):
        row = found[i]
        status = NOT_FOUND
        first = m
        if row >= 0 and not missed:
            if rows[row].state != READABLE:
                status = NOT_READY
            else:
                m = living_replicas(rows, overflow, alive, row, replicas, first)
        answers[i].replicas = m - first
        if m == first:
            answers[i].size = 0
            answers[i].checksum = 0
            answers[i].lease_ns = 0
            answers[i].generation = 0
            answers[i].status = status
            misses += not missed
            missed = missed or stop_at_miss != 0
            continue
        hits += 1
        nbytes += rows[row].size
        answers[i].size = rows[row].size
        answers[i].checksum = rows[row].checksum
        answers[i].generation = rows[row].generation
        answers[i].status = OK
        answers[i].lease_ns = 0
        if ttl > 0:
            lease(rows, row, now, ttl)
            answers[i].lease_ns = rows[row].lease_end - now
            for j in range(first, m):
                segment = replicas[j].segment
                if rows[row].lease_end > lease_until[segment]:
                    lease_until[segment] = rows[row].lease_end
        if hot_hits > 0 and count_hit(rows, row, window) == hot_hits:
            hot_rows[hot] = row
            hot += 1
        notes[count] = row
        count += 1
    context[TALLY + HOT] = hot
    context[NOTED] = count
    if ttl > 0:  # else it is a query: nobody reads
        context[TALLY + HITS] += hits
        context[TALLY + MISSES] += misses
        context[TALLY + READ_BYTES] += nbytes
    return m


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
            out[i] = alive[rows[row].segment] != 0
            link = rows[row].more
            while not out[i] and link >= 0:
                out[i] = overflow[link].state == READABLE and alive[overflow[link].segment] != 0
                link = overflow[link].next


@njit(**KERNEL)
def exists(context, digests, out):
    """out[i] = whether digests[i] names an object that can be read now."""
    found = column(context, FOUND, INT32)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, column(context, ROWS, ROW), digests, found)
    readable(context, found[: digests.shape[0]], out)


@njit(**KERNEL)
def renew(rows, overflow, alive, found, generations, times, lease_until, status, remaining):
    """Prolong leases of unchanged objects; times = (now, ttl_ns)."""
    now, ttl = times[0], times[1]
    for i in range(found.shape[0]):
        row = found[i]
        remaining[i] = 0
        status[i] = LEASE_EXPIRED
        if row < 0 or rows[row].state != READABLE or rows[row].generation != generations[i]:
            continue
        end = max(rows[row].lease_end, now + ttl)
        if alive[rows[row].segment]:
            status[i] = OK
            lease_until[rows[row].segment] = max(lease_until[rows[row].segment], end)
        link = rows[row].more
        while link >= 0:
            segment = overflow[link].segment
            if overflow[link].state == READABLE and alive[segment]:
                status[i] = OK
                lease_until[segment] = max(lease_until[segment], end)
            link = overflow[link].next
        if status[i] == OK:
            if rows[row].lease_end <= now:
                rows[row].holders = 1
            rows[row].lease_end = end
            remaining[i] = end - now


@njit(**KERNEL)
def release_leases(rows, found, generations, now, status):
    """One reader of each object is done; the last one ends the lease."""
    for i in range(found.shape[0]):
        row = found[i]
        if row < 0 or rows[row].state != READABLE or rows[row].generation != generations[i]:
            status[i] = NOT_FOUND
            continue
        status[i] = OK
        if rows[row].lease_end > now and 0 < rows[row].holders < HOLDERS_MAX:
            rows[row].holders -= 1
            if rows[row].holders == 0:
                rows[row].lease_end = now


@njit(**KERNEL)
def listing(rows, overflow, alive, cold, span, out):
    """Readable, named rows of tenant span[2] among rows span[0]..span[1]; returns how many."""
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state == READABLE and cold[row].tenant == span[2] and cold[row].name_ref != 0:
            living = alive[rows[row].segment] != 0
            link = rows[row].more
            while not living and link >= 0:
                living = overflow[link].state == READABLE and alive[overflow[link].segment] != 0
                link = overflow[link].next
            if living:
                out[count] = row
                count += 1
    return count
