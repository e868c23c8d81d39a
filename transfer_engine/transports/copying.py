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

from transfer_engine.base import CANCELLED, Operation
from transfer_engine.checksum import checksum_ranges, streams
from transfer_engine.errors import TransferTimeoutError
from transfer_engine.kernels import moving, xxh3

if TYPE_CHECKING:
    from transfer_engine.base import Batch, Columns
    from transfer_engine.segments.mapping import Mapping

__all__ = ["copy_single", "hash_local", "move_batch"]

# 10-40 ms of copying between two looks at the clock.
_PIECE_BYTES = 256 << 20
# From here on writing past the caches is faster than memcpy by more than reading it again costs.
_STREAM_BYTES_MIN = 256 << 10
# The shortest blocks, on average, for which that was measured.
_STREAM_BLOCK_BYTES_MIN = 64 << 10


def move_batch(mapping: Mapping, batch: Batch, peer: str) -> None:
    """Copy a checked batch between `mapping` and local memory.

    Raises TransferTimeoutError between pieces; the pieces before it stay copied.
    """
    if batch.checksums is not None:
        _move_with_checksums(mapping, batch, peer)
        return
    into_segment = 1 if batch.writing else 0
    long = max(_STREAM_BYTES_MIN, _STREAM_BLOCK_BYTES_MIN * batch.lengths.size)
    streaming = 1 if batch.total_bytes >= long else 0
    begin = 0
    while True:
        end = min(batch.total_bytes, begin + _PIECE_BYTES)
        if moving.copy_batch(
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
            batch.fail(CANCELLED)
            return
        if end >= batch.total_bytes:
            return
        _check_deadline(batch, end, peer)
        begin = end


def _check_deadline(batch: Batch, done: int, peer: str) -> None:
    if time.monotonic() >= batch.deadline:
        raise TransferTimeoutError(
            f"{done} of {batch.total_bytes} bytes were copied when the deadline passed",
            operation=batch.operation.verb,
            peer=peer,
        )


def copy_single(
    mapping: Mapping, operation: Operation, offset: int, length: int, address: int
) -> None:
    """Copy one checked range between `mapping` and local memory."""
    streaming = 1 if length >= _STREAM_BYTES_MIN else 0
    inside = mapping.address + offset
    if operation is Operation.WRITE:
        moving.copy_one(inside, address, length, streaming)
    else:
        moving.copy_one(address, inside, length, streaming)


def hash_local(batch: Batch) -> None:
    """Fill the checksums a batch asks for from its local memory, after it was moved otherwise."""
    if batch.checksums is not None:
        good = np.flatnonzero(batch.statuses == 0)
        batch.checksums[good] = checksum_ranges(batch.addresses[good], batch.lengths[good])


def _move_with_checksums(mapping: Mapping, batch: Batch, peer: str) -> None:
    """Copy and hash in one pass over the source, so that memory is read once.

    Pieces consist of whole requests: a sum is of one of them.
    """
    if not batch.bad and batch.total_bytes <= _PIECE_BYTES:
        _copy_hashed(mapping, batch)
        return
    good = np.flatnonzero(batch.statuses == 0)
    begin, done = 0, 0
    for end in _piece_ends(batch.lengths[good]):
        if begin:
            _check_deadline(batch, done, peer)
        if batch.cancelled:
            batch.statuses[good[begin:]] = CANCELLED
            return
        with batch.part(good[begin:end]) as part:
            _copy_hashed(mapping, part)
        begin, done = end, done + part.total_bytes


def _copy_hashed(mapping: Mapping, batch: Batch) -> None:
    """Copy a batch without bad requests; the bytes are hashed on their way through registers."""
    inside, outside = mapping.address + batch.offsets, batch.addresses
    if batch.writing:
        inside, outside = outside, inside
    streaming = streams(batch.total_bytes)
    xxh3.copy_xxh3_64(inside, outside, batch.lengths, batch.checksums, streaming)


def _piece_ends(lengths: Columns) -> list[int]:
    """Where runs of requests end that have about _PIECE_BYTES each."""
    marks = np.arange(_PIECE_BYTES, int(lengths.sum()), _PIECE_BYTES)
    ends = np.searchsorted(lengths.cumsum(), marks) + 1
    return [int(end) for end in np.unique(np.append(ends[ends < lengths.size], lengths.size))]
