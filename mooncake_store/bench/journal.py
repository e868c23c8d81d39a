"""What it costs to keep what a master knows: pools that write it down beside one that does not.

Rows: batches of small puts with their removal, and gets, in keys per second; then the slowest of a
thousand calls of put, alone and while another process fills the same disk. `value` is a pool as it
is started by default (`--journal written`); beside it stand `none`, and `synced`, where a put waits
for the disk. All alternate in one run. `bytes_per_put` is what one with its removal writes.

It measures an undisturbed life; how long a restart takes is for `restart`.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mooncake_store.bench.harness import alternate
from mooncake_store.client.blocking import Client
from mooncake_store.local_cluster import LocalCluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from mooncake_store.bench.harness import Report

__all__ = ["run"]

ALTERNATIVES = ()
DEFAULT = "written"
LEVELS = (DEFAULT, "none", "synced")
BATCHES = (128, 1024)
SAMPLE_S, SAMPLE_QUICK_S = 0.3, 0.05
REPEATS, REPEATS_QUICK = 15, 3
CALLS, CALLS_QUICK = 1000, 50
"""Calls of which the slowest in a thousand is told, or the slowest of fewer."""
_FILLER = """
import os, sys
data = bytes(1 << 20)
while True:
    file = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(512):
        os.write(file, data)
    os.fsync(file)
    os.close(file)
"""


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure all rows; `vs` is empty: the original keeps nothing."""
    with ExitStack() as stack:
        bench = _Bench(report, stack, quick=quick)
        for count in BATCHES:
            names = _names("fresh", count)
            bench.rates(f"put_remove/{count}", partial(_put, names=names), count)
        for count in BATCHES:
            names = _names("kept", count)
            for store in bench.stores.values():
                store.put_many(names, [b"x" * 64] * count).check()
            bench.rates(f"get/{count}", partial(_get, names=names), count)
        bench.slowest("slowest_put/128")
        with _disk_busy(bench.folder):
            bench.slowest("slowest_put/128/disk_busy")
        bench.bytes_per_put()


class _Bench:
    """A pool of each level, all on one disk."""

    def __init__(self, report: Report, stack: ExitStack, *, quick: bool) -> None:
        self._report = report
        self._repeats = REPEATS_QUICK if quick else REPEATS
        self._sample_s = SAMPLE_QUICK_S if quick else SAMPLE_S
        self._calls = CALLS_QUICK if quick else CALLS
        self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-")))
        self.stores: dict[str, Client] = {}
        for level in LEVELS:
            kept = {"journal": level, "state": str(self.folder / level)}
            cluster = stack.enter_context(LocalCluster(segment="64MB", master=kept))
            self.stores[level] = stack.enter_context(Client(cluster.url))

    def rates(self, name: str, call: Callable[[Client], object], many: int) -> None:
        """Add a row of how often something of so many keys can be done."""

        def rate(store: Client) -> float:
            done, began = 0, time.perf_counter()
            while (taken := time.perf_counter() - began) < self._sample_s:
                call(store)
                done += many
            return done / taken

        self._row(name, "keys/s", rate)

    def slowest(self, name: str) -> None:
        """Add a row of the slowest put among many."""
        names = _names("slow", BATCHES[0])
        values = [b"x" * 64] * len(names)

        def slowest(store: Client) -> float:
            taken = []
            for _ in range(self._calls):
                began = time.perf_counter()
                store.put_many(names, values).check()
                taken.append(time.perf_counter() - began)
                store.remove_many(names).check()
            return 1e6 * max(taken)

        self._row(name, "us", slowest, higher_is_better=False)

    def _row(
        self,
        name: str,
        unit: str,
        sample: Callable[[Client], float],
        *,
        higher_is_better: bool = True,
    ) -> None:
        sides = {level: partial(sample, store) for level, store in self.stores.items()}
        samples = alternate(sides, self._repeats)
        vs = {level: samples[level] for level in LEVELS if level != DEFAULT}
        self._report.row(name, unit, samples[DEFAULT], vs=vs, higher_is_better=higher_is_better)

    def bytes_per_put(self) -> None:
        """Add a row of what a put of a small object with its removal writes."""
        store, names = self.stores[DEFAULT], _names("size", 1024)
        before = store.store_stats()[0].journal_bytes
        _put(store, names)
        each = (store.store_stats()[0].journal_bytes - before) / len(names)
        self._report.row("bytes_per_put", "B", [each], higher_is_better=False)


@contextmanager
def _disk_busy(folder: Path) -> Iterator[None]:
    """Have a process write to the disk of a folder as fast as that takes it."""
    file = folder / "filler"
    process = subprocess.Popen([sys.executable, "-c", _FILLER, str(file)])
    try:
        yield
    finally:
        process.kill()
        process.wait()
        file.unlink(missing_ok=True)


def _put(store: Client, names: list[str]) -> None:
    """Put a batch of small objects, and remove it to make place for the next."""
    store.put_many(names, [b"x" * 64] * len(names)).check()
    store.remove_many(names).check()


def _get(store: Client, names: list[str]) -> None:
    store.get_many(names)


def _names(kind: str, count: int) -> list[str]:
    return [f"model/llama-3-8b/{kind}/07/block/{at:08d}" for at in range(count)]
