"""When the requests under way decode, in columns: how many at a moment is one pass over all.

    slot = under_way.add(begins=12.5, tokens=4000)     # while its prompt is computed
    under_way.began(slot, 12.7)                        # its first token is there
    under_way.at(now=12.8, moment=14.0, longest_s=5.0) # (1, 4000)
    under_way.remove(slot)

Pure: time is an argument. O(requests) for a moment, in one compiled pass; O(1) for others.
"""

from __future__ import annotations

import math

import numpy as np

from serving.scheduling.kernels.moments import decode_at

__all__ = ["UnderWay"]

_ROOM = 64


class UnderWay:
    """Requests by a number that `add` gives them."""

    def __init__(self) -> None:
        self._free = list(reversed(range(_ROOM)))
        self._begins = np.full(_ROOM, math.inf)
        self._waits = np.zeros(_ROOM, np.bool_)
        self._tokens = np.zeros(_ROOM, np.int64)

    def __len__(self) -> int:
        return len(self._begins) - len(self._free)

    def add(self, begins: float, tokens: int) -> int:
        """Take one in that is expected to decode from then on, this many tokens of context."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._begins[slot], self._waits[slot], self._tokens[slot] = begins, True, tokens
        return slot

    def began(self, slot: int, at: float) -> None:
        """It decodes since then."""
        self._begins[slot], self._waits[slot] = at, False

    def resize(self, slot: int, tokens: int) -> None:
        """Its context has another size."""
        self._tokens[slot] = tokens

    def remove(self, slot: int) -> None:
        """It ended."""
        self._begins[slot], self._waits[slot] = math.inf, False
        self._free.append(slot)

    def at(self, now: float, moment: float, longest_s: float) -> tuple[int, int]:
        """How many decode at a moment, `now` or later, and their tokens; each for `longest_s`.

        One that should have begun already, and has not, is expected to begin now.
        """
        found: tuple[int, int] = decode_at(
            self._begins, self._waits, self._tokens, now, moment, longest_s
        )
        return found

    def _grow(self) -> None:
        room = len(self._begins)
        self._begins = np.concatenate([self._begins, np.full(room, math.inf)])
        self._waits = np.concatenate([self._waits, np.zeros(room, np.bool_)])
        self._tokens = np.concatenate([self._tokens, np.zeros(room, np.int64)])
        self._free = list(reversed(range(room, 2 * room)))
