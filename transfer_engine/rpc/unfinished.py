"""Frames that began and have not ended, of all connections of a server: their bytes, their time.

A peer may begin a frame as long as its operation allows and not end it, on as many connections as
it gets. So the bytes of all together are bounded, and where they are too many, whoever has the most
is dropped; and a frame that began has to go on: it ends, or grows by `GROWTH_BYTES`, within
`STALL_S`, or its connection ends.

What is whole when it arrives never gets here. Cost: a dict entry for each frame that comes in more
than one read, and a look at every connection each ten seconds.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from transfer_engine.rpc.entrance import GROWTH_BYTES, STALL_S

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["SWEEP_S", "Unfinished"]

SWEEP_S = STALL_S / 3
"""How often it is looked for frames that do not go on."""
_RELIEF = 0.75
"""Where there are too many bytes, so much of what is allowed remains: not each read looks anew."""


class _Owner(Protocol):
    """A connection; `beginning` is what it has of a frame, the same object until that ends."""

    @property
    def beginning(self) -> bytearray: ...


OwnerT = TypeVar("OwnerT", bound=_Owner)


def _taken(beginning: bytearray) -> int:
    """What is allocated for the beginning of a frame: an eighth more than it has."""
    return beginning.__alloc__() if beginning else 0


class _Mark:
    __slots__ = ("beginning", "bytes", "counted", "since")

    def __init__(self, beginning: bytearray, since: float) -> None:
        self.beginning = beginning
        self.bytes = len(beginning)
        self.counted = 0
        self.since = since


class Unfinished(Generic[OwnerT]):
    """The beginnings of frames on one server. `clock` is time.monotonic, or what a test moves."""

    def __init__(self, bytes_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._bytes_max = bytes_max
        self._clock = clock
        self._bytes = 0
        self._marks: dict[OwnerT, _Mark] = {}

    def grew(self, owner: OwnerT) -> list[OwnerT]:
        """Note that a read ended no frame; return who has to go."""
        mark, beginning = self._marks.get(owner), owner.beginning
        if mark is None or mark.beginning is not beginning:
            mark = self._mark(owner)
        taken = _taken(beginning)
        self._bytes += taken - mark.counted
        mark.counted = taken
        if self._bytes <= self._bytes_max:
            return []
        held = {each: _taken(each.beginning) for each in self._marks}
        self._marks = {each: self._marks[each] for each, size in held.items() if size}
        self._bytes = sum(held.values())
        if self._bytes <= self._bytes_max:
            return []
        dropped = []
        for each in sorted(self._marks, key=lambda each: held[each], reverse=True):
            if self._bytes <= _RELIEF * self._bytes_max:
                break
            dropped.append(each)
            self.forget(each)
            self._bytes -= held[each]
        return dropped

    def stalled(self, owners: Iterable[OwnerT]) -> list[OwnerT]:
        """Look at all connections; return those whose frame does not go on."""
        now = self._clock()
        found = []
        for owner in owners:
            beginning = owner.beginning
            if not beginning:
                if self._marks:
                    self._marks.pop(owner, None)
                continue
            mark = self._marks.get(owner)
            if mark is None or mark.beginning is not beginning:
                self._mark(owner)
            elif len(beginning) - mark.bytes >= GROWTH_BYTES:
                mark.bytes, mark.since = len(beginning), now
            elif now - mark.since > STALL_S:
                found.append(owner)
        return found

    def forget(self, owner: OwnerT) -> None:
        """Let go of a connection that ends."""
        self._marks.pop(owner, None)

    def _mark(self, owner: OwnerT) -> _Mark:
        mark = self._marks[owner] = _Mark(owner.beginning, self._clock())
        return mark
