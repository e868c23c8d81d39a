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
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from transfer_engine import _kernels_stream
from transfer_engine.base import (
    CANCELLED,
    One,
    Operation,
    RemoteSegment,
    Transport,
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
from transfer_engine.transports import forking
from transfer_engine.transports.calling import call
from transfer_engine.transports.dialing import dial
from transfer_engine.transports.stream import (
    COUNT_MAX,
    DATA_BYTES_MAX,
    READ,
    REPLY,
    REPLY_BODY_BYTES,
    REQUEST,
    REQUEST_AT,
    REQUEST_BODY_BYTES,
    WRITE,
    Link,
    check_header,
    padded,
)
from transfer_engine.wire.faults import ERROR_BYTES_MAX, decode_error
from transfer_engine.wire.frame import ERROR, MAGIC, VERSION
from transfer_engine.wire.frame import REPLY as REPLY_FLAG

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from transfer_engine.base import Batch, Columns, SegmentDescriptor, Statuses

__all__ = ["TcpTransport"]

_OPCODES = {Operation.READ: READ, Operation.WRITE: WRITE}
# What is hashed as a whole once it came: it is in the cache.
_HASHED_MAX = _kernels_stream.WINDOW_BYTES


class _Pool:
    """The connections to one owner: idle ones on a stack, a bound on all of them."""

    def __init__(
        self, descriptor: SegmentDescriptor, secret: bytes | None, connections_max: int
    ) -> None:
        self.address = (descriptor.tcp_host, descriptor.tcp_port)
        self.instance = descriptor.instance
        self.name = f"{self.address[0]}:{self.address[1]}"
        self._secret = secret
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
            link, _ = dial(self.address, self.instance, secret=self._secret, deadline=deadline)
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
        self.key = (descriptor.tcp_host, descriptor.tcp_port, descriptor.instance)
        self.number = 0


class TcpTransport(Transport):
    """Moves batches over pooled connections."""

    name: ClassVar[str] = "tcp"
    cost: ClassVar[int] = 30

    def __init__(self, *, secret: bytes | None = None, connections_max: int = 16) -> None:
        self._secret = secret
        self._connections_max = connections_max
        # The first words of the reply to a batch that succeeds, but for its number.
        self._expected = {
            operation: np.frombuffer(
                bytearray(
                    REPLY.pack(MAGIC, VERSION, REPLY_FLAG, opcode, REPLY_BODY_BYTES, 0, 0, 0, 0)
                ),
                dtype=np.int64,
            )
            for operation, opcode in _OPCODES.items()
        }
        self._lock = threading.Lock()
        self._pools: dict[tuple[str, int, bytes], _Pool] = {}
        self._closed = False
        forking.register(self)

    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """Every segment whose owner listens."""
        if self.name not in descriptor.transports:
            return "the owner does not listen on TCP"
        return None

    def open(self, descriptor: SegmentDescriptor, deadline: float) -> TcpSegment:
        """Connect, and ask the owner whether it serves the segment."""
        target = TcpSegment(descriptor)
        one = np.zeros(1, dtype=np.int64)
        status = np.zeros(1, dtype=np.int32)
        self._message(target, Operation.READ, (one, one, one, status), None, 0, deadline, None)
        if status[0] != 0:
            raise error_of(int(status[0]), operation="open", peer=str(descriptor))
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
                    raise PeerLostError("the transport was closed", peer=str(target.descriptor))
                pool = self._pools.get(target.key)
                if pool is None:
                    for key in [key for key, other in self._pools.items() if other.drop()]:
                        del self._pools[key]
                    pool = _Pool(target.descriptor, self._secret, self._connections_max)
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

    def move(
        self, target: RemoteSegment, operation: Operation, batch: Batch, deadline: float
    ) -> None:
        """Send the batch in messages of at most COUNT_MAX requests."""
        assert isinstance(target, TcpSegment)
        if batch.total_bytes > DATA_BYTES_MAX:
            raise InvalidArgumentError(
                f"{batch.total_bytes} bytes in one batch exceed {DATA_BYTES_MAX}",
                advice="split the batch",
            )
        count = batch.statuses.size
        for at in range(0, max(1, count), COUNT_MAX):
            self._part(target, operation, batch, slice(at, at + COUNT_MAX), deadline)

    def move_one(
        self, target: RemoteSegment, one: One
    ) -> tuple[int, NDArray[np.uint64] | None] | None:
        """Exchange one request over a connection that is idle, if there is one.

        One that turns out dead is closed; a batch then finds, or makes, another.
        """
        assert isinstance(target, TcpSegment)
        pool = self._pools.get(target.key)
        if pool is None or one.fence >= 1 << 63 or (one.checksums and one.length > _HASHED_MAX):
            return None
        link = pool.take()
        if link is None:
            return None
        link.deadline = time.monotonic() + one.timeout_s
        target.number = number = (target.number + 1) & 0x7FFF_FFFF_FFFF_FFFF
        place = one.offset, one.length, one.address
        writing = one.operation is Operation.WRITE
        status = 0
        sums = _hash(one) if one.checksums and writing else None
        try:
            if not link.exchange_one(target.words, number, one.fence, place, writing=writing):
                status = self._told(link, one, number)
        except BaseException as error:
            pool.discard(link)
            if isinstance(error, TransferTimeoutError):
                error.operation = error.operation or one.operation.name.lower()
            elif isinstance(error, StoreError):
                return None
            raise
        pool.release(link)
        if one.checksums and sums is None:
            sums = _hash(one)
        return status, sums

    def _told(self, link: Link, one: One, number: int) -> int:
        """Receive the rest of an unexpected reply to one request, and return its status."""
        column = np.array([one.length]), np.array([one.address])
        statuses = np.zeros(1, dtype=np.int32)
        opcode = _OPCODES[one.operation]
        self._unexpected(link, opcode, number, (column[0], *column, statuses))
        return int(statuses[0])

    def _part(
        self,
        target: TcpSegment,
        operation: Operation,
        batch: Batch,
        part: slice,
        deadline: float,
    ) -> None:
        """Move one message's worth of a batch."""
        statuses = batch.statuses[part]
        if batch.cancelled:
            statuses[statuses == 0] = CANCELLED
            return
        columns = (batch.offsets[part], batch.lengths[part], batch.addresses[part], statuses)
        sums = None if batch.checksums is None else batch.checksums[part]
        if not batch.bad:
            self._message(target, operation, columns, sums, batch.fence, deadline, batch)
            return
        # Only the good requests travel; the verdict on the others stands.
        good = np.flatnonzero(statuses == 0)
        offsets, lengths, addresses = (column[good] for column in columns[:3])
        verdicts = statuses[good]
        found = None if sums is None else sums[good]
        columns = (offsets, lengths, addresses, verdicts)
        self._message(target, operation, columns, found, batch.fence, deadline, batch)
        statuses[good] = verdicts
        if sums is not None and found is not None:
            sums[good] = found

    def _message(
        self,
        target: TcpSegment,
        operation: Operation,
        columns: tuple[Columns, Columns, Columns, Statuses],
        sums: NDArray[np.uint64] | None,
        fence: int,
        deadline: float,
        batch: Batch | None,
    ) -> None:
        """Exchange one message, on a second connection if a pooled one turns out dead."""
        fresh = False
        while True:
            pool, link, used = self._acquire(target, deadline, fresh=fresh)
            if batch is not None:
                batch.interrupt = link.abort
            try:
                self._exchange(link, target, operation, columns, sums, fence)
            except BaseException as error:
                pool.discard(link)
                if batch is not None and batch.cancelled:
                    columns[3][:] = CANCELLED
                    return
                if used and not fresh and isinstance(error, PeerLostError):
                    fresh = True
                    continue
                if isinstance(error, StoreError) and error.operation is None:
                    error.operation = operation.name.lower()
                raise
            finally:
                if batch is not None:
                    batch.interrupt = None
            pool.release(link)
            return

    def _exchange(
        self,
        link: Link,
        target: TcpSegment,
        operation: Operation,
        columns: tuple[Columns, Columns, Columns, Statuses],
        sums: NDArray[np.uint64] | None,
        fence: int,
    ) -> None:
        count = columns[0].size
        total = int(columns[1].sum()) if count > 1 else int(columns[1][0]) if count else 0
        target.number = number = (target.number + 1) & 0x7FFF_FFFF_FFFF_FFFF
        opcode = _OPCODES[operation]
        link.reserve(count)
        REQUEST.pack_into(
            link.view, REQUEST_AT, MAGIC, VERSION, 0, opcode, REQUEST_BODY_BYTES + 16 * count, 0,
            number, target.descriptor.uuid, fence, count,
        )  # fmt: skip
        expected = self._expected[operation].copy()
        expected[2] = number
        if not link.exchange(columns, total, expected, sums, writing=operation is Operation.WRITE):
            self._unexpected(link, opcode, number, columns)
            if sums is not None and operation is Operation.READ:
                good = np.flatnonzero(columns[3] == 0)
                sums[good] = checksum_ranges(columns[2][good], columns[1][good])

    def _unexpected(
        self,
        link: Link,
        opcode: int,
        number: int,
        columns: tuple[Columns, Columns, Columns, Statuses],
    ) -> None:
        """Receive the rest of a reply that reports refusals, or raise what it says."""
        _, lengths, addresses, statuses = columns
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
        if (flags, answered, repeated, body) != (REPLY_FLAG, opcode, number, told):
            raise RemoteProtocolError(
                f"{link.peer} answered request {number} ({opcode:#x}) with {repeated} "
                f"({answered:#x}), flags {flags:#x}, {body} bytes",
                peer=link.peer,
            )
        column = np.empty(told // 4, dtype=np.int32)
        link.receive(column.data.cast("B"))
        statuses[:] = column[: statuses.size]
        if opcode == READ:
            entries, asked = link.entries(0, addresses, lengths, statuses)
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


def _hash(one: One) -> NDArray[np.uint64]:
    """The checksum of the local memory of a request, as a column."""
    return checksum_ranges(np.array([one.address]), np.array([one.length]))
