"""Segments behind RDMA cards: one-sided reads and writes, without the owner's processor.

A batch becomes chains of linked work requests with one completion each (`rdma_endpoint`), built
by a kernel in arrays the card reads. Endpoints are pooled per owner and card, used by one batch
at a time and bounded in number over all owners (`rdma_pool`). Keys and sizes of remote memory are
asked for on the owner's TCP port (`rdma_wire`); local keys come from what the engine registered
(`rdma_memory`).

Every card of this host is a rail. A large batch is split over the rails that work, a small one
takes the rail with the fewest bytes under way. A batch that failed on a pooled endpoint goes once
more over a fresh one (the owner may have dropped it, or restarted, or the segment's key may have
changed); reads and writes may be repeated. A rail on which a fresh endpoint failed rests, longer
each time, and the others take over. A timeout is never retried.

Like shared memory, the owner judges rights once, when a segment is opened; it cannot fence single
writes. Cost: about 25 us of Python a batch, and one copy for memory nobody registered.
"""

from __future__ import annotations

import dataclasses
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from transfer_engine import forking
from transfer_engine.base import (
    CANCELLED,
    REFUSED,
    UNKNOWN_SEGMENT,
    RemoteSegment,
    Transport,
)
from transfer_engine.errors import (
    AuthError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
)
from transfer_engine.kernels import moving, rdma
from transfer_engine.rdma import verbs
from transfer_engine.rdma.endpoint import Cancelled, Endpoint, Job, RefusedByCard, Transfer, drive
from transfer_engine.rdma.memory import ARENA_BYTES, LocalMemory
from transfer_engine.rdma.pool import Pool
from transfer_engine.transports.copying import hash_local

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from transfer_engine.base import Batch, Region, SegmentDescriptor
    from transfer_engine.rdma.verbs import Nic

__all__ = ["RdmaTransport"]

_RAIL_BYTES_MIN = 1 << 20
"""A batch is split over rails in parts of at least this much."""
_REST_S_MIN, _REST_S_MAX = 1.0, 60.0


class _NotWritable(Exception):
    """The owner granted reading only."""


@dataclass(slots=True)
class _Rail:
    """How one card of this host does towards one owner."""

    resting_until: float = 0.0
    rest_s: float = _REST_S_MIN

    def fail(self, now: float) -> None:
        self.resting_until = now + self.rest_s
        self.rest_s = min(_REST_S_MAX, 2 * self.rest_s)


class _Rails(list[_Rail]):
    """The cards towards one owner, shared by its segments and forgotten with the last of them."""


class RdmaSegment(RemoteSegment):
    """A segment reached through endpoints."""

    __slots__ = ("owner", "rails")

    def __init__(
        self, descriptor: SegmentDescriptor, owner: tuple[str, int, bytes], rails: _Rails
    ) -> None:
        super().__init__(descriptor)
        self.owner = owner
        self.rails = rails


class RdmaTransport(Transport):
    """Moves batches over RDMA cards. `endpoints_max` bounds the queue pairs of this transport."""

    name: ClassVar[str] = "rdma"
    cost: ClassVar[int] = 20

    def __init__(self, *, secret: bytes | None = None, endpoints_max: int = 256) -> None:
        self._secret = secret
        self._instance = secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._memory = LocalMemory()
        self._pool: Pool[tuple[object, int], Endpoint] = Pool(endpoints_max)
        self._owners: weakref.WeakValueDictionary[tuple[str, int, bytes], _Rails] = (
            weakref.WeakValueDictionary()
        )
        # Bytes under way per card, of all owners.
        self._flying = [0] * len(self._nics)
        forking.register(self)

    @property
    def _nics(self) -> tuple[Nic, ...]:
        return verbs.find_nics()

    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """Segments that their owner serves over RDMA, where this host has a card."""
        if self.name not in descriptor.transports:
            return "the owner does not serve this segment over RDMA"
        return verbs.unavailable()

    def register(self, region: Region) -> None:
        """Register memory of the host with every card; a device's is staged there first."""
        if region.location == "host":
            self._memory.add(region, self._nics)

    def unregister(self, region: Region) -> None:
        """Take memory back; transfers under way still end."""
        self._memory.remove(region)

    def open(self, descriptor: SegmentDescriptor, deadline: float) -> RdmaSegment:
        """Connect, and ask the owner for the key of the segment."""
        owner = (descriptor.tcp_host, descriptor.tcp_port, descriptor.instance)
        with self._lock:
            rails = self._owners.setdefault(owner, _Rails(_Rail() for _ in self._nics))
        target = RdmaSegment(descriptor, owner, rails)
        for endpoint, _ in self._endpoints(target, 0, deadline, fresh=False):
            self._pool.release(endpoint)
        return target

    def _endpoints(
        self, target: RdmaSegment, total: int, deadline: float, *, fresh: bool
    ) -> list[tuple[Endpoint, bool]]:
        """Return endpoints that hold the segment's key, for `total` bytes, and if they were used.

        One at least, which is waited for; more where other rails have room.
        """
        rails = self._choose(target.rails)
        found: list[tuple[Endpoint, bool]] = []
        failure: StoreError | None = None
        try:
            for rail in rails:
                try:
                    one = self._endpoint(target, rail, deadline, fresh=fresh, wait=not found)
                except (NotFoundError, AuthError, TransferTimeoutError):
                    raise
                except StoreError as error:
                    target.rails[rail].fail(time.monotonic())
                    failure = failure or error.again()
                    continue
                if one is not None:
                    found.append(one)
                if found and total < (len(found) + 1) * _RAIL_BYTES_MIN:
                    break
            if not found:
                assert failure is not None
                raise failure.again()
        except BaseException:
            for endpoint, _ in found:
                self._pool.release(endpoint)
            raise
        return found

    def _choose(self, rails: _Rails) -> Sequence[int]:
        """Return the rails that work, those with the least under way first."""
        if len(rails) == 1:
            return (0,)
        now = time.monotonic()
        order = sorted(range(len(rails)), key=self._flying.__getitem__)
        awake = [rail for rail in order if rails[rail].resting_until <= now]
        return awake or sorted(order, key=lambda rail: rails[rail].resting_until)

    def _endpoint(
        self, target: RdmaSegment, rail: int, deadline: float, *, fresh: bool, wait: bool
    ) -> tuple[Endpoint, bool] | None:
        """Return one endpoint of a rail that holds the key of the segment."""

        def make() -> Endpoint:
            return Endpoint.connect(
                self._nics[rail], rail, target.descriptor, secret=self._secret,
                instance=self._instance, deadline=deadline,
            )  # fmt: skip

        while True:
            found = self._pool.acquire((target.owner, rail), make, deadline, fresh=fresh, wait=wait)
            if found is None:
                return None
            endpoint, used = found
            try:
                endpoint.grant(target.descriptor, deadline)
            except (NotFoundError, AuthError):
                self._pool.release(endpoint)  # an answer, on a sound connection
                raise
            except BaseException as error:
                self._pool.discard(endpoint)
                if used and isinstance(error, PeerLostError):
                    fresh = True
                    continue
                raise
            return endpoint, used

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
                if error.operation is None:
                    error.operation = batch.operation.verb
                raise
        hash_local(batch)

    def _move(self, target: RdmaSegment, batch: Batch) -> None:
        table = self._memory.table(self._nics)
        where = np.empty(batch.statuses.size, dtype=np.int64)
        inside, outside = rdma.locate(
            batch.addresses, batch.lengths, batch.statuses, table.starts, table.ends, table.reach,
            where,
        )  # fmt: skip
        job = Job(
            batch, target.descriptor, batch.offsets, batch.lengths, batch.addresses, where,
            table.keys,
        )  # fmt: skip
        if inside:
            self._spread(target, job, 0, inside)
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
            self._spread(target, staged, begin, end)
            if not batch.writing and moving.copy_batch(*window, 0, 0, batch.cancel):
                raise Cancelled
        self._memory.give_arena(arena)

    def _spread(self, target: RdmaSegment, job: Job, begin: int, end: int) -> None:
        """Move a window of a job over the rails, again what failed, then give up."""
        windows = [(begin, end)]
        attempts = 0
        while windows:
            again = []
            for window in windows:
                for transfer, error in self._attempt(target, job, *window, fresh=attempts > 0):
                    repeatable = isinstance(error, PeerLostError | RefusedByCard)
                    if not repeatable or attempts > len(target.rails):
                        raise error.again()
                    again.append(transfer.window)
            windows = again
            attempts += 1

    def _attempt(
        self, target: RdmaSegment, job: Job, begin: int, end: int, *, fresh: bool
    ) -> list[tuple[Transfer, StoreError]]:
        """Move one window once and return the parts that failed."""
        batch = job.batch
        found = self._endpoints(target, end - begin, batch.deadline, fresh=fresh)
        transfers: list[Transfer] = []
        failed: list[tuple[Transfer, StoreError]] = []
        ended = False
        try:
            for at, (endpoint, _) in enumerate(found):
                first = begin + (end - begin) * at // len(found)
                last = begin + (end - begin) * (at + 1) // len(found)
                grant = endpoint.grant(job.segment, batch.deadline)
                if batch.writing and not grant.writable:
                    ended = True
                    raise _NotWritable
                transfers.append(Transfer(endpoint, job, grant, first, last))
            self._count(transfers, 1)
            try:
                failed = drive(job, transfers)
            finally:
                self._count(transfers, -1)
            ended = True
        finally:
            broken = [transfer.endpoint for transfer, _ in failed]
            for endpoint, _ in found:
                # What did not end is still under way; closing its endpoint is what ends it.
                if ended and endpoint not in broken:
                    self._pool.release(endpoint)
                    target.rails[endpoint.rail].rest_s = _REST_S_MIN
                else:
                    self._pool.discard(endpoint)
        if failed:
            self._blame(target.rails, failed, {endpoint for endpoint, used in found if used})
        return failed

    def _blame(
        self,
        rails: _Rails,
        failed: list[tuple[Transfer, StoreError]],
        used: set[Endpoint],
    ) -> None:
        """Let a rail rest that lost packets on an endpoint just made: a used one may be stale."""
        for transfer, error in failed:
            if isinstance(error, PeerLostError) and transfer.endpoint not in used:
                rails[transfer.endpoint.rail].fail(time.monotonic())

    def _count(self, transfers: list[Transfer], sign: int) -> None:
        """Note how much is under way per rail, where there is a choice of them."""
        if len(self._flying) > 1:
            with self._lock:
                for transfer in transfers:
                    begin, end = transfer.window
                    self._flying[transfer.endpoint.rail] += sign * (end - begin)

    def close(self) -> None:
        """Close all endpoints and deregister all memory. Idempotent."""
        for endpoint in self._pool.close():
            endpoint.abort()
        self._memory.close()

    def after_fork(self) -> None:
        """Leave the endpoints to the parent; memory is registered anew when it is next used."""
        self._lock = threading.Lock()
        for endpoint in self._pool.items():
            endpoint.forget()
        self._pool = Pool(self._pool.limit)
        self._memory.after_fork()
        self._flying = [0] * len(self._flying)
