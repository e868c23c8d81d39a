"""The owner's end of the shm transport: hands segment descriptors to processes of this host.

One thread for all connections: each carries a message per mapping and is silent otherwise. The
kernel says who connects (SO_PEERCRED); other users are refused. Who may not write is given a
descriptor that cannot be mapped writable. A withdrawn segment is announced to those who mapped
it; what they mapped stays readable to them until they let go of it, as with any shared memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from transfer_engine.base import REFUSED as REFUSED_STATUS
from transfer_engine.base import UNKNOWN_SEGMENT, Operation
from transfer_engine.errors import AuthError, ConfigError, RemoteProtocolError, StoreError
from transfer_engine.lasting import LastingThread
from transfer_engine.transports.handover import (
    GRANTED,
    MAP,
    MESSAGE_BYTES,
    REFUSED,
    WITHDRAWN,
    Message,
    check_uid,
    peer_credentials,
    socket_address,
)
from transfer_engine.transports.owner import may_open

if TYPE_CHECKING:
    from transfer_engine.transports.owner import Owner

__all__ = ["ShmServer"]

_log = logging.getLogger(__name__)
_JOIN_S = 1.0


@dataclass(eq=False)
class _Client:
    sock: socket.socket
    peer: str
    refused: bool
    mapped: set[bytes] = field(default_factory=set)


class ShmServer:
    """Listens on a Unix socket and passes descriptors of the owner's segments."""

    def __init__(self, owner: Owner, address: str, *, connections_max: int) -> None:
        self._owner = owner
        self.address = address
        self._connections_max = connections_max
        self._lock = threading.Lock()
        self._clients: set[_Client] = set()
        self._closing = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._listener.bind(socket_address(address))
        except OSError as error:
            self._listener.close()
            raise ConfigError(
                f"cannot listen on the unix socket {address!r}: {error.strerror}",
                advice="another process uses this address, or its directory is missing",
            ) from error
        if not address.startswith("@"):
            os.chmod(address, 0o600)
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self.thread = LastingThread("mooncake-shm", self._round)
        self.thread.start()

    def _round(self) -> None:
        """Hear everybody who has something to say, then accept who waits."""
        waiting = False
        for key, _ in self._selector.select():
            if key.fileobj is self._listener:
                waiting = True
            elif key.data is not None:
                self._hear(key.data)
        if waiting and not self._closing:
            self._accept()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it waits no more
        try:
            self._admit(sock)
        except BaseException:
            sock.close()
            raise

    def _admit(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        pid, uid = peer_credentials(sock)
        peer = f"uid {uid} pid {pid}"
        if len(self._clients) >= self._connections_max:
            _log.warning("refused %s: %d shared-memory clients", peer, self._connections_max)
            sock.close()
            return
        client = _Client(sock, peer, refused=False)
        try:
            check_uid(uid, peer)
        except AuthError as error:
            _log.warning("refused a shared-memory client: %s", error)
            client.refused = True  # it learns so when it asks: a closed socket would not say why
        self._selector.register(sock, selectors.EVENT_READ, client)
        with self._lock:
            self._clients.add(client)

    def _hear(self, client: _Client) -> None:
        try:
            data = client.sock.recv(MESSAGE_BYTES + 1)
            if not data:
                self._drop(client)
                return
            message = Message.unpack(data, client.peer)
            if message.kind != MAP:
                raise RemoteProtocolError(f"{client.peer} sent a message of kind {message.kind}")
            self._map(client, message)
        except BlockingIOError:
            return
        except (OSError, StoreError) as error:
            _log.warning("dropped a shared-memory client: %s", error)
            self._drop(client)
        except BaseException:
            self._drop(client)
            raise

    def _map(self, client: _Client, message: Message) -> None:
        uuid = message.uuid
        if client.refused:
            self._send(client, Message(REFUSED, code=REFUSED_STATUS, uuid=uuid))
            self._drop(client)
            return
        with self._lock:  # a withdrawal now either hides the segment or is announced afterwards
            segment = self._owner.find(uuid)
            if segment is not None:
                client.mapped.add(uuid)
        if segment is None or not segment.lent_as:
            self._send(client, Message(REFUSED, code=UNKNOWN_SEGMENT, uuid=uuid))
            return
        writable = (
            message.writable
            and segment.writable
            and may_open(self._owner, client.peer, Operation.WRITE, segment)
        )
        # Drivers of devices know no mapping for reading alone.
        readable = segment.lent_as != "cuda" and may_open(
            self._owner, client.peer, Operation.READ, segment
        )
        if not writable and not readable:
            client.mapped.discard(uuid)
            self._send(client, Message(REFUSED, code=REFUSED_STATUS, uuid=uuid))
            return
        fd = segment.share(writable=writable)
        try:
            self._send(client, Message(GRANTED, writable, uuid=uuid, size=segment.size), fd)
        finally:
            os.close(fd)

    def _send(self, client: _Client, message: Message, *fds: int) -> None:
        told = message._replace(instance=self._owner.instance)
        socket.send_fds(client.sock, [told.pack()], fds, socket.MSG_NOSIGNAL)

    def _drop(self, client: _Client) -> None:
        with self._lock:
            self._clients.discard(client)
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(client.sock)
        client.sock.close()

    def announce_withdrawal(self, uuid: bytes) -> None:
        """Tell everyone who mapped this segment that it is served no more."""
        with self._lock:
            holders = [client for client in self._clients if uuid in client.mapped]
            for client in holders:
                client.mapped.discard(uuid)
        for client in holders:
            try:
                self._send(client, Message(WITHDRAWN, uuid=uuid))
            except OSError:
                # It does not read its messages; the end of the connection tells it as well.
                with contextlib.suppress(OSError):
                    client.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Stop listening and disconnect everyone. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.thread.stop()
        self._wake_write.send(b"x")
        self.thread.join(timeout=_JOIN_S)
        if not self.address.startswith("@"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.address)
        self._close_sockets()

    def forget(self) -> None:
        """In a forked child: close the copies of the parent's sockets, which stay open there."""
        self._closing = True
        self._lock = threading.Lock()
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._listener.close()
        self._wake_read.close()
        self._wake_write.close()
        for client in self._clients:
            client.sock.close()
        self._clients = set()
        # Closing the selector of a forked child leaves the parent's interest list as it is.
        self._selector.close()
