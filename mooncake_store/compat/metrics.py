"""Totals of a store under the names that dashboards of the original know, and in one line.

Only what means the same is told; the original's counters of single requests are not kept here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mooncake_store.core.records import Tier
from mooncake_store.metrics.exposition import lines as metric
from mooncake_store.metrics.exposition import quoted
from mooncake_store.units import format_size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.wire.cluster import ClusterStatus
    from mooncake_store.wire.shard import ShardFigures

__all__ = ["metrics", "summary"]

_TOTALS = (
    ("master_allocated_file_size_bytes", "gauge", "disk_allocated", "Bytes of disks in use."),
    ("master_total_file_capacity_bytes", "gauge", "disk_total", "Bytes of all disks."),
    ("master_key_count", "gauge", "objects", "Readable objects."),
    ("master_soft_pin_key_count", "gauge", "soft_pinned", "Objects with a soft pin."),
    ("master_evicted_key_count", "counter", "evicted_objects", "Objects that were evicted."),
    ("master_evicted_size_bytes", "counter", "evicted_bytes", "Bytes that were evicted."),
    (
        "master_promotion_completed_total", "counter", "promoted_objects",
        "Objects that were copied from disks to memory.",
    ),
    (
        "master_promotion_completed_bytes_total", "counter", "promoted_bytes",
        "Bytes that were copied from disks to memory.",
    ),
)  # fmt: skip


def metrics(shards: Sequence[ShardFigures], status: ClusterStatus) -> str:
    """The figures in the text format of Prometheus."""
    lines: list[str] = []
    used, total = _memory(shards)
    lines += metric("master_allocated_bytes", "gauge", "Bytes of memory in use.", [("", used)])
    lines += metric("master_total_capacity_bytes", "gauge", "Bytes of all memory.", [("", total)])
    for name, kind, field, text in _TOTALS:
        lines += metric(name, kind, text, [("", _total(shards, field))])
    alive = [("", _alive(status))]
    lines += metric("master_active_clients", "gauge", "Workers that answer.", alive)
    for name, field, text in (
        ("segment_allocated_bytes", "used_bytes", "Bytes of a segment in use."),
        ("segment_total_capacity_bytes", "nbytes", "Bytes of a segment."),
    ):
        samples = [(_label(entry.name), getattr(entry, field)) for entry in status.segments]
        lines += metric(name, "gauge", text, samples)
    for tier, what in ((Tier.DISK, "disk"), (Tier.COLD, "store")):
        some = [entry for entry in status.segments if entry.tier == tier]
        failing = [(_label(entry.name), int(bool(entry.fault))) for entry in some]
        text = f"Whether the {what} of a segment fails."
        lines += metric(f"segment_{what}_failing", "gauge", text, failing)
    return "\n".join(lines + _of_standbys(status)) + "\n"


def _of_standbys(status: ClusterStatus) -> list[str]:
    lines = metric(
        "changes_refused", "gauge", "Whether changes are refused for want of a standby.",
        [("", int(bool(status.refusing)))],
    )  # fmt: skip
    text = "Changes that wait for the disk or a standby."
    lines += metric("changes_waiting", "gauge", text, [("", status.waiting)])
    for name, text, told in (
        ("counts", "Whether changes wait for a standby.", lambda each: int(each.counts)),
        ("follows", "Whether a standby follows.", lambda each: int(each.follows)),
        ("behind_words", "Words that a standby lacks; -1 unknown.", lambda e: e.behind_words),
        ("silent_ms", "For how long a standby took nothing.", lambda each: each.silent_ms),
    ):
        samples = [(f'{{standby="{e.number:016x}"}}', told(e)) for e in status.standbys]
        lines += metric(f"standby_{name}", "gauge", text, samples)
    return lines


def summary(shards: Sequence[ShardFigures], status: ClusterStatus) -> str:
    """The figures in a line for people."""
    used, total = _memory(shards)
    on_disk, disks = _total(shards, "disk_allocated"), _total(shards, "disk_total")
    ready = "true" if status.ready else "false"
    return (
        f"role=leader, state=serving, service_ready={ready}, master={{"
        f"Mem Storage: {format_size(used)} / {format_size(total)}"
        f"{f' ({100 * used / total:.1f}%)' if total else ''}"
        f" | SSD Storage: {format_size(on_disk)} / {format_size(disks)}"
        f" | Keys: {_total(shards, 'objects')} (soft-pinned: {_total(shards, 'soft_pinned')})"
        f" | Clients: {_alive(status)}"
        f" | Eviction: keys={_total(shards, 'evicted_objects')}, "
        f"size={format_size(_total(shards, 'evicted_bytes'))}}}"
    )


def _memory(shards: Sequence[ShardFigures]) -> tuple[int, int]:
    """How much of the memory is in use, and how much there is: what lies below left aside."""
    below = ("disk_allocated", "cold_allocated"), ("disk_total", "cold_total")
    used, total = (sum(_total(shards, field) for field in fields) for fields in below)
    return _total(shards, "bytes_allocated") - used, _total(shards, "bytes_total") - total


def _total(shards: Sequence[ShardFigures], field: str) -> int:
    return sum(int(getattr(shard, field)) for shard in shards)


def _alive(status: ClusterStatus) -> int:
    return sum(worker.state == "alive" for worker in status.workers)


def _label(segment: str) -> str:
    return f"{{segment={quoted(segment)}}}"
