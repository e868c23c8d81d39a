"""The owner's end of the shm transport: hands segment descriptors to processes of this host.

One thread for all connections: each carries a message per mapping and is silent otherwise. The
kernel says who connects (SO_PEERCRED); other users are refused. Who may not write is given a
descriptor that cannot be mapped writable. A withdrawn segment is announced to those who mapped
it; what they mapped stays readable to them until they let go of it, as with any shared memory.

Who has been granted nothing yet is a stranger (`rpc.entrance`): it has a few places and seconds.
Where all connections are in use the one that was silent for longest is told to part, and comes back
when it needs something.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

from transfer_engine.base import REFUSED as REFUSED_STATUS
from transfer_engine.base import UNKNOWN_SEGMENT, Operation
from transfer_engine.errors import AuthError, ConfigError, RemoteProtocolError, StoreError
from transfer_engine.lasting import LastingThread
from transfer_engine.rpc.entrance import HANDSHAKE_S, Entrance
from transfer_engine.transports.handover import (
    GRANTED,
    MAP,
    MESSAGE_BYTES,
    PARTED,
    REFUSED,
    WITHDRAWN,
    Message,
    check_uid,
    peer_credentials,
    socket_address,
)
from transfer_engine.transports.owner import may_open

if TYPE_CHECKING:
    from collections import Counter

    from transfer_engine.transports.owner import Owner

__all__ = ["ShmServer"]

_log = logging.getLogger(__name__)
_JOIN_S = 1.0
_BACKLOG = 1024


@dataclass(eq=False)
class _Client:
    sock: socket.socket
    peer: str
    refused: bool
    mapped: set[bytes] = field(default_factory=set)
    heard: float = field(default_factory=time.monotonic)

    @property
    def idle_s(self) -> float:
        return time.monotonic() - self.heard


class ShmServer:
    """Listens on a Unix socket and passes descriptors of the owner's segments."""

    def __init__(self, owner: Owner, address: str, *, connections_max: int) -> None:
        self._owner = owner
        self.address = address
        self._entrance = Entrance[_Client](
            f"the unix socket {address}",
            idle_s=attrgetter("idle_s"),
            sessions_max=connections_max,
            log=_log,
            rests_s=0.0,  # who has mapped something needs no connection to use it
        )
        self._strangers: dict[_Client, None] = {}  # who came first is overdue first
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
        self._listener.listen(_BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._wake_read, self._wake_write = socket.socketpair()
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self.thread = LastingThread("mooncake-shm", self._round)
        self.thread.start()

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._clients)

    @property
    def turned_away(self) -> Counter[str]:
        """How often somebody was sent away, by the kind of reason."""
        return self._entrance.told

    def _round(self) -> None:
        """Hear everybody who has something to say, then accept who waits."""
        waiting = False
        for key, _ in self._selector.select(self._patience_s()):
            if key.fileobj is self._listener:
                waiting = True
            elif key.data in self._clients:  # none before it had to make it go
                self._hear(key.data)
        if waiting and not self._closing:
            self._accept()
        while self._patience_s() == 0.0:
            self._turn_away(next(iter(self._strangers)), "silent", "it asked for nothing in time")

    def _patience_s(self) -> float | None:
        first = next(iter(self._strangers), None)
        return None if first is None else max(0.0, first.heard + HANDSHAKE_S - time.monotonic())

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it waits no more
        except OSError:  # there are no descriptors
            self._give_way(self._entrance.relieve())
            raise
        try:
            self._meet(sock)
        except BaseException:
            sock.close()
            raise

    def _meet(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        pid, uid = peer_credentials(sock)
        client = _Client(sock, f"uid {uid} pid {pid}", refused=False)
        try:
            check_uid(uid, client.peer)
        except AuthError as error:
            self._entrance.tell("refused", error.what)
            client.refused = True  # it learns so when it asks: a closed socket would not say why
        self._selector.register(sock, selectors.EVENT_READ, client)
        with self._lock:
            self._clients.add(client)
        self._strangers[client] = None
        self._give_way(self._entrance.arrive(client, f"uid {uid}"))

    def _give_way(self, first: _Client | None) -> None:
        """End whoever has to go for a newcomer."""
        if first is None:
            return
        if first in self._strangers:
            too_late = "too many others came before it asked for something"
            self._entrance.tell("crowded", f"{first.peer}: {too_late}")
        with contextlib.suppress(OSError):  # it does not read: the end of the connection tells it
            self._send(first, Message(PARTED))
        self._drop(first)

    def _turn_away(self, client: _Client, kind: str, why: str) -> None:
        self._entrance.tell(kind, f"{client.peer}: {why}")
        self._drop(client)

    def _admitted(self, client: _Client) -> bool:
        """Whether there is a place for who was a stranger so far; who has none is gone."""
        if client not in self._strangers:
            return True
        admitted, idle = self._entrance.admit(client)
        self._give_way(idle)
        if admitted:
            del self._strangers[client]
        else:
            self._turn_away(client, "full", f"{self._entrance.sessions_max} clients are at work")
        return admitted

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
            self._turn_away(client, "broken", str(error))
        except BaseException:
            self._drop(client)
            raise

    def _map(self, client: _Client, message: Message) -> None:
        uuid = message.uuid
        if client.refused:
            self._send(client, Message(REFUSED, code=REFUSED_STATUS, uuid=uuid))
            self._drop(client)
            return
        if not self._admitted(client):
            return
        client.heard = time.monotonic()
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
        self._strangers.pop(client, None)
        self._entrance.leave(client)
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
