"""How fast objects move: gets and puts of 4 KiB to 4 MiB, by every way a client can reach them.

`tcp` and `shm` are clients of one pool whose memory another process owns, `local` is a client
that reads the segment it owns itself. Reads go to random objects in a set far larger than the
caches, into buffers as large; no object is read twice before all were, and the lease cache is
off, so every get asks the master. Checksums are on: every get verifies what it read. Puts write
fresh keys into memory that was used before; what they wrote is removed off the clock.

`upstream` is the original, with registered buffers: its path between two processes beside tcp and
shm (it has no other on one host), its in-process path beside local. `raw` moves the same blocks
with nothing around them: bare blocking sockets beside tcp, bare memcpy beside shm and local.

All sides run in processes of the same shape and are measured in turn. The time of a sample is
bounded, not its bytes, except that a batch is never cut. A full run takes about six minutes.
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
from mooncake_store.bench._store import StorePool
from mooncake_store.errors import StoreError
from mooncake_store.units import GIB, KIB, MIB, format_size

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report

__all__ = ["Plan", "measure_all", "run"]

ALTERNATIVES = ("upstream", "raw")
BATCHES = (1, 32, 128)
TRANSPORTS = ("tcp", "shm", "local")
# What stands beside each of our transports; see the module.
AGAINST = {
    "tcp": {"upstream": "upstream", "raw": "sockets"},
    "shm": {"upstream": "upstream", "raw": "memcpy"},
    "local": {"upstream": "upstream_local", "raw": "memcpy"},
}
RAW = ("sockets", "memcpy")
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


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    sizes: tuple[int, ...]
    buffer_bytes: int
    objects_bytes_max: int
    budget_s: float
    repeats: int
    total_s: float
    """From the start on; after that a measurement makes no more rounds than it must."""
    latency_calls: int
    too_large: str
    """Why a batch that does not fit into the buffer is left out."""

    def objects(self, size: int) -> int:
        """How many objects of this size there are: a batch at least, a buffer full at most."""
        fit = self.buffer_bytes // size
        return max(1, min(fit, max(BATCHES[-1], self.objects_bytes_max // size)))


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure every row; `vs` may name upstream and raw."""
    wish = 128 * MIB if quick else 512 * MIB
    room = memory_available() // MEMORY_BUFFERS // (4 * MIB) * (4 * MIB)
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
    bench.pressure()


class _Bench:
    """The sides by name, and the rows made from them."""

    def __init__(self, report: Report, plan: Plan, vs: tuple[str, ...], stack: ExitStack) -> None:
        self._report = report
        self._plan = plan
        self._vs = tuple(name for name in ALTERNATIVES if name in vs)
        self._stack = stack
        self._upstream = _upstream.wanted(report, vs)
        self._drivers: dict[str, Driver] = {}
        self._started, self._measured = time.perf_counter(), 0

    def start(self) -> None:
        """Start all pools and clients, and use the memory of every pool once."""
        plan, drivers = self._plan, self._drivers
        pool_bytes, buffer_bytes = POOL_BUFFERS * plan.buffer_bytes, plan.buffer_bytes
        shared = self._stack.enter_context(StorePool(segment_bytes=pool_bytes))
        every: dict[str, Any] = {"lease_cache": False, "lease_ttl": LEASE_TTL}
        drivers["tcp"] = shared.client(buffer_bytes, transports=["tcp"], **every)
        drivers["shm"] = shared.client(buffer_bytes, transports=["shm"], **every)
        drivers["leased"] = shared.client(LEASED_OBJECTS * LATENCY_BYTES, transports=["shm"])
        own = self._stack.enter_context(StorePool(workers=0))
        drivers["local"] = own.client(
            buffer_bytes, segment=pool_bytes, transports=["local"], **every
        )
        if self._upstream is not None:
            _upstream.attempt(self._report, self._start_upstream)
        if "raw" in self._vs:
            for side in RAW:
                driver = self._stack.enter_context(Driver(f"bare {side}", side))
                driver.ask("open", nbytes=buffer_bytes)
                driver.ask("buffer", nbytes=buffer_bytes)
                drivers[side] = driver
        self._touch()

    def _start_upstream(self) -> None:
        assert self._upstream is not None
        pool_bytes, buffer_bytes = POOL_BUFFERS * self._plan.buffer_bytes, self._plan.buffer_bytes
        between = self._stack.enter_context(_upstream.pool(self._upstream))
        between.worker(pool_bytes)
        reader = between.client(buffer_bytes)
        within = self._stack.enter_context(_upstream.pool(self._upstream))
        self._drivers["upstream_local"] = within.client(buffer_bytes, pool_bytes)
        self._drivers["upstream"] = reader

    def _touch(self) -> None:
        size = min(4 * MIB, self._plan.buffer_bytes)
        count = int(0.8 * POOL_BUFFERS * self._plan.buffer_bytes) // size
        self._owners("fill", RAW, prefix="touch", count=count, size=size)
        self._owners("drop", RAW, prefix="touch", count=count)

    def _owners(self, command: str, but: tuple[str, ...] = (), **options: Any) -> None:
        """Ask one client of every pool, but for some: it puts what all clients of the pool read.

        If the original fails here, a row says so and its sides are null from then on.
        """
        for side, driver in list(self._drivers.items()):
            if side in ("tcp", "leased", *but):
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
        for batch in BATCHES:
            self._throughput("get", label, batch, objects)
        if size == LATENCY_BYTES:
            self._latencies(objects)
        self._owners("drop", prefix=label, count=count)
        for batch in BATCHES:
            self._throughput("put", label, batch, {"count": count, "size": size})

    def _throughput(self, command: str, label: str, batch: int, options: dict[str, Any]) -> None:
        plan = self._plan
        names = {way: f"{command}/{way}/{label}/b{batch}" for way in TRANSPORTS}
        if batch * options["size"] > plan.buffer_bytes:
            nobody = Samples(failures=dict.fromkeys(TRANSPORTS, plan.too_large))
            for way, name in names.items():
                add_row(self._report, name, "GB/s", nobody, way, self._against(way))
            return

        def sample(driver: Driver) -> float:
            rate: float = driver.ask(command, **options, batch=batch, budget_s=plan.budget_s)
            return rate / 1e9

        calls = {
            side: partial(sample, driver)
            for side, driver in self._drivers.items()
            if side != "leased"
        }
        samples = measure(calls, plan.repeats, self._deadline_s())
        for way, name in names.items():
            add_row(self._report, name, "GB/s", samples, way, self._against(way))

    def _deadline_s(self) -> float:
        """A fair part, for the measurement that is next, of the time that is left."""
        all_of_them = len(self._plan.sizes) * len(BATCHES) * 2 + 1
        self._measured += 1
        left = self._plan.total_s - (time.perf_counter() - self._started)
        return max(0.0, left / max(1, all_of_them + 1 - self._measured))

    def _latencies(self, objects: dict[str, Any]) -> None:
        plan = self._plan
        few = objects | {"count": min(LEASED_OBJECTS, objects["count"])}

        def sample(side: str) -> float:
            options = few if side == "leased" else objects
            driver = self._drivers[side]
            return float(driver.ask("latency", **options, calls=plan.latency_calls))

        calls = {side: partial(sample, side) for side in self._drivers}
        samples = measure(calls, plan.repeats, self._deadline_s())
        label = objects["prefix"]
        for way in TRANSPORTS:
            self._latency_row(f"p50_us/get/{way}/{label}", samples, way, way)
        self._latency_row(f"p50_us/get_leased/shm/{label}", samples, "leased", "shm")

    def _latency_row(self, name: str, samples: Samples, ours: str, way: str) -> None:
        add_row(self._report, name, "us", samples, ours, self._against(way), higher_is_better=False)

    def pressure(self) -> None:
        """More puts than fit, one after another, nothing pinned: how many are accepted."""
        name, count, pool_bytes = "pressure/300x1MiB", 300, 64 * MIB
        accepted = Samples()
        with ExitStack() as stack:
            store = stack.enter_context(StorePool(segment_bytes=pool_bytes))
            drivers = {"ours": store.client(8 * MIB)}
            if self._upstream is not None and "upstream" in self._drivers:
                other = stack.enter_context(_upstream.pool(self._upstream))
                other.worker(pool_bytes)
                drivers["upstream"] = other.client(8 * MIB)
            for side, driver in drivers.items():
                try:
                    accepted.of[side] = [driver.ask("pressure", count=count, size=MIB)]
                except StoreError as error:
                    accepted.failures[side] = str(error)
        vs = {"upstream": "upstream"} if "upstream" in self._vs else {}
        add_row(self._report, name, "puts", accepted, "ours", vs)

    def _against(self, way: str) -> dict[str, str]:
        return {label: side for label, side in AGAINST[way].items() if label in self._vs}
