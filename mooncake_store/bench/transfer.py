"""How fast the transfer engine alone moves bytes: no master, no keys, no leases, no checksums.

Reads and writes of blocks between a buffer and a segment of another process (`local`: of this
one), one block a call and in batches, to and from places in a set far larger than the caches.
`upstream` is the engine of the original over tcp, between two processes, with its plain call for a
single block and its batch call for more. `raw` moves the same blocks with nothing around them:
bare blocking sockets beside tcp, bare memcpy beside shm and local.

All sides are measured in turn, in processes of the same shape. With threads, every batch is moved
by that many threads, a part each, by us and by the original; raw stays single.
"""

from __future__ import annotations

import math
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.bench import _upstream
from mooncake_store.bench._process import Driver, memory_available
from mooncake_store.bench._sides import Samples, add_row, measure
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.units import KIB, MIB, format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.bench.harness import Report

__all__ = ["Plan", "measure_all", "run"]

ALTERNATIVES = ("upstream", "raw")
SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
BATCHES = (1, 32, 128)
TRANSPORTS = ("tcp", "shm", "local")
OPERATIONS = ("read", "write")
RAW = {"tcp": "sockets", "shm": "memcpy", "local": "memcpy"}
COMMANDS = {"read": "get", "write": "put"}
BUFFERS = 14
"""Buffers and segments of all sides together, and as much again for everybody else."""
OBJECTS_BYTES_MAX = 512 * MIB


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured, and how long."""

    sizes: tuple[int, ...] = SIZES
    batches: tuple[int, ...] = BATCHES
    transports: tuple[str, ...] = TRANSPORTS
    operations: tuple[str, ...] = OPERATIONS
    threads: int = 1
    buffer_bytes: int = 512 * MIB
    budget_s: float = 0.15
    repeats: int = 5
    total_s: float = math.inf


def run(
    report: Report,
    *,
    quick: bool,
    vs: tuple[str, ...],
    sizes: str = "",
    batches: str = "",
    transports: str = "",
    operations: str = "",
    threads: int = 1,
) -> None:
    """Measure every row; `vs` may name upstream and raw. Lists are separated by commas."""
    wish = 128 * MIB if quick else 512 * MIB
    room = memory_available() // BUFFERS // (16 * MIB) * (16 * MIB)
    if not 1 <= threads <= 64:
        raise InvalidArgumentError(f"--threads {threads}: choose 1 to 64")
    plan = Plan(
        sizes=tuple(map(parse_size, _items(sizes))) or SIZES,
        batches=_numbers(batches) or BATCHES,
        transports=_chosen("--transport", transports, TRANSPORTS),
        operations=_chosen("--operation", operations, OPERATIONS),
        threads=threads,
        buffer_bytes=max(min(wish, room), 16 * MIB),
        budget_s=0.01 if quick else 0.15,
        repeats=3 if quick else 5,
        total_s=35.0 if quick else math.inf,
    )
    measure_all(report, plan, vs)


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def _numbers(text: str) -> tuple[int, ...]:
    for item in _items(text):
        if not item.isascii() or not item.isdigit() or not 1 <= int(item) <= 100_000:
            raise InvalidArgumentError(f"--batch {item}: choose 1 to 100000")
    return tuple(map(int, _items(text)))


def _chosen(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    for item in _items(text):
        if item not in known:
            raise InvalidArgumentError(f"{option} {item}: choose from {', '.join(known)}")
    return tuple(item for item in known if item in _items(text)) or tuple(known)


def measure_all(report: Report, plan: Plan, vs: tuple[str, ...]) -> None:
    """Measure what the plan says."""
    with ExitStack() as stack:
        bench = _Bench(report, plan, vs, stack)
        bench.start()
        for size in plan.sizes:
            bench.one_size(size)


class _Bench:
    """The sides by name, and the rows made from them."""

    def __init__(self, report: Report, plan: Plan, vs: tuple[str, ...], stack: ExitStack) -> None:
        self._report = report
        self._plan = plan
        self._vs = tuple(name for name in ALTERNATIVES if name in vs)
        self._stack = stack
        self._installed = _upstream.wanted(report, vs)
        self._drivers: dict[str, Driver] = {}
        self._started, self._measured = time.perf_counter(), 0

    def start(self) -> None:
        """Start every side: its owner, its buffer."""
        plan = self._plan
        shared: dict[str, Any] = {"nbytes": plan.buffer_bytes, "threads": plan.threads}
        for way in plan.transports:
            self._start(way, Driver(f"our engine over {way}", "engine"), transport=way, **shared)
        if self._installed is not None:
            _upstream.attempt(self._report, partial(self._start_upstream, shared))
        if "raw" in self._vs:
            for side in dict.fromkeys(RAW[way] for way in plan.transports):
                self._start(side, Driver(f"bare {side}", side), nbytes=plan.buffer_bytes)

    def _start(self, side: str, driver: Driver, **options: Any) -> None:
        self._stack.enter_context(driver)
        driver.ask("open", **options)
        driver.ask("buffer", nbytes=self._plan.buffer_bytes)
        self._drivers[side] = driver

    def _start_upstream(self, shared: dict[str, Any]) -> None:
        assert self._installed is not None
        driver = Driver("the original's engine", "upstream_engine", self._installed.python)
        self._start("upstream", driver, **shared)

    def one_size(self, size: int) -> None:
        """All rows of one block size."""
        plan, label = self._plan, format_size(size)
        count = min(plan.buffer_bytes, OBJECTS_BYTES_MAX) // size
        blocks: dict[str, Any] = {"prefix": label, "count": count, "size": size}
        if count:
            for driver in self._drivers.values():
                driver.ask("fill", **blocks)
        for operation in plan.operations:
            given = blocks if operation == "read" else {"count": count, "size": size}
            for batch in plan.batches:
                self._rows(operation, label, batch, given)

    def _rows(self, operation: str, label: str, batch: int, given: dict[str, Any]) -> None:
        plan = self._plan
        names = {way: f"{operation}/{way}/{label}/b{batch}" for way in plan.transports}
        if given["count"] < batch:
            why = f"{batch} such blocks do not fit into {format_size(plan.buffer_bytes)}"
            samples = Samples(failures=dict.fromkeys(plan.transports, why))
        else:

            def sample(driver: Driver) -> float:
                command = COMMANDS[operation]
                rate: float = driver.ask(command, **given, batch=batch, budget_s=plan.budget_s)
                return rate / 1e9

            calls = {side: partial(sample, driver) for side, driver in self._drivers.items()}
            samples = measure(calls, plan.repeats, self._deadline_s())
        for way, row in names.items():
            vs: dict[str, str] = {"upstream": "upstream", "raw": RAW[way]}
            against: dict[str, str] = {name: vs[name] for name in self._vs}
            add_row(self._report, row, "GB/s", samples, way, against)

    def _deadline_s(self) -> float:
        """A fair part, for the measurement that is next, of the time that is left."""
        plan = self._plan
        all_of_them = len(plan.sizes) * len(plan.batches) * len(plan.operations)
        self._measured += 1
        left = plan.total_s - (time.perf_counter() - self._started)
        return max(0.0, left / max(1, all_of_them + 1 - self._measured))
