"""Kernels that change objects: puts, their ends, removals, and the space that leaves with them.

Rows were found by `_kernels_table`; -1 stands for "no such object".
Layouts are those of `records.py`. `overflow` holds replicas after the first as chains that begin
at `ROW.more`; its entry 0 is the head of its free list (`next`) and counts the entries ever used
(`offset`). `alive[s]` is 1 while replicas on segment s may be read. `tally` and `tenant_use` are
running totals, because a sum over all rows would be a scan. All kernels are O(n + replicas).
"""

import numpy as np
from numba import njit

from mooncake_store.core._codes import (
    ALREADY_EXISTS,
    BUSY,
    BYTES,
    DOOMED,
    GENERATION,
    HARD_BYTES,
    HARD_PIN,
    HAS_LEASE,
    ILLEGAL_CLIENT,
    INVALID_KEY,
    INVALID_PARAMS,
    INVALID_WRITE,
    KERNEL,
    NAME_BYTES_MAX,
    NO_SPACE,
    NOT_FOUND,
    NOT_READY,
    OBJECTS,
    OK,
    READABLE,
    REMOVED,
    RETRY,
    SINK,
    SIZE_MAX,
    SOFT_PIN,
    SOFT_PINNED,
    STORED,
    SWAP,
    TASK,
    UNFINISHED,
    UPSERT,
    WRITING,
)
from mooncake_store.core._kernels_table import FREE_ROWS, find, find_or_insert


@njit(**KERNEL, inline="always")
def open_row(rows, cold, row, size, now, client, tenant, wanted, tally):
    """Make a fresh row that of an unfinished put."""
    tally[GENERATION] = (tally[GENERATION] + 1) & 0xFFFFFFFF
    tally[UNFINISHED] += 1
    rows[row].size = size
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
    ring[at].tier = 0


@njit(**KERNEL)
def claim(
    head,
    table_a,
    table_b,
    rows,
    cold,
    free_rows,
    overflow,
    alive,
    digests,
    sizes,
    lengths,
    now,
    discard_ns,
    who,
    wanted,
    tally,
    tenant_use,
    status,
    found,
    inserted,
):
    """Start puts: missing keys get a row in state WRITING, others an answer that says why not.

    who = (client, tenant). status[i] != 0 on entry means refused already. RETRY marks a row
    whose writer is late, or whose replicas are all gone. Returns (rows claimed, RETRY answers).
    """
    n = digests.shape[0]
    admit(sizes, lengths, status)
    sink = 0
    for i in range(min(n, head[FREE_ROWS])):  # the rows that will be taken, so that they are near
        row = free_rows[head[FREE_ROWS] - 1 - i]
        sink ^= rows[row].size ^ cold[row].name_ref
    tally[SINK] = sink
    find_or_insert(head, table_a, table_b, rows, free_rows, digests, status, found, inserted)
    tenant = who[1]
    claimed = 0
    retries = 0
    for i in range(n):
        if status[i] != OK:
            continue
        row = found[i]
        if row < 0:
            status[i] = NO_SPACE
        elif inserted[i]:
            open_row(rows, cold, row, sizes[i], now, who[0], tenant, wanted, tally)
            claimed += 1
        elif rows[row].state == READABLE:
            living = alive[rows[row].segment] != 0
            link = rows[row].more
            while not living and link >= 0:
                living = alive[overflow[link].segment] != 0 and overflow[link].state == READABLE
                link = overflow[link].next
            status[i] = RETRY
            if living:
                status[i] = ALREADY_EXISTS
            elif rows[row].flags & TASK:
                status[i] = BUSY  # its writer must be stopped first; the janitor does
        else:
            status[i] = RETRY if now - rows[row].lease_end >= discard_ns else ALREADY_EXISTS
        if status[i] == RETRY:
            retries += 1
    tenant_use[tenant, 1] += claimed
    return claimed, retries


@njit(**KERNEL)
def beside(rows, cold, old, new, sizes, now, who, wanted, tally, tenant_use):
    """Open a hidden second generation new[i] of each readable row old[i]."""
    for i in range(old.shape[0]):
        rows[new[i]].digest_lo = rows[old[i]].digest_lo
        rows[new[i]].digest_hi = rows[old[i]].digest_hi
        open_row(rows, cold, new[i], sizes[i], now, who[0], who[1], wanted, tally)
        rows[new[i]].flags |= UPSERT
        rows[old[i]].flags |= UPSERT
        cold[new[i]].twin = old[i] + 1
        cold[old[i]].twin = new[i] + 1
    tenant_use[who[1], 1] += old.shape[0]


@njit(**KERNEL)
def settle(rows, chosen, segment, offsets, tenant, tally, tenant_use, answers, replicas):
    """Give every chosen row, which has none, its one replica, and write the answers.

    False, with nothing done, if one of the offsets is -1.
    """
    n = chosen.shape[0]
    for i in range(n):
        if offsets[i] < 0:
            return False
    total = 0
    hard = 0
    for i in range(n):
        row = chosen[i]
        rows[row].segment = segment
        rows[row].offset = offsets[i]
        rows[row].replicas = 1
        total += rows[row].size
        if rows[row].flags & HARD_PIN:
            hard += rows[row].size
        answers[i].generation = rows[row].generation
        answers[i].status = OK
        answers[i].replicas = 1
        replicas[i].offset = offsets[i]
        replicas[i].segment = segment
        replicas[i].spare = 0
    tally[BYTES] += total
    tally[HARD_BYTES] += hard
    tenant_use[tenant, 0] += total
    return True


@njit(**KERNEL)
def attach(rows, overflow, chosen, segments, offsets, tenant, tally, tenant_use):
    """Give each chosen row one more replica (a chain keeps the order of attachment)."""
    for i in range(chosen.shape[0]):
        row = chosen[i]
        if rows[row].segment < 0:
            rows[row].segment = segments[i]
            rows[row].offset = offsets[i]
        else:
            link = overflow[0].next
            if link > 0:
                overflow[0].next = overflow[link].next
            else:
                overflow[0].offset += 1
                link = np.int32(overflow[0].offset)
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
        rows[row].replicas += 1
        tally[BYTES] += rows[row].size
        tenant_use[tenant, 0] += rows[row].size
        if rows[row].flags & HARD_PIN:
            tally[HARD_BYTES] += rows[row].size


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
        replicas[m].offset = rows[row].offset
        replicas[m].spare = 0
        m += 1
        link = rows[row].more
        while link >= 0:
            replicas[m].segment = overflow[link].segment
            replicas[m].offset = overflow[link].offset
            replicas[m].spare = 0
            m += 1
            link = overflow[link].next
    return m


@njit(**KERNEL)
def complete(
    head,
    table_a,
    table_b,
    found,
    rows,
    cold,
    digests,
    generations,
    checksums,
    now,
    client,
    pin_ends,
    tally,
    status,
    done,
    stream,
):
    """End puts; `done` lists the rows that became readable, and each is an event.

    Returns (their number, whether any needs special care): SWAP marks a completed second
    generation, which the caller swaps in, and a done row may have a flag.
    """
    find(head, table_a, table_b, rows, digests, found)
    ring, at, kept = stream
    count = 0
    special = False
    for i in range(found.shape[0]):
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
                    rows[twin].checksum = checksums[i]
                    rows[twin].flags |= DOOMED
                    status[i] = SWAP
                    special = True
                continue
        if cold[row].owner != client:
            status[i] = ILLEGAL_CLIENT
        elif rows[row].generation != generations[i]:
            status[i] = INVALID_WRITE
        elif rows[row].state == READABLE:
            status[i] = OK
        else:
            status[i] = OK
            rows[row].state = READABLE
            rows[row].checksum = checksums[i]
            rows[row].lease_end = 0
            rows[row].holders = 0
            tally[UNFINISHED] -= 1
            tally[OBJECTS] += 1
            if rows[row].flags != 0:
                special = True
            if rows[row].flags & SOFT_PIN:
                pin_ends[row] += now  # held the ttl until now
                tally[SOFT_PINNED] += 1
            if kept > 0:
                record(ring, (at + count) % kept, rows, cold, row, STORED)
            done[count] = row
            count += 1
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
def check_remove(rows, found, now, discard_ns, force, status, doomed):
    """Decide removals. Returns how many rows are doomed.

    A doomed row is flagged, so that a second occurrence in the batch is answered as missing.
    """
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
        elif rows[row].state == READABLE and rows[row].lease_end > now and force == 0:
            status[i] = HAS_LEASE
        else:
            status[i] = OK
            rows[row].flags |= DOOMED
            doomed[count] = row
            count += 1
    return count


@njit(**KERNEL)
def survey(rows, cold, tally, doomed):
    """Return (all flags of doomed rows or-ed, number of their replicas).

    Touches everything the kernels after it will need of these rows: loads that depend on nothing
    overlap their cache misses.
    """
    flags = 0
    replicas = 0
    sink = 0
    for i in range(doomed.shape[0]):
        flags |= rows[doomed[i]].flags
        replicas += rows[doomed[i]].replicas
        sink ^= cold[doomed[i]].name_ref
    tally[SINK] = sink
    return flags, replicas


@njit(**KERNEL)
def remove(
    head,
    table_a,
    table_b,
    found,
    rows,
    cold,
    digests,
    now,
    discard_ns,
    force,
    tally,
    status,
    doomed,
):
    """Find keys and decide their removal.

    Returns (rows doomed, all their flags or-ed, number of their replicas).
    """
    find(head, table_a, table_b, rows, digests, found)
    count = check_remove(rows, found, now, discard_ns, force, status, doomed)
    flags, replicas = survey(rows, cold, tally, doomed[:count])
    return count, flags, replicas


@njit(**KERNEL)
def extents(
    rows,
    cold,
    overflow,
    doomed,
    now,
    release_ns,
    writer_done,
    tally,
    tenant_use,
    out,
    stream,
):
    """List and unlink all extents of doomed rows.

    out[:, j] = (segment, offset, size, until): `until` is 0 when the space may be reused at
    once, else the end of the lease or of the writer's time. Returns (extents, bytes, whether any
    has to wait, whether all are on one segment, events).
    """
    ring, at, kept = stream
    waiting = False
    total, told, m = 0, 0, 0
    for i in range(doomed.shape[0]):
        row = doomed[i]
        until = 0
        if rows[row].state == WRITING:
            tally[UNFINISHED] -= 1
            if writer_done == 0:
                until = rows[row].lease_end + release_ns
        else:
            tally[OBJECTS] -= 1
            if kept > 0:
                record(ring, (at + told) % kept, rows, cold, row, REMOVED)
                told += 1
            until = rows[row].lease_end
            if rows[row].flags & SOFT_PIN:
                tally[SOFT_PINNED] -= 1
        if until <= now:
            until = 0
        else:
            waiting = True
        first = m
        size = rows[row].size
        if rows[row].segment >= 0:
            out[0, m] = rows[row].segment
            out[1, m] = rows[row].offset
            m += 1
        link = rows[row].more
        while link >= 0:
            out[0, m] = overflow[link].segment
            out[1, m] = overflow[link].offset
            m += 1
            after = overflow[link].next
            overflow[link].state = 0
            overflow[link].next = overflow[0].next
            overflow[0].next = link
            link = after
        for j in range(first, m):
            out[2, j] = size
            out[3, j] = until
        total += size * (m - first)
        tally[BYTES] -= size * (m - first)
        tenant_use[cold[row].tenant, 0] -= size * (m - first)
        tenant_use[cold[row].tenant, 1] -= 1
        if rows[row].flags & HARD_PIN:
            tally[HARD_BYTES] -= size * (m - first)
    together = True
    for j in range(1, m):
        together = together and out[0, j] == out[0, 0]
    return m, total, waiting, together, told


@njit(**KERNEL)
def drop_replica(rows, overflow, row, segment, tenant, tally, tenant_use):
    """Unlink the replica of `row` on `segment`; returns its offset or -1. O(replicas)."""
    offset = np.int64(-1)
    link = rows[row].more
    if rows[row].segment == segment:
        offset = rows[row].offset
        if link >= 0:
            rows[row].segment = overflow[link].segment
            rows[row].offset = overflow[link].offset
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
        overflow[link].state = 0
        overflow[link].next = overflow[0].next
        overflow[0].next = link
    rows[row].replicas -= 1
    tally[BYTES] -= rows[row].size
    tenant_use[tenant, 0] -= rows[row].size
    if rows[row].flags & HARD_PIN:
        tally[HARD_BYTES] -= rows[row].size
    return offset


def warmup() -> None:
    """Compile every kernel of this file, by running a small shard through every operation."""
    from mooncake_store.core._exercise import exercise

    exercise()
