"""What happens without being asked: deadlines, dead segments, drains, lost replicas, pressure.

`tick` does a bounded share of each per call. A sweep walks the rows with a cursor: it reclaims
puts whose writer is past its last deadline or gone, and drops replicas on segments that are gone.
When a sweep that began after a segment's end is complete, nothing refers to the segment any more.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import context as places
from mooncake_store.core import pressure, puts
from mooncake_store.core.hauls import LATER
from mooncake_store.core.held import HeldBytes
from mooncake_store.core.kernels import scan as k
from mooncake_store.core.reads import replicas_of
from mooncake_store.core.records import Flag, SegmentState, State, Status
from mooncake_store.core.removal import unpin
from mooncake_store.core.repair import Repair
from mooncake_store.core.segment import NEVER, Segment
from mooncake_store.core.tasks import TaskKind, Tasks, TaskState, choose_target, drop_replica
from mooncake_store.core.wheel import due_at

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.state import ShardState

__all__ = ["DrainJob", "DrainState", "Janitor"]

SWEEP_ROWS = 4096
"""Rows looked at per tick when nothing is urgent."""
SWEEP_ROWS_URGENT = 16_384
"""Rows looked at per tick while a segment or a writer is known to be gone."""
ATTENDED_MAX = 256
"""Objects with several replicas that one sweep step looks at one by one."""
PINS_ENDED_MAX = 4096
"""Soft pins ended per tick; a million that end in one moment took 840 ms together."""
DRAIN_IN_FLIGHT = 64
"""Moves of one drain at a time; also copies of the repair at a time while a drain runs."""
REPAIR_IN_FLIGHT = 256
HAULED_PER_STEP = 4096
"""Objects, about, for which one step looks whether they are to go to another tier."""
DRAIN_RETRIES = 3
DRAINS_KEPT = 1024
"""Drain jobs that have ended and can still be asked for."""


class DrainState(IntEnum):
    """Life of a drain job."""

    RUNNING = 0
    DONE = 1
    FAILED = 2
    CANCELLED = 3


@dataclass(slots=True)
class DrainJob:
    """Moving everything off one segment."""

    number: int
    segment: int
    state: DrainState = DrainState.RUNNING
    moved: int = 0
    message: str = ""
    cursor: int = 0
    seen: int = 0
    running: set[int] = field(default_factory=set)
    failures: dict[int, int] = field(default_factory=dict)
    """Row -> failed attempts."""


class Janitor:
    """Background duties of a shard, in steps."""

    def __init__(self, state: ShardState, tasks: Tasks) -> None:
        self._state = state
        self._tasks = tasks
        self._repair = Repair(state, tasks)
        self._cursor = 0
        self._sweeping: set[int] = set()  # segments gone before the running sweep began
        self._closed_before: set[int] = set()
        self._writers = False  # rows may name a client that was closed
        self.held = HeldBytes(state)
        self._jobs: dict[int, DrainJob] = {}
        self._running: dict[int, DrainJob] = {}  # segment -> its job
        self._last_job = 0

    def tick(self) -> None:
        """Do a share of everything that is due."""
        state = self._state
        state.space.release_quarantine(state.now)
        self.held.share_out()
        state.space.expire_memories(state.now)
        self._end_soft_pins()
        self._tasks.expire()
        state.hauls.expire()
        for segment in state.space.all():
            if segment.gone_at <= state.now and segment.state != SegmentState.GONE:
                self.end_segment(segment)
        for job in list(self._running.values()):
            self._drain_step(job)
        gone = any(s.state == SegmentState.GONE for s in state.space.all())
        self._sweep(SWEEP_ROWS_URGENT if gone or self._writers else SWEEP_ROWS)
        state.table.maintain(0, growing=False)
        if not state.space.quarantine.due(state.now):  # else there is room to come without victims
            pressure.relieve(state)
        if state.numbers[places.BELOW_USED]:
            self._change_tiers()
        self._repair.step(DRAIN_IN_FLIGHT if self._running else REPAIR_IN_FLIGHT)

    def _change_tiers(self) -> None:
        """Have hauled what was put, where that is wanted, and what is read often on disks."""
        state = self._state
        state.hand_on_notes()
        fresh = state.fresh.take(HAULED_PER_STEP)
        outcome = state.hauls.offer(fresh, keep=True)
        state.fresh.add(fresh[outcome == LATER])
        state.hauls.promote(state.risers.take(HAULED_PER_STEP), hot=True)

    def clients_closed(self) -> None:
        """Note that unfinished puts of closed clients wait for the sweep."""
        self._writers = True
        self._sweep_soon()

    def end_segment(self, segment: Segment) -> None:
        """Hide a segment's replicas at once; the sweep forgets them."""
        if segment.part:
            self._state.space.part_from(segment, self._state.now)
        self._state.space.set_state(segment, SegmentState.GONE)
        segment.gone_at = NEVER
        self._state.hauls.abandon(segment.index)
        job = self._running.get(segment.index)
        if job is not None:
            self._end(job, DrainState.FAILED, "the segment was unmounted")
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        """Look at a share of the rows at once, for what has just ended.

        A sweep that runs is not begun anew, but goes on: where clients come and go all the time
        none would ever end, and so nothing be given back: late puts, dead segments, the numbers of
        these clients. Where it ends, one begins that knows of what has just ended.
        """
        if self._cursor:
            self._sweep(SWEEP_ROWS_URGENT)
        if self._cursor == 0:
            self._sweep(SWEEP_ROWS_URGENT)

    def _sweep(self, rows: int) -> None:
        """Look at the next rows."""
        state = self._state
        if self._cursor == 0:
            self._closed_before = set(np.flatnonzero(state.closed[1:]) + 1)
            self._sweeping = {s.index for s in state.space.all() if s.state == SegmentState.GONE}
        late = state.now - state.config.put_release_ns
        columns = state.rows, state.overflow, state.cold, state.space.dead, state.closed
        start = self._cursor
        found, self._cursor = state.scan(partial(k.sweep, *columns), start, rows, late)
        if len(found):
            left = self._attend(found, late)
            if left is not None:
                self._cursor = left
        self.held.add_up(start, self._cursor)
        if self._cursor == 0:
            if self._writers:
                state.closed[list(self._closed_before)] = 0  # no row names them any more
                self._writers = bool(state.closed[1:].any())
            for index in self._sweeping:
                segment = state.space.get(index)
                if segment is not None and segment.state == SegmentState.GONE:
                    state.space.forget(segment)
            self._sweeping = set()

    def _attend(self, rows: NDArray[np.int32], late: int) -> int | None:
        """Reclaim late puts and drop dead replicas of the rows a sweep found.

        Returns the row to go on with when there were too many to look at one by one.
        """
        state = self._state
        writing = state.rows["state"][rows] == State.WRITING
        closed = state.closed[state.cold["owner"][rows]]
        overdue = writing & ((state.rows["lease_end"][rows] <= late) | (closed == 1))
        fenced = writing & (closed == 2)
        state.totals.expired_puts += int(np.count_nonzero(overdue | fenced))
        state.dispose(rows[fenced], writer_done=True)
        state.dispose(rows[overdue & ~fenced])
        rest = rows[~(overdue | fenced)]
        rest = rest[state.rows["state"][rest] != State.FREE]  # second generations went along
        single = state.rows["replicas"][rest] == 1
        single &= (state.flags(rest) & Flag.TASK) == 0
        several = rest[~single]
        emptied = several[:ATTENDED_MAX]
        near = emptied[(state.flags(emptied) & Flag.OFF_MEMORY) == 0]
        for row in emptied.tolist():
            self._drop_dead_replicas(row)
        state.retier(emptied)
        self._bring_back(near)
        doomed = np.concatenate([rest[single], emptied[state.rows["segment"][emptied] < 0]])
        state.totals.lost_objects += len(doomed)
        first = (state.flags(doomed) & Flag.UPSERT) != 0
        first &= state.rows["state"][doomed] == State.READABLE
        first &= ~np.isin(state.cold["twin"][doomed] - 1, doomed)
        for row in doomed[first].tolist():
            puts.continue_alone(state, row)
        state.dispose(doomed)
        return int(several[ATTENDED_MAX]) if len(several) > ATTENDED_MAX else None

    def _bring_back(self, rows: NDArray[np.int32]) -> None:
        """Copy to memory what lay there and has only its replicas below left, into spare room."""
        state = self._state
        if state.config.promotion_hits:
            gone = (state.flags(rows) & (Flag.OFF_MEMORY | Flag.TASK)) == Flag.OFF_MEMORY
            gone &= (state.rows["state"][rows] == State.READABLE) & (
                state.rows["segment"][rows] >= 0
            )
            state.hauls.promote(rows[gone])

    def _drop_dead_replicas(self, row: int) -> None:
        state = self._state
        dead = {s for s, _, _ in replicas_of(state, row) if state.space.dead[s]}
        if int(state.rows["flags"][row]) & Flag.TASK:
            self._tasks.abandon(row, dead, "a replica of the object was lost")
        until = int(state.rows["lease_end"][row])
        if state.rows["state"][row] == State.WRITING:
            until += state.config.put_release_ns
        elif until <= state.now:
            until = 0
        for segment in dead:
            drop_replica(state, row, segment, until)

    def _end_soft_pins(self) -> None:
        """Make objects whose soft pin has ended ordinary again, and time those prolonged since."""
        state = self._state
        due = state.soft_ends.pop(state.now, PINS_ENDED_MAX)
        if due is None:
            return
        rows = due[:, 0].astype(np.int32)
        same = state.rows["generation"][rows] == due[:, 1]
        same &= (state.flags(rows) & Flag.SOFT_PIN) != 0
        same &= state.rows["state"][rows] == State.READABLE
        rows = np.unique(rows[same])
        ended = due_at(state.pin_ends[rows]) <= state.now
        unpin(state, rows[ended])
        state.time_soft_pins(rows[~ended])

    def drain(self, index: int) -> tuple[Status, int]:
        """Start moving everything off a segment."""
        segment = self._state.space.get(index)
        if segment is None or segment.state == SegmentState.GONE:
            return Status.SEGMENT_NOT_FOUND, 0
        running = self._running.get(index)
        if running is not None:
            return Status.OK, running.number
        self._last_job += 1
        job = DrainJob(self._last_job, index)
        self._jobs[job.number] = self._running[index] = job
        ended = [n for n, known in self._jobs.items() if known.state != DrainState.RUNNING]
        for number in ended[: max(0, len(ended) - DRAINS_KEPT)]:
            del self._jobs[number]
        self._state.space.set_state(segment, SegmentState.DRAINING)
        return Status.OK, job.number

    def job(self, number: int) -> DrainJob | None:
        """Return a drain job."""
        return self._jobs.get(number)

    def cancel_drain(self, number: int) -> Status:
        """Stop a drain, and the unmount it was for; the segment takes new objects again."""
        job = self._jobs.get(number)
        if job is None or job.state != DrainState.RUNNING:
            return Status.JOB_NOT_FOUND
        segment = self._state.space.get(job.segment)
        if segment is not None:
            segment.gone_at = NEVER
            self._state.space.touch(segment)
        self._stop(job, DrainState.CANCELLED, "cancelled")
        return Status.OK

    def _end(self, job: DrainJob, outcome: DrainState, message: str) -> None:
        job.state, job.message = outcome, message
        job.failures.clear()  # one for each object, perhaps
        del self._running[job.segment]

    def _stop(self, job: DrainJob, outcome: DrainState, message: str) -> None:
        """End a job, and let its segment go on as the outcome says."""
        self._end(job, outcome, message)
        segment = self._state.space.get(job.segment)
        if segment is None or segment.life != SegmentState.DRAINING:
            return
        leaving = segment.gone_at != NEVER
        if outcome == DrainState.DONE:
            self._state.space.set_state(segment, SegmentState.DRAINED)
            if leaving:
                self.end_segment(segment)
        elif not leaving:  # else what is put there until the deadline would be lost at it
            self._state.space.set_state(segment, SegmentState.OK)

    def _drain_step(self, job: DrainJob) -> None:
        """Collect the outcome of moves and submit further ones."""
        for number in list(job.running):
            task = self._tasks.get(number)
            if task is None or task.state == TaskState.SUCCESS:
                job.moved += 1
            elif task.state == TaskState.FAILED:
                job.failures[task.row] = job.failures.get(task.row, 0) + 1
                if job.failures[task.row] > DRAIN_RETRIES:
                    self._stop(job, DrainState.FAILED, f"a move failed: {task.message}")
                    return
            else:
                continue
            job.running.discard(number)
        state = self._state
        segment = state.space.get(job.segment)
        if segment is None or segment.state == SegmentState.ABSENT:
            return  # it goes on when the worker is back
        wanted = state.space.mask(lambda s: s.index == job.segment)

        def in_span(span: NDArray[np.int64], out: NDArray[np.int32]) -> int:
            rows = np.arange(span[0], span[1])
            there = np.empty(len(rows), np.bool_)
            k.on_segments(state.rows, state.overflow, wanted, rows, there)
            there &= state.rows["state"][span[0] : span[1]] != State.FREE
            found = rows[there]
            out[: len(found)] = found
            return len(found)

        rows, following = state.scan(in_span, job.cursor, SWEEP_ROWS_URGENT)
        job.seen += len(rows)
        for row in rows.tolist():
            if len(job.running) >= DRAIN_IN_FLIGHT:
                following = row
                break
            self._move_off(job, row)
            if job.state != DrainState.RUNNING:
                return
        job.cursor = following
        if following == 0:
            if job.seen == 0 and not job.running:
                self._stop(job, DrainState.DONE, "")
            job.seen = 0

    def _move_off(self, job: DrainJob, row: int) -> None:
        state = self._state
        if state.rows["state"][row] != State.READABLE or int(state.rows["flags"][row]) & (
            Flag.TASK | Flag.UPSERT
        ):
            return  # comes up again in the next round
        if any((task := self._tasks.get(n)) and task.row == row for n in job.running):
            return
        target = choose_target(state, row, job.segment, job.failures.get(row, 0))
        status, number = Status.NO_SPACE, 0
        if target is not None:
            digest = state.digests(np.array([row]))
            status, number = self._tasks.submit(TaskKind.MOVE, digest, job.segment, [target])
        if status == Status.OK:
            job.running.add(number)
        else:
            job.failures[row] = job.failures.get(row, 0) + 1
            if job.failures[row] > DRAIN_RETRIES:
                self._stop(job, DrainState.FAILED, f"an object cannot be moved: {status.name}")
