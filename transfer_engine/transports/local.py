"""Segments of this very process: a copy, no peer.

It finds segments by uuid in the table of open segments; a closed one is an unknown one.
Cost: one kernel call a batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from transfer_engine.base import REFUSED, UNKNOWN_SEGMENT, RemoteSegment, Transport
from transfer_engine.errors import NotFoundError
from transfer_engine.segments.memory import Segment
from transfer_engine.transports.copying import move_batch

if TYPE_CHECKING:
    from transfer_engine.base import Batch, SegmentDescriptor
    from transfer_engine.segments.mapping import Mapping

__all__ = ["LocalTransport"]


class LocalTransport(Transport):
    """Copies inside one process."""

    name: ClassVar[str] = "local"
    cost: ClassVar[int] = 0

    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """Only segments that are open in this process."""
        if Segment.find(descriptor.uuid) is None:
            return "no open segment of this process has this uuid"
        return None

    def open(self, descriptor: SegmentDescriptor, deadline: float) -> RemoteSegment:
        """Check that the segment is here; nothing is held."""
        self._find(descriptor)
        return RemoteSegment(descriptor)

    def _find(self, descriptor: SegmentDescriptor) -> Segment:
        segment = Segment.find(descriptor.uuid)
        if segment is None:
            raise NotFoundError(f"{descriptor} is not open in this process")
        return segment

    def move(self, target: RemoteSegment, batch: Batch) -> None:
        """Copy the batch; all requests fail with a status once the segment is closed."""
        mapping = self.memory(target)  # held, so that a close meanwhile does not unmap it
        if mapping is None:
            batch.fail(UNKNOWN_SEGMENT)
        elif batch.writing and not mapping.writable:
            batch.fail(REFUSED)
        else:
            move_batch(mapping, batch, target.name)

    def memory(self, target: RemoteSegment) -> Mapping | None:
        """Return the memory itself."""
        segment = Segment.find(target.descriptor.uuid)
        return None if segment is None else segment.held()

    def view(self, target: RemoteSegment, offset: int, length: int) -> memoryview:
        """Return the memory itself, read-only."""
        return self._find(target.descriptor).view(offset, length)

    def close(self) -> None:
        """Nothing to give up."""
