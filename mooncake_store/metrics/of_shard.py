"""What a shard tells its master of what it has counted. O(segments + clients + namespaces)."""

from __future__ import annotations

import time
from collections import Counter
from heapq import nsmallest
from typing import TYPE_CHECKING

from mooncake_store.core import codes as c
from mooncake_store.core.records import TIER_NAMES, SegmentState
from mooncake_store.metrics.families import NAMES_MAX, NOBODY, OTHERS, few
from mooncake_store.metrics.process import resident_bytes
from mooncake_store.units import SECOND_NS
from mooncake_store.wire.metrics import Metrics, Sample

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mooncake_store.core.figures import ShardStats
    from mooncake_store.core.shard import Shard
    from mooncake_store.master.keeping import Keeper
    from mooncake_store.master.site import Site

__all__ = ["of_shard"]


def of_shard(site: Site) -> Metrics:
    """Return what is counted of a shard, as it stands."""
    shard, number = site.shard, str(site.place.shard)
    stats = shard.stats()
    samples = [*_totals(stats, shard), *_space(shard), *_queues(site, stats)]
    samples += [*_principals(site), *_namespaces(shard)]
    samples += [
        Sample("mooncake_keys_total", site.keys),
        Sample("mooncake_shard_objects", stats.objects, (number,)),
        Sample("mooncake_shard_requests_total", site.requests, (number,)),
        Sample("mooncake_shard_clients", len(site.clients), (number,)),
        Sample("mooncake_shard_cpu_seconds_total", time.process_time(), (number,)),
        Sample("mooncake_shard_resident_memory_bytes", resident_bytes(), (number,)),
    ]
    if site.keeper is not None:
        samples += _journal(site.keeper, shard, site.now(), number)
    return Metrics(tuple(samples), tuple(site.took.told()))


def _totals(stats: ShardStats, shard: Shard) -> Iterator[Sample]:
    below = stats.disk_hits + stats.cold_hits
    hits = {"memory": stats.hits - below, "disk": stats.disk_hits, "cold": stats.cold_hits}
    for tier, count in hits.items():
        yield Sample("mooncake_hits_total", count, (tier,))
    unfinished = int(shard.tally[c.UNREADY])
    unknown = stats.misses - stats.misses_absent - unfinished
    misses = {"absent": stats.misses_absent, "unfinished": unfinished, "unknown": unknown}
    for reason, count in misses.items():
        yield Sample("mooncake_misses_total", count, (reason,))
    totals = shard.totals
    for reason in ("watermark", "room", "wait", "quota", "asked"):
        objects, nbytes = totals.evicted_objects_for[reason], totals.evicted_bytes_for[reason]
        yield Sample("mooncake_evicted_objects_total", objects, (reason,))
        yield Sample("mooncake_evicted_bytes_total", nbytes, (reason,))
    for direction, objects, nbytes in (
        ("down", stats.demoted_objects, stats.demoted_bytes),
        ("up", stats.promoted_objects, stats.promoted_bytes),
    ):
        yield Sample("mooncake_moved_objects_total", objects, (direction,))
        yield Sample("mooncake_moved_bytes_total", nbytes, (direction,))
    yield Sample("mooncake_objects", stats.objects, ("readable",))
    yield Sample("mooncake_objects", stats.writing, ("unfinished",))
    for name, value in (
        ("mooncake_read_bytes_total", stats.read_bytes),
        ("mooncake_written_bytes_total", stats.written_bytes),
        ("mooncake_object_bytes", stats.bytes_used),
        ("mooncake_missing_replicas", stats.replicas_missing),
        ("mooncake_lost_objects_total", stats.lost_objects),
        ("mooncake_expired_puts_total", stats.expired_puts),
        ("mooncake_quarantined_bytes", stats.quarantined_bytes),
        ("mooncake_leased_bytes", stats.leased_bytes),
        ("mooncake_soft_pinned_objects", stats.soft_pinned),
        ("mooncake_hard_pinned_bytes", stats.hard_pinned_bytes),
    ):
        yield Sample(name, value)


def _space(shard: Shard) -> Iterator[Sample]:
    """Tell how the space of each tier is used, of segments that are there."""
    total, used, whole = Counter[str](), Counter[str](), Counter[str]()
    for segment in shard.space.all():
        if segment.state not in (SegmentState.GONE, SegmentState.ABSENT):
            tier = TIER_NAMES[segment.tier]
            total[tier] += segment.nbytes
            used[tier] += segment.used
            whole[tier] += segment.allocator.stats().largest_free
    for tier in TIER_NAMES:
        yield Sample("mooncake_capacity_bytes", total[tier], (tier,))
        yield Sample("mooncake_used_bytes", used[tier], (tier,))
        yield Sample("mooncake_contiguous_free_bytes", whole[tier], (tier,))


def _queues(site: Site, stats: ShardStats) -> Iterator[Sample]:
    for queue, waiting in (
        ("space", sum(site.puts.waiting.values())),
        ("events", sum(site.followers.waiting.values())),
        ("turn", site.turns.waiting),
        ("journal", 0 if site.keeper is None else site.keeper.waiting),
    ):
        yield Sample("mooncake_waiting_requests", waiting, (queue,))
    for kind, count in (("copies", stats.tasks_unfinished), ("hauls", stats.hauls_unfinished)):
        yield Sample("mooncake_unfinished_work", count, (kind,))


def _principals(site: Site) -> Iterator[Sample]:
    """Tell what principals have, of a bounded number of them."""
    clients, leased, waiting = Counter[str](), Counter[str](), Counter[str]()
    leased_of = site.shard.leased.of
    for run in site.clients:
        who = run.principal or NOBODY
        clients[who] += bool(run.connections)
        if run.handle < len(leased_of):
            leased[who] += int(leased_of[run.handle])
        waiting[who] += site.puts.waiting.get(run.handle, 0)
        waiting[who] += site.followers.waiting.get(run.handle, 0)
    pinned = {account.rights.principal: account.pinned for account in site.accounts.confined}
    for family, sums in (
        ("mooncake_principal_clients", clients),
        ("mooncake_principal_leased_bytes", leased),
        ("mooncake_principal_pinned_bytes", pinned),
        ("mooncake_principal_waiting_requests", waiting),
    ):
        for name, value in few(sums).items():
            yield Sample(family, value, (name,))


def _namespaces(shard: Shard) -> Iterator[Sample]:
    """Tell what namespaces have, of the first of them by name, and the others together."""
    first, count = nsmallest(NAMES_MAX, shard.tenants), len(shard.tenants)
    for column, family in enumerate(("mooncake_namespace_bytes", "mooncake_namespace_objects")):
        numbers = [shard.tenants[name].number for name in first]
        shown = shard.tenant_use[numbers, column].tolist()
        for name, value in zip(first, shown, strict=True):
            yield Sample(family, value, (name,))
        if count > NAMES_MAX:
            rest = int(shard.tenant_use[:count, column].sum()) - sum(shown)
            yield Sample(family, rest, (OTHERS,))
    for name in first:
        quota = shard.tenants[name].quota_bytes
        if quota is not None:
            yield Sample("mooncake_namespace_quota_bytes", quota, (name,))


def _journal(keeper: Keeper, shard: Shard, now: int, number: str) -> Iterator[Sample]:
    journal = shard.journal
    yield Sample("mooncake_journal_kept", int(keeper.keeps), (number,))
    yield Sample("mooncake_journal_bytes_total", keeper.written_bytes, (number,))
    yield Sample("mooncake_journal_unwritten_bytes", keeper.unwritten_bytes, (number,))
    yield Sample("mooncake_journal_snapshots_total", journal.snapshots, (number,))
    if journal.snapshots:
        age_s, took_s = (now - journal.snapshot_at) / SECOND_NS, journal.snapshot_ns / SECOND_NS
        yield Sample("mooncake_journal_snapshot_age_seconds", age_s, (number,))
        yield Sample("mooncake_journal_snapshot_duration_seconds", took_s, (number,))
