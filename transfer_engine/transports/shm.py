"""Segments of other processes on this host: mapped once, then every transfer is one copy.

The owner hands the descriptor of the segment over (`transports.lending`) and is not asked per
batch. Bounds are checked by the engine for the caller's sake. Fencing of single writers needs a
transport whose owner takes part (tcp).

Cost: one kernel call a batch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, ClassVar

from transfer_engine.base import UNKNOWN_SEGMENT, RemoteSegment, error_of
from transfer_engine.segments.mapping import Mapping, map_file
from transfer_engine.transports.copying import move_batch
from transfer_engine.transports.lending import LendingTransport, LentSegment

if TYPE_CHECKING:
    from transfer_engine.base import Batch, SegmentDescriptor

__all__ = ["ShmTransport"]

_MAP_S = 5.0


class ShmTransport(LendingTransport[Mapping]):
    """Copies between this process and memory it maps from others."""

    name: ClassVar[str] = "shm"
    cost: ClassVar[int] = 10

    def _accept(self, fd: int, descriptor: SegmentDescriptor, *, writable: bool) -> Mapping:
        return map_file(fd, descriptor.size, writable=writable)

    def _carry(self, lent: Mapping, batch: Batch, peer: str) -> None:
        move_batch(lent, batch, peer)

    def memory(self, target: RemoteSegment) -> Mapping | None:
        """Return the mapped memory."""
        assert isinstance(target, LentSegment)
        return self._resource(target, None, time.monotonic() + _MAP_S)

    def view(self, target: RemoteSegment, offset: int, length: int) -> memoryview:
        """Return the memory itself, read-only; it stays mapped as long as the view lives."""
        mapping = self.memory(target)
        if mapping is None:
            raise error_of(UNKNOWN_SEGMENT, operation="view", peer=target.name)
        return mapping.view(offset, length)
