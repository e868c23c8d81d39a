"""Making missing replicas anew: copies for objects that have fewer than they were put for.

A total says how many replicas are missing, so nothing is looked at while there are none. Else a
round walks the rows in chunks and submits copies, and the next round follows after a pause that
grows while no copy succeeds: whatever was in the way (no room, a limit, a worker that fails) is
tried again in that time. A segment that comes, goes or recovers calls for a round at once.

Copies take spare room only and evict nothing (`spare_bytes`), and few are under way at a time.
One tick costs the scan of a chunk and a bounded number of submissions.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core.kernels import scan as k
from mooncake_store.core.options import DEFAULTS
from mooncake_store.core.reads import replicas_of
from mooncake_store.core.records import Flag, Status, Tier
from mooncake_store.core.segment import NEVER
from mooncake_store.core.state import TENANTS_MAX
from mooncake_store.core.tasks import Tasks, TaskState, spare_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.segment import Segment
    from mooncake_store.core.state import ShardState

__all__ = ["Repair"]

ROWS_PER_STEP = 16_384
SUBMITTED_PER_STEP = 64
CONSIDERED_PER_STEP = 128
"""Objects that one step looks at one by one."""
TARGETS_KEPT_NS = 100_000_000
"""How long a look at all segments serves."""
SEGMENTS_COMPARED = 32
"""Segments looked at, most, to find one for an object."""
PAUSE_MIN_NS = 1_000_000_000
PAUSE_MAX_NS = 60_000_000_000


class Repair:
    """Rounds of repair, in steps."""

    def __init__(self, state: ShardState, tasks: Tasks) -> None:
        self._state = state
        self._tasks = tasks
        self._copies: dict[int, int] = {}  # row -> its unfinished copy
        self._cramped: dict[int, int] = {}
        """Segment -> the least size that it had no room in one piece for."""
        self._looking = False  # a round runs
        self._cursor = 0
        self._due = 0  # when the next round begins; NEVER while one runs that nothing disturbed
        self._pause_ns = PAUSE_MIN_NS
        self._succeeded = False  # a copy has, since the last round ended
        self._changes = 0  # of the segments, known so far
        self._targets: _Targets | None = None

    def step(self, copies_max: int) -> None:
        """Submit a share of the copies that are due; at most `copies_max` are unfinished."""
        state, now = self._state, self._state.now
        if state.space.changes != self._changes:
            self._changes = state.space.changes
            self._due, self._pause_ns, self._targets = now, PAUSE_MIN_NS, None
        if not self._looking:
            if state.numbers[places.TALLY + c.MISSING] == 0 or now < self._due:
                return
            self._looking, self._cursor, self._due = True, 0, NEVER
        self._collect()
        # The other half of all tasks is for those that are asked for.
        free = max(1, state.config.tasks_max // 2) - self._tasks.count_own()
        allowed = min(SUBMITTED_PER_STEP, copies_max - len(self._copies), free)
        if allowed <= 0:
            return
        if self._targets is None or now >= self._targets.stale_at:
            self._targets = _Targets(state, self._tasks, self._booked(), self._cramped)
        rows, following = self._find(self._targets)
        left = self._submit(rows, allowed, self._targets)
        self._cursor = following if left is None else left
        if left is None and following == 0:
            self._end_round()

    def _collect(self) -> None:
        """Learn which copies have ended."""
        for row, number in list(self._copies.items()):
            task = self._tasks.get(number)
            if task is None or task.state in (TaskState.FAILED, TaskState.SUCCESS):
                del self._copies[row]
                self._succeeded |= task is not None and task.state == TaskState.SUCCESS
                if task is not None and task.message == Status.NO_SPACE.name:
                    size, (target,) = int(self._state.rows["size"][row]), task.targets
                    self._cramped[target] = min(size, self._cramped.get(target, size))

    def _booked(self) -> dict[int, int]:
        """Return the bytes per segment that copies will take which have not begun."""
        booked: dict[int, int] = {}
        for row, number in self._copies.items():
            task = self._tasks.get(number)
            if task is not None and task.state == TaskState.PENDING:
                size = int(self._state.rows["size"][row])
                booked[task.targets[0]] = booked.get(task.targets[0], 0) + size
        return booked

    def _find(self, targets: _Targets) -> tuple[NDArray[np.int32], int]:
        """Return the rows of the next chunk that a copy could help, and where to go on."""
        state = self._state
        if not targets.room:
            return np.empty(0, np.int32), 0
        columns = state.rows, state.cold, state.overflow
        masks = targets.sources, targets.open_to, targets.barred
        find = partial(k.short_of_replicas, *columns, *masks)
        asked = len(targets.room), targets.room_max, targets.disks
        return state.scan(find, self._cursor, ROWS_PER_STEP, *asked)

    def _submit(self, rows: NDArray[np.int32], allowed: int, targets: _Targets) -> int | None:
        """Ask for copies; returns the row to go on with when there were too many."""
        for row in rows[:CONSIDERED_PER_STEP].tolist():
            if row in self._copies:
                continue
            if allowed == 0:
                return int(row)
            held = replicas_of(self._state, row)
            source = next(
                (s for s, _, life in held if life == c.READABLE and self._tasks.answers(s)), -1
            )
            target = targets.take(row, [s for s, _, _ in held]) if source >= 0 else -1
            if target < 0:
                continue
            status, number = self._tasks.repair(row, source, target)
            if status != Status.OK:
                return int(row)
            self._copies[row] = number
            allowed -= 1
        return int(rows[CONSIDERED_PER_STEP]) if len(rows) > CONSIDERED_PER_STEP else None

    def _end_round(self) -> None:
        self._looking = False
        if not self._copies:  # where there was no room there may be by now
            self._cramped.clear()
        if self._succeeded:
            self._pause_ns = PAUSE_MIN_NS
        self._succeeded = False
        if self._due == NEVER:
            self._due = self._state.now + self._pause_ns
            self._pause_ns = min(2 * self._pause_ns, PAUSE_MAX_NS)


class _Targets:
    """The segments that have spare room, taken in turn, and who may not use it.

    Neighbours in their cycle are on different hosts, so one on another host than an object's
    replicas is soon found. Room is counted once and may be less when a copy begins, which is why it
    is looked at again then; where it lay in pieces too small, `cramped` says for what.
    """

    def __init__(
        self, state: ShardState, tasks: Tasks, booked: dict[int, int], cramped: dict[int, int]
    ) -> None:
        self._state = state
        self._cramped = cramped
        self.stale_at = state.now + TARGETS_KEPT_NS
        self._segments: list[Segment] = []
        self.room: dict[int, int] = {}
        homes, some = state.space.homes, []
        for home in homes.all():
            cycle, start = homes.turn(state.now, home)
            self._turn = max(start, 0)
            some += cycle + homes.further(state.now, DEFAULTS, home)
        self.disks = 0
        for segment in some:
            room = spare_bytes(state, segment) - segment.used - booked.get(segment.index, 0)
            if room > 0 and segment.usable_from <= state.now:
                self._segments.append(segment)
                self.room[segment.index] = room
                self.disks += segment.tier == Tier.DISK
        self.room_max = max(self.room.values(), default=0)
        self.open_to = state.space.mask(lambda segment: segment.index in self.room)
        self.open_to += self.open_to & state.space.tiers  # 2 is a disk
        self.barred = np.zeros(TENANTS_MAX, np.uint8)
        for number, tenant in state.tenant_by_number.items():
            if tenant.quota_bytes is not None:
                self.barred[number] = state.tenant_use[number, 0] >= tenant.quota_bytes
        self.sources = state.space.mask(lambda segment: tasks.answers(segment.index))

    def take(self, row: int, held: list[int]) -> int:
        """Return a segment for one more replica, -1 for none.

        In memory if possible, but on a disk for what left memory; then on a host without one.
        """
        space, record = self._state.space, self._state.rows[row]
        hosts = {segment.host for index in held if (segment := space.get(index)) is not None}
        home = self._state.home_of(int(self._state.cold["tenant"][row]))
        size, count = int(record["size"]), len(self._segments)
        below = bool(record["flags"] & Flag.OFF_MEMORY)
        chosen, rank = -1, (False, False)
        for _ in range(min(count, SEGMENTS_COMPARED)):
            segment = self._segments[self._turn % count]
            self._turn += 1
            on_disk = segment.tier == Tier.DISK
            if segment.index in held or self.room[segment.index] < size or below > on_disk:
                continue
            if size >= self._cramped.get(segment.index, size + 1):
                continue
            if segment.namespace != home:
                continue
            against = (on_disk and not below, segment.host in hosts)
            if chosen < 0 or against < rank:
                chosen, rank = segment.index, against
            if not any(rank):
                break
        if chosen >= 0:
            self.room[chosen] -= size
        return chosen
