"""Borrowing segments from other processes of this host, by file descriptor.

Opening asks the owner, over its Unix socket, for the descriptor of the segment; what becomes of
it (`shm` maps it, `file` reads and writes it) derived transports say. The connection stays open
and is looked at before each batch (0.3 us): it says that the owner died, or withdrew the segment.
One that had to make room is opened anew when it is next needed. There is no thread: what an owner
lent that is gone is let go of when it is next used, or another owner is met.

The owner is asked once, not per batch. Who must be kept from writing is handed a descriptor
opened read-only; who may write can write anywhere in the segment.

Cost: one exchange of messages per segment, one look at the connection per batch.
"""

from __future__ import annotations

import abc
import os
import select
import socket
import struct
import threading
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from transfer_engine import forking
from transfer_engine.base import (
    REFUSED,
    UNKNOWN_SEGMENT,
    RemoteSegment,
    Transport,
    error_of,
    held,
    remaining_s,
    restarted,
)
from transfer_engine.errors import (
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    StoreError,
    TransferTimeoutError,
)
from transfer_engine.segments.mapping import host_identity
from transfer_engine.transports.handover import (
    GRANTED,
    MAP,
    MESSAGE_BYTES,
    PARTED,
    WITHDRAWN,
    Message,
    check_uid,
    peer_credentials,
    socket_address,
)
from transfer_engine.transports.handover import REFUSED as NOT_GRANTED

if TYPE_CHECKING:
    from transfer_engine.base import Batch, Operation, SegmentDescriptor

__all__ = ["LendingTransport", "LentSegment"]

_TIMEVAL = struct.Struct("@ll")


class Lent(Protocol):
    """What a segment is in this process: memory it maps, a file it opened, or device memory."""

    @property
    def writable(self) -> bool:
        """Whether it may be written to."""


Resource = TypeVar("Resource", bound=Lent)


class _Peer(Generic[Resource]):
    """The connection to one owner, and what it lent."""

    def __init__(self, descriptor: SegmentDescriptor) -> None:
        self.name = str(descriptor)
        self.instance = descriptor.instance
        self.lock = threading.Lock()
        self.lost = ""
        self.segments: dict[bytes, LentSegment[Resource]] = {}
        # What the connection before this one had lent when it parted, until it is asked for again.
        self.parted: dict[bytes, LentSegment[Resource]] = {}
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._epoll = select.epoll()
        self._address = socket_address(descriptor.unix_address)

    def connect(self, deadline: float) -> None:
        # A socket with a timeout of Python's own is turned away where others wait to be accepted.
        whole, part = divmod(remaining_s(deadline, "open", self.name), 1)
        patience = _TIMEVAL.pack(int(whole), max(1, int(part * 1e6)))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, patience)
        try:
            self._sock.connect(self._address)
        except BlockingIOError as error:
            raise TransferTimeoutError(
                "the owner does not accept connections", peer=self.name, operation="open"
            ) from error
        except OSError as error:
            raise PeerLostError(
                f"process {os.getpid()} cannot connect to the owner: {error.strerror}",
                peer=self.name,
                operation="open",
            ) from error
        _, uid = peer_credentials(self._sock)
        check_uid(uid, self.name)
        self._epoll.register(self._sock.fileno(), select.EPOLLIN)

    def map(self, uuid: bytes, *, writable: bool, deadline: float) -> tuple[Message, int]:
        """Ask for a segment; return the grant and the file descriptor. Held: `lock`."""
        try:
            self._sock.settimeout(remaining_s(deadline, "open", self.name))
            self._sock.send(Message(MAP, writable, uuid=uuid).pack())
            while True:
                self._sock.settimeout(remaining_s(deadline, "open", self.name))
                data, fds, _, _ = socket.recv_fds(self._sock, MESSAGE_BYTES + 1, 4)
                message = self._understand(data, fds)
                if message.kind == PARTED:
                    raise self.error("open")
                if message.kind != WITHDRAWN:
                    return message, fds[0]
        except StoreError:  # some of them are OSErrors as well
            raise
        except TimeoutError as error:
            self.disconnect("it did not answer")  # its late answer would confuse the next one
            raise TransferTimeoutError(
                "the owner did not answer before the deadline", peer=self.name, operation="open"
            ) from error
        except OSError as error:
            self._hear()  # it may have parted before it could be asked
            if self.lost != _PARTED:
                self.disconnect(error.strerror or "the connection failed")
            raise self.error("open") from error

    def _understand(self, data: bytes, fds: list[int]) -> Message:
        """Check and apply a message of the owner; raise what a refusal stands for."""
        try:
            if not data:
                self.disconnect("it closed the connection")
                raise self.error("open")
            message = Message.unpack(data, self.name)
            if message.instance != self.instance:
                raise restarted(
                    self.instance, message.instance.hex(), operation="open", peer=self.name
                )
            if message.kind == NOT_GRANTED:
                here = f"from process {os.getpid()} of user {os.geteuid()}"
                raise error_of(message.code, operation="open", peer=f"{self.name}, {here}")
            if message.kind == PARTED:
                self.leave(_PARTED)
            elif message.kind == WITHDRAWN:
                self._withdraw(message.uuid)
            elif message.kind != GRANTED or len(fds) != 1:
                raise RemoteProtocolError(f"{self.name} sent kind {message.kind}", peer=self.name)
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise
        return message

    def _withdraw(self, uuid: bytes) -> None:
        segment = self.segments.pop(uuid, None)
        if segment is not None:
            segment.resource = None

    def check(self) -> None:
        """Notice what happened to the owner since the last look."""
        if self.lost:
            return
        try:
            heard = self._epoll.poll(0, 1)
        except (ValueError, OSError):
            return  # closed this moment, by another thread that noticed first
        if heard:
            with self.lock:
                self._hear()

    def _hear(self) -> None:
        if not self.lost:
            self._sock.setblocking(False)
        while not self.lost:
            try:
                data = self._sock.recv(MESSAGE_BYTES + 1)
            except BlockingIOError:
                return
            except OSError as error:
                self.disconnect(error.strerror or "the connection failed")
                return
            if not data:
                self.disconnect("it ended")
                return
            try:
                self._understand(data, [])
            except StoreError as error:  # who looks here may mean another owner
                self.disconnect(error.what)

    def error(self, operation: str) -> PeerLostError:
        return PeerLostError(
            f"process {os.getpid()} lost the owner of the segment: {self.lost}",
            peer=self.name,
            operation=operation,
        )

    def disconnect(self, why: str) -> None:
        """Give the connection up and let go of what it lent. Held: `lock`.

        Memory goes with its last user: copies and views under way keep theirs until they end.
        """
        for segment in self.segments.values():
            segment.resource = None
        self.segments.clear()
        self.leave(why)

    def leave(self, why: str) -> None:
        """Give the connection up; what it lent stays, which in a forked child it may."""
        if not self.lost:
            self.lost = why
            self._epoll.close()
            self._sock.close()


class LentSegment(RemoteSegment, Generic[Resource]):
    """A segment another process lent; `resource` is None once it was withdrawn."""

    __slots__ = ("peer", "resource", "users")

    def __init__(
        self, descriptor: SegmentDescriptor, peer: _Peer[Resource], resource: Resource
    ) -> None:
        super().__init__(descriptor)
        self.peer = peer
        self.resource: Resource | None = resource
        self.users = 0


class LendingTransport(Transport, Generic[Resource]):
    """Asks owners for descriptors of their segments; derived classes say what to do with one.

    What `_own` finds in this process needs no asking.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._peers: dict[tuple[str, bytes], _Peer[Resource]] = {}
        self._closed = False
        forking.register(self)

    @abc.abstractmethod
    def _accept(self, fd: int, descriptor: SegmentDescriptor, *, writable: bool) -> Resource:
        """Make the resource of a file descriptor that the caller closes afterwards.

        Raises InvalidArgumentError when the file holds less than the segment.
        """

    @abc.abstractmethod
    def _carry(self, lent: Resource, batch: Batch, peer: str) -> None:
        """Move a batch that may be moved; with its checksums, if it asks for some."""

    def _own(self, uuid: bytes) -> Resource | None:
        """Return what a segment of this very process is, where that is of use."""
        return None

    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """Only segments of this process, or lent on this boot of this host."""
        if self._own(descriptor.uuid) is not None:
            return None
        if self.name not in descriptor.transports:
            return "the owner does not share this segment"
        if descriptor.host != host_identity():
            return "the owner runs on another host"
        return None

    def open(self, descriptor: SegmentDescriptor, deadline: float) -> RemoteSegment:
        """Find the segment here, or borrow it, once however often it is opened."""
        if self._own(descriptor.uuid) is not None:
            return RemoteSegment(descriptor)
        return self._borrow(descriptor, deadline)

    def move(self, target: RemoteSegment, batch: Batch) -> None:
        """Move the batch. Raises PeerLostError when the owner is gone."""
        if isinstance(target, LentSegment):
            lent: Resource | None = self._resource(target, batch.operation, batch.deadline)
        else:
            lent = self._own(target.descriptor.uuid)
        if lent is None:
            batch.fail(UNKNOWN_SEGMENT)
        elif batch.writing and not lent.writable:
            batch.fail(REFUSED)
        else:
            self._carry(lent, batch, target.name)

    def _borrow(self, descriptor: SegmentDescriptor, deadline: float) -> LentSegment[Resource]:
        while True:
            peer = self._peer(descriptor, deadline)
            with held(peer.lock, deadline, "open", peer.name):
                if peer.lost:
                    continue
                segment = peer.segments.get(descriptor.uuid)
                if segment is None:
                    try:
                        segment = self._ask(peer, descriptor, deadline)
                    except PeerLostError:
                        if peer.lost == _PARTED:
                            continue
                        raise
                segment.users += 1
                return segment

    def _ask(
        self, peer: _Peer[Resource], descriptor: SegmentDescriptor, deadline: float
    ) -> LentSegment[Resource]:
        message, fd = peer.map(descriptor.uuid, writable=descriptor.writable, deadline=deadline)
        try:
            resource = self._accept(fd, descriptor, writable=message.writable)
        except InvalidArgumentError as error:
            raise RemoteProtocolError(
                f"{descriptor} is not what its descriptor says: {error.what}"
            ) from error
        finally:
            os.close(fd)
        segment = peer.parted.pop(descriptor.uuid, None)
        if segment is None:
            segment = LentSegment(descriptor, peer, resource)
        else:
            segment.peer, segment.resource = peer, resource
        peer.segments[descriptor.uuid] = segment
        return segment

    def _peer(self, descriptor: SegmentDescriptor, deadline: float) -> _Peer[Resource]:
        key = (descriptor.unix_address, descriptor.instance)
        with self._lock:
            peer = self._peers.get(key)
        if peer is not None:
            peer.check()
            if not peer.lost:
                return peer
        # Nobody comes back to an owner that ended, so what it lent is let go of here at the latest.
        for known in list(self._peers.values()):
            known.check()
        peer = _Peer[Resource](descriptor)
        try:
            peer.connect(deadline)
        except BaseException:
            peer.disconnect("it could not be reached")
            raise
        with self._lock:
            current = self._peers.get(key)
            if current is not None and not current.lost:
                peer.disconnect("another thread connected first")
                return current
            if self._closed:  # while a probe or a slice was under way
                peer.disconnect("the transport was closed")
                raise PeerLostError("the transport was closed", peer=str(descriptor))
            if current is not None and current.lost == _PARTED:
                peer.parted = current.parted | current.segments
            self._peers = {k: known for k, known in self._peers.items() if not known.lost}
            self._peers[key] = peer
        return peer

    def _resource(
        self, target: LentSegment[Resource], operation: Operation | None, deadline: float
    ) -> Resource | None:
        """Return what was lent, held by the reference, or None when it was withdrawn.

        `operation` is for the error of a lost peer; None is a mapping of its memory.
        """
        target.peer.check()
        if target.peer.lost:
            if target.peer.lost not in (_FORKED, _PARTED):
                raise target.peer.error("map" if operation is None else operation.verb)
            self._reopen(target, deadline)
        return target.resource

    def _reopen(self, target: LentSegment[Resource], deadline: float) -> None:
        """Give a segment another connection and resource: in a forked child, or after parting."""
        try:
            fresh = self._borrow(target.descriptor, deadline)
        except NotFoundError:
            target.resource = None
            return
        if fresh is target:
            with held(target.peer.lock, deadline, "open", target.name):
                target.users -= 1  # it was not opened once more
            return
        target.peer, target.resource = fresh.peer, fresh.resource
        fresh.users += target.users - 1
        fresh.peer.segments[target.descriptor.uuid] = target

    def release(self, target: RemoteSegment) -> None:
        """Give back after the last user; transfers and views under way keep what they use."""
        if not isinstance(target, LentSegment):
            return
        peer = target.peer
        with peer.lock:
            target.users -= 1
            if target.users > 0:
                return
            if peer.segments.get(target.descriptor.uuid) is target:
                del peer.segments[target.descriptor.uuid]
            target.resource = None
            if not peer.segments:
                peer.disconnect("nothing of it is in use")

    def close(self) -> None:
        """Disconnect from all owners and give back what nobody uses. Idempotent."""
        with self._lock:
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
        for peer in peers:
            with peer.lock:
                peer.disconnect("the transport was closed")

    def after_fork(self) -> None:
        """Leave the connections to the parent; what was lent stays valid in the child."""
        self._lock = threading.Lock()
        for peer in self._peers.values():
            peer.lock = threading.Lock()
            peer.leave(_FORKED)
        self._peers = {}


_FORKED = "this process was forked"
_PARTED = "the connection was idle, and made room for another"
