"""All work of a pool that takes a while, as one list: drains, copies, moves, moves of shards.

    jobs = client._run(list_jobs(client._core))
    job = client._run(begin_drain(client._core, "10.0.0.6:0"))

Nothing is kept here: masters know how drains and moves of shards stand, and shards the copies and
moves of objects, the latest `TASKS_LISTED` of each. The id of a job says whom to ask about it. As
steps; no I/O. Cost: two rounds of requests, in the second one for each segment and shard.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal, TypeAlias

from msgspec.structs import replace

from mooncake_store.client.extension import CLUSTER, KeyBatch, anew, ask_all, ask_one, error_of
from mooncake_store.core.records import SegmentState, Status
from mooncake_store.core.tasks import TaskKind, TaskState
from mooncake_store.errors import InvalidArgumentError, NotFoundError
from mooncake_store.program.openapi import Shape
from mooncake_store.wire.cluster import (
    DRAIN,
    DRAIN_STATUS,
    STATUS,
    Drain,
    DrainReply,
    DrainStatusRequest,
    StatusRequest,
)
from mooncake_store.wire.hosts import HOSTS, MOVE, HostsRequest, Move
from mooncake_store.wire.overseeing import TASKS, TasksRequest
from mooncake_store.wire.shard import SUBMIT_TASK, TASK, SubmitTask, TaskRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.client.extension import Call, Core, Steps
    from mooncake_store.wire.cluster import ClusterStatus, SegmentEntry
    from mooncake_store.wire.hosts import MoveState
    from mooncake_store.wire.overseeing import TaskEntry
    from mooncake_store.wire.shard import TaskReply

__all__ = [
    "Job",
    "begin_copy",
    "begin_drain",
    "cancel_drain",
    "cancel_job",
    "drain_of",
    "find_job",
    "list_jobs",
]

State: TypeAlias = Literal["waiting", "running", "done", "failed", "cancelled"]

TASKS_LISTED = 256
SEGMENTS_ASKED = 256
"""Of how many segments the drains are listed; those that drain come first."""
_ID = re.compile(r"(drain|task|shard)-([0-9]{1,9})(?:-([0-9]{1,18}))?")
_TASK_STATES: dict[int, State] = {
    TaskState.PENDING: "waiting",
    TaskState.PROCESSING: "running",
    TaskState.FAILED: "failed",
    TaskState.SUCCESS: "done",
}
_MOVE_STATES: dict[str, State] = {
    "copying": "running",
    "handing over": "running",
    "done": "done",
    "failed": "failed",
}
_DRAINING = (SegmentState.DRAINING, SegmentState.DRAINED)
_REFUSALS = {
    Status.SEGMENT_NOT_FOUND: "a segment that it was to go to takes nothing now",
    Status.REPLICA_NOT_FOUND: "no copy of it lies where it was to be taken from",
    Status.REPLICA_ALREADY_EXISTS: "a copy of it lies there already",
}


class Job(Shape, frozen=True):
    """Work that takes a while, and how far it is."""

    id: str
    kind: Literal["drain", "copy", "move", "shard", "split"]
    state: State
    about: str
    """A segment, a key, or a shard."""
    to: list[str]
    namespace: str = ""
    """Of the object that is copied or moved."""
    moved_objects: int | None = None
    """Off a segment, so far..."""
    left_bytes: int | None = None
    """...and what lies there yet."""
    behind_words: int | None = None
    """What the copy of a shard lacks."""
    age_s: float | None = None
    message: str = ""

    @property
    def ended(self) -> bool:
        """Whether nothing more becomes of it."""
        return self.state not in ("waiting", "running")


def list_jobs(core: Core) -> Steps[list[Job]]:
    """Return what runs or ended a while ago; what runs comes first."""
    return anew(lambda until: _listed(core, until), core.until({}))


def _listed(core: Core, until: float) -> Steps[list[Job]]:
    first: list[Call] = [
        (CLUSTER, STATUS, STATUS.request.pack(StatusRequest())),
        (CLUSTER, HOSTS, HOSTS.request.pack(HostsRequest())),
    ]
    body = TASKS.request.pack(TasksRequest(TASKS_LISTED))
    found = yield from ask_all(
        [*first, *((shard, TASKS, body) for shard in range(core.shards))], until
    )
    status, hosts, *shards = found
    segments = sorted(status.segments, key=lambda each: each.state not in _DRAINING)
    segments = segments[:SEGMENTS_ASKED]
    calls: list[Call] = [
        (CLUSTER, DRAIN_STATUS, DRAIN_STATUS.request.pack(DrainStatusRequest(each.number)))
        for each in segments
    ]
    moved = range(core.shards) if len(hosts.hosts) > 1 else range(0)
    calls += [(CLUSTER, MOVE, MOVE.request.pack(Move(shard))) for shard in moved]
    replies = (yield from ask_all(calls, until)) if calls else []
    drains = zip(segments, replies, strict=False)
    jobs = [_drain_job(each, reply) for each, reply in drains if reply.state != "none"]
    moves = zip(moved, replies[len(segments) :], strict=True)
    jobs += [_shard_job(shard, reply) for shard, reply in moves if reply.state != "none"]
    if hosts.split:
        jobs.append(Job("split", "split", "failed", "all shards", [], message=hosts.split))
    names = {each.number: each.name for each in status.segments}
    jobs += [
        _task_job(shard, entry, names)
        for shard, reply in enumerate(shards)
        for entry in reply.tasks
    ]
    return sorted(jobs, key=lambda job: job.ended)


def find_job(core: Core, number: str) -> Steps[Job]:
    """Return how one job stands. Raises NotFoundError."""
    match = _ID.fullmatch(number)
    if match is not None and match[1] == "task" and match[3] is None:
        match = None
    if match is None:
        for job in (yield from list_jobs(core)):
            if job.id == number:
                return job
        raise _no_job(number)
    until, place = core.until({}), int(match[2])
    if match[1] == "drain":
        return (yield from drain_of(core, place, until))
    if match[1] == "shard":
        state = yield from ask_one(CLUSTER, MOVE, MOVE.request.pack(Move(place)), until)
        if state.state == "none":
            raise _no_job(number)
        return _shard_job(place, state)
    if place >= core.shards:
        raise _no_job(number)
    return (yield from _task(core, place, int(match[3]), until))


def begin_drain(core: Core, segment: str) -> Steps[Job]:
    """Begin to move everything off a segment, which takes nothing new from then on."""
    until = core.until({})
    found = yield from _segment(segment, until)
    body = DRAIN.request.pack(Drain(found.number))
    _check(segment, (yield from ask_one(CLUSTER, DRAIN, body, until)))
    return (yield from drain_of(core, found.number, until))


def drain_of(core: Core, number: int, until: float) -> Steps[Job]:
    """Return how the drain of a segment stands. Raises NotFoundError where there was none."""
    body = DRAIN_STATUS.request.pack(DrainStatusRequest(number))
    calls: list[Call] = [
        (CLUSTER, DRAIN_STATUS, body),
        (CLUSTER, STATUS, STATUS.request.pack(StatusRequest())),
    ]
    reply, status = yield from ask_all(calls, until)
    entry = next((each for each in status.segments if each.number == number), None)
    if entry is None or reply.state == "none":
        raise _no_job(f"drain-{number}")
    return _drain_job(entry, reply)


def begin_copy(
    core: Core, key: str | bytes, targets: Sequence[str], source: str | None = None
) -> Steps[Job]:
    """Begin to copy an object to segments, or to move it to one where `source` is named."""
    return anew(lambda until: _copy(core, key, targets, source, until), core.until({}))


def _copy(
    core: Core, key: str | bytes, targets: Sequence[str], source: str | None, until: float
) -> Steps[Job]:
    status = yield from _status(until)
    to = [_named(status, each).number for each in targets]
    start = -1 if source is None else _named(status, source).number
    kind = TaskKind.COPY if source is None else TaskKind.MOVE
    digest = KeyBatch.single(key, core.identity).digests.tobytes()
    shard = core.shard_of(digest)
    body = SUBMIT_TASK.request.pack(SubmitTask(int(kind), digest, tuple(to), start))
    reply: TaskReply = yield from ask_one(shard, SUBMIT_TASK, body, until)
    if reply.status:
        why = _REFUSALS.get(Status(reply.status))
        if why is not None:
            raise InvalidArgumentError(
                f"the object cannot be {'copied' if source is None else 'moved'}: {why}",
                key=key,
                operation=kind.name.lower(),
                advice="`mooncake stat` says where it lies, `mooncake status` what takes objects",
            )
        raise error_of(reply.status, key=key, operation=kind.name.lower())
    job = _replied(shard, reply)
    text = key if isinstance(key, str) else key.decode(errors="backslashreplace")
    return replace(job, about=text, to=list(targets), namespace=core.namespace)


def cancel_job(core: Core, number: str) -> Steps[Job]:
    """Stop a drain; what was moved stays where it is. Raises InvalidArgumentError for others."""
    job = yield from find_job(core, number)
    if job.kind != "drain" or job.ended:
        why = "it has ended" if job.ended else f"a {job.kind} is carried out once it was asked for"
        raise InvalidArgumentError(
            f"job {number} cannot be stopped: {why}",
            operation="cancel",
            advice="only a drain that runs can be",
        )
    return (yield from cancel_drain(core, job.about))


def cancel_drain(core: Core, segment: str) -> Steps[Job]:
    """Stop the drain of a segment; what was moved stays where it is."""
    until = core.until({})
    found = yield from _segment(segment, until)
    body = DRAIN.request.pack(Drain(found.number, cancel=True))
    _check(segment, (yield from ask_one(CLUSTER, DRAIN, body, until)))
    return (yield from drain_of(core, found.number, until))


def _status(until: float) -> Steps[ClusterStatus]:
    body = STATUS.request.pack(StatusRequest())
    found: ClusterStatus = yield from ask_one(CLUSTER, STATUS, body, until)
    return found


def _segment(name: str, until: float) -> Steps[SegmentEntry]:
    return _named((yield from _status(until)), name)


def _named(status: ClusterStatus, name: str) -> SegmentEntry:
    """Return a segment by its name. Raises NotFoundError, InvalidArgumentError."""
    found = [entry for entry in status.segments if entry.name == name]
    if not found:
        raise NotFoundError(
            f"no segment is named {name!r}", advice="`mooncake status` lists segments"
        )
    if len(found) > 1:
        raise InvalidArgumentError(
            f"{len(found)} segments are named {name!r}",
            advice="give the workers that lend them names of their own",
        )
    return found[0]


def _check(segment: str, reply: DrainReply) -> None:
    if reply.status:
        raise NotFoundError(
            f"segment {segment!r} has gone: {reply.message}", advice="look at `mooncake status`"
        )


def _task(core: Core, shard: int, number: int, until: float) -> Steps[Job]:
    """Return how a copy or move stands: in full to an admin, to others who may see it in part."""
    body = TASK.request.pack(TaskRequest(number))
    reply: TaskReply = yield from ask_one(shard, TASK, body, until)
    if reply.status:
        raise _no_job(f"task-{shard}-{number}")
    return _replied(shard, reply)


def _replied(shard: int, reply: TaskReply) -> Job:
    return Job(
        f"task-{shard}-{reply.number}",
        _kind(reply.kind),
        _TASK_STATES[reply.state],
        "",
        [],
        age_s=reply.created_ms_ago / 1e3,
        message=reply.message,
    )


def _kind(number: int) -> Literal["copy", "move"]:
    return "move" if number == TaskKind.MOVE else "copy"


def _task_job(shard: int, entry: TaskEntry, names: dict[int, str]) -> Job:
    return Job(
        f"task-{shard}-{entry.number}",
        _kind(entry.kind),
        _TASK_STATES[entry.state],
        entry.name.decode(errors="backslashreplace"),
        [names.get(each, f"segment {each}") for each in entry.targets],
        entry.namespace,
        age_s=entry.created_ms_ago / 1e3,
        message=entry.message,
    )


def _drain_job(entry: SegmentEntry, reply: DrainReply) -> Job:
    state: State = "failed"
    if reply.state in ("running", "done", "cancelled"):
        state = reply.state  # type: ignore[assignment]  # it is one of these words
    return Job(
        f"drain-{entry.number}",
        "drain",
        state,
        entry.name,
        [],
        moved_objects=reply.moved,
        left_bytes=entry.used_bytes,
        message=reply.message,
    )


def _shard_job(shard: int, state: MoveState) -> Job:
    stage = state.state if state.state not in ("done", "failed") else ""
    return Job(
        f"shard-{shard}",
        "shard",
        _MOVE_STATES[state.state],
        f"shard {shard}",
        [],
        behind_words=state.behind,
        message=state.why or stage,
    )


def _no_job(number: str) -> NotFoundError:
    return NotFoundError(
        f"there is no job {number!r}",
        operation="job",
        advice="`mooncake jobs` lists what runs and what ended a while ago",
    )
