"""Runs a scenario, over processes, and tells its figures by run and as medians over seeds.

    results = run_scenario(scenario, jobs=4)
    results.plain(), results.csv()

A run depends on its plan and seed alone and results are in the order of the file, so they are the
same whatever the number of processes. Each process reads a trace once. With one job there is no
other process.
"""

from __future__ import annotations

import csv
import io
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.simulator.cluster import Cluster
from serving.simulator.curves import Curves, curves_of
from serving.simulator.outcomes import summary

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from eviction import Trace
    from serving.simulator.scenario import Scenario, TraceSource, Variant

__all__ = ["Results", "Run", "run_scenario"]

Figures = dict[str, float | int]


class Run(NamedTuple):
    """What one plan came to with one seed."""

    variant: Variant
    seed: int
    figures: Figures
    curves: Curves


class Results(NamedTuple):
    """All runs of a scenario, variant by variant and seed by seed."""

    scenario: Scenario
    runs: list[Run]

    def of(self, variant: Variant) -> list[Run]:
        """The runs of one variant."""
        return [run for run in self.runs if run.variant is variant]

    def medians(self, variant: Variant) -> Figures:
        """Each figure's median over seeds, of those runs that have it."""
        runs = self.of(variant)
        names = dict.fromkeys(name for run in runs for name in run.figures)
        return {
            name: statistics.median(run.figures[name] for run in runs if name in run.figures)
            for name in names
        }

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "about": self.scenario.about,
            "runs": [
                {"name": run.variant.name, **run.variant.differs, "seed": run.seed, **run.figures}
                for run in self.runs
            ],
            "medians": [
                {"name": variant.name, **variant.differs, **self.medians(variant)}
                for variant in self.scenario.variants
            ],
        }

    def csv(self) -> str:
        """A line a run, then the medians, whose seed is `median`."""
        plain = self.plain()
        lines = [*plain["runs"], *({**each, "seed": "median"} for each in plain["medians"])]
        names = ("name", *self.scenario.varied, "seed")
        columns = dict.fromkeys((*names, *(name for line in lines for name in line)))
        text = io.StringIO()
        writer = csv.DictWriter(text, list(columns), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return text.getvalue()


def run_scenario(
    scenario: Scenario, *, jobs: int = 1, done: Callable[[int], object] = lambda _count: None
) -> Results:
    """Run every variant with every seed; `done` is told how many are, as they end in order.

    Raises:
        InvalidArgumentError: the trace is none.
    """
    wanted = [(variant, seed) for variant in scenario.variants for seed in scenario.seeds]
    runs: list[Run] = []

    def collect(found: Iterable[tuple[Figures, Curves]]) -> None:
        for (variant, seed), (figures, curves) in zip(wanted, found, strict=True):
            runs.append(Run(variant, seed, figures, curves))
            done(len(runs))

    orders = [(scenario._replace(variants=[variant]), seed) for variant, seed in wanted]
    if min(jobs, len(wanted)) <= 1:
        collect(map(_run, orders))
    else:
        context = multiprocessing.get_context("spawn")  # a fork would take threads' locks along
        with ProcessPoolExecutor(min(jobs, len(wanted)), context) as pool:
            collect(pool.map(_run, orders))
    return Results(scenario, runs)


@lru_cache(maxsize=4)
def _trace(source: TraceSource, seed: int) -> Trace:
    return source.read(seed)


def _run(order: tuple[Scenario, int]) -> tuple[Figures, Curves]:
    scenario, seed = order
    plan = replace(scenario.variants[0].plan, seed=seed)
    # What is made up differs by the seed, a file does not.
    trace = _trace(scenario.source, 0 if scenario.source.file else seed)
    outcomes = Cluster(plan, scenario.hardware).run(trace)
    slo = scenario.slo
    ttft_s = plan.ttft_s if slo.ttft_s is None else slo.ttft_s
    tbt_s = plan.tbt_s if slo.tbt_s is None else slo.tbt_s
    figures = summary(outcomes, trace.input_tokens, ttft_s, tbt_s)
    return figures, curves_of(outcomes)
