"""What is asked of a shard for whoever looks after a pool: all its namespaces, all its copies.

Only admins ask: the answers name objects and namespaces of everybody.
"""

from __future__ import annotations

import msgspec

from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation

__all__ = [
    "NAMESPACES",
    "SET_QUOTA",
    "TASKS",
    "NamespaceFigures",
    "Namespaces",
    "NamespacesRequest",
    "QuotaSet",
    "SetQuota",
    "TaskEntries",
    "TaskEntry",
    "TasksRequest",
]


class TasksRequest(msgspec.Struct, frozen=True, array_like=True, tag="tasks?"):
    """Asks for the copies and moves that clients asked for, the latest `limit` of them."""

    limit: int = 256


class TaskEntry(msgspec.Struct, frozen=True, array_like=True):
    """A copy or move, and of what; the numbers are those of `TaskReply` and `SubmitTask`."""

    number: int
    kind: int
    state: int
    message: str
    created_ms_ago: int
    name: bytes
    """Empty once there is no such object any more."""
    namespace: str
    source: int
    targets: tuple[int, ...]


class TaskEntries(msgspec.Struct, frozen=True, array_like=True, tag="entries"):
    """Copies and moves, the latest first."""

    tasks: tuple[TaskEntry, ...]


class NamespacesRequest(msgspec.Struct, frozen=True, array_like=True, tag="namespaces?"):
    """Asks for the namespaces that come after this number, -1 for the first of them."""

    after: int = -1


class NamespaceFigures(msgspec.Struct, frozen=True, array_like=True):
    """What a namespace has on a shard, and the part of its quota that is there: -1 for none."""

    number: int
    name: str
    objects: int
    nbytes: int
    quota_bytes: int


class Namespaces(msgspec.Struct, frozen=True, array_like=True, tag="namespaces"):
    """Namespaces in the order of their numbers; `more` where some come after these."""

    found: tuple[NamespaceFigures, ...]
    more: bool = False


class SetQuota(msgspec.Struct, frozen=True, array_like=True, tag="quota?"):
    """Gives a namespace a quota over all shards, of which each takes its part; -1 takes it away."""

    namespace: str
    quota_bytes: int


class QuotaSet(msgspec.Struct, frozen=True, array_like=True, tag="quota"):
    """The part that this shard took, -1 for none."""

    quota_bytes: int


TASKS = Operation(
    "tasks",
    0x3D,
    Cold(TasksRequest),
    Cold(TaskEntries, bytes_max=4 << 20),
    "copies and moves that clients asked for",
)
NAMESPACES = Operation(
    "namespaces",
    0x3E,
    Cold(NamespacesRequest),
    Cold(Namespaces, bytes_max=4 << 20),
    "what each namespace has, and its quota",
)
SET_QUOTA = Operation(
    "set_quota", 0x3F, Cold(SetQuota), Cold(QuotaSet), "gives a namespace a quota, or takes it away"
)
