"""`BufferPool`: registered scratch memory, lent out and taken back, for calls that take addresses.

    with BufferPool(store).buffer(1 << 20) as lease:
        count = store.get_into("key", lease.ptr, lease.size)
        use(lease.buffer[:count])

Regions are kept by size class (powers of two) and handed out again; all begin on a page, which is
as much of an alignment as a copy can use. `max_bytes` bounds what is lent
and kept together; without it the bound is twice the local buffer of `setup`. A lease whose memory
is still looked at cannot be released. Cost: a dictionary lookup; new regions are page faults.
"""

from __future__ import annotations

import mmap
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from types import TracebackType

    from numpy.typing import NDArray

    from mooncake_store.compat.pointers import PointerCalls

__all__ = ["BufferLease", "BufferPool", "RegisteredBufferPool"]

_BYTES_MIN = 64 << 20


class BufferLease:
    """Memory lent until `release`; a context manager."""

    def __init__(self, pool: BufferPool, region: NDArray[np.uint8], size: int) -> None:
        self._pool = pool
        self._region: NDArray[np.uint8] | None = region
        # Every view made of it refers to this array, so that its life tells whether there are any.
        self._window: NDArray[np.uint8] | None = region[:size]
        self.size = size

    @property
    def ptr(self) -> int:
        """Its address; raises RuntimeError once it was released."""
        return int(self._live().ctypes.data)

    @property
    def buffer(self) -> memoryview:
        """Its memory, writable."""
        return memoryview(self._live().data)

    def _live(self) -> NDArray[np.uint8]:
        if self._window is None:
            raise RuntimeError("the lease was released")
        return self._window

    def release(self) -> None:
        """Give the memory back. Idempotent; raises RuntimeError while a view of it lives."""
        if self._region is None or self._window is None:
            return
        watched = weakref.ref(self._window)
        self._window = None
        alive = watched()
        if alive is not None:
            self._window = alive
            raise RuntimeError("exported views of this buffer are still alive: delete them first")
        region, self._region = self._region, None
        self._pool._take_back(region)

    def __enter__(self) -> BufferLease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __del__(self) -> None:
        region = self.__dict__.get("_region")
        if region is not None:
            self._window = None
            self._pool._take_back(region)


class BufferPool:
    """Lends registered memory of a store."""

    def __init__(
        self,
        store: PointerCalls,
        max_bytes: int = 0,
        min_size_class: int = 65_536,
        max_size_class: int | None = None,
        alignment: int = 8 << 20,
        block_on_exhaustion: bool = True,
        default_timeout: float | None = None,
        max_regions: int | None = None,
        prewarm_size: int | None = None,
        prewarm_count: int = 0,
    ) -> None:
        if min_size_class < 1 or max_bytes < 0:
            raise ValueError("min_size_class must be positive and max_bytes not negative")
        if alignment < 1 or alignment & (alignment - 1):
            raise RuntimeError(f"alignment {alignment} is not a power of two")
        self._store = store
        self._max_bytes = max_bytes or max(2 * store._wanted.local_buffer_size, _BYTES_MIN)
        self._min = min_size_class
        self._max_class = max_size_class
        self._block = block_on_exhaustion
        self._timeout = default_timeout
        self._max_regions = max_regions
        self._free: dict[int, list[NDArray[np.uint8]]] = {}
        self._held = 0  # bytes lent and kept
        self._lent = 0
        self._news = threading.Condition()
        self._closed = False
        if prewarm_size is not None and prewarm_count:
            self.prewarm(prewarm_size, prewarm_count)

    def acquire(
        self, size: int, block: bool | None = None, timeout: float | None = None
    ) -> BufferLease:
        """Lend `size` bytes. Raises RuntimeError when it may not, or not longer, wait for them."""
        kind = self._class_of(size)
        wait = self._block if block is None else block
        limit = self._timeout if timeout is None else timeout
        limit = None if limit is None else max(0, limit)
        until = None if limit is None else time.monotonic() + limit
        with self._news:
            while True:
                if self._closed:
                    raise RuntimeError("the pool is closed")
                region = self._region(kind)
                if region is not None:
                    self._lent += 1
                    return BufferLease(self, region, size)
                left = None if until is None else until - time.monotonic()
                if not wait:
                    raise RuntimeError(f"the pool is exhausted: no buffer of {size} bytes is free")
                if left is not None and left <= 0:
                    raise RuntimeError(f"no buffer of {size} bytes came free within {limit} s")
                self._news.wait(left)

    buffer = acquire

    def prewarm(self, size: int, count: int) -> None:
        """Make regions ahead."""
        leases = [self.acquire(size, block=False) for _ in range(count)]
        for lease in leases:
            lease.release()

    def close(self) -> None:
        """Give all memory up. Raises RuntimeError while leases are out. Idempotent."""
        with self._news:
            if self._lent:
                raise RuntimeError(f"the pool has {self._lent} active leases")
            self._closed = True
            for regions in self._free.values():
                for region in regions:
                    self._drop(region)
            self._free = {}
            self._news.notify_all()

    def _class_of(self, size: int) -> int:
        if not 0 <= size <= self._max_bytes:
            raise RuntimeError(f"a buffer of {size} bytes exceeds the pool's capacity")
        if self._max_class is not None and size > self._max_class:
            return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        kind = max(self._min, 1 << max(0, size - 1).bit_length())
        return min(kind, max(size, self._max_bytes))

    def _region(self, kind: int) -> NDArray[np.uint8] | None:
        """A region of a class, kept or new; None when there is no room. Held: the lock."""
        if self._max_regions is not None and self._lent >= self._max_regions:
            return None
        if self._free.get(kind):
            return self._free[kind].pop()
        for other, regions in self._free.items():
            while regions and other != kind and self._held + kind > self._max_bytes:
                self._drop(regions.pop())
        if self._held + kind > self._max_bytes:
            return None
        region = np.frombuffer(mmap.mmap(-1, kind), np.uint8)
        if self._store.register_buffer(int(region.ctypes.data), kind) != 0:
            raise RuntimeError("the store does not take the memory: is it set up?")
        self._held += kind
        return region

    def _drop(self, region: Any) -> None:
        self._store.unregister_buffer(int(region.ctypes.data))
        self._held -= region.nbytes

    def _take_back(self, region: NDArray[np.uint8]) -> None:
        with self._news:
            self._lent -= 1
            self._free.setdefault(region.nbytes, []).append(region)
            self._news.notify_all()


RegisteredBufferPool = BufferPool
