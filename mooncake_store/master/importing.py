"""Making a state directory of what `exporting` wrote.

    imported = import_state(source, path, SystemClock())

All is made in a folder within the directory and takes its place there at the end, what makes it a
master's state last; so an import that is killed leaves nothing that a master believes, and the next
import takes it away. The master that starts then knows that its directory was put there: it reads
nothing from a worker's memory before that worker has told it which run it knows (`lineage`).

Times are moved to the clock of this host where they are of another one, or of another boot: what
has to wait waits as long as it had to when it was exported. O(bytes), in the memory that one shard
takes in a master.
"""

from __future__ import annotations

import gc
import os
import re
import shutil
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.core.facts import ClientFact, ForgottenFact, SegmentFact, TenantFact
from mooncake_store.core.journal import extent_cells, fact_cell
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.portable import cells_of
from mooncake_store.core.records import SegmentState, Tier
from mooncake_store.core.restore import StreamEnd, restore
from mooncake_store.core.segment import NEVER
from mooncake_store.core.state import CLIENTS_MAX, TENANTS_MAX
from mooncake_store.journal.origin import Origin, this_boot
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.master.exporting import ROWS_MAX, boot_bytes
from mooncake_store.master.keeping import Keeper
from mooncake_store.master.kept_files import sync_folder, unusable
from mooncake_store.master.lineage import new_run
from mooncake_store.master.registers import (
    REGISTERS,
    RUNS_KEPT,
    SEGMENT_NUMBERS,
    Registers,
    check_registers,
    write_registers,
)
from mooncake_store.master.registers import VERSION as REGISTERS_VERSION
from mooncake_store.master.shifting import Shift
from mooncake_store.master.state_columns import held_in, objects_in
from mooncake_store.master.state_directory import IDENTITY, LOCK, Kept, check_kept, held, write_kept
from mooncake_store.master.state_directory import VERSION as KEPT_VERSION
from mooncake_store.master.state_file import (
    HeldRecord,
    ObjectsRecord,
    RegistersRecord,
    ShardRecord,
    StateFile,
)
from mooncake_store.units import SECOND_NS
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from mooncake_store.clock import Clock
    from mooncake_store.core.facts import Fact
    from mooncake_store.core.last_cells import Run
    from mooncake_store.core.shard import Shard
    from mooncake_store.master.state_file import Record, SegmentEntry

__all__ = ["WRITE_S", "Imported", "import_state", "placed"]

_BEGIN = 1
"""The first position of a stream."""
WRITE_S = 600.0
"""How long the disk may take for the journal of one shard."""
UNFINISHED = "import.unfinished"
"""Where an import is made; what is found there was left by one that was killed."""
_MADE = re.compile(f"shard-[0-9]+|{re.escape(REGISTERS)}|{re.escape(IDENTITY)}|{UNFINISHED}")
"""What an import makes in a directory."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What was read."""

    cluster: str
    shards: int
    objects: int


def import_state(source: Path, path: Path, clock: Clock) -> Imported:
    """Make a state directory, which must not be there or be empty, of an exported file.

    Raises InvalidArgumentError for a directory that holds something, ConfigError for one that is in
    use or a file that cannot be read, StoreError for a file that is damaged, newer or none, and
    for a disk that takes too little; then nothing is left in the directory.
    """
    file = StateFile(source)
    with _place_for(path) as place:
        state = _State(file, place, clock)
        try:
            objects = state.write()
        except (ValueError, OverflowError) as error:
            raise file.damaged(error) from error
        _put_in_place(place, path)
    return Imported(file.head.cluster, file.head.shards, objects)


@contextmanager
def _place_for(path: Path) -> Iterator[Path]:
    """Hold a directory and make the folder in it; take away all that was made if that fails."""
    made, locked, begun, place = not path.exists(), (path / LOCK).exists(), False, path / UNFINISHED
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with held(path):
            try:
                left = _left_in(path)
                strange = set(os.listdir(path)) - {LOCK, *left}
                if strange:
                    raise InvalidArgumentError(
                        f"{path} holds something already: {min(strange)}",
                        advice="name a directory that is empty or not there; nothing was changed",
                    )
                begun = True
                _remove(path, left)
                place.mkdir(mode=0o700)
                yield place
            except BaseException:
                with suppress(OSError):  # what failed first is told
                    if begun:
                        _remove(path, set(filter(_MADE.fullmatch, os.listdir(path))))
                    if not locked:
                        (path / LOCK).unlink()
                    if made:
                        path.rmdir()
                raise
    except OSError as error:
        raise unusable(path, error) from error


def _left_in(path: Path) -> set[str]:
    """Return what an import left that was killed: who the cluster is was not in its place yet."""
    names = set(filter(_MADE.fullmatch, os.listdir(path)))
    return names if UNFINISHED in names and IDENTITY not in names else names & {UNFINISHED}


def _remove(path: Path, names: set[str]) -> None:
    """Remove what an import made, with its memory.

    What makes it a state goes first, and what tells the next import of the rest last.
    """
    for name in sorted(names, key=lambda name: (name == UNFINISHED, name != IDENTITY)):
        if name == UNFINISHED:
            for shard in os.listdir(path / name):
                remove_rings(path / name / shard)
        if (path / name).is_dir():
            shutil.rmtree(path / name)
        else:
            (path / name).unlink()


def _put_in_place(place: Path, path: Path) -> None:
    """Move all to where a master looks for it; who the cluster is comes last."""
    names = sorted(os.listdir(place), key=lambda name: name == IDENTITY)
    for name in names:
        os.rename(place / name, path / name)
    place.rmdir()
    sync_folder(path)


class _State:
    """A file that becomes a state, record by record."""

    def __init__(self, file: StateFile, place: Path, clock: Clock) -> None:
        self._file = file
        self._place = place
        self._clock = clock
        self._records = file.records()
        self._record: Record | None = next(self._records, None)

    def write(self) -> int:
        """Write all of it; returns how many objects. Raises ValueError for what cannot be."""
        head = self._file.head
        kept = Kept(KEPT_VERSION, head.cluster, head.secret.hex())
        check_kept(kept)
        if isinstance(self._record, RegistersRecord):
            write_registers(self._place / REGISTERS, _registers(self._record))
            self._advance()
        objects = 0
        for number in range(head.shards):
            record = self._record
            if not isinstance(record, ShardRecord) or record.shard != number:
                raise ValueError(f"shard {number} of {head.shards} is not where it should be")
            self._advance()
            self._write_shard(record)
            objects += record.objects
        if self._record is not None:
            raise ValueError("there are records behind the last shard")
        write_kept(self._place, kept)
        return objects

    def _advance(self) -> None:
        self._record = next(self._records, None)

    def _write_shard(self, record: ShardRecord) -> None:
        head = self._file.head
        _check(record)
        gc.collect()  # the shard before, whose parts know each other
        limits = ShardConfig(
            objects_max=max(ShardConfig().objects_max, record.objects),
            segments_max=SEGMENT_NUMBERS,
        )
        origin = Origin(head.cluster, record.shard, head.shards)
        shift = _shift_of(record, self._clock)
        Keeper.write(
            limits,
            origin,
            self._place / f"shard-{record.shard}",
            lambda shard: self._fill(shard, record, shift),
            WRITE_S,
        )

    def _fill(self, shard: Shard, record: ShardRecord, shift: Shift) -> None:
        now = self._clock.now_ns()
        leases_until = shift.until(record.leases_until_ns)
        end = StreamEnd(now, leases_until, record.next_event, record.generation, _BEGIN)
        restored = restore(shard, placed(self._cells(record, shift)), end, now)
        if restored.dropped or restored.objects != record.objects:
            raise ValueError(
                f"shard {record.shard} tells of {record.objects} objects, "
                f"{restored.objects} of which can be"
            )

    def _cells(self, record: ShardRecord, shift: Shift) -> Iterator[NDArray[np.int64]]:
        """Yield the words of a shard, and go on to the record behind it."""
        for fact in _facts(record, shift):
            yield fact_cell(fact)
        row = 0
        while isinstance(self._record, HeldRecord | ObjectsRecord):
            if isinstance(self._record, HeldRecord):
                held_extents = held_in(self._record)
                held_extents[:, 4] = shift.ends(held_extents[:, 4])
                yield from extent_cells(held_extents)
            else:
                objects = shift.objects(objects_in(self._record))
                yield from cells_of(objects, row)
                row += len(objects.sizes)
            self._advance()


def placed(runs: Iterable[NDArray[np.int64]]) -> Iterator[Run]:
    """Yield words with the positions that they have one behind the other."""
    position = _BEGIN
    for words in runs:
        yield position, words
        position += len(words)


def _shift_of(record: ShardRecord, clock: Clock) -> Shift:
    """Return what to add to times of a shard's former clock, on this one."""
    if record.boot == boot_bytes(this_boot()):
        return Shift()
    # As if no time had passed since; dates are moved by what has.
    wait_ns = clock.now_ns() - record.clock_ns
    passed_ns = max(0, clock.wall_ns() - record.wall_ns)
    return Shift(wait_ns, (wait_ns - passed_ns) // SECOND_NS)


def _registers(record: RegistersRecord) -> Registers:
    registers = Registers(
        REGISTERS_VERSION,
        record.life,
        record.last_number,
        record.workers,
        record.segments,
        # A run of its own, so that there is one: without any, all would be believed.
        (*record.runs, new_run())[-RUNS_KEPT:],
    )
    check_registers(registers)
    return registers


def _check(record: ShardRecord) -> None:
    """Raise ValueError for numbers that a shard has no place for."""
    if not 0 <= record.objects <= ROWS_MAX:
        raise ValueError(f"shard {record.shard} cannot have {record.objects} objects")
    for what, numbers, least, end in (
        ("namespace", [each.number for each in record.namespaces], 0, TENANTS_MAX),
        ("client", [each.handle for each in record.clients], 0, CLIENTS_MAX),
        ("segment", [each.number for each in record.segments], 0, SEGMENT_NUMBERS),
        # -1: a memory that is known by its uuid alone.
        ("segment", [each.number for each in record.memories], -1, SEGMENT_NUMBERS),
    ):
        wrong = [number for number in numbers if not least <= number < end]
        if wrong:
            raise ValueError(f"a {what} cannot have the number {wrong[0]}")


def _facts(record: ShardRecord, shift: Shift) -> Iterator[Fact]:
    """Yield what a shard knows that is no object."""
    for tenant in record.namespaces:
        yield TenantFact(tenant.number, tenant.name, tenant.quota_bytes)
    for client in record.clients:
        yield ClientFact(client.handle, client.uuid, client.epoch, client.host)
    for memory in record.memories:
        busy, readers = shift.until(memory.busy_until_ns), shift.until(memory.readers_until_ns)
        yield ForgottenFact(memory.number, memory.uuid, busy, readers)
    for segment in record.segments:
        yield _segment_fact(segment, shift)


def _segment_fact(entry: SegmentEntry, shift: Shift) -> SegmentFact:
    gone_at_ns = entry.gone_at_ns
    return SegmentFact(
        entry.number,
        entry.uuid,
        entry.name,
        entry.host,
        entry.nbytes,
        entry.owner,
        int(_state(entry.state)),
        shift.until(entry.usable_from_ns),
        NEVER if gone_at_ns is None else shift.until(gone_at_ns),
        shift.until(entry.busy_until_ns),
        int(_state(entry.returns_as)),
        int(Tier(entry.tier)),
        shift.date(entry.unsure_s),
        entry.part,
        namespace=entry.namespace,
    )


def _state(name: str) -> SegmentState:
    try:
        return SegmentState[name.upper()]
    except KeyError:
        raise ValueError(f"a segment cannot be {name!r}") from None
