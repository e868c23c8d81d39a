"""The stream of what happened to objects, numbered without gaps, for indexes elsewhere.

A ring of fixed length: a follower that asks for a number the ring no longer holds is told so,
takes a snapshot and goes on from the number the snapshot names. Numbers start anew with every ring;
whoever serves them has to say whose they are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import context as places
from mooncake_store.core.records import EventKind, Flag, Tier

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.context import Context

__all__ = ["Events"]


class Events:
    """The newest `kept` events of a shard. Numbers start at 1.

    Kernels that change objects write into the ring, and count, themselves.
    """

    def __init__(self, kept: int, ring: NDArray[Any], context: Context) -> None:
        assert len(ring) >= kept, f"{len(ring)} events find room, {kept} are to be kept"
        self.kept = kept
        self.ring = context.bind(places.EVENTS, ring)
        self._words = context.words
        self._words[places.EVENTS_KEPT] = kept
        self._words[places.EVENTS_NEXT] = 1

    @property
    def next_number(self) -> int:
        """The number the next event will have."""
        return int(self._words[places.EVENTS_NEXT])

    @next_number.setter
    def next_number(self, number: int) -> None:
        self._words[places.EVENTS_NEXT] = number

    def stored(self, rows: NDArray[Any], cold: NDArray[Any], row: int) -> None:
        """Record that one object, or its new generation, can be read."""
        self._record(EventKind.STORED, rows, cold, row)

    def removed(self, rows: NDArray[Any], cold: NDArray[Any], row: int) -> None:
        """Record that one object cannot be read under this key any more."""
        self._record(EventKind.REMOVED, rows, cold, row)

    def _record(self, kind: EventKind, rows: NDArray[Any], cold: NDArray[Any], row: int) -> None:
        if self.kept:
            place = (self.next_number - 1) % self.kept
            event = self.ring[place : place + 1]
            event["digest_lo"] = rows["digest_lo"][row : row + 1].view(np.uint64)
            event["digest_hi"] = rows["digest_hi"][row : row + 1].view(np.uint64)
            event["kind"], event["tenant"] = kind, cold["tenant"][row]
            event["tier"] = Tier.MEMORY
            if rows["flags"][row] & Flag.OFF_MEMORY:
                far = cold["tiers"][row] == 1 << Tier.COLD
                event["tier"] = Tier.COLD if far else Tier.DISK
            self.next_number += 1

    def cleared(self, tenant: int) -> None:
        """Record that a tenant has no objects left."""
        if self.kept:
            self.ring[(self.next_number - 1) % self.kept] = (0, 0, EventKind.CLEARED, tenant, 0)
            self.next_number += 1

    def since(self, number: int, limit: int = 65_536) -> tuple[int, NDArray[Any], bool]:
        """Return (number of the first, events, gap): those from `number` on, at most `limit`.

        `gap` says that events between `number` and the first one returned are no longer held.
        """
        oldest = max(1, self.next_number - self.kept)
        first = max(number, oldest)
        count = max(0, min(limit, self.next_number - first))
        at = (first - 1 + np.arange(count)) % max(self.kept, 1)
        return first, self.ring[at], number < oldest
