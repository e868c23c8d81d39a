"""Windows: places of a segment where an object would fit if what lies there left.

Eviction frees the coldest bytes wherever they lie. A large object needs its bytes side by side,
and where pins and leases stand between, the coldest may leave one after the other without such a
place ever coming to be. So places are looked for by address: between what must stay, the one from
which the fewest bytes have to leave. There is none: then nothing needs to leave.

Cost: O(rows of the shard) a search, some milliseconds at ROWS_MAX, and a put that waits searches
again; so only for large objects that lack only room in one piece, and only up to there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.core.reads import extents_of
from mooncake_store.core.records import Flag, State

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mooncake_store.core.segment import Segment
    from mooncake_store.core.state import ShardState

__all__ = ["ROWS_MAX", "Window", "cheapest", "gather"]

ROWS_MAX = 16_384
"""Rows of a shard among which a place is looked for."""


class Window(NamedTuple):
    """A place, and what lies there."""

    segment: Segment
    start: int
    nbytes: int
    rows: NDArray[np.int64]


def cheapest(
    state: ShardState,
    segments: list[Segment],
    size: int,
    eligible: Callable[[NDArray[np.int64]], NDArray[np.bool_]],
    soft: bool,
) -> list[Window]:
    """The best window of each segment that has one, those with the fewest bytes to leave first.

    Only what is `eligible` may leave, and what is pinned softly only with `soft`.
    """
    live = np.flatnonzero(state.rows["state"][: state.table.rows_high] != State.FREE)
    row, index, offset = extents_of(state, live)
    wanted = state.space.mask(lambda segment: segment in segments)
    here = wanted[index] != 0
    row, index, offset = row[here], index[here], offset[here]
    nbytes = state.rows["size"][row].astype(np.int64)
    may_leave = eligible(row)
    if not soft:
        may_leave &= (state.rows["flags"][row] & Flag.SOFT_PIN) == 0
    resting = state.space.quarantine.entries()
    row = np.concatenate([row, np.full(len(resting), -1)])
    index, offset, nbytes = (
        np.concatenate([column, resting[:, at]])
        for at, column in enumerate((index, offset, nbytes))
    )
    may_leave = np.concatenate([may_leave, np.zeros(len(resting), np.bool_)])
    found = []
    for segment in segments:
        if segment.part:
            continue  # its runs are short, and what others have there does not leave for this one
        mine = np.flatnonzero(index == segment.index)
        mine = mine[np.argsort(offset[mine])]
        columns = row[mine], offset[mine], nbytes[mine], may_leave[mine]
        window = _best(segment, size, *columns)
        if window is not None:
            found.append(window)
    return sorted(found, key=lambda window: window.nbytes)


def _best(
    segment: Segment,
    size: int,
    row: NDArray[np.int64],
    offset: NDArray[np.int64],
    nbytes: NDArray[np.int64],
    may_leave: NDArray[np.bool_],
) -> Window | None:
    """The window of `size` bytes on one segment, whose extents come in order of their offsets."""
    granule = segment.allocator.granule
    end = -(-(offset + nbytes) // granule) * granule
    # A window begins where the segment does, or something ends.
    starts = np.append(0, end)
    first = np.searchsorted(end, starts, side="right")
    behind = np.searchsorted(offset, starts + size, side="left")
    # The next thing behind a start that must stay, or else the end of the segment.
    barrier = np.where(may_leave, segment.nbytes, offset)
    limit = np.minimum.accumulate(np.append(barrier, segment.nbytes)[::-1])[::-1][first]
    fits = starts + size <= limit
    if not fits.any():
        return None
    total = np.append(0, np.cumsum(nbytes))
    cost = np.where(fits, total[behind] - total[first], np.iinfo(np.int64).max)
    at = int(cost.argmin())
    inside = slice(int(first[at]), int(behind[at]))
    return Window(segment, int(starts[at]), int(cost[at]), np.unique(row[inside]))


def gather(state: ShardState, window: Window, size: int) -> bool:
    """Make one hole of an emptied window, of which slabs may still hold parts."""
    state.space.return_freed()
    allocator = window.segment.allocator
    start = np.array([window.start])
    return bool(allocator.reserve(start, np.array([size]))[0] and allocator.free(start)[0])
