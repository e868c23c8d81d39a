"""What a cluster tells of itself: how it is made up, its segments and workers, and how they are.

It changes nothing. A map and segments by number are answered from what is here, because gets ask
for them; all segments, and the health of the cluster, cost a round trip to the shards.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mooncake_store.core.records import SegmentState, Tier
from mooncake_store.identity import secret_of
from mooncake_store.master.bounds import check_label
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire import cluster as wire
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.networks import Networks

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from mooncake_store.master.all_shards import AllShards
    from mooncake_store.master.lineage import Lineage
    from mooncake_store.master.liveness import Liveness
    from mooncake_store.master.roster import LentSegment, Roster
    from mooncake_store.master.seats import Seats
    from mooncake_store.master.standbys import Standbys
    from transfer_engine.rpc.serving import Connection

__all__ = ["ClusterFacts", "Overview"]

MOUNTED_S = 1.0
"""How long workers that look for a master take to mount, and more."""
LOOK_S = 0.005
WILDCARDS = ("0.0.0.0", "::")


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """What stays the same as long as the master runs."""

    cluster: str
    epoch: int
    version: str
    liveness: Address
    ping_interval_ms: int
    client_ttl_ms: int
    identity: str
    """How keys become digests: one of `identity.KINDS`."""
    secret: bytes
    """From which that of each namespace is made."""
    life: int
    """Which life of the shards' contents this is."""
    objects_max: int
    """As many as fit a shard."""
    networks: Networks = field(default_factory=Networks)
    """Which addresses segments may be at."""


@dataclass(frozen=True, slots=True)
class Overview:
    """The parts of a cluster that goes, as others are told of them."""

    facts: ClusterFacts
    lineage: Lineage
    roster: Roster
    seats: Seats
    shards: AllShards
    liveness: Liveness
    standbys: Standbys
    began: float = field(default_factory=time.monotonic)

    def map_for(
        self, connection: Connection, request: wire.MapRequest
    ) -> wire.ClusterMap | Coroutine[Any, Any, wire.ClusterMap]:
        """Return how the cluster is made up; a client may hear of it a moment later.

        While nothing can be read before its worker has mounted, as behind a standby that was just
        promoted, all that a client asked for would be a miss.
        """
        check_label("namespace", request.namespace)
        if request.namespace and self._awaited:
            return self._map_later(connection, request)
        return self.cluster_map(connection, request)

    async def _map_later(self, connection: Connection, request: wire.MapRequest) -> wire.ClusterMap:
        while True:
            if not self._awaited:
                return self.cluster_map(connection, request)
            await asyncio.sleep(LOOK_S)

    @property
    def _awaited(self) -> bool:
        """Whether a worker of the run before is to mount within moments."""
        if not self.lineage.moved or time.monotonic() > self.began + MOUNTED_S:
            return False
        workers = self.roster.workers.values()
        return any(worker.state == "alive" and not worker.met for worker in workers)

    def cluster_map(self, connection: Connection, request: wire.MapRequest) -> wire.ClusterMap:
        """Return how the cluster is made up, as this peer reaches it."""
        facts, lineage = self.facts, self.lineage
        if request.namespace:
            connection.session.rights.check_namespace(
                request.namespace, wire.MAP.name, connection.peer
            )

        def reachable(address: Address | None) -> str:
            assert address is not None
            # Bound to every address of the machine: name the one this peer came to.
            if address.host not in WILDCARDS:
                return str(address)
            local = connection._transport.get_extra_info("sockname")[0]
            return str(Address(local, address.port))

        return wire.ClusterMap(
            facts.cluster,
            facts.epoch,
            tuple(reachable(seat.address) for seat in self.seats),
            reachable(facts.liveness),
            facts.ping_interval_ms,
            facts.client_ttl_ms,
            facts.identity,
            secret_of(facts.secret, request.namespace) if request.namespace else b"",
            facts.life,
            lineage.run,
            lineage.has(request.run),
            self.seats.movable,
        )

    async def list_segments(self, request: wire.SegmentsRequest) -> wire.SegmentsReply:
        """Return the segments with some numbers, or all."""
        if request.numbers:
            known = self.roster.segments
            chosen = [known[number] for number in request.numbers if number in known]
            return wire.SegmentsReply(tuple(_entry(segment) for segment in chosen))
        return wire.SegmentsReply(await self._entries())

    async def _entries(self) -> tuple[wire.SegmentEntry, ...]:
        used: dict[int, int] = {}
        told = await self.shards.slices()
        for number, nbytes, _state in (found for slices in told for found in slices):
            used[number] = used.get(number, 0) + nbytes
        segments = sorted(self.roster.segments.values(), key=lambda s: s.number)
        faults = self.liveness.faults()
        return tuple(
            _entry(s, used.get(s.number, 0), faults.get(s.spec.uuid, "")) for s in segments
        )

    async def status(self, connection: Connection, uptime_ms: int) -> wire.ClusterStatus:
        """Return the health of the cluster."""
        segments = self.roster.segments.values()
        takes = any(s.state == SegmentState.OK and s.spec.tier != Tier.COLD for s in segments)
        standbys = await self.standbys.told()
        return wire.ClusterStatus(
            takes and not standbys["refusing"],
            self.facts.version,
            os.getpid(),
            uptime_ms,
            self.cluster_map(connection, wire.MapRequest()).shards,
            tuple(
                wire.WorkerEntry(
                    worker.name,
                    worker.host,
                    worker.state,
                    self.liveness.silent_ns(worker.uuid) // MILLISECOND_NS,
                    tuple(sorted(worker.numbers)),
                )
                for worker in self.roster.workers.values()
            ),
            await self._entries(),
            **standbys,
        )


def _entry(segment: LentSegment, used: int = 0, fault: str = "") -> wire.SegmentEntry:
    spec, worker = segment.spec, segment.worker
    return wire.SegmentEntry(
        segment.number,
        spec.uuid,
        spec.name,
        worker.host,
        spec.nbytes,
        int(segment.state),
        spec.descriptor,
        used,
        worker.name,
        spec.tier,
        fault,
        bool(spec.key),
        spec.namespace,
    )
