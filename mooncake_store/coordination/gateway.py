"""An etcd asked over HTTP: the JSON gateway that every member of 3.4 and newer has on its port.

    gateway = Gateway(["10.0.0.1:2379", "10.0.0.2:2379"], timeout_s=5)
    answer = await gateway.ask("get", "kv/range", {"key": b"name"})

Each call has a connection of its own and speaks HTTP/1.0: an answer ends with its connection, so
there is nothing to keep in step, and a member that hangs spoils no other call. Members are tried
in turn, from the one that answered last, each for its share of the time. What must not be done
twice is sent to one member: where its answer is lost, nobody knows whether it was done, and the
error says so.

Not done here: what the calls mean (`etcd`). Cost: a connection a call; an answer is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from mooncake_store.coordination.base import FAULTS, CompactedError, lease_ended
from mooncake_store.endpoint import split_address
from mooncake_store.printable import printable
from transfer_engine.errors import (
    AuthError,
    ConfigError,
    InvalidArgumentError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

__all__ = ["Answer", "Event", "Gateway", "Header", "Member", "Pair"]

T = TypeVar("T")

ANSWER_BYTES_MAX = 32 << 20
HEADERS_MAX = 64
ADVICE = "check that the etcd runs, and that a majority of its members reach each other"
ADVICE_ADDRESS = "check that this is where an etcd of version 3.4 or newer listens for clients"
ADVICE_USER = "check the user of the etcd, the password, and what it may read and write"
ADVICE_FULL = (
    "compact its history and defragment it, or start it with a larger --quota-backend-bytes; "
    "then run `etcdctl alarm disarm`"
)

# Of the codes of gRPC, which an etcd answers with.
_INVALID, _NOT_FOUND, _FORBIDDEN, _EXHAUSTED, _OUT_OF_RANGE, _UNAUTHENTICATED = 3, 5, 7, 8, 11, 16


class Header(msgspec.Struct):
    """What every answer says of the etcd."""

    revision: int = 0
    raft_term: int = 0


class Pair(msgspec.Struct):
    """A key with its value."""

    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    create_revision: int = 0
    lease: int = 0


class Event(msgspec.Struct):
    """What a watch tells; a key that was removed has no value."""

    kv: Pair
    type: str = "PUT"


class Answer(msgspec.Struct):
    """What there may be in an answer; an etcd leaves out what is 0 or empty."""

    header: Header
    kvs: list[Pair] = []
    succeeded: bool = False
    ID: int = 0
    TTL: int = 0
    token: str = ""
    events: list[Event] = []
    canceled: bool = False
    cancel_reason: str = ""
    compact_revision: int = 0


class _Failure(msgspec.Struct):
    message: str
    code: int = 0
    grpc_code: int = 0
    """Instead of the other in a stream of 3.4 and 3.5."""


class _Streamed(msgspec.Struct):
    result: Answer | None = None
    error: _Failure | None = None


class Member(NamedTuple):
    """Where one member of the etcd listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class _Link(NamedTuple):
    member: Member
    operation: str
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Gateway:
    """Calls an etcd; raises ConfigError for what is no address."""

    def __init__(
        self,
        members: Sequence[str],
        timeout_s: float,
        *,
        user: str = "",
        password: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if not members:
            raise ConfigError("name at least one member of the etcd, such as '10.0.0.1:2379'")
        self.members = [Member(*split_address(member)) for member in members]
        """In the order in which they are tried."""
        self._timeout_s = timeout_s
        self._login = {"name": user, "password": password} if user else None
        self._tls = tls
        self._token = ""

    async def ask(
        self,
        operation: str,
        path: str,
        request: object,
        *,
        member: Member | None = None,
        repeat: bool = True,
        timeout_s: float | None = None,
    ) -> Answer:
        """Return what the etcd answers, or one member; `repeat` says that it may be asked twice.

        Raises UnavailableError, TransferTimeoutError, or what the etcd's answer means.
        """

        async def connect(member: Member, until: float) -> _Link:
            return await self._connect(member, operation, until)

        async def exchange(member: Member, until: float) -> Answer:
            return await self._exchange(await connect(member, until), path, request, until)

        async def change() -> Answer:
            link = await self.in_turn(connect, until)
            try:
                return await self._exchange(link, path, request, until)
            except FAULTS as error:
                self.leave(link.member)
                if error.advice != ADVICE_FULL:
                    error.what += "; it is not known whether the change was made"
                raise

        async def once() -> Answer:
            await self._log_in(until)
            if member:
                return await exchange(member, until)
            return await (self.in_turn(exchange, until) if repeat else change())

        began = time.monotonic()
        until = began + (self._timeout_s if timeout_s is None else timeout_s)
        known = self._token
        try:
            try:
                return await once()
            except AuthError:
                if self._token or not known:
                    raise
                return await once()  # with a new token: etcd forgets them when it is started
        except StoreError as error:
            error.elapsed_s = time.monotonic() - began
            raise

    async def stream(
        self, member: Member, operation: str, path: str, request: object, silence_s: float
    ) -> AsyncGenerator[Answer, None]:
        """Yield each of many answers of a member, until there is none for so long."""
        until = time.monotonic() + self._timeout_s
        await self._log_in(until)
        link = await self._connect(member, operation, until)
        try:
            async with _faults(member, operation, until):
                await self._send(link, path, request)
            while True:
                try:
                    async with _faults(member, operation, time.monotonic() + silence_s):
                        line = await link.reader.readline()
                except TransferTimeoutError:
                    return
                if not line:
                    raise _unreachable(member, operation, "it ended the answer")
                yield self._decoded(line, link, streamed=True)
        finally:
            link.writer.transport.abort()

    async def in_turn(self, attempt: Callable[[Member, float], Awaitable[T]], until: float) -> T:
        """Return what the first member gives for whom `attempt(member, until)` does not fail."""
        members = tuple(self.members)
        for more, member in zip(range(len(members) - 1, -1, -1), members, strict=True):
            now = time.monotonic()
            try:
                return await attempt(member, now + max(until - now, 0.0) / (more + 1))
            except FAULTS as error:
                self.leave(member)
                if not more:
                    error.peer = ", ".join(map(str, members))
                    raise
        raise AssertionError("there is a member")

    def leave(self, member: Member) -> None:
        """Try a member after the others from now on."""
        self.members.remove(member)
        self.members.append(member)

    async def _log_in(self, until: float) -> None:
        async def log_in(member: Member, until: float) -> str:
            link = await self._connect(member, "log in", until)
            return (await self._exchange(link, "auth/authenticate", self._login, until)).token

        if self._login and not self._token:
            self._token = await self.in_turn(log_in, until)

    async def _connect(self, member: Member, operation: str, until: float) -> _Link:
        async with _faults(member, operation, until):
            reader, writer = await asyncio.open_connection(
                member.host, member.port, ssl=self._tls, limit=ANSWER_BYTES_MAX
            )
        return _Link(member, operation, reader, writer)

    async def _exchange(self, link: _Link, path: str, request: object, until: float) -> Answer:
        try:
            async with _faults(link.member, link.operation, until):
                await self._send(link, path, request)
                body = await _rest(link.reader)
            return self._decoded(body, link, streamed=path == "lease/keepalive")
        finally:
            link.writer.transport.abort()

    async def _send(self, link: _Link, path: str, request: object) -> None:
        """Send a call and read up to the body of its answer; raise what one means that is not good.

        A body that never ends, as that of a watch, is one of a good answer.
        """
        body = msgspec.json.encode(request)
        token = f"Authorization: {self._token}\r\n" if self._token else ""
        head = f"POST /v3/{path} HTTP/1.0\r\nHost: {link.member}\r\nContent-Length: {len(body)}\r\n"
        link.writer.write(f"{head}{token}\r\n".encode() + body)
        await link.writer.drain()
        status = await link.reader.readline()
        if not status:
            raise ConnectionError("it hung up")
        lines = 0
        while (await link.reader.readline()).strip():
            lines += 1
            if lines > HEADERS_MAX:
                raise ValueError
        version, _, code = status.partition(b" ")
        if version.startswith(b"HTTP/1.") and code.startswith(b"200"):
            return
        body = await _rest(link.reader)
        try:
            failure = msgspec.json.decode(body, type=_Failure)
        except msgspec.MsgspecError:
            raise _garbage(status + body, link.member, link.operation) from None
        raise self._refusal(failure, link)

    def _decoded(self, body: bytes, link: _Link, *, streamed: bool) -> Answer:
        try:
            if not streamed:
                return msgspec.json.decode(body, type=Answer, strict=False)
            part = msgspec.json.decode(body, type=_Streamed, strict=False)
        except msgspec.MsgspecError:
            raise _garbage(body, link.member, link.operation) from None
        if part.error:
            raise self._refusal(part.error, link)
        if part.result is None:
            raise _garbage(body, link.member, link.operation)
        return part.result

    def _refusal(self, failure: _Failure, link: _Link) -> StoreError:
        """The error for how an etcd says no."""
        code, what = failure.code or failure.grpc_code, printable(failure.message[:300])
        context: dict[str, Any] = {"peer": str(link.member), "operation": link.operation}
        if code == _NOT_FOUND and "lease" in what:
            return lease_ended(**context)
        if code == _UNAUTHENTICATED or "auth store is old" in what:
            self._token = ""
        if code in (_FORBIDDEN, _UNAUTHENTICATED) or "auth" in what or "user name" in what:
            return AuthError(f"the etcd refuses: {what}", advice=ADVICE_USER, **context)
        if code == _OUT_OF_RANGE and "compacted" in what:
            return CompactedError("the etcd has compacted its history", **context)
        if code == _EXHAUSTED and "space" in what:
            full = f"the etcd is full and takes no changes: {what}"
            return UnavailableError(full, advice=ADVICE_FULL, **context)
        if code == _INVALID:
            return InvalidArgumentError(f"the etcd refuses: {what}", **context)
        return UnavailableError(f"the etcd cannot answer: {what}", advice=ADVICE, **context)


@contextlib.asynccontextmanager
async def _faults(member: Member, operation: str, until: float) -> AsyncGenerator[None, None]:
    """Turn what fails in the body, or lasts beyond that time, into the project's errors."""
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            yield
    except TransferTimeoutError:
        raise
    except TimeoutError:
        raise TransferTimeoutError(
            "the etcd did not answer", peer=str(member), operation=operation, advice=ADVICE
        ) from None
    except StoreError:
        raise
    except OSError as error:
        raise _unreachable(member, operation, error) from None
    except ValueError:
        raise _garbage(b"a line, or an answer, without an end", member, operation) from None


async def _rest(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while part := await reader.read(1 << 20):
        body += part
        if len(body) > ANSWER_BYTES_MAX:
            raise ValueError
    return bytes(body)


def _unreachable(member: Member, operation: str, why: object) -> UnavailableError:
    return UnavailableError(
        f"cannot reach the etcd: {why}", peer=str(member), operation=operation, advice=ADVICE
    )


def _garbage(answer: bytes, member: Member, operation: str) -> RemoteProtocolError:
    start = printable(answer[:80].decode(errors="replace"))
    return RemoteProtocolError(
        f"this is no answer of an etcd: {start!r}",
        peer=str(member),
        operation=operation,
        advice=ADVICE_ADDRESS,
    )
