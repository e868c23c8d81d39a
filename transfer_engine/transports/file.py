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

from transfer_engine.errors import InvalidArgumentError
from transfer_engine.segments.blockfile import BlockFile
from transfer_engine.segments.file import FileSegment
from transfer_engine.segments.geometry import measure
from transfer_engine.transports.lending import LendingTransport

if TYPE_CHECKING:
    from transfer_engine.base import Batch, SegmentDescriptor

__all__ = ["FileTransport"]


class FileTransport(LendingTransport[BlockFile]):
    """Reads and writes files that this process opened, or that their owner handed over."""

    name: ClassVar[str] = "file"
    cost: ClassVar[int] = 15

    def _own(self, uuid: bytes) -> BlockFile | None:
        segment = FileSegment.find(uuid)
        return None if segment is None else segment.held_staged()

    def _accept(self, fd: int, descriptor: SegmentDescriptor, *, writable: bool) -> BlockFile:
        geometry = measure(fd)
        if geometry.size < descriptor.size:
            raise InvalidArgumentError(
                f"the file holds {geometry.size} bytes, the segment names {descriptor.size}"
            )
        return BlockFile(os.dup(fd), f"the file of {descriptor}", geometry, punctual=True)

    def _carry(self, lent: BlockFile, batch: Batch, peer: str) -> None:
        lent.move(batch, peer)
