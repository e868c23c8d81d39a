"""Where the master is, when several addresses are named: which are asked, and for how long each.

    masters = Masters(split_addresses("10.0.0.5:50051,10.0.0.6:50051"))
    search = masters.search(until)       # yields attempts, is sent what came of them

One of several masters leads; the others refuse until they take over, or do not listen. The one that
answered last is asked first, those that were silent last. A host that is gone refuses nothing, its
packets vanish, so nobody gets all of the time: it goes round three times, for longer each time,
since one that is busy may only need longer, and another may begin to lead meanwhile. Who asks ends
at once when all refuse. With one address it has all.

What an attempt is, its caller decides; no I/O. Threads may share it: what one of them loses to
another is the order. O(addresses).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

from transfer_engine.errors import (
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rpc.address import Address

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Attempt", "Masters", "Search"]

T = TypeVar("T")

_SHARES = (0.1, 0.3, 1.0)
"""Of the time that is left, what each round over the addresses may use."""
_SILENCE = 0.9
"""Of the time that an address was given: who takes that long was cut off."""


class Attempt(NamedTuple):
    """Whom to ask for the map of the cluster, and how long to wait."""

    place: Address
    timeout_s: float


Search: TypeAlias = Generator[Attempt, T | StoreError, T]


class Masters:
    """The addresses of one pool's master; `leader` is the one that answered last."""

    def __init__(self, places: Iterable[tuple[str, int]]) -> None:
        self.named = tuple(Address(*place) for place in places)
        self.leader = self.named[0]
        self._order = list(self.named)

    @property
    def several(self) -> bool:
        """Whether there is another one to ask."""
        return len(self.named) > 1

    def __str__(self) -> str:
        return ",".join(map(str, self.named))

    def search(self, until: float) -> Search[T]:
        """Ask one after the other until one answers; return its answer.

        Raises what the only one said, or an error that tells what each of them said.
        """
        said: dict[Address, StoreError] = {}
        for share in _SHARES if self.several else (1.0,):
            asked, silent, began = list(self._order), [], time.monotonic()
            ends = began + share * (until - began)
            for at, place in enumerate(asked):
                began = time.monotonic()
                if began >= until and said:
                    break
                timeout_s = (ends - began) / (len(asked) - at)
                outcome = yield Attempt(place, timeout_s)
                if not isinstance(outcome, StoreError):
                    self.leader = place
                    self._order = sorted(self._order, key=place.__ne__)
                    return outcome
                said[place] = outcome
                if time.monotonic() - began >= _SILENCE * timeout_s:
                    silent.append(place)
            if not silent:
                break
            self._order = sorted(self._order, key=silent.__contains__)
        raise self._refusal(said)

    def _refusal(self, said: dict[Address, StoreError]) -> StoreError:
        """Return what it means that these failed so."""
        if not self.several:
            return said[self.leader].again()
        each = [f"{place}: {said[place].what}" for place in self.named if place in said]
        kinds = {type(error) for error in said.values()}
        alike = len(kinds) == 1 and kinds.isdisjoint({PeerLostError, TransferTimeoutError})
        first = next(iter(said.values()))
        return (type(first) if alike else UnavailableError)(
            f"none of {len(self.named)} masters answers: {'; '.join(each)}",
            operation="connect",
            advice=first.advice if alike else None,
        )
