"""From which capacity on a pool with lru would have answered each block lookup of a trace.

    needs = least_capacities(trace.ids, trace.offsets)
    hits = np.count_nonzero((needs > 0) & (needs <= 10_000))     # as count_hits counts them

The model is that of `eviction.simulate`, tail first. There the blocks in a pool of any capacity
are the first ones of one order, that of last uses. So one pass tells all capacities: a block needs
as many as its place in that order is deep, or more where a block before it in the prompt does.

Only lru has such an order; other policies are replayed. Cost: O(blocks log blocks), some hundredths
of a microsecond a block, and 12 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eviction.simulate import check_offsets

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["least_capacities"]


def least_capacities(ids: NDArray[np.int64], offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The least number of blocks with which each lookup is a hit; 0 where none is enough.

    Request r looks up ids[offsets[r]:offsets[r + 1]], which names no block twice.
    Raises ValueError for offsets that do not fit and for ids below 0.
    """
    from eviction.kernels import capacities

    check_offsets(ids, offsets)
    if ids.min(initial=0) < 0:
        raise ValueError("ids must be 0 or more: they are places in an array")
    needs = np.zeros(len(ids), dtype=np.int64)
    places = np.zeros(int(ids.max(initial=0)) + 1, dtype=np.int32)
    tree = np.zeros(len(ids) + 1, dtype=np.int32)
    capacities.least_capacities(ids, offsets, places, tree, needs)
    return needs
