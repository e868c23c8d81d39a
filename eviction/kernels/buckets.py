"""Kernels of the keyed policies (lfu, lfu_perfect, length_aware, opt): a bucket queue.

Every present id has a key below KEYS; lower keys leave first, equal keys by recency. There is one
ring of nodes per key and a four-level tree of 64-bit words that says which keys have one, so
finding the next key is four word reads and no step depends on how many ids there are.

Array layout. `nodes` is uint32 of shape (capacity + 1, 4): row `id + 1` holds (previous, next,
key, kept) in one 16-byte quarter of a cache line; a next of 0 means absent. Row 0 is no node:
nodes[0, 0] counts them. `kept` is the use count that outlives removal (lfu_perfect).
`heads` is uint32[KEYS]: the coldest row of each ring, whose previous is the hottest; 0 for none.
`words` is uint64[WORDS]: the levels of the tree, the widest first.

Counting keys are `count * step + (step - 1 - depth)`: step 1 is plain LFU, a larger step puts the
deeper block first among equal counts. Counts stop growing at the largest key: blocks that hot
are ordered by recency alone. Depths stop at `step - 1`.

Kernels that insert refuse an id outside the table (-1, nothing changed); the others ignore it.
"""

# mypy: allow-untyped-defs

import numpy as np

from kernel_cache import njit

KEYS = 1 << 24
WORDS = (1 << 18) + (1 << 12) + (1 << 6) + 1
REFUSED = -1
BROKEN = -2

# Columns of `nodes`.
PREVIOUS = 0
NEXT = 1
KEY = 2
KEPT = 3

# What `keyed_move` does.
INSERT = 0
TOUCH = 1
PLACE = 2
REPLACE = 3
REMOVE = 4
RETIRE = 5

# Keys that are none.
OUT = -1
IGNORED = -2


@njit(cache=True, nogil=True)
def _level_start(level):
    """Where a level of the tree begins in `words`. O(1)."""
    if level == 0:
        return 0
    if level == 1:
        return 1 << 18
    if level == 2:
        return (1 << 18) + (1 << 12)
    return (1 << 18) + (1 << 12) + (1 << 6)


@njit(cache=True, nogil=True)
def _lowest(word):
    """The position of the lowest set bit of a non-zero word. O(1)."""
    position = 0
    for width in (32, 16, 8, 4, 2, 1):
        mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
        if word & mask == np.uint64(0):
            word >>= np.uint64(width)
            position += width
    return position


@njit(cache=True, nogil=True)
def _mark(words, key):
    """Note that `key` has a ring; stops at the first level that knew already. O(1)."""
    for level in range(4):
        place = _level_start(level) + (key >> 6)
        before = words[place]
        words[place] = before | (np.uint64(1) << np.uint64(key & 63))
        if before != np.uint64(0):
            return
        key >>= 6


@njit(cache=True, nogil=True)
def _unmark(words, key):
    """Note that `key` has no ring any more; stops at the first level still in use. O(1)."""
    for level in range(4):
        place = _level_start(level) + (key >> 6)
        words[place] &= ~(np.uint64(1) << np.uint64(key & 63))
        if words[place] != np.uint64(0):
            return
        key >>= 6


@njit(cache=True, nogil=True)
def _next_key(words, key):
    """The lowest key >= `key` that has a ring, or -1. O(1)."""
    for level in range(4):
        if (key >> 6) >= 1 << (18 - 6 * level):
            return -1
        rest = words[_level_start(level) + (key >> 6)] >> np.uint64(key & 63)
        if rest != np.uint64(0):
            key += _lowest(rest)
            for below in range(level - 1, -1, -1):
                key = (key << 6) + _lowest(words[_level_start(below) + key])
            return key
        key = (key >> 6) + 1
    return -1


@njit(cache=True, nogil=True)
def _read_ahead(nodes, ids):
    """Load the nodes of a batch and their neighbours; False when they disagree. O(batch)."""
    rows = nodes.shape[0] - 1
    broken = 0
    for k in range(ids.size):
        i = ids[k]
        if 0 <= i < rows:
            s = np.uint32(i + 1)
            after = nodes[s, NEXT]
            if after != 0:
                broken |= (nodes[after, PREVIOUS] != s) | (nodes[nodes[s, PREVIOUS], NEXT] != s)
    return broken == 0


@njit(cache=True, nogil=True)
def _within(nodes, ids):
    """Whether every id has a row. O(batch)."""
    rows = nodes.shape[0] - 1
    outside = 0
    for k in range(ids.size):
        outside |= (ids[k] < 0) | (ids[k] >= rows)
    return outside == 0


@njit(cache=True, nogil=True)
def _new_key(how, present, old, kept, given, step):
    """The key an id moves to: one of the queue, OUT, or IGNORED when it takes no part. O(1).

    INSERT         one use more than kept, deeper first by the depth `given`; an id already
                   present counts one use more.
    TOUCH          one use more, of ids present.
    PLACE, REPLACE the key `given`; REPLACE only of ids present.
    REMOVE, RETIRE OUT, of ids present.
    """
    if how == PLACE or (how == REPLACE and present):
        return given
    if present:
        if how == REMOVE or how == RETIRE:
            return OUT
        return old + step if old + step < KEYS else old
    if how != INSERT:
        return IGNORED
    uses = min(kept + 1, KEYS // step - 1)
    return uses * step + (step - 1 - min(max(given, 0), step - 1))


@njit(cache=True, nogil=True)
def keyed_move(nodes, heads, words, ids, given, how, step):
    """Take each of `ids` out of its ring, if it is in one, and put it in that of its new key.

    `how` and `given` (empty, or one value an id) decide it as in `_new_key`; RETIRE also keeps
    the old key as use count. The keys of PLACE and REPLACE are the caller's to check.

    Everything is in one loop because passing arrays to a helper for every id would cost more
    than the work itself (their reference counts). O(batch).
    """
    if (how == INSERT or how == PLACE) and not _within(nodes, ids):
        return REFUSED
    if not _read_ahead(nodes, ids):
        return BROKEN
    rows = nodes.shape[0] - 1
    balance = 0
    for k in range(ids.size):
        i = ids[k]
        if i < 0 or i >= rows:
            continue
        s = np.uint32(i + 1)
        after = nodes[s, NEXT]
        old = np.int64(nodes[s, KEY])
        value = np.int64(given[k]) if given.size else 0
        key = _new_key(how, after != 0, old, np.int64(nodes[s, KEPT]), value, step)
        if key == IGNORED:
            continue
        # Out of the old ring.
        if after != 0:
            balance -= 1
            slot = np.uint32(old)
            if after == s:
                heads[slot] = 0
                _unmark(words, old)
            else:
                before = nodes[s, PREVIOUS]
                nodes[before, NEXT] = after
                nodes[after, PREVIOUS] = before
                if heads[slot] == s:
                    heads[slot] = after
        # Into the new ring.
        if key == OUT:
            nodes[s, PREVIOUS] = 0
            nodes[s, NEXT] = 0
            if how == RETIRE:
                nodes[s, KEPT] = np.uint32(old)
            continue
        balance += 1
        nodes[s, KEY] = np.uint32(key)
        slot = np.uint32(key)
        head = heads[slot]
        if head == 0:
            heads[slot] = s
            nodes[s, PREVIOUS] = s
            nodes[s, NEXT] = s
            _mark(words, key)
        else:
            last = nodes[head, PREVIOUS]
            nodes[last, NEXT] = s
            nodes[s, PREVIOUS] = last
            nodes[s, NEXT] = head
            nodes[head, PREVIOUS] = s
    nodes[0, 0] = np.uint32(np.int64(nodes[0, 0]) + balance)
    return 0


@njit(cache=True, nogil=True)
def keyed_walk(nodes, heads, words, cursor, out):
    """Write ids by rising key, coldest first in a ring; cursor is (next row, its key). O(out)."""
    s, key = cursor[0], cursor[1]
    found = 0
    while found < out.size:
        if s == 0:
            key = _next_key(words, key)
            if key < 0:
                key = KEYS
                break
            s = np.int64(heads[key])
        out[found] = s - 1
        found += 1
        s = np.int64(nodes[s, NEXT])
        if s == heads[key]:
            s = 0
            key += 1
    cursor[0], cursor[1] = s, key
    return found


@njit(cache=True, nogil=True)
def keyed_check(nodes, heads, words):
    """Whether rings, keys, tree and count agree with one another. O(n + keys in use)."""
    count = 0
    key = _next_key(words, 0)
    while key >= 0:
        s = heads[key]
        if s == 0:
            return False
        while True:
            after = nodes[s, NEXT]
            if nodes[s, KEY] != key or after == 0 or nodes[after, PREVIOUS] != s:
                return False
            count += 1
            if count > nodes[0, 0]:
                return False
            s = after
            if s == heads[key]:
                break
        key = _next_key(words, key + 1)
    return count == nodes[0, 0]


@njit(cache=True, nogil=True)
def future_keys(starts, uses, done, ids, horizon, keys):
    """Key of each use by Belady's rule: `horizon` minus the next use, 0 when there is none.

    The uses of id i are uses[starts[i]:starts[i + 1]], rising, of which done[i] have happened;
    this counts one more for each of `ids`. O(batch).
    """
    known = starts.size - 1
    for k in range(ids.size):
        i = ids[k]
        keys[k] = 0
        if 0 <= i < known:
            done[i] += 1
            place = starts[i] + done[i]
            if place < starts[i + 1]:
                keys[k] = horizon - uses[place]
    return 0


def warmup() -> None:
    """Compile (or load from the cache) every kernel here for the types used in production."""
    nodes = np.zeros((4, 4), dtype=np.uint32)
    heads = np.zeros(KEYS, dtype=np.uint32)
    words = np.zeros(WORDS, dtype=np.uint64)
    depths = np.zeros(2, dtype=np.int32)
    keys = np.zeros(2, dtype=np.int64)
    starts = np.zeros(3, dtype=np.int64)
    out = np.empty(2, dtype=np.int64)
    for kind in (np.int64, np.int32):
        ids = np.arange(2, dtype=kind)
        keyed_move(nodes, heads, words, ids, depths, INSERT, 1)
        keyed_move(nodes, heads, words, ids, keys, PLACE, 1)
        keyed_walk(nodes, heads, words, np.zeros(2, dtype=np.int64), out)
        future_keys(starts, out, np.zeros(2, dtype=np.int64), ids, 2, keys)
    keyed_check(nodes, heads, words)
