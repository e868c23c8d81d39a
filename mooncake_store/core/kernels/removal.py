"""Kernels that let objects go: removals, and everything that leaves with a row.

Rows were found by `table`; -1 stands for "no such object". Layouts are those of
`records.py`, places in `context` those of `context.py`. All kernels are O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import (
    BUSY,
    BYTES,
    DOOMED,
    GROUPED,
    HARD_PIN,
    HAS_LEASE,
    KERNEL,
    MISSING,
    NOT_FOUND,
    NOT_READY,
    NOTE_REMOVE,
    OBJECTS,
    OK,
    READABLE,
    REMOVED,
    SINK,
    SOFT_PIN,
    SOFT_PINNED,
    TASK,
    UNFINISHED,
    UPSERT,
    WRITING,
)
from mooncake_store.core.context import (
    COLD_ROWS,
    DISCARD_NS,
    EVENTS,
    EVENTS_KEPT,
    EVENTS_NEXT,
    FOUND,
    FREE_STACK,
    FREED,
    FREED_EXTENTS,
    INT32,
    INT64,
    MARKED,
    MARKS,
    NAME_HEADS,
    NAME_WORDS,
    NOTED,
    NOTES,
    OVERFLOW_ROWS,
    PIN_ENDS,
    PINS_USED,
    RELEASE_NS,
    ROWS,
    SHARED,
    TABLE_A,
    TABLE_B,
    TALLY,
    TENANT_USE,
)
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.leases import leased_to_others
from mooncake_store.core.kernels.names import drop
from mooncake_store.core.kernels.reads import first_offset
from mooncake_store.core.kernels.table import delete, find, give_link
from mooncake_store.core.kernels.writes import count_pinned, keep_marks, missing, note, record
from mooncake_store.core.records import COLD, EVENT, OVERFLOW, ROW


@njit(**KERNEL)
def check_remove(context, client, now, force, found, status, doomed):
    """Decide removals by a client. Returns how many rows are doomed.

    Leases of its own do not keep it from removing; what reads under them finds the bytes until
    they end.

    A doomed row is flagged, so that a second occurrence in the batch is answered as missing.
    """
    rows = column(context, ROWS, ROW)
    shared = column(context, SHARED, INT64)
    discard_ns = context[DISCARD_NS]
    count = 0
    for i in range(found.shape[0]):
        row = found[i]
        if row < 0 or rows[row].flags & DOOMED:
            status[i] = NOT_FOUND
        elif rows[row].flags & TASK:
            status[i] = BUSY
        elif rows[row].state == WRITING and now - rows[row].lease_end < discard_ns and force == 0:
            status[i] = NOT_READY
        elif rows[row].flags & UPSERT and force == 0:
            status[i] = NOT_READY
        elif (
            rows[row].state == READABLE
            and force == 0
            and leased_to_others(rows, shared, row, client, now)
        ):
            status[i] = HAS_LEASE
        else:
            status[i] = OK
            rows[row].flags |= DOOMED
            doomed[count] = row
            count += 1
    return count


@njit(**KERNEL)
def survey(context, now, doomed):
    """Return (all flags of doomed rows or-ed, number of their replicas, whether any may wait).

    Touches everything the kernels after it will need of these rows: loads that depend on nothing
    overlap their cache misses.
    """
    rows = column(context, ROWS, ROW)
    cold = column(context, COLD_ROWS, COLD)
    flags = 0
    replicas = 0
    sink = 0
    some_wait = False
    for i in range(doomed.shape[0]):
        flags |= rows[doomed[i]].flags
        some_wait |= rows[doomed[i]].state == WRITING or rows[doomed[i]].lease_end > now
        replicas += rows[doomed[i]].replicas
        sink ^= cold[doomed[i]].name_ref
    context[TALLY + SINK] = sink
    return flags, replicas, some_wait


@njit(**KERNEL)
def dispose_plain(context, now, silently, doomed):
    """Dispose of rows if nothing about them is special, and tell the policies; see `dispose`.

    Returns (their flags or-ed, bytes, or -1 when nothing was done because something is: a tie to
    other rows, a reader or writer to wait for, more than FREED_EXTENTS or NOTES has room for).
    """
    flags, replicas, some_wait = survey(context, now, doomed)
    freed = column(context, FREED_EXTENTS, INT64)
    too_many = context[FREED] + replicas > freed.shape[0] // 2
    too_many |= context[NOTED] + doomed.shape[0] > column(context, NOTES, INT64).shape[0]
    if flags & (UPSERT | GROUPED) or some_wait or too_many:
        return flags, -1
    _, total = dispose(context, now, False, silently, doomed, True, freed)
    note(context, doomed, NOTE_REMOVE)
    return flags, total


@njit(**KERNEL)
def remove(context, client, now, force, digests, status, doomed):
    """Find keys, decide their removal, and let the rows go if nothing about them is special.

    Returns (rows doomed, what `dispose_plain` says of them).
    """
    found = column(context, FOUND, INT32)[: digests.shape[0]]
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    find(context, table_a, table_b, column(context, ROWS, ROW), digests, found)
    count = check_remove(context, client, now, force, found, status, doomed)
    flags, total = dispose_plain(context, now, False, doomed[:count])
    return count, flags, total


@njit(**KERNEL)
def dispose(context, now, writer_done, silently, doomed, keep, out):
    """Let doomed rows go: list their extents, tell the events, and clear all that knows of them.

    `out` is five columns, one after the other: segment, offset, size, writer, until, which is 0
    when the space may be reused at once, else the end of the lease or of the writer's time; the
    writer is its owner above its generation, 0 for what was complete. With `keep`, when none has
    to wait, it is FREED_EXTENTS and they are added. Returns (extents, bytes).
    """
    rows = column(context, ROWS, ROW)
    cold = column(context, COLD_ROWS, COLD)
    if context[PINS_USED]:
        pin_ends = column(context, PIN_ENDS, INT64)
        for i in range(doomed.shape[0]):
            pin_ends[doomed[i]] = 0
    m, total, named = unlink(context, now, writer_done, silently, rows, cold, doomed, keep, out)
    if named:
        words, heads = column(context, NAME_WORDS, INT64), column(context, NAME_HEADS, INT64)
        drop(words, heads, cold, doomed)
    delete(
        context,
        column(context, TABLE_A, INT64),
        column(context, TABLE_B, INT64),
        rows,
        column(context, FREE_STACK, INT32),
        doomed,
    )
    return m, total


@njit(**KERNEL)
def unlink(context, now, writer_done, silently, rows, cold, doomed, keep, out):
    """List and unlink the extents of doomed rows, and take the rows out of all totals.

    Returns (extents, bytes, whether any row has a name); see `dispose`.
    """
    most = out.shape[0] // 2 if keep else out.shape[0] // 5
    begin = context[FREED] if keep else 0
    segments, offsets = out[begin:most], out[most + begin : 2 * most]
    sizes, writers, untils = out[2 * most :], out[3 * most :], out[4 * most :]
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    events = column(context, EVENTS, EVENT)
    tenant_use = column(context, TENANT_USE, INT64)
    kept = 0 if silently else context[EVENTS_KEPT]
    place = (context[EVENTS_NEXT] - 1) % max(kept, 1)
    marks, marked = column(context, MARKS, INT64), context[MARKED]
    unfinished, pinned, short, total, names, m = 0, 0, 0, 0, 0, 0
    for i in range(doomed.shape[0]):
        row = doomed[i]
        marks[marked + i] = row
        until, writer = 0, 0
        if rows[row].state == WRITING:
            unfinished += 1
            if writer_done == 0:
                until = rows[row].lease_end + context[RELEASE_NS]
                writer = np.int64(cold[row].owner) << 32 | np.int64(rows[row].generation)
        else:
            if kept > 0:
                record(events, place, rows, cold, row, REMOVED)
                place = place + 1 if place + 1 < kept else 0
            until = rows[row].lease_end
            short += missing(rows, cold, row)
            pinned += (rows[row].flags & SOFT_PIN) != 0
        if until <= now:
            until = 0
        first, size = m, rows[row].size
        if rows[row].segment >= 0:
            segments[m] = rows[row].segment
            offsets[m] = first_offset(rows, row)
            m += 1
        link = rows[row].more
        while link >= 0:
            segments[m] = overflow[link].segment
            offsets[m] = overflow[link].offset
            m += 1
            link = give_link(overflow, link)
        if not keep:
            for j in range(first, m):
                sizes[j] = size
                writers[j] = writer
                untils[j] = until
        nbytes = size * (m - first)
        total += nbytes
        names |= cold[row].name_ref
        tenant_use[2 * cold[row].tenant] -= nbytes
        tenant_use[2 * cold[row].tenant + 1] -= 1
        if rows[row].flags & HARD_PIN:
            count_pinned(context, row, -nbytes)
    keep_marks(context, marked + doomed.shape[0])
    ended = doomed.shape[0] - unfinished
    context[TALLY + UNFINISHED] -= unfinished
    context[TALLY + OBJECTS] -= ended
    context[TALLY + SOFT_PINNED] -= pinned
    context[TALLY + MISSING] -= short
    context[TALLY + BYTES] -= total
    context[EVENTS_NEXT] += ended if kept > 0 else 0
    context[FREED] += m if keep else 0
    return m, total, names != 0


@njit(**KERNEL)
def by_segment(segments, offsets, counts, grouped, runs):
    """Put extents in order of their segment, keeping the order within one. O(n).

    `counts` has a zero per segment, now and afterwards. runs[r] = (segment, start, stop) of each
    run in `grouped`; returns how many.
    """
    found = 0
    for j in range(segments.shape[0]):
        segment = segments[j]
        if counts[segment] == 0:
            runs[found, 0] = segment
            found += 1
        counts[segment] += 1
    start = 0
    for r in range(found):
        segment = runs[r, 0]
        runs[r, 1] = start
        start += counts[segment]
        runs[r, 2] = start
        counts[segment] = runs[r, 1]
    for j in range(segments.shape[0]):
        grouped[counts[segments[j]]] = offsets[j]
        counts[segments[j]] += 1
    for r in range(found):
        counts[runs[r, 0]] = 0
    return found
