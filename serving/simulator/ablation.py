"""What each choice is worth: a run of a trace for every combination of policies, caches and disks.

    rows = list(compare(trace, hardware, Plan(decode=0), {"eviction": ["lru", "lfu"]}))
    for row in rows:
        print(row.eviction, row.ttft_mean_s, row.ttft_gain)
    print(best(rows))

Fields of a `Plan` are varied, each by a list; the first of every list is what the others stand
beside, always at the same cache. Prompts alone (`decode=0`) are the quickest: a run of the
published conversation trace takes some seconds. Every plan is looked at before the first run.
"""

from __future__ import annotations

import csv
import io
import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from serving.simulator.cluster import Cluster
from serving.simulator.outcomes import summary

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from eviction import Trace
    from serving.simulator.cluster import Plan
    from serving.simulator.hardware import Hardware

__all__ = ["AblationRow", "as_csv", "best", "compare"]


class AblationRow(NamedTuple):
    """One run; gains are shares of what the first combination came to with the same cache.

    `ttft_gain` is by how much the mean time to the first token is shorter, `hit_gain` how many more
    tokens of prompts were found.
    """

    cache_tokens: int
    disk_tokens: int
    eviction: str
    placement: str
    balancing: float
    hit_ratio: float
    ttft_mean_s: float
    ttft_p99_s: float
    ttft_gain: float
    hit_gain: float


def compare(
    trace: Trace, hardware: Hardware, plan: Plan, varied: Mapping[str, Sequence[Any]]
) -> Iterator[AblationRow]:
    """Run every combination, the cache as the slowest to change.

    Raises:
        InvalidArgumentError: one of the plans cannot be run, on this hardware or at all.
    """
    caches = varied.get("cache_tokens", [plan.cache_tokens])
    others = [name for name in varied if name != "cache_tokens"]
    choices = [
        dict(zip(others, values, strict=True))
        for values in itertools.product(*(varied[name] for name in others))
    ]
    plans = [
        [replace(plan, cache_tokens=cache, **choice) for choice in choices] for cache in caches
    ]
    for each in itertools.chain.from_iterable(plans):
        each.check_on(hardware)
    return itertools.chain.from_iterable(_beside(trace, hardware, some) for some in plans)


def best(rows: Iterable[AblationRow]) -> list[AblationRow]:
    """The quickest combination on average of each cache and disk; of equal ones the earlier."""
    found: dict[tuple[int, int], AblationRow] = {}
    for row in rows:
        at = row.cache_tokens, row.disk_tokens
        if at not in found or row.ttft_mean_s < found[at].ttft_mean_s:
            found[at] = row
    return list(found.values())


def as_csv(rows: Iterable[AblationRow]) -> str:
    """A line a run, after one of names."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(AblationRow._fields)
    writer.writerows(rows)
    return text.getvalue()


def _beside(trace: Trace, hardware: Hardware, plans: Sequence[Plan]) -> Iterator[AblationRow]:
    """The runs of one cache."""
    first: dict[str, float] = {}
    for plan in plans:
        outcomes = Cluster(plan, hardware).run(trace)
        figures = summary(outcomes, trace.input_tokens, plan.ttft_s, plan.tbt_s)
        first = first or figures
        hits, ttft_s = figures["hit_ratio"], figures.get("ttft_mean_s", 0.0)
        yield AblationRow(
            plan.cache_tokens,
            plan.disk_tokens,
            plan.eviction,
            plan.placement,
            plan.balancing,
            hits,
            ttft_s,
            figures.get("ttft_p99_s", 0.0),
            _share(first.get("ttft_mean_s", 0.0) - ttft_s, first.get("ttft_mean_s", 0.0)),
            _share(hits - first["hit_ratio"], first["hit_ratio"]),
        )


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
