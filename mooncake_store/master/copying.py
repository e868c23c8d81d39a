"""Copies and moves: who asks for one, how it stands, and the workers that carry it out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.records import Status
from mooncake_store.core.tasks import TaskKind
from mooncake_store.master.answers import Answer, answers
from mooncake_store.master.bounds import MESSAGE_CHARS_MAX
from mooncake_store.master.words import digest_of
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire import shard as wire
from transfer_engine.errors import InvalidArgumentError, OverloadedError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.tasks import Asked, Task
    from mooncake_store.master.clients import Peer
    from mooncake_store.master.site import Site

__all__ = ["Copying"]

TASKS_PER_FETCH = 256
TASKS_RETRY_S = 0.5
"""Workers ask for tasks several times in it."""
HAULS_PER_FETCH = wire.BATCH_MAX // wire.HAUL_OBJECTS_MAX


def _side_by_side(columns: list[NDArray[Any]], kind: type) -> NDArray[Any]:
    return np.concatenate(columns) if columns else np.empty(0, kind)


_NO_HAULS: dict[str, Any] = {
    name: np.empty(0, dtype)
    for name, dtype in (
        ("haul", np.int64), ("source", np.int16), ("source_offset", np.int64),
        ("target", np.int16), ("target_offset", np.int64), ("size", np.int64),
        ("checksum", np.uint64), ("namespace", np.int32),
    )
} | {"namespaces": []}  # fmt: skip


def _too_many(asked: Asked) -> OverloadedError:
    """Say whose copies and moves are too many."""
    if asked.mine >= asked.most_of_one:
        what = f"{asked.mine} copies and moves that this client asked for have not ended, at most "
        what += f"{asked.most_of_one} of one client may wait"
    else:
        what = f"{asked.total} copies and moves that clients asked for have not ended, at most "
        what += f"{asked.most} may wait; a client at {asked.host} asked for {asked.of_host}"
    refusal = OverloadedError(
        what, operation=wire.SUBMIT_TASK.name, advice="ask again when some of them have ended"
    )
    refusal.retry_after_s = TASKS_RETRY_S
    return refusal


class Copying:
    """Answers what is asked of tasks."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._shard = site.shard
        self._now = site.now

    @answers(wire.SUBMIT_TASK, changes=True)
    def submit_task(self, peer: Peer, request: Any) -> Answer:
        """Queue a copy or a move."""
        digest, targets = digest_of(request.digest), list(request.targets)
        source = None if request.source < 0 else request.source
        kind = TaskKind(request.kind) if request.kind in (0, 1) else None
        if kind is None or not targets or (kind == TaskKind.MOVE and len(targets) > 1):
            raise InvalidArgumentError("a copy (0) has targets, a move (1) has exactly one")
        if peer.account is not None:
            copies = len(targets) if kind == TaskKind.COPY else 0
            peer.account.check_task(digest, copies, peer.address)
        status, number = self._shard.submit_task(
            self._now(), kind, digest, targets, source, peer.handle
        )
        if status == Status.OK and peer.account is not None:
            peer.account.asked(number)
        if status == Status.TASK_LIMIT:
            raise _too_many(self._shard.tasks.asked(peer.handle))
        return wire.TaskReply(int(status), number) if status else self._described(number)

    @answers(wire.TASK)
    def task(self, peer: Peer, request: Any) -> Answer:
        """Say how a task stands."""
        return self._described(request.number)

    def _described(self, number: int) -> wire.TaskReply:
        found = self._shard.tasks.get(number)
        if found is None:
            return wire.TaskReply(int(Status.TASK_NOT_FOUND), number)
        now = self._now()
        return wire.TaskReply(
            0,
            number,
            int(found.kind),
            int(found.state),
            found.message,
            max(0, now - found.created_ns) // MILLISECOND_NS,
            max(0, now - found.updated_ns) // MILLISECOND_NS,
        )

    @answers(wire.FETCH_TASKS, changes=True, idle=wire.TaskList(()))
    def fetch_tasks(self, peer: Peer, request: Any) -> Answer:
        """Hand out work of the asking worker."""
        limit = max(0, min(request.limit, TASKS_PER_FETCH))
        tasks = self._shard.fetch_tasks(self._now(), peer.handle, limit)
        work = tuple(work for task in tasks if (work := self._work(peer, task)) is not None)
        return wire.TaskList(work)

    def _work(self, peer: Peer, task: Task) -> wire.TaskWork | None:
        """Say what a worker has to copy; a task whose source is gone ends here."""
        now, bases = self._now(), self._site.bases
        found = self._shard.stat(now, task.digest)
        at = [] if found is None else [o for s, o, _ in found.replicas if s == task.source]
        if found is None or not at:
            self._shard.finish_task(now, peer.handle, task.number, False, "the source is gone")
            return None
        unsure = self._shard.space.is_unsure(task.source, found.created_ns)
        return wire.TaskWork(
            task.number,
            found.size,
            (task.source, at[0] + int(bases[task.source])),
            tuple(
                (int(r["segment"]), int(r["offset"]) + int(bases[r["segment"]]))
                for r in task.replicas
            ),
            found.checksum if unsure else None,
        )

    @answers(wire.FINISH_TASK, changes=True)
    def finish_task(self, peer: Peer, request: Any) -> Answer:
        """End a task of the asking worker."""
        status = self._shard.finish_task(
            self._now(),
            peer.handle,
            request.number,
            request.ok,
            request.message[:MESSAGE_CHARS_MAX],
        )
        return wire.TaskOutcome(int(status))

    @answers(wire.FETCH_HAULS, changes=True, idle=_NO_HAULS)
    def fetch_hauls(self, peer: Peer, request: Any) -> Answer:
        """Hand out batches of copies between tiers to the asking worker."""
        hauls = self._shard.fetch_hauls(
            self._now(),
            peer.handle,
            int(request.device),
            max(0, min(request.limit, HAULS_PER_FETCH)),
        )
        bases = self._site.bases
        namespaces, whose = self._shard.owners(_side_by_side([h.rows for h in hauls], np.int32))
        sizes = [len(haul.sizes) for haul in hauls]

        return {
            "haul": np.repeat(np.array([haul.number for haul in hauls], np.int64), sizes),
            "source": np.repeat(np.array([haul.source for haul in hauls], np.int16), sizes),
            "source_offset": _side_by_side(
                [haul.source_offsets + bases[haul.source] for haul in hauls], np.int64
            ),
            "target": np.repeat(np.array([haul.target for haul in hauls], np.int16), sizes),
            "target_offset": _side_by_side(
                [haul.target_offsets + bases[haul.target] for haul in hauls], np.int64
            ),
            "size": _side_by_side([haul.sizes for haul in hauls], np.int64),
            "checksum": _side_by_side([haul.checksums for haul in hauls], np.uint64),
            "namespace": whose,
            "namespaces": [name.encode() for name in namespaces],
        }

    @answers(wire.FINISH_HAUL, changes=True)
    def finish_haul(self, peer: Peer, request: Any) -> Answer:
        """End a batch of the asking worker."""
        number, statuses = request
        return {"status": int(self._shard.finish_haul(self._now(), peer.handle, number, statuses))}

    @answers(wire.HELD)
    def held(self, peer: Peer, request: Any) -> Answer:
        """Say where on a segment of the asking worker objects begin."""
        number, offsets = request
        segment = self._shard.space.get(number)
        if segment is None:
            return {"held": np.ones(len(offsets), np.uint8)}
        places = offsets - self._site.bases[number]
        found = self._shard.held(peer.handle, number, places).astype(np.uint8)
        found[(places < 0) | (places >= segment.nbytes)] = wire.ELSEWHERE
        return {"held": found}
