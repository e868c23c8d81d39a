"""A server: listeners, the set of connections, and a graceful end.

    server = Server(registry, handle, secret=secret)
    address = await server.listen("127.0.0.1", 0)
    ...
    await server.stop(grace_s=5)

It runs on any asyncio loop; `run` starts one on uvloop, which is faster. One
thread, no locks: a handler that blocks, blocks every peer. See `serving` for what happens on one
connection. Cost of an idle connection: a few KiB.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar

from transfer_engine.errors import ConfigError
from transfer_engine.rpc.address import Address, check_private
from transfer_engine.rpc.entrance import STALL_S, Entrance
from transfer_engine.rpc.limits import ServerLimits
from transfer_engine.rpc.reached import Reached
from transfer_engine.rpc.sealed import SealedTransport
from transfer_engine.rpc.serving import WRITE_BYTES, Connection, Handler, Service
from transfer_engine.rpc.spinning import LoopSpin
from transfer_engine.rpc.unfinished import SWEEP_S, Unfinished
from transfer_engine.wire.frame import VERSIONS, VersionRange
from transfer_engine.wire.handshake import Identity
from transfer_engine.wire.keyring import LOOK_S, guarding, tls_of

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from transfer_engine.wire.keyring import Keyring, Secret
    from transfer_engine.wire.registry import Registry

__all__ = ["Server", "bound", "run"]

log = logging.getLogger(__name__)

T = TypeVar("T")

_BACKLOG = 1024
"""Connections that may wait to be accepted."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new uvloop event loop, as `asyncio.run` would."""
    import uvloop

    return uvloop.run(main)


class Server:
    """Serves one registry of operations on any number of addresses.

    Without a `secret` it serves its own user on this host, and with `insecure` whoever comes.
    `reached_as` names further addresses that lead here (`rpc.reached`).
    """

    def __init__(
        self,
        registry: Registry,
        handle: Handler,
        *,
        identity: Identity | None = None,
        secret: Secret | None = None,
        insecure: bool = False,
        reached_as: Sequence[str] = (),
        limits: ServerLimits | None = None,
        versions: VersionRange = VERSIONS,
    ) -> None:
        limits = limits or ServerLimits()
        keyring = guarding(secret)
        self._insecure = insecure
        self.loop = asyncio.get_running_loop()
        self._entrance = Entrance[Connection](
            f"the {registry.service} port",
            idle_s=attrgetter("idle_s"),
            sessions_max=limits.connections_max,
            log=log,
        )
        self._service = Service(
            registry,
            handle,
            limits,
            {opcode: min(limit, WRITE_BYTES) for opcode, limit in registry.reply_limits.items()},
            identity or Identity(registry.service, role="server"),
            keyring,
            keyring is None and not insecure,
            Reached(reached_as),
            versions,
            LoopSpin(self.loop) if limits.awake_bytes_max else None,
            self._entrance,
            Unfinished(limits.unfinished_bytes_max),
            self._meet,
            self._forget,
        )
        self._listeners: list[asyncio.AbstractServer] = []
        self._sweeping: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def connections(self) -> int:
        """How many peers are connected."""
        return self._entrance.guests

    async def listen(self, host: str, port: int) -> Address:
        """Listen on TCP and return the address, with the port the system chose for 0.

        Raises ConfigError as `bound` does.
        """
        keyring, insecure = self._service.keyring, self._insecure
        return await self.serve(bound(host, port, secret=keyring, insecure=insecure))

    async def serve(self, sockets: Sequence[socket.socket]) -> Address:
        """Listen on sockets that are bound; return the address of the first one.

        They may be another process's as well, and outlive this one: who connects meanwhile waits
        for the next that serves them.
        """
        where = sockets[0].getsockname()
        for one in sockets:
            listener = await self.loop.create_server(self._protocol, sock=one, backlog=_BACKLOG)
            self._listeners.append(listener)
        return Address(where[0], where[1])

    async def stop(self, grace_s: float = 5.0) -> None:
        """Accept no more, answer what was read, close; after `grace_s` cut the rest off."""
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        for connection in list(self._connections):
            connection.drain()
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            for connection in list(self._connections):
                connection.abort()
            await self._empty.wait()
        for timer in (self._sweeping, self._looking):
            if timer is not None:
                timer.cancel()
        self._sweeping = self._looking = None

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def _protocol(self) -> asyncio.Protocol:
        connection, tls = Connection(self._service), tls_of(self._service.keyring)
        return connection if tls is None else SealedTransport(connection, tls.seal_of_server())

    def _meet(self, connection: Connection) -> None:
        self._connections.add(connection)
        self._empty.clear()
        if self._sweeping is None:
            self._sweeping = self.loop.call_later(SWEEP_S, self._sweep)
        keyring = self._service.keyring
        if self._looking is None and keyring is not None and not keyring.lasting:
            self._looking = self.loop.call_later(LOOK_S, self._end_revoked, keyring)

    def _forget(self, connection: Connection) -> None:
        self._connections.discard(connection)
        self._entrance.leave(connection)
        self._service.unfinished.forget(connection)
        if not self._connections:
            self._empty.set()

    def _sweep(self) -> None:
        """Drop whose frames do not go on; look again while anybody is there."""
        for connection in self._service.unfinished.stalled(self._connections):
            connection.drop(f"its request did not go on for {STALL_S:g} s")
        self._sweeping = None
        if self._connections:
            self._sweeping = self.loop.call_later(SWEEP_S, self._sweep)

    def _end_revoked(self, keyring: Keyring) -> None:
        """End the sessions whose credential is not believed any more."""
        for connection in list(self._connections):
            connection.end_unless_holds(keyring)
        self._looking = None
        if self._connections:
            self._looking = self.loop.call_later(LOOK_S, self._end_revoked, keyring)


def bound(host: str, port: int, *, secret: Secret | None, insecure: bool) -> list[socket.socket]:
    """Return sockets that listen on every address of a host, the first one first.

    Raises ConfigError when the port is taken, and for an address that other machines can reach
    while there is no secret to keep them out, unless `insecure` says that this is meant.
    """
    check_private(host, secret=secret, insecure=insecure)
    try:
        return _bind(host, port)
    except OSError as error:
        raise _cannot_listen(f"{host}:{port}", error) from error


def _bind(host: str, port: int) -> list[socket.socket]:
    """Bind and listen.

    Not left to the loop: uvloop resolves names, and numbers too, on threads of libuv. A child
    forked afterwards has not got them, waits for them when it exits, and crashes.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as opened:
        sockets = [
            opened.enter_context(socket.create_server(where[:2], family=family, backlog=_BACKLOG))
            for family, where in dict.fromkeys((family, where) for family, *_, where in found)
        ]
        opened.pop_all()
    return sockets


def _cannot_listen(address: str, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"{address} is in use by another process",
            advice="stop that process, or choose another port",
        )
    reason = error.strerror or str(error)
    return ConfigError(f"cannot listen on {address}: {reason}", advice="check host and port")
