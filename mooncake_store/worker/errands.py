"""What a worker does for the shards: work that is fetched from each of them and reported back.

A thread has errands of one kind, with connections, and handles of other workers' segments, of its
own. What it is that is fetched, and how it is done, derived classes say (`copier`, `hauler`).
Segments that are no memory are read like segments of others.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from mooncake_store.wire import cluster as wire
from mooncake_store.wire import shard as shard_wire
from transfer_engine import transports
from transfer_engine.base import SegmentDescriptor
from transfer_engine.engine import TransferEngine
from transfer_engine.errors import NotFoundError, UnavailableError
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.segments.memory import Segment
from transfer_engine.wire.handshake import Identity

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from transfer_engine.handle import SegmentHandle
    from transfer_engine.segments.cold import ColdSegment
    from transfer_engine.segments.file import FileSegment
    from transfer_engine.wire.keyring import Secret

    Lent: TypeAlias = Segment | FileSegment | ColdSegment

__all__ = ["CALL_S", "Errands", "Target"]

CALL_S = 5.0


class Target(NamedTuple):
    """A segment of whoever owns it, and what it is made of (a core `Tier`)."""

    handle: SegmentHandle
    tier: int


class Errands(abc.ABC):
    """Work from and to segments of this process; used by one thread.

    `identity` says to shards who works; `describe` asks the master for segments by their numbers,
    and leaves out those that are gone.
    """

    transports: ClassVar[Sequence[str]] = transports.NAMES

    def __init__(
        self,
        segments: Sequence[Lent],
        descriptors: Mapping[bytes, SegmentDescriptor],
        identity: shard_wire.OpenClient,
        describe: Callable[[tuple[int, ...]], tuple[wire.SegmentEntry, ...]],
        secret: Secret | None,
        networks: Sequence[str] = (),
    ) -> None:
        self._segments = segments
        self._identity = identity
        self._describe = describe
        self._secret = secret
        self._engine = TransferEngine(transports=self.transports, secret=secret, networks=networks)
        self._files: dict[bytes, SegmentHandle] = {}
        for segment in segments:
            if isinstance(segment, Segment):
                self._engine.register(segment)
            else:
                self._files[segment.uuid] = self._engine.open(descriptors[segment.uuid])
        self._connections: dict[str, BlockingConnection] = {}
        self._targets: dict[int, Target] = {}
        self._epoch = 0
        self._cluster = ""
        self._closed = False

    def work(self, cluster: wire.ClusterMap, numbers: tuple[int, ...]) -> bool:
        """Do what every shard has for this worker; return whether there was anything.

        `numbers` are those under which the master knows the segments, in their order.
        """
        if cluster.epoch != self._epoch:
            self._reset(cluster.epoch)
            self._cluster = cluster.cluster
        lent = dict(zip(numbers, self._segments, strict=True))
        worked = [self._serve(self._shard(address), lent) for address in cluster.shards]
        return any(worked)

    @abc.abstractmethod
    def _serve(self, connection: BlockingConnection, lent: dict[int, Lent]) -> bool:
        """Fetch what one shard has, do it and report it; return whether there was anything."""

    def _shard(self, address: str) -> BlockingConnection:
        connection = self._connections.get(address)
        if connection is not None and not connection.closed and connection.stale():
            connection.close()
        if connection is None or connection.closed:
            connection = BlockingConnection.connect(
                address,
                shard_wire.SHARD,
                identity=Identity(shard_wire.SHARD.service, role="worker", cluster=self._cluster),
                secret=self._secret,
                timeout_s=CALL_S,
            )
            self._connections[address] = connection
            if self._closed:  # meanwhile, by whoever mounts again, and nobody would close this one
                connection.close()
                raise UnavailableError(f"what was to be done for {address} is done by others now")
            opening = shard_wire.OPEN.request.pack(self._identity)
            try:
                connection.call(shard_wire.OPEN, opening, timeout_s=CALL_S)
            except BaseException:
                connection.close()  # it speaks for nobody
                raise
        return connection

    def _target(self, number: int) -> Target:
        found = self._targets.get(number)
        if found is None:
            entries = self._describe((number,))
            if not entries:
                raise NotFoundError(f"segment {number} is not mounted any more", advice="")
            descriptor = SegmentDescriptor.decode(entries[0].descriptor)
            found = Target(self._engine.open(descriptor), entries[0].tier)
            self._targets[number] = found
        return found

    def _drop(self, number: int) -> None:
        target = self._targets.pop(number, None)
        if target is not None:
            target.handle.close()

    def _reset(self, epoch: int) -> None:
        """Forget what belonged to a former run of the master."""
        self._epoch = epoch
        for number in list(self._targets):
            self._drop(number)
        for connection in list(self._connections.values()):
            connection.close()
        self._connections.clear()

    def close(self) -> None:
        """Close all connections, for good; another thread may be at work. Idempotent."""
        self._closed = True
        self._reset(0)
        self._engine.close()
