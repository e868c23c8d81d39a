"""Kernels of sieve: one doubly linked list, oldest end first, a mark an id, and a hand.

Array layout. `links` is uint32 of shape (capacity + 2, 2): row `id + 2` holds (previous, next)
as row numbers, both in one 8-byte pair so that a node costs one cache line. Row 1 is the end of
the list on both sides: its next is the oldest node, its previous the youngest. Row 0 is no node:
links[0, 0] counts the nodes. A next of 0 means absent, so fresh zero memory is an empty list
once row 1 points at itself. `marks` is one byte per row; `hand` holds one row number.

Unlinking a node touches three lines, and in a big list all three miss the cache. That is serial
(each step writes what the next one reads), so each batch is first read in a pass whose
loads do not depend on one another and thus overlap; what it loads, it also checks.

An id outside the table is refused by the inserting kernel (returns -1, nothing changed) and
ignored by the others; -2 means the links were found broken before anything changed.
"""

# mypy: allow-untyped-defs

import numpy as np

from kernel_cache import njit

END = 1
FIRST = 2
REFUSED = -1
BROKEN = -2


@njit(cache=True, nogil=True)
def _read_ahead(links, ids):
    """Load every node of the batch and its neighbours; False when they disagree. O(batch)."""
    rows = links.shape[0] - FIRST
    broken = 0
    for k in range(ids.size):
        i = ids[k]
        if 0 <= i < rows:
            s = np.uint32(i + FIRST)
            after = links[s, 1]
            if after != 0:
                broken |= (links[after, 0] != s) | (links[links[s, 0], 1] != s)
    return broken == 0


@njit(cache=True, nogil=True)
def _within(links, ids):
    """Whether every id has a row. O(batch)."""
    rows = links.shape[0] - FIRST
    outside = 0
    for k in range(ids.size):
        outside |= (ids[k] < 0) | (ids[k] >= rows)
    return outside == 0


@njit(cache=True, nogil=True)
def list_check(links):
    """Whether every link has its counterpart and the count is right. O(n)."""
    count = 0
    s = np.uint32(END)
    while True:
        after = links[s, 1]
        if after == 0 or links[after, 0] != s:
            return False
        s = after
        if s == END:
            return count == links[0, 0]
        count += 1
        if count > links[0, 0]:
            return False


@njit(cache=True, nogil=True)
def sieve_insert(links, marks, ids):
    """Append new ids unmarked at the young end; mark those already present. O(batch)."""
    if not _within(links, ids):
        return REFUSED
    if not _read_ahead(links, ids):
        return BROKEN
    last = links[END, 0]
    added = 0
    for k in range(ids.size):
        s = np.uint32(ids[k] + FIRST)
        if links[s, 1] != 0:
            marks[s] = 1
            continue
        links[last, 1] = s
        links[s, 0] = last
        links[s, 1] = END
        last = s
        added += 1
    links[END, 0] = last
    links[0, 0] += np.uint32(added)
    return added


@njit(cache=True, nogil=True)
def sieve_touch(links, marks, ids):
    """Mark those of `ids` that are present; the order stays. O(batch)."""
    rows = links.shape[0] - FIRST
    for k in range(ids.size):
        i = ids[k]
        if 0 <= i < rows and links[i + FIRST, 1] != 0:
            marks[i + FIRST] = 1
    return 0


@njit(cache=True, nogil=True)
def sieve_remove(links, marks, hand, ids):
    """Unlink those of `ids` that are present; a hand on one of them moves on. O(batch)."""
    if not _read_ahead(links, ids):
        return BROKEN
    rows = links.shape[0] - FIRST
    removed = 0
    for k in range(ids.size):
        i = ids[k]
        if 0 <= i < rows:
            s = np.uint32(i + FIRST)
            after = links[s, 1]
            if after != 0:
                before = links[s, 0]
                links[before, 1] = after
                links[after, 0] = before
                if hand[0] == s:
                    hand[0] = after
                links[s, 0] = 0
                links[s, 1] = 0
                marks[s] = 0
                removed += 1
    links[0, 0] -= np.uint32(removed)
    return removed


@njit(cache=True, nogil=True)
def sieve_sweep(links, marks, hand, ids):
    """Move the hand to each of `ids` in turn, clearing the marks it passes.

    O(nodes passed), never more than two rounds an id; the walk that proposed them passed as many.
    """
    rows = links.shape[0] - FIRST
    for k in range(ids.size):
        i = ids[k]
        if i < 0 or i >= rows or links[i + FIRST, 1] == 0:
            continue
        s = hand[0]
        while True:
            if s <= END:
                s = np.int64(links[END, 1])
            if s == i + FIRST and marks[s] == 0:
                break
            marks[s] = 0
            s = np.int64(links[s, 1])
        hand[0] = s
    return 0


@njit(cache=True, nogil=True)
def sieve_walk(links, marks, hand, cursor, out):
    """Write ids in the order the hand would evict them, if nothing were touched meanwhile.

    First round: the unmarked ones from the hand on; second round: the marked ones, whose marks
    the first round would have cleared. cursor is (next row, round), rounds 1 and 2, 3 for done.
    O(nodes walked).
    """
    start = hand[0] if hand[0] > END else np.int64(links[END, 1])
    if start == END:
        return 0
    if cursor[1] == 0:
        cursor[0] = start
        cursor[1] = 1
    found = 0
    s = cursor[0]
    while found < out.size and cursor[1] < 3:
        if marks[s] == cursor[1] - 1:
            out[found] = s - FIRST
            found += 1
        s = np.int64(links[s, 1])
        if s == END:
            s = np.int64(links[END, 1])
        if s == start:
            cursor[1] += 1
    cursor[0] = s
    return found


def warmup() -> None:
    """Compile (or load from the cache) every kernel here for the types used in production."""
    links = np.zeros((4, 2), dtype=np.uint32)
    links[END] = END
    marks = np.zeros(4, dtype=np.uint8)
    hand = np.zeros(1, dtype=np.int64)
    out = np.empty(2, dtype=np.int64)
    for kind in (np.int64, np.int32):
        ids = np.arange(2, dtype=kind)
        sieve_insert(links, marks, ids)
        sieve_touch(links, marks, ids)
        sieve_walk(links, marks, hand, np.zeros(2, dtype=np.int64), out)
        sieve_sweep(links, marks, hand, ids)
        sieve_remove(links, marks, hand, ids)
    list_check(links)
