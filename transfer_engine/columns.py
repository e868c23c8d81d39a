"""Columns as the kernels take them, and registered memory as one sorted list of ranges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import ArrayLike

    from transfer_engine.base import Columns, Region

__all__ = ["as_column", "as_rights", "merge_ranges"]

_INT64 = np.dtype(np.int64)


def as_column(values: ArrayLike) -> Columns:
    """Return values as the kernels take them: contiguous writable int64, copied only if not so."""
    if type(values) is np.ndarray and values.dtype is _INT64 and values.ndim == 1:
        flags = values.flags
        if flags.c_contiguous and flags.writeable:
            return values
    column = np.ascontiguousarray(values, dtype=np.int64)
    if column.ndim != 1:
        raise InvalidArgumentError(f"a column has one dimension, not {column.ndim}")
    # A read-only array is another type to numba, and would compile every kernel anew.
    return column if column.flags.writeable else column.copy()


def as_rights(values: ArrayLike, count: int) -> Columns:
    """Return rows (tag, stamp), one per request, as `as_column` does."""
    if type(values) is np.ndarray and values.dtype is _INT64 and values.shape == (count, 2):
        flags = values.flags
        if flags.c_contiguous and flags.writeable:
            return values
    rights = np.ascontiguousarray(values, dtype=np.int64)
    if rights.shape != (count, 2):
        raise InvalidArgumentError(
            f"rights of shape {rights.shape} for {count} requests: each has a tag and a stamp"
        )
    return rights if rights.flags.writeable else rights.copy()


def merge_ranges(regions: Sequence[Region]) -> tuple[Columns, Columns]:
    """Return the union of regions as sorted, disjoint, non-touching starts and ends. O(r log r)."""
    starts: list[int] = []
    ends: list[int] = []
    for region in sorted(regions, key=lambda region: region.address):
        end = region.address + region.size
        if starts and region.address <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        elif region.size:
            starts.append(region.address)
            ends.append(end)
    return np.array(starts, dtype=np.int64), np.array(ends, dtype=np.int64)
