"""Who lends what to a cluster, and under which numbers: the master's own knowledge, without I/O.

A segment is announced first: it has a number, and is written into the registers, before any shard
hears of it. It is entered when all shards have it, and only then shown to anybody. Numbers are
handed out in turn; one is used again only when it is not `leaving`, that is when no shard knows it
any more. O(1), but for what goes over all segments and says so.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_store.core.records import SegmentState
from mooncake_store.master.bounds import SEGMENTS_OF_WORKER_MAX
from mooncake_store.master.registers import (
    SEGMENT_NUMBERS,
    KeptSegment,
    KeptWorker,
    Registers,
)
from mooncake_store.master.shard_link import slice_of
from mooncake_store.wire import cluster as wire

if TYPE_CHECKING:
    from mooncake_store.master.lineage import Lineage

__all__ = ["LentSegment", "LentWorker", "Roster"]

GONE_WORKERS_KEPT = 256


@dataclass(slots=True)
class LentWorker:
    """A run of a worker; `state` is "alive", "suspect", "absent" or "gone"."""

    uuid: bytes
    epoch: int
    name: str
    host: str
    state: str = "alive"
    numbers: set[int] = field(default_factory=set)
    keeps: bool = False
    """Whether its memory outlives its process."""
    principal: str = ""
    """Who lends it; empty for who knows the pool's secret."""
    met: bool = False
    """Whether it has mounted in this run of the master. Before that nobody knows whether what is
    known of its memory is still true."""


@dataclass(slots=True)
class LentSegment:
    """A segment, as its owner describes it, under its number."""

    number: int
    worker: LentWorker
    spec: wire.SegmentSpec
    state: SegmentState = SegmentState.OK
    shares: int = 0
    """Among how many shards it was divided when it was mounted; 0: as many as there are."""

    def slice_of(self, shard: int, shards: int) -> tuple[int, int]:
        """Return where the slice begins in which a shard has space, and its length.

        Shards that were one when it was mounted have the same, each a part of it.
        """
        shares = self.shares or shards
        return slice_of(self.spec.nbytes, shard * shares // shards, shares)


class Roster:
    """The workers and segments of one cluster."""

    def __init__(self) -> None:
        self.workers: dict[bytes, LentWorker] = {}
        self.segments: dict[int, LentSegment] = {}
        self.leaving: set[int] = set()
        """Numbers that some shard may still know."""
        self._by_uuid: dict[bytes, int] = {}
        self._announced: dict[int, LentSegment] = {}
        self._last_number = -1
        self._split = 0

    def number_of(self, uuid: bytes) -> int:
        """Return the number of a segment, -1 for one that is not entered."""
        return self._by_uuid.get(uuid, -1)

    def find(self, uuid: bytes) -> LentSegment | None:
        """Return a segment that is entered or announced."""
        known = self.segments.get(self.number_of(uuid))
        if known is None:
            known = next((s for s in self._announced.values() if s.spec.uuid == uuid), None)
        return known

    def announce(self, worker: LentWorker, spec: wire.SegmentSpec) -> LentSegment | None:
        """Return a segment that is to be handed out; None when there is no number for it.

        One that is known keeps its number and its state; that it was suspect is over.
        """
        known = self.find(spec.uuid)
        number = self._free_number(worker) if known is None else known.number
        if number < 0:
            return None
        silent = known is not None and known.state == SegmentState.SUSPECT
        state = SegmentState.OK if known is None or silent else known.state
        shares = 0 if known is None else known.shares
        segment = self._announced[number] = LentSegment(number, worker, spec, state, shares)
        return segment

    def _free_number(self, worker: LentWorker) -> int:
        if len(worker.numbers) >= SEGMENTS_OF_WORKER_MAX:
            return -1
        for step in range(1, SEGMENT_NUMBERS + 1):
            number = (self._last_number + step) % SEGMENT_NUMBERS
            if (
                number not in self.segments
                and number not in self._announced
                and number not in self.leaving
            ):
                self._last_number = number
                return number
        return -1

    def enter(self, segment: LentSegment) -> None:
        """Take in a segment that all shards have."""
        self._announced.pop(segment.number, None)
        self.segments[segment.number] = segment
        self._by_uuid[segment.spec.uuid] = segment.number
        segment.worker.numbers.add(segment.number)

    def withdraw(self) -> None:
        """Forget what was announced and not entered."""
        self._announced.clear()

    def remove(self, number: int) -> None:
        """Let a segment go; its number is leaving."""
        segment = self.segments.pop(number)
        del self._by_uuid[segment.spec.uuid]
        segment.worker.numbers.discard(number)
        self.leaving.add(number)

    def idle(self) -> Counter[str]:
        """Count the workers that lend nothing and are not gone, by host. O(workers)."""
        workers = self.workers.values()
        return Counter(w.host for w in workers if not w.numbers and w.state != "gone")

    def drop_old_workers(self) -> None:
        """Forget the oldest of those that are gone, where there are many. O(workers)."""
        gone = [worker for worker in self.workers.values() if worker.state == "gone"]
        for worker in gone[: max(0, len(gone) - GONE_WORKERS_KEPT)]:
            del self.workers[worker.uuid]

    def bases(self, shard: int, shards: int) -> list[tuple[int, int]]:
        """Return where in segments the slices of a shard may begin: (number, base). O(segments)."""
        return [
            (number, segment.slice_of(shard, shards)[0])
            for number, segment in {**self.segments, **self._announced}.items()
        ]

    def registers(self, life: int, lineage: Lineage, hosts: tuple[int, ...]) -> Registers:
        """Return what the next run has to know. O(segments)."""
        segments = {**self.segments, **self._announced}
        owners = {segment.worker.uuid: segment.worker for segment in segments.values()}
        return Registers(
            Registers.version_of(hosts, self._split),
            life,
            self._last_number,
            tuple(
                KeptWorker(w.uuid, w.epoch, w.name, w.host, w.keeps, w.principal)
                for w in owners.values()
            ),
            tuple(
                KeptSegment(
                    segment.number,
                    segment.spec.uuid,
                    segment.spec.name,
                    segment.spec.nbytes,
                    segment.spec.descriptor,
                    segment.worker.uuid,
                    segment.spec.tier,
                    segment.shares,
                    segment.spec.key,
                    segment.spec.namespace,
                )
                for segment in segments.values()
            ),
            lineage.runs,
            lineage.place,
            hosts,
            self._split,
        )

    def restore(self, registers: Registers) -> None:
        """Begin with what the run before knew."""
        self._last_number, self._split = registers.last_number, registers.split
        for kept in registers.workers:
            worker = LentWorker(kept.uuid, kept.epoch, kept.name, kept.host)
            worker.keeps, worker.principal = kept.keeps, kept.principal
            self.workers[kept.uuid] = worker
        for known in registers.segments:
            spec = wire.SegmentSpec(
                known.uuid, known.name, known.nbytes, known.descriptor, known.tier, known.key,
                known.namespace,
            )  # fmt: skip
            worker = self.workers[known.worker]
            self.enter(LentSegment(known.number, worker, spec, shares=known.shares))

    def forget(self) -> None:
        """Know no worker and no segment any more, but which numbers were given out."""
        self.workers.clear()
        self.segments.clear()
        self._by_uuid.clear()
