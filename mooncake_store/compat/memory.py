"""Memory that callers name by address: what of it may be used, and buffers made for them.

A raw address is only a number, so a call that takes one is refused unless `register_buffer` was
told of that memory before. Registering checks that the memory is mapped. It pins nothing: the
transports here copy through the CPU, and do not need it.

Cost of a check: O(log r) a piece for r registered ranges, in numpy.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from transfer_engine.base import Region
from transfer_engine.checksum import address_of
from transfer_engine.columns import merge_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client.extension import Sink

    Column = NDArray[np.int64]

__all__ = ["BufferHandle", "HandleSink", "MooncakeHostMemAllocator", "Registry", "is_mapped"]

_PROBE_BYTES = 1 << 30


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def is_mapped(address: int, nbytes: int) -> bool:
    """Whether every page of a range belongs to this process, as far as the kernel tells."""
    page = mmap.PAGESIZE
    start = address - address % page
    end = address + nbytes
    vector = (ctypes.c_ubyte * (min(_PROBE_BYTES, end - start) // page + 1))()
    while start < end:
        length = min(_PROBE_BYTES, end - start)
        if _libc().mincore(ctypes.c_void_p(start), ctypes.c_size_t(length), vector) != 0:
            return False
        start += length
    return True


class Registry:
    """The ranges that pointer calls may touch."""

    def __init__(self, *, unchecked: bool = False) -> None:
        self._unchecked = unchecked
        self._lock = threading.Lock()
        self._ranges: dict[int, Region] = {}
        self._own: dict[int, Region] = {}
        self._merged = merge_ranges([])

    def add(self, address: int, nbytes: int) -> bool:
        """Allow a range; False if one begins there already, or it is no memory of ours."""
        if address <= 0 or nbytes <= 0 or address + nbytes >= 1 << 63:
            return False
        if not self._unchecked and not is_mapped(address, nbytes):
            return False
        with self._lock:
            if address in self._ranges:
                return False
            self._ranges[address] = Region(address, nbytes, None)
            self._merge()
        return True

    def lend(self, address: int, nbytes: int) -> None:
        """Allow memory that was made for the program, for good; it may be added all the same."""
        with self._lock:
            self._own[address] = Region(address, nbytes, None)
            self._merge()

    def discard(self, address: int) -> bool:
        """Forbid the range that begins there; False if there is none."""
        with self._lock:
            if self._ranges.pop(address, None) is None:
                return False
            self._merge()
        return True

    def _merge(self) -> None:
        self._merged = merge_ranges([*self._ranges.values(), *self._own.values()])

    def covers(self, addresses: Any, lengths: Any) -> NDArray[np.bool_]:
        """Which of these ranges lie within registered memory; empty ones always do."""
        at = np.asarray(addresses, np.int64)
        size = np.asarray(lengths, np.int64)
        if self._unchecked:
            return np.asarray((at > 0) & (size >= 0) | (size == 0))
        starts, ends = self._merged
        if not len(starts):
            return np.asarray(size == 0)
        slot = np.searchsorted(starts, at, "right") - 1
        inside = (slot >= 0) & (size >= 0)
        inside &= size <= ends[slot] - at
        return np.asarray(inside | (size == 0))

    def room(self, address: int) -> int:
        """Registered bytes from an address on; 0 outside. Unchecked memory has no known end."""
        if self._unchecked:
            return 1 << 62
        starts, ends = self._merged
        slot = int(np.searchsorted(starts, address, "right")) - 1
        return max(0, int(ends[slot]) - address) if slot >= 0 else 0


class BufferHandle(mmap.mmap):
    """The bytes of one object, as memory of this process: anything that takes buffers takes it.

    It is released with its last reference.
    """

    def size(self) -> int:
        """Its bytes."""
        return len(self)

    def ptr(self) -> int:
        """Its address."""
        return address_of(self, writable=False)[0]


class HandleSink:
    """Makes a `BufferHandle` per key of a read."""

    def __init__(self, count: int) -> None:
        self.handles: list[BufferHandle | None] = [None] * count

    def place(self, index: Column, lengths: Column, addresses: Column) -> Column | None:
        """Make them; all fit."""
        for at, length in zip(index.tolist(), lengths.tolist(), strict=True):
            self.handles[at] = handle = BufferHandle(-1, length)
            addresses[at] = handle.ptr()
        return None

    @property
    def keep(self) -> object:
        """The handles."""
        return self.handles


if TYPE_CHECKING:
    _: type[Sink] = HandleSink


class MooncakeHostMemAllocator:
    """Page-aligned memory by address, as a host memory pool wants it."""

    _all: dict[int, tuple[mmap.mmap, Any]] = {}  # noqa: RUF012 - shared by all, like an allocator

    def alloc(self, size: int) -> int:
        """Return the address of zeroed memory, or 0 if there is none."""
        try:
            memory = mmap.mmap(-1, size)
        except (OSError, ValueError, OverflowError):
            return 0
        hold = (ctypes.c_char * size).from_buffer(memory)
        address = ctypes.addressof(hold)
        self._all[address] = (memory, hold)
        return address

    def free(self, address: int) -> int:
        """Give memory back; -1 for an address that `alloc` did not return."""
        return 0 if self._all.pop(address, None) is not None else -1
