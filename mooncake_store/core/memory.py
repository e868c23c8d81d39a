"""Columns that grow without ever being copied.

A column reserves address space for the most rows it may ever have; the kernel backs a page when
it is first written. So growing costs a page fault instead of a rehash or a copy, memory follows
what is used, and a column nobody writes costs nothing. Zero therefore always means "nothing here".
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["release", "reserve"]

MAP_NORESERVE = 0x4000  # Linux; the mmap module names it only from Python 3.13 on


def reserve(count: int, dtype: Any) -> NDArray[Any]:
    """Return `count` zeroed entries whose memory becomes real page by page, when written."""
    dtype = np.dtype(dtype)
    nbytes = max(mmap.PAGESIZE, count * dtype.itemsize)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
    region = mmap.mmap(-1, nbytes, flags=flags)
    return np.frombuffer(region, dtype=dtype, count=count)


def release(column: NDArray[Any], start: int, stop: int) -> None:
    """Give the pages of entries start..stop back; they read as zero afterwards.

    Only whole pages are given back, so callers pass multiples of a page or the whole column.
    """
    owner = _owner(column)
    first = -(-start * column.itemsize // mmap.PAGESIZE) * mmap.PAGESIZE
    last = stop * column.itemsize // mmap.PAGESIZE * mmap.PAGESIZE
    if stop == len(column):
        last = len(owner) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first:
        owner.madvise(mmap.MADV_DONTNEED, first, last - first)


def _owner(column: NDArray[Any]) -> mmap.mmap:
    region: Any = column.base
    assert isinstance(region.obj, mmap.mmap)
    return region.obj
