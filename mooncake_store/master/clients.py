"""Who talks to a shard: one record per run of a client, alive while it has anything here.

A client is known by the connections it has open and by the segments mounted in its name. When the
last of both is gone it may still come back, so its unfinished puts are given up only after
`client_ttl`. A newer run of the same uuid takes over at once: the connections of the older one
are closed, so nothing late of it arrives.

How many are known is bounded. What anybody can make grow are those who came and left, so they make
room before anybody is refused, the oldest first: those of the newcomer's own address when this has
many, and those of the address that has most of them when there is no place left. Whoever is
connected stays, however many are of one address: a whole pool may live on one.

Every call is O(1) besides closing connections, but for O(addresses) when there is no place left.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from mooncake_store.core.records import SegmentState
from mooncake_store.master.bounds import CLIENTS_MAX, CLIENTS_OF_ADDRESS_MAX
from transfer_engine.errors import IllegalClientError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mooncake_store.core.shard import Shard
    from mooncake_store.master.accounts import Account
    from transfer_engine.rpc.serving import Connection

__all__ = ["ClientRun", "Clients", "Peer"]

log = logging.getLogger(__name__)

LEAVE_AT_ONCE = 64
"""To end so many takes hardly longer than to end one, so that those who come and go in a loop cost
others little."""


@dataclass(slots=True, eq=False)
class ClientRun:
    """One run of one client, as the shard knows it."""

    uuid: bytes
    epoch: int
    handle: int
    address: str = ""
    """Where it came from first; "" for workers of which the master told, and after a restart."""
    principal: str | None = None
    """Who speaks for it; None until somebody has."""
    connections: set[Connection] = field(default_factory=set)
    segments: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Peer:
    """In whose name a connection speaks; set once by `open`."""

    handle: int
    tenant: int
    confined: bool = False
    """Whether its credential is for some namespaces only."""
    who: str = ""
    """How a log names it."""
    asked: bool = False
    """Whether owners of memory ask it for rights..."""
    namespaces: tuple[str, ...] = ()
    """...but where that is declared for one of these, which its credential is for."""
    address: str = ""
    """Where it asks from."""
    account: Account | None = None
    """What its principal takes here; None without a name."""


class Clients:
    """All client runs of a shard, and when the idle ones end."""

    def __init__(self, shard: Shard, ttl_ns: int) -> None:
        self._shard = shard
        self._ttl_ns = ttl_ns
        self._runs: dict[bytes, ClientRun] = {}
        self._of: Counter[str] = Counter()  # runs by address
        # Uuid -> when the run ends. The ttl is the same for all, so the oldest entry ends first.
        self._idle: dict[bytes, int] = {}
        self._idle_of: dict[str, dict[bytes, None]] = {}  # the same by address

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[ClientRun]:
        return iter(self._runs.values())

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
            self._enter(run)
            self._begin_idle_time(now, run)

    def enroll(self, now: int, uuid: bytes, epoch: int, host: str, address: str = "") -> ClientRun:
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
        if known is None:
            self._make_room(now, address)
        handle = self._shard.open_client(now, uuid, epoch, host)
        if handle < 0:
            raise self._full()
        run = ClientRun(uuid, epoch, handle, address)
        if known is not None:
            self._forget(known)
            run.segments = known.segments  # the core hands them over with the uuid
            for connection in list(known.connections):
                connection.close()
        self._enter(run)
        self._begin_idle_time(now, run)
        return run

    def connect(self, run: ClientRun, connection: Connection, principal: str = "") -> None:
        """Note that a connection speaks for this run.

        Raises IllegalClientError where that is another principal's, who is held to other limits.
        """
        if run.principal not in (None, principal):
            raise IllegalClientError(
                "another principal speaks for this client",
                operation="open",
                advice="open it under a uuid of its own, or with a newer epoch",
            )
        run.principal = principal
        run.connections.add(connection)
        self._end_idle_time(run)

    def disconnect(self, now: int, run: ClientRun, connection: Connection) -> None:
        """Note that a connection is gone."""
        run.connections.discard(connection)
        self._begin_idle_time(now, run)

    def mounted(self, run: ClientRun, number: int) -> None:
        """Note that the run owns a segment, which keeps it known."""
        run.segments.add(number)
        self._end_idle_time(run)

    def unmounted(self, now: int, number: int) -> None:
        """Note that a segment is gone, whoever owned it."""
        for run in [run for run in self._runs.values() if number in run.segments]:
            run.segments.discard(number)
            self._begin_idle_time(now, run)

    def expire(self, now: int) -> None:
        """End the runs whose time is over: their unfinished puts are given up."""
        first = islice(self._idle.items(), LEAVE_AT_ONCE)
        self._end(now, [uuid for uuid, ends in first if ends <= now])

    def _enter(self, run: ClientRun) -> None:
        self._runs[run.uuid] = run
        self._of[run.address] += 1

    def _forget(self, run: ClientRun) -> None:
        self._end_idle_time(run)
        del self._runs[run.uuid]
        self._of[run.address] -= 1
        if not self._of[run.address]:
            del self._of[run.address]

    def _begin_idle_time(self, now: int, run: ClientRun) -> None:
        """Start the time of a run that has nothing here any more."""
        if self._runs.get(run.uuid) is run and not run.connections and not run.segments:
            self._end_idle_time(run)
            self._idle[run.uuid] = now + self._ttl_ns
            self._idle_of.setdefault(run.address, {})[run.uuid] = None

    def _end_idle_time(self, run: ClientRun) -> None:
        if self._runs.get(run.uuid) is run and self._idle.pop(run.uuid, None) is not None:
            mine = self._idle_of[run.address]
            del mine[run.uuid]
            if not mine:
                del self._idle_of[run.address]

    def _make_room(self, now: int, address: str) -> None:
        """Let idle runs go where there are too many. Raises UnavailableError if none are idle."""
        if self._of[address] >= CLIENTS_OF_ADDRESS_MAX:
            self._end_oldest(now, address)
        if len(self._runs) >= CLIENTS_MAX:
            if not self._idle_of:
                raise self._full()
            self._end_oldest(now, max(self._idle_of, key=lambda one: len(self._idle_of[one])))

    def _end_oldest(self, now: int, address: str) -> None:
        self._end(now, list(islice(self._idle_of.get(address, ()), LEAVE_AT_ONCE)))

    def _end(self, now: int, uuids: list[bytes]) -> None:
        """Let idle runs go: their unfinished puts are given up."""
        runs = [self._runs[uuid] for uuid in uuids]
        for run in runs:
            self._forget(run)
        if runs:
            self._shard.close_clients(now, [run.handle for run in runs])

    def _full(self) -> UnavailableError:
        address, count = max(self._of.items(), key=lambda each: each[1], default=("", 0))
        where = f"at {address}" if address else "workers'"
        return UnavailableError(
            f"the shard knows {len(self._runs)} clients, as many as it can, and all are connected "
            f"or lend memory; {count} of them are {where}",
            operation="open",
            advice="close some there, then connect again",
        )
