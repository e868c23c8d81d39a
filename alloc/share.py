"""Share: what one of several allocators has of a segment that was divided among them.

    share = Share(CompositeAllocator(nbytes), base, reach)

Its own part is [base, base + nbytes) of [0, reach).

It hands out of its own part only. Objects that were there before the division stay where they are,
so some of its objects lie in the parts of others, or across an end of its own: it knows these by
where they begin and end, until they are freed, and never gives their place out again. Whoever owns
the part does that, once told (`outstanding`).

Costs: those of the allocator inside; for each object elsewhere 25 bytes, and O(log n) to free it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from alloc.base import Allocator, AllocatorStats
from alloc.offset import as_int64

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Share"]


class Share(Allocator):
    """Allocates in a part of a segment, and knows objects of its own elsewhere."""

    def __init__(self, inner: Allocator, base: int, reach: int) -> None:
        self._inner = inner
        self.base = base
        self._reach = reach
        self.capacity = inner.capacity
        self.alignment = inner.alignment
        self.granule = inner.granule
        empty = np.empty(0, np.int64)
        # Objects elsewhere, in order of where they begin, and which of them are there still.
        self._starts, self._ends, self._live = empty, empty, np.empty(0, np.bool_)
        # Where the piece of each begins that crosses into this part; -1 without one.
        self._pieces = empty
        self.elsewhere_bytes = 0
        """What the objects elsewhere take of the parts of others."""

    def allocate(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offset per size, in the whole segment; -1 where nothing fits in this part."""
        offsets = self._inner.allocate(sizes)
        return np.where(offsets >= 0, offsets + self.base, -1)

    def free(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an object started at each offset; it is freed, also in the part of another."""
        offsets = as_int64(offsets)
        if not self._live.any():
            return self._inner.free(offsets - self.base)
        at, freed = self._find(offsets)
        first = np.zeros(len(offsets), np.bool_)  # of an offset that comes twice
        first[np.unique(offsets, return_index=True)[1]] = True
        freed &= first
        self._live[at[freed]] = False
        gone = at[freed]
        self.elsewhere_bytes -= int(self._outside(self._starts[gone], self._ends[gone]).sum())
        pieces = self._pieces[gone]
        self._inner.free(pieces[pieces >= 0])
        others = ~freed
        freed[others] = self._inner.free(offsets[others] - self.base)
        return freed

    def holds(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an object starts at each offset."""
        offsets = as_int64(offsets)
        return self._inner.holds(offsets - self.base) | self._find(offsets)[1]

    def _find(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Where objects elsewhere that begin at some offsets stand, and which are there."""
        at = np.searchsorted(self._starts, offsets).clip(max=max(0, len(self._starts) - 1))
        if not len(self._starts):
            return at, np.zeros(len(offsets), np.bool_)
        return at, (self._starts[at] == offsets) & self._live[at]

    def reserve(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Re-create objects, those elsewhere included; False where one overlaps."""
        offsets, sizes = as_int64(offsets), as_int64(sizes)
        begin = offsets - self.base
        inside = (begin >= 0) & (begin <= self.capacity - sizes.clip(1, self.capacity))
        # What cannot be at all is for the one inside to refuse.
        inside |= (sizes <= 0) | (offsets < 0) | (offsets > self._reach - sizes.clip(1))
        done = np.zeros(len(offsets), np.bool_)
        done[inside] = self._inner.reserve(begin[inside], sizes[inside])
        others = np.flatnonzero(~inside)
        if len(others):
            done[others] = self._keep(offsets[others], offsets[others] + sizes[others])
        return done

    def _keep(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Take up objects elsewhere; False for those that overlap one before them."""
        live = self._live
        known = int(np.count_nonzero(live))
        starts = np.concatenate([self._starts[live], starts])
        ends = np.concatenate([self._ends[live], ends])
        order = np.argsort(starts, kind="stable")
        kept = np.zeros(len(starts), np.bool_)
        last = -1
        for at in order.tolist():
            if starts[at] >= last:
                kept[at], last = True, ends[at]
        pieces = np.full(len(starts), -1)
        pieces[:known] = self._pieces[live]
        begin = (starts - self.base).clip(0)
        nbytes = (ends - self.base).clip(max=self.capacity) - begin
        crossing = np.flatnonzero(kept & (nbytes > 0) & (np.arange(len(starts)) >= known))
        if len(crossing):
            kept[crossing] = self._inner.reserve(begin[crossing], nbytes[crossing])
            pieces[crossing] = np.where(kept[crossing], begin[crossing], -1)
        order = order[kept[order]]
        self._starts, self._ends, self._pieces = starts[order], ends[order], pieces[order]
        self._live = np.ones(len(order), np.bool_)
        self.elsewhere_bytes = int(self._outside(self._starts, self._ends).sum())
        return kept[known:]

    def _outside(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many bytes of some ranges are not of this part."""
        last = self.base + self.capacity
        inside = (np.minimum(ends, last) - np.maximum(starts, self.base)).clip(0)
        outside: NDArray[np.int64] = ends - starts - inside
        return outside

    def outstanding(self, places: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each byte belongs to an object that lies elsewhere, and is not freed yet."""
        if not len(self._starts):
            return np.zeros(len(places), np.bool_)
        at = np.searchsorted(self._starts, places, side="right") - 1
        found: NDArray[np.bool_] = (at >= 0) & (places < self._ends[at]) & self._live[at]
        return found

    @property
    def elsewhere(self) -> int:
        """How many objects lie in the parts of others."""
        return int(np.count_nonzero(self._live))

    def stats(self) -> AllocatorStats:
        """Figures of this part; objects elsewhere count among the allocations."""
        inner = self._inner.stats()
        return AllocatorStats(
            inner.capacity,
            inner.allocated_bytes,
            inner.allocations + int(np.count_nonzero(self._live & (self._pieces < 0))),
            inner.largest_free,
        )

    @property
    def allocated_bytes(self) -> int:
        """What `stats` says of it."""
        return self._inner.allocated_bytes

    def check_integrity(self) -> None:
        """Raise AssertionError unless every byte has one owner and all indexes agree. O(n)."""
        self._inner.check_integrity()
        assert (self._starts[1:] >= self._ends[:-1]).all(), "objects elsewhere overlap"
        end = self.base + self.capacity
        assert ((self._starts < self.base) | (self._ends > end)).all(), "one lies here"
