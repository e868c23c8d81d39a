"""Segments, and who owns every byte of them.

`Space` owns one allocator per segment and the quarantine: extents that left their object while a
reader's lease or a late writer's time still ran (invariant 4 and 5). Which segments a batch may go
to is in `homes.py`, and which ask for rights in `guards.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from alloc import Share, create_allocator
from mooncake_store.core import context as places
from mooncake_store.core.facts import ForgottenFact, SegmentFact
from mooncake_store.core.guards import Guards
from mooncake_store.core.homes import KEEPING, Homes
from mooncake_store.core.kernels import removal as k
from mooncake_store.core.records import SegmentState, Tier
from mooncake_store.core.segment import NEVER, Segment
from mooncake_store.core.wheel import Wheel

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from numpy.typing import NDArray

    from alloc.base import Allocator
    from mooncake_store.core.context import Context
    from mooncake_store.core.journal import Journal
    from mooncake_store.core.options import ShardConfig

__all__ = ["Segment", "Space", "writers_of"]

FREED_KEPT = 4096
"""Extents that wait, at most, to be returned to their allocators together."""
RELEASED_MAX = 16_384
"""Extents that leave the quarantine at once; a million that came due together took 176 ms."""
LATE_KEPT = 65_536
"""Late writers that are known, at most; the space of those before waits for its whole time."""
ANY_MEMORY = b"any"
"""In place of the 16 bytes of a uuid: all memory that is mounted, whatever is known of it."""
UNREADABLE = (SegmentState.ABSENT, SegmentState.GONE)
"""States of segments whose replicas cannot be read."""


@dataclass(slots=True)
class Late:
    """A writer that lost its object before it was complete, and may still be writing."""

    until: int
    """When its space returns if it does not come."""
    overtaken: bool = False
    """Whether another put took its place."""


class Space:
    """All segments of a shard."""

    def __init__(
        self, config: ShardConfig, rng: random.Random, context: Context, journal: Journal
    ) -> None:
        self._config = config
        self._journal = journal
        self._touched: set[int] = set()  # segments to be written down
        self._segments: dict[int, Segment] = {}
        self._by_uuid: dict[bytes, Segment] = {}
        self.changes = 0
        """How often a segment came, went or changed its state."""
        self.absent = 0
        """How many segments are absent."""
        self._earlier: dict[bytes, int] = {}  # uuid of a forgotten segment -> its busy_until
        self._readers: dict[int, int] = {}  # number of one -> when its last lease ends
        most = config.segments_max
        self.alive = context.bind(places.ALIVE, np.zeros(most, np.uint8))
        self.dead = context.bind(places.DEAD, np.zeros(most, np.uint8))
        self.tiers = context.bind(places.TIERS, np.zeros(most, np.uint8))
        self._unsure = context.bind(places.UNSURE, np.zeros(most, np.int64))
        self.lease_until = context.bind(places.LEASE_UNTIL, np.zeros(most, np.int64))
        self._counts = np.zeros(most, np.int64)
        self.quarantine = Wheel(4)  # segment, offset, size, late writer or 0
        self.late: dict[int, Late] = {}
        self._numbers = context.numbers
        self._freed = context.bind(places.FREED_EXTENTS, np.zeros(2 * FREED_KEPT, np.int64))
        self.guards = Guards(most)
        self.homes = Homes(config, rng, context.numbers, self._segments, self.return_freed)

    def __len__(self) -> int:
        return len(self._segments)

    def get(self, index: int) -> Segment | None:
        """Return a segment by its number."""
        return self._segments.get(index)

    def by_uuid(self, uuid: bytes) -> Segment | None:
        """Return the segment that is mounted under this uuid."""
        return self._by_uuid.get(uuid)

    def all(self) -> list[Segment]:
        """Return all segments, gone ones that are still being swept included."""
        self.return_freed()
        return list(self._segments.values())

    def mount(
        self,
        now: int,
        uuid: bytes,
        name: str,
        nbytes: int,
        host: str,
        owner: int,
        number: int | None = None,
        tier: Tier = Tier.MEMORY,
        part: tuple[tuple[int, int], ...] = (),
        guard: tuple[bytes, str] = (b"", ""),
    ) -> Segment | None:
        """Add a segment; None when no number is left, or `number` is not free.

        `part` is where in it space may be given out, in runs; everywhere if that is empty. `guard`
        is its key and the namespace that it is declared for, as `Segment` has them.
        """
        self.return_freed()
        free = np.flatnonzero(~np.isin(np.arange(len(self.alive)), list(self._segments)))
        if len(free) == 0 or (number is not None and number not in free):
            return None
        index = int(free[0]) if number is None else number
        own, kind = nbytes, self._config.allocator
        if part:
            own = sum(end - start for start, end in part)
            runs = [(create_allocator(kind, end - start), start) for start, end in part]
            allocator: Allocator = Share(runs, nbytes)
        else:
            allocator = create_allocator(kind, nbytes)
        full_at = int(self._config.high_watermark * own)
        segment = Segment(index, uuid, name, host, own, owner, allocator, full_at, tier)
        segment.part, segment.reach = part, nbytes
        segment.key, segment.namespace = guard
        segment.usable_from = self._busy_until(uuid)
        self._readers.pop(index, None)
        self._segments[index] = segment
        self._by_uuid[uuid] = segment
        self.guards.enter(segment)
        self.touch(segment)
        self.alive[index], self.dead[index], self.tiers[index] = 1, 0, tier
        if tier != Tier.MEMORY:
            self._numbers[places.BELOW_USED] = 1
        self.lease_until[index] = segment.usable_from
        self._unsure[index] = 0
        self.homes.changed()
        self.changes += 1
        return segment

    def restore(self, fact: SegmentFact, horizon: int) -> None:
        """Mount a segment as it was; leases on it may run until `horizon`."""
        given = fact.uuid, fact.name, fact.nbytes, fact.host, fact.owner, fact.index
        guard = fact.key, fact.namespace
        segment = self.mount(0, *given, Tier(fact.tier), fact.part, guard)
        if segment is not None:
            segment.usable_from, segment.gone_at = fact.usable_from, fact.gone_at
            segment.busy_until = fact.busy_until
            self.lease_until[fact.index] = horizon
            segment.returns_as = SegmentState(fact.returns_as)
            self._doubt(segment, fact.unsure_s)
            if fact.state == SegmentState.ABSENT:
                self._enter_state(segment, SegmentState.ABSENT)
            else:
                self.set_state(segment, SegmentState(fact.state))

    def set_tier(self, segment: Segment, tier: Tier) -> None:
        """Change of what a segment is made."""
        segment.tier = tier
        self.tiers[segment.index] = tier
        self._numbers[places.BELOW_USED] |= tier != Tier.MEMORY
        self.homes.changed()
        self.changes += 1

    def set_guard(self, segment: Segment, key: bytes, namespace: str) -> None:
        """Change what rights to a segment are made with, and whose objects it takes."""
        if (segment.key, segment.namespace) != (key, namespace):
            segment.key, segment.namespace = key, namespace
            self.guards.enter(segment)
            self.homes.changed()
            self.changes += 1
            self.touch(segment)

    def touch(self, segment: Segment) -> None:
        """Have what is known of a segment written down with the operation that runs."""
        self._touched.add(segment.index)
        self._numbers[places.CHANGED] = 1

    def changed(self) -> list[SegmentFact]:
        """Return what became of the segments that were touched since the last call."""
        if not self._touched:
            return []
        touched, self._touched = sorted(self._touched), set()
        # One that is missing was forgotten since, and `remember` told it.
        return [self._segments[index].fact for index in touched if index in self._segments]

    def _busy_until(self, uuid: bytes) -> int:
        """Return when readers and late writers of earlier lives of a memory are out of time."""
        times = [self._earlier.get(uuid, 0), self._earlier.get(ANY_MEMORY, 0)]
        for segment in self._segments.values():
            if segment.uuid == uuid:
                times += [segment.busy_until, int(self.lease_until[segment.index])]
                times.append(self.quarantine.latest(0, segment.index))
        return max(times)

    def expire_memories(self, now: int) -> None:
        """Forget busy times that have passed."""
        if self._earlier:
            self._earlier = {u: t for u, t in self._earlier.items() if t > now}
        if self._readers:
            self._readers = {n: t for n, t in self._readers.items() if t > now}

    def readers_until(self, index: int) -> int:
        """Return when the last lease ends, at the latest, on a segment that is known or was.

        Leases given back count until the sweep that follows an unmount has seen all rows.
        """
        if index in self._segments:
            return int(self.lease_until[index])
        return self._readers.get(index, 0)

    def set_state(self, segment: Segment, state: SegmentState) -> None:
        """Change a segment's state, or what an absent one will be once it is back; GONE is the end.

        GONE hides its replicas at once.
        """
        if segment.state == SegmentState.ABSENT and state != SegmentState.GONE:
            segment.returns_as = state
            self.touch(segment)
            return
        self._enter_state(segment, state)
        if state == SegmentState.GONE and self._by_uuid.get(segment.uuid) is segment:
            del self._by_uuid[segment.uuid]

    def set_absent(self, segment: Segment, absent: bool) -> None:
        """Hide a segment's replicas and keep them, or show them again."""
        if absent and segment.state not in UNREADABLE:
            suspect = segment.state == SegmentState.SUSPECT
            segment.returns_as = SegmentState.OK if suspect else segment.state
            self._enter_state(segment, SegmentState.ABSENT)
        elif not absent and segment.state == SegmentState.ABSENT:
            self._enter_state(segment, segment.returns_as)

    def _enter_state(self, segment: Segment, state: SegmentState) -> None:
        self.changes += segment.state != state
        self.absent += int(state == SegmentState.ABSENT) - int(segment.state == SegmentState.ABSENT)
        segment.state = state
        self.touch(segment)
        self.homes.changed()
        self.alive[segment.index] = state not in UNREADABLE
        self.dead[segment.index] = state == SegmentState.GONE

    def forget(self, segment: Segment) -> None:
        """Drop a GONE segment that no row refers to any more.

        Whoever may still use its memory waits in the quarantine, or did when the rows left it:
        leases that were given back before are not among them.
        """
        self.return_freed()
        segment.busy_until = max(
            segment.busy_until,
            segment.usable_from,
            self.quarantine.discard(0, segment.index),
        )
        until = min(segment.busy_until, int(self.lease_until[segment.index]))
        busy_until = max(segment.busy_until, self._earlier.get(segment.uuid, 0))
        self.remember(ForgottenFact(segment.index, segment.uuid, busy_until, until))
        del self._segments[segment.index]
        self.homes.changed()
        self.changes += 1

    def remember(self, forgotten: ForgottenFact) -> None:
        """Keep in mind until when the memory of a segment that is no more may be used."""
        self.recall(forgotten)
        self._journal.tell(forgotten)

    def recall(self, forgotten: ForgottenFact) -> None:
        """Keep in mind what was written down before.

        Written once more it would come behind what was told of a segment of that number since.
        """
        if forgotten.uuid:
            self._earlier[forgotten.uuid] = forgotten.busy_until
        if forgotten.index >= 0:
            self._readers[forgotten.index] = forgotten.readers_until  # late writers do not count

    def rest(self, until: int) -> None:
        """Place nothing anywhere before a time: somebody whom nobody knows may use any space.

        That goes for memory that is mounted from now on as well: the shard may have known it.
        """
        self.remember(ForgottenFact(-1, ANY_MEMORY, until, 0))
        self.rest_mounted(until)

    def rest_mounted(self, until: int) -> None:
        """Place nothing on the segments that there are before a time."""
        for segment in self._segments.values():
            segment.usable_from = max(segment.usable_from, until)
            self.touch(segment)
        self.homes.changed()

    def doubt_mounted(self, until_s: int) -> None:
        """Have nothing that was put up to a time, in seconds, believed to lie on the segments."""
        for segment in self._segments.values():
            self._doubt(segment, until_s)
            self.touch(segment)

    def is_unsure(self, index: int, created_ns: int) -> bool:
        """Whether something else may lie on a segment where an object of that age does."""
        return created_ns // 1_000_000_000 <= int(self._unsure[index])

    def _doubt(self, segment: Segment, until_s: int) -> None:
        segment.unsure_s = self._unsure[segment.index] = until_s
        self._numbers[places.UNSURE_USED] |= until_s > 0

    def forgotten(self) -> list[ForgottenFact]:
        """Return what `remember` was told and still counts."""
        memories = [ForgottenFact(-1, uuid, until, 0) for uuid, until in self._earlier.items()]
        readers = [ForgottenFact(index, b"", 0, until) for index, until in self._readers.items()]
        return memories + readers

    def expect_freed(self, count: int) -> None:
        """Make room for `count` extents in FREED_EXTENTS, as far as there can be."""
        if self._numbers[places.FREED] + count > FREED_KEPT:
            self.return_freed()

    def return_freed(self) -> None:
        """Return kept extents to their allocators, before anything asks these or changes them.

        Each allocator costs a call, and a batch of objects lies on many segments; removals and
        evictions in a row are returned together.
        """
        count = self._numbers[places.FREED]
        if count:
            self._numbers[places.FREED] = 0
            self.free(self._freed[:count], self._freed[FREED_KEPT : FREED_KEPT + count])

    def free(self, segments: NDArray[np.int64], offsets: NDArray[np.int64]) -> None:
        """Return extents to the allocators of their segments."""
        if len(segments) == 0:
            return
        n = len(segments)
        grouped, runs = np.empty(n, np.int64), np.empty((n, 3), np.int64)
        segments, offsets = np.ascontiguousarray(segments), np.ascontiguousarray(offsets)
        count = k.by_segment(segments, offsets, self._counts, grouped, runs)
        for index, start, stop in runs[:count].tolist():
            segment = self._segments.get(index)
            if segment is not None:  # a forgotten one has no allocator
                freed = segment.allocator.free(grouped[start:stop])
                assert np.logical_and.reduce(freed), f"{segment.name}: freed an extent twice"

    def free_or_quarantine(self, extents: NDArray[np.int64]) -> None:
        """Return extents (rows segment, offset, size, writer, until), if `until` at that time.

        `writer` is who may write there meanwhile (`writers_of`), and 0 if nobody may.
        """
        waiting = extents[4] > 0
        self.free(extents[0, ~waiting], extents[1, ~waiting])
        if not waiting.any():
            return
        held = extents[:, waiting].T
        for index in np.unique(held[:, 0]):
            segment = self._segments.get(int(index))
            if segment is not None and segment.state == SegmentState.GONE:
                latest = int(held[held[:, 0] == index, 4].max())
                segment.busy_until = max(segment.busy_until, latest)
        self._journal.tell_extents(held)
        self.hold(held)

    def hold(self, held: NDArray[np.int64]) -> None:
        """Put extents (segment, offset, size, writer, until) into the quarantine."""
        self.quarantine.add(held[:, 4], held[:, :4])
        guests = held[:, 4] >= NEVER
        self._count_quarantine(held[~guests], 1)
        self._count_guests(held[guests], 1)
        for writer, until in held[~guests & (held[:, 3] > 0), 3:].tolist():
            self.late[writer] = Late(until)
        for writer in list(islice(self.late, max(0, len(self.late) - LATE_KEPT))):
            del self.late[writer]

    def writers_done(self, writers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return at once what waits for these writers; says of each whether it was overtaken."""
        known = [self.late.pop(writer, None) for writer in writers.tolist()]
        untils = {late.until for late in known if late is not None}
        extents = self.quarantine.take(untils, 3, writers)
        self._journal.tell_writers(np.unique(extents[:, 3]))
        self._count_quarantine(extents, -1)
        self.free(extents[:, 0], extents[:, 1])
        return np.array([late is not None and late.overtaken for late in known], np.bool_)

    def overtaken(self, writers: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say of each of these writers whether it was overtaken; what waits for them waits on."""
        known = [self.late.get(writer) for writer in writers.tolist()]
        return np.array([late is not None and late.overtaken for late in known], np.bool_)

    def guests(self) -> NDArray[np.int64]:
        """Return what other shards have where this one gives out space.

        Segment, offset, size, and GUEST with the number of the shard and one of its own each.
        """
        return self.quarantine.at(NEVER)

    def guests_left(self, guests: NDArray[np.int64]) -> int:
        """Have the space of guests whose objects are no more, by their last column; how many."""
        extents = self.quarantine.take({NEVER}, 3, guests)
        self._journal.tell_writers(np.unique(extents[:, 3]))
        self._count_guests(extents, -1)
        self.free(extents[:, 0], extents[:, 1])
        return len(extents)

    def part_from(self, segment: Segment, now: int) -> None:
        """Know a divided segment no more as one: what others have there is theirs to wait for."""
        extents = self.quarantine.take({NEVER}, 0, np.array([segment.index]))
        self._journal.tell_writers(np.unique(extents[:, 3]))
        self._count_guests(extents, -1)
        longest = max(self._config.lease_ttl_max_ns, self._config.put_release_ns)
        segment.busy_until = max(segment.busy_until, now + longest)

    def release_quarantine(self, now: int) -> int:
        """Free what has come due, a bounded number of extents; return the bytes."""
        due = self.quarantine.pop(now, RELEASED_MAX)
        if due is None:
            return 0
        self._count_quarantine(due, -1)
        self.free(due[:, 0], due[:, 1])
        for writer in due[due[:, 3] > 0, 3].tolist():
            self.late.pop(writer, None)
        return int(due[:, 2].sum())

    def _count_guests(self, extents: NDArray[np.int64], sign: int) -> None:
        for index in np.unique(extents[:, 0]):
            segment = self._segments.get(int(index))
            if segment is not None:
                segment.guests += sign * int(extents[extents[:, 0] == index, 2].sum())

    def _count_quarantine(self, extents: NDArray[np.int64], sign: int) -> None:
        for index in np.unique(extents[:, 0]):
            segment = self._segments.get(int(index))
            if segment is not None:
                segment.quarantined += sign * int(extents[extents[:, 0] == index, 2].sum())

    def total_bytes(self, tier: Tier | None = None) -> int:
        """Bytes of all segments, or those of a tier, whose replicas can be read."""
        return sum(s.nbytes for s in self._readable(tier))

    def _readable(self, tier: Tier | None) -> list[Segment]:
        return [
            s
            for s in self._segments.values()
            if s.state not in UNREADABLE and (tier is None or s.tier == tier)
        ]

    def excess_bytes(self, tier: Tier) -> int:
        """What segments of a tier that `watermark_bytes` counts hold above it, all together."""
        self.return_freed()
        some = [s for s in self._segments.values() if s.state in KEEPING and s.tier == tier]
        return sum(s.used - s.full_at for s in some)

    def used_bytes(self, tier: Tier | None = None) -> int:
        """Bytes of those that `total_bytes` counts that are not free."""
        self.return_freed()
        return sum(s.used for s in self._readable(tier))

    def mask(self, keep: Callable[[Segment], bool]) -> NDArray[np.uint8]:
        """Return one byte per segment number: whether `keep` says so."""
        out = np.zeros(len(self.alive), np.uint8)
        for segment in self._segments.values():
            out[segment.index] = keep(segment)
        return out


def writers_of(owners: NDArray[Any], generations: NDArray[Any]) -> NDArray[np.int64]:
    """Return one number per put: who writes it, and which generation. Never 0."""
    return owners.astype(np.int64) << 32 | generations.astype(np.int64)
