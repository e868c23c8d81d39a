"""Bytes of many objects, or of ranges of them, read as one batch into memory that is ready.

    gather = Gather()
    gather.want(key, offset, length, size, address)     # any number of times
    yield from gather.fetch()
    gather.failures                                     # the error of each key that had one

Whole objects are verified while they are copied; a checksum says nothing about a range. Objects
that are leased already are read without a request; the others are asked for in one, so a batch
costs as many requests as it has bounded pieces (`STEP_BYTES`), whatever the number of ranges.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.client import Pieces
from mooncake_store.client.extension import Memory
from mooncake_store.errors import LeaseExpiredError
from mooncake_store.fs.plan import Call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from mooncake_store.fs.plan import Plan

__all__ = ["STEP_BYTES", "Gather", "bounded"]

STEP_BYTES = 256 << 20
"""How much one call moves: every call has the client's deadline."""


def bounded(sizes: Sequence[int], most: int) -> Iterator[slice]:
    """Cut a sequence, by the bytes of its items, into slices of at most `most`, or of one item."""
    first = total = 0
    for at, size in enumerate(sizes):
        if at > first and total + size > most:
            yield slice(first, at)
            first, total = at, 0
        total += size
    if sizes:
        yield slice(first, len(sizes))


class Gather:
    """What is wanted, then what failed. The caller keeps the memory until `fetch` is done."""

    def __init__(self) -> None:
        self.failures: dict[Any, Exception] = {}
        self._whole: list[tuple[Any, int, int]] = []
        self._ranges: dict[Any, list[tuple[int, int, int]]] = {}

    def want(self, key: Any, offset: int, length: int, size: int, address: int) -> None:
        """Read `length` bytes from `offset` of an object of this size to an address."""
        if length == size:
            self._whole.append((key, length, address))
        elif length:
            self._ranges.setdefault(key, []).append((offset, length, address))

    def fetch(self) -> Plan[None]:
        """Read all that is wanted."""
        for step in bounded([length for _, length, _ in self._whole], STEP_BYTES):
            yield from self._fetch_whole(self._whole[step])
        keys = list(self._ranges)
        sizes = [sum(length for _, length, _ in self._ranges[key]) for key in keys]
        for step in bounded(sizes, STEP_BYTES):
            yield from self._fetch_ranges(keys[step])

    def _fetch_whole(self, wanted: list[tuple[Any, int, int]]) -> Plan[None]:
        keys = [key for key, _, _ in wanted]
        sizes = np.array([length for _, length, _ in wanted], np.int64)
        addresses = np.array([address for _, _, address in wanted], np.int64)
        got = yield Call("get_into_many", (keys, Memory(addresses, sizes, None)))
        for at, error in got.errors():
            self.failures[keys[at]] = error
        # Without a lease the object may have become another one since it was measured.
        for at in np.flatnonzero((got.statuses == 0) & (got.sizes != sizes)).tolist():
            self.failures[keys[at]] = LeaseExpiredError(
                "it was replaced while it was read", key=keys[at], operation="read"
            )

    def _fetch_ranges(self, keys: list[Any]) -> Plan[None]:
        lists = [self._ranges[key] for key in keys]
        flat = np.array([piece for ranges in lists for piece in ranges], np.int64)
        starts = np.zeros(len(keys) + 1, np.int64)
        np.cumsum([len(ranges) for ranges in lists], out=starts[1:])
        pieces = Pieces(flat[:, 2], flat[:, 1], starts, offsets=flat[:, 0])
        got = yield Call("get_into_many", (keys, pieces))
        self.failures.update((keys[at], error) for at, error in got.errors())
