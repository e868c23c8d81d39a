"""What the list policies share: one linked list of ids, coldest first.

Subclasses decide what a touch does to the order. Cost: 8 bytes an id touched, O(1) a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from eviction._storage import reserve
from eviction.base import EvictionPolicy, State, as_ids, state_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["ListPolicy"]


class ListPolicy(EvictionPolicy):
    """Ids in a linked list; insert appends at the hot end and moves what was there already."""

    def __init__(self, capacity_ids: int) -> None:
        from eviction import _kernels_list

        self._kernels = _kernels_list
        super().__init__(capacity_ids)

    def _reset(self) -> None:
        rows = self.capacity_ids + self._kernels.FIRST
        self._links: NDArray[np.uint32] = reserve((rows, 2), np.uint32)
        self._links[self._kernels.END] = self._kernels.END

    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Append `ids`; those already present move to the hot end. Depths do not matter here."""
        self._done(self._kernels.list_insert(self._links, as_ids(ids), True))

    def remove(self, ids: NDArray[Any]) -> None:
        """Unlink `ids`; those not present are ignored."""
        self._done(self._kernels.list_remove(self._links, as_ids(ids)))

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

    def dump(self) -> State:
        """The ids, coldest first."""
        return {"ids": self.coldest(len(self))}

    def load(self, state: State) -> None:
        """Become the dumped order."""
        (ids,) = state_columns(state, "ids")
        ids = self._loadable(ids)
        self._reset()
        self._done(self._kernels.list_insert(self._links, ids, True))

    def _walk(self, cursor: NDArray[np.int64], out: NDArray[np.int64]) -> int:
        return int(self._kernels.list_walk(self._links, cursor, out))
