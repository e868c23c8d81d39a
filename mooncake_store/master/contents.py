"""What a shard holds: listings, removal by name, one object, totals."""

from __future__ import annotations

import resource
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.master.answers import Answer, answers
from mooncake_store.master.words import digest_of, words
from mooncake_store.units import MILLISECOND_NS, SECOND_NS
from mooncake_store.wire import shard as wire
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from mooncake_store.master.clients import Peer
    from mooncake_store.master.site import Site

__all__ = ["Contents"]

ROWS_PER_REMOVAL = 262_144
CURSOR_MAX = 1 << 62
"""No shard has as many rows."""
_PAGE_BYTES = resource.getpagesize()


class Contents:
    """Answers what is asked of all objects, or of one that somebody looks at."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._shard = site.shard
        self._now = site.now

    @answers(wire.LIST, dear=True)
    def list_objects(self, peer: Peer, request: Any) -> Answer:
        """Return one page of named objects; fewer than asked when their names are long."""
        cursor, limit, prefix = request
        limit = max(1, min(limit, wire.BATCH_MAX))
        while True:
            rows, names, following = self._shard.list_objects(
                self._now(), peer.tenant, prefix.tobytes(), min(cursor, CURSOR_MAX), limit
            )
            if len(names) <= wire.LIST_BYTES_MAX:
                break
            limit = max(1, limit // 2)
        rows["created_s"] += np.uint32(self._site.epoch_s())
        return {"cursor": following, "rows": words(rows), "names": names}

    @answers(wire.REMOVE_MATCHING, changes=True, dear=True)
    def remove_matching(self, peer: Peer, request: Any) -> Answer:
        """Remove by name within a bounded number of rows."""
        try:
            removed, cursor = self._shard.remove_matching(
                self._now(),
                peer.tenant,
                request.pattern,
                request.kind,
                request.force,
                max(0, min(request.cursor, CURSOR_MAX)),
                max(1, min(request.rows_max, ROWS_PER_REMOVAL)),
                peer.handle if request.own_leases else 0,
            )
        except ValueError as error:
            raise InvalidArgumentError(str(error), operation="remove_matching") from error
        return wire.Removed(removed, cursor)

    @answers(wire.STAT)
    def stat(self, peer: Peer, request: Any) -> Answer:
        """Return everything known of one object."""
        now = self._now()
        found = self._shard.stat(now, digest_of(request.digest))
        if found is None:
            return wire.StatReply(False)
        bases = self._site.bases
        return wire.StatReply(
            found=True,
            name=found.name,
            size=found.size,
            state=int(found.state),
            generation=found.generation,
            checksum=found.checksum,
            lease_ms=found.lease_ns // MILLISECOND_NS,
            soft_pin_ms=found.soft_pin_ns // MILLISECOND_NS,
            hard_pin=found.hard_pin,
            group=found.group,
            age_ms=max(0, now - found.created_ns) // MILLISECOND_NS,
            hits=found.hits,
            replicas=tuple(
                (segment, offset + int(bases[segment]), int(state))
                for segment, offset, state in found.replicas
            ),
            created_s=found.created_ns // SECOND_NS + self._site.epoch_s(),
            absent=found.absent,
        )

    @answers(wire.STATS, dear=True)
    def stats(self, peer: Peer, request: Any) -> Answer:
        """Return the totals of the shard and of the asking tenant."""
        found, keeper = self._shard.stats(peer.tenant, peer.handle), self._site.keeper
        quota, held = self._shard.tenant_quota(peer.tenant), self._shard.allowances.get(peer.handle)
        limits = found.room_bytes, quota, None if held is None else held.bytes_most
        room = min(most for most in limits if most is not None)
        return wire.ShardFigures(
            **asdict(found)
            | {"room_bytes": room, "pinnable_bytes": min(room, found.pinnable_bytes)},
            tenant_objects=self._shard.tenant_objects(peer.tenant),
            tenant_bytes=self._shard.tenant_bytes(peer.tenant),
            tenant_quota=quota or 0,
            requests=self._site.requests,
            keys=self._site.keys,
            clients=len(self._site.clients),
            cpu_s=time.process_time(),
            rss_bytes=_rss_bytes(),
            event_number=self._shard.events.next_number,
            journal="none" if keeper is None else keeper.state,
            journal_bytes=0 if keeper is None else keeper.written_bytes,
        )


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
