"""SIEVE: insertion order, one mark per id, and a hand that spares what was used since it passed.

A touch only sets a byte, which makes it the cheapest policy that looks at uses, and blocks used
once are dropped within one round of the hand (Zhang et al., NSDI 2024).

There, finding a victim moves the hand. Here `victims` only proposes, so the hand moves when the
owner removes what was proposed: `remove` sweeps it up to the removed ids, clearing the marks it
passes, and ids removed for other reasons leave the hand alone. The proposal is a hint: without it
removal is still right, only the hand stays where it was.

Cost: O(1) a step, plus one mark cleared for every mark set; 9 bytes an id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from eviction.base import EvictionPolicy, Pick, as_ids
from kernel_cache.columns import reserve

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SievePolicy"]


class SievePolicy(EvictionPolicy):
    """The oldest id not used since the hand last passed it leaves first."""

    name: ClassVar[str] = "sieve"

    def __init__(self, capacity_ids: int) -> None:
        from eviction.kernels import sieve

        super().__init__(capacity_ids)
        self._kernels = sieve
        rows = self.capacity_ids + self._kernels.FIRST
        self._links: NDArray[np.uint32] = reserve((rows, 2), np.uint32, small_pages=True)
        self._links[self._kernels.END] = self._kernels.END
        self._marks: NDArray[np.uint8] = reserve(rows, np.uint8, small_pages=True)
        self._hand = np.zeros(1, dtype=np.int64)
        self._proposed: NDArray[np.int64] | None = None

    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Append new `ids` unmarked; mark those already present."""
        self._done(self._kernels.sieve_insert(self._links, self._marks, as_ids(ids)))

    def touch(self, ids: NDArray[Any]) -> None:
        """Mark `ids`; the hand will spare each once."""
        self._kernels.sieve_touch(self._links, self._marks, as_ids(ids))

    def victims(
        self, nbytes: int, pick: Pick | None = None, limit: int | None = None
    ) -> NDArray[np.int64]:
        """The ids the hand would evict next; removing them makes the hand follow."""
        self._proposed = super().victims(nbytes, pick, limit)
        return self._proposed.copy()

    def remove(self, ids: NDArray[Any]) -> None:
        """Unlink `ids`; for those that were proposed as victims the hand sweeps up to them."""
        ids = as_ids(ids)
        if self._proposed is not None and len(self._proposed):
            evicted = self._proposed[np.isin(self._proposed, ids)]
            if len(evicted):
                self._kernels.sieve_sweep(self._links, self._marks, self._hand, evicted)
                self._proposed = None
        self._done(self._kernels.sieve_remove(self._links, self._marks, self._hand, ids))

    def __len__(self) -> int:
        return int(self._links[0, 0])

    def __contains__(self, id_: object) -> bool:
        if not isinstance(id_, (int, np.integer)) or not 0 <= id_ < self.capacity_ids:
            return False
        return bool(self._links[int(id_) + self._kernels.FIRST, 1])

    def check_integrity(self) -> None:
        """Raise AssertionError when the list and its count disagree; O(n)."""
        if not self._kernels.list_check(self._links):
            raise AssertionError(f"{self.name}: the list and its count disagree")

    def _walk(self, cursor: NDArray[np.int64], out: NDArray[np.int64]) -> int:
        return int(self._kernels.sieve_walk(self._links, self._marks, self._hand, cursor, out))
