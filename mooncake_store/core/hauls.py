"""Hauls: batches of copies between tiers, run by whoever owns the source, seen by everyone.

    shard.hauls.demote(rows)         # memory to disk; the replicas in memory go when it has arrived
    shard.hauls.promote(rows)        # from below to memory; the replicas below stay

What leaves memory goes to disks where there are any, else into cold segments, and so does what
leaves disks (`offer`). A cold segment takes from its own worker only: nobody else writes there.

Hauls that may hang in one device of their worker have a queue of their own, so that it holds up no
other device, and those that cannot, to segments of others, one together.

A haul is up to HAUL_OBJECTS objects, from one segment to one segment, in columns: what `tasks.py`
does for one object, for many at the price of one. Its objects are flagged as those of a task. They
are nobody's wish, so they stand in nobody's way: who removes one, or puts it anew, has it leave its
haul (`let_go`), and what the worker may still write to is quarantined until it reports.

A worker that was told of a haul and did not finish it in time is a late writer. How many hauls wait
is bounded for each worker. Cost: a few kernel calls a haul.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core.kernels import tiers as k
from mooncake_store.core.options import SECOND
from mooncake_store.core.records import OF_OTHERS, REPLICAS_MAX, SegmentState, Status, Tier
from mooncake_store.core.space import writers_of
from mooncake_store.core.tasks import answers, drop_replica, spare_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from mooncake_store.core.segment import Segment
    from mooncake_store.core.state import ShardState

    Limit = Callable[[Segment], int]

__all__ = ["DAMAGED", "HAULS_PER_LANE", "LATER", "REFUSED", "TAKEN", "Haul", "Hauls"]

HAUL_OBJECTS = 1024
HAUL_BYTES = 256 << 20
"""Most bytes of a haul, unless a single object has more."""
HAULS_PER_LANE = 16
"""Hauls of a worker with one device (see `Haul.lane`) that wait, or that it runs."""
SLOWEST_BYTES_PER_S = 16 << 20
"""What the slowest disk moves that is waited for, but for the time that each haul has anyhow."""
TARGETS_TRIED = 4
DAMAGED = -801
"""What a worker reports of an object whose bytes are not those of its checksum at the source."""
REFUSED, TAKEN, LATER = 0, 1, 2
"""What became of an object that was to be hauled: it cannot be, it is, or its worker is busy."""


@dataclass(slots=True)
class Haul:
    """Objects that go from one segment to another, side by side in columns."""

    number: int
    worker: int
    """Handle of the only client that may fetch and finish it."""
    source: int
    target: int
    moves: bool
    """Whether the replicas on the tier of the source go when it has ended well."""
    rows: NDArray[np.int32]
    """-1: the object has left the haul."""
    source_offsets: NDArray[np.int64]
    target_offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    checksums: NDArray[np.uint64]
    begun_ns: int
    """When it was told, 0 before..."""
    created_ns: int
    """...and when it was queued."""
    nbytes: int
    device: int
    """The lower of the segments, if its worker is the owner; else OF_OTHERS."""

    @property
    def lane(self) -> tuple[int, int]:
        """Whose it is and in which device it may hang: what has a queue of its own."""
        return self.worker, self.device

    def without(self, left: NDArray[np.bool_]) -> None:
        """Leave objects out. Not once it was told: it is reported in the order of its columns."""
        self.rows, self.checksums = self.rows[~left], self.checksums[~left]
        self.source_offsets = self.source_offsets[~left]
        self.target_offsets = self.target_offsets[~left]
        self.sizes = self.sizes[~left]


class Hauls:
    """All hauls of a shard."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._hauls: dict[int, Haul] = {}
        self._of_lane: Counter[tuple[int, int]] = Counter()
        self._leaving: dict[int, int] = {}  # bytes, by segment
        self._heard: dict[tuple[int, int], int] = {}  # when one of the lane ended last

    def __len__(self) -> int:
        return len(self._hauls)

    def demote(self, rows: NDArray[np.int32], *, keep: bool = False) -> int:
        """Queue readable objects to be copied to a disk; returns how many were taken.

        Their replicas in memory go when they have arrived, unless they are to be kept.
        """
        return int(np.count_nonzero(self.offer(rows, keep=keep) == TAKEN))

    def offer(
        self, rows: NDArray[np.int32], tier: Tier = Tier.MEMORY, *, keep: bool = False
    ) -> NDArray[np.uint8]:
        """Queue, as `demote` does, what is to leave a tier; says of each what became of it."""
        out = np.full(len(rows), REFUSED, np.uint8)
        for home, mine in self._by_home(rows):
            below = self._below(tier, home)
            if below is not None:
                out[mine] = self._haul(rows[mine], tier, below, not keep, _no_limit, home)
        return out

    def tier_below(self, tier: Tier) -> Tier | None:
        """Return where that goes which leaves a tier, None for nowhere."""
        return self._below(tier, None)

    def _below(self, tier: Tier, home: str | None) -> Tier | None:
        some = (s for s in self._usable() if home is None or s.namespace == home)
        return min((s.tier for s in some if s.tier > tier), default=None)

    def _by_home(self, rows: NDArray[np.int32]) -> Iterator[tuple[str, NDArray[np.bool_] | slice]]:
        """Yield which rows go to which segments: see `homes.py`."""
        if not self._state.space.homes.declared:
            yield "", slice(None)
            return
        tenants = self._state.cold["tenant"][rows]
        homes = {number: self._state.home_of(number) for number in np.unique(tenants).tolist()}
        for home in sorted(set(homes.values())):
            yield home, np.isin(tenants, [n for n, each in homes.items() if each == home])

    def promote(self, rows: NDArray[np.int32], *, hot: bool = False) -> int:
        """Queue objects that lie below memory alone to be copied there; returns how many.

        As many as there is spare room for: they evict nothing. Of that there is none in a memory
        that is full, so what is `hot` fills it further, and the coldest leave as for puts.
        """
        limit = _limit_of_hot if hot else partial(spare_bytes, self._state)
        taken = 0
        for home, mine in self._by_home(rows):
            for tier in (Tier.DISK, Tier.COLD):  # a row that is under way is not taken twice
                outcome = self._haul(rows[mine], tier, Tier.MEMORY, False, limit, home)
                taken += int(np.count_nonzero(outcome == TAKEN))
        return taken

    def fetch(self, client: int, limit: int, device: int) -> list[Haul]:
        """Return up to `limit` hauls of this worker from or to one of its segments below memory.

        With OF_OTHERS those to segments of others. It runs none of these while it asks: so what it
        was told before and has not finished is told again, as `Tasks.fetch` does.
        """
        if not self._of_lane[client, device]:
            return []
        mine = [haul for haul in self._hauls.values() if haul.lane == (client, device)]
        out = [haul for haul in mine if haul.begun_ns][:limit]
        for haul in mine:
            if len(out) >= limit:
                break
            if not haul.begun_ns and self._begin(haul):
                out.append(haul)
        return out

    def finish(self, client: int, number: int, statuses: NDArray[np.int16]) -> Status:
        """End a haul: what has arrived becomes readable, the space of the rest returns.

        The report of one that was given up returns its space before its time.
        """
        haul = self._hauls.get(number)
        if haul is None:
            if 0 < number <= 0xFFFFFFFF:
                self._writer_done(client, number)
            return Status.TASK_NOT_FOUND
        if haul.worker != client:
            return Status.ILLEGAL_CLIENT
        if not haul.begun_ns:
            return Status.NO_TASK
        if len(statuses) != len(haul.rows):
            return Status.INVALID_PARAMS
        self._heard[haul.lane] = self._state.now
        self._end(haul, statuses == 0, late=False)
        if self._state.space.tiers[haul.source] != Tier.MEMORY:
            damaged = haul.rows[(statuses == DAMAGED) & (haul.rows >= 0)]
            self._lose(damaged, haul.source)
        self._writer_done(client, number)
        return Status.OK

    def expire(self) -> None:
        """Give up hauls whose worker is gone or silent for too long."""
        state = self._state
        for haul in list(self._hauls.values()):
            # What waits, waits for those before it: as long as the worker ends some.
            before = max(haul.created_ns, self._heard.get(haul.lane, 0))
            closed = int(state.closed[haul.worker])
            if closed or state.now - (haul.begun_ns or before) >= self._patience(haul):
                self._give_up(haul, fenced=closed == 2)
        for lane in [lane for lane in self._heard if not self._of_lane[lane]]:
            del self._heard[lane]

    def abandon(self, segment: int) -> None:
        """Give up hauls from or to a segment that is gone, or absent."""
        for haul in list(self._hauls.values()):
            if segment in (haul.source, haul.target):
                self._give_up(haul)

    def let_go(self, rows: NDArray[np.int32]) -> None:
        """Have objects leave their hauls, for whoever wants something else of them."""
        state = self._state
        for haul in list(self._hauls.values()):
            leaving = np.isin(haul.rows, rows) & (haul.rows >= 0)
            if leaving.any():
                gone = haul.rows[leaving]
                self._unload(haul, gone, leaving, np.zeros(len(gone), np.bool_), haul.begun_ns > 0)
                haul.rows[leaving] = -1
                assert not (state.flags(gone) & c.TASK).any()

    def give_way(self, segments: set[int], nbytes: int) -> bool:
        """Have objects that nobody holds leave hauls from these segments; whether any did.

        As many as have `nbytes`, where there are: first of hauls that no worker was told of, as
        what was told is copied in vain.
        """
        rows_of, leaving = self._state.rows, []
        mine = [haul for haul in self._hauls.values() if haul.source in segments]
        for haul in sorted(mine, key=lambda haul: haul.begun_ns > 0):
            rows = haul.rows[haul.rows >= 0]
            held = rows_of["lease_end"][rows] > self._state.now
            rows = rows[~held & ((rows_of["flags"][rows] & c.HARD_PIN) == 0)]
            ends = np.cumsum(rows_of["size"][rows].astype(np.int64))
            rows = rows[: int(np.searchsorted(ends, nbytes)) + 1]
            if len(rows):
                leaving.append(rows)
                nbytes -= int(ends[len(rows) - 1])
            if nbytes <= 0:
                break
        if leaving:
            self.let_go(np.concatenate(leaving))
        return bool(leaving)

    def leaving_bytes(self, segment: int) -> int:
        """Bytes of a segment that will be free when the hauls under way have ended well."""
        return self._leaving.get(segment, 0)

    def leaving_bytes_of_all(self, tier: Tier) -> int:
        """The same of all segments of a tier."""
        tiers = self._state.space.tiers
        return sum(nbytes for segment, nbytes in self._leaving.items() if tiers[segment] == tier)

    def moving_bytes(self, tenant: int) -> int:
        """Bytes that a tenant has twice because of moves under way: its quota counts them once."""
        owners, total = self._state.cold["tenant"], 0
        for haul in self._hauls.values():
            if haul.moves:
                there = haul.rows >= 0
                total += int(haul.sizes[there][owners[haul.rows[there]] == tenant].sum())
        return total

    def _begin(self, haul: Haul) -> bool:
        """Tell of a haul for the first time; False when there is nothing left to be told."""
        left = haul.rows < 0
        if left.any():
            haul.without(left)
        if not len(haul.rows) or not self._sound(haul):
            self._give_up(haul)
            return False
        haul.begun_ns = max(1, self._state.now)
        return True

    def _sound(self, haul: Haul) -> bool:
        """Whether both segments can be used. A move to where nobody can read gives nothing up."""
        alive = self._state.space.alive
        return bool(alive[haul.source]) and bool(alive[haul.target])

    def _patience(self, haul: Haul) -> int:
        """How long a worker has for a haul; less than until its deadline as a late writer."""
        config = self._state.config
        moving = haul.nbytes * SECOND // SLOWEST_BYTES_PER_S
        return config.task_timeout_ns + min(moving, config.put_release_ns // 2)

    def _deadline(self, haul: Haul) -> int:
        """When a worker that was told of a haul writes no more."""
        config = self._state.config
        return haul.begun_ns + config.task_timeout_ns + config.put_release_ns

    def _usable(self) -> list[Segment]:
        """Return the segments that take objects now."""
        state = self._state
        some = state.space.all()
        return [s for s in some if s.state == SegmentState.OK and s.usable_from <= state.now]

    def _haul(
        self, rows: NDArray[np.int32], tier: Tier, to: Tier, moves: bool, limit: Limit, home: str
    ) -> NDArray[np.uint8]:
        """Queue objects of a home to be hauled to another tier; says of each what became of it."""
        state = self._state
        rows = np.ascontiguousarray(rows, np.int32)
        out = np.full(len(rows), REFUSED, np.uint8)
        targets = [s for s in self._usable() if s.tier == to and s.namespace == home]
        if not targets or not len(rows):
            return out
        answering = state.space.mask(lambda segment: answers(state, segment.index))
        segments, offsets = np.empty(len(rows), np.int64), np.empty(len(rows), np.int64)
        up = to < tier
        k.sources(state.words, rows, int(tier), up, answering, not moves, segments, offsets)
        _, first = np.unique(rows, return_index=True)
        again = np.ones(len(rows), np.bool_)
        again[first] = False
        segments[again] = -1
        for index in np.unique(segments[segments >= 0]).tolist():
            source = state.space.get(index)
            assert source is not None
            places = np.flatnonzero(segments == index)
            out[places] = self._from(source, targets, rows[places], offsets[places], moves, limit)
        return out

    def _from(
        self,
        source: Segment,
        targets: list[Segment],
        rows: NDArray[np.int32],
        offsets: NDArray[np.int64],
        moves: bool,
        limit: Limit,
    ) -> NDArray[np.uint8]:
        """Queue what lies on one segment, to the nearest that has room and whose lane has."""
        out = np.full(len(rows), REFUSED, np.uint8)
        targets = [t for t in targets if t.tier != Tier.COLD or t.owner == source.owner]
        ends = np.cumsum(self._state.rows["size"][rows])
        start = 0
        while start < len(rows):
            before = int(ends[start - 1]) if start else 0
            full = int(np.searchsorted(ends, before + HAUL_BYTES, side="right"))
            stop = min(max(full, start + 1), start + HAUL_OBJECTS)
            left = np.arange(start, stop)
            idle = [target for target in targets if self._takes(source, target)]
            if not idle and targets:
                out[start:] = LATER
                return out
            for target in sorted(idle, key=lambda t: _distance(source, t))[:TARGETS_TRIED]:
                took = self._load(source, target, rows[left], offsets[left], moves, limit)
                out[left[took]] = TAKEN
                left = left[~took]
                if not len(left):
                    break
            if len(idle) < len(targets):
                out[left] = LATER
            start = stop
        return out

    def _takes(self, source: Segment, target: Segment) -> bool:
        return self._of_lane[source.owner, _device(source, target)] < HAULS_PER_LANE

    def _load(
        self,
        source: Segment,
        target: Segment,
        rows: NDArray[np.int32],
        offsets: NDArray[np.int64],
        moves: bool,
        limit: Limit,
    ) -> NDArray[np.bool_]:
        """Queue one haul of the rows that find room; says which they are."""
        state = self._state
        sizes = state.rows["size"][rows].astype(np.int64)
        took = state.rows["replicas"][rows] < REPLICAS_MAX
        state.space.return_freed()
        took &= _fitting(sizes, took, limit(target) - target.used)
        if not moves:
            took &= self._within_quotas(rows, sizes, took)
        where = np.full(len(rows), -1, np.int64)
        if took.any():
            where[took] = target.allocator.allocate(sizes[took])
            took &= where >= 0
        if not took.any():
            return took
        chosen, where, sizes = rows[took], where[took], sizes[took]
        state.journal.expect_marks(len(chosen))
        k.load(state.words, chosen, target.index, where)
        most = int(state.rows["replicas"][chosen].max())
        state.replicas_most = max(state.replicas_most, most)
        # Numbered as puts are: who writes late is known by his number, also after a restart.
        number = int(state.tally[c.GENERATION]) % 0xFFFFFFFF + 1
        state.tally[c.GENERATION] = number
        haul = self._hauls[number] = Haul(
            number,
            source.owner,
            source.index,
            target.index,
            moves,
            chosen,
            offsets[took],
            where,
            sizes,
            state.rows["checksum"][chosen].copy(),
            begun_ns=0,
            created_ns=state.now,
            nbytes=int(sizes.sum()),
            device=_device(source, target),
        )
        self._of_lane[haul.lane] += 1
        if moves:
            self._leaving[source.index] = self.leaving_bytes(source.index) + haul.nbytes
        return took

    def _within_quotas(
        self, rows: NDArray[np.int32], sizes: NDArray[np.int64], wanted: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Which of the wanted ones of these objects their tenants may have once more."""
        state = self._state
        tenants = state.cold["tenant"][rows]
        out = np.ones(len(rows), np.bool_)
        for number in np.unique(tenants).tolist():
            quota = state.tenant_by_number[number].quota_bytes
            if quota is not None:
                mine = tenants == number
                room = quota - int(state.tenant_use[number, 0])
                out[mine] = _fitting(sizes[mine], wanted[mine], room)
        return out

    def _end(self, haul: Haul, arrived: NDArray[np.bool_], *, late: bool) -> None:
        """Make what has arrived readable, and undo the rest, which a `late` worker may write to."""
        state = self._state
        del self._hauls[haul.number]
        self._of_lane[haul.lane] -= 1
        if haul.moves:
            self._leaving[haul.source] -= haul.nbytes
            if not self._leaving[haul.source]:
                del self._leaving[haul.source]
        there = haul.rows >= 0
        rows = haul.rows[there]
        arrived = arrived[there] & self._sound(haul)
        self._unload(haul, rows, there, arrived, late)
        here = rows[arrived]
        if not len(here):
            return
        state.retier(here)
        if haul.moves:
            leaving = here[(state.flags(here) & c.HARD_PIN) == 0]  # pinned meanwhile: it stays
            state.drop_tier(leaving, Tier(state.space.tiers[haul.source]))
            state.totals.demoted_objects += len(leaving)
            state.totals.demoted_bytes += int(state.rows["size"][leaving].sum())
        elif state.space.tiers[haul.target] == Tier.MEMORY:
            state.totals.promoted_objects += len(here)
            state.totals.promoted_bytes += int(state.rows["size"][here].sum())

    def _unload(
        self,
        haul: Haul,
        rows: NDArray[np.int32],
        which: NDArray[np.bool_],
        arrived: NDArray[np.bool_],
        late: bool,
    ) -> None:
        """End the haul of `rows`, which stand at `which`: free what did not arrive, or hold it."""
        state = self._state
        state.journal.expect_marks(len(rows))
        k.unload(state.words, rows, haul.target, arrived)
        extents = np.zeros((5, len(rows) - int(np.count_nonzero(arrived))), np.int64)
        extents[0] = haul.target
        extents[1] = haul.target_offsets[which][~arrived]
        extents[2] = haul.sizes[which][~arrived]
        if late:
            extents[3], extents[4] = haul.worker << 32 | haul.number, self._deadline(haul)
        state.space.free_or_quarantine(extents)

    def _give_up(self, haul: Haul, *, fenced: bool = False) -> None:
        """End a haul of which nothing has arrived; unless it is `fenced` its worker may be late."""
        late = haul.begun_ns > 0 and not fenced
        self._end(haul, np.zeros(len(haul.rows), np.bool_), late=late)

    def _writer_done(self, client: int, number: int) -> None:
        """Return the space that waited for the worker of a haul."""
        if self._state.space.late:
            writer = writers_of(np.array([client]), np.array([number]))
            self._state.space.writers_done(writer)

    def _lose(self, rows: NDArray[np.int32], segment: int) -> None:
        """Drop replicas whose bytes are damaged; an object without another is lost."""
        state = self._state
        alone = state.rows["replicas"][rows] == 1
        for row in rows[~alone].tolist():
            lease_end = int(state.rows["lease_end"][row])
            drop_replica(state, row, segment, lease_end if lease_end > state.now else 0)
        state.retier(rows[~alone])
        state.totals.lost_objects += int(np.count_nonzero(alone))
        state.dispose(rows[alone])


def _device(source: Segment, target: Segment) -> int:
    """Return the segment whose device the owner of the source may have to wait for."""
    lower = max(source, target, key=lambda segment: segment.tier)
    return lower.index if lower.owner == source.owner else OF_OTHERS


def _limit_of_hot(segment: Segment) -> int:
    """Half of what puts still find above the high watermark is for what was read often."""
    return (segment.full_at + segment.nbytes) // 2


def _no_limit(segment: Segment) -> int:
    return segment.nbytes


def _fitting(sizes: NDArray[np.int64], wanted: NDArray[np.bool_], room: int) -> NDArray[np.bool_]:
    """Which of the wanted ones have room together; one that is too large is in nobody's way."""
    out: NDArray[np.bool_] = wanted & (sizes <= room)
    out &= np.cumsum(np.where(out, sizes, 0)) <= room
    return out


def _distance(source: Segment, target: Segment) -> tuple[bool, bool, bool, float]:
    """How much speaks against a target: no room before others have to leave, then the way there."""
    return (
        target.used > target.full_at,
        target.owner != source.owner,
        target.host != source.host,
        target.used / target.nbytes,
    )
