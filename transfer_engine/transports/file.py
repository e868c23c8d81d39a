"""Segments on files and block devices of this host, read and written by whoever uses them.

The owner hands over a descriptor of the file, opened anew for the borrower
(`transports.lending`): no path crosses a process border, so a forged descriptor of a segment
cannot name a file its reader should not touch. From then on the borrower talks to the device
itself. Whether the page cache is used and whether writes are durable is in the descriptor's mode
and thereby the owner's choice.

A full disk, a shortened file and a failing device are statuses of single requests. Processes that
change parts of one block at once are serialised by locks of the kernel (`rangelock`).
Cost: see `blockfile`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, ClassVar

from transfer_engine.base import REFUSED, UNKNOWN_SEGMENT, Operation, RemoteSegment
from transfer_engine.blockfile import BlockFile
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.file_segment import find_file_segment
from transfer_engine.transports.copying import hash_local
from transfer_engine.transports.lending import LendingTransport, LentSegment

if TYPE_CHECKING:
    from transfer_engine.base import Batch, SegmentDescriptor

__all__ = ["FileTransport"]


class FileTransport(LendingTransport[BlockFile]):
    """Reads and writes files that this process opened, or that their owner handed over."""

    name: ClassVar[str] = "file"
    cost: ClassVar[int] = 15

    def can_reach(self, descriptor: SegmentDescriptor) -> str | None:
        """File segments of this process, and those lent on this boot of this host."""
        if find_file_segment(descriptor.uuid) is not None:
            return None
        return super().can_reach(descriptor)

    def open(self, descriptor: SegmentDescriptor, deadline: float) -> RemoteSegment:
        """Find the file in this process, or borrow it."""
        if find_file_segment(descriptor.uuid) is not None:
            return RemoteSegment(descriptor)
        return super().open(descriptor, deadline)

    def _accept(self, fd: int, descriptor: SegmentDescriptor, *, writable: bool) -> BlockFile:
        file = BlockFile.adopt(os.dup(fd), f"the file of {descriptor}")
        if file.size < descriptor.size:
            raise InvalidArgumentError(
                f"the file holds {file.size} bytes, the segment names {descriptor.size}"
            )
        return file

    def move(
        self, target: RemoteSegment, operation: Operation, batch: Batch, deadline: float
    ) -> None:
        """Read or write the batch. Raises PeerLostError when the owner is gone."""
        if isinstance(target, LentSegment):
            file: BlockFile | None = self._resource(target, operation, deadline)
        else:
            segment = find_file_segment(target.descriptor.uuid)
            file = None if segment is None else segment.held_staged()
        if file is None:
            batch.statuses[batch.statuses == 0] = UNKNOWN_SEGMENT
            return
        if operation is Operation.WRITE and not file.writable:
            batch.statuses[batch.statuses == 0] = REFUSED
            return
        file.move(operation, batch, deadline, str(target.descriptor))
        hash_local(batch)

    def release(self, target: RemoteSegment) -> None:
        """Give a borrowed file back after its last user."""
        if isinstance(target, LentSegment):
            super().release(target)
