"""The table of all families: each is declared once, here, and nowhere else named in code.

A name ends in its base unit, and in `_total` where it only grows. Labels have few values: those
that are given here, or names of which at most `NAMES_MAX` are told, and the others together as
`OTHERS`. A key of an object is never one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["FAMILIES", "NAMES_MAX", "NOBODY", "OTHERS", "PARTS", "Family", "few"]

NAMES_MAX = 64
OTHERS = "other"
NOBODY = "none"
"""In place of a principal: whoever came without a credential of his own."""
Values: TypeAlias = tuple[str, ...] | str

PARTS = {
    "master": "A master, of all its shards together, wherever these are",
    "shard": "A master, of each shard",
    "worker": "A worker",
    "client": "A client, where a program shows what `client_page` returns",
    "process": "Each of them, of its own process",
}
"""Who tells families, by the names that the table has for them."""


class Family(NamedTuple):
    """What is counted or measured under one name."""

    part: str
    name: str
    kind: str
    help: str
    labels: dict[str, Values]
    """By name: all values, or in words what they are."""


_OPERATION = "an operation of [the protocol](wire-protocol.md)"
_TIER = ("memory", "disk", "cold")
_STATES = ("ok", "suspect", "draining", "drained", "absent")
_REASON = ("watermark", "room", "wait", "quota", "asked")
_PRINCIPAL = f"a principal, {NOBODY} for who came without a credential of its own"
_NAMESPACE = "a namespace"
_SHARD = "the number of a shard"
_WAY = ("read", "written")
_TURNED_AWAY = (
    "refused", "silent", "crowded", "full", "broken", "dropped", "revoked", "unsealed",
)  # fmt: skip

_TABLE = (
    # -- a master
    Family("master", "mooncake_build_info", "gauge", "1, with the version that runs.",
     {"version": "of the package"}),
    Family("master", "mooncake_ready", "gauge", "Whether puts can be taken.", {}),
    Family("master", "mooncake_shards", "gauge", "Shards of the pool.", {}),
    Family("master", "mooncake_silent_shards", "gauge",
     "Shards that did not say in time what they have counted: their figures are missing.", {}),
    Family("master", "mooncake_request_seconds", "histogram",
     "Requests and how long they took to be answered, those that failed included; a request is "
     "one, however many keys it asks for. Those of events wait for news.",
     {"operation": _OPERATION}),
    Family("master", "mooncake_requests_failed_total", "counter",
     "Requests that were answered with an error, as a whole.", {"operation": _OPERATION}),
    Family("master", "mooncake_keys_total", "counter", "Keys that requests asked for.", {}),
    Family("master", "mooncake_hits_total", "counter",
     "Keys that gets found, by the highest tier they were on. Reads under a lease that is held ask "
     "nobody.", {"tier": _TIER}),
    Family("master", "mooncake_misses_total", "counter",
     "Keys that gets did not find: on workers that are absent, not written to their end, or not "
     "there.", {"reason": ("absent", "unfinished", "unknown")}),
    Family("master", "mooncake_read_bytes_total", "counter", "Bytes of what gets found.", {}),
    Family("master", "mooncake_written_bytes_total", "counter",
     "Bytes of completed puts, each object once.", {}),
    Family("master", "mooncake_objects", "gauge",
     "Objects.", {"state": ("readable", "unfinished")}),
    Family("master", "mooncake_object_bytes", "gauge",
     "Bytes of all replicas, as they were put.", {}),
    Family("master", "mooncake_missing_replicas", "gauge",
     "Replicas that readable objects have fewer than they were put for.", {}),
    Family("master", "mooncake_lost_objects_total", "counter",
     "Objects whose last replica went with its worker or its disk.", {}),
    Family("master", "mooncake_expired_puts_total", "counter",
     "Puts that were begun and not ended in time.", {}),
    Family("master", "mooncake_evicted_objects_total", "counter",
     "Objects that were evicted: above the high watermark, to make room for a put, for a put that "
     "waits, for a quota or a limit, or because somebody asked.", {"reason": _REASON}),
    Family("master", "mooncake_evicted_bytes_total", "counter",
     "Their bytes.", {"reason": _REASON}),
    Family("master", "mooncake_moved_objects_total", "counter",
     "Objects that went from memory to a lower tier, or back.", {"direction": ("down", "up")}),
    Family("master", "mooncake_moved_bytes_total", "counter", "Their bytes.",
     {"direction": ("down", "up")}),
    Family("master", "mooncake_capacity_bytes", "gauge", "Bytes of the segments that are there.",
     {"tier": _TIER}),
    Family("master", "mooncake_used_bytes", "gauge",
     "Bytes of them that are not free: replicas as they are rounded, and what readers may still "
     "read.", {"tier": _TIER}),
    Family("master", "mooncake_contiguous_free_bytes", "gauge",
     "Free bytes in the largest piece of each shard's part of each segment. Far below what is "
     "free: space is in pieces.", {"tier": _TIER}),
    Family("master", "mooncake_quarantined_bytes", "gauge",
     "Bytes that are nobody's and not free yet, because somebody may still read or write there.",
     {}),
    Family("master", "mooncake_segments", "gauge", "Segments.", {"tier": _TIER, "state": _STATES}),
    Family("master", "mooncake_failing_segments", "gauge",
     "Segments below memory whose disk or store fails.", {"tier": ("disk", "cold")}),
    Family("master", "mooncake_workers", "gauge", "Workers.",
     {"state": ("alive", "suspect", "absent", "gone")}),
    Family("master", "mooncake_leased_bytes", "gauge",
     "Bytes under leases of readers, as the last sweep saw them.", {}),
    Family("master", "mooncake_soft_pinned_objects", "gauge", "Objects with a soft pin.", {}),
    Family("master", "mooncake_hard_pinned_bytes", "gauge",
     "Bytes of objects with a hard pin.", {}),
    Family("master", "mooncake_waiting_requests", "gauge",
     "Requests that wait: puts for space, followers for events, listings for their turn, changes "
     "for the disk or a standby.", {"queue": ("space", "events", "turn", "journal")}),
    Family("master", "mooncake_unfinished_work", "gauge",
     "What workers have yet to do: copies and moves, and batches that go from tier to tier.",
     {"kind": ("copies", "hauls")}),
    Family("master", "mooncake_principal_clients", "gauge",
     "Clients that are connected, once for each shard.",
     {"principal": _PRINCIPAL}),
    Family("master", "mooncake_principal_leased_bytes", "gauge",
     "Bytes under leases; what several lease counts for each.", {"principal": _PRINCIPAL}),
    Family("master", "mooncake_principal_pinned_bytes", "gauge",
     "Bytes that are pinned hard in the namespaces of a credential that is for some.",
     {"principal": _PRINCIPAL}),
    Family("master", "mooncake_principal_waiting_requests", "gauge",
     "Requests that wait for space or for events.", {"principal": _PRINCIPAL}),
    Family("master", "mooncake_namespace_objects", "gauge", "Objects.", {"namespace": _NAMESPACE}),
    Family("master", "mooncake_namespace_bytes", "gauge", "Bytes of their replicas.",
     {"namespace": _NAMESPACE}),
    Family("master", "mooncake_namespace_quota_bytes", "gauge",
     "The most that they may have, where there is such a quota.", {"namespace": _NAMESPACE}),
    Family("master", "mooncake_standbys", "gauge",
     "Standbys: those that changes wait for, those that only follow, and those that are away.",
     {"state": ("counts", "follows", "away")}),
    Family("master", "mooncake_standby_behind_bytes", "gauge",
     "Bytes of the journal that the standby lacks which is furthest behind.", {}),
    Family("master", "mooncake_changes_refused", "gauge",
     "Whether changes are refused for want of a standby.", {}),
    # -- each shard
    Family("shard", "mooncake_shard_objects", "gauge", "Readable objects.", {"shard": _SHARD}),
    Family("shard", "mooncake_shard_requests_total", "counter", "Requests.", {"shard": _SHARD}),
    Family("shard", "mooncake_shard_clients", "gauge", "Clients that it knows.", {"shard": _SHARD}),
    Family("shard", "mooncake_shard_cpu_seconds_total", "counter",
     "Processor time of its process, which is the master's where there is one shard.",
     {"shard": _SHARD}),
    Family("shard", "mooncake_shard_resident_memory_bytes", "gauge", "Memory of its process.",
     {"shard": _SHARD}),
    Family("shard", "mooncake_journal_kept", "gauge",
     "Whether what it holds is known again when its process was killed. Of a pool that keeps no "
     "journal nothing is told here.", {"shard": _SHARD}),
    Family("shard", "mooncake_journal_bytes_total", "counter", "What was written down.",
     {"shard": _SHARD}),
    Family("shard", "mooncake_journal_unwritten_bytes", "gauge",
     "What of it is not in files yet: it outlives the process, and not the host.",
     {"shard": _SHARD}),
    Family("shard", "mooncake_journal_snapshots_total", "counter",
     "Snapshots since its process was started.", {"shard": _SHARD}),
    Family("shard", "mooncake_journal_snapshot_age_seconds", "gauge",
     "For how long the last of them is there.", {"shard": _SHARD}),
    Family("shard", "mooncake_journal_snapshot_duration_seconds", "gauge", "What that took.",
     {"shard": _SHARD}),
    # -- a worker
    Family("worker", "mooncake_worker_mounted", "gauge",
     "Whether its master knows and hears it.", {}),
    Family("worker", "mooncake_worker_sound", "gauge",
     "Whether all of it goes on; one that is not falls silent.", {}),
    Family("worker", "mooncake_worker_segments", "gauge",
     "Segments that it lends.", {"tier": _TIER}),
    Family("worker", "mooncake_worker_lent_bytes", "gauge", "Their bytes.", {"tier": _TIER}),
    Family("worker", "mooncake_worker_failing_segments", "gauge",
     "Segments whose disk or store fails.", {}),
    Family("worker", "mooncake_worker_connections", "gauge",
     "Who is connected to be given data, over TCP, or the memory itself.",
     {"transport": ("tcp", "shm")}),
    Family("worker", "mooncake_worker_requests_total", "counter",
     "Batches over TCP that were answered. Who has mapped the memory, or reaches it by a card, "
     "asks nobody.", {}),
    Family("worker", "mooncake_worker_refused_ranges_total", "counter",
     "Ranges of batches that were refused: out of bounds, of a segment that is not lent, or "
     "without a right.", {}),
    Family("worker", "mooncake_worker_transferred_bytes_total", "counter",
     "Bytes that its data connections carried to readers, and from writers.",
     {"transport": ("tcp",), "direction": _WAY}),
    Family("worker", "mooncake_worker_turned_away_total", "counter",
     "Who came and was sent away, or ended, by the words of the log.", {"reason": _TURNED_AWAY}),
    Family("worker", "mooncake_worker_hauled_objects_total", "counter",
     "Objects that it carried from tier to tier, and those of them with which that failed.",
     {"result": ("carried", "failed")}),
    Family("worker", "mooncake_worker_hauled_bytes_total", "counter",
     "Bytes of those carried.", {}),
    # -- a client
    Family("client", "mooncake_client_requests_total", "counter", "Requests to masters.", {}),
    Family("client", "mooncake_client_keys_total", "counter", "Keys of all operations.", {}),
    Family("client", "mooncake_client_lease_cache_hits_total", "counter",
     "Keys that were read under a lease it held, without asking.", {}),
    Family("client", "mooncake_client_disk_reads_total", "counter",
     "Keys whose bytes came from disks.", {}),
    Family("client", "mooncake_client_failovers_total", "counter",
     "Keys that were read from another replica than at first.", {}),
    Family("client", "mooncake_client_checksum_failures_total", "counter",
     "Keys whose bytes were not those that were put.", {}),
    Family("client", "mooncake_client_transferred_bytes_total", "counter",
     "Bytes of objects that were read and written, by the way they went.",
     {"transport": "a [transport](../internals/transfer-engine.md)", "direction": _WAY}),
    # -- every process
    Family("process", "process_cpu_seconds_total", "counter", "Processor time.", {}),
    Family("process", "process_resident_memory_bytes", "gauge",
     "Memory that it has, what it lends and has filled included.", {}),
    Family("process", "process_virtual_memory_bytes", "gauge",
     "Addresses that it has reserved.", {}),
    Family("process", "process_open_fds", "gauge", "Descriptors that are open.", {}),
    Family("process", "process_max_fds", "gauge", "Descriptors that may be.", {}),
    Family("process", "process_threads", "gauge", "Threads of Python.", {}),
    Family("process", "process_start_time_seconds", "gauge",
     "When it was started, in seconds since 1970.", {}),
)  # fmt: skip
FAMILIES = {family.name: family for family in _TABLE}
"""All of them by name, in the order in which they are shown."""


def few(sums: Mapping[str, float]) -> Mapping[str, float]:
    """Return figures by name, those of too many names together as `OTHERS`.

    Which names are told depends on the names alone, so that one does not come and go with its
    figure.
    """
    names = sorted(sums.keys() - {OTHERS})
    if len(names) <= NAMES_MAX:
        return sums
    rest = sum(sums[name] for name in names[NAMES_MAX:])
    return {name: sums[name] for name in names[:NAMES_MAX]} | {OTHERS: sums.get(OTHERS, 0) + rest}
