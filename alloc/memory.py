"""Arrays that grow without ever being copied: address space first, memory when touched.

An allocator cannot know how many objects its segment will hold, and a table that doubles by
copying stalls every request behind it. So each state array reserves its largest size as address
space (an anonymous private mapping without swap accounting); the kernel supplies a zeroed page at
the first write to it. Reserving costs microseconds whatever the size, growing costs one page
fault per 4 KiB. Where the system refuses that much address space, half is tried, and so on.

What this does not do: give pages back. An array stays as large as the most it ever held.
"""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

# The constant has a name in `mmap` only from Python 3.13 on; the value is Linux's.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_BYTES_MIN = 1 << 20


def reserve_array(rows: int, columns: int, dtype: DTypeLike) -> NDArray[Any]:
    """Zeroed array of at most `rows` rows (fewer where the system refuses), untouched so far.

    One-dimensional when `columns` is 1. Raises OSError when not even 1 MiB can be reserved.
    """
    width = columns * np.dtype(dtype).itemsize
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    while True:
        try:
            memory = mmap.mmap(-1, rows * width, flags=flags)
            break
        except OSError:
            if rows * width <= _BYTES_MIN:
                raise
            rows //= 2
    flat = np.frombuffer(memory, dtype=dtype)
    return flat if columns == 1 else flat.reshape(rows, columns)
