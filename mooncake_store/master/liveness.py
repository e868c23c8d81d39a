"""Who is alive: a listener and a loop of their own, on their own thread.

A worker that was silent for some pings is suspect (its segments take no new objects), after
`client_ttl` it is absent (what lies there cannot be read, and is kept), and after `worker_grace`
more it is gone (its segments are unmounted). Until then any ping of its run makes it alive again.
Answering here never waits for data work: while the master's loop is busy with a long request, pings
are answered and counted.

A worker whose connection closed, and whose address refuses although it answered before, has ended
(`doors`): it is absent at once if its memory outlives its process, else gone. All else that can be
behind a closed connection waits for silence.

Nor does a master that stood still blame its workers: when the check comes late by more than an
interval, everybody's last sign of life is moved forward by the time lost (invariant 8).

Changes are reported through one callback, on this thread, in the order in which they happen.
Cost: O(workers) per interval, O(1) per ping.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mooncake_store.master.doors import answering, refused
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire.cluster import LIVENESS, PING, Pong
from transfer_engine.lasting import keep_going
from transfer_engine.rpc.server import Server, run

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from mooncake_store.clock import Clock
    from mooncake_store.credentials import Gate
    from mooncake_store.master.doors import Door
    from transfer_engine.rpc.address import Address
    from transfer_engine.rpc.limits import ServerLimits
    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.frame import Frame

__all__ = ["LivenessTimes", "Liveness"]

START_S = 10.0
CHECKS_PER_INTERVAL = 2
FAULTS, FAULT_CHARACTERS = 64, 300
"""As much is kept of what a worker says of its disks."""


@dataclass(frozen=True, slots=True)
class LivenessTimes:
    """When silence means something, in ns."""

    ping_interval_ns: int
    suspect_ns: int
    absent_ns: int
    grace_ns: int
    """For how long the memory of an absent worker is kept."""


@dataclass(slots=True)
class _Watched:
    epoch: int
    seen_ns: int
    state: str = "alive"
    doors: tuple[Door, ...] = ()
    """Where it listened when it came."""
    keeps: bool = False
    """Whether its memory outlives its process."""
    doubted: bool = False
    """Whether these are being looked at because a connection of it closed."""
    called_back: bool = False
    """Whether it is to mount again, which it hears with the answer to its next ping."""
    faults: tuple[tuple[bytes, str], ...] = ()
    """What it said of its disks last: the uuid of a segment, and what is wrong."""


class Liveness:
    """Watches workers from a thread; `report(uuid, epoch, state)` is called on that thread.

    States are "alive", "suspect", "absent", and, each the last of its run, "gone" and "ended": gone
    with its process.
    When the thread cannot go on, `failed(error)` is called on the loop that started it.
    """

    def __init__(
        self,
        times: LivenessTimes,
        master_epoch: int,
        clock: Clock,
        report: Callable[[bytes, int, str], object],
        failed: Callable[[Exception], object],
    ) -> None:
        self._times = times
        self._master_epoch = master_epoch
        self._now = clock.now_ns
        self._wall_ns = clock.wall_ns
        self._report = report
        self._failed = failed
        self._lock = threading.Lock()
        self._watched: dict[bytes, _Watched] = {}
        self._checked_ns = 0
        self._thread: threading.Thread | None = None
        self._stop: Callable[[], object] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looking: set[asyncio.Task[None]] = set()

    # -- from any thread

    def watch(
        self, uuid: bytes, epoch: int, doors: tuple[Door, ...] = (), *, keeps: bool = False
    ) -> None:
        """Count a run of a worker as alive from now on; it listens at `doors`.

        `keeps` says that its memory outlives its process.
        """
        watched = _Watched(epoch, self._now(), keeps=keeps)
        with self._lock:
            self._watched[uuid] = watched
        loop = self._loop
        if doors and loop is not None:
            with contextlib.suppress(RuntimeError):  # its loop ended meanwhile
                loop.call_soon_threadsafe(lambda: self._look(self._meet(watched, doors)))

    def call_back(self, uuid: bytes) -> None:
        """Let a worker mount again: until it does its pings are answered as a stranger's."""
        with self._lock:
            watched = self._watched.get(uuid)
            if watched is not None:
                watched.called_back = True

    def forget(self, uuid: bytes) -> None:
        """Watch a worker no more: it left."""
        with self._lock:
            self._watched.pop(uuid, None)

    def state(self, uuid: bytes, epoch: int) -> str:
        """Return the state of a run as it is by now; "" for one that is watched no more."""
        with self._lock:
            watched = self._watched.get(uuid)
            return watched.state if watched is not None and watched.epoch == epoch else ""

    def silent_ns(self, uuid: bytes) -> int:
        """Return for how long a worker has been silent."""
        with self._lock:
            watched = self._watched.get(uuid)
            return 0 if watched is None else max(0, self._now() - watched.seen_ns)

    def faults(self) -> dict[bytes, str]:
        """What workers say of their disks, by the uuid of the segment. O(workers)."""
        with self._lock:
            return dict(each for watched in self._watched.values() for each in watched.faults)

    async def start(self, host: str, gate: Gate, limits: ServerLimits) -> Address:
        """Start the thread and return where it listens."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[Address] = loop.create_future()

        def answer_start(address: Address | None, error: Exception | None) -> None:
            if started.done():
                if error is not None:
                    self._failed(error)
                return
            if error is not None or address is None:
                started.set_exception(error or RuntimeError("the liveness thread ended"))
            else:
                started.set_result(address)

        def tell(address: Address | None, error: Exception | None = None) -> None:
            loop.call_soon_threadsafe(answer_start, address, error)

        async def main() -> None:
            stop = asyncio.Event()
            own_loop = asyncio.get_running_loop()
            self._stop = lambda: own_loop.call_soon_threadsafe(stop.set)
            self._loop = own_loop
            async with Server(LIVENESS, self._handle, **gate, limits=limits) as server:
                tell(await server.listen(host, 0))
                self._checked_ns = self._now()
                checks = own_loop.create_task(keep_going("looking for silent workers", self._check))
                await stop.wait()
                self._loop = None  # from now on it is this side that closes connections
                for task in (checks, *self._looking):
                    task.cancel()
                await server.stop(grace_s=0.5)

        def body() -> None:
            try:
                run(main())
            except Exception as error:
                tell(None, error)

        self._thread = threading.Thread(target=body, name="mooncake-liveness", daemon=True)
        self._thread.start()
        async with asyncio.timeout(START_S):
            return await started

    async def stop(self) -> None:
        """End the thread. Idempotent."""
        stop, self._stop = self._stop, None
        if stop is not None and self._thread is not None:
            with contextlib.suppress(RuntimeError):  # its loop ended by itself
                stop()
            await asyncio.to_thread(self._thread.join, START_S)

    # -- on the thread

    def _handle(self, connection: Connection, frame: Frame) -> bytes:
        ping = PING.request.unpack(frame.body)
        with self._lock:
            watched = self._watched.get(ping.uuid)
            known = watched is not None and watched.epoch == ping.epoch
            returned = called_back = False
            if watched is not None and known:
                watched.seen_ns = self._now()
                watched.faults = tuple(
                    (segment, fault[:FAULT_CHARACTERS]) for segment, fault in ping.faults[:FAULTS]
                )
                returned, watched.state = watched.state != "alive", "alive"
                called_back = watched.called_back
                if connection.context is None:
                    connection.context = ping.uuid
                    connection.on_close(lambda: self._closed(ping.uuid, ping.epoch))
        if returned:
            self._report(ping.uuid, ping.epoch, "alive")
        clock_ms = self._wall_ns() // MILLISECOND_NS
        return PING.reply.pack(Pong(known and not called_back, self._master_epoch, clock_ms))

    async def _check(self) -> None:
        await asyncio.sleep(self._times.ping_interval_ns / CHECKS_PER_INTERVAL / 1e9)
        self.check()

    def _look(self, looking: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            looking.close()
            return
        task = self._loop.create_task(looking)
        self._looking.add(task)
        task.add_done_callback(self._looking.discard)

    async def _meet(self, watched: _Watched, doors: tuple[Door, ...]) -> None:
        """Remember the addresses that answer: only such can refuse with a meaning."""
        watched.doors = await answering(doors)

    def _closed(self, uuid: bytes, epoch: int) -> None:
        """A connection that pings came on is gone; perhaps its worker is as well."""
        with self._lock:
            watched = self._watched.get(uuid)
        if watched is None or watched.epoch != epoch:
            return
        if watched.doors and not watched.doubted:
            self._look(self._doubt(uuid, watched))

    async def _doubt(self, uuid: bytes, watched: _Watched) -> None:
        watched.doubted, seen_ns = True, watched.seen_ns
        try:
            ended = await refused(watched.doors)
        finally:
            watched.doubted = False
        state = "absent" if watched.keeps and self._times.grace_ns else "ended"
        with self._lock:
            if not ended or self._watched.get(uuid) is not watched or watched.seen_ns != seen_ns:
                return
            if watched.state == state:
                return
            watched.state = state
            if state == "ended":
                del self._watched[uuid]
        self._report(uuid, watched.epoch, state)

    def check(self) -> None:
        """Look at everybody once."""
        times, changes = self._times, []
        with self._lock:
            now = self._now()
            late = now - self._checked_ns - times.ping_interval_ns // CHECKS_PER_INTERVAL
            self._checked_ns = now
            for uuid, watched in list(self._watched.items()):
                if late > times.ping_interval_ns:
                    watched.seen_ns = min(now, watched.seen_ns + late)
                silent = now - watched.seen_ns
                if silent >= times.absent_ns + times.grace_ns:
                    del self._watched[uuid]
                    changes.append((uuid, watched.epoch, "gone"))
                elif silent >= times.absent_ns and watched.state != "absent":
                    watched.state = "absent"
                    changes.append((uuid, watched.epoch, "absent"))
                elif silent >= times.suspect_ns and watched.state == "alive":
                    watched.state = "suspect"
                    changes.append((uuid, watched.epoch, "suspect"))
        for change in changes:
            self._report(*change)
