"""Files of a cold segment: what their names say, and how the bytes in them are kept.

What was written at once at a place is an extent: files of at most PIECE_BYTES, in whose names all
stands that is known of them, so a listing is the index. No I/O.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

from transfer_engine.segments.codec import HEAD_BYTES
from transfer_engine.segments.sealing import SEAL_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PIECE_BYTES", "Extent", "Found", "Piece", "found_in"]

PIECE_BYTES = 4 << 20

_CODED, _SEALED = "-z", "-s"
_FILE = re.compile(
    "([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)-([0-9a-f]{16})(-z)?(?:-s([0-9a-f]{16}))?"
)


class Extent(NamedTuple):
    """What was written at once at a place; `number` grows with every write."""

    start: int
    length: int
    number: int
    sums: tuple[int, ...]
    """Checksums of its pieces, as they were written; 0 where they are sealed."""
    coded: bool = False
    """Whether its files hold what a codec made of the pieces..."""
    key: str = ""
    """...and the id of the key that sealed them."""

    def pieces(self, begin: int, end: int) -> Iterator[int]:
        """Yield the pieces that hold these bytes of it."""
        yield from range(begin // PIECE_BYTES, -(-end // PIECE_BYTES))

    def piece_bytes(self, piece: int) -> int:
        """Return how long a piece is."""
        return min(PIECE_BYTES, self.length - piece * PIECE_BYTES)

    def file(self, piece: int) -> str:
        """Return how the file of a piece is called."""
        name = f"{self.start:x}-{self.length:x}-{self.number:x}-{piece:x}-{self.sums[piece]:016x}"
        return name + _CODED * self.coded + (_SEALED + self.key if self.key else "")

    def may_be(self, piece: int, nbytes: int) -> bool:
        """Whether a file of so many bytes may be that of a piece."""
        whole = self.piece_bytes(piece)
        held = nbytes - SEAL_BYTES * bool(self.key)
        return 0 < held <= whole + HEAD_BYTES if self.coded else held == whole


class Piece(NamedTuple):
    """One file of an extent."""

    extent: Extent
    number: int

    @property
    def nbytes(self) -> int:
        """How long it is."""
        return self.extent.piece_bytes(self.number)

    @property
    def file(self) -> str:
        """How it is called."""
        return self.extent.file(self.number)


class Found(NamedTuple):
    """What the name of a file says: of an extent, which has no sums yet, and of a piece."""

    extent: Extent
    piece: int
    sum: int


def found_in(name: str) -> Found | None:
    """Return what a name says; None for one that is nobody's of ours."""
    match = _FILE.fullmatch(name)
    if match is None:
        return None
    start, length, number, piece, total = (int(text, 16) for text in match.groups()[:5])
    extent = Extent(start, length, number, (), match[6] is not None, match[7] or "")
    return Found(extent, piece, total)
