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

from transfer_engine.accelerators import borrow
from transfer_engine.devices.devices import DeviceMemory
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.segments.device import DeviceSegment
from transfer_engine.transports.copying import hash_local
from transfer_engine.transports.lending import LendingTransport

if TYPE_CHECKING:
    from transfer_engine.base import Batch, SegmentDescriptor

__all__ = ["CudaTransport"]

_TOKEN_BYTES_MAX = 4096


class CudaTransport(LendingTransport[DeviceMemory]):
    """Copies between memory of this process and device memory that it has, or was lent."""

    name: ClassVar[str] = "cuda"
    cost: ClassVar[int] = 12
    takes_device_memory: ClassVar[bool] = True

    def _own(self, uuid: bytes) -> DeviceMemory | None:
        segment = DeviceSegment.find(uuid)
        return None if segment is None else segment.held_staged()

    def _accept(self, fd: int, descriptor: SegmentDescriptor, *, writable: bool) -> DeviceMemory:
        memory = borrow(os.pread(fd, _TOKEN_BYTES_MAX, 0))
        if memory.size < descriptor.size:
            raise InvalidArgumentError(
                f"the device memory has {memory.size} bytes, the segment names {descriptor.size}"
            )
        return memory

    def _carry(self, lent: DeviceMemory, batch: Batch, peer: str) -> None:
        lent.move(batch, peer)
        hash_local(batch)
