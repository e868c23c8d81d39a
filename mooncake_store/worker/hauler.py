"""Running hauls: batches of objects on their way between memory and disks, fetched and reported.

A haul goes from one segment of this process to one of anybody's, as one batch: the file transport
sorts it by offset and joins neighbours into large transfers. What comes from a disk is compared
with its checksum before it is reported, so nothing that a disk made of it gets to readers. What
goes to a disk is on its medium before it is reported (`TransferEngine.sync`), so no journal says
that a disk has what it would not have after a power cut.

Each object has a status of its own; what fails as a whole is that of every object. A disk that
fails again and again is told in the log, once, and again when it is well. Each disk has a hauler
and a thread of its own, so one that hangs holds up its own hauls alone. A haul that waits in the
kernel may still write, so it can neither be given up nor have another of that disk beside it: who
asks a shard for hauls says with that that it runs none of these. One more runs those to disks of
others, which end in time.

A fetch asks for few hauls, and the next one follows at once: what is under way is what a shard
counts on. Cost: a few calls a haul, and bytes.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np

from mooncake_store.core.records import OF_OTHERS, Tier
from mooncake_store.program.logs import StateLog
from mooncake_store.wire import shard as shard_wire
from mooncake_store.worker.errands import CALL_S, Errands, Target
from transfer_engine.checksum import checksum_ranges
from transfer_engine.errors import (
    ChecksumMismatchError,
    NotFoundError,
    StoreError,
    TransferError,
    TruncatedError,
)
from transfer_engine.segments.cold import ColdSegment
from transfer_engine.segments.file import FileSegment
from transfer_engine.segments.memory import Segment
from transfer_engine.staging import parts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from typing import Self, TypeAlias

    from numpy.typing import NDArray

    from mooncake_store.worker.errands import Lent
    from transfer_engine.rpc.blocking import BlockingConnection

    Statuses = NDArray[np.int16]
    Column: TypeAlias = NDArray[np.int64]
    Write: TypeAlias = Callable[["Haul", Column], NDArray[np.int32]]

__all__ = ["Haul", "Hauled", "Hauler"]

log = logging.getLogger(__name__)

FETCH = 2
STALE_S = 20.0
"""After this long a haul that was told is not begun: whether it still is one is asked first."""
PART_BYTES = 32 << 20
"""What goes from a disk to another process at once, through memory of this one."""
COLD_S = 45.0
"""How long a haul may wait for a store; no call of it takes as long, see `remote`."""
FAILING_AFTER = 3
"""Hauls in a row of which a part failed, after which a segment is called suspect."""


class Haul(NamedTuple):
    """Objects that go from one segment to another, side by side in columns."""

    number: int
    source: int
    target: int
    source_offsets: NDArray[np.int64]
    target_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    namespaces: NDArray[np.int32]
    """Whose they are, by the place among `names`; -1: nobody's any more."""
    names: Sequence[str]

    def part(self, chosen: NDArray[np.intp] | slice) -> Self:
        """Return some of the objects."""
        return self._replace(
            source_offsets=self.source_offsets[chosen],
            target_offsets=self.target_offsets[chosen],
            sizes=self.sizes[chosen],
            checksums=self.checksums[chosen],
            namespaces=self.namespaces[chosen],
        )

    def owners(self) -> list[str]:
        """Return the namespace of each object, "" for what is nobody's."""
        names = [*self.names, ""]
        return [names[place] for place in self.namespaces.tolist()]


@dataclass(slots=True)
class Hauled:
    """What was hauled so far: objects that arrived and their bytes, and those that did not."""

    objects: int = 0
    nbytes: int = 0
    failed: int = 0

    def count(self, sizes: Column, statuses: Statuses) -> None:
        """Count a haul that has ended."""
        good = statuses == 0
        carried = int(np.count_nonzero(good))
        self.objects += carried
        self.nbytes += int(sizes[good].sum())
        self.failed += len(sizes) - carried


class Hauler(Errands):
    """Hauls from segments of this process into those of anybody, of one device.

    `device` is one of the segments, which is no memory, or None: then of devices of others.
    """

    # Without rdma: memory is registered with a card once, by who copies.
    transports: ClassVar[Sequence[str]] = ("local", "shm", "file", "tcp")

    def __init__(self, device: FileSegment | ColdSegment | None, *given: Any) -> None:
        super().__init__(*given)
        self.device = device
        self.hauled = Hauled()
        self._failed: Counter[str] = Counter()
        self._states = StateLog(log)

    def _serve(self, connection: BlockingConnection, lent: dict[int, Lent]) -> bool:
        number = OF_OTHERS
        if self.device is not None:  # two that ask for those of others would run them both
            number = next(n for n, segment in lent.items() if segment is self.device)
        body = shard_wire.FETCH_HAULS.request.pack(limit=FETCH, device=number)
        asked = time.monotonic()
        reply = connection.call(shard_wire.FETCH_HAULS, body, timeout_s=CALL_S)
        worked = False
        for haul in hauls_in(shard_wire.FETCH_HAULS.reply.unpack(reply)):
            if worked and time.monotonic() - asked > STALE_S:
                break  # it is told again, unless it was given up meanwhile
            statuses = self.run(haul, lent)
            self.hauled.count(haul.sizes, statuses)
            body = shard_wire.FINISH_HAUL.request.pack(number=haul.number, statuses=statuses)
            connection.call(shard_wire.FINISH_HAUL, body, timeout_s=CALL_S)
            worked = True
        return worked

    def look_again(self) -> None:
        """Try the disk once more if it failed; one that hangs is waited for."""
        file = self.device.held_staged() if isinstance(self.device, FileSegment) else None
        if file is not None:
            file.look_again()

    def run(self, haul: Haul, lent: dict[int, Lent]) -> Statuses:
        """Carry a haul out; return what became of each object."""
        try:
            return self._move(haul, lent)
        except Exception as error:  # the shard must hear that its space is free again
            if not isinstance(error, StoreError):
                log.exception("the haul to segment %d failed", haul.target)
            self._drop(haul.target)
            self._failing(_disk_of(haul, lent), str(error))
            code = error.code if isinstance(error, StoreError) else TransferError.code
            return np.full(len(haul.sizes), code, np.int16)

    def _move(self, haul: Haul, lent: dict[int, Lent]) -> Statuses:
        source, own = lent.get(haul.source), lent.get(haul.target)
        if source is None:
            raise NotFoundError(f"segment {haul.source} is not of this worker", advice="")
        # Who takes addresses keeps the memory, should the segments be replaced meanwhile.
        held = [each.mapping for each in (source, own) if isinstance(each, Segment)]
        if not isinstance(source, Segment) and isinstance(own, Segment):
            # Nobody reads there before it is reported, so what is damaged does no harm.
            statuses = self._read(haul, source, own.address + haul.target_offsets)
        elif isinstance(own, ColdSegment):
            statuses = self._carry(haul, source, partial(_write_cold, own))
        else:
            there = self._place(haul.target, own)
            statuses = self._carry(haul, source, partial(self._write, there))
            if there.tier == Tier.DISK and (statuses == 0).any():
                self._engine.sync(there.handle)
        del held
        self._judge(_disk_of(haul, lent), statuses)
        return statuses.astype(np.int16)

    def _carry(self, haul: Haul, source: Lent, write: Write) -> NDArray[np.int32]:
        if not isinstance(source, Segment):
            return self._read_and_write(haul, source, write)
        return write(haul, source.address + haul.source_offsets)

    def _write(self, there: Target, haul: Haul, at: Column) -> NDArray[np.int32]:
        columns = haul.target_offsets, haul.sizes, at
        return self._engine.write_batch(there.handle, *columns, trusted=True).statuses

    def _place(self, number: int, own: Lent | None) -> Target:
        """Return where a haul goes, be it lent by this process or by another one."""
        if isinstance(own, FileSegment):
            return Target(self._files[own.uuid], Tier.DISK)
        return self._target(number)

    def _read_and_write(
        self, haul: Haul, source: FileSegment | ColdSegment, write: Write
    ) -> NDArray[np.int32]:
        """Read, compare, and write what is as it was put."""
        statuses = np.zeros(len(haul.sizes), np.int32)
        for chosen in parts(haul.sizes, PART_BYTES):
            part = haul.part(chosen)
            memory = np.empty(int(part.sizes.sum()), np.uint8)
            at = memory.ctypes.data + np.cumsum(part.sizes) - part.sizes
            read = self._read(part, source, at)
            good = np.flatnonzero(read == 0)
            read[good] = write(part.part(good), at[good])
            statuses[chosen] = read
        return statuses

    def _read(
        self, haul: Haul, source: FileSegment | ColdSegment, at: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        if isinstance(source, ColdSegment):
            return _read_cold(haul, source, at)
        found = self._engine.read_batch(
            self._files[source.uuid],
            haul.source_offsets,
            haul.sizes,
            at,
            checksums=True,
            trusted=True,
        )
        statuses = found.statuses.copy()
        assert found.checksums is not None
        damaged = (statuses == 0) & (found.checksums != haul.checksums)
        count = int(np.count_nonzero(damaged))
        fault = f"{count} of {len(damaged)} objects are not what was put" if count else ""
        source.file.health.tell("content", fault, "a haul")
        statuses[damaged] = ChecksumMismatchError.code
        return statuses

    def _judge(self, disk: str, statuses: NDArray[np.int32]) -> None:
        """Note how the disk does that a haul went to or came from."""
        bad = statuses[statuses != 0]
        if len(bad):
            of = f"{len(bad)} of {len(statuses)} objects"
            self._failing(disk, f"{of}, the first with status {int(bad[0])}")
        elif self._failed.pop(disk, 0) >= FAILING_AFTER:
            self._states.change(disk, "well again")

    def _failing(self, disk: str, why: str) -> None:
        self._failed[disk] += 1
        if self._failed[disk] >= FAILING_AFTER:
            self._states.change(disk, "suspect: hauls fail again and again", why, logging.WARNING)


def _read_cold(haul: Haul, source: ColdSegment, at: NDArray[np.int64]) -> NDArray[np.int32]:
    """Read and compare; what the store has lost is as gone as what is damaged."""
    deadline = time.monotonic() + COLD_S
    statuses = source.read(haul.source_offsets, haul.sizes, at, deadline)
    statuses[statuses == TruncatedError.code] = ChecksumMismatchError.code
    good = np.flatnonzero(statuses == 0)
    differ = checksum_ranges(at[good], haul.sizes[good]) != haul.checksums[good]
    statuses[good[differ]] = ChecksumMismatchError.code
    return statuses


def _write_cold(target: ColdSegment, haul: Haul, at: Column) -> NDArray[np.int32]:
    deadline = time.monotonic() + COLD_S
    return target.write(haul.target_offsets, haul.sizes, at, deadline, haul.owners())


def _disk_of(haul: Haul, lent: dict[int, Lent]) -> str:
    """Return what the log calls the lower of the ends of a haul: its source, or else its target."""
    source = lent.get(haul.source)
    below = source is not None and not isinstance(source, Segment)
    if below and isinstance(lent.get(haul.target), ColdSegment):
        below = False
    number = haul.source if below else haul.target
    return f"segment {lent[number].name if number in lent else number}"


def hauls_in(columns: Any) -> Iterator[Haul]:
    """Yield the hauls of a reply, whose objects stand side by side."""
    numbers, names = columns.haul, [name.decode() for name in columns.namespaces]
    begins = np.flatnonzero(np.diff(numbers, prepend=-1)).tolist()
    for first, stop in pairwise([*begins, len(numbers)]):
        yield Haul(
            int(numbers[first]),
            int(columns.source[first]),
            int(columns.target[first]),
            columns.source_offset[first:stop],
            columns.target_offset[first:stop],
            columns.size[first:stop],
            columns.checksum[first:stop],
            columns.namespace[first:stop],
            names,
        )
