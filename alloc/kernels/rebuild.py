"""Kernel that finds slabs again where a table of objects says what lies in an empty pool.

Objects of one slab begin at multiples of their stride from each other, and nothing else lies
between them. Such a run becomes a slab again, which has slots for the gaps as well; all else
becomes extents. A run is one only if

- it has no gap that a slab of its own fits into: that is left to whoever needs it;
- more than a quarter of its slots is live, since `sparse_slabs` would have it dissolved otherwise;
- it is as long as the smallest slab of its class, or free room beside it makes it so, and as many
  objects as half of that slab has slots are live: a few equal extents side by side are not meant.

The state is that of `slabs`. Not done here: sorting the table, and reserving in the extent layer
what is listed. Cost: O(ranges); whether a run is a slab is decided once for all of it.
"""

import numpy as np

from alloc.kernels.extents import HELPER, KERNEL, mix, round_up
from alloc.kernels.slabs import (
    ALLOCATED,
    C_ASKS,
    C_BATCH,
    C_PARTIAL,
    C_SLOTS,
    C_STRIDE,
    CAPACITY,
    CLASS_SETS,
    CLASS_WAYS,
    GRANULE,
    LEARN,
    LIVE,
    NIL,
    S_BITS,
    S_FREE,
    SLAB_BYTES_MAX,
    SLOTS_MIN,
    bits_words,
    partial_remove,
    slab_least,
    slab_most,
    slab_open,
    small_state,
    stride_of,
)
from kernel_cache import njit

GAP_SLOTS = 8  # a gap of fewer stays in its slab, even if a slab fits into it

# --- ranges ---------------------------------------------------------------------------------------


@njit(**HELPER)
def refused(head, reach, start, size):
    """Whether a range leaves the pool, or begins before `reach`, where the last one ended. O(1)."""
    return start < reach or size > head[CAPACITY] or start > head[CAPACITY] - size


@njit(**HELPER)
def has_neighbour(head, sizes, index, stride):
    """Whether the next range may lie in the same slab: else none is worth a division. O(1)."""
    if index + 1 == sizes.size or sizes[index + 1] > head[CAPACITY]:
        return False
    return stride_of(head, sizes[index + 1]) == stride


@njit(**HELPER)
def period_of(head, stride):
    """Every how many slots one begins at a multiple of the granule: a power of two. O(1)."""
    return head[GRANULE] // min(stride & -stride, head[GRANULE])


@njit(**HELPER)
def slots_before(head, start, stride, reach):
    """Slots from the nearest start that a slab with a slot at `start` can have, or NIL. O(1).

    A slab begins at a multiple of the granule, as not every slot does, and not before `reach`.
    """
    if stride * head[SLOTS_MIN] > head[SLAB_BYTES_MAX]:
        return NIL
    common = min(stride & -stride, head[GRANULE])
    if start & (common - 1) != 0:
        return NIL
    mask = head[GRANULE] // common - 1  # below 64: a larger granule divides every stride
    odd = (stride // common) & mask
    # Of an odd number, itself is an inverse modulo 8, and after one step of Newton's modulo 64.
    inverse = odd * (2 - odd * odd)
    count = (((start // common) & mask) * inverse) & mask
    return count if start - count * stride >= reach else NIL


# --- runs -----------------------------------------------------------------------------------------


@njit(**HELPER)
def run_cut(head, stride, front):
    """Slots from a range on that are left for a slab of the largest size. O(1).

    Cut at a multiple of the granule where that leaves enough, so that the next slab begins there.
    """
    most = slab_most(head, stride)
    even = most & -period_of(head, stride)
    return (even if even >= slab_least(head, stride) else most) - front


@njit(**HELPER)
def run_find(head, offsets, sizes, done, first, stride, front):
    """The run that begins with range `first`, which is `front` slots into its slab.

    Returns its last range, how many it has, and where it must end; fills `done` up to there. Once
    too few of its slots are live, any run that goes on does better without them: so it ends there.
    O(ranges walked).
    """
    widest, most = max(slab_least(head, stride), GAP_SLOTS), slab_most(head, stride)
    last, live, slots = first, 1, 1
    reach = offsets[first] + sizes[first]
    for index in range(first + 1, offsets.size):
        start, size = offsets[index], sizes[index]
        done[index] = not refused(head, reach, start, size)
        if not done[index]:
            continue
        if stride_of(head, size) != stride:
            return last, live, start
        gap = start - offsets[last]
        step = 1 if gap == stride else gap // stride
        slots += step
        if step * stride != gap or step > widest or 4 * (live + 1) <= slots:
            return last, live, start
        if front + slots > most:
            return last, live, min(start, offsets[first] + run_cut(head, stride, front) * stride)
        last, reach = index, start + size
        live += 1
    return last, live, head[CAPACITY]


@njit(**HELPER)
def run_shape(head, offsets, done, first, last, live, stride, front, reach, barrier):
    """The slab that a run can be between `reach` and `barrier`. O(1 + ranges cut off).

    Returns its start, its slots (0: it shall be none), its last range and how many it has.
    """
    least = slab_least(head, stride)
    start = offsets[first] - front * stride
    slots = (offsets[last] - start) // stride + 1
    room = ((barrier - start) & -head[GRANULE]) // stride
    while slots > room and last > first:
        # It ends at a multiple of the granule, and what lies close behind would be in the way.
        barrier = min(barrier, offsets[last])
        last -= 1
        while not done[last]:
            last -= 1
        live -= 1
        slots = (offsets[last] - start) // stride + 1
        room = ((barrier - start) & -head[GRANULE]) // stride
    if slots > room or live < 2 or 2 * live < least:
        return start, 0, last, live
    lacking = max(least - slots, 0)
    behind = min(lacking, room - slots)
    before = round_up(lacking - behind, period_of(head, stride))
    if start - before * stride < reach:
        return start, 0, last, live
    slots += behind + before
    if 4 * live <= slots or slots > slab_most(head, stride):
        slots = 0
    return start - before * stride, slots, last, live


# --- slabs ----------------------------------------------------------------------------------------


@njit(**HELPER)
def class_enter(head, cls, stride):
    """Class of a stride that has objects, learned at once, or NIL where there is no place. O(1).

    Any size without slabs gives way, since nothing waits for one between batches.
    """
    first = (mix(stride) % CLASS_SETS) * CLASS_WAYS
    victim, fewest = NIL, 1 << 61
    for index in range(first, first + CLASS_WAYS):
        if cls[index, C_STRIDE] == stride:
            cls[index, C_ASKS] = max(cls[index, C_ASKS], head[LEARN])
            return index
        if cls[index, C_SLOTS] == 0 and cls[index, C_ASKS] < fewest:
            victim, fewest = index, cls[index, C_ASKS]
    if victim != NIL:
        cls[victim, C_STRIDE] = stride
        cls[victim, C_ASKS] = head[LEARN]
        cls[victim, C_PARTIAL] = NIL
        cls[victim, C_BATCH] = 0
    return victim


@njit(**HELPER)
def run_open(state, offsets, done, first, last, live, stride, start, slots):
    """Open the slab of a run, its ranges live: its row, or NIL where the tables are full.

    O(ranges of the run + slots / 32).
    """
    head, slab, bits, page, cls = state
    owner = class_enter(head, cls, stride)
    if owner == NIL:
        return NIL
    if not slab_open(head, slab, bits, page, cls, owner, start, slots * stride):
        return NIL
    index = cls[owner, C_PARTIAL]
    base = slab[index, S_BITS]
    summary, words = bits_words(slots)
    slot, before = 0, start
    for at in range(first, last + 1):
        if not done[at]:
            continue
        gap = offsets[at] - before
        slot += 1 if gap == stride else gap // stride
        before = offsets[at]
        where = base + summary + (slot >> 5)
        bits[where] = np.int64(bits[where]) & ~(1 << (slot & 31))
    for leaf in range(words - summary):
        if bits[base + summary + leaf] == 0:
            where = base + (leaf >> 5)
            bits[where] = np.int64(bits[where]) & ~(1 << (leaf & 31))
    slab[index, S_FREE] = slots - live
    head[ALLOCATED] += live * stride
    head[LIVE] += live
    if live == slots:
        partial_remove(slab, cls, index)
    return index


# --- batches: what the allocator calls ------------------------------------------------------------


@njit(**KERNEL)
def rebuild_batch(state, offsets, sizes, done, starts, lengths, opened):
    """Open slabs for what lay in slabs, and list the extents that an empty pool needs for it all.

    Ranges come in ascending order. Fills `done`: whether each is in the pool and overlaps none
    before it that was taken. Writes start and length of every extent, ascending, and the slab
    that lies there, NIL for an object of its own; returns how many there are. O(ranges).
    """
    head, _, _, _, _ = state
    count, reach, index = 0, 0, 0
    while index < offsets.size:
        done[index] = not refused(head, reach, offsets[index], sizes[index])
        if not done[index]:
            index += 1
            continue
        last, found, front = index, NIL, NIL
        stride = stride_of(head, sizes[index])
        if has_neighbour(head, sizes, index, stride):
            front = slots_before(head, offsets[index], stride, reach)
        if front != NIL:
            last, live, barrier = run_find(head, offsets, sizes, done, index, stride, front)
            start, slots, end, live = run_shape(
                head, offsets, done, index, last, live, stride, front, reach, barrier
            )
            if slots > 0:
                found = run_open(state, offsets, done, index, end, live, stride, start, slots)
            if found != NIL:
                last = end
                starts[count], opened[count] = start, found
                lengths[count] = round_up(slots * stride, head[GRANULE])
                reach = start + lengths[count]
                count += 1
        if found == NIL:
            for at in range(index, last + 1):
                if done[at]:
                    starts[count], lengths[count], opened[count] = offsets[at], sizes[at], NIL
                    count += 1
            reach = offsets[last] + sizes[last]
        index = last + 1
    return count


def warmup() -> None:
    """Call the kernel once with the types used in production, so that the cache holds it."""
    offsets, sizes = np.arange(0, 512, 64, np.int64), np.full(8, 64, np.int64)
    starts, lengths, opened = (np.empty(8, np.int64) for _ in range(3))
    rebuild_batch(small_state(), offsets, sizes, np.empty(8, np.bool_), starts, lengths, opened)
