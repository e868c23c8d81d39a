"""An etcd asked over HTTP: the JSON gateway that every member of 3.4 and newer has on its port.

    gateway = Gateway(["10.0.0.1:2379", "10.0.0.2:2379"], timeout_s=5)
    answer = await gateway.ask("get", "kv/range", {"key": b"name"})

Each call has a connection of its own and speaks HTTP/1.0: an answer ends with its connection, so
there is nothing to keep in step, and a member that hangs spoils no other call. Addresss are tried
in turn, from the one that answered last, each for its share of the time. What must not be done
twice is sent to one member: where its answer is lost, nobody knows whether it was done, and the
error says so.

Not done here: what the calls mean (`etcd`) and look like (`calls`). Cost: a connection a call; an
answer is bounded.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from mooncake_store.coordination.access import Access
from mooncake_store.coordination.base import FAULTS
from mooncake_store.coordination.calls import ADVICE_FULL, LOG_IN, Call, TokenError, is_good
from mooncake_store.coordination.exchange import ANSWER_BYTES_MAX, rest
from mooncake_store.endpoint import split_address
from transfer_engine.errors import ConfigError, StoreError, TransferTimeoutError
from transfer_engine.rpc.address import Address

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from mooncake_store.coordination.calls import Answer

__all__ = ["Gateway"]

T = TypeVar("T")

HEADERS_MAX = 64


class _Link(NamedTuple):
    call: Call
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class Gateway:
    """Calls an etcd; raises ConfigError for what is no address."""

    def __init__(
        self,
        members: Sequence[str],
        timeout_s: float,
        access: Access | None = None,
    ) -> None:
        if not members:
            raise ConfigError("name at least one member of the etcd, such as '10.0.0.1:2379'")
        self.members = [Address(*split_address(member)) for member in members]
        """In the order in which they are tried."""
        self._timeout_s = timeout_s
        self._access = access or Access()
        self._token = ""

    async def ask(
        self,
        operation: str,
        path: str,
        request: object,
        *,
        member: Address | None = None,
        repeat: bool = True,
        timeout_s: float | None = None,
    ) -> Answer:
        """Return what the etcd answers, or one member; `repeat` says that it may be asked twice.

        Raises UnavailableError, TransferTimeoutError, or what the etcd's answer means.
        """

        def call(member: Address) -> Call:
            return Call(member, operation, path, request)

        async def connect(member: Address, until: float) -> _Link:
            return await self._connect(call(member), until)

        async def exchange(member: Address, until: float) -> Answer:
            return await self._exchange(await connect(member, until), until)

        async def change() -> Answer:
            link = await self.in_turn(connect, until)
            try:
                return await self._exchange(link, until)
            except FAULTS as error:
                self.leave(link.call.member)
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
            except TokenError:
                self._token = ""
                if not known:
                    raise
                return await once()  # with a new token
        except StoreError as error:
            error.elapsed_s = time.monotonic() - began
            raise

    async def stream(
        self, member: Address, operation: str, path: str, request: object, silence_s: float
    ) -> AsyncGenerator[Answer, None]:
        """Yield each of many answers of a member, until there is none for so long."""
        until = time.monotonic() + self._timeout_s
        await self._log_in(until)
        call = Call(member, operation, path, request)
        link = await self._connect(call, until)
        try:
            async with _faults(call, until):
                await self._send(link)
            while True:
                try:
                    async with _faults(call, time.monotonic() + silence_s):
                        line = await link.reader.readline()
                except TransferTimeoutError:
                    return
                if not line:
                    raise call.unreachable("it ended the answer")
                yield call.decoded(line)
        except TokenError:
            self._token = ""
            raise
        finally:
            link.writer.transport.abort()

    async def in_turn(self, attempt: Callable[[Address, float], Awaitable[T]], until: float) -> T:
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

    def leave(self, member: Address) -> None:
        """Try a member after the others from now on."""
        self.members.remove(member)
        self.members.append(member)

    async def _log_in(self, until: float) -> None:
        shown = {"name": self._access.user, "password": self._access.password}

        async def log_in(member: Address, until: float) -> str:
            link = await self._connect(Call(member, *LOG_IN, shown), until)
            return (await self._exchange(link, until)).token

        if self._access.user and not self._token:
            self._token = await self.in_turn(log_in, until)

    async def _connect(self, call: Call, until: float) -> _Link:
        async with _faults(call, until):
            reader, writer = await asyncio.open_connection(
                call.member.host, call.member.port, ssl=self._access.tls, limit=ANSWER_BYTES_MAX
            )
        return _Link(call, reader, writer)

    async def _exchange(self, link: _Link, until: float) -> Answer:
        try:
            async with _faults(link.call, until):
                await self._send(link)
                body = await rest(link.reader)
            return link.call.decoded(body)
        finally:
            link.writer.transport.abort()

    async def _send(self, link: _Link) -> None:
        """Send a call and read up to the body of its answer; raise what one means that is not good.

        A body that never ends, as that of a watch, is one of a good answer.
        """
        link.writer.write(link.call.request(self._token))
        await link.writer.drain()
        status = await link.reader.readline()
        if not status:
            raise ConnectionError("it hung up")
        lines = 0
        while (await link.reader.readline()).strip():
            lines += 1
            if lines > HEADERS_MAX:
                raise ValueError
        if not is_good(status):
            raise link.call.refusal(status, await rest(link.reader))


@contextlib.asynccontextmanager
async def _faults(call: Call, until: float) -> AsyncGenerator[None, None]:
    """Turn what fails in the body, or lasts beyond that time, into the project's errors."""
    try:
        async with asyncio.timeout(max(until - time.monotonic(), 0.0)):
            yield
    except StoreError:
        raise
    except (OSError, ValueError) as error:
        raise call.fault(error) from None
