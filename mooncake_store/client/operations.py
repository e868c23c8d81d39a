"""Every operation of the client, written once as steps; `Client` and `AsyncClient` drive them.

Arguments are checked here, requests made and answers turned into results. Reading and writing of
bytes is in `reads.py` and `writes.py`. No I/O. Single operations are batches of one that raise.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mooncake_store import ids
from mooncake_store.client.arguments import count_of, flag_of
from mooncake_store.client.buffers import Buffers, Memory, locate
from mooncake_store.client.core import CallOptions, Core, PutOptions, ReadOptions
from mooncake_store.client.failures import NOT_RENAMED
from mooncake_store.client.hints import hint
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.keys import Key, KeyBatch, Keys
from mooncake_store.client.pieces import PiecePutting, PieceReading, Pieces
from mooncake_store.client.queries import query, read_costs
from mooncake_store.client.reads import Plan, Reading
from mooncake_store.client.requests import KeyRequests, check_named
from mooncake_store.client.results import (
    BatchResult,
    GetResult,
    HintResult,
    ObjectInfo,
    PutManyResult,
    PutResult,
    QueryResult,
    ReadCosts,
)
from mooncake_store.client.sessions import PutSession, Writing, session_of
from mooncake_store.client.single import digest_of, put_one, read_one
from mooncake_store.client.sinks import ArenaSink, BytesSink, MemorySink
from mooncake_store.client.steps import ReshardedError, Steps, fetch
from mooncake_store.client.views import Viewing
from mooncake_store.client.writes import PutFields, Putting, StartedPut
from mooncake_store.core.options import SoftPin
from mooncake_store.core.records import RENAMES_MAX, REPLICAS_REMOVED_MAX
from mooncake_store.errors import AlreadyExistsError, InvalidArgumentError, StoreError
from mooncake_store.units import parse_duration
from mooncake_store.wire.shard import (
    BATCH_MAX,
    EXISTS,
    FIND_PREFIX,
    PIN,
    REMOVE,
    REMOVE_REPLICAS,
    RENAME,
    RemoveFlag,
)
from mooncake_store.wire.single_key import EXISTS_ONE, PutOne
from transfer_engine.checksum import address_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mooncake_store.client.reads import Answer
    from mooncake_store.client.sinks import Sink

    Column = NDArray[np.int64]

__all__ = ["Operations"]

T = TypeVar("T")


class Operations:
    """The operations of one client as steps."""

    def __init__(self, core: Core) -> None:
        self.core = core
        config = core.config
        # What a get without options asks for.
        self._plan = Plan(core.ttl_ms, config.verify, config.lease_cache)
        # What a put without options asks for.
        self._fields = PutFields(core, {}, 1)
        self._requests = PutOne(**self._fields.request)

    # Puts.

    def put(self, key: Key, value: Any, options: PutOptions) -> Steps[PutResult]:
        """Put one object; raises what a batch would report."""
        core, began = self.core, time.monotonic()
        until = core.until(options, PutOptions)
        address, nbytes = address_of(value, writable=False)
        outcome: PutResult | StartedPut | None = None
        if not options and core.config.replicas == 1:
            place = address, nbytes, value
            outcome = yield from put_one(core, key, place, self._requests, until)
        if not isinstance(outcome, PutResult):
            keys = KeyBatch.single(key, core.identity)
            memory = Memory(np.array([address], np.int64), np.array([nbytes], np.int64), value)
            fields = PutFields(core, options, 1) if options else self._fields
            putting = Putting(core, keys, memory, fields, until)
            putting.started = outcome
            outcome = (yield from putting.steps())[0]
        if outcome.error is not None:
            outcome.error.elapsed_s = time.monotonic() - began
            raise outcome.error.again()
        return outcome

    def put_many(self, keys: Keys, values: Buffers, options: PutOptions) -> Steps[PutManyResult]:
        """Put a batch."""
        core, until = self.core, self.core.until(options, PutOptions)
        batch = KeyBatch.of(keys, core.identity)
        fields = self._fields if not options else PutFields(core, options, len(batch.digests))
        if isinstance(values, Pieces):
            return PiecePutting.of(core, batch, values, fields, until).steps()
        memory = locate(values, len(batch.digests), writable=False)
        return Putting(core, batch, memory, fields, until).steps()

    def put_described(
        self, key: Key, header: bytes, elements: Any, options: PutOptions
    ) -> Steps[PutResult]:
        """Put what `tensors` made of one: two ranges, so that the elements are not copied first."""
        until = self.core.until(options, PutOptions)
        nbytes = address_of(elements, writable=False)[1]
        writing = self.writing(key, len(header) + nbytes, options)
        try:
            yield from writing.begin()
        except AlreadyExistsError:
            return PutResult("already_present")
        try:
            yield from writing.write(0, header, until)
            yield from writing.write(len(header), elements, until)
            return (yield from writing.commit(until))
        except StoreError:
            yield from writing.revoke()
            raise

    def writing(self, key: Key, size: int, options: PutOptions) -> Writing:
        """A put of one object that is written range by range."""
        until = self.core.until(options, PutOptions)
        return Writing(self.core, KeyBatch.single(key, self.core.identity), size, options, until)

    def put_session(self, keys: Keys, sizes: Column, options: PutOptions) -> PutSession:
        """Puts of a batch that are written range by range."""
        until = self.core.until(options, PutOptions)
        return session_of(self.core, KeyBatch.of(keys, self.core.identity), sizes, options, until)

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
        yield from self._one(key, sink, options, answer=answer)
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
        sink = ArenaSink(1)
        yield from self._one(key, sink, options)
        return sink.array()

    def get_decoded(
        self, key: Key, decode: Callable[[NDArray[np.uint8]], T], options: ReadOptions
    ) -> Steps[T]:
        """Read one object and return what `decode` makes of its bytes."""
        return decode((yield from self.get_memory(key, options)))

    def view(self, key: Key, options: ReadOptions) -> Viewing:
        """A view of one object, whose lease lasts for the deadline unless `ttl` is given."""
        core, until = self.core, self.core.until(options, ReadOptions)
        ttl_ms = core.lease_ms(options) if "ttl" in options else 0
        verify = options.get("verify", core.config.verify)
        keys = KeyBatch.single(key, core.identity)
        return Viewing(core, keys, ttl_ms, verify, until, core.ready_by(options))

    def get_into(
        self, key: Key, buffer: Any, offset: int, length: int | None, options: ReadOptions
    ) -> Steps[int]:
        """Read one object, or a range of it, into a buffer; return the bytes filled."""
        address, nbytes = address_of(buffer, writable=True)
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
        offset: int = 0,
        length: int | None = None,
        answer: Answer | None = None,
    ) -> Steps[Reading]:
        began = time.monotonic() if answer is None else answer.sent / 1e9
        keys = KeyBatch.single(key, self.core.identity)
        reading = self._reading(keys, sink, options, offset, length)
        reading.answer = answer
        result = yield from reading.steps()
        if not result.ok:
            try:
                result.check()
            except StoreError as error:
                error.elapsed_s = time.monotonic() - began
                raise
        return reading

    def _reading(
        self,
        keys: KeyBatch,
        sink: Sink,
        options: ReadOptions,
        offset: int = 0,
        length: int | None = None,
    ) -> Reading:
        """A read of keys into a sink."""
        until = self.core.until(options, ReadOptions)
        usual = not options and length is None and type(offset) is int and not offset
        plan = self._plan if usual else self._plan_of(options, offset, length)
        return Reading(self.core, keys, sink, plan, until)

    def _plan_of(
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
        length = None if length is None else count_of(length, "length")
        if offset < 0 or (length is not None and length < 1):
            raise InvalidArgumentError(f"no object has a range [{offset}, + {length})")
        return Plan(
            core.lease_ms(options),
            options.get("verify", core.config.verify),
            cached and core.config.lease_cache,
            offset,
            length,
            ready_by=core.ready_by(options),
        )

    def get_many(self, keys: Keys, copy: bool, options: ReadOptions) -> Steps[GetResult]:
        """Read a batch into new bytes objects, or memoryviews of one arena without `copy`."""
        batch = KeyBatch.of(keys, self.core.identity)
        kind = BytesSink if copy is True or flag_of(copy, "copy") else ArenaSink
        sink = kind(len(batch.digests))
        plan = self._plan_of(options) if options else self._plan
        until = self.core.until(options, ReadOptions)
        return Reading(self.core, batch, sink, plan, until).steps(sink.values)

    def get_many_to(self, keys: Keys, sink: Sink, options: ReadOptions) -> Steps[GetResult]:
        """Read a batch into whatever memory a sink makes for it."""
        return self._reading(KeyBatch.of(keys, self.core.identity), sink, options).steps()

    def get_into_many(self, keys: Keys, buffers: Buffers, options: ReadOptions) -> Steps[GetResult]:
        """Read a batch into buffers of the caller."""
        batch = KeyBatch.of(keys, self.core.identity)
        if isinstance(buffers, Pieces):
            until = self.core.until(options, ReadOptions)
            plan = self._plan_of(options)
            return PieceReading(self.core, batch, buffers, plan, until).steps()
        memory = locate(buffers, len(batch.digests), writable=True)
        return self._reading(batch, MemorySink(memory), options).steps()

    def get_ranges(self, keys: Keys, pieces: Pieces) -> Steps[tuple[GetResult, Column]]:
        """Read ranges of a batch; also which generation of each object was read."""
        batch = KeyBatch.of(keys, self.core.identity)
        plan = replace(self._plan, verify=False, cached=True)
        reading = PieceReading(self.core, batch, pieces, plan, self.core.until({}))
        return (yield from reading.steps()), reading.cols[k.GENERATION]

    # Leases.

    def lease_many(self, keys: Keys, cached: bool, options: ReadOptions) -> Steps[GetResult]:
        """Find and lease a batch without reading it."""
        return (yield from self._lease(keys, cached, options)).result()

    def lease_with_generations(
        self, keys: Keys, options: ReadOptions
    ) -> Steps[tuple[GetResult, Column]]:
        """Find and lease a batch, and say which generation of each object it is."""
        reading = yield from self._lease(keys, False, options)
        return reading.result(), reading.cols[k.GENERATION]

    def _lease(self, keys: Keys, cached: bool, options: ReadOptions) -> Steps[Reading]:
        if "worth" in options:
            raise InvalidArgumentError("worth is of reads: a lease moves nothing")
        batch = KeyBatch.of(keys, self.core.identity)
        until = self.core.until(options, ReadOptions)
        plan = replace(self._plan_of(options, cached=cached), operation="lease")
        reading = Reading(self.core, batch, BytesSink(0), plan, until)
        missing = reading.look_up()
        if len(missing):
            yield from reading.find(missing)
        reading.status[reading.status == k.FOUND] = 0
        return reading

    def release_many(self, keys: Keys, options: CallOptions) -> Steps[None]:
        """Give leases of ours back, as often as they were granted."""
        asked = self._over(keys, options)
        yield from asked.tell(asked.release(asked.good()))

    def _over(self, keys: Keys, options: CallOptions) -> KeyRequests:
        batch = KeyBatch.of(keys, self.core.identity)
        return KeyRequests(self.core, batch, self.core.until(options))

    # Probes.

    def exists(self, key: Key, options: CallOptions) -> Steps[bool]:
        """Whether one object can be read now."""
        # The smallest operation there is: columns of one would cost more than the question.
        core = self.core
        until = core.until(options)
        core.counters.keys += 1
        identity = core.identity
        digest = digest_of(key, identity)
        if digest is None:
            digest = KeyBatch.single(key, identity).digests.tobytes()
        request = EXISTS_ONE.request.pack(digest)
        while True:
            try:
                body = yield from fetch(core.shard_of(digest), EXISTS, request, until)
            except ReshardedError:
                continue
            break
        check_named(core, identity)
        return bool(EXISTS_ONE.reply.unpack(body)[0])

    def exists_many(self, keys: Keys, options: CallOptions) -> Steps[NDArray[np.bool_]]:
        """Which objects can be read now."""
        return self._exists(self._over(keys, options))

    def _exists(self, asked: KeyRequests) -> Steps[NDArray[np.bool_]]:
        out = np.zeros(len(asked.status), np.bool_)
        self.core.counters.keys += len(out)
        requests = asked.requests(EXISTS, asked.good(), {"digests": asked.keys.digests})
        for some, reply in (yield from asked.ask(requests)):
            out[some] = reply.present.view(np.bool_)
        for error in asked.errors.values():
            assert isinstance(error, StoreError)
            raise error.again()  # a probe has no way to say "unknown"
        return out

    def find_prefix(self, keys: Keys, options: CallOptions) -> Steps[int]:
        """Length of the leading run of objects that can be read now."""
        asked = self._over(keys, options)
        index = asked.good()
        if self.core.shards > 1 or not 0 < len(index) == len(asked.status) <= BATCH_MAX:
            there = yield from self._exists(asked)
            return len(there) if there.all() else int(there.argmin())
        self.core.counters.keys += len(index)
        requests = asked.requests(FIND_PREFIX, index, {"digests": asked.keys.digests})
        ((_, reply),) = yield from asked.ask(requests)
        return int(reply.length)

    def query(self, key: Key, options: CallOptions) -> Steps[ObjectInfo]:
        """Size, checksum, generation and replicas of one object, without a lease."""
        keys, until = KeyBatch.single(key, self.core.identity), self.core.until(options)
        result = yield from query(KeyRequests(self.core, keys, until))
        info = result.check().infos[0]
        assert info is not None
        return info

    def query_many(self, keys: Keys, options: CallOptions) -> Steps[QueryResult]:
        """Size, checksum, generation and replicas of a batch."""
        return query(self._over(keys, options))

    def read_cost(self, keys: Keys, options: CallOptions) -> Steps[ReadCosts]:
        """What reads of a batch would take."""
        batch = KeyBatch.of(keys, self.core.identity)
        return read_costs(self.core, batch, self.core.until(options))

    # Removal and pins.

    def remove(self, key: Key, force: bool, options: CallOptions) -> Steps[None]:
        """Remove one object."""
        keys = KeyBatch.single(key, self.core.identity)
        result = yield from self._remove(keys, force, options)
        result.check()

    def remove_many(self, keys: Keys, force: bool, options: CallOptions) -> Steps[BatchResult]:
        """Remove a batch."""
        return self._remove(KeyBatch.of(keys, self.core.identity), force, options)

    def _remove(self, keys: KeyBatch, force: bool, options: CallOptions) -> Steps[BatchResult]:
        flags = RemoveFlag.FORCE if flag_of(force, "force") else 0
        return self._without_leases(REMOVE, keys, {"flags": flags}, options)

    def remove_replicas(self, keys: Keys, segment: int, options: CallOptions) -> Steps[BatchResult]:
        """Remove what lies on one segment of a batch."""
        batch, fields = KeyBatch.of(keys, self.core.identity), {"segment": segment, "flags": 0}
        return self._without_leases(REMOVE_REPLICAS, batch, fields, options, REPLICAS_REMOVED_MAX)

    def _without_leases(
        self,
        operation: Any,
        keys: KeyBatch,
        fields: dict[str, Any],
        options: CallOptions,
        keys_max: int = BATCH_MAX,
    ) -> Steps[BatchResult]:
        """Change what leases of this client shall not protect: they are given back first."""
        asked = KeyRequests(self.core, keys, self.core.until(options))
        self.core.counters.keys += len(asked.status)
        index, fields = asked.good(), {"digests": keys.digests} | fields
        first = asked.release(index)
        own = fields | {"flags": fields["flags"] | RemoveFlag.OWN_LEASES}
        viewed = self.core.leases.viewed(keys.words[index])
        if viewed is None:
            requests = asked.requests(operation, index, own, keys_max)
        else:  # what is shown to somebody is in the way all the same
            requests = asked.requests(operation, index[~viewed], own, keys_max)
            requests += asked.requests(operation, index[viewed], fields, keys_max)
        return (yield from asked.change(operation.name, requests, first))

    def rename(
        self, key: Key, target: Key, overwrite: bool, force: bool, options: CallOptions
    ) -> Steps[None]:
        """Rename one object."""
        old, new = (KeyBatch.single(each, self.core.identity) for each in (key, target))
        asked = KeyRequests(self.core, old, self.core.until(options))
        (yield from self._rename(asked, new, overwrite, force)).check()

    def rename_many(
        self, keys: Keys, targets: Keys, overwrite: bool, force: bool, options: CallOptions
    ) -> Steps[BatchResult]:
        """Rename a batch."""
        new = KeyBatch.of(targets, self.core.identity)
        return self._rename(self._over(keys, options), new, overwrite, force)

    def _rename(
        self, asked: KeyRequests, new: KeyBatch, overwrite: bool, force: bool
    ) -> Steps[BatchResult]:
        """Change keys within the master; no byte moves.

        Where the keys of a pair belong to different shards a rename would be a change in two
        places, with a crash between them: such pairs are refused with NOT_RENAMED, and whoever
        wants to goes on by copying. Pairs of one shard take effect in order.
        """
        core, old, status = asked.core, asked.keys, asked.status
        if len(old) != len(new):
            raise InvalidArgumentError(f"{len(old)} keys and {len(new)} new ones")
        core.counters.keys += len(old)
        np.minimum(status, new.statuses(), out=status)
        if core.shards > 1:
            here, there = (ids.shard_of(keys.digests, core.shards) for keys in (old, new))
            status[(here != there) & (status == 0)] = NOT_RENAMED
        flags = RemoveFlag.FORCE if flag_of(force, "force") else 0

        def flags_of(some: NDArray[np.int64]) -> int:
            shown = any(core.leases.viewed(batch.words[some]) is not None for batch in (old, new))
            return flags if shown else flags | RemoveFlag.OWN_LEASES

        fields = {
            "overwrite": flag_of(overwrite, "overwrite"),
            "flags": flags_of,
            "sources": old.digests,
            "targets": new.digests,
            "names": new.names,
        }
        index = np.flatnonzero(status == 0)
        first = asked.release(index) + KeyRequests(core, new, asked.until).release(index)
        requests = asked.requests(RENAME, index, fields, RENAMES_MAX)
        return (yield from asked.change("rename", requests, first))

    def pin(
        self,
        key: Key,
        soft: bool | None,
        hard: bool | None,
        ttl: float | str | None,
        options: CallOptions,
    ) -> Steps[None]:
        """Change the pins of one object."""
        keys, until = KeyBatch.single(key, self.core.identity), self.core.until(options)
        (yield from self._pin(KeyRequests(self.core, keys, until), soft, hard, ttl)).check()

    def pin_many(
        self,
        keys: Keys,
        soft: bool | None,
        hard: bool | None,
        ttl: float | str | None,
        options: CallOptions,
    ) -> Steps[BatchResult]:
        """Change the pins of a batch."""
        return self._pin(self._over(keys, options), soft, hard, ttl)

    def _pin(
        self, asked: KeyRequests, soft: bool | None, hard: bool | None, ttl: float | str | None
    ) -> Steps[BatchResult]:
        if soft is None and hard is None:
            raise InvalidArgumentError("pin changes soft, hard or both: name one")
        soft_pin = SoftPin.PRESERVE
        if soft is not None:
            soft_pin = SoftPin.ENABLE if flag_of(soft, "soft") else SoftPin.DISABLE
        fields = {
            "soft_pin": soft_pin,
            "hard_pin": -1 if hard is None else flag_of(hard, "hard"),
            "ttl_ms": -1 if ttl is None else int(parse_duration(ttl) * 1000),
            "digests": asked.keys.digests,
        }
        self.core.counters.keys += len(asked.status)
        return asked.change("pin", asked.requests(PIN, asked.good(), fields))

    def hint(
        self,
        keys: Keys,
        action: str,
        ttl: float | str | None,
        priority: int | None,
        options: CallOptions,
    ) -> Steps[HintResult]:
        """Give a hint about a batch."""
        return hint(self._over(keys, options), action, ttl, priority)
