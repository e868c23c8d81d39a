"""SlabAllocator: one size class per size asked for, in slabs taken from an offset allocator.

A slab is an extent cut into equal slots of exactly one size, so objects of that size leave no gaps
between them, cost about two bits of memory each, and never fragment the pool for others. Sizes
are learned, not configured: the stride of a class is the size itself (above 8 KiB rounded up
to 64 bytes), so 32 KiB + 17 wastes as little as 32 KiB.

No class can hold memory for ever, because nothing belongs to a class:

- an empty slab goes back to the extents at once, for any size to use;
- a class takes slabs in proportion to what it already uses (an eighth), cut smaller when the
  pool is nearly full, and single extents when not even a small slab fits;
- when a request finds no room, slabs that are three quarters empty are dissolved: their live
  objects stay where they are but become extents, and the gaps between them become holes.

A pool smaller than 64 slabs' worth of a size serves that size as extents.

`reserve` finds slabs again in the table of objects that it is told to re-create in an empty pool.

`SlabAllocator` makes a class of every size at its first use; `composite.CompositeAllocator` is
the same code with patience. Allocation and freeing are O(1) an object, plus O(slots / 32) when a
slab is opened and O(slots) when one is dissolved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from alloc.base import Allocator, AllocatorStats
from alloc.kernels import rebuild
from alloc.kernels import slabs as kernels
from alloc.kernels.extents import NIL
from alloc.memory import reserve_array
from alloc.offset import OffsetAllocator, as_int64, refuse_size, sorted_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PAGES = 1 << 14  # pages of a pool, so that their table stays a few dozen KiB ...
_PAGE_BYTES_MAX = 1 << 19  # ... except that no class of a huge pool should start with a huge slab
_SLABS_PER_POOL = 64  # no slab takes more than this share of the pool
_BITS_MAX = 1 << 30


class SlabAllocator(Allocator):
    """Allocates slots of exactly the size asked for, a class of slabs for each size.

    Raises ValueError for a capacity or alignment it cannot have.
    """

    learn: ClassVar[int] = 1  # asks before a size becomes a class
    slots_min: ClassVar[int] = 1  # smallest slab

    def __init__(self, capacity: int, alignment: int = 1) -> None:
        self._extents = OffsetAllocator(capacity, alignment)
        self.capacity = capacity
        self.alignment = alignment
        self.granule = self._extents.granule
        page_shift = min(max(capacity // _PAGES, 64), _PAGE_BYTES_MAX).bit_length() - 1
        slabs = (capacity >> page_shift) + 2
        slab = reserve_array(slabs, 8, np.int64)
        bits = reserve_array(min(capacity // 64 + 64, _BITS_MAX), 1, np.uint32)
        page = reserve_array(slabs + 1, 1, np.int32)
        cls = reserve_array(kernels.CLASS_SETS * kernels.CLASS_WAYS, 6, np.int64)
        cls[:, kernels.C_PARTIAL] = NIL
        head = np.zeros(kernels.HEAD_WORDS, np.int64)
        head[kernels.SLAB_SPARE] = NIL
        head[kernels.SLAB_MAX] = len(slab)
        head[kernels.BITS_TOP] = 1
        head[kernels.BITS_MAX] = len(bits)
        head[kernels.CAPACITY] = capacity
        head[kernels.ALIGN] = alignment
        head[kernels.GRANULE] = self._extents.granule
        head[kernels.PAGE_SHIFT] = page_shift
        head[kernels.SLAB_BYTES_MAX] = capacity // _SLABS_PER_POOL
        head[kernels.SLOTS_MIN] = self.slots_min
        head[kernels.LEARN] = self.learn
        self._numbers = head.data  # the same words for Python, which reads one faster
        self._owners = np.empty(kernels.CLASS_SETS * kernels.CLASS_WAYS, np.int64)
        self._rest = np.empty(0, np.int64)
        self._emptied = np.empty(0, np.int64)
        self._state = (head, slab, bits, page, cls)
        self._found_well = b""  # what `check_integrity` saw last

    def allocate(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offset per size, -1 where nothing fits. O(batch), plus the opening of slabs."""
        sizes = as_int64(sizes)
        offsets = np.empty(sizes.size, np.int64)
        wanting, singles = kernels.take_batch(
            self._state, sizes, offsets, False, self._owners, self._extents.room
        )
        if wanting < 0:
            raise refuse_size(sizes, -wanting - 1)
        while wanting:
            self._open_slabs(self._owners[:wanting])
            wanting, singles = self._take_pending(sizes, offsets)
        if singles and self._extents.fill(sizes, offsets, kernels.EXTENT):
            self._take_again(sizes, offsets)
        return offsets

    def _take_pending(
        self, sizes: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> tuple[int, int]:
        """Give slots to what is PENDING; see `take_batch`."""
        found: tuple[int, int] = kernels.take_batch(
            self._state, sizes, offsets, True, self._owners, self._extents.room
        )
        return found

    def _open_slabs(self, owners: NDArray[np.int64]) -> None:
        """Take extents for the slabs these classes want, smaller ones where those do not fit."""
        sizes, least = np.empty_like(owners), np.empty_like(owners)
        kernels.size_batch(self._state, owners, sizes, least)
        starts = self._extents.allocate(sizes)
        failed = np.flatnonzero(starts < 0)
        if failed.size:
            stride = self._state[4][owners[failed], kernels.C_STRIDE]
            room = np.minimum(sizes[failed], self._extents.largest_free()) // stride * stride
            enough = room >= least[failed]
            failed, room = failed[enough], room[enough]
            sizes[failed] = room
            starts[failed] = self._extents.allocate(room)
        extents = starts.copy()
        if kernels.open_batch(self._state, owners, starts, sizes):
            self._extents.free(extents[starts == kernels.PENDING])

    def _take_again(self, sizes: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        """Serve what found no room among the extents: from slabs, else dissolving sparse ones."""
        if not self._numbers[kernels.SLABS]:
            return
        failed = np.flatnonzero((offsets < 0) & (sizes <= self.capacity))
        if failed.size:
            # Slabs opened for later entries of this batch may have slots to spare by now.
            offsets[failed] = kernels.PENDING
            self._take_pending(sizes, offsets)
            failed = failed[offsets[failed] < 0]
            offsets[failed] = NIL
        if failed.size and self._reclaim():
            offsets[failed] = self._extents.allocate(sizes[failed])

    def _reclaim(self) -> bool:
        """Dissolve what is sparse among the next few slabs; whether there was any."""
        sparse = np.empty(kernels.SPARSE_FOUND, np.int64)
        count = kernels.sparse_slabs(self._state, sparse)
        for index in sparse[:count].tolist():
            self._dissolve(index)
        return bool(count)

    def _dissolve(self, index: int) -> None:
        """Turn a slab's live objects into extents where they are, its gaps into holes."""
        _, slab, _, _, _ = self._state
        start, stride, slots = slab[index, : kernels.S_SLOTS + 1].tolist()
        if self._extents.nodes_left() < 2 * slots + 2:
            return
        live = self._close(index)
        self._extents.free(np.array([start]))
        done = self._extents.place(live, np.full(live.size, stride))
        assert done.all(), f"lost {live.size - done.sum()} objects of the slab at {start}"

    def _close(self, index: int) -> NDArray[np.int64]:
        """Forget a slab but not its extent; where its live objects are, in ascending order."""
        live = np.empty(self._state[1][index, kernels.S_SLOTS], np.int64)
        return live[: kernels.dissolve(self._state, index, live)]

    def free(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an object started at each offset; it is freed. O(batch)."""
        if not self._numbers[kernels.SLABS]:
            return self._extents.free(offsets)
        offsets = as_int64(offsets)
        freed = np.empty(offsets.size, np.bool_)
        if offsets.size > self._rest.size:
            self._rest, self._emptied = np.empty((2, offsets.size), np.int64)
        rest, emptied = self._rest, self._emptied
        others, empty = kernels.give_batch(self._state, offsets, freed, rest, emptied)
        if empty:
            # First of all: a second free of an object of a slab that is empty now is looked up
            # among the extents, and must not find the slab's own.
            self._extents.free(emptied[:empty])
        if others:
            self._extents.free_some(offsets, freed, rest, others)
        return freed

    def holds(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an object starts at each offset. O(batch)."""
        offsets = as_int64(offsets)
        found, inside = np.empty((2, offsets.size), np.bool_)
        kernels.holds_batch(self._state, offsets, found, inside)
        found[~inside] = self._extents.holds(offsets[~inside])
        return found

    def reserve(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Re-create objects, in an empty pool in slabs where they lay in slabs; see `Allocator`.

        In a pool that is not empty they become extents, and slabs in the way are dissolved.
        """
        offsets, sizes, order = sorted_ranges(offsets, sizes)
        if self._extents.allocated_bytes:
            # Before anything is reserved: of two ranges that overlap, the first must get its bytes.
            for index in self._slabs_between(offsets, sizes):
                self._dissolve(index)
            done = self._extents.place(offsets, sizes)
        else:
            done = self._rebuild(offsets, sizes)
        result = np.empty_like(done)
        result[order] = done
        return result

    def _rebuild(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Fill an empty pool with ranges that come in ascending order; which got their bytes."""
        done = np.empty(offsets.size, np.bool_)
        starts, lengths, opened = (np.empty(offsets.size, np.int64) for _ in range(3))
        count = rebuild.rebuild_batch(self._state, offsets, sizes, done, starts, lengths, opened)
        starts, lengths, opened = starts[:count], lengths[:count], opened[:count]
        placed = self._extents.place(starts, lengths)
        if not placed.all():
            # The table of nodes is full, and what has no extent is nowhere.
            for index in opened[~placed & (opened != NIL)].tolist():
                self._close(index)
            taken = np.flatnonzero(done)
            done[taken] = placed[np.searchsorted(starts, offsets[taken], side="right") - 1]
        return done

    def _slabs_between(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> list[int]:
        """Slabs that share a byte with any of these ranges, which come in ascending order."""
        inside = (offsets >= 0) & (sizes <= self.capacity) & (offsets <= self.capacity - sizes)
        if not self._numbers[kernels.SLABS] or not inside.any():
            return []
        offsets, sizes = offsets[inside], sizes[inside]
        slab = self._state[1][: self._numbers[kernels.SLAB_TOP]]
        used = np.flatnonzero(slab[:, kernels.S_SLOTS])
        start = slab[used, kernels.S_START]
        length = slab[used, kernels.S_STRIDE] * slab[used, kernels.S_SLOTS]
        end = start + -(-length // self.granule) * self.granule
        # Ranges may overlap each other, so the furthest end so far decides, not the last one.
        reach = np.maximum.accumulate(offsets + sizes)
        before = np.searchsorted(offsets, end) - 1
        found = (before >= 0) & (reach[before] > start)
        return [int(index) for index in used[found]]

    def stats(self) -> AllocatorStats:
        """Current figures, in O(1)."""
        head, extents = self._numbers, self._extents.stats()
        return AllocatorStats(
            capacity=self.capacity,
            allocated_bytes=self.allocated_bytes,
            allocations=extents.allocations + head[kernels.LIVE] - head[kernels.SLABS],
            largest_free=extents.largest_free,
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all objects, rounding included. O(1)."""
        head = self._numbers
        slack: int = head[kernels.ALLOCATED] - head[kernels.HELD]  # free slots, negative
        return self._extents.allocated_bytes + slack

    def check_integrity(self) -> None:
        """Raise AssertionError unless extents and slabs agree on who owns every byte. O(n)."""
        from alloc.integrity import check_slabs, extents_seal, slabs_seal

        self._extents.check_integrity()
        seal = slabs_seal(self._state) + extents_seal(self._extents._state)
        if seal != self._found_well:
            check_slabs(self._state, self._extents._state)
            self._found_well = seal
