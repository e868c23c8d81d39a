"""A bounded set of blocking connections to one service, shared by threads, safe across fork.

    pool = BlockingPool("127.0.0.1:7000", registry, connections_max=8)
    body = pool.call(GET, GET.request.pack(...), timeout_s=1.0)

The connection used last is used next, so few stay open. Taking one costs a deque pop and no lock
(one `append` or `pop` of a deque is atomic); the lock is for opening a connection and for waiting
when all are in use. A connection that idled for a second is asked, without waiting, whether its
peer is still there, and after a lost peer all idle ones are dropped: the next call reconnects.
Where the peer ended a connection to make room for others, the call goes over a new one.
Those that a burst of threads opened and nobody has used for ten seconds are closed, one with each
connection that is given back; there is no thread, so a pool that rests keeps what it has.

After a fork the child sees another process id and starts from an empty state of its own; sockets
of the parent are closed in the child, never written to. Nothing is registered at import.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from transfer_engine.errors import PeerLostError, TransferTimeoutError, UnavailableError
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.rpc.failures import unserved

if TYPE_CHECKING:
    from transfer_engine.wire.frame import Body, Buffer
    from transfer_engine.wire.handshake import Identity
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation, Registry

__all__ = ["BlockingPool"]

_TRUSTED_IDLE_S = 1.0
_KEPT_IDLE_S = 10.0


class _State:
    """The connections of one process."""

    __slots__ = ("changed", "idle", "open", "pid", "waiters")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.idle: deque[BlockingConnection] = deque()
        self.changed = threading.Condition(threading.Lock())
        self.open = 0
        self.waiters = 0


class BlockingPool:
    """Calls from any thread; connects when first needed; a context manager."""

    def __init__(
        self,
        address: str | Address,
        registry: Registry,
        *,
        connections_max: int = 8,
        connect_s: float = 5.0,
        identity: Identity | None = None,
        secret: Secret | None = None,
    ) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self._registry = registry
        self._connections_max = connections_max
        self._connect_s = connect_s
        self._identity = identity
        self._secret = secret
        self._closed = False
        self._state = _State()

    def call(self, operation: Operation[Any, Any], body: Buffer, *, timeout_s: float) -> Body:
        """Send a request on a free connection and return the body of its reply.

        `timeout_s` covers it all: waiting for a connection, opening one, the round trip.
        """
        start = time.monotonic()
        while True:
            connection = self.acquire(timeout_s=timeout_s)
            spent_s = time.monotonic() - start
            try:
                # Only a wait is worth a new timeout, which costs the connection a system call.
                left_s = timeout_s if spent_s < 0.01 * timeout_s else timeout_s - spent_s
                return connection.call(operation, body, timeout_s=left_s)
            except PeerLostError:
                self._drop_idle(self._state)  # they lead to the same peer
                raise
            except UnavailableError as error:
                if not unserved(error):
                    raise
                timeout_s -= time.monotonic() - start
            finally:
                self.release(connection)
            start = time.monotonic()

    def acquire(self, *, timeout_s: float) -> BlockingConnection:
        """Take a connection out of the pool; `release` must follow."""
        state = self._state
        if state.pid != os.getpid():
            state = self._after_fork()
        while True:
            try:
                connection = state.idle.pop()
            except IndexError:
                return self._acquire_slowly(state, time.monotonic(), timeout_s)
            if time.monotonic() - connection.last_used < _TRUSTED_IDLE_S or not connection.stale():
                return connection
            self._discard(state, connection)

    def release(self, connection: BlockingConnection) -> None:
        """Give a connection back; one that is closed or has unread replies is dropped."""
        state = self._state
        if connection.pid != state.pid:
            connection.close()
            return
        if self._closed or not connection.reusable:
            self._discard(state, connection)
            return
        state.idle.append(connection)
        # A waiter counts itself in before it looks at `idle`, so one of the two sees the other.
        if state.waiters:
            with state.changed:
                state.changed.notify()
        if len(state.idle) > 1:  # one alone was used just now
            with suppress(IndexError):  # others may have taken them all
                oldest = state.idle[0]
                if connection.last_used - oldest.last_used > _KEPT_IDLE_S:
                    self._close_unused(state, oldest)

    def _close_unused(self, state: _State, connection: BlockingConnection) -> None:
        try:
            state.idle.remove(connection)
        except ValueError:
            return  # somebody took it this moment
        self._discard(state, connection)

    def _acquire_slowly(self, state: _State, start: float, timeout_s: float) -> BlockingConnection:
        """Open a connection, or wait for one to be released when all are in use."""
        with state.changed:
            state.waiters += 1
            try:
                while True:
                    if self._closed:
                        raise UnavailableError(
                            "the pool is closed", peer=str(self.address), operation="connect"
                        )
                    with suppress(IndexError):
                        return state.idle.pop()
                    if state.open < self._connections_max:
                        state.open += 1
                        break
                    left_s = start + timeout_s - time.monotonic()
                    if left_s <= 0 or not state.changed.wait(left_s):
                        raise TransferTimeoutError(
                            f"all {self._connections_max} connections stayed in use",
                            peer=str(self.address),
                            elapsed_s=time.monotonic() - start,
                            advice="raise connections_max or the deadline",
                        )
            finally:
                state.waiters -= 1
        try:
            return self._open(start + timeout_s - time.monotonic())
        except BaseException as error:
            self._forget(state)
            if isinstance(error, UnavailableError | PeerLostError):
                self._drop_idle(state)
            raise

    def _open(self, left_s: float) -> BlockingConnection:
        connection = BlockingConnection.connect(
            self.address,
            self._registry,
            identity=self._identity,
            secret=self._secret,
            timeout_s=max(1e-3, min(left_s, self._connect_s)),
        )
        connection.last_used = time.monotonic()
        return connection

    def _discard(self, state: _State, connection: BlockingConnection) -> None:
        connection.close()
        self._forget(state)

    def _forget(self, state: _State) -> None:
        with state.changed:
            state.open -= 1
            state.changed.notify()

    def _drop_idle(self, state: _State) -> None:
        while True:
            try:
                connection = state.idle.pop()
            except IndexError:
                return
            self._discard(state, connection)

    def _after_fork(self) -> _State:
        # Two threads may both get here; the second state wins and the first dies with its user.
        inherited, self._state = self._state, _State()
        for connection in inherited.idle:
            connection.close()
        return self._state

    def close(self) -> None:
        """Close the idle connections now and the others when they are released; idempotent."""
        self._closed = True
        self._drop_idle(self._state)
        with self._state.changed:
            self._state.changed.notify_all()

    def __enter__(self) -> BlockingPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
