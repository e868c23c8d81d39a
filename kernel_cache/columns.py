"""Columns that grow without ever being copied: address space first, memory when touched.

A table that doubles by copying stalls every request behind it, and nobody knows beforehand how
many rows there will be. So a column reserves address space for the most rows it may ever have;
the kernel of the system backs a page when it is first written. Reserving costs microseconds
whatever the size, growing a page fault, and a column nobody writes costs nothing. Zero therefore
always means "nothing here".

It does not count or limit real memory, and gives none back but where `release` is asked to.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

__all__ = ["release", "reserve"]

# Python names this flag from 3.13 on; the value is Linux's.
_NORESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)


def reserve(
    shape: int | tuple[int, ...], dtype: DTypeLike, *, small_pages: bool = False
) -> NDArray[Any]:
    """Return a zeroed array over fresh address space; raises OSError where there is not as much.

    With `small_pages` no touch costs more than one of 4 KiB: that of a huge page took up to
    5.5 ms where the machine's host had yet to back it, and that would be one request's wait.
    """
    kind = np.dtype(dtype)
    count = shape if isinstance(shape, int) else math.prod(shape)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    memory = mmap.mmap(-1, max(mmap.PAGESIZE, count * kind.itemsize), flags=flags)
    if small_pages and hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A system built without huge pages refuses the advice, and needs none.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    column = np.frombuffer(memory, dtype=kind, count=count)
    return column if isinstance(shape, int) else column.reshape(shape)


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
