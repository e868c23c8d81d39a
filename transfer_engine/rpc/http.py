"""A small HTTP/1.1 server with bounds: what a few programs poll, not what data moves over.

    class Hello(HttpServer):
        async def answer(self, request):
            return HttpReply(200, b"hello", TEXT)

    with Hello("127.0.0.1", 8080): ...

Bytes from the network are believed only within limits: head, body, connections, seconds; a request
that breaks one costs its connection. Bodies come with their length. A connection carries many
requests, one after the other. Who has yet to send the head of a first one is a stranger
(`entrance`); afterwards who waits with nothing asked makes room for others where all connections
are in use. A server on loopback answers only those who call it by a name of loopback: a page whose
own name was made to lead there does not. Whatever a page of a browser asks for, by its Origin,
changes nothing on any address. Nor does another user of the host, over its
loopback, unless it is `insecure`; both may look.

An asyncio server of its own rather than `http.server`: that reads up to 6 MB of headers a
connection before anybody can object, and a thread a connection invites slow clients to hold many.
It runs in a thread of its own, so that whoever starts it need not have a loop.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from abc import ABC, abstractmethod
from contextlib import aclosing, suppress
from http import HTTPStatus
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Self

from transfer_engine.errors import InvalidArgumentError
from transfer_engine.rpc.accepting import Acceptor, listen
from transfer_engine.rpc.address import Address, is_loopback
from transfer_engine.rpc.entrance import HANDSHAKE_S, Entrance
from transfer_engine.rpc.http_checks import is_own_host
from transfer_engine.rpc.neighbours import stranger
from transfer_engine.rpc.sealed import SealedTransport

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncGenerator, Callable, Mapping
    from types import TracebackType

    from transfer_engine.errors import StoreError
    from transfer_engine.wire.tls import Tls

__all__ = ["JSON", "TEXT", "HttpReply", "HttpRequest", "HttpServer", "unsealed_answer"]

_log = logging.getLogger(__name__)

TEXT = "text/plain; charset=utf-8"
JSON = "application/json; charset=utf-8"
CLOSE_S = 5.0
_TARGET = re.compile(r"/[\x21-\x7e]*")


class HttpRequest(NamedTuple):
    """One request; header names are in lower case."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    is_last: bool
    """Whether the peer asks to have the connection closed afterwards, or is too old to keep it."""


class HttpReply(NamedTuple):
    """What a request is answered with; a body of unknown length comes in pieces."""

    status: int
    body: bytes | AsyncGenerator[bytes]
    kind: str
    headers: Mapping[str, str] = {}
    """Further ones."""


class _Caller:
    """Who is connected; `since` when it has nothing asked, None while it is answered."""

    __slots__ = ("peer", "since", "sock", "stranger", "task")

    def __init__(self, task: asyncio.Task[None], peer: str, sock: socket.socket) -> None:
        self.task = task
        self.peer = peer
        self.sock = sock
        self.stranger = True
        self.since: float | None = None

    @property
    def idle_s(self) -> float:
        return -1.0 if self.since is None else time.monotonic() - self.since


class _Stream(asyncio.StreamReaderProtocol):
    """What reads requests; TLS may lie below."""

    refused: Callable[[str], None]

    def unsealed(self, error: StoreError) -> None:
        """Say whom there is no TLS with; who hears of that goes, or is held to be silent."""
        self.refused(error.what)


class HttpServer(ABC):
    """Answers requests until it is closed. `address` is "host:port"."""

    def __init__(
        self,
        host: str,
        port: int,
        *,
        connections_max: int = 256,
        patience_s: float = 5.0,
        head_bytes_max: int = 8 << 10,
        body_bytes_max: int = 64 << 10,
        name: str = "mooncake-http",
        insecure: bool = False,
        tls: Tls | None = None,
    ) -> None:
        """With `tls` it answers by https alone."""
        self._entrance = Entrance[_Caller](
            name, idle_s=attrgetter("idle_s"), sessions_max=connections_max, log=_log
        )
        self._name = name
        self._patience_s = patience_s
        self._head_bytes_max = head_bytes_max
        self._body_bytes_max = body_bytes_max
        self._is_local = is_loopback(host)
        self._insecure = insecure
        self._tls = tls
        self._tasks: set[asyncio.Task[None]] = set()
        listener = listen(host, port)
        self._loop = asyncio.new_event_loop()
        self._acceptor = self._loop.run_until_complete(self._begin(listener))
        self.address = str(Address(*listener.getsockname()[:2]))
        self.url = f"{'http' if tls is None else 'https'}://{self.address}"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @abstractmethod
    async def answer(self, request: HttpRequest) -> HttpReply:
        """Answer a request; it may take as long as the server has patience."""

    async def ended(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Let go of what belongs to the loop; no request follows."""

    async def _begin(self, listener: socket.socket) -> Acceptor:
        def protocol() -> asyncio.Protocol:
            reader = asyncio.StreamReader(self._head_bytes_max, self._loop)
            stream = _Stream(reader, self._connected, self._loop)
            if self._tls is None:
                return stream
            stream.refused = lambda why: self._entrance.tell("unsealed", why)
            return SealedTransport(stream, self._tls.seal_of_http(), unsealed_answer)

        return Acceptor(
            listener, self._name, protocol, lambda: self._give_way(self._entrance.relieve())
        )

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._end())
        self._loop.close()

    async def _end(self) -> None:
        self._acceptor.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.ended()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task, peer = asyncio.current_task(), writer.get_extra_info("peername")
        assert task is not None
        if peer is None:  # it left before it was met
            writer.close()
            return
        caller = _Caller(task, f"{peer[0]}:{peer[1]}", writer.get_extra_info("socket"))
        self._tasks.add(task)
        try:
            self._give_way(self._entrance.arrive(caller, peer[0]))
            while await self._serve(reader, writer, caller):
                caller.since = time.monotonic()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # it left, or held us up: its connection ends, which is all there is to do
        except asyncio.CancelledError:
            # Asked for by `close` or for a newcomer; the task ends as if its peer had left.
            pass
        except Exception:
            _log.exception("an answer broke off")
        finally:
            self._tasks.discard(task)
            self._entrance.leave(caller)
            writer.close()

    def _give_way(self, first: _Caller | None) -> None:
        """End whoever has to go for a newcomer."""
        if first is not None:
            if first.stranger:
                self._tell(first, "crowded", "too many others came before its request")
            first.task.cancel()

    def _tell(self, caller: _Caller, kind: str, what: str) -> None:
        self._entrance.tell(kind, f"{caller.peer}: {what}")

    async def _serve(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: _Caller
    ) -> bool:
        """Answer one request; whether another may follow."""
        bare = False  # an answer to HEAD tells of a body, but has none
        async with asyncio.timeout(self._patience_s):
            try:
                request = await self._receive(reader, caller)
            except InvalidArgumentError as error:
                # What follows on this connection may not be a request, so it ends.
                reply, is_last = HttpReply(400, str(error).encode(errors="replace"), TEXT), True
            else:
                caller.since = None
                if request is None:
                    reply, is_last = HttpReply(503, b"all connections are in use", TEXT), True
                else:
                    reply, is_last = await self._answered(request, caller), request.is_last
                    bare = request.method == "HEAD"
            writer.write(_head(reply, is_last))
            if isinstance(reply.body, bytes) and not bare:
                writer.write(reply.body)
            await writer.drain()
        if not (isinstance(reply.body, bytes) or bare):
            async with aclosing(reply.body) as pieces:  # also where its reader has left
                await self._send_pieces(pieces, writer)
        return not is_last

    def _admitted(self, caller: _Caller) -> bool:
        """Whether there is a place for who was a stranger so far."""
        if caller.stranger:
            admitted, idle = self._entrance.admit(caller)
            self._give_way(idle)
            if not admitted:
                most = self._entrance.sessions_max
                self._tell(caller, "full", f"all {most} connections are at work")
                return False
            caller.stranger, caller.since = False, time.monotonic()
        return True

    async def receive(self, request: HttpRequest, sock: socket.socket) -> HttpReply:
        """Answer a request of whoever is at the other end, if it may ask for that."""
        if request.method not in ("GET", "HEAD"):
            if "origin" in request.headers:
                return HttpReply(403, b"pages of a browser change nothing here", TEXT)
            other = None if self._insecure else stranger(sock)
            if other is not None:
                self.tell_refused(sock, other.what)
                return HttpReply(403, other.what.encode(), TEXT)
        return await self.answer(request)

    def tell_refused(self, sock: socket.socket, what: str) -> None:
        """Log once in a while why somebody was refused."""
        with suppress(OSError):  # it has left
            self._entrance.tell("refused", f"{Address(*sock.getpeername()[:2])}: {what}")

    async def _answered(self, request: HttpRequest, caller: _Caller) -> HttpReply:
        try:
            return await self.receive(request, caller.sock)
        except ConnectionResetError:  # it has left
            raise
        except Exception:
            _log.exception("%s %.100s could not be answered", request.method[:16], request.target)
            return HttpReply(500, b"internal error", TEXT)

    async def _send_pieces(
        self, pieces: AsyncGenerator[bytes], writer: asyncio.StreamWriter
    ) -> None:
        """Send a body whose end is marked, so that one that broke off is seen to have."""
        while True:
            async with asyncio.timeout(self._patience_s):
                piece = await anext(pieces, b"")
                writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                await writer.drain()
            if not piece:
                return

    async def _receive(self, reader: asyncio.StreamReader, caller: _Caller) -> HttpRequest | None:
        """Read one request within the limits; raises InvalidArgumentError for anything else.

        None where there is no place for who sends it.
        """
        try:
            async with asyncio.timeout(HANDSHAKE_S if caller.stranger else None):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            raise InvalidArgumentError(f"the head exceeds {self._head_bytes_max} bytes") from None
        lines = head.decode("latin-1").split("\r\n")
        words = lines[0].split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise InvalidArgumentError("not an HTTP request")
        if not _TARGET.fullmatch(words[1]):
            raise InvalidArgumentError("the target of the request is not a path")
        headers: dict[str, str] = {}
        for line in lines[1:-2]:
            name, colon, value = line.partition(":")
            if not colon or name.strip() != name or name.lower() in headers:
                raise InvalidArgumentError("a malformed or repeated header")
            headers[name.lower()] = value.strip()
        host = headers.get("host", "")
        if self._is_local and host and not is_own_host(host, "localhost", ()):
            raise InvalidArgumentError("the Host of the request is not this machine")
        length = headers.get("content-length", "0")
        if "transfer-encoding" in headers or not re.fullmatch(r"[0-9]{1,9}", length):
            raise InvalidArgumentError("a body needs its length in Content-Length")
        if int(length) > self._body_bytes_max:
            raise InvalidArgumentError(f"the body exceeds {self._body_bytes_max} bytes")
        wish = headers.get("connection", "").lower()
        if not self._admitted(caller):
            return None
        is_last = wish == "close" or (words[2] == "HTTP/1.0" and wish != "keep-alive")
        body = await reader.readexactly(int(length))
        return HttpRequest(words[0], words[1], headers, body, is_last)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=CLOSE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _head(reply: HttpReply, is_last: bool) -> bytes:
    lines = [
        f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
        f"Content-Type: {reply.kind}",
        f"Content-Length: {len(reply.body)}"
        if isinstance(reply.body, bytes)
        else "Transfer-Encoding: chunked",
        *(f"{name}: {value}" for name, value in reply.headers.items()),
    ]
    if is_last:
        lines.append("Connection: close")
    return "\r\n".join((*lines, "", "")).encode()


def unsealed_answer(error: StoreError) -> bytes:
    """Return what somebody is answered who asks in the clear where https is spoken."""
    body = f"this port speaks https only: {error.what}\n".encode()
    reply = HttpReply(400, body, TEXT)
    return _head(reply, is_last=True) + body
