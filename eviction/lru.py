"""Least recently used: every use appends an id to the hot end of one log.

The store's default, and the best of the known-past policies on the published conversation trace
except at tiny capacities. A scan of one-time blocks pushes everything else out; lfu and sieve
resist that. Cost: O(1) a step, 8 to 12 bytes an id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from eviction._log import LogPolicy
from eviction.base import as_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LruPolicy"]


class LruPolicy(LogPolicy):
    """The id whose last use lies furthest back leaves first."""

    name: ClassVar[str] = "lru"

    def touch(self, ids: NDArray[Any]) -> None:
        """Move `ids` to the hot end, the last one hottest."""
        self._kernels.log_touch(self._head, self._places, self._log, as_ids(ids))
