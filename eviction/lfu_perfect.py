"""Least frequently used with counts that survive eviction: the policy of a perfect memory.

For analysis only: an id must mean the same block for ever, as in a trace. A store reuses its ids,
and a count that outlives its object would be credited to a stranger. Removal for any reason
keeps the count. Cost: as lfu.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from eviction._buckets import CountingPolicy
from eviction.base import State, state_columns

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["LfuPerfectPolicy"]


class LfuPerfectPolicy(CountingPolicy):
    """The id with the fewest uses ever leaves first, among equals the one used longest ago."""

    name: ClassVar[str] = "lfu_perfect"
    _keeps_counts: ClassVar[bool] = True

    def dump(self) -> State:
        """Order and keys, and beside them the counts kept for ids that are away."""
        kept = self._kept()
        away = np.flatnonzero(kept)
        return super().dump() | {"away_ids": away, "away_counts": kept[away].astype(np.int64)}

    def load(self, state: State) -> None:
        """Become the dumped order, keys and memory."""
        away, counts = state_columns(state, "away_ids", "away_counts")
        away = self._loadable(away)
        super().load(state)
        self._nodes[away + 1, self._kernels.KEPT] = counts
        highest = max(int(self._nodes[0, 1]), int(away.max(initial=-1)) + 1)
        self._nodes[0, 1] = highest

    def _kept(self) -> NDArray[np.uint32]:
        """The kept count of every id below the highest one ever inserted."""
        return self._nodes[1 : int(self._nodes[0, 1]) + 1, self._kernels.KEPT]
