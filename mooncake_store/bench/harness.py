"""What every benchmark shares: alternating measurement, the report, machine and noise.

A ratio is only worth printing when both sides ran on the same machine in the same minute, so
`alternate` interleaves them (A B A B ...) and drops one warm-up of each: slow drift (frequency,
neighbours, page cache) then falls on both sides alike. A report never hides a row: what could not
be measured is present with a null value and the reason.

The value of a row is the median of its samples; `low` and `high` are the smallest and the largest
sample, because with the five or so repeats used here quantiles would be interpolation. `noise` is
a fixed pure-Python loop timed before the first row and after the last: if that loop moved, so did
the machine, and small ratios mean nothing.

This module neither warms caches, pins cores nor changes the collector: what it measures is
what a user gets. It imports the standard library only. Cost: two calibrations of about 50 ms
each, and memory for the samples.
"""

from __future__ import annotations

import math
import os
import platform
import statistics
import subprocess
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

__all__ = [
    "Against",
    "Report",
    "Row",
    "alternate",
    "listed",
    "machine",
    "memory_bytes",
    "versions",
]

T = TypeVar("T")

CALIBRATION_ROUNDS = 9
CALIBRATION_STEPS = 100_000


def listed(text: str) -> tuple[str, ...]:
    """The distinct items of a comma-separated option, in order."""
    return tuple(dict.fromkeys(item.strip() for item in text.split(",") if item.strip()))


def alternate(
    sides: Mapping[str, Callable[[], T]], repeats: int, deadline_s: float | None = None
) -> dict[str, list[T]]:
    """Call every side in turn, `repeats` times over, and return what each call returned.

    One round before the first is a warm-up and is not returned. After `deadline_s` seconds no
    new round starts; the first counted round always runs, and rounds are never cut, so all sides
    have equally many samples. A call returns its own sample: a rate or a duration, or several.
    """
    if not sides:
        raise ValueError("alternate needs at least one side")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, not {repeats}")
    started = time.perf_counter()
    for call in sides.values():
        call()
    samples: dict[str, list[T]] = {name: [] for name in sides}
    for done in range(repeats):
        if done and deadline_s is not None and time.perf_counter() - started > deadline_s:
            break
        for name, call in sides.items():
            samples[name].append(call())
    return samples


@dataclass(frozen=True, slots=True)
class Against:
    """The other side of a row: its median, and our advantage (above 1 when we are better)."""

    value: float | None
    ratio: float | None


@dataclass(frozen=True, slots=True)
class Row:
    """One measured quantity; `value` is None exactly when `why` says the reason."""

    name: str
    value: float | None
    unit: str
    low: float | None
    high: float | None
    repeats: int
    vs: dict[str, Against]
    why: str | None

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON values; `vs` and `why` only where there is something to say."""
        told = {"vs": bool(self.vs), "why": self.why is not None}
        return {name: value for name, value in asdict(self).items() if told.get(name, True)}


@dataclass(slots=True)
class Report:
    """Collects the rows of one bench run together with the machine they were measured on.

    Make it before measuring and call `to_dict` after: both ends calibrate the noise.
    """

    bench: str
    quick: bool = False
    on_row: Callable[[Row], None] | None = None
    rows: list[Row] = field(default_factory=list, init=False)
    _prefix: str = field(default="", init=False)
    _before: _Calibration = field(init=False)

    def __post_init__(self) -> None:
        self._before = _calibrate()

    def row(
        self,
        name: str,
        unit: str,
        samples: Sequence[float],
        *,
        vs: Mapping[str, Sequence[float]] | None = None,
        higher_is_better: bool = True,
        why: str | None = None,
    ) -> None:
        """Add one row from its samples and those of the sides it is compared with.

        No samples means it could not be measured, and then `why` must say why. A side in `vs`
        without samples is kept with null values, so that a reader sees it was asked for.
        """
        name = self._prefix + name
        if any(row.name == name for row in self.rows):
            raise ValueError(f"bench {self.bench} reports the row {name!r} twice")
        if bool(samples) == (why is not None):
            raise ValueError(f"row {name!r} needs either samples or the reason there are none")
        if not all(map(math.isfinite, samples)):
            raise ValueError(f"row {name!r} has a sample that is no number: {list(samples)}")
        value = _median(samples)
        row = Row(
            name=name,
            value=value,
            unit=unit,
            low=_tidy(min(samples)) if samples else None,
            high=_tidy(max(samples)) if samples else None,
            repeats=len(samples),
            vs={
                side: _against(value, _median(theirs), higher_is_better)
                for side, theirs in (vs or {}).items()
            },
            why=why,
        )
        self.rows.append(row)
        if self.on_row is not None:
            self.on_row(row)

    @contextmanager
    def within(self, bench: str) -> Iterator[None]:
        """Put `bench/` before the names of rows added inside; used by the run of all benches."""
        outer, self._prefix = self._prefix, f"{self._prefix}{bench}/"
        try:
            yield
        finally:
            self._prefix = outer

    def to_dict(self) -> dict[str, Any]:
        """The whole report as one plain JSON object; measures the noise a second time."""
        return {
            "bench": self.bench,
            "quick": self.quick,
            "machine": machine(),
            "versions": versions(),
            "noise": self.noise(),
            "rows": [row.to_dict() for row in self.rows],
        }

    def noise(self) -> dict[str, Any]:
        """How much the machine itself moved between making this report and now."""
        before, after = self._before, _calibrate()
        return {
            "calibration_ms": _tidy(before.median_ms),
            "spread_before": _tidy(before.spread),
            "spread_after": _tidy(after.spread),
            "drift": _tidy(after.median_ms / before.median_ms - 1),
            "load_average": [round(load, 2) for load in os.getloadavg()],
        }


def _median(samples: Sequence[float]) -> float | None:
    return _tidy(statistics.median(samples)) if samples else None


def _against(ours: float | None, theirs: float | None, higher_is_better: bool) -> Against:
    above, below = (ours, theirs) if higher_is_better else (theirs, ours)
    ratio = None if above is None or not below else _tidy(above / below, digits=4)
    return Against(theirs, ratio)


def _tidy(number: float, digits: int = 6) -> float:
    """Whole numbers stay exact (hits, bytes); others keep the digits that a timing can carry."""
    return int(number) if float(number).is_integer() else float(f"{number:.{digits}g}")


@dataclass(frozen=True, slots=True)
class _Calibration:
    median_ms: float
    spread: float


def _calibrate() -> _Calibration:
    """Time one fixed loop; its spread is (slowest - fastest) / median."""
    times_ms = []
    for _ in range(CALIBRATION_ROUNDS):
        started = time.perf_counter()
        total = 0
        for step in range(CALIBRATION_STEPS):
            total += step
        times_ms.append((time.perf_counter() - started) * 1e3)
    median_ms = statistics.median(times_ms)
    return _Calibration(median_ms, (max(times_ms) - min(times_ms)) / median_ms)


def machine() -> dict[str, Any]:
    """The hardware and kernel facts a reader needs to compare figures; null where unknown."""
    thp = _read("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "cpu": _field("/proc/cpuinfo", "model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes("MemTotal"),
        "kernel": platform.release(),
        "transparent_hugepages": thp.partition("[")[2].partition("]")[0] or None,
    }


def memory_bytes(name: str) -> int | None:
    """MemTotal, MemAvailable or another line of /proc/meminfo; None where unknown."""
    kib = _field("/proc/meminfo", name)
    return int(kib.split()[0]) * 1024 if kib else None


def versions() -> dict[str, str | None]:
    """What was measured: our version and commit, the interpreter, numpy and numba."""
    return {
        "mooncake_store": _version("mooncake-store"),
        "commit": _commit(),
        "python": platform.python_version(),
        "numpy": _version("numpy"),
        "numba": _version("numba"),
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checked-out commit, marked when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _field(path: str, name: str) -> str:
    """The first `name : value` line of a /proc file, or an empty string."""
    for line in _read(path).splitlines():
        label, separator, value = line.partition(":")
        if separator and label.strip() == name:
            return value.strip()
    return ""
