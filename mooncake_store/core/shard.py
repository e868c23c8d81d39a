"""One shard: the complete semantics of the store for one slice of the key space, without I/O.

    shard = Shard(ShardConfig())
    rows, replicas = shard.put_start(now, client, tenant, digests, sizes, names)
    ...the caller writes the bytes where `replicas` says...
    shard.put_end(now, client, digests, rows["generation"], checksums)
    rows, replicas = shard.get(now, client, digests, ttl_ns)

Every method takes the time as its first argument and digests as an (n, 2) array of uint64; the
answer has one status per key, never an exception for one bad key. Time that runs backwards is
taken as standing still. The same calls with the same times leave the same state: that is what
makes it replayable, replicable and testable against a model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mooncake_store.core import _codes as c
from mooncake_store.core import integrity, pressure, puts, reads, removal, renames
from mooncake_store.core.figures import SegmentInfo, ShardStats, totals
from mooncake_store.core.janitor import DrainJob, Janitor, TickReport
from mooncake_store.core.options import DEFAULTS, PutOptions, ShardConfig, SoftPin
from mooncake_store.core.records import SEGMENT_BYTES_MAX, SegmentState, State, Status
from mooncake_store.core.state import CLIENTS_MAX, TENANTS_MAX, Client, ShardState, Tenant
from mooncake_store.core.tasks import Task, TaskKind, Tasks

if TYPE_CHECKING:
    from mooncake_store.core.names import Names
    from mooncake_store.core.pressure import EvictReport
    from mooncake_store.core.reads import ObjectStat

__all__ = ["SegmentInfo", "Shard", "ShardStats"]

Digests = NDArray[np.uint64]


class Shard:
    """The state machine; see the module's head for the rules all methods share."""

    def __init__(self, config: ShardConfig | None = None) -> None:
        self.config = config or ShardConfig()
        self._state = ShardState(self.config)
        self._tasks = Tasks(self._state)
        self._janitor = Janitor(self._state, self._tasks)

    # -- tenants and clients

    def tenant(self, name: str, quota_bytes: int | None = None) -> int:
        """Return the number of a tenant, registering it; a quota given replaces the old one.

        Returns -1 when there are too many tenants.
        """
        tenants = self._state.tenants
        if name not in tenants:
            taken = self._state.tenant_by_number
            number = next((i for i in range(TENANTS_MAX) if i not in taken), -1)
            if number < 0:
                return number
            tenants[name] = self._state.tenant_by_number[number] = Tenant(number, name, None)
        if quota_bytes is not None:
            tenants[name].quota_bytes = quota_bytes
            self._state.order_tenant(tenants[name].number)
        return tenants[name].number

    def drop_tenant(self, tenant: int) -> Status:
        """Forget a tenant that has no objects."""
        known = self._state.tenant_by_number.get(tenant)
        if known is None or tenant == 0:
            return Status.TENANT_NOT_REGISTERED
        if self._state.tenant_use[tenant, 1]:
            return Status.TENANT_NOT_EMPTY
        del self._state.tenants[known.name], self._state.tenant_by_number[tenant]
        self._state.quota_orders.pop(tenant, None)
        return Status.OK

    def open_client(self, now: int, uuid: bytes, epoch: int, host: str = "") -> int:
        """Return the handle of a client; a new epoch of a known uuid closes the old one.

        Returns -1 when there are too many clients.
        """
        state = self._state
        state.advance(now)
        known = state.clients.get(uuid)
        if known is not None and known.epoch == epoch:
            return known.handle
        handle = self._free_handle()
        if handle < 0:
            return handle
        if known is not None:
            for segment in state.space.all():
                if segment.owner == known.handle:
                    segment.owner = handle
            self.close_client(now, known.handle)
        state.clients[uuid] = state.client_by_handle[handle] = Client(handle, uuid, epoch, host)
        return handle

    def _free_handle(self) -> int:
        state = self._state
        for _ in range(CLIENTS_MAX):
            state.handle = (state.handle + 1) % CLIENTS_MAX
            if state.handle not in state.client_by_handle and not state.closed[state.handle]:
                state.handles_used = max(state.handles_used, state.handle)
                return state.handle
        return -1

    def close_client(self, now: int, client: int, fenced: bool = False) -> None:
        """End a client: its unfinished puts are given up, its segments stay."""
        state = self._state
        state.advance(now)
        known = state.client_by_handle.pop(client, None)
        if known is None:
            return
        if state.clients.get(known.uuid) is known:
            del state.clients[known.uuid]
        state.closed[client] = 2 if fenced else 1
        self._tasks.expire()
        self._janitor.client_closed()
        self._checked()

    # -- segments

    def mount(
        self,
        now: int,
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
        state = self._state
        state.advance(now)
        if client not in state.client_by_handle:
            return Status.CLIENT_NOT_FOUND, -1
        if not 0 < nbytes <= SEGMENT_BYTES_MAX:
            return Status.INVALID_PARAMS, -1
        known = state.space.by_uuid(uuid)
        if known is not None:
            if known.nbytes != nbytes or known.name != name:
                return Status.SEGMENT_ALREADY_EXISTS, known.index
            if known.owner != client and known.owner in state.client_by_handle:
                return Status.ILLEGAL_CLIENT, known.index
            known.owner = client
            if known.state == SegmentState.SUSPECT:
                state.space.set_state(known, SegmentState.OK)
            return Status.OK, known.index
        segment = state.space.mount(now, uuid, name, nbytes, host, client, number)
        if segment is None:
            return Status.NO_SPACE, -1
        return Status.OK, segment.index

    def unmount(self, now: int, client: int, uuid: bytes, force: bool = False) -> Status:
        """Make a segment's replicas unreadable at once; `force` is for administrators."""
        self._state.advance(now)
        segment = self._state.space.by_uuid(uuid)
        if segment is None:
            return Status.SEGMENT_NOT_FOUND
        if segment.owner != client and not force:
            return Status.ILLEGAL_CLIENT
        self._janitor.end_segment(segment)
        self._checked()
        return Status.OK

    def unmount_gracefully(self, now: int, client: int, uuid: bytes, deadline_ns: int) -> Status:
        """Drain a segment and unmount it when it is empty, at the latest at `deadline_ns`."""
        self._state.advance(now)
        segment = self._state.space.by_uuid(uuid)
        if segment is None:
            return Status.SEGMENT_NOT_FOUND
        if segment.owner != client:
            return Status.ILLEGAL_CLIENT
        segment.gone_at = deadline_ns
        return self._janitor.drain(segment.index)[0]

    def set_suspect(self, now: int, segment: int, suspect: bool) -> None:
        """Stop or resume placing new objects on a segment whose owner is silent."""
        self._state.advance(now)
        known = self._state.space.get(segment)
        if known is not None and known.state in (SegmentState.OK, SegmentState.SUSPECT):
            self._state.space.set_state(known, SegmentState.SUSPECT if suspect else SegmentState.OK)

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
            for s in self._state.space.all()
        ]

    def readers_until(self, segment: int) -> int:
        """When the last lease ends, at the latest, on a segment or what was one.

        Leases given back count until the sweep that follows an unmount has seen all rows.
        """
        return self._state.space.readers_until(segment)

    # -- objects

    def put_start(
        self,
        now: int,
        client: int,
        tenant: int,
        digests: Digests,
        sizes: NDArray[np.int64],
        names: Names | None = None,
        options: PutOptions = DEFAULTS,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin objects: (PUT_ROW per key, REPLICA per replica of the accepted keys, in order).

        Every replica lies on a segment of its own; fewer than asked is success if at least
        `replicas_min` fit. Where nothing fits, cold objects are evicted first.
        """
        self._state.advance(now)
        out = puts.put_start(self._state, client, tenant, digests, sizes, names, options)
        self._checked()
        return out

    def upsert_start(
        self,
        now: int,
        client: int,
        tenant: int,
        digests: Digests,
        sizes: NDArray[np.int64],
        names: Names | None = None,
        options: PutOptions = DEFAULTS,
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Begin new generations beside readable ones; put_end swaps them in."""
        self._state.advance(now)
        out = puts.upsert_start(self._state, client, tenant, digests, sizes, names, options)
        self._checked()
        return out

    def put_end(
        self,
        now: int,
        client: int,
        digests: Digests,
        generations: NDArray[np.uint32],
        checksums: NDArray[np.uint64],
    ) -> NDArray[np.int16]:
        """Make written objects readable, with the checksum of their bytes."""
        self._state.advance(now)
        out = puts.put_end(self._state, client, digests, generations, checksums)
        self._checked()
        return out

    def put_revoke(
        self,
        now: int,
        client: int,
        digests: Digests,
        generations: NDArray[np.uint32],
        *,
        late: bool = False,
    ) -> NDArray[np.int16]:
        """Give up unfinished puts; the caller writes no more, unless some of it may come `late`."""
        self._state.advance(now)
        out = puts.put_revoke(self._state, client, digests, generations, late=late)
        self._checked()
        return out

    def get(
        self, now: int, client: int, digests: Digests, ttl_ns: int, stop_at_miss: bool = False
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return (GET_ROW per key, REPLICA per living replica); `ttl_ns` 0 grants no lease.

        The lease is the client's; client 0 is nobody, whose leases run to their end.

        With `stop_at_miss` keys after the first miss are neither leased nor touched.
        """
        self._state.advance(now)
        out = reads.get(self._state, client, digests, ttl_ns, stop_at_miss)
        self._checked()
        return out

    def exists(self, now: int, digests: Digests) -> NDArray[np.bool_]:
        """Return which objects can be read; changes nothing."""
        self._state.advance(now)
        return reads.exists(self._state, digests)

    def find_prefix(self, now: int, digests: Digests) -> int:
        """Return the length of the leading run of readable objects; changes nothing."""
        self._state.advance(now)
        return reads.find_prefix(self._state, digests)

    def renew(
        self,
        now: int,
        client: int,
        digests: Digests,
        generations: NDArray[np.uint32],
        ttl_ns: int,
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Prolong a client's leases of unchanged objects: (status, remaining ns) per key.

        Who has none is granted one; with `ttl_ns` 0 the status only says what is unchanged.
        """
        self._state.advance(now)
        return reads.renew(self._state, client, digests, generations, ttl_ns)

    def release(
        self, now: int, client: int, digests: Digests, generations: NDArray[np.uint32]
    ) -> NDArray[np.int16]:
        """Give a client's leases back, one grant each; a lease ends when all are given back.

        What is somebody else's, or was given back already, stays as it is.
        """
        self._state.advance(now)
        return reads.release(self._state, client, digests, generations)

    def remove(
        self, now: int, digests: Digests, force: bool = False, client: int = 0
    ) -> NDArray[np.int16]:
        """Remove objects; `force` also those leased or being written, space quarantined.

        Leases of the client that asks are in nobody's way; their space is quarantined as well.
        """
        self._state.advance(now)
        out = removal.remove(self._state, client, digests, force)
        self._checked()
        return out

    def remove_replicas(
        self, now: int, digests: Digests, segment: int, client: int = 0
    ) -> NDArray[np.int16]:
        """Remove what lies on one segment; leases of `client` are not in the way."""
        self._state.advance(now)
        out = removal.remove_replicas(self._state, client, digests, segment)
        self._checked()
        return out

    def rename(
        self,
        now: int,
        sources: Digests,
        targets: Digests,
        names: Names | None = None,
        overwrite: bool = False,
        force: bool = False,
        client: int = 0,
    ) -> NDArray[np.int16]:
        """Give readable objects other keys of the same tenant, pair by pair, in order.

        Bytes, generation, leases, pins and group stay. What a new key names is in the way unless
        `overwrite` replaces it; `force` overrides leases of both, and a put under the new key.
        Leases of the client that asks are in nobody's way.
        """
        self._state.advance(now)
        out = renames.rename(self._state, client, sources, targets, names, overwrite, force)
        self._checked()
        return out

    def remove_matching(
        self,
        now: int,
        tenant: int,
        pattern: str,
        kind: str,
        force: bool = False,
        cursor: int = 0,
        rows_max: int = 65_536,
        client: int = 0,
    ) -> tuple[int, int]:
        """Remove by name ("prefix", "glob", "regex") or "all": (removed, next cursor or 0).

        Raises ValueError for a pattern that is refused.
        """
        self._state.advance(now)
        out = removal.remove_matching(
            self._state, client, tenant, pattern, kind, force, cursor, rows_max
        )
        self._checked()
        return out

    def list_objects(
        self, now: int, tenant: int, prefix: bytes = b"", cursor: int = 0, limit: int = 1000
    ) -> tuple[NDArray[Any], bytes, int]:
        """Return (LISTED rows, their names as one blob, next cursor or 0) of a tenant.

        A page may be short, or empty, before the end: only a cursor of 0 means the end.
        """
        self._state.advance(now)
        return reads.list_objects(self._state, tenant, prefix, cursor, limit)

    def stat(self, now: int, digest: Digests) -> ObjectStat | None:
        """Return everything known of one object."""
        self._state.advance(now)
        return reads.stat(self._state, digest)

    def pin(
        self, now: int, digests: Digests, soft_pin: SoftPin, ttl_ns: int | None = None
    ) -> NDArray[np.int16]:
        """Set or clear soft pins of readable objects."""
        self._state.advance(now)
        out = removal.pin(self._state, digests, soft_pin, ttl_ns)
        self._checked()
        return out

    def set_hard_pin(self, now: int, digests: Digests, pinned: bool) -> NDArray[np.int16]:
        """Set or clear hard pins, within the configured share of the pool."""
        self._state.advance(now)
        out = removal.set_hard_pin(self._state, digests, pinned)
        self._checked()
        return out

    # -- pressure and background duties

    def evict(self, now: int, ratio: float, floor: float | None = None) -> EvictReport:
        """Evict that share of the bytes in use, soft-pinned objects only up to `floor`."""
        self._state.advance(now)
        out = pressure.evict(self._state, ratio, floor)
        self._checked()
        return out

    def tick(self, now: int) -> TickReport:
        """Do a bounded share of the background duties; call it every 10 ms or so."""
        self._state.advance(now)
        out = self._janitor.tick()
        self._checked()
        return out

    # -- copies, moves, drains

    def copy_start(
        self, now: int, client: int, digest: Digests, source: int | None, targets: list[int]
    ) -> tuple[Status, int, NDArray[Any]]:
        """Begin a copy run by `client`: (status, task number, replicas to write)."""
        self._state.advance(now)
        out = self._tasks.start(TaskKind.COPY, client, digest, source, targets)
        self._checked()
        return out

    def move_start(
        self, now: int, client: int, digest: Digests, source: int | None, target: int
    ) -> tuple[Status, int, NDArray[Any]]:
        """Begin a move run by `client`; the source replica goes when it ends well."""
        self._state.advance(now)
        out = self._tasks.start(TaskKind.MOVE, client, digest, source, [target])
        self._checked()
        return out

    def submit_copy(
        self, now: int, digest: Digests, targets: list[int], source: int | None = None
    ) -> tuple[Status, int]:
        """Queue a copy for the owner of the source: (status, task number)."""
        self._state.advance(now)
        return self._tasks.submit(TaskKind.COPY, digest, source, targets)

    def submit_move(
        self, now: int, digest: Digests, target: int, source: int | None = None
    ) -> tuple[Status, int]:
        """Queue a move for the owner of the source: (status, task number)."""
        self._state.advance(now)
        return self._tasks.submit(TaskKind.MOVE, digest, source, [target])

    def fetch_tasks(self, now: int, client: int, limit: int = 16) -> list[Task]:
        """Return tasks of this client, begun now or before: it runs none while it asks."""
        self._state.advance(now)
        out = self._tasks.fetch(client, limit)
        self._checked()
        return out

    def finish_task(
        self, now: int, client: int, number: int, ok: bool, message: str = ""
    ) -> Status:
        """End a running copy or move."""
        self._state.advance(now)
        out = self._tasks.finish(client, number, ok, message)
        self._checked()
        return out

    def task(self, number: int) -> Task | None:
        """Return a task, finished ones for a while."""
        return self._tasks.get(number)

    def drain(self, now: int, segment: int) -> tuple[Status, int]:
        """Start moving everything off a segment: (status, job number)."""
        self._state.advance(now)
        return self._janitor.drain(segment)

    def drain_job(self, number: int) -> DrainJob | None:
        """Return a drain job."""
        return self._janitor.job(number)

    def cancel_drain(self, now: int, number: int) -> Status:
        """Stop a drain; the segment takes new objects again."""
        self._state.advance(now)
        return self._janitor.cancel_drain(number)

    # -- observation

    def hot_keys(self, now: int) -> tuple[Digests, NDArray[np.uint16]]:
        """Return and forget the keys that became hot since the last call, and their hits."""
        state = self._state
        state.advance(now)
        rows = np.array(
            [row for row, gen in state.hot.items() if state.rows["generation"][row] == gen],
            np.int32,
        )
        state.hot.clear()
        hits = state.rows["hits"][rows] & np.uint16(c.HOT_COUNT_MASK)
        return self._digests(rows), hits

    def events_since(self, number: int, limit: int = 65_536) -> tuple[int, NDArray[Any], bool]:
        """Return (number of the first, EVENT rows, whether events before it were lost)."""
        return self._state.events.since(number, limit)

    def event_snapshot(self, cursor: int = 0, rows_max: int = 65_536) -> tuple[Digests, int, int]:
        """Return (digests of readable objects, next cursor or 0, number of the next event).

        A follower keeps the number of the first page and replays from there after the last.
        """
        state = self._state

        def in_span(span: NDArray[np.int64], out: NDArray[np.int32]) -> int:
            found = np.flatnonzero(state.rows["state"][span[0] : span[1]] == State.READABLE)
            out[: len(found)] = found + span[0]
            return len(found)

        rows, following = state.scan(in_span, cursor, rows_max)
        return self._digests(rows), following, state.events.next_number

    def _digests(self, rows: NDArray[np.int32]) -> Digests:
        words = np.stack(
            [self._state.rows["digest_lo"][rows], self._state.rows["digest_hi"][rows]], axis=1
        )
        out: Digests = words.view(np.uint64)
        return out

    @property
    def objects(self) -> int:
        """How many objects can be read."""
        return int(self._state.tally[c.OBJECTS])

    def stats(self) -> ShardStats:
        """Return totals; cheap."""
        return totals(self._state, self._tasks.count())

    def tenant_bytes(self, tenant: int) -> int:
        """Return the bytes a tenant's objects occupy."""
        return int(self._state.tenant_use[tenant, 0])

    def tenant_quota(self, tenant: int) -> int | None:
        """Return the most bytes a tenant's objects may occupy, None where that has no limit."""
        return self._state.tenant_by_number[tenant].quota_bytes

    def tenant_objects(self, tenant: int) -> int:
        """Return how many objects a tenant has."""
        return int(self._state.tenant_use[tenant, 1])

    def check_integrity(self) -> None:
        """Check every invariant of the state; AssertionError names the one that is broken."""
        integrity.check(self._state)

    def _checked(self) -> None:
        if self.config.debug_integrity:
            integrity.check(self._state)
