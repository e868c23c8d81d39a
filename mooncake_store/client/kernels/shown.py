"""Compiled loops of a client that shows rights: the rights in its lease table, and of replicas.

Beside the lease table of `reading.py` stands a second one, RIGHT_WORDS a row of it: tag, stamp,
until when the right holds, in nanoseconds of the monotonic clock, and the tag of the content. A
lease may be prolonged, a right is not, so what is planned from the table needs both. What needs no
right has a stamp of 0, and it holds for ever.

Clients of which nobody asks rights have none of this. Callers hold the lock of the table. O(n).
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.client.kernels.reading import (
    COLUMNS,
    FIRST,
    FOUND,
    MISSING,
    OFFSET,
    REPLICAS,
    SEGMENT,
    SET_WORDS,
    STATUS,
    UNTIL,
    WAYS,
    WORDS,
    _find,
    lookup,
    lookup_one,
    remember,
    take_one,
    take_single,
)

RIGHT_WORDS = 4
EARLIER_NS = 250_000_000
"""So much before its lease a right ends."""
_LOWER = 0xFFFFFFFF
_FOR_EVER = np.int64(1 << 62)


@njit(cache=True, nogil=True)
def _right_of(row):
    """Where the right of a row of the lease table stands. O(1)."""
    first = row // SET_WORDS
    return first * WAYS + (row - first * SET_WORDS - WAYS) // WORDS


@njit(cache=True, nogil=True)
def _enter(table, rights, low, high, tag, stamp, until, content):
    """Enter the right that came with a lease, if that is in the table. O(WAYS)."""
    row = _find(table, low, high)
    if row < 0:
        return
    at = _right_of(row)
    rights[at, 0], rights[at, 1] = tag, stamp
    rights[at, 2] = until - EARLIER_NS if stamp != 0 else _FOR_EVER
    rights[at, 3] = content


@njit(cache=True, nogil=True)
def lookup_shown(table, rights, digests, now, cols, chosen, contents):
    """Do as `lookup`, with the right of each key in `chosen`; without one it is MISSING. O(n).

    contents[i] = the tag of its content.
    """
    hits = lookup(table, digests, now, cols)
    for i in range(digests.shape[0]):
        if cols[STATUS, i] != FOUND:
            continue
        at = _right_of(_find(table, digests[i, 0], digests[i, 1]))
        if rights[at, 2] <= now:
            cols[STATUS, i] = MISSING
            hits -= 1
            continue
        chosen[i, 0], chosen[i, 1] = rights[at, 0], rights[at, 1]
        contents[i] = rights[at, 3]
    return hits


@njit(cache=True, nogil=True)
def lookup_one_shown(table, rights, low, high, now):
    """Do as `lookup_one`, taking none; its words, tag, stamp, tag of its content. O(WAYS)."""
    end, size, checksum, generation, segment, offset = lookup_one(table, low, high, now, 0)
    if end == 0:
        none = np.int64(0)
        return end, size, checksum, generation, segment, offset, none, none, none
    at = _right_of(_find(table, low, high))
    if rights[at, 2] <= now:
        end = np.int64(0)
    tag, stamp, content = rights[at, 0], rights[at, 1], rights[at, 3]
    return end, size, checksum, generation, segment, offset, tag, stamp, content


@njit(cache=True, nogil=True)
def content_of(table, rights, low, high):
    """The tag of the content of a key, 0 where it has none or is not there. O(WAYS)."""
    row = _find(table, low, high)
    return rights[_right_of(row), 3] if row >= 0 else np.int64(0)


@njit(cache=True, nogil=True)
def remember_shown(table, rights, digests, index, now, cols, chosen, contents):
    """Do as `remember`, with the right and the tag of the content of each key. O(n * WAYS)."""
    latest = remember(table, digests, index, now, cols)
    for j in range(index.shape[0]):
        i = index[j]
        if cols[STATUS, i] == FOUND and cols[UNTIL, i] > now:
            low, high = digests[i, 0], digests[i, 1]
            tag, stamp = chosen[i, 0], chosen[i, 1]
            _enter(table, rights, low, high, tag, stamp, cols[UNTIL, i], contents[i])
    return latest


@njit(cache=True, nogil=True)
def take_single_shown(
    table, rights, low, high, size, checksum, left, last, offset, segment, tag, stamp, content,
    _, sent, now, targets,
):  # fmt: skip
    """Do as `take_single` with the right to that replica, and the tag of its content.

    Returns its words, tag, stamp and the tag of the content. O(1).
    """
    end, size, checksum, generation, segment, offset = take_single(
        table, low, high, size, checksum, left, last, offset, segment, sent, now, targets
    )
    if end != 0:
        _enter(table, rights, low, high, tag, stamp, end, content)
    return end, size, checksum, generation, segment, offset, tag, stamp, content


@njit(cache=True, nogil=True)
def take_one_shown(
    table, rights, low, high, rows, replicas, shown, contents, sent, now, targets, turn
):
    """Do as `take_one` with the rights to these replicas, and the tag of their content.

    Returns its words, tag, stamp and the tag of the content. O(replicas).
    """
    end, size, checksum, generation, segment, offset = take_one(
        table, low, high, rows, replicas, sent, now, targets, turn
    )
    tag, stamp, content = np.int64(0), np.int64(0), np.int64(0)
    if end != 0:
        content = contents[0, 0]
        for r in range(shown.shape[0]):
            if replicas[r, 0] == offset and replicas[r, 1] & _LOWER == segment:
                tag, stamp = shown[r, 0], shown[r, 1]
        _enter(table, rights, low, high, tag, stamp, end, content)
    return end, size, checksum, generation, segment, offset, tag, stamp, content


@njit(cache=True, nogil=True)
def pick(index, replicas, shown, cols, chosen):
    """chosen[i] = the right to the replica that was chosen for key i. O(replicas).

    shown: the rights to all replicas. A key that was planned from the table keeps what it has.
    """
    for j in range(index.shape[0]):
        i = index[j]
        first, segment = cols[FIRST, i], cols[SEGMENT, i]
        if first < 0 or segment < 0:
            continue
        for r in range(first, min(first + cols[REPLICAS, i], shown.shape[0])):
            if replicas[r, 0] == cols[OFFSET, i] and replicas[r, 1] & _LOWER == segment:
                chosen[i, 0], chosen[i, 1] = shown[r, 0], shown[r, 1]
                break


def warmup() -> None:
    """Call every kernel once with the argument types of production."""
    table, rights = np.zeros(SET_WORDS, np.int64), np.zeros((WAYS, RIGHT_WORDS), np.int64)
    digests, chosen = np.ones((1, 2), np.int64), np.zeros((1, 2), np.int64)
    index, cols = np.zeros(1, np.int64), np.zeros((COLUMNS, 1), np.int64)
    targets = np.zeros((2, 1), np.int64)
    rows = np.frombuffer(bytes(32), np.int64).reshape(1, 4)
    replicas = np.frombuffer(bytes(16), np.int64).reshape(1, 2)
    lookup_shown(table, rights, digests, 1, cols, chosen, index)
    lookup_one_shown(table, rights, 1, 1, 1)
    content_of(table, rights, 1, 1)
    remember_shown(table, rights, digests, index, 1, cols, chosen, index)
    take_single_shown(table, rights, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, targets)
    take_one_shown(table, rights, 1, 1, rows, replicas, replicas, replicas, 1, 1, targets, 0)
    pick(index, replicas, replicas, cols, chosen)
