"""Objects that are written range by range: layer by layer, as a model computes them.

One request begins a batch of them, one ends it; between them any number of writes moves ranges of
any of its objects to all their replicas, in any order, without asking anybody. What was never
written would show old bytes of other objects, so an object with a gap is not committed. The
checksum is computed as ranges pass if they come in order without overlap; else the object is read
back at the end. Who has to show rights to memory, which are for whole objects, keeps what is
written until then (`GatheredSession`). What was begun has the store's put deadline (`put_discard`,
30 s by default): one that takes longer may find itself replaced, and its commit then fails.

As steps; no I/O. Cost of a write: O(pieces), a call of Python each; of gathering, a copy of all.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mooncake_store.client.arguments import count_of
from mooncake_store.client.buffers import new_bytes
from mooncake_store.client.core import PutOptions, every
from mooncake_store.client.failures import OUT_OF_RANGE, error_of
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.pieces import NO_PIECES, PiecePutting, Pieces, copy_pieces
from mooncake_store.client.results import PutResult
from mooncake_store.client.steps import Move, Moves
from mooncake_store.client.writes import PutFields, Putting
from mooncake_store.core.records import Status
from mooncake_store.errors import AlreadyExistsError, InvalidArgumentError, StoreError
from transfer_engine.base import Operation as Direction
from transfer_engine.base import error_of as transfer_error
from transfer_engine.checksum import address_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client.core import Core
    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.client.steps import Steps

    Column = NDArray[np.int64]

__all__ = ["GatheredSession", "PutSession", "Writing", "session_of"]

# What is read back at once for the checksum of an object written out of order.
_READ_BACK_BYTES = 8 << 20


class _Progress:
    """Which ranges of an object were written; its checksum, for as long as they come in order."""

    __slots__ = ("hashed", "ranges", "running")

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []
        self.running: Any = xxhash.xxh3_64()
        self.hashed = 0

    def wrote(self, offset: int, nbytes: int, address: int) -> None:
        """Take note of a range, whose bytes are at an address while this runs."""
        if not nbytes:
            return
        if self.running is not None and offset == self.hashed:
            self.running.update((ctypes.c_char * nbytes).from_address(address))
            self.hashed += nbytes
        else:
            self.running = None
        self.ranges = _merged([*self.ranges, (offset, offset + nbytes)])

    @property
    def gap(self) -> int:
        """The first byte that was not written."""
        return self.ranges[0][1] if self.ranges and self.ranges[0][0] == 0 else 0


class PutSession(PiecePutting):
    """Puts of a batch under way: `start`, any number of `write`, then `commit` or `revoke`."""

    def __init__(
        self, core: Core, keys: KeyBatch, sizes: Column, options: PutOptions, until: float
    ) -> None:
        super().__init__(core, keys, sizes, PutFields(core, options, len(keys)), until)
        self._progress = [_Progress() for _ in range(len(keys))]
        # Which object of the pieces that are written just now each key is.
        self._where = np.full(len(keys), -1, np.int64)

    def start(self) -> Steps[None]:
        """Ask for room; FOUND keys are open then, the others have a status."""
        index = self.good()
        self.core.counters.keys += len(index)
        if len(index):
            yield from self.begin(index)

    def is_open(self, at: int) -> bool:
        """Whether a key can be written to."""
        return bool(self.status[at] == k.FOUND)

    def _within(self, index: Column) -> Column:
        where: Column = self._where[index]
        return where

    def write(self, index: Column, pieces: Pieces, until: float) -> Steps[NDArray[np.int16]]:
        """Write ranges (pieces with offsets) of some open keys; return a status for each.

        A range outside of its object fails its key and nothing of it is written. A key of which a
        range could not be written to every replica can only be revoked.
        """
        if pieces.offsets is None or len(pieces) != len(index):
            raise InvalidArgumentError("ranges of as many objects as keys, with offsets, are due")
        self.until = until
        statuses = np.zeros(len(index), np.int16)
        statuses[self.status[index] != k.FOUND] = Status.INVALID_PARAMS
        outside = pieces.misfits(every(len(index)), self.memory.sizes[index])
        statuses[outside] = OUT_OF_RANGE
        good = np.flatnonzero(statuses == 0)
        self._where[index[good]] = good
        self.pieces = pieces
        try:
            yield from self._write(index[good])
        finally:
            self.pieces = NO_PIECES
        lost = self.status[index] != k.FOUND
        statuses[lost & (statuses == 0)] = Status.INTERNAL
        for j in good[~lost[good]].tolist():
            progress = self._progress[int(index[j])]
            of = slice(int(pieces.starts[j]), int(pieces.starts[j + 1]))
            columns = pieces.offsets[of], pieces.lengths[of], pieces.addresses[of]
            for offset, nbytes, address in zip(*(c.tolist() for c in columns), strict=True):
                progress.wrote(offset, nbytes, address)
        return statuses

    def reopen(self, at: int) -> None:
        """Let a lost range of a key be written again, unless some of it may still arrive."""
        if at not in self._late:
            del self.failures[at]
            self.status[at] = k.FOUND

    def commit(self, index: Column, until: float) -> Steps[NDArray[np.int16]]:
        """Make written objects readable; return a status for each.

        A key with a gap stays open. Its error is in `errors`.
        """
        self.until = until
        statuses = np.zeros(len(index), np.int16)
        ready = []
        for j, at in enumerate(index.tolist()):
            size, progress = int(self.memory.sizes[at]), self._progress[at]
            self.errors.pop(at, None)
            if not self.is_open(at):
                statuses[j] = Status.INVALID_PARAMS
            elif progress.ranges != [(0, size)]:
                statuses[j] = Status.INVALID_PARAMS
                self.errors[at] = f"byte {progress.gap} of {size} was never written"
            else:
                try:
                    self.checksums[at] = yield from self._sum(at)
                    ready.append(at)
                except StoreError as error:
                    statuses[j] = error.code
                    self.errors[at] = error.again()
        if ready:
            chosen = np.array(ready, np.int64)
            yield from self.end(chosen)
            self.core.leases.drop(self.keys.words, chosen, time.monotonic_ns())
            ended = np.isin(index, chosen)
            statuses[ended] = self.status[index[ended]]
        return statuses

    def _sum(self, at: int) -> Steps[int]:
        """The checksum of a written object, which is read back if its ranges came out of order."""
        running = self._progress[at].running
        if running is not None:
            return int(running.intdigest())
        segment, base = self.places(at)[0]
        target = self.core.directory.known.get(segment)
        assert target is not None
        digest, size = xxhash.xxh3_64(), int(self.memory.sizes[at])
        for start in range(0, size, _READ_BACK_BYTES):
            nbytes = min(_READ_BACK_BYTES, size - start)
            piece, address = new_bytes(nbytes)
            columns = np.array([[base + start], [nbytes], [address]], np.int64)
            move = Move(target, Direction.READ, columns[0], columns[1], columns[2], False, piece)
            (outcome,) = yield Moves([move], self.until)
            error = outcome if isinstance(outcome, StoreError) else None
            if error is None and outcome.statuses[0]:
                error = transfer_error(outcome.statuses[0], operation="commit", peer=target.label)
            if error is not None:
                self.core.directory.failed(target, time.monotonic_ns())
                error.key = self.keys.label(at)
                raise error.again()
            digest.update(piece)
        return int(digest.intdigest())

    def revoke(self, index: Column) -> Steps[NDArray[np.int16]]:
        """Give open keys up; return a status for each."""
        statuses = np.zeros(len(index), np.int16)
        mine = self.status[index]
        live = (mine == k.FOUND) | (mine == k.FAILED)
        statuses[~live] = Status.INVALID_PARAMS
        chosen = index[live]
        self.status[chosen] = Status.INVALID_PARAMS
        yield from self._revoke(chosen)
        return statuses


class GatheredSession(PutSession):
    """Puts whose objects are kept here until they are whole, then written at once.

    A commit whose bytes are refused, or do not arrive, ends its puts; nothing is begun anew, as the
    memory of the caller is not at hand any more.
    """

    # What is moved are whole objects, as in a put of them.
    _move, _judge, _moved = Putting._move, Putting._judge, Putting._moved

    def __init__(
        self, core: Core, keys: KeyBatch, sizes: Column, options: PutOptions, until: float
    ) -> None:
        super().__init__(core, keys, sizes, options, until)
        self._arenas: dict[int, NDArray[np.uint8]] = {}
        for progress in self._progress:
            progress.running = None  # the checksum is computed as the whole is written

    def _write(self, accepted: Column) -> Steps[None]:
        """Keep the pieces of these keys."""
        for at in accepted.tolist():
            if at not in self._arenas:
                arena = self._arenas[at] = np.empty(int(self.memory.sizes[at]), np.uint8)
                self.memory.addresses[at] = arena.__array_interface__["data"][0]
        if len(accepted):
            where = self._within(accepted)
            copy_pieces(self.core, self.pieces, where, self.memory.addresses[accepted])
        yield from ()

    def _sum(self, at: int) -> Steps[int]:
        yield from ()
        return 0

    def end(self, index: Column) -> Steps[None]:
        """Write what was kept to every replica, and make it readable."""
        yield from super()._write(index)
        written = index[self.status[index] == k.FOUND]
        if len(written):
            yield from super().end(written)
        failed = index[self.status[index] == k.FAILED]
        yield from self._give_up(failed)
        self._tell_tried()
        for at in index.tolist():
            del self._arenas[at]

    def revoke(self, index: Column) -> Steps[NDArray[np.int16]]:
        """Give open keys up; return a status for each."""
        for at in index.tolist():
            self._arenas.pop(at, None)
        return (yield from super().revoke(index))


def session_of(
    core: Core, keys: KeyBatch, sizes: Column, options: PutOptions, until: float
) -> PutSession:
    """Puts that are written range by range, or gathered where rights are to be shown."""
    kind = PutSession if core.shown is None else GatheredSession
    return kind(core, keys, sizes, options, until)


class Writing:
    """One object of a `PutSession`, whose failures are raised."""

    def __init__(
        self, core: Core, keys: KeyBatch, size: int, options: PutOptions, until: float
    ) -> None:
        self.size = count_of(size, "size")
        if self.size < 1:
            raise InvalidArgumentError(f"an object has at least 1 byte, not {self.size}")
        sizes = np.array([self.size], np.int64)
        self._put = session_of(core, keys, sizes, options, until)
        self.open = False

    def begin(self) -> Steps[None]:
        """Ask for room; raises AlreadyExistsError among others."""
        yield from self._put.start()
        self.open = self._put.is_open(0)
        if not self.open:
            raise self._error("put")

    def _error(self, operation: str) -> StoreError:
        """What the put failed with."""
        put = self._put
        error = put.result().error(0)
        if error is None:
            key = put.keys.label(0)
            return AlreadyExistsError("the key names an object already", key=key, operation="put")
        error.operation = operation
        return error

    def write(self, offset: int, data: Any, until: float) -> Steps[int]:
        """Write a range to every replica; return its length."""
        put, key = self._put, self._put.keys.label(0)
        self._require_open()
        address, nbytes = address_of(data, writable=False)
        offset = count_of(offset, "offset")
        if not 0 <= offset <= offset + nbytes <= self.size:
            raise InvalidArgumentError(
                f"[{offset}, {offset + nbytes}) is outside of the {self.size} bytes announced",
                key=key,
            )
        if nbytes:
            pieces = Pieces([address], [nbytes], [0, 1], offsets=[offset], keep=data)
            yield from put.write(every(1), pieces, until)
            if 0 in put.failures:
                error = self._lost()
                put.reopen(0)
                raise error
        return nbytes

    def _require_open(self) -> None:
        if not self.open:
            key = self._put.keys.label(0)
            raise InvalidArgumentError("this put has ended", key=key, advice="begin another")
        if 0 in self._put.failures:
            raise self._lost()

    def _lost(self) -> StoreError:
        """Why the last range was not written."""
        code, tried = self._put.failures[0]
        return error_of(code, key=self._put.keys.label(0), operation="write", detail=tried)

    def commit(self, until: float) -> Steps[PutResult]:
        """Make the object readable. Raises, and leaves the put open, while a gap is left."""
        self._require_open()
        put, self.open = self._put, False
        (status,) = yield from put.commit(every(1), until)
        self.open = put.is_open(0)
        if self.open:  # there is a gap, or what was written could not be read back
            known = put.errors[0]
            if isinstance(known, StoreError):
                raise known.again()
            raise InvalidArgumentError(
                known,
                key=put.keys.label(0),
                operation="commit",
                advice="write every range before the commit, or revoke the put",
            )
        if status == Status.SUPERSEDED:
            return PutResult("superseded")
        if status:
            raise self._error("commit")
        return PutResult("stored", replicas=int(put.cols[k.REPLICAS, 0]))

    def revoke(self) -> Steps[None]:
        """Give the put up; its space returns. Does nothing once it has ended."""
        if self.open:
            put, self.open = self._put, False
            put.until = time.monotonic() + put.core.config.deadline_s
            yield from put.revoke(every(1))


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Unite ranges that touch or overlap. O(r log r)."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out
