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
import os
import socket
from typing import TYPE_CHECKING, Any, TypeVar

from transfer_engine.errors import ConfigError
from transfer_engine.rpc.address import Address, is_loopback
from transfer_engine.rpc.serving import WRITE_BYTES, Connection, Handler, ServerLimits
from transfer_engine.rpc.spinning import Vigil
from transfer_engine.wire.frame import VERSIONS, VersionRange
from transfer_engine.wire.handshake import Identity, ServerHandshake

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from transfer_engine.wire.registry import Registry

__all__ = ["Server", "run"]

T = TypeVar("T")

BACKLOG = 1024
"""Connections that may wait to be accepted."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a new uvloop event loop, as `asyncio.run` would."""
    import uvloop

    return uvloop.run(main)


class Server:
    """Serves one registry of operations on any number of addresses."""

    def __init__(
        self,
        registry: Registry,
        handle: Handler,
        *,
        identity: Identity | None = None,
        secret: bytes | None = None,
        limits: ServerLimits | None = None,
        versions: VersionRange = VERSIONS,
    ) -> None:
        self.registry = registry
        self.handle = handle
        self.limits = limits or ServerLimits()
        # Replies up to these lengths are gathered; longer ones leave alone, or not at all.
        self.short_limits = {
            opcode: min(limit, WRITE_BYTES) for opcode, limit in registry.reply_limits.items()
        }
        self.versions = versions
        self.loop = asyncio.get_running_loop()
        self.vigil = Vigil(self.loop) if self.limits.vigil_bytes_max else None
        self._identity = identity or Identity(registry.service, role="server")
        self._secret = secret
        self._listeners: list[asyncio.AbstractServer] = []
        self._paths: list[str] = []
        self._refused = 0  # of the connections: told why, and about to close
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def connections(self) -> int:
        """How many peers are connected."""
        return len(self._connections) - self._refused

    async def listen(self, host: str, port: int, *, insecure: bool = False) -> Address:
        """Listen on TCP and return the address, with the port the system chose for 0.

        Raises ConfigError when the port is taken, and for an address that other machines can
        reach while there is no secret to keep them out, unless `insecure` says that this is meant.
        """
        if self._secret is None and not insecure and not is_loopback(host):
            raise ConfigError(
                f"{host}:{port} is reachable from other machines and no secret is set",
                advice="set a secret (MOONCAKE_SECRET_FILE), bind 127.0.0.1, or say --insecure",
            )
        try:
            sockets = _bind(host, port)
        except OSError as error:
            raise _cannot_listen(f"{host}:{port}", error) from error
        bound = sockets[0].getsockname()
        for one in sockets:
            listener = await self.loop.create_server(
                lambda: Connection(self), sock=one, backlog=BACKLOG
            )
            self._listeners.append(listener)
        return Address(bound[0], bound[1])

    async def listen_unix(self, path: str) -> Address:
        """Listen on a Unix socket; the file of a dead server is replaced, a live one is not."""
        with (
            contextlib.suppress(FileNotFoundError, ConnectionRefusedError),
            socket.socket(socket.AF_UNIX) as probe,
        ):
            probe.settimeout(1)
            try:
                probe.connect(path)
            except (FileNotFoundError, ConnectionRefusedError):
                raise
            except OSError as error:
                raise _cannot_listen(f"unix:{path}", error) from error
            raise _cannot_listen(f"unix:{path}", OSError(errno.EADDRINUSE, "in use"))
        try:
            listener = await self.loop.create_unix_server(lambda: Connection(self), path)
        except OSError as error:
            raise _cannot_listen(f"unix:{path}", error) from error
        self._listeners.append(listener)
        self._paths.append(path)
        return Address(path=path)

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
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._paths.clear()

    async def __aenter__(self) -> Server:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # For the connections.

    def new_handshake(self) -> ServerHandshake:
        """Return the state machine that greets one peer."""
        return ServerHandshake(self._identity, secret=self._secret, versions=self.versions)

    def admit(self, connection: Connection) -> bool:
        """Count a connection in; False when there are too many to serve it."""
        self._connections.add(connection)
        self._empty.clear()
        if len(self._connections) - self._refused <= self.limits.connections_max:
            return True
        self._refused += 1
        return False

    def forget(self, connection: Connection) -> None:
        """Count a connection out."""
        self._connections.discard(connection)
        self._refused -= not connection.admitted
        if not self._connections:
            self._empty.set()


def _bind(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on every address of a host, the first one first.

    Not left to the loop: uvloop resolves names, and numbers too, on threads of libuv. A child
    forked afterwards has not got them, waits for them when it exits, and crashes.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as opened:
        sockets = [
            opened.enter_context(socket.create_server(where[:2], family=family, backlog=BACKLOG))
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
