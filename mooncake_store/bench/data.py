"""How fast objects move: gets and puts of 4 KiB to 4 MiB, by every way a client can reach them.

`tcp` and `shm` are clients of one pool whose memory another process owns, `local` is a client
that reads the segment it owns itself. Reads go to random objects in a set far larger than the
caches, into buffers as large; no object is read twice before all were, and the lease cache is
off, so every get asks the master. Checksums are on: every get verifies what it read. Puts write
fresh keys into memory that was used before; what they wrote is removed off the clock.

`upstream` is the original, with registered buffers: its path between two processes beside tcp and
shm (it has no other on one host), its in-process path beside local. `raw` moves the same blocks
with nothing around them: bare blocking sockets beside tcp, bare memcpy beside shm and local.
`rights` is a client over tcp with a credential, beside one with the pool's secret (`off`).

All sides run in processes of the same shape and are measured in turn. The time of a sample is
bounded, not its bytes, except that a batch is never cut. A full run takes about six minutes.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.bench.harness import memory_bytes
from mooncake_store.bench.parts import upstream
from mooncake_store.bench.parts.blocks import (
    AGAINST,
    ALTERNATIVES,
    BATCHES,
    RAW,
    BlockBench,
    BlockPlan,
)
from mooncake_store.bench.parts.rights import measure_rights
from mooncake_store.bench.parts.store import StorePool
from mooncake_store.bench.sides.measuring import Samples, add_row, measure
from mooncake_store.errors import StoreError
from mooncake_store.units import GIB, KIB, MIB, format_size

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report
    from mooncake_store.bench.parts.process import Driver

__all__ = ["ALTERNATIVES", "Plan", "measure_all", "run"]

LATENCY_BYTES = 64 * KIB
LEASED_OBJECTS = 64
LEASE_TTL = "2s"
"""Space of what is removed under a lease comes back when that ends: before the next puts."""
POOL_BUFFERS = 4
"""A pool is this many times the buffer: objects, puts, and what leases still hold."""
MEMORY_BUFFERS = 30
"""All buffers and pools together, and as much again for everybody else, in buffers."""
QUICK_S = 32.0
"""After this long a quick run makes as few rounds as it can; a pool under pressure comes last."""


@dataclass(frozen=True, kw_only=True)
class Plan(BlockPlan):
    """How much is measured."""

    objects_bytes_max: int
    latency_calls: int

    def objects(self, size: int) -> int:
        """How many objects of this size there are: a batch at least, a buffer full at most."""
        fit = self.buffer_bytes // size
        return max(1, min(fit, max(BATCHES[-1], self.objects_bytes_max // size)))


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure every row; `vs` may name upstream and raw."""
    wish = 128 * MIB if quick else 512 * MIB
    room = (memory_bytes("MemAvailable") or 0) // MEMORY_BUFFERS // (4 * MIB) * (4 * MIB)
    plan = Plan(
        sizes=(4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB),
        buffer_bytes=max(min(wish, room), 4 * MIB),
        objects_bytes_max=64 * MIB if quick else GIB,
        budget_s=0.01 if quick else 0.15,
        repeats=3 if quick else 5,
        total_s=QUICK_S if quick else math.inf,
        latency_calls=200 if quick else 2000,
        too_large="left out by --quick" if room >= wish and quick else "needs more free memory",
    )
    measure_all(report, plan, vs)


def measure_all(report: Report, plan: Plan, vs: tuple[str, ...]) -> None:
    """Measure what the plan says."""
    with ExitStack() as stack:
        bench = _Bench(report, plan, vs, stack)
        bench.start()
        for size in plan.sizes:
            bench.one_size(size)
    measure_rights(report, plan)
    bench.pressure()


class _Bench(BlockBench):
    """Our clients by transport, those of the original, and the bare calls."""

    _plan: Plan
    # The original has a path within one process as well.
    _against = AGAINST | {"local": {"upstream": "upstream_local", "raw": RAW["local"]}}

    def start(self) -> None:
        """Start all pools and clients, and use the memory of every pool once."""
        buffer_bytes, drivers = self._plan.buffer_bytes, self._drivers
        pool_bytes = POOL_BUFFERS * buffer_bytes
        shared = self._stack.enter_context(StorePool(segment_bytes=pool_bytes))
        every: dict[str, Any] = {"lease_cache": False, "lease_ttl": LEASE_TTL}
        drivers["tcp"] = shared.client(buffer_bytes, transports=["tcp"], **every)
        drivers["shm"] = shared.client(buffer_bytes, transports=["shm"], **every)
        self._leased = shared.client(LEASED_OBJECTS * LATENCY_BYTES, transports=["shm"])
        own = self._stack.enter_context(StorePool(workers=0))
        drivers["local"] = own.client(
            buffer_bytes, segment=pool_bytes, transports=["local"], **every
        )
        if self._upstream is not None:
            upstream.attempt(self._report, partial(self._start_upstream, self._upstream))
        self._start_bare()
        self._touch()

    def _start_upstream(self, installed: upstream.Environment) -> None:
        pool_bytes, buffer_bytes = POOL_BUFFERS * self._plan.buffer_bytes, self._plan.buffer_bytes
        between = self._stack.enter_context(upstream.pool(installed))
        between.worker(pool_bytes)
        reader = between.client(buffer_bytes)
        within = self._stack.enter_context(upstream.pool(installed))
        self._drivers["upstream_local"] = within.client(buffer_bytes, pool_bytes)
        self._drivers["upstream"] = reader

    def _touch(self) -> None:
        size = min(4 * MIB, self._plan.buffer_bytes)
        count = int(0.8 * POOL_BUFFERS * self._plan.buffer_bytes) // size
        bare = tuple(RAW.values())
        self._owners("fill", bare, prefix="touch", count=count, size=size)
        self._owners("drop", bare, prefix="touch", count=count)

    def _owners(self, command: str, but: tuple[str, ...] = (), **options: Any) -> None:
        """Ask one client of every pool, but for some: it puts what all clients of the pool read.

        If the original fails here, a row says so and its sides are null from then on.
        """
        for side, driver in list(self._drivers.items()):
            if side in ("tcp", *but):
                continue
            try:
                driver.ask(command, **options)
            except StoreError as error:
                if not side.startswith("upstream"):
                    raise
                del self._drivers[side]
                self._report.row(side, "", [], why=str(error))

    def one_size(self, size: int) -> None:
        """All rows of one block size: reads, latencies, then puts."""
        count = self._plan.objects(size)
        label = format_size(size)
        objects: dict[str, Any] = {"prefix": label, "count": count, "size": size}
        self._owners("fill", **objects)
        self._rates("get", objects)
        if size == LATENCY_BYTES:
            self._latencies(objects)
        self._owners("drop", prefix=label, count=count)
        self._rates("put", objects)

    def _latencies(self, objects: dict[str, Any]) -> None:
        plan, label = self._plan, objects["prefix"]
        few = objects | {"count": min(LEASED_OBJECTS, objects["count"])}

        def sample(driver: Driver, read: dict[str, Any]) -> float:
            return float(driver.ask("latency", **read, calls=plan.latency_calls))

        calls = {side: partial(sample, driver, objects) for side, driver in self._drivers.items()}
        calls["leased"] = partial(sample, self._leased, few)
        samples = measure(calls, plan.repeats, self._pace.next_s())
        for way in plan.transports:
            self._latency_row(f"p50_us/get/{way}/{label}", samples, way, way)
        self._latency_row(f"p50_us/get_leased/shm/{label}", samples, "leased", "shm")

    def _latency_row(self, name: str, samples: Samples, ours: str, way: str) -> None:
        beside = self._beside(way)
        add_row(self._report, name, "us", samples, ours, beside, higher_is_better=False)

    def pressure(self) -> None:
        """More puts than fit, one after another, nothing pinned: how many are accepted."""
        name, count, pool_bytes = "pressure/300x1MiB", 300, 64 * MIB
        accepted = Samples()
        with ExitStack() as stack:
            store = stack.enter_context(StorePool(segment_bytes=pool_bytes))
            drivers = {"ours": store.client(8 * MIB)}
            if self._upstream is not None and "upstream" in self._drivers:
                other = stack.enter_context(upstream.pool(self._upstream))
                other.worker(pool_bytes)
                drivers["upstream"] = other.client(8 * MIB)
            for side, driver in drivers.items():
                try:
                    accepted.of[side] = [driver.ask("pressure", count=count, size=MIB)]
                except StoreError as error:
                    accepted.failures[side] = str(error)
        vs = {"upstream": "upstream"} if "upstream" in self._vs else {}
        add_row(self._report, name, "puts", accepted, "ours", vs)
