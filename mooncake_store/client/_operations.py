"""Every operation of the client, written once as steps; `Client` and `AsyncClient` drive them.

Arguments are checked here, requests made and answers turned into results. Reading and writing of
bytes is in `_reads.py` and `_writes.py`. No I/O. Single operations are batches of one that raise.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.client import _kernels as k
from mooncake_store.client._arguments import count_of, flag_of
from mooncake_store.client._buffers import Buffers, Memory, locate, locate_one
from mooncake_store.client._core import (
    CallOptions,
    Core,
    PutOptions,
    ReadOptions,
    check_options,
    every,
    parts,
)
from mooncake_store.client._keys import Digests, Key, KeyBatch, Keys
from mooncake_store.client._pieces import PiecePutting, PieceReading, Pieces
from mooncake_store.client._queries import query
from mooncake_store.client._reads import BytesSink, MemorySink, Plan, Reading
from mooncake_store.client._renames import rename_many
from mooncake_store.client._steps import Steps, ask, fetch
from mooncake_store.client._straight import digest_of, put_one, read_one
from mooncake_store.client._writes import Begun, Putting, Wishes
from mooncake_store.client.results import (
    BatchResult,
    GetResult,
    ObjectInfo,
    PutManyResult,
    PutResult,
    QueryResult,
)
from mooncake_store.core.options import SoftPin
from mooncake_store.core.records import REPLICAS_REMOVED_MAX
from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.units import parse_duration
from mooncake_store.wire.shard import (
    BATCH_MAX,
    EXISTS,
    EXISTS_ONE,
    FIND_PREFIX,
    PIN,
    RELEASE,
    REMOVE,
    REMOVE_REPLICAS,
    PutOne,
    RemoveFlag,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client._reads import Answer, Sink

    Column = NDArray[np.int64]

__all__ = ["Operations"]


class Operations:
    """The operations of one client as steps."""

    def __init__(self, core: Core) -> None:
        self.core = core
        config = core.config
        # What a get without options asks for.
        self._plan = Plan(core.ttl_ms, config.verify, config.lease_cache)
        # What a put without options asks for.
        self._requests = PutOne(**Wishes(core, {}, 1).fields())

    # Puts.

    def put(self, key: Key, value: Any, options: PutOptions) -> Steps[PutResult]:
        """Put one object; raises what a batch would report."""
        core, started = self.core, time.monotonic()
        until = core.until(options)
        address, nbytes = locate_one(value, writable=False)
        outcome: PutResult | Begun | None = None
        if not options and core.config.replicas == 1:
            place = address, nbytes, value
            outcome = yield from put_one(core, key, place, self._requests, until)
        if not isinstance(outcome, PutResult):
            keys = KeyBatch.single(key, core.namespace)
            memory = Memory(np.array([address], np.int64), np.array([nbytes], np.int64), value)
            outcome = (yield from self._put(keys, memory, options, until, outcome))[0]
        if outcome.error is not None:
            outcome.error.elapsed_s = time.monotonic() - started
            raise outcome.error.again()
        return outcome

    def put_many(self, keys: Keys, values: Buffers, options: PutOptions) -> Steps[PutManyResult]:
        """Put a batch."""
        batch = KeyBatch.of(keys, self.core.seed)
        memory: Memory | Pieces
        if isinstance(values, Pieces):
            memory = values
        else:
            memory = locate(values, len(batch), writable=False)
        return (yield from self._put(batch, memory, options, self.core.until(options)))

    def _put(
        self,
        keys: KeyBatch,
        memory: Memory | Pieces,
        options: PutOptions,
        until: float,
        begun: Begun | None = None,
    ) -> Steps[PutManyResult]:
        if options:
            check_options(options, PutOptions)
        wishes = Wishes(self.core, options, len(keys))
        putting: Putting
        if isinstance(memory, Pieces):
            putting = PiecePutting(self.core, keys, memory, wishes, until)
        else:
            putting = Putting(self.core, keys, memory, wishes, until)
        putting.begun = begun
        yield from putting.steps()
        return PutManyResult(keys, putting.statuses(), putting.errors, putting.written)

    # Gets.

    def get(self, key: Key, options: ReadOptions) -> Steps[bytes]:
        """Read one object."""
        answer = None
        if not options:
            until = self.core.until(options)
            _, got, answer = yield from read_one(self.core, key, self._plan, until, None)
            if got is not None:
                return got
        sink = BytesSink(1)
        yield from self._one(key, sink, options, 0, None, answer)
        value = sink.values[0]
        assert isinstance(value, bytes)
        return value

    def get_range(
        self, key: Key, offset: int, length: int | None, options: ReadOptions
    ) -> Steps[bytes]:
        """Read a range of one object."""
        sink = BytesSink(1)
        yield from self._one(key, sink, options, offset, length)
        value = sink.values[0]
        assert isinstance(value, bytes)
        return value

    def get_memory(self, key: Key, options: ReadOptions) -> Steps[NDArray[np.uint8]]:
        """Read one object into new writable memory, 64-byte aligned."""
        sink = _ArenaSink(1)
        yield from self._one(key, sink, options, 0, None)
        return sink.array()

    def get_into(
        self, key: Key, buffer: Any, offset: int, length: int | None, options: ReadOptions
    ) -> Steps[int]:
        """Read one object, or a range of it, into a buffer; return the bytes filled."""
        address, nbytes = locate_one(buffer, writable=True)
        answer = None
        if not options and length is None and type(offset) is int and offset == 0:
            until, place = self.core.until(options), (address, nbytes, buffer)
            size, _, answer = yield from read_one(self.core, key, self._plan, until, place)
            if size >= 0:
                return size
        memory = Memory(np.array([address], np.int64), np.array([nbytes], np.int64), buffer)
        sink = MemorySink(memory)
        reading = yield from self._one(key, sink, options, offset, length, answer)
        return int(reading.lengths[0])

    def _one(
        self,
        key: Key,
        sink: Sink,
        options: ReadOptions,
        offset: int,
        length: int | None,
        answer: Answer | None = None,
    ) -> Steps[Reading]:
        started = time.monotonic() if answer is None else answer.sent / 1e9
        keys = KeyBatch.single(key, self.core.namespace)
        reading = self.reading(keys, sink, options, offset, length)
        reading.answer = answer
        yield from reading.steps()
        if reading.cols[k.STATUS, 0]:
            try:
                reading.raise_error()
            except StoreError as error:
                error.elapsed_s = time.monotonic() - started
                raise
        return reading

    def plan(
        self,
        options: ReadOptions,
        offset: int = 0,
        length: int | None = None,
        *,
        cached: bool = True,
    ) -> Plan:
        """What a read with these options asks for."""
        core = self.core
        offset = count_of(offset, "offset")
        if not options and not offset and length is None and cached:
            return self._plan
        if options:
            check_options(options, ReadOptions)
        length = None if length is None else count_of(length, "length")
        if offset < 0 or (length is not None and length < 1):
            raise InvalidArgumentError(f"no object has a range [{offset}, + {length})")
        return Plan(
            core.lease_ms(options),
            options.get("verify", core.config.verify),
            cached and core.config.lease_cache,
            offset,
            length,
        )

    def reading(
        self,
        keys: KeyBatch,
        sink: Sink,
        options: ReadOptions,
        offset: int = 0,
        length: int | None = None,
        *,
        cached: bool = True,
    ) -> Reading:
        """A read with its options."""
        plan = self.plan(options, offset, length, cached=cached)
        return Reading(self.core, keys, sink, plan, self.core.until(options))

    def get_many(self, keys: Keys, copy: bool, options: ReadOptions) -> Steps[GetResult]:
        """Read a batch into new bytes objects, or memoryviews of one arena without `copy`."""
        batch = KeyBatch.of(keys, self.core.seed)
        sink = BytesSink(len(batch)) if flag_of(copy, "copy") else _ArenaSink(len(batch))
        return (yield from self._many(batch, sink, options, sink.values))

    def get_many_into_sink(self, keys: Keys, sink: Sink, options: ReadOptions) -> Steps[GetResult]:
        """Read a batch into whatever memory a sink makes for it."""
        batch = KeyBatch.of(keys, self.core.seed)
        return (yield from self._many(batch, sink, options, []))

    def get_into_many(self, keys: Keys, buffers: Buffers, options: ReadOptions) -> Steps[GetResult]:
        """Read a batch into buffers of the caller."""
        batch = KeyBatch.of(keys, self.core.seed)
        if isinstance(buffers, Pieces):
            plan, until = self.plan(options), self.core.until(options)
            reading = PieceReading(self.core, batch, buffers, plan, until)
            return (yield from self._result(batch, reading, []))
        memory = locate(buffers, len(batch), writable=True)
        return (yield from self._many(batch, MemorySink(memory), options, []))

    def _many(
        self,
        keys: KeyBatch,
        sink: Sink,
        options: ReadOptions,
        values: list[bytes | memoryview | None],
    ) -> Steps[GetResult]:
        return (yield from self._result(keys, self.reading(keys, sink, options), values))

    def _result(
        self, keys: KeyBatch, reading: Reading, values: list[bytes | memoryview | None]
    ) -> Steps[GetResult]:
        yield from reading.steps()
        statuses, sizes = reading.statuses(), reading.cols[k.SIZE]
        if statuses.any():
            sizes = np.where(statuses == 0, sizes, 0)
            if values:
                for at in np.flatnonzero(statuses).tolist():
                    values[at] = None  # what it holds was not checked
        return GetResult("get", keys, statuses, reading.errors, sizes, values)

    # Leases.

    def lease_many(self, keys: Keys, cached: bool, options: ReadOptions) -> Steps[GetResult]:
        """Find and lease a batch without reading it."""
        reading = yield from self._lease(keys, cached, options)
        statuses = reading.statuses()
        sizes = np.where(statuses == 0, reading.cols[k.SIZE], 0)
        return GetResult("lease", reading.keys, statuses, reading.errors, sizes, [])

    def lease_with_generations(
        self, keys: Keys, options: ReadOptions
    ) -> Steps[tuple[BatchResult, Column]]:
        """The same, and which generation of each object it is."""
        reading = yield from self._lease(keys, False, options)
        result = BatchResult("lease", reading.keys, reading.statuses(), reading.errors)
        return result, reading.cols[k.GENERATION]

    def _lease(self, keys: Keys, cached: bool, options: ReadOptions) -> Steps[Reading]:
        batch = KeyBatch.of(keys, self.core.seed)
        reading = self.reading(batch, BytesSink(0), options, cached=cached)
        yield from reading.locate()
        status = reading.cols[k.STATUS]
        status[status == k.FOUND] = 0
        return reading

    def release_many(self, keys: Keys, options: CallOptions) -> Steps[None]:
        """Give leases of ours back, as often as they were granted."""
        if options:
            check_options(options, CallOptions)
        batch = KeyBatch.of(keys, self.core.seed)
        index = np.flatnonzero(batch.statuses() == 0)
        calls: list[tuple[int, Any, bytes]] = []
        for shard, some in parts(batch, index, self.core.shards, BATCH_MAX) if len(index) else ():
            body = self._release(batch, some)
            if body is not None:
                calls.append((shard, RELEASE, body))
        if calls:
            yield from ask(calls, self.core.until(options))

    # Probes.

    def exists(self, key: Key, options: CallOptions) -> Steps[bool]:
        """Whether one object can be read now."""
        # The smallest operation there is: columns of one would cost more than the question.
        core = self.core
        if options:
            check_options(options, CallOptions)
        core.counters.keys += 1
        digest = digest_of(key, core.namespace)
        if digest is None:
            digest = KeyBatch.single(key, core.namespace).digests.tobytes()
        shard, request = core.shard_of_one(digest), EXISTS_ONE.request.pack(digest)
        body = yield from fetch(shard, EXISTS, request, core.until(options))
        return bool(EXISTS_ONE.reply.unpack(body)[0])

    def exists_many(self, keys: Keys, options: CallOptions) -> Steps[NDArray[np.bool_]]:
        """Which objects can be read now."""
        return (yield from self._exists(KeyBatch.of(keys, self.core.seed), options))

    def _exists(self, keys: KeyBatch, options: CallOptions) -> Steps[NDArray[np.bool_]]:
        core, n = self.core, len(keys)
        if options:
            check_options(options, CallOptions)
        core.counters.keys += n
        if core.shards == 1 and 0 < n <= BATCH_MAX:
            split = [(0, every(n))]
            calls = [(0, EXISTS, EXISTS.request.pack(digests=keys.digests))]
        else:
            split = parts(keys, every(n), core.shards, BATCH_MAX) if n else []
            calls = [
                (shard, EXISTS, EXISTS.request.pack(digests=keys.digests[some]))
                for shard, some in split
            ]
        replies = yield from ask(calls, core.until(options))
        out: NDArray[np.bool_]
        if len(calls) == 1 and not keys.refused:
            out = replies[0].present.astype(np.bool_)
            return out
        out = np.zeros(n, np.bool_)
        for (_, some), reply in zip(split, replies, strict=True):
            if isinstance(reply, StoreError):
                raise reply.again()  # a probe has no way to say "unknown"
            out[some] = reply.present.view(np.bool_)
        if keys.refused:
            out[keys.refused] = False
        return out

    def find_prefix(self, keys: Keys, options: CallOptions) -> Steps[int]:
        """Length of the leading run of objects that can be read now."""
        core = self.core
        batch = KeyBatch.of(keys, core.seed)
        if core.shards > 1 or len(batch) > BATCH_MAX or batch.refused or not len(batch):
            there = yield from self._exists(batch, options)
            return len(there) if there.all() else int(there.argmin())
        if options:
            check_options(options, CallOptions)
        core.counters.keys += len(batch)
        body = FIND_PREFIX.request.pack(digests=batch.digests)
        replies = yield from ask([(0, FIND_PREFIX, body)], core.until(options))
        return int(replies[0].length)

    def query(self, key: Key, options: CallOptions) -> Steps[ObjectInfo]:
        """Size, checksum, generation and replicas of one object, without a lease."""
        keys = KeyBatch.single(key, self.core.namespace)
        result = yield from self._query(keys, options)
        result.check()
        info = result.infos[0]
        assert info is not None
        return info

    def query_many(self, keys: Keys, options: CallOptions) -> Steps[QueryResult]:
        """The same of a batch."""
        return (yield from self._query(KeyBatch.of(keys, self.core.seed), options))

    def _query(self, keys: KeyBatch, options: CallOptions) -> Steps[QueryResult]:
        if options:
            check_options(options, CallOptions)
        return (yield from query(self.core, keys, self.core.until(options)))

    # Removal and pins.

    def remove(self, key: Key, force: bool, options: CallOptions) -> Steps[None]:
        """Remove one object."""
        keys = KeyBatch.single(key, self.core.namespace)
        result = yield from self._remove(keys, force, options)
        result.check()

    def remove_many(self, keys: Keys, force: bool, options: CallOptions) -> Steps[BatchResult]:
        """Remove a batch."""
        return (yield from self._remove(KeyBatch.of(keys, self.core.seed), force, options))

    def _remove(self, keys: KeyBatch, force: bool, options: CallOptions) -> Steps[BatchResult]:
        core = self.core
        if options:
            check_options(options, CallOptions)
        return (
            yield from self._change(
                "remove",
                keys,
                REMOVE,
                {"flags": RemoveFlag.FORCE if flag_of(force, "force") else 0},
                core.until(options),
                give_back=True,
            )
        )

    def remove_replicas(self, keys: Keys, segment: int, options: CallOptions) -> Steps[BatchResult]:
        """Remove what lies on one segment of a batch."""
        batch = KeyBatch.of(keys, self.core.seed)
        return (
            yield from self._change(
                "remove_replicas",
                batch,
                REMOVE_REPLICAS,
                {"segment": segment, "flags": 0},
                self.core.until(options),
                give_back=True,
                keys_max=REPLICAS_REMOVED_MAX,
            )
        )

    def rename(
        self, key: Key, target: Key, overwrite: bool, force: bool, options: CallOptions
    ) -> Steps[None]:
        """Rename one object."""
        for each in (key, target):
            KeyBatch.single(each, self.core.namespace)  # what is no key is refused here
        one, other = (each if isinstance(each, Digests) else [each] for each in (key, target))
        result = yield from self.rename_many(one, other, overwrite, force, options)
        result.check()

    def rename_many(
        self, keys: Keys, targets: Keys, overwrite: bool, force: bool, options: CallOptions
    ) -> Steps[BatchResult]:
        """Rename a batch."""
        if options:
            check_options(options, CallOptions)
        until = self.core.until(options)
        return (yield from rename_many(self, keys, targets, overwrite, force, until))

    def give_back(self, keys: KeyBatch, index: Column) -> tuple[Any, bytes] | None:
        """Forget leases of ours; the request that gives them back, if there are any."""
        body = self._release(keys, index)
        return None if body is None else (RELEASE, body)

    def pin(
        self,
        keys: KeyBatch,
        soft: bool | None,
        hard: bool | None,
        ttl: float | str | None,
        options: CallOptions,
    ) -> Steps[BatchResult]:
        """Change the pins of a batch."""
        if options:
            check_options(options, CallOptions)
        if soft is None and hard is None:
            raise InvalidArgumentError("pin changes soft, hard or both: name one")
        scalars = {
            "soft_pin": SoftPin.PRESERVE
            if soft is None
            else SoftPin.ENABLE
            if flag_of(soft, "soft")
            else SoftPin.DISABLE,
            "hard_pin": -1 if hard is None else flag_of(hard, "hard"),
            "ttl_ms": -1 if ttl is None else int(parse_duration(ttl) * 1000),
        }
        return (yield from self._change("pin", keys, PIN, scalars, self.core.until(options)))

    def _change(
        self,
        name: str,
        keys: KeyBatch,
        operation: Any,
        scalars: dict[str, int],
        until: float,
        *,
        give_back: bool = False,
        keys_max: int = BATCH_MAX,
    ) -> Steps[BatchResult]:
        """Send digests, get statuses; leases of ours are given back first if asked for."""
        core = self.core
        core.counters.keys += len(keys)
        index = np.flatnonzero(keys.statuses() == 0) if keys.refused else every(len(keys))
        split = parts(keys, index, core.shards, keys_max) if len(index) else []
        calls = []
        positions: list[Column | None] = []
        for shard, some in split:
            if give_back:
                release = self._release(keys, some)
                if release is not None:
                    calls.append((shard, RELEASE, release))
                    positions.append(None)
            for part, own in (
                self._own_leases(keys, some, scalars) if give_back else [(some, scalars)]
            ):
                digests = keys.digests if len(part) == len(keys) else keys.digests[part]
                calls.append((shard, operation, operation.request.pack(digests=digests, **own)))
                positions.append(part)
        replies = yield from ask(calls, until)
        if len(calls) == 1 and len(replies[0].statuses) == len(keys):
            return BatchResult(name, keys, replies[0].statuses)
        statuses = keys.statuses()
        errors: dict[int, StoreError | str] = {}
        for position, reply in zip(positions, replies, strict=True):
            if position is None:
                continue
            if isinstance(reply, StoreError):
                statuses[position] = reply.code
                errors.update(dict.fromkeys(position.tolist(), reply))
            else:
                statuses[position] = reply.statuses
        return BatchResult(name, keys, statuses, errors)

    def _own_leases(
        self, keys: KeyBatch, index: Column, scalars: dict[str, int]
    ) -> list[tuple[Column, dict[str, int]]]:
        """Split by whether leases of ours are in the way: only those of views are."""
        own = scalars | {"flags": scalars["flags"] | RemoveFlag.OWN_LEASES}
        viewed = self.core.leases.viewed(keys.words[index])
        if viewed is None:
            return [(index, own)]
        split = [(index[~viewed], own), (index[viewed], scalars)]
        return [(part, these) for part, these in split if len(part)]

    def _release(self, keys: KeyBatch, index: Column) -> bytes | None:
        """Forget leases of ours; return the request that gives them back, if there are any."""
        forgotten = self.core.leases.forget(keys.words, index, time.monotonic_ns())
        if forgotten is None:
            return None
        generations, counts = forgotten
        # One entry each time the lease was granted: the last one back ends it.
        repeated = np.repeat(index, counts)[:BATCH_MAX]
        return RELEASE.request.pack(
            digests=keys.digests[repeated],
            generations=np.repeat(generations, counts)[:BATCH_MAX].astype(np.uint32),
        )


class _ArenaSink:
    """Puts all objects of a batch into one buffer, 64-byte aligned, and shows them as views."""

    def __init__(self, count: int) -> None:
        self.values: list[bytes | memoryview | None] = [None] * count
        self._arenas: list[NDArray[np.uint8]] = []
        self._last = (0, 0)

    def array(self) -> NDArray[np.uint8]:
        """The memory of the last object placed."""
        start, length = self._last
        return self._arenas[-1][start : start + length]

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Make room for these keys, in an arena of their own."""
        spaced = (lengths + 63) & ~63
        ends = np.cumsum(spaced)
        arena = np.empty(int(ends[-1]) + 64, np.uint8)
        base = int(arena.__array_interface__["data"][0])
        starts = ends - spaced + (-base & 63)
        addresses[index] = base + starts
        self._last = (int(starts[-1]), int(lengths[-1]))
        view = memoryview(arena.data).toreadonly()
        for at, start, length in zip(
            index.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            self.values[at] = view[start : start + length]
        self._arenas.append(arena)
        return None

    @property
    def keep(self) -> object:
        """The arenas."""
        return self._arenas
