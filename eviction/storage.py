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


def reserve(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """A zero array of `shape` over fresh address space, released when the array goes.

    Small pages only: the first touch of a huge page took up to 5.5 ms where the machine's host
    had yet to back it, and that would be one request's wait.
    """
    kind = np.dtype(dtype)
    count = math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, max(1, count * kind.itemsize), flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A kernel built without huge pages refuses the advice, and needs none.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype=kind, count=count).reshape(shape)
