"""The order in which softly pinned objects leave: lower levels first, in each the coldest first.

An ordinary soft pin, which puts and `pin` set, has level 0, so most shards have one order here
and pay for no other. Which level an object is pinned at stands in its cold record (`pin_level`):
it does not change while the object is in the order.

Cost: that of an LRU for each level in use, but for inserts, which go to their own one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from eviction.base import INSERT, NOTE_SHIFT, EvictionPolicy, as_ids
from eviction.lru import LruPolicy

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["PinnedOrder"]


class PinnedOrder(EvictionPolicy):
    """One LRU behind the other, by what `levels` says of each id."""

    name: ClassVar[str] = "pinned"

    def __init__(self, capacity_ids: int, levels: NDArray[np.uint8]) -> None:
        super().__init__(capacity_ids)
        self._levels = levels
        self._orders = [LruPolicy(capacity_ids)]

    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Add `ids`, each to the order of its level. Depths do not matter here."""
        ids = as_ids(ids)
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.capacity_ids:
            self._done(-1)
        levels = self._levels[ids]
        if not levels.any():
            self._orders[0].insert(ids)
            return
        while len(self._orders) <= levels.max():
            self._orders.append(LruPolicy(self.capacity_ids))
        for level in np.unique(levels).tolist():
            self._orders[level].insert(ids[levels == level])

    def touch(self, ids: NDArray[Any]) -> None:
        """Make each of `ids` the hottest of its level."""
        for order in self._orders:
            order.touch(ids)

    def remove(self, ids: NDArray[Any]) -> None:
        """Forget `ids`; those not present are ignored."""
        for order in self._orders:
            order.remove(ids)

    def replay(self, notes: NDArray[np.int64]) -> None:
        """Do what notes say, in one pass for each level unless something is inserted."""
        if len(self._orders) > 1 and (notes >> NOTE_SHIFT == INSERT).any():
            super().replay(notes)
            return
        for order in self._orders:
            order.replay(notes)

    def __len__(self) -> int:
        return sum(map(len, self._orders))

    def __contains__(self, id_: object) -> bool:
        return any(id_ in order for order in self._orders)

    def check_integrity(self) -> None:
        """Raise AssertionError when an order is broken, or an id is in that of another level."""
        for level, order in enumerate(self._orders):
            order.check_integrity()
            if (self._levels[order.coldest(len(order))] != level).any():
                raise AssertionError(f"{self.name}: an id is in the order of level {level}")

    def _walk(self, cursor: NDArray[np.int64], out: NDArray[np.int64]) -> int:
        # The first word of the cursor is that of an order, the second says of which.
        found = 0
        while True:
            found += self._orders[int(cursor[1])]._walk(cursor[:1], out[found:])
            if found == len(out) or cursor[1] + 1 == len(self._orders):
                return found
            cursor[:] = 0, cursor[1] + 1
