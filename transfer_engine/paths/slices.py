"""Cutting a batch into slices, and putting the verdicts of the pieces together again.

A slice is a run of neighbouring pieces of about `slice_bytes` together; a request longer than
that becomes several pieces, except that a tail shorter than a quarter stays with the piece before
it. So a batch of many small requests gives slices of many, and one large request gives many
slices. No loop over requests: everything is columns.
Cost: O(requests + pieces) in numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transfer_engine.base import Columns, Statuses

__all__ = ["Slices", "cut", "fold"]


@dataclass(frozen=True, slots=True)
class Slices:
    """Pieces in columns; slice n is the pieces from bounds[n] up to bounds[n + 1]."""

    offsets: Columns
    lengths: Columns
    addresses: Columns
    bounds: NDArray[np.int64]
    sizes: NDArray[np.int64]
    """Bytes of each slice."""
    firsts: NDArray[np.int64]
    """The first piece of each request."""

    def __len__(self) -> int:
        return self.sizes.size

    def pieces_of(self, number: int) -> slice:
        """Where the pieces of a slice are in the columns."""
        return slice(int(self.bounds[number]), int(self.bounds[number + 1]))


def cut(
    offsets: Columns,
    lengths: Columns,
    addresses: Columns,
    slice_bytes: int,
    *,
    whole: bool = False,
) -> Slices:
    """Cut checked requests (no negative length) into slices, or only between requests (`whole`)."""
    if slice_bytes <= 0:
        raise ValueError(f"slices of {slice_bytes} bytes")
    tail = lengths % slice_bytes
    counts = np.maximum(1, lengths // slice_bytes + (tail > slice_bytes // 4))
    if whole:
        counts = np.ones_like(lengths)
    firsts = np.cumsum(counts) - counts
    if counts.size and int(counts.max()) > 1:
        origin = np.repeat(np.arange(counts.size), counts)
        step = (np.arange(origin.size) - firsts[origin]) * slice_bytes
        last = np.zeros(origin.size, dtype=np.bool_)
        last[firsts + counts - 1] = True
        sizes = np.where(last, lengths[origin] - step, slice_bytes)
        offsets, addresses = offsets[origin] + step, addresses[origin] + step
        lengths = sizes
    before = np.cumsum(lengths) - lengths
    number = before // slice_bytes
    starts = np.flatnonzero(np.diff(number, prepend=-1))
    bounds = np.append(starts, lengths.size)
    total = int(before[-1] + lengths[-1]) if lengths.size else 0
    edges = np.append(before[starts], total)
    return Slices(offsets, lengths, addresses, bounds, np.diff(edges), firsts)


def fold(slices: Slices, pieces: Statuses) -> Statuses:
    """Return the status of every request: completed when all its pieces are, else the worst."""
    if not slices.firsts.size:
        return pieces[:0]
    return np.minimum.reduceat(pieces, slices.firsts)
