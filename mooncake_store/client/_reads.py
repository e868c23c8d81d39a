"""The one way in which bytes are read: find, lease, transfer, check. Every kind of get is this.

    1. Keys under a running lease of ours are planned from the lease table; the others are asked
       for in one request per shard, which leases them. A lease counts from when its request left.
    2. Each key gets its cheapest replica (same process, same host, then the network; segments
       that failed lately last; equal ones in turns), and the sink says where its bytes go: a
       buffer that is too small fails here, before any byte is written.
    3. One batch per segment is moved, checksums computed on the way.
    4. A failed replica is noted, the next one tried; a plan from the lease table is asked for anew.
    5. Where the lease ran out meanwhile, or was given back, the store is asked whether the same
       generation still stands where it was read. If so the bytes are good. If not, and a removal
       of this very client gave the lease back, the key is read anew; else it fails with
       LEASE_EXPIRED.

A key succeeds only if all of this did. Its buffer may have been written to otherwise.

A whole object alone takes the same steps without the columns, in `_straight.py`, which leaves
everything unusual to this.

Not done here: I/O (`_steps.py`), what callers get (`_operations.py`).
Cost: one round trip a batch; none if all leases run.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from mooncake_store.client import _kernels as k
from mooncake_store.client._answers import still_there
from mooncake_store.client._buffers import new_bytes_many
from mooncake_store.client._core import every, parts
from mooncake_store.client._failures import BUFFER_SMALL, OUT_OF_RANGE
from mooncake_store.client._steps import CLUSTER, Move, Moves, Opens, ask
from mooncake_store.client.results import BatchResult
from mooncake_store.core.records import Status
from mooncake_store.errors import (
    ChecksumMismatchError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.wire.cluster import SEGMENTS, SegmentsRequest
from mooncake_store.wire.shard import BATCH_MAX, GET
from transfer_engine.base import Operation as Direction
from transfer_engine.base import error_of as transfer_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client._buffers import Memory
    from mooncake_store.client._core import Core
    from mooncake_store.client._directory import Road
    from mooncake_store.client._keys import KeyBatch
    from mooncake_store.client._steps import Steps

    Column = NDArray[np.int64]

__all__ = [
    "Answer",
    "BytesSink",
    "MemorySink",
    "Plan",
    "Reading",
    "copied",
    "half_of",
    "learn_segments",
]

# A lease that ends sooner than this is not worth starting a transfer under.
MARGIN_NS = 2_000_000
# Readings of one key when other threads of this client remove and put it all the time.
_READINGS_MAX = 8
_NO_REPLICAS = np.empty((0, 2), np.int64)
_NO_REPLICAS.flags.writeable = False
_NO_SUMS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a get asks for. `length` None reads to the end; `cached` allows the lease table."""

    ttl_ms: int
    verify: bool
    cached: bool
    offset: int = 0
    length: int | None = None
    operation: str = "get"

    @property
    def whole(self) -> bool:
        """Whether the whole object is read, which is what its checksum speaks of."""
        return self.offset == 0 and self.length is None


class Answer(NamedTuple):
    """The reply to a get of one key, and when it was asked for."""

    reply: Any
    sent: int


class Sink(Protocol):
    """Where bytes go."""

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Write the addresses for these keys; return the positions in `index` without room."""

    @property
    def keep(self) -> object:
        """What owns the memory."""


class BytesSink:
    """Makes a bytes object per key."""

    def __init__(self, count: int) -> None:
        self.values: list[bytes | memoryview | None] = [None] * count

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Make them; all fit."""
        made, addresses[index] = new_bytes_many(lengths.tolist())
        if len(made) == len(self.values):  # all of them, in order
            self.values[:] = made
        else:
            for at, value in zip(index.tolist(), made, strict=True):
                self.values[at] = value
        return None

    @property
    def keep(self) -> object:
        """The values themselves."""
        return self.values


class MemorySink:
    """Buffers of the caller."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Compare the sizes of buffers with what is to be read."""
        memory = self._memory
        if len(index) == len(memory.addresses):  # all of them, in order
            addresses[:] = memory.addresses
            small = lengths > memory.sizes
        else:
            addresses[index] = memory.addresses[index]
            small = lengths > memory.sizes[index]
        return np.flatnonzero(small) if small.any() else None

    @property
    def keep(self) -> object:
        """The buffers of the caller."""
        return self._memory.keep


class Reading:
    """One get of a batch of keys. Run `steps`, then look at `cols`, `errors` and the sink."""

    def __init__(self, core: Core, keys: KeyBatch, sink: Sink, plan: Plan, until: float) -> None:
        self.core = core
        self.keys = keys
        self.sink = sink
        self.plan = plan
        self.until = until
        self.errors: dict[int, StoreError | str] = {}
        n = len(keys)
        self.cols: NDArray[np.int64] = np.empty((k.COLUMNS, n), np.int64)
        self.cols[k.STATUS] = Status.INVALID_KEY if keys.refused else 0
        if keys.refused:
            good = np.ones(n, np.bool_)
            good[keys.refused] = False
            self.cols[k.STATUS, good] = 0
        self.lengths: Column = self.cols[k.SIZE] if plan.whole else np.zeros(n, np.int64)
        self._addresses: Column = np.zeros(n, np.int64)
        self._replicas: Column = _NO_REPLICAS
        # Keys that were given replicas in one segment, and which: they need no sorting.
        self._together: tuple[Column, int] | None = None
        self._refreshed: set[int] = set()
        self._doubted: set[int] = set()
        self._causes: dict[int, tuple[int, str]] = {}
        self._failed = 0
        self._expired = 0
        # A lease that is not entered in the table is given back by who asked for it.
        self.uncounted = False
        # What a shard answered already to a get of the only key, and when it was asked.
        self.answer: Answer | None = None

    def statuses(self) -> NDArray[np.int16]:
        """The final status of each key."""
        statuses: NDArray[np.int16] = self.cols[k.STATUS].astype(np.int16)
        return statuses

    def raise_error(self) -> None:
        """Raise the error of the first key that failed, if there is one."""
        if self.cols[k.STATUS].any():
            operation = self.plan.operation
            BatchResult(operation, self.keys, self.statuses(), self.errors).check()

    def steps(self) -> Steps[None]:
        """Read; see the module."""
        epoch = self.core.leases.epoch
        index = yield from self.locate()
        yield from self.finish(index, epoch)

    def locate(self) -> Steps[Column]:
        """Find and lease keys without reading them; return those that are FOUND now."""
        core, cols, n = self.core, self.cols, len(self.keys)
        now = time.monotonic_ns()
        if self.plan.cached and self.answer is None:
            hits = core.leases.lookup(self.keys.words, now + MARGIN_NS, cols)
            core.counters.lease_cache_hits += hits
        else:
            hits = 0
            cols[k.STATUS][cols[k.STATUS] == 0] = k.MISSING
        core.counters.keys += n
        index = every(n)
        if hits < n:
            missing = index if not (hits or self.keys.refused) else self._where(k.MISSING)
            found = (yield from self.find(missing)) if len(missing) else 0
            if hits + found < n:
                index = self._where(k.FOUND)
        return index

    def finish(self, index: Column, epoch: int) -> Steps[None]:
        """Transfer FOUND keys and check their leases; `epoch` is that of before they were found."""
        core, cols = self.core, self.cols
        for _ in range(_READINGS_MAX):
            if len(index):
                yield from self._fill(index)
            if core.leases.epoch != epoch:
                # A lease of ours was given back meanwhile, perhaps the one that was read under.
                cols[k.STATUS][cols[k.STATUS] == 0] = k.EXPIRED
                self._expired = len(self.keys)
            if not self._expired:
                return
            expired = self._where(k.EXPIRED)
            began, epoch = time.monotonic_ns(), core.leases.epoch
            if len(expired):
                yield from self._ask_whether_unchanged(expired)
            lost = expired[cols[k.STATUS, expired] == Status.LEASE_EXPIRED]
            again = lost[cols[k.UNTIL, lost] > began]  # not the time took these leases
            if not len(again):
                return
            self._expired = 0
            cols[k.STATUS, again] = k.MISSING
            yield from self.find(again)
            index = again[cols[k.STATUS, again] == k.FOUND]

    def _where(self, status: int) -> Column:
        return np.flatnonzero(self.cols[k.STATUS] == status)

    # Finding.

    def find(self, index: Column) -> Steps[int]:
        """Ask the shards where objects are, choose a replica for each; return how many are."""
        core, keys, cols = self.core, self.keys, self.cols
        answer, self.answer = self.answer, None
        if answer is not None:
            split, sent, replies = [(0, index)], answer.sent, [answer.reply]
        else:
            split = parts(keys, index, core.shards, BATCH_MAX)
            calls = []
            for shard, some in split:
                digests = keys.digests if len(some) == len(keys) else keys.digests[some]
                body = GET.request.pack(ttl_ms=self.plan.ttl_ms, stop_at_miss=0, digests=digests)
                calls.append((shard, GET, body))
            sent = time.monotonic_ns()
            replies = yield from ask(calls, self.until)
        found = unknown = 0
        for (_, some), reply in zip(split, replies, strict=True):
            if isinstance(reply, StoreError):
                self._blame(some, reply.code, reply)
                continue
            rows, replicas = reply.rows.view(np.int64), reply.replicas.view(np.int64)
            if len(rows) != len(some):
                raise UnavailableError(f"{len(rows)} answers came to {len(some)} keys")
            base = len(self._replicas)
            here, strange = k.take(
                some, rows, replicas, base, sent, time.monotonic_ns(), core.directory.roads, cols
            )
            found, unknown = found + here, unknown + strange
            self._replicas = replicas if not base else _joined(self._replicas, replicas)
        if unknown:
            yield from learn_segments(core, self._numbers(), self.until)
        self._choose(index)
        if not self.uncounted:
            core.leases.remember(keys.words, index, sent, cols)
        return found

    def replicas(self, at: int) -> list[tuple[int, int]]:
        """(segment, offset) of each replica of a key that was found."""
        first, count = int(self.cols[k.FIRST, at]), int(self.cols[k.REPLICAS, at])
        rows = self._replicas[first : first + count]
        return [(int(row[1]) & 0xFFFF_FFFF, int(row[0])) for row in rows]

    def _numbers(self) -> set[int]:
        """Segments in the answers that this client has not met."""
        segments = np.unique(self._replicas[:, 1] & 0xFFFFFFFF)
        roads, now = self.core.directory.roads, time.monotonic_ns()
        return {
            number
            for number in segments.tolist()
            if number >= roads.shape[1] or (roads[0, number] < 0 and roads[1, number] <= now)
        }

    def _choose(self, index: Column) -> None:
        chosen, least, most = k.choose(
            index,
            self._replicas,
            self.core.directory.roads,
            time.monotonic_ns(),
            self.core.turn(),
            self.cols,
        )
        self._together = (index, int(least)) if chosen == len(index) and least == most else None

    # Transferring.

    def _fill(self, index: Column) -> Steps[None]:
        """Transfer FOUND keys until each is filled, or no replica is left to try."""
        index = self._place(index)
        while len(index):
            self._failed = 0
            yield from self._transfer(index)
            if not self._failed:
                return
            failed = self._where(k.FAILED)
            yield from self._find_others(failed)
            index = failed[self.cols[k.STATUS, failed] == k.FOUND]

    def _place(self, index: Column) -> Column:
        """Decide what is read of each key and where it goes; return the keys that are to be."""
        plan, cols = self.plan, self.cols
        if plan.whole:
            sizes = cols[k.SIZE]
            lengths = sizes if len(index) == len(sizes) else sizes[index]
        else:
            sizes = cols[k.SIZE][index]
            lengths = (
                sizes - plan.offset if plan.length is None else np.full_like(sizes, plan.length)
            )
            outside = (lengths < 0) | (plan.offset + lengths > sizes)
            self.lengths[index] = lengths
            if outside.any():
                for at in index[outside].tolist():
                    self.errors[at] = f"it has {cols[k.SIZE, at]} bytes"
                cols[k.STATUS, index[outside]] = OUT_OF_RANGE
                index, lengths = index[~outside], lengths[~outside]
        small = self.sink.place(index, lengths, self._addresses)
        if small is not None:
            for at, length in zip(index[small].tolist(), lengths[small].tolist(), strict=True):
                self.errors[at] = f"{length} bytes are needed"
            cols[k.STATUS, index[small]] = BUFFER_SMALL
            index = np.delete(index, small)
        return index

    def _transfer(self, index: Column) -> Steps[None]:
        """Move one batch per segment and judge each key."""
        directory, together = self.core.directory, self._together
        if together is not None and together[0] is index:  # nearly always
            groups = [(together[1], index)]
        else:
            segments = self.cols[k.SEGMENT, index]
            first = int(segments[0])
            if (segments == first).all():
                groups = [(first, index)]
            else:
                groups = [(int(s), index[segments == s]) for s in np.unique(segments)]
        roads: list[tuple[Road, Column]] = []
        for number, some in groups:
            road = directory.get(number) if number >= 0 else None
            if road is None:
                what = f"segment {number} is unknown" if number >= 0 else "no replica is reachable"
                self._fail(some, UnavailableError.code, what)
            else:
                roads.append((road, some))
        closed = [road for road, _ in roads if road.handle is None]
        if closed:
            outcome = yield Opens(closed, self._attempt_until(index))
            failures = {road.number: error for road, error in zip(closed, outcome, strict=True)}
            for road, some in roads:
                error = failures.get(road.number)
                if error is not None:
                    yield from self._lost(road, some, error)
            roads = [(road, some) for road, some in roads if failures.get(road.number) is None]
        if roads:
            yield from self._move_all(roads)

    def _move_all(self, roads: list[tuple[Road, Column]]) -> Steps[None]:
        moves = [self._move(road, some) for road, some in roads]
        until = self.until
        if not all(copied(road) for road, _ in roads):
            until = min(self._attempt_until(some) for _, some in roads)
        outcomes = yield Moves(moves, until)
        now = time.monotonic_ns()
        for (road, some), outcome in zip(roads, outcomes, strict=True):
            if isinstance(outcome, StoreError):
                yield from self._lost(road, some, outcome)
                continue
            gone = self._judge(road, some, outcome, now)
            if gone is not None:
                what = NotFoundError("it is not served there any more")
                yield from self._lost(road, gone, what)

    def _attempt_until(self, index: Column) -> float:
        """When to give an attempt up: at the deadline only if no other replica is left to try.

        An owner that went silent would use up all of the time otherwise.
        """
        cols = self.cols
        all_of_them = (1 << np.minimum(cols[k.REPLICAS, index], 62)) - 1
        others = (cols[k.FIRST, index] < 0) | ((all_of_them & ~cols[k.TRIED, index]) != 0)
        return half_of(self.until) if others.any() else self.until

    def _move(self, road: Road, index: Column) -> Move:
        cols, everything = self.cols, len(index) == len(self.keys)
        offsets = cols[k.OFFSET] if everything else cols[k.OFFSET, index]
        if self.plan.offset:
            offsets = offsets + self.plan.offset
        return Move(
            road,
            Direction.READ,
            offsets,
            self.lengths if everything else self.lengths[index],
            self._addresses if everything else self._addresses[index],
            self.plan.verify and self._covers(index),
            self.sink.keep,
        )

    def _covers(self, index: Column) -> bool:
        """Whether whole objects are read, so that checksums can be compared."""
        if self.plan.whole:
            return True
        return bool((self.lengths[index] == self.cols[k.SIZE, index]).all())

    def _judge(self, road: Road, index: Column, outcome: Any, now: int) -> Column | None:
        """Settle each key of a batch; return those whose segment is not where it was."""
        statuses, checksums = outcome.statuses, outcome.checksums
        sums = _NO_SUMS if checksums is None else checksums.view(np.int64)
        failed, expired = k.settle(index, statuses, sums, now, self.cols)
        self._expired += expired
        counters, lengths = self.core.counters, self.lengths
        if len(index) == 1:
            moved = int(lengths[index[0]])
        else:
            moved = int((lengths if len(index) == len(self.keys) else lengths[index]).sum())
        name = outcome.transport
        counters.bytes_read[name] = counters.bytes_read.get(name, 0) + moved
        if not failed:
            self.core.directory.worked(road)
            return None
        self._failed += failed
        self.core.directory.failed(road, now)
        bad = np.flatnonzero(statuses)
        for at, status in zip(index[bad].tolist(), statuses[bad].tolist(), strict=True):
            if status == ChecksumMismatchError.code:
                counters.checksum_failures += 1
                self._note(at, f"{road.label}: the checksum differs", status)
            else:
                error = transfer_error(status, operation="read", peer=road.label)
                self._note(at, f"{road.label}: {error.what}", status)
        gone: Column = index[statuses == NotFoundError.code]
        return gone if len(gone) else None

    def _lost(self, road: Road, index: Column, error: StoreError) -> Steps[None]:
        """A whole batch failed: prefer others for a while, or meet a restarted owner again."""
        core = self.core
        core.directory.failed(road, time.monotonic_ns())
        status = error.code
        if isinstance(error, NotFoundError):
            status = UnavailableError.code
        self._fail(index, status, f"{road.label}: {error.what}")
        moved_away = isinstance(error, NotFoundError | PeerLostError)
        if moved_away and road.number not in self._refreshed:
            self._refreshed.add(road.number)
            # A store that does not answer must not keep the other replicas from being tried.
            with suppress(StoreError):
                yield from learn_segments(core, {road.number}, self.until)
            if core.directory.get(road.number) not in (road, None):
                # Its owner is another process now: the same replica deserves another try.
                self.cols[k.TRIED, index] = 0

    def _fail(self, index: Column, status: int, what: str) -> None:
        self.cols[k.STATUS, index] = k.FAILED
        self._failed += len(index)
        for at in index.tolist():
            self._note(at, what, status)

    def _note(self, at: int, what: str, status: int) -> None:
        """Keep what was tried for a key. Its last failure gives the status, should all fail."""
        before = self._causes.get(at)
        self._causes[at] = (status, f"{before[1]}; {what}" if before else what)

    def _find_others(self, failed: Column) -> Steps[None]:
        """Give failed keys another replica; those planned from the lease table ask anew."""
        core, cols = self.core, self.cols
        core.counters.failovers += len(failed)
        out_of_time = time.monotonic() >= self.until
        stale = failed[cols[k.FIRST, failed] < 0]
        if len(stale):
            # Also when there is no time to ask: the next get must not follow the same plan.
            core.leases.drop(self.keys.words, stale, time.monotonic_ns())
        if len(stale) and not out_of_time:
            cols[k.STATUS, stale] = k.MISSING
            yield from self.find(stale)
            again = stale[cols[k.STATUS, stale] == k.FOUND]
            self._place(again)
            failed = failed[cols[k.STATUS, failed] == k.FAILED]
        if not out_of_time:
            self._choose(failed)
            yield from self._doubt(failed[cols[k.STATUS, failed] == k.FAILED])
        for at in failed[cols[k.STATUS, failed] == k.FAILED].tolist():
            status, tried = self._causes[at]
            if out_of_time:
                status = TransferTimeoutError.code
            cols[k.STATUS, at] = status
            self.errors[at] = f"tried {tried}"

    def _doubt(self, failed: Column) -> Steps[None]:
        """Find anew what differs from its checksum because its lease did not hold.

        A master that was started anew knows no lease of its former life, and gives the memory to
        others. Asked once a key: what still stands where it was read is damaged.
        """
        cols = self.cols
        code = ChecksumMismatchError.code
        differing = {at for at in failed.tolist() if self._causes[at][0] == code}
        index = np.array(sorted(differing - self._doubted), np.int64)
        if not len(index):
            return
        self._doubted.update(index.tolist())
        yield from self._ask_whether_unchanged(index)
        cols[k.STATUS, index[cols[k.STATUS, index] == 0]] = k.FAILED
        changed = index[cols[k.STATUS, index] == Status.LEASE_EXPIRED]
        if len(changed):
            cols[k.STATUS, changed] = k.MISSING
            yield from self.find(changed)
            self._place(changed[cols[k.STATUS, changed] == k.FOUND])

    # Checking.

    def _ask_whether_unchanged(self, index: Column) -> Steps[None]:
        """Ask whether objects read without a lease still are what and where they were.

        What is the same at a later time was not touched before it. Nothing is leased by this.
        """
        core, cols, keys = self.core, self.cols, self.keys
        core.counters.lease_renewals += len(index)
        split = parts(keys, index, core.shards, BATCH_MAX)
        calls = []
        for shard, some in split:
            body = GET.request.pack(ttl_ms=0, stop_at_miss=0, digests=keys.digests[some])
            calls.append((shard, GET, body))
        replies = yield from ask(calls, self.until)
        for (_, some), reply in zip(split, replies, strict=True):
            if isinstance(reply, StoreError):
                self._blame(some, reply.code, reply)
                continue
            places = cols[k.GENERATION, some], cols[k.SEGMENT, some], cols[k.OFFSET, some]
            same = still_there(reply, *places)
            cols[k.STATUS, some] = np.where(same, 0, Status.LEASE_EXPIRED)
            core.counters.leases_expired += int(len(some) - np.count_nonzero(same))

    def _blame(self, index: Column, status: int, error: StoreError) -> None:
        self.cols[k.STATUS, index] = status
        self.errors.update(dict.fromkeys(index.tolist(), error))


def half_of(until: float) -> float:
    """The middle of the time that is left."""
    now = time.monotonic()
    return now + max(0.0, until - now) / 2


def copied(road: Road) -> bool:
    """Whether a transfer is a copy of memory, which no silent owner can hold up."""
    return road.handle is not None and road.handle.transport in ("local", "shm")


def learn_segments(core: Core, numbers: set[int], until: float) -> Steps[None]:
    """Ask the cluster how to reach segments."""
    wanted = SegmentsRequest(tuple(sorted(numbers)))
    replies = yield from ask([(CLUSTER, SEGMENTS, SEGMENTS.request.pack(wanted))], until)
    core.directory.learn(numbers, replies[0].segments, time.monotonic_ns())


def _joined(one: Column, other: Column) -> Column:
    out: Column = np.concatenate((one, other))
    out.flags.writeable = False  # the one type the kernels are compiled for
    return out
