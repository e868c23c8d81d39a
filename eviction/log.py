"""What the log policies share: a log of uses, coldest first, in which only the newest counts.

Subclasses decide whether a touch changes the order. Cost: 4 bytes an id and 4 an entry of the log,
which is at most twice as long as there are ids; O(1) a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from eviction.base import EvictionPolicy, as_ids
from kernel_cache.columns import reserve

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LogPolicy"]


class LogPolicy(EvictionPolicy):
    """Ids in a log; insert appends, also what was there already."""

    promotes: ClassVar[bool] = True
    """Whether a use moves an id to the hot end."""

    def __init__(self, capacity_ids: int) -> None:
        from eviction.kernels import log

        super().__init__(capacity_ids)
        k = self._kernels = log
        self._head = np.zeros(k.HEAD_WORDS, dtype=np.int64)
        self._numbers = self._head.data  # the same words for Python, which reads one faster
        self._places: NDArray[np.uint32] = reserve(self.capacity_ids, np.uint32, small_pages=True)
        # Squeezing starts at 3/2 of the ids and SLACK, and a third is appended while it runs.
        length = 2 * self.capacity_ids + 2 * (k.SLACK + k.RUN)
        self._log: NDArray[np.uint32] = reserve(length, np.uint32, small_pages=True)

    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Append `ids`. Depths do not matter here."""
        k = self._kernels
        code = k.log_insert(self._head, self._places, self._log, as_ids(ids), self.promotes)
        self._done(code)

    def touch(self, ids: NDArray[Any]) -> None:
        """Move `ids` to the hot end, the last one hottest, if uses matter."""
        if self.promotes:
            self._kernels.log_touch(self._head, self._places, self._log, as_ids(ids))

    def replay(self, notes: NDArray[np.int64]) -> None:
        """Do what notes say, in one pass."""
        k = self._kernels
        self._done(k.log_replay(self._head, self._places, self._log, notes, self.promotes))

    def remove(self, ids: NDArray[Any]) -> None:
        """Forget `ids`; those not present are ignored."""
        self._kernels.log_remove(self._head, self._places, self._log, as_ids(ids))

    def __len__(self) -> int:
        return self._numbers[self._kernels.COUNT]

    def __contains__(self, id_: object) -> bool:
        if not isinstance(id_, (int, np.integer)) or not 0 <= id_ < self.capacity_ids:
            return False
        return bool(self._places[int(id_)])

    def check_integrity(self) -> None:
        """Raise AssertionError when the log and its count disagree; O(n)."""
        if not self._kernels.log_check(self._head, self._places, self._log):
            raise AssertionError(f"{self.name}: the log and its count disagree")

    def _walk(self, cursor: NDArray[np.int64], out: NDArray[np.int64]) -> int:
        k = self._kernels
        return int(k.log_walk(self._head, self._places, self._log, cursor, out))
