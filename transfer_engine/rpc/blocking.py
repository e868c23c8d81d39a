"""A blocking client connection: real blocking sockets, one system call each way.

    with BlockingConnection.connect("127.0.0.1:7000", registry) as connection:
        body = connection.call(GET, GET.request.pack(...), timeout_s=1.0)
        view = GET.reply.unpack(body)

`send` and `recv` are the two halves of `call`: send to several connections (or several times to
one), then collect; replies may come back in any order. A connection belongs to one thread at a
time and to the process that opened it; `BlockingPool` shares connections among threads and
survives fork.

Every wait has a deadline, kept to within 1 % (the timeout of the socket is only set anew when it
is further off, which saves a system call a call). Whatever goes wrong in the middle of a
conversation closes the connection: what a late reply would mean is nothing anybody can know.

The reply to a request that is not long is polled for before it is slept for, where that has paid
lately: see `spinning`.

    no listener, name unknown, no answer to the handshake    UnavailableError
    not this protocol, other version, other service          RemoteProtocolError
    no reply in time                                         TransferTimeoutError
    connection closed or reset                               PeerLostError
    an error reply                                           the error the server raised

What it does not do: retry. Only the caller knows whether a request may be sent twice.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from transfer_engine.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    StoreError,
)
from transfer_engine.rpc.address import Address, tune
from transfer_engine.rpc.dialing import first_accepting
from transfer_engine.rpc.failures import locate, lost, overdue, unreachable
from transfer_engine.rpc.reached import end_of
from transfer_engine.rpc.sealed import SealedSocket
from transfer_engine.rpc.spinning import AWAITED_BYTES_MAX, SPIN_NS, Spin
from transfer_engine.rpc.twin import Twin
from transfer_engine.wire.faults import decode_error
from transfer_engine.wire.frame import (
    DEADLINE_MS_MAX,
    ERROR,
    HEADER_BYTES,
    VERSIONS,
    Body,
    Buffer,
    Frame,
    FrameDecoder,
    VersionRange,
    encode_frame,
    encode_frame_parts,
    match_reply,
)
from transfer_engine.wire.handshake import (
    HANDSHAKE_LIMITS,
    ClientHandshake,
    Identity,
    Session,
)
from transfer_engine.wire.keyring import tls_of

if TYPE_CHECKING:
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation, Registry

__all__ = ["BlockingConnection", "deadline_ms"]

# Bodies up to this are copied behind their header, which is faster than a gathering write.
_COPY_BYTES_MAX = 1 << 15
_RECV_BYTES = 1 << 16


def deadline_ms(timeout_s: float) -> int:
    """Return the deadline field of a request: at least 1, because 0 means none."""
    return min(max(1, int(timeout_s * 1000)), DEADLINE_MS_MAX)


class BlockingConnection:
    """An authenticated connection to one service; a context manager, `close` is idempotent."""

    def __init__(self, sock: socket.socket | SealedSocket, peer: str, registry: Registry) -> None:
        self.peer = peer
        self.last_used = 0.0
        self._socket = sock
        # The same socket once more, never waiting: what usually fits needs no poll before it.
        self._sender = sock.twin() if isinstance(sock, SealedSocket) else Twin(sock)
        self._sender.setblocking(False)
        self._registry = registry
        self._request_limits = registry.request_limits
        self._reply_limits = registry.reply_limits
        self._timeout_s = -1.0
        self._asked_s = 0.0
        self._deadline_ms = 0
        self.pid = os.getpid()
        self._buffer = bytearray(_RECV_BYTES)
        self._view = memoryview(self._buffer)
        self._next_id = 1
        self._waiting: dict[int, int] = {}
        self._arrived: dict[int, Frame] = {}
        # Operations differ in how soon they are answered, so each learns for itself.
        self._spins: defaultdict[int, Spin] = defaultdict(Spin)
        self._awaited = False
        self._decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
        self._session: Session | None = None
        self._version = 0

    @classmethod
    def connect(
        cls,
        address: str | Address,
        registry: Registry,
        *,
        identity: Identity | None = None,
        secret: Secret | None = None,
        timeout_s: float = 5.0,
        versions: VersionRange = VERSIONS,
    ) -> BlockingConnection:
        """Connect and shake hands within `timeout_s`; the name lookup alone is up to the system."""
        start = time.monotonic()
        where = Address.parse(address) if isinstance(address, str) else address
        me = identity or Identity(registry.service, role="client")
        handshake = ClientHandshake(me, secret=secret, versions=versions)
        tls = tls_of(secret)
        try:
            sock = _open(where, start + timeout_s)
        except OSError as error:
            elapsed_s = time.monotonic() - start
            raise unreachable(where, elapsed_s, error, accepted=False) from error
        seal = None if tls is None else tls.seal_of_client(where.host)
        connection = cls(sock if seal is None else SealedSocket(sock, seal), str(where), registry)
        try:
            tune(sock)
            if isinstance(connection._socket, SealedSocket):
                connection._socket.shake(start + timeout_s)
            connection._shake(handshake, versions, start + timeout_s)
        except BaseException as error:
            connection.close()
            elapsed_s = time.monotonic() - start
            if isinstance(error, StoreError):
                locate(error, str(where), "connect", elapsed_s)
            elif isinstance(error, OSError):
                raise unreachable(where, elapsed_s, error, accepted=True) from error
            raise
        return connection

    def _shake(self, handshake: ClientHandshake, versions: VersionRange, deadline: float) -> None:
        self._decoder.expect(HANDSHAKE_LIMITS, replies=False, versions=versions)
        self._arm(deadline - time.monotonic())
        self._socket.sendall(handshake.start(end_of(self._socket.getpeername())))
        while handshake.session is None:
            for frame in self._read(deadline):
                self._socket.sendall(handshake.receive(frame))
        session = self._session = handshake.session
        self._version = session.version
        self._decoder.expect(
            self._registry.reply_limits,
            replies=True,
            versions=VersionRange(session.version, session.version),
        )

    @property
    def session(self) -> Session:
        """What the handshake established."""
        assert self._session is not None
        return self._session

    @property
    def closed(self) -> bool:
        """Whether this connection can no longer be used."""
        return self._socket.fileno() < 0

    @property
    def reusable(self) -> bool:
        """Whether it is open and no reply is outstanding."""
        return not self._waiting and self._socket.fileno() >= 0

    def call(self, operation: Operation[Any, Any], body: Buffer, *, timeout_s: float) -> Body:
        """Send a request and return the body of its reply, both within `timeout_s`."""
        start = time.monotonic()
        request_id = self._send(operation, body, start, timeout_s)
        return self._recv(request_id, operation, start, timeout_s)

    def send(self, operation: Operation[Any, Any], body: Buffer, *, timeout_s: float) -> int:
        """Send a request and return its id, to be given to `recv`."""
        return self._send(operation, body, time.monotonic(), timeout_s)

    def recv(self, request_id: int, *, timeout_s: float) -> Body:
        """Return the body of the reply to `request_id`, or raise the error it carries."""
        opcode = self._waiting.get(request_id)
        if opcode is None:
            raise LocalProtocolError(f"no request {request_id} is waiting for a reply")
        operation = self._registry.by_opcode[opcode]
        return self._recv(request_id, operation, time.monotonic(), timeout_s)

    def _send(
        self, operation: Operation[Any, Any], body: Buffer, start: float, timeout_s: float
    ) -> int:
        opcode, length = operation.opcode, len(body)
        if timeout_s != self._asked_s:
            self._deadline_ms = deadline_ms(timeout_s)
            self._asked_s = timeout_s
        if length > self._request_limits[opcode] or timeout_s <= 0 or os.getpid() != self.pid:
            raise self._unsendable(operation, length, timeout_s)
        request_id = self._next_id
        self._next_id = request_id + 1
        encode = encode_frame if length <= _COPY_BYTES_MAX else encode_frame_parts
        message = encode(opcode, body, 0, request_id, self._deadline_ms, self._version)
        try:
            try:
                sent = self._sender.send(message) if type(message) is bytes else 0
            except BlockingIOError:
                sent = 0
            if sent != len(message):
                self._send_rest(message, sent, start + timeout_s)
        except BaseException as error:
            self._fail(self._parting(error), operation.name, start, timeout_s)
            raise
        self._waiting[request_id] = opcode
        self._awaited = length <= AWAITED_BYTES_MAX
        return request_id

    def _parting(self, error: BaseException) -> BaseException:
        """Return why the peer had hung up, where it had and said why, else the error itself."""
        if isinstance(error, ConnectionError) and not self._waiting:
            with contextlib.suppress(OSError, StoreError):
                for frame in self._decoder.feed(self._view[: self._sender.recv_into(self._buffer)]):
                    if frame.request_id == 0 and frame.flags & ERROR:
                        return decode_error(frame.body)
        return error

    def _unsendable(
        self, operation: Operation[Any, Any], length: int, timeout_s: float
    ) -> StoreError:
        """Say why a request must not leave; the connection is as good as before."""
        if os.getpid() != self.pid:
            return LocalProtocolError(
                f"the connection to {self.peer} belongs to process {self.pid}",
                advice="open another one after fork, or use BlockingPool, which does",
            )
        if timeout_s <= 0:
            return overdue(self.peer, operation.name, timeout_s, 0.0)
        return LocalProtocolError(
            f"a body of {length} bytes exceeds the limit of {operation.name}",
            advice="split the batch",
        )

    def _send_rest(self, message: bytes | tuple[Buffer, ...], sent: int, deadline: float) -> None:
        """Send what is left with gathering writes, waiting for the peer to read."""
        parts = (message,) if isinstance(message, bytes) else message
        views = [memoryview(part) for part in parts if len(part)]
        while True:
            while views and sent >= len(views[0]):
                sent -= len(views.pop(0))
            if not views:
                return
            views[0] = views[0][sent:]
            self._arm(deadline - time.monotonic())
            sent = self._socket.sendmsg(views)

    def _recv(
        self, request_id: int, operation: Operation[Any, Any], start: float, timeout_s: float
    ) -> Body:
        waiting = self._waiting
        frame: Frame | None = None
        try:
            if len(waiting) == 1 and not self._arrived and not self._decoder.pending_bytes:
                # Nothing else can come, so what comes next is nearly always this reply, alone.
                spin = self._spins[operation.opcode] if self._awaited else None
                count = self._receive(start + timeout_s, spin)
                length = match_reply(
                    self._buffer, count, self._version, operation.opcode, request_id
                )
                if 0 <= length <= self._reply_limits[operation.opcode]:
                    del waiting[request_id]
                    self.last_used = start
                    return bytes(self._view[HEADER_BYTES : HEADER_BYTES + length])
                frame = self._sort(self._decoder.feed(self._view[:count]), request_id)
            else:
                frame = self._arrived.pop(request_id, None)
            while frame is None:
                frame = self._sort(self._read(start + timeout_s), request_id)
            if frame.opcode != waiting.pop(request_id):
                raise RemoteProtocolError(f"the reply has opcode {frame.opcode:#06x}")
            reported = decode_error(frame.body) if frame.flags & ERROR else None
        except BaseException as error:
            self._fail(error, operation.name, start, timeout_s)
            raise
        self.last_used = start
        if reported is not None:
            raise locate(reported, self.peer, operation.name, None)
        return frame.body

    def _read(self, deadline: float) -> list[Frame]:
        return self._decoder.feed(self._view[: self._receive(deadline)])

    def _receive(self, deadline: float, spin: Spin | None = None) -> int:
        if self._decoder.error is not None:
            raise self._decoder.error.again()
        count = self._poll(spin) if spin is not None and spin.worthwhile() else -1
        if count < 0:
            self._arm(deadline - time.monotonic())
            count = self._socket.recv_into(self._buffer)
        if not count:
            raise ConnectionResetError("closed by the peer")
        return count

    def _poll(self, spin: Spin) -> int:
        """Look for something to read without sleeping; -1 if nothing came for a moment."""
        receive, buffer, clock = self._sender.recv_into, self._buffer, time.perf_counter_ns
        stop = clock() + SPIN_NS
        while True:
            try:
                count = receive(buffer)
            except BlockingIOError:
                if clock() > stop:
                    spin.failed()
                    return -1
                os.sched_yield()
            else:
                if clock() <= stop:
                    spin.paid()
                else:
                    spin.failed()
                return count

    def _sort(self, frames: list[Frame], request_id: int) -> Frame | None:
        """Return the reply that is waited for, if it came; set the others aside."""
        found = None
        for frame in frames:
            if frame.request_id == request_id:
                found = frame
            elif frame.request_id in self._waiting and frame.request_id not in self._arrived:
                self._arrived[frame.request_id] = frame
            elif frame.request_id == 0 and frame.flags & ERROR:
                raise decode_error(frame.body)
            else:
                raise RemoteProtocolError(f"a reply came to request {frame.request_id}, never sent")
        return found

    def _arm(self, remaining_s: float) -> None:
        """Let the next system call of the socket wait this long, or a hundredth longer."""
        if not 0.99 * self._timeout_s <= remaining_s <= self._timeout_s:
            if remaining_s <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining_s)
            self._timeout_s = remaining_s

    def _fail(self, error: BaseException, operation: str, start: float, timeout_s: float) -> None:
        """Close, and raise what `error` means to a caller; return for what is not ours."""
        self.close()
        elapsed_s = time.monotonic() - start
        if isinstance(error, StoreError):
            raise locate(error, self.peer, operation, elapsed_s)
        if isinstance(error, TimeoutError):
            raise overdue(self.peer, operation, timeout_s, elapsed_s) from None
        if isinstance(error, OSError):
            raise lost(self.peer, operation, elapsed_s, error) from error

    def stale(self) -> bool:
        """Whether an idle connection has something to read: its end, or what nobody asked for."""
        import select

        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def interrupt(self) -> None:
        """Let whoever waits for a reply lose the connection at once; for any thread."""
        with contextlib.suppress(OSError):  # it is lost already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; requests without a reply stay without."""
        self._sender.close()
        self._socket.close()
        self._waiting.clear()
        self._arrived.clear()

    def __enter__(self) -> BlockingConnection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _open(where: Address, deadline: float) -> socket.socket:
    """Connect to the first address of `where` that accepts, all within the deadline."""
    found = socket.getaddrinfo(where.host, where.port, type=socket.SOCK_STREAM)
    return first_accepting(((family, target) for family, _, _, _, target in found), deadline)
