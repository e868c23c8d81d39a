"""The service of one shard: requests in columns, one core call each, replies in columns.

    service = ShardService(Shard(config), ShardPlace(0, 1), times, clock)
    server = Server(SHARD, service.handle)
    service.start()

What every client does all day (put, get, exists, ...) is answered at once, without a task: views
of the request go into the core, and arrays of the core become the reply. Only a put that found no
space, and a follower of events that has seen all, wait (`pending`). What is rare is in
`shard_rare`. A tick every 10 ms does a bounded share of the core's duties; the next one is
scheduled when it is done, so ticks never pile up behind a long request.

A connection speaks for one client and one tenant, named by its first request; replica offsets
leave here relative to the whole segment, while the core counts within its slice.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store import ids
from mooncake_store.core.records import Status
from mooncake_store.master.bodies import names_of, options_of, words
from mooncake_store.master.clients import Clients, Peer
from mooncake_store.master.pending import EventQueue, Put, PutQueue
from mooncake_store.master.shard_rare import RareOperations
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire import shard as wire
from mooncake_store.wire.shard import PutFlag
from transfer_engine.errors import (
    AuthError,
    InvalidArgumentError,
    RemoteProtocolError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from numpy.typing import NDArray

    from mooncake_store.clock import Clock
    from mooncake_store.core.shard import Shard
    from transfer_engine.rpc.serving import Connection, Reply
    from transfer_engine.wire.frame import Frame

__all__ = ["ShardPlace", "ShardService", "ShardTimes"]

log = logging.getLogger(__name__)

TICK_S = 0.010
IDLE_TICK_S = 0.050
# The reply must be on its way before the caller's deadline, or what it grants is lost: a tenth of
# the time the caller gives, between these, because a busy machine delays long waits as well.
REPLY_MARGIN_MS = (20, 500)

_PUT, _PUT_REPLY = wire.PUT_START.request, wire.PUT_START.reply
_END, _STATUSES = wire.PUT_END.request, wire.PUT_END.reply
_REVOKE, _RELEASE = wire.PUT_REVOKE.request, wire.RELEASE.request
_GET, _GET_REPLY = wire.GET.request, wire.GET.reply
_EXISTS, _EXISTS_REPLY = wire.EXISTS.request, wire.EXISTS.reply
_PREFIX, _PREFIX_REPLY = wire.FIND_PREFIX.request, wire.FIND_PREFIX.reply
_RENEW, _RENEW_REPLY = wire.RENEW.request, wire.RENEW.reply
_CHANGES = frozenset(
    operation.opcode
    for operation in (
        wire.PUT_START, wire.PUT_END, wire.PUT_REVOKE, wire.REMOVE, wire.RENAME, wire.PIN,
        wire.REMOVE_MATCHING, wire.REMOVE_REPLICAS, wire.SUBMIT_TASK, wire.FETCH_TASKS,
        wire.FINISH_TASK,
    )
)  # fmt: skip
_EVENTS, _EVENTS_REPLY = wire.EVENTS.request, wire.EVENTS.reply


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Which slice of the key space a shard serves: number `shard` of `shards`."""

    shard: int = 0
    shards: int = 1


@dataclass(frozen=True, slots=True)
class ShardTimes:
    """Durations that the service needs and the core does not know, in ns."""

    lease_ttl_ns: int
    lease_ttl_max_ns: int
    client_ttl_ns: int


class ShardService:
    """Answers the requests of one shard; belongs to one event loop."""

    def __init__(self, shard: Shard, place: ShardPlace, times: ShardTimes, clock: Clock) -> None:
        self.shard = shard
        self.place = place
        self.times = times
        self.clock = clock
        self.now: Callable[[], int] = clock.now_ns
        self.clients = Clients(shard, times.client_ttl_ns)
        self.bases = np.zeros(shard.config.segments_max, np.int64)
        self.requests = 0
        self.keys = 0
        # Event numbers begin anew with every life of a shard; this tells the lives apart.
        self.stream = secrets.randbits(64)
        self.failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._seen = 0  # requests up to the last tick
        self._shifted = False
        self._stopped = False
        self._puts = PutQueue(shard, self.now)
        self._followers = EventQueue()
        self._timer: asyncio.TimerHandle | None = None
        self._handlers = self._table()

    def _table(self) -> dict[int, Callable[[Peer, Frame], Reply | Awaitable[Reply]]]:
        rare = RareOperations(self)
        return {
            wire.PUT_START.opcode: self._put_start,
            wire.PUT_END.opcode: self._put_end,
            wire.PUT_REVOKE.opcode: self._put_revoke,
            wire.GET.opcode: self._get,
            wire.EXISTS.opcode: self._exists,
            wire.FIND_PREFIX.opcode: self._find_prefix,
            wire.RENEW.opcode: self._renew,
            wire.RELEASE.opcode: self._release,
            wire.EVENTS.opcode: self._events,
            **rare.table(),
        }

    # -- life

    def start(self) -> None:
        """Begin to tick."""
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def stop(self) -> None:
        """Tick no more and let nobody wait any longer. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._puts.give_up()
        self._followers.give_up()

    def _tick(self) -> None:
        now = self.now()
        try:
            self.shard.tick(now)
            self._puts.retry(now)
            self.clients.expire(now)
            if not self._followers.empty:
                self._followers.wake(self.next_event())
        except Exception as error:
            # A broken invariant: whoever started this shard has to end it, loudly.
            log.exception("shard %d failed", self.place.shard)
            if not self.failure.done():
                self.failure.set_exception(error)
            return
        # Nobody notices that a shard which nobody uses expires things a little later.
        idle = self.requests == self._seen and self._puts.empty and self._followers.empty
        self._seen = self.requests
        delay_s = IDLE_TICK_S if idle else TICK_S
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def place_slice(self, number: int, base: int) -> None:
        """Note where in its segment the slice begins that the core calls `number`."""
        self.bases[number] = base
        self._shifted = bool(self.bases.any())

    def in_segments(self, replicas: NDArray[Any]) -> NDArray[Any]:
        """Turn offsets within slices into offsets within segments, in place."""
        if self._shifted:
            replicas["offset"] += self.bases[replicas["segment"]]
        return replicas

    def next_event(self) -> int:
        """Return the number the next event will have."""
        return self.shard.event_snapshot(0, 0)[2]

    # -- requests

    def handle(self, connection: Connection, frame: Frame) -> Reply | Awaitable[Reply]:
        """Answer one request."""
        self.requests += 1
        peer = connection.context
        if peer is None:
            return self._open(connection, frame)
        if peer.read_only and frame.opcode in _CHANGES:
            raise _refused(frame)
        handler = self._handlers.get(frame.opcode)
        if handler is None:
            raise RemoteProtocolError(
                "this connection is open already",
                advice="open another connection to speak for another client or namespace",
            )
        return handler(peer, frame)

    def _open(self, connection: Connection, frame: Frame) -> bytes:
        if frame.opcode != wire.OPEN.opcode:
            raise RemoteProtocolError(
                "the first request on a connection must be open",
                advice="send open with uuid, epoch, host and namespace",
            )
        request = wire.OPEN.request.unpack(frame.body)
        if len(request.uuid) != 16:
            raise InvalidArgumentError(f"a client uuid has 16 bytes, not {len(request.uuid)}")
        now = self.now()
        run = self.clients.enroll(now, request.uuid, request.epoch, request.host)
        tenant = self.shard.tenant(request.namespace or "default")
        if tenant < 0:
            raise UnavailableError(
                "the shard knows too many namespaces", advice="use one that it knows"
            )
        self.clients.connect(run, connection)
        connection.context = Peer(run, run.handle, tenant, connection.session.read_only)
        connection.on_close(lambda: self.clients.disconnect(self.now(), run, connection))
        return wire.OPEN.reply.pack(
            wire.Opened(
                self.place.shard,
                self.place.shards,
                self.times.lease_ttl_ns // MILLISECOND_NS,
                self.times.lease_ttl_max_ns // MILLISECOND_NS,
                wire.BATCH_MAX,
            )
        )

    def _put_start(self, peer: Peer, frame: Frame) -> Reply | Awaitable[Reply]:
        request = _PUT.unpack(frame.body)
        self.keys += len(request.digests)
        self.check_routing(request.digests)
        put = Put(
            peer.handle,
            peer.tenant,
            request.digests,
            request.sizes,
            names_of(request.names),
            options_of(request),
            bool(request.flags & PutFlag.UPSERT),
        )
        rows, replicas = put.run(self.shard, self.now())
        wait_ms = request.wait_ms
        patient = wait_ms and not self._puts.full and not self._stopped
        # With one replica each there are as many as accepted keys: nobody has to look.
        refused = len(replicas) < len(rows) or put.options.replicas > 1
        if refused and patient and (rows["status"] == Status.NO_SPACE).any():
            if frame.deadline_ms:
                wait_ms = min(wait_ms, _wait_max_ms(frame.deadline_ms))
            return self._wait_for_space(put, rows, replicas, wait_ms)
        return self._put_reply(rows, replicas)

    async def _wait_for_space(
        self, put: Put, rows: NDArray[Any], replicas: NDArray[Any], wait_ms: int
    ) -> bytes:
        rows, replicas = await self._puts.wait(put, rows, replicas, wait_ms * MILLISECOND_NS)
        return self._put_reply(rows, replicas)

    def _put_reply(self, rows: NDArray[Any], replicas: NDArray[Any]) -> bytes:
        placed = words(self.in_segments(replicas))
        return _PUT_REPLY.pack(rows=rows.view(np.uint64), replicas=placed)

    def check_routing(self, digests: NDArray[np.uint64]) -> None:
        """Refuse keys of other shards: an object here would be found by nobody."""
        if self.place.shards > 1:
            shards = ids.shard_of(digests, self.place.shards)
            if (shards != self.place.shard).any():
                raise RemoteProtocolError(
                    f"a key of shard {int(shards[shards != self.place.shard][0])} came to shard "
                    f"{self.place.shard} of {self.place.shards}",
                    advice="ask the master for its map again",
                )

    def _put_end(self, peer: Peer, frame: Frame) -> bytes:
        digests, generations, checksums = _END.unpack(frame.body)
        self.keys += len(digests)
        return _STATUSES.pack(
            statuses=self.shard.put_end(self.now(), peer.handle, digests, generations, checksums)
        )

    def _put_revoke(self, peer: Peer, frame: Frame) -> bytes:
        late, digests, generations = _REVOKE.unpack(frame.body)
        self.keys += len(digests)
        return _STATUSES.pack(
            statuses=self.shard.put_revoke(
                self.now(), peer.handle, digests, generations, late=bool(late)
            )
        )

    def _get(self, peer: Peer, frame: Frame) -> bytes:
        ttl_ms, stop_at_miss, digests = _GET.unpack(frame.body)
        self.keys += len(digests)
        rows, replicas = self.shard.get(
            self.now(), peer.handle, digests, self._lease_ns(ttl_ms), bool(stop_at_miss)
        )
        return _GET_REPLY.pack(rows=words(rows), replicas=words(self.in_segments(replicas)))

    def _lease_ns(self, ttl_ms: int) -> int:
        if ttl_ms == wire.TTL_DEFAULT:
            return self.times.lease_ttl_ns
        return ttl_ms * MILLISECOND_NS

    def _exists(self, peer: Peer, frame: Frame) -> bytes:
        (digests,) = _EXISTS.unpack(frame.body)
        self.keys += len(digests)
        return _EXISTS_REPLY.pack(present=self.shard.exists(self.now(), digests).view(np.uint8))

    def _find_prefix(self, peer: Peer, frame: Frame) -> bytes:
        (digests,) = _PREFIX.unpack(frame.body)
        self.keys += len(digests)
        return _PREFIX_REPLY.pack(length=self.shard.find_prefix(self.now(), digests))

    def _renew(self, peer: Peer, frame: Frame) -> bytes:
        ttl_ms, digests, generations = _RENEW.unpack(frame.body)
        self.keys += len(digests)
        statuses, remaining = self.shard.renew(
            self.now(), peer.handle, digests, generations, self._lease_ns(ttl_ms)
        )
        return _RENEW_REPLY.pack(statuses=statuses, remaining_ns=remaining)

    def _release(self, peer: Peer, frame: Frame) -> bytes:
        digests, generations = _RELEASE.unpack(frame.body)
        self.keys += len(digests)
        return _STATUSES.pack(
            statuses=self.shard.release(self.now(), peer.handle, digests, generations)
        )

    def _events(self, peer: Peer, frame: Frame) -> bytes | Awaitable[bytes]:
        stream, number, limit, wait_ms = _EVENTS.unpack(frame.body)
        limit, following = min(limit, wire.BATCH_MAX), self.next_event()
        # Nobody knows what lies between here and a number of another life, or one that never was.
        lost = stream != self.stream or number > following
        first, events, gap = self.shard.events_since(following if lost else number, limit)
        gap |= lost
        patient = wait_ms and limit and not self._followers.full and not self._stopped
        if len(events) or gap or not patient:
            return _EVENTS_REPLY.pack(first=first, gap=gap, events=words(events))
        if frame.deadline_ms:
            wait_ms = min(wait_ms, _wait_max_ms(frame.deadline_ms))
        return self._wait_for_events(following, limit, wait_ms)

    async def _wait_for_events(self, number: int, limit: int, wait_ms: int) -> bytes:
        await self._followers.wait(number, wait_ms / 1000)
        first, events, gap = self.shard.events_since(number, limit)
        return _EVENTS_REPLY.pack(first=first, gap=gap, events=words(events))


def _refused(frame: Frame) -> AuthError:
    """Say what a read-only credential does not allow, and of which key it was asked."""
    operation = wire.SHARD.by_opcode[frame.opcode]
    request = operation.request.unpack(frame.body)
    names, digests = getattr(request, "names", None), getattr(request, "digests", None)
    key: str | None = None
    if names is not None and len(names.blob):
        key = bytes(names.blob[: int(names.offsets[1])]).decode(errors="backslashreplace")
    elif digests is not None and len(digests):
        key = ids.hex(digests[0])
    return AuthError(
        "the credential is read-only",
        key=key,
        operation=operation.name,
        advice="connect with the shared secret itself to change objects",
    )


def _wait_max_ms(deadline_ms: int) -> int:
    """How long a request may wait here so that its reply comes before the caller's deadline."""
    least, most = REPLY_MARGIN_MS
    return max(0, deadline_ms - max(least, min(most, deadline_ms // 10)))
