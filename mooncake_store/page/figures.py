"""What a page shows of a pool: its state in plain values, and what is wrong with it. No I/O.

Of many workers and segments the first `LISTED_MAX` are shown, those in trouble before others.
O(workers + segments).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mooncake_store.admin.told import problems, segments_value, standbys_value, workers_value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.wire.cluster import ClusterStatus
    from mooncake_store.wire.shard import ShardFigures

__all__ = ["figures"]

LISTED_MAX = 500
_GRAVE = "bad"
_SLIGHT = "warn"
_VIEWS = {"pool": "overview", "worker": "workers", "segment": "segments", "standby": "journal"}


def figures(status: ClusterStatus, shards: Sequence[ShardFigures]) -> dict[str, Any]:
    """Return what there is now, as the page has it."""
    segments = sorted(segments_value(status), key=lambda each: (_is_well(each), each["name"]))
    workers = _workers(status, segments)
    return {
        "ready": status.ready,
        "refusing": "" if status.ready else problems(status)[0].what,
        "waiting": status.waiting,
        "version": status.version,
        "uptime_s": status.uptime_ms / 1e3,
        "problems": _wrong(status, segments, shards)[:LISTED_MAX],
        "segments": segments[:LISTED_MAX],
        "segments_all": len(segments),
        "workers": workers[:LISTED_MAX],
        "workers_all": len(workers),
        "shards": [
            _shard(address, each) for address, each in zip(status.shards, shards, strict=False)
        ],
        "standbys": standbys_value(status.standbys),
    }


def _wrong(
    status: ClusterStatus, segments: Sequence[dict[str, Any]], shards: Sequence[ShardFigures]
) -> list[dict[str, str]]:
    """Return what is wrong, the worst first: how grave it is, what, and which view tells more."""
    found = [
        (_GRAVE if each.grave else _SLIGHT, each.what, _VIEWS[each.about])
        for each in problems(status)
    ]
    found += [
        (_SLIGHT, f"segment {each['name']} is {each['state']}", "segments")
        for each in segments
        if each["state"] in ("draining", "drained")
    ]
    missing = sum(each.replicas_missing for each in shards)
    if missing:
        found.append((_SLIGHT, f"{missing:,} replicas are missing and not yet copied", "overview"))
    lost = sum(each.lost_objects for each in shards)
    if lost:
        found.append((_SLIGHT, f"{lost:,} objects were lost with their workers so far", "workers"))
    found.sort(key=lambda each: each[0] != _GRAVE)
    return [{"grave": grave, "what": what, "view": view} for grave, what, view in found]


def _is_well(segment: dict[str, Any]) -> bool:
    return segment["state"] == "ok" and not segment["fault"]


def _workers(status: ClusterStatus, segments: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return who lends memory and how much: those in trouble first."""
    lent: dict[str, list[dict[str, Any]]] = {}
    for each in segments:
        lent.setdefault(each["worker"], []).append(each)
    found = []
    for worker in workers_value(status):
        mine = lent.get(worker["name"], [])
        found.append(
            worker
            | {
                "segments": len(mine),
                "size": sum(each["size"] for each in mine),
                "used": sum(each["used"] for each in mine),
                "faults": [each["fault"] for each in mine if each["fault"]],
            }
        )
    return sorted(found, key=lambda each: (each["state"] == "alive", each["name"]))


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
