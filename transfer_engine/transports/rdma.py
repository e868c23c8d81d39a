"""Segments behind RDMA cards: one-sided reads and writes, without the owner's processor.

A batch becomes chains of linked work requests with one completion each (`rdma.endpoint`), built
by a kernel in arrays the card reads. Endpoints are pooled per owner and card, used by one batch
at a time and bounded in number over all owners (`rdma.pool`). Keys and sizes of remote memory are
asked for on the owner's TCP port (`rdma.wire`); local keys come from what the engine registered
(`rdma.memory`).

Every card of this host is a way of its own: which one a batch takes, whether it takes several, and
what happens to one that fails is up to `paths`. A batch that failed on a pooled endpoint goes once
more over a fresh one of the same card (the owner may have dropped it, or restarted), and so does
one that the owner's card refused (the segment's key may have changed); reads and writes may be
repeated. What fails on a fresh endpoint is the card's failure. A timeout is never retried.

Like shared memory, the owner judges rights once, when a segment is opened; it cannot fence single
writes. Cost: about 25 us of Python a batch, and one copy for memory nobody registered.
"""

from __future__ import annotations

import dataclasses
import itertools
import secrets
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from transfer_engine import forking
from transfer_engine.base import (
    CANCELLED,
    REFUSED,
    UNKNOWN_SEGMENT,
    RemoteSegment,
    Transport,
    Way,
)
from transfer_engine.errors import AuthError, NotFoundError, PeerLostError, StoreError
from transfer_engine.kernels import moving, rdma
from transfer_engine.rdma import verbs
from transfer_engine.rdma.endpoint import Cancelled, Endpoint, Job, RefusedByCard, Transfer
from transfer_engine.rdma.memory import ARENA_BYTES, LocalMemory
from transfer_engine.rdma.pool import Pool
from transfer_engine.rpc.networks import Networks
from transfer_engine.segments.mapping import host_identity
from transfer_engine.transports.copying import hash_local
from transfer_engine.wire.keyring import tls_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from transfer_engine.base import Batch, Region, SegmentDescriptor
    from transfer_engine.rdma.verbs import Nic
    from transfer_engine.wire.keyring import Secret

    # An owner (host, port, instance) and the number of a card of this host.
    Key = tuple[str, int, bytes, int]

__all__ = ["RdmaTransport"]


class _NotWritable(Exception):
    """The owner granted reading only."""


class RdmaSegment(RemoteSegment):
    """A segment reached through endpoints of one card."""

    __slots__ = ("card", "key")

    def __init__(self, descriptor: SegmentDescriptor, card: int) -> None:
        super().__init__(descriptor)
        self.card = card
        self.key: Key = (descriptor.tcp_host, descriptor.tcp_port, descriptor.instance, card)


class RdmaTransport(Transport):
    """Moves batches over RDMA cards. `endpoints_max` bounds the queue pairs of this transport."""

    name: ClassVar[str] = "rdma"
    cost: ClassVar[int] = 20

    def __init__(
        self,
        *,
        secret: Secret | None = None,
        networks: Networks | None = None,
        endpoints_max: int = 256,
    ) -> None:
        self._secret = secret
        self._networks = networks or Networks()
        self._instance = secrets.token_bytes(16)
        self._memory = LocalMemory()
        self._pool: Pool[Key, Endpoint] = Pool(endpoints_max)
        self._turns = itertools.count()
        forking.register(self)

    @property
    def _nics(self) -> tuple[Nic, ...]:
        return verbs.find_nics()

    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """Segments that their owner serves over RDMA, where this host has a card."""
        if self.name not in descriptor.transports:
            return "the owner does not serve this segment over RDMA"
        if tls_of(self._secret) is not None:
            return "TLS is asked for, and nothing seals what RDMA cards move"
        return verbs.unavailable() or self._objection(descriptor, descriptor.tcp_host)

    def _objection(self, descriptor: SegmentDescriptor, host: str) -> str | None:
        return self._networks.objection(host, near=descriptor.host == host_identity())

    def register(self, region: Region) -> None:
        """Register memory of the host with every card; a device's is staged there first."""
        if region.location == "host":
            self._memory.add(region, self._nics)

    def unregister(self, region: Region) -> None:
        """Take memory back; transfers under way still end."""
        self._memory.remove(region)

    def ways(self, descriptor: SegmentDescriptor) -> list[Way]:
        """One per card. Handles begin with each in turn, so their small batches use all of them."""
        nics = self._nics
        first = next(self._turns)
        return [
            Way(f"{self.name} {nics[card].name}", partial(self.open, descriptor, card=card))
            for card in ((first + at) % len(nics) for at in range(len(nics)))
        ]

    def open(self, descriptor: SegmentDescriptor, deadline: float, card: int = 0) -> RdmaSegment:
        """Connect a card, ask the owner for the key of the segment, and try the card out."""
        target = RdmaSegment(descriptor, card)

        def check(endpoint: Endpoint) -> None:
            endpoint.open(descriptor, deadline)
            endpoint.try_out(deadline)

        try:
            self._over(target, deadline, check)
        except StoreError as error:
            error.operation = error.operation or "open"
            raise
        return target

    def _over(self, target: RdmaSegment, deadline: float, use: Callable[[Endpoint], None]) -> None:
        """Use an endpoint of the segment's card; a fresh one where the first may be out of date."""
        fresh = False
        while True:
            make = partial(self._connect, target, deadline)
            endpoint, used = self._pool.acquire(target.key, make, deadline, fresh=fresh)
            try:
                use(endpoint)
            except (NotFoundError, AuthError, _NotWritable):
                self._pool.release(endpoint)  # an answer, on a sound connection
                raise
            except BaseException as error:
                # What did not end is still under way; closing its endpoint is what ends it.
                self._pool.discard(endpoint)
                lost = used and isinstance(error, PeerLostError)
                if fresh or not (lost or isinstance(error, RefusedByCard)):
                    raise
                fresh = True
            else:
                self._pool.release(endpoint)
                return

    def _connect(self, target: RdmaSegment, deadline: float) -> Endpoint:
        return Endpoint.connect(
            self._nics[target.card], target.card, target.descriptor, secret=self._secret,
            instance=self._instance, deadline=deadline,
            objection=partial(self._objection, target.descriptor),
        )  # fmt: skip

    def move(self, target: RemoteSegment, batch: Batch) -> None:
        """Move registered memory directly, the rest through an arena."""
        assert isinstance(target, RdmaSegment)
        if batch.total_bytes:
            try:
                self._move(target, batch)
            except Cancelled:
                batch.fail(CANCELLED)
            except NotFoundError:
                batch.fail(UNKNOWN_SEGMENT)
            except _NotWritable:
                batch.fail(REFUSED)
            except StoreError as error:
                error.operation = error.operation or batch.operation.verb
                raise
        hash_local(batch)

    def _move(self, target: RdmaSegment, batch: Batch) -> None:
        table = self._memory.table(self._nics)
        where = np.empty(batch.statuses.size, dtype=np.int64)
        inside, outside = rdma.locate(
            batch.addresses, batch.lengths, batch.statuses, table.starts, table.ends, table.reach,
            where,
        )  # fmt: skip
        job = Job(batch, batch.offsets, batch.lengths, batch.addresses, where, table.keys)
        if inside:
            self._carry(target, job, 0, inside)
        if outside:
            strays = np.flatnonzero((where == rdma.NOWHERE) & (batch.statuses == 0))
            self._through_arena(target, job, strays, outside)

    def _through_arena(
        self, target: RdmaSegment, job: Job, strays: NDArray[np.int64], total: int
    ) -> None:
        """Move requests whose memory no card knows, one arena full at a time."""
        batch = job.batch
        arena = self._memory.take_arena(self._nics)
        lengths = np.ascontiguousarray(job.lengths[strays])
        memory = np.ascontiguousarray(job.addresses[strays])
        positions = np.cumsum(lengths) - lengths
        good = np.zeros(strays.size, dtype=np.int32)
        staged = dataclasses.replace(
            job,
            offsets=np.ascontiguousarray(job.offsets[strays]),
            lengths=lengths,
            where=np.zeros(strays.size, dtype=np.int64),
            keys=arena.table.keys,
        )
        for begin in range(0, total, ARENA_BYTES):
            end = min(total, begin + ARENA_BYTES)
            # The requests, laid end to end, pass under the arena like a tape.
            origin = arena.address - begin
            staged.addresses = origin + positions
            window = (origin, positions, lengths, memory, good, begin, end)
            if batch.writing and moving.copy_batch(*window, 1, 0, batch.cancel):
                raise Cancelled
            self._carry(target, staged, begin, end)
            if not batch.writing and moving.copy_batch(*window, 0, 0, batch.cancel):
                raise Cancelled
        self._memory.give_arena(arena)

    def _carry(self, target: RdmaSegment, job: Job, begin: int, end: int) -> None:
        """Move a window of a job over one endpoint."""
        batch = job.batch

        def use(endpoint: Endpoint) -> None:
            grant = endpoint.grant(target.descriptor, batch.deadline)
            if batch.writing and not grant.writable:
                raise _NotWritable
            Transfer(endpoint, job, grant, begin, end).run()

        self._over(target, batch.deadline, use)

    def close(self) -> None:
        """Close all endpoints and deregister all memory. Idempotent."""
        for endpoint in self._pool.close():
            endpoint.abort()
        self._memory.close()

    def after_fork(self) -> None:
        """Leave the endpoints to the parent; memory is registered anew when it is next used."""
        for endpoint in self._pool.items():
            endpoint.forget()
        self._pool = Pool(self._pool.limit)
        self._memory.after_fork()
