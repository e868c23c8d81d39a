"""Kernels on object rows: what a batch of row numbers becomes under each operation.

Rows were found by `_kernels_table`; -1 stands for "no such object". Layouts are those of
`records.py`; `overflow` holds replicas after the first as chains that begin at `ROW.more`, its
entry 0 being the head of its free list (`next`) and the count of entries ever used (`offset`).
`alive[s]` is 1 while replicas on segment s may be read. `tally` and `tenant_use` are running
totals (constants below), kept here because a sum over all rows would be a scan.
All kernels are O(n + replicas) for n rows.
"""

import numpy as np
from numba import njit

WRITING, READABLE = 1, 2
SOFT_PIN, HARD_PIN, GROUPED, TASK, UPSERT, DOOMED = 1, 2, 4, 8, 16, 128
OK, NO_SPACE, ILLEGAL_CLIENT, INVALID_WRITE = 0, -200, -601, -700
NOT_READY, NOT_FOUND, ALREADY_EXISTS, HAS_LEASE, LEASE_EXPIRED, BUSY = (
    -703,
    -704,
    -705,
    -706,
    -707,
    -708,
)
RETRY, SWAP = 1, 2  # internal: clear the row away and ask again; a second generation is complete
HOLDERS_MAX = 255  # saturated: nobody can release, the lease runs to its end

# tally
OBJECTS, UNFINISHED, BYTES, SOFT_PINNED, HARD_BYTES, GENERATION, HOT = 0, 1, 2, 3, 4, 5, 6
TALLY_WORDS = 8
HOT_COUNT_BITS = 20


@njit(cache=True, nogil=True)
def claim(rows, overflow, alive, found, inserted, sizes, times, tenant, tally, status):
    """Start puts: new rows become WRITING, existing ones answer why not.

    times = (now, discard_ns). status[i] != 0 on entry means refused already; such a row is only
    passed over. RETRY marks a row whose writer is late, or whose replicas are all gone.
    """
    now, discard_ns = times[0], times[1]
    for i in range(found.shape[0]):
        if status[i] != OK:
            continue
        row = found[i]
        if row < 0:
            status[i] = NO_SPACE
        elif inserted[i]:
            tally[GENERATION] = (tally[GENERATION] + 1) & 0xFFFFFFFF
            tally[UNFINISHED] += 1
            rows[row].size = sizes[i]
            rows[row].lease_end = now
            rows[row].generation = tally[GENERATION]
            rows[row].more = -1
            rows[row].segment = -1
            rows[row].tenant = tenant
            rows[row].state = WRITING
        elif rows[row].state == READABLE:
            living = alive[rows[row].segment]
            link = rows[row].more
            while not living and link >= 0:
                living = alive[overflow[link].segment] and overflow[link].state == READABLE
                link = overflow[link].next
            status[i] = ALREADY_EXISTS if living else RETRY
        else:
            status[i] = RETRY if now - rows[row].lease_end >= discard_ns else ALREADY_EXISTS


@njit(cache=True, nogil=True)
def attach(rows, overflow, chosen, segments, offsets, tally, tenant_use):
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
        tenant_use[rows[row].tenant, 0] += rows[row].size
        if rows[row].flags & HARD_PIN:
            tally[HARD_BYTES] += rows[row].size


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def complete(rows, owners, twins, found, generations, checksums, who, pin_ends, tally, status, done):
    """End puts; `done` lists the rows that became readable. Returns their number.

    who = (now, client). SWAP marks a completed second generation: the caller swaps it in.
    """
    now, client = who[0], who[1]
    count = 0
    for i in range(found.shape[0]):
        row = found[i]
        if row < 0:
            status[i] = NOT_FOUND
            continue
        if rows[row].state == READABLE and rows[row].flags & UPSERT:
            twin = twins[row] - 1
            if rows[twin].generation == generations[i]:
                if owners[twin] == client:
                    rows[twin].checksum = checksums[i]
                    status[i] = SWAP
                else:
                    status[i] = ILLEGAL_CLIENT
                continue
        if owners[row] != client:
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
            if rows[row].flags & SOFT_PIN:
                pin_ends[row] += now  # held the ttl until now
                tally[SOFT_PINNED] += 1
            done[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def grant(rows, overflow, alive, lease_until, found, times, hits, tally, answers, replicas, touched):
    """Answer gets: where the replicas are, with a lease if asked for.

    times = (now, ttl_ns, stop_at_miss, hot_window_ns, hot_hits). `touched` lists the rows read;
    rows that just became hot are listed from its end backwards, tally[HOT] of them. Returns
    (replicas written, rows touched).
    """
    now, ttl, stop_at_miss = times[0], times[1], times[2]
    window = 0
    if times[4] > 0:
        window = ((now // times[3]) & 0xFFF) << HOT_COUNT_BITS
    m = 0
    count = 0
    hot = 0
    missed = False
    n = found.shape[0]
    for i in range(n):
        row = found[i]
        answers[i].size = 0
        answers[i].checksum = 0
        answers[i].lease_ns = 0
        answers[i].generation = 0
        answers[i].replicas = 0
        if row < 0 or missed:
            answers[i].status = NOT_FOUND
            missed = missed or stop_at_miss != 0
            continue
        if rows[row].state != READABLE:
            answers[i].status = NOT_READY
            missed = stop_at_miss != 0
            continue
        first = m
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
        if m == first:
            answers[i].status = NOT_FOUND
            missed = stop_at_miss != 0
            continue
        answers[i].status = OK
        answers[i].size = rows[row].size
        answers[i].checksum = rows[row].checksum
        answers[i].generation = rows[row].generation
        answers[i].replicas = m - first
        if ttl > 0:
            if rows[row].lease_end <= now:
                rows[row].holders = 1
            elif rows[row].holders < HOLDERS_MAX:
                rows[row].holders += 1
            if now + ttl > rows[row].lease_end:
                rows[row].lease_end = now + ttl
            answers[i].lease_ns = rows[row].lease_end - now
            for j in range(first, m):
                segment = replicas[j].segment
                if rows[row].lease_end > lease_until[segment]:
                    lease_until[segment] = rows[row].lease_end
        if times[4] > 0:
            seen = np.int64(hits[row])
            if (seen >> HOT_COUNT_BITS) != (window >> HOT_COUNT_BITS):
                seen = window
            if seen & 0xFFFFF < 0xFFFFF:
                seen += 1
            hits[row] = seen
            if (seen & 0xFFFFF) == times[4]:
                hot += 1
                touched[touched.shape[0] - hot] = row
        touched[count] = row
        count += 1
    tally[HOT] = hot
    return m, count


@njit(cache=True, nogil=True)
def readable(rows, overflow, alive, found, out):
    """out[i] = whether the object can be read now."""
    for i in range(found.shape[0]):
        row = found[i]
        out[i] = False
        if row >= 0 and rows[row].state == READABLE:
            out[i] = alive[rows[row].segment] != 0
            link = rows[row].more
            while not out[i] and link >= 0:
                out[i] = overflow[link].state == READABLE and alive[overflow[link].segment] != 0
                link = overflow[link].next


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
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


@njit(cache=True, nogil=True)
def check_remove(rows, found, times, status, doomed):
    """Decide removals; times = (now, discard_ns, force). Returns how many rows are doomed.

    A doomed row is flagged, so that a second occurrence in the batch is answered as missing.
    """
    now, discard_ns, force = times[0], times[1], times[2] != 0
    count = 0
    for i in range(found.shape[0]):
        row = found[i]
        if row < 0 or rows[row].flags & DOOMED:
            status[i] = NOT_FOUND
        elif rows[row].flags & TASK:
            status[i] = BUSY
        elif rows[row].state == WRITING and now - rows[row].lease_end < discard_ns and not force:
            status[i] = NOT_READY
        elif rows[row].flags & UPSERT and not force:
            status[i] = NOT_READY
        elif rows[row].state == READABLE and rows[row].lease_end > now and not force:
            status[i] = HAS_LEASE
        else:
            status[i] = OK
            rows[row].flags |= DOOMED
            doomed[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def revoke(rows, owners, twins, found, generations, client, status, doomed):
    """Decide revocations; `doomed` are the rows to give up. Returns their number."""
    count = 0
    for i in range(found.shape[0]):
        row = found[i]
        if row < 0 or rows[row].flags & DOOMED:
            status[i] = NOT_FOUND
            continue
        if rows[row].state == READABLE and rows[row].flags & UPSERT:
            twin = twins[row] - 1
            if rows[twin].generation == generations[i]:
                row = twin
        if owners[row] != client:
            status[i] = ILLEGAL_CLIENT
        elif rows[row].state == READABLE or rows[row].generation != generations[i]:
            status[i] = INVALID_WRITE
        else:
            status[i] = OK
            rows[row].flags |= DOOMED
            doomed[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def extents(rows, overflow, doomed, times, tally, tenant_use, out):
    """List and unlink all extents of doomed rows; returns their number.

    times = (now, release_ns, writer_done). out[j] = (segment, offset, size, until): `until` is 0
    when the space may be reused at once, else the end of the lease or of the writer's time.
    """
    now, release_ns, writer_done = times[0], times[1], times[2] != 0
    m = 0
    for i in range(doomed.shape[0]):
        row = doomed[i]
        until = 0
        if rows[row].state == WRITING:
            tally[UNFINISHED] -= 1
            if not writer_done:
                until = rows[row].lease_end + release_ns
        else:
            tally[OBJECTS] -= 1
            until = rows[row].lease_end
            if rows[row].flags & SOFT_PIN:
                tally[SOFT_PINNED] -= 1
        if until <= now:
            until = 0
        first = m
        size = rows[row].size
        if rows[row].segment >= 0:
            out[m, 0] = rows[row].segment
            out[m, 1] = rows[row].offset
            m += 1
        link = rows[row].more
        while link >= 0:
            out[m, 0] = overflow[link].segment
            out[m, 1] = overflow[link].offset
            m += 1
            after = overflow[link].next
            overflow[link].state = 0
            overflow[link].next = overflow[0].next
            overflow[0].next = link
            link = after
        for j in range(first, m):
            out[j, 2] = size
            out[j, 3] = until
        tally[BYTES] -= size * (m - first)
        tenant_use[rows[row].tenant, 0] -= size * (m - first)
        tenant_use[rows[row].tenant, 1] -= 1
        if rows[row].flags & HARD_PIN:
            tally[HARD_BYTES] -= size * (m - first)
    return m


@njit(cache=True, nogil=True)
def eligible(rows, ids, now, out):
    """out[i] = whether row ids[i] may be evicted now, groups left aside."""
    for i in range(ids.shape[0]):
        row = ids[i]
        out[i] = (
            rows[row].state == READABLE
            and rows[row].lease_end <= now
            and not rows[row].flags & (HARD_PIN | TASK | UPSERT)
        )


@njit(cache=True, nogil=True)
def on_segments(rows, overflow, wanted, ids, out):
    """out[i] = whether row ids[i] has a replica on a segment s with wanted[s]."""
    for i in range(ids.shape[0]):
        row = ids[i]
        out[i] = rows[row].segment >= 0 and wanted[rows[row].segment] != 0
        link = rows[row].more
        while not out[i] and link >= 0:
            out[i] = wanted[overflow[link].segment] != 0
            link = overflow[link].next


@njit(cache=True, nogil=True)
def row_bytes(rows, ids, out):
    """out[i] = bytes that row ids[i] occupies in all its replicas."""
    for i in range(ids.shape[0]):
        out[i] = rows[ids[i]].size * rows[ids[i]].replicas


@njit(cache=True, nogil=True)
def sweep(rows, overflow, owners, alive, closed, span, out):
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
            wanted = rows[row].lease_end <= span[2] or closed[owners[row]] != 0
        wanted = wanted or (rows[row].segment >= 0 and not alive[rows[row].segment])
        link = rows[row].more
        while not wanted and link >= 0:
            wanted = not alive[overflow[link].segment]
            link = overflow[link].next
        if wanted:
            out[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def drop_replica(rows, overflow, row, segment, tally, tenant_use):
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
    tenant_use[rows[row].tenant, 0] -= rows[row].size
    if rows[row].flags & HARD_PIN:
        tally[HARD_BYTES] -= rows[row].size
    return offset


@njit(cache=True, nogil=True)
def listing(rows, overflow, alive, name_refs, span, out):
    """Readable, named rows of tenant span[2] among rows span[0]..span[1]; returns how many."""
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state == READABLE and rows[row].tenant == span[2] and name_refs[row] != 0:
            living = alive[rows[row].segment] != 0
            link = rows[row].more
            while not living and link >= 0:
                living = overflow[link].state == READABLE and alive[overflow[link].segment] != 0
                link = overflow[link].next
            if living:
                out[count] = row
                count += 1
    return count


@njit(cache=True, nogil=True)
def of_tenant(rows, span, out):
    """Rows in use of tenant span[2] among rows span[0]..span[1]; returns how many."""
    count = 0
    for row in range(span[0], span[1]):
        if rows[row].state != 0 and rows[row].tenant == span[2]:
            out[count] = row
            count += 1
    return count


@njit(cache=True, nogil=True)
def record(ring, rows, chosen, where):
    """Write one event per chosen row into a ring; where = (first place, length, kind)."""
    for i in range(chosen.shape[0]):
        at = (where[0] + i) % where[1]
        row = chosen[i]
        ring[at].digest_lo = rows[row].digest_lo
        ring[at].digest_hi = rows[row].digest_hi
        ring[at].kind = where[2]
        ring[at].tenant = rows[row].tenant
        ring[at].tier = 0


def warmup() -> None:
    """Compile every kernel of this file, by running a small shard through every operation."""
    from mooncake_store.core._exercise import exercise

    exercise()
