"""Where objects of a namespace go: to segments declared for it if there are any, else to others.

    home = homes.of("team-a")              # "team-a", or "": the segments that are for all
    order = homes.order(now, options, home) + homes.further(now, options, home)

A segment that is declared for a namespace takes objects of no other. One of any state but GONE is a
home: what is put while it is suspect or absent waits for it, and never lies elsewhere. How a batch
is spread over segments is in `spreading.py`.

Cost: O(segments) after one came, went or changed its state, for each home that is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.core import context as places
from mooncake_store.core.options import Placement
from mooncake_store.core.records import SIZE_MAX, SegmentState, Tier
from mooncake_store.core.spreading import interleave_hosts, nth_largest

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from mooncake_store.core.options import ShardConfig, StartOptions
    from mooncake_store.core.segment import Segment

__all__ = ["KEEPING", "Homes"]

RATIO_SAMPLE = 16
"""Segments compared by free share when there are more than these."""
KEEPING = (SegmentState.OK, SegmentState.SUSPECT)
"""States of segments on which objects can be put and stay."""


class _Cycle(NamedTuple):
    """The segments of a home that take objects, neighbours on different hosts."""

    first: list[Segment]
    """Those of the first tier, and..."""
    further: list[Segment]
    """...disks, where objects are put into memory."""
    usable_from: int
    """When each of the first is usable."""


class Homes:
    """The segments of a shard, by whose objects they take."""

    def __init__(
        self,
        config: ShardConfig,
        rng: random.Random,
        numbers: memoryview[int],
        segments: dict[int, Segment],
        return_freed: Callable[[], None],
    ) -> None:
        self._config = config
        self._rng = rng
        self._numbers = numbers
        self._segments = segments
        self._return_freed = return_freed
        self._cycles: dict[str, _Cycle] = {}
        self._declared: frozenset[str] | None = None

    def changed(self) -> None:
        """Hear that a segment came, went, or is another than before."""
        self._cycles.clear()
        self._declared = None

    @property
    def declared(self) -> frozenset[str]:
        """The namespaces that have segments of their own."""
        if self._declared is None:
            there = (s for s in self._segments.values() if s.state != SegmentState.GONE)
            self._declared = frozenset(s.namespace for s in there if s.namespace)
        return self._declared

    def all(self) -> list[str]:
        """Return all homes."""
        return ["", *sorted(self.declared)]

    def of(self, namespace: str) -> str:
        """Return the home of a namespace."""
        return namespace if namespace in self.declared else ""

    def _at(self, home: str | None) -> list[Segment]:
        some = self._segments.values()
        return [s for s in some if home is None or s.namespace == home]

    def first_tier(self, home: str | None = None) -> Tier:
        """Where objects are put: disks only take them where no memory is lent that could.

        Memory that is suspect may soon be back; what is absent or drains does not count. Without a
        home all segments are looked at.
        """
        if not self._numbers[places.BELOW_USED]:
            return Tier.MEMORY
        some = [s for s in self._at(home) if s.state in KEEPING and s.tier != Tier.COLD]
        disks = some and all(s.tier == Tier.DISK for s in some)
        return Tier.DISK if disks else Tier.MEMORY

    def turn(self, now: int, home: str) -> tuple[list[Segment], int]:
        """Return the segments in their cycle and where in it a batch begins.

        That place is -1 where placement is not simply random: `order` must be asked then.
        """
        self._return_freed()
        cycle, _, usable_from = self._cycle(home)
        if self._config.placement != Placement.RANDOM or usable_from > now:
            return cycle, -1
        return cycle, int(self._rng.random() * len(cycle))

    def _cycle(self, home: str) -> _Cycle:
        found = self._cycles.get(home)
        if found is None:
            tier = self.first_tier(home)
            some = [s for s in self._at(home) if s.state == SegmentState.OK]
            cycle = interleave_hosts([s for s in some if s.tier == tier])
            # Nothing is put into cold segments: only their owners write there.
            further = interleave_hosts([s for s in some if tier < s.tier < Tier.COLD])
            usable_from = max((s.usable_from for s in cycle), default=0)
            found = self._cycles[home] = _Cycle(cycle, further, usable_from)
        return found

    def order(self, now: int, options: StartOptions, home: str) -> list[Segment]:
        """Return the segments that may take a replica, most wanted first.

        Those of the first tier, and disks that are preferred by name.
        """
        cycle, start = self.turn(now, home)
        if start < 0:
            start = int(self._rng.random() * len(cycle))
        cycle = cycle[start:] + cycle[:start]
        if options.preferred:
            cycle += [s for s in self._cycle(home).further if s.name in options.preferred]
        return self._wanted(cycle, now, options)

    def further(self, now: int, options: StartOptions, home: str) -> list[Segment]:
        """Return the disks that take replicas for which there is no memory, most wanted first."""
        cycle = self._cycle(home).further
        start = int(self._rng.random() * len(cycle)) if cycle else 0
        cycle = [s for s in cycle[start:] + cycle[:start] if s.name not in options.preferred]
        return self._wanted(cycle, now, options)

    def _wanted(self, cycle: list[Segment], now: int, options: StartOptions) -> list[Segment]:
        usable = [s for s in cycle if s.usable_from <= now and s.name not in options.excluded]
        if self._config.placement == Placement.FREE_RATIO:
            head, tail = usable[:RATIO_SAMPLE], usable[RATIO_SAMPLE:]
            usable = sorted(head, key=lambda s: s.used / s.nbytes) + tail
        if options.preferred:
            rank = {name: i for i, name in enumerate(options.preferred)}
            usable.sort(key=lambda s: rank.get(s.name, len(rank)))
        return usable

    def largest_bytes(self, nth: int, home: str) -> int:
        """Size of the nth largest segment that may ever take an object, SIZE_MAX without any.

        One that is suspect, absent or drains counts: it may be back while a put waits. Without any
        segment a put waits for the first, whose size nobody knows.
        """
        some = [
            segment
            for segment in self._at(home)
            if segment.state != SegmentState.GONE and segment.tier != Tier.COLD
        ]
        return nth_largest(some, nth) if some else SIZE_MAX

    def watermark_bytes(self, home: str, *, below: bool) -> int:
        """Bytes that objects can keep: above the high watermark what was just put is evicted again.

        Lower tiers count where objects come there, `below`.

        Segments that drain will take nothing any more; one that is suspect may soon be back. One
        that is absent may stay away, and who counts on its room puts what finds none.
        """
        some = [s for s in self._at(home) if s.state in KEEPING]
        if not below:
            some = [s for s in some if s.tier == self.first_tier(home)]
        return sum(s.full_at for s in some)
