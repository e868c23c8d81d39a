"""What was fetched of a cold segment, given to those who wanted parts of it.

A piece is compared with its checksum whole, whatever is wanted of it: what a former write left, or
somebody put there, is never taken for what was written.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine.base import DISK_FAILED, TRUNCATED
from transfer_engine.checksum import checksum_one, copy_ranges
from transfer_engine.errors import ChecksumMismatchError
from transfer_engine.segments.forms import UNREADABLE
from transfer_engine.segments.remote import LOST

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from transfer_engine.segments.extents import Piece

__all__ = ["DAMAGED", "Wanted", "give"]

DAMAGED = ChecksumMismatchError.code
_STATUSES = {LOST: TRUNCATED, UNREADABLE: DISK_FAILED}
"""Of lengths that stand for something else."""


class Wanted(NamedTuple):
    """Bytes of a piece that a request wants."""

    request: int
    begin: int
    end: int
    address: int


def give(
    pieces: Sequence[Piece],
    lengths: Sequence[int],
    memory: NDArray[np.uint8],
    wanted: Mapping[Piece, Sequence[Wanted]],
    statuses: NDArray[np.int32],
) -> str:
    """Copy what was read of pieces to who wanted it, compared; return what is wrong with it."""
    fault, address = "", memory.ctypes.data
    whole: list[Piece] = []
    columns: list[tuple[int, int, int]] = []
    for piece, length in zip(pieces, lengths, strict=False):
        nbytes, parts = piece.nbytes, wanted[piece]
        if length != nbytes:
            fault = _refuse(piece, length, parts, statuses) or fault
        elif len(parts) == 1 and parts[0].end - parts[0].begin == nbytes:
            whole.append(piece)
            columns.append((address, parts[0].address, nbytes))
        elif _is_as_written(piece, checksum_one(address, nbytes)):
            for part in parts:
                ctypes.memmove(part.address, address + part.begin, part.end - part.begin)
        else:
            fault = _refuse(piece, length, parts, statuses)
        address += nbytes
    if whole:
        sums = copy_ranges(*np.array(columns, np.int64).T).tolist()
        for piece, found in zip(whole, sums, strict=True):
            if not _is_as_written(piece, found):
                fault = _refuse(piece, piece.nbytes, wanted[piece], statuses)
    return fault


def _is_as_written(piece: Piece, found: int) -> bool:
    """Whether a checksum is that of a piece; one that was sealed opens only as it was written."""
    return found == piece.extent.sums[piece.number] or bool(piece.extent.key)


def _refuse(piece: Piece, length: int, parts: Sequence[Wanted], statuses: NDArray[np.int32]) -> str:
    """Fail all that is wanted of a piece; return what is wrong with it, if that is news."""
    for part in parts:
        statuses[part.request] = _STATUSES.get(length, DAMAGED)
    if length == UNREADABLE:
        return ""  # it was told when the file was found
    return f"{piece.file} is {'gone' if length == LOST else 'not what was written'}"
