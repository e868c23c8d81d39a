"""Segments on devices of this host, copied to and from by a device of this process (CUDA IPC).

The owner hands over what maps its memory (`transports.lending`), once. Every batch is then copies
of the device between that memory and the caller's, which may be of the device or of the host; the
owner's processor takes no part. A batch that wants checksums of device memory passes through
staging memory of the host, where it is hashed.

Cost: about a call into the driver per run of adjacent requests, and one wait a batch.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from transfer_engine.base import (
    CANCELLED,
    REFUSED,
    UNKNOWN_SEGMENT,
    Operation,
    RemoteSegment,
)
from transfer_engine.device_segment import find_device_segment
from transfer_engine.devices import DeviceMemory, borrow
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.transports.copying import hash_local
from transfer_engine.transports.lending import LendingTransport, LentSegment

if TYPE_CHECKING:
    from transfer_engine.base import Batch, SegmentDescriptor

__all__ = ["CudaTransport"]

_TOKEN_BYTES_MAX = 4096


class CudaTransport(LendingTransport[DeviceMemory]):
    """Copies between memory of this process and device memory that it has, or was lent."""

    name: ClassVar[str] = "cuda"
    cost: ClassVar[int] = 12
    takes_device_memory: ClassVar[bool] = True

    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """Device segments of this process, and those lent on this boot of this host."""
        if find_device_segment(descriptor.uuid) is not None:
            return None
        return super().can_reach(descriptor)

    def open(self, descriptor: SegmentDescriptor, deadline: float) -> RemoteSegment:
        """Find the memory in this process, or map it."""
        if find_device_segment(descriptor.uuid) is not None:
            return RemoteSegment(descriptor)
        return super().open(descriptor, deadline)

    def _accept(self, fd: int, descriptor: SegmentDescriptor, *, writable: bool) -> DeviceMemory:
        memory = borrow(os.pread(fd, _TOKEN_BYTES_MAX, 0))
        if memory.size < descriptor.size:
            raise InvalidArgumentError(
                f"the device memory has {memory.size} bytes, the segment names {descriptor.size}"
            )
        return memory

    def move(
        self, target: RemoteSegment, operation: Operation, batch: Batch, deadline: float
    ) -> None:
        """Copy the batch. Raises PeerLostError when the owner is gone."""
        if isinstance(target, LentSegment):
            memory: DeviceMemory | None = self._resource(target, operation, deadline)
            writable = target.writable
        else:
            segment = find_device_segment(target.descriptor.uuid)
            memory = None if segment is None else segment.held_staged()
            writable = True
        if memory is None:
            batch.statuses[batch.statuses == 0] = UNKNOWN_SEGMENT
            return
        if operation is Operation.WRITE and not writable:
            batch.statuses[batch.statuses == 0] = REFUSED
            return
        memory.move(operation, batch, deadline, str(target.descriptor))
        if batch.cancelled:
            batch.statuses[batch.statuses == 0] = CANCELLED
        hash_local(batch)

    def release(self, target: RemoteSegment) -> None:
        """Give borrowed memory back after its last user."""
        if isinstance(target, LentSegment):
            super().release(target)
