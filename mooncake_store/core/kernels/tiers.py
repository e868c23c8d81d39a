"""Kernels that know of what a replica's segment is made: tiers of rows, and hauls between them.

A row says by two flags whether complete replicas of it lie in memory and below (`Flag`), and its
cold columns on which tiers below; `tiers[s]` is the tier of segment s. A replica that a haul writes
is WRITING, and the last of its chain or behind complete ones. Layouts are those of `records.py`,
places in `context` those of `context.py`. All kernels are O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import (
    BELOW,
    BYTES,
    HARD_PIN,
    HITS_MASK,
    KERNEL,
    MEMORY,
    MISSING,
    NOTE_INSERT,
    NOTE_REMOVE,
    OFF_MEMORY,
    READABLE,
    TASK,
    UPSERT,
    WRITING,
)
from mooncake_store.core.context import (
    ALIVE,
    BYTE,
    COLD_ROWS,
    INT64,
    MARKED,
    MARKS,
    OVERFLOW_ROWS,
    ROWS,
    TALLY,
    TENANT_USE,
    TIERS,
)
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.reads import first_offset
from mooncake_store.core.kernels.table import take_link
from mooncake_store.core.kernels.writes import count_pinned, drop_replica, keep_marks, missing
from mooncake_store.core.records import COLD, OVERFLOW, ROW

ROW_MASK = (1 << 32) - 1
"""The row in a note."""


@njit(**KERNEL)
def retier(context, chosen, before, lay):
    """Make rows say on which tiers they lie.

    `before` is what all flags were, and `lay` on which tiers below memory they lay (`COLD.tiers`).
    """
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    tiers = column(context, TIERS, BYTE)
    for i in range(chosen.shape[0]):
        row = chosen[i]
        before[i] = rows[row].flags
        lay[i] = cold[row].tiers
        if rows[row].segment < 0:
            continue
        found = np.int64(1) << np.int64(tiers[rows[row].segment])
        link = rows[row].more
        while link >= 0:
            if overflow[link].state == READABLE:
                found |= np.int64(1) << np.int64(tiers[overflow[link].segment])
            link = overflow[link].next
        flags = np.int64(rows[row].flags) & ~np.int64(BELOW | OFF_MEMORY)
        if found >> (MEMORY + 1):
            flags |= BELOW
        if not found & (1 << MEMORY):
            flags |= OFF_MEMORY
        rows[row].flags = flags
        cold[row].tiers = found & ~np.int64(1 << MEMORY)


@njit(**KERNEL, inline="always")
def first_on(rows, overflow, tiers, row, tier):
    """The first segment of a tier on which a row has a replica, -1 for none. O(replicas)."""
    segment = np.int64(rows[row].segment)
    link = rows[row].more
    while segment >= 0 and tiers[segment] != tier:
        segment = np.int64(-1)
        if link >= 0:
            segment = np.int64(overflow[link].segment)
            link = overflow[link].next
    return segment


@njit(**KERNEL)
def lies_also(context, chosen, tier, out):
    """out[i] = whether a replica of row chosen[i] on another tier than this can be read."""
    rows = column(context, ROWS, ROW)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    tiers, alive = column(context, TIERS, BYTE), column(context, ALIVE, BYTE)
    for i in range(chosen.shape[0]):
        segment = np.int64(rows[chosen[i]].segment)
        found = segment >= 0 and tiers[segment] != tier and alive[segment] != 0
        link = rows[chosen[i]].more
        while not found and link >= 0:
            segment = np.int64(overflow[link].segment)
            found = (
                overflow[link].state == READABLE and tiers[segment] != tier and alive[segment] != 0
            )
            link = overflow[link].next
        out[i] = found


@njit(**KERNEL)
def drop_tier(context, now, chosen, tier, out):
    """Unlink the replicas that rows have on a tier; no replica of theirs is being written.

    `out` is columns as of `dispose`: segment, offset, size, 0, until. Returns (extents, bytes).
    """
    rows = column(context, ROWS, ROW)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    tiers = column(context, TIERS, BYTE)
    marks, marked = column(context, MARKS, INT64), context[MARKED]
    m, total = 0, 0
    for i in range(chosen.shape[0]):
        row = chosen[i]
        marks[marked + i] = row
        until = rows[row].lease_end
        if until <= now:
            until = 0
        segment = first_on(rows, overflow, tiers, row, tier)
        while segment >= 0:
            out[0, m] = segment
            out[1, m] = drop_replica(context, row, segment)
            out[2, m] = rows[row].size
            out[3, m] = 0
            out[4, m] = until
            m += 1
            total += rows[row].size
            segment = first_on(rows, overflow, tiers, row, tier)
    keep_marks(context, marked + chosen.shape[0])
    return m, total


@njit(**KERNEL)
def sources(context, chosen, tier, up, answering, kept, segments, offsets):
    """Find where rows that may be hauled off a tier are to be read: segment -1 for the others.

    A row may be hauled that is complete, lies on that tier, not on one where it is to go, and has
    no other business: `up` is to memory, else it goes to a lower tier. One that is pinned hard may
    only if the source is `kept`. answering[s] = whether somebody can read from segment s.
    """
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    tiers = column(context, TIERS, BYTE)
    barred = TASK | UPSERT
    if not kept:
        barred |= HARD_PIN
    if tier == MEMORY:
        barred |= OFF_MEMORY
    for i in range(chosen.shape[0]):
        row = chosen[i]
        segments[i] = -1
        offsets[i] = 0
        if rows[row].state != READABLE or rows[row].flags & barred:
            continue
        if up and not rows[row].flags & OFF_MEMORY:
            continue
        if not up and np.int64(cold[row].tiers) >> (tier + 1):
            continue
        segment = np.int64(rows[row].segment)
        if segment >= 0 and tiers[segment] == tier and answering[segment]:
            segments[i] = segment
            offsets[i] = first_offset(rows, row)
        link = rows[row].more
        while segments[i] < 0 and link >= 0:
            segment = np.int64(overflow[link].segment)
            if overflow[link].state == READABLE and tiers[segment] == tier and answering[segment]:
                segments[i] = segment
                offsets[i] = overflow[link].offset
            link = overflow[link].next


@njit(**KERNEL)
def load(context, chosen, segment, offsets):
    """Give each row a replica on a segment that a haul writes, and tie the row to that."""
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    tenant_use = column(context, TENANT_USE, INT64)
    marks, marked = column(context, MARKS, INT64), context[MARKED]
    for i in range(chosen.shape[0]):
        row = chosen[i]
        marks[marked + i] = row
        link = take_link(overflow)
        overflow[link].offset = offsets[i]
        overflow[link].segment = segment
        overflow[link].state = WRITING
        overflow[link].next = -1
        if rows[row].more < 0:
            rows[row].more = link
        else:
            last = rows[row].more
            while overflow[last].next >= 0:
                last = overflow[last].next
            overflow[last].next = link
        if missing(rows, cold, row) > 0:
            context[TALLY + MISSING] -= 1
        rows[row].replicas += 1
        rows[row].flags |= TASK
        context[TALLY + BYTES] += rows[row].size
        tenant_use[2 * np.int64(cold[row].tenant)] += rows[row].size
        if rows[row].flags & HARD_PIN:
            count_pinned(context, row, rows[row].size)
    keep_marks(context, marked + chosen.shape[0])


@njit(**KERNEL)
def unload(context, chosen, segment, arrived):
    """End a haul of rows to a segment: what arrived[i] can be read there, the rest is unlinked."""
    rows = column(context, ROWS, ROW)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    marks, marked = column(context, MARKS, INT64), context[MARKED]
    for i in range(chosen.shape[0]):
        row = chosen[i]
        marks[marked + i] = row
        rows[row].flags &= ~TASK & 0xFF
        if not arrived[i]:
            drop_replica(context, row, segment)
            continue
        link = rows[row].more
        while link >= 0:
            if overflow[link].segment == segment:
                overflow[link].state = READABLE
            link = overflow[link].next
    keep_marks(context, marked + chosen.shape[0])


@njit(**KERNEL)
def sort_notes(context, notes, hits_wanted, below, risers):
    """List the notes that are about rows below memory or that went, and the rows that are to rise.

    Those were read, lie below memory alone, and were read `hits_wanted` times lately, unless that
    is 0. Returns how many of each.
    """
    rows = column(context, ROWS, ROW)
    count, rising = 0, 0
    for i in range(notes.shape[0]):
        row = notes[i] & ROW_MASK
        flags = rows[row].flags
        if notes[i] == row:
            if flags & BELOW:
                below[count] = notes[i]
                count += 1
            if flags & OFF_MEMORY and rows[row].state == READABLE and not flags & TASK:
                if hits_wanted > 0 and (rows[row].hits & HITS_MASK) >= hits_wanted:
                    risers[rising] = row
                    rising += 1
        elif notes[i] & NOTE_REMOVE:
            below[count] = notes[i]
            count += 1
    return count, rising


@njit(**KERNEL)
def follow_notes(context, notes, behind, ahead, out):
    """Learn which row was put behind which; list what comes behind reads of what lies below.

    Of up to `ahead` rows of the same tenant behind the last of a run those are listed that lie
    below memory alone. `behind` is that of `Continuations`. Returns how many.
    """
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    count = 0
    for i in range(notes.shape[0]):
        row = notes[i] & ROW_MASK
        if notes[i] == row:
            following = np.int64(behind[row + 1])
            going_on = i + 1 < notes.shape[0] and notes[i + 1] == following - 1
            if going_on or not rows[row].flags & BELOW:
                continue
            left = ahead
            while following > 0 and left > 0 and count < out.shape[0]:
                at = following - 1
                if rows[at].state != READABLE or cold[at].tenant != cold[row].tenant:
                    break
                if rows[at].flags & OFF_MEMORY and not rows[at].flags & TASK:
                    out[count] = at
                    count += 1
                following = np.int64(behind[at + 1])
                left -= 1
        elif notes[i] & NOTE_REMOVE:
            behind[row + 1] = 0
        elif notes[i] & NOTE_INSERT:
            before = np.int64(behind[0])
            if before > 0 and before - 1 != row:
                behind[before] = row + 1
            behind[0] = row + 1
            behind[row + 1] = 0
    return count
