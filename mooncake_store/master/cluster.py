"""The cluster service: which segments there are, whose they are, and how clients reach the shards.

The master keeps no metadata of objects; it hands every segment out to all shards, one slice each,
and takes it back from all when its worker leaves, dies or is replaced by a newer run. While a
worker is absent its segments keep their numbers, and the shards what lies there. A segment's number
is the master's and equal on all shards (`roster`), so whoever still holds an old number holds no
new segment by mistake.

Changes are made one after the other (a lock), each in a task of its own, so that a peer that goes
away in the middle leaves nothing half done. A change costs one round trip to the shards, and where
the registers are kept a write of them: before the shards hear of a new segment, and after they
heard that one is gone. So a master that is started again knows of all that shards may know, and
agrees with them on the rest (`reconcile`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from mooncake_store.core.records import SegmentState, Status
from mooncake_store.master.all_shards import AllShards, numbers_in, refusals, state_of, states_in
from mooncake_store.master.bounds import check_mount
from mooncake_store.master.doors import acceptable, check_descriptors, doors_of, well_named
from mooncake_store.master.lent import lend_as
from mooncake_store.master.lineage import Lineage
from mooncake_store.master.overview import Overview
from mooncake_store.master.register_news import RegisterNews
from mooncake_store.master.registers import BEGIN_S, RegisterFile
from mooncake_store.master.roster import LentSegment, LentWorker, Roster
from mooncake_store.master.standbys import Standbys
from mooncake_store.program.logs import StateLog
from mooncake_store.units import MILLISECOND_NS, SECOND_NS
from mooncake_store.wire import cluster as wire
from mooncake_store.wire.standby import DROP, REGISTERS, RegistersReply
from transfer_engine.errors import StoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence

    from mooncake_store.clock import Clock
    from mooncake_store.master.liveness import Liveness
    from mooncake_store.master.overview import ClusterFacts
    from mooncake_store.master.registers import Registers
    from mooncake_store.master.seats import Seats
    from mooncake_store.wire.standby import RegistersRequest
    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.registry import Operation

__all__ = ["Cluster"]

log = logging.getLogger(__name__)
T = TypeVar("T")

SWEEP_S = 0.05
READERS_NS = 2 * SECOND_NS
"""A shard sweeps three million rows in that time, on a machine that is not busy."""
DRAIN_POLL_S = 0.02
AGREE_S = 1.0
TAKEN_S = 2.0
"""How long a mount waits for a standby to write it down; whoever mounts waits for 5 s at most."""


class Cluster:
    """Workers and segments; belongs to one event loop. `begin` makes it answer."""

    def __init__(self, clock: Clock, seats: Seats, standbys: Standbys | None = None) -> None:
        self._seats = seats
        self._standbys = standbys or Standbys()
        self._now = clock.now_ns
        self._started_ns = clock.now_ns()
        self._overview: Overview | None = None
        self._shards = AllShards(seats)
        self._liveness: Liveness | None = None
        self._roster = Roster()
        self._file = RegisterFile()
        self._life = 0
        self._lineage = Lineage()
        self.lock = asyncio.Lock()
        """Held while workers or segments change."""
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.Task[None] | None = None
        self._agreeing: asyncio.Task[None] | None = None
        self._states = StateLog(log)
        self._news = RegisterNews()

    @property
    def handlers(self) -> dict[Operation[Any, Any], Callable[[Connection, Any], Any]]:
        """What answers each request for segments and workers."""
        return {
            wire.MAP: lambda *asked: self._known.map_for(*asked),
            wire.MOUNT: self._begin_mount,
            wire.UNMOUNT: lambda _, request: self._apart(self._unmount(request)),
            wire.SEGMENTS: lambda _, request: self._known.list_segments(request),
            wire.STATUS: self._status,
            wire.DRAIN: lambda _, request: self._apart(self._drain(request)),
            wire.DRAIN_STATUS: self._drain_status,
            REGISTERS: self._registers,
            DROP: lambda _, request: self._standbys.drop(request),
        }

    @property
    def begun(self) -> bool:
        """Whether all shards are there, and everybody is answered."""
        return self._overview is not None

    # -- life

    def recall(self, file: RegisterFile, found: str = "", place: str = "") -> int | None:
        """Begin with what the run before wrote down, if it did, and write changes there.

        `found` tells the directory from a copy as the run before left it, `place` as it is now.
        Returns the life that it is about. Raises ConfigError for what cannot be read or is not
        understood.
        """
        self._file, registers = file, file.read()
        self._lineage = Lineage(place)
        if registers is None:
            return None
        self._seats.restore(registers.hosts)
        self._lineage.go_on(registers, found)
        self._roster.restore(registers)
        self._life = registers.life
        return registers.life

    @property
    def run(self) -> int:
        """Which run of the master this is."""
        return self._lineage.run

    def bases(self, shard: int, shards: int) -> list[tuple[int, int]]:
        """Return where in each segment the slice of a shard begins: (number, base)."""
        return self._roster.bases(shard, shards)

    async def begin(self, facts: ClusterFacts, liveness: Liveness) -> None:
        """Agree with the shards, which are up, and answer requests from then on.

        Workers of the run before are alive, and watched, from now; nothing new is put with them
        until they have mounted. Raises UnavailableError where what there is cannot be written down:
        others would hear of a life, or a run, that the next run forgets.
        """
        roster, lineage = self._roster, self._lineage
        if facts.life != self._life:
            roster.forget()  # it was lent to other contents; whoever lent it mounts again
            lineage.begin_anew()
        if lineage.moved:
            log.warning(
                "the state directory is not where it was written, or was put back, or this host "
                "was started anew: it may be older than what its workers hold, so nothing is read "
                "there until they have mounted"
            )
        self._liveness, self._life = liveness, facts.life
        await self.reconcile()
        for worker in list(roster.workers.values()):
            if not worker.numbers:
                del roster.workers[worker.uuid]
        await self.keep(BEGIN_S)
        beside, distant = self._seats.beside(), self._seats.distant()
        self._standbys.begin(AllShards(beside), distant)
        self._news.expect(await self._standbys.counting(), TAKEN_S)
        self._overview = Overview(
            facts, lineage, roster, self._seats, self._shards, liveness, self._standbys
        )
        for worker in roster.workers.values():
            specs = [roster.segments[number].spec for number in sorted(worker.numbers)]
            self._watch(worker, specs)

    async def stop(self) -> None:
        """Give up what is under way. Idempotent."""
        self._news.give_up()
        await self._standbys.stop()
        while self._tasks:  # one that fails meanwhile asks for another
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._file.settle()

    # -- requests

    @property
    def _known(self) -> Overview:
        assert self._overview is not None
        return self._overview

    async def _status(
        self, connection: Connection, request: wire.StatusRequest
    ) -> wire.ClusterStatus:
        uptime_ms = (self._now() - self._started_ns) // MILLISECOND_NS
        if self._overview is None:
            return wire.ClusterStatus(False, "", os.getpid(), uptime_ms, (), (), ())
        return await self._overview.status(connection, uptime_ms)

    async def _registers(self, connection: Connection, request: RegistersRequest) -> RegistersReply:
        """Tell a standby what is written down here, when that is another than it has."""
        if not self._file.keeps:
            raise UnavailableError(
                "this master keeps nothing, so nothing can be copied",
                operation="registers",
                advice="start it with --state DIRECTORY",
            )
        self._standbys.met(connection, request.standby, request.address)
        facts, run = self._known.facts, self._lineage.run
        version = request.version if request.run == run else 0
        self._news.heard(connection, version, request.standby)
        if request.run == run:
            await self._news.after(request.version, request.wait_ms / 1000)
        registers = self._registers_now()
        return RegistersReply(
            run,
            self._news.version,
            msgspec.json.encode(registers),
            facts.cluster,
            facts.secret.hex(),
            self._known.cluster_map(connection, wire.MapRequest()).shards,
            facts.objects_max,
        )

    # -- changes

    async def _apart(self, change: Coroutine[Any, Any, T]) -> T:
        """Run a change to its end, whatever becomes of the peer that asked for it."""
        return await asyncio.shield(self._spawn(change))

    def _spawn(self, change: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(change)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a change of the cluster failed: %s", task.exception())
            # Some shards may have heard of it, and others not.
            idle = self._agreeing is None or self._agreeing.done()
            if idle and isinstance(task.exception(), StoreError):
                self._agreeing = self._spawn(self.reconcile(AGREE_S))

    async def keep(self, within_s: float | None = None) -> None:
        """Write down what there is now. Raises UnavailableError where that cannot be in time."""
        self._news.changed()
        if self._file.keeps:
            await self._file.keep(self._registers_now(), within_s)

    async def announce(self) -> None:
        """Tell the standby that could lead in place of this master what there is now.

        Raises UnavailableError where it may not have heard; nobody else is to act on it then.
        """
        self._news.changed()
        for number in await self._standbys.counting():
            if not await self._news.taken_by(number, TAKEN_S):
                raise UnavailableError(
                    f"the standby {number:016x} does not hear which host leads what, and it may "
                    "lead in place of this master",
                    advice="see `mooncake standbys`",
                )

    def _registers_now(self) -> Registers:
        return self._roster.registers(self._life, self._lineage, self._seats.owners)

    def _begin_mount(self, asker: Connection, request: wire.Mount) -> Awaitable[wire.Mounted]:
        if request.run not in (0, self._lineage.run):
            raise UnavailableError(
                f"the master was started again before worker {request.name} mounted",
                operation="mount",
                advice="ask for its map again",
            )
        check_descriptors(request.segments, self._known.facts.networks)
        return self._apart(self._mount(asker, request))

    async def _mount(self, asker: Connection, request: wire.Mount) -> wire.Mounted:
        if not well_named(request.uuid, request.name):
            return _refused(request, Status.INVALID_PARAMS)
        workers = self._roster.workers
        async with self.lock:
            worker = workers.get(request.uuid)
            check_mount(request, self._roster.idle() if worker is None else None)
            if worker is not None and worker.epoch > request.epoch:
                return _refused(request, Status.ILLEGAL_CLIENT)
            if request.disowned:
                log.warning(
                    "worker %s was mounted last in the run %016x, from which this state does not "
                    "come: it is older than that worker's memory, so what it says of it goes",
                    request.name,
                    request.disowned,
                )
            if worker is not None and worker.epoch < request.epoch:
                await self._replace_run(worker, request)
            elif worker is not None and not (worker.met and worker.state == "alive"):
                await self._resume_run(worker, request)
            if worker is None:
                worker = LentWorker(request.uuid, request.epoch, request.name, request.host)
            lend_as(asker, self._roster, worker, request)
            try:
                results = await self._mount_all(worker, request.segments)
                # Not before: who sees it alive counts on its memory.
                worker.state, worker.met = "alive", True
            finally:
                if worker.numbers or not request.segments:
                    workers[worker.uuid] = worker
                else:
                    workers.pop(worker.uuid, None)  # nothing of it was accepted
            if worker.uuid in workers:
                self._watch(worker, request.segments)
            self._roster.drop_old_workers()
        return wire.Mounted(
            tuple(int(status) for status, _ in results), tuple(number for _, number in results)
        )

    def _watch(self, worker: LentWorker, specs: Sequence[wire.SegmentSpec]) -> None:
        """Count a worker as alive from now on."""
        doors = doors_of(specs, self._known.facts.networks)
        self._known.liveness.watch(worker.uuid, worker.epoch, doors, keeps=worker.keeps)
        numbers = ", ".join(map(str, sorted(worker.numbers)))
        self._states.change(f"worker {worker.name}", "alive", f"segments {numbers}")

    async def _replace_run(self, worker: LentWorker, request: wire.Mount) -> None:
        """Let a newer run take over: segments it does not bring died with the old one."""
        log.info("worker %s: a newer run takes over", worker.name)
        brought, segments = {spec.uuid for spec in request.segments}, self._roster.segments
        await self._take_away(n for n in worker.numbers if segments[n].spec.uuid not in brought)
        worker.epoch = request.epoch

    async def _resume_run(self, worker: LentWorker, request: wire.Mount) -> None:
        """Let a run go on that was silent: what it does not bring once more is there as well."""
        brought, segments = {spec.uuid for spec in request.segments}, self._roster.segments
        for number in sorted(worker.numbers):
            if segments[number].spec.uuid not in brought:
                await self._turn(number, "ok")

    async def _mount_all(
        self, worker: LentWorker, specs: Iterable[wire.SegmentSpec]
    ) -> list[tuple[int, int]]:
        """Return (status, number) of each segment."""
        try:
            admitted = [self._admit(worker, spec) for spec in specs]
            await self.keep()
            # The shards may tell a standby at once what they hear, and it must not know less.
            if not await self._news.taken(TAKEN_S):
                log.warning("a standby has not taken what worker %s lends", worker.name)
            return [
                found if isinstance(found, tuple) else await self._mount_one(found)
                for found in admitted
            ]
        finally:
            self._roster.withdraw()

    def _admit(self, worker: LentWorker, spec: wire.SegmentSpec) -> LentSegment | tuple[int, int]:
        """Announce a segment, or return (status, number) of one that is refused."""
        if not acceptable(spec) or not self._shards.can_share(spec.nbytes):
            return Status.INVALID_PARAMS, -1
        known = self._roster.find(spec.uuid)
        if known is not None and known.worker is not worker:
            return Status.ILLEGAL_CLIENT, -1
        if known is not None and (known.spec.nbytes, known.spec.name) != (spec.nbytes, spec.name):
            return Status.SEGMENT_ALREADY_EXISTS, known.number
        return self._roster.announce(worker, spec) or (Status.NO_SPACE, -1)

    async def _mount_one(self, segment: LentSegment) -> tuple[int, int]:
        """Return (status, number) of an announced segment."""
        replies = await self._shards.hand_out(segment)
        refused = refusals(replies)
        if not refused:
            segment.state = state_of(replies, SegmentState.OK)
            self._roster.enter(segment)
            return Status.OK, segment.number
        if segment.number not in self._roster.segments:
            await self._forget_number(segment.number)
        return refused[0], -1

    async def _take_away(self, numbers: Iterable[int]) -> int:
        """Unmount segments everywhere; return for how many ms readers may hold their memory."""
        busy_ms = 0
        for number in sorted(numbers):
            self._roster.remove(number)
            busy_ms = max(busy_ms, await self._forget_number(number))
        # Where this fails it is said, and the next run hears from the shards what is gone.
        with contextlib.suppress(UnavailableError):
            await self.keep()
        return busy_ms

    async def _forget_number(self, number: int) -> int:
        self._roster.leaving.add(number)
        replies = await self._shards.tell(number, "gone")
        if self._sweeper is None or self._sweeper.done():
            self._sweeper = self._spawn(self._sweep())
        return max((reply.busy_ms for reply in replies), default=0)

    async def _sweep(self) -> None:
        """Free numbers that no shard knows any more."""
        leaving = self._roster.leaving
        while leaving:
            await asyncio.sleep(SWEEP_S)
            asked = set(leaving)
            leaving -= asked - numbers_in(await self._shards.slices())

    async def reconcile(self, after_s: float = 0.0) -> None:
        """Agree with the shards on what there is, when some of them may not have heard of it.

        A segment that not all of them have is of no use any more, and of what only shards know
        nobody here knows whose it is: both go. One whose worker has a newer run than is known here
        waits, hidden, until that mounts.
        """
        roster, liveness = self._roster, self._liveness
        if liveness is None:
            return  # `begin` does it when all are up
        await asyncio.sleep(after_s)
        async with self.lock:
            told = await self._shards.slices()
            strange = numbers_in(told) - roster.segments.keys()
            states, lost = states_in(told), []
            for number, segment in sorted(roster.segments.items()):
                there = states.get(number, [])
                gone = len(there) < len(told) or segment.worker.state == "gone"
                refused = [] if gone else refusals(await self._shards.hand_out(segment))
                if gone or set(refused) - {Status.ILLEGAL_CLIENT}:
                    lost.append(number)
                elif refused:
                    # Shards know a newer run of its worker: what is written down here is older.
                    await self._turn(number, "absent")
                else:
                    await self._go_on(segment, set(there))
            if lost:
                log.warning("segments %s are given up: not all shards have them", lost)
            owners = {roster.segments[number].worker.uuid for number in lost}
            await self._take_away(lost)
            for uuid in owners:
                liveness.call_back(uuid)  # or it would take its memory for lent
            for number in sorted(strange):
                await self._forget_number(number)

    async def _go_on(self, segment: LentSegment, states: set[int]) -> None:
        """Take a segment over in the state that its slices are in."""
        segment.state = SegmentState.OK
        if SegmentState.DRAINING in states:
            segment.state = SegmentState.DRAINING
            await self._shards.tell(segment.number, "drain")
        elif states == {SegmentState.DRAINED}:
            segment.state = SegmentState.DRAINED
        if not segment.worker.met:
            # It may be lent to another line of this cluster by now, so nothing is put there.
            hidden = self._lineage.moved or SegmentState.ABSENT in states
            await self._turn(segment.number, "absent" if hidden else "suspect")
        elif segment.worker.state in ("suspect", "absent"):
            await self._turn(segment.number, segment.worker.state)

    async def _unmount(self, request: wire.Unmount) -> wire.Outcome:
        worker = self._roster.workers.get(request.uuid)
        if worker is None or worker.epoch != request.epoch:
            return wire.Outcome(int(Status.ILLEGAL_CLIENT), "this run of a worker is not mounted")
        numbers = []
        segments = self._roster.segments
        for uuid in request.segments or [segments[n].spec.uuid for n in worker.numbers]:
            number = self._roster.number_of(uuid)
            if number < 0:
                return wire.Outcome(int(Status.SEGMENT_NOT_FOUND), f"no segment {uuid.hex()}")
            if number not in worker.numbers:
                return wire.Outcome(int(Status.ILLEGAL_CLIENT), "the segment is another worker's")
            numbers.append(number)
        message = ""
        if request.grace_ms > 0:
            message = await self._empty(numbers, request.grace_ms)
        async with self.lock:
            left = {number for number in numbers if number in segments}
            busy_ms = await self._take_away(left)
            if not worker.numbers and self._roster.workers.get(worker.uuid) is worker:
                del self._roster.workers[worker.uuid]
                self._known.liveness.forget(worker.uuid)
                self._states.change(f"worker {worker.name}", "left")
                self._states.forget(f"worker {worker.name}")
        if busy_ms:
            busy_ms = await self._readers_left_ms(numbers)
        return wire.Outcome(0, message, busy_ms)

    async def _readers_left_ms(self, numbers: list[int]) -> int:
        """For how many ms readers may hold segments that are gone, without leases given back.

        Those count until every shard has swept its rows, which is waited for, but not for long.
        """
        deadline = self._now() + READERS_NS
        while True:
            told = [await self._shards.tell(number, "query") for number in numbers]
            replies = [reply for replies in told for reply in replies]
            busy_ms = max((reply.busy_ms for reply in replies), default=0)
            swept = not any(reply.state == SegmentState.GONE for reply in replies)
            if swept or not busy_ms or self._now() >= deadline:
                return busy_ms
            await asyncio.sleep(SWEEP_S)

    async def _empty(self, numbers: list[int], grace_ms: int) -> str:
        """Move everything off segments until they are empty or the time is over."""
        deadline = self._now() + grace_ms * MILLISECOND_NS
        for number in numbers:
            async with self.lock:
                if number in self._roster.segments:
                    await self._turn(number, "drain", grace_ms)
        waiting = set(numbers)
        message = ""
        while waiting and self._now() < deadline:
            await asyncio.sleep(DRAIN_POLL_S)
            for number in list(waiting):
                replies = await self._shards.tell(number, "query")
                failed = [reply.message for reply in replies if reply.drain == "failed"]
                if all(reply.state in (0, SegmentState.GONE) for reply in replies):
                    waiting.discard(number)
                elif failed:
                    # What is left cannot be moved, so waiting longer would change nothing.
                    message = failed[0]
                    waiting.discard(number)
        return message or ("the time was over before all was moved" if waiting else "")

    # -- liveness

    def changed(self, uuid: bytes, epoch: int, state: str) -> None:
        """Act on what the liveness thread saw; called on the loop."""
        self._spawn(self._follow_worker(uuid, epoch, state))

    async def _follow_worker(self, uuid: bytes, epoch: int, state: str) -> None:
        async with self.lock:
            worker = self._roster.workers.get(uuid)
            if worker is None or worker.epoch != epoch or worker.state == "gone":
                return
            last = state in ("gone", "ended")
            if self._known.liveness.state(uuid, epoch) != ("" if last else state):
                return  # it was heard of meanwhile, by a ping that is told as well or a mount
            why = self._why(worker, state)
            worker.state = "gone" if last else state
            level = logging.INFO if state == "alive" else logging.WARNING
            self._states.change(f"worker {worker.name}", worker.state, why, level)
            if last:
                await self._take_away(worker.numbers)
                return
            if not worker.met and state != "absent":
                return  # nothing new is put there, and only its mount may show what is there
            for number in sorted(worker.numbers):
                await self._turn(number, "ok" if state == "alive" else state)

    def _why(self, worker: LentWorker, state: str) -> str:
        """Say for the log what made a worker become what it is."""
        facts, liveness = self._known.facts, self._known.liveness
        silence = f"silent for {facts.client_ttl_ms} ms"
        if state == "absent":
            silent_ms = liveness.silent_ns(worker.uuid) // MILLISECOND_NS
            return silence if silent_ms >= facts.client_ttl_ms else "its process ended"
        if state == "gone":
            return "it did not come back in time" if worker.state == "absent" else silence
        return "its process ended" if state == "ended" else ""

    async def _turn(self, number: int, state: str, deadline_ms: int = 0) -> None:
        """Tell all shards what becomes of a segment, and note what it is then."""
        segment = self._roster.segments[number]
        replies = await self._shards.tell(number, state, deadline_ms)
        segment.state = state_of(replies, segment.state)

    # -- drains

    async def _drain(self, request: wire.Drain) -> wire.DrainReply:
        async with self.lock:
            segment = self._roster.segments.get(request.number)
            if segment is None:
                return _no_segment(request.number)
            change = "cancel" if request.cancel else "drain"
            replies = await self._shards.tell(request.number, change)
            return self._drained(segment, replies)

    async def _drain_status(
        self, connection: Connection, request: wire.DrainStatusRequest
    ) -> wire.DrainReply:
        segment = self._roster.segments.get(request.number)
        if segment is None:
            return _no_segment(request.number)
        return self._drained(segment, await self._shards.tell(request.number, "query"))

    def _drained(self, segment: LentSegment, replies: list[wire.SliceReply]) -> wire.DrainReply:
        """Sum the drains of all shards up: the one that stands worst decides."""
        states = {reply.drain for reply in replies}
        order = ("failed", "running", "cancelled", "done")
        state = next((state for state in order if state in states), "none")
        segment.state = state_of(replies, segment.state)
        status = next((reply.status for reply in replies if reply.status), 0)
        message = next((reply.message for reply in replies if reply.message), "")
        return wire.DrainReply(status, state, sum(reply.moved for reply in replies), message)


def _refused(request: wire.Mount, status: Status) -> wire.Mounted:
    count = len(request.segments)
    return wire.Mounted((int(status),) * max(1, count), (-1,) * max(1, count))


def _no_segment(number: int) -> wire.DrainReply:
    return wire.DrainReply(
        int(Status.SEGMENT_NOT_FOUND), message=f"no segment has the number {number}"
    )
