"""Belady's optimum: the id whose next use lies furthest ahead leaves first. Analysis only.

It needs the whole future, so no store can run it; it bounds what any policy could reach at a
capacity. (For whole-prefix hits it is the usual yardstick, not a proven optimum.) Ids without a
further use leave first, in order of last use.

Cost: O(1) a step after O(f log f) once for a future of f uses; 16 bytes an id and 16 a use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from eviction.base import as_ids
from eviction.buckets import BucketPolicy

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["OptPolicy"]


class OptPolicy(BucketPolicy):
    """Knows `future`: every id to be inserted or touched, once per use, in order of use.

    The order of two uses in `future` decides which is further ahead, so a request's blocks belong
    there head first: the head is looked up first. Uses beyond the future count as no further use.
    """

    name: ClassVar[str] = "opt"

    def __init__(self, capacity_ids: int, future: NDArray[Any] | None = None) -> None:
        super().__init__(capacity_ids)
        self._future = as_ids(np.empty(0, np.int64) if future is None else future)
        if len(self._future) >= self._kernels.KEYS:
            raise ValueError(f"opt: a future has fewer than {self._kernels.KEYS} uses")
        if len(self._future) and not 0 <= self._future.min() <= self._future.max() < capacity_ids:
            raise ValueError(f"opt: an id of the future is outside 0 to {capacity_ids - 1}")
        self._uses = np.argsort(self._future, kind="stable")
        counts = np.bincount(self._future, minlength=capacity_ids)
        self._starts = np.concatenate(([0], np.cumsum(counts)))
        self._uses_done = np.zeros(capacity_ids, dtype=np.int64)

    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Add `ids`, each with its next use; those already present learn their next use."""
        self._place(as_ids(ids), add=True)

    def touch(self, ids: NDArray[Any]) -> None:
        """Let `ids` look forward to their next use; a use of an absent id is spent as well."""
        self._place(as_ids(ids), add=False)

    def _place(self, ids: NDArray[Any], *, add: bool) -> None:
        if add and len(ids) and not 0 <= ids.min() <= ids.max() < self.capacity_ids:
            self._done(self._kernels.REFUSED)
        keys = np.empty(len(ids), dtype=np.int64)
        horizon = len(self._future)
        self._kernels.future_keys(self._starts, self._uses, self._uses_done, ids, horizon, keys)
        self._move(ids, keys, self._kernels.PLACE if add else self._kernels.REPLACE)
