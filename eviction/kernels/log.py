"""Kernels of the log policies (lru, fifo): the order is a log, and a use appends to it.

Array layout. `log` is uint32: ids in the order of their uses, coldest first. `places` is uint32:
places[id] is one more than where the id's newest entry stands in the log, 0 when the id is
absent, so fresh zero memory is an empty log. An entry whose id has moved on is stale, and skipped.
`head` is int64: the order is log[MOVED_FIRST:MOVED], then log[FIRST:END]; COUNT ids are present.

A use writes at one random place and at the end of the log; in a linked list it would write to
three nodes, each waiting for the one before. The price is that stale entries have to be squeezed
out. That is done in steps, a few for each entry appended and each id removed: living entries
from FIRST on slide down to MOVED, which starts at 0 and can never overtake FIRST. So the log
stays under twice the ids plus SLACK, and no call does more than a few steps an id.

An id outside the table is refused by the inserting kernel (returns -1, nothing changed) and
ignored by the others.
"""

# mypy: allow-untyped-defs

import numpy as np

from kernel_cache import njit

MOVED_FIRST, MOVED, FIRST, END, COUNT, SLIDING = 0, 1, 2, 3, 4, 5
HEAD_WORDS = 8
INSERT, REMOVE, LOW = 1, 2, 0xFFFFFFFF
REFUSED = -1
SLACK = 4096
"""Entries of the log that are always allowed to be stale."""
STEPS = 4
"""Entries looked at for each one appended while the log is squeezed."""
RUN = 256
"""Entries appended between two rounds of squeezing."""


@njit(cache=True, nogil=True, inline="always")
def squeeze(head, places, log, changes):
    """Slide living entries down, STEPS for each change, if the log is long enough. O(changes)."""
    if head[SLIDING] == 0:
        if 2 * (head[END] - SLACK) <= 3 * head[COUNT]:
            return
        head[SLIDING] = 1
    first = head[FIRST]
    moved = head[MOVED]
    stop = min(head[END], first + STEPS * changes)
    for p in range(first, stop):
        # Which entries live is as good as random: a branch would be mispredicted half of the time.
        i = log[p]
        place = np.int64(places[i])
        living = np.int64(place == p + 1)
        log[moved] = i
        moved += living
        places[i] = place + living * (moved - place)
    head[FIRST] = stop
    head[MOVED] = moved
    if stop == head[END]:
        head[FIRST] = head[MOVED_FIRST]
        head[END] = moved
        head[MOVED_FIRST] = 0
        head[MOVED] = 0
        head[SLIDING] = 0


@njit(cache=True, nogil=True)
def log_insert(head, places, log, ids, promote):
    """Append `ids`; those already present too if `promote`. O(batch)."""
    outside = 0
    for k in range(ids.size):
        outside |= (ids[k] < 0) | (ids[k] >= places.size)
    if outside:
        return REFUSED
    for start in range(0, ids.size, RUN):
        stop = min(ids.size, start + RUN)
        end = head[END]
        added = 0
        for k in range(start, stop):
            i = ids[k]
            if places[i] == 0:
                added += 1
            elif not promote:
                continue
            log[end] = i
            end += 1
            places[i] = end
        head[END] = end
        head[COUNT] += added
        squeeze(head, places, log, stop - start)
    return 0


@njit(cache=True, nogil=True)
def log_touch(head, places, log, ids):
    """Append those of `ids` that are present. O(batch)."""
    for start in range(0, ids.size, RUN):
        stop = min(ids.size, start + RUN)
        end = head[END]
        for k in range(start, stop):
            i = ids[k]
            if 0 <= i < places.size and places[i] != 0:
                log[end] = i
                end += 1
                places[i] = end
        head[END] = end
        squeeze(head, places, log, stop - start)


@njit(cache=True, nogil=True)
def log_remove(head, places, log, ids):
    """Forget those of `ids` that are present. O(batch)."""
    removed = 0
    for k in range(ids.size):
        i = ids[k]
        if 0 <= i < places.size and places[i] != 0:
            places[i] = 0
            removed += 1
    head[COUNT] -= removed
    squeeze(head, places, log, ids.size)


@njit(cache=True, nogil=True)
def log_replay(head, places, log, notes, promote):
    """Do what notes (kind << 32 | id) say, in order; touches matter if `promote`. O(batch).

    Ids to insert outside the table refuse all of it.
    """
    outside = 0
    for k in range(notes.size):
        outside |= (notes[k] >> 32 == INSERT) & ((notes[k] & LOW) >= places.size)
    if outside:
        return REFUSED
    for start in range(0, notes.size, RUN):
        stop = min(notes.size, start + RUN)
        end = head[END]
        added = 0
        for k in range(start, stop):
            i = notes[k] & LOW
            kind = notes[k] >> 32
            if i >= places.size:
                continue
            there = places[i] != 0
            if kind == REMOVE:
                places[i] = 0
                added -= there
            elif (there and promote) or (kind == INSERT and not there):
                log[end] = i
                end += 1
                places[i] = end
                added += not there
        head[END] = end
        head[COUNT] += added
        squeeze(head, places, log, stop - start)
    return 0


@njit(cache=True, nogil=True)
def log_walk(head, places, log, cursor, out):
    """Write ids from cursor[0] (0: the coldest) towards the hot end. O(entries walked).

    Stale entries before the coldest id are dropped for good, so that no walk meets them again.
    """
    while head[MOVED_FIRST] < head[MOVED]:
        p = head[MOVED_FIRST]
        if places[log[p]] == p + 1:
            break
        head[MOVED_FIRST] += 1
    if head[MOVED_FIRST] == head[MOVED]:
        while head[FIRST] < head[END]:
            p = head[FIRST]
            if places[log[p]] == p + 1:
                break
            head[FIRST] += 1
    p = head[MOVED_FIRST] if cursor[0] == 0 else cursor[0] - 1
    found = 0
    while found < out.size:
        if head[MOVED] <= p < head[FIRST]:
            p = head[FIRST]
        if p >= head[END]:
            break
        i = log[p]
        p += 1
        if places[i] == p:
            out[found] = i
            found += 1
    cursor[0] = p + 1
    return found


@njit(cache=True, nogil=True)
def log_check(head, places, log):
    """Whether the living entries are as many as the ids present, and within bounds. O(n)."""
    if not 0 <= head[MOVED_FIRST] <= head[MOVED] <= head[FIRST] <= head[END] <= log.size:
        return False
    living = 0
    for p in range(head[MOVED_FIRST], head[END]):
        if p < head[MOVED] or p >= head[FIRST]:
            if log[p] >= places.size:
                return False
            living += places[log[p]] == p + 1
    return living == head[COUNT]


def warmup() -> None:
    """Compile (or load from the cache) every kernel here for the types used in production."""
    head = np.zeros(HEAD_WORDS, dtype=np.int64)
    places, log = np.zeros(4, dtype=np.uint32), np.zeros(8, dtype=np.uint32)
    cursor = np.zeros(2, dtype=np.int64)
    out = np.empty(2, dtype=np.int64)
    for kind in (np.int64, np.int32):
        ids = np.arange(2, dtype=kind)
        log_insert(head, places, log, ids, True)
        log_touch(head, places, log, ids)
        log_walk(head, places, log, cursor, out)
        log_remove(head, places, log, ids)
    notes = np.array([1, INSERT << 32, REMOVE << 32 | 1], dtype=np.int64)
    log_replay(head, places, log, notes, True)
    log_check(head, places, log)
