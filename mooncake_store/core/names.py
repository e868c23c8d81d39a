"""Names of objects, kept for listing and matching; the store itself works with digests.

Freed names are reused by names of the same length (in words of 8 bytes): no compaction, no
Python objects, O(1) per name. Listing is a scan of rows in steps the caller bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mooncake_store.core import _kernels_names as k
from mooncake_store.core.memory import reserve

__all__ = ["NAME_BYTES_MAX", "NameArena", "Names"]

NAME_BYTES_MAX = 4096
ARENA_BYTES_PER_ROW = 64


@dataclass(frozen=True, slots=True)
class Names:
    """The names of a batch: one blob and the length of each."""

    blob: bytes
    lengths: NDArray[np.uint16]

    @classmethod
    def of(cls, names: list[bytes]) -> Names:
        """Pack a list of names."""
        return cls(b"".join(names), np.array([len(name) for name in names], np.uint16))


class NameArena:
    """Row -> name, for at most `rows_max` rows."""

    def __init__(self, rows_max: int) -> None:
        self._words = reserve(max(1024, rows_max * ARENA_BYTES_PER_ROW // 8), np.int64)
        self._blob = self._words.view(np.uint8)
        self._heads = np.zeros(k.CLASSES, np.int64)
        self.refs = reserve(rows_max, np.int64)

    def store(self, rows: NDArray[np.int32], names: Names) -> int:
        """Keep the name of each row (row -1: none); return how many found no room."""
        blob = np.frombuffer(names.blob, np.uint8)
        ends = np.cumsum(names.lengths, dtype=np.int64)
        return int(k.store(self._words, self._blob, self._heads, self.refs, rows, blob, ends))

    def drop(self, rows: NDArray[np.int32]) -> None:
        """Forget the names of rows that are going away."""
        k.drop(self._words, self._heads, self.refs, rows)

    def get(self, row: int) -> bytes:
        """Return the name of one row, b"" when it has none."""
        ref = int(self.refs[row])
        start = (ref >> k.LENGTH_BITS) << 3
        return self._blob[start : start + (ref & k.LENGTH_MASK)].tobytes()

    def gather(self, rows: NDArray[np.int32]) -> tuple[bytes, NDArray[np.uint16]]:
        """Return the names of rows as one blob, and their lengths."""
        lengths = np.empty(len(rows), np.uint16)
        total = int((self.refs[rows] & k.LENGTH_MASK).sum())
        out = np.empty(total, np.uint8)
        k.gather(self._blob, self.refs, rows, lengths, out)
        return out.tobytes(), lengths

    def with_prefix(self, rows: NDArray[np.int32], prefix: bytes) -> NDArray[np.int32]:
        """Return those of `rows` whose name starts with `prefix`, in the same order."""
        out = np.empty(len(rows), np.int32)
        count = k.with_prefix(self._blob, self.refs, rows, np.frombuffer(prefix, np.uint8), out)
        return out[:count]
