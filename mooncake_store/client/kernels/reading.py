"""Compiled loops of the client: the lease table, the choice of replicas, the verdict on a read.

Columns of one operation are the rows of one int64 matrix `cols[COLUMNS, n]`, one column per key,
so that a kernel call takes one array instead of ten. The lease table is set-associative: a set is
chosen by the low word of the digest and has a line of WAYS tags, then WAYS rows of eight words, a
cache line each: one line says whether a key is there, and a second one what is known of it. A tag
is the upper half of the low word << 32 | the end of the lease in steps of 1 ms, 0 for no entry; a
new entry takes the place of the lease that ends first. Words of a row: digest low, digest high,
end of the lease, size, checksum, generation | times granted << 32, segment, offset.

Kernels of batches first ask for all the lines they will need, so that their cache misses overlap.

`targets[2, s]` says how to reach segment s: its cost (-1: unknown) and until when it rests after a
failure. All times are nanoseconds of the monotonic clock. Callers hold the lock of the table.
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.kernels.lines import LINE, ask_for, first_equal

WAYS = LINE
WORDS = 8
SET_WORDS = WAYS + WAYS * WORDS

# Rows of `cols`.
STATUS = 0  # 0 or a negative code; while an operation runs also the marks below
SIZE = 1
CHECKSUM = 2
UNTIL = 3  # end of the lease
GENERATION = 4
SEGMENT = 5  # of the chosen replica, or -1
OFFSET = 6
FIRST = 7  # its first replica in the answers, or -1: it came from the lease table
REPLICAS = 8
TRIED = 9  # of a read; bit r: replica r was tried
COLUMNS = 10

# Marks in STATUS.
MISSING = 1  # to be asked for
FAILED = 2  # another replica must be tried
EXPIRED = 3  # filled, but the lease ended: its generation must be asked for
FOUND = 4  # answered, not yet filled

_LOWER = 0xFFFFFFFF
_UPPER = -1 << 32
_SIGN = 1 << 31
_STEP_BITS = 20
_RESTING = 1 << 20
_COUNT_MAX = 255  # leases counted in an entry; further ones run out by themselves
_CHECKSUM_MISMATCH = -801  # ChecksumMismatchError.code


@njit(cache=True, nogil=True)
def _set_of(table, low):
    """Where the set of a digest begins. O(1)."""
    return (low & (table.shape[0] // SET_WORDS - 1)) * SET_WORDS


@njit(cache=True, nogil=True)
def _row_of(first, way):
    """Where the row of a way begins. O(1)."""
    return first + WAYS + way * WORDS


@njit(cache=True, nogil=True)
def _set_tag(table, row, low, until):
    """Let the tag of a row say what it now is; an end of 0 makes it none. O(1)."""
    first = _set_of(table, low)
    tag = (low & _UPPER) | max((until >> _STEP_BITS) & _LOWER, 1)
    table[first + (row - first - WAYS) // WORDS] = tag if until else 0


@njit(cache=True, nogil=True)
def _find(table, low, high):
    """Where the row of a digest begins, or -1. O(WAYS)."""
    first = _set_of(table, low)
    upper = (low >> 32) & _LOWER
    for way in range(first_equal(table, first, upper, 32), WAYS):
        row = _row_of(first, way)
        if table[row] == low and table[row + 1] == high and table[first + way] != 0:
            return row
    return -1


@njit(cache=True, nogil=True)
def _ask_for_row(table, low):
    """Ask for the row that a digest probably has; its tags are there. O(1)."""
    first = _set_of(table, low)
    way = first_equal(table, first, (low >> 32) & _LOWER, 32)
    if way < WAYS:
        ask_for(table, _row_of(first, way))


@njit(cache=True, nogil=True)
def lookup(table, digests, now, cols):
    """Fill the columns of keys under a running lease; the others get MISSING. Returns hits. O(n).

    digests: int64[n, 2].
    """
    hits = 0
    for i in range(digests.shape[0]):
        ask_for(table, _set_of(table, digests[i, 0]))
    for i in range(digests.shape[0]):
        _ask_for_row(table, digests[i, 0])
    for i in range(digests.shape[0]):
        cols[TRIED, i] = 0
        cols[FIRST, i] = -1
        if cols[STATUS, i] < 0:
            continue
        row = _find(table, digests[i, 0], digests[i, 1])
        if row < 0 or table[row + 2] <= now or table[row + 6] < 0:
            cols[STATUS, i] = MISSING
            continue
        cols[STATUS, i] = FOUND
        cols[UNTIL, i] = table[row + 2]
        cols[SIZE, i] = table[row + 3]
        cols[CHECKSUM, i] = table[row + 4]
        cols[GENERATION, i] = table[row + 5] & _LOWER
        cols[SEGMENT, i] = table[row + 6]
        cols[OFFSET, i] = table[row + 7]
        cols[REPLICAS, i] = 1
        hits += 1
    return hits


@njit(cache=True, nogil=True)
def lookup_one(table, low, high, now, taken):
    """Find the entry of one key whose lease runs beyond `now`. O(WAYS).

    taken: how many of the leases that the entry counts are taken out of it, 0 or 1; an entry that
    counts fewer is not found. Returns (end of the lease or 0 for none, size, checksum, generation,
    segment, offset).
    """
    row = _find(table, low, high)
    if row < 0 or table[row + 2] <= now or table[row + 6] < 0 or table[row + 5] >> 32 < taken:
        return np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    table[row + 5] -= taken << 32
    generation = table[row + 5] & _LOWER
    return (
        table[row + 2],
        table[row + 3],
        table[row + 4],
        generation,
        table[row + 6],
        table[row + 7],
    )


@njit(cache=True, nogil=True)
def take_back(table, low, high, generation, now):
    """Count a lease again that `lookup_one` took out; False if its entry is gone. O(WAYS)."""
    row = _find(table, low, high)
    if row < 0 or table[row + 2] <= now or (table[row + 5] & _LOWER) != generation:
        return False
    table[row + 5] = generation | (min((table[row + 5] >> 32) + 1, _COUNT_MAX) << 32)
    return True


@njit(cache=True, nogil=True)
def _victim(table, first, now):
    """The way of a set that is empty, or else has the lease that ends first. O(WAYS)."""
    best, least = 0, np.int64(1 << 62)
    for way in range(WAYS):
        # As a signed distance from now, so that it does not matter where the steps wrap around.
        left = (((table[first + way] - (now >> _STEP_BITS)) & _LOWER) ^ _SIGN) - _SIGN
        if table[first + way] == 0:
            left = -_SIGN - 1
        if left < least:
            best, least = way, left
    return best


@njit(cache=True, nogil=True)
def _enter(table, low, high, now, until, size, checksum, generation, segment, offset):
    """Enter one lease just granted, and count it. O(WAYS)."""
    first = _set_of(table, low)
    row = _find(table, low, high)
    granted = np.int64(1)
    if row < 0:
        row = _row_of(first, _victim(table, first, now))
    elif (table[row + 5] & _LOWER) == generation and table[row + 2] > now:
        granted += table[row + 5] >> 32
        until = max(until, table[row + 2])  # all of them last as long as the longest
    _set_tag(table, row, low, until)
    table[row], table[row + 1] = low, high
    table[row + 2], table[row + 3] = until, size
    table[row + 4] = checksum
    table[row + 5] = generation | (min(granted, _COUNT_MAX) << 32)
    table[row + 6], table[row + 7] = segment, offset


@njit(cache=True, nogil=True)
def _ask_for_places(table, digests, index, now):
    """Ask for what `_enter` needs for the keys in `index`: their rows, or those they get. O(n)."""
    for j in range(index.shape[0]):
        ask_for(table, _set_of(table, digests[index[j], 0]))
    for j in range(index.shape[0]):
        low = digests[index[j], 0]
        first = _set_of(table, low)
        way = first_equal(table, first, (low >> 32) & _LOWER, 32)
        ask_for(table, _row_of(first, way if way < WAYS else _victim(table, first, now)))


@njit(cache=True, nogil=True)
def remember(table, digests, index, now, cols):
    """Enter leases just granted, and count them; return when the last of them ends. O(n * WAYS).

    index: int64, the keys concerned; the granted ones among them are FOUND.
    """
    latest = np.int64(0)
    _ask_for_places(table, digests, index, now)
    for j in range(index.shape[0]):
        i = index[j]
        if cols[STATUS, i] != FOUND or cols[UNTIL, i] <= now:
            continue
        _enter(
            table,
            digests[i, 0],
            digests[i, 1],
            now,
            cols[UNTIL, i],
            cols[SIZE, i],
            cols[CHECKSUM, i],
            cols[GENERATION, i],
            cols[SEGMENT, i],
            cols[OFFSET, i],
        )
        latest = max(latest, cols[UNTIL, i])
    return latest


@njit(cache=True, nogil=True)
def forget(table, digests, index, now, generations, counts):
    """Drop entries: generations and counts of the leases they held, count 0 for none. O(n).

    Returns the sum of the counts.
    """
    total = 0
    for j in range(index.shape[0]):
        ask_for(table, _set_of(table, digests[index[j], 0]))
    for j in range(index.shape[0]):
        _ask_for_row(table, digests[index[j], 0])
    for j in range(index.shape[0]):
        generations[j] = 0
        counts[j] = 0
        row = _find(table, digests[index[j], 0], digests[index[j], 1])
        if row < 0:
            continue
        if table[row + 2] > now:
            generations[j] = table[row + 5] & _LOWER
            counts[j] = table[row + 5] >> 32
            total += counts[j]
        _set_tag(table, row, table[row], 0)
        table[row : row + WORDS] = 0
    return total


@njit(cache=True, nogil=True)
def take(index, rows, replicas, base, sent, now, targets, cols):
    """Read a get's answer into the columns. O(n).

    Returns how many keys are found, and how many replicas are on unknown segments, and unsure.

    rows: int64[m, 4] and replicas: int64[r, 2], see `core.records`; row j answers key index[j].
    base: where these replicas start among all answers. sent: when the request left, from which
    the lease is counted, because the master counted from later.
    """
    at = 0
    found = 0
    unknown = 0
    unsure = 0
    for j in range(index.shape[0]):
        i = index[j]
        last = rows[j, 3]
        status = np.int64(np.int16((last >> 32) & 0xFFFF))
        count = (last >> 48) & 0xFFFF
        cols[SIZE, i] = rows[j, 0]
        cols[CHECKSUM, i] = rows[j, 1]
        cols[UNTIL, i] = sent + rows[j, 2]
        cols[GENERATION, i] = last & _LOWER
        cols[SEGMENT, i] = -1
        cols[FIRST, i] = base + at
        cols[REPLICAS, i] = count
        cols[TRIED, i] = 0
        cols[STATUS, i] = status
        if status == 0:
            cols[STATUS, i] = FOUND
            found += 1
        for r in range(at, min(at + count, replicas.shape[0])):
            segment = replicas[r, 1] & _LOWER
            unsure += replicas[r, 1] >> 32 != 0
            if segment >= targets.shape[1] or (
                targets[0, segment] < 0 and targets[1, segment] <= now
            ):
                unknown += 1
        at += count
    return found, unknown, unsure


@njit(cache=True, nogil=True)
def _cheapest(replicas, first, count, tried, turn, targets, now):
    """The replica that costs least among those not tried, or -1; equal ones by turn. O(count)."""
    best, best_cost = np.int64(-1), np.int64(1 << 62)
    for step in range(count):
        r = (step + turn) % count
        segment = replicas[first + r, 1] & _LOWER
        if tried >> r & 1 or segment >= targets.shape[1] or targets[0, segment] < 0:
            continue
        cost = targets[0, segment]
        if targets[1, segment] > now:
            cost += _RESTING
        if cost < best_cost:
            best, best_cost = np.int64(r), cost
    return best


@njit(cache=True, nogil=True)
def take_single(table, low, high, size, checksum, left, last, offset, segment, sent, now, targets):
    """Take the answer to a get of one key with this one replica, and remember its lease. O(1).

    size, checksum, left, last: the words of its row; offset, segment: those of its replica, see
    `core.records`. Returns what `lookup_one` does. The end is 0, and nothing is remembered, if
    anything is unusual: no lease, an unsure replica, a segment that is not known or rests.
    """
    sure = segment >> 32 == 0
    segment &= 0xFFFFFFFF
    until = sent + left
    known = segment < targets.shape[1] and targets[0, segment] >= 0 and targets[1, segment] <= now
    if (last >> 32) & 0xFFFF != 0 or until <= now or not (known and sure):
        return np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    generation = last & _LOWER
    _enter(table, low, high, now, until, size, checksum, generation, segment, offset)
    return until, size, checksum, generation, segment, offset


@njit(cache=True, nogil=True)
def take_one(table, low, high, rows, replicas, sent, now, targets, turn):
    """Choose a replica in the answer to a get of one key, and do as `take_single`. O(replicas).

    rows: int64[1, 4], replicas: int64[r, 2].
    """
    none = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    if rows.shape[0] != 1:
        return none
    last = rows[0, 3]
    count = min((last >> 48) & 0xFFFF, 63)
    if not 0 < count <= replicas.shape[0]:
        return none
    best = _cheapest(replicas, 0, count, 0, turn, targets, now)
    if best < 0:
        return none
    size, checksum, left = rows[0, 0], rows[0, 1], rows[0, 2]
    offset, segment = replicas[best, 0], replicas[best, 1]
    return take_single(
        table, low, high, size, checksum, left, last, offset, segment, sent, now, targets
    )


@njit(cache=True, nogil=True)
def choose(index, replicas, targets, now, turn, cols):
    """Give each FOUND or FAILED key its cheapest replica that was not tried. O(replicas).

    Equal ones take turns, key by key. A key without one left keeps SEGMENT -1. Returns how many
    got a replica, and the least and greatest segment among them.
    """
    chosen, least, most = 0, np.int64(1 << 62), np.int64(-1)
    for j in range(index.shape[0]):
        i = index[j]
        if cols[STATUS, i] != FOUND and cols[STATUS, i] != FAILED:
            continue
        first, count = cols[FIRST, i], min(cols[REPLICAS, i], 63)
        cols[SEGMENT, i] = -1
        if first < 0 or count == 0 or first + count > replicas.shape[0]:
            continue
        best = _cheapest(replicas, first, count, cols[TRIED, i], turn + j, targets, now)
        if best < 0:
            continue
        cols[TRIED, i] |= np.int64(1) << best
        cols[SEGMENT, i] = replicas[first + best, 1] & _LOWER
        cols[OFFSET, i] = replicas[first + best, 0]
        cols[STATUS, i] = FOUND
        chosen += 1
        least, most = min(least, cols[SEGMENT, i]), max(most, cols[SEGMENT, i])
    return chosen, least, most


@njit(cache=True, nogil=True)
def line_up(lengths, before, object_s, byte_s, left, ready):
    """Say when each of some objects would be there, read one after the other. O(n).

    before: seconds until the first one begins. What would come after `left` seconds is not read,
    so those behind it do not wait for it. Returns when the last one that is read is there.
    """
    for j in range(lengths.shape[0]):
        ready[j] = before + object_s + lengths[j] * byte_s
        if ready[j] <= left:
            before = ready[j]
    return before


@njit(cache=True, nogil=True)
def verdict(status, same, until, now):
    """The one rule of what a transfer is worth: (mark for STATUS, status). O(1).

    status: 0 or what the transfer failed with. same: whether the checksum is the one wanted, or
    was not asked for. until: end of the lease.
    """
    if status == 0 and not same:
        status = np.int64(_CHECKSUM_MISMATCH)
    if status != 0:
        return np.int64(FAILED), status
    if until <= now:
        return np.int64(EXPIRED), status
    return np.int64(0), status


@njit(cache=True, nogil=True)
def judge(index, statuses, checksums, now, cols):
    """Write what each transfer was worth to STATUS. Returns how many (failed, expired). O(n).

    statuses: int32, what each transfer ended with; a checksum that differs is written there.
    checksums: int64 as computed, or empty if none were asked for.
    """
    failed = 0
    expired = 0
    for j in range(index.shape[0]):
        i = index[j]
        same = checksums.shape[0] == 0 or checksums[j] == cols[CHECKSUM, i]
        mark, status = verdict(np.int64(statuses[j]), same, cols[UNTIL, i], now)
        cols[STATUS, i] = mark
        statuses[j] = status
        failed += mark == FAILED
        expired += mark == EXPIRED
    return failed, expired


@njit(cache=True, nogil=True)
def take_put(index, rows, base, cols):
    """Read the answer to a put_start. Returns (accepted, most replicas of a key). O(n).

    rows: int64[m], see `PUT_ROW`; row j answers key index[j].
    """
    at = 0
    accepted = 0
    most = 0
    for j in range(index.shape[0]):
        i = index[j]
        count = (rows[j] >> 48) & 0xFFFF
        status = np.int64(np.int16((rows[j] >> 32) & 0xFFFF))
        cols[STATUS, i] = status
        cols[GENERATION, i] = rows[j] & _LOWER
        cols[FIRST, i] = base + at
        cols[REPLICAS, i] = count
        if status == 0:
            cols[STATUS, i] = FOUND
            accepted += 1
            most = max(most, count)
        at += count
    return accepted, most


@njit(cache=True, nogil=True)
def nth_replica(index, replicas, nth, targets, cols):
    """Set SEGMENT and OFFSET of FOUND keys to their nth replica, -1 where there is none. O(n).

    Returns (how many have one, least and greatest segment, how many are on unknown segments).
    """
    count, unknown = 0, 0
    least, most = np.int64(1 << 62), np.int64(-1)
    for j in range(index.shape[0]):
        i = index[j]
        cols[SEGMENT, i] = -1
        at = cols[FIRST, i] + nth
        if cols[STATUS, i] != FOUND or nth >= cols[REPLICAS, i] or at >= replicas.shape[0]:
            continue
        segment = replicas[at, 1] & _LOWER
        cols[SEGMENT, i] = segment
        cols[OFFSET, i] = replicas[at, 0]
        count += 1
        least, most = min(least, segment), max(most, segment)
        if segment >= targets.shape[1] or targets[0, segment] < 0:
            unknown += 1
    return count, least, most, unknown


@njit(cache=True, nogil=True)
def by_shard(digests, index, slots, shards, ends, out):
    """Put positions in order of the shard that serves them, keeping the order within each. O(n).

    Says what `ids.shard_of` says. ends[s] = end of shard s in `out`.
    """
    ends[:] = 0
    for i in range(index.shape[0]):
        ends[_shard(digests[index[i], 1], slots, shards)] += 1
    before = 0
    for s in range(shards):
        ends[s], before = before, before + ends[s]
    for i in range(index.shape[0]):
        s = _shard(digests[index[i], 1], slots, shards)
        out[ends[s]] = index[i]
        ends[s] += 1


@njit(cache=True, nogil=True)
def _shard(high, slots, shards):
    """The shard of a digest by its high word. O(1)."""
    return ((((high >> 32) & _LOWER) * slots) >> 32) * shards // slots


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    table = np.zeros(SET_WORDS, np.int64)
    digests = np.ones((1, 2), np.int64)
    index = np.zeros(1, np.int64)
    targets = np.zeros((2, 1), np.int64)
    cols = np.zeros((COLUMNS, 1), np.int64)
    one = np.zeros(1, np.int64)
    rows = np.frombuffer(bytes(32), np.int64).reshape(1, 4)
    replicas = np.frombuffer(bytes(16), np.int64).reshape(1, 2)
    lookup(table, digests, 1, cols)
    take(index, rows, replicas, 0, 1, 1, targets, cols)
    choose(index, replicas, targets, 1, 0, cols)
    remember(table, digests, index, 1, cols)
    lookup_one(table, 1, 1, 1, 1)
    take_back(table, 1, 1, 1, 1)
    take_one(table, 1, 1, rows, replicas, 1, 1, targets, 0)
    take_single(table, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, targets)
    line_up(one, 0.0, 0.0, 0.0, 0.0, np.zeros(1))
    verdict(0, True, 1, 1)
    forget(table, digests, index, 1, one, one.copy())
    by_shard(digests, index, 2, 1, one, one.copy())
    judge(index, np.zeros(1, np.int32), one, 1, cols)
    take_put(index, rows[0, :1], 0, cols)
    nth_replica(index, replicas, 0, targets, cols)
