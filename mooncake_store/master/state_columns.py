"""Columns of objects and of held extents as the bytes of a state file, and back.

Integers of fixed width, little-endian, one behind the other. What is read is checked: columns that
do not belong together, or hold what cannot be, are a ValueError. O(n).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.portable import Objects
from mooncake_store.master.state_file import HeldRecord, ObjectsRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["held_in", "held_record", "objects_in", "objects_record"]

_COLUMNS = {
    "digests": "<u8",
    "sizes": "<i8",
    "checksums": "<u8",
    "tags": "<u8",
    "generations": "<u4",
    "created_s": "<i8",
    "used_ns": "<i8",
    "pinned_until_ns": "<i8",
    "pins": "u1",
    "namespaces": "<u2",
    "writers": "<u2",
    "wanted": "u1",
    "replicas": "u1",
    "segments": "<i8",
    "offsets": "<i8",
    "name_bytes": "<u2",
    "groups": "<u4",
}
_HELD = ("segments", "offsets", "sizes", "writers", "until_ns")


def objects_record(objects: Objects) -> ObjectsRecord:
    """Return what is written of some objects."""
    columns = {name: _packed(getattr(objects, name), kind) for name, kind in _COLUMNS.items()}
    if not objects.tags.any():
        columns["tags"] = b""
    return ObjectsRecord(**columns, names=objects.names, group_names=objects.group_names)


def objects_in(record: ObjectsRecord) -> Objects:
    """Return the objects that a record tells of."""
    columns = {name: _column(name, record, kind) for name, kind in _COLUMNS.items()}
    columns["digests"] = columns["digests"].reshape(-1, 2)
    if not record.tags:  # as those of who wrote none of them
        columns["tags"] = np.zeros(len(columns["sizes"]), np.uint64)
    objects = Objects(**columns, names=record.names, group_names=record.group_names)
    objects.check()
    return objects


def held_record(held: NDArray[np.int64]) -> HeldRecord:
    """Return what is written of extents that wait."""
    return HeldRecord(*(_packed(held[:, at], "<i8") for at in range(len(_HELD))))


def held_in(record: HeldRecord) -> NDArray[np.int64]:
    """Return the extents that a record tells of: segment, offset, size, writer, until a row."""
    columns = [_column(name, record, "<i8") for name in _HELD]
    if len({len(column) for column in columns}) > 1:
        raise ValueError("the columns of held extents have different lengths")
    out: NDArray[np.int64] = np.stack(columns, axis=1).astype(np.int64)
    return out


def _packed(column: NDArray[Any], kind: str) -> bytes:
    return np.ascontiguousarray(column, kind).tobytes()


def _column(name: str, record: ObjectsRecord | HeldRecord, kind: str) -> NDArray[Any]:
    data: bytes = getattr(record, name)
    width = np.dtype(kind).itemsize * (2 if name == "digests" else 1)
    if len(data) % width:
        raise ValueError(f"{name} ends in the middle of an entry")
    return np.frombuffer(data, kind)
