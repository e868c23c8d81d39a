"""What the keyed policies share: a bucket queue of ids by key, coldest key first.

Subclasses say how a use changes the key. Cost: O(1) a step, independent of how many ids and keys
there are; 16 bytes an id, plus 4 bytes of sparse address space per possible key, of which a page
becomes real when a key on it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from eviction.base import EvictionPolicy, as_ids
from kernel_cache.columns import reserve

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["BucketPolicy", "CountingPolicy"]

NO_DEPTHS = np.empty(0, dtype=np.int32)


class BucketPolicy(EvictionPolicy):
    """Ids in rings by key; a subclass gives the keys."""

    # How far one use moves a counting key; what fits below it is the second criterion.
    _step: ClassVar[int] = 1
    # Whether the key of a removed id is kept as the use count it comes back with.
    _keeps_counts: ClassVar[bool] = False

    def __init__(self, capacity_ids: int) -> None:
        from eviction.kernels import buckets

        super().__init__(capacity_ids)
        self._kernels = buckets
        self._nodes: NDArray[np.uint32] = reserve(
            (self.capacity_ids + 1, 4), np.uint32, small_pages=True
        )
        self._heads: NDArray[np.uint32] = reserve(self._kernels.KEYS, np.uint32, small_pages=True)
        self._words: NDArray[np.uint64] = reserve(self._kernels.WORDS, np.uint64, small_pages=True)

    def remove(self, ids: NDArray[Any]) -> None:
        """Take `ids` out of their rings; those not present are ignored."""
        how = self._kernels.RETIRE if self._keeps_counts else self._kernels.REMOVE
        self._move(as_ids(ids), NO_DEPTHS, how)

    def _move(self, ids: NDArray[Any], given: NDArray[Any], how: int) -> None:
        """Run the one kernel that changes rings."""
        self._done(
            self._kernels.keyed_move(
                self._nodes, self._heads, self._words, ids, given, how, self._step
            )
        )

    def __len__(self) -> int:
        return int(self._nodes[0, 0])

    def __contains__(self, id_: object) -> bool:
        if not isinstance(id_, (int, np.integer)) or not 0 <= id_ < self.capacity_ids:
            return False
        return bool(self._nodes[int(id_) + 1, self._kernels.NEXT])

    def check_integrity(self) -> None:
        """Raise AssertionError when rings, keys and count disagree; O(n + keys in use)."""
        if not self._kernels.keyed_check(self._nodes, self._heads, self._words):
            raise AssertionError(f"{self.name}: rings, keys and count disagree")

    def _walk(self, cursor: NDArray[np.int64], out: NDArray[np.int64]) -> int:
        return int(self._kernels.keyed_walk(self._nodes, self._heads, self._words, cursor, out))


class CountingPolicy(BucketPolicy):
    """Keys that count uses."""

    def insert(self, ids: NDArray[Any], depths: NDArray[Any] | None = None) -> None:
        """Add `ids` with one use each; those already present count one more."""
        ids = as_ids(ids)
        depths = NO_DEPTHS if depths is None else as_ids(depths)
        if depths.size and depths.shape != ids.shape:
            raise ValueError(f"{self.name}: {len(ids)} ids came with {depths.size} depths")
        self._move(ids, depths, self._kernels.INSERT)

    def touch(self, ids: NDArray[Any]) -> None:
        """Count one use of each of `ids`."""
        self._move(as_ids(ids), NO_DEPTHS, self._kernels.TOUCH)
