"""Things that happen later, in batches: a wheel of time slots, each a list of column batches.

Used for quarantined space, soft pins and late writers, where thousands of entries share a
deadline; a heap of Python objects would cost more than the requests that fill it. Entries come
due up to one slot late, never early; who takes a bounded number at a time gets the rest later.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Wheel", "due_at"]

SLOT_NS = 10_000_000


def due_at(deadlines: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return when entries with these deadlines come due."""
    return -(-deadlines // SLOT_NS) * SLOT_NS


class Wheel:
    """Deadline -> rows of an int64 table with a fixed number of columns. O(slots touched)."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._slots: dict[int, list[NDArray[np.int64]]] = {}
        self._order: list[int] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, deadlines: NDArray[np.int64], entries: NDArray[np.int64]) -> None:
        """Add one row of `entries` per deadline."""
        slots = -(-deadlines // SLOT_NS)
        self._count += len(slots)
        if len(slots) and slots[0] == slots[-1] and (slots == slots[0]).all():
            self._append(int(slots[0]), entries)
            return
        for slot in np.unique(slots):
            self._append(int(slot), entries[slots == slot])

    def _append(self, slot: int, entries: NDArray[np.int64]) -> None:
        if slot not in self._slots:
            self._slots[slot] = []
            heapq.heappush(self._order, slot)
        self._slots[slot].append(np.array(entries))

    def due(self, now: int) -> bool:
        """Whether anything is due."""
        return bool(self._order) and self._order[0] * SLOT_NS <= now

    def pop(self, now: int, limit: int) -> NDArray[np.int64] | None:
        """Remove and return the `limit` entries longest due, None when nothing is."""
        if not self.due(now):
            return None
        due: list[NDArray[np.int64]] = []
        left = limit
        while left > 0 and self.due(now):
            taken = self._take(self._order[0], left)
            due += taken
            left -= sum(map(len, taken))
        if not due:
            return None  # everything was taken or discarded before
        out = np.concatenate(due)
        self._count -= len(out)
        return out

    def _take(self, slot: int, limit: int) -> list[NDArray[np.int64]]:
        """Remove up to `limit` entries of the earliest slot, which goes with its last one."""
        batches = self._slots[slot]
        whole = 0
        for batch in batches:
            if len(batch) > limit:
                break
            limit -= len(batch)
            whole += 1
        taken = batches[:whole]
        del batches[:whole]
        if not batches:
            del self._slots[slot]
            heapq.heappop(self._order)
        elif limit:
            taken.append(batches[0][:limit])
            batches[0] = batches[0][limit:]
        return taken

    def entries(self) -> NDArray[np.int64]:
        """Return all entries, in no order."""
        batches = [batch for slot in self._slots.values() for batch in slot]
        if not batches:
            return np.empty((0, self._columns), np.int64)
        return np.concatenate(batches)

    def at(self, deadline: int) -> NDArray[np.int64]:
        """Return all entries of one deadline."""
        batches = self._slots.get(-(-deadline // SLOT_NS), [])
        return np.concatenate([np.empty((0, self._columns), np.int64), *batches])

    def timed(self) -> NDArray[np.int64]:
        """Return all entries, each with when it comes due as one more column."""
        batches = [
            np.insert(batch, self._columns, slot * SLOT_NS, axis=1)
            for slot, batches in self._slots.items()
            for batch in batches
        ]
        return np.concatenate([np.empty((0, self._columns + 1), np.int64), *batches])

    def take(
        self, deadlines: set[int], column: int, values: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """Remove and return the entries of these deadlines whose `column` is one of `values`."""
        taken = [np.empty((0, self._columns), np.int64)]
        for slot in {-(-deadline // SLOT_NS) for deadline in deadlines}:
            left = []
            for batch in self._slots.get(slot, ()):
                match = np.isin(batch[:, column], values)
                taken.append(batch[match])
                if not match.all():
                    left.append(batch[~match])
            if slot in self._slots:
                self._slots[slot] = left
        out = np.concatenate(taken)
        self._count -= len(out)
        return out

    def latest(self, column: int, value: int) -> int:
        """Return when the last entry whose `column` equals `value` comes due, 0 if none is."""
        slots = [
            slot
            for slot, batches in self._slots.items()
            if any((batch[:, column] == value).any() for batch in batches)
        ]
        return max(slots, default=0) * SLOT_NS

    def discard(self, column: int, value: int) -> int:
        """Remove the entries whose `column` equals `value`; return when the last came due."""
        latest = 0
        for slot, batches in self._slots.items():
            for i, batch in enumerate(batches):
                match = batch[:, column] == value
                if match.any():
                    latest = max(latest, slot * SLOT_NS)
                    self._count -= int(np.count_nonzero(match))
                    batches[i] = batch[~match]
        return latest
