"""Moving a batch between two ranges of memory that are both mapped in this process.

One kernel call copies the whole batch on the calling thread without the GIL. Splitting a batch
over threads was measured and left out: one core already draws what the memory of a small host
gives, and below a few MiB waking a thread costs more than the copy. Large batches are copied in
pieces so that a deadline and a cancellation are noticed. Cost: O(n + bytes).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from transfer_engine import _kernels, _kernels_xxh3
from transfer_engine.base import CANCELLED, Operation
from transfer_engine.checksum import copy_with_checksum, streams
from transfer_engine.errors import TransferTimeoutError

if TYPE_CHECKING:
    from transfer_engine.base import Batch, Columns
    from transfer_engine.memory import Mapping

__all__ = ["copy_single", "hash_local", "move_batch"]

# 10-40 ms of copying between two looks at the clock.
_PIECE_BYTES = 256 << 20
# From here on writing past the caches is faster than memcpy by more than reading it again costs.
_STREAM_BYTES_MIN = 256 << 10
# The shortest blocks, on average, for which that was measured.
_STREAM_BLOCK_BYTES_MIN = 64 << 10


def move_batch(
    mapping: Mapping, operation: Operation, batch: Batch, deadline: float, peer: str
) -> None:
    """Copy a checked batch between `mapping` and local memory.

    Raises TransferTimeoutError between pieces; the pieces before it stay copied.
    """
    if batch.checksums is not None:
        _move_with_checksums(mapping, operation, batch, deadline, peer)
        return
    into_segment = 1 if operation is Operation.WRITE else 0
    long = max(_STREAM_BYTES_MIN, _STREAM_BLOCK_BYTES_MIN * batch.lengths.size)
    streaming = 1 if batch.total_bytes >= long else 0
    begin = 0
    while True:
        end = min(batch.total_bytes, begin + _PIECE_BYTES)
        if _kernels.copy_batch(
            mapping.address,
            batch.offsets,
            batch.lengths,
            batch.addresses,
            batch.statuses,
            begin,
            end,
            into_segment,
            streaming,
            batch.cancel,
        ):
            batch.statuses[batch.statuses == 0] = CANCELLED
            return
        if end >= batch.total_bytes:
            return
        _check_deadline(deadline, end, batch, operation, peer)
        begin = end


def _check_deadline(
    deadline: float, done: int, batch: Batch, operation: Operation, peer: str
) -> None:
    if time.monotonic() >= deadline:
        raise TransferTimeoutError(
            f"{done} of {batch.total_bytes} bytes were copied when the deadline passed",
            operation=operation.name.lower(),
            peer=peer,
        )


def copy_single(
    mapping: Mapping, operation: Operation, offset: int, length: int, address: int
) -> None:
    """Copy one checked range between `mapping` and local memory."""
    streaming = 1 if length >= _STREAM_BYTES_MIN else 0
    inside = mapping.address + offset
    if operation is Operation.WRITE:
        _kernels.copy_one(inside, address, length, streaming)
    else:
        _kernels.copy_one(address, inside, length, streaming)


def hash_local(batch: Batch) -> None:
    """Fill the checksums a batch asks for from its local memory, after it was moved otherwise."""
    from transfer_engine.checksum import checksum_ranges

    if batch.checksums is not None:
        good = np.flatnonzero(batch.statuses == 0)
        batch.checksums[good] = checksum_ranges(batch.addresses[good], batch.lengths[good])


def _move_with_checksums(
    mapping: Mapping, operation: Operation, batch: Batch, deadline: float, peer: str
) -> None:
    """Copy and hash in one pass over the source, so that memory is read once.

    Pieces consist of whole requests: a sum is of one of them.
    """
    assert batch.checksums is not None
    if not batch.bad and batch.total_bytes <= _PIECE_BYTES:
        # The usual case, without the checks of a public function: the batch was checked.
        inside, outside = mapping.address + batch.offsets, batch.addresses
        if operation is Operation.WRITE:
            inside, outside = outside, inside
        streaming = streams(batch.total_bytes)
        _kernels_xxh3.copy_xxh3_64(inside, outside, batch.lengths, batch.checksums, streaming)
        return
    good = np.flatnonzero(batch.statuses == 0)
    begin, done = 0, 0
    for end in _piece_ends(batch.lengths[good]):
        if begin:
            _check_deadline(deadline, done, batch, operation, peer)
        if batch.cancelled:
            batch.statuses[good[begin:]] = CANCELLED
            return
        part = good[begin:end]
        inside, outside = mapping.address + batch.offsets[part], batch.addresses[part]
        if operation is Operation.WRITE:
            inside, outside = outside, inside
        lengths = batch.lengths[part]
        batch.checksums[part] = copy_with_checksum(inside, outside, lengths, threads=1)
        begin, done = end, done + int(lengths.sum())


def _piece_ends(lengths: Columns) -> list[int]:
    """Where runs of requests end that have about _PIECE_BYTES each."""
    marks = np.arange(_PIECE_BYTES, int(lengths.sum()), _PIECE_BYTES)
    ends = np.searchsorted(lengths.cumsum(), marks) + 1
    return [int(end) for end in np.unique(np.append(ends[ends < lengths.size], lengths.size))]
