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

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from alloc import Share
from mooncake_store.core import codes as c
from mooncake_store.core import (
    hints,
    integrity,
    lost_answers,
    pressure,
    puts,
    reads,
    removal,
    renames,
    rights,
    tags,
)
from mooncake_store.core.facts import ClientFact, ClosedFact, TenantFact
from mooncake_store.core.figures import ShardStats, totals
from mooncake_store.core.guards import KEY_BYTES
from mooncake_store.core.hauls import Haul, Hauls
from mooncake_store.core.janitor import Janitor
from mooncake_store.core.operation import operation
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import SEGMENT_BYTES_MAX, SegmentState, State, Status, Tier
from mooncake_store.core.state import CLIENTS_MAX, TENANTS_MAX, Client, ShardState, Tenant
from mooncake_store.core.tasks import Task, TaskKind, Tasks

if TYPE_CHECKING:
    from mooncake_store.core.journal import Sink
    from mooncake_store.core.ring import Ring
    from mooncake_store.core.segment import Segment

__all__ = ["Shard"]

Digests = NDArray[np.uint64]

HANDLES_LEAST = 1024
"""So many clients come, at least, before the handle of one that is gone is another's."""


class Shard(ShardState):
    """The operations of one shard: each takes the time, and answers key by key."""

    hauls: Hauls

    def __init__(
        self,
        config: ShardConfig | None = None,
        ring: Ring | None = None,
        sink: Sink | None = None,
    ) -> None:
        super().__init__(config or ShardConfig(), ring, sink)
        self.tasks = Tasks(self)
        self.hauls = Hauls(self)
        self.janitor = Janitor(self, self.tasks)
        if self.config.debug_integrity:
            self.check = integrity.check

    # Objects. Each is a function on the state, in the module that it is taken from.

    put_start = operation(puts.put_start)
    upsert_start = operation(puts.upsert_start)
    put_begun = operation(lost_answers.put_begun)
    put_end = operation(puts.put_end)
    put_revoke = operation(puts.put_revoke)
    rights_to_read = operation(rights.to_read)
    rights_to_write = operation(rights.to_write)
    unwritten = operation(rights.unwritten)
    put_end_shown = operation(rights.put_end)
    tell_tags = operation(tags.tell_tags)
    get = operation(reads.get)
    exists = operation(reads.exists)
    foreign = reads.foreign
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
    hint = operation(hints.hint)
    evict = operation(pressure.evict)
    make_way = operation(pressure.make_way)

    # Tenants and clients.

    def tenant(self, name: str, quota_bytes: int | None = None) -> int:
        """Return the number of a tenant, registering it; a quota given replaces the old one.

        Returns -1 when there are too many tenants.
        """
        tenants = self.tenants
        if name not in tenants:
            number = max(self.tenant_by_number) + 1  # a restored shard may lack some
            if number == TENANTS_MAX:
                return -1
            self.enter_tenant(Tenant(number, name, None))
        elif quota_bytes is None:
            return tenants[name].number
        found = tenants[name]
        if quota_bytes is not None:
            found.quota_bytes = quota_bytes
            self.order_tenant(found.number)
        self._tell_tenant(found)
        return found.number

    def end_quota(self, name: str) -> None:
        """Let a tenant have as much as there is room for."""
        found = self.tenants.get(name)
        if found is not None and found.quota_bytes is not None:
            found.quota_bytes = None
            self._tell_tenant(found)

    def _tell_tenant(self, tenant: Tenant) -> None:
        self.journal.tell(TenantFact(tenant.number, tenant.name, tenant.quota_bytes))
        self.journal.publish()

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
                    self.space.touch(segment)
            self.close_client(self.now, known.handle)
        self.enter_client(Client(handle, uuid, epoch, host))
        self.journal.tell(ClientFact(handle, uuid, epoch, host))
        return handle

    def _free_handle(self) -> int:
        """Return the next one in turn that no row names; the turn is as long as clients are many.

        What is looked at for each number there was, in every sweep, is so for no more than these.
        """
        if self.handle >= min(CLIENTS_MAX, max(HANDLES_LEAST, 4 * len(self.client_by_handle))):
            self.handle = 0
        for _ in range(CLIENTS_MAX):
            self.handle = (self.handle + 1) % CLIENTS_MAX
            if self.handle not in self.client_by_handle and not self.closed[self.handle]:
                self.handles_used = max(self.handles_used, self.handle)
                return self.handle
        return -1

    @operation
    def close_client(self, client: int, fenced: bool = False) -> None:
        """End a client: its unfinished puts are given up, its segments stay."""
        self._close([client], 2 if fenced else 1)

    @operation
    def close_clients(self, clients: list[int]) -> None:
        """End several clients, which takes hardly longer than to end one."""
        self._close(clients, 1)

    def _close(self, clients: list[int], how: int) -> None:
        there = [client for client in clients if client in self.client_by_handle]
        for client in there:
            known = self.client_by_handle.pop(client)
            self.journal.tell(ClosedFact(client, known.uuid))
            if self.clients.get(known.uuid) is known:
                del self.clients[known.uuid]
            self.closed[client] = how
            self.allowances.pop(client, None)
        if there:
            self.tasks.expire()
            self.hauls.expire()  # before the handle is another's
            self.janitor.clients_closed()

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
        tier: Tier = Tier.MEMORY,
        key: bytes = b"",
        namespace: str = "",
    ) -> tuple[Status, int]:
        """Add a segment; mounting the same uuid again only says who owns it, and that it is there.

        `number` is for masters that number the segments of several shards alike; it must be free.
        `key` is what rights are made with, and `namespace` whose objects alone go there, if any.
        """
        if client not in self.client_by_handle:
            return Status.CLIENT_NOT_FOUND, -1
        if not 0 < nbytes <= SEGMENT_BYTES_MAX or len(key) not in (0, KEY_BYTES):
            return Status.INVALID_PARAMS, -1
        known = self.space.by_uuid(uuid)
        if known is not None:
            if known.reach != nbytes or known.name != name:
                return Status.SEGMENT_ALREADY_EXISTS, known.index
            if known.owner != client and known.owner in self.client_by_handle:
                return Status.ILLEGAL_CLIENT, known.index
            known.owner = client
            self._know_tier(known, tier)
            self.space.set_guard(known, key, namespace)
            self.space.touch(known)
            self.space.set_absent(known, False)
            if known.state == SegmentState.SUSPECT:
                self.space.set_state(known, SegmentState.OK)
            return Status.OK, known.index
        given = uuid, name, nbytes, host, client, number, tier
        segment = self.space.mount(self.now, *given, guard=(key, namespace))
        if segment is None:
            return Status.NO_SPACE, -1
        self.janitor.held.share_out()
        return Status.OK, segment.index

    def _know_tier(self, segment: Segment, tier: Tier) -> None:
        """Take a segment for what its owner says; before there were tiers it was always memory."""
        if segment.tier != tier:
            self.space.set_tier(segment, tier)
            state = self.rows["state"][: self.table.rows_high]
            self.retier(np.flatnonzero(state != State.FREE).astype(np.int32))

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
        self.space.touch(segment)
        return self.janitor.drain(segment.index)[0]

    @operation
    def set_suspect(self, segment: int, suspect: bool) -> None:
        """Stop or resume placing new objects on a segment whose owner is silent."""
        known = self.space.get(segment)
        if known is not None and known.state in (SegmentState.OK, SegmentState.SUSPECT):
            self.space.set_state(known, SegmentState.SUSPECT if suspect else SegmentState.OK)

    @operation
    def set_absent(self, segment: int, absent: bool) -> None:
        """Hide what lies on a segment, and keep it, while its owner may come back with its memory.

        Nothing is put or copied there meanwhile, and nothing copied from there. A drain waits.
        """
        known = self.space.get(segment)
        if known is not None:
            self.space.set_absent(known, absent)
            if absent:
                self.hauls.abandon(segment)

    def segments(self) -> list[Segment]:
        """Return all segments, gone ones that are still being swept included."""
        return self.space.all()

    # Background duties.

    @operation
    def tick(self) -> None:
        """Do a bounded share of the background duties; call it every 10 ms or so."""
        self.janitor.tick()
        self.journal.step()

    # Copies, moves, drains.

    @operation
    def submit_task(
        self,
        kind: TaskKind,
        digest: Digests,
        targets: list[int],
        source: int | None = None,
        client: int = 0,
    ) -> tuple[Status, int]:
        """Queue a copy or a move for the owner of the source: (status, task number).

        A copy has one target or more, a move exactly one. A client may ask for a part of them.
        """
        return self.tasks.submit(kind, digest, source, targets, client)

    @operation
    def fetch_tasks(self, client: int, limit: int = 16) -> list[Task]:
        """Return tasks of this client, begun now or before: it runs none while it asks."""
        return self.tasks.fetch(client, limit)

    @operation
    def finish_task(self, client: int, number: int, ok: bool, message: str = "") -> Status:
        """End a running copy or move."""
        return self.tasks.finish(client, number, ok, message)

    @operation
    def fetch_hauls(self, client: int, device: int, limit: int = 16) -> list[Haul]:
        """Return hauls of this client, begun now or before: it runs none of these while it asks."""
        return self.hauls.fetch(client, limit, device)

    def owners(self, rows: NDArray[np.int32]) -> tuple[list[str], NDArray[np.int32]]:
        """Return the names of tenants, and the place of each row's among them; -1 of no row."""
        numbers = np.where(rows >= 0, self.cold["tenant"][rows].astype(np.int32), -1)
        found, places = np.unique(numbers, return_inverse=True)
        strange = bool(len(found) and found[0] < 0)
        names = [self.tenant_by_number[number].name for number in found[strange:].tolist()]
        return names, (places - strange).astype(np.int32)

    def held(self, client: int, number: int, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an extent begins at each offset of a segment, for its owner: all, for others.

        So are those where this shard gives out no space: another one knows of these. What waits for
        late readers or writers counts as there.
        """
        segment = self.space.get(number)
        if segment is None or segment.owner != client or segment.state == SegmentState.GONE:
            return np.ones(len(offsets), np.bool_)
        self.space.return_freed()
        there = segment.allocator.holds(offsets)
        if isinstance(segment.allocator, Share):
            there |= ~segment.allocator.own(offsets)
        return there

    def guests(self) -> NDArray[np.int64]:
        """Return what other shards have where this one gives out space: see `Space.guests`."""
        return self.space.guests()

    def outstanding(self, segments: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[Any]:
        """Return whether each byte belongs to something that this shard has elsewhere."""
        self.space.return_freed()
        found = np.zeros(len(places), np.bool_)
        for number in np.unique(segments).tolist():
            segment = self.space.get(number)
            if segment is not None and isinstance(segment.allocator, Share):
                mine = segments == number
                found[mine] = segment.allocator.outstanding(places[mine])
        return found

    @operation
    def guests_left(self, guests: NDArray[np.int64]) -> int:
        """Have the space of guests whose objects are no more; return how many."""
        return self.space.guests_left(guests)

    @operation
    def finish_haul(self, client: int, number: int, statuses: NDArray[np.int16]) -> Status:
        """End a running haul, of which there is a status for each object."""
        return self.hauls.finish(client, number, statuses)

    @operation
    def drain(self, segment: int) -> tuple[Status, int]:
        """Start moving everything off a segment: (status, job number)."""
        return self.janitor.drain(segment)

    @operation
    def cancel_drain(self, number: int) -> Status:
        """Stop a drain; the segment takes new objects again."""
        return self.janitor.cancel_drain(number)

    # Observation.

    def event_snapshot(
        self, cursor: int = 0, rows_max: int = 65_536, tenant: int | None = None
    ) -> tuple[Digests, int, int]:
        """Return (digests of readable objects, next cursor or 0, number of the next event).

        Those of one `tenant`, or of all. A follower keeps the number of the first page and replays
        from there after the last.
        """

        def in_span(span: NDArray[np.int64], out: NDArray[np.int32]) -> int:
            wanted = self.rows["state"][span[0] : span[1]] == State.READABLE
            if tenant is not None:
                wanted &= self.cold["tenant"][span[0] : span[1]] == tenant
            found = np.flatnonzero(wanted)
            out[: len(found)] = found + span[0]
            return len(found)

        rows, following = self.scan(in_span, cursor, rows_max)
        return self.digests(rows), following, self.events.next_number

    @property
    def objects(self) -> int:
        """How many objects can be read."""
        return int(self.tally[c.OBJECTS])

    def stats(self, tenant: int = 0, client: int = 0) -> ShardStats:
        """Return totals, with the room there is for a tenant and a client's pins; cheap."""
        return totals(self, self.tasks.count(), tenant, client)

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
