"""A bounded pool of equal, page-aligned pieces of memory that transfers pass through.

Devices want aligned or pinned memory and callers have any; between them a piece of this pool is
leased, filled, emptied and returned. The bound is what keeps a burst of transfers from pinning
the machine: whoever finds no free piece waits for one, until its deadline.

Pieces are made on first use and kept. `prepare` is called once for each, to pin it, and may
refuse by raising. Nothing here knows what the memory is used for. Cost: a lock per lease.
"""

from __future__ import annotations

import contextlib
import mmap
import threading
import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine import forking
from transfer_engine.base import remaining_s
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.segments.mapping import Mapping

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from transfer_engine.base import Columns

__all__ = ["WINDOW_BYTES", "StagingPool", "Window", "parts", "windows"]

WINDOW_BYTES = 8 << 20
"""What an owner reads before it answers a peer; of more, nothing that fails is told apart."""


class StagingPool:
    """Lends at most `pieces_max` pieces of `piece_bytes` at a time. Thread-safe."""

    def __init__(
        self,
        piece_bytes: int,
        pieces_max: int,
        *,
        prepare: Callable[[Mapping], object] | None = None,
    ) -> None:
        if piece_bytes <= 0 or piece_bytes % mmap.PAGESIZE or pieces_max <= 0:
            raise InvalidArgumentError(
                f"a staging pool of {pieces_max} pieces of {piece_bytes} bytes: "
                "both must be positive, and the bytes whole pages"
            )
        self.piece_bytes = piece_bytes
        self.pieces_max = pieces_max
        self._prepare = prepare
        self._changed = threading.Condition()
        self._free: list[Mapping] = []
        self._made = 0
        forking.register(self)

    @property
    def lent(self) -> int:
        """How many pieces are in use now."""
        with self._changed:
            return self._made - len(self._free)

    def take(self, deadline: float, operation: str, peer: str) -> Mapping:
        """Return a piece, waiting for one if need be. Raises TransferTimeoutError."""
        with self._changed:
            while not self._free:
                if self._made < self.pieces_max:
                    self._made += 1
                    break
                self._changed.wait(remaining_s(deadline, operation, peer))
            else:
                return self._free.pop()
        try:
            piece = Mapping(mmap.mmap(-1, self.piece_bytes), writable=True)
            if self._prepare is not None:
                self._prepare(piece)
        except BaseException:
            with self._changed:
                self._made -= 1
                self._changed.notify()
            raise
        return piece

    def try_take(self) -> Mapping | None:
        """Return a piece if one can be had without waiting."""
        with self._changed:
            if not self._free and self._made >= self.pieces_max:
                return None
        return self.take(time.monotonic() + 1.0, "stage", "this process")

    def give(self, piece: Mapping) -> None:
        """Take a piece back; nothing may be using its memory any more."""
        with self._changed:
            self._free.append(piece)
            self._changed.notify()

    @contextlib.contextmanager
    def lease(self, deadline: float, operation: str, peer: str) -> Iterator[Mapping]:
        """Lend a piece for the length of a `with` block."""
        piece = self.take(deadline, operation, peer)
        try:
            yield piece
        finally:
            self.give(piece)

    def after_fork(self) -> None:
        """Start anew in a forked child: what was lent there is lost here, and pins do not pass."""
        self._changed = threading.Condition()
        self._free = []
        self._made = 0


class Window(NamedTuple):
    """Pieces of requests that fit into staging memory together."""

    owners: NDArray[np.intp]
    """The request of each piece."""
    begins: Columns
    """Where in its request each begins."""
    lengths: Columns
    positions: Columns
    """Where in staging memory each lies."""


def parts(lengths: Columns, room: int) -> Iterator[slice]:
    """Cut requests, in their order, into parts of at most `room` bytes, or of one that has more."""
    ends = np.cumsum(lengths)
    first = 0
    while first < lengths.size:
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + room, "right")))
        yield slice(first, last)
        first = last


def windows(lengths: Columns, room: int) -> Iterator[Window]:
    """Cut requests into pieces, and these, in their order, into windows of at most `room` bytes.

    Requests without bytes are in none. O(n log n).
    """
    counts = -(-lengths // room)
    owners = np.repeat(np.arange(lengths.size), counts)
    begins = (np.arange(owners.size) - np.repeat(np.cumsum(counts) - counts, counts)) * room
    pieces = np.minimum(lengths[owners] - begins, room)
    ends = np.cumsum(pieces)
    first = 0
    while first < pieces.size:
        before = int(ends[first] - pieces[first])
        last = int(np.searchsorted(ends, before + room, "right"))
        these = slice(first, last)
        positions = ends[these] - pieces[these] - before
        yield Window(owners[these], begins[these], pieces[these], positions)
        first = last
