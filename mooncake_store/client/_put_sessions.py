"""A batch of objects that is written range by range: layer by layer, as a model computes them.

One request begins the batch, one ends it; between them any number of writes moves ranges of any
of its objects to all their replicas, without asking anybody. The rules are those of `Session`: an
object with a gap is not committed; its checksum is computed as ranges pass if they come in order,
else the object is read back; the store's put deadline runs from the beginning.

As steps; no I/O. Cost of a write: O(pieces), a call of Python each.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mooncake_store.client import _kernels as k
from mooncake_store.client._buffers import Memory
from mooncake_store.client._core import every
from mooncake_store.client._failures import OUT_OF_RANGE
from mooncake_store.client._pieces import fold, move_pieces
from mooncake_store.client._sessions import merged, raw, read_back
from mooncake_store.client._writes import Putting, Wishes
from mooncake_store.core.records import Status
from mooncake_store.errors import InvalidArgumentError, StoreError
from transfer_engine.base import Operation as Direction
from transfer_engine.outcome import BatchResult

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client._core import Core, PutOptions
    from mooncake_store.client._directory import Road
    from mooncake_store.client._keys import KeyBatch
    from mooncake_store.client._pieces import Pieces
    from mooncake_store.client._steps import Move, Steps

    Column = NDArray[np.int64]

__all__ = ["PutSessions"]


class _Progress:
    """What of one object was written, and its checksum as far as ranges came in order."""

    __slots__ = ("hashed", "ranges", "running")

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.running: Any = xxhash.xxh3_64()
        self.hashed = 0

    def wrote(self, offset: int, nbytes: int, address: int) -> None:
        """Take note of a range that lies at an address now."""
        if self.running is not None and offset == self.hashed:
            self.running.update(raw(address, nbytes))
            self.hashed += nbytes
        elif nbytes:
            self.running = None
        self.ranges = merged([*self.ranges, (offset, offset + nbytes)])


class PutSessions(Putting):
    """Puts of a batch under way: `start`, any number of `write`, then `commit` or `revoke`."""

    def __init__(
        self, core: Core, keys: KeyBatch, sizes: Column, options: PutOptions, until: float
    ) -> None:
        memory = Memory(np.zeros(len(keys), np.int64), sizes, None)
        super().__init__(core, keys, memory, Wishes(core, options, len(keys)), until)
        self._progress = [_Progress() for _ in range(len(keys))]
        self._current: tuple[Pieces, Column] | None = None
        # The replicas most of these objects have; columns are reused by later steps.
        self._replicas_most = 0

    def start(self) -> Steps[None]:
        """Ask for room; FOUND keys are open then, the others have a status."""
        index = np.flatnonzero(self.cols[k.STATUS] == 0)
        self.core.counters.keys += len(index)
        if len(index):
            yield from self.begin(index)
            self._replicas_most = int(self.cols[k.TRIED, 0])

    def is_open(self, at: int) -> bool:
        """Whether a key can be written to."""
        return bool(self.cols[k.STATUS, at] == k.FOUND)

    def write(self, index: Column, pieces: Pieces, until: float) -> Steps[NDArray[np.int16]]:
        """Write ranges (pieces with offsets) of some open keys; return a status for each.

        A range outside of its object fails its key and nothing of it is written; a range that
        could not be written to every replica ends the key.
        """
        if pieces.offsets is None or len(pieces) != len(index):
            raise InvalidArgumentError("ranges of as many objects as keys, with offsets, are due")
        self.until = until
        statuses = np.zeros(len(index), np.int16)
        statuses[self.cols[k.STATUS, index] != k.FOUND] = Status.INVALID_PARAMS
        outside = pieces.misfits(every(len(index)), self.memory.sizes[index])
        statuses[outside] = OUT_OF_RANGE
        good = np.flatnonzero(statuses == 0)
        where = np.full(len(self.keys), -1, np.int64)
        where[index[good]] = good
        self._current = (pieces, where)
        try:
            for nth in range(self._replicas_most if len(good) else 0):
                yield from self._write_replica(index[good], nth)
        finally:
            self._current = None
        lost = self.cols[k.STATUS, index] != k.FOUND
        statuses[lost & (statuses == 0)] = Status.INTERNAL
        for j in good[~lost[good]].tolist():
            self._note(int(index[j]), pieces, j)
        return statuses

    def _note(self, at: int, pieces: Pieces, j: int) -> None:
        assert pieces.offsets is not None
        for row in range(int(pieces.starts[j]), int(pieces.starts[j + 1])):
            self._progress[at].wrote(
                int(pieces.offsets[row]), int(pieces.lengths[row]), int(pieces.addresses[row])
            )

    def _move(self, road: Road, index: Column, nth: int) -> Move:
        assert self._current is not None
        pieces, where = self._current
        at = where[index]
        return move_pieces(
            pieces, at, road, Direction.WRITE, self.cols[k.OFFSET, index], pieces.keep
        )

    def _judge(self, road: Road, index: Column, outcome: Any, nth: int) -> None:
        assert self._current is not None
        pieces, where = self._current
        if isinstance(outcome, BatchResult):
            outcome = fold(pieces, where[index], outcome, hashed=False)
        super()._judge(road, index, outcome, nth)

    def _moved(self, index: Column) -> int:
        assert self._current is not None
        pieces, where = self._current
        return int(pieces.totals[where[index]].sum())

    def commit(self, index: Column, until: float) -> Steps[NDArray[np.int16]]:
        """Make written objects readable; return a status for each.

        A key with a gap stays open. Its error is in `errors`.
        """
        self.until = until
        statuses = np.zeros(len(index), np.int16)
        ready = []
        for j, at in enumerate(index.tolist()):
            progress, size = self._progress[at], int(self.memory.sizes[at])
            if not self.is_open(at):
                statuses[j] = Status.INVALID_PARAMS
            elif progress.ranges != [(0, size)]:
                statuses[j] = Status.INVALID_PARAMS
                self.errors[at] = "a byte of it was never written"
            else:
                try:
                    yield from self._sum(at, progress, size)
                    ready.append(at)
                except StoreError as error:
                    statuses[j] = error.code
                    self.errors[at] = error.again()
        if ready:
            chosen = np.array(ready, np.int64)
            yield from self.end(chosen)
            self.core.leases.drop(self.keys.words, chosen, time.monotonic_ns())
            ended = np.isin(index, chosen)
            statuses[ended] = self.cols[k.STATUS, index[ended]]
        return statuses

    def _sum(self, at: int, progress: _Progress, size: int) -> Steps[None]:
        if progress.running is not None:
            self.checksums[at] = progress.running.intdigest()
            return
        segment, offset = self.places(at)[0]
        road = self.core.directory.get(segment)
        assert road is not None
        key = self.keys.label(at)
        self.checksums[at] = yield from read_back(self.core, key, road, offset, size, self.until)

    def revoke(self, index: Column) -> Steps[NDArray[np.int16]]:
        """Give open keys up; return a status for each."""
        statuses = np.zeros(len(index), np.int16)
        mine = self.cols[k.STATUS, index]
        live = (mine == k.FOUND) | (mine == k.FAILED)
        statuses[~live] = Status.INVALID_PARAMS
        chosen = index[live]
        self.cols[k.CHECKSUM, chosen] = Status.INVALID_PARAMS  # what they are from now on
        yield from self._give_up(chosen)
        return statuses
