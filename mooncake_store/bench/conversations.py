"""A working set of four times the memory, on a pool with a disk: what is found, where, how quickly.

A trace of conversations is replayed on a pool whose memory holds a quarter of its blocks and whose
disk holds all: each request reads what there is of its prompt, as a leading run, and puts the rest.
`hit_ratio` is the share of blocks that were found; its side `memory` is a pool without the disk.
`read/memory` and `read/disk` say where the bytes came from. Who puts waits for the disk: what comes
quicker than that is evicted without it, but engines have to compute it.

`foreground_p99` is the slowest in a hundred batches of a client in another process, which reads
the same blocks from memory all the while: beside demotion, and in the pool without a disk beside
evictions. Bytes are compared with their checksums, as always, and lengths with what was put.

Without a trace file the trace is made up, with the shape of conversations but no real workload's
figures. The disk is that of temporary files (TMPDIR).
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eviction import read_trace, synthetic_trace
from mooncake_store.bench.harness import alternate
from mooncake_store.client.blocking import Client
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from eviction.trace import Trace
    from mooncake_store.bench.harness import Report

__all__ = ["ALTERNATIVES", "run"]

ALTERNATIVES = ("memory",)
BLOCK_BYTES = 64 * KIB
MEMORY_BYTES, MEMORY_QUICK_BYTES = GIB, 64 * MIB
TIMES_MEMORY = 4
"""The working set; the disk has twice as much room."""
REPEATS, REPEATS_QUICK = 3, 1
SYNTHETIC_REQUESTS = 20_000
ROOM = 0.95
"""Share of memory above which a request waits while anything is on its way to the disk."""
PATIENCE_S = 10.0
FOREGROUND = 16
READER = """
import select, sys, time
from mooncake_store import Client
url, nbytes, names = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
with Client(url) as store:
    store.put_many(names, [b"f" * nbytes] * len(names)).check()
    taken = []
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        began = time.perf_counter()
        found = store.get_many(names)
        taken.append(time.perf_counter() - began)
        if any(value is not None and len(value) != nbytes for value in found.values):
            raise SystemExit("a block has another length")
print(sorted(taken)[len(taken) * 99 // 100])
"""


class _Outcome(NamedTuple):
    """What one replay gave."""

    hit_ratio: float
    memory_bytes: int
    disk_bytes: int
    p99_s: float


def run(report: Report, *, quick: bool, vs: tuple[str, ...], trace: str | None = None) -> None:
    """Measure all rows; `vs` may name memory. Raises InvalidArgumentError for a malformed trace."""
    try:
        found = read_trace(trace) if trace else synthetic_trace(SYNTHETIC_REQUESTS)
    except ValueError as error:
        raise InvalidArgumentError(
            str(error), operation="bench conversations", advice=""
        ) from error
    memory = MEMORY_QUICK_BYTES if quick else MEMORY_BYTES
    count = _requests(found, TIMES_MEMORY * memory // BLOCK_BYTES)
    sides = {"ours": lambda: _replay(found, count, memory, disk=True)}
    if vs:
        sides["memory"] = lambda: _replay(found, count, memory, disk=False)
    outcomes = alternate(sides, REPEATS_QUICK if quick else REPEATS)
    ours, others = outcomes["ours"], {name: outcomes[name] for name in vs}

    def row(name: str, unit: str, at: str, scale: float, better: bool) -> None:
        beside = {
            side: [scale * getattr(one, at) for one in those] for side, those in others.items()
        }
        samples = [scale * getattr(one, at) for one in ours]
        report.row(name, unit, samples, vs=beside, higher_is_better=better)

    row("hit_ratio", "ratio", "hit_ratio", 1, True)
    row("foreground_p99", "ms", "p99_s", 1e3, False)
    report.row("read/memory", "GB", [one.memory_bytes / 1e9 for one in ours])
    report.row("read/disk", "GB", [one.disk_bytes / 1e9 for one in ours])


def _requests(trace: Trace, blocks: int) -> int:
    """Return how many requests name no more blocks than that, together."""
    _, first = np.unique(trace.ids, return_index=True)
    first.sort()
    end = first[blocks] if blocks < len(first) else len(trace.ids)
    return max(1, int(np.searchsorted(trace.offsets, end, side="right")) - 1)


def _replay(trace: Trace, count: int, memory: int, *, disk: bool) -> _Outcome:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-bench-"))
        lent = [f"{os.path.join(folder, 'disk')}:{2 * TIMES_MEMORY * memory}"] if disk else []
        pool = LocalCluster(segment=memory, worker={"files": lent} if disk else {})
        stack.enter_context(pool)
        store = stack.enter_context(Client(pool.url))
        found, put = 0, 0
        value = b"c" * BLOCK_BYTES
        with _foreground(pool.url) as p99:
            before = store.store_stats()[0]
            for at in range(count):
                ids = trace.ids[trace.offsets[at] : trace.offsets[at + 1]]
                names = [f"conversation/{number}" for number in ids.tolist()]
                run = _leading(store, names)
                store.put_many(names[run:], [value] * (len(names) - run))
                found, put = found + run, put + len(names)
                _wait_for_room(store, memory)
            after = store.store_stats()[0]
        below = (after.disk_hits - before.disk_hits) * BLOCK_BYTES
        near = found * BLOCK_BYTES - below
        return _Outcome(found / put, max(0, near), below, p99[0])


def _wait_for_room(store: Client, memory: int) -> None:
    until = time.monotonic() + PATIENCE_S
    while time.monotonic() < until:
        (shard,) = store.store_stats()
        near = shard.bytes_allocated - shard.disk_allocated
        if near <= ROOM * memory or not shard.hauls_unfinished:
            return
        threading.Event().wait(0.001)


def _leading(store: Client, names: list[str]) -> int:
    """Read what there is of a prompt; return how long its leading run is."""
    values = store.get_many(names).values
    return next((at for at, value in enumerate(values) if value is None), len(values))


@contextmanager
def _foreground(url: str) -> Iterator[list[float]]:
    """Have a process read from memory all the while; afterwards the list has its p99."""
    names = [f"foreground/{number}" for number in range(FOREGROUND)]
    reader = subprocess.Popen(
        [sys.executable, "-c", READER, url, str(BLOCK_BYTES), *names],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert reader.stdin is not None
    assert reader.stdout is not None
    p99: list[float] = []
    try:
        if reader.stdout.readline() != "ready\n":
            raise AssertionError("the reader in the foreground did not start")
        yield p99
        said, _ = reader.communicate("end\n", timeout=60)
        p99.append(float(said))
    finally:
        reader.kill()
        reader.wait()
