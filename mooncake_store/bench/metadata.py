"""What it costs to ask: probes, queries, small puts and removals, beside the original.

Keys are 40-character strings, objects 64 bytes; 20,000 of them, and a million for the rows that
say 1M. Both masters run with default settings in processes of their own, and the same keys go to
both from clients of the same shape, in turn. `query` is where an object is, without reading it.
Puts and removals are of fresh keys.

`cpu_us_per_key` is the processor time of the master's processes, taken over the same calls as the
rows of that batch size. `rss_bytes_per_object/1M` is by how much the master's resident memory grew
over a million puts. `shards2/exists` compares two shards with one, two clients each
(`shards1` stands where the original would); `shards2/cpu_us_per_key` and `shards2/cores_busy` are
the processor time of masters and clients together, which says whether the machine had cores left
for the second shard. `start_s`, `connect_ms` and `wrong_address_s` are what
one waits for: a master, a client with its first answer, the error for an address where nobody is.

There is no `raw` to compare with. A quick run leaves out the original's million objects and its
minute and a half at a wrong address: those sides are null. A full run takes about six minutes.
"""

from __future__ import annotations

import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.bench.parts import upstream
from mooncake_store.bench.parts.process import (
    Child,
    Driver,
    accepts,
    cpu_seconds,
    free_ports,
    rss_bytes,
    wait_for,
)
from mooncake_store.bench.parts.store import StorePool
from mooncake_store.bench.sides.measuring import Samples, add_row, measure
from mooncake_store.errors import StoreError
from mooncake_store.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.bench.harness import Report
    from mooncake_store.bench.parts.upstream import Environment, UpstreamPool

__all__ = ["Plan", "measure_all", "run"]

ALTERNATIVES = ("upstream",)
BATCH = 128
PROBE_BATCHES = (1, 128, 1024)
LARGE_BATCHES = (128, 1024)
SMALL_PREFIX, LARGE_PREFIX = "small", "large"
SEGMENT_BYTES = GIB
START_TIMEOUT_S = 60.0
WRONG_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured."""

    objects: int
    large: int
    fresh: int
    budget_s: float
    repeats: int
    deadline_s: float
    starts: int
    patient: bool
    """Whether the original gets its million objects and its time at a wrong address."""


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure every row; `vs` may name upstream."""
    plan = Plan(
        objects=20_000,
        large=1_000_000,
        fresh=1_280 if quick else 12_800,
        budget_s=0.1 if quick else 0.5,
        repeats=3 if quick else 5,
        deadline_s=2.0 if quick else 30.0,
        starts=2 if quick else 5,
        patient=not quick,
    )
    measure_all(report, plan, vs)


def measure_all(report: Report, plan: Plan, vs: tuple[str, ...]) -> None:
    """Measure what the plan says."""
    with ExitStack() as stack:
        bench = _Bench(report, plan, vs, stack)
        bench.probes()
        bench.shards()
        bench.changes()
        bench.large()
        bench.waits()


class _Bench:
    """Both pools, a client of each, and the rows made from them."""

    def __init__(self, report: Report, plan: Plan, vs: tuple[str, ...], stack: ExitStack) -> None:
        self._report = report
        self._plan = plan
        self._stack = stack
        self._vs = {"upstream": "upstream"} if "upstream" in vs else {}
        self._upstream = upstream.wanted(report, vs)
        self._nowhere = f"127.0.0.1:{free_ports(1)[0]}"
        self._lost: Driver | None = None
        if self._upstream is not None and plan.patient:
            # It takes a minute and a half to give up; it sleeps meanwhile, so it may do so now.
            self._lost = stack.enter_context(
                Driver("the original's lost client", "upstream", self._upstream.python)
            )
            self._lost.send("try_open", address=self._nowhere)
        self._pools: dict[str, StorePool | UpstreamPool] = {}
        self._clients: dict[str, Driver] = {}
        self._start()

    def _start(self) -> None:
        self._ours = ours = self._stack.enter_context(StorePool(segment_bytes=SEGMENT_BYTES))
        self._pools["ours"], self._clients["ours"] = ours, ours.client()
        self._where: dict[str, dict[str, Any]] = {"ours": {"url": ours.url}}
        if self._upstream is not None:
            upstream.attempt(self._report, partial(self._start_upstream, self._upstream))
        for client in self._clients.values():
            client.ask("populate", prefix=SMALL_PREFIX, count=self._plan.objects)

    def _start_upstream(self, installed: Environment) -> None:
        theirs = self._stack.enter_context(upstream.pool(installed))
        theirs.worker(SEGMENT_BYTES)
        self._clients["upstream"] = theirs.client()
        self._pools["upstream"] = theirs
        self._where["upstream"] = {"address": theirs.address}

    def probes(self) -> None:
        """Ask for keys that exist, one by one and in batches, and where objects are."""
        asked = {}
        for batch in PROBE_BATCHES:
            asked[batch] = self._asking("exists", SMALL_PREFIX, self._plan.objects, batch)
            self._row(f"exists/b{batch}", "keys/s", asked[batch].part(0))
        for batch in LARGE_BATCHES:
            found = self._asking("query", SMALL_PREFIX, self._plan.objects, batch)
            self._row(f"query/b{batch}", "keys/s", found.part(0))
        for batch in LARGE_BATCHES:
            used = asked[batch].part(1)
            self._row(f"cpu_us_per_key/exists/b{batch}", "us", used, higher_is_better=False)

    def _asking(self, command: str, prefix: str, count: int, batch: int) -> Samples:
        """Keys per second, and microseconds of the masters per key, over the same calls."""
        asked: dict[str, Any] = {"prefix": prefix, "count": count, "batch": batch}

        def sample(side: str) -> tuple[float, float]:
            pids = self._pools[side].pids
            before = cpu_seconds(pids)
            keys, seconds = self._clients[side].ask(command, **asked, budget_s=self._plan.budget_s)
            return keys / seconds, (cpu_seconds(pids) - before) / keys * 1e6

        return self._measure(sample)

    def changes(self) -> None:
        """Put and remove fresh objects in batches."""

        def sample(side: str) -> list[float]:
            rates: list[float] = self._clients[side].ask(
                "put_remove", count=self._plan.fresh, batch=BATCH
            )
            return rates

        rates = self._measure(sample)
        self._row(f"put/b{BATCH}", "keys/s", rates.part(0))
        self._row(f"remove/b{BATCH}", "keys/s", rates.part(1))

    def large(self) -> None:
        """Probes among a million objects, and what each of those takes of memory."""
        plan = self._plan
        clients = self._clients
        if not plan.patient:
            self._clients = {"ours": clients["ours"]}
        grown = Samples()
        for side, client in self._clients.items():
            before = rss_bytes(self._pools[side].pids)
            try:
                client.ask("populate", prefix=LARGE_PREFIX, count=plan.large)
            except StoreError as error:
                grown.failures[side] = str(error)
                continue
            grown.of[side] = [(rss_bytes(self._pools[side].pids) - before) / plan.large]
        for batch in LARGE_BATCHES:
            asked = self._asking("exists", LARGE_PREFIX, plan.large, batch)
            self._row(f"exists/b{batch}/1M", "keys/s", asked.part(0))
        self._row("rss_bytes_per_object/1M", "B", grown, higher_is_better=False)
        self._clients = clients

    def waits(self) -> None:
        """Seconds until a master serves, a client is served, a wrong address is noticed."""
        starts = {"ours": _start_master}
        if self._upstream is not None:
            starts["upstream"] = partial(_start_upstream, self._upstream)
        samples = measure(starts, self._plan.starts, self._plan.deadline_s)
        self._row("start_s/master", "s", samples, higher_is_better=False)

        def connect(side: str) -> float:
            return 1e3 * float(self._clients[side].ask("reconnect", **self._where[side]))

        self._row("connect_ms/client", "ms", self._measure(connect), higher_is_better=False)
        lost = self._stack.enter_context(Driver("our lost client", "store"))
        url = f"mooncake://{self._nowhere}/default"
        samples = measure(
            {"ours": lambda: float(lost.ask("try_open", url=url)["seconds"])},
            self._plan.repeats,
            self._plan.deadline_s,
        )
        if self._lost is not None:
            samples.of["upstream"] = [self._lost.receive(WRONG_TIMEOUT_S)["seconds"]]
        self._row("wrong_address_s", "s", samples, higher_is_better=False)

    def shards(self) -> None:
        """Two clients at once, of a pool with two shards and of a pool with one."""
        plan = self._plan
        asked: dict[str, Any] = {"prefix": SMALL_PREFIX, "count": plan.objects, "batch": BATCH}
        with ExitStack() as stack:
            pool = stack.enter_context(StorePool(segment_bytes=SEGMENT_BYTES, shards=2))
            pairs = {
                "shards2": [pool.client(), pool.client()],
                "shards1": [self._clients["ours"], self._ours.client()],
            }
            pairs["shards2"][0].ask("populate", prefix=SMALL_PREFIX, count=plan.objects)
            pids = {
                side: [*masters, *(client.pid for client in pairs[side])]
                for side, masters in (("shards2", pool.pids), ("shards1", self._ours.pids))
            }

            def sample(side: str) -> tuple[float, float, float]:
                before = cpu_seconds(pids[side])
                for client in pairs[side]:
                    client.send("exists", **asked, budget_s=plan.budget_s)
                answers = [client.receive() for client in pairs[side]]
                spent = cpu_seconds(pids[side]) - before
                return (
                    sum(keys / seconds for keys, seconds in answers),
                    spent / sum(keys for keys, _ in answers) * 1e6,
                    spent / max(seconds for _, seconds in answers),
                )

            found = measure(
                {side: partial(sample, side) for side in pairs}, plan.repeats, plan.deadline_s
            )
        figures = (("exists", "keys/s"), ("cpu_us_per_key", "us"), ("cores_busy", "cores"))
        for at, (name, unit) in enumerate(figures):
            add_row(
                self._report,
                f"shards2/{name}",
                unit,
                found.part(at),
                "shards2",
                {"shards1": "shards1"},
                higher_is_better=name == "exists",
            )

    def _measure(self, sample: Callable[[str], Any]) -> Samples:
        calls = {side: partial(sample, side) for side in self._clients}
        return measure(calls, self._plan.repeats, self._plan.deadline_s)

    def _row(
        self, name: str, unit: str, samples: Samples, *, higher_is_better: bool = True
    ) -> None:
        add_row(
            self._report, name, unit, samples, "ours", self._vs, higher_is_better=higher_is_better
        )


def _start_master() -> float:
    """Seconds from starting `mooncake master` to accepting a connection."""
    port = free_ports(1)[0]
    command = [sys.executable, "-m", "mooncake_store", "master", "--port", str(port)]
    with tempfile.TemporaryDirectory(prefix="mooncake-bench-") as state:
        started = time.perf_counter()
        with Child("our master", [*command, "--state", state]) as master:
            wait_for("start of our master", lambda: accepts(port), master, START_TIMEOUT_S)
            seconds = time.perf_counter() - started
            master.end()
    return seconds


def _start_upstream(installed: Environment) -> float:
    """Seconds from starting the original's master to accepting a connection."""
    with upstream.pool(installed) as pool:
        return pool.start_s
