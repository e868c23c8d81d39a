"""An asyncio client: one connection carries many requests at once, told apart by their id.

    client = AsyncClient("127.0.0.1:7000", registry)
    body = await client.call(GET, GET.request.pack(...), timeout_s=1.0)

A call may be cancelled at any point and costs the connection nothing: its reply, if one comes, is
dropped by its id, as is one that comes after its deadline. At most `in_flight_max` requests are
open, and none is written while the peer does not read; callers wait for both within their own
deadline. When the connection ends every open call gets PeerLostError, and the next call of an
`AsyncClient` connects again.

What it does not do: retry, and being used from two event loops.
Most of the cost of a call is asyncio's; use the blocking client where latency counts.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any, cast

from transfer_engine.errors import (
    LocalProtocolError,
    RemoteProtocolError,
    StoreError,
    UnavailableError,
)
from transfer_engine.rpc.address import Address, tune
from transfer_engine.rpc.blocking import deadline_ms
from transfer_engine.rpc.failures import locate, lost, overdue, unreachable, unserved
from transfer_engine.rpc.reached import dialled
from transfer_engine.rpc.sealed import SealedTransport
from transfer_engine.wire.faults import decode_error
from transfer_engine.wire.frame import (
    ERROR,
    Body,
    Buffer,
    Frame,
    FrameDecoder,
    VersionRange,
    encode_frame,
)
from transfer_engine.wire.handshake import (
    HANDSHAKE_LIMITS,
    ClientHandshake,
    Identity,
    Session,
)
from transfer_engine.wire.keyring import tls_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation, Registry

__all__ = ["AsyncClient", "AsyncConnection", "Following"]

_LOOKS = 4
"""How often it is looked whether a peer is silent, before it is called so: whoever stood still
itself meanwhile takes what came before it looks again."""


class AsyncConnection(asyncio.Protocol):
    """One multiplexed connection; it does not come back once it is lost."""

    def __init__(
        self,
        peer: str,
        registry: Registry,
        handshake: ClientHandshake,
        in_flight_max: int,
    ) -> None:
        self.peer = peer
        self._registry = registry
        self._handshake: ClientHandshake | None = handshake
        self._session: Session | None = None
        self._decoder = FrameDecoder(HANDSHAKE_LIMITS, replies=False)
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._open: dict[int, tuple[int, asyncio.Future[Frame]]] = {}
        self._followed: dict[int, Following] = {}
        self._slots = asyncio.Semaphore(in_flight_max)
        self._writable = asyncio.Event()
        self._writable.set()
        self._next_id = 1
        self._version = 0
        self._failure: Exception | None = None
        self._lost = asyncio.Event()

    @classmethod
    async def connect(
        cls,
        address: str | Address,
        registry: Registry,
        *,
        identity: Identity | None = None,
        secret: Secret | None = None,
        timeout_s: float = 5.0,
        in_flight_max: int = 1024,
    ) -> AsyncConnection:
        """Connect and shake hands within `timeout_s`; raises as `BlockingConnection.connect`."""
        start = time.monotonic()
        where = Address.parse(address) if isinstance(address, str) else address
        me = identity or Identity(registry.service, role="client")
        handshake = ClientHandshake(me, secret=secret)
        connection = cls(str(where), registry, handshake, in_flight_max)
        loop, tls = connection._loop, tls_of(secret)
        protocol: asyncio.Protocol = connection
        if tls is not None:
            protocol = SealedTransport(connection, tls.seal_of_client(where.host))
        accepted = False
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: protocol, where.host, where.port)
                accepted = True
                await connection._ready
        except BaseException as error:
            connection._end(None)
            elapsed_s = time.monotonic() - start
            if isinstance(error, StoreError):
                locate(error, str(where), "connect", elapsed_s)
            elif isinstance(error, OSError):
                raise unreachable(where, elapsed_s, error, accepted=accepted) from error
            raise
        return connection

    @property
    def session(self) -> Session:
        """What the handshake established."""
        assert self._session is not None
        return self._session

    @property
    def closed(self) -> bool:
        """Whether this connection can no longer be used."""
        return self._failure is not None

    async def call(self, operation: Operation[Any, Any], body: Buffer, *, timeout_s: float) -> Body:
        """Send a request and return the body of its reply, both within `timeout_s`."""
        if len(body) > self._registry.request_limits[operation.opcode]:
            raise LocalProtocolError(
                f"a body of {len(body)} bytes exceeds the limit of {operation.name}",
                advice="split the batch",
            )
        start = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s), self._slots:
                frame = await self._exchange(operation, body, start, timeout_s)
        except TimeoutError as error:
            if isinstance(error, StoreError):
                raise
            elapsed_s = time.monotonic() - start
            raise overdue(self.peer, operation.name, timeout_s, elapsed_s) from None
        if frame.flags & ERROR:
            raise locate(decode_error(frame.body), self.peer, operation.name, None)
        return frame.body

    def follow(
        self, operation: Operation[Any, Any], body: Buffer, take: Callable[[Body], None]
    ) -> Following:
        """Send a request that is answered again and again; `take` is called with each answer.

        It is on its way when this returns, before all that is asked behind it.
        """
        if self._failure is not None:
            raise self._gone(operation.name, time.monotonic())
        request_id = self._next_id
        self._next_id += 1
        following = Following(self, operation, request_id, take)
        self._followed[request_id] = following
        self._transport.write(
            encode_frame(operation.opcode, body, request_id=request_id, version=self._version)
        )
        return following

    async def _exchange(
        self, operation: Operation[Any, Any], body: Buffer, start: float, timeout_s: float
    ) -> Frame:
        if not self._writable.is_set():
            await self._writable.wait()
        if self._failure is not None:
            raise self._gone(operation.name, start)
        request_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Frame] = self._loop.create_future()
        self._open[request_id] = (operation.opcode, future)
        left_ms = deadline_ms(timeout_s - (time.monotonic() - start))
        try:
            self._transport.write(
                encode_frame(
                    operation.opcode, body, request_id=request_id, deadline_ms=left_ms,
                    version=self._version,
                )
            )  # fmt: skip
            return await future
        except ConnectionAbortedError:
            raise self._gone(operation.name, start) from self._failure
        finally:
            self._open.pop(request_id, None)

    def _gone(self, operation: str, start: float) -> StoreError:
        """Return what the end of the connection means to one call."""
        elapsed_s = time.monotonic() - start
        failure = self._failure
        if isinstance(failure, StoreError):
            return type(failure)(
                failure.what,
                peer=self.peer,
                operation=failure.operation or operation,
                elapsed_s=elapsed_s,
                advice=failure.advice,
            )
        return lost(self.peer, operation, elapsed_s, failure if failure and failure.args else None)

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first frame of the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        tune(transport.get_extra_info("socket"))
        assert self._handshake is not None
        self._transport.write(self._handshake.start(dialled(transport.get_extra_info("peername"))))

    def data_received(self, data: bytes) -> None:
        """Hand replies to the calls that wait for them."""
        if self._failure is not None:
            return
        try:
            frames = self._decoder.feed(data)
            if self._handshake is not None:
                self._shake(self._handshake, frames)
            else:
                for frame in frames:
                    self._deliver(frame)
            if self._decoder.error is not None:
                raise self._decoder.error.again()
        except StoreError as error:
            self._end(error.again())

    def _shake(self, handshake: ClientHandshake, frames: list[Frame]) -> None:
        for frame in frames:
            self._transport.write(handshake.receive(frame))
        if handshake.session is not None:
            session = self._session = handshake.session
            self._handshake = None
            self._version = session.version
            self._decoder.expect(
                self._registry.reply_limits,
                replies=True,
                versions=VersionRange(session.version, session.version),
            )
            self._ready.set_result(None)

    def _deliver(self, frame: Frame) -> None:
        opcode, future = self._open.get(frame.request_id, (-1, None))
        if future is None:
            following = self._followed.get(frame.request_id)
            if following is not None:
                following.deliver(frame)
                return
            if frame.request_id == 0 and frame.flags & ERROR:
                raise decode_error(frame.body)
            if not 0 < frame.request_id < self._next_id:
                raise RemoteProtocolError(f"a reply came to request {frame.request_id}, never sent")
            return  # its caller gave up: cancelled, or out of time
        if opcode != frame.opcode:
            raise RemoteProtocolError(f"the reply has opcode {frame.opcode:#06x}")
        if not future.done():
            future.set_result(frame)

    def unsealed(self, error: StoreError) -> None:
        """Tell every open call that there is no TLS with the peer."""
        self._end(error)

    def pause_writing(self) -> None:
        """Hold further requests back: the peer does not read."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Let requests go again."""
        self._writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell every open call."""
        self._end(exc)
        self._lost.set()

    def _end(self, error: Exception | None) -> None:
        if self._failure is not None:
            return
        self._failure = error or ConnectionResetError()
        if not self._ready.done():
            self._ready.set_exception(error or ConnectionResetError("closed by the peer"))
            self._ready.exception()  # seen, also when `connect` has been cancelled
        for _, future in list(self._open.values()):
            if not future.done():
                future.set_exception(ConnectionAbortedError())
        for following in self._followed.values():
            following.news.set()
        self._writable.set()
        transport = getattr(self, "_transport", None)
        if transport is None:
            self._lost.set()  # never connected
        else:
            transport.abort()

    async def close(self) -> None:
        """Close now; open calls get PeerLostError. Idempotent."""
        self._end(ConnectionResetError("closed by this side"))
        await self._lost.wait()

    async def __aenter__(self) -> AsyncConnection:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Following:
    """A request that is answered again and again, made by `AsyncConnection.follow`."""

    def __init__(
        self,
        connection: AsyncConnection,
        operation: Operation[Any, Any],
        request_id: int,
        take: Callable[[Body], None],
    ) -> None:
        self._connection = connection
        self._operation = operation
        self._request_id = request_id
        self._take = take
        self._refusal: StoreError | None = None
        self.news = asyncio.Event()
        """Set by each answer, and by the end of the connection."""

    def deliver(self, frame: Frame) -> None:
        """Take an answer in."""
        self.news.set()
        if frame.opcode != self._operation.opcode:
            raise RemoteProtocolError(f"the reply has opcode {frame.opcode:#06x}")
        if frame.flags & ERROR:
            self._refusal = decode_error(frame.body)
        else:
            self._take(frame.body)

    async def ended(self, silence_s: float) -> StoreError:
        """Wait until no answer can come any more; return why.

        That the peer refused it or is gone, or TransferTimeoutError when nothing came for so long.
        Whoever is cancelled here is told of no further answer.
        """
        began, silent = time.monotonic(), 0
        connection, name = self._connection, self._operation.name
        try:
            while self._refusal is None and not connection.closed and silent < _LOOKS:
                self.news.clear()
                try:
                    async with asyncio.timeout(silence_s / _LOOKS):
                        await self.news.wait()
                    silent = 0
                except TimeoutError:
                    silent += 1
        finally:
            connection._followed.pop(self._request_id, None)
        if self._refusal is not None:
            return locate(self._refusal, connection.peer, name, None)
        if connection.closed:
            return connection._gone(name, began)
        return overdue(connection.peer, name, silence_s, time.monotonic() - began)


class AsyncClient:
    """A connection that is opened when first needed and again when it was lost."""

    def __init__(
        self,
        address: str | Address,
        registry: Registry,
        *,
        connect_s: float = 5.0,
        identity: Identity | None = None,
        secret: Secret | None = None,
        in_flight_max: int = 1024,
    ) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self._registry = registry
        self._connect_s = connect_s
        self._identity = identity
        self._secret = secret
        self._in_flight_max = in_flight_max
        self._connection: AsyncConnection | None = None
        self._connecting = asyncio.Lock()
        self._closed = False

    async def call(self, operation: Operation[Any, Any], body: Buffer, *, timeout_s: float) -> Body:
        """Send a request and return the body of its reply, connecting included in `timeout_s`."""
        connection = self._connection
        while True:
            start = time.monotonic()
            if connection is None or connection.closed:
                connection = await self.connected(timeout_s)
                timeout_s -= time.monotonic() - start
                start = time.monotonic()
            try:
                return await connection.call(operation, body, timeout_s=timeout_s)
            except UnavailableError as error:
                if not unserved(error):
                    raise
                timeout_s -= time.monotonic() - start

    async def connected(self, timeout_s: float) -> AsyncConnection:
        """Return the connection, a new one if there is none or it was lost."""
        start = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                return await self._connect()
        except TimeoutError as error:
            raise unreachable(
                self.address, time.monotonic() - start, error, accepted=False
            ) from None

    async def _connect(self) -> AsyncConnection:
        async with self._connecting:  # callers that come meanwhile share the new connection
            if self._closed:
                raise UnavailableError("the client is closed", peer=str(self.address))
            if self._connection is None or self._connection.closed:
                self._connection = await AsyncConnection.connect(
                    self.address,
                    self._registry,
                    identity=self._identity,
                    secret=self._secret,
                    timeout_s=self._connect_s,
                    in_flight_max=self._in_flight_max,
                )
            return self._connection

    async def close(self) -> None:
        """Close the connection, for good. Idempotent."""
        self._closed = True
        if self._connection is not None:
            await self._connection.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
