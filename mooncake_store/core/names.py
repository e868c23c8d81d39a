"""Names of objects, kept for listing and matching; the store itself works with digests.

Freed names are reused by names of the same length (in words of 8 bytes): no compaction, no
Python objects, O(1) per name. Listing is a scan of rows in steps the caller bounds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from kernel_cache.columns import reserve
from mooncake_store.core import context as places
from mooncake_store.core.kernels import names as k

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.context import Context
    from mooncake_store.core.patterns import Pattern

__all__ = ["NameArena", "Names"]

ARENA_BYTES_PER_ROW = 128
ARENA_BYTES_MIN = 1 << 20


class Names(NamedTuple):
    """The names of a batch: one blob and the length of each."""

    blob: bytes | memoryview
    lengths: NDArray[np.uint32]

    @classmethod
    def of(cls, names: list[bytes]) -> Names:
        """Pack a list of names."""
        return cls(b"".join(names), np.array([len(name) for name in names], np.uint32))


def as_lengths(lengths: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """View the lengths read-only: the one type the kernels are compiled for."""
    out = lengths.view()
    out.flags.writeable = False
    return out


class NameArena:
    """Row -> name; `cold` holds the reference of each row."""

    def __init__(self, cold: NDArray[Any], context: Context) -> None:
        nbytes = max(ARENA_BYTES_MIN, len(cold) * ARENA_BYTES_PER_ROW)
        words = reserve(nbytes // 8, np.int64)
        self._words = context.bind(places.NAME_WORDS, words)
        self._blob = self._words.view(np.uint8)
        self._heads = context.bind(places.NAME_HEADS, np.zeros(k.CLASSES, np.int64))
        self._cold = cold

    def store(self, rows: NDArray[np.int32], status: NDArray[np.int16], names: Names) -> int:
        """Keep the name of each row whose status is 0; return how many found no room.

        Keys that exist already under another name are refused, and counted as well.
        """
        blob = np.frombuffer(names.blob, np.uint8)
        return int(
            k.store(
                self._words,
                self._blob,
                self._heads,
                self._cold,
                rows,
                status,
                blob,
                as_lengths(names.lengths),
            )
        )

    def refuse_others(
        self, found: NDArray[np.int32], status: NDArray[np.int16], names: Names
    ) -> None:
        """Refuse keys that exist already under another name."""
        blob = np.frombuffer(names.blob, np.uint8)
        k.refuse_others(self._blob, self._cold, found, status, blob, as_lengths(names.lengths))

    def hand_over(self, old: int, new: int) -> None:
        """Give the name of one row to another that has none."""
        if self._cold["name_ref"][new] == 0:
            self._cold["name_ref"][new] = self._cold["name_ref"][old]
            self._cold["name_ref"][old] = 0

    def has_room(self, row: int, length: int) -> bool:
        """Whether a name of this many bytes can take the place of that of a row."""
        blocks, own = (length + 7) >> 3, int(self._cold["name_ref"][row]) & k.LENGTH_MASK
        if blocks in (0, (own + 7) >> 3) or self._heads[blocks]:
            return True
        return int(self._heads[0]) + blocks < len(self._words)

    def replace(self, row: int, name: bytes) -> None:
        """Give a row another name, for which there is room, or with b"" none."""
        rows = np.array([row], np.int32)
        k.drop(self._words, self._heads, self._cold, rows)
        if name:
            self.store(rows, np.zeros(1, np.int16), Names.of([name]))

    def get(self, row: int) -> bytes:
        """Return the name of one row, b"" when it has none."""
        ref = int(self._cold["name_ref"][row])
        start = (ref >> k.LENGTH_BITS) << 3
        return self._blob[start : start + (ref & k.LENGTH_MASK)].tobytes()

    def gather(self, rows: NDArray[np.int32]) -> tuple[bytes, NDArray[np.uint16]]:
        """Return the names of rows as one blob, and their lengths."""
        lengths = np.empty(len(rows), np.uint16)
        total = int((self._cold["name_ref"][rows] & k.LENGTH_MASK).sum())
        out = np.empty(total, np.uint8)
        k.gather(self._blob, self._cold, rows, lengths, out)
        return out.tobytes(), lengths

    def with_prefix(self, rows: NDArray[np.int32], prefix: bytes) -> NDArray[np.int32]:
        """Return those of `rows` whose name starts with `prefix`, in the same order."""
        out = np.empty(len(rows), np.int32)
        count = k.with_prefix(self._blob, self._cold, rows, np.frombuffer(prefix, np.uint8), out)
        return out[:count]

    def matching(self, rows: NDArray[np.int32], pattern: Pattern) -> NDArray[np.int32]:
        """Return those of `rows` whose name, empty if there is none, a pattern accepts."""
        out = np.empty(len(rows), np.int32)
        count = k.matching(self._blob, self._cold, rows, *pattern, out)
        return out[:count]
