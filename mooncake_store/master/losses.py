"""What a damage of a journal costs, and who keeps what is needed to know that.

    left = Left.find(folder, origin)               # in memory, or of a good end
    judgement = judge(contents, left.noted)        # what a shard makes of what was written down
    noter = Noter.beginning(ring, origin, ...)     # its `note` is for the writer's thread

The stream alone does not tell what a stretch that is missing said. Where each row was last written
does (`core/last_cells.py`): it lies in memory that outlives the process, beside the ring, and the
thread that writes files keeps it, so no request waits for that; a process that ends in good order
leaves it in the folder. Without it, because it found no room or went with the host, a damage means
that a shard begins with nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.core.last_cells import KnownRows, Stretch, last_cells, note_cells
from mooncake_store.core.restore import Damage
from mooncake_store.core.ring import HEAD
from mooncake_store.journal.ending import read_ending, write_ending
from mooncake_store.journal.ring_file import RingFile
from mooncake_store.journal.row_file import RowFile

if TYPE_CHECKING:
    from pathlib import Path
    from typing import Self

    from numpy.typing import NDArray

    from mooncake_store.core.last_cells import Run
    from mooncake_store.core.ring import Ring
    from mooncake_store.journal.origin import Origin
    from mooncake_store.journal.reading import Contents

__all__ = ["Judgement", "Left", "Noted", "Noter", "judge", "rows_of", "runs_of"]

log = logging.getLogger(__name__)


class Noted(NamedTuple):
    """Where rows were last written, up to a position of the stream at least."""

    position: int
    words: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Left:
    """What a run left beside its files."""

    file: RingFile | None
    """Its ring, if it was killed."""
    rows: RowFile | None
    ring: Ring | None
    """What the ring says; without cells where the run ended in good order."""
    noted: Noted | None
    why: str
    """Why there is no ring."""

    def close(self) -> None:
        """Let the files go. Idempotent."""
        for left in (self.file, self.rows):
            if left is not None:
                left.close()

    @classmethod
    def find(cls, folder: Path, origin: Origin) -> Self:
        """Look for it."""
        file, why = RingFile.find(folder, origin)
        if file is not None:
            rows = RowFile.find(file.path, origin)[0]
            noted = None if rows is None else Noted(rows.position, rows.words)
            return cls(file, rows, file.ring, noted, why)
        ending = read_ending(folder, origin)
        if ending is None:
            return cls(None, None, None, None, why)
        ring, words = ending
        return cls(None, None, ring, Noted(int(ring.header[HEAD]), words), why)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a shard that is started makes of what was written down."""

    unusable: str = ""
    """Why it begins with nothing; empty where it goes on, or where there is nothing."""
    damage: Damage | None = None
    """What it has to know where something is missing, and it goes on all the same."""
    told: str = ""
    """What is missing then."""
    lost: int = 0
    """How many objects are lost with that, unfinished ones included."""


def runs_of(contents: Contents) -> list[Run]:
    """Return what has to be read of a journal: all since its newest whole snapshot began."""
    since = 0 if contents.facts is None else contents.facts.snapshot
    runs = zip(contents.positions, contents.runs, strict=True)
    return [(position, run) for position, run in runs if position + len(run) > since]


def rows_of(runs: list[Run]) -> int:
    """Return how many rows a shard needs for what is told of; 0 for words that are no cells."""
    try:
        return len(_in_use(last_cells(runs)))
    except ValueError:
        return 0


def judge(contents: Contents, noted: Noted | None) -> Judgement:
    """Say what a shard makes of a journal, and of what was noted of its rows. O(words + rows)."""
    if contents.unusable or contents.facts is None or not contents.needed:
        return Judgement(contents.unusable)
    told = f"the journal is not whole: {contents.needed[-1]}"
    if noted is None or not contents.ended:
        return Judgement(f"{told}; where rows were last written is not known")
    runs = runs_of(contents)
    try:
        behind = [run for run in runs if run[0] + len(run[1]) > noted.position]
        last = last_cells(behind, noted.words, noted.position)
        reached = behind[-1][0] + len(behind[-1][1]) if behind else noted.position
        if reached != contents.end:
            raise ValueError(f"it reaches to {reached}, and the journal to {contents.end}")
        known = KnownRows(last, contents.facts.snapshot)
        for run in runs:
            known.note(run)
    except ValueError as error:
        return Judgement(f"{told}; where rows were last written does not fit it: {error}")
    damage = Damage(last, contents.end, contents.behind)
    return Judgement("", damage, told, len(known.lost()))


class Noter:
    """Notes where rows are written, on the thread that writes the files of their shard.

    Where the system has no room for that it says so once, and notes nothing from then on.
    """

    def __init__(self, ring: RingFile, shard: int, rows: RowFile | None) -> None:
        self._file = ring
        self._ring = Stretch.ring(ring.ring.cells)
        self._shard = shard
        self._rows = rows

    @classmethod
    def beginning(
        cls,
        ring: RingFile,
        origin: Origin,
        rows_max: int,
        found: RowFile | None,
        runs: list[Run],
        damage: Damage | None,
    ) -> Noter:
        """Return one for a shard that goes on where the ring ends, with what these runs say.

        What was `found` is gone on with, and made anew only where it does not fit.
        """
        end = int(ring.ring.header[HEAD])
        begin = runs[0][0] if runs else end
        if found is not None and begin <= found.position <= end and found.rows_max >= rows_max:
            noter = cls(ring, origin.shard, found)
            for position, words in runs:
                if position + len(words) > found.position:
                    stretch = Stretch.run(position, words)
                    noter._note(stretch, max(position, found.position), position + len(words))
            return noter
        if found is not None:
            found.close()
        noter = cls(ring, origin.shard, None)
        try:
            words = _in_use(last_cells(runs) if damage is None else damage.last)
            noter._rows = RowFile.create(ring.path, origin, max(rows_max, len(words)), words, end)
        except (OSError, ValueError) as error:
            noter._give_up(error)
        return noter

    def note(self, start: int, stop: int) -> None:
        """Note what stands in the ring between two positions."""
        self._note(self._ring, start, stop)

    def _note(self, stretch: Stretch, start: int, stop: int) -> None:
        rows = self._rows
        if rows is None:
            return
        try:
            while (start := note_cells(stretch, start, stop, rows.words)) < stop:
                rows.grow(stretch.row_at(start))
        except OSError as error:
            self._give_up(error)
        else:
            rows.position = stop

    def _give_up(self, error: Exception) -> None:
        rows, self._rows = self._rows, None
        if rows is not None:
            rows.unlink()
            rows.close()
        self._tell(error)

    def _tell(self, error: Exception) -> None:
        log.warning(
            "journal of shard %d: it cannot be noted where objects are written (%s); should its "
            "files be damaged, the shard begins with nothing when it is started again",
            self._shard,
            error.strerror or error if isinstance(error, OSError) else error,
        )

    def leave(self, folder: Path, origin: Origin, header: NDArray[np.int64]) -> None:
        """Bring what was noted to the folder, because its memory goes with the ring.

        For when the writer's thread has ended, and all that the `header` tells of is in files.
        """
        if self._rows is None:
            return
        try:
            write_ending(folder, origin, header, _in_use(self._rows.words))
        except OSError as error:
            self._tell(error)
        self._rows.unlink()

    def close(self) -> None:
        """Let the file go; the writer's thread has ended. Idempotent."""
        if self._rows is not None:
            self._rows.close()


def _in_use(words: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return them without those at the end that say nothing."""
    used = np.flatnonzero(words)
    return words[: used[-1] + 1] if len(used) else words[:0]
