"""Making several shards of each one of a state directory that no master uses.

    split_state(path, 4, SystemClock(), put_release_ns)

Keys belong to shards by runs of slots, so each shard becomes as many, every one with a run of its
slots. Objects stay where they are: only rows go. Of every slice in which a shard had space each of
its successors gives out some runs, and knows what the others have there as guests; of its own
objects it also knows those that lie elsewhere (`alloc.Share`). Puts that were under way end; what
they may still write to waits, as after a put that nobody completes.

Everything is made beside the state, and one rename decides: up to there nothing has changed, and
from there on a master that starts finishes it (`finish_split`). O(bytes of the journals), in the
memory that one shard takes and each of its successors after the other.
"""

from __future__ import annotations

import gc
import os
import shutil
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from mooncake_store import ids
from mooncake_store.core.facts import SegmentFact
from mooncake_store.core.journal import extent_cells, fact_cell
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.portable import (
    ROWS_AT_ONCE,
    cells_of,
    objects_of,
    readable_rows,
    unfinished_extents,
)
from mooncake_store.core.reads import extents_of
from mooncake_store.core.restore import StreamEnd, restore
from mooncake_store.core.segment import GUEST, NEVER
from mooncake_store.journal.origin import Origin
from mooncake_store.journal.ring_file import move_rings, remove_rings
from mooncake_store.master.counting import Counted, count_standby, counting_standby
from mooncake_store.master.exporting import check_whole, restored_shard
from mooncake_store.master.importing import WRITE_S, placed
from mooncake_store.master.keeping import Keeper, take_lock
from mooncake_store.master.kept_files import sync_folder, unusable
from mooncake_store.master.kept_journals import KeptJournals
from mooncake_store.master.registers import (
    REGISTERS,
    SEGMENT_NUMBERS,
    RegisterFile,
    Registers,
    write_registers,
)
from mooncake_store.master.shard_link import slice_of
from mooncake_store.master.state_directory import held
from transfer_engine.errors import ConfigError, InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from mooncake_store.clock import Clock
    from mooncake_store.core.facts import Fact
    from mooncake_store.core.shard import Shard
    from mooncake_store.master.kept_journals import Seen

__all__ = ["SHARDS_MAX", "Split", "finish_split", "split_state"]

SHARDS_MAX = 1024
UNFINISHED, READY = "split.unfinished", "split.ready"
"""Where it is made, and what that is called once it counts."""
RUNS = 8
"""Into so many runs a slice is cut that is divided first, and each of these among the shards. What
is used lies mostly at its beginning, and everybody is to have a part of that and of what is free.
No object is longer than a piece of a run from then on."""


@dataclass(frozen=True, slots=True)
class Split:
    """What was made."""

    shards: int
    objects: int


def split_state(path: Path, factor: int, clock: Clock, put_release_ns: int) -> Split:
    """Make `factor` shards of each one of a state directory.

    Raises ConfigError while a master uses it, and where there is none; StoreError for a state that
    is not whole, and a disk that takes too little; InvalidArgumentError for what cannot be.
    Nothing has changed then.
    """
    journals = KeptJournals.of(path)
    count = journals.shards * factor
    if factor < 2 or count > SHARDS_MAX:
        raise InvalidArgumentError(
            f"{journals.shards} shards cannot become {count}",
            advice=f"name a number from 2 on, for at most {SHARDS_MAX} shards in all",
        )
    place = path / UNFINISHED
    with ExitStack() as locks:
        try:
            locks.enter_context(held(path))
            for shard in range(journals.shards):
                locks.callback(os.close, take_lock(path / f"shard-{shard}"))
            if place.exists():
                _remove(place)
            place.mkdir(mode=0o700)
        except OSError as error:
            raise unusable(path, error) from error
        try:
            objects = _Splitting(journals, place, factor, clock, put_release_ns).write()
            os.rename(place, path / READY)
            sync_folder(path)
        except BaseException:
            if place.exists():
                _remove(place)
            raise
    finish_split(path)
    return Split(count, objects)


def finish_split(path: Path) -> None:
    """Put in its place what a split has made that came to count, and take away what did not.

    Before anything else reads the directory. Raises ConfigError where that cannot be done.
    """
    ready, unfinished = path / READY, path / UNFINISHED
    try:
        if unfinished.exists():
            _remove(unfinished)
        if not ready.exists():
            return
        for name in sorted(os.listdir(ready), key=lambda name: name == REGISTERS):
            former = path / name
            if former.is_dir():
                remove_rings(former)
                shutil.rmtree(former)
            move_rings(unfinished / name, former)  # copies have some, from when they were made
            os.rename(ready / name, former)
        ready.rmdir()
        sync_folder(path)
    except OSError as error:
        raise unusable(path, error) from error


def _remove(place: Path) -> None:
    for name in os.listdir(place):
        if (place / name).is_dir():
            remove_rings(place / name)
    shutil.rmtree(place)


def _cut_up(start: int, end: int, count: int) -> list[tuple[int, int]]:
    """Cut a range into pieces that lie one behind the other, as slices are."""
    slices = [slice_of(end - start, at, count) for at in range(count)]
    return [(start + base, start + base + nbytes) for base, nbytes in slices]


class _Splitting:
    def __init__(
        self,
        journals: KeptJournals,
        place: Path,
        factor: int,
        clock: Clock,
        put_release_ns: int,
    ) -> None:
        self._journals = journals
        self._place = place
        self._factor = factor
        self._clock = clock
        self._put_release_ns = put_release_ns
        self._count = journals.shards * factor

    def write(self) -> int:
        """Write all of it; return how many objects."""
        registers = RegisterFile(self._journals.path).read()
        if registers is None:
            raise ConfigError("the state has no registers", advice="start its master once")
        if registers.hosts:
            raise ConfigError(
                "shards that lead on several hosts cannot be split",
                advice="move them to the host of the master first: `mooncake shard move`",
            )
        objects = 0
        for number in range(self._journals.shards):
            objects += self._split(number)
            gc.collect()  # a shard, whose parts know each other
        write_registers(self._place / REGISTERS, self._registers(registers))
        return objects

    def _registers(self, registers: Registers) -> Registers:
        shares = self._journals.shards
        return msgspec.structs.replace(
            registers,
            version=Registers.version_of((), self._count),
            segments=tuple(
                msgspec.structs.replace(segment, shares=segment.shares or shares)
                for segment in registers.segments
            ),
            split=self._count,
        )

    def _split(self, number: int) -> int:
        seen = self._journals.look(number)
        check_whole(number, seen)
        facts = seen.contents.facts
        assert facts is not None
        shard = restored_shard(seen, facts, self._put_release_ns)
        parts = _Parts(shard, number * self._factor, self._factor, self._count)
        now = max(facts.now, self._clock.now_ns() + seen.ahead_ns)
        ends = facts.horizon, facts.events_next, facts.generation
        counted = counting_standby(seen.folder)
        for at in range(self._factor):
            self._write(parts, at, now, StreamEnd(now, *ends, 1), seen)
            if counted != Counted():
                # It has all that was answered until now, so nothing may be answered without it.
                count_standby(self._place / f"shard-{parts.first + at}", counted)
        return shard.objects

    def _write(self, parts: _Parts, at: int, now: int, end: StreamEnd, seen: Seen) -> None:
        number, count = parts.first + at, parts.objects(at)
        limits = ShardConfig(
            objects_max=max(ShardConfig().objects_max, count), segments_max=SEGMENT_NUMBERS
        )

        def fill(shard: Shard) -> None:
            restored = restore(shard, placed(parts.cells(at, self._put_release_ns)), end, now)
            if restored.dropped or restored.objects != count:
                raise StoreError(
                    f"shard {number} would have {restored.objects} of its {count} objects"
                )

        origin = Origin(self._journals.kept.cluster, number, self._count)
        folder = self._place / f"shard-{number}"
        Keeper.write(limits, origin, folder, fill, WRITE_S, seen.ahead_ns)


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
        yield from extent_cells(self._cut(waiting, at))
        yield from extent_cells(self._guests(at))
        mine, first = self._rows[self._owner == at], 0
        for begin in range(0, len(mine), ROWS_AT_ONCE):
            objects = objects_of(shard, mine[begin : begin + ROWS_AT_ONCE])
            yield from cells_of(objects, first)
            first += len(objects.sizes)

    def _part(self, index: int, at: int) -> tuple[tuple[int, int], ...]:
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

    def _cut(self, extents: NDArray[np.int64], at: int) -> NDArray[np.int64]:
        """Of extents, what lies where one of them gives out space."""
        out = []
        for index in np.unique(extents[:, 0]).tolist():
            if index not in self._segments:
                continue
            of_segment = extents[extents[:, 0] == index]
            for begin, last in self._part(index, at):
                start = np.maximum(of_segment[:, 1], begin)
                end = np.minimum(of_segment[:, 1] + of_segment[:, 2], last)
                here = end > start
                mine = of_segment[here].copy()
                mine[:, 1], mine[:, 2] = start[here], (end - start)[here]
                out.append(mine)
        return np.concatenate([np.empty((0, extents.shape[1]), np.int64), *out])

    def _guests(self, at: int) -> NDArray[np.int64]:
        """What the others have where one of them gives out space, as extents that wait for ever."""
        theirs = self._cut(self._extents[self._extents[:, 3] != at], at)
        known = self._shard.space.guests()
        first = int(known[:, 3].max(initial=GUEST)) - GUEST + 1
        held: NDArray[Any] = np.empty((len(theirs), 5), np.int64)
        held[:, :3] = theirs[:, :3]
        held[:, 3] = GUEST + first + np.arange(len(theirs))
        held[:, 4] = NEVER
        return held
