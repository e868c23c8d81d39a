"""How fast blocks go from memory to a file and come back, and how fast they are read from a store.

`demote/SIZE/bN` writes a haul of N blocks to a file segment and has it on the medium; `read_back`
reads one into memory and compares checksums. It is the worker's own code for both, without a
master. `raw` is what a bare program does with the same memory in the same file system, in turn with
ours: one large write past the page cache and one wait for the medium, one large read, no checksums.
(In memory of its own it may be twice as quick or slow, by how its pages lie.)

`read_through/SIZE/bN` is what a client gets of a pool whose objects lie in a store elsewhere alone,
here a folder: a batch of N objects as bytes, through the worker that lends it. `raw` is fsspec,
which reads the very files of these objects one after the other.

The folder is that of temporary files (TMPDIR): name one on the disk that is meant. Blocks are taken
in turn from a file that is larger than what a device has under way; where direct I/O is not to be
had, both sides use the page cache, and reads come from there.
"""

from __future__ import annotations

import abc
import itertools
import os
import tempfile
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
from fsspec.implementations.local import LocalFileSystem

from mooncake_store.bench.harness import alternate
from mooncake_store.client.blocking import Client
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.units import KIB, MIB, format_size
from mooncake_store.wire import shard as shard_wire
from mooncake_store.worker.hauler import Haul, Hauler
from mooncake_store.worker.memory_files import FOLDER
from transfer_engine.checksum import checksum_ranges
from transfer_engine.segments.file import FileSegment
from transfer_engine.segments.memory import Segment
from transfer_engine.transports.server import TransferServer

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.bench.harness import Report
    from mooncake_store.worker.errands import Lent

__all__ = ["ALTERNATIVES", "run"]

ALTERNATIVES = ("raw",)
SIZES = (64 * KIB, MIB)
BATCH = 128
HAULS, HAULS_QUICK = 4, 2
"""Hauls of the largest blocks that the file has room for."""
REPEATS, REPEATS_QUICK = 15, 3
DEADLINE_S = 8.0
LEAST_BYTES = 16 * MIB
PATIENCE_S = 60.0
MEMORY, DISK = 0, 1
"""Numbers of the segments."""


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure all rows; `vs` may name raw."""
    hauls, repeats = (HAULS_QUICK, REPEATS_QUICK) if quick else (HAULS, REPEATS)
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as folder, ExitStack() as stack:
        ours = _Hauls(stack, folder, hauls * BATCH * max(SIZES))
        raw = _Raw(stack, folder, hauls * BATCH * max(SIZES), ours.memory, direct=ours.direct)
        for size in SIZES:
            for name in ("demote", "read_back"):
                sides: dict[str, Callable[[], float]] = {"ours": ours.call(name, size)}
                if vs:
                    sides["raw"] = raw.call(name, size)
                found = alternate(sides, repeats, DEADLINE_S)
                report.row(
                    f"{name}/{format_size(size)}/b{BATCH}", "GB/s", found.pop("ours"), vs=found
                )
        for size in SIZES:
            with ExitStack() as of_size:
                far = _Far(of_size, os.path.join(folder, f"far-{size}"), size, hauls)
                sides = {"ours": far.call(far.get)}
                if vs:
                    sides["raw"] = far.call(far.cat)
                found = alternate(sides, repeats, DEADLINE_S)
            name = f"read_through/{format_size(size)}/b{BATCH}"
            report.row(name, "GB/s", found.pop("ours"), vs=found)


class _Side(abc.ABC):
    """Something that takes blocks to a file and back."""

    nbytes: int

    def call(self, name: str, size: int) -> Callable[[], float]:
        """Return what moves the next blocks of a size, and answers GB/s."""
        steps = {"demote": self.demote, "read_back": self.read_back}
        places = itertools.cycle(range(0, self.nbytes, BATCH * size))

        def once() -> float:
            at = next(places)
            began = time.perf_counter()
            steps[name](size, at)
            return BATCH * size / (time.perf_counter() - began) / 1e9

        return once

    @abc.abstractmethod
    def demote(self, size: int, at: int) -> None:
        """Have blocks on the medium, from a place of the file on."""

    @abc.abstractmethod
    def read_back(self, size: int, at: int) -> None:
        """Have them in memory again."""


class _Hauls(_Side):
    """The segments of a worker, and what carries its hauls out."""

    def __init__(self, stack: ExitStack, folder: str, nbytes: int) -> None:
        self.nbytes = nbytes
        memory = stack.enter_context(Segment.create(BATCH * max(SIZES), name="memory"))
        np.frombuffer(memory.buffer, np.uint8)[:] = _bytes(memory.size)
        path = os.path.join(folder, "segment")
        disk = stack.enter_context(FileSegment.create(path, nbytes, name="disk"))
        self.direct = disk.file.direct
        server = stack.enter_context(TransferServer(tcp=None))
        told = {segment.uuid: server.publish(segment) for segment in (memory, disk)}
        identity = shard_wire.OpenClient(bytes(16), 1, "", "default")
        self._hauler = Hauler(disk, (memory, disk), told, identity, lambda _: (), None)
        stack.callback(self._hauler.close)
        self._lent: dict[int, Lent] = {MEMORY: memory, DISK: disk}
        self._address = memory.address
        self.memory = memoryview(memory.buffer)

    def _haul(self, source: int, target: int, size: int, at: int) -> None:
        sizes = np.full(BATCH, size, np.int64)
        here = np.arange(BATCH, dtype=np.int64) * size
        offsets = {MEMORY: here, DISK: at + here}
        # The same bytes lie everywhere in the file, so sums are those of the memory.
        sums = self._sums[size] if source == DISK else np.zeros(BATCH, np.uint64)
        own = np.zeros(BATCH, np.int32), ["default"]
        haul = Haul(1, source, target, offsets[source], offsets[target], sizes, sums, *own)
        statuses = self._hauler.run(haul, self._lent)
        if statuses.any():
            raise AssertionError(f"a haul failed: {statuses.tolist()}")

    def call(self, name: str, size: int) -> Callable[[], float]:
        """Fill the file with the blocks that are read, then as any side."""
        if name == "read_back":
            here = self._address + np.arange(BATCH, dtype=np.int64) * size
            sizes = np.full(BATCH, size, np.int64)
            self._sums = {size: checksum_ranges(here, sizes)}
            for at in range(0, self.nbytes, BATCH * size):
                self.demote(size, at)
        return super().call(name, size)

    def demote(self, size: int, at: int) -> None:
        self._haul(MEMORY, DISK, size, at)

    def read_back(self, size: int, at: int) -> None:
        self._haul(DISK, MEMORY, size, at)


class _Raw(_Side):
    """A bare program: a file, memory in whole pages, and two system calls."""

    def __init__(
        self, stack: ExitStack, folder: str, nbytes: int, memory: memoryview, *, direct: bool
    ) -> None:
        self.nbytes = nbytes
        self._memory = memory
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
        self._fd = os.open(os.path.join(folder, "raw"), flags, 0o600)
        stack.callback(os.close, self._fd)
        os.posix_fallocate(self._fd, 0, nbytes)

    def call(self, name: str, size: int) -> Callable[[], float]:
        """Fill the file, as the other side does."""
        if name == "read_back":
            for at in range(0, self.nbytes, BATCH * size):
                self.demote(size, at)
        return super().call(name, size)

    def demote(self, size: int, at: int) -> None:
        view = self._memory[: BATCH * size]
        while view:
            done = os.pwrite(self._fd, view, at)
            view, at = view[done:], at + done
        os.fdatasync(self._fd)

    def read_back(self, size: int, at: int) -> None:
        view = self._memory[: BATCH * size]
        while view:
            done = os.preadv(self._fd, [view], at)
            view, at = view[done:], at + done


class _Far:
    """A pool whose objects went to a folder, and the files that they are there."""

    def __init__(self, stack: ExitStack, folder: str, size: int, batches: int) -> None:
        os.mkdir(folder)
        shm = FOLDER if os.path.isdir(FOLDER) else None
        memory = tempfile.TemporaryDirectory(prefix="mooncake-bench-", dir=shm)
        cluster = LocalCluster(
            segment=max(LEAST_BYTES, 2 * BATCH * size),
            master={"promotion_hits": 0},  # what is read stays where it is
            worker={
                "memory": stack.enter_context(memory),
                "cold_url": folder,
                "cold": str(max(LEAST_BYTES, 2 * batches * BATCH * size)),
            },
        )
        stack.enter_context(cluster)
        self._store = stack.enter_context(Client(cluster.url))
        self._size = size
        self._names = [[f"far/{n}/{at}" for at in range(BATCH)] for n in range(batches)]
        for names in self._names:
            self._put(names)
        self._fs = LocalFileSystem()
        there = self._fs.find(folder, detail=True)
        files = [path for path, facts in there.items() if facts["size"] == size]
        self._files = [files[n * BATCH :][:BATCH] for n in range(batches)]

    def _put(self, names: list[str]) -> None:
        """Have a batch in the folder, and nowhere else."""
        content = _bytes(self._size).tobytes()
        self._store.put_many(names, [content] * BATCH).check()
        self._store.hint(names, "demote")
        until = time.monotonic() + PATIENCE_S
        while any(self._near(name) for name in names):
            if time.monotonic() > until:
                raise AssertionError("what was put did not leave memory")
            threading.Event().wait(0.01)

    def _near(self, name: str) -> bool:
        return any(not replica.below for replica in self._store.query(name).replicas)

    def call(self, read: Callable[[int], list[Any]]) -> Callable[[], float]:
        """Return what reads the next batch, and answers GB/s."""
        turns = itertools.cycle(range(len(self._names)))

        def once() -> float:
            at = next(turns)
            began = time.perf_counter()
            found = read(at)
            took_s = time.perf_counter() - began
            if [len(each) for each in found] != [self._size] * BATCH:
                raise AssertionError("a read failed")
            return BATCH * self._size / took_s / 1e9

        return once

    def get(self, at: int) -> list[Any]:
        """Read a batch as clients do."""
        return self._store.get_many(self._names[at]).check().values

    def cat(self, at: int) -> list[Any]:
        """Read the files of as many objects."""
        return [self._fs.cat_file(path) for path in self._files[at]]


def _bytes(count: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(7).integers(0, 256, count, np.uint8)
