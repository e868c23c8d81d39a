"""Reference model of one shard, written from the store's semantics and not from its code.

Dicts and dataclasses, one object at a time. Where the semantics fix an answer the model computes
it and compares; where the core may choose (segments, offsets, victims under pressure, when a dead
put is swept) the model checks that the choice was legal and follows it. Every disagreement raises
`Mismatch`. The model knows nothing of rows, hashing, allocators or rounding, so "there was room"
is only asserted with a generous margin (`SLACK`). Each operation is O(keys of the model).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_store.core.options import SoftPin
from mooncake_store.core.records import SIZE_MAX, SegmentState, Status
from mooncake_store.core.wheel import SLOT_NS
from tests.core.holds import Holds
from tests.core.nouns import Object, Quarantined, Segment, Task, Tenant, Version
from tests.core.shares import allowed, share_out
from tests.core.space import Mismatch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from mooncake_store.core.options import ShardConfig, StartOptions
    from tests.core.space import Extent, Space

OK = Status.OK
UNREADABLE = {SegmentState.ABSENT, SegmentState.GONE}
PLACED = {Status.OK}
NEVER_ROOM = {Status.TOO_LARGE, Status.TOO_FEW_SEGMENTS, Status.PINS_FULL}
NO_ROOM = NEVER_ROOM | {Status.NO_SPACE, Status.TENANT_QUOTA}


@dataclass(slots=True)
class Reference:
    """Everything a shard should remember, and the laws its answers must obey."""

    config: ShardConfig
    slack: int
    """Largest rounding and fragmentation for which the core is excused when it says "full"."""
    now: int = 0
    objects: dict[int, Object] = field(default_factory=dict)
    segments: dict[int, Segment] = field(default_factory=dict)
    spaces: dict[bytes, Space] = field(default_factory=dict)
    tenants: dict[int, Tenant] = field(default_factory=lambda: {0: Tenant()})
    clients: set[int] = field(default_factory=set)
    asked: set[int] = field(default_factory=set)
    """Those of them who show rights: their word ends no wait."""
    tasks: dict[int, Task] = field(default_factory=dict)
    quarantine: list[Quarantined] = field(default_factory=list)
    generations: dict[int, set[int]] = field(default_factory=dict)
    overtaken: set[tuple[int, int]] = field(default_factory=set)
    """(client, generation) of puts whose place another put took."""
    evicted: int = 0
    shared_out: int = 0
    """Bytes of which long leases have a share, see `shares.py`."""
    clock: int = 0
    """Counts accesses; an object's stamp is its place in the order of last use."""

    # Time

    def advance(self, now: int) -> None:
        """Move time forward (never back) and drop quarantine that has run out."""
        self.now = max(self.now, now)
        kept = []
        for entry in self.quarantine:
            if entry.until > self.now:
                kept.append(entry)
            else:
                entry.space.give(entry.offset, entry.size)
        self.quarantine = kept

    # Facts about one object

    def expired(self, version: Version) -> bool:
        """A put that anybody may pre-empt."""
        return self.now >= version.started + self.config.put_discard_ns

    def released(self, version: Version) -> bool:
        """A put whose writer is no longer feared."""
        return self.now >= version.started + self.config.put_release_ns

    def leased(self, item: Object) -> bool:
        return item.current is not None and item.lease_end > self.now

    def leased_to_others(self, item: Object, client: int) -> bool:
        return item.current is not None and item.holds.of_others(client, self.now)

    def soft_pinned(self, item: Object) -> bool:
        """A pin past its deadline counts until a tick has ended it."""
        return item.soft_pin_end > 0

    def end_soft_pins(self) -> None:
        """What was pinned joins the ordinary objects as the most recently used, in any order.

        A shard keeps the ends of pins in slots: they come due up to one slot late, never early.
        """
        self.clock += 1
        slot = self.now // SLOT_NS
        for item in self.objects.values():
            if item.current is not None and 0 < -(-item.soft_pin_end // SLOT_NS) <= slot:
                item.soft_pin_end = 0
                item.stamp = self.clock

    def alive(self, version: Version | None) -> list[Extent]:
        """Extents a reader may be sent to."""
        if version is None:
            return []
        return [
            extent
            for extent in version.extents
            if extent.readable and self.segments[extent.segment].state not in UNREADABLE
        ]

    def readable(self, key: int) -> Object | None:
        item = self.objects.get(key)
        return item if item is not None and self.alive(item.current) else None

    def absent(self, item: Object) -> bool:
        """Whether a complete object cannot be read, and can be again if a worker comes back.

        Not if all it has left is where a copy was to arrive: its row waits for the sweep.
        """
        version = item.current
        if version is None or self.alive(version):
            return False
        states = {self.segments[e.segment].state for e in version.extents if e.readable}
        return SegmentState.ABSENT in states

    def evictable(self, item: Object, until: int = 0) -> bool:
        """Whether an object may leave; for puts that wait, under leases that end by `until`."""
        return (
            item.current is not None
            and item.writing is None
            and item.task is None
            and not item.hard_pin
            and item.lease_end <= max(until, self.now)
            and (self.config.evict_soft_pinned or not self.soft_pinned(item))
        )

    def shield(self, item: Object) -> str:
        """Why an object may not be evicted, for a failure."""
        left = item.lease_end - self.now
        return (
            f"upsert={item.writing is not None} task={item.task} hard={item.hard_pin} "
            f"lease={left} holds={item.holds} soft={item.soft_pin_end - self.now}"
        )

    def unit(self, item: Object) -> list[Object]:
        """The objects that live and leave together with this one."""
        if not item.group:
            return [item]
        return [
            other
            for other in self.objects.values()
            if other.group == item.group and other.tenant == item.tenant
        ]

    def touch(self, item: Object) -> None:
        self.clock += 1
        item.stamp = self.clock

    # Space

    def free(
        self, version: Version, until: int = 0, writer: tuple[int, int, int] | None = None
    ) -> None:
        """Give a version's bytes back: now, or when nobody can read or write them any more."""
        for extent in version.extents:
            self.free_extent(extent, until, writer)
        version.extents = []

    def free_extent(
        self, extent: Extent, until: int = 0, writer: tuple[int, int, int] | None = None
    ) -> None:
        space = self.segments[extent.segment].space
        if until > self.now:
            entry = Quarantined(space, extent.offset, extent.size, until, writer)
            self.quarantine.append(entry)
            space.owners[extent.offset, extent.offset + extent.size] += f", held to {until}"
        else:
            space.give(extent.offset, extent.size)

    def waiting_for(self, client: int, generation: int) -> list[Quarantined]:
        """What is held until this writer has said that it is done, or is out of time."""
        who = (client, generation)
        return [entry for entry in self.quarantine if entry.writer and entry.writer[:2] == who]

    def writer_done(self, client: int, generation: int) -> None:
        """Invariant 5: a writer's own word ends the wait for it, and nobody else's."""
        for entry in () if client in self.asked else self.waiting_for(client, generation):
            entry.space.give(entry.offset, entry.size)
            self.quarantine.remove(entry)

    def forget_current(self, item: Object) -> None:
        """Drop the readable generation; readers in flight keep its bytes quarantined."""
        assert item.current is not None
        self.free(item.current, item.lease_end)
        item.current = None
        item.holds = Holds()
        item.soft_pin_end = 0
        item.hard_pin = False
        if item.writing is not None:
            item.group = item.writing.group
        self.forget_if_empty(item)

    def forget_writing(self, item: Object, *, fenced: bool, overtaken: bool = False) -> None:
        """End an unfinished put whose writer may still write, unless it is fenced."""
        version = item.writing
        assert version is not None
        until = 0 if fenced else version.started + self.config.put_release_ns
        self.free(version, until, (version.owner, version.generation, item.key))
        if overtaken:
            self.overtaken.add((version.owner, version.generation))
        item.writing = None
        self.forget_if_empty(item)

    def forget_if_empty(self, item: Object) -> None:
        if item.current is None and item.writing is None:
            del self.objects[item.key]

    def lose_dead(self) -> None:
        """Forget generations whose last replica's segment is gone."""
        for item in list(self.objects.values()):
            for version in (item.current, item.writing):
                for extent in list(version.extents if version else ()):
                    if self.segments[extent.segment].state != SegmentState.GONE:
                        continue
                    assert version is not None
                    until = item.lease_end
                    if version is item.writing:
                        until = version.started + self.config.put_release_ns
                    self.free_extent(extent, until)
                    version.extents.remove(extent)
            if item.writing is not None and not item.writing.extents:
                item.writing = None
            if item.current is not None and not item.current.extents and item.task is None:
                self.forget_current(item)
            elif item.current is None:
                self.forget_if_empty(item)

    # Eviction, followed

    def follow_evicted(self, gone: Iterable[int], why: str, until: int = 0) -> list[Object]:
        victims = [self.objects[key] for key in gone]
        for item in victims:
            if item.writing is not None and self.expired(item.writing):
                self.forget_writing(item, fenced=False)
        leaving = {item.key for item in victims}
        for item in victims:
            if not self.evictable(item, until):
                raise Mismatch(f"{why}: key {item.key} was evicted though {self.shield(item)}")
            if self.absent(item) and not item.group and self.tenants[item.tenant].quota is None:
                raise Mismatch(f"{why}: key {item.key} was evicted and took nobody's room")
            for mate in self.unit(item):
                stayed = self.readable(mate.key) or self.absent(mate)
                if mate.key not in leaving and stayed:
                    raise Mismatch(
                        f"{why}: group {item.group!r} was torn: {item.key} left, {mate.key} stayed"
                    )
        for item in victims:
            self.forget_current(item)
        self.evicted += len(victims)
        return victims

    def follow_reclaimed(self, still_there: Callable[[int], bool]) -> None:
        """Follow dead puts that the core swept early; before their deadline none may vanish."""
        for item in list(self.objects.values()):
            version = item.writing
            if version is None or item.current is not None or still_there(item.key):
                continue
            if not self.expired(version) and self.placed_somewhere(version):
                raise Mismatch(f"unfinished put of {item.key} vanished before its deadline")
            self.forget_writing(item, fenced=False)

    def placed_somewhere(self, version: Version) -> bool:
        return any(
            self.segments[extent.segment].state != SegmentState.GONE for extent in version.extents
        )

    # Put

    def eligible(self, options: StartOptions) -> list[int]:
        """Segments that may take a new replica."""
        return [
            index
            for index, segment in self.segments.items()
            if segment.state == SegmentState.OK and segment.name not in options.excluded
        ]

    def room(self, size: int, options: StartOptions) -> bool:
        """Whether one extent must fit, after evicting everything that may be evicted."""
        removable: dict[int, set[tuple[int, int]]] = {}
        for item in self.objects.values():
            if self.evictable(item) and all(self.evictable(mate) for mate in self.unit(item)):
                for extent in item.current.extents if item.current else ():
                    spot = (extent.offset, extent.offset + extent.size)
                    removable.setdefault(extent.segment, set()).add(spot)
        return any(
            self.segments[index].space.gap_max(removable.get(index, set())) >= size + self.slack
            for index in self.eligible(options)
            if self.segments[index].idle_until <= self.now
        )

    def expect_put(self, key: int, client: int, *, upsert: bool) -> set[Status]:
        """Statuses that put_start or upsert_start may answer, room permitting."""
        item = self.objects.get(key)
        if client not in self.clients:
            return {Status.ILLEGAL_CLIENT, Status.CLIENT_NOT_FOUND}
        if item is None:
            return PLACED | NO_ROOM
        if item.task is not None:
            unread = not self.alive(item.current)
            return {Status.BUSY} if upsert or unread else {Status.ALREADY_EXISTS}
        if upsert:
            return PLACED | NO_ROOM
        if self.absent(item):
            free = item.writing is None or self.expired(item.writing)
            return PLACED | NO_ROOM if free else {Status.ALREADY_EXISTS}
        if item.current is None and item.writing is not None:
            if self.expired(item.writing):
                return PLACED | NO_ROOM
            if not self.placed_somewhere(item.writing):
                return PLACED | NO_ROOM | {Status.ALREADY_EXISTS}
            return {Status.ALREADY_EXISTS}
        if self.evictable(item):
            return {Status.ALREADY_EXISTS} | PLACED | NO_ROOM
        return {Status.ALREADY_EXISTS}

    def begin(self, item: Object, version: Version) -> None:
        """Follow one granted put: its bytes must be free, its generation new, its place legal."""
        who = f"put of {item.key} at {version.started}"
        used = self.generations.setdefault(item.key, set())
        if version.generation in used:
            raise Mismatch(f"{who}: generation {version.generation} was used before")
        used.add(version.generation)
        count, options = len(version.extents), version.options
        if not max(options.replicas_min, 1) <= count <= options.replicas:
            raise Mismatch(f"{who}: {count} replicas, asked {options.replicas}")
        segments = [extent.segment for extent in version.extents]
        if len(set(segments)) != count:
            raise Mismatch(f"{who}: two replicas on one segment: {segments}")
        allowed = self.eligible(options)
        if not set(segments) <= set(allowed):
            raise Mismatch(f"{who}: placed on {segments}, allowed {allowed}")
        assert item.writing is None, "pre-empted before"
        self.objects[item.key] = item
        item.writing = version
        for extent in version.extents:
            self.segments[extent.segment].space.take(extent.offset, extent.size, who)

    def check_refused(
        self, tenant: int, key: int, size: int, options: StartOptions, status: Status
    ) -> None:
        """A full pool is no excuse while something may be evicted; pins and quotas are."""
        if status == Status.TENANT_QUOTA and self.tenants[tenant].quota is None:
            raise Mismatch(f"put of {key}: a tenant without a quota is over it")
        might = [s for s in self.segments.values() if s.state != SegmentState.GONE]
        fitting = sum(segment.space.nbytes >= size for segment in might)
        never = bool(might) and fitting < options.replicas_min
        told = status in (Status.TOO_LARGE, Status.TOO_FEW_SEGMENTS)
        # More than the whole quota is refused for that first: it is as hopeless.
        if told != never and status != Status.TENANT_QUOTA:
            raise Mismatch(f"put of {key}: {status!r}, though {fitting} segments are large enough")
        excused = options.hard_pin or options.replicas_min > 1 or status == Status.TENANT_QUOTA
        if not excused and self.room(size, options):
            raise Mismatch(f"put of {key}: no space for {size} bytes though there is room")

    def commit(self, key: int, checksum: int) -> None:
        """The writer finished: the new generation replaces the old one, pins take effect."""
        item = self.objects[key]
        version = item.writing
        assert version is not None
        if item.current is not None:
            self.free(item.current, item.lease_end)
        version.checksum = checksum
        item.current, item.writing = version, None
        item.name = version.name or item.name
        item.holds = Holds()
        options = version.options
        if options.soft_pin == SoftPin.ENABLE:
            ttl = options.soft_pin_ttl_ns
            ttl = self.config.soft_pin_ttl_ns if ttl is None else ttl
            until = self.now + min(ttl, self.config.soft_pin_ttl_max_ns)
            item.soft_pin_end = until if ttl else 0
            item.priority = 1
        elif options.soft_pin == SoftPin.DISABLE:
            item.soft_pin_end = 0

    def expect_end(self, key: int, client: int, generation: int, *, revoke: bool) -> set[Status]:
        """Statuses of put_end or put_revoke for one key."""
        item = self.objects.get(key)
        if item is None:
            return {Status.NOT_FOUND} if revoke else self._given_up(client, generation)
        for version in (item.writing, item.current):
            if version is None or version.generation != generation:
                continue
            if version.owner != client:
                return {Status.ILLEGAL_CLIENT}
            if version is item.writing:
                if self.placed_somewhere(version) or revoke:
                    return {OK}
                return {OK, Status.NOT_FOUND, Status.REPLICA_IS_GONE}
            return {Status.INVALID_WRITE} if revoke else {OK}
        newest = item.writing or item.current
        assert newest is not None
        if newest.generation > generation and not revoke:
            return {Status.SUPERSEDED}
        if not revoke:  # what this put was to replace is still there
            return self._given_up(client, generation)
        owners = {version.owner for version in (item.writing, item.current) if version}
        answers = set()
        if client in owners:
            answers.add(Status.INVALID_WRITE)
        if owners - {client}:
            answers.add(Status.ILLEGAL_CLIENT)
        return answers

    def _given_up(self, client: int, generation: int) -> set[Status]:
        """Statuses of the put_end of a put that was given up, of a key that names nothing newer."""
        if (client, generation) not in self.overtaken:
            return {Status.NOT_FOUND}
        if self.waiting_for(client, generation):
            return {Status.SUPERSEDED}
        return {Status.SUPERSEDED, Status.NOT_FOUND}  # what is told once may be forgotten

    # Read

    def expect_get(self, key: int) -> Status:
        if self.readable(key):
            return OK
        item = self.objects.get(key)
        if item is not None and self.absent(item):
            return Status.ABSENT
        if item is not None and item.writing is not None and self.placed_somewhere(item.writing):
            return Status.NOT_READY
        return Status.NOT_FOUND

    def lease(self, item: Object, client: int, ttl: int, told: int) -> int:
        """Grant a client a read lease; return how long this one is."""
        self.touch(item)
        if ttl <= 0:
            return 0
        ttl = allowed(self, item, ttl, told)
        item.holds.grant(client, self.now, ttl)
        return ttl

    def renew(
        self, client: int, key: int, generation: int, ttl: int, told: int
    ) -> tuple[Status, int]:
        item = self.readable(key)
        if item is None or item.current is None or item.current.generation != generation:
            return Status.LEASE_EXPIRED, 0
        return OK, item.holds.renew(client, self.now, allowed(self, item, ttl, told))

    def release(self, client: int, key: int, generation: int) -> Status:
        item = self.objects.get(key)
        if item is None or item.current is None or item.current.generation != generation:
            return Status.NOT_FOUND
        item.holds.release(client, self.now)
        return OK

    # Remove

    def expect_remove(self, client: int, key: int, *, force: bool) -> set[Status]:
        item = self.objects.get(key)
        if item is None:
            return {Status.NOT_FOUND}
        if item.task is not None:
            return {Status.BUSY}
        if force:
            known = self.readable(key) or self.absent(item)
            if not known and not (item.writing and self.placed_somewhere(item.writing)):
                return {OK, Status.NOT_FOUND}
            return {OK}
        if item.writing is not None:
            if not self.placed_somewhere(item.writing):
                return {OK, Status.NOT_READY, Status.NOT_FOUND, Status.HAS_LEASE}
            if item.current is None:
                return {OK} if self.expired(item.writing) else {Status.NOT_READY}
            return {Status.NOT_READY}
        return {Status.HAS_LEASE} if self.leased_to_others(item, client) else {OK}

    def removed(self, key: int) -> None:
        """Follow a granted remove of whatever there is under the key."""
        item = self.objects.get(key)
        if item is None:
            return
        if item.writing is not None:
            self.forget_writing(item, fenced=False)
        if item.current is not None:
            self.forget_current(item)

    def expect_match(self, client: int, item: Object, *, force: bool) -> bool | None:
        """Whether remove_matching takes a matching object; None where either will do."""
        if item.task is not None:
            return False
        if item.writing is not None:
            if not self.placed_somewhere(item.writing):
                return None
            return item.current is None and self.expired(item.writing)
        return force or not self.leased_to_others(item, client)

    # Segments and clients

    def mount(self, index: int, segment: Segment) -> None:
        """Follow a mount; bytes quarantined under this uuid earlier stay out of reach."""
        if segment.uuid in self.spaces:
            longest = max(self.config.lease_ttl_max_ns, self.config.put_release_ns)
            segment.idle_until = self.now + longest
        segment.space = self.spaces.setdefault(segment.uuid, segment.space)
        old = self.segments.get(index)
        if old is not None and old.state != SegmentState.GONE:
            raise Mismatch(f"segment index {index} is in use by {old.name}")
        self.segments[index] = segment
        share_out(self)

    def close_client(self, client: int, *, fenced: bool) -> None:
        """End a client: its unfinished puts are over, what is readable stays."""
        self.clients.discard(client)
        for item in list(self.objects.values()):
            if item.writing is not None and item.writing.owner == client:
                self.forget_writing(item, fenced=fenced)

    # Copy and move

    def expect_copy(self, key: int, source: int | None, targets: list[int]) -> set[Status]:
        """Statuses of a wish to copy or move, room permitting."""
        item = self.objects.get(key)
        if item is None:
            return {Status.NOT_FOUND}
        if item.task is not None or (item.current is not None and item.writing is not None):
            return {Status.BUSY}
        if item.current is None:
            return {Status.REPLICA_NOT_FOUND, Status.NOT_FOUND}
        held = {extent.segment for extent in self.alive(item.current)}
        if not held:
            return {Status.NOT_FOUND}
        answers = set()
        if source is not None and source not in held:
            answers.add(Status.REPLICA_NOT_FOUND)
        for target in targets:
            segment = self.segments.get(target)
            if segment is None or segment.state == SegmentState.GONE:
                answers.add(Status.SEGMENT_NOT_FOUND)
        if answers:
            return answers
        answers = {OK, Status.NO_SPACE, Status.TENANT_QUOTA}
        if all(target in held for target in targets):
            answers = {OK, Status.REPLICA_ALREADY_EXISTS}
        for target in targets:
            segment = self.segments[target]
            if segment.state != SegmentState.OK or segment.idle_until > self.now:
                answers.add(Status.SEGMENT_NOT_FOUND)
        return answers

    def copy_begins(self, number: int, task: Task) -> None:
        item = self.objects[task.key]
        assert item.current is not None
        held = {extent.segment for extent in item.current.extents}
        for extent in task.targets:
            if extent.segment in held:
                raise Mismatch(f"copy of {task.key}: target {extent.segment} holds it already")
            space = self.segments[extent.segment].space
            space.take(extent.offset, extent.size, f"copy of {task.key}")
            item.current.extents.append(extent)
        self.tasks[number] = task
        item.task = number

    def copy_ends(self, number: int, *, ok: bool, fenced: bool = True) -> None:
        """The targets become replicas, or their bytes return; a move gives up its source."""
        task = self.tasks.pop(number)
        item = self.objects[task.key]
        item.task = None
        version = item.current
        assert version is not None
        arrived = False
        for extent in task.targets:
            if extent not in version.extents:
                continue  # its segment went away meanwhile
            if ok:
                extent.readable = arrived = True
            else:
                version.extents.remove(extent)
                until = task.started + self.config.put_release_ns
                self.free_extent(extent, 0 if fenced else until)
        if ok and arrived and task.move:
            for extent in list(version.extents):
                if extent.segment == task.source:
                    version.extents.remove(extent)
                    self.free_extent(extent, item.lease_end)
        if not version.extents:
            self.forget_current(item)

    def valid_size(self, size: int) -> bool:
        return 0 < size < SIZE_MAX
