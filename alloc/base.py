"""The contract of an allocator: where inside a segment an object goes.

An allocator hands out ranges of [0, capacity) and never touches the memory behind them. One
object is one contiguous range, because a one-sided transfer wants one address and a zero-copy
view one buffer; see docs/internals/alloc.md for what that costs in utilisation. Everything works
on batches; an entry that cannot be served does not disturb the others. Allocators are
deterministic (the same calls give the same offsets) and not thread-safe: a shard owns its own.

`alloc.testing.AllocatorContract` checks all of this for any implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class AllocatorStats:
    """Where the bytes of a segment are."""

    capacity: int
    allocated_bytes: int  # handed out, rounding included
    allocations: int
    largest_free: int  # largest extent to be had at once (to within 3 %); free slots not counted

    @property
    def free_bytes(self) -> int:
        """Bytes not handed out: holes and free slots."""
        return self.capacity - self.allocated_bytes


class Allocator(ABC):
    """Hands out contiguous ranges of [0, capacity) in batches."""

    capacity: int  # bytes managed
    alignment: int  # every offset is a multiple; sizes are rounded up to it
    granule: int  # every hole that can be had as a whole begins at a multiple of it

    @abstractmethod
    def allocate(self, sizes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offset per size, -1 where nothing fits.

        An object of s bytes (rounded up to `alignment`) starts at a multiple of gcd(s, 64), so
        an array that fills its object is aligned for its element type.

        Raises ValueError, and allocates nothing, when a size is not positive.
        """

    @abstractmethod
    def free(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an object started at each offset; it is freed.

        False for anything else (freed before, never handed out, outside): nothing changes then.
        """

    @abstractmethod
    def holds(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether an object starts at each offset; nothing changes."""

    @abstractmethod
    def reserve(self, offsets: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Re-create objects at given places, in any order; False where one overlaps.

        For rebuilding from an object table: call it once with the whole table, so that what lay
        together can be told. Of ranges that overlap, the one that begins first is kept, and of
        those that begin at the same byte the first given. Takes the bytes it is told, at any
        offset; it rounds a size up, as `allocate` does, only where no other range of the table is
        in the way. Costs a walk over the pool, unlike everything else.

        Raises ValueError, and reserves nothing, when a size is not positive.
        """

    @abstractmethod
    def stats(self) -> AllocatorStats:
        """Current figures, in O(1)."""

    @property
    @abstractmethod
    def allocated_bytes(self) -> int:
        """What `stats` says of it; cheaper, for decisions per request."""

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise AssertionError unless every byte has one owner and all indexes agree. O(n)."""
