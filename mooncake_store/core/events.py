"""The stream of what happened to objects, numbered without gaps, for indexes elsewhere.

A ring of fixed length: a follower that asks for a number the ring no longer holds is told so,
takes a snapshot and goes on from the number the snapshot names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import _kernels_scan as k
from mooncake_store.core.memory import reserve
from mooncake_store.core.records import EVENT, EventKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Events"]


class Events:
    """The newest `kept` events of a shard. Numbers start at 1."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._ring = reserve(max(kept, 1), EVENT)
        self.next_number = 1

    def append(
        self, kind: EventKind, rows: NDArray[Any], cold: NDArray[Any], chosen: NDArray[np.int32]
    ) -> None:
        """Record one event for each chosen row. O(n)."""
        if self._kept and len(chosen):
            where = np.array([self.next_number - 1, self._kept, kind], np.int64)
            k.record(self._ring, rows, cold, chosen, where)
            self.next_number += len(chosen)

    def cleared(self, tenant: int) -> None:
        """Record that a tenant has no objects left."""
        if self._kept:
            self._ring[(self.next_number - 1) % self._kept] = (0, 0, EventKind.CLEARED, tenant, 0)
            self.next_number += 1

    def since(self, number: int, limit: int) -> tuple[int, NDArray[Any], bool]:
        """Return (number of the first, events, gap): those from `number` on, at most `limit`.

        `gap` says that events between `number` and the first one returned are no longer held.
        """
        oldest = max(1, self.next_number - self._kept)
        first = max(number, oldest)
        count = max(0, min(limit, self.next_number - first))
        at = (first - 1 + np.arange(count)) % max(self._kept, 1)
        return first, self._ring[at], number < oldest
