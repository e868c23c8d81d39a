"""The last hour of a pool in spans of five seconds: what counters grew by, and what gauges said.

A ring of fixed length: 720 spans of fifteen numbers. No I/O, no clock. O(1) a span.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from mooncake_store.core.records import TIER_NAMES, SegmentState

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mooncake_store.wire.cluster import SegmentEntry
    from mooncake_store.wire.shard import ShardFigures

__all__ = ["COUNTERS", "FIELDS", "SPANS_MAX", "SPAN_S", "History", "added", "filled", "totals"]

SPAN_S = 5.0
SLACK_S = 0.5
"""What looks every five seconds may come sooner, by their own time."""
SPANS_MAX = 720
COUNTERS = (
    "requests", "keys", "hits", "misses", "misses_absent", "read_bytes", "written_bytes",
    "evicted_objects", "evicted_bytes", "demoted_objects", "promoted_objects",
)  # fmt: skip
"""Of `ShardFigures`, those that only grow."""
FIELDS = ("at", "seconds", *COUNTERS, "objects", *TIER_NAMES)
"""What the numbers of a span are; `at` is when it ended, of tiers there is the share in use."""


def totals(figures: Sequence[ShardFigures]) -> dict[str, int]:
    """Return the counters of all shards."""
    return {name: sum(getattr(each, name) for each in figures) for name in COUNTERS}


def added(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return by how much counters grew: a shard that was started anew counts from 0 again."""
    return {name: max(0, after[name] - before[name]) for name in COUNTERS}


def filled(segments: Sequence[SegmentEntry]) -> list[dict[str, Any]]:
    """Return how full each tier is that there is, absent segments left out."""
    found = []
    for number, name in enumerate(TIER_NAMES):
        mine = [
            each for each in segments if each.tier == number and each.state != SegmentState.ABSENT
        ]
        if mine:
            used, size = sum(each.used_bytes for each in mine), sum(each.nbytes for each in mine)
            found.append({"tier": name, "used": used, "size": size, "segments": len(mine)})
    return found


class History:
    """Spans, the newest last."""

    def __init__(self) -> None:
        self.spans: deque[list[float | None]] = deque(maxlen=SPANS_MAX)
        self.ended = 0
        """How many there were."""
        self._began: tuple[float, Mapping[str, int]] | None = None

    def take(
        self,
        now: float,
        counters: Mapping[str, int],
        objects: int,
        tiers: Sequence[Mapping[str, Any]],
    ) -> None:
        """Take a look at the figures in; a span ends with the first one after its time."""
        if self._began is None:
            self._began = now, counters
            return
        since, before = self._began
        if now - since < SPAN_S - SLACK_S:
            return
        grown = added(before, counters)
        shares = {each["tier"]: each["used"] / max(1, each["size"]) for each in tiers}
        self.spans.append([
            round(now, 1), round(now - since, 2), *grown.values(), objects,
            *(None if name not in shares else round(shares[name], 4) for name in TIER_NAMES),
        ])  # fmt: skip
        self.ended += 1
        self._began = now, counters

    def since(self, number: int) -> list[list[float | None]]:
        """Return those that ended after so many had."""
        count = min(self.ended - number, len(self.spans))
        return list(self.spans)[len(self.spans) - count :]
