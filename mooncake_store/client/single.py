"""One whole object, read or put without the machinery of a batch: the same steps on plain numbers.

    get    lease table, or one request  ->  place  ->  copy and hash  ->  `verdict`
    put    one request  ->  copy and hash  ->  one request

Memory that this process shares with the owner is copied from, or to, in one kernel call; elsewhere
a batch of one is moved. Anything unusual is declined: a key that is not readable, or is not to be
written, several replicas to write, a segment that is new or failed lately, a buffer that is too
small, a failed transfer, a checksum that differs, a lease that ran out or was given back meanwhile.
`Reading` and `Putting` then do it all, from the answer if one came, with their retries, renewals
and errors; nothing of that is repeated here. What a read is worth is the one rule of
`kernels.reading.verdict` in both.

No I/O. Cost: at most one round trip for a get, two for a put.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.client.buffers import new_bytes
from mooncake_store.client.costs import Sample
from mooncake_store.client.failures import error_of
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.keys import Digests, label_of, name_of
from mooncake_store.client.reads import MARGIN_NS, Answer, half_of
from mooncake_store.client.requests import check_named
from mooncake_store.client.results import PutResult
from mooncake_store.client.steps import Move, Moves, ReshardedError, fetch
from mooncake_store.client.writes import StartedPut, attempt_until, patience_ms
from mooncake_store.core.records import Status, Tier
from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.wire.shard import (
    GET,
    PUT_END,
    PUT_END_SHOWN,
    PUT_START,
)
from mooncake_store.wire.single_key import (
    GET_ONE,
    PUT_END_ONE,
    PUT_END_SHOWN_ONE,
    PUT_STARTED_ONE,
    PUT_STARTED_SHOWN,
)
from transfer_engine.base import Operation as Direction
from transfer_engine.checksum import copy_one
from transfer_engine.outcome import BatchResult

if TYPE_CHECKING:
    from mooncake_store.client.core import Core
    from mooncake_store.client.directory import Target
    from mooncake_store.client.keys import Key
    from mooncake_store.client.leases import Found
    from mooncake_store.client.reads import Plan
    from mooncake_store.client.shown import Shown
    from mooncake_store.client.steps import Steps
    from mooncake_store.identity import Identity
    from mooncake_store.wire.single_key import PutOne
    from transfer_engine.segments.mapping import Mapping
    from transfer_engine.tagging import Tagging

__all__ = ["Single", "digest_of", "put_one", "read_one"]

_PAIR = struct.Struct("<qq")
_NOT_FOUND = (0, 0, 0, 0, 0, 0)
_ONE_ACCEPTED = 1 << 16
"""Status 0 and one replica, in the upper half of a PUT_ROW."""
_UNSIGNED = 0xFFFF_FFFF_FFFF_FFFF


class Single(NamedTuple):
    """`size` bytes were read, as a new object if that was asked for; -1: declined."""

    size: int
    value: bytes | None
    answer: Answer | None


_DECLINED = Single(-1, None, None)
_STORED = PutResult("stored", replicas=1)


def digest_of(key: Key, identity: Identity) -> bytes | None:
    """The digest of one key, or None for what is no single key."""
    if isinstance(key, str | bytes):
        return identity.digest(key)
    return key.words.tobytes() if isinstance(key, Digests) and len(key) == 1 else None


def read_one(
    core: Core, key: Key, plan: Plan, until: float, buffer: tuple[int, int, Any] | None
) -> Steps[Single]:
    """Read into (address, size, owner) of a buffer, or make a bytes object."""
    identity = core.identity
    digest = digest_of(key, identity)
    if digest is None:
        return _DECLINED
    low, high = _PAIR.unpack(digest)
    leases = core.leases
    epoch = leases.epoch
    shown = core.shown
    found: Found | Shown = _NOT_FOUND
    if plan.cached:
        enough = time.monotonic_ns() + MARGIN_NS
        if shown is None:
            found = leases.one(low, high, enough)
        else:
            found = shown.one_shown(low, high, enough)
    hit = found[0] != 0
    if not hit:
        ttl_ms = plan.ttl_ms if shown is None else core.ttl_to_ask_for(plan.ttl_ms)
        request = GET_ONE.request.pack(ttl_ms, 0, digest)
        sent = time.monotonic_ns()
        try:
            body = yield from fetch(core.shard_of(digest), GET, request, until)
        except ReshardedError:
            return _DECLINED
        check_named(core, identity)
        now, targets = time.monotonic_ns(), core.directory.targets
        fields, reply = GET_ONE.reply.match(body) if shown is None else None, None
        if fields is not None:
            found = leases.take_single(low, high, fields, sent, now, targets)
        elif shown is not None:
            turn = next(core.turns)
            found, reply = shown.take_shown(low, high, body, sent, now, targets, turn)
        else:
            reply = GET.reply.unpack(body)
            found = leases.take_one(low, high, reply, sent, now, targets, next(core.turns))
        if not found[0]:
            return Single(-1, None, Answer(reply or GET.reply.unpack(body), sent))
    size = found[1]
    value = None
    if buffer is None:
        value, address = new_bytes(size)
        buffer = address, size, value
    copied = yield from _read(core, found, plan, until, buffer)
    if copied and leases.epoch == epoch:
        counters = core.counters
        counters.keys += 1
        counters.lease_cache_hits += hit
        return Single(size, value, None)
    # A lease that was asked for is in the table; asking again would count it twice.
    return _DECLINED


def put_one(
    core: Core, key: Key, memory: tuple[int, int, Any], requests: PutOne, until: float
) -> Steps[PutResult | StartedPut | None]:
    """Put (address, size, owner) of memory as one replica; what was begun if that is declined."""
    identity = core.identity
    digest = digest_of(key, identity)
    if digest is None:
        return None
    size, shards = memory[1], core.shards
    request = requests.pack(digest, name_of(key), size, patience_ms(until), next(core.requests))
    try:
        body = yield from fetch(core.shard_of(digest), PUT_START, request, until)
    except ReshardedError:
        return None
    check_named(core, identity)
    shown = core.shown is not None
    fields, outcome = (PUT_STARTED_SHOWN if shown else PUT_STARTED_ONE).match(body), None
    if fields is not None and fields[0] >> 32 == _ONE_ACCEPTED:
        _, offset, segment, *right = fields
        outcome = yield from _write(core, segment & 0xFFFF_FFFF, offset, memory, until, right)
    if type(outcome) is not _Written:
        return StartedPut(PUT_START.reply.unpack(body), outcome)
    assert fields is not None
    ended, operation = PUT_END_ONE, PUT_END
    more: tuple[int, ...] = ()
    if shown:
        ended, operation = PUT_END_SHOWN_ONE, PUT_END_SHOWN
        more = outcome.receipt, outcome.tag
    request = ended.request.pack(digest, fields[0] & 0xFFFF_FFFF, outcome.sum64, *more)
    while True:
        try:
            answer = yield from fetch(core.shard_of(digest), operation, request, until)
        except ReshardedError:
            continue
        break
    (status,) = ended.reply.unpack(answer)
    if shown and status == Status.INVALID_WRITE:
        return StartedPut(PUT_START.reply.unpack(body), outcome.batch())
    if status == Status.NOT_FOUND and core.shards != shards:
        return None  # other shards than that which began it know nothing of it
    counters = core.counters
    counters.keys += 1
    name = outcome.transport
    counters.bytes_written[name] = counters.bytes_written.get(name, 0) + size
    if status == Status.SUPERSEDED:
        return PutResult("superseded")
    if status:
        error = error_of(status, key=label_of(key), operation="put")
        return PutResult("rejected", error=error)
    return _STORED


def _read(
    core: Core, found: Found | Shown, plan: Plan, until: float, buffer: tuple[int, int, Any]
) -> Steps[bool]:
    """Copy and judge; False for anything but bytes that are good."""
    end, size, wanted, _, segment, offset, *right = found
    content = right.pop() & _UNSIGNED if right else 0
    tagging = core.tagging if content and plan.verify else None
    summed = plan.verify and tagging is None
    target = _target(core, segment)
    if target is None or size > buffer[1]:
        return False
    try:
        memory = _memory(core, target, offset, size)
    except StoreError:
        return _failed(core, target)
    if memory is not None:
        sum64 = copy_one(memory.address + offset, buffer[0], size)
        tag = 0 if tagging is None else tagging.one(buffer[0], size)
        name = target.transport
    else:
        # What follows a failure tries other replicas, and needs time for that.
        place = buffer[0], size, buffer[2]
        times = [0.0, 0.0]
        under_way = target.pace.under_way
        beside, under_way[id(times)] = sum([*under_way.values()]) // 2, size
        try:
            outcome = yield from _move(
                target, Direction.READ, offset, place, summed, half_of(until), right, times, tagging
            )
        finally:
            under_way.pop(id(times), None)
        if isinstance(outcome, StoreError) or outcome.statuses[0]:
            return _failed(core, target)
        if times[1] > times[0]:
            sample = Sample(size + beside, 1, times[1] - times[0], times[1])
            target.pace.samples.append(sample)
        sum64 = int(outcome.checksums[0]) if summed else 0
        tag = 0 if tagging is None else int(outcome.tags[0])
        name = outcome.transport
    same = tag == content if tagging is not None else not summed or sum64 == wanted & _UNSIGNED
    mark, _ = k.verdict(0, same, end, time.monotonic_ns())
    if mark == k.FAILED:
        core.counters.checksum_failures += 1
        return _failed(core, target)
    if mark:
        return False
    read = core.counters.bytes_read
    read[name] = read.get(name, 0) + size
    core.counters.disk_reads += target.entry.tier == Tier.DISK
    return True


def _failed(core: Core, target: Target) -> bool:
    """Note what failed, so that what follows prefers another replica."""
    core.counters.failovers += 1
    core.directory.failed(target, time.monotonic_ns())
    return False


class _Written(NamedTuple):
    """Bytes that are where they belong."""

    sum64: int
    transport: str
    receipt: int = 0
    tag: int = 0

    def batch(self) -> BatchResult:
        """The same as what became of a batch of one."""
        sums, tags = np.array([[self.sum64], [self.tag]], np.uint64)
        receipts, statuses = np.array([self.receipt]), np.zeros(1, np.int32)
        return BatchResult(statuses, sums, self.transport, receipts=receipts, tags=tags)


def _write(
    core: Core,
    segment: int,
    offset: int,
    memory: tuple[int, int, Any],
    until: float,
    right: list[int],
) -> Steps[Any]:
    """Write one replica; return None if that was not tried, and the outcome if it failed."""
    target, (address, size, _) = _target(core, segment), memory
    if target is None:
        return None
    try:
        shared = _memory(core, target, offset, size)
    except StoreError as error:
        return error.again()
    if shared is None:
        # What follows a failure tries other segments, and needs time for that.
        limit = attempt_until(until, size)
        outcome = yield from _move(
            target, Direction.WRITE, offset, memory, True, limit, right, tagging=core.tagging
        )
        if isinstance(outcome, StoreError) or outcome.statuses[0]:
            return outcome
        receipt = 0 if outcome.receipts is None else int(outcome.receipts[0])
        tag = 0 if outcome.tags is None else int(outcome.tags[0])
        return _Written(int(outcome.checksums[0]), outcome.transport, receipt, tag)
    if not shared.writable:
        return None
    tag = 0 if core.tagging is None else core.tagging.one(address, size)
    sum64 = copy_one(address, shared.address + offset, size)
    return _Written(sum64, target.transport, tag=tag)


def _target(core: Core, segment: int) -> Target | None:
    """How a segment is reached, if it was reached before and never failed since."""
    target = core.directory.known.get(segment)
    return None if target is None or target.handle is None or target.failures else target


def _memory(core: Core, target: Target, offset: int, size: int) -> Mapping | None:
    """The memory that this process shares with the owner; None where bytes are to be moved."""
    assert target.handle is not None
    memory = target.handle.memory() if size <= core.inline_bytes_max else None
    if memory is not None and not 0 <= offset <= memory.bytes - size:
        raise InvalidArgumentError(f"[{offset}, + {size}) is outside of {target.label}")
    return memory


def _move(
    target: Target,
    direction: Direction,
    offset: int,
    memory: tuple[int, int, Any],
    checksum: bool,
    until: float,
    right: list[int],
    times: list[float] | None = None,
    tagging: Tagging | None = None,
) -> Steps[Any]:
    """Move a batch of one; return its outcome. `right`: tag and stamp, or nothing."""
    address, size, owner = memory
    offsets, lengths, addresses = np.array([[offset], [size], [address]], np.int64)
    rights = np.array([right], np.int64) if right and right[1] else None
    columns = offsets, lengths, addresses
    move = Move(target, direction, *columns, checksum, owner, times, rights, tagging)
    (outcome,) = yield Moves([move], until)
    return outcome
