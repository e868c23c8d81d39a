"""Kernels that change objects: puts, their ends, and the replicas they gain or lose.

Rows were found by `table`; -1 stands for "no such object".
Layouts are those of `records.py`, places in `context` those of `context.py`. `alive[s]` is 1 while
replicas on segment s may be read. All kernels are O(n + replicas).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import (
    ALREADY_EXISTS,
    BELOW,
    BUSY,
    BYTES,
    DISK,
    DOOMED,
    GENERATION,
    HARD_BYTES,
    HARD_PIN,
    ILLEGAL_CLIENT,
    INVALID_KEY,
    INVALID_PARAMS,
    INVALID_WRITE,
    KERNEL,
    MARK_ENDED,
    MEMORY,
    MISSING,
    NAME_BYTES_MAX,
    NO_SPACE,
    NOT_FOUND,
    NOTE_INSERT,
    OBJECTS,
    OFF_MEMORY,
    OK,
    READABLE,
    REMOTE,
    RETRY,
    SINK,
    SIZE_MAX,
    SOFT_PIN,
    SOFT_PINNED,
    STORED,
    SUPERSEDED,
    SWAP,
    TALLY_WORDS,
    TASK,
    UNFINISHED,
    UPSERT,
    WRITING,
    WRITTEN_BYTES,
)
from mooncake_store.core.context import (
    ALIVE,
    BYTE,
    COLD_ROWS,
    DISCARD_NS,
    EVENTS,
    EVENTS_KEPT,
    EVENTS_NEXT,
    FOUND,
    FREE_STACK,
    FRESH,
    INT16,
    INT32,
    INT64,
    JOURNALED,
    MARKED,
    MARKS,
    NOTED,
    NOTES,
    OVERFLOW_ROWS,
    PIN_ENDS,
    PINNED_OF,
    PINNER,
    ROWS,
    STATUS,
    TABLE_A,
    TABLE_B,
    TALLY,
    TENANT_PINS,
    TENANT_USE,
    TIERS,
    UINT16,
)
from mooncake_store.core.kernels.cells import keep_tag
from mooncake_store.core.kernels.columns import column
from mooncake_store.core.kernels.reads import first_offset
from mooncake_store.core.kernels.table import (
    FREE_ROWS,
    find,
    find_or_insert,
    give_link,
    is_living,
    set_first,
    take_link,
)
from mooncake_store.core.records import COLD, EVENT, OVERFLOW, ROW


@njit(**KERNEL, inline="always")
def open_row(rows, cold, row, size, now, client, tenant, request, wanted, tally):
    """Make a fresh row that of an unfinished put."""
    tally[GENERATION] = (tally[GENERATION] + 1) & 0xFFFFFFFF
    tally[UNFINISHED] += 1
    rows[row].size = size
    rows[row].checksum = request
    rows[row].lease_end = now
    rows[row].generation = tally[GENERATION]
    rows[row].more = -1
    rows[row].segment = -1
    cold[row].tenant = tenant
    rows[row].state = WRITING
    cold[row].created_s = now // 1_000_000_000
    rows[row].hits = 0
    cold[row].twin = 0
    cold[row].owner = client
    cold[row].wanted = wanted
    cold[row].pin_level = 0
    cold[row].tiers = 0


@njit(**KERNEL, inline="always")
def missing(rows, cold, row):
    """How many replicas a row has fewer than it was put for. O(1)."""
    return max(0, np.int64(cold[row].wanted) - np.int64(rows[row].replicas))


@njit(**KERNEL, inline="always")
def admit(sizes, lengths, status):
    """Refuse keys whose size or name is out of range."""
    for i in range(sizes.shape[0]):
        if sizes[i] <= 0 or sizes[i] >= SIZE_MAX:
            status[i] = INVALID_PARAMS
        if lengths.shape[0] > 0 and lengths[i] > NAME_BYTES_MAX:
            status[i] = INVALID_KEY


@njit(**KERNEL, inline="always")
def record(ring, at, rows, cold, row, kind):
    """Write one event at place `at` of the ring."""
    ring[at].digest_lo = rows[row].digest_lo
    ring[at].digest_hi = rows[row].digest_hi
    ring[at].kind = kind
    ring[at].tenant = cold[row].tenant
    ring[at].tier = MEMORY
    if rows[row].flags & OFF_MEMORY:
        ring[at].tier = REMOTE if cold[row].tiers == 1 << REMOTE else DISK


@njit(**KERNEL, inline="always")
def note(context, chosen, kind):
    """Add notes of a kind to NOTES, for the policies. The caller made room. O(n)."""
    notes = column(context, NOTES, INT64)[context[NOTED] :]
    for i in range(chosen.shape[0]):
        notes[i] = chosen[i]
        notes[i] |= kind
    context[NOTED] += chosen.shape[0]


@njit(**KERNEL, inline="always")
def keep_marks(context, marked):
    """Count the rows that were written to MARKS up to a place, if changes are written down."""
    if context[JOURNALED]:
        context[MARKED] = marked


@njit(**KERNEL)
def why_not(context, rows, cold, row, now, discard_ns):
    """What to answer to the put of a key that has a row. O(replicas).

    A complete object that cannot be read now is no reason not to store it anew, unless somebody
    does so already.
    """
    unfinished = row
    if rows[row].state == READABLE:
        alive = column(context, ALIVE, BYTE)
        overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
        if is_living(rows, overflow, alive, row):
            return ALREADY_EXISTS
        if rows[row].flags & TASK:
            return BUSY  # the janitor stops a task's writer
        if not rows[row].flags & UPSERT:
            return RETRY
        unfinished = cold[row].twin - 1
    return RETRY if now - rows[unfinished].lease_end >= discard_ns else ALREADY_EXISTS


@njit(**KERNEL)
def enter(context, digests, sizes, lengths, status, found, fresh):
    """Find the rows of keys to put, and make new ones of those that are missing.

    status[i] != 0 on entry means refused already.
    """
    rows = column(context, ROWS, ROW)
    cold = column(context, COLD_ROWS, COLD)
    free_rows = column(context, FREE_STACK, INT32)
    admit(sizes, lengths, status)
    sink = 0
    for i in range(min(digests.shape[0], context[FREE_ROWS])):  # what will be taken, to be near
        row = free_rows[context[FREE_ROWS] - 1 - i]
        sink ^= rows[row].size ^ cold[row].name_ref
    context[TALLY + SINK] = sink
    find_or_insert(
        context,
        column(context, TABLE_A, INT64),
        column(context, TABLE_B, INT64),
        rows,
        free_rows,
        digests,
        status,
        found,
        fresh,
    )


@njit(**KERNEL)
def claim(
    context,
    now,
    client,
    tenant,
    request,
    wanted,
    discard_ns,
    digests,
    sizes,
    lengths,
    status,
    found,
):
    """Start puts: missing keys get a row in state WRITING, others an answer that says why not.

    status[i] != 0 on entry means refused already. RETRY marks a row whose writer is late, or that
    cannot be read now. Returns how many of those there are.
    """
    rows = column(context, ROWS, ROW)
    cold = column(context, COLD_ROWS, COLD)
    fresh = column(context, FRESH, BYTE)
    tally = context[TALLY : TALLY + TALLY_WORDS]
    enter(context, digests, sizes, lengths, status, found, fresh)
    marks, marked = column(context, MARKS, INT64), context[MARKED]
    claimed = 0
    retries = 0
    for i in range(digests.shape[0]):
        if status[i] != OK:
            continue
        row = found[i]
        if row < 0:
            status[i] = NO_SPACE
        elif fresh[i]:
            open_row(rows, cold, row, sizes[i], now, client, tenant, request, wanted, tally)
            marks[marked + claimed] = row
            claimed += 1
        else:
            status[i] = why_not(context, rows, cold, row, now, discard_ns)
            retries += status[i] == RETRY
    column(context, TENANT_USE, INT64)[2 * tenant + 1] += claimed
    keep_marks(context, marked + claimed)
    return retries


@njit(**KERNEL)
def start(
    context,
    now,
    client,
    tenant,
    request,
    segment,
    first,
    words,
    sizes,
    lengths,
    offsets,
    answers,
    replicas,
):
    """Start puts of one replica each at `offsets` of one segment, and write their answers.

    Does what `claim`, `attach` and `put_reply` do together, for keys from `first` on in a batch,
    of which FOUND and STATUS then have rows and statuses. Returns (rows started, offsets left over,
    now first, RETRY answers); -1 and nothing done if an offset is -1.
    """
    n = words.shape[0]
    for i in range(n):
        if offsets[i] < 0:
            return -1, 0, 0
    rows = column(context, ROWS, ROW)
    cold = column(context, COLD_ROWS, COLD)
    fresh = column(context, FRESH, BYTE)
    found = column(context, FOUND, INT32)[first : first + n]
    status = column(context, STATUS, INT16)[first : first + n]
    tally = context[TALLY : TALLY + TALLY_WORDS]
    status[:] = OK
    enter(context, words, sizes, lengths, status, found, fresh)
    marks, marked = column(context, MARKS, INT64), context[MARKED]
    started, left, retries, total = 0, 0, 0, 0
    lies = np.int64(1) << np.int64(column(context, TIERS, BYTE)[segment]) & ~(1 << MEMORY)
    for i in range(n):
        row = found[i]
        if status[i] == OK:
            if row < 0:
                status[i] = NO_SPACE
            elif not fresh[i]:
                status[i] = why_not(context, rows, cold, row, now, context[DISCARD_NS])
                retries += status[i] == RETRY
        answers[i].status = status[i]
        if status[i] != OK:
            answers[i].generation = 0
            answers[i].replicas = 0
            offsets[left] = offsets[i]
            left += 1
            continue
        open_row(rows, cold, row, sizes[i], now, client, tenant, request, 1, tally)
        set_first(rows, row, segment, offsets[i])
        rows[row].replicas = 1
        rows[row].flags = BELOW | OFF_MEMORY if lies else 0
        cold[row].tiers = lies
        total += sizes[i]
        answers[i].generation = rows[row].generation
        answers[i].replicas = 1
        replicas[started].offset = offsets[i]
        replicas[started].segment = segment
        replicas[started].unsure = 0
        marks[marked + started] = row
        started += 1
    keep_marks(context, marked + started)
    context[TALLY + BYTES] += total
    use = column(context, TENANT_USE, INT64)
    use[2 * tenant] += total
    use[2 * tenant + 1] += started
    return started, left, retries


@njit(**KERNEL)
def beside(rows, cold, old, new, sizes, now, who, wanted, tally, tenant_use):
    """Open a hidden second generation new[i] of each readable row old[i]."""
    for i in range(old.shape[0]):
        rows[new[i]].digest_lo = rows[old[i]].digest_lo
        rows[new[i]].digest_hi = rows[old[i]].digest_hi
        open_row(rows, cold, new[i], sizes[i], now, who[0], who[1], who[2], wanted, tally)
        rows[new[i]].flags |= UPSERT
        rows[old[i]].flags |= UPSERT
        cold[new[i]].twin = old[i] + 1
        cold[old[i]].twin = new[i] + 1
    tenant_use[who[1], 1] += old.shape[0]


@njit(**KERNEL, inline="always")
def count_pinned(context, row, nbytes):
    """Note that a row pins more bytes hard, or fewer: in all, for its tenant and for who did. O(1).

    PINNER tells who, for rows that have the flag. What clients that are gone have pinned, and all
    of before a restart, is nobody's: client 0.
    """
    context[TALLY + HARD_BYTES] += nbytes
    pinner = column(context, PINNER, UINT16)
    pinned_of = column(context, PINNED_OF, INT64)
    pinned_of[np.int64(pinner[row])] += nbytes
    tenant = np.int64(column(context, COLD_ROWS, COLD)[row].tenant)
    column(context, TENANT_PINS, INT64)[tenant] += nbytes


@njit(**KERNEL)
def attach(context, chosen, segments, offsets, tenant):
    """Give each chosen row one more replica (a chain keeps the order of attachment)."""
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    tenant_use = column(context, TENANT_USE, INT64)
    for i in range(chosen.shape[0]):
        row = chosen[i]
        if rows[row].segment < 0:
            set_first(rows, row, segments[i], offsets[i])
        else:
            link = take_link(overflow)
            overflow[link].offset = offsets[i]
            overflow[link].segment = segments[i]
            overflow[link].state = READABLE
            overflow[link].next = -1
            if rows[row].more < 0:
                rows[row].more = link
            else:
                last = rows[row].more
                while overflow[last].next >= 0:
                    last = overflow[last].next
                overflow[last].next = link
        if rows[row].state == READABLE and missing(rows, cold, row) > 0:
            context[TALLY + MISSING] -= 1
        rows[row].replicas += 1
        context[TALLY + BYTES] += rows[row].size
        tenant_use[2 * tenant] += rows[row].size
        if rows[row].flags & HARD_PIN:
            count_pinned(context, row, rows[row].size)


@njit(**KERNEL)
def put_reply(rows, overflow, found, status, answers, replicas):
    """Write the answer to a put_start; return how many replicas were written."""
    m = 0
    for i in range(found.shape[0]):
        answers[i].status = status[i]
        answers[i].generation = 0
        answers[i].replicas = 0
        if status[i] != OK:
            continue
        row = found[i]
        answers[i].generation = rows[row].generation
        answers[i].replicas = rows[row].replicas
        replicas[m].segment = rows[row].segment
        replicas[m].offset = first_offset(rows, row)
        replicas[m].unsure = 0
        m += 1
        link = rows[row].more
        while link >= 0:
            replicas[m].segment = overflow[link].segment
            replicas[m].offset = overflow[link].offset
            replicas[m].unsure = 0
            m += 1
            link = overflow[link].next
    return m


@njit(**KERNEL, inline="always")
def passed(rows, cold, row, generation):
    """Whether a later put of the key took the place of the one of this generation."""
    newest = np.int64(rows[row].generation)
    if newest == generation:
        return False
    if rows[row].state == READABLE and rows[row].flags & UPSERT:
        newest = np.int64(rows[cold[row].twin - 1].generation)
    # Generations count modulo 2**32.
    return 0 < (newest - np.int64(generation)) & 0xFFFFFFFF < 0x80000000


@njit(**KERNEL, inline="always")
def keep_sums(context, rows, row, checksums, tags, i):
    """Keep the checksum of an object that was written, and its tag if tags came."""
    rows[row].checksum = checksums[i]
    keep_tag(context, row, tags[i] if tags.shape[0] > 0 else np.int64(0))


@njit(**KERNEL)
def complete(context, now, client, digests, generations, checksums, tags, status, done):
    """End puts; `done` lists the rows that became readable, and each is an event.

    Returns (their number, whether any needs special care): SWAP marks a completed second
    generation, which the caller swaps in, and a done row may have a flag. If none does, NOTES
    tells the policy of the rows.
    """
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    events, pin_ends = column(context, EVENTS, EVENT), column(context, PIN_ENDS, INT64)
    table_a, table_b = column(context, TABLE_A, INT64), column(context, TABLE_B, INT64)
    found = column(context, FOUND, INT32)
    find(context, table_a, table_b, rows, digests, found)
    kept = context[EVENTS_KEPT]
    place = (context[EVENTS_NEXT] - 1) % max(kept, 1)
    count, pinned, short, written, special = 0, 0, 0, 0, False
    marks, marked = column(context, MARKS, INT64), context[MARKED]
    for i in range(digests.shape[0]):
        row = found[i]
        if row < 0:
            status[i] = NOT_FOUND
            continue
        if rows[row].state == READABLE and rows[row].flags & UPSERT:
            twin = cold[row].twin - 1
            if rows[twin].generation == generations[i]:
                if cold[twin].owner != client:
                    status[i] = ILLEGAL_CLIENT
                elif rows[twin].flags & DOOMED:
                    status[i] = OK  # ended by an earlier entry of this batch
                else:
                    keep_sums(context, rows, twin, checksums, tags, i)
                    rows[twin].flags |= DOOMED
                    status[i] = SWAP
                    special = True
                    written += rows[twin].size
                continue
        if passed(rows, cold, row, generations[i]):
            status[i] = SUPERSEDED
        elif rows[row].generation != generations[i]:
            status[i] = NOT_FOUND  # given up meanwhile; the key names an object from before
        elif cold[row].owner != client:
            status[i] = ILLEGAL_CLIENT
        elif rows[row].state == READABLE:
            status[i] = OK
        else:
            status[i] = OK
            rows[row].state = READABLE
            keep_sums(context, rows, row, checksums, tags, i)
            rows[row].lease_end = rows[row].holders = 0
            short += missing(rows, cold, row)
            written += rows[row].size
            special = special or rows[row].flags != 0
            marks[marked + count] = row if rows[row].flags else np.int64(row) | MARK_ENDED
            if rows[row].flags & SOFT_PIN:
                pin_ends[row] += now  # held the ttl until now
                pinned += 1
            if kept > 0:
                record(events, place, rows, cold, row, STORED)
                place = place + 1 if place + 1 < kept else 0
            done[count] = row
            count += 1
    keep_marks(context, marked + count)
    context[TALLY + UNFINISHED] -= count
    context[TALLY + OBJECTS] += count
    context[TALLY + SOFT_PINNED] += pinned
    context[TALLY + MISSING] += short
    context[TALLY + WRITTEN_BYTES] += written
    context[EVENTS_NEXT] += count if kept > 0 else 0
    if not special:
        note(context, done[:count], NOTE_INSERT)
    return count, special


@njit(**KERNEL)
def revoke(rows, cold, found, generations, client, status, doomed):
    """Decide revocations; `doomed` are the rows to give up. Returns their number."""
    count = 0
    for i in range(found.shape[0]):
        row = found[i]
        if row < 0 or rows[row].flags & DOOMED:
            status[i] = NOT_FOUND
            continue
        if rows[row].state == READABLE and rows[row].flags & UPSERT:
            twin = cold[row].twin - 1
            if rows[twin].generation == generations[i]:
                if not rows[twin].flags & DOOMED:  # else given up by an earlier entry
                    row = twin
        if cold[row].owner != client:
            status[i] = ILLEGAL_CLIENT
        elif rows[row].state == READABLE or rows[row].generation != generations[i]:
            status[i] = INVALID_WRITE
        else:
            status[i] = OK
            rows[row].flags |= DOOMED
            doomed[count] = row
            count += 1
    return count


@njit(**KERNEL)
def drop_replica(context, row, segment):
    """Unlink the replica of `row` on `segment`; returns its offset or -1. O(replicas)."""
    rows, cold = column(context, ROWS, ROW), column(context, COLD_ROWS, COLD)
    overflow = column(context, OVERFLOW_ROWS, OVERFLOW)
    offset = np.int64(-1)
    link = rows[row].more
    if rows[row].segment == segment:
        offset = first_offset(rows, row)
        if link >= 0:
            set_first(rows, row, overflow[link].segment, overflow[link].offset)
            rows[row].more = overflow[link].next
        else:
            rows[row].segment = -1
    else:
        before = -1
        while link >= 0 and overflow[link].segment != segment:
            before = link
            link = overflow[link].next
        if link < 0:
            return offset
        offset = overflow[link].offset
        if before < 0:
            rows[row].more = overflow[link].next
        else:
            overflow[before].next = overflow[link].next
    if link >= 0:
        give_link(overflow, link)
    rows[row].replicas -= 1
    if rows[row].state == READABLE and missing(rows, cold, row) > 0:
        context[TALLY + MISSING] += 1
    context[TALLY + BYTES] -= rows[row].size
    column(context, TENANT_USE, INT64)[2 * np.int64(cold[row].tenant)] -= rows[row].size
    if rows[row].flags & HARD_PIN:
        count_pinned(context, row, -rows[row].size)
    return offset
