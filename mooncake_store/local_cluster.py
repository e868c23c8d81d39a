"""A whole pool on this machine, for a notebook, a test, or a first try.

    with LocalCluster(workers=2, segment="256MB") as cluster:
        client = Client(cluster.url)

    with LocalCluster(segment="8GB", state="~/pool") as cluster:   # as the last program left it
        client = Client(cluster.url)

Master and workers are child processes on free loopback ports; they end with this process, however
it ends. With `in_process=True` they are threads instead: nothing to start but also one
interpreter for all, so it is for trying things out, not for measuring. What was not closed is
closed when the program ends; a forked child reaches its parent's cluster and ends nothing of it.

With `state` the pool outlives the program, be it closed or killed: the next one that names the same
directory finds every completed object. All of it lies in that directory, also the memory of the
workers (DIR/memory). So the pool may be larger than /dev/shm, holds no memory while nobody runs it,
and goes with the directory; but the system writes what is put to the disk, in its own time, and a
put may have to wait for that. `worker={"memory": FOLDER}`, best on a tmpfs, costs memory instead.
Neither outlives a start of the machine: what is on the disk then may be older than what the journal
knows, so it is not believed, and the pool begins empty.

The tests' methods (`kill_worker`, `stop_worker`, ...) do to processes what happens to them in real
life. `close` is idempotent. It is no way to run a pool for others: nothing is restarted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mooncake_store import config
from mooncake_store.credentials import sealing
from mooncake_store.journal.ring_file import remove_rings
from mooncake_store.program.children import START_S, Child
from mooncake_store.program.orderly_exit import end_at_exit, ended
from mooncake_store.units import parse_size
from mooncake_store.worker.capacity import check_room
from mooncake_store.worker.keeping import memory_folder
from transfer_engine.errors import InvalidArgumentError, UnavailableError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping
    from types import TracebackType

    from mooncake_store.config.settings import MasterConfig, WorkerConfig
    from mooncake_store.local_state import LocalState
    from mooncake_store.worker.worker import Worker

__all__ = ["SEGMENT", "LocalCluster"]

S = TypeVar("S", bound=config.Settings)

log = logging.getLogger(__name__)

SEGMENT = "256MB"
"""What a worker lends unless it is told."""
STOP_S = 5.0
MASTER_STOP_S = 15.0
"""How long a master may take that has yet to bring to files what it knows."""
OBJECTS_MAX = 4_000_000

_PROGRAM = "mooncake_store.program.local_program"


class LocalCluster:
    """A master and `workers` workers, each lending one segment.

    `state` is the directory of a pool that outlives the program; one program at a time uses it, and
    another number of `shards` than before is refused. What lay with a worker that there is no more,
    or that lends another size, is gone, and a warning says so.

    `master` and `worker` are further settings by name, as in a configuration file. `start` and
    `close` are what the context manager calls.
    """

    def __init__(
        self,
        workers: int = 1,
        segment: str | int = SEGMENT,
        shards: int = 1,
        *,
        in_process: bool = False,
        state: str | os.PathLike[str] | None = None,
        namespace: str = "default",
        secret: bytes | None = None,
        master: Mapping[str, Any] | None = None,
        worker: Mapping[str, Any] | None = None,
    ) -> None:
        if workers < 0:
            raise InvalidArgumentError(f"workers must be 0 or more, not {workers}")
        if state is not None:
            _check_kept(master or {}, worker or {})
        self._segment_bytes = parse_size(segment)
        self._workers_wanted = workers
        self._in_process = in_process
        self._namespace = namespace
        self._secret = secret
        self._path = None if state is None else Path(state).expanduser().absolute()
        self._held: LocalState | None = None
        self._master_settings = {
            "port": 0,
            "shards": shards,
            "objects_max": OBJECTS_MAX,
            "log_level": "warning",
            "state": "none" if self._path is None else str(self._path),
            "journal": "none" if self._path is None else "written",
            **(master or {}),
        }
        self._names_state = self._path is not None or "state" in (master or {})
        self._state: tempfile.TemporaryDirectory[str] | None = None
        """What a master that is started again in this cluster goes on with, where none is named."""
        self._worker_settings = {
            "segments": str(self._segment_bytes),
            # Where nothing is kept, those that are killed would leave it behind.
            "memory": "anonymous" if self._path is None else str(self._path / "memory"),
            "log_level": "warning",
            **(worker or {}),
        }
        self._address = ""
        self._master: Child | _MasterThread | None = None
        self._workers: list[Child | Worker] = []

    # -- what it is

    @property
    def address(self) -> str:
        """Host and port of the master."""
        if not self._address:
            raise UnavailableError("the cluster is not running", advice="call start()")
        return self._address

    @property
    def url(self) -> str:
        """The URL that clients of this cluster use."""
        return f"mooncake://{self.address}/{self._namespace}"

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes of the cluster, master first; empty in-process."""
        running = [self._master, *self._workers]
        return tuple(child.pid for child in running if isinstance(child, Child))

    # -- life

    def start(self) -> LocalCluster:
        """Start everything, or nothing; return self. Does nothing when it runs."""
        if self._address:
            return self
        lent = _load(config.WorkerConfig, {"name": "worker-0", **self._worker_settings})
        try:
            if self._path is not None:
                from mooncake_store.local_state import LocalState

                self._held = LocalState.hold(self._path)
            # Of all workers at once: each of them alone would find the room of the others free.
            check_room(lent, names=self._names)
            if self._in_process:
                end_at_exit(self, self.close)
                self._start_threads(lent)
            else:
                self._start_processes(lent)
        except BaseException:
            self.close()
            raise
        return self

    def _start_threads(self, lent: WorkerConfig) -> None:
        from mooncake_store.worker.worker import Worker

        master = _MasterThread(_load(config.MasterConfig, self._master_settings), self._secret)
        self._master = master
        self._address = master.start()
        self._drop_misfits(lent)
        for index in range(self._workers_wanted):
            settings = _load(config.WorkerConfig, self._settings_of_worker(index))
            worker = Worker(settings, secret=self._secret)
            self._workers.append(worker)
            worker.start()
            ended(worker)  # its cluster ends it, which knows how

    def _start_processes(self, lent: WorkerConfig) -> None:
        if not self._names_state:
            self._state = tempfile.TemporaryDirectory(
                prefix="mooncake-", ignore_cleanup_errors=True
            )
            self._master_settings["state"] = self._state.name
        self._start_master({})
        self._drop_misfits(lent)
        for index in range(self._workers_wanted):
            self._workers.append(self._new_worker(index))
        for child in self._workers:
            assert isinstance(child, Child)
            child.wait_ready()

    def _start_master(self, overrides: dict[str, Any]) -> None:
        settings = {**self._master_settings, **overrides}
        self._master = master = self._child("master", settings, "the master")
        self._address = master.wait_ready()["address"]

    def _new_worker(self, index: int) -> Child:
        return self._child("worker", self._settings_of_worker(index), f"worker {index}")

    def _child(self, program: str, settings: dict[str, Any], name: str) -> Child:
        held = self._held
        message = {
            "program": program,
            "settings": settings,
            "secret": self._secret,
            "keeps": held is not None,
        }
        fds = () if held is None else held.for_children
        return Child(_PROGRAM, message, name=name, fds=fds)

    @property
    def _names(self) -> list[str]:
        return [f"worker-{index}" for index in range(self._workers_wanted)]

    def _settings_of_worker(self, index: int) -> dict[str, Any]:
        return {"name": self._names[index], "master": self.address, **self._worker_settings}

    def _drop_misfits(self, lent: WorkerConfig) -> None:
        memory = memory_folder(lent)
        if self._held is not None and memory is not None:
            sizes = dict.fromkeys(self._names, lent.segments_bytes)
            secret = sealing(lent, self._secret)
            self._held.drop_misfits(memory, sizes, self.address, secret)

    def close(self) -> None:
        """End everything; workers take their leave of the master first. What has a state stays."""
        ended(self)
        workers, self._workers = self._workers, []
        master, self._master = self._master, None
        # A stopped process would hold the end up until it is killed.
        for child in (master, *workers):
            if isinstance(child, Child):
                child.signal(signal.SIGCONT)
        ends = [threading.Thread(target=self._end, args=(worker,)) for worker in workers]
        if master is not None and self._held is not None:
            # At once: it would take them for dead, and warn of it.
            ends.append(threading.Thread(target=master.stop, args=(MASTER_STOP_S,)))
        for end in ends:
            end.start()
        for end in ends:
            end.join()
        if master is not None:
            master.stop(MASTER_STOP_S)
        state, self._state = self._state, None
        if state is not None:
            for folder in Path(state.name).glob("shard-*"):
                remove_rings(folder)  # a master that was killed left its own
            state.cleanup()
        held, self._held = self._held, None
        if held is not None:
            held.close()
        self._address = ""

    def _end(self, worker: Child | Worker) -> None:
        if isinstance(worker, Child):
            worker.stop(STOP_S)
        elif self._held is not None:
            worker.suspend()
        else:
            worker.stop(leases_s=0.0)

    def __enter__(self) -> LocalCluster:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- what happens to processes in real life

    def kill_worker(self, index: int) -> None:
        """End a worker with SIGKILL."""
        self._worker(index).kill()

    def stop_worker(self, index: int) -> None:
        """Stop a worker with SIGSTOP: it neither answers nor closes anything."""
        self._worker(index).signal(signal.SIGSTOP)

    def resume_worker(self, index: int) -> None:
        """Let a stopped worker go on."""
        self._worker(index).signal(signal.SIGCONT)

    def restart_worker(self, index: int) -> None:
        """Kill a worker and start another one in its place.

        Its memory is fresh, unless the cluster has a `state`, or the settings of workers name a
        folder that keeps it.
        """
        self._worker(index).kill()
        self._workers[index] = child = self._new_worker(index)
        child.wait_ready()

    def stop_master(self) -> None:
        """Stop the master with SIGSTOP."""
        self._master_process().signal(signal.SIGSTOP)

    def resume_master(self) -> None:
        """Let a stopped master go on."""
        self._master_process().signal(signal.SIGCONT)

    def kill_master(self) -> None:
        """End the master with SIGKILL."""
        self._master_process().kill()

    def restart_master(self) -> None:
        """Kill the master and start another one at its address.

        It names keys as the one before it did, and knows its objects if the cluster has a `state`,
        or was given a `journal`, such as "written".
        """
        port = int(self.address.rpartition(":")[2])
        self._master_process().kill()
        self._start_master({"port": port})

    def _worker(self, index: int) -> Child:
        worker = self._workers[index]
        if not isinstance(worker, Child):
            raise InvalidArgumentError("an in-process worker cannot be killed or stopped")
        return worker

    def _master_process(self) -> Child:
        if not isinstance(self._master, Child):
            raise InvalidArgumentError("an in-process master cannot be killed or stopped")
        return self._master


def _load(program: type[S], overrides: Mapping[str, Any]) -> S:
    """Return settings on which environment and files have no say."""
    return config.load(program, environ={}, overrides=overrides).value


def _check_kept(master: Mapping[str, Any], worker: Mapping[str, Any]) -> None:
    """Refuse settings with which nothing would be kept, or elsewhere than `state` says."""
    if "state" in master:
        raise InvalidArgumentError(
            "state and the setting state of the master each name a directory", advice="say one"
        )
    for name, value in (("journal", master.get("journal")), ("memory", worker.get("memory"))):
        if value in ("none", "anonymous"):
            raise InvalidArgumentError(
                f"a cluster with a state keeps its objects, and {name}={value!r} keeps none",
                advice="leave one of them out",
            )


class _MasterThread:
    """A master on a thread and a loop of its own."""

    def __init__(self, settings: MasterConfig, secret: bytes | None) -> None:
        self._settings = settings
        self._secret = secret
        self._ready = threading.Event()
        self._address = ""
        self._error: BaseException | None = None
        self._stop: asyncio.Event | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._body, name="mooncake-master", daemon=True)

    def start(self) -> str:
        """Start it and return its address; raises what kept it from starting."""
        self._thread.start()
        if not self._ready.wait(START_S):
            raise UnavailableError(
                "the in-process master was not ready in time",
                advice="compile its kernels ahead: `mooncake warmup`",
            )
        if self._error is not None:
            raise self._error
        return self._address

    def _body(self) -> None:
        from transfer_engine.rpc.server import run

        try:
            run(self._serve())
        except Exception as error:
            if self._ready.is_set():
                log.exception("the in-process master failed")
            self._error = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        from mooncake_store.master.server import Master

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        master = Master(self._settings, secret=self._secret)
        self._address = str((await master.start()).master)
        self._ready.set()
        assert master.failed is not None
        ending = self._loop.create_task(self._stop.wait())
        ends: set[asyncio.Future[Any]] = {ending, master.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await master.stop(STOP_S)
        if master.failed.done():
            master.failed.result()

    def stop(self, grace_s: float) -> None:
        """End it. Idempotent."""
        if self._loop is not None and self._stop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(grace_s + 1.0)
