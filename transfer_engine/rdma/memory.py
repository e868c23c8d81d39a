"""Which local memory the cards may touch: what the engine registered, and arenas for the rest.

A card reaches only memory that was registered with it, which costs far more than a small transfer
(the pages are pinned). So memory is registered when the engine registers it, on every card, and a
batch finds its keys in a table. What a caller never registered (one-time buffers) is copied
through an arena: a few MiB of registered memory, one per batch under way. Registering such
buffers on the fly was rejected: it costs tens of microseconds each, and remembering the
registration of memory that its owner may free and reuse would send the wrong bytes.

A table is replaced, never changed, and holds its registrations: a batch that uses one keeps them
until it ends, whatever is unregistered meanwhile. Cost: a table is O(r log r) to make.
"""

from __future__ import annotations

import logging
import mmap
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from transfer_engine.errors import TransferError
from transfer_engine.rdma.verbs import LOCAL

if TYPE_CHECKING:
    from transfer_engine.base import Columns, Region
    from transfer_engine.rdma.verbs import MemoryRegion, Nic

__all__ = ["ARENA_BYTES", "Arena", "LocalMemory", "Table"]

_log = logging.getLogger(__name__)
ARENA_BYTES = 4 << 20


class Table(NamedTuple):
    """Registered ranges by address. `keys[nic][range]` is the card's key for a range."""

    starts: Columns
    ends: Columns
    reach: Columns
    keys: Columns
    held: tuple[list[MemoryRegion], ...]


def make_table(ranges: list[tuple[int, int, list[MemoryRegion]]]) -> Table:
    """Build a table of (address, size, registration per card). O(r log r)."""
    ranges = sorted(ranges, key=lambda entry: entry[0])
    starts = np.array([address for address, _, _ in ranges], dtype=np.int64)
    ends = starts + np.array([size for _, size, _ in ranges], dtype=np.int64)
    keys = np.array([[on.lkey for on in regions] for _, _, regions in ranges], dtype=np.int64)
    held = tuple(regions for _, _, regions in ranges)
    by_card = np.ascontiguousarray(keys.T) if ranges else np.empty((0, 0), dtype=np.int64)
    return Table(starts, ends, np.maximum.accumulate(ends), by_card, held)


class Arena:
    """Registered memory of our own that the bytes of unregistered buffers pass through."""

    def __init__(self, nics: tuple[Nic, ...]) -> None:
        self._memory = mmap.mmap(-1, ARENA_BYTES)
        self.address = int(np.frombuffer(self._memory, dtype=np.uint8).ctypes.data)
        regions = [
            nic.register(self.address, ARENA_BYTES, LOCAL, keep=self._memory) for nic in nics
        ]
        self.table = make_table([(self.address, ARENA_BYTES, regions)])


class LocalMemory:
    """The engine's regions on all cards, and idle arenas. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._registered: dict[int, list[MemoryRegion]] = {}
        self._pending: list[Region] = []
        self._table: Table | None = None
        self._arenas: list[Arena] = []

    def add(self, region: Region, nics: tuple[Nic, ...]) -> None:
        """Register memory with the cards; where they refuse, it goes through arenas."""
        with self._lock:
            self._regions[id(region)] = region
            self._register(region, nics)
            self._table = None

    def _register(self, region: Region, nics: tuple[Nic, ...]) -> None:
        if not region.size or not nics:
            return
        try:
            self._registered[id(region)] = [
                nic.register(region.address, region.size, LOCAL, keep=region) for nic in nics
            ]
        except TransferError as error:
            _log.warning("transfers of this memory are copied once more: %s", error)

    def remove(self, region: Region) -> None:
        """Take memory back; batches under way keep its registration until they end."""
        with self._lock:
            if self._regions.pop(id(region), None) is not None:
                self._registered.pop(id(region), None)
                self._table = None

    def table(self, nics: tuple[Nic, ...]) -> Table:
        """Return the registered ranges as they are now."""
        table = self._table
        if table is None:
            with self._lock:
                for region in self._pending:
                    if id(region) in self._regions:
                        self._register(region, nics)
                self._pending = []
                table = self._table = make_table(
                    [
                        (self._regions[key].address, self._regions[key].size, regions)
                        for key, regions in self._registered.items()
                    ]
                )
        return table

    def take_arena(self, nics: tuple[Nic, ...]) -> Arena:
        """Return an arena for one batch; `give_arena` it back."""
        with self._lock:
            if self._arenas:
                return self._arenas.pop()
        return Arena(nics)

    def give_arena(self, arena: Arena) -> None:
        """Keep an arena for the next batch."""
        with self._lock:
            self._arenas.append(arena)

    def close(self) -> None:
        """Forget all memory. Idempotent."""
        with self._lock:
            self._regions, self._registered, self._arenas = {}, {}, []
            self._pending, self._table = [], None

    def after_fork(self) -> None:
        """In a forked child: the registrations are the parent's, the memory is here as well."""
        self._lock = threading.Lock()
        self._pending = list(self._regions.values())
        self._registered, self._arenas, self._table = {}, [], None
