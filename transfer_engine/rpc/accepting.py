"""Accepting connections on an event loop, one a turn, whatever goes wrong with one of them.

    acceptor = Acceptor(listener, "the REST port", protocol_factory, relieve)
    ...
    acceptor.close()

Loops have servers of their own. That of asyncio takes as many connections at once as may wait,
before those that have to go for them have gone, and where there are no more descriptors it logs as
many tracebacks. Here the next one is accepted when the loop has turned, and a failure costs a
pause and a line of the log once in a while; `relieve` is called before that, to end somebody.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TYPE_CHECKING

from transfer_engine.errors import ConfigError
from transfer_engine.lasting import Setbacks
from transfer_engine.rpc.address import Address, tune

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Acceptor", "listen"]

_BACKLOG = 1024


class Acceptor:
    """Gives each connection a protocol, on the running loop, until closed; owns the listener."""

    def __init__(
        self,
        listener: socket.socket,
        name: str,
        factory: Callable[[], asyncio.Protocol],
        relieve: Callable[[], None],
    ) -> None:
        self._listener = listener
        self._factory = factory
        self._relieve = relieve
        self._setbacks = Setbacks(name)
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None
        self._meetings: set[asyncio.Task[object]] = set()
        listener.setblocking(False)
        self._resume()

    def _resume(self) -> None:
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it waits no more
        except OSError as error:
            self._relieve()
            self._loop.remove_reader(self._listener.fileno())
            self._pause = self._loop.call_later(self._setbacks.failed(error), self._resume)
            return
        self._setbacks.worked()
        sock.setblocking(False)
        # The loop does so only for sockets that name their protocol, which accepted ones do not.
        tune(sock)
        meeting: asyncio.Task[object] = self._loop.create_task(
            self._loop.connect_accepted_socket(self._factory, sock)
        )
        self._meetings.add(meeting)
        meeting.add_done_callback(self._met)

    def _met(self, meeting: asyncio.Task[object]) -> None:
        self._meetings.discard(meeting)
        if not meeting.cancelled():
            error = meeting.exception()
            if isinstance(error, Exception) and not isinstance(error, OSError):
                self._setbacks.failed(error)

    def close(self) -> None:
        """Accept no more. Idempotent."""
        if self._pause is not None:
            self._pause.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()
        for meeting in self._meetings:
            meeting.cancel()


def listen(host: str, port: int) -> socket.socket:
    """Take a port, at the first address of a host: who connects waits until it is served.

    Raises ConfigError.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        family, *_, where = found[0]
        return socket.create_server((str(where[0]), port), family=family, backlog=_BACKLOG)
    except OSError as error:
        # The resolver and the socket module word it anew, with the address once more.
        known = error.errno and not isinstance(error, socket.gaierror)
        reason = os.strerror(error.errno or 0) if known else error.strerror or str(error)
        raise ConfigError(
            f"cannot listen on {Address(host, port) if host else port}: {reason}",
            advice="another program may be using the port: choose another one",
        ) from error
