"""Segments behind a TCP port: one message per batch, bytes straight between memory and socket.

Connections are pooled per owner and used by one batch at a time; a batch takes an idle one or,
up to a bound, makes one. A connection that failed, timed out or was cancelled is closed, never
reused: what is still on its way in it belongs to nobody. An owner that restarts is another one, so
nobody would come back to the connections of the former: whenever an owner is met for the first
time, idle connections that their owner has ended are closed, and pools without any are dropped.

A batch that failed on a *pooled* connection is sent once more on a fresh one: the owner may have
dropped the idle connection, or restarted. That is safe for reads. For a write it is too: it puts
the same bytes in the same place, under the same fence, and its owner has closed the first
connection when this side sees it end. A timeout is never retried: the deadline has passed.

Cost: about 10 us of Python a batch on top of the kernel's work.
"""

from __future__ import annotations

import threading
import time
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from msgspec.structs import replace

from transfer_engine import forking
from transfer_engine.base import (
    CANCELLED,
    Batch,
    Operation,
    RemoteSegment,
    SingleRequest,
    Transport,
    Way,
    error_of,
    remaining_s,
)
from transfer_engine.checksum import checksum_ranges
from transfer_engine.errors import (
    InvalidArgumentError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
)
from transfer_engine.kernels import stream
from transfer_engine.kernels.moving import PLAIN_COLUMNS, SHOWN_COLUMNS
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.networks import Networks
from transfer_engine.segments.mapping import host_identity
from transfer_engine.transports.calling import call
from transfer_engine.transports.copying import hash_local
from transfer_engine.transports.dialing import dial
from transfer_engine.transports.stream import (
    COUNT_MAX,
    DATA_BYTES_MAX,
    READ,
    READ_SHOWN,
    REPLY,
    REPLY_BODY_BYTES,
    REQUEST,
    REQUEST_AT,
    REQUEST_BODY_BYTES,
    WRITE,
    WRITE_SHOWN,
    Link,
    check_header,
    padded,
)
from transfer_engine.wire.faults import ERROR_BYTES_MAX, decode_error
from transfer_engine.wire.frame import ERROR, MAGIC, VERSION
from transfer_engine.wire.frame import REPLY as REPLY_FLAG
from transfer_engine.wire.keyring import tls_of
from transfer_engine.wire.records import load_sealing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transfer_engine.base import SegmentDescriptor, SingleOutcome
    from transfer_engine.rpc.networks import Objection
    from transfer_engine.wire.keyring import Secret

    # An owner: host, port, instance, and whether it says that it runs on this host.
    Key = tuple[str, int, bytes, bool]

__all__ = ["TcpTransport"]

_OPCODES = {Operation.READ: READ, Operation.WRITE: WRITE}
_SHOWN_OPCODES = {Operation.READ: READ_SHOWN, Operation.WRITE: WRITE_SHOWN}
# What is hashed as a whole once it came: it is in the cache.
_HASHED_MAX = stream.WINDOW_BYTES


class _Pool:
    """The connections to one owner: idle ones on a stack, a bound on all of them."""

    def __init__(
        self,
        descriptor: SegmentDescriptor,
        secret: Secret | None,
        connections_max: int,
        objection: Objection,
    ) -> None:
        self.address = (descriptor.tcp_host, descriptor.tcp_port)
        self.instance = descriptor.instance
        self.name = f"{self.address[0]}:{self.address[1]}"
        self._secret = secret
        self._objection = objection
        self._idle: list[Link] = []
        self._open: set[Link] = set()
        self._count = 0
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting = 0
        self._closed = False
        self._dropped = False

    def acquire(self, deadline: float, *, fresh: bool = False) -> tuple[Link, bool] | None:
        """Return a connection of this thread's own, and whether it was used before.

        None when the pool was dropped: the transport has, or makes, another.
        """
        with self._changed:
            while not self._closed:
                if self._dropped:
                    return None
                link = self.take()
                if link is not None:
                    if not fresh:
                        return link, True
                    self._discard(link)
                if self._count < self._connections_max:
                    self._count += 1
                    break
                self._waiting += 1
                try:
                    woken = self._changed.wait(remaining_s(deadline, "connect", self.name))
                finally:
                    self._waiting -= 1
                if not woken:
                    raise TransferTimeoutError(
                        f"all {self._connections_max} connections were busy", peer=self.name
                    )
            else:
                raise PeerLostError("the transport was closed", peer=self.name)
        try:
            link, _ = dial(
                self.address,
                self.instance,
                secret=self._secret,
                deadline=deadline,
                objection=self._objection,
            )
        except BaseException:
            with self._changed:
                self._count -= 1
                self._changed.notify()
            raise
        self._admit(link)
        return link, False

    def take(self) -> Link | None:
        """Return an idle connection, if there is one.

        Takes no lock: of two that ask, one gets it. So this alone takes connections off the stack.
        """
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def _admit(self, link: Link) -> None:
        """Count a new connection in, unless the transport was closed meanwhile."""
        with self._changed:
            self._open.add(link)
            if self._closed:
                self._discard(link)
                raise PeerLostError("the transport was closed", peer=self.name)

    def release(self, link: Link) -> None:
        """Give back a connection that is in step."""
        with self._lock:
            if self._closed:
                self._discard(link)
                return
            self._idle.append(link)
            if self._waiting:
                self._changed.notify()

    def discard(self, link: Link) -> None:
        """Close a connection that is not; what it has not sent must not arrive later."""
        link.reset()
        with self._changed:
            self._discard(link)

    def _discard(self, link: Link) -> None:
        link.close()
        self._open.discard(link)
        self._count -= 1
        self._changed.notify()

    def drop(self) -> bool:
        """Close idle connections that the owner has ended; whether that leaves none at all.

        Nobody can get a connection here then.
        """
        with self._changed:
            for _ in range(len(self._idle)):
                link = self.take()
                if link is None:
                    break
                if link.idle:
                    self._idle.append(link)
                else:
                    self._discard(link)
            self._dropped = not self._count and not self._waiting
            return self._dropped

    def close(self) -> None:
        """End every connection, busy ones as well."""
        with self._changed:
            self._closed = True
            for link in self._open:
                link.abort()
            while (idle := self.take()) is not None:
                self._discard(idle)
            self._changed.notify_all()

    def forget(self) -> None:
        """In a forked child: close the copies of the parent's sockets."""
        for link in self._open:
            link.close()


class TcpSegment(RemoteSegment):
    """A segment reached through the connections of a pool."""

    __slots__ = ("key", "number", "words")

    def __init__(self, descriptor: SegmentDescriptor) -> None:
        super().__init__(descriptor)
        low, high = np.frombuffer(descriptor.uuid, dtype=np.int64).tolist()
        self.words: tuple[int, int] = (low, high)
        near = descriptor.host == host_identity()
        self.key: Key = (descriptor.tcp_host, descriptor.tcp_port, descriptor.instance, near)
        self.number = 0


class TcpTransport(Transport):
    """Moves batches over pooled connections."""

    name: ClassVar[str] = "tcp"
    cost: ClassVar[int] = 30

    def __init__(
        self,
        *,
        secret: Secret | None = None,
        networks: Networks | None = None,
        connections_max: int = 16,
    ) -> None:
        if tls_of(secret) is not None:
            load_sealing()
        self._secret = secret
        self._networks = networks or Networks()
        self._connections_max = connections_max
        # The first words of the reply to a batch that succeeds, but for its number.
        self._expected = {
            opcode: np.frombuffer(
                bytearray(
                    REPLY.pack(MAGIC, VERSION, REPLY_FLAG, opcode, REPLY_BODY_BYTES, 0, 0, 0, 0)
                ),
                dtype=np.int64,
            )
            for opcode in (READ, WRITE, READ_SHOWN, WRITE_SHOWN)
        }
        self._lock = threading.Lock()
        self._pools: dict[Key, _Pool] = {}
        self._closed = False
        forking.register(self)

    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """Every segment whose owner listens where this process may connect to."""
        if self.name not in descriptor.transports:
            return "the owner does not listen on TCP"
        near = descriptor.host == host_identity()
        hosts = descriptor.tcp_host, *(Address.parse(rail).host for rail in descriptor.rails)
        found = [self._networks.objection(host, near=near) for host in hosts]
        return None if None in found else found[0]

    def ways(self, descriptor: SegmentDescriptor) -> list[Way]:
        """One per address that the owner listens on."""
        if not descriptor.rails:
            return super().ways(descriptor)
        found = [descriptor]
        for rail in descriptor.rails:
            where = Address.parse(rail)
            found.append(replace(descriptor, tcp_host=where.host, tcp_port=where.port, rails=()))
        return [Way(f"{self.name} {there.tcp_host}", partial(self.open, there)) for there in found]

    def open(self, descriptor: SegmentDescriptor, deadline: float) -> TcpSegment:
        """Connect, and ask the owner whether it serves the segment."""
        target = TcpSegment(descriptor)
        zero = np.zeros(1, dtype=np.int64)
        status = np.zeros(1, dtype=np.int32)
        self._message(target, Batch(Operation.READ, zero, zero, zero, status, 0, deadline))
        if status[0] != 0:
            raise error_of(int(status[0]), operation="open", peer=target.name)
        return target

    def call(self, descriptor: SegmentDescriptor, question: bytes, deadline: float) -> bytes:
        """Ask the owner something that is not about bytes, and return its answer."""
        target, fresh = TcpSegment(descriptor), False
        while True:
            pool, link, used = self._acquire(target, deadline, fresh=fresh)
            try:
                answer = call(link, question)
            except (PeerLostError, TransferTimeoutError, RemoteProtocolError) as error:
                pool.discard(link)
                if not used or fresh or not isinstance(error, PeerLostError):
                    raise
                fresh = True
            except StoreError:
                pool.release(link)  # the peer's own answer: the connection is in step
                raise
            except BaseException:
                pool.discard(link)
                raise
            else:
                pool.release(link)
                return answer

    def _pool(self, target: TcpSegment) -> _Pool:
        pool = self._pools.get(target.key)
        if pool is None:
            with self._lock:
                if self._closed:  # a probe or a slice that was under way
                    raise PeerLostError("the transport was closed", peer=target.name)
                pool = self._pools.get(target.key)
                if pool is None:
                    for key in [key for key, other in self._pools.items() if other.drop()]:
                        del self._pools[key]
                    objection = partial(self._networks.objection, near=target.key[-1])
                    pool = _Pool(target.descriptor, self._secret, self._connections_max, objection)
                    self._pools[target.key] = pool
        return pool

    def _acquire(
        self, target: TcpSegment, deadline: float, *, fresh: bool
    ) -> tuple[_Pool, Link, bool]:
        """Return a connection, its pool, and whether it was used before."""
        while True:
            pool = self._pool(target)
            found = pool.acquire(deadline, fresh=fresh)
            if found is not None:
                link, used = found
                link.deadline = deadline
                return pool, link, used

    def move(self, target: RemoteSegment, batch: Batch) -> None:
        """Send the batch in messages of at most COUNT_MAX requests."""
        assert isinstance(target, TcpSegment)
        if batch.total_bytes > DATA_BYTES_MAX:
            raise InvalidArgumentError(
                f"{batch.total_bytes} bytes in one batch exceed {DATA_BYTES_MAX}",
                advice="split the batch",
            )
        if not batch.bad and batch.statuses.size <= COUNT_MAX:
            self._message(target, batch)
            return
        # Only the good requests travel; the verdict on the others stands.
        good = np.flatnonzero(batch.statuses == 0)
        for at in range(0, max(1, good.size), COUNT_MAX):
            with batch.part(good[at : at + COUNT_MAX]) as part:
                self._message(target, part)

    def move_one(self, target: RemoteSegment, request: SingleRequest) -> SingleOutcome | None:
        """Exchange one request over a connection that is idle, if there is one.

        One that turns out dead is closed; a batch then finds, or makes, another.
        """
        assert isinstance(target, TcpSegment)
        operation, offset, length, address, fence, checksums, timeout_s, tag, stamp = request
        pool = self._pools.get(target.key)
        if pool is None or fence >= 1 << 63 or (checksums and length > _HASHED_MAX):
            return None
        link = pool.take()
        if link is None:
            return None
        link.deadline = time.monotonic() + timeout_s
        target.number = number = (target.number + 1) & 0x7FFF_FFFF_FFFF_FFFF
        place = offset, length, address, tag, stamp
        writing = operation is Operation.WRITE
        status, receipt = 0, 0
        sums = _hash(address, length) if checksums and writing else None
        try:
            if not link.exchange_one(target.words, number, fence, place, writing=writing):
                status = self._told(link, request, number)
            elif writing and stamp:
                receipt = link.receipt
        except BaseException as error:
            pool.discard(link)
            if isinstance(error, TransferTimeoutError):
                error.operation = error.operation or operation.verb
            elif isinstance(error, StoreError):
                return None
            raise
        pool.release(link)
        if checksums and sums is None:
            sums = _hash(address, length)
        return status, sums, receipt

    def _told(self, link: Link, request: SingleRequest, number: int) -> int:
        """Receive the rest of an unexpected reply to one request, and return its status."""
        operation, offset, length, address, *_ = request
        columns = np.array([offset]), np.array([length]), np.array([address])
        status = np.zeros(1, dtype=np.int32)
        batch = Batch(operation, *columns, status, length, link.deadline)
        if request.stamp:
            batch.rights = np.array([[request.tag, request.stamp]])
            batch.receipts = np.zeros(1, dtype=np.int64) if batch.writing else None
        self._unexpected(link, number, batch)
        return int(status[0])

    def _message(self, target: TcpSegment, batch: Batch) -> None:
        """Exchange one message, unless the batch was cancelled before."""
        if batch.cancelled:
            batch.fail(CANCELLED)
        else:
            self._exchange_somewhere(target, batch)

    def _exchange_somewhere(self, target: TcpSegment, batch: Batch) -> None:
        """Exchange one message, on a second connection if a pooled one turns out dead."""
        fresh = False
        while True:
            pool, link, used = self._acquire(target, batch.deadline, fresh=fresh)
            batch.interrupt = link.abort
            try:
                self._exchange(link, target, batch)
            except BaseException as error:
                pool.discard(link)
                if batch.cancelled:
                    batch.statuses[:] = CANCELLED
                    return
                if used and not fresh and isinstance(error, PeerLostError):
                    fresh = True
                    continue
                if isinstance(error, StoreError) and error.operation is None:
                    error.operation = batch.operation.verb
                raise
            finally:
                batch.interrupt = None
            pool.release(link)
            return

    def _exchange(self, link: Link, target: TcpSegment, batch: Batch) -> None:
        count = batch.statuses.size
        target.number = number = (target.number + 1) & 0x7FFF_FFFF_FFFF_FFFF
        opcode = _opcode(batch)
        columns = PLAIN_COLUMNS if batch.rights is None else SHOWN_COLUMNS
        link.reserve(count, columns)
        body = REQUEST_BODY_BYTES + 8 * columns * count
        REQUEST.pack_into(
            link.view, REQUEST_AT, MAGIC, VERSION, 0, opcode, body, 0, number,
            target.descriptor.uuid, batch.fence, count,
        )  # fmt: skip
        expected = self._expected[opcode].copy()
        expected[2] = number
        if not link.exchange(batch, expected):
            self._unexpected(link, number, batch)
            if not batch.writing:
                hash_local(batch)

    def _unexpected(self, link: Link, number: int, batch: Batch) -> None:
        """Receive the rest of a reply that reports refusals, or raise what it says."""
        opcode, statuses, receipts = _opcode(batch), batch.statuses, batch.receipts
        magic, version, flags, answered, body, _, repeated, data, refused = REPLY.unpack_from(
            link.view
        )
        check_header(magic, version, link)
        body -= REPLY_BODY_BYTES
        if flags == REPLY_FLAG | ERROR and refused <= body <= padded(ERROR_BYTES_MAX):
            text = bytearray(body)
            link.receive(memoryview(text))
            raise decode_error(bytes(text[:refused]))
        told = padded(4 * statuses.size)
        if receipts is not None:
            body -= receipts.nbytes
        if (flags, answered, repeated, body) != (REPLY_FLAG, opcode, number, told):
            raise RemoteProtocolError(
                f"{link.peer} answered request {number} ({opcode:#x}) with {repeated} "
                f"({answered:#x}), flags {flags:#x}, {body} bytes",
                peer=link.peer,
            )
        column = np.empty(told // 4, dtype=np.int32)
        link.receive(column.data.cast("B"))
        statuses[:] = column[: statuses.size]
        if receipts is not None:
            link.receive(receipts.data.cast("B"))
        if not batch.writing:
            entries, asked = link.entries(0, batch.addresses, batch.lengths, statuses)
            if asked != data:
                raise RemoteProtocolError(
                    f"{link.peer} sends {data} bytes, {asked} were asked for", peer=link.peer
                )
            link.move(entries, receive=True)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        with self._lock:
            self._closed = True
            pools, self._pools = list(self._pools.values()), {}
        for pool in pools:
            pool.close()

    def after_fork(self) -> None:
        """Leave the connections to the parent; the child makes its own when it needs them."""
        self._lock = threading.Lock()
        for pool in self._pools.values():
            pool.forget()
        self._pools = {}


def _opcode(batch: Batch) -> int:
    return (_OPCODES if batch.rights is None else _SHOWN_OPCODES)[batch.operation]


def _hash(address: int, length: int) -> NDArray[np.uint64]:
    """The checksum of a range of local memory, as a column."""
    return checksum_ranges(np.array([address]), np.array([length]))
