"""Objects whose bytes lie in pieces: gathered by one put, scattered by one get, nothing staged.

A KV block is often many ranges of memory (K and V of every layer). `Pieces` names them as columns;
a put writes each where it belongs in the object, a get fills each from there, and a batch costs
the same round trips as one of whole buffers. The transfer sees one row per piece; this file turns
keys into rows and the rows' statuses back into one per key.

A checksum speaks of the whole object, so it is computed over the pieces in order after they moved.
With offsets of their own, pieces are ranges of an object instead; those cannot be verified.

Cost: O(pieces) in numpy, and a call of Python a piece for the checksum. No I/O.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from mooncake_store.client.buffers import Memory
from mooncake_store.client.core import every
from mooncake_store.client.failures import OUT_OF_RANGE
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.reads import Plan, Reading
from mooncake_store.client.sinks import BytesSink
from mooncake_store.client.steps import Move
from mooncake_store.client.writes import PutFields, Putting
from mooncake_store.errors import InvalidArgumentError
from transfer_engine.base import Operation as Direction
from transfer_engine.checksum import copy_ranges
from transfer_engine.outcome import BatchResult

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mooncake_store.client.core import Core
    from mooncake_store.client.directory import Target
    from mooncake_store.client.keys import KeyBatch
    from transfer_engine.tagging import Tagging

    Column = NDArray[np.int64]

__all__ = [
    "PiecePutting",
    "PieceReading",
    "Pieces",
    "checksum_pieces",
    "copy_pieces",
    "fold",
    "gather",
    "move_pieces",
]


class Pieces:
    """Buffers of a batch, each in one or more pieces, as columns.

    Piece j is `lengths[j]` bytes at `addresses[j]`; those of object i are `starts[i]` up to
    `starts[i + 1]`, and follow each other in the object. With `offsets` each is the range of the
    object from there on instead. The caller answers for the memory, as with `Rows`; `keep` may
    hold what owns it.
    """

    __slots__ = ("addresses", "keep", "lengths", "offsets", "starts")

    def __init__(
        self,
        addresses: Any,
        lengths: Any,
        starts: Any,
        *,
        offsets: Any = None,
        keep: object = None,
    ) -> None:
        self.addresses: Column = np.ascontiguousarray(addresses, np.int64)
        self.lengths: Column = np.ascontiguousarray(lengths, np.int64)
        self.starts: Column = np.ascontiguousarray(starts, np.int64)
        self.offsets: Column | None = None
        self.keep = keep
        count = len(self.addresses)
        if offsets is not None:
            self.offsets = np.ascontiguousarray(offsets, np.int64)
        if len(self.lengths) != count or (self.offsets is not None and len(self.offsets) != count):
            raise InvalidArgumentError("pieces need as many addresses as lengths and offsets")
        bounds = self.starts
        if not len(bounds) or bounds[0] != 0 or bounds[-1] != count or (np.diff(bounds) < 1).any():
            raise InvalidArgumentError("every object has at least one piece")
        if ((self.lengths < 0) | ((self.addresses <= 0) & (self.lengths > 0))).any():
            raise InvalidArgumentError("a piece lies nowhere or has a negative length")
        if self.offsets is not None and (self.offsets < 0).any():
            raise InvalidArgumentError("a piece has a negative offset")

    @classmethod
    def of(
        cls,
        addresses: Sequence[Sequence[int]],
        lengths: Sequence[Sequence[int]],
        offsets: Sequence[Sequence[int]] | None = None,
    ) -> Pieces:
        """Make columns of one list of addresses and one of lengths per object."""
        counts = np.fromiter(map(len, addresses), np.int64, len(addresses))
        starts = np.zeros(len(counts) + 1, np.int64)
        np.cumsum(counts, out=starts[1:])
        given = [lengths] if offsets is None else [lengths, offsets]
        if any(list(map(len, lists)) != counts.tolist() for lists in given):
            raise InvalidArgumentError("pieces need as many addresses as lengths and offsets")
        flat = [
            np.fromiter((x for each in lists for x in each), np.int64, int(starts[-1]))
            for lists in (addresses, *given)
        ]
        return cls(flat[0], flat[1], starts, offsets=flat[2] if offsets is not None else None)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def totals(self) -> Column:
        """Bytes of each object's pieces."""
        sums: Column = np.add.reduceat(self.lengths, self.starts[:-1])
        return sums if len(self) else np.zeros(0, np.int64)

    def misfits(self, index: Column, sizes: Column) -> NDArray[np.bool_]:
        """Which objects of these sizes do not take or give exactly what the pieces name."""
        if self.offsets is None:
            return np.asarray(self.totals[index] != sizes)
        ends = np.maximum.reduceat(self.offsets + self.lengths, self.starts[:-1])
        return np.asarray(ends[index] > sizes)

    def rows(self, index: Column) -> tuple[Column, Column]:
        """The pieces of some objects, and where each object's begin among them."""
        counts = self.starts[index + 1] - self.starts[index]
        ends = np.cumsum(counts)
        firsts = ends - counts
        total = int(ends[-1]) if len(ends) else 0
        pieces = np.arange(total) + np.repeat(self.starts[index] - firsts, counts)
        return pieces, firsts

    def within(self, pieces: Column, firsts: Column) -> Column:
        """Where in its object each of these pieces belongs."""
        if self.offsets is not None:
            offsets: Column = self.offsets[pieces]
            return offsets
        lengths = self.lengths[pieces]
        before = np.cumsum(lengths) - lengths
        counts = np.diff(firsts, append=len(pieces))
        out: Column = before - np.repeat(before[firsts], counts)
        return out


NO_PIECES = Pieces([], [], [0])
"""Those of an empty batch."""


def checksum_pieces(pieces: Pieces, index: Column) -> NDArray[np.uint64]:
    """XXH3-64 of each object's pieces, in order, as of one buffer. O(bytes)."""
    out = np.empty(len(index), np.uint64)
    rows, firsts = pieces.rows(index)
    addresses, lengths = pieces.addresses[rows].tolist(), pieces.lengths[rows].tolist()
    bounds = [*firsts.tolist(), len(rows)]
    for at in range(len(index)):
        digest = xxhash.xxh3_64()
        for piece in range(bounds[at], bounds[at + 1]):
            digest.update((ctypes.c_char * lengths[piece]).from_address(addresses[piece]))
        out[at] = digest.intdigest()
    return out


def copy_pieces(core: Core, pieces: Pieces, at: Column, bases: Column) -> None:
    """Copy the pieces of the objects `at` to where they belong in memory, from `bases` on."""
    rows, firsts = pieces.rows(at)
    sources, counts = pieces.addresses[rows], np.diff(firsts, append=len(rows))
    if any(map(core.engine.holds_device, sources.tolist())):
        raise InvalidArgumentError(
            "who has to show rights to memory puts no pieces that lie in memory of a device",
            advice="copy them to the host first, or lend memory for the namespace alone",
        )
    targets = np.repeat(bases, counts) + pieces.within(rows, firsts)
    copy_ranges(sources, targets, pieces.lengths[rows])


def gather(core: Core, pieces: Pieces) -> Memory:
    """Copy the pieces of each object into memory where they follow each other."""
    sizes, index = pieces.totals, every(len(pieces))
    arena = np.empty(int(sizes.sum()), np.uint8)
    bases = int(arena.__array_interface__["data"][0]) + np.cumsum(sizes) - sizes
    if len(index):
        copy_pieces(core, pieces, index, bases)
    return Memory(bases, sizes, arena)


def move_pieces(
    pieces: Pieces,
    at: Column,
    target: Target,
    direction: Direction,
    bases: Column,
    times: list[float] | None = None,
) -> Move:
    """One row per piece of the objects `at`, which begin at `bases` of a segment."""
    rows, firsts = pieces.rows(at)
    counts = np.diff(firsts, append=len(rows))
    offsets = np.repeat(bases, counts) + pieces.within(rows, firsts)
    lengths, addresses = pieces.lengths[rows], pieces.addresses[rows]
    keep = pieces, pieces.keep
    return Move(target, direction, offsets, lengths, addresses, False, keep, times)


def _tag_pieces(pieces: Pieces, index: Column, tagging: Tagging) -> NDArray[np.uint64]:
    """The tag of each object's pieces, in order, as of one buffer. O(bytes)."""
    rows, firsts = pieces.rows(index)
    starts = np.append(firsts, len(rows))
    return tagging.pieces(pieces.addresses[rows], pieces.lengths[rows], starts)


def fold(
    pieces: Pieces,
    at: Column,
    outcome: BatchResult,
    *,
    hashed: bool,
    tagging: Tagging | None = None,
) -> BatchResult:
    """One status per object from one per piece, with checksums and tags if asked for."""
    _, firsts = pieces.rows(at)
    statuses = np.minimum.reduceat(outcome.statuses, firsts)
    sums = tags = None
    if hashed:
        sums = np.zeros(len(at), np.uint64)
        good = np.flatnonzero(statuses == 0)
        sums[good] = checksum_pieces(pieces, at[good])
    if tagging is not None:
        tags = np.zeros(len(at), np.uint64)
        good = np.flatnonzero(statuses == 0)
        tags[good] = _tag_pieces(pieces, at[good], tagging)
    return BatchResult(statuses, sums, outcome.transport, tags=tags)


class PieceReading(Reading):
    """A get into pieces; a key whose object the pieces do not fit fails before a byte is moved."""

    def __init__(
        self, core: Core, keys: KeyBatch, pieces: Pieces, plan: Plan, until: float
    ) -> None:
        super().__init__(core, keys, BytesSink(0), plan, until)
        if len(pieces) != len(keys):
            raise InvalidArgumentError(f"{len(keys)} keys and pieces of {len(pieces)} objects")
        self._pieces = pieces

    def place(self, index: Column) -> Column:
        """Return the keys whose objects the pieces fit."""
        if not len(index):
            return index
        misfits = self._pieces.misfits(index, self.cols[k.SIZE, index])
        if not misfits.any():
            return index
        for at in index[misfits].tolist():
            self.errors[at] = f"it has {self.cols[k.SIZE, at]} bytes"
        self.status[index[misfits]] = OUT_OF_RANGE
        return index[~misfits]

    @property
    def ranged(self) -> bool:
        """Whether the pieces are ranges."""
        return self._pieces.offsets is not None

    @property
    def cuts(self) -> bool:
        """Whether what the pieces take may have to be cut out of whole objects."""
        return self.rights is not None or super().cuts

    def targets(self, at: int) -> list[tuple[int, int, int]]:
        """(address, offset in the object, length) of what the pieces of a key take."""
        rows, firsts = self._pieces.rows(np.array([at]))
        columns = self._pieces.addresses[rows], self._pieces.within(rows, firsts)
        lengths = self._pieces.lengths[rows]
        return [*zip(*(column.tolist() for column in (*columns, lengths)), strict=True)]

    def wanted(self, index: Column) -> Column:
        """How many bytes of each key the pieces take."""
        return self._pieces.totals[index]

    def _move(self, target: Target, index: Column, times: list[float]) -> Move:
        bases = self.cols[k.OFFSET, index]
        return move_pieces(self._pieces, index, target, Direction.READ, bases, times)

    def _judge(self, target: Target, index: Column, outcome: Any, now: int) -> Column | None:
        hashed, tagging = False, None
        if self._pieces.offsets is None:
            hashed, tagging = self._compared_by(index)
        whole = fold(self._pieces, index, outcome, hashed=hashed, tagging=tagging)
        return super()._judge(target, index, whole, now)


class PiecePutting(Putting):
    """A put of objects whose bytes are gathered from `pieces`."""

    def __init__(
        self, core: Core, keys: KeyBatch, sizes: Column, fields: PutFields, until: float
    ) -> None:
        memory = Memory(np.zeros(len(sizes), np.int64), sizes, None)
        super().__init__(core, keys, memory, fields, until)
        self.pieces = NO_PIECES

    @classmethod
    def of(
        cls, core: Core, keys: KeyBatch, pieces: Pieces, fields: PutFields, until: float
    ) -> Putting:
        """A put of whole objects; who has to show rights brings the pieces of each together."""
        if pieces.offsets is not None:
            raise InvalidArgumentError("a put takes pieces in order, without offsets")
        if len(pieces) != len(keys):
            raise InvalidArgumentError(f"{len(keys)} keys and pieces of {len(pieces)} objects")
        if core.shown is not None:
            return Putting(core, keys, gather(core, pieces), fields, until)
        putting = cls(core, keys, pieces.totals, fields, until)
        putting.pieces = pieces
        return putting

    def _within(self, index: Column) -> Column:
        """Which of the pieces' objects these keys are."""
        return index

    def _move(self, target: Target, index: Column, nth: int) -> Move:
        bases, at = self.cols[k.OFFSET, index], self._within(index)
        return move_pieces(self.pieces, at, target, Direction.WRITE, bases)

    def _judge(self, target: Target, index: Column, outcome: Any, nth: int) -> None:
        if isinstance(outcome, BatchResult):
            hashed = nth == 0 and self.pieces.offsets is None
            outcome = fold(self.pieces, self._within(index), outcome, hashed=hashed)
        super()._judge(target, index, outcome, nth)

    def _moved(self, index: Column) -> int:
        return int(self.pieces.totals[self._within(index)].sum())
