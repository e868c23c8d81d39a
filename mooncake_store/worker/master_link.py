"""A worker's connection to the master: to whichever leads, of those that are named.

The map of the cluster is asked of one after the other until one answers (`masters`), and all else
of the one that did: whoever mounts asks for the map first, and again when anything fails. An etcd
that knows them is asked as `masters` says. One call at a time; every wait has a deadline, `CALL_S`
unless it is given.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from mooncake_store.coordination.exchange import followed
from mooncake_store.endpoint import Etcd, split_masters
from mooncake_store.masters import Masters
from mooncake_store.wire import cluster as wire
from transfer_engine.errors import ConfigError, StoreError
from transfer_engine.rpc.blocking import BlockingConnection

if TYPE_CHECKING:
    from mooncake_store.masters import Search
    from transfer_engine.rpc.address import Address
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation

__all__ = ["CALL_S", "MasterLink", "towards"]

CALL_S = 5.0


class MasterLink:
    """Asks the cluster service of the masters that a text names; used by any thread."""

    def __init__(self, named: str, secret: Secret | None, etcd_file: str = "") -> None:
        self.masters = Masters(split_masters(named), etcd_file)
        self._secret = secret
        self._lock = threading.Lock()
        self._connection: BlockingConnection | None = None
        self._cluster = ""

    def call(
        self,
        operation: Operation[Any, Any],
        request: Any,
        *,
        timeout_s: float = CALL_S,
        alone: bool = False,
    ) -> Any:
        """Ask for the map, or the master that gave it last for anything else.

        `alone` uses a connection of its own, for what takes long.
        """
        if alone:
            with self._connect(self.masters.leader, CALL_S) as connection:
                return _answer(connection, operation, request, timeout_s)
        with self._lock:
            if operation is wire.MAP:
                return self._search(request, timeout_s)
            connection = self._connected(self.masters.leader, CALL_S)
            self._connection = connection
            return _answer(connection, operation, request, timeout_s)

    def starting(self) -> bool:
        """Whether one of the masters is there, and knows nothing of its cluster yet."""
        for place in self.masters.named:
            try:
                with self._connect(place, CALL_S) as connection:
                    status = _answer(connection, wire.STATUS, wire.StatusRequest(), CALL_S)
            except StoreError:
                continue
            if not status.version:
                return True
        return False

    def _search(self, request: wire.MapRequest, timeout_s: float) -> wire.ClusterMap:
        search: Search[wire.ClusterMap] = self.masters.search(time.monotonic() + timeout_s)
        found = followed(search, lambda attempt: self._ask_map(request, *attempt))
        self._cluster = found.cluster
        return found

    def _ask_map(
        self, request: wire.MapRequest, place: Address, timeout_s: float
    ) -> wire.ClusterMap | StoreError:
        """Ask one master; its connection is kept if it is the one that leads."""
        until = time.monotonic() + timeout_s
        try:
            connection = self._connected(place, timeout_s)
            try:
                left_s = until - time.monotonic()
                found: wire.ClusterMap = _answer(connection, wire.MAP, request, left_s)
                if self.masters.several and self._cluster not in ("", found.cluster):
                    raise ConfigError(
                        f"this is a master of cluster {found.cluster}, and this worker's is "
                        f"{self._cluster}",
                        peer=str(place),
                        advice="name the masters of one pool, or start the worker anew",
                    )
            except BaseException:
                connection.close()
                raise
        except StoreError as error:
            return error.again()
        if self._connection is not connection and self._connection is not None:
            self._connection.close()
        self._connection = connection
        return found

    def _connected(self, place: Address, timeout_s: float) -> BlockingConnection:
        """The connection that is open, if it is one to that master, or another one."""
        connection = self._connection
        if connection is not None and not connection.closed:
            if connection.peer == str(place) and not connection.stale():
                return connection
            connection.close()
        return self._connect(place, timeout_s)

    def _connect(self, place: Address, timeout_s: float) -> BlockingConnection:
        return BlockingConnection.connect(
            place, wire.CLUSTER, secret=self._secret, timeout_s=timeout_s
        )

    def close(self) -> None:
        """End the connection. Idempotent."""
        if self._connection is not None:
            self._connection.close()


def _answer(
    connection: BlockingConnection, operation: Operation[Any, Any], request: Any, timeout_s: float
) -> Any:
    body = connection.call(operation, operation.request.pack(request), timeout_s=timeout_s)
    return operation.reply.unpack(body)


def towards(master: str) -> str:
    """Return the address of this machine on the way to the master, or its etcd; sends nothing."""
    failure, where = OSError("nothing was tried"), split_masters(master)
    for host, port in where.members if isinstance(where, Etcd) else where:
        try:
            family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with contextlib.closing(socket.socket(family, kind)) as probe:
                probe.connect(target)
                name: str = probe.getsockname()[0]
                return name
        except OSError as error:
            failure = error
    raise ConfigError(
        f"cannot tell which address of this machine leads to the master {master}: {failure}",
        advice="set worker.host to the address that others can reach",
    ) from failure
