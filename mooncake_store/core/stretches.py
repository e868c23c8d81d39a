"""Where a stream of cells may begin and end, so that a shard can be made of it (`restore`).

    for snapshot in snapshots(runs): ...
    runs, end = stretch(runs, snapshot.begin, until)

A shard as it was at any position needs a whole snapshot before that, and every word since it began.
`restore` takes the stream to its end; this is for who wants to see how it was before. O(cells).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.core import journal as j
from mooncake_store.core.kernels import cells as k
from mooncake_store.core.state import INT64, as_column

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from mooncake_store.core.last_cells import Run

__all__ = ["Snapshot", "snapshots", "stretch"]


class Snapshot(NamedTuple):
    """A whole snapshot in a stream."""

    begin: int
    """The position of its first word."""
    whole: int
    """From this position on a shard can be made of it..."""
    until: int
    """...and to this one: behind it words are missing, or there are none yet."""


def snapshots(runs: Sequence[Run]) -> list[Snapshot]:
    """Return the whole snapshots among the words of a journal, oldest first.

    Raises ValueError for words that are no cells.
    """
    found: list[Snapshot] = []
    complete: list[tuple[int, int]] = []  # begin and whole, of those that no gap has ended
    begun, end = -1, None
    for position, run in runs:
        if end not in (None, position):
            found += [Snapshot(*each, end) for each in complete]
            complete, begun = [], -1
        end = position + len(run)
        for at, kind in _told(run):
            if kind == j.SNAPSHOT_BEGINS:
                begun = position + at
            elif kind == j.SNAPSHOT_ENDS and begun >= 0:
                # The rows of its last slice follow, in what was published with it.
                complete.append((begun, end))
                begun = -1
    return found + [Snapshot(*each, end) for each in complete if end is not None]


def _told(run: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
    """Yield place and kind of each cell that is none of a row."""
    run, at = as_column(run, INT64), 0
    while True:
        at = int(k.next_told(run, at, len(run)))
        if at == len(run):
            return
        words = (int(run[at]) >> 16) & 0xFFFF
        if words < 1 or at + words > len(run):
            raise ValueError(f"a cell of {words} words where {len(run) - at} are left")
        yield at, int(run[at]) & 0xFF
        at += words


def stretch(runs: Sequence[Run], begin: int, until: int) -> tuple[list[Run], int]:
    """Return the words of all cells that begin from one position to another, and where they end.

    `begin` is that of a cell. No word may be missing in between.
    """
    taken, end = [], begin
    for position, run in runs:
        if position + len(run) <= begin or position >= until:
            continue
        first, stop = max(0, begin - position), until - position
        last = len(run) if stop >= len(run) else _boundary(run, first, stop)
        taken.append((position + first, run[first:last]))
        end = position + last
    return taken, end


def _boundary(run: NDArray[np.int64], first: int, stop: int) -> int:
    """Return the place of the first cell that begins at `stop` or behind it."""
    run, at = as_column(run, INT64), first
    while at < stop:
        at = int(k.next_told(run, at, stop))
        if at < stop:
            at += max(1, (int(run[at]) >> 16) & 0xFFFF)
    return min(at, len(run))
