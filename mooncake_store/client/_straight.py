"""One whole object, read without the machinery of a batch: the same steps on plain numbers.

    lease table, or one request  ->  place  ->  copy and hash  ->  `verdict`

Memory that this process shares with the owner is copied from in one kernel call; elsewhere a
batch of one is moved. Anything unusual is declined: a key that is not readable, a segment that is
new or failed lately, a buffer that is too small, a failed transfer, a checksum that differs, a
lease that ran out or was given back meanwhile. `Reading` then does it all, from the answer if one
came, with its retries, renewals and errors; nothing of that is repeated here. What a transfer is
worth is the one rule of `_kernels.verdict` in both.

No I/O. Cost: at most one round trip.
"""

from __future__ import annotations

import struct
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store import ids
from mooncake_store.client import _kernels as k
from mooncake_store.client._buffers import new_bytes
from mooncake_store.client._keys import Digests
from mooncake_store.client._reads import MARGIN_NS, Answer, half_of
from mooncake_store.client._steps import Move, Moves, ask
from mooncake_store.errors import StoreError
from mooncake_store.wire.shard import GET
from transfer_engine.base import Operation as Direction
from transfer_engine.checksum import copy_one

if TYPE_CHECKING:
    from mooncake_store.client._core import Core
    from mooncake_store.client._directory import Road
    from mooncake_store.client._keys import Key
    from mooncake_store.client._leases import Found
    from mooncake_store.client._reads import Plan
    from mooncake_store.client._steps import Steps

__all__ = ["Single", "digest_of", "read_one"]

_PAIR = struct.Struct("<qq")
_WORDS = np.dtype(np.uint64)
_NOT_FOUND = (0, 0, 0, 0, 0, 0)
_UNSIGNED = 0xFFFF_FFFF_FFFF_FFFF


class Single(NamedTuple):
    """`size` bytes were read, as a new object if that was asked for; -1: declined."""

    size: int
    value: bytes | None
    answer: Answer | None


_DECLINED = Single(-1, None, None)


def digest_of(key: Key, namespace: str) -> bytes | None:
    """The digest of one key, or None for what is no single key."""
    if isinstance(key, str | bytes):
        return ids.digest(key, namespace)
    return key.words.tobytes() if isinstance(key, Digests) and len(key) == 1 else None


def read_one(
    core: Core, key: Key, plan: Plan, until: float, buffer: tuple[int, int, Any] | None
) -> Steps[Single]:
    """Read into (address, size, owner) of a buffer, or make a bytes object."""
    digest = digest_of(key, core.namespace)
    if digest is None:
        return _DECLINED
    low, high = _PAIR.unpack(digest)
    leases, answer = core.leases, None
    epoch = leases.epoch
    found: Found = _NOT_FOUND
    if plan.cached:
        found = leases.one(low, high, time.monotonic_ns() + MARGIN_NS)
    if not found[0]:
        digests = np.ndarray((1, 2), _WORDS, digest)
        body = GET.request.pack(ttl_ms=plan.ttl_ms, stop_at_miss=0, digests=digests)
        shard = 0 if core.shards == 1 else ids.shard_of_one(digest, core.shards)
        sent = time.monotonic_ns()
        replies = yield from ask([(shard, GET, body)], until)
        answer = Answer(replies[0], sent)
        now, roads = time.monotonic_ns(), core.directory.roads
        found = leases.take_one(low, high, replies[0], sent, now, roads, core.turn())
        if not found[0]:
            return Single(-1, None, answer)
    size = found[1]
    value = None
    if buffer is None:
        value, address = new_bytes(size)
        buffer = address, size, value
    copied = yield from _copy(core, found, plan, until, buffer)
    if copied and leases.epoch == epoch:
        counters = core.counters
        counters.keys += 1
        counters.lease_cache_hits += answer is None
        return Single(size, value, None)
    # A lease that was asked for is in the table; asking again would count it twice.
    return _DECLINED


def _copy(
    core: Core, found: Found, plan: Plan, until: float, buffer: tuple[int, int, Any]
) -> Steps[bool]:
    """Copy and judge; False for anything but bytes that are good."""
    end, size, wanted, _, segment, offset = found
    road = core.directory.get(segment)
    if road is None or road.handle is None or road.failures or size > buffer[1]:
        return False
    memory = None
    if size <= core.inline_bytes_max:
        try:
            memory = road.handle.memory()
        except StoreError:
            return _failed(core, road)
    if memory is not None:
        if offset < 0 or size > memory.bytes or offset > memory.bytes - size:
            return False
        sum64 = copy_one(memory.address + offset, buffer[0], size)
        name = road.handle.transport
    else:
        column = np.array([[offset], [size], [buffer[0]]], np.int64)
        offsets, lengths, addresses = column
        move = Move(road, Direction.READ, offsets, lengths, addresses, plan.verify, buffer[2])
        # What follows a failure tries other replicas, and needs time for that.
        (outcome,) = yield Moves([move], half_of(until))
        if isinstance(outcome, StoreError) or outcome.statuses[0]:
            return _failed(core, road)
        sum64 = int(outcome.checksums[0]) if plan.verify else 0
        name = outcome.transport
    same = not plan.verify or sum64 == wanted & _UNSIGNED
    mark, _ = k.verdict(0, same, end, time.monotonic_ns())
    if mark == k.FAILED:
        core.counters.checksum_failures += 1
        return _failed(core, road)
    if mark:
        return False
    read = core.counters.bytes_read
    read[name] = read.get(name, 0) + size
    return True


def _failed(core: Core, road: Road) -> bool:
    """Note what failed, so that what follows prefers another replica."""
    core.counters.failovers += 1
    core.directory.failed(road, time.monotonic_ns())
    return False
