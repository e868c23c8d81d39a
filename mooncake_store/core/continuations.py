"""What was put behind what: the blocks of a prompt come one after the other, and are read so.

    rows = continuations.follow(words, notes)    # likely to be read next; as notes go to policies

A shard knows no prompts, only digests. But who puts the blocks of one puts them in their order, and
a shard that has some of them has these in that order. So each row remembers which came behind it.
Reads that end at an object that lies below have those behind it come to memory, up to a number: who
reads a prefix in steps finds the next step there. It is a guess: of prompts with one beginning it
is the one put last, and rows that are used anew may mislead it once. What is read itself is left to
those who count hits.

Cost: 4 bytes a row and a pass over notes, in pools that have anything below memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kernel_cache.columns import reserve
from mooncake_store.core.kernels import tiers

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Continuations"]


AT_ONCE = 4096
"""Rows of one batch of notes that are followed, at most."""


class Continuations:
    """Which row came behind which."""

    def __init__(self, rows_max: int, ahead: int) -> None:
        self._ahead = ahead
        # [0] is the row put last, [1 + r] the one behind row r; each plus one, 0 for none.
        self._behind = reserve(rows_max + 1, np.int32)

    def follow(self, words: NDArray[np.int64], notes: NDArray[np.int64]) -> NDArray[np.int32]:
        """Take note of what was put and read; return the rows that are likely to be read next."""
        if not self._ahead:
            return _NONE
        found = np.empty(AT_ONCE, np.int32)
        return found[: tiers.follow_notes(words, notes, self._behind, self._ahead, found)]


_NONE = np.empty(0, np.int32)
