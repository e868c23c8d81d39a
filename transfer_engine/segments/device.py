"""Segments on memory of accelerators, lent to other processes of this host (CUDA IPC).

A `DeviceSegment` is published like any other. Processes of its host reach it by the `cuda`
transport: they get what the driver needs to map the memory, over the owner's Unix socket, and copy
to and from it with their own device. All others reach it over TCP: the owner's device then copies
to and from staging memory of the server.

What the owner has queued on its device is not waited for by those who read: it synchronises before
it tells anybody that bytes are there. The memory is held until the segment is closed.
It does not allocate. Cost: O(1).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from transfer_engine.accelerators import locate
from transfer_engine.errors import InvalidArgumentError, NotFoundError
from transfer_engine.segments.memory import OpenSegment, check_name

if TYPE_CHECKING:
    from transfer_engine.devices.devices import DeviceMemory, SupportsDevice

__all__ = ["DeviceSegment"]


class DeviceSegment(OpenSegment):
    """Memory of a device that others may be allowed to read and write.

    Attributes are constant: `name`, `uuid` (16 bytes), `size`, `writable`. Made by `wrap`.
    """

    lent_as: ClassVar[str] = "cuda"
    """The transport by which other processes of this host reach it."""

    def __init__(self, memory: DeviceMemory, *, name: str, uuid: bytes | None) -> None:
        self._memory: DeviceMemory | None = memory
        super().__init__(name, uuid, memory.size, writable=True)

    @classmethod
    def wrap(
        cls, memory: SupportsDevice, *, name: str = "device", uuid: bytes | None = None
    ) -> DeviceSegment:
        """Make a segment of a contiguous CUDA tensor, which it holds.

        Raises InvalidArgumentError for anything else.
        """
        check_name(name)
        found = locate(memory)
        if found is None or not found.size:
            raise InvalidArgumentError(
                f"a {type(memory).__name__} is no memory of a device",
                advice="Segment.wrap takes buffers of the host",
            )
        return cls(found, name=name, uuid=uuid)

    @property
    def memory(self) -> DeviceMemory:
        """Where the bytes lie. Whoever copies holds this object."""
        if self._memory is None:
            raise NotFoundError(f"segment {self.name!r} is closed", advice="make it anew")
        return self._memory

    def held_staged(self) -> DeviceMemory | None:
        """Return the memory of the device, or None once the segment is closed."""
        return self._memory

    def held(self) -> None:
        """Return the memory of the host: it has none."""

    def share(self, *, writable: bool) -> int:
        """Return a new descriptor that tells another process how to map the memory.

        Drivers know no read-only mapping: who may not write is refused altogether.
        """
        memory = self.memory
        if not writable:
            raise InvalidArgumentError(f"segment {self.name!r} cannot be lent for reading alone")
        fd = os.memfd_create("mooncake-device", os.MFD_CLOEXEC)
        try:
            os.fchmod(fd, 0o600)
            os.write(fd, memory.device.lend(memory.address, memory.size))
        except BaseException:
            os.close(fd)
            raise
        return fd

    def close(self) -> None:
        """Give the segment up: no new transfer finds it. Idempotent."""
        self._memory = None
        super().close()

    def __repr__(self) -> str:
        return f"DeviceSegment({self.name!r}, {self.uuid.hex()}, {self.size} bytes)"
