"""Kernels of the slab layer: size classes, and slabs cut into equal slots with one bit each.

The layer owns no space: its slabs are extents that the caller takes from the extent layer and
gives back when a slab is empty. The state is a tuple of five arrays, one argument to each kernel:

    head    int64[HEAD_WORDS]
    slab    int64[slabs, 8]     one row, one cache line, per slab
    bits    uint32[...]         per slab: summary words, then leaf words; a set bit is a free slot
    page    int32[...]          slab that holds the first byte of each page of the pool
    cls     int64[classes, 6]   size classes, and the sizes on probation

A slot costs a little more than one bit (the bitmap of a slab is rounded up to a power of two of
32-bit words), a slab its row. A slab's row is all zeros in SLOTS when it is not in use.

Cost: every helper is O(1) except where its docstring says otherwise. Numbers stay below 2**62,
so that the same functions run as plain Python through `.py_func`.
"""

import numpy as np

from alloc.kernels.extents import HELPER, KERNEL, log2_floor, low_bit, mix
from kernel_cache import njit

NIL = -1
EXTENT = -2  # in offsets: to be served as an extent of its own
PENDING = -3  # in offsets: its class needs another slab first

# head: bytes in live slots, live slots, bytes of all slabs' extents, slabs in use.
ALLOCATED, LIVE, HELD, SLABS = 0, 1, 2, 3
# Rows of `slab` ever used, first spare one (chained through S_NEXT), rows at most.
SLAB_TOP, SLAB_SPARE, SLAB_MAX = 4, 5, 6
# Words of `bits` ever used (word 0 never is, so that 0 can mean none), words at most.
BITS_TOP, BITS_MAX = 7, 8
# CAPACITY in bytes; strides are multiples of ALIGN, and above EXACT_MAX of GRANULE.
CAPACITY, ALIGN, GRANULE = 9, 10, 11
# log2 of the page: no slab is smaller. Largest slab in bytes, smallest in slots.
PAGE_SHIFT, SLAB_BYTES_MAX, SLOTS_MIN = 12, 13, 14
# Asks before a size becomes a class; number of the current batch; clock hand of `sparse_slabs`.
LEARN, BATCH, HAND = 15, 16, 17
BITS_SPARE = 20  # first of 20 free lists of bitmaps, by log2 of their words
HEAD_WORDS = 40

S_START, S_STRIDE, S_SLOTS, S_FREE, S_BITS, S_CLASS, S_PREV, S_NEXT = 0, 1, 2, 3, 4, 5, 6, 7
# Stride; asks; first slab with a free slot; slots of all slabs; last batch that wanted a slab, and
# for how many objects.
C_STRIDE, C_ASKS, C_PARTIAL, C_SLOTS, C_BATCH, C_WANT = 0, 1, 2, 3, 4, 5
CLASS_SETS = 512
CLASS_WAYS = 8

STRIDE_MIN = 8
EXACT_MAX = 8192  # above this, rounding a stride up to the granule of 64 loses less than 1 %
SLAB_SLOTS = 1024  # a grown class takes slabs of this many slots ...
SLAB_BYTES = 1 << 23  # ... or this many bytes, whichever is more
SLOTS_MAX = 1 << 16
ASKS_MAX = 64  # so that a size that is no longer asked for is soon forgotten
SPARSE_LOOK = 256  # slabs looked at by one call of sparse_slabs, ...
SPARSE_FOUND = 16  # ... and found at most
SPARSE_LIVE = 4096  # with this many live objects in what it found, it looks no further


# --- bitmaps --------------------------------------------------------------------------------------


@njit(**HELPER)
def bits_words(slots):
    """(summary words, all words) of the bitmap of a slab. O(1)."""
    leaves = (slots + 31) >> 5
    summary = (leaves + 31) >> 5
    return summary, summary + leaves


@njit(**HELPER)
def bits_take(head, bits, slots):
    """A bitmap with all slots free: its first word, or 0 when there is no room. O(slots / 32)."""
    summary, words = bits_words(slots)
    order = log2_floor(2 * words - 1)
    base = head[BITS_SPARE + order]
    if base:
        head[BITS_SPARE + order] = bits[base]
    else:
        base = head[BITS_TOP]
        if base + (1 << order) > head[BITS_MAX]:
            return 0
        head[BITS_TOP] += 1 << order
    for index in range(base, base + words):
        bits[index] = 0xFFFFFFFF
    leaves = words - summary
    if leaves & 31:
        bits[base + summary - 1] = (1 << (leaves & 31)) - 1
    if slots & 31:
        bits[base + words - 1] = (1 << (slots & 31)) - 1
    return base


@njit(**HELPER)
def bits_give(head, bits, base, slots):
    """Return a bitmap to the free list of its size. O(1)."""
    _, words = bits_words(slots)
    order = log2_floor(2 * words - 1)
    bits[base] = head[BITS_SPARE + order]
    head[BITS_SPARE + order] = base


# --- slabs ----------------------------------------------------------------------------------------


@njit(**HELPER)
def slab_at(head, slab, page, offset):
    """Slab whose slots cover `offset`, or NIL. O(1).

    No slab is smaller than a page, so the slab of a byte also holds the first byte of that
    byte's page or of the next one. Entries of dead slabs are left in `page`: a slab's own range
    decides.
    """
    at = offset >> head[PAGE_SHIFT]
    for index in (at, at + 1):
        found = page[index]
        start = slab[found, S_START]
        if start <= offset < start + slab[found, S_STRIDE] * slab[found, S_SLOTS]:
            return found
    return NIL


@njit(**HELPER)
def partial_push(slab, cls, index):
    """Enter a slab at the front of its class's list of slabs with free slots. O(1)."""
    owner = slab[index, S_CLASS]
    first = cls[owner, C_PARTIAL]
    slab[index, S_PREV] = NIL
    slab[index, S_NEXT] = first
    if first != NIL:
        slab[first, S_PREV] = index
    cls[owner, C_PARTIAL] = index


@njit(**HELPER)
def partial_remove(slab, cls, index):
    """Take a slab out of its class's list of slabs with free slots. O(1)."""
    before = slab[index, S_PREV]
    after = slab[index, S_NEXT]
    if after != NIL:
        slab[after, S_PREV] = before
    if before != NIL:
        slab[before, S_NEXT] = after
    else:
        cls[slab[index, S_CLASS], C_PARTIAL] = after


@njit(**HELPER)
def slots_take(head, slab, bits, cls, index, offsets, first, last):
    """Give offsets[first:last] the lowest free slots of a slab that has one; how many it had.

    O(slots taken), plus at most 64 summary words. A word of the bitmap stays in a register while
    slots are taken from it: by way of memory each would wait for the one before.
    """
    base, stride = slab[index, S_BITS], slab[index, S_STRIDE]
    summary, _ = bits_words(slab[index, S_SLOTS])
    count = min(last - first, slab[index, S_FREE])
    at, done = base, 0
    while done < count:
        while bits[at] == 0:
            at += 1
        group = np.int64(bits[at])
        leaf = ((at - base) << 5) + low_bit(group)
        word = np.int64(bits[base + summary + leaf])
        start = slab[index, S_START] + (leaf << 5) * stride
        while word != 0 and done < count:
            offsets[first + done] = start + low_bit(word) * stride
            word &= word - 1
            done += 1
        bits[base + summary + leaf] = word
        if word == 0:
            bits[at] = group & (group - 1)
    slab[index, S_FREE] -= count
    if slab[index, S_FREE] == 0:
        partial_remove(slab, cls, index)
    head[ALLOCATED] += count * stride
    head[LIVE] += count
    return count


@njit(**HELPER)
def slot_is_free(slab, bits, index, slot):
    """Whether a slot is free. O(1)."""
    summary, _ = bits_words(slab[index, S_SLOTS])
    word = np.int64(bits[slab[index, S_BITS] + summary + (slot >> 5)])
    return (word >> (slot & 31)) & 1 == 1


@njit(**HELPER)
def slot_give(head, slab, bits, cls, index, offset):
    """Free the slot at `offset`; False where no live object starts. O(1)."""
    stride = slab[index, S_STRIDE]
    slot = (offset - slab[index, S_START]) // stride
    if slab[index, S_START] + slot * stride != offset or slot_is_free(slab, bits, index, slot):
        return False
    summary, _ = bits_words(slab[index, S_SLOTS])
    base = slab[index, S_BITS]
    where = base + summary + (slot >> 5)
    bits[where] = np.int64(bits[where]) | (1 << (slot & 31))
    where = base + (slot >> 10)
    bits[where] = np.int64(bits[where]) | (1 << ((slot >> 5) & 31))
    slab[index, S_FREE] += 1
    head[ALLOCATED] -= stride
    head[LIVE] -= 1
    if slab[index, S_FREE] == 1:
        partial_push(slab, cls, index)
    return True


@njit(**HELPER)
def slab_close(head, slab, bits, cls, index):
    """Forget a slab that is in its class's partial list. O(1)."""
    partial_remove(slab, cls, index)
    slots = slab[index, S_SLOTS]
    cls[slab[index, S_CLASS], C_SLOTS] -= slots
    head[HELD] -= (slab[index, S_STRIDE] * slots + head[GRANULE] - 1) & -head[GRANULE]
    head[SLABS] -= 1
    bits_give(head, bits, slab[index, S_BITS], slots)
    slab[index, S_SLOTS] = 0
    slab[index, S_NEXT] = head[SLAB_SPARE]
    head[SLAB_SPARE] = index


@njit(**HELPER)
def slab_open(head, slab, bits, page, cls, owner, start, size):
    """Cut an extent into slots; False when the bitmaps or rows run out. O(slots / 32 + pages)."""
    stride = cls[owner, C_STRIDE]
    slots = min(size // stride, SLOTS_MAX)
    if head[SLAB_SPARE] == NIL and head[SLAB_TOP] >= head[SLAB_MAX]:
        return False
    base = bits_take(head, bits, slots)
    if base == 0:
        return False
    index = head[SLAB_SPARE]
    if index != NIL:
        head[SLAB_SPARE] = slab[index, S_NEXT]
    else:
        index = head[SLAB_TOP]
        head[SLAB_TOP] += 1
    slab[index, S_START] = start
    slab[index, S_STRIDE] = stride
    slab[index, S_SLOTS] = slots
    slab[index, S_FREE] = slots
    slab[index, S_BITS] = base
    slab[index, S_CLASS] = owner
    cls[owner, C_SLOTS] += slots
    head[HELD] += (stride * slots + head[GRANULE] - 1) & -head[GRANULE]
    head[SLABS] += 1
    partial_push(slab, cls, index)
    shift = head[PAGE_SHIFT]
    for at in range(
        (start + (1 << shift) - 1) >> shift, ((start + slots * stride - 1) >> shift) + 1
    ):
        page[at] = index
    return True


# --- classes: a set-associative table of fixed size -----------------------------------------------


@njit(**HELPER)
def class_of(head, cls, stride):
    """Class of a stride if it is (or now becomes) worth slabs, else NIL; counts the ask. O(1).

    A size on probation is displaced when sizes that miss have used up its asks; a class that has
    slabs, or waits for one in this batch, is not. A size that finds no place gets extents.
    """
    first = (mix(stride) % CLASS_SETS) * CLASS_WAYS
    victim, fewest = NIL, 1 << 61
    for index in range(first, first + CLASS_WAYS):
        if cls[index, C_STRIDE] == stride:
            cls[index, C_ASKS] = min(cls[index, C_ASKS] + 1, ASKS_MAX)
            if cls[index, C_ASKS] >= head[LEARN] or cls[index, C_SLOTS] > 0:
                return index
            return NIL
        waits = cls[index, C_BATCH] == head[BATCH]
        if cls[index, C_SLOTS] == 0 and not waits and cls[index, C_ASKS] < fewest:
            victim, fewest = index, cls[index, C_ASKS]
    if victim == NIL:
        return NIL
    if fewest > 0:
        cls[victim, C_ASKS] -= 1
        return NIL
    cls[victim, C_STRIDE] = stride
    cls[victim, C_ASKS] = 1
    cls[victim, C_PARTIAL] = NIL
    cls[victim, C_BATCH] = 0
    return victim if head[LEARN] <= 1 else NIL


@njit(**HELPER)
def stride_of(head, size):
    """Bytes of the slot that an object of `size` bytes gets. O(1)."""
    stride = max((size + head[ALIGN] - 1) & -head[ALIGN], STRIDE_MIN)
    if stride > EXACT_MAX:
        stride = (stride + head[GRANULE] - 1) & -head[GRANULE]
    return stride


@njit(**HELPER)
def owner_of(head, cls, size):
    """Class that serves a size, else EXTENT, or NIL for a size larger than the pool. O(1)."""
    if size > head[CAPACITY]:
        return NIL
    stride = stride_of(head, size)
    if stride * head[SLOTS_MIN] > head[SLAB_BYTES_MAX]:
        return EXTENT
    owner = class_of(head, cls, stride)
    return EXTENT if owner == NIL else owner


@njit(**HELPER)
def slab_least(head, stride):
    """Slots of the smallest slab of a class: a page, and SLOTS_MIN. O(1)."""
    return max(head[SLOTS_MIN], ((1 << head[PAGE_SHIFT]) + stride - 1) // stride)


@njit(**HELPER)
def slab_most(head, stride):
    """Slots of the largest slab of a class, never fewer than of the smallest. O(1)."""
    most = min(max(SLAB_SLOTS, SLAB_BYTES // stride), head[SLAB_BYTES_MAX] // stride, SLOTS_MAX)
    return max(most, slab_least(head, stride))


@njit(**HELPER)
def slab_size(head, cls, owner, wanted):
    """Bytes of the next slab of a class that lacks `wanted` slots, and the least of use. O(1).

    A slab is an eighth of what the class has already, so that what a class leaves idle stays in
    proportion to what it uses, and within the limits above.
    """
    stride = cls[owner, C_STRIDE]
    least = slab_least(head, stride)
    slots = max(least, min(slab_most(head, stride), max(cls[owner, C_SLOTS] >> 3, wanted)))
    return slots * stride, least * stride


# --- batches: what the allocator calls ----------------------------------------------------------


@njit(**KERNEL)
def take_batch(state, sizes, offsets, again, owners, room):
    """Give slots, and list in `owners` the classes that want a slab. O(batch).

    No extent is larger than `room`: a class that needs more for its smallest slab wants none.

    The first call of a batch (`again` False) writes to each of `offsets` an offset, NIL (larger
    than the pool), EXTENT or PENDING; it refuses a size below 1 by returning -1 - its index, and
    then nothing has changed. Calls after `open_batch` (`again` True) go on with what is PENDING.
    Returns how many classes want a slab, and how many entries are EXTENT.
    """
    head, slab, bits, _, cls = state
    if not again:
        for index in range(sizes.size):
            if sizes[index] <= 0:
                return -index - 1, 0
        head[BATCH] += 1
    wanting, owner = 0, NIL
    index, stop = 0, 0  # up to `stop` sizes are the same, and so is the class
    while index < sizes.size:
        if again and offsets[index] != PENDING:
            index += 1
            continue
        if index >= stop:
            owner = owner_of(head, cls, sizes[index])
            stop = index + 1
            while owner >= 0 and stop < sizes.size and sizes[stop] == sizes[index]:
                if again and offsets[stop] != PENDING:
                    break
                stop += 1
        if owner < 0:
            offsets[index] = owner
        elif cls[owner, C_PARTIAL] != NIL:
            slab_index = cls[owner, C_PARTIAL]
            index += slots_take(head, slab, bits, cls, slab_index, offsets, index, stop)
            continue
        elif cls[owner, C_BATCH] != head[BATCH]:
            cls[owner, C_BATCH] = head[BATCH]
            stride = cls[owner, C_STRIDE]
            if slab_least(head, stride) * stride > room:
                cls[owner, C_WANT] = 0
                continue
            cls[owner, C_WANT] = 1
            owners[wanting] = owner
            wanting += 1
            offsets[index] = PENDING
        elif cls[owner, C_WANT] > 0:
            cls[owner, C_WANT] += 1
            offsets[index] = PENDING
        else:
            offsets[index] = EXTENT
        index += 1
    singles = 0
    for index in range(sizes.size):
        singles += offsets[index] == EXTENT
    return wanting, singles


@njit(**KERNEL)
def size_batch(state, owners, sizes, least):
    """Fill in the bytes each class wants for its next slab and the least that will do. O(n)."""
    head, _, _, _, cls = state
    for index in range(owners.size):
        owner = owners[index]
        sizes[index], least[index] = slab_size(head, cls, owner, cls[owner, C_WANT])


@njit(**KERNEL)
def open_batch(state, owners, starts, sizes):
    """Make a slab of each extent and return how many could not be used. O(n) slabs.

    A class whose start is NIL, or is left PENDING here because the tables are full, gets no more
    slabs in this batch.
    """
    head, slab, bits, page, cls = state
    refused = 0
    for index in range(owners.size):
        owner = owners[index]
        cls[owner, C_WANT] = 0
        if starts[index] == NIL:
            continue
        if slab_open(head, slab, bits, page, cls, owner, starts[index], sizes[index]):
            cls[owner, C_BATCH] = 0
        else:
            refused += 1
            starts[index] = PENDING
    return refused


@njit(**KERNEL)
def give_batch(state, offsets, freed, rest, emptied):
    """Free slots: fill `freed`, and list what is not in a slab and which extents are empty now.

    Returns the lengths of both lists: positions in `offsets`, and starts of extents. O(batch).
    """
    head, slab, bits, page, cls = state
    others, empty = 0, 0
    for index in range(offsets.size):
        offset = offsets[index]
        freed[index] = False
        if offset < 0 or offset >= head[CAPACITY]:
            continue
        found = slab_at(head, slab, page, offset)
        if found == NIL:
            rest[others] = index
            others += 1
        elif slot_give(head, slab, bits, cls, found, offset):
            freed[index] = True
            if slab[found, S_FREE] == slab[found, S_SLOTS]:
                emptied[empty] = slab[found, S_START]
                empty += 1
                slab_close(head, slab, bits, cls, found)
    return others, empty


@njit(**KERNEL)
def holds_batch(state, offsets, found, inside):
    """Fill `found`: whether a slot at each offset is taken, and `inside`: whether a slab is there.

    O(batch).
    """
    head, slab, bits, page, _ = state
    for index in range(offsets.size):
        offset = offsets[index]
        found[index] = inside[index] = False
        if offset < 0 or offset >= head[CAPACITY]:
            continue
        at = slab_at(head, slab, page, offset)
        if at == NIL:
            continue
        inside[index] = True
        slot = (offset - slab[at, S_START]) // slab[at, S_STRIDE]
        begins = slab[at, S_START] + slot * slab[at, S_STRIDE] == offset
        found[index] = begins and not slot_is_free(slab, bits, at, slot)


@njit(**KERNEL)
def sparse_slabs(state, found):
    """List slabs that are three quarters free among the next SPARSE_LOOK slabs. O(1)."""
    head, slab, _, _, _ = state
    count, total = 0, 0
    for _ in range(min(SPARSE_LOOK, head[SLAB_TOP])):
        if count == SPARSE_FOUND or total >= SPARSE_LIVE:
            break
        if head[HAND] >= head[SLAB_TOP]:
            head[HAND] = 0
        index = head[HAND]
        head[HAND] += 1
        slots = slab[index, S_SLOTS]
        live = slots - slab[index, S_FREE]
        if slots > 0 and 4 * live <= slots:
            found[count] = index
            count += 1
            total += live
    return count


@njit(**KERNEL)
def dissolve(state, index, live):
    """Close a slab and list the offsets of its live objects, ascending: how many. O(slots)."""
    head, slab, bits, _, cls = state
    stride, slots = slab[index, S_STRIDE], slab[index, S_SLOTS]
    count = 0
    for slot in range(slots):
        if not slot_is_free(slab, bits, index, slot):
            live[count] = slab[index, S_START] + slot * stride
            count += 1
    if count == slots:
        partial_push(slab, cls, index)
    head[ALLOCATED] -= count * stride
    head[LIVE] -= count
    slab_close(head, slab, bits, cls, index)
    return count


def small_state():
    """The state of an empty pool of 4 KiB, of the types used in production."""
    head = np.zeros(HEAD_WORDS, np.int64)
    head[[SLAB_SPARE, SLAB_MAX, BITS_TOP, BITS_MAX, CAPACITY, ALIGN, GRANULE]] = (
        NIL, 4, 1, 64, 4096, 1, 64,
    )  # fmt: skip
    head[[PAGE_SHIFT, SLAB_BYTES_MAX, SLOTS_MIN, LEARN]] = 6, 1024, 1, 1
    cls = np.zeros((CLASS_SETS * CLASS_WAYS, 6), np.int64)
    cls[:, C_PARTIAL] = NIL
    page = np.zeros(66, np.int32)
    return head, np.zeros((4, 8), np.int64), np.zeros(64, np.uint32), page, cls


def warmup() -> None:
    """Call every kernel once with the types used in production, so that the cache holds it."""
    state = small_state()
    column = [np.full(1, 64, np.int64) for _ in range(5)]
    sizes, offsets, owners, starts, least = column
    take_batch(state, sizes, offsets, False, owners, 4096)
    size_batch(state, owners, starts, least)
    starts[0] = 0
    open_batch(state, owners, starts, least)
    take_batch(state, sizes, offsets, True, owners, 4096)
    sparse_slabs(state, owners)
    dissolve(state, 0, owners)
    give_batch(state, offsets, np.zeros(1, np.bool_), starts, least)
    holds_batch(state, offsets, *np.zeros((2, 1), np.bool_))
