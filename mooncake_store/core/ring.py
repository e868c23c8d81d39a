"""Where a shard writes down what became true: arrays that may outlive its process.

    header    facts in fixed words, as of the last operation that is whole
    cells     a ring of words; position p of the endless stream stands at cells[p & (len - 1)]
    events    the newest events, for followers

Whoever makes a shard decides where these lie. In memory that has a name they are still there when
its process was killed: HEAD moves only when an operation is done, so what lies before it is whole,
and what lies behind it never happened. The shard writes all but WRITTEN, SYNCED and VOID, which
belong to whoever copies the stream to files. What cells mean is in `kernels/cells.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kernel_cache.columns import reserve
from mooncake_store.core.records import EVENT

if TYPE_CHECKING:
    from typing import Self

    from numpy.typing import NDArray

__all__ = ["Ring"]

HEADER_WORDS = 512
"""A page."""
HEAD, WRITTEN, SYNCED = 0, 1, 2
"""Positions: the end of what is whole, of what is in files, of what these have on the disk."""
HORIZON, NOW = 3, 4
"""When the last lease granted so far ends, and the time at HEAD, both on the shard's clock."""
EVENTS_NEXT, GENERATION = 5, 6
"""The number of the next event, and the newest generation, at HEAD."""
SNAPSHOT = 7
"""Where the newest complete snapshot begins: nothing before it is needed any more. 0: none yet;
positions begin at 1."""
VOID = 8
"""Not 0: what files keep is not the truth, because they could not be written."""
STREAM = 9
"""Which stream the numbers of events belong to; as good as random."""
AHEAD = 10
"""By how much the time of the shard is ahead of the clock of this boot, in ns; may be negative."""
COPIED = 11
"""Not 0: a copy of what was written down elsewhere. 1: it may lack the last of that; 2: it lacks
nothing that anybody was told; 3: nothing at all, and whom it is of goes on no more."""
HISTORY = 12
"""Of a copy, which stream it is of."""
ERA, OBJECTS = 13, 14
"""Of a copy, in which era COPIED was told, and how many objects its leader had."""
LACKING, EXACT, HANDED_OVER = 1, 2, 3
"""What COPIED says of a copy."""
FIRST_OWN = 64
"""Words from here on belong to whoever made the arrays."""


@dataclass(frozen=True, slots=True)
class Ring:
    """The arrays; as many cells as a power of two."""

    header: NDArray[np.int64]
    cells: NDArray[np.int64]
    events: NDArray[Any]

    @classmethod
    def private(cls, words: int, events: int) -> Self:
        """Return one that ends with this process, and begins at position 1."""
        assert words & (words - 1) == 0, f"{words} is no power of two"
        header = np.zeros(HEADER_WORDS, np.int64)
        header[[HEAD, WRITTEN, SYNCED]] = 1
        return cls(header, reserve(words, np.int64), reserve(max(events, 1), EVENT))
