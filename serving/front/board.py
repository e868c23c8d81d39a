"""What a front shows of itself: health, Prometheus metrics, and the figures of the page.

Counters are kept by the conductor (`Stats`); this reads them when somebody asks. Labels are bounded
sets: outcomes, roles. Needs `prometheus_client`.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from serving.conductor.conductor import Conductor
    from serving.conductor.fleet import Member
    from serving.scheduling.stats import Histogram

__all__ = ["ConductorBoard"]


class ConductorBoard:
    """The figures of one conductor; a collector of Prometheus."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor

    def health(self) -> dict[str, Any]:
        """Whether requests can be served, and whether prefixes are reused."""
        ledger = self._conductor.scheduler.ledger
        roles = {role: len(ledger.of_role(role)) for role in ("prefill", "decode")}
        return {
            "serving": all(roles.values()),
            "workers": roles,
            "store": self._store(),
        }

    def _store(self) -> str:
        pool = self._conductor.pool
        if pool is None:
            return "none: nothing is reused"
        return "up" if pool.up else "down: serving without reuse"

    def metrics(self) -> str:
        """Counters, gauges and histograms, names beginning with mooncake_serving_."""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(self)
        return generate_latest(registry).decode()

    def collect(self) -> Iterator[Metric]:
        """What `metrics` shows, family by family."""
        conductor = self._conductor
        stats, scheduler = conductor.stats, conductor.scheduler
        outcomes = CounterMetricFamily(
            "mooncake_serving_requests", "Requests that ended.", labels=["outcome"]
        )
        for outcome, count in stats.outcomes.items():
            outcomes.add_metric([outcome], count)
        yield outcomes
        for name, about, value in (
            ("prompt_tokens", "Tokens of prompts that were answered.", stats.prompt_tokens),
            ("cached_tokens", "Of these, tokens that were not computed.", stats.cached_tokens),
            ("generated_tokens", "Tokens of answers.", stats.generated_tokens),
            ("resumed", "Attempts made because a worker failed.", stats.resumed),
            ("prefill_seconds", "Compute time of prompts that were answered.", stats.prefill_s),
            (
                "wasted_prefill_seconds",
                "Compute time of prompts that were not.",
                stats.wasted_prefill_s,
            ),
            ("role_changes", "Workers that changed their role.", stats.role_changes),
        ):
            yield CounterMetricFamily(f"mooncake_serving_{name}", about, value=value)
        loads = scheduler.loads(conductor.clock())
        gauge = GaugeMetricFamily(
            "mooncake_serving_load", "Predicted time over its SLO.", labels=["role"]
        )
        gauge.add_metric(["prefill"], loads.prefill)
        gauge.add_metric(["decode"], loads.decode)
        yield gauge
        workers = GaugeMetricFamily("mooncake_serving_workers", "Workers.", labels=["role"])
        for role in ("prefill", "decode"):
            workers.add_metric([role], len(scheduler.ledger.of_role(role)))
        yield workers
        yield GaugeMetricFamily(
            "mooncake_serving_under_way", "Requests.", value=conductor.under_way
        )
        up = conductor.pool is not None and conductor.pool.up
        yield GaugeMetricFamily("mooncake_serving_store_up", "The store answers.", value=up)
        yield _histogram("ttft", "Time to the first token.", stats.ttft)
        yield _histogram("tbt", "Time between tokens.", stats.tbt)

    def stats(self) -> dict[str, Any]:
        """Everything the page shows."""
        conductor = self._conductor
        stats, now = conductor.stats, conductor.clock()
        loads = conductor.scheduler.loads(now)
        prompt = max(1, stats.prompt_tokens)
        return {
            "model": conductor.card.name if conductor.card else "",
            "health": self.health(),
            "under_way": conductor.under_way,
            "outcomes": dict(stats.outcomes),
            "hit_rate": stats.cached_tokens / prompt,
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "generated_tokens": stats.generated_tokens,
            "resumed": stats.resumed,
            "ttft_s": _quantiles(stats.ttft),
            "tbt_s": _quantiles(stats.tbt),
            "loads": {"prefill": loads.prefill, "decode": loads.decode},
            "history": stats.history(now),
            "pool_blocks": conductor.index.holders.get("pool", 0),
            "workers": [self._worker(member) for member in conductor.fleet.members.values()],
            "requests": stats.recent(now),
        }

    def _worker(self, member: Member) -> dict[str, Any]:
        load = member.load
        ledger = self._conductor.scheduler.ledger
        return {
            "id": member.hello.worker_id,
            "role": load.role if load is not None and member.there else member.hello.role,
            "state": _state(member),
            "requests": len(ledger.on(member.address)),
            "kv_used": load.kv_blocks_used / max(1, load.kv_blocks) if load else 0.0,
            "tbt_s": load.tbt_s if load else 0.0,
        }


def _state(member: Member) -> str:
    if not member.there:
        return "lost"
    if member.changing or (member.load is not None and member.load.draining):
        return "draining"
    return "there"


def _quantiles(histogram: Histogram) -> dict[str, float]:
    recent = list(histogram.recent)
    return {
        "median": statistics.median(recent) if recent else 0.0,
        "p90": histogram.quantile(0.9),
    }


def _histogram(name: str, about: str, histogram: Histogram) -> HistogramMetricFamily:
    total, buckets = 0, []
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        total += count
        buckets.append((str(bound), total))
    buckets.append(("+Inf", total + histogram.counts[-1]))
    return HistogramMetricFamily(
        f"mooncake_serving_{name}_seconds", about, buckets=buckets, sum_value=histogram.total
    )
