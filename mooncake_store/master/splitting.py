"""Making several shards of each one of a state directory that no master uses.

    split_state(path, 4, SystemClock(), put_release_ns)

Keys belong to shards by runs of slots, so each shard becomes as many, every one with a run of its
slots. Objects stay where they are: only rows go. Of every slice in which a shard had space each of
its successors gives out some runs, and knows what the others have there as guests; of its own
objects it also knows those that lie elsewhere (`alloc.Share`). Puts that were under way end; what
they may still write to waits, as after a put that nobody completes.

All or nothing: see `resharding`. O(bytes of the journals), in the memory that one shard takes and
each of its successors after the other.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import numpy as np

from mooncake_store import ids
from mooncake_store.core.facts import SegmentFact
from mooncake_store.core.journal import extent_cells, fact_cell
from mooncake_store.core.portable import (
    ROWS_AT_ONCE,
    cells_of,
    objects_of,
    readable_rows,
    unfinished_extents,
)
from mooncake_store.core.reads import extents_of
from mooncake_store.core.restore import StreamEnd
from mooncake_store.core.segment import GUEST, NEVER
from mooncake_store.master.counting import counting_standby
from mooncake_store.master.exporting import restored_shard
from mooncake_store.master.resharding import Change, reshard
from mooncake_store.master.shard_link import slice_of
from transfer_engine.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from mooncake_store.clock import Clock
    from mooncake_store.core.facts import Fact
    from mooncake_store.core.shard import Shard
    from mooncake_store.master.resharding import Making, Resharded

__all__ = ["split_state"]

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""From where to where, in order."""

RUNS = 8
"""Into so many runs a slice is cut that is divided first, and each of these among the shards. What
is used lies mostly at its beginning, and everybody is to have a part of that and of what is free.
No object is longer than a piece of a run from then on."""


def split_state(path: Path, factor: int, clock: Clock, put_release_ns: int) -> Resharded:
    """Make `factor` shards of each one of a state directory; raises what `reshard` does."""

    def make(making: Making) -> int:
        splitting = _Splitting(making, factor, clock, put_release_ns)
        objects = 0
        for number in range(making.journals.shards):
            objects += splitting.split(number)
            gc.collect()  # a shard, whose parts know each other
        splitting.write_registers()
        return objects

    return reshard(path, Change(factor), make)


def _cut_up(start: int, end: int, count: int) -> list[tuple[int, int]]:
    """Cut a range into pieces that lie one behind the other, as slices are."""
    slices = [slice_of(end - start, at, count) for at in range(count)]
    return [(start + base, start + base + nbytes) for base, nbytes in slices]


class _Splitting:
    def __init__(self, making: Making, factor: int, clock: Clock, put_release_ns: int) -> None:
        self._making = making
        self._factor = factor
        self._clock = clock
        self._put_release_ns = put_release_ns

    def write_registers(self) -> None:
        """Write down among how many shards each segment was divided."""
        shares = self._making.journals.shards
        segments = self._making.registers.segments
        self._making.write_registers(
            tuple(msgspec.structs.replace(s, shares=s.shares or shares) for s in segments)
        )

    def split(self, number: int) -> int:
        """Write all successors of a shard; return how many objects they have."""
        making, factor = self._making, self._factor
        seen = making.look(number)
        facts = seen.contents.facts
        assert facts is not None
        shard = restored_shard(seen, facts, self._put_release_ns)
        parts = _Parts(shard, number * factor, factor, making.shards)
        now = max(facts.now, self._clock.now_ns() + seen.ahead_ns)
        counted = counting_standby(seen.folder)
        end = StreamEnd(now, facts.horizon, facts.events_next, facts.generation, 1)
        for at in range(factor):
            count, cells = parts.objects(at), parts.cells(at, self._put_release_ns)
            made = making.write(parts.first + at, count, cells, end, seen.ahead_ns, counted)
            if made != count:
                raise StoreError(f"shard {parts.first + at} would have {made} of {count} objects")
        return shard.objects


class _Parts:
    """What each of the successors of a shard has of it."""

    def __init__(self, shard: Shard, first: int, factor: int, count: int) -> None:
        self.first = first
        self._shard = shard
        self._factor = factor
        rows = [np.empty(0, np.int64), *readable_rows(shard)]
        self._rows: NDArray[np.int64] = np.concatenate(rows)
        owner = ids.shard_of(shard.digests(self._rows), count) - first
        self._owner: NDArray[np.int64] = owner
        row, segment, offset = extents_of(shard, self._rows)
        of_row = np.zeros(shard.table.rows_high, np.int64)
        of_row[self._rows] = owner
        size = shard.rows["size"][row].astype(np.int64)
        self._extents = np.stack([segment, offset, size, of_row[row]], axis=1).astype(np.int64)
        self._segments = {s.index: s for s in shard.segments()}

    def objects(self, at: int) -> int:
        """How many objects one of them has."""
        return int(np.count_nonzero(self._owner == at))

    def cells(self, at: int, put_release_ns: int) -> Iterator[NDArray[np.int64]]:
        """Yield the words that say all of one of them."""
        shard = self._shard
        for fact in shard.all_but_rows():
            yield fact_cell(self._fact(fact, at))
        waiting = np.concatenate([shard.waiting_extents(), unfinished_extents(shard)])
        yield from extent_cells(self._cut(waiting, self._parts_of(at)))
        if at == 0:  # what waits where others give out space has to be known to one
            yield from extent_cells(self._cut(waiting, self._gaps))
        yield from extent_cells(self._guests(at))
        mine, first = self._rows[self._owner == at], 0
        for begin in range(0, len(mine), ROWS_AT_ONCE):
            objects = objects_of(shard, mine[begin : begin + ROWS_AT_ONCE])
            yield from cells_of(objects, first)
            first += len(objects.sizes)

    def _part(self, index: int, at: int) -> Runs:
        """The runs in which one of them gives out space of a segment."""
        segment = self._segments[index]
        runs = segment.part or tuple(_cut_up(0, segment.nbytes, RUNS))
        part = []
        for number, (start, end) in enumerate(runs):
            pieces = _cut_up(start, end, self._factor)
            begin, last = pieces[(at + number) % self._factor]
            if last <= begin:
                raise InvalidArgumentError(
                    f"the {segment.nbytes} bytes of segment {segment.name} cannot be divided among "
                    f"{self._factor} shards",
                    advice="let its worker lend more, or split into fewer",
                )
            part.append((begin, last))
        return tuple(part)

    def _fact(self, fact: Fact, at: int) -> Fact:
        if not isinstance(fact, SegmentFact):
            return fact
        return msgspec.structs.replace(fact, part=self._part(fact.index, at))

    def _parts_of(self, at: int) -> Callable[[int], Runs]:
        return lambda index: self._part(index, at)

    def _gaps(self, index: int) -> Runs:
        """Where in a segment the shard gave out no space."""
        part = self._segments[index].part
        if not part:
            return ()
        starts = [0, *(end for _, end in part)]
        ends = [*(start for start, _ in part), self._segments[index].reach]
        return tuple(zip(starts, ends, strict=True))

    def _cut(self, extents: NDArray[np.int64], runs_of: Callable[[int], Runs]) -> NDArray[np.int64]:
        """Of extents, what lies in some runs of their segments."""
        out = []
        for index in np.unique(extents[:, 0]).tolist():
            if index not in self._segments:
                continue
            of_segment = extents[extents[:, 0] == index]
            for begin, last in runs_of(index):
                start = np.maximum(of_segment[:, 1], begin)
                end = np.minimum(of_segment[:, 1] + of_segment[:, 2], last)
                here = end > start
                mine = of_segment[here].copy()
                mine[:, 1], mine[:, 2] = start[here], (end - start)[here]
                out.append(mine)
        return np.concatenate([np.empty((0, extents.shape[1]), np.int64), *out])

    def _guests(self, at: int) -> NDArray[np.int64]:
        """What the others have where one of them gives out space, as extents that wait for ever."""
        theirs = self._cut(self._extents[self._extents[:, 3] != at], self._parts_of(at))
        known = self._shard.space.guests()
        first = int(known[:, 3].max(initial=GUEST)) - GUEST + 1
        held: NDArray[Any] = np.empty((len(theirs), 5), np.int64)
        held[:, :3] = theirs[:, :3]
        held[:, 3] = GUEST + first + np.arange(len(theirs))
        held[:, 4] = NEVER
        return held
