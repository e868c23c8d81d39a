"""How long a pool is away when its processes are killed, and what preparing for it costs.

The rows of a restart count seconds from the start of a process in place of a killed one: until a
client that connects then has read an object whose bytes it knows (`first_read`), has put another
(`first_put`), and until a client that was connected all the time reads again (`goes_on`). Those
of a worker count until what lies in its memory is read. `put/128` is a batch before and after.

`get/128` is the slowest in a hundred of such batches while all objects are written down once more,
beside those of before; `slowest` is the slowest of all.

The processes run beside the clients that measure them, on the cores that there are. Python, its
modules and compiled kernels come from a warm page cache, what the journal holds from the disk.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from mooncake_store.client.blocking import Client
from mooncake_store.errors import StoreError
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.worker.memory_files import FOLDER

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.bench.harness import Report

__all__ = ["run"]

ALTERNATIVES = ()
OBJECTS, OBJECTS_QUICK = (1_000_000, 10_000_000), (20_000,)
SNAPSHOT_OBJECTS = 5_000_000
"""The pool with at least so many, or the last one, is asked while it writes all down."""
REPEATS, REPEATS_QUICK = 5, 1
PATIENCE_S = 60.0
POLL_S = 0.005
BATCH, FILL = 128, 4096
CALLS = 200
VALUE_BYTES = 64
SNAPSHOT_BYTES = 100_000
"""What is written meanwhile where only a snapshot writes."""
ALLOCATED_BYTES = 4 * VALUE_BYTES
"""More than an object and its share of what cannot be used take."""


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure all rows; `vs` is empty: with the original all objects are gone."""
    repeats = REPEATS_QUICK if quick else REPEATS
    sizes = OBJECTS_QUICK if quick else OBJECTS
    for objects in sizes:
        with _Pool(objects) as pool:
            if objects == sizes[-1] or objects >= SNAPSHOT_OBJECTS:
                pool.snapshot(report)
            pool.master(report, repeats)
            pool.worker(report, repeats)


class _Pool:
    """A pool with so many objects, whose processes leave everything to the next."""

    def __init__(self, objects: int) -> None:
        self._objects = objects
        self._stack = ExitStack()
        self._put_names = _names("fresh", 0, BATCH)
        self._kept_names = _names("kept", 0, BATCH)
        self._unread = itertools.cycle(range(BATCH, objects))

    def __enter__(self) -> _Pool:
        folder = self._folder(None)
        self._cluster = LocalCluster(
            segment=max(64 << 20, ALLOCATED_BYTES * self._objects),
            master={
                "state": folder,
                "journal": "written",
                "objects_max": 2 * self._objects,
            },
            worker={"memory": self._folder(FOLDER)},
        )
        self._stack.enter_context(self._cluster)
        self._store = self._stack.enter_context(Client(self._cluster.url))
        for first in range(0, self._objects, FILL):
            stop = min(first + FILL, self._objects)
            names = _names("kept", first, stop)
            self._store.put_many(names, list(map(_value, range(first, stop)))).check()
        return self

    def _folder(self, within: str | None) -> str:
        within = within if within and os.path.isdir(within) else None
        made = tempfile.TemporaryDirectory(prefix="mooncake-bench-", dir=within)
        return self._stack.enter_context(made)

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # -- restarts

    def master(self, report: Report, repeats: int) -> None:
        """Add the rows of a master that was killed."""
        before, after, taken = list[float](), list[float](), []
        for _ in range(repeats):
            before += self._puts_us()
            taken.append(self._restart_master())
            after += self._puts_us()
        for name in ("first_read", "first_put", "goes_on"):
            samples = [each[name] for each in taken]
            report.row(f"master/{name}/{self._objects}", "s", samples, higher_is_better=False)
        report.row(
            f"put/{BATCH}/after/{self._objects}", "us", after,
            vs={"before": before}, higher_is_better=False,
        )  # fmt: skip

    def _restart_master(self) -> dict[str, float]:
        self._cluster.kill_master()
        watches = _Watches()
        watches.add({"goes_on": lambda: self._reads(self._store)})
        watches.add({"first_read": self._reads_anew, "first_put": self._puts_anew})
        self._cluster.restart_master()
        return watches.seconds()

    def _reads(self, store: Client) -> None:
        # One that no client has a lease of, or it would be read without asking.
        number = next(self._unread)
        if store.get(_names("kept", number, number + 1)[0]) != _value(number):
            raise AssertionError("another object's bytes were read")

    def _reads_anew(self) -> None:
        with Client(self._cluster.url, connect_timeout=1.0) as store:
            self._reads(store)

    def _puts_anew(self) -> None:
        with Client(self._cluster.url, connect_timeout=1.0) as store:
            store.put("fresh", b"after the restart")
            store.remove("fresh")

    def worker(self, report: Report, repeats: int) -> None:
        """Add the row of a worker that was killed."""

        def back() -> float:
            self._cluster.kill_worker(0)
            watches = _Watches()
            watches.add({"read": lambda: self._reads(self._store)})
            self._cluster.restart_worker(0)
            return watches.seconds()["read"]

        samples = [back() for _ in range(repeats)]
        report.row(f"worker/read/{self._objects}", "s", samples, higher_is_better=False)

    # -- a life without them

    def _puts_us(self) -> list[float]:
        return [_microseconds(self._put) for _ in range(CALLS)]

    def _put(self) -> None:
        self._store.put_many(self._put_names, [b"x" * VALUE_BYTES] * BATCH).check()
        self._store.remove_many(self._put_names).check()

    def _get(self) -> None:
        self._store.get_many(self._kept_names)

    def snapshot(self, report: Report) -> None:
        """Add the rows of gets while all that there is is written down once more."""
        gets: list[float] = []
        quiet = [_microseconds(self._get) for _ in range(20 * CALLS)]
        names = _names("other", 0, FILL)
        deadline = time.monotonic() + PATIENCE_S
        while not gets and time.monotonic() < deadline:
            # What is put and removed makes the old files long enough to be worth it.
            self._store.put_many(names, [b"x" * VALUE_BYTES] * FILL).check()
            self._store.remove_many(names).check()
            gets = self._gets_while_written()
        why = None if gets else "nothing was written down anew in time"
        for name, of in (("get/128/p99", _p99), ("get/128/slowest", max)):
            report.row(
                f"{name}/snapshot/{self._objects}", "us", [of(gets)] if gets else [],
                vs={"before": [of(quiet)]}, higher_is_better=False, why=why,
            )  # fmt: skip

    def _gets_while_written(self) -> list[float]:
        """Take the time of gets as long as the master writes, though nobody changes anything."""
        gets: list[float] = []
        written = self._store.store_stats()[0].journal_bytes
        while True:
            some = [_microseconds(self._get) for _ in range(CALLS)]
            now = self._store.store_stats()[0].journal_bytes
            if now - written < SNAPSHOT_BYTES:
                return gets
            written = now
            gets += some


class _Watches:
    """Threads that try calls until each has succeeded once, and when that was."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._seconds: dict[str, float] = {}
        self._failed = threading.Event()
        self._failure: BaseException | None = None

    def add(self, calls: dict[str, Callable[[], None]]) -> None:
        """Try these, one after the other."""
        thread = threading.Thread(target=self._watch, args=(calls,), name="bench-restart")
        self._threads.append(thread)
        thread.start()

    def _watch(self, calls: dict[str, Callable[[], None]]) -> None:
        try:
            for name, call in calls.items():
                while not self._done(call):
                    if self._failed.wait(POLL_S):
                        return
                self._seconds[name] = time.monotonic() - self._began
        except BaseException as error:
            self._failure = error
            self._failed.set()

    def _done(self, call: Callable[[], None]) -> bool:
        try:
            call()
        except StoreError:
            if time.monotonic() > self._began + PATIENCE_S:
                raise
            return False
        return True

    def seconds(self) -> dict[str, float]:
        """Return how long each took; raises what the last try of one failed with."""
        for thread in self._threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        return self._seconds


def _microseconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - began)


def _p99(samples: list[float]) -> float:
    return sorted(samples)[len(samples) * 99 // 100]


def _value(number: int) -> bytes:
    return number.to_bytes(8, "little") * (VALUE_BYTES // 8)


def _names(kind: str, first: int, stop: int) -> list[str]:
    return [f"model/llama-3-8b/{kind}/07/block/{at:08d}" for at in range(first, stop)]
