"""Serving the segments of this process to others: over shared memory, over TCP, or both.

A process has one `TransferServer` and publishes segments through it; the descriptor it gets back
is what others open. Every access is judged here, by the owner: bounds always, identity when the
connection is made (peer credentials or the shared secret), rights by the `authorize` hook.

The server runs on plain threads with blocking sockets. A client that dies, stalls or sends
nonsense costs its own connection. In a forked child the server does not exist: the parent keeps
serving, the child's copies of its sockets are closed.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections import Counter
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine import forking
from transfer_engine.base import SegmentDescriptor
from transfer_engine.errors import AlreadyExistsError, ConfigError, NotFoundError
from transfer_engine.notify import PeerService
from transfer_engine.rdma import verbs
from transfer_engine.rpc.address import Address, check_private
from transfer_engine.rpc.reached import Reached
from transfer_engine.segments.mapping import host_identity, load_kernels
from transfer_engine.segments.memory import check_name
from transfer_engine.transports.guarding import Guard
from transfer_engine.transports.rdma_server import RdmaServer
from transfer_engine.transports.reachable import Tables
from transfer_engine.transports.shm_server import ShmServer
from transfer_engine.transports.tcp_server import Carried, TcpServer
from transfer_engine.wire.keyring import guarding, tls_of
from transfer_engine.wire.records import load_sealing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from numpy.typing import NDArray

    from transfer_engine.base import Access, AccessHook
    from transfer_engine.notify import Notification
    from transfer_engine.transports.owner import Served
    from transfer_engine.wire.keyring import Secret

__all__ = ["TransferServer"]

_log = logging.getLogger(__name__)


class TransferServer:
    """Serves published segments until it is closed.

    `tcp` is "host:port" (port 0: any free one) or None; `unix` is "@name", a path, "auto" or
    None. `rails` are further addresses, each on a network of its own: large batches use all.
    `rdma` offers RDMA as well where this host has a card; clients ask for it over `tcp`.
    Without a `secret`, only loopback addresses are bound, for its own user, unless `insecure`.
    `reached_as` names further addresses that lead here (`rpc.reached`).
    `authorize` sees every batch before bytes move and answers True, False or one bool per request.
    `patience_s` bounds how long a peer may stall in the middle of a message.
    """

    def __init__(
        self,
        *,
        tcp: str | None = "127.0.0.1:0",
        unix: str | None = "auto",
        rails: Sequence[str] = (),
        rdma: bool = True,
        secret: Secret | None = None,
        insecure: bool = False,
        reached_as: Sequence[str] = (),
        authorize: AccessHook | None = None,
        advertise_host: str | None = None,
        connections_max: int = 256,
        patience_s: float = 30.0,
    ) -> None:
        load_kernels()
        if tls_of(secret) is not None:
            load_sealing()
        self.instance = secrets.token_bytes(16)
        self.keyring = guarding(secret)
        self.reached = Reached(reached_as)
        self.own_user = self.keyring is None and not insecure
        self._authorize = authorize
        self._segments: dict[bytes, Served] = {}
        self._described: dict[bytes, SegmentDescriptor] = {}
        self._guards: dict[bytes, Guard] = {}
        self.peer_service = PeerService(self, os.getpid(), host_identity())
        self._lock = threading.Lock()
        self.tables = Tables()
        self._tcp: TcpServer | None = None
        self._rails: list[TcpServer] = []
        self._shm: ShmServer | None = None
        self._tcp_host = ""
        # What cards move nothing seals.
        rdma = rdma and tcp is not None and tls_of(secret) is None
        self.rdma = RdmaServer(self) if rdma and verbs.find_nics() else None

        def listen(address: Address) -> TcpServer:
            check_private(address.host, secret=secret, insecure=insecure)
            return TcpServer(
                self, address, self.rdma, connections_max=connections_max, patience_s=patience_s
            )

        if rails and tcp is None:
            raise ConfigError("rails without tcp", advice="name the first of them as tcp")
        try:
            if tcp is not None:
                address = Address.parse(tcp)
                self._tcp_host = _advertised(address.host, advertise_host)
                self._tcp = listen(address)
            for address in map(Address.parse, rails):
                _advertised(address.host, None)
                self._rails.append(listen(address))
            if unix is not None:
                if unix == "auto":
                    unix = f"@mooncake-{os.getpid()}-{secrets.token_hex(8)}"
                self._shm = ShmServer(self, unix, connections_max=connections_max)
        except BaseException:
            self.close()
            raise
        forking.register(self)

    @property
    def tcp_address(self) -> tuple[str, int] | None:
        """Host and port that descriptors name."""
        return None if self._tcp is None else (self._tcp_host, self._tcp.port)

    @property
    def unix_address(self) -> str | None:
        """The Unix socket that descriptors name."""
        return None if self._shm is None else self._shm.address

    @property
    def clock_offset_ms(self) -> int:
        """By how many ms the clock by which rights end is before that of this machine."""
        return self.tables.clock_offset_ms

    @clock_offset_ms.setter
    def clock_offset_ms(self, offset_ms: int) -> None:
        self.tables.clock_offset_ms = offset_ms

    def publish(
        self, segment: Served, *, name: str | None = None, key: bytes = b"", namespace: str = ""
    ) -> SegmentDescriptor:
        """Serve a segment from now on, by default under its own name; return how to reach it.

        With a key, 16 bytes, it is guarded: over tcp who proved a credential below a worker's reads
        and writes it only by rights made with that key (`kernels.rights`), or unasked if it is
        declared for a namespace of that credential. shm and rdma give the whole segment or nothing:
        shm asks the user, rdma gives it to whoever need show no rights.
        """
        name = segment.name if name is None else name
        check_name(name)
        guard = Guard.of(key, namespace)
        with self._lock:
            if self._segments.get(segment.uuid, segment) is not segment:
                raise AlreadyExistsError(f"another segment with the uuid of {segment!r} is served")
            # Before the segment: whoever finds that asks for its guard next.
            if guard is not None:
                self._guards[segment.uuid] = guard
            else:
                self._guards.pop(segment.uuid, None)
            self._segments[segment.uuid] = segment
        lender = self._shm if segment.lent_as else None
        tcp = self._tcp
        rdma = self.rdma is not None and self.rdma.publish(segment)
        ways = {segment.lent_as: lender, "rdma": rdma, "tcp": tcp}
        descriptor = SegmentDescriptor(
            uuid=segment.uuid,
            size=segment.size,
            name=name,
            writable=segment.writable,
            host=host_identity(),
            instance=self.instance,
            uid=os.geteuid(),
            pid=os.getpid(),
            transports=tuple(name for name, way in ways.items() if way),
            unix_address=lender.address if lender else "",
            tcp_host=self._tcp_host if tcp else "",
            tcp_port=tcp.port if tcp else 0,
            rails=tuple(str(Address(rail.host, rail.port)) for rail in self._rails),
        )
        with self._lock:
            self._described[segment.uuid] = descriptor
            self._tabulate()
        return descriptor

    def _tabulate(self) -> None:
        """Tell the loops that serve memory what there is. Held: the lock."""
        served = self._segments.values() if self._authorize is None else ()
        self.tables.replace(served, self._guards)

    def withdraw(self, segment: Served, *, timeout_s: float = 5.0) -> None:
        """Stop serving a segment; return when no connection moves bytes of it any more.

        Connections still busy with it after `timeout_s` are cut. Processes that mapped it are
        told and let go; until they do they can still see the memory.
        """
        with self._lock:
            if self._segments.pop(segment.uuid, None) is None:
                raise NotFoundError(f"{segment!r} is not served", advice="publish it first")
            self._described.pop(segment.uuid, None)
            self._tabulate()
        if self._shm is not None:
            self._shm.announce_withdrawal(segment.uuid)
        if self.rdma is not None:
            self.rdma.withdraw(segment.uuid)
        for server in self._listeners():
            server.quiesce(segment.uuid, timeout_s)
        with self._lock:
            if segment.uuid not in self._segments:  # nor is it served anew
                self._guards.pop(segment.uuid, None)

    def described(self) -> list[SegmentDescriptor]:
        """Return the descriptors of everything that is published, in the order of publishing."""
        with self._lock:
            return list(self._described.values())

    def take_notifications(self, timeout_s: float = 0.0) -> list[Notification]:
        """Return the notifications that peers have sent, waiting for the first one.

        At most 1024 wait; then senders are refused until some are taken.
        """
        return self.peer_service.inbox.take(timeout_s)

    @property
    def sound(self) -> bool:
        """Whether the threads that meet clients do so, as far as there are any."""
        threads = [server.acceptor for server in self._listeners()]
        if self._shm is not None:
            threads.append(self._shm.thread)
        return all(thread.sound for thread in threads)

    @property
    def carried(self) -> Carried:
        """What data connections have done so far."""
        return reduce(Carried.plus, (each.carried for each in self._listeners()), Carried())

    @property
    def connections(self) -> dict[str, int]:
        """How many there are, by transport."""
        shm = 0 if self._shm is None else self._shm.connections
        return {"tcp": sum(each.connections for each in self._listeners()), "shm": shm}

    @property
    def turned_away(self) -> Counter[str]:
        """How often somebody was sent away, by the kind of reason that the log has."""
        told = [each.turned_away for each in self._listeners()]
        if self._shm is not None:
            told.append(self._shm.turned_away)
        return sum(told, Counter())

    def _listeners(self) -> list[TcpServer]:
        first = [] if self._tcp is None else [self._tcp]
        return [*first, *self._rails]

    def find(self, uuid: bytes) -> Served | None:
        """Return a published segment."""
        return self._segments.get(uuid)

    def guard_of(self, uuid: bytes) -> Guard | None:
        """Return what guards a published segment, if it is guarded."""
        return self._guards.get(uuid)

    def permits(self, access: Access) -> bool | NDArray[np.bool_]:
        """Ask the access hook. A hook that fails or answers nonsense refuses."""
        if self._authorize is None:
            return True
        try:
            answer = self._authorize(access)
        except Exception:
            _log.exception("the access hook failed; %s was refused", access.peer)
            return False
        if isinstance(answer, np.ndarray):
            if answer.dtype == np.bool_ and answer.shape == access.offsets.shape:
                return bool(answer.all()) or answer
            _log.error("the access hook answered %r; %s was refused", answer, access.peer)
            return False
        return answer is True

    def close(self) -> None:
        """Stop serving. Segments stay open: they belong to who made them. Idempotent."""
        with self._lock:
            self._segments = {}
            self._tabulate()
        if self._shm is not None:
            self._shm.close()
        for server in self._listeners():
            server.close()
        if self.rdma is not None:
            self.rdma.close()

    def after_fork(self) -> None:
        """Stop existing in a forked child: the parent serves."""
        self._segments = {}
        self._lock = threading.Lock()
        for front in (self._shm, *self._listeners(), self.rdma):
            if front is not None:
                front.forget()

    def __enter__(self) -> TransferServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _advertised(host: str, chosen: str | None) -> str:
    if chosen is not None:
        return chosen
    if host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"binding {host} does not say which address others connect to",
            advice="pass advertise_host, or bind the address itself",
        )
    return host
