"""The hash table digest -> row, and the supply of rows.

Grows and shrinks in steps of bounded size, so that no request waits for a rehash: a new array of
entries is made real page by page while the load approaches its limit, then entries move a few
per request. The arrays are virtual (`kernel_cache.columns`); nothing is copied, nothing is Python.

Complexity: all batch calls O(n) expected; `maintain` does O(n + constant) work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_cache.columns import release, reserve
from mooncake_store.core import context as places
from mooncake_store.core.kernels import table as k

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.context import Context

__all__ = ["Table"]

SLOTS_MIN = 1024
ENTRIES_PER_PAGE = 512
DRAIN_PER_KEY = 16
"""After a growth 8 per key would end in time; after a shrink to a quarter it takes more."""
BATCH_DRAINED = 65_536
RELEASE_STEP = 1 << 19
"""Entries whose pages are given back in one step (4 MiB)."""


class Table:
    """Digest -> row with incremental growth, over a fixed address range of rows.

    Kernels of other files reach it through the context; before inserting n keys, call
    `maintain(n)`.
    """

    def __init__(self, rows: NDArray[Any], context: Context) -> None:
        rows_max = len(rows)
        slots_max = 1 << max(10, (2 * rows_max - 1).bit_length())
        self._rows = rows
        self.tables = (
            context.bind(places.TABLE_A, reserve(slots_max, np.int64)),
            context.bind(places.TABLE_B, reserve(slots_max, np.int64)),
        )
        self.free_rows = context.bind(places.FREE_STACK, reserve(rows_max, np.int32))
        self.head = context.part(places.TABLE, k.HEAD_WORDS)
        self._numbers = context.numbers[places.TABLE : places.TABLE + k.HEAD_WORDS]
        self.head[k.MASK] = SLOTS_MIN - 1
        self.head[k.OLD_MASK] = k.DELETED
        self._touched = 0  # entries of the inactive array made real ahead of growth
        self._to_release = 0  # entries of the inactive array whose pages go back, from the end

    def __len__(self) -> int:
        return int(self.head[k.USED])

    @property
    def rows_high(self) -> int:
        """Rows ever in use: every row number in use is below it."""
        return int(self.head[k.ROWS_HIGH])

    @property
    def slots(self) -> int:
        """Positions of the active array."""
        return int(self.head[k.MASK]) + 1

    def find(self, digests: NDArray[np.int64]) -> NDArray[np.int32]:
        """Return the row of every digest, -1 where there is none."""
        out = np.empty(len(digests), np.int32)
        k.find(self.head, *self.tables, self._rows, digests, out)
        return out

    def fill(self, used: NDArray[np.int32], entered: NDArray[np.int32]) -> NDArray[np.int32]:
        """Make the table of rows that hold something already; it must be empty.

        `used` are all of these rows, in order, and `entered` those a digest is to lead to. Returns
        rows whose digest leads to another one.
        """
        assert not len(self), "the table is in use"
        head, high = self.head, self.rows_high
        head[k.MASK] = max(SLOTS_MIN, 1 << (2 * len(entered)).bit_length()) - 1
        twice = np.empty(len(entered), np.int32)
        count = k.enter_rows(head, self.tables[0], self._rows, entered, twice)
        free = np.ones(high, np.bool_)
        free[used] = False
        self.supply(np.flatnonzero(free)[::-1].astype(np.int32))
        return twice[:count]

    def supply(self, rows: NDArray[np.int32]) -> None:
        """Make empty rows that are in no table available."""
        first = int(self.head[k.FREE_ROWS])
        self.free_rows[first : first + len(rows)] = rows
        self.head[k.FREE_ROWS] = first + len(rows)

    def take_rows(self, count: int) -> NDArray[np.int32]:
        """Return rows outside the table (-1 where none is left)."""
        out = np.empty(count, np.int32)
        k.take_rows(self.head, self.free_rows, len(self._rows), out)
        return out

    def delete(self, doomed: NDArray[np.int32]) -> None:
        """Remove rows from the table, zero them and make them available again."""
        self.maintain(len(doomed), growing=False)
        k.delete(self.head, *self.tables, self._rows, self.free_rows, doomed)

    def swap(self, old: NDArray[np.int32], new: NDArray[np.int32]) -> None:
        """Let the digests of `old` rows lead to `new` ones."""
        assert k.swap_rows(self.head, *self.tables, self._rows, old, new) == len(old)

    def rename(self, row: int, low: int, high: int) -> None:
        """Let another digest, which is not in the table, lead to a row in place of its own."""
        self.maintain(1)
        k.rename_row(self.head, *self.tables, self._rows, row, low, high)

    def maintain(self, n: int, *, growing: bool = True) -> None:
        """Do a bounded share of pending growth, before a request on n keys."""
        head = self._numbers
        if head[k.OLD_MASK] >= 0:
            self._drain(n)
            crowded = growing and 10 * (head[k.USED] + n) > 7 * self.slots
            if head[k.OLD_MASK] >= 0 and not crowded:
                return
            while head[k.OLD_MASK] >= 0:  # only after a shrink, and then the array is small
                self._drain(BATCH_DRAINED)
        if self._to_release:
            start = max(0, self._to_release - RELEASE_STEP)
            release(self.tables[1 - head[k.ACTIVE]], start, self._to_release)
            self._to_release = start
        used, slots = head[k.USED], head[k.MASK] + 1
        if growing and 100 * used > 65 * slots:
            self._prefault(2 * slots, n)
        if growing and 10 * (used + n) > 7 * slots:
            self._resize(max(2 * slots, 1 << (2 * (used + n) - 1).bit_length()))
            self._drain(n)
        elif not growing and slots > SLOTS_MIN and 16 * used < slots:
            self._resize(slots // 4)

    def _prefault(self, slots: int, n: int) -> None:
        """Make pages of the next array real, fast enough to be done before it is needed."""
        if self._to_release or self._touched >= slots:
            return
        stop = min(slots, self._touched + ENTRIES_PER_PAGE * (4 + n // 6))
        k.touch_pages(self.tables[1 - int(self.head[k.ACTIVE])], self._touched, stop)
        self._touched = stop

    def _resize(self, slots: int) -> None:
        """Make the other array the active one; the entries follow in later steps."""
        head = self.head
        inactive = self.tables[1 - int(head[k.ACTIVE])]
        if slots > len(inactive):
            return  # as large as the rows allow: the load stays below 0.5 by construction
        if self._to_release:  # a resize right after another one: rare, and only then in one go
            release(inactive, 0, self._to_release)
            self._to_release = 0
        self._touched = 0
        head[k.ACTIVE] = 1 - head[k.ACTIVE]
        head[k.OLD_MASK] = head[k.MASK]
        head[k.CURSOR] = 0
        head[k.MASK] = slots - 1

    def _drain(self, n: int) -> None:
        """Move a share of the old array's entries; note when it is empty."""
        head = self.head
        slots = int(head[k.OLD_MASK]) + 1
        k.drain(head, *self.tables, DRAIN_PER_KEY * n + 64)
        if slots and head[k.OLD_MASK] < 0:
            self._to_release = slots

    def check_integrity(self) -> None:
        """Every entry leads to a row with its digest, and no digest is lost."""
        head = self.head
        active = int(head[k.ACTIVE])
        entries = self.tables[active][: self.slots]
        found = entries[entries != 0]
        if head[k.OLD_MASK] >= 0:
            old = self.tables[1 - active][int(head[k.CURSOR]) : int(head[k.OLD_MASK]) + 1]
            found = np.concatenate([found, old[(old != 0) & (old != k.DELETED)]])
        assert len(found) == head[k.USED], f"table holds {len(found)}, counts {head[k.USED]}"
        rows = ((found & k.LOW) - 1).astype(np.int32)
        taken = set(rows.tolist())
        assert len(taken) == len(rows), "a row stands twice in the table"
        digests = np.stack([self._rows["digest_lo"][rows], self._rows["digest_hi"][rows]], axis=1)
        tags = (found >> 32) & k.LOW
        assert np.array_equal(tags, digests[:, 0] & k.LOW), "an entry's tag is not its digest's"
        assert np.array_equal(self.find(digests), rows), "an entry cannot be found by its digest"
        free = self.free_rows[: int(head[k.FREE_ROWS])].tolist()
        assert len(set(free)) == len(free), "a row is free twice"
        assert taken.isdisjoint(free), "a free row stands in the table"
