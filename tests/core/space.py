"""Interval bookkeeping of the reference model: who owns which bytes of a segment.

It is deliberately naive (a sorted list of intervals per segment) and shares nothing with `alloc`:
its one job is to refuse an extent that overlaps bytes which are live or quarantined. It does not
choose offsets and does not know rounding. O(n) per change, which small pools can afford.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field


class Mismatch(AssertionError):
    """The core answered or did something that the semantics do not allow."""


@dataclass(slots=True)
class Extent:
    """One replica's bytes; `readable` is false while a copy still fills it."""

    segment: int
    offset: int
    size: int
    readable: bool = True


@dataclass(slots=True)
class Space:
    """The bytes of one segment uuid; it outlives an unmount, as quarantined bytes do."""

    nbytes: int
    taken: list[tuple[int, int]] = field(default_factory=list)
    owners: dict[tuple[int, int], str] = field(default_factory=dict)
    """What each interval was taken for, to name in a failure."""

    def take(self, offset: int, size: int, who: str) -> None:
        """Own [offset, offset + size); raises Mismatch when any byte has an owner already."""
        end = offset + size
        if offset < 0 or end > self.nbytes:
            raise Mismatch(f"{who}: extent [{offset}, {end}) leaves a segment of {self.nbytes}")
        at = bisect_left(self.taken, (offset, end))
        for lower, upper in self.taken[max(at - 1, 0) : at + 1]:
            if lower < end and offset < upper:
                owner = self.owners[lower, upper]
                raise Mismatch(f"{who}: [{offset}, {end}) overlaps [{lower}, {upper}): {owner}")
        insort(self.taken, (offset, end))
        self.owners[offset, end] = who

    def give(self, offset: int, size: int) -> None:
        """Disown exactly one interval taken before."""
        self.taken.remove((offset, offset + size))
        del self.owners[offset, offset + size]

    def gap_max(self, removable: set[tuple[int, int]]) -> int:
        """Largest hole there would be if the intervals in `removable` left."""
        largest, at = 0, 0
        for lower, upper in self.taken:
            if (lower, upper) in removable:
                continue
            largest, at = max(largest, lower - at), upper
        return max(largest, self.nbytes - at)

    def used(self) -> int:
        """Bytes that have an owner."""
        return sum(upper - lower for lower, upper in self.taken)


def expect(condition: bool, message: str) -> None:
    if not condition:
        raise Mismatch(message)
