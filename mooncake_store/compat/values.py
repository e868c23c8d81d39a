"""The small types of the original's module: enumerations, configurations, descriptors, tasks.

They hold values and check their types where the original's do; the store acts on them elsewhere.
Enumerations compare and print as the original's and turn into their numbers with `int`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

__all__ = [
    "Descriptor",
    "DiskDescriptor",
    "LocalDiskDescriptor",
    "MemoryDescriptor",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "TransferNotify",
    "TransferOpcode",
]


class _Numbered(Enum):
    """An enumeration that is no number but has one."""

    def __int__(self) -> int:
        return int(self.value)

    __index__ = __int__


class SoftPinAction(_Numbered):
    """What a put does to the soft pin of its object."""

    PRESERVE = 0
    ENABLE = 1
    DISABLE = 2


class ObjectDataType(_Numbered):
    """What an object holds, as its writer says; the store does not act on it."""

    UNKNOWN = 0
    KVCACHE = 1
    TENSOR = 2
    WEIGHT = 3
    SAMPLE = 4
    ACTIVATION = 5
    GRADIENT = 6
    OPTIMIZER_STATE = 7
    METADATA = 8
    GENERAL = 9


class ReplicaStatus(_Numbered):
    """Life of a replica."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


class TaskType(_Numbered):
    """What a task does."""

    REPLICA_COPY = 0
    REPLICA_MOVE = 1


class TaskStatus(_Numbered):
    """Life of a task."""

    PENDING = 0
    PROCESSING = 1
    FAILED = 2
    SUCCESS = 3


class TransferOpcode(_Numbered):
    """Direction of a transfer, as its initiator sees it."""

    Read = 0
    Write = 1
    READ = 0
    WRITE = 1


@dataclass(slots=True)
class TransferNotify:
    """A short text that follows a transfer."""

    name: str = ""
    msg: str = ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 64


def _is_names(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


class ReplicateConfig:
    """How a put places and keeps its object. Attributes of a wrong type raise TypeError."""

    # What each attribute takes: values of a type, or those of which something is true.
    _KINDS: ClassVar[dict[str, Any]] = {
        "replica_num": _is_count,
        "nof_replica_num": _is_count,
        "dfs_replica_num": _is_count,
        "soft_pin_action": SoftPinAction,
        "soft_pin_ttl_ms": lambda value: value is None or _is_count(value),
        "with_hard_pin": bool,
        "preferred_segments": _is_names,
        "preferred_segment": str,
        "preferred_nof_segments": _is_names,
        "prefer_alloc_in_same_node": bool,
        "data_type": ObjectDataType,
        "host_id": str,
        "group_ids": lambda value: value is None or _is_names(value),
    }

    def __init__(self) -> None:
        self.replica_num = 1
        self.nof_replica_num = 0
        self.dfs_replica_num = 0
        self.soft_pin_action = SoftPinAction.PRESERVE
        self.soft_pin_ttl_ms: int | None = None
        self.with_hard_pin = False
        self.preferred_segments: list[str] = []
        self.preferred_segment = ""
        self.preferred_nof_segments: list[str] = []
        self.prefer_alloc_in_same_node = False
        self.data_type = ObjectDataType.UNKNOWN
        self.host_id = ""
        self.group_ids: list[str] | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        accepts = self._KINDS.get(name)
        if accepts is None:
            raise AttributeError(f"'ReplicateConfig' object has no attribute {name!r}")
        fits = isinstance(value, accepts) if isinstance(accepts, type) else accepts(value)
        if not fits:
            raise TypeError(f"ReplicateConfig.{name} cannot be {value!r}")
        object.__setattr__(self, name, list(value) if isinstance(value, tuple) else value)

    def __str__(self) -> str:
        ttl = "default" if self.soft_pin_ttl_ms is None else self.soft_pin_ttl_ms
        return (
            f"ReplicateConfig: {{ replica_num: {self.replica_num}, "
            f"nof_replica_num: {self.nof_replica_num}, dfs_replica_num: {self.dfs_replica_num}, "
            f"soft_pin_action: {self.soft_pin_action.name}, soft_pin_ttl_ms: {ttl}, "
            f"with_hard_pin: {int(self.with_hard_pin)}, "
            f"preferred_segments: [{', '.join(self.preferred_segments)}], "
            f"preferred_nof_segments: [{', '.join(self.preferred_nof_segments)}], "
            f"prefer_alloc_in_same_node: {int(self.prefer_alloc_in_same_node)}, "
            f"data_type: {self.data_type.name} }}"
        )


@dataclass(slots=True)
class Descriptor:
    """Where bytes of a memory replica lie.

    `transport_endpoint` is the name of the segment, `buffer_address` the offset in it: no address
    of another process ever leaves that process.
    """

    size: int = 0
    buffer_address: int = 0
    transport_endpoint: str = ""

    @property
    def size_(self) -> int:
        """The size, by the name that older releases used."""
        return self.size

    def __repr__(self) -> str:
        return (
            f"<Descriptor size={self.size} buffer_address={self.buffer_address} "
            f"transport_endpoint={self.transport_endpoint}>"
        )


@dataclass(frozen=True, slots=True)
class MemoryDescriptor:
    """A replica in memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True, slots=True)
class DiskDescriptor:
    """A replica in a file."""

    file_path: str
    object_size: int


@dataclass(frozen=True, slots=True)
class LocalDiskDescriptor:
    """A replica on a disk that a store or a worker lends; `transport_endpoint` names the disk."""

    object_size: int
    transport_endpoint: str


class ReplicaDescriptor:
    """One copy of an object."""

    __slots__ = ("_at", "status")

    def __init__(
        self, at: MemoryDescriptor | DiskDescriptor | LocalDiskDescriptor, status: ReplicaStatus
    ) -> None:
        self._at = at
        self.status = status

    def is_memory_replica(self) -> bool:
        """Whether it lies in memory."""
        return isinstance(self._at, MemoryDescriptor)

    def is_disk_replica(self) -> bool:
        """Whether it lies in a file of its own; no replica here does."""
        return isinstance(self._at, DiskDescriptor)

    def is_local_disk_replica(self) -> bool:
        """Whether it lies on a disk that somebody lends."""
        return isinstance(self._at, LocalDiskDescriptor)

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Where it lies in memory; raises RuntimeError for one on disk."""
        if not isinstance(self._at, MemoryDescriptor):
            raise RuntimeError("this replica does not lie in memory")
        return self._at

    def get_disk_descriptor(self) -> DiskDescriptor:
        """Where it lies in a file; raises RuntimeError for one that does not."""
        if not isinstance(self._at, DiskDescriptor):
            raise RuntimeError("this replica does not lie in a file of its own")
        return self._at


@dataclass(slots=True)
class QueryTaskResponse:
    """How a copy or a move stands. Identifiers are pairs of numbers."""

    id: tuple[int, int] = (0, 0)
    type: TaskType = TaskType.REPLICA_COPY
    status: TaskStatus = TaskStatus.PENDING
    created_at_ms_epoch: int = 0
    last_updated_at_ms_epoch: int = 0
    assigned_client: tuple[int, int] = (0, 0)
    message: str = ""


@dataclass(slots=True)
class ParallelAxis:
    """One axis along which a tensor is cut: "tp", "dp", "ep" or "pp"."""

    kind: str = ""
    rank: int = 0
    size: int = 1
    split_dim: int | None = None
    expert_id: int | None = None
    stage_id: int | None = None


@dataclass(slots=True)
class TensorParallelism:
    """The axes that name one shard of a tensor, in order."""

    axes: list[ParallelAxis] = field(default_factory=list)


@dataclass(slots=True)
class ReadTarget:
    """What a read of a cut tensor returns: "as_stored", a "shard", or the "full" tensor."""

    mode: str = "as_stored"
    parallelism: TensorParallelism | None = None
