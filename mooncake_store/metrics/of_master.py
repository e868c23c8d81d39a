"""The page of a master: what its shards have counted, and what the cluster service knows.

Figures of shards are added up where their labels are the same. O(samples + segments + workers).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from mooncake_store.core.records import TIER_NAMES, SegmentState
from mooncake_store.metrics.exposition import Page
from mooncake_store.metrics.families import FAMILIES, few
from mooncake_store.metrics.process import add_process
from mooncake_store.metrics.times import BOUNDS_S
from mooncake_store.wire.metrics import Metrics, Sample, Took

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.wire.cluster import ClusterStatus

__all__ = ["master_page", "merged"]

_WORD_BYTES = 8
_NAMES = ("principal", "namespace")
"""Labels of which few values are told."""


def merged(told: Iterable[Metrics]) -> Metrics:
    """Return the sum of what several have counted."""
    sums, took = defaultdict[tuple[str, tuple[str, ...]], float](float), dict[str, Took]()
    for each in told:
        for sample in each.samples:
            sums[sample.family, sample.labels] += sample.value
        for one in each.took:
            other = took.get(one.operation)
            took[one.operation] = one if other is None else _both(one, other)
    samples = (Sample(family, value, labels) for (family, labels), value in sums.items())
    return Metrics(tuple(samples), tuple(took.values()))


def _both(one: Took, other: Took) -> Took:
    counts = tuple(map(sum, zip(one.counts, other.counts, strict=False)))
    seconds, failed = one.seconds + other.seconds, one.failed + other.failed
    return Took(one.operation, counts, seconds, failed)


def master_page(metrics: Metrics, status: ClusterStatus) -> str:
    """Return the families of a master and its shards, and of this process."""
    page = Page("master", "shard", "process")
    _add_shards(page, metrics)
    _add_cluster(page, status)
    add_process(page)
    return page.text()


def _add_shards(page: Page, metrics: Metrics) -> None:
    named = defaultdict[str, dict[str, float]](dict)
    for sample in metrics.samples:
        family = FAMILIES.get(sample.family)
        if family is None or len(family.labels) != len(sample.labels):
            continue  # of another version
        if any(name in _NAMES for name in family.labels):
            named[sample.family][sample.labels[0]] = sample.value
        else:
            page.add(sample.family, sample.value, *sample.labels)
    for name, sums in named.items():
        for label, value in few(sums).items():
            page.add(name, value, label)
    for took in metrics.took:
        if len(took.counts) == len(BOUNDS_S) + 1:
            page.add_times("mooncake_request_seconds", took, took.operation)
            page.add("mooncake_requests_failed_total", took.failed, took.operation)


def _add_cluster(page: Page, status: ClusterStatus) -> None:
    page.add("mooncake_build_info", 1, status.version)
    page.add("mooncake_ready", int(status.ready))
    page.add("mooncake_shards", len(status.shards))
    workers = Counter(worker.state for worker in status.workers)
    for state in FAMILIES["mooncake_workers"].labels["state"]:
        page.add("mooncake_workers", workers[state], state)
    segments = Counter(
        (TIER_NAMES[entry.tier], SegmentState(entry.state).name.lower())
        for entry in status.segments
    )
    failing = Counter(TIER_NAMES[entry.tier] for entry in status.segments if entry.fault)
    for tier in TIER_NAMES:
        for state in FAMILIES["mooncake_segments"].labels["state"]:
            page.add("mooncake_segments", segments[tier, state], tier, state)
    for tier in FAMILIES["mooncake_failing_segments"].labels["tier"]:
        page.add("mooncake_failing_segments", failing[tier], tier)
    standbys = Counter(
        "counts" if each.counts else "follows" if each.follows else "away"
        for each in status.standbys
    )
    for state in FAMILIES["mooncake_standbys"].labels["state"]:
        page.add("mooncake_standbys", standbys[state], state)
    behind = max((each.behind_words for each in status.standbys), default=0)
    page.add("mooncake_standby_behind_bytes", max(0, behind) * _WORD_BYTES)
    page.add("mooncake_changes_refused", int(bool(status.refusing)))
