"""What a front shows of itself: health, Prometheus metrics, and the figures of the page.

Counters are kept by the conductor (`Stats`); this reads them when somebody asks. Labels are small
fixed sets: outcomes, stages, sources, roles. Needs `prometheus_client`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from serving.scheduling.history import SPAN_S
from serving.scheduling.index import POOL
from serving.scheduling.ledger import COUPLED, DECODE, PREFILL
from serving.scheduling.stats import OUTCOMES, SOURCES, STAGES, UNDER_WAY

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator, Mapping

    from prometheus_client import Metric

    from serving.conductor.conductor import Conductor
    from serving.conductor.fleet import Member
    from serving.scheduling.history import Span, Spread
    from serving.scheduling.stats import Histogram

__all__ = ["ConductorBoard"]

ROLES = (PREFILL, DECODE)


class ConductorBoard:
    """The figures of one conductor; a collector of Prometheus."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor = conductor
        self._began = conductor.clock()

    def health(self) -> dict[str, Any]:
        """Whether requests can be served, and whether prefixes are reused."""
        ledger = self._conductor.scheduler.ledger
        roles = {role: len(ledger.of_role(role)) for role in ROLES}
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
        stats = self._conductor.stats
        yield _counter("requests", "Requests that ended.", "outcome", stats.outcomes)
        yield _counter(
            "prefix_tokens",
            "Tokens of prompts that were computed, by where their KV came from.",
            "source",
            {source: stats.sources[source] for source in SOURCES},
        )
        yield _counter(
            "stage_seconds",
            "Time that requests which ended spent in each stage.",
            "stage",
            {stage: stats.stage_s[stage] for stage in STAGES},
        )
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
        yield from self._gauges()
        yield _histogram("ttft", "Time to the first token.", stats.ttft)
        yield _histogram("tbt", "Time between tokens.", stats.tbt)

    def _gauges(self) -> Iterator[Metric]:
        conductor = self._conductor
        scheduler, index = conductor.scheduler, conductor.index
        loads, slo = scheduler.loads(conductor.clock()), scheduler.slo
        roles = {role: len(scheduler.ledger.of_role(role)) for role in ROLES}
        kept = sum(index.holders.get(address, 0) for address in conductor.fleet.members)
        predicted = {"prefill": loads.prefill, "decode": loads.decode}
        yield _gauge("load", "Predicted time over its SLO.", "role", predicted)
        yield _gauge(
            "slo_seconds", "What a time may be.", "of", {"ttft": slo.ttft_s, "tbt": slo.tbt_s}
        )
        yield _gauge("workers", "Workers.", "role", roles)
        yield _gauge("queued", "Prompts that wait at workers.", "role", self._queued())
        yield _gauge("stage_requests", "Requests under way.", "stage", self._under_way())
        up = conductor.pool is not None and conductor.pool.up
        for name, about, value in (
            ("under_way", "Requests.", conductor.under_way),
            ("kept_blocks", "Blocks of finished requests that workers keep.", kept),
            ("store_up", "The store answers.", up),
        ):
            yield GaugeMetricFamily(f"mooncake_serving_{name}", about, value=value)

    def _queued(self) -> dict[str, int]:
        queued = dict.fromkeys((*ROLES, COUPLED), 0)
        for member in self._conductor.fleet.members.values():
            if member.there and member.load is not None and member.load.role in queued:
                queued[member.load.role] += member.load.queued
        return queued

    def _under_way(self) -> dict[str, int]:
        stages = self._conductor.stats.stages
        return {stage: stages[stage] for stage in UNDER_WAY}

    def stats(self) -> dict[str, Any]:
        """Everything the page shows."""
        conductor = self._conductor
        stats, slo, now = conductor.stats, conductor.scheduler.slo, conductor.clock()
        loads = conductor.scheduler.loads(now)
        return {
            "model": conductor.card.name if conductor.card else "",
            "uptime_s": now - self._began,
            "health": self.health(),
            "slo": {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s},
            "under_way": conductor.under_way,
            "stages": self._under_way(),
            "ended": _by_kind(stats.outcomes),
            "hit_rate": stats.cached_tokens / max(1, stats.prompt_tokens),
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "generated_tokens": stats.generated_tokens,
            "sources": {source: stats.sources[source] for source in SOURCES},
            "resumed": stats.resumed,
            "role_changes": stats.role_changes,
            "ttft_s": _quantiles(stats.ttft),
            "tbt_s": _quantiles(stats.tbt),
            "loads": {"prefill": loads.prefill, "decode": loads.decode},
            "costs": conductor.scheduler.costs.learnt(),
            "machine": self._machine(),
            "span_s": SPAN_S,
            "history": [_span(age_s, span) for age_s, span in stats.history.spans(now)],
            "pool_blocks": conductor.index.holders.get(POOL, 0),
            "workers": [self._worker(member, now) for member in conductor.fleet.members.values()],
            "requests": [line.shown(now) for line in stats.recent()],
        }

    def _machine(self) -> dict[str, int]:
        """What the costs are those of, beside what was learnt."""
        card = self._conductor.card
        members = self._conductor.fleet.members.values()
        rooms = [each.hello.kv_blocks for each in members if each.hello.role != PREFILL]
        return {
            "layers": card.layers if card else 0,
            "kv_tokens": min(rooms, default=0) * (card.block_tokens if card else 0),
        }

    def _worker(self, member: Member, now: float) -> dict[str, Any]:
        load, address = member.load, member.address
        scheduler = self._conductor.scheduler
        role = load.role if load is not None and member.there else member.hello.role
        return {
            "id": member.hello.worker_id,
            "address": address,
            "role": role,
            "state": _state(member),
            "seen_s": now - member.heard,
            "load": scheduler.load_of(now, address, role),
            "requests": len(scheduler.ledger.on(address)),
            "queued": load.queued if load else 0,
            "running": load.running if load else 0,
            "kv_used": load.kv_blocks_used / max(1, load.kv_blocks) if load else 0.0,
            "kept_blocks": self._conductor.index.holders.get(address, 0),
            "pending_puts": load.pending_puts if load else 0,
            "tbt_s": load.tbt_s if load else 0.0,
            "changes": [{"age_s": now - at, "role": to} for at, to in member.changes],
        }


def _state(member: Member) -> str:
    if not member.there:
        return "lost"
    if member.changing or (member.load is not None and member.load.draining):
        return "draining"
    return "there"


def _quantiles(histogram: Histogram) -> dict[str, float]:
    return {
        "median": histogram.quantile(0.5),
        "p90": histogram.quantile(0.9),
        "p99": histogram.quantile(0.99),
    }


def _by_kind(outcomes: Counter[str]) -> dict[str, dict[str, int]]:
    """How many requests ended in which way, those that did, by kind."""
    return {
        kind: {each: outcomes[each] for each in possible if outcomes[each]}
        for kind, possible in OUTCOMES.items()
    }


def _span(age_s: float, span: Span) -> dict[str, Any]:
    """A span as the page reads it."""
    return {
        "age_s": age_s,
        "ended": _by_kind(span.outcomes),
        "sources": span.sources,
        "stage_s": span.stage_s,
        "ttft_s": _spread(span.ttft),
        "tbt_s": _spread(span.tbt),
        "loads": {"prefill": span.loads[0], "decode": span.loads[1]},
    }


def _spread(spread: Spread) -> dict[str, float] | None:
    if not spread.total:
        return None
    return {"median": spread.quantile(0.5), "p99": spread.quantile(0.99)}


def _counter(name: str, about: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"mooncake_serving_{name}", about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauge(name: str, about: str, label: str, values: Mapping[str, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"mooncake_serving_{name}", about, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, about: str, histogram: Histogram) -> HistogramMetricFamily:
    total, buckets = 0, []
    for bound, count in zip(histogram.bounds, histogram.counts, strict=False):
        total += count
        buckets.append((str(bound), total))
    buckets.append(("+Inf", total + histogram.counts[-1]))
    return HistogramMetricFamily(
        f"mooncake_serving_{name}_seconds", about, buckets=buckets, sum_value=histogram.total
    )
