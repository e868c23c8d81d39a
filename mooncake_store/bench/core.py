"""Bench of the shard core alone: operations per second, bytes per object, worst pause in growth.

One process, one shard, no sockets: what is measured is the state machine that a master runs, and
beside it, in the same run and alternating with it, the same job done by one Python object per key
(`dict_core.py`). Operation rows run over a million live objects with random keys, in batches of
128 and of 1024; digests, names and argument arrays are made before the clock starts. A get leases
for ten seconds and counts as a use. The evict rows take the population down by a few per cent per
sample and are measured last.

Memory is the growth of the resident set in a fresh process, less the bytes of the names, so it
counts tables, columns, allocator and policy. `worst_ms/grow` is the slowest single batch of 128
among all puts and gets while a shard grows from nothing: it shows rehashing in one go, if any.
It does not isolate the machine's own hiccups; the baseline meets the same ones.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.bench.harness import Report, alternate
from mooncake_store.bench.parts.dict_core import DictCore
from mooncake_store.bench.parts.process import rss_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["run"]

LIVE = 1_000_000
BATCHES = (128, 1024)
REPEATS, REPEATS_QUICK = 9, 5
KEYS_PER_SAMPLE = 98_304
KEYS_PER_EVICTION = 16_384
OBJECT_BYTES = 65_536
SEGMENTS, SEGMENT_BYTES = 8, 64 << 30
NAME_BYTES = 40
SECOND = 1_000_000_000
LEASE_NS = 10 * SECOND
GROW_BATCH = 128
GROW_DEADLINE_S = 600
WRITES = ("put_start", "put_end", "remove")
READS = ("get", "exists")


class Columns:
    """The store's own core."""

    def __init__(self) -> None:
        from mooncake_store.core.names import Names
        from mooncake_store.core.options import DEFAULTS, Placement, ShardConfig
        from mooncake_store.core.shard import Shard

        self._shard = Shard(ShardConfig(placement=Placement.RANDOM))
        self._options = DEFAULTS
        self._names = Names
        self._client = self._shard.open_client(1, b"bench".ljust(16), 1, "host")
        for number in range(SEGMENTS):
            status, _ = self._shard.mount(
                1, self._client, bytes([number] * 16), f"s{number}", SEGMENT_BYTES, f"h{number}"
            )
            assert status == 0, status

    def keys(self, digests: NDArray[np.uint64]) -> Any:
        """Digests as they are, with the columns that go with them; read-only, as from a socket."""
        n = len(digests)
        columns = digests.view(), np.full(n, OBJECT_BYTES, np.int64), np.zeros(n, np.uint64)
        for column in columns:
            column.flags.writeable = False
        return columns

    def put_start(self, now: int, keys: Any, names: bytes | None) -> Any:
        """Start a batch of puts; return its answer."""
        given = None
        if names is not None:
            given = self._names(names, np.full(len(keys[0]), NAME_BYTES, np.uint32))
        rows, _ = self._shard.put_start(
            now, self._client, 0, keys[0], keys[1], given, self._options
        )
        return rows

    def generations(self, answer: Any) -> Any:
        """Pick from that answer what `put_end` wants to be told."""
        return np.ascontiguousarray(answer["generation"])

    def put_end(self, now: int, keys: Any, generations: Any) -> Any:
        """End a batch of puts."""
        return self._shard.put_end(now, self._client, keys[0], generations, keys[2])

    def get(self, now: int, keys: Any) -> Any:
        """Look up a batch under a lease."""
        return self._shard.get(now, self._client, keys[0], LEASE_NS)

    def exists(self, now: int, keys: Any) -> Any:
        """Probe a batch."""
        return self._shard.exists(now, keys[0])

    def remove(self, now: int, keys: Any) -> Any:
        """Remove a batch."""
        return self._shard.remove(now, keys[0])

    def evict(self, now: int, count: int) -> int:
        """Evict about that many objects; return how many left."""
        return int(self._shard.evict(now, count / self._shard.objects).objects)


def _plain() -> DictCore:
    return DictCore(SEGMENTS, SEGMENT_BYTES, OBJECT_BYTES, NAME_BYTES, LEASE_NS)


SIDES: dict[str, Callable[[], Columns | DictCore]] = {"ours": Columns, "python": _plain}
ALTERNATIVES = ("python",)


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Fill the report; `vs` may name `python`, the baseline."""
    sides = ["ours", *(name for name in ALTERNATIVES if name in vs)]
    repeats = REPEATS_QUICK if quick else REPEATS
    crews = {side: _Crew.of(SIDES[side]()) for side in sides}
    for batch in BATCHES:
        _rates(report, WRITES, crews, repeats, batch)
        for operation in READS:
            _rates(report, (operation,), crews, repeats, batch)
    for batch in BATCHES:
        _rates(report, ("evict",), crews, repeats, batch)
    crews.clear()
    _growth(report, sides, quick=quick)


def _rates(
    report: Report,
    operations: tuple[str, ...],
    crews: dict[str, _Crew],
    repeats: int,
    batch: int,
) -> None:
    """Add a row for each of some operations that are measured in one go."""
    rates = alternate(
        {side: functools.partial(crew.sample, operations, batch) for side, crew in crews.items()},
        repeats,
    )
    for at, operation in enumerate(operations):
        samples = {side: [sample[at] for sample in taken] for side, taken in rates.items()}
        ours = samples.pop("ours")
        report.row(f"{operation}/b{batch}", "M ops/s", ours, vs=samples)


@dataclass(slots=True)
class _Crew:
    """One side with its population, its clock and its supply of keys."""

    side: Columns | DictCore
    rng: np.random.Generator
    live: NDArray[np.uint64]
    now: int = SECOND

    @classmethod
    def of(cls, side: Columns | DictCore) -> _Crew:
        """Fill a side with a million objects; every side gets the same keys."""
        rng = np.random.default_rng(1)
        crew = cls(side, rng, _digests(rng, LIVE))
        for first in range(0, LIVE, 4096):
            keys = side.keys(crew.live[first : first + 4096])
            answer = side.put_start(crew.now, keys, None)
            side.put_end(crew.now, keys, side.generations(answer))
        return crew

    def sample(self, operations: tuple[str, ...], batch: int) -> list[float]:
        """Millions of keys per second of some operations, in batches of that size."""
        self.now += 60 * SECOND  # past every lease of the sample before
        count = KEYS_PER_SAMPLE // batch * batch
        if operations == WRITES:
            seconds = self._writes(self._batches(_digests(self.rng, count), batch))
        elif operations == ("evict",):
            count, *seconds = self._evict(batch)
        else:
            picked = self.live[self.rng.integers(0, LIVE, count)]
            seconds = [self._reads(operations[0], self._batches(picked, batch))]
        return [count / elapsed / 1e6 for elapsed in seconds]

    def _batches(self, digests: NDArray[np.uint64], batch: int) -> list[Any]:
        return [self.side.keys(digests[at : at + batch]) for at in range(0, len(digests), batch)]

    def _reads(self, operation: str, batches: list[Any]) -> float:
        """Seconds for all batches; what they hit stays."""
        call, now = getattr(self.side, operation), self.now
        started = time.perf_counter()
        for keys in batches:
            call(now, keys)
        return time.perf_counter() - started

    def _writes(self, batches: list[Any]) -> list[float]:
        """Put and remove all batches; seconds of each of the three steps."""
        side, now = self.side, self.now
        began = time.perf_counter()
        answers = [side.put_start(now, keys, None) for keys in batches]
        started = time.perf_counter()
        stamped = list(zip(batches, map(side.generations, answers), strict=True))
        resumed = time.perf_counter()
        for keys, generations in stamped:
            side.put_end(now, keys, generations)
        ended = time.perf_counter()
        for keys in batches:
            side.remove(now, keys)
        return [started - began, ended - resumed, time.perf_counter() - ended]

    def _evict(self, batch: int) -> tuple[int, float]:
        """Evict about a batch per call; how many left, and the seconds."""
        left = 0
        started = time.perf_counter()
        for _ in range(KEYS_PER_EVICTION // batch):
            left += self.side.evict(self.now, batch)
        return left, time.perf_counter() - started


def _digests(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return rng.integers(0, 1 << 64, (count, 2), dtype=np.uint64)


def _growth(report: Report, sides: list[str], *, quick: bool) -> None:
    """Memory and pauses, each side in a process of its own.

    A quick run grows the baseline to a million only: five million Python objects take a while.
    """
    grown = {
        side: _in_child(side, LIVE if quick and side != "ours" else 5 * LIVE) for side in sides
    }
    _growth_row(report, "bytes_per_object/1M", "bytes", grown)
    _growth_row(report, "bytes_per_object/5M", "bytes", grown)
    _growth_row(report, "worst_ms/grow/5M", "ms", grown)


def _growth_row(report: Report, row: str, unit: str, grown: dict[str, dict[str, float]]) -> None:
    samples = {side: [found[row]] if row in found else [] for side, found in grown.items()}
    ours = samples.pop("ours")
    why = None if ours else "the measuring process failed or ran out of time or memory"
    report.row(row, unit, ours, vs=samples, higher_is_better=False, why=why)


def _in_child(side: str, objects: int) -> dict[str, float]:
    """Grow one side in a fresh interpreter; values by row name, none when it did not finish."""
    code = f"from mooncake_store.bench import core; core.grow({side!r}, {objects})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=GROW_DEADLINE_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    found: dict[str, float] = json.loads(done.stdout)
    return found


def grow(side_name: str, objects: int) -> None:
    """Grow a side to so many objects and write what that took as JSON to standard output.

    Run in a process of its own, since it compares the resident set before and after. A small
    shard of the same kind goes through every call first, so that compiling and importing count
    neither as memory nor as a pause.
    """
    _grow(SIDES[side_name](), range(4 * GROW_BATCH))
    side = SIDES[side_name]()
    found = {}
    worst_s = 0.0
    before = rss_bytes([os.getpid()])
    for millions in range(1, objects // LIVE + 1):
        worst_s = max(worst_s, _grow(side, range((millions - 1) * LIVE, millions * LIVE)))
        net = rss_bytes([os.getpid()]) - before - NAME_BYTES * millions * LIVE
        found[f"bytes_per_object/{millions}M"] = net / (millions * LIVE)
    found[f"worst_ms/grow/{objects // LIVE}M"] = worst_s * 1e3
    sys.stdout.write(json.dumps(found))


def _grow(side: Columns | DictCore, numbers: range) -> float:
    """Put and get objects in batches; return the seconds of the slowest single call."""
    rng = np.random.default_rng(numbers.start)
    worst, now = 0.0, SECOND + numbers.start * 10_000
    for first in numbers[::GROW_BATCH]:
        now += 1_000_000
        n = min(GROW_BATCH, numbers.stop - first)
        keys = side.keys(_digests(rng, n))
        names = b"".join(b"model/layer-%028d" % at for at in range(first, first + n))
        marks = [time.perf_counter()]
        answer = side.put_start(now, keys, names)
        marks.append(time.perf_counter())
        generations = side.generations(answer)
        marks.append(time.perf_counter())
        side.put_end(now, keys, generations)
        marks.append(time.perf_counter())
        side.get(now, keys)
        marks.append(time.perf_counter())
        worst = max(worst, marks[1] - marks[0], marks[3] - marks[2], marks[4] - marks[3])
    return worst
