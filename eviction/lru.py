"""Least recently used: every use appends an id to the hot end of one log.

The store's default, and the best of the known-past policies on the published conversation trace
except at tiny capacities. A scan of one-time blocks pushes everything else out; lfu and sieve
resist that. Cost: O(1) a step, 8 to 12 bytes an id.
"""

from __future__ import annotations

from typing import ClassVar

from eviction.log import LogPolicy

__all__ = ["LruPolicy"]


class LruPolicy(LogPolicy):
    """The id whose last use lies furthest back leaves first."""

    name: ClassVar[str] = "lru"
