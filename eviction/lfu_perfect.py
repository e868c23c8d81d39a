"""Least frequently used with counts that survive eviction: the policy of a perfect memory.

For analysis only: an id must mean the same block for ever, as in a trace. A store reuses its ids,
and a count that outlives its object would be credited to a stranger. Removal for any reason
keeps the count. Cost: as lfu.
"""

from __future__ import annotations

from typing import ClassVar

from eviction.buckets import CountingPolicy

__all__ = ["LfuPerfectPolicy"]


class LfuPerfectPolicy(CountingPolicy):
    """The id with the fewest uses ever leaves first, among equals the one used longest ago."""

    name: ClassVar[str] = "lfu_perfect"
    _keeps_counts: ClassVar[bool] = True
