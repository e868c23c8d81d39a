"""Kernels of the least capacities: how deep in the order of last uses each lookup finds its block.

Array layout. `places` is int32: places[id] is the number of the id's newest use, counted from 1,
and 0 when it has not been used. `tree` is int32, a Fenwick tree over these numbers with one for
each id's newest use, so that a sum of it counts ids.
"""

# mypy: allow-untyped-defs

import numpy as np

from kernel_cache import njit


@njit(cache=True, nogil=True, inline="always")
def add(tree, place, count):
    """Count `count` more at a place. O(log uses)."""
    while place < tree.size:
        tree[place] += count
        place += place & -place


@njit(cache=True, nogil=True, inline="always")
def before(tree, place):
    """How many ids were last used before a place. O(log uses)."""
    place -= 1
    total = 0
    while place > 0:
        total += tree[place]
        place -= place & -place
    return total


@njit(cache=True, nogil=True)
def least_capacities(ids, offsets, places, tree, out):
    """Write each lookup's least capacity, 0 where there is none. O(uses log uses).

    A request's blocks are looked up before anything changes, and then used tail first. A block is
    found if it is resident and all before it are, so what its prefix needs it needs too.
    """
    used = 0
    known = 0
    for r in range(offsets.size - 1):
        start, end = offsets[r], offsets[r + 1]
        need = 0
        for k in range(start, end):
            place = np.int64(places[ids[k]])
            if place == 0:
                break
            need = max(need, known - before(tree, place))
            out[k] = need
        for k in range(end - 1, start - 1, -1):
            i = ids[k]
            if places[i] == 0:
                known += 1
            else:
                add(tree, np.int64(places[i]), -1)
            used += 1
            places[i] = used
            add(tree, used, 1)


def warmup() -> None:
    """Compile (or load from the cache) every kernel here for the types used in production."""
    ids, offsets = np.zeros(2, dtype=np.int64), np.arange(3, dtype=np.int64)
    places, tree = np.zeros(1, dtype=np.int32), np.zeros(3, dtype=np.int32)
    add(tree, 1, 1)
    before(tree, 1)
    tree[:] = 0
    least_capacities(ids, offsets, places, tree, np.zeros(2, dtype=np.int64))
