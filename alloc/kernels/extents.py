"""Kernels of the extent layer: two-level bins of holes, a hash table of allocations.

An allocator's state is a tuple of four arrays, passed to every kernel as one argument:

    head    int64[HEAD_WORDS]   scalars, then the bitmaps of bins, then the lists of bins
    span    int64[nodes, 4]     columns START and SIZE of a node; the rest is `link`
    link    int32[nodes, 8]     the same memory as `span`: columns LEFT, RIGHT, PREV, NEXT
    bucket  int32[...]          linear hash table: start of an allocated node -> node

A node is one contiguous range of the pool: a hole (SIZE > 0), an allocated range (SIZE < 0) or a
spare row (SIZE == 0). It takes 32 bytes, half a cache line, which is worth the odd column
numbers; an allocated one takes 4 bytes of hash table more. Ranges may start and end at any byte
(a reservation needs that), allocations start at multiples of GRANULE.

Cost: every helper is O(1): loops run over bits, over bins or over SCAN holes. Numbers stay below
2**62, so that the same functions run as plain Python through `.py_func`. The constants live here,
not in a module of their own, because numba's disk cache only watches the file of the kernel.
"""

import numpy as np

from kernel_cache import njit

# Kernels allocate nothing, so numba need not count references to their arrays. It would do so with
# an atomic instruction per array and inner call: without it, a batch takes a fifth of the time.
KERNEL = {"cache": True, "nogil": True, "error_model": "numpy", "_nrt": False}
HELPER = {**KERNEL, "forceinline": True}

NIL = -1
UNBINNED = -2  # PREV of a hole that cannot hold one aligned granule

# head: scalars. CAPACITY and ALLOCATED are bytes; extents are rounded up to GRANULE = 1 << SHIFT.
CAPACITY, GRANULE, SHIFT, ALLOCATED, LIVE = 0, 1, 2, 3, 4
# Nodes: rows ever used, first spare one (chained through NEXT), how many can still be created.
NODE_TOP, NODE_SPARE, NODE_LEFT = 5, 6, 7
# Hash table: buckets in use, entries, buckets at most, mask of the last bucket's index.
BUCKETS, HASHED, BUCKET_MAX, BUCKET_MASK = 8, 9, 10, 15
# Search: holes compared per bin; comparisons a batch may still make beyond that.
SCAN, BUDGET = 11, 12
# Node where the last reservation or freeing was; bitmap of the levels that have a hole.
FINGER, BIN_LEVELS = 13, 14
# No hole is larger than this many bytes; kept by every batch, so that nobody has to ask.
ROOM = 16
LEVELS = 48
BINS = 32  # bins per level: sizes in one bin differ by less than 1/32
BIN_MAP = 17
BIN_LIST = BIN_MAP + LEVELS
HEAD_WORDS = BIN_LIST + LEVELS * BINS

START, SIZE = 0, 1  # columns of span
LEFT, RIGHT, PREV, NEXT = 4, 5, 6, 7  # columns of link
BUDGET_BATCH = 4096


# Index of the only set bit b of a word, at (b * 0x077CB531 >> 27) & 31.
_LOW_BIT = np.zeros(32, np.int64)
_LOW_BIT[[0x077CB531 << bit >> 27 & 31 for bit in range(32)]] = range(32)


# --- bits -----------------------------------------------------------------------------------------


@njit(**HELPER)
def low_bit(word):
    """Index of the lowest set bit of a non-zero 32-bit word, by a de Bruijn sequence. O(1)."""
    return _LOW_BIT[(((word & -word) * 0x077CB531) >> 27) & 31]


@njit(**HELPER)
def log2_floor(value):
    """Index of the highest set bit of a positive number below 2**62, without branches. O(1)."""
    step = int(value > 0xFFFFFFFF) << 5
    index = step
    value >>= step
    step = int(value > 0xFFFF) << 4
    index += step
    value >>= step
    step = int(value > 0xFF) << 3
    index += step
    value >>= step
    step = int(value > 0xF) << 2
    index += step
    value >>= step
    step = int(value > 0x3) << 1
    index += step
    return index + (value >> step >> 1)


@njit(**HELPER)
def round_up(value, power):
    """Smallest multiple of a power of two that is not below `value`. O(1)."""
    return (value + power - 1) & -power


@njit(**HELPER)
def mix(value):
    """Spread a non-negative number over 31 bits, without leaving 62 bits. O(1)."""
    value ^= value >> 31
    value = (value & 0x7FFFFFFF) * 0x5851F42D
    value ^= value >> 29
    value = (value & 0x7FFFFFFF) * 0x4C957F2D
    return (value >> 20) & 0x7FFFFFFF


# --- hash table: grows by one bucket per insertion, so nobody pays for a whole rehash -------------


@njit(**HELPER)
def bucket_of(buckets, mask, start):
    """Bucket of `start` when `buckets` are in use and `mask` covers the last of them. O(1)."""
    index = mix(start) & mask
    if index >= buckets:
        index &= mask >> 1
    return index


@njit(**HELPER)
def hash_find(head, span, link, bucket, start):
    """Allocated node that starts at `start`, or NIL. O(1) expected."""
    node = bucket[bucket_of(head[BUCKETS], head[BUCKET_MASK], start)]
    while node != NIL and span[node, START] != start:
        node = link[node, NEXT]
    return node


@njit(**HELPER)
def hash_insert(head, span, link, bucket, node):
    """Enter an allocated node, then split at most one bucket. O(1) expected."""
    index = bucket_of(head[BUCKETS], head[BUCKET_MASK], span[node, START])
    link[node, NEXT] = bucket[index]
    bucket[index] = node
    head[HASHED] += 1
    buckets = head[BUCKETS]
    if head[HASHED] <= buckets or buckets >= head[BUCKET_MAX]:
        return
    mask = head[BUCKET_MASK]
    if buckets > mask:
        mask = 2 * mask + 1
    source = buckets & (mask >> 1)
    node = bucket[source]
    bucket[source] = NIL
    bucket[buckets] = NIL
    head[BUCKETS] = buckets + 1
    head[BUCKET_MASK] = mask
    while node != NIL:
        following = link[node, NEXT]
        index = bucket_of(buckets + 1, mask, span[node, START])
        link[node, NEXT] = bucket[index]
        bucket[index] = node
        node = following


@njit(**HELPER)
def hash_remove(head, span, link, bucket, node):
    """Take an allocated node out of the table. O(1) expected."""
    index = bucket_of(head[BUCKETS], head[BUCKET_MASK], span[node, START])
    head[HASHED] -= 1
    at = bucket[index]
    if at == node:
        bucket[index] = link[node, NEXT]
        return
    while link[at, NEXT] != node:
        at = link[at, NEXT]
    link[at, NEXT] = link[node, NEXT]


@njit(**HELPER)
def hash_widen(head, bucket, entries):
    """Give a table without entries as many buckets as it is about to need. O(entries).

    Who fills a pool at once would otherwise look at each entry twice: where it is entered, and
    where its bucket is split.
    """
    buckets = min(entries, head[BUCKET_MAX])
    if head[HASHED] > 0 or buckets <= head[BUCKETS]:
        return
    for index in range(head[BUCKETS], buckets):
        bucket[index] = NIL
    head[BUCKETS] = buckets
    head[BUCKET_MASK] = (2 << log2_floor(buckets - 1)) - 1


# --- bins: holes by the aligned bytes they can hold -----------------------------------------------


@njit(**HELPER)
def bin_of(units):
    """Bin of a hole of `units` >= 1 granules. O(1)."""
    if units < BINS:
        return units
    level = log2_floor(units) - 4
    return level * BINS + (units >> (level - 1)) - BINS


@njit(**HELPER)
def usable(head, span, node):
    """Bytes between the first and the last granule boundary inside a node. O(1)."""
    low = round_up(span[node, START], head[GRANULE])
    high = (span[node, START] + span[node, SIZE]) & -head[GRANULE]
    return max(high - low, 0)


@njit(**HELPER)
def bin_insert(head, span, link, node):
    """Enter a hole at the front of its bin. O(1)."""
    units = usable(head, span, node) >> head[SHIFT]
    if units == 0:
        link[node, PREV] = UNBINNED
        link[node, NEXT] = NIL
        return
    index = bin_of(units)
    first = head[BIN_LIST + index]
    link[node, PREV] = NIL
    link[node, NEXT] = first
    if first != NIL:
        link[first, PREV] = node
    head[BIN_LIST + index] = node
    head[BIN_MAP + index // BINS] |= 1 << (index % BINS)
    head[BIN_LEVELS] |= 1 << (index // BINS)


@njit(**HELPER)
def bin_remove(head, span, link, node):
    """Take a hole out of its bin; its START and SIZE must be those it was entered with. O(1)."""
    before = link[node, PREV]
    after = link[node, NEXT]
    if before == UNBINNED:
        return
    if after != NIL:
        link[after, PREV] = before
    if before != NIL:
        link[before, NEXT] = after
        return
    index = bin_of(usable(head, span, node) >> head[SHIFT])
    head[BIN_LIST + index] = after
    if after == NIL:
        head[BIN_MAP + index // BINS] ^= 1 << (index % BINS)
        if head[BIN_MAP + index // BINS] == 0:
            head[BIN_LEVELS] ^= 1 << (index // BINS)


@njit(**HELPER)
def bin_above(head, index):
    """First non-empty bin after `index`, or NIL. O(1)."""
    level = index // BINS
    rest = head[BIN_MAP + level] >> (index % BINS + 1)
    if rest:
        return index + 1 + low_bit(rest)
    levels = head[BIN_LEVELS] >> (level + 1)
    if levels == 0:
        return NIL
    level += 1
    if levels & 0xFFFFFFFF == 0:
        level += 32
        levels >>= 32
    level += low_bit(levels)
    return level * BINS + low_bit(head[BIN_MAP + level])


@njit(**HELPER)
def hole_find(head, span, link, size):
    """Hole for `size` bytes (a multiple of the granule): the best of a few, or NIL. O(SCAN).

    Only the bin of `size` itself can hold holes that are too small. It is searched beyond SCAN
    holes only when no larger bin has any, and then a whole batch shares one budget: a request
    may miss a hole that fits by less than 1/32 among thousands that do not.
    """
    own = bin_of(size >> head[SHIFT])
    above = bin_above(head, own)
    best, best_size = NIL, 1 << 61
    steps = head[SCAN]
    node = head[BIN_LIST + own]
    while node != NIL:
        if steps <= 0:
            if best != NIL or above != NIL or head[BUDGET] <= 0:
                break
            head[BUDGET] -= 1
        steps -= 1
        room = usable(head, span, node)
        if size <= room < best_size:
            best, best_size = node, room
            if room == size:
                break
        node = link[node, NEXT]
    if best != NIL or above == NIL:
        return best
    node = head[BIN_LIST + above]
    for _ in range(head[SCAN]):
        room = usable(head, span, node)
        if room < best_size:
            best, best_size = node, room
        node = link[node, NEXT]
        if node == NIL:
            break
    return best


@njit(**HELPER)
def note_room(head):
    """Write down the most that a hole of the topmost bin can hold. O(1)."""
    if head[BIN_LEVELS] == 0:
        head[ROOM] = 0
        return
    level = log2_floor(head[BIN_LEVELS])
    place = log2_floor(head[BIN_MAP + level])
    units = place if level == 0 else ((BINS + 1 + place) << (level - 1)) - 1
    head[ROOM] = units << head[SHIFT]


@njit(**HELPER)
def hole_largest(head, span, link):
    """The largest of the first holes in the topmost bin; NIL when there is no hole. O(1)."""
    if head[BIN_LEVELS] == 0:
        return NIL
    level = log2_floor(head[BIN_LEVELS])
    node = head[BIN_LIST + level * BINS + log2_floor(head[BIN_MAP + level])]
    best, best_size = NIL, 0
    for _ in range(16):
        room = usable(head, span, node)
        if room > best_size:
            best, best_size = node, room
        node = link[node, NEXT]
        if node == NIL:
            break
    return best


# --- nodes: the pool as a linked sequence of ranges; node 0 is always the leftmost ----------------


@njit(**HELPER)
def node_new(head, span, link, start, size, left, right):
    """Create a node between two neighbours; the caller has checked NODE_LEFT. O(1)."""
    node = head[NODE_SPARE]
    if node != NIL:
        head[NODE_SPARE] = link[node, NEXT]
    else:
        node = head[NODE_TOP]
        head[NODE_TOP] += 1
    head[NODE_LEFT] -= 1
    span[node, START] = start
    span[node, SIZE] = size
    link[node, LEFT] = left
    link[node, RIGHT] = right
    if left != NIL:
        link[left, RIGHT] = node
    if right != NIL:
        link[right, LEFT] = node
    return node


@njit(**HELPER)
def node_absorb(head, span, link, node):
    """Merge the right neighbour (already out of every index) into a hole. O(1)."""
    right = link[node, RIGHT]
    after = link[right, RIGHT]
    span[node, SIZE] += span[right, SIZE]
    link[node, RIGHT] = after
    if after != NIL:
        link[after, LEFT] = node
    span[right, SIZE] = 0
    link[right, NEXT] = head[NODE_SPARE]
    head[NODE_SPARE] = right
    head[NODE_LEFT] += 1


@njit(**HELPER)
def carve(head, span, link, bucket, hole, start, size):
    """Allocate [start, start + size) inside a hole and return its node. O(1).

    The leftmost part keeps the node, so node 0 never moves. Needs two nodes at most; the
    caller has checked NODE_LEFT.
    """
    bin_remove(head, span, link, hole)
    low = span[hole, START]
    high = low + span[hole, SIZE]
    node = hole
    if start > low:
        span[hole, SIZE] = start - low
        node = node_new(head, span, link, start, size, hole, link[hole, RIGHT])
        bin_insert(head, span, link, hole)
    if start + size < high:
        rest = node_new(
            head, span, link, start + size, high - start - size, node, link[node, RIGHT]
        )
        bin_insert(head, span, link, rest)
    span[node, SIZE] = -size
    hash_insert(head, span, link, bucket, node)
    return node


@njit(**HELPER)
def release(head, span, link, bucket, node):
    """Turn an allocated node into a hole, merge it with its neighbours, return it. O(1)."""
    hash_remove(head, span, link, bucket, node)
    span[node, SIZE] = -span[node, SIZE]
    right = link[node, RIGHT]
    if right != NIL and span[right, SIZE] > 0:
        bin_remove(head, span, link, right)
        node_absorb(head, span, link, node)
    left = link[node, LEFT]
    if left != NIL and span[left, SIZE] > 0:
        bin_remove(head, span, link, left)
        node_absorb(head, span, link, left)
        node = left
    bin_insert(head, span, link, node)
    return node


@njit(**HELPER)
def extent_take(head, span, link, bucket, size):
    """Allocate an extent of `size` bytes (a multiple of the granule): its node, or NIL. O(SCAN).

    What is left of the hole goes beside its larger neighbour: when that one is freed the two
    join to a hole that is more likely to fit a large request.
    """
    if head[NODE_LEFT] < 2:
        return NIL
    hole = hole_find(head, span, link, size)
    if hole == NIL:
        return NIL
    start = round_up(span[hole, START], head[GRANULE])
    left, right = link[hole, LEFT], link[hole, RIGHT]
    if left != NIL and right != NIL and span[left, SIZE] < span[right, SIZE]:
        # Both neighbours are allocated, so their sizes are negative: the left one is larger.
        start = ((span[hole, START] + span[hole, SIZE]) & -head[GRANULE]) - size
    return carve(head, span, link, bucket, hole, start, size)


@njit(**HELPER)
def extent_give(head, span, link, bucket, start):
    """Free the extent that starts at `start`; False where none does. O(1)."""
    if start < 0 or start >= head[CAPACITY]:
        return False
    node = hash_find(head, span, link, bucket, start)
    if node == NIL:
        return False
    head[ALLOCATED] += span[node, SIZE]
    head[LIVE] -= 1
    # Who dissolves a slab reserves its objects in the hole that was it: no walk to get there.
    head[FINGER] = release(head, span, link, bucket, node)
    return True


# --- batches: what the allocator calls ------------------------------------------------------------


@njit(**KERNEL)
def format_pool(state):
    """Make one hole of the whole pool; the scalars of `head` are set. O(LEVELS * BINS)."""
    head, span, link, bucket = state
    for index in range(BIN_LIST, HEAD_WORDS):
        head[index] = NIL
    head[BUCKETS], head[BUCKET_MASK] = 1, 1
    bucket[0] = NIL
    node = node_new(head, span, link, 0, head[CAPACITY], NIL, NIL)
    bin_insert(head, span, link, node)
    note_room(head)


@njit(**KERNEL)
def allocate_batch(state, sizes, offsets, wanted):
    """Fill `offsets` where it says `wanted`, or everywhere when that is NIL. O(batch).

    Where there is no room it becomes NIL. Returns how many those are; or -1 - its index for a
    size below 1, and then nothing is allocated.
    """
    head, span, link, bucket = state
    for index in range(sizes.size):
        if sizes[index] <= 0:
            return -index - 1
    head[BUDGET] = BUDGET_BATCH
    failed = 0
    for index in range(sizes.size):
        if wanted != NIL and offsets[index] != wanted:
            continue
        node = NIL
        if sizes[index] <= head[CAPACITY]:
            node = extent_take(head, span, link, bucket, round_up(sizes[index], head[GRANULE]))
        if node == NIL:
            offsets[index] = NIL
            failed += 1
            continue
        offsets[index] = span[node, START]
        head[ALLOCATED] -= span[node, SIZE]
        head[LIVE] += 1
    note_room(head)
    return failed


@njit(**KERNEL)
def free_batch(state, offsets, freed):
    """Fill `freed`: whether an extent started at each offset, which is now free. O(batch)."""
    head, span, link, bucket = state
    for index in range(offsets.size):
        freed[index] = extent_give(head, span, link, bucket, offsets[index])
    note_room(head)


@njit(**KERNEL)
def holds_batch(state, offsets, found):
    """Fill `found`: whether an extent starts at each offset. O(batch)."""
    head, span, link, bucket = state
    for index in range(offsets.size):
        start = offsets[index]
        found[index] = (
            0 <= start < head[CAPACITY] and hash_find(head, span, link, bucket, start) != NIL
        )


@njit(**KERNEL)
def free_some(state, offsets, freed, chosen, count):
    """Do what `free_batch` does for the positions that come first in `chosen`. O(count)."""
    head, span, link, bucket = state
    for place in range(count):
        index = chosen[place]
        freed[index] = extent_give(head, span, link, bucket, offsets[index])
    note_room(head)


@njit(**KERNEL)
def reserve_batch(state, offsets, sizes, done):
    """Fill `done`: whether each range was free and is now an extent. O(batch + nodes walked).

    Ranges come in ascending order: the walk continues where the last one ended, so a whole
    object table costs one walk over the pool. Ranges are taken as given, not rounded: rounding
    could overlap a neighbour that has yet to be reserved.
    """
    head, span, link, bucket = state
    hash_widen(head, bucket, offsets.size)
    for index in range(offsets.size):
        start, size = offsets[index], sizes[index]
        done[index] = False
        if start < 0 or size > head[CAPACITY] or start > head[CAPACITY] - size:
            continue
        node = head[FINGER]
        if span[node, SIZE] == 0:
            node = 0
        while span[node, START] > start:
            node = link[node, LEFT]
        while span[node, START] + abs(span[node, SIZE]) <= start:
            node = link[node, RIGHT]
        head[FINGER] = node
        if start + size > span[node, START] + span[node, SIZE] or head[NODE_LEFT] < 2:
            continue
        head[FINGER] = carve(head, span, link, bucket, node, start, size)
        head[ALLOCATED] += size
        head[LIVE] += 1
        done[index] = True
    note_room(head)


@njit(**KERNEL)
def largest_free(state):
    """Bytes of the largest extent that can be had at once, to within one bin. O(1)."""
    head, span, link, _ = state
    hole = hole_largest(head, span, link)
    return 0 if hole == NIL else usable(head, span, hole)


def warmup() -> None:
    """Call every kernel once with the types used in production, so that the cache holds it."""
    head = np.zeros(HEAD_WORDS, np.int64)
    head[[CAPACITY, GRANULE, SHIFT, NODE_SPARE, NODE_LEFT, BUCKET_MAX, SCAN]] = (
        1 << 20, 64, 6, NIL, 16, 16, 16,
    )  # fmt: skip
    span = np.zeros((16, 4), np.int64)
    state = (head, span, span.view(np.int32), np.zeros(16, np.int32))
    sizes, offsets = np.full(2, 64, np.int64), np.zeros(2, np.int64)
    flags = np.zeros(2, np.bool_)
    format_pool(state)
    allocate_batch(state, sizes, offsets, NIL)
    free_batch(state, offsets, flags)
    free_some(state, offsets, flags, offsets, 1)
    holds_batch(state, offsets, flags)
    reserve_batch(state, offsets, sizes, flags)
    largest_free(state)
