"""Where each row was last written: what tells, of a stream that lacks stretches, which rows it has.

    note_cells(Stretch.ring(cells), start, stop, last)     # who writes the stream
    known = KnownRows(last, snapshot)                      # who reads what is left of it
    for run in runs: known.note(run)
    known.unknown(), known.lost()

A row is what its newest cell says, and where that stood is known from elsewhere (`last`). So a row
whose newest cell was read is known, whatever else is missing, and any other is not to be believed:
it may have been removed or replaced since. Layout: `kernels/last_cells.py`. O(cells + rows).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.core.kernels import last_cells as k
from mooncake_store.core.state import INT64, as_column

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["KnownRows", "Run", "Stretch", "last_cells", "note_cells"]

Run = tuple[int, "NDArray[np.int64]"]
"""Words of a stream, and the position where they begin."""

_ROWS_MIN = 1 << 12


class Stretch(NamedTuple):
    """Words of a stream: that of position p is cells[(p - base) & mask]."""

    cells: NDArray[np.int64]
    base: int
    mask: int

    @classmethod
    def ring(cls, cells: NDArray[np.int64]) -> Self:
        """Return what a ring holds."""
        return cls(as_column(cells, INT64), 0, len(cells) - 1)

    @classmethod
    def run(cls, position: int, words: NDArray[np.int64]) -> Self:
        """Return words that begin at a position."""
        return cls(as_column(words, INT64), position, -1)

    def row_at(self, position: int) -> int:
        """Return which row a cell is about."""
        return int(self.cells[(position - self.base) & self.mask]) >> 32


def note_cells(stretch: Stretch, start: int, stop: int, last: NDArray[np.int64]) -> int:
    """Note in `last` the cells from one position to another.

    Returns where it came to: `stop`, or a cell about a row that is beyond `last`, or none at all.
    """
    return int(k.note_cells(*stretch, start, stop, last))


def last_cells(
    runs: Iterable[Run], noted: NDArray[np.int64] | None = None, position: int = 0
) -> NDArray[np.int64]:
    """Return where each row was last written at the end of the runs.

    `noted` is what is known of that up to a position. Raises ValueError for words that are no
    cells, and where the runs leave anything out behind that position.
    """
    last = np.zeros(_ROWS_MIN, np.int64) if noted is None else noted.copy()
    for begin, words in runs:
        stretch, stop = Stretch.run(begin, words), begin + len(words)
        if position and begin > position:
            raise ValueError(f"nothing is known of the positions {position} to {begin}")
        at = max(begin, position)
        while at < stop and (at := note_cells(stretch, at, stop, last)) < stop:
            row = stretch.row_at(at)
            if row < len(last):
                raise ValueError(f"no cell at position {at}")
            more = np.zeros(max(row + 1, 2 * len(last)) - len(last), np.int64)
            last = np.concatenate([last, more])
        position = max(position, stop)
    return last


class KnownRows:
    """Compares what was read of a stream, run by run, with where its rows were last written.

    `since` is where the newest whole snapshot begins: rows that nothing was written about from
    there on hold nothing.
    """

    def __init__(self, last: NDArray[np.int64], since: int) -> None:
        self.gaps = 0
        """How many stretches were missing so far."""
        self._last = last
        self._seen = np.zeros(len(last), np.int64)
        self._since = since
        self._end = since

    def goes_on(self, position: int) -> bool:
        """Whether a run at a position leaves nothing out behind those before."""
        return position <= self._end

    def reach(self, position: int) -> None:
        """Go on at a position, the end of the stream as well: what lies before it is missing."""
        if not self.goes_on(position):
            self.gaps += 1
            self._end = position

    def note(self, run: Run) -> None:
        """Note that a run was read. Raises ValueError for what is no cell, or of no such row."""
        position, words = run
        self.reach(position)
        self._end = position + len(words)
        at = note_cells(Stretch.run(position, words), position, self._end, self._seen)
        if at < self._end:
            raise ValueError(f"a cell at position {at} is about no row that was noted")

    def passed(self) -> NDArray[np.int64]:
        """Return rows that will have been written again, or freed, by the end of the stream."""
        return np.flatnonzero(self._seen >> k.PLACE_BITS != self._last >> k.PLACE_BITS)

    def unknown(self) -> NDArray[np.int64]:
        """Return rows of which the newest cell was not read."""
        return np.flatnonzero(self._seen != self._last)

    def lost(self) -> NDArray[np.int64]:
        """Return those of them that hold an object, or one that is being written."""
        rows = self.unknown()
        newest = self._last[rows]
        holding = (newest >> k.PLACE_BITS >= self._since) & (newest & k.FREED == 0)
        held: NDArray[np.int64] = rows[holding]
        return held
