"""One request, where it needs no batch around it: memory that is shared, a connection that is idle.

Columns, verdicts and the choice of a path cost a batch some 20 us of Python, as much as copying
64 KiB. So an engine first asks here for every batch of one. What is ordinary (a range inside of the
segment, local memory that is registered; memory that is mapped, or an owner that is connected) is
moved with plain numbers. Anything else, and what fails but for a deadline, goes the usual way,
which knows all the errors and the other paths. Cost: half of that, and the copy or the exchange.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine.base import Operation, SingleRequest, default_timeout_s
from transfer_engine.errors import StoreError
from transfer_engine.outcome import BatchResult
from transfer_engine.transports.copying import copy_single

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from transfer_engine.base import BatchRequest, RemoteSegment, Transport
    from transfer_engine.tagging import Tagging

__all__ = ["move_at_once"]

# Longer copies look at their deadline in between.
_BYTES_MAX = 64 << 20
# What is tagged as a whole once it came, or before it went: it is in the cache. Longer objects
# are tagged as they pass.
_TAGGED_MAX = 256 << 10
_INT64 = np.dtype(np.int64)
_ONE_ROW = (1,)


def _number(values: object) -> int:
    """Return the number of a column of one; -1 for every other column."""
    if type(values) is np.ndarray:
        if values.dtype is _INT64 and values.shape == _ONE_ROW:
            return int(values.item())
    elif type(values) is list and len(values) == 1 and type(values[0]) is int:
        return values[0]
    return -1


def move_at_once(
    used: tuple[Transport, RemoteSegment], edges: Sequence[int] | None, request: BatchRequest
) -> BatchResult | None:
    """Move a request between a segment and local memory; None if that takes a batch.

    edges: start and end of each registered range in turn, sorted; None for memory that the caller
    vouches for. Raises TransferTimeoutError. O(log ranges + bytes).
    """
    transport, target = used
    operation, offsets, lengths, addresses, timeout_s, checksums, fence, _, rights, tagging = (
        request
    )
    offset, length, address = _number(offsets), _number(lengths), _number(addresses)
    if offset < 0 or not 0 < length <= _BYTES_MAX or offset > target.descriptor.size - length:
        return None
    if tagging is not None and length > _TAGGED_MAX:
        return None
    if fence < 0 or not (address > 0 if edges is None else _holds(edges, address, length)):
        return None
    if timeout_s is None:
        timeout_s = default_timeout_s(length)
    tag = stamp = 0
    receipts = None
    if rights is not None:
        tag, stamp = rights.item(0), rights.item(1)
        if operation is Operation.WRITE:
            receipts = np.zeros(1, _INT64)
    single = SingleRequest(
        operation, offset, length, address, fence, checksums, timeout_s, tag, stamp
    )
    told = transport.move_one(target, single)
    if told is not None:
        status, sums, receipt = told
        statuses = np.zeros(1, np.int32)
        if status:
            statuses[0] = status
        if receipt and receipts is not None:
            receipts[0] = receipt
        tags = _tags(tagging, address, length)
        return BatchResult(statuses, sums, transport.name, target.descriptor, receipts, tags)
    if checksums or fence:
        return None
    try:
        mapping = transport.memory(target)
    except StoreError:
        return None  # the usual way meets it again, and has somewhere else to go
    if mapping is None or (operation is Operation.WRITE and not mapping.writable):
        return None
    copy_single(mapping, operation, offset, length, address)
    tags = _tags(tagging, address, length)
    statuses = np.zeros(1, np.int32)
    return BatchResult(statuses, None, transport.name, target.descriptor, receipts, tags)


def _tags(tagging: Tagging | None, address: int, length: int) -> NDArray[np.uint64] | None:
    return None if tagging is None else np.array([tagging.one(address, length)], np.uint64)


def _holds(edges: Sequence[int], address: int, length: int) -> bool:
    after = bisect_right(edges, address)
    return after % 2 == 1 and address + length <= edges[after]
