"""Bench of the shard core alone: operations per second, bytes per object, worst pause in growth.

One process, one shard, no sockets: what is measured is the state machine that a master runs, and
beside it, in the same run and alternating with it, the same job done by one Python object per key
(`_dict_core.py`). Operation rows run over a million live objects with random keys, in batches of
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
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mooncake_store.bench.harness import Report, alternate

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
OPERATIONS = ("put_start", "put_end", "get", "exists", "remove")


class Side(Protocol):
    """One implementation, driven by batches that were prepared in its own key format."""

    def keys(self, digests: NDArray[np.uint64]) -> Any:
        """Turn digests into what the implementation takes as keys."""

    def put_start(self, now: int, keys: Any, names: bytes | None) -> Any:
        """Start a batch of puts; return its answer."""

    def generations(self, answer: Any) -> Any:
        """Pick from that answer what put_end wants to be told."""

    def put_end(self, now: int, keys: Any, generations: Any) -> Any:
        """End a batch of puts."""

    def get(self, now: int, keys: Any) -> Any:
        """Look up a batch under a lease."""

    def exists(self, now: int, keys: Any) -> Any:
        """Probe a batch."""

    def remove(self, now: int, keys: Any) -> Any:
        """Remove a batch."""

    def evict(self, now: int, count: int) -> int:
        """Evict about that many objects; return how many left."""


class Columns:
    """The store's own core."""

    def __init__(self) -> None:
        from mooncake_store.core import Placement, PutOptions, Shard, ShardConfig
        from mooncake_store.core.names import Names

        self._shard = Shard(ShardConfig(placement=Placement.RANDOM))
        self._options = PutOptions()
        self._names = Names
        self._client = self._shard.open_client(1, b"bench".ljust(16), 1, "host")
        for number in range(SEGMENTS):
            status, _ = self._shard.mount(
                1, self._client, bytes([number] * 16), f"s{number}", SEGMENT_BYTES, f"h{number}"
            )
            assert status == 0, status

    def keys(self, digests: NDArray[np.uint64]) -> Any:
        """Digests as they are, with the columns that go with them."""
        n = len(digests)
        return digests, np.full(n, OBJECT_BYTES, np.int64), np.zeros(n, np.uint64)

    def put_start(self, now: int, keys: Any, names: bytes | None) -> Any:
        """Start a batch."""
        given = None
        if names is not None:
            given = self._names(names, np.full(len(keys[0]), NAME_BYTES, np.uint16))
        rows, _ = self._shard.put_start(
            now, self._client, 0, keys[0], keys[1], given, self._options
        )
        return rows

    def generations(self, answer: Any) -> Any:
        """One column of the answer."""
        return np.ascontiguousarray(answer["generation"])

    def put_end(self, now: int, keys: Any, generations: Any) -> Any:
        """End a batch."""
        return self._shard.put_end(now, self._client, keys[0], generations, keys[2])

    def get(self, now: int, keys: Any) -> Any:
        """Look up a batch under a lease."""
        return self._shard.get(now, keys[0], LEASE_NS)

    def exists(self, now: int, keys: Any) -> Any:
        """Probe a batch."""
        return self._shard.exists(now, keys[0])

    def remove(self, now: int, keys: Any) -> Any:
        """Remove a batch."""
        return self._shard.remove(now, keys[0])

    def evict(self, now: int, count: int) -> int:
        """Evict by the share that makes the count."""
        return int(self._shard.evict(now, count / self._shard.stats().objects).objects)


class Objects:
    """The baseline: a dict of dataclass objects."""

    def __init__(self) -> None:
        from mooncake_store.bench._dict_core import DictCore

        self._core = DictCore(SEGMENTS, SEGMENT_BYTES)

    def keys(self, digests: NDArray[np.uint64]) -> Any:
        """Digests as bytes, with the lists that go with them."""
        raw = digests.tobytes()
        n = len(digests)
        return [raw[16 * i : 16 * i + 16] for i in range(n)], [OBJECT_BYTES] * n, [0] * n

    def put_start(self, now: int, keys: Any, names: bytes | None) -> Any:
        """Start a batch."""
        given = None
        if names is not None:
            n = len(keys[0])
            given = [names[NAME_BYTES * i : NAME_BYTES * i + NAME_BYTES] for i in range(n)]
        return self._core.put_start(now, 1, keys[0], keys[1], given)

    def generations(self, answer: Any) -> Any:
        """The second part of every answer."""
        return [row[1] for row in answer]

    def put_end(self, now: int, keys: Any, generations: Any) -> Any:
        """End a batch."""
        return self._core.put_end(now, 1, keys[0], generations, keys[2])

    def get(self, now: int, keys: Any) -> Any:
        """Look up a batch under a lease."""
        return self._core.get(now, keys[0], LEASE_NS)

    def exists(self, now: int, keys: Any) -> Any:
        """Probe a batch."""
        del now
        return self._core.exists(keys[0])

    def remove(self, now: int, keys: Any) -> Any:
        """Remove a batch."""
        return self._core.remove(now, keys[0])

    def evict(self, now: int, count: int) -> int:
        """Evict by the share that makes the count."""
        return self._core.evict(now, count / len(self._core))


SIDES: dict[str, Callable[[], Side]] = {"ours": Columns, "python": Objects}


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Fill the report; `vs` may name `python`, the baseline."""
    sides = ["ours", *(side for side in vs if side in SIDES and side != "ours")]
    repeats = REPEATS_QUICK if quick else REPEATS
    crews = {side: _Crew.of(SIDES[side]()) for side in sides}
    for batch in BATCHES:
        for operation in OPERATIONS:
            _rates(report, f"{operation}/b{batch}", crews, repeats, operation, batch)
    for batch in BATCHES:
        _rates(report, f"evict/b{batch}", crews, repeats, "evict", batch)
    crews.clear()
    _growth(report, sides, quick=quick)


def _rates(
    report: Report, row: str, crews: dict[str, _Crew], repeats: int, operation: str, batch: int
) -> None:
    samples = alternate(
        {side: functools.partial(crew.sample, operation, batch) for side, crew in crews.items()},
        repeats,
    )
    ours = samples.pop("ours")
    report.row(row, "M ops/s", ours, vs=samples)


@dataclass(slots=True)
class _Crew:
    """One side with its population, its clock and its supply of keys."""

    side: Side
    rng: np.random.Generator
    live: NDArray[np.uint64]
    now: int = SECOND

    @classmethod
    def of(cls, side: Side) -> _Crew:
        """Fill a side with a million objects; every side gets the same keys."""
        rng = np.random.default_rng(1)
        crew = cls(side, rng, _digests(rng, LIVE))
        for first in range(0, LIVE, 4096):
            crew._put(side.keys(crew.live[first : first + 4096]))
        return crew

    def _put(self, keys: Any) -> None:
        self._end(keys, self.side.put_start(self.now, keys, None))

    def _end(self, keys: Any, answer: Any) -> None:
        self.side.put_end(self.now, keys, self.side.generations(answer))

    def sample(self, operation: str, batch: int) -> float:
        """Millions of keys per second of one operation, in batches of that size."""
        self.now += 60 * SECOND  # past every lease of the sample before
        if operation == "evict":
            return self._evict(batch)
        count = KEYS_PER_SAMPLE // batch
        reads = operation in ("get", "exists")
        made = (
            self.live[self.rng.integers(0, LIVE, count * batch)]
            if reads
            else _digests(self.rng, count * batch)
        )
        batches = [self.side.keys(made[at : at + batch]) for at in range(0, len(made), batch)]
        run: Callable[[str, list[Any]], float] = self._reads if reads else self._writes
        return count * batch / run(operation, batches) / 1e6

    def _reads(self, operation: str, batches: list[Any]) -> float:
        """Seconds for all batches; what they hit stays."""
        call, now = getattr(self.side, operation), self.now
        started = time.perf_counter()
        for keys in batches:
            call(now, keys)
        return time.perf_counter() - started

    def _writes(self, wanted: str, batches: list[Any]) -> float:
        """Put and remove all batches; seconds of the wanted step."""
        side, now = self.side, self.now
        marks = [time.perf_counter()]
        answers = [side.put_start(now, keys, None) for keys in batches]
        marks.append(time.perf_counter())
        stamped = list(zip(batches, map(side.generations, answers), strict=True))
        restart = time.perf_counter()
        for keys, generations in stamped:
            side.put_end(now, keys, generations)
        marks.append(time.perf_counter())
        for keys in batches:
            side.remove(now, keys)
        marks.append(time.perf_counter())
        if wanted == "put_start":
            return marks[1] - marks[0]
        return marks[2] - restart if wanted == "put_end" else marks[3] - marks[2]

    def _evict(self, batch: int) -> float:
        """Millions of objects per second that leave, about a batch of them per call."""
        left = 0
        started = time.perf_counter()
        for _ in range(KEYS_PER_EVICTION // batch):
            left += self.side.evict(self.now, batch)
        return left / (time.perf_counter() - started) / 1e6


def _digests(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    return rng.integers(0, 1 << 64, (count, 2), dtype=np.uint64)


def _growth(report: Report, sides: list[str], *, quick: bool) -> None:
    """Memory and pauses, each side in a process of its own."""
    small = {side: _in_child(side, LIVE) for side in sides}
    large = {
        side: _in_child(side, 5 * LIVE) if side == "ours" or not quick else None for side in sides
    }
    for label, grown in (("1M", small), ("5M", large)):
        _growth_row(report, f"bytes_per_object/{label}", "bytes", grown, "bytes")
    _growth_row(report, "worst_ms/grow/5M", "ms", large, "worst_ms")


def _growth_row(
    report: Report, row: str, unit: str, grown: dict[str, dict[str, float] | None], field: str
) -> None:
    samples = {side: [found[field]] if found else [] for side, found in grown.items()}
    ours = samples.pop("ours")
    why = None if ours else "the measuring process failed or ran out of time or memory"
    report.row(row, unit, ours, vs=samples, higher_is_better=False, why=why)


def _in_child(side: str, objects: int) -> dict[str, float] | None:
    """Grow one side in a fresh interpreter; None when it did not finish."""
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
        return None
    found: dict[str, float] = json.loads(done.stdout)
    return found


def grow(side_name: str, objects: int) -> None:
    """Grow a side to so many objects and write what that took as JSON to standard output.

    Run in a process of its own, since it compares the resident set before and after. A small
    shard of the same kind goes through every call first, so that compiling and importing count
    neither as memory nor as a pause.
    """
    _grow(SIDES[side_name](), 4 * GROW_BATCH)
    side = SIDES[side_name]()
    before = _resident_bytes()
    worst_s = _grow(side, objects)
    grown = _resident_bytes() - before - NAME_BYTES * objects
    found = {"bytes": grown / objects, "worst_ms": worst_s * 1e3}
    sys.stdout.write(json.dumps(found))


def _grow(side: Side, objects: int) -> float:
    """Put and get all objects in batches; return the seconds of the slowest single call."""
    rng = np.random.default_rng(2)
    worst, now = 0.0, SECOND
    for first in range(0, objects, GROW_BATCH):
        now += 1_000_000
        n = min(GROW_BATCH, objects - first)
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


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()
