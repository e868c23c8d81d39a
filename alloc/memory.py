"""As many rows as the system grants address space for: an allocator works with fewer, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_cache.columns import reserve

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

_BYTES_MIN = 1 << 20


def reserve_array(rows: int, columns: int, dtype: DTypeLike) -> NDArray[Any]:
    """Zeroed array of at most `rows` rows, half as many while the system refuses.

    One-dimensional when `columns` is 1. Raises OSError when not even 1 MiB can be reserved.
    """
    width = columns * np.dtype(dtype).itemsize
    while True:
        try:
            return reserve(rows if columns == 1 else (rows, columns), dtype)
        except OSError:
            if rows * width <= _BYTES_MIN:
                raise
            rows //= 2
