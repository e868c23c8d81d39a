"""What a page shows of a pool: its state in plain values, and what is wrong with it. No I/O.

Of many workers and segments the first `LISTED_MAX` are shown, those in trouble before others.
O(workers + segments).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.core.records import TIER_NAMES, SegmentState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.wire.cluster import ClusterStatus, SegmentEntry, WorkerEntry
    from mooncake_store.wire.shard import ShardFigures
    from mooncake_store.wire.standby import StandbyEntry

__all__ = ["figures", "problems", "state_of"]

LISTED_MAX = 500
_GRAVE = "bad"
_SLIGHT = "warn"
_BACKING = ("memory", "disk", "store")
"""What fails, by `Tier`."""


def state_of(segment: SegmentEntry) -> str:
    """Return the state of a segment as a word."""
    return SegmentState(segment.state).name.lower()


def problems(status: ClusterStatus, shards: Sequence[ShardFigures]) -> list[dict[str, str]]:
    """Return what is wrong, the worst first: how grave it is, what, and which view tells more."""
    found: list[tuple[str, str, str]] = []
    if not status.ready:
        found.append((_GRAVE, f"no puts are taken: {_why_not(status)}", "overview"))
    for segment in status.segments:
        if segment.fault:
            what = f"the {_BACKING[segment.tier]} of segment {segment.name}, worker "
            found.append((_GRAVE, f"{what}{segment.worker}, fails: {segment.fault}", "segments"))
        elif state_of(segment) in ("draining", "drained"):
            found.append((_SLIGHT, f"segment {segment.name} is {state_of(segment)}", "segments"))
    for worker in status.workers:
        if worker.state != "alive":
            grave = _SLIGHT if worker.state == "suspect" else _GRAVE
            silent = f"silent for {worker.silent_ms / 1e3:.0f} s"
            found.append((grave, f"worker {worker.name} is {worker.state}, {silent}", "workers"))
    for standby in status.standbys:
        if not standby.follows:
            grave = _GRAVE if standby.counts else _SLIGHT
            found.append((grave, f"standby {standby.number:016x} does not follow", "journal"))
    missing = sum(each.replicas_missing for each in shards)
    if missing:
        found.append((_SLIGHT, f"{missing:,} replicas are missing and not yet copied", "overview"))
    lost = sum(each.lost_objects for each in shards)
    if lost:
        found.append((_SLIGHT, f"{lost:,} objects were lost with their workers so far", "workers"))
    found.sort(key=lambda each: each[0] != _GRAVE)
    told = found[:LISTED_MAX]
    return [{"grave": grave, "what": what, "view": view} for grave, what, view in told]


def _why_not(status: ClusterStatus) -> str:
    return status.refusing or "no worker lends memory"


def figures(status: ClusterStatus, shards: Sequence[ShardFigures]) -> dict[str, Any]:
    """Return what there is now, as the page has it."""
    segments = sorted(status.segments, key=lambda each: (_is_well(each), each.name))
    workers = sorted(status.workers, key=lambda each: (each.state == "alive", each.name))
    return {
        "ready": status.ready,
        "refusing": "" if status.ready else _why_not(status),
        "waiting": status.waiting,
        "version": status.version,
        "uptime_s": status.uptime_ms / 1e3,
        "problems": problems(status, shards),
        "segments": [_segment(each) for each in segments[:LISTED_MAX]],
        "segments_all": len(segments),
        "workers": [_worker(each, status) for each in workers[:LISTED_MAX]],
        "workers_all": len(workers),
        "shards": [
            _shard(address, each) for address, each in zip(status.shards, shards, strict=False)
        ],
        "standbys": [_standby(each) for each in status.standbys],
    }


def _is_well(segment: SegmentEntry) -> bool:
    return segment.state == SegmentState.OK and not segment.fault


def _segment(entry: SegmentEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "worker": entry.worker,
        "host": entry.host,
        "tier": TIER_NAMES[entry.tier],
        "state": state_of(entry),
        "size": entry.nbytes,
        "used": entry.used_bytes,
        "fault": entry.fault,
        "namespace": entry.namespace,
    }


def _worker(entry: WorkerEntry, status: ClusterStatus) -> dict[str, Any]:
    mine = [each for each in status.segments if each.number in entry.segments]
    return {
        "name": entry.name,
        "host": entry.host,
        "state": entry.state,
        "silent_s": entry.silent_ms / 1e3,
        "segments": len(mine),
        "size": sum(each.nbytes for each in mine),
        "used": sum(each.used_bytes for each in mine),
        "faults": [each.fault for each in mine if each.fault],
    }


def _shard(address: str, figures: ShardFigures) -> dict[str, Any]:
    return {
        "address": address,
        "objects": figures.objects,
        "writing": figures.writing,
        "clients": figures.clients,
        "rss_bytes": figures.rss_bytes,
        "journal": figures.journal,
        "journal_bytes": figures.journal_bytes,
        "leased_bytes": figures.leased_bytes,
        "hard_pinned_bytes": figures.hard_pinned_bytes,
        "copies": figures.tasks_unfinished + figures.hauls_unfinished,
    }


def _standby(entry: StandbyEntry) -> dict[str, Any]:
    return {
        "number": f"{entry.number:016x}",
        "address": entry.address,
        "counts": entry.counts,
        "follows": entry.follows,
        "exact": entry.exact,
        "behind_words": entry.behind_words,
        "silent_s": entry.silent_ms / 1e3,
        "objects": entry.objects,
    }
