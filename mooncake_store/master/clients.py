"""Who talks to a shard: one record per run of a client, alive while it has anything here.

A client is known by the connections it has open and by the segments mounted in its name. When the
last of both is gone it may still come back, so its unfinished puts are given up only after
`client_ttl`. A newer run of the same uuid takes over at once: the connections of the older one
are closed, so nothing late of it arrives. Every call is O(1) besides closing connections.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_store.core.records import SegmentState
from transfer_engine.errors import IllegalClientError, UnavailableError

if TYPE_CHECKING:
    from mooncake_store.core.shard import Shard
    from transfer_engine.rpc.serving import Connection

__all__ = ["ClientRun", "Clients", "Peer"]

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class ClientRun:
    """One run of one client, as the shard knows it."""

    uuid: bytes
    epoch: int
    handle: int
    connections: set[Connection] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Peer:
    """In whose name a connection speaks; set once by `open`."""

    handle: int
    tenant: int
    confined: bool = False
    """Whether its credential is for some namespaces only."""


class Clients:
    """All client runs of a shard, and when the idle ones end."""

    def __init__(self, shard: Shard, ttl_ns: int) -> None:
        self._shard = shard
        self._ttl_ns = ttl_ns
        self._runs: dict[bytes, ClientRun] = {}
        # Uuid -> when the run ends. The ttl is the same for all, so the oldest entry ends first.
        self._idle: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._runs)

    def restore(self, now: int) -> None:
        """Know the clients that the shard has brought along from before its process was started.

        Those that own segments stay as they are; the others have the ttl, from now, to come back.
        To be called before any connection is accepted.
        """
        owned: dict[int, set[int]] = {}
        for segment in self._shard.segments():
            if segment.state != SegmentState.GONE:
                owned.setdefault(segment.owner, set()).add(segment.index)
        for client in self._shard.clients.values():
            run = ClientRun(client.uuid, client.epoch, client.handle)
            run.segments = owned.get(client.handle, run.segments)
            self._runs[client.uuid] = run
            self._begin_idle_time(now, run)

    def enroll(self, now: int, uuid: bytes, epoch: int, host: str) -> ClientRun:
        """Return the run of this client, replacing an older one.

        Raises IllegalClientError for a run that was replaced, UnavailableError when full.
        """
        known = self._runs.get(uuid)
        if known is not None and known.epoch == epoch:
            return known
        if known is not None and known.epoch > epoch:
            raise IllegalClientError(
                "a newer run of this client has taken over",
                advice="a program that was replaced must stop, or start again with a new epoch",
            )
        handle = self._shard.open_client(now, uuid, epoch, host)
        if handle < 0:
            raise UnavailableError("the shard knows too many clients", advice="close idle ones")
        run = self._runs[uuid] = ClientRun(uuid, epoch, handle)
        self._idle.pop(uuid, None)
        if known is not None:
            run.segments = known.segments  # the core hands them over with the uuid
            for connection in list(known.connections):
                connection.close()
        self._begin_idle_time(now, run)
        return run

    def connect(self, run: ClientRun, connection: Connection) -> None:
        """Note that a connection speaks for this run."""
        run.connections.add(connection)
        self._idle.pop(run.uuid, None)

    def disconnect(self, now: int, run: ClientRun, connection: Connection) -> None:
        """Note that a connection is gone."""
        run.connections.discard(connection)
        self._begin_idle_time(now, run)

    def mounted(self, run: ClientRun, number: int) -> None:
        """Note that the run owns a segment, which keeps it known."""
        run.segments.add(number)
        self._idle.pop(run.uuid, None)

    def unmounted(self, now: int, number: int) -> None:
        """Note that a segment is gone, whoever owned it."""
        for run in [run for run in self._runs.values() if number in run.segments]:
            run.segments.discard(number)
            self._begin_idle_time(now, run)

    def _begin_idle_time(self, now: int, run: ClientRun) -> None:
        """Start the time of a run that has nothing here any more."""
        if self._runs.get(run.uuid) is run and not run.connections and not run.segments:
            self._idle.pop(run.uuid, None)
            self._idle[run.uuid] = now + self._ttl_ns

    def expire(self, now: int) -> None:
        """End the runs whose time is over: their unfinished puts are given up."""
        while self._idle:
            uuid = next(iter(self._idle))
            if self._idle[uuid] > now:
                return
            del self._idle[uuid]
            self._shard.close_client(now, self._runs.pop(uuid).handle)
