"""Writing down what became true, so that a shard can be made again of it (`restore`).

    journal.mark(row)            # an operation changed this row: kernels do the same in MARKS
    journal.tell(fact)           # what is no row
    journal.publish()            # the operation is done: all of it counts from now on

Rows are only marked while an operation runs. At its end each marked row is written to the ring as
it is then (`kernels/cells.py`), and HEAD moves behind all of it at once: after a kill the operation
was carried out or was not, and whoever got an answer finds what it said. Gets write nothing but
one word, when the last lease ends (HORIZON).

A snapshot is all rows and facts written down once more, a slice a tick between requests, so there
is one format and one reader. What was written before its beginning is needed no more at its end.

Facts that are no rows are few, and much hangs on each of them: nobody believes a row on a segment
that he never heard of. So each is told twice, the second time when the first is in files, and so in
another block: no damage of one block takes it.

Somebody else takes the words to where they are kept (`Sink`). Without one nothing is written.

Cost for an ordinary object: 13 words and its name when it is begun, 3 when it is complete, 1 when
it goes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

import numpy as np

from kernel_cache.columns import reserve
from mooncake_store.core import context as places
from mooncake_store.core import ring as header
from mooncake_store.core.facts import encode_fact
from mooncake_store.core.kernels import cells as k
from mooncake_store.core.records import KEYS_MAX

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray

    from mooncake_store.core.context import Context
    from mooncake_store.core.facts import Fact
    from mooncake_store.core.ring import Ring

__all__ = ["Journal", "Sink", "Told", "extent_cells", "fact_cell"]

EXTENTS, WRITERS, FACT, SNAPSHOT_BEGINS, SNAPSHOT_ENDS, FACT_AGAIN = range(k.TOLD, k.TOLD + 6)
"""Kinds of cells: extents that wait in the quarantine, as (segment, offset, size, writer, until);
writers that are done with theirs; a fact, with its bytes where a row's number would be, and the
same once more, behind the position of the first."""

EXTENTS_PER_CELL = 64
SNAPSHOT_ROWS = 4096
"""Rows of one slice: 0.15 ms, the median among a million."""
SNAPSHOT_WORDS_MIN = 8 << 20
"""What is written at least between two snapshots (64 MiB); else twice what the last one took."""
RING_WORDS_MIN = 1 << 14
"""The least of a ring: one cell of any kind finds room."""


class Sink(Protocol):
    """Who takes the words away, and says so in WRITTEN."""

    @property
    def wants_snapshot(self) -> bool:
        """Whether all must be written down again, because nothing of before is kept."""

    def wake(self) -> None:
        """Hear that HEAD has moved. Cheap."""

    def make_room(self, words: int) -> bool:
        """Wait until the ring has room for so many words; False where it gets none."""


class Told(Protocol):
    """What is written down, for when a journal asks."""

    now: int
    context: Context

    @property
    def rows_high(self) -> int:
        """No row from here on was ever used."""

    def changed_segments(self) -> Iterable[Fact]:
        """Tell of the segments that changed since this was asked last."""

    def has_members(self) -> bool:
        """Whether any row is a member of a group."""

    def members(self, rows: list[int]) -> Iterable[Fact]:
        """Tell of which groups rows are members."""

    def all_but_rows(self) -> Iterable[Fact]:
        """Tell all that is no row."""

    def waiting_extents(self) -> NDArray[np.int64]:
        """Return what `tell_extents` takes, of all that wait."""


class Journal:
    """How one shard of at most so many objects writes down its changes."""

    def __init__(self, state: Told, objects_max: int, ring: Ring, sink: Sink | None) -> None:
        assert sink is None or len(ring.cells) >= RING_WORDS_MIN, "the ring is too small"
        self.ring = ring
        self.behind = False
        """Whether the ring has had no room for what operations changed: nobody may be told of it
        but by reads. It is written as soon as there is room."""
        self._state = state
        self._sink = sink
        self._words = state.context.words
        self._numbers = state.context.numbers
        self._header = ring.header.data
        self._told: list[tuple[NDArray[np.int64], bool]] = []  # and whether to tell it again
        self._told_words = 0
        # Facts to tell again, with their positions: at most what the ring has, and files have not.
        self._again: deque[tuple[int, NDArray[np.int64]]] = deque()
        self._looked = 0  # marks that were looked at for members of groups
        bind = state.context.bind
        # All rows at once may go, and a batch may have come before.
        self._marks = bind(places.MARKS, reserve(objects_max + KEYS_MAX, np.int64))
        bind(places.CELLS, ring.cells)
        bind(places.RING_HEADER, ring.header)
        self._words[places.JOURNALED] = sink is not None
        self._words[places.CELLS_END] = ring.header[header.HEAD]
        self._cursor = -1  # the row where the running snapshot goes on
        self._begun = 0  # where it begins
        self._since = int(ring.header[header.HEAD])  # where the last one ended
        self._snapshot_words = 0  # what that took
        self._asked = False  # for a snapshot
        self._begun_at = 0
        self.snapshots = 0
        """How many were written; when the last one ended, by the shard's time, and what it took."""
        self.snapshot_at = self.snapshot_ns = 0

    # -- while an operation runs

    def mark(self, *rows: NDArray[np.int32] | int) -> None:
        """Note that rows have changed."""
        for some in rows:
            count = 1 if isinstance(some, int) else len(some)
            self.expect_marks(count)
            if self._numbers[places.JOURNALED]:
                first = self._numbers[places.MARKED]
                self._marks[first : first + count] = some
                self._numbers[places.MARKED] = first + count

    def expect_marks(self, count: int) -> None:
        """Make room in MARKS for `count` rows."""
        marked = self._numbers[places.MARKED]
        if marked + count > len(self._marks):
            rows = np.unique(self._marks[:marked] & k.ROW_MASK)
            self._marks[: len(rows)] = rows
            self._numbers[places.MARKED], self._looked = len(rows), 0

    def lease(self, until: int) -> None:
        """Note that a lease was granted until then."""
        self._header[header.HORIZON] = max(self._header[header.HORIZON], until)

    def tell(self, fact: Fact, *, twice: bool = True) -> None:
        """Note what is no row; not `twice` if only rows of the same operation hang on it."""
        if self._sink is not None:
            self._tell(fact_cell(fact), again=twice)

    def tell_extents(self, held: NDArray[np.int64]) -> None:
        """Note extents that wait: (segment, offset, size, writer, until) a row."""
        if self._sink is not None:
            for cell in extent_cells(held):
                self._tell(cell)

    def tell_writers(self, writers: NDArray[np.int64]) -> None:
        """Note that these writers are done with what waits for them."""
        if self._sink is not None:
            for first in range(0, len(writers), EXTENTS_PER_CELL):
                self._tell(_cell(WRITERS, writers[first : first + EXTENTS_PER_CELL]))

    def _tell(self, words: NDArray[np.int64], *, again: bool = False) -> None:
        self._told.append((words, again))
        self._told_words += len(words)
        self._numbers[places.CHANGED] = 1

    # -- when it is done

    def publish(self) -> None:
        """Write down all that changed, and let it count; what finds no room waits for the next."""
        numbers, sink = self._numbers, self._sink
        changed = numbers[places.CHANGED]
        segments = self._state.changed_segments() if changed else ()
        if sink is None:
            numbers[places.CHANGED] = 0
            return
        if not changed and k.write_plain(self._words, self._state.now):
            # What most operations change, in one kernel.
            self._looked, self.behind = 0, False
            self._header[header.HEAD] = numbers[places.CELLS_END]
            sink.wake()
            return
        for fact in segments:
            self.tell(fact)
        if numbers[places.MARKED] > self._looked and self._state.has_members():
            self._tell_members()
        self.behind = not self._write()
        if not self.behind:
            numbers[places.CHANGED] = 0
            self._show()
            sink.wake()

    def _write(self) -> bool:
        """Write all that waits to the ring; whether it found room."""
        # An operation is kept as a whole or not at all, unless it is larger than the ring.
        if not self._make_room(self._words_waiting()):
            return False
        while self._told:
            if not self._make_room(len(self._told[0][0])):
                return False
            words, again = self._told.pop(0)
            self._told_words -= len(words)
            if again:
                self._again.append((self._numbers[places.CELLS_END], words))
            k.write_words(self._words, words)
        place, marked = 0, self._numbers[places.MARKED]
        while (place := k.write_marked(self._words, place, self._room())) < marked:
            if not self._make_room(k.CELL_WORDS_MAX):
                rest = self._marks[place:marked].copy()
                self._marks[: len(rest)] = rest
                self._numbers[places.MARKED], self._looked = len(rest), len(rest)
                return False
        self._numbers[places.MARKED] = self._looked = 0
        return True

    def _words_waiting(self) -> int:
        """At most how many words wait: the most there can be if that is no matter."""
        most = self._told_words + (self._numbers[places.MARKED] + 1) * k.CELL_WORDS_MAX
        if most <= self._room():
            return most
        exact = self._told_words + k.words_marked(self._words) + k.CELL_WORDS_MAX
        return min(int(exact), len(self.ring.cells))

    def _make_room(self, words: int) -> bool:
        if self._room() >= words:
            return True
        assert self._sink is not None
        if self._numbers[places.CELLS_END] != self._header[header.HEAD]:
            self._show()  # a part of an operation that is larger than the ring
        return self._sink.make_room(words)

    def _show(self) -> None:
        k.tell_beside(self._words, self._state.now)
        self._header[header.HEAD] = self._numbers[places.CELLS_END]  # not before all else is there

    def _room(self) -> int:
        used = self._numbers[places.CELLS_END] - self._header[header.WRITTEN]
        return len(self.ring.cells) - used

    def _tell_members(self) -> None:
        marked = self._numbers[places.MARKED]
        rows = np.empty(marked - self._looked, np.int32)
        count = k.grouped_rows(self._words, self._looked, rows)
        self._looked = marked
        for fact in self._state.members(np.unique(rows[:count]).tolist()):
            self.tell(fact, twice=False)

    def _tell_again(self) -> None:
        """Tell facts once more that are in files."""
        written = self._header[header.WRITTEN]
        while self._again and self._again[0][0] < written:
            position, words = self._again.popleft()
            first = np.array([position], np.int64)
            self._tell(_cell(FACT_AGAIN, np.concatenate([first, words[1:]]), int(words[0]) >> 32))

    # -- snapshots

    def expect_snapshot(self) -> None:
        """Begin a whole snapshot as soon as none runs, because what was written lacks something."""
        self._asked = True

    def step(self) -> None:
        """Do a slice of a snapshot if one is due or runs; nothing else may run meanwhile."""
        if self._sink is None:
            return
        self._tell_again()
        if self._cursor < 0 and self._due():
            self._begin()
        if self._cursor < 0 or self.behind:
            return
        rows_high = self._state.rows_high
        stop = min(self._cursor + SNAPSHOT_ROWS, rows_high)
        self.expect_marks(SNAPSHOT_ROWS)
        k.mark_used(self._words, self._cursor, stop)
        self._cursor = stop
        if stop >= rows_high:
            self._end()

    def _due(self) -> bool:
        assert self._sink is not None
        if self._asked or self._sink.wants_snapshot or not self._header[header.SNAPSHOT]:
            return True
        written = self._numbers[places.CELLS_END] - self._since
        return written > max(SNAPSHOT_WORDS_MIN, 2 * self._snapshot_words)

    def _begin(self) -> None:
        self.publish()
        if self.behind:
            return
        self._begun, self._cursor, self._asked = self._numbers[places.CELLS_END], 0, False
        self._begun_at = self._state.now
        self._again.clear()  # all of it is told now
        self._tell(_cell(SNAPSHOT_BEGINS, np.empty(0, np.int64)))
        for fact in self._state.all_but_rows():
            self.tell(fact)
        self.tell_extents(self._state.waiting_extents())

    def _end(self) -> None:
        self._tell(_cell(SNAPSHOT_ENDS, np.empty(0, np.int64)))
        self.publish()
        if self.behind:
            return  # it is told once more
        self._header[header.SNAPSHOT] = self._begun
        self._since, self._cursor = self._numbers[places.CELLS_END], -1
        self._snapshot_words = self._since - self._begun
        self.snapshots += 1
        self.snapshot_at = self._state.now
        self.snapshot_ns = self.snapshot_at - self._begun_at


def fact_cell(fact: Fact) -> NDArray[np.int64]:
    """Return the words of what is no row."""
    data = encode_fact(fact)
    padded = data + bytes(-len(data) % 8)
    return _cell(FACT, np.frombuffer(padded, np.int64), len(data))


def extent_cells(held: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Yield the words of extents that wait: (segment, offset, size, writer, until) a row."""
    for first in range(0, len(held), EXTENTS_PER_CELL):
        yield _cell(EXTENTS, held[first : first + EXTENTS_PER_CELL].ravel())


def _cell(kind: int, payload: NDArray[np.int64], note: int = 0) -> NDArray[np.int64]:
    words = np.empty(1 + len(payload), np.int64)
    words[0] = kind | len(words) << 16 | note << 32
    words[1:] = payload
    return words
