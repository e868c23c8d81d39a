"""Hauls: batches of copies between tiers, run by whoever owns the source, seen by everyone.

Interface only, so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.core.records import Status

if TYPE_CHECKING:
    from numpy.typing import NDArray

    import numpy as np

    from mooncake_store.core.state import ShardState

__all__ = ["Haul", "Hauls"]


@dataclass(slots=True)
class Haul:
    """Objects that go from one segment to another, side by side in columns."""

    number: int
    worker: int
    """Handle of the only client that may fetch and finish it."""
    source: int
    target: int
    source_offsets: NDArray[np.int64]
    target_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint64]


class Hauls:
    """All hauls of a shard: `shard.hauls`."""

    def __init__(self, state: ShardState) -> None:
        self._state = state

    def demote(self, rows: NDArray[np.int32], *, keep: bool = False) -> int:
        """Queue readable objects to be copied to a disk; returns how many were taken.

        Their replicas in memory go when they have arrived, unless they are to be kept.
        """
        return 0

    def promote(self, rows: NDArray[np.int32]) -> int:
        """Queue objects that lie on disks alone to be copied to memory; returns how many."""
        return 0

    def fetch(self, client: int, limit: int) -> list[Haul]:
        """Return up to `limit` hauls of this worker, which runs none while it asks."""
        return []

    def finish(self, client: int, number: int, statuses: NDArray[np.int16]) -> Status:
        """End a haul: what has arrived becomes readable, the space of the rest returns."""
        return Status.TASK_NOT_FOUND
