"""Rights to memory: who was given a place may show it to the owner, who then need ask nobody.

A shard and the owner of a segment share a key. For a place that somebody may write or read the
shard makes a right, two words: a tag, and a stamp, which says until when it holds and of which
generation it is. The tag is the lower half of SipHash-2-4-128, under the key of the segment, of

    offset,  length | kind << 56,  stamp

so a right is good for one range of one segment, for one kind of access, until its end; nobody
without the key makes another. What an owner answers to a write that it took in full is such a tag
as well, of kind WRITTEN: a receipt, by which the shard knows that all of the place was written, and
that this right writes there no more.

A stamp is the end in ticks of TICK_MS since 1970 << 24 | the lower 24 bits of the generation; 0
stands where no right is needed. All words are int64, as everywhere on the data path.

It does not check anything but tags. O(n) each; eight tags are made side by side.
"""

import numpy as np

from kernel_cache import njit
from transfer_engine.kernels.siphash import (
    LANES,
    LANES_MIN,
    TOP,
    U64,
    _absorbed,
    _begun,
    _ended,
    digest_lanes,
)

READ, WRITE, WRITTEN = 1, 2, 3
TICK_MS = 16
GENERATION_BITS = 24
GENERATION_MASK = (1 << GENERATION_BITS) - 1
_KIND_BITS = 56
_WORDS = 3
_LAST = U64(8 * _WORDS) << TOP


@njit(cache=True, nogil=True, inline="always")
def stamp_of(end_ms, generation):
    """The stamp of a right of a generation that ends at so many ms since 1970. O(1)."""
    return ((end_ms // TICK_MS) << GENERATION_BITS) | (generation & GENERATION_MASK)


@njit(cache=True, nogil=True, inline="always")
def end_of(stamp):
    """When a right ends, in ms since 1970. O(1)."""
    return (stamp >> GENERATION_BITS) * TICK_MS


@njit(cache=True, nogil=True)
def tag_of(key_low, key_high, offset, length, kind, stamp):
    """The tag of one right. key_low, key_high: int64, the rest as well. O(1)."""
    v0, v1, v2, v3 = _begun(np.uint64(key_low), np.uint64(key_high))
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, np.uint64(offset))
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, np.uint64(length | (kind << _KIND_BITS)))
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, np.uint64(stamp))
    v0, v1, v2, v3 = _absorbed(v0, v1, v2, v3, _LAST)
    low, _ = _ended(v0, v1, v2, v3)
    return np.int64(low)


@njit(cache=True, nogil=True)
def tags_of(key_low, key_high, offsets, lengths, kind, stamps, out):
    """out[i] = the tag of right i, all of one kind and of one key. O(n).

    offsets, lengths, stamps, out: int64[n].
    """
    count = offsets.shape[0]
    words = np.empty(_WORDS * LANES, dtype=np.uint64)
    lanes = np.empty(2 * LANES, dtype=np.uint64)
    state = np.int64(lanes.ctypes.data)
    base = np.int64(words.ctypes.data)
    v0, v1, v2, v3 = _begun(np.uint64(key_low), np.uint64(key_high))
    at = 0
    while count - at >= LANES_MIN:
        group = min(LANES, count - at)
        for lane in range(LANES):
            i = at + min(lane, group - 1)
            words[_WORDS * lane] = np.uint64(offsets[i])
            words[_WORDS * lane + 1] = np.uint64(lengths[i] | (kind << _KIND_BITS))
            words[_WORDS * lane + 2] = np.uint64(stamps[i])
            lanes[lane] = U64(base + 8 * _WORDS * lane)
            lanes[LANES + lane] = _LAST
        digest_lanes(state, _WORDS, v0, v1, v2, v3)
        for lane in range(group):
            out[at + lane] = np.int64(lanes[lane])
        at += group
    for i in range(at, count):
        out[i] = tag_of(key_low, key_high, offsets[i], lengths[i], kind, stamps[i])


@njit(cache=True, nogil=True)
def granted(keys, columns, kind, out):
    """Make rights to n places, under several keys: out[i] = (tag, stamp). O(n).

    columns: int64[5, n or more], which of the keys, offset, length, end in ms since 1970 and
    generation; what is in the last two is lost. Both words are 0 for an end of 0. keys:
    int64[m, 2]; out: int64[n, 2].
    """
    count = out.shape[0]
    _make(keys, columns, count, kind)
    for i in range(count):
        out[i, 0] = columns[4, i] if columns[3, i] else 0
        out[i, 1] = columns[3, i]


@njit(cache=True, nogil=True)
def _make(keys, columns, count, kind):
    """Put stamps in place of the ends of `count` places, and tags in place of generations. O(n)."""
    for i in range(count):
        if columns[3, i] > 0:
            columns[3, i] = stamp_of(columns[3, i], columns[4, i])
    at = 0
    while at < count:
        key, stop = columns[0, at], at + 1
        while stop < count and columns[0, stop] == key:
            stop += 1
        offsets, lengths = columns[1, at:stop], columns[2, at:stop]
        stamps, tags = columns[3, at:stop], columns[4, at:stop]
        if stop - at < LANES_MIN:
            for i in range(stop - at):
                tags[i] = tag_of(
                    keys[key, 0], keys[key, 1], offsets[i], lengths[i], kind, stamps[i]
                )
        else:
            tags_of(keys[key, 0], keys[key, 1], offsets, lengths, kind, stamps, tags)
        at = stop


@njit(cache=True, nogil=True)
def _has(receipts, tag):
    """Whether a tag is among receipts, which are sorted. O(log n)."""
    low, high = 0, receipts.shape[0]
    while low < high:
        middle = (low + high) >> 1
        if receipts[middle] < tag:
            low = middle + 1
        else:
            high = middle
    return low < receipts.shape[0] and receipts[low] == tag


@njit(cache=True, nogil=True)
def lacking(keys, columns, count, drift, receipts, whose, out):
    """out[whose[i]] = 1 where nobody has said that place i was written by a right; how many. O(n).

    columns, keys: as `granted` takes them, of which `count` places are meant. receipts: sorted.
    drift: by how many ticks the end of the right may have been another. A place that lacks its
    receipt costs a tag for each of those.
    """
    _make(keys, columns, count, WRITTEN)
    found = 0
    for i in range(count):
        if _has(receipts, columns[4, i]):
            continue
        low, high = keys[columns[0, i], 0], keys[columns[0, i], 1]
        known = False
        for ticks in range(-drift, drift + 1):
            near = columns[3, i] + (ticks << GENERATION_BITS)
            if not known:
                tag = tag_of(low, high, columns[1, i], columns[2, i], WRITTEN, near)
                known = _has(receipts, tag)
        if not known:
            out[whose[i]] = 1
            found += 1
    return found


def warmup() -> None:
    """Compile every kernel for the argument types used in production."""
    column = np.zeros(1, dtype=np.int64)
    granted(
        np.zeros((1, 2), np.int64), np.zeros((5, 1), np.int64), READ, np.zeros((1, 2), np.int64)
    )
    lacking(
        np.zeros((1, 2), np.int64), np.zeros((5, 1), np.int64), 1, 0, column, column,
        np.zeros(1, np.bool_),
    )  # fmt: skip
    end_of(stamp_of(0, 0))
    tag_of(0, 1, 0, 8, READ, 0)
    tags_of(0, 1, column, column, WRITE, column, column)
