"""Serving an aiohttp application on a port that strangers reach. Needs `aiohttp`.

    server = WebServer(shelled(shell, routes, ...), listener, "the REST port")
    await server.start()
    ...
    await server.cleanup()

aiohttp waits as long as it takes for the head of a first request, and takes as many connections as
come. Here a connection gets to it once the head has arrived, all of it within `HANDSHAKE_S`; before
that it is a stranger (`transfer_engine.rpc.entrance`). Then it is one of `SESSIONS_MAX`. Those that
wait for a request, or are still sending one, make room for others, who was silent for longest
first; those whose request is being answered never do. A body has to go on, by `GROWTH_BYTES` each
`STALL_S`. What a request may be is `program.shell`'s.

What clients do wrong aiohttp logs each time, with a traceback; here it is told once in a while, in
a line.
"""

from __future__ import annotations

import asyncio
import logging
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

from aiohttp import ClientConnectionResetError, web
from aiohttp.http_exceptions import HttpProcessingError

from transfer_engine.lasting import Seldom
from transfer_engine.rpc.accepting import Acceptor
from transfer_engine.rpc.entrance import GROWTH_BYTES, HANDSHAKE_S, STALL_S, Entrance
from transfer_engine.rpc.http import unsealed_answer
from transfer_engine.rpc.sealed import SealedTransport

if TYPE_CHECKING:
    import socket
    from collections.abc import Awaitable, Callable

    from transfer_engine.errors import StoreError
    from transfer_engine.wire.tls import Tls

__all__ = ["SESSIONS_MAX", "WebServer"]

log = logging.getLogger(__name__)

SESSIONS_MAX = 1024
_HEAD_BYTES_MAX = 64 << 10
_CALLERS = HttpProcessingError, ClientConnectionResetError
"""What aiohttp raises for what a caller has sent, or that it left."""
_SHOWN = 200
_END = b"\r\n\r\n"
_FULL = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nRetry-After: 1\r\n"
    b"Connection: close\r\n\r\n"
)


class _Once(logging.Filter):
    """Lets what is logged again and again through once in a while."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom: dict[object, Seldom] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        kind, error = record.exc_info[:2] if record.exc_info else (None, None)
        more = self._seldom.setdefault((record.msg, kind), Seldom()).due()
        if more is None:
            return False
        text = record.getMessage()
        if isinstance(error, _CALLERS):
            record.exc_info = record.exc_text = None
            record.levelno, record.levelname = logging.WARNING, "WARNING"
            text = f"{text}: {type(error).__name__}: {' '.join(str(error).split())[:_SHOWN]}"
        record.msg, record.args = text + more, ()
        return True


class _Door(asyncio.Protocol):
    """What stands between a connection and aiohttp."""

    def __init__(self, server: WebServer) -> None:
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._head = bytearray()
        self._handler: Any = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = self._loop.time()
        self._received = self._noted = 0
        self._peer = "?"
        self.request: web.BaseRequest | None = None

    @property
    def idle_s(self) -> float:
        """For how long it has not been answered anything; below 0 while it is."""
        if self.request is not None and self.request.content.is_eof():
            return -1.0
        return self._loop.time() - self._since

    def begin(self, request: web.BaseRequest) -> None:
        self.request = request
        self._since, self._noted = self._loop.time(), self._received

    def end(self) -> None:
        self.request = None
        self._since = self._loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        if peer is None:  # it left before it was met
            self._transport.abort()
            return
        self._peer = f"{peer[0]}:{peer[1]}"
        self._timer = self._loop.call_later(HANDSHAKE_S, self._overdue)
        self._server.doors.add(self)
        self._server.give_way(self._server.entrance.arrive(self, peer[0]))

    def give_way(self) -> None:
        """End, to make room for another."""
        if self._transport is not None:
            if self._handler is None:
                self._tell("crowded", "too many others came before its request")
            self._transport.abort()

    def _tell(self, kind: str, what: str) -> None:
        self._server.entrance.tell(kind, f"{self._peer}: {what}")

    def _overdue(self) -> None:
        assert self._transport is not None
        self._tell("silent", f"no request came in {HANDSHAKE_S:g} s")
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._received += len(data)
        if self._handler is None:
            self._head += data
            if self._head.find(_END, max(0, len(self._head) - len(data) - len(_END))) < 0:
                if len(self._head) > _HEAD_BYTES_MAX:
                    self._tell("broken", f"a head of more than {_HEAD_BYTES_MAX} bytes")
                    assert self._transport is not None
                    self._transport.abort()
                return
            if not self._enter():
                return
            data = bytes(self._head)
            self._head.clear()
        self._handler.data_received(data)

    def _enter(self) -> bool:
        """Become a session; whether there is room for it."""
        transport = self._transport
        assert transport is not None
        assert self._timer is not None
        if transport.is_closing():
            return False
        self._timer.cancel()
        entrance = self._server.entrance
        admitted, idle = entrance.admit(self)
        self._server.give_way(idle)
        if not admitted:
            self._tell("full", f"all {entrance.sessions_max} connections are at work")
            transport.write(_FULL)
            transport.close()
            return False
        self._since = self._loop.time()
        self._handler = self._server.handler(self)
        self._handler.connection_made(transport)
        return True

    def check(self) -> None:
        """End a connection whose request does not go on."""
        request, transport = self.request, self._transport
        if request is None or request.content.is_eof() or transport is None:
            return
        if self._received - self._noted >= GROWTH_BYTES:
            self._since, self._noted = self._loop.time(), self._received
        elif self.idle_s > STALL_S:
            self._tell("dropped", f"its request did not go on for {STALL_S:g} s")
            transport.abort()

    def unsealed(self, error: StoreError) -> None:
        """Say that there is no TLS with it; it goes, or is held to be silent."""
        self._tell("unsealed", error.what)

    def hang_up(self) -> None:
        """End a stranger; aiohttp ends all others."""
        if self._handler is None and self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> bool | None:
        return None if self._handler is None else self._handler.eof_received()

    def pause_writing(self) -> None:
        if self._handler is not None:
            self._handler.pause_writing()

    def resume_writing(self) -> None:
        if self._handler is not None:
            self._handler.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._server.leave(self, self._handler)
        if self._handler is not None:
            self._handler.connection_lost(exc)


class WebServer:
    """Serves until `cleanup`; takes the listener over. `options` are those of `web.AppRunner`.

    With `tls` it answers by https alone.
    """

    def __init__(
        self,
        application: web.Application,
        listener: socket.socket,
        name: str,
        *,
        tls: Tls | None = None,
        **options: Any,
    ) -> None:
        self._tls = tls
        answers = log.getChild("answers")
        if not any(isinstance(each, _Once) for each in answers.filters):
            answers.addFilter(_Once())
        application.middlewares.insert(0, self._middleware())
        # Bodies stay as they come: a small one could become a large one before anybody objects.
        self._runner = web.AppRunner(
            application, access_log=None, logger=answers, auto_decompress=False, **options
        )
        self._listener = listener
        self._name = name
        self.address: tuple[str, int] = listener.getsockname()[:2]
        self.entrance = Entrance[_Door](
            name, idle_s=attrgetter("idle_s"), sessions_max=SESSIONS_MAX, log=log
        )
        self.doors: set[_Door] = set()
        self._behind: dict[object, _Door] = {}
        self._acceptor: Acceptor | None = None
        self._sweeping: asyncio.TimerHandle | None = None

    def _middleware(self) -> Any:
        @web.middleware
        async def noted(
            request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
        ) -> web.StreamResponse:
            door = self._behind.get(request.protocol)
            if door is None:
                return await handler(request)
            door.begin(request)
            try:
                return await handler(request)
            finally:
                door.end()

        return noted

    async def start(self) -> None:
        """Take connections."""
        await self._runner.setup()
        self._acceptor = Acceptor(
            self._listener,
            self._name,
            self._door,
            lambda: self.give_way(self.entrance.relieve()),
        )
        self._sweep()

    def _door(self) -> asyncio.Protocol:
        door = _Door(self)
        if self._tls is None:
            return door
        return SealedTransport(door, self._tls.seal_of_http(), unsealed_answer)

    def handler(self, door: _Door) -> asyncio.Protocol:
        """What aiohttp has for a connection; it is told of its requests from now on."""
        server = self._runner.server
        assert server is not None
        handler = server()
        self._behind[handler] = door
        return handler

    def give_way(self, first: _Door | None) -> None:
        """End whoever has to go for a newcomer."""
        if first is not None:
            first.give_way()

    def leave(self, door: _Door, handler: object) -> None:
        """Count a connection out."""
        self.entrance.leave(door)
        self.doors.discard(door)
        self._behind.pop(handler, None)

    def _sweep(self) -> None:
        for door in tuple(self.doors):
            door.check()
        self._sweeping = asyncio.get_running_loop().call_later(STALL_S / 3, self._sweep)

    async def cleanup(self) -> None:
        """Serve no more: what is being answered gets the time that the runner has for it."""
        if self._acceptor is not None:
            self._acceptor.close()
        self._listener.close()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for door in tuple(self.doors):
            door.hang_up()
        await self._runner.cleanup()
