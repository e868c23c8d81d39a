"""Copies and moves: two phases each, run by whoever owns the source, seen by everyone.

A running task flags its object, so nothing removes, evicts or overwrites it meanwhile. The new
replicas exist from the start but are not readable until the task ends well. A task whose worker
goes silent times out; its space is quarantined as a late writer's.

How many there may be has parts: half are for what clients ask for, of which one client has a
quarter at most; the rest is for what a shard does by itself, repairs and drains.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core.kernels import writes as k
from mooncake_store.core.options import DEFAULTS
from mooncake_store.core.reads import replicas_of
from mooncake_store.core.records import (
    REPLICA,
    REPLICAS_MAX,
    Flag,
    SegmentState,
    State,
    Status,
    Tier,
)
from mooncake_store.core.state import ShardState, as_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.segment import Segment

__all__ = ["Asked", "Task", "TaskKind", "TaskState", "Tasks"]

FINISHED_KEPT = 4096
ASKED_SHARE, SHARE_OF_ONE = 2, 8
"""Of all tasks that there may be: one in so many may be asked for, and so by one client."""


class TaskKind(IntEnum):
    """What a task does with its source replica."""

    COPY = 0
    MOVE = 1


class TaskState(IntEnum):
    """Life of a task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


@dataclass(slots=True)
class Task:
    """One copy or move of one object."""

    number: int
    kind: TaskKind
    digest: NDArray[np.uint64]
    source: int
    targets: tuple[int, ...]
    worker: int
    """Handle of the only client that may fetch and finish it."""
    created_ns: int
    updated_ns: int
    row: int
    tenant: int
    """Whose the object is."""
    state: TaskState = TaskState.PENDING
    message: str = ""
    repair: bool = False
    """Whether it makes a missing replica anew: while one is missing, in spare room and quota."""
    asker: bytes = b""
    """The uuid of the client that asked for it; none for what the shard does by itself."""
    replicas: NDArray[Any] = field(default_factory=lambda: np.empty(0, REPLICA))


@dataclass(frozen=True, slots=True)
class Asked:
    """How many of the tasks that have not ended were asked for, and by whom."""

    total: int
    most: int
    """There may be."""
    mine: int
    most_of_one: int
    host: str
    """Where the client is that asked for most, and for how many."""
    of_host: int


class Tasks:
    """All tasks of a shard. Cold path: one Python object per task."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._tasks: dict[int, Task] = {}
        self._open: dict[int, Task] = {}
        self._finished: deque[int] = deque()
        self._asked: Counter[bytes] = Counter()  # unfinished ones, by who asked
        self._asked_for = 0
        self._last = 0

    def get(self, number: int) -> Task | None:
        """Return a task, finished ones for a while."""
        return self._tasks.get(number)

    def unfinished(self) -> list[Task]:
        """Return the tasks that are pending or running, oldest first."""
        return list(self._open.values())

    def count(self) -> int:
        """Return how many tasks are pending or running."""
        return len(self._open)

    def latest_asked(self, limit: int) -> list[Task]:
        """Return those that clients asked for, finished ones for a while, the latest first."""
        asked = (task for task in reversed(self._tasks.values()) if task.asker)
        return list(islice(asked, limit))

    def count_own(self) -> int:
        """Return how many of these nobody asked for."""
        return len(self._open) - self._asked_for

    def asked(self, client: int) -> Asked:
        """Return how many were asked for, in all and by a client. O(clients that did)."""
        known, most = self._state.clients, self._state.config.tasks_max
        uuid, count = max(self._asked.items(), key=lambda each: each[1], default=(b"", 0))
        return Asked(
            self._asked_for,
            max(1, most // ASKED_SHARE),
            self._asked[self._asker(client)],
            max(1, most // SHARE_OF_ONE),
            known[uuid].host if uuid in known else "a host that left",
            count,
        )

    def _asker(self, client: int) -> bytes:
        known = self._state.client_by_handle.get(client)
        return b"" if known is None else known.uuid

    def submit(
        self,
        kind: TaskKind,
        digest: NDArray[np.uint64],
        source: int | None,
        targets: list[int],
        client: int = 0,
    ) -> tuple[Status, int]:
        """Queue a task for the owner of the source replica; it starts when that fetches it.

        A copy to where copies lie already is done at once. `client` is who asks for it.
        """
        asker = self._asker(client)
        targets = list(dict.fromkeys(targets))
        status, row, chosen = self._check(digest, source, targets)
        if status == Status.REPLICA_ALREADY_EXISTS and kind == TaskKind.COPY:
            status, number = self._new(kind, row, targets[0], targets, 0, asker)
            if status == Status.OK:
                self._close(self._tasks[number], TaskState.SUCCESS, "it lies there already")
            return status, number
        if status != Status.OK:
            return status, 0
        segment = self._state.space.get(chosen)
        assert segment is not None
        return self._new(kind, row, chosen, targets, segment.owner, asker)

    def repair(self, row: int, source: int, target: int) -> tuple[Status, int]:
        """Queue a copy that makes a missing replica anew, of an object that may be copied now."""
        segment = self._state.space.get(source)
        assert segment is not None
        status, number = self._new(TaskKind.COPY, row, source, [target], segment.owner)
        if status == Status.OK:
            self._tasks[number].repair = True
        return status, number

    def fetch(self, client: int, limit: int) -> list[Task]:
        """Return up to `limit` tasks of this worker, which runs none while it asks.

        So what it was told before and has not finished is told again: the answer was lost, or the
        report. Carrying a task out twice writes the same bytes to the same place. Other tasks
        are pending and begin now.
        """
        mine = [task for task in self.unfinished() if task.worker == client]
        out = [task for task in mine if task.state == TaskState.PROCESSING][:limit]
        for task in mine:
            if len(out) >= limit:
                break
            if task.state == TaskState.PENDING:
                status = self._begin(task)
                if status == Status.OK:
                    out.append(task)
                else:
                    self._close(task, TaskState.FAILED, status.name)
        return out

    def finish(self, client: int, number: int, ok: bool, message: str = "") -> Status:
        """End a running task: its replicas become readable, or their space returns."""
        task = self._tasks.get(number)
        if task is None:
            return Status.TASK_NOT_FOUND
        if task.worker != client:
            return Status.ILLEGAL_CLIENT
        if task.state != TaskState.PROCESSING:
            return Status.NO_TASK
        gone = self._gone(task) if ok else ""
        done = ok and not gone
        self._end(task, done, writer_done=True)
        self._close(task, TaskState.SUCCESS if done else TaskState.FAILED, gone or message)
        return Status.REPLICA_IS_GONE if gone else Status.OK

    def expire(self) -> None:
        """Fail tasks whose worker is gone or silent for too long."""
        state = self._state
        for task in self.unfinished():
            silent = state.now - task.updated_ns >= state.config.task_timeout_ns
            if silent or state.closed[task.worker]:
                if task.state == TaskState.PROCESSING:
                    self._end(task, ok=False, writer_done=bool(state.closed[task.worker] == 2))
                self._close(task, TaskState.FAILED, "its worker did not finish in time")

    def abandon(self, row: int, segments: set[int], reason: str) -> None:
        """Fail the running task of an object that reads from or writes to lost segments."""
        for task in self.unfinished():
            touched = segments & {task.source, *task.targets}
            if task.row == row and task.state == TaskState.PROCESSING and touched:
                self._end(task, ok=False, writer_done=False)
                self._close(task, TaskState.FAILED, reason)

    def answers(self, index: int) -> bool:
        """Whether the owner of a segment is there to copy from it."""
        return answers(self._state, index)

    def _check(
        self, digest: NDArray[np.uint64], source: int | None, targets: list[int]
    ) -> tuple[Status, int, int]:
        """Return (status, row, source segment) for a wish to copy or move."""
        state = self._state
        row = int(state.table.find(as_words(digest.reshape(1, 2)))[0])
        if row < 0:
            return Status.NOT_FOUND, row, -1
        if state.rows["state"][row] != State.READABLE:
            return Status.REPLICA_NOT_FOUND, row, -1
        if int(state.rows["flags"][row]) & (c.TASK | c.UPSERT):
            return Status.BUSY, row, -1
        living = [
            s for s, _, life in replicas_of(state, row) if self._alive(s) and life == State.READABLE
        ]
        if not living:
            return Status.NOT_FOUND, row, -1
        if source is not None and source not in living:
            return Status.REPLICA_NOT_FOUND, row, -1
        if not targets or any(not self._placeable(t, row) for t in targets):
            return Status.SEGMENT_NOT_FOUND, row, -1
        if all(t in living for t in targets):
            return Status.REPLICA_ALREADY_EXISTS, row, -1
        if int(state.rows["replicas"][row]) + len(set(targets) - set(living)) > REPLICAS_MAX:
            return Status.INVALID_PARAMS, row, -1
        if any(self._still_read(t) for t in targets):
            return Status.NO_SPACE, row, -1
        if source is None:
            source = next((s for s in living if self.answers(s)), living[0])
        return Status.OK, row, source

    def _alive(self, segment: int) -> bool:
        return bool(self._state.space.alive[segment])

    def _placeable(self, index: int, row: int) -> bool:
        segment = self._state.space.get(index)
        if segment is None or segment.tier == Tier.COLD:  # only its owner writes there, in hauls
            return False
        home = self._state.home_of(int(self._state.cold["tenant"][row]))
        return segment.state == SegmentState.OK and segment.namespace == home

    def _still_read(self, index: int) -> bool:
        """Whether leases on an earlier life of the segment's memory still run."""
        segment = self._state.space.get(index)
        return segment is not None and segment.usable_from > self._state.now

    def _gone(self, task: Task) -> str:
        """Say what a task that was carried out has lost meanwhile, "" for nothing.

        A move whose target is gone must not give up its source, whenever the sweep gets there.
        """
        held = {s for s, _, _ in replicas_of(self._state, task.row)}
        if not self._alive(task.source) or task.source not in held:
            return "the source replica is gone, or its worker absent"
        if not any(self._alive(int(replica["segment"])) for replica in task.replicas):
            return "the segments of the new replicas are gone, or absent"
        return ""

    def _new(
        self,
        kind: TaskKind,
        row: int,
        source: int,
        targets: list[int],
        worker: int,
        asker: bytes = b"",
    ) -> tuple[Status, int]:
        if len(self._open) >= self._state.config.tasks_max or not self._may_ask(asker):
            return Status.TASK_LIMIT, 0
        self._last += 1
        now, digest = self._state.now, self._state.digests(np.array([row]))[0]
        tenant = int(self._state.cold["tenant"][row])
        task = Task(self._last, kind, digest, source, tuple(targets), worker, now, now, row, tenant)
        self._tasks[task.number] = self._open[task.number] = task
        if asker:
            task.asker = asker
            self._asked[asker] += 1
            self._asked_for += 1
        return Status.OK, task.number

    def _may_ask(self, asker: bytes) -> bool:
        """Whether one more may be asked for, by this client."""
        most = self._state.config.tasks_max
        return not asker or (
            self._asked_for < max(1, most // ASKED_SHARE)
            and self._asked[asker] < max(1, most // SHARE_OF_ONE)
        )

    def _begin(self, task: Task) -> Status:
        """Allocate the target replicas and flag the object."""
        state = self._state
        status, row, _ = self._check(task.digest, task.source, list(task.targets))
        if status != Status.OK:
            return status
        if task.repair and state.rows["replicas"][row] >= state.cold["wanted"][row]:
            return Status.REPLICA_ALREADY_EXISTS
        if task.repair and not self._within_quota(row):
            return Status.TENANT_QUOTA
        placed = self._place(task, row)
        if placed is None:
            return Status.NO_SPACE
        self._attach(row, placed)
        state.set_flag(row, Flag.TASK)
        state.replicas_most = max(state.replicas_most, int(state.rows["replicas"][row]))
        task.row, task.state, task.updated_ns = row, TaskState.PROCESSING, state.now
        task.replicas = np.array([(offset, where, 0) for where, offset in placed], REPLICA)
        return Status.OK

    def _within_quota(self, row: int) -> bool:
        """Whether the tenant of a row may have one more replica of it."""
        number = int(self._state.cold["tenant"][row])
        quota = self._state.tenant_by_number[number].quota_bytes
        after = int(self._state.tenant_use[number, 0]) + int(self._state.rows["size"][row])
        return quota is None or after <= quota

    def _place(self, task: Task, row: int) -> list[tuple[int, int]] | None:
        """Find (segment, offset) of each new replica; None when one of them has no room."""
        state = self._state
        held = {s for s, _, _ in replicas_of(state, row)}
        size = state.rows["size"][row : row + 1]
        placed: list[tuple[int, int]] = []
        state.space.return_freed()
        for target in task.targets:
            if target in held:
                continue
            segment = state.space.get(target)
            assert segment is not None
            offset = int(segment.allocator.allocate(size)[0])
            if offset >= 0:
                placed.append((target, offset))
            if offset < 0 or (task.repair and segment.used > spare_bytes(state, segment)):
                for where, taken in placed:
                    state.space.free(np.array([where]), np.array([taken]))
                return None
        return placed

    def _attach(self, row: int, placed: list[tuple[int, int]]) -> None:
        state = self._state
        for where, offset in placed:
            k.attach(
                state.words,
                np.array([row], np.int32),
                np.array([where], np.int16),
                np.array([offset], np.int64),
                int(state.cold["tenant"][row]),
            )
            self._set_life(row, where, State.WRITING)
        state.journal.mark(row)

    def _set_life(self, row: int, segment: int, life: State) -> None:
        """Set the state of the replica on `segment`, which is not the first of its chain."""
        link = int(self._state.rows["more"][row])
        while link >= 0:
            if self._state.overflow["segment"][link] == segment:
                self._state.overflow["state"][link] = life
                return
            link = int(self._state.overflow["next"][link])

    def _end(self, task: Task, ok: bool, *, writer_done: bool) -> None:
        """Make the new replicas readable and drop the source of a move, or undo the start."""
        state, row = self._state, task.row
        state.journal.mark(row)
        state.clear_flag(row, Flag.TASK)
        for replica in task.replicas:
            where = int(replica["segment"])
            if ok:
                self._set_life(row, where, State.READABLE)
            else:
                until = 0 if writer_done else state.now + state.config.put_release_ns
                drop_replica(state, row, where, until)
        if ok and task.kind == TaskKind.MOVE:
            lease_end = int(state.rows["lease_end"][row])
            drop_replica(state, row, task.source, lease_end if lease_end > state.now else 0)
        state.retier(np.array([row], np.int32))

    def _close(self, task: Task, outcome: TaskState, message: str) -> None:
        task.state, task.message, task.updated_ns = outcome, message, self._state.now
        del self._open[task.number]
        if task.asker:
            self._asked_for -= 1
            self._asked[task.asker] -= 1
            if not self._asked[task.asker]:
                del self._asked[task.asker]
        self._finished.append(task.number)
        if len(self._finished) > FINISHED_KEPT:
            del self._tasks[self._finished.popleft()]


def answers(state: ShardState, index: int) -> bool:
    """Whether the owner of a segment is there to copy from it."""
    segment = state.space.get(index)
    return (
        segment is not None
        and segment.state in (SegmentState.OK, SegmentState.DRAINING, SegmentState.DRAINED)
        and segment.owner in state.client_by_handle
    )


def drop_replica(state: ShardState, row: int, segment: int, until: int) -> None:
    """Unlink one replica of a living object; its space returns at `until` (0: now)."""
    state.journal.mark(row)
    size = int(state.rows["size"][row])
    offset = k.drop_replica(state.words, row, segment)
    if offset >= 0:
        extent = np.array([[segment], [offset], [size], [0], [until]], np.int64)
        state.space.free_or_quarantine(extent)


def spare_bytes(state: ShardState, segment: Segment) -> int:
    """Return how much of a segment may be in use after a repair.

    Eviction leaves this much: if copies filled the room that it makes, it would begin again.
    """
    config = state.config
    return int(max(0.0, config.high_watermark - config.eviction_ratio) * segment.nbytes)


def choose_target(state: ShardState, row: int, source: int, tried: int = 0) -> int | None:
    """Return a segment that could take a replica of `row` in place of the one on another.

    The emptiest of a few: of the tier of that one if there is room, of a lower one if there is some
    there, and else of one that has to evict for it. Who has `tried` in vain gets the next best.
    """
    replicas = replicas_of(state, row)
    held = {s for s, _, _ in replicas}
    hosts = {s.host for s in state.space.all() if s.index in held}
    homes, home = state.space.homes, state.home_of(int(state.cold["tenant"][row]))
    order = homes.order(state.now, DEFAULTS, home) + homes.further(state.now, DEFAULTS, home)
    order = [s for s in order if s.index not in held]
    tier, size = state.space.tiers[source], int(state.rows["size"][row])
    order.sort(
        key=lambda s: (s.nbytes - s.used < size, s.tier != tier, s.host in hosts, s.used / s.nbytes)
    )
    return order[tried % len(order)].index if order else None
