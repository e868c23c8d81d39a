"""Which blocks of a worker's memory others may read, or write.

Whoever is allowed to is told a number, which comes with every batch of the transfer engine. Over
tcp the owner's server asks `judge` before a byte moves; who shares memory with it does not ask.
Thread-safe. Cost: O(blocks of the memory) a grant, O(ranges) a batch.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from transfer_engine import Access, Operation

__all__ = ["Grants"]


class Grants:
    """Which blocks of a memory may be read, or written, by the number that this is asked with."""

    def __init__(self, operation: Operation, half: int, blocks: int) -> None:
        self._operation = operation
        self._half = half
        self._blocks = blocks
        # How many of the blocks before each one are granted.
        self._counts: dict[int, NDArray[np.int64]] = {}

    def add(self, blocks: Sequence[int]) -> int:
        """Allow these from now on; return their number."""
        granted = np.zeros(self._blocks + 1, np.int64)
        granted[np.asarray(blocks, np.int64) + 1] = 1
        fence = secrets.randbits(63)
        self._counts[fence] = np.cumsum(granted)
        return fence

    def remove(self, fence: int) -> None:
        """Allow them no longer. Idempotent."""
        self._counts.pop(fence, None)

    def judge(self, access: Access) -> bool | NDArray[np.bool_]:
        """Answer the server that asks: which ranges of a batch lie in granted blocks."""
        if not access.lengths.any():
            return True  # a way is opened; a process of this user maps the memory
        counts = self._counts.get(access.fence)
        if counts is None or access.operation is not self._operation:
            return False
        plane = self._half * self._blocks  # of the keys, or the values, of one layer
        last = access.offsets + access.lengths - 1
        first_block = access.offsets % plane // self._half
        last_block = last % plane // self._half
        granted = counts[last_block + 1] - counts[first_block] == last_block - first_block + 1
        within: NDArray[np.bool_] = granted & (access.offsets // plane == last // plane)
        return within
