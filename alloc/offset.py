"""OffsetAllocator: extents of any size, two-level bins of holes, immediate coalescing.

Every hole is in one of 32 bins per power of two of its size, so finding one that fits is a few
bit operations; both neighbours of a freed extent are known, so holes merge at once and an empty
pool is always one hole. Extents start at multiples of 64 bytes and are rounded up to 64.

Up to 16 holes of a bin are compared and the remainder of a split is left beside its larger
neighbour. That costs some 10 ns more than the first hole in the bin, and gains 3 points of
utilisation on random sizes (docs/internals/alloc.md).

Good for few, large or ever-changing sizes; 36 bytes of memory per allocation. What it does not
do: keep small objects of one size from fragmenting the pool for large ones; see `slab`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from alloc.base import Allocator, AllocatorStats
from alloc.kernels import extents as kernels
from alloc.memory import reserve_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

CAPACITY_MAX = 1 << 47
ALIGNMENT_MAX = 1 << 21
_NODES_MAX = 1 << 28
_HOLES_COMPARED = 16
_INT64 = np.dtype(np.int64)


def check_geometry(capacity: int, alignment: int) -> None:
    """Raise ValueError unless an allocator can have this capacity and alignment."""
    if not 1 <= capacity <= CAPACITY_MAX:
        raise ValueError(f"capacity must be in 1..{CAPACITY_MAX} bytes, not {capacity}")
    if not 1 <= alignment <= ALIGNMENT_MAX or alignment & (alignment - 1):
        raise ValueError(f"alignment must be a power of two in 1..{ALIGNMENT_MAX}, not {alignment}")


def as_int64(values: Any) -> NDArray[np.int64]:
    """A one-dimensional, contiguous int64 array; ValueError for anything but integers."""
    array = values if type(values) is np.ndarray else np.asarray(values)
    if array.dtype is _INT64 and array.ndim == 1 and array.flags.c_contiguous:
        return array
    if array.size and array.dtype.kind not in "iu":
        raise ValueError(f"sizes and offsets must be integers, not {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"sizes and offsets must be one-dimensional, not {array.ndim}-dimensional")
    return np.ascontiguousarray(array, np.int64)


def refuse_size(sizes: NDArray[np.int64], index: int) -> ValueError:
    """The error for a size that is not positive."""
    return ValueError(f"size {sizes[index]} at position {index} is not positive")


def sorted_ranges(
    offsets: Any, sizes: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64] | slice]:
    """Offsets and sizes in ascending order of offset, and that order; checks both.

    Equal offsets stay in the order given. O(n) for what is in order already, else O(n log n).
    """
    offsets, sizes = as_int64(offsets), as_int64(sizes)
    if offsets.size != sizes.size:
        raise ValueError(f"{offsets.size} offsets but {sizes.size} sizes")
    if sizes.size and sizes.min() <= 0:
        raise refuse_size(sizes, int(sizes.argmin()))
    if (offsets[1:] >= offsets[:-1]).all():
        return _behaved(offsets), _behaved(sizes), slice(None)
    order = _order_of(offsets)
    return offsets[order], sizes[order], order


def _behaved(column: NDArray[np.int64]) -> NDArray[np.int64]:
    """The column, or a copy of one that is read-only: for that, kernels would be compiled anew."""
    return column if column.flags.behaved else column.copy()


def _order_of(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The order that sorts offsets, equal ones as they come. O(n log n).

    An offset and its index mostly fit into one word: sorting words compares what lies side by side,
    while sorting indexes goes through memory for each comparison.
    """
    shift = (offsets.size - 1).bit_length()
    if offsets.min() < 0 or int(offsets.max()).bit_length() + shift > 63:
        return as_int64(np.argsort(offsets, kind="stable"))
    words: NDArray[np.int64] = np.left_shift(offsets, shift)
    words |= np.arange(offsets.size)
    words.sort()
    words &= (1 << shift) - 1
    return words


class OffsetAllocator(Allocator):
    """Allocates extents of any size in O(1), for sizes that are few, large or ever-changing.

    Raises ValueError for a capacity or alignment it cannot have.
    """

    def __init__(self, capacity: int, alignment: int = 1) -> None:
        check_geometry(capacity, alignment)
        self.capacity = capacity
        self.alignment = alignment
        self.granule = max(64, alignment)
        nodes = min(capacity // 4 + 8, _NODES_MAX)
        span = reserve_array(nodes, 4, np.int64)
        bucket = reserve_array(len(span), 1, np.int32)
        head = np.zeros(kernels.HEAD_WORDS, np.int64)
        head[kernels.CAPACITY] = capacity
        head[kernels.GRANULE] = self.granule
        head[kernels.SHIFT] = self.granule.bit_length() - 1
        head[kernels.NODE_SPARE] = kernels.NIL
        head[kernels.NODE_LEFT] = len(span)
        head[kernels.BUCKET_MAX] = len(bucket)
        head[kernels.SCAN] = _HOLES_COMPARED
        self._numbers = head.data  # the same words for Python, which reads one faster
        self._state = (head, span, span.view(np.int32), bucket)
        self._found_well = b""  # what `check_integrity` saw last
        kernels.format_pool(self._state)

    def allocate(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offset per size, -1 where nothing fits. O(batch)."""
        sizes = as_int64(sizes)
        offsets = np.empty(sizes.size, np.int64)
        failed = kernels.allocate_batch(self._state, sizes, offsets, kernels.NIL)
        if failed < 0:
            raise refuse_size(sizes, -failed - 1)
        return offsets

    def fill(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64], wanted: int) -> int:
        """Allocate, in place, where `offsets` says `wanted`; how many got -1. O(batch).

        For the layer above, which has checked that sizes are positive.
        """
        return int(kernels.allocate_batch(self._state, sizes, offsets, wanted))

    def free(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an extent started at each offset; it is freed. O(batch)."""
        offsets = as_int64(offsets)
        freed = np.empty(offsets.size, np.bool_)
        kernels.free_batch(self._state, offsets, freed)
        return freed

    def holds(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an extent starts at each offset. O(batch)."""
        offsets = as_int64(offsets)
        found = np.empty(offsets.size, np.bool_)
        kernels.holds_batch(self._state, offsets, found)
        return found

    def free_some(
        self,
        offsets: NDArray[np.int64],
        freed: NDArray[np.bool_],
        chosen: NDArray[np.int64],
        count: int,
    ) -> None:
        """Free the offsets at the first `count` positions of `chosen`, and say so there."""
        kernels.free_some(self._state, offsets, freed, chosen, count)

    def reserve(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Re-create extents of exactly these bytes. O(batch log batch + nodes walked)."""
        offsets, sizes, order = sorted_ranges(offsets, sizes)
        done = self.place(offsets, sizes)
        result = np.empty_like(done)
        result[order] = done
        return result

    def place(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Do what `reserve` does with what comes in ascending order. O(batch + nodes walked).

        For the layer above, which has checked that sizes are positive.
        """
        done = np.empty(offsets.size, np.bool_)
        kernels.reserve_batch(self._state, offsets, sizes, done)
        return done

    def largest_free(self) -> int:
        """Bytes of the largest extent to be had at once, to within one bin (3 %). O(1)."""
        return int(kernels.largest_free(self._state))

    @property
    def room(self) -> int:
        """No extent larger than this can be had, though one as large need not be. O(1)."""
        return self._numbers[kernels.ROOM]

    def nodes_left(self) -> int:
        """Ranges, allocated or free, that the table can still take. O(1)."""
        return self._numbers[kernels.NODE_LEFT]

    def stats(self) -> AllocatorStats:
        """Current figures, in O(1)."""
        head = self._numbers
        return AllocatorStats(
            capacity=self.capacity,
            allocated_bytes=self.allocated_bytes,
            allocations=head[kernels.LIVE],
            largest_free=self.largest_free(),
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all extents, rounding included. O(1)."""
        return self._numbers[kernels.ALLOCATED]

    def check_integrity(self) -> None:
        """Raise AssertionError unless nodes tile the pool and every index agrees. O(n)."""
        from alloc.integrity import check_extents, extents_seal

        seal = extents_seal(self._state)
        if seal != self._found_well:
            check_extents(self._state)
            self._found_well = seal
