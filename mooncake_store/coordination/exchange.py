"""Carrying out one call of an etcd: send some bytes, return all that comes back.

    received = exchange(Exchange(call, call.request(), timeout_s=1.0))          # blocking
    received = await exchange_async(Exchange(call, call.request(), 1.0))        # on an event loop

Whom to ask for what is decided elsewhere (`directory`), by generators that yield an `Exchange` and
are sent what came of it, so that blocking and asynchronous clients decide alike. An error is
returned, not raised. Cost: a connection.
"""

from __future__ import annotations

import asyncio
import socket
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Generator

    from mooncake_store.coordination.calls import Call
    from transfer_engine.errors import StoreError
    from transfer_engine.rpc.address import Address

__all__ = ["ANSWER_BYTES_MAX", "Exchange", "exchange", "exchange_async", "followed", "rest"]

A = TypeVar("A")
B = TypeVar("B")
T = TypeVar("T")

ANSWER_BYTES_MAX = 32 << 20
_READ_BYTES = 1 << 16


class Exchange(NamedTuple):
    """What to send to one member of an etcd, and how long to wait for the end of its answer."""

    call: Call
    request: bytes
    timeout_s: float
    tls: ssl.SSLContext | None = None

    @property
    def place(self) -> Address:
        """Whom to ask."""
        return self.call.member


def exchange(asked: Exchange) -> bytes | StoreError:
    """Ask, on the thread of the caller; the name lookup alone is up to the system."""
    until = time.monotonic() + asked.timeout_s
    try:
        with ExitStack() as stack:
            sock = stack.enter_context(_connected(asked.place, until))
            if asked.tls is not None:
                sock.settimeout(_left(until))
                sock = asked.tls.wrap_socket(sock, server_hostname=asked.place.host)
                stack.enter_context(sock)
            sock.settimeout(_left(until))
            sock.sendall(asked.request)
            received = bytearray()
            while True:
                sock.settimeout(_left(until))
                part = sock.recv(_READ_BYTES)
                if not part:
                    return bytes(received)
                received += _bounded(part, len(received))
    except (OSError, ValueError) as error:
        return asked.call.fault(error)


def followed(steps: Generator[A | Exchange, B | bytes | StoreError, T], do: Callable[[A], B]) -> T:
    """Return what steps come to: what they ask of an etcd is done here, and all else by `do`."""
    step = next(steps)
    while True:
        try:
            step = steps.send(exchange(step) if isinstance(step, Exchange) else do(step))
        except StopIteration as end:
            found: T = end.value
            return found


async def exchange_async(asked: Exchange) -> bytes | StoreError:
    """Ask, on the event loop that runs."""
    try:
        async with asyncio.timeout(asked.timeout_s):
            reader, writer = await asyncio.open_connection(
                asked.place.host, asked.place.port, ssl=asked.tls
            )
            try:
                writer.write(asked.request)
                await writer.drain()
                return await rest(reader)
            finally:
                writer.transport.abort()
    except (OSError, ValueError) as error:
        return asked.call.fault(error)


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Read up to the end of a connection; raises ValueError for what is too much."""
    received = bytearray()
    while part := await reader.read(1 << 20):
        received += _bounded(part, len(received))
    return bytes(received)


def _bounded(part: bytes, before: int) -> bytes:
    if before + len(part) > ANSWER_BYTES_MAX:
        raise ValueError("an answer without an end")
    return part


def _left(until: float) -> float:
    """Return the time that is left; raises TimeoutError where there is none."""
    left_s = until - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _connected(place: Address, until: float) -> socket.socket:
    """Connect to the first address of a name that accepts."""
    failure = OSError("the name has no address")
    for family, kind, _, _, target in socket.getaddrinfo(
        place.host, place.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind)
        try:
            sock.settimeout(_left(until))
            sock.connect(target)
        except BaseException as error:
            sock.close()
            if not isinstance(error, OSError):
                raise
            failure = error
        else:
            return sock
    try:
        raise failure
    finally:
        del failure  # or it would hold this frame, and this frame it
