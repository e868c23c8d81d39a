"""One array that leads a kernel to everything a shard has.

A kernel call pays for every array it is given, several times as much for arrays of records and
for tuples, and a request needs a dozen columns in several kernels. So the hot kernels take one
array of words instead: counters that they keep, and where every column lies. Columns never move
(`kernel_cache.columns` reserves their address range once), so an address is written down once, by
`bind`, which also keeps its column alive as long as the words that point at it.

Kernels turn a place into an array with `kernels.columns.column`; nothing else may read addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Context"]

# Words 0 to 7 are the head of the hash table (`kernels/table.py`), 16 from TALLY on the totals of
# `codes.py`.
TABLE, TALLY = 0, 64
# What the configuration says, and the number of the next event.
DISCARD_NS, RELEASE_NS, HITS_WINDOW_NS = 16, 17, 18
EVENTS_KEPT, EVENTS_NEXT, PINS_USED = 20, 21, 22
# Whether any segment was ever other than memory: without, nothing looks at tiers.
BELOW_USED = 88
# Whether any segment holds something else, perhaps, than is known.
UNSURE_USED = 91
# Above what length a lease is a long one, of which there is a share; flags of rows that take none
# of it; the first row that the sweep which runs has not seen. Of long leases: the most that all
# clients may have, and one; what they have at most, and what of it that sweep does not count.
BRIEF_NS, UNSHARED, SWEPT, LONG_MOST, LONG_MOST_OF_ONE, LONG, LONG_BEHIND = range(92, 99)
# Entries in the columns of that name.
NOTED, FREED, MARKED = 23, 54, 19
# Whether changes are written down, the position behind what was (see `kernels/cells.py`), and
# whether the operation that runs has changed anything but rows.
JOURNALED, CELLS_END, CHANGED = 15, 14, 55
# Columns: two words each, address and number of entries.
ROWS, COLD_ROWS, OVERFLOW_ROWS, TABLE_A, TABLE_B, FREE_STACK = 24, 26, 28, 30, 32, 34
ALIVE, DEAD, LEASE_UNTIL, TENANT_USE, PIN_ENDS, EVENTS = 36, 84, 38, 40, 42, 44
TIERS, UNSURE = 86, 89
NAME_WORDS, NAME_HEADS = 46, 48
# Holders of leases that several have, see `kernels/leases.py`.
SHARED = 56
# Bytes under long leases by client, see there as well.
LONG_OF = 99
# Which client pinned a row hard, and how many bytes each has pinned so.
PINNER, PINNED_OF = 101, 103
# Bytes that are pinned hard by tenant.
TENANT_PINS = 105
# Tags of content by row, and whether any row has had one: without, nothing looks at them.
TAGS, TAGS_USED = 107, 109
# What kernels leave for Python to hand on in larger batches: notes to the eviction policies of rows
# that were read, came or went, and extents freed.
NOTES, FREED_EXTENTS = 50, 52
# Rows that an operation has changed so far, and where it is written down: `ring.py`. The first two
# once more, as words.
MARKS, CELLS, RING_HEADER, ROW_WORDS, COLD_WORDS = 58, 60, 62, 80, 82
# Scratch of a kernel call: rows found, whether a row is new, statuses.
FOUND, FRESH, STATUS = 8, 10, 12
WORDS = 110

INT64, INT32, INT16 = np.dtype(np.int64), np.dtype(np.int32), np.dtype(np.int16)
BYTE, UINT16 = np.dtype(np.uint8), np.dtype(np.uint16)
"""Types of the columns that are not records, for `column`."""


class Context:
    """The words of one shard."""

    def __init__(self) -> None:
        self.words = np.zeros(WORDS, np.int64)
        self.numbers = self.words.data
        """The same words for Python, which reads one in a third of the time."""
        self._bound: dict[int, NDArray[Any]] = {}

    def bind(self, place: int, column: NDArray[Any]) -> NDArray[Any]:
        """Write down where a column lies, and return it. It must be contiguous."""
        assert column.flags.c_contiguous, "a column must be contiguous"
        assert place not in self._bound, "a column never moves"
        self._bound[place] = column
        self.words[place] = column.ctypes.data
        self.words[place + 1] = column.size
        return column

    def part(self, place: int, count: int) -> NDArray[np.int64]:
        """Return a view of some words, for Python code that reads or keeps them."""
        return self.words[place : place + count]
