"""Where the bytes of a read go: new bytes objects, buffers of the caller, or one arena for all.

A sink is asked for addresses once it is known how much each key has, so a buffer that is too small
fails before any byte is written. No I/O. O(keys).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np

from mooncake_store.client.buffers import new_bytes_many

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client.buffers import Memory

    Column = NDArray[np.int64]
    Values = list[bytes | memoryview | None]

__all__ = ["ArenaSink", "BytesSink", "MemorySink", "Sink"]


class Sink(Protocol):
    """Where bytes go."""

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Write the addresses for these keys; return the positions in `index` without room."""

    @property
    def keep(self) -> object:
        """What owns the memory."""


class BytesSink:
    """Makes a bytes object per key."""

    def __init__(self, count: int) -> None:
        self.values: Values = [None] * count
        self.keep = self.values

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Make them; all fit."""
        made, addresses[index] = new_bytes_many(lengths.tolist())
        if len(made) == len(self.values):  # all of them, in order
            self.values[:] = made
        else:
            for at, value in zip(index.tolist(), made, strict=True):
                self.values[at] = value
        return None


class MemorySink:
    """Buffers of the caller."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.keep = memory.keep

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Compare the sizes of buffers with what is to be read."""
        memory = self._memory
        if len(index) == len(memory.addresses):  # all of them, in order
            addresses[:] = memory.addresses
            small = lengths > memory.sizes
        else:
            addresses[index] = memory.addresses[index]
            small = lengths > memory.sizes[index]
        return np.flatnonzero(small) if small.any() else None


class ArenaSink:
    """Puts all objects of a batch into one buffer, 64-byte aligned, and shows them as views."""

    def __init__(self, count: int) -> None:
        self.values: Values = [None] * count
        self._arenas: list[NDArray[np.uint8]] = []
        self.keep = self._arenas
        self._last = (0, 0)

    def array(self) -> NDArray[np.uint8]:
        """The memory of the last object placed."""
        start, length = self._last
        return self._arenas[-1][start : start + length]

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Make room for these keys, in an arena of their own."""
        spaced = (lengths + 63) & ~63
        ends = np.cumsum(spaced)
        arena = np.empty(int(ends[-1]) + 64, np.uint8)
        base = int(arena.__array_interface__["data"][0])
        starts = ends - spaced + (-base & 63)
        addresses[index] = base + starts
        self._last = (int(starts[-1]), int(lengths[-1]))
        view = memoryview(arena.data).toreadonly()
        for at, start, length in zip(
            index.tolist(), starts.tolist(), lengths.tolist(), strict=True
        ):
            self.values[at] = view[start : start + length]
        self._arenas.append(arena)
        return None
