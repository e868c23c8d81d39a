"""Least frequently used, counting since the last insertion; equal counts leave by recency.

An id that was evicted starts again at one use, so old fame does not last; a block that was hot
once and stays resident does keep its place, which is why lru beats this on drifting traffic.
Cost: O(1) a step (a bucket per count), 16 bytes an id. Counts stop at 2**24 - 1.
"""

from __future__ import annotations

from typing import ClassVar

from eviction.buckets import CountingPolicy

__all__ = ["LfuPolicy"]


class LfuPolicy(CountingPolicy):
    """The id with the fewest uses leaves first, among equals the one used longest ago."""

    name: ClassVar[str] = "lfu"
