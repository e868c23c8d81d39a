"""A worker: memory of this process lent to the pool, served to everybody, and kept alive.

    with Worker(config, secret=secret) as worker:     # in any process; no signals are touched
        ...

Starting creates the segments, publishes them (`TransferServer`: shared memory and TCP) and mounts
them at the master. From then on four threads work: one only says "alive" on the liveness service,
so that nothing this process does delays it; one mounts again when the master asks for it; one runs
the copies and moves whose source lies here, and the last one hauls between memory and disks. These
two may wait for a shard whose host is gone, and nobody waits for them. None ends by what it meets
(`lasting`). A worker of which a part cannot go on, be it these or those that serve the memory,
falls silent, and so is alive to nobody: others stop using what can no longer be reached, or trusted
to be looked after.

Stopping takes the segments back: the master hides their replicas at once (after moving them away,
if time for that was granted) and says for how long readers may still hold leases; the memory stays
until then, within a bound. All waits have deadlines; `stop` is idempotent.

A master that was restarted, and has kept what it knew, finds everything where it was. One that has
not knows nothing of the objects, nor of who still reads or writes them: the worker then lends fresh
memory instead of the old, as another run of itself. So it does for a master whose state is older
than its memory: each run of a master has a number, the worker remembers the one it mounted in last,
and the master says whether it comes from that.

A worker with a name keeps its memory in files (`keeping`). Killed and started again it is the same
worker in a newer run, with the same segments: it asks the master who it is before it takes them up,
and objects are where they were as soon as it has mounted. A worker that is stopped leaves what
lies in files and devices, one that is suspended all of it, as if it was killed; one that is drained
leaves nothing.

Not done here: deciding what lies where, and for how long a silent worker is waited for (the master
does).
"""

from __future__ import annotations

import logging
import os
import random
import secrets
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store import __version__
from mooncake_store.core.guards import KEY_BYTES
from mooncake_store.credentials import gate_of, sealing
from mooncake_store.endpoint import host_name, split_rail
from mooncake_store.metrics.of_worker import worker_page
from mooncake_store.program.children import START_S
from mooncake_store.program.logs import StateLog
from mooncake_store.program.orderly_exit import end_at_exit, ended
from mooncake_store.wire import cluster as wire
from mooncake_store.wire import shard as shard_wire
from mooncake_store.worker.capacity import check_room
from mooncake_store.worker.cold_hauler import ColdHauler
from mooncake_store.worker.copier import Copier
from mooncake_store.worker.hauler import Hauler
from mooncake_store.worker.master_link import CALL_S, MasterLink, towards
from mooncake_store.worker.promises import in_turn
from mooncake_store.worker.segments import WorkerSegments, tier_of
from transfer_engine.errors import (
    IllegalClientError,
    InvalidArgumentError,
    NoSpaceError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.lasting import LastingThread
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.segments.cold import ColdSegment
from transfer_engine.segments.file import FileSegment
from transfer_engine.transports.server import TransferServer

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from mooncake_store.config.settings import WorkerConfig
    from mooncake_store.worker.errands import Lent
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation

__all__ = ["Worker", "host_name"]

log = logging.getLogger(__name__)

RETRY_S = 0.1
RETURN_S = 10.0
"""For how long a master that was there is asked often whether it is there again."""
RETURN_PAUSES_S = (0.05, 0.25)
"""Pauses meanwhile are drawn from these, so that many workers do not come at once."""
SEARCH_S = 1.0
"""How long the first search for another master may take."""
CLOCK_S = 0.1
"""Answers to pings that took longer do not say what time it is."""
HAUL_PAUSE_S = 0.005
"""The first pause where there is no haul; each further one is twice as long."""
JOIN_S = 5.0
WITHDRAW_S = 1.0
HUNG_S = 30.0
"""Saying that one is alive takes seconds at most, whoever does not answer."""
PINGING = "mooncake-ping"
LEASES_S = 30.0
"""How long `stop` keeps memory for readers whose leases still run, unless told otherwise."""

_OLDER = "what the master knows is older than its memory, from a backup or a copy of its state"
_OUT_OF_REACH = (UnavailableError, PeerLostError, TransferTimeoutError)
_REFUSALS: dict[int, type[StoreError]] = {
    kind.code: kind for kind in (IllegalClientError, NoSpaceError, InvalidArgumentError)
}


class _MountedFor(NamedTuple):
    """Who works for which shards, and under which numbers they know the segments."""

    copier: Copier
    haulers: tuple[Hauler, ...]
    cluster: wire.ClusterMap
    numbers: tuple[int, ...]


class Worker:
    """Lends segments to a pool, from `start` to `stop`.

    `uuid` and `epoch` name this run, once it has started; `name` is for people, and leads to what
    the run before kept. `start` waits up to `timeout_s` for the master.
    """

    def __init__(self, config: WorkerConfig, *, secret: Secret | None = None) -> None:
        self.config = config
        self.uuid = secrets.token_bytes(16)
        self.epoch = time.time_ns()
        self.name = config.name or f"{host_name()}-{os.getpid()}"
        self.host = host_name()
        self.numbers: tuple[int, ...] = ()
        self._lent = WorkerSegments(config, self.name)
        secret = self._secret = sealing(config, secret)
        self._server: TransferServer | None = None
        self._specs: tuple[wire.SegmentSpec, ...] = ()
        self._disowned = 0  # the run in which the memory was mounted that this was made instead of
        self._mounted = 0  # the epoch of the master at which all is mounted
        self._map: wire.ClusterMap | None = None
        self._link = MasterLink(config.master, secret, config.etcd_file)
        self._copier: Copier | None = None
        self._haulers: tuple[Hauler, ...] = ()
        self._mounted_for: _MountedFor | None = None
        self._mounting = threading.Lock()  # held while it is mounted again
        self._leaving = False
        self._stopping = threading.Event()
        self._remount = threading.Event()
        self._threads: list[LastingThread] = []
        self._pulse: BlockingConnection | None = None
        self._search_s = CALL_S  # how long the next search for who leads may take
        self._copy_pause_s = 0.0
        self._haul_pauses_s: list[float] = []  # for each of those who haul
        self._away_since: float | None = None  # time.monotonic() when the master was gone
        self._states = StateLog(log)
        self._closed = False

    @property
    def segments(self) -> list[Lent]:
        """What is lent, memory first."""
        return self._lent.segments

    @property
    def address(self) -> str | None:
        """Host and port where data is served over TCP, if it is."""
        found = self._server.tcp_address if self._server is not None else None
        return None if found is None else str(Address(*found))

    # -- life

    def start(self, *, timeout_s: float = 30.0) -> None:
        """Create or take up, publish and mount the segments, or nothing at all.

        Raises ConfigError for more memory than there is, before it touches any, and for memory that
        is not for this run, and what kept it from the master when that lasted longer than
        `timeout_s`; a master that answers, but still compiles its kernels, has START_S more.
        """
        check_room(self.config)
        try:
            self._serve()
            if self._lent.folder is not None:
                self._patiently(self._take_place, timeout_s)
                self._patiently(self._compare_runs, timeout_s)
            with in_turn():  # who looks next sees what is made here, as this sees what was before
                check_room(self.config)
                self._lent.make()
            self._publish()
            self._patiently(self._mount, timeout_s)
            self._say_alive()
        except BaseException:
            if self._lent.new:  # else a former run's objects are in it
                self._lent.leave()
            self._release()
            raise
        self._lent.populate()
        self._copy_pause_s = self._interval_s
        turns = [("mooncake-tasks", self._copy), ("mooncake-mount", self._mount_again)]
        turns += [(PINGING, self._ping)]
        lanes = range(len(self._haulers))
        turns += [(f"mooncake-hauls-{n}", partial(self._haul, n)) for n in lanes]
        for name, turn in turns:
            thread = LastingThread(name, turn)
            self._threads.append(thread)
            thread.start()
        # A program that ends without `stop` tells the master so, but waits for no reader.
        end_at_exit(self, lambda: self.stop(leases_s=0.0))
        log.info("worker %s lends %d segments", self.name, len(self.segments))

    def _serve(self) -> None:
        config = self.config
        self._server = TransferServer(
            tcp=str(Address(config.host, config.port)) if "tcp" in config.transports else None,
            unix="auto" if "shm" in config.transports else None,
            rdma="rdma" in config.transports,
            rails=[str(Address(*split_rail(rail))) for rail in config.rails],
            **gate_of(config, self._secret),
            advertise_host=towards(config.master) if config.host in ("0.0.0.0", "::") else None,
        )
        self._server.peer_service.version = __version__

    def _publish(self) -> None:
        """Let others reach the segments."""
        assert self._server is not None
        # Others than of this run: rights to what was taken up hold no more.
        namespace, keys = self.config.namespace, {s.uuid: _new_key() for s in self.segments}
        descriptors = {
            s.uuid: self._server.publish(s, key=keys[s.uuid], namespace=namespace)
            for s in self.segments
        }
        self._specs = tuple(
            wire.SegmentSpec(
                s.uuid, s.name, s.size, descriptors[s.uuid].encode(), int(tier_of(s)),
                keys[s.uuid], namespace,
            )
            for s in self.segments
        )  # fmt: skip
        identity = shard_wire.OpenClient(self.uuid, self.epoch, self.host, "default")
        given = (
            tuple(self.segments), descriptors, identity, self._describe, self._secret,
            self.config.data_networks,
        )  # fmt: skip
        self._copier, haulers = Copier(*given), [Hauler(None, *given)]
        for segment in self.segments:
            if isinstance(segment, FileSegment):
                haulers.append(Hauler(segment, *given))
            elif isinstance(segment, ColdSegment):
                haulers.append(ColdHauler(segment, *given))
        self._haulers = tuple(haulers)
        self._haul_pauses_s = [0.0] * len(haulers)

    def _take_place(self) -> None:
        """Become the worker of this name, in the cluster that there is."""
        self._map = found = self._ask_map()
        self.uuid, self.epoch = self._lent.hold(found.cluster, found.life)

    def _compare_runs(self) -> None:
        """Take nothing up of which the master knows less than is in it."""
        found = self._ask_map()
        if not found.follows:
            self._disowned = self._lent.run
            self._lent.disown(_OLDER)

    def _ask_map(self) -> wire.ClusterMap:
        request, timeout_s = wire.MapRequest(run=self._lent.run), self._search_s
        # Shortly at first, for another one may begin to lead while one is waited for, and longer
        # each time, for one that is busy.
        self._search_s = min(CALL_S, 1.5 * timeout_s)
        found: wire.ClusterMap = self._call(wire.MAP, request, timeout_s=timeout_s)
        self._search_s = SEARCH_S if self._link.masters.several else CALL_S
        return found

    def _replace_segments(self, found: wire.ClusterMap, why: str) -> None:
        """Replace all segments: a master with other contents does not know who uses the old ones.

        Readers and writers of its predecessor may be under way for as long as their leases last;
        they keep the old memory, and what they write there meets no new object.
        """
        assert self._server is not None
        log.warning("worker %s: %s; all memory is replaced", self.name, why)
        self._mounted_for = None
        self._end_errands()
        for segment in self.segments:
            if self._server.find(segment.uuid) is not None:
                self._server.withdraw(segment, timeout_s=WITHDRAW_S)
        # Else a master that knows of the old memory as well would go on expecting it here.
        self.epoch = max(self.epoch + 1, time.time_ns())
        self._lent.replace(found.cluster, found.life, self.epoch)
        self._publish()

    def _end_errands(self) -> None:
        for errands in (self._copier, *self._haulers):
            if errands is not None:
                errands.close()

    def _patiently(self, attempt: Callable[[], None], timeout_s: float) -> None:
        """Do what needs the master, again while it is out of reach."""
        started = time.monotonic()
        while True:
            try:
                attempt()
            except _OUT_OF_REACH as error:
                self._states.change(f"master {self.config.master}", "unreachable", error.what)
                left_s = started + timeout_s - time.monotonic()
                if left_s <= RETRY_S and self._link.starting():
                    left_s += START_S
                if left_s <= RETRY_S or self._stopping.wait(RETRY_S):
                    raise
            else:
                return

    def _mount(self) -> None:
        found, known = self._ask_map(), self._map
        # Memory that may have been taken up is as bound to the master's objects as mounted one.
        used = bool(self.numbers) or self._lent.folder is not None
        if known is not None and known.life != found.life and used:
            self._replace_segments(found, "the master has lost its objects")
        elif not found.follows:
            self._disowned = self._lent.run
            self._replace_segments(found, _OLDER)
        self._map = found
        # From now on its memory may be changed in this run, whether the answer comes or not.
        self._lent.note_run(found.run)
        mounted: wire.Mounted = self._call(
            wire.MOUNT,
            wire.Mount(
                self.uuid,
                self.epoch,
                self.name,
                self.host,
                self._specs,
                keeps=self._lent.folder is not None,
                run=found.run,
                disowned=self._disowned,
            ),
        )
        refused = next((status for status in mounted.statuses if status), 0)
        if refused:
            raise _REFUSALS.get(refused, UnavailableError)(
                f"the master refused the segments of worker {self.name} (status {refused})",
                peer=self.config.master,
                operation="mount",
            )
        self.numbers, self._disowned, self._mounted = mounted.numbers, 0, found.epoch
        self._away_since = None
        assert self._copier is not None
        self._mounted_for = _MountedFor(self._copier, self._haulers, found, mounted.numbers)
        self._states.change(f"master {self.config.master}", "mounted", self._which)

    def stop(self, *, drain_s: float = 0.0, leases_s: float = LEASES_S) -> None:
        """Take the segments back and end, but for files and devices of a worker with a name.

        These stay the next run's, with what lies in them: to the master they are away, as when a
        worker was killed. With `drain_s` nothing stays: objects are first moved to other workers,
        for at most that long. The memory stays until readers' leases end, at most `leases_s`.
        Idempotent.
        """
        if self._closed:
            return
        self._closed = True
        ended(self)
        try:
            busy_ms = self._unmount(drain_s)
            wait_s = min(busy_ms / 1000, leases_s)
            self._stopping.set()
            if wait_s > 0:
                log.info("worker %s: readers hold leases for up to %.1f s", self.name, wait_s)
                threading.Event().wait(wait_s)
        finally:  # also when a second interrupt cuts the waiting short
            self._end()

    def suspend(self) -> None:
        """End, and leave the memory with what lies in it to the next run of this name. Idempotent.

        To the master it is a run that was killed: objects here are absent until the next run has
        mounted, for at most `worker_grace`. Memory that is not in files ends all the same.
        """
        if self._closed:
            return
        self._closed = self._leaving = True
        ended(self)
        self._end()

    def _end(self) -> None:
        self._stopping.set()
        self._remount.set()
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._release()

    def _unmount(self, drain_s: float) -> int:
        """Tell the master; return for how many ms readers may hold leases."""
        if not self._threads:
            return 0
        # From when the master lets go pings say "unknown", which else is a reason to mount again.
        self._leaving = True
        if self._mounting.acquire(timeout=CALL_S):  # what began before has ended
            self._mounting.release()
        # Before the master lets go: its memory is nobody's from then on.
        if drain_s:
            self._lent.leave()
            segments = tuple(segment.uuid for segment in self.segments)
        else:
            segments = tuple(self._lent.leave_memory())
        if not segments:
            return 0
        request = wire.Unmount(self.uuid, self.epoch, segments, int(drain_s * 1000))
        try:
            outcome: wire.Outcome = self._call(
                wire.UNMOUNT, request, timeout_s=drain_s + CALL_S, alone=True
            )
        except StoreError as error:
            log.warning("worker %s leaves without its master: %s", self.name, error)
            return 0
        if outcome.message:
            log.warning("worker %s: %s", self.name, outcome.message)
        return outcome.busy_ms

    def _release(self) -> None:
        self._end_errands()
        if self._server is not None:
            self._server.close()
        self._lent.close()
        self._link.close()
        if self._pulse is not None:
            self._pulse.close()

    def __enter__(self) -> Worker:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    # -- the master

    def _call(self, operation: Operation[Any, Any], request: Any, **options: Any) -> Any:
        return self._link.call(operation, request, **options)

    def _describe(self, numbers: tuple[int, ...]) -> tuple[wire.SegmentEntry, ...]:
        """Ask the master how to reach segments; those that are gone are left out."""
        reply: wire.SegmentsReply = self._call(wire.SEGMENTS, wire.SegmentsRequest(numbers))
        return reply.segments

    @property
    def _which(self) -> str:
        """Say for the log which of several masters leads."""
        masters = self._link.masters
        return f"at {masters.leader}" if masters.several else ""

    @property
    def _interval_s(self) -> float:
        assert self._map is not None
        return self._map.ping_interval_ms / 1000

    def page(self) -> str:
        """Return what it tells Prometheus of itself."""
        mounted = self._mounted_for is not None and self._away_since is None
        hauled = [each.hauled for each in self._haulers]
        return worker_page(self._lent, self._server, hauled, mounted=mounted, sound=self.sound)

    @property
    def sound(self) -> bool:
        """Whether everything that this worker does for others still goes on."""
        served = self._server is not None and self._server.sound
        return served and all(thread.sound for thread in self._threads)

    @property
    def beating(self) -> bool:
        """Whether it is sound, and the thread that says so to its master does not hang.

        A master that does not answer, or a name that is looked up, holds that up for less.
        """
        pinging = next(thread for thread in self._threads if thread.name == PINGING)
        return self.sound and pinging.turn_s < self._interval_s + HUNG_S

    def _ping(self) -> None:
        """Say after a while that this worker is alive, unless it cannot do what it is there for."""
        if self._stopping.wait(self._ping_pause_s()):
            return
        sound = self.sound
        self._states.change(
            f"worker {self.name}", "sound" if sound else "silent: part of it cannot go on",
            level=logging.INFO if sound else logging.ERROR,
        )  # fmt: skip
        if sound:
            self._say_alive()

    def _ping_pause_s(self) -> float:
        """Nothing is put here before a master that was started again has heard of this worker."""
        since = self._away_since
        if since is None or time.monotonic() > since + RETURN_S:
            return self._interval_s
        return min(self._interval_s, random.uniform(*RETURN_PAUSES_S))

    def _say_alive(self) -> None:
        """The connection stays open, so that the master sees it close when this process ends."""
        assert self._map is not None
        body = wire.PING.request.pack(wire.Ping(self.uuid, self.epoch, self._lent.faults()))
        place, timeout_s = self._map.liveness, max(1.0, self._interval_s)
        try:
            if self._pulse is not None and self._pulse.peer != place:
                self._pulse.close()  # another master leads by now
            if self._pulse is None or self._pulse.closed:
                self._pulse = BlockingConnection.connect(
                    place, wire.LIVENESS, secret=self._secret, timeout_s=timeout_s
                )
            begun = time.monotonic()
            reply = self._pulse.call(wire.PING, body, timeout_s=timeout_s)
            pong = wire.PING.reply.unpack(reply)
            self._set_clock(pong.clock_ms, time.monotonic() - begun)
        except StoreError as error:
            self._failed(error)
            # A restarted master may listen for pings elsewhere.
            self._ask_to_mount()
            return
        if pong.known and pong.master_epoch == self._mounted:
            self._states.change(f"master {self.config.master}", "mounted", self._which)
        else:
            self._ask_to_mount()

    def _set_clock(self, clock_ms: int, took_s: float) -> None:
        """Judge the ends of rights by the clock of the pool, as an answer that took so long said.

        One that took long says little of when that was.
        """
        if clock_ms and took_s < CLOCK_S and self._server is not None:
            self._server.clock_offset_ms = clock_ms - round((time.time() - took_s / 2) * 1000)

    def _failed(self, error: StoreError) -> None:
        """Tell, once, what the master does instead of answering."""
        if isinstance(error, _OUT_OF_REACH) and self._away_since is None:
            self._away_since = time.monotonic()
        state = "silent" if isinstance(error, _OUT_OF_REACH) else "refusing"
        self._states.change(f"master {self.config.master}", state, error.what, logging.WARNING)

    def _ask_to_mount(self) -> None:
        self._remount.set()

    def _mount_again(self) -> None:
        """Mount when that was asked for."""
        if not self._remount.wait(self._interval_s):
            return
        self._remount.clear()
        try:
            with self._mounting:
                if not (self._leaving or self._stopping.is_set()):
                    self._mount()
        except StoreError as error:
            self._failed(error)

    def _copy(self) -> None:
        """Run the copies and moves that wait."""
        if self._stopping.wait(self._copy_pause_s):
            return
        worked, mounted = False, self._mounted_for
        if mounted is not None:
            name = f"copies of {self.name}"
            try:
                worked = mounted.copier.work(mounted.cluster, mounted.numbers)
                self._states.change(name, "going on", level=logging.DEBUG)
            except StoreError as error:
                self._states.change(name, "waiting", error.what)
        # Work seldom comes alone: look again soon, then less and less often.
        self._copy_pause_s = 0.005 if worked else min(self._interval_s, self._copy_pause_s * 2)

    def _haul(self, lane: int) -> None:
        """Run the hauls of a device that wait, one after the other while there are any."""
        before_s = self._haul_pauses_s[lane]
        if self._stopping.wait(before_s):
            return
        worked, mounted = False, self._mounted_for
        if mounted is not None:
            hauler = mounted.haulers[lane]
            device = hauler.device
            name = f"hauls of {self.name} " + (f"with {device.name}" if device else "to others")
            try:
                worked = hauler.work(mounted.cluster, mounted.numbers)
                if not worked:
                    hauler.look_again()
                self._states.change(name, "going on", level=logging.DEBUG)
            except StoreError as error:
                self._states.change(name, "waiting", error.what)
        pause_s = max(HAUL_PAUSE_S, 2 * before_s)
        self._haul_pauses_s[lane] = 0.0 if worked else min(self._interval_s, pause_s)


def _new_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)
