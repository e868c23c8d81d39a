"""One accepted connection: handshake, then requests in, replies out, in bounded memory.

`handle(connection, frame)` returns the body of the reply, None for no reply, or an awaitable of
either; after None it may `send` any number of replies later. A body at once is the hot path: no
task, no future, and the replies to all requests of one read leave in one write, so a client that
pipelines costs one system call for many requests. An awaitable gets a task, which is bounded by the
deadline of its request and cancelled when the peer goes.

Plain `data_received` was chosen over BufferedProtocol by measurement: an uvloop echo of 64
pipelined frames of 128 bytes runs at 4.5-5.9 M frames/s with it and at 4.7-6.0 M with buffers of
our own, and immutable bytes can be handed to handlers without a copy or a lifetime to respect.

Peers take turns: who sends many requests at once has some of them answered, then others are heard.
Back-pressure: while the peer does not take its replies, or has `in_flight_max` requests open,
nothing more is read from it; requests that had been read wait in a backlog no longer than a read.
So the memory of a connection is bounded by one read, one request, and the write limit plus one
reply, whatever the peer does.

An exception of the handler becomes an error reply and never ends the connection; a violation of
the protocol ends it, after one frame that says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from transfer_engine.errors import (
    AuthError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rpc.address import tune
from transfer_engine.rpc.entrance import tcp_idle_s
from transfer_engine.rpc.failures import gave_way
from transfer_engine.rpc.neighbours import stranger
from transfer_engine.wire.faults import encode_error
from transfer_engine.wire.frame import (
    ERROR,
    REPLY,
    Buffer,
    Frame,
    FrameDecoder,
    VersionRange,
    encode_frame,
    encode_frame_parts,
)
from transfer_engine.wire.handshake import (
    HANDSHAKE_LIMITS,
    REFUSED,
    Identity,
    ServerHandshake,
    Session,
    refusal,
)

if TYPE_CHECKING:
    from transfer_engine.rpc.entrance import Entrance
    from transfer_engine.rpc.limits import ServerLimits
    from transfer_engine.rpc.reached import Reached
    from transfer_engine.rpc.spinning import LoopSpin
    from transfer_engine.rpc.unfinished import Unfinished
    from transfer_engine.wire.keyring import Keyring
    from transfer_engine.wire.registry import Registry

__all__ = ["WRITE_BYTES", "Connection", "Handler", "Reply", "Service"]

log = logging.getLogger(__name__)

Reply: TypeAlias = Buffer | None
"""The body of a reply, or None when the operation has none."""

# The longest a refused or failed peer may take to read the reason.
_LINGER_S = 1.0
# Replies are gathered up to this before they are handed to the transport.
WRITE_BYTES = 1 << 16
# After so much of one peer the others are heard, whatever it has asked besides. What a request
# costs grows with its length and that of its reply, and there is a cost of each.
TURN_BYTES = 1 << 16
_REQUEST_BYTES = 128


@dataclass(frozen=True, slots=True)
class Service:
    """What all connections of a server share: what is served, how, and who keeps count of them."""

    registry: Registry
    handle: Handler
    limits: ServerLimits
    short_limits: dict[int, int]
    """Replies up to these lengths are gathered; longer ones leave alone, or not at all."""
    identity: Identity
    keyring: Keyring | None
    own_user: bool
    """Whether other users of this host are sent away."""
    reached: Reached
    versions: VersionRange
    spin: LoopSpin | None
    entrance: Entrance[Connection]
    unfinished: Unfinished[Connection]
    meet: Callable[[Connection], None]
    """Count a connection in."""
    forget: Callable[[Connection], None]
    """Count a connection out."""


class Connection(asyncio.Protocol):
    """A peer of a server, as its handler sees it.

    `peer` is its address, `session` what the handshake established, `context` is for the handler
    to keep what it likes.
    """

    def __init__(self, service: Service) -> None:
        self.peer = "?"
        self.context: Any = None
        self._socket: Any = None
        self._session: Session | None = None
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._handle: Handler = service.handle
        self._limits = service.limits
        self._spin = service.spin
        self._reply_limits = service.registry.reply_limits
        versions = service.versions
        self._handshake = ServerHandshake(
            service.identity, secret=service.keyring, versions=versions
        )
        self._beyond: frozenset[int] = frozenset()  # opcodes that are not for this peer
        self._decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False, versions=versions)
        self._version = versions.newest
        self._callbacks: list[Callable[[], None]] = []
        self._stays = False
        self._resumed: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._backlog: list[Frame] = []
        self._write_paused = False
        self._reading = True
        self._draining = False
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def session(self) -> Session:
        """What the handshake established; handlers only run after it."""
        assert self._session is not None
        return self._session

    def on_close(self, callback: Callable[[], None], *, stays: bool = True) -> None:
        """Call `callback` once this connection is gone, for whatever reason.

        Unless it `stays`, it may be ended while it is idle, to make room for another.
        """
        self._callbacks.append(callback)
        self._stays = self._stays or stays

    @property
    def idle_s(self) -> float:
        """For how long nothing was asked or told here; below 0 where a request is under way."""
        under_way = self._tasks or self._backlog or self._resumed or self._write_paused
        return -1.0 if self._stays or under_way or self._closing else tcp_idle_s(self._socket)

    @property
    def beginning(self) -> bytearray:
        """What there is of a frame that has not ended."""
        return self._decoder.beginning

    @property
    def writable(self) -> bool:
        """Whether the peer takes its replies; not where it is gone."""
        return not (self._write_paused or self._closing)

    def on_writable(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the peer takes its replies again."""
        self._resumed.append(callback)

    def close(self) -> None:
        """Send what was answered, then close; a peer that does not read is cut off."""
        # Not at once: the replies to the requests of the same read are still being gathered.
        self._loop.call_soon(self._hang_up, b"")

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over an accepted socket."""
        self._transport = cast("asyncio.Transport", transport)
        self._service.meet(self)
        try:
            self._transport.set_write_buffer_limits(high=self._limits.write_bytes_max)
            self._identify(transport.get_extra_info("socket"), transport.get_extra_info("peername"))
        except OSError:  # it left before it was met
            self._closing = True
            self._transport.abort()
            return
        self._timer = self._loop.call_later(self._limits.handshake_s, self._handshake_overdue)
        host = self.peer.rpartition(":")[0]
        first = self._service.entrance.arrive(self, host)
        if first is not None:
            first.give_way()

    def data_received(self, data: bytes) -> None:
        """Answer the requests that are complete."""
        if self._closing:
            return
        frames = self._decoder.feed(data)
        if self._session is not None:
            self._serve(frames)
        else:
            self._shake(frames)
        if self._decoder.error is not None and not self._closing:
            self._violated(self._decoder.error)
        if self._spin is not None:
            limits = self._limits
            brief = len(data) <= limits.awake_bytes_max
            if brief or (frames and frames[-1].opcode in limits.awake_opcodes):
                self._spin.expect()
            else:
                self._spin.rest()

    def pause_writing(self) -> None:
        """Note that the peer does not take its replies."""
        self._write_paused = True

    def resume_writing(self) -> None:
        """Go on where `pause_writing` stopped."""
        self._write_paused = False
        self._unblock()
        for callback in self._resumed:
            callback()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything that belonged to the peer."""
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._backlog.clear()
        for task in self._tasks:
            task.cancel()
        self._service.forget(self)
        self._socket = None
        for callback in self._callbacks:
            try:
                callback()
            except Exception:
                log.exception("a close callback of %s failed", self.peer)
        self._callbacks.clear()
        self._resumed.clear()

    # Handshake.

    def unsealed(self, error: StoreError) -> None:
        """Note that there is no TLS with the peer, which was told why."""
        self._tell("unsealed", error.what)
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(_LINGER_S, self._transport.abort)

    def _identify(self, sock: Any, peername: Any) -> None:
        if sock is None:
            return
        tune(sock)
        if peername is None:
            raise ConnectionResetError("it has no address any more")
        self.peer = f"{peername[0]}:{peername[1]}"
        self._socket = sock
        # Not a method of this: what is closed is to be gone at once, whatever it had received.
        self._handshake.objection = partial(
            self._service.reached.objection, here=sock.getsockname()
        )

    def _shake(self, frames: list[Frame]) -> None:
        for frame in frames:
            if self._handshake.session is not None:
                self._violated(RemoteProtocolError("a frame came before the welcome was read"))
                return
            answer = self._handshake.receive(frame)
            if self._handshake.failure is not None:
                self._tell("refused", str(self._handshake.failure))
                self._hang_up(answer)
                return
            if self._is_stranger() or not self._has_place():
                return
            self._transport.write(answer)
        if self._handshake.session is not None:
            session = self._session = self._handshake.session
            self._version = session.version
            self._beyond = self._service.registry.beyond(session.rights.role)
            self._decoder.expect(
                self._service.registry.request_limits,
                replies=False,
                versions=VersionRange(session.version, session.version),
            )
            if self._timer is not None:
                self._timer.cancel()

    def _has_place(self) -> bool:
        """Whether there is a place for what may be a session by now; who has none is told so."""
        if self._handshake.session is None:
            return True
        entrance = self._service.entrance
        admitted, idle = entrance.admit(self)
        if idle is not None:
            idle.give_way()
        if not admitted:
            entrance.leave(self)
            self._hang_up(
                refusal(
                    UnavailableError(
                        f"the server has all its {entrance.sessions_max} connections in use",
                        advice="close idle clients, or raise connections_max",
                    )
                )
            )
            self._tell("full", f"all {entrance.sessions_max} connections are at work")
        return admitted

    def _is_stranger(self) -> bool:
        """Whether it is another user of this host, who is told so and leaves."""
        if self._handshake.session is None or not self._service.own_user or self._socket is None:
            return False
        try:
            error = stranger(self._socket)
        except OSError:  # it left
            self._transport.abort()
            return True
        if error is not None:
            self._tell("refused", error.what)
            self._hang_up(refusal(error))
        return error is not None

    def _tell(self, kind: str, what: str) -> None:
        self._service.entrance.tell(kind, f"{self.peer}: {what}")

    def _handshake_overdue(self) -> None:
        self._tell("silent", f"the handshake was not finished in {self._limits.handshake_s:g} s")
        self._hang_up(refusal(TransferTimeoutError("the handshake was not finished in time")))

    # Requests.

    @property
    def _blocked(self) -> bool:
        return self._write_paused or len(self._tasks) >= self._limits.in_flight_max

    def _serve(self, frames: list[Frame]) -> None:
        """Answer frames in order, up to the point where the peer must first take its replies.

        After each `TURN_BYTES` of requests and replies others have their turn.
        """
        if self._backlog:
            self._backlog += frames
            return
        handle, version, beyond = self._handle, self._version, self._beyond
        short_limits = self._service.short_limits
        out: list[bytes] = []
        waiting = 0
        left = TURN_BYTES
        for position, frame in enumerate(frames, 1):
            if left < 0:
                self._let_others(out, frames[position - 1 :])
                return
            left -= len(frame.body) + _REQUEST_BYTES
            try:
                if frame.opcode in beyond:
                    raise self._not_allowed(frame)
                reply = handle(self, frame)
            except Exception as error:
                encoded = self._error(frame, error)
            else:
                if reply is None:
                    continue
                if type(reply) is bytes and len(reply) <= short_limits[frame.opcode]:
                    encoded = encode_frame(frame.opcode, reply, REPLY, frame.request_id, 0, version)
                else:
                    if out:  # replies leave in the order of their requests
                        self._transport.write(b"".join(out))
                        out.clear()
                        waiting = 0
                    left -= self._reply_slowly(frame, reply)
                    if self._blocked or self._closing:
                        self._stop_reading(frames[position:])
                        return
                    continue
            out.append(encoded)
            waiting += len(encoded)
            left -= len(encoded)
            if waiting >= WRITE_BYTES:
                self._transport.write(b"".join(out))
                out.clear()
                waiting = 0
                if self._blocked or self._closing:
                    self._stop_reading(frames[position:])
                    return
        if out:
            if not self._transport.is_closing():
                self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        elif not frames:
            self._grew()
        if self._blocked:
            self._stop_reading([])

    def _not_allowed(self, frame: Frame) -> AuthError:
        """Say that an operation is for others, and what it was about, as far as that is said."""
        registry = self._service.registry
        operation = registry.by_opcode[frame.opcode]
        subject = None
        with contextlib.suppress(StoreError):
            subject = registry.subject(operation.request.unpack(frame.body))
        return self.session.rights.refusal(operation.needs, operation.name, self.peer, subject)

    def _let_others(self, out: list[bytes], backlog: list[Frame]) -> None:
        """Send what was answered, and go on once every other connection was heard."""
        if out and not self._transport.is_closing():
            self._transport.write(b"".join(out))
        self._stop_reading(backlog)
        self._loop.call_soon(self._unblock)

    def _grew(self) -> None:
        """Count what a frame has grown by that has not ended."""
        for each in self._service.unfinished.grew(self):
            each.drop("of all unfinished requests, too large together, it had most")

    def _reply_slowly(self, frame: Frame, reply: Any) -> int:
        """Send a long body without copying it, or start the task that will make one.

        Returns how long the body is, as far as that is known.
        """
        if isinstance(reply, (bytes, bytearray, memoryview)):
            self.send(frame, reply)
            return len(reply)
        task = self._loop.create_task(self._finish(frame, reply))
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return 0

    async def _finish(self, frame: Frame, awaitable: Awaitable[Reply]) -> None:
        try:
            async with asyncio.timeout(frame.deadline_ms / 1000 if frame.deadline_ms else None):
                reply = await awaitable
        except TimeoutError as error:
            overdue: Exception = error
            if not isinstance(error, StoreError):
                overdue = TransferTimeoutError(
                    "the request was not finished within the deadline of its caller",
                    elapsed_s=frame.deadline_ms / 1000,
                )
            self._write(self._error(frame, overdue))
        except Exception as error:
            self._write(self._error(frame, error))
        else:
            if reply is not None:
                self.send(frame, reply)

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("replying to %s failed", self.peer, exc_info=task.exception())
        self._unblock()

    def send(self, frame: Frame, body: Buffer) -> None:
        """Reply to a request, at once.

        A handler that returned None may do so any number of times; it looks at `writable` first.
        """
        if len(body) > self._reply_limits[frame.opcode]:
            error = StoreError(
                f"the reply of {len(body)} bytes exceeds the limit of its operation",
                advice="ask for less in one request",
            )
            self._write(self._error(frame, error))
        elif not self._transport.is_closing():
            self._transport.writelines(
                encode_frame_parts(
                    frame.opcode, body, flags=REPLY, request_id=frame.request_id,
                    version=self._version,
                )
            )  # fmt: skip

    def _write(self, encoded: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(encoded)

    def _error(self, frame: Frame, error: Exception) -> bytes:
        """Return the error frame for what a handler raised; only what is unexpected is logged."""
        if not isinstance(error, StoreError):
            operation = self._service.registry.by_opcode[frame.opcode].name
            known = {"request": frame.request_id, "peer": self.peer, "operation": operation}
            told = "operation %s for %s failed"
            log.error(told, operation, self.peer, exc_info=error, extra=known)
            error = StoreError(
                f"the server failed: {type(error).__name__}: {error}",
                operation=operation,
                advice="see the log of the server",
            )
        return encode_frame(
            frame.opcode, encode_error(error), flags=REPLY | ERROR, request_id=frame.request_id,
            version=self._version,
        )  # fmt: skip

    # Flow and end.

    def _stop_reading(self, backlog: list[Frame]) -> None:
        self._backlog = [] if self._closing else backlog
        if self._reading and not self._transport.is_closing():
            self._reading = False
            self._transport.pause_reading()

    def _unblock(self) -> None:
        if self._blocked or self._closing or (self._reading and not self._draining):
            return
        backlog, self._backlog = self._backlog, []
        self._serve(backlog)
        if self._blocked or self._backlog or self._transport.is_closing():
            return
        if self._draining:
            self._finish_drain()
        elif not self._reading:
            self._reading = True
            self._transport.resume_reading()

    def _violated(self, error: RemoteProtocolError) -> None:
        self._tell("broken", f"it broke the protocol: {error}")
        if self._session is None:
            self._hang_up(refusal(error, self._version))
        else:
            # Request id 0 belongs to no request: this is about the connection.
            self._hang_up(
                encode_frame(
                    REFUSED, encode_error(error), flags=REPLY | ERROR, version=self._version
                )
            )

    def _hang_up(self, last_words: bytes) -> None:
        if self._closing:
            return
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if last_words:
            self._write(last_words)
        self._transport.close()
        self._timer = self._loop.call_later(_LINGER_S, self._transport.abort)

    def give_way(self) -> None:
        """End, to make room for another: a session that is idle, or a stranger."""
        if self._session is None:
            self._tell("crowded", "too many others came before it had finished its handshake")
            self._hang_up(
                refusal(UnavailableError("too many others came before this handshake was finished"))
            )
        else:
            self._hang_up(
                encode_frame(
                    REFUSED, encode_error(gave_way()), flags=REPLY | ERROR, version=self._version
                )
            )

    def end_unless_holds(self, keyring: Keyring) -> None:
        """End a session whose rights have ended."""
        if self._session is not None and not keyring.holds(self._session.rights):
            rights = self._session.rights
            self._tell("revoked", f"the credential of {rights.principal} holds no more")
            self._hang_up(
                encode_frame(
                    REFUSED, encode_error(rights.ended()), flags=REPLY | ERROR,
                    version=self._version,
                )
            )  # fmt: skip

    def drop(self, why: str) -> None:
        """End at once: the peer asks for more than it gets."""
        self._tell("dropped", why)
        self._closing = True
        self._transport.abort()

    def drain(self) -> None:
        """Read no more, answer what was read, then close."""
        self._draining = True
        self._stop_reading(self._backlog)
        self._finish_drain()

    def _finish_drain(self) -> None:
        if not self._tasks and not self._backlog and not self._closing:
            self._closing = True
            self._transport.close()  # after what is still buffered; the server bounds the wait

    def abort(self) -> None:
        """Close at once, whatever is unsent."""
        self._transport.abort()


Handler: TypeAlias = Callable[[Connection, Frame], Reply | Awaitable[Reply]]
"""What a service is: a request in, the body of its reply out, at once or later."""
