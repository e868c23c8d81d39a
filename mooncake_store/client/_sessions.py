"""Objects that stay open for a while: puts written range by range, and views under a lease.

A session begins a put, writes ranges in any order, and ends it. What was never written would show
old bytes of other objects, so a session with a gap cannot be committed. The checksum is computed
as ranges pass if they come in order without overlap; else the object is read back at the end. A
session has the store's put deadline (`put_discard`, 30 s by default): a longer one may find
itself replaced, and its commit then fails.

A view shows the memory of a replica itself, under a lease of its own, where memory is shared;
elsewhere it holds a copy. As steps; no I/O.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mooncake_store.client import _kernels as k
from mooncake_store.client._arguments import count_of
from mooncake_store.client._buffers import Memory, locate_one, new_bytes
from mooncake_store.client._leases import RELEASE_MARGIN_NS
from mooncake_store.client._reads import BytesSink, Plan, Reading, learn_segments
from mooncake_store.client._steps import Move, Moves, Opens, ask, ask_one
from mooncake_store.client._writes import Putting, Wishes
from mooncake_store.client.results import PutManyResult, PutResult
from mooncake_store.core.records import Status
from mooncake_store.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    LeaseExpiredError,
    StoreError,
    UnavailableError,
)
from mooncake_store.wire.shard import PUT_REVOKE, RELEASE, RENEW
from transfer_engine.base import Operation as Direction
from transfer_engine.base import error_of as transfer_error
from transfer_engine.checksum import checksum_one

if TYPE_CHECKING:
    from mooncake_store.client._core import Core, PutOptions
    from mooncake_store.client._directory import Road
    from mooncake_store.client._keys import KeyBatch
    from mooncake_store.client._steps import Steps
    from transfer_engine.memory import Mapping

__all__ = ["Session", "Viewing", "merged", "raw", "read_back"]

# What is read back at once for the checksum of a session written out of order.
_READ_BACK_BYTES = 8 << 20
_UNSIGNED = 0xFFFF_FFFF_FFFF_FFFF


class Session:
    """One put under way. `begin`, any number of `write`, then `commit` or `revoke`."""

    def __init__(self, core: Core, keys: KeyBatch, size: int, options: PutOptions) -> None:
        size = count_of(size, "size")
        if size < 1:
            raise InvalidArgumentError(f"an object has at least 1 byte, not {size}")
        self.core = core
        self.key = keys.label(0)
        self.size = size
        sizes = np.array([size], np.int64)
        memory = Memory(np.zeros(1, np.int64), sizes, None)
        wishes = Wishes(core, options, 1)
        self._putting = Putting(core, keys, memory, wishes, core.until(options))
        self._keys = keys
        self._roads: list[tuple[Road, int]] = []
        self._ranges: list[tuple[int, int]] = []
        self._running: Any = xxhash.xxh3_64()
        self._hashed = 0
        self.open = False

    def begin(self) -> Steps[None]:
        """Ask for room and reach the segments; raises AlreadyExistsError among others."""
        core, putting = self.core, self._putting
        yield from putting.begin(np.zeros(1, np.int64))
        status = int(putting.cols[k.STATUS, 0])
        if status != k.FOUND:
            raise self._refusal()
        self.open = True
        try:
            for segment, offset in putting.places(0):
                road = core.directory.get(segment)
                if road is None:
                    yield from learn_segments(core, {segment}, putting.until)
                    road = core.directory.get(segment)
                if road is None:
                    raise UnavailableError(f"segment {segment} is unknown", key=self.key)
                self._roads.append((road, offset))
            closed = [road for road, _ in self._roads if road.handle is None]
            if closed:
                outcome = yield Opens(closed, putting.until)
                for error in outcome:
                    if error is not None:
                        raise error.again()
        except StoreError:
            yield from self.revoke()
            raise

    def _refusal(self) -> StoreError:
        putting = self._putting
        result = PutManyResult(self._keys, putting.statuses(), putting.errors, putting.written)[0]
        if result.error is not None:
            return result.error
        return AlreadyExistsError("the key names an object already", key=self.key, operation="put")

    def write(self, offset: int, data: Any, until: float) -> Steps[int]:
        """Write a range to every replica; return its length."""
        self._require_open()
        address, nbytes = locate_one(data, writable=False)
        offset = count_of(offset, "offset")
        if not 0 <= offset <= offset + nbytes <= self.size:
            raise InvalidArgumentError(
                f"[{offset}, {offset + nbytes}) is outside of the {self.size} bytes announced",
                key=self.key,
            )
        if not nbytes:
            return 0
        moves = [
            _move(Direction.WRITE, road, base + offset, nbytes, address, data)
            for road, base in self._roads
        ]
        outcomes = yield Moves(moves, until)
        for (road, _), outcome in zip(self._roads, outcomes, strict=True):
            _check(self.core, self.key, road, outcome)
        if offset == self._hashed and self._running is not None:
            self._running.update(raw(address, nbytes))
            self._hashed += nbytes
        else:
            self._running = None
        self._ranges = merged([*self._ranges, (offset, offset + nbytes)])
        return nbytes

    def _require_open(self) -> None:
        if not self.open:
            raise InvalidArgumentError("this put has ended", key=self.key, advice="begin another")

    def commit(self, until: float) -> Steps[PutResult]:
        """Make the object readable. Raises, and leaves the session open, while a gap is left."""
        self._require_open()
        if self._ranges != [(0, self.size)]:
            end = self._ranges[0][1] if self._ranges and self._ranges[0][0] == 0 else 0
            raise InvalidArgumentError(
                f"byte {end} of {self.size} was never written",
                key=self.key,
                operation="commit",
                advice="write every range before the commit, or revoke the put",
            )
        putting = self._putting
        if self._running is None:
            road, base = self._roads[0]
            total = yield from read_back(self.core, self.key, road, base, self.size, until)
        else:
            total = self._running.intdigest()
        putting.checksums[0] = total
        putting.until = until
        self.open = False
        yield from putting.end(np.zeros(1, np.int64))
        status = int(putting.cols[k.STATUS, 0])
        if status not in (0, Status.SUPERSEDED):
            raise self._refusal()
        self.core.leases.drop(self._keys.words, np.zeros(1, np.int64), time.monotonic_ns())
        if status:
            return PutResult("superseded")
        return PutResult("stored", replicas=len(self._roads))

    def revoke(self) -> Steps[None]:
        """Give the put up; its space returns. Does nothing once the session has ended."""
        if not self.open:
            return
        self.open = False
        generation = self._putting.cols[k.GENERATION, :1].astype(np.uint32)
        body = PUT_REVOKE.request.pack(late=0, digests=self._keys.digests, generations=generation)
        shard = self.core.shard_of(self._keys)
        yield from ask([(shard, PUT_REVOKE, body)], time.monotonic() + self.core.config.deadline_s)


class Viewing:
    """A lease of its own on one object, and its bytes in `data`.

    With `ttl_ms` 0 any lease will do that runs for half of the client's `lease_ttl`: one of those
    that gets of this client were granted is taken out of the lease table, without a request, and
    entered there again at the end.
    """

    def __init__(self, core: Core, keys: KeyBatch, ttl_ms: int, verify: bool, until: float) -> None:
        self.core = core
        self.data: memoryview = memoryview(b"")
        self.zero_copy = False
        self.lease_end_ns = 0
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._verify = verify
        self._until = until
        self._generation = 0
        self._place = (0, 0)  # segment and offset of what is shown
        self._leased = False

    @property
    def key(self) -> str | bytes:
        """What is shown."""
        return self._keys.label(0)

    def begin(self) -> Steps[None]:
        """Lease the object and show it; a replica that cannot be shown is copied instead."""
        core = self.core
        if not self._ttl_ms and core.config.lease_cache and self._show_leased():
            return
        self._ttl_ms = self._ttl_ms or max(1, int((self._until - time.monotonic()) * 1000))
        plan = Plan(self._ttl_ms, verify=self._verify, cached=False, operation="view")
        sink = BytesSink(1)
        reading = Reading(core, self._keys, sink, plan, self._until)
        reading.uncounted = True
        epoch = core.leases.epoch
        reading.cols[k.STATUS] = k.MISSING
        yield from reading.find(np.zeros(1, np.int64))
        if reading.cols[k.STATUS, 0] == k.FOUND:
            self._generation = int(reading.cols[k.GENERATION, 0])
            self._hold(int(reading.cols[k.UNTIL, 0]))
            road = core.directory.get(int(reading.cols[k.SEGMENT, 0]))
            if road is not None and (yield from self._show(reading, road)):
                return
            yield from reading.finish(np.zeros(1, np.int64), epoch)
            if reading.cols[k.STATUS, 0] == 0 and sink.values[0] is not None:
                self.data = memoryview(sink.values[0])
                return
        try:
            reading.raise_error()
        finally:
            yield from self.release()

    def _show_leased(self) -> bool:
        """Show memory under a lease that a get was granted; False without either."""
        core, (low, high) = self.core, self._keys.words[0].tolist()
        enough = time.monotonic_ns() + core.lease_ns // 2
        found = core.leases.one(low, high, enough, taken=True)
        if not found[0]:
            return False
        end, size, wanted, self._generation, segment, offset = found
        self._place = segment, offset
        self._hold(end)
        road = core.directory.get(segment)
        if road is not None and road.handle is not None and not road.failures:
            try:
                memory = road.handle.memory()
                if memory is not None and self._take_in(memory, offset, size, wanted, end):
                    return True
            except StoreError:
                pass  # asked for in earnest by who called, which also tells what is wrong
        self._leased = False
        core.leases.view_ends(low)
        core.leases.take_back(low, high, self._generation, time.monotonic_ns())
        return False

    def _hold(self, end: int) -> None:
        """Note that this has a lease of its own."""
        if not self._leased:
            self.core.leases.view_begins(int(self._keys.words[0, 0]))
        self._leased, self.lease_end_ns = True, end

    def _take_in(self, memory: Mapping, offset: int, size: int, wanted: int, end: int) -> bool:
        """Show a range of memory if it is what was put and its lease runs."""
        data = memory.view(offset, size)
        same = not self._verify or checksum_one(memory.address + offset, size) == wanted & _UNSIGNED
        mark, _ = k.verdict(0, same, end, time.monotonic_ns())
        if mark == k.FAILED:
            self.core.counters.checksum_failures += 1
        if mark:
            return False
        self.data, self.zero_copy = data, True
        return True

    def _show(self, reading: Reading, road: Road) -> Steps[bool]:
        """Map the replica that was chosen; False if it cannot be shown, or is not what was put."""
        if road.handle is None:
            outcome = yield Opens([road], self._until)
            if outcome[0] is not None:
                return False
        try:
            memory = None if road.handle is None else road.handle.memory()
        except StoreError:
            return False
        if memory is None:
            return False
        offset, size, wanted = (int(reading.cols[row, 0]) for row in (k.OFFSET, k.SIZE, k.CHECKSUM))
        self._place = road.number, offset
        if self._take_in(memory, offset, size, wanted, self.lease_end_ns):
            return True
        if self.remaining_s <= 0:
            raise LeaseExpiredError("the lease ended before the view began", key=self.key)
        return False

    @property
    def remaining_s(self) -> float:
        """Seconds until the lease ends; not positive once it has."""
        return (self.lease_end_ns - time.monotonic_ns()) / 1e9

    def renew(self, until: float) -> Steps[None]:
        """Prolong the lease; raises LeaseExpiredError when the object is another one by now."""
        if self.lease_end_ns <= time.monotonic_ns() + RELEASE_MARGIN_NS:
            yield from self._lease_anew(until)
            return
        generations = np.array([self._generation], np.uint32)
        ttl_ms = self._ttl_ms or self.core.ttl_ms
        body = RENEW.request.pack(
            ttl_ms=ttl_ms, digests=self._keys.digests, generations=generations
        )
        sent = time.monotonic_ns()
        reply = yield from ask_one(self.core.shard_of(self._keys), RENEW, body, until)
        if reply.statuses[0] != Status.OK:
            raise LeaseExpiredError("the object is gone or was replaced", key=self.key)
        self.lease_end_ns = max(self.lease_end_ns, sent + int(reply.remaining_ns[0]))

    def _lease_anew(self, until: float) -> Steps[None]:
        """Get another lease for one that ran out, if the same bytes are still where they were.

        Prolonging would not do: the store counts how often a client has a lease, and of those
        that ran out none counts any more.
        """
        core = self.core
        plan = Plan(self._ttl_ms or core.ttl_ms, verify=False, cached=False, operation="view")
        reading = Reading(core, self._keys, BytesSink(1), plan, until)
        reading.uncounted = True
        reading.cols[k.STATUS] = k.MISSING
        if (yield from reading.find(np.zeros(1, np.int64))):
            generation = int(reading.cols[k.GENERATION, 0])
            same = generation == self._generation
            if same and (not self.zero_copy or self._place in reading.replicas(0)):
                self._hold(int(reading.cols[k.UNTIL, 0]))
                return
            yield from self._give_back(generation)
        raise LeaseExpiredError("the object is gone or was replaced", key=self.key)

    def release(self) -> Steps[None]:
        """Give the lease back. Idempotent; a store that cannot be reached lets it run out."""
        if not self._leased:
            return
        self._leased = False
        low, high = self._keys.words[0].tolist()
        self.core.leases.view_ends(low)
        now = time.monotonic_ns()
        if self.lease_end_ns <= now + RELEASE_MARGIN_NS:
            return
        if not self._ttl_ms and self.core.leases.take_back(low, high, self._generation, now):
            return
        yield from self._give_back(self._generation)

    def _give_back(self, generation: int) -> Steps[None]:
        generations = np.array([generation], np.uint32)
        body = RELEASE.request.pack(digests=self._keys.digests, generations=generations)
        until = time.monotonic() + self.core.config.deadline_s
        yield from ask([(self.core.shard_of(self._keys), RELEASE, body)], until)


def read_back(
    core: Core, key: str | bytes, road: Road, base: int, size: int, until: float
) -> Steps[int]:
    """Hash what was written to a replica, in pieces."""
    digest = xxhash.xxh3_64()
    for start in range(0, size, _READ_BACK_BYTES):
        nbytes = min(_READ_BACK_BYTES, size - start)
        piece, address = new_bytes(nbytes)
        move = _move(Direction.READ, road, base + start, nbytes, address, piece)
        outcomes = yield Moves([move], until)
        _check(core, key, road, outcomes[0])
        digest.update(piece)
    return digest.intdigest()


def _move(
    direction: Direction, road: Road, offset: int, nbytes: int, address: int, keep: object
) -> Move:
    column = np.array([offset, nbytes, address], np.int64)
    return Move(road, direction, column[0:1], column[1:2], column[2:3], False, keep)


def _check(core: Core, key: str | bytes, road: Road, outcome: Any) -> None:
    error = outcome if isinstance(outcome, StoreError) else None
    if error is None and outcome.statuses[0]:
        error = transfer_error(int(outcome.statuses[0]), operation="write", peer=road.label)
    if error is not None:
        core.directory.failed(road, time.monotonic_ns())
        error.key = key
        raise error.again()


def raw(address: int, nbytes: int) -> Any:
    """The memory of a buffer that was located before and is held by its owner."""
    import ctypes

    return (ctypes.c_char * nbytes).from_address(address)


def merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Unite ranges that touch or overlap. O(r log r)."""
    out: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out
