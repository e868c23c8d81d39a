"""The rows that a trace of the paper has, whichever it is: hits, prefills, caches, replicas, load.

    rows = TraceRows(read_trace("toolagent_trace.jsonl"), TOOLAGENT)
    for row in rows.common():
        print(row.name, row.paper, row.ours, row.verdict)

Each row says which trace it was judged on, and whether that is the published one. A run of a
cluster takes a second or some; runs that several rows look at are made once.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eviction import count_hits
from eviction.trace import BLOCK_TOKENS
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.coupled import CoupledPlan, run_coupled
from serving.simulator.hardware import read_hardware
from serving.traces.shape import spread

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from eviction import Trace
    from serving.simulator.hardware import Hardware
    from serving.simulator.outcomes import Outcomes
    from serving.simulator.paper_figures import Published

__all__ = ["HARDWARE", "TOKEN_TIMES", "Row", "TraceRows", "listed"]

HARDWARE = "a800-llama3-70b"
TOKEN_TIMES = (40, 50, 60, 70, 80, 90, 100)
"""Milliseconds between tokens, of figures 1 and 6."""
WITHOUT_END = 100_000_000
"""Tokens of a cache that has room for all of a trace."""
LONG_DECODE_S = 34.0
"""The mean answer of the conversation trace at the SLO between tokens."""


class Row(NamedTuple):
    """One line of the comparison."""

    name: str
    paper: str
    ours: str
    tolerance: str
    verdict: str
    trace: str = ""
    """What it was judged on, where that is a trace."""


class TraceRows:
    """Rows of one trace."""

    def __init__(self, trace: Trace, published: Published) -> None:
        self.trace = trace
        self.published = published
        self.hardware = read_hardware(HARDWARE)
        known, name = published.is_it(trace), published.name
        self._told = name if known else f"not the published {name} trace"

    def row(self, name: str, paper: str, ours: str, tolerance: str, good: bool) -> Row:
        """A line that says of what trace it is."""
        return Row(name, paper, ours, tolerance, "ok" if good else "short", self._told)

    def ratio(self, name: str, paper: float, ours: float, allowed: float) -> Row:
        """A line of one time that may be so much off, as a share."""
        return self.row(
            name, f"{paper} s", f"{ours:.3f} s", f"{100 * allowed:.0f} %",
            abs(ours / paper - 1) <= allowed,
        )  # fmt: skip

    def run(
        self, plan: Plan, *, spread_out: bool = False, hardware: Hardware | None = None
    ) -> Outcomes:
        """Serve the trace."""
        trace = self.spread if spread_out else self.trace
        return Cluster(plan, hardware or self.hardware).run(trace)

    @cached_property
    def spread(self) -> Trace:
        """The trace, its requests of one timestamp evenly until the next."""
        return spread(self.trace)

    def common(self) -> Iterator[Row]:
        """Hits of figure 9, prefills of figure 8, caches of figure 10."""
        yield self._curve()
        yield from self._prefills()
        yield from self._caches()

    # -- rows

    def _curve(self) -> Row:
        ids, offsets, told = self.trace.ids, self.trace.offsets, self.published.curve
        below = [
            paper - count_hits(ids, offsets, "lru", int(tokens // BLOCK_TOKENS)).ratio
            for tokens, paper in told
        ]
        least, most = self.published.curve_off
        return self.row(
            "A3 hit ratios of figure 9 less ours, least and most",
            "0", f"{min(below):.3f} to {max(below):.3f}", f"{least:g} to {most:g}",
            min(below) >= least - 5e-4 and max(below) <= most,
        )  # fmt: skip

    def _prefills(self) -> Iterator[Row]:
        told, trace = self.published, self.trace
        times = [self.hardware.prefill_s(n, 0) for n in trace.input_tokens.tolist()]
        none_s = float(np.mean(times))
        uncached_off, mooncake_off, vllm_off = told.off
        yield self.ratio("A4 prefill without a cache, mean", told.uncached_s, none_s, uncached_off)
        plan = Plan(prefill=10, decode=0, cache_tokens=WITHOUT_END)
        all_s = float(self.run(plan).computing_s.mean())
        yield self.ratio("A5 prefill with Mooncake, mean", told.mooncake_s, all_s, mooncake_off)
        saved = 100 * (1 - all_s / none_s)
        yield self.row(
            "A5 what it saves", f"{told.saved:g} %", f"{saved:.1f} %", "3 points",
            abs(saved - told.saved) <= 3,
        )  # fmt: skip
        coupled = run_coupled(trace, self.hardware, CoupledPlan(nodes=16, cache_tokens=1_000_000))
        own_s = float(coupled.computing_s.mean())
        yield self.ratio(
            "A6 prefill with vLLM's prefix caching, mean", told.vllm_s, own_s, vllm_off
        )

    def _caches(self) -> Iterator[Row]:
        runs = {
            name: self.run(Plan(prefill=10, decode=0, placement=name))
            for name in ("cache-centric", "local-cache", "least-loaded")
        }
        tokens = self.trace.input_tokens.sum()
        best, local, balanced = (float(run.cached_tokens.sum() / tokens) for run in runs.values())
        together, alone = self.published.found
        yield self.row(
            "A7 tokens found by all together, 10 prefill nodes",
            f"{together}", f"{best:.3f}", "0.03", abs(best - together) <= 0.03,
        )  # fmt: skip
        seconds = float(runs["cache-centric"].computing_s.mean())
        yield self.ratio("A7 prefill, mean", self.published.found_s, seconds, 0.08)
        yield self.row(
            "A8 tokens found: global, local, load balancing",
            f"{together}, {alone}", f"{best:.3f}, {local:.3f}, {balanced:.3f}", "their order",
            best >= local >= balanced,
        )  # fmt: skip

    def token_times(self, outcomes: Outcomes) -> Row:
        """How many requests are within times between tokens; `outcomes` of 8 + 8 nodes."""
        told = self.published.within
        ours = [100 * outcomes.within(ms / 1e3) for ms in TOKEN_TIMES]
        off = [abs(each - paper) for each, paper in zip(ours, told, strict=True)]
        return self.row(
            "A13 % of requests within 40, 50, ... 100 ms between tokens, 8 + 8 nodes",
            listed(told, 1), listed(ours, 1), "6 points each", max(off) <= 6,
        )  # fmt: skip

    @cached_property
    def replicas(self) -> list[int]:
        """The most nodes of 8 that had the 1st, 10th and 100th hottest block at a time."""
        uses = np.bincount(self.trace.ids)
        ranked = np.argsort(-uses, kind="stable")
        hottest = ranked[[rank for rank in (0, 9, 99) if rank < len(ranked)]].tolist()
        cluster = Cluster(Plan(prefill=8, decode=0), self.hardware)
        most = cluster.watch(hottest)
        cluster.run(self.trace)
        return [most[block] for block in hottest]

    def overload(self) -> Iterator[Row]:
        """Requests that come twice as fast, under the rules of table 3 for who is refused."""
        plan = Plan(prefill=8, decode=8, speed=2.0)
        late, early = (self.run(replace(plan, admission=name)) for name in ("at-decode", "load"))
        forecasts = [
            self.run(replace(plan, admission="forecast", decode_s=seconds))
            for seconds in (20.0, 25.0, LONG_DECODE_S)
        ]
        wasted = [run.wasted_s for run in (late, early, forecasts[-1])]
        yield self.row(
            "A18 seconds of prefill wasted at twice the load: late, early, predicted rejection",
            "", listed(wasted, 0), "their order", wasted == sorted(wasted, reverse=True),
        )  # fmt: skip
        refused = [int(np.count_nonzero(~run.finished)) for run in (late, early, *forecasts)]
        best = min(refused[2:])
        yield self.row(
            "A18 requests refused: late, early, the best of predictions",
            "4183, 3771, 3589 (of another trace)", f"{refused[0]}, {refused[1]}, {best}",
            "early at most 1.01 of late, predicted 1.03 of early",
            refused[1] <= 1.01 * refused[0] and best <= 1.03 * refused[1],
        )  # fmt: skip


def listed(values: Iterable[float], digits: int) -> str:
    """Numbers with so many digits behind the point."""
    return ", ".join(f"{each:.{digits}f}" for each in values)
