"""Moves bytes between registered memory: segments, batches, transports; no objects."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.base import Access, Operation, Region, SegmentDescriptor, status_name
    from transfer_engine.engine import TransferEngine
    from transfer_engine.handle import SegmentHandle
    from transfer_engine.notify import Notification
    from transfer_engine.outcome import BatchResult
    from transfer_engine.paths.routes import PathReport
    from transfer_engine.segments.device import DeviceSegment
    from transfer_engine.segments.file import FileSegment
    from transfer_engine.segments.memory import Segment
    from transfer_engine.submission import Submission
    from transfer_engine.transports.server import TransferServer
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = [
    # The owner of memory.
    "Access",
    "DeviceSegment",
    "FileSegment",
    "Segment",
    "SegmentDescriptor",
    "TransferServer",
    # Who moves bytes.
    "BatchResult",
    "Notification",
    "Operation",
    "PathReport",
    "Region",
    "SegmentHandle",
    "Submission",
    "TransferEngine",
    "status_name",
]
