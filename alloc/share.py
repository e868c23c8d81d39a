"""Share: what one of several allocators has of a segment that was divided among them.

    share = Share([(CompositeAllocator(end - start), start) for start, end in runs], reach)

It hands out of its own runs only, each object of one of them. Objects that were there before the
division stay where they are, so some of its objects lie in the runs of others, or across an end of
its own: it knows these by where they begin and end, until they are freed, and never gives their
place out again. Whoever owns the run does that, once told (`outstanding`).

Runs of all lie between each other, because what was used before lies mostly at the beginning: who
had that alone would have no room, and the others nothing else.

Costs: a call of an allocator for each run that is touched, of which few are as long as there is
room; for each object elsewhere 25 bytes, and O(log n) to free it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from alloc.base import Allocator, AllocatorStats
from alloc.offset import as_int64, refuse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["Share"]


class Share(Allocator):
    """Allocates in some runs of a segment, in order, and knows objects of its own elsewhere."""

    def __init__(self, runs: Sequence[tuple[Allocator, int]], reach: int) -> None:
        self._inner = [inner for inner, _ in runs]
        self._begins = np.array([start for _, start in runs], np.int64)
        self._lasts = self._begins + np.array([inner.capacity for inner in self._inner])
        self._reach = reach
        self.capacity = sum(inner.capacity for inner in self._inner)
        self.alignment = self._inner[0].alignment
        self.granule = self._inner[0].granule
        self._next = 0  # the run that had room last
        self._allocated = 0
        # Objects elsewhere, in order of where they begin, and which of them are there still.
        self._starts = self._ends = np.empty(0, np.int64)
        self._live = np.empty(0, np.bool_)
        self._crossing = np.empty(0, np.bool_)
        """Which of them have pieces in runs of this one."""
        self.elsewhere_bytes = 0
        """What the objects elsewhere take of the runs of others."""

    def allocate(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offset per size, in the whole segment; -1 where nothing fits in any run."""
        sizes = as_int64(sizes)
        if sizes.size and sizes.min() <= 0:
            raise refuse_size(sizes, int(sizes.argmin()))
        offsets = np.full(len(sizes), -1)
        missing = np.arange(len(sizes))
        for step in range(len(self._inner)):
            at = (self._next + step) % len(self._inner)
            inner = self._inner[at]
            before = inner.allocated_bytes
            got = inner.allocate(sizes[missing])
            self._allocated += inner.allocated_bytes - before
            placed = got >= 0
            offsets[missing[placed]] = got[placed] + self._begins[at]
            missing = missing[~placed]
            if not len(missing):
                self._next = at
                break
        return offsets

    def _run_of(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        """The run of this one in which each offset lies; -1 for those in none."""
        at = np.searchsorted(self._begins, offsets, side="right") - 1
        inside = (at >= 0) & (offsets < self._lasts[at])
        return np.where(inside, at, -1)

    def own(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each byte lies in a run of this one."""
        found: NDArray[np.bool_] = self._run_of(offsets) >= 0
        return found

    def _each(
        self, offsets: NDArray[np.int64], ask: str, sizes: NDArray[np.int64] | None = None
    ) -> NDArray[np.bool_]:
        """Ask the allocators of the runs in which offsets lie; False for those in none."""
        answer = np.zeros(len(offsets), np.bool_)
        runs = self._run_of(offsets)
        for at in np.unique(runs[runs >= 0]).tolist():
            inner, mine = self._inner[at], np.flatnonzero(runs == at)
            given = [offsets[mine] - self._begins[at]]
            if sizes is not None:
                given.append(sizes[mine])
            before = inner.allocated_bytes
            answer[mine] = getattr(inner, ask)(*given)
            self._allocated += inner.allocated_bytes - before
        return answer

    def free(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an object started at each offset; it is freed, also in the run of another."""
        offsets = as_int64(offsets)
        if not self._live.any():
            return self._each(offsets, "free")
        at, freed = self._find(offsets)
        first = np.zeros(len(offsets), np.bool_)  # of an offset that comes twice
        first[np.unique(offsets, return_index=True)[1]] = True
        freed &= first
        gone = at[freed]
        self._live[gone] = False
        self.elsewhere_bytes -= int(self._outside(self._starts[gone], self._ends[gone]).sum())
        gone = gone[self._crossing[gone]]
        pieces, _ = self._pieces(self._starts[gone], self._ends[gone])
        self._each(pieces[:, 0], "free")
        others = ~freed
        freed[others] = self._each(offsets[others], "free")
        return freed

    def holds(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an object starts at each offset."""
        offsets = as_int64(offsets)
        return self._each(offsets, "holds") | self._find(offsets)[1]

    def _find(self, offsets: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Where objects elsewhere that begin at some offsets stand, and which are there."""
        at = np.searchsorted(self._starts, offsets).clip(max=max(0, len(self._starts) - 1))
        if not len(self._starts):
            return at, np.zeros(len(offsets), np.bool_)
        return at, (self._starts[at] == offsets) & self._live[at]

    def reserve(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Re-create objects, those elsewhere included; False where one overlaps."""
        offsets, sizes = as_int64(offsets), as_int64(sizes)
        if sizes.size and sizes.min() <= 0:
            raise refuse_size(sizes, int(sizes.argmin()))
        possible = (offsets >= 0) & (offsets <= self._reach - sizes.clip(max=self._reach))
        possible &= sizes <= self._reach
        runs = self._run_of(offsets)
        inside = possible & (runs >= 0) & (sizes <= self._lasts[runs] - offsets)
        done = np.zeros(len(offsets), np.bool_)
        done[inside] = self._each(offsets[inside], "reserve", sizes[inside])
        others = np.flatnonzero(possible & ~inside)
        if len(others):
            done[others] = self._keep(offsets[others], offsets[others] + sizes[others])
        return done

    def _keep(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Take up objects elsewhere; False for those that overlap one before them."""
        known = int(np.count_nonzero(self._live))
        starts = np.concatenate([self._starts[self._live], starts])
        ends = np.concatenate([self._ends[self._live], ends])
        crossing = np.zeros(len(starts), np.bool_)
        crossing[:known] = self._crossing[self._live]
        order = np.argsort(starts, kind="stable")
        kept = np.zeros(len(starts), np.bool_)
        last = -1
        for at in order.tolist():
            if starts[at] >= last:
                kept[at], last = True, ends[at]
        fresh = np.flatnonzero(kept & (np.arange(len(starts)) >= known))
        pieces, of = self._pieces(starts[fresh], ends[fresh])
        taken = self._each(pieces[:, 0], "reserve", pieces[:, 1])
        refused = np.unique(of[~taken])
        self._each(pieces[taken & np.isin(of, refused), 0], "free")
        kept[fresh[refused]] = False
        crossing[fresh[of]] = True
        order = order[kept[order]]
        self._starts, self._ends, self._crossing = starts[order], ends[order], crossing[order]
        self._live = np.ones(len(order), np.bool_)
        self.elsewhere_bytes = int(self._outside(self._starts, self._ends).sum())
        return kept[known:]

    def _pieces(
        self, starts: NDArray[np.int64], ends: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """What of some ranges lies in runs of this one: (offset, size), and of which it is."""
        found, of = [np.empty((0, 2), np.int64)], [np.empty(0, np.int64)]
        for begin, last in zip(self._begins.tolist(), self._lasts.tolist(), strict=True):
            start, end = np.maximum(starts, begin), np.minimum(ends, last)
            here = np.flatnonzero(end > start)
            found.append(np.stack([start[here], end[here] - start[here]], axis=1))
            of.append(here)
        return np.concatenate(found), np.concatenate(of)

    def _outside(self, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many bytes of each of some ranges are in no run of this one."""
        pieces, of = self._pieces(starts, ends)
        outside: NDArray[np.int64] = ends - starts
        np.subtract.at(outside, of, pieces[:, 1])
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
        """How many objects lie in the runs of others, wholly or in part."""
        return int(np.count_nonzero(self._live))

    def stats(self) -> AllocatorStats:
        """Figures of these runs; objects elsewhere count among the allocations."""
        every = [inner.stats() for inner in self._inner]
        crossing = np.flatnonzero(self._live & self._crossing)
        pieces, _ = self._pieces(self._starts[crossing], self._ends[crossing])
        return AllocatorStats(
            self.capacity,
            self._allocated,
            sum(stats.allocations for stats in every) + self.elsewhere - len(pieces),
            max(stats.largest_free for stats in every),
        )

    @property
    def allocated_bytes(self) -> int:
        """What `stats` says of it."""
        return self._allocated

    def check_integrity(self) -> None:
        """Raise AssertionError unless every byte has one owner and all indexes agree. O(n)."""
        for inner in self._inner:
            inner.check_integrity()
        assert self._allocated == sum(inner.allocated_bytes for inner in self._inner)
        assert (self._starts[1:] >= self._ends[:-1]).all(), "objects elsewhere overlap"
        assert (self._lasts[:-1] <= self._begins[1:]).all(), "runs overlap"
