"""What is told of a pool, in the same words to people, to programs and over HTTP. No I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from mooncake_store.core.records import TIER_NAMES, SegmentState
from mooncake_store.units import format_duration

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.credentials import Entry
    from mooncake_store.wire.cluster import ClusterStatus
    from mooncake_store.wire.standby import StandbyEntry

__all__ = [
    "BACKING", "Problem", "credential_value", "problems", "promotion", "segments_value",
    "standbys_value", "status_value", "workers_value",
]  # fmt: skip

BACKING = ("memory", "disk", "store")
"""What fails, by `Tier`."""


class Problem(NamedTuple):
    """Something that is wrong with a pool."""

    about: str
    """"pool", "worker", "segment" or "standby"."""
    grave: bool
    """Whether something cannot be read or changed because of it."""
    what: str


def problems(found: ClusterStatus) -> list[Problem]:
    """Return what is wrong with a pool, the worst first."""
    told = []
    if not found.ready:
        why = found.refusing or "no worker lends memory"
        told.append(Problem("pool", True, f"not ready: {why}"))
    told += [
        Problem(
            "worker",
            each.state != "suspect",
            f"worker {each.name} on {each.host} is {each.state}: "
            f"silent for {format_duration(max(1, round(each.silent_ms / 1e3)))}",
        )
        for each in found.workers
        if each.state not in ("alive", "gone")
    ]
    told += [
        Problem(
            "segment",
            True,
            f"{BACKING[each.tier]} of {each.name}, worker {each.worker}: {each.fault}",
        )
        for each in found.segments
        if each.fault
    ]
    told += [
        Problem(
            "standby",
            each.counts,
            f"standby {each.number:016x} at {each.address or 'an unknown address'} does not follow",
        )
        for each in found.standbys
        if not each.follows
    ]
    return told


def status_value(found: ClusterStatus) -> dict[str, Any]:
    """Return all that a master says of its pool."""
    return {
        "ready": found.ready,
        "problems": [each.what for each in problems(found)],
        "version": found.version,
        "pid": found.pid,
        "uptime_s": found.uptime_ms / 1e3,
        "shards": list(found.shards),
        "workers": workers_value(found),
        "segments": segments_value(found),
        "standbys": standbys_value(found.standbys),
        "refusing": found.refusing,
        "waiting": found.waiting,
    }


def workers_value(found: ClusterStatus) -> list[dict[str, Any]]:
    """Return who lends memory."""
    return [
        {"name": w.name, "host": w.host, "state": w.state, "silent_s": w.silent_ms / 1e3}
        for w in found.workers
    ]


def segments_value(found: ClusterStatus) -> list[dict[str, Any]]:
    """Return what is lent, and how full it is."""
    return [
        {
            "number": s.number,
            "name": s.name,
            "worker": s.worker,
            "host": s.host,
            "tier": TIER_NAMES[s.tier],
            "state": SegmentState(s.state).name.lower(),
            "size": s.nbytes,
            "used": s.used_bytes,
            "fault": s.fault,
            "namespace": s.namespace,
        }
        for s in found.segments
    ]


def promotion(objects: int, lacking_words: int, *, exact: bool) -> dict[str, Any]:
    """Return what a promotion now would come to: -1 words where that is not known."""
    return {
        "objects": objects,
        "lacking_words": lacking_words,
        "loses": "nothing" if exact else "the last changes" if lacking_words >= 0 else "unknown",
    }


def standbys_value(entries: Sequence[StandbyEntry]) -> list[dict[str, Any]]:
    """Return what a leader tells of its standbys."""
    return [
        {
            "number": f"{each.number:016x}",
            "address": each.address,
            "counts": each.counts,
            "follows": each.follows,
            "behind_words": each.behind_words,
            "silent_s": each.silent_ms / 1e3,
            "promotion": promotion(each.objects, each.behind_words, exact=each.exact),
        }
        for each in entries
    ]


def credential_value(name: str, entry: Entry, now: float) -> dict[str, Any]:
    """Return what a principal may do, and how many secrets are believed; none of these."""
    return {
        "principal": name,
        "role": entry.role,
        "namespaces": list(entry.namespaces),
        "limits": entry.limits,
        "until": entry.until or None,
        "secrets": len(entry.keys(name, now)),
    }
