"""One request on memory that this process shares with its owner: a copy, without a batch around it.

Columns, verdicts and the choice of a path cost a batch some 10 us of Python, as much as copying
64 KiB. So an engine first asks here for every batch of one. What is ordinary (memory that is
mapped, a range inside of it, local memory that is registered) is copied with plain numbers; for
anything else nothing has happened, and the batch goes the usual way, which knows all the errors.
Cost: half of that, and the copy.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.base import Operation
from transfer_engine.errors import StoreError
from transfer_engine.outcome import BatchResult
from transfer_engine.transports.copying import copy_single

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transfer_engine.base import RemoteSegment, Transport

__all__ = ["copy_at_once", "only"]

# Longer copies look at their deadline in between.
_BYTES_MAX = 64 << 20
_INT64 = np.dtype(np.int64)
_ONE = (1,)


def only(values: object) -> int:
    """Return the number of a column of one; -1 for every other column."""
    if type(values) is np.ndarray:
        if values.dtype is _INT64 and values.shape == _ONE:
            return int(values.item())
    elif type(values) is list and len(values) == 1 and type(values[0]) is int:
        return values[0]
    return -1


def copy_at_once(
    used: tuple[Transport, RemoteSegment],
    edges: Sequence[int] | None,
    operation: Operation,
    offset: int,
    length: int,
    address: int,
) -> BatchResult | None:
    """Copy between a segment and local memory; None if that takes more, and nothing was done.

    edges: start and end of each registered range in turn, sorted; None for memory that the caller
    vouches for. O(log ranges + bytes).
    """
    transport, target = used
    if offset < 0 or not 0 < length <= _BYTES_MAX or offset > target.descriptor.size - length:
        return None
    if not (address > 0 if edges is None else _holds(edges, address, length)):
        return None
    try:
        mapping = transport.memory(target)
    except StoreError:
        return None  # the usual way meets it again, and has somewhere else to go
    if mapping is None or (operation is Operation.WRITE and not mapping.writable):
        return None
    copy_single(mapping, operation, offset, length, address)
    return BatchResult(np.zeros(1, np.int32), None, transport.name, target.descriptor)


def _holds(edges: Sequence[int], address: int, length: int) -> bool:
    after = bisect_right(edges, address)
    return after % 2 == 1 and address + length <= edges[after]
