"""The owner's end of the tcp transport: bounds, rights, and bytes in and out of segments.

Who connects shakes hands first (`greeting`). Then it has a thread of its own, blocked in the kernel
while bytes move and without the GIL. Plain requests on memory never leave the compiled loop
(`kernels.serving`); this is about the others. What comes
from a socket is believed only after it was checked: counts and lengths before any memory is
reserved, ranges by a kernel without overflow, rights by the access hook and, of guarded segments,
by what a peer shows (`guarding`). A bad request gets a
status; a message that breaks the protocol gets an error and ends its connection, no other.

A peer whose message does not go on for `patience_s` is dropped. One that is idle may be, for a
newcomer, where all connections are in use; its client then dials anew.
Cost: about 10 us of Python a batch, for plain requests on memory only when the thread had slept.
"""

from __future__ import annotations

import contextlib
import logging
import math
import socket
import threading
import time
from dataclasses import dataclass
from functools import reduce
from operator import add, attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine.base import REFUSED, UNKNOWN_SEGMENT, Access, Operation
from transfer_engine.errors import (
    ConfigError,
    RemoteProtocolError,
    StoreError,
)
from transfer_engine.kernels import moving
from transfer_engine.kernels.moving import PLAIN_COLUMNS, SHOWN_COLUMNS
from transfer_engine.notify import QUESTION_BYTES_MAX
from transfer_engine.rdma.wire import FEATURE
from transfer_engine.rpc.entrance import Entrance, tcp_carried
from transfer_engine.segments.mapping import Mapping
from transfer_engine.transports import calling
from transfer_engine.transports.greeting import Greeter, Guest
from transfer_engine.transports.guarding import Showing
from transfer_engine.transports.stream import (
    CALL,
    COLUMNS_AT,
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
    identity,
)
from transfer_engine.transports.tcp_staged import StagedService
from transfer_engine.wire.faults import encode_error
from transfer_engine.wire.frame import MAGIC, VERSION
from transfer_engine.wire.frame import REPLY as REPLY_FLAG
from transfer_engine.wire.handshake import ServerHandshake
from transfer_engine.wire.keyring import tls_of

if TYPE_CHECKING:
    from collections import Counter

    from transfer_engine.base import Columns, Staged, Statuses
    from transfer_engine.rpc.address import Address
    from transfer_engine.transports.owner import Owner
    from transfer_engine.transports.rdma_server import RdmaServer
    from transfer_engine.wire.handshake import Session

__all__ = ["Carried", "TcpServer"]

_log = logging.getLogger(__name__)

_OPERATIONS = {
    READ: Operation.READ,
    WRITE: Operation.WRITE,
    READ_SHOWN: Operation.READ,
    WRITE_SHOWN: Operation.WRITE,
}
_SHOWN = frozenset({READ_SHOWN, WRITE_SHOWN})
_SINK_BYTES = 1 << 20
_LINGER_S = 1.0
_BACKLOG = 1024
_QUESTION_COUNT_MAX = QUESTION_BYTES_MAX // 16


class Carried(NamedTuple):
    """What connections have done so far: batches answered, ranges of them refused, bytes."""

    answered: int = 0
    refused: int = 0
    sent: int = 0
    received: int = 0

    def plus(self, other: Carried) -> Carried:
        """Return the sum."""
        return Carried(*map(add, self, other))


@dataclass
class _Reply:
    """What a batch is answered: its header, statuses if any is not 0, receipts if there are any."""

    link: Link
    opcode: int
    number: int
    statuses: Statuses
    """Padded to whole words."""
    count: int
    receipts: Columns | None = None

    @property
    def verdicts(self) -> Statuses:
        """The statuses of the requests."""
        return self.statuses[: self.count]

    def head(self, data: int, refused: int) -> None:
        """Write the header, given the bytes of data and how many requests were refused."""
        body = REPLY_BODY_BYTES + sum(length for _, length in self.lead(refused)[1:])
        REPLY.pack_into(
            self.link.view, 0, MAGIC, VERSION, REPLY_FLAG, self.opcode, body, 0, self.number, data,
            refused,
        )  # fmt: skip

    def lead(self, refused: int) -> tuple[tuple[int, int], ...]:
        """Say where what comes before the data lies, the header first."""
        columns = (self.statuses if refused else None, self.receipts)
        parts = [(int(each.ctypes.data), each.nbytes) for each in columns if each is not None]
        return (self.link.address, REPLY.size), *parts


class TcpServer:
    """Listens for data connections and serves the owner's segments on them."""

    def __init__(
        self,
        owner: Owner,
        address: Address,
        rdma: RdmaServer | None,
        *,
        connections_max: int,
        patience_s: float,
    ) -> None:
        self._owner = owner
        self._rdma = rdma
        self._connections_max = connections_max
        self._patience_s = patience_s
        self._staged = StagedService(patience_s=patience_s)
        self._links: set[Link] = set()
        self._ended = Carried()
        self._lock = threading.Lock()
        self._closing = False
        # Where the data of refused writes goes; nobody reads it, so all connections share it.
        self._sink = np.empty(_SINK_BYTES, dtype=np.uint8)
        self.host = address.host
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        try:
            self._listener = socket.create_server(
                (address.host, address.port), family=family, backlog=_BACKLOG
            )
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {address}: {error.strerror}",
                advice="choose another port, or 0 for any free one",
            ) from error
        self.port: int = self._listener.getsockname()[1]
        self._entrance = Entrance[Guest](
            f"data port {self.port}",
            idle_s=attrgetter("idle_s"),
            sessions_max=connections_max,
            log=_log,
        )
        keyring = owner.keyring
        fickle = keyring is not None and not keyring.lasting
        self._greeter = Greeter(
            self._listener,
            self._entrance,
            self._handshake,
            self._serve,
            self._end_revoked if fickle else None,
            own_user=owner.own_user,
            tls=tls_of(keyring),
        )
        self.acceptor = self._greeter.thread
        self.acceptor.start()

    def _handshake(self, sock: socket.socket) -> ServerHandshake:
        offered = () if self._rdma is None else (FEATURE,)
        return ServerHandshake(
            identity("owner", self._owner.instance, offered),
            secret=self._owner.keyring,
            objection=lambda dialled: self._owner.reached.objection(dialled, sock.getsockname()),
        )

    def _serve(self, guest: Guest, session: Session) -> None:
        link = guest.link
        assert link is not None
        with self._lock:
            self._links.add(link)
        try:
            if self._rdma is not None and FEATURE in session.features:
                guest.stays = True
                self._rdma.serve(link)
            link.patience_s = self._patience_s
            while not self._closing:
                self._answer(link)
        except StoreError as error:
            if not self._closing and isinstance(error, RemoteProtocolError):
                self._entrance.tell("dropped", f"dropped {link.peer}: {error}")
            else:
                _log.debug("data connection of %s ended: %s", link.peer, error)
        except Exception:
            _log.exception("the data connection of %s failed", link.peer)
        finally:
            self._forget(guest, link)

    def _end_revoked(self) -> None:
        """End the sessions whose credential is not believed any more."""
        keyring = self._owner.keyring
        with self._lock:
            links = list(self._links)
        for link in links:
            if keyring is not None and not keyring.holds(link.rights):
                self._entrance.tell("revoked", f"{link.peer}: {link.rights.ended().what}")
                link.abort()

    @property
    def carried(self) -> Carried:
        """What connections have done, those that have ended included. O(connections)."""
        with self._lock:
            return reduce(Carried.plus, map(_carried, self._links), self._ended)

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._links)

    @property
    def turned_away(self) -> Counter[str]:
        """How often somebody was sent away, by the kind of reason."""
        return self._entrance.told

    def _forget(self, guest: Guest, link: Link) -> None:
        with self._lock:
            self._links.discard(link)
            self._ended = self._ended.plus(_carried(link))
        self._entrance.leave(guest)
        link.close()

    def _answer(self, link: Link) -> None:
        """Serve one message, or raise what ends the connection."""
        link.expect_progress()
        whole: bool | None = link.take_request()
        if whole:
            whole = link.serve(self._owner.tables.latest)
        if whole is None:
            return
        try:
            self._batch(link, whole)
        except RemoteProtocolError as error:
            self._refuse(link, error)
            raise
        finally:
            link.naming[:] = 0
            link.end_after(math.inf)

    def _call(self, link: Link, length: int) -> None:
        """Answer a question, which lies where the columns of a batch would."""
        question = bytes(link.view[COLUMNS_AT : COLUMNS_AT + length])
        try:
            service = self._owner.peer_service
            answer = calling.reply(service.answer(question, link.peer, link.rights))
        except RemoteProtocolError:
            raise
        except StoreError as error:
            answer = calling.reply(encode_error(error), failed=True)
        link.expect_progress()
        link.send(answer)

    def _batch(self, link: Link, whole: bool) -> None:
        magic, version, flags, opcode, length, _, number, uuid, fence, count = REQUEST.unpack_from(
            link.view, REQUEST_AT
        )
        check_header(magic, version, link)
        question = opcode == CALL and 0 <= 16 * count - fence < 16
        operation = _OPERATIONS.get(opcode)
        count_max = _QUESTION_COUNT_MAX if question else COUNT_MAX if operation else -1
        if flags or count > count_max:
            raise RemoteProtocolError(
                f"no such request: opcode {opcode:#x}, flags {flags:#x}, {count} ranges"
            )
        columns = SHOWN_COLUMNS if opcode in _SHOWN else PLAIN_COLUMNS
        if length != REQUEST_BODY_BYTES + 8 * columns * count:
            raise RemoteProtocolError(f"a body of {length} bytes cannot hold {count} ranges")
        if not whole:
            link.reserve(count, columns)
            link.receive(link.view[COLUMNS_AT : COLUMNS_AT + 8 * columns * count])
        if operation is None:
            self._call(link, fence)
            return
        # Named before it is looked up, so that `quiesce` cannot miss it.
        link.naming[:] = np.frombuffer(uuid, dtype=np.int64)
        offsets, lengths = link.columns(count)
        statuses = np.zeros(count + (count & 1), dtype=np.int32)
        access = Access(link.peer, operation, uuid, offsets, lengths, fence)
        store = self._judge(access, statuses[:count], link.read_only)
        reply = _Reply(link, opcode, number, statuses, count)
        guard = None if store is None else self._owner.guard_of(uuid)
        if opcode in _SHOWN:
            shown = link.shown(count)
            if guard is not None and not guard.asks(link.peer_words) and not shown[1].any():
                guard = None
            with Showing(guard, access, shown, self._owner.tables.clock_offset_ms) as showing:
                showing.judge(reply.verdicts)
                link.end_after(showing.left_s)
                self._move(access, store, reply, showing)
            return
        if guard is not None and guard.asks(link.peer_words):
            # Without bytes it is asked whether the segment is there.
            reply.verdicts[(reply.verdicts == 0) & (lengths > 0)] = REFUSED
        self._move(access, store, reply)

    def _move(
        self,
        access: Access,
        store: Mapping | Staged | None,
        reply: _Reply,
        showing: Showing | None = None,
    ) -> None:
        """Move the bytes of the requests that are not refused, and answer."""
        link, verdicts = reply.link, reply.verdicts
        ranges = offsets, lengths = access.offsets, access.lengths
        refused = int(np.count_nonzero(verdicts))
        link.answered += 1
        link.refused += refused
        memory, staged = (store, None) if isinstance(store, Mapping) else (None, store)
        base = memory.address if memory else 0
        if access.operation is Operation.READ:
            if staged is not None:
                self._staged.send(link, staged, ranges, verdicts, reply.head, reply.lead)
                return
            entries, data = link.entries(base, offsets, lengths, verdicts, lead=reply.lead(refused))
            reply.head(data, refused)
        else:
            sink = (int(self._sink.ctypes.data), _SINK_BYTES) if refused else (0, 0)
            if staged is not None:
                self._staged.receive(link, staged, ranges, verdicts, sink)
                refused = int(np.count_nonzero(verdicts))
            else:
                entries, _ = link.entries(base, offsets, lengths, verdicts, sink=sink)
                link.expect_progress()
                link.move(entries, receive=True)
            if showing is not None:
                reply.receipts = showing.receipts(verdicts)
                link.end_after(math.inf)
            entries = link.lead(*reply.lead(refused))
            reply.head(0, refused)
        link.expect_progress()
        link.move(entries, receive=False)

    def _judge(
        self, access: Access, statuses: Statuses, read_only: bool
    ) -> Mapping | Staged | None:
        """Set the status of every range, but for what has to be shown; return what holds them."""
        segment = self._owner.find(access.segment)
        store = None if segment is None else segment.held() or segment.held_staged()
        size = 0 if segment is None or store is None else segment.size
        named, _ = moving.check_ranges(access.offsets, access.lengths, size, statuses)
        if not 0 <= named <= DATA_BYTES_MAX:
            raise RemoteProtocolError(
                f"the ranges of one message add up to more than {DATA_BYTES_MAX} bytes, or below 0"
            )
        if store is None:
            statuses[:] = UNKNOWN_SEGMENT
            return None
        allowed = self._owner.permits(access)
        if access.operation is Operation.WRITE and (read_only or not store.writable):
            allowed = False
        if allowed is not True:
            statuses[(statuses == 0) & np.logical_not(allowed)] = REFUSED
        return store

    def _refuse(self, link: Link, error: RemoteProtocolError) -> None:
        """Tell the peer why its connection ends, and give it the time to read that."""
        with contextlib.suppress(StoreError, OSError):
            link.send(calling.reply(encode_error(error), failed=True, opcode=0))
            link.sock.shutdown(socket.SHUT_WR)
            # Closing with unread input would reset the connection and lose the answer.
            until = time.monotonic() + _LINGER_S
            link.sock.settimeout(_LINGER_S)
            while time.monotonic() < until and link.sock.recv_into(self._sink.data):
                pass

    def quiesce(self, uuid: bytes, timeout_s: float) -> None:
        """Return once no connection moves bytes of this segment; cut those that outlast it."""
        deadline = time.monotonic() + timeout_s
        while busy := self._serving(uuid):
            if time.monotonic() >= deadline:
                for link in busy:
                    _log.warning("cut %s off a withdrawn segment", link.peer)
                    link.abort()
                deadline = time.monotonic() + timeout_s
            time.sleep(0.001)

    def _serving(self, uuid: bytes) -> list[Link]:
        with self._lock:
            return [link for link in self._links if link.naming.tobytes() == uuid]

    def close(self) -> None:
        """Stop listening and cut all connections. Idempotent."""
        self._closing = True
        self.acceptor.stop()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            links = list(self._links)
        for link in links:
            link.abort()
        self.acceptor.join(timeout=_LINGER_S)
        # Not before: what is closed wakes nobody.
        self._listener.close()
        self._greeter.close()
        deadline = time.monotonic() + _LINGER_S
        while self._links and time.monotonic() < deadline:
            time.sleep(0.001)

    def forget(self) -> None:
        """In a forked child: close the copies of the parent's sockets, which stay open there."""
        self._closing = True
        self._lock = threading.Lock()
        self._listener.close()
        self._greeter.close()
        for link in self._links:
            link.close()
        self._links = set()


def _carried(link: Link) -> Carried:
    return Carried(link.answered, link.refused, *tcp_carried(link.sock))
