"""Moves bytes between registered memory: segments, batches, transports; no objects."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transfer_engine.base import Access, Operation, Region, SegmentDescriptor, status_name
    from transfer_engine.device_segment import DeviceSegment
    from transfer_engine.engine import TransferEngine
    from transfer_engine.file_segment import FileSegment
    from transfer_engine.handle import SegmentHandle
    from transfer_engine.notify import Notification
    from transfer_engine.outcome import BatchResult
    from transfer_engine.paths_routes import PathReport
    from transfer_engine.segment import Segment
    from transfer_engine.submission import Submission
    from transfer_engine.transports.server import TransferServer

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

_HOME = {
    "Access": "transfer_engine.base",
    "BatchResult": "transfer_engine.outcome",
    "DeviceSegment": "transfer_engine.device_segment",
    "FileSegment": "transfer_engine.file_segment",
    "Operation": "transfer_engine.base",
    "PathReport": "transfer_engine.paths_routes",
    "Region": "transfer_engine.base",
    "Segment": "transfer_engine.segment",
    "SegmentDescriptor": "transfer_engine.base",
    "Notification": "transfer_engine.notify",
    "SegmentHandle": "transfer_engine.handle",
    "Submission": "transfer_engine.submission",
    "TransferEngine": "transfer_engine.engine",
    "TransferServer": "transfer_engine.transports.server",
    "status_name": "transfer_engine.base",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
