"""Kernels of where rows were last written: one word for each row, made of the cells of a stream.

    position of the newest ROW_CELL or FREED_CELL about the row << 2 | FREED | ENDED

FREED says that it was the latter, ENDED that an ENDED_CELL came since. So two words are the same
only where all cells that made the row what it is are the same. Doing cells once more changes
nothing, as long as all that follow are done again as well. What cells are is in `cells.py`.
"""

import numpy as np

from kernel_cache import njit
from mooncake_store.core.codes import KERNEL
from mooncake_store.core.kernels.cells import ENDED_CELL, FREED_CELL, ROW_CELL, TOLD

ENDED, FREED = 1, 2
PLACE_BITS = 2


@njit(**KERNEL)
def note_cells(cells, base, mask, first, stop, last):
    """Note the cells at the positions from `first` to `stop`; position p is at (p - base) & mask.

    Returns the position it came to: `stop`, or where a cell is about a row that `last` has no room
    for, or is none. O(cells).
    """
    at = first
    while at < stop:
        head = cells[(at - base) & mask]
        kind, words, row = head & 0xFF, (head >> 16) & 0xFFFF, head >> 32
        if words < 1 or kind < ROW_CELL:
            break
        if kind < TOLD:
            if row < 0 or row >= last.shape[0]:
                break
            if kind == ENDED_CELL:
                last[row] |= ENDED
            elif kind == FREED_CELL:
                last[row] = at << PLACE_BITS | FREED
            else:
                last[row] = at << PLACE_BITS
        at += words
    return at


def warmup() -> None:
    """Compile every kernel of this file."""
    cells = np.array([FREED_CELL | 1 << 16], np.int64)
    cells.flags.writeable = False
    note_cells(cells, 1, -1, 1, 2, np.zeros(1, np.int64))
