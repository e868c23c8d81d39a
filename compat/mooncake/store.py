"""`mooncake.store` of the original."""

from mooncake_store.compat.buffer_pool import BufferLease, BufferPool, RegisteredBufferPool
from mooncake_store.compat.memory import BufferHandle, MooncakeHostMemAllocator
from mooncake_store.compat.numa import bind_to_numa_node
from mooncake_store.compat.store import MooncakeDistributedStore
from mooncake_store.compat.tensor_format import HEADER_BYTES
from mooncake_store.compat.tensors import deserialize as _deserialize_tensor
from mooncake_store.compat.tensors import serialize as _serialize_tensor
from mooncake_store.compat.values import (
    Descriptor,
    DiskDescriptor,
    MemoryDescriptor,
    ObjectDataType,
    ParallelAxis,
    QueryTaskResponse,
    ReadTarget,
    ReplicaDescriptor,
    ReplicaStatus,
    ReplicateConfig,
    SoftPinAction,
    TaskStatus,
    TaskType,
    TensorParallelism,
)

__all__ = [
    "BufferHandle",
    "BufferLease",
    "BufferPool",
    "Descriptor",
    "DiskDescriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
    "_deserialize_tensor",
    "_serialize_tensor",
    "_tensor_metadata_size",
    "bind_to_numa_node",
]

RegisteredBufferLease = BufferLease

# The original exports the members of these enumerations by themselves, too.
for _kind in (TaskType, TaskStatus, ReplicaStatus, ObjectDataType):
    globals().update(_kind.__members__)
del _kind


def _tensor_metadata_size() -> int:
    """Bytes of the header before the elements of a stored tensor."""
    return HEADER_BYTES
