"""Steps of a decode node in columns: stretches of them, each step a little longer than the last.

    stretches.begin(120, 0.03, 1e-6)      # step 120 took 30 ms, each one after it 1 us more
    first_s, slowest_s = stretches.look_back(joined=118, last=400)

Where the columns are full, what began before the oldest sequence is given up, so they hold what one
sequence lives through. O(1) to begin, one compiled pass to look back.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from serving.simulator.kernels.stretches import look_back

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Stretches"]

_ROOM = 1024


class Stretches:
    """Those of one node; `oldest` says which step somebody may still ask about."""

    def __init__(self, oldest: Callable[[], int]) -> None:
        self._oldest = oldest
        self._first = np.zeros(_ROOM, np.int64)
        self._step_s = np.zeros(_ROOM)
        self._slope_s = np.zeros(_ROOM)
        self._count = 0
        self.step_s = self.slope_s = 0.0
        """Of the one under way."""

    def begin(self, first: int, step_s: float, slope_s: float) -> None:
        """From this step on."""
        if self._count == len(self._first):
            self._make_room()
        at = self._count
        self._first[at], self._step_s[at], self._slope_s[at] = first, step_s, slope_s
        self._count = at + 1
        self.step_s, self.slope_s = step_s, slope_s

    def look_back(self, joined: int, last: int) -> tuple[float, float]:
        """Seconds of step `joined`, and the mean of the longest tenth of those until `last`.

        Without any between the two, the second is nan.
        """
        found: tuple[float, float] = look_back(
            self._first, self._step_s, self._slope_s, self._count, joined, last
        )
        return found

    def _make_room(self) -> None:
        keep = int(np.searchsorted(self._first, self._oldest(), side="right")) - 1
        keep = max(0, keep)
        count = self._count - keep
        # At least as much room again: no more than O(1) is moved for each that begins.
        room = max(_ROOM, 1 << math.ceil(math.log2(2 * count)))
        for name in ("_first", "_step_s", "_slope_s"):
            old = getattr(self, name)
            new = np.zeros(room, old.dtype)
            new[:count] = old[keep:]
            setattr(self, name, new)
        self._count = count
