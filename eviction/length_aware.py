"""LengthAwareCache: like lfu, but among equal counts the block later in its request leaves first.

The first Mooncake paper describes it in one sentence. Of its two readings only this one makes
sense: a block is of use only while every block before it is resident, so the tail must go before
the head (keeping later blocks instead is far worse on the published trace).

Order: uses since insertion, then depth (deeper first), then recency. Counts stop at 2,047 and
depths at 8,191; beyond, recency decides. Cost: O(1) a step, 16 bytes an id.
"""

from __future__ import annotations

from typing import ClassVar

from eviction.buckets import CountingPolicy

__all__ = ["LengthAwarePolicy"]


class LengthAwarePolicy(CountingPolicy):
    """The least used id leaves first, among equals the deepest, then the one used longest ago."""

    name: ClassVar[str] = "length_aware"
    _step: ClassVar[int] = 1 << 13
