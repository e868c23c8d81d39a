"""Arrays reserved as address space: big enough for every id, real memory only where touched.

A policy must never copy its columns to grow (a copy of millions of nodes is a stall of tens of
milliseconds in the shard), so it reserves its upper bound at once. Anonymous memory reads as
zero until written, hence every layout in this package lets zero mean "absent".

It does not limit or count real memory. Cost: one system call; a page fault per page touched.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["reserve"]

# Python names this flag only since 3.13; 0x4000 is its value on Linux.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
_HUGE_FROM_BYTES = 4 << 20


def reserve(shape: tuple[int, ...], dtype: DTypeLike, *, dense: bool = False) -> NDArray[Any]:
    """A zero array of `shape` over fresh address space, released when the array goes.

    `dense` says the array fills up from its start, so huge pages would save address translation
    misses and waste at most one page; a sparse array must not have them.
    """
    kind = np.dtype(dtype)
    count = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, max(1, count * kind.itemsize), flags=flags)
    advice = "MADV_HUGEPAGE" if dense and len(memory) >= _HUGE_FROM_BYTES else "MADV_NOHUGEPAGE"
    if hasattr(mmap, advice):
        # A kernel built without huge pages refuses the advice; only speed depends on it.
        with contextlib.suppress(OSError):
            memory.madvise(getattr(mmap, advice))
    return np.frombuffer(memory, dtype=kind, count=count).reshape(shape)
