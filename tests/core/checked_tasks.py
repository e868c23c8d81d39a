"""Copies, moves and their tasks, called on a shard and its model; part of `Checked`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.core.records import SegmentState, Status
from mooncake_store.core.tasks import TaskKind, TaskState
from tests.core.lab import SECOND, digest_of, digests_of
from tests.core.model import OK, UNREADABLE
from tests.core.nouns import Task, Version
from tests.core.space import Extent, expect

if TYPE_CHECKING:
    from collections.abc import Sequence


class TaskCalls:
    """What `Checked` does about tasks; it brings shard, model, time and log."""

    shard: Any
    model: Any
    now: int
    note: Any
    stat: Any
    at: Any
    tick: Any
    asked: dict[int, bytes]
    """Who asked for a copy that has not ended, by its number."""

    def copy_end(self, client: int, number: int, ok: bool) -> None:
        self.note("copy_end", client, number, ok)
        task = self.model.tasks.get(number)
        status = self.shard.finish_task(self.now, client, number, ok)
        if task is None:
            expect(status != OK, f"end of unknown task {number}: {status!r}")
        elif client != task.client:
            expect(status == Status.ILLEGAL_CLIENT, f"end by a stranger: {status!r}")
        else:
            places = [task.source, *(extent.segment for extent in task.targets)]
            there, *targets = (self.model.segments[at].state not in UNREADABLE for at in places)
            arrived = there and any(targets)
            wanted = OK if arrived or not ok else Status.REPLICA_IS_GONE
            expect(status == wanted, f"end of task {number}: {status!r}, not {wanted!r}")
            self.model.copy_ends(number, ok=ok and arrived)

    def submit(
        self,
        key: int,
        targets: list[int],
        source: int | None = None,
        move: bool = False,
        client: int = 0,
    ) -> int | None:
        """Queue a copy or a move; it begins when the worker that is returned fetches it."""
        self.note("submit", "move" if move else "copy", key, source, targets, client)
        kind = TaskKind.MOVE if move else TaskKind.COPY
        digest = digests_of([key])[0]
        too_many = self._asks_too_much(client)
        status, number = self.shard.submit_task(self.now, kind, digest, targets, source, client)
        allowed = self.model.expect_copy(key, source, targets)
        if too_many:
            allowed = {Status.TASK_LIMIT if each == OK else each for each in allowed}
        expect(status in allowed, f"submit of {key}: {status!r}, allowed {allowed}")
        task = self.shard.tasks.get(number)
        if status != OK or task.state != TaskState.PENDING:
            return None
        if client:
            self.asked[number] = self.whose(client)
        expect(source in (None, task.source), f"{key} is taken from {task.source}, not {source}")
        return int(task.worker)

    def _asks_too_much(self, client: int) -> bool:
        """Whether one more is too many, of this client or of all."""
        most = self.model.config.tasks_max
        unfinished = {task.number for task in self.shard.tasks.unfinished()}
        self.asked = {number: who for number, who in self.asked.items() if number in unfinished}
        mine = sum(who == self.whose(client) for who in self.asked.values())
        too_many = mine >= most // 8 or len(self.asked) >= most // 2
        return len(unfinished) >= most or (client != 0 and too_many)

    def whose(self, client: int) -> bytes:
        """The program behind a handle, which has another one after it was started anew."""
        found = self.shard.client_by_handle.get(client)
        return b"" if found is None else bytes(found.uuid)

    def fetch(self, client: int, keys: Sequence[int], limit: int = 3) -> None:
        """A worker takes its tasks: submitted ones, and those that replace lost replicas."""
        self.note("fetch", client)
        by_digest = {digest_of(key): key for key in keys}
        told = self.shard.fetch_tasks(self.now, client, limit)
        tasks = [task for task in told if task.number not in self.model.tasks]
        for task in told[: len(told) - len(tasks)]:
            begun = self.model.tasks[task.number]
            places = [(int(r["segment"]), int(r["offset"])) for r in task.replicas]
            expect(begun.client == client, f"task {task.number} of {begun.client} told to {client}")
            expect(places == [(e.segment, e.offset) for e in begun.targets], f"{task} moved")
        self._check_repairs(tasks)
        for task in tasks:
            key = by_digest[tuple(task.digest.tolist())]
            self.note("  task", task.number, key, task.source, task.targets)
            item = self.model.readable(key)
            expect(item is not None and item.task is None, f"task of {key}: {item}")
            assert item is not None
            assert item.current is not None
            sources = [extent.segment for extent in self.model.alive(item.current)]
            expect(task.source in sources, f"task of {key} reads from {task.source}: {sources}")
            lacks = len(item.current.extents) < item.current.options.replicas
            expect(lacks or not task.repair, f"repair of {key}, which has all its replicas")
            size = item.current.size
            extents = [
                Extent(int(r["segment"]), int(r["offset"]), size, readable=False)
                for r in task.replicas
            ]
            move = task.kind == TaskKind.MOVE
            begun = Task(key, client, move, task.source, extents, self.now)
            self.model.copy_begins(task.number, begun)

    def _check_repairs(self, tasks: Sequence[Any]) -> None:
        """Repairs leave the room free that eviction leaves free."""
        asked_for = {target for task in tasks if not task.repair for target in task.targets}
        targets = {target for task in tasks if task.repair for target in task.targets}
        for info in self.shard.segments():
            if info.index in targets - asked_for:
                expect(info.used <= self._spare(info), f"a repair filled {info}")

    def _spare(self, info: Any) -> float:
        config = self.model.config
        return float((config.high_watermark - config.eviction_ratio) * info.nbytes)

    def mend(self, keys: Sequence[int], clients: Sequence[int]) -> None:
        """Workers do what there is to do until nothing is missing that they could make anew."""
        self.note("mend")
        idle = 0
        while idle < 30:  # longer than the longest pause between rounds of repair
            self.at(5 * SECOND)
            self.tick()
            for client in clients:
                self.fetch(client, keys, limit=64)
            idle = 0 if self.model.tasks else idle + 1
            for number, task in list(self.model.tasks.items()):
                self.copy_end(task.client, number, True)
        for item in list(self.model.objects.values()):
            version = item.current
            if version is None or item.writing is not None:
                continue
            lacks = len(version.extents) < version.options.replicas
            quota = self.model.tenants[item.tenant].quota
            after = self.shard.tenant_bytes(item.tenant) + version.size
            may = (quota is None or after <= quota) and self._could_mend(version)
            expect(not (lacks and may), f"{item} was not repaired")

    def _could_mend(self, version: Version) -> bool:
        """Whether a worker that is there could copy a generation to a segment with spare room."""
        model, held = self.model, {extent.segment for extent in version.extents}
        sources = [model.segments[extent.segment] for extent in model.alive(version)]
        if not any(s.owner in model.clients and s.state == SegmentState.OK for s in sources):
            return False
        return any(
            model.segments[info.index].state == SegmentState.OK
            and info.index not in held
            and model.segments[info.index].idle_until <= self.now
            and info.used + 2 * version.size + 4096 <= self._spare(info)
            and model.segments[info.index].space.gap_max(set()) >= version.size + model.slack
            for info in self.shard.segments()
        )

    def follow_tasks(self) -> None:
        """Follow the tasks that the core gave up: late ones, and those that lost a replica."""
        for number, task in list(self.model.tasks.items()):
            found = self.shard.tasks.get(number)
            if found is None or found.state == TaskState.FAILED:
                late = self.now - task.started >= self.model.config.task_timeout_ns
                current = self.model.objects[task.key].current
                touched = [task.source, *(extent.segment for extent in task.targets)]
                lost = current is None or any(
                    segment is not None and self.model.segments[segment].state == SegmentState.GONE
                    for segment in (*touched, *(extent.segment for extent in current.extents))
                )
                expect(late or lost, f"task {number} was given up for no reason: {found}")
                self.model.copy_ends(number, ok=False, fenced=False)

    # Audit
