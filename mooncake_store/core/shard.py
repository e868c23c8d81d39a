"""One shard: the complete semantics of the store for one slice of the key space, without I/O.

    shard = Shard(ShardConfig())
    rows, replicas = shard.put_start(now, client, tenant, digests, sizes, names)
    ...the caller writes the bytes where `replicas` says...
    shard.put_end(now, client, digests, rows["generation"], checksums)
    rows, replicas = shard.get(now, client, digests, ttl_ns)

Every operation takes the time as its first argument and digests as an (n, 2) array of uint64; the
answer has one status per key, never an exception for one bad key. Time that runs backwards is
taken as standing still. The same calls with the same times leave the same state: that is what
makes it replayable, replicable and testable against a model.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_store.core import _codes as c
from mooncake_store.core import integrity, pressure, puts, reads, removal, renames
from mooncake_store.core.figures import SegmentInfo, ShardStats, totals
from mooncake_store.core.janitor import Janitor, TickReport
from mooncake_store.core.operation import operation
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import SEGMENT_BYTES_MAX, SegmentState, State, Status
from mooncake_store.core.state import CLIENTS_MAX, TENANTS_MAX, Client, ShardState, Tenant
from mooncake_store.core.tasks import Task, TaskKind, Tasks

__all__ = ["SegmentInfo", "Shard", "ShardStats"]

Digests = NDArray[np.uint64]


class Shard(ShardState):
    """The state machine; see the module's head for the rules all operations share."""

    def __init__(self, config: ShardConfig | None = None) -> None:
        super().__init__(config or ShardConfig())
        self.tasks = Tasks(self)
        self.janitor = Janitor(self, self.tasks)
        if self.config.debug_integrity:
            self.check = integrity.check

    # Objects. Each is a function on the state, in the module that it is taken from.

    put_start = operation(puts.put_start)
    upsert_start = operation(puts.upsert_start)
    put_end = operation(puts.put_end)
    put_revoke = operation(puts.put_revoke)
    get = operation(reads.get)
    exists = operation(reads.exists)
    find_prefix = operation(reads.find_prefix)
    renew = operation(reads.renew)
    release = operation(reads.release)
    list_objects = operation(reads.list_objects)
    stat = operation(reads.stat)
    rename = operation(renames.rename)
    remove = operation(removal.remove)
    remove_replicas = operation(removal.remove_replicas)
    remove_matching = operation(removal.remove_matching)
    pin = operation(removal.pin)
    set_hard_pin = operation(removal.set_hard_pin)
    evict = operation(pressure.evict)

    # Tenants and clients.

    def tenant(self, name: str, quota_bytes: int | None = None) -> int:
        """Return the number of a tenant, registering it; a quota given replaces the old one.

        Returns -1 when there are too many tenants.
        """
        tenants = self.tenants
        if name not in tenants:
            taken = self.tenant_by_number
            number = next((i for i in range(TENANTS_MAX) if i not in taken), -1)
            if number < 0:
                return number
            tenants[name] = self.tenant_by_number[number] = Tenant(number, name, None)
        if quota_bytes is not None:
            tenants[name].quota_bytes = quota_bytes
            self.order_tenant(tenants[name].number)
        return tenants[name].number

    def drop_tenant(self, tenant: int) -> Status:
        """Forget a tenant that has no objects."""
        known = self.tenant_by_number.get(tenant)
        if known is None or tenant == 0:
            return Status.TENANT_NOT_REGISTERED
        if self.tenant_use[tenant, 1]:
            return Status.TENANT_NOT_EMPTY
        del self.tenants[known.name], self.tenant_by_number[tenant]
        self.quota_orders.pop(tenant, None)
        return Status.OK

    @operation
    def open_client(self, uuid: bytes, epoch: int, host: str = "") -> int:
        """Return the handle of a client; a new epoch of a known uuid closes the old one.

        Returns -1 when there are too many clients.
        """
        known = self.clients.get(uuid)
        if known is not None and known.epoch == epoch:
            return known.handle
        handle = self._free_handle()
        if handle < 0:
            return handle
        if known is not None:
            for segment in self.space.all():
                if segment.owner == known.handle:
                    segment.owner = handle
            self.close_client(self.now, known.handle)
        self.clients[uuid] = self.client_by_handle[handle] = Client(handle, uuid, epoch, host)
        return handle

    def _free_handle(self) -> int:
        for _ in range(CLIENTS_MAX):
            self.handle = (self.handle + 1) % CLIENTS_MAX
            if self.handle not in self.client_by_handle and not self.closed[self.handle]:
                self.handles_used = max(self.handles_used, self.handle)
                return self.handle
        return -1

    @operation
    def close_client(self, client: int, fenced: bool = False) -> None:
        """End a client: its unfinished puts are given up, its segments stay."""
        known = self.client_by_handle.pop(client, None)
        if known is None:
            return
        if self.clients.get(known.uuid) is known:
            del self.clients[known.uuid]
        self.closed[client] = 2 if fenced else 1
        self.tasks.expire()
        self.janitor.client_closed()

    # Segments.

    @operation
    def mount(
        self,
        client: int,
        uuid: bytes,
        name: str,
        nbytes: int,
        host: str = "",
        number: int | None = None,
    ) -> tuple[Status, int]:
        """Add a segment; mounting the same uuid again changes nothing but its owner's handle.

        `number` is for masters that number the segments of several shards alike; it must be free.
        """
        if client not in self.client_by_handle:
            return Status.CLIENT_NOT_FOUND, -1
        if not 0 < nbytes <= SEGMENT_BYTES_MAX:
            return Status.INVALID_PARAMS, -1
        known = self.space.by_uuid(uuid)
        if known is not None:
            if known.nbytes != nbytes or known.name != name:
                return Status.SEGMENT_ALREADY_EXISTS, known.index
            if known.owner != client and known.owner in self.client_by_handle:
                return Status.ILLEGAL_CLIENT, known.index
            known.owner = client
            if known.state == SegmentState.SUSPECT:
                self.space.set_state(known, SegmentState.OK)
            return Status.OK, known.index
        segment = self.space.mount(self.now, uuid, name, nbytes, host, client, number)
        if segment is None:
            return Status.NO_SPACE, -1
        return Status.OK, segment.index

    @operation
    def unmount(self, client: int, uuid: bytes, force: bool = False) -> Status:
        """Make a segment's replicas unreadable at once; `force` is for administrators."""
        segment = self.space.by_uuid(uuid)
        if segment is None:
            return Status.SEGMENT_NOT_FOUND
        if segment.owner != client and not force:
            return Status.ILLEGAL_CLIENT
        self.janitor.end_segment(segment)
        return Status.OK

    @operation
    def unmount_gracefully(self, client: int, uuid: bytes, deadline_ns: int) -> Status:
        """Drain a segment and unmount it when it is empty, at the latest at `deadline_ns`."""
        segment = self.space.by_uuid(uuid)
        if segment is None:
            return Status.SEGMENT_NOT_FOUND
        if segment.owner != client:
            return Status.ILLEGAL_CLIENT
        segment.gone_at = deadline_ns
        return self.janitor.drain(segment.index)[0]

    @operation
    def set_suspect(self, segment: int, suspect: bool) -> None:
        """Stop or resume placing new objects on a segment whose owner is silent."""
        known = self.space.get(segment)
        if known is not None and known.state in (SegmentState.OK, SegmentState.SUSPECT):
            self.space.set_state(known, SegmentState.SUSPECT if suspect else SegmentState.OK)

    def segments(self) -> list[SegmentInfo]:
        """Return all segments, gone ones that are still being swept included."""
        return [
            SegmentInfo(
                s.index,
                s.uuid,
                s.name,
                s.host,
                s.nbytes,
                s.state,
                s.used,
                s.quarantined,
                s.owner,
            )
            for s in self.space.all()
        ]

    # Background duties.

    @operation
    def tick(self) -> TickReport:
        """Do a bounded share of the background duties; call it every 10 ms or so."""
        return self.janitor.tick()

    # Copies, moves, drains.

    @operation
    def copy_start(
        self, client: int, digest: Digests, source: int | None, targets: list[int]
    ) -> tuple[Status, int, NDArray[Any]]:
        """Begin a copy run by `client`: (status, task number, replicas to write)."""
        return self.tasks.start(TaskKind.COPY, client, digest, source, targets)

    @operation
    def move_start(
        self, client: int, digest: Digests, source: int | None, target: int
    ) -> tuple[Status, int, NDArray[Any]]:
        """Begin a move run by `client`; the source replica goes when it ends well."""
        return self.tasks.start(TaskKind.MOVE, client, digest, source, [target])

    @operation
    def submit_copy(
        self, digest: Digests, targets: list[int], source: int | None = None
    ) -> tuple[Status, int]:
        """Queue a copy for the owner of the source: (status, task number)."""
        return self.tasks.submit(TaskKind.COPY, digest, source, targets)

    @operation
    def submit_move(
        self, digest: Digests, target: int, source: int | None = None
    ) -> tuple[Status, int]:
        """Queue a move for the owner of the source: (status, task number)."""
        return self.tasks.submit(TaskKind.MOVE, digest, source, [target])

    @operation
    def fetch_tasks(self, client: int, limit: int = 16) -> list[Task]:
        """Return tasks of this client, begun now or before: it runs none while it asks."""
        return self.tasks.fetch(client, limit)

    @operation
    def finish_task(self, client: int, number: int, ok: bool, message: str = "") -> Status:
        """End a running copy or move."""
        return self.tasks.finish(client, number, ok, message)

    @operation
    def drain(self, segment: int) -> tuple[Status, int]:
        """Start moving everything off a segment: (status, job number)."""
        return self.janitor.drain(segment)

    @operation
    def cancel_drain(self, number: int) -> Status:
        """Stop a drain; the segment takes new objects again."""
        return self.janitor.cancel_drain(number)

    # Observation.

    @operation
    def hot_keys(self) -> tuple[Digests, NDArray[np.uint16]]:
        """Return and forget the keys that became hot since the last call, and their hits."""
        rows = np.array(
            [row for row, gen in self.hot.items() if self.rows["generation"][row] == gen],
            np.int32,
        )
        self.hot.clear()
        hits = self.rows["hits"][rows] & np.uint16(c.HOT_COUNT_MASK)
        return self._digests(rows), hits

    def event_snapshot(self, cursor: int = 0, rows_max: int = 65_536) -> tuple[Digests, int, int]:
        """Return (digests of readable objects, next cursor or 0, number of the next event).

        A follower keeps the number of the first page and replays from there after the last.
        """

        def in_span(span: NDArray[np.int64], out: NDArray[np.int32]) -> int:
            found = np.flatnonzero(self.rows["state"][span[0] : span[1]] == State.READABLE)
            out[: len(found)] = found + span[0]
            return len(found)

        rows, following = self.scan(in_span, cursor, rows_max)
        return self._digests(rows), following, self.events.next_number

    def _digests(self, rows: NDArray[np.int32]) -> Digests:
        words = np.stack([self.rows["digest_lo"][rows], self.rows["digest_hi"][rows]], axis=1)
        out: Digests = words.view(np.uint64)
        return out

    @property
    def objects(self) -> int:
        """How many objects can be read."""
        return int(self.tally[c.OBJECTS])

    def stats(self) -> ShardStats:
        """Return totals; cheap."""
        return totals(self, self.tasks.count())

    def tenant_bytes(self, tenant: int) -> int:
        """Return the bytes a tenant's objects occupy."""
        return int(self.tenant_use[tenant, 0])

    def tenant_quota(self, tenant: int) -> int | None:
        """Return the most bytes a tenant's objects may occupy, None where that has no limit."""
        return self.tenant_by_number[tenant].quota_bytes

    def tenant_objects(self, tenant: int) -> int:
        """Return how many objects a tenant has."""
        return int(self.tenant_use[tenant, 1])

    def check_integrity(self) -> None:
        """Check every invariant of the state; AssertionError names the one that is broken."""
        integrity.check(self)
