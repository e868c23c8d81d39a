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
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.bench.harness import listed, memory_bytes
from mooncake_store.bench.parts import upstream
from mooncake_store.bench.parts.blocks import (
    ALTERNATIVES,
    BATCHES,
    TRANSPORTS,
    BlockBench,
    BlockPlan,
)
from mooncake_store.bench.parts.process import Driver
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.units import KIB, MIB, format_size, parse_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.bench.harness import Report

__all__ = ["ALTERNATIVES", "Plan", "measure_all", "run"]

SIZES = (4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB)
OPERATIONS = ("read", "write")
BUFFERS = 14
"""Buffers and segments of all sides together, and as much again for everybody else."""


@dataclass(frozen=True, kw_only=True)
class Plan(BlockPlan):
    """What is measured, and for how long."""

    operations: tuple[str, ...] = OPERATIONS
    threads: int = 1


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
    room = (memory_bytes("MemAvailable") or 0) // BUFFERS // (16 * MIB) * (16 * MIB)
    if not 1 <= threads <= 64:
        raise InvalidArgumentError(f"--threads {threads}: choose 1 to 64")
    plan = Plan(
        sizes=tuple(map(parse_size, listed(sizes))) or SIZES,
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


def _numbers(text: str) -> tuple[int, ...]:
    for item in listed(text):
        if not item.isascii() or not item.isdigit() or not 1 <= int(item) <= 100_000:
            raise InvalidArgumentError(f"--batch {item}: choose 1 to 100000")
    return tuple(map(int, listed(text)))


def _chosen(option: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    for item in listed(text):
        if item not in known:
            raise InvalidArgumentError(f"{option} {item}: choose from {', '.join(known)}")
    return tuple(item for item in known if item in listed(text)) or tuple(known)


def measure_all(report: Report, plan: Plan, vs: tuple[str, ...]) -> None:
    """Measure what the plan says."""
    with ExitStack() as stack:
        bench = _Bench(report, plan, vs, stack)
        bench.start()
        for size in plan.sizes:
            bench.one_size(size)


class _Bench(BlockBench):
    """Our engine by transport, that of the original, and the bare calls."""

    _plan: Plan

    def start(self) -> None:
        """Start every side: its owner, its buffer."""
        plan = self._plan
        shared: dict[str, Any] = {"nbytes": plan.buffer_bytes, "threads": plan.threads}
        for way in plan.transports:
            self._start(way, Driver(f"our engine over {way}", "engine"), transport=way, **shared)
        if self._upstream is not None:
            theirs = Driver("the original's engine", "upstream_engine", self._upstream.python)
            upstream.attempt(self._report, partial(self._start, "upstream", theirs, **shared))
        self._start_bare()

    def one_size(self, size: int) -> None:
        """All rows of one block size."""
        plan = self._plan
        count = plan.buffer_bytes // size
        blocks: dict[str, Any] = {"prefix": format_size(size), "count": count, "size": size}
        if count:
            for driver in self._drivers.values():
                driver.ask("fill", **blocks)
        for operation in plan.operations:
            self._rates(operation, blocks)
