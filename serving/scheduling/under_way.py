"""When the requests under way decode, and where, in columns: a moment is one pass over all.

    slot = under_way.add(begins=12.5, tokens=4000, where="decode-0")    # while it is computed
    under_way.began(slot, 12.7)                         # its first token is there
    under_way.at("decode-0", now=12.8, moment=14.0, until=13.0, mean_s=5.0)     # (0.96, 3843.1)
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
        self._tokens = np.zeros(_ROOM, np.int64)
        self._where = np.zeros(_ROOM, np.int64)
        self._instances: dict[str, tuple[int, set[int]]] = {}
        """Those that have requests, each by its number, and which."""
        self._names: dict[int, str] = {}
        self._numbered = 0

    def __len__(self) -> int:
        return len(self._begins) - len(self._free)

    def add(self, begins: float, tokens: int, where: str) -> int:
        """Take one in that is expected to decode there from then on, this many tokens."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._begins[slot], self._tokens[slot] = begins, tokens
        self._enter(slot, where)
        return slot

    def began(self, slot: int, at: float) -> None:
        """It decodes since then."""
        self._begins[slot] = at

    def resize(self, slot: int, tokens: int) -> None:
        """Its context has another size."""
        self._tokens[slot] = tokens

    def move(self, slot: int, where: str) -> None:
        """Another instance decodes it."""
        self._leave(slot)
        self._enter(slot, where)

    def remove(self, slot: int) -> None:
        """It ended."""
        self._begins[slot] = math.inf
        self._leave(slot)
        self._free.append(slot)

    def at(
        self, where: str, now: float, moment: float, until: float, mean_s: float
    ) -> tuple[float, float]:
        """How many are expected to decode on an instance, and their tokens.

        Those that begin by `moment`, `now` or later, less those that end by `until`. Decodes last
        `mean_s` on average and are as likely to end in any second, however long they have lasted.
        """
        if where not in self._instances:
            return 0.0, 0.0
        number, _ = self._instances[where]
        found: tuple[float, float] = decode_at(
            self._begins, self._tokens, self._where, number, now, moment, until, mean_s
        )
        return found

    def _enter(self, slot: int, where: str) -> None:
        if where not in self._instances:
            self._numbered += 1
            self._instances[where] = self._numbered, set()
            self._names[self._numbered] = where
        number, slots = self._instances[where]
        slots.add(slot)
        self._where[slot] = number

    def _leave(self, slot: int) -> None:
        number = int(self._where[slot])
        where = self._names[number]
        slots = self._instances[where][1]
        slots.remove(slot)
        if not slots:
            del self._instances[where], self._names[number]

    def _grow(self) -> None:
        room = len(self._begins)
        self._begins = np.concatenate([self._begins, np.full(room, math.inf)])
        self._tokens = np.concatenate([self._tokens, np.zeros(room, np.int64)])
        self._where = np.concatenate([self._where, np.zeros(room, np.int64)])
        self._free = list(reversed(range(room, 2 * room)))
