"""The KV that a node keeps in its memory: whole prefixes, by an eviction policy of the product.

A block is in one of `slots` places, and the policy orders places, so that it needs no more memory
than the node has blocks, however many blocks a trace names. What is inserted leaves the request's
first blocks for last: a prefix without its beginning is of no use. O(blocks) a call.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

import numpy as np

from eviction.base import picking

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eviction import EvictionPolicy

__all__ = ["NodeCache"]

_NOWHERE = -1


class NodeCache:
    """Blocks by name. `make` makes a policy for so many places."""

    def __init__(self, slots: int, make: Callable[[int], EvictionPolicy]) -> None:
        self._places: dict[int, int] = {}
        self._names: dict[int, int] = {}
        self._free = list(range(slots - 1, -1, -1))
        self._policy = make(max(1, slots))
        self._slots = slots
        self._depths = np.arange(slots - 1, -1, -1, dtype=np.int32)
        self._evictable = np.ones(max(1, slots), np.bool_)
        self._pick = picking(eligible=self._evictable.__getitem__)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks from the start of a chain are here."""
        places = self._places
        for count, name in enumerate(chain):
            if name not in places:
                return count
        return len(chain)

    def on_disk(self, chain: Sequence[int]) -> int:
        """How many of these blocks take a disk to be read."""
        return 0

    def remove(self, names: Sequence[int]) -> None:
        """Keep blocks that are here no longer."""
        freed = [self._places.pop(name) for name in names]
        for place in freed:
            del self._names[place]
        self._free += freed
        self._policy.remove(np.array(freed, np.int64))

    def insert(self, chain: Sequence[int]) -> tuple[list[int], list[int]]:
        """Keep a prompt's blocks; returns those that are new here and those that went for them.

        Of a prompt that is longer than the cache the beginning is kept.
        """
        places, free, names = self._places, self._free, self._names
        chain = chain[: self._slots]
        used = list(map(places.get, chain, repeat(_NOWHERE)))
        count = used.count(_NOWHERE)
        gone = self._make_room(count - len(free), used) if count > len(free) else []
        fresh: list[int] = []
        if count:
            first = used.index(_NOWHERE)
            fresh = list(chain[first:])
            if len(fresh) > count:  # some behind the first are here
                fresh = [name for name in fresh if name not in places]
            taken = free[: -count - 1 : -1]
            del free[-count:]
            names.update(zip(taken, fresh, strict=True))
            places.update(zip(fresh, taken, strict=True))
            used[first:] = map(places.__getitem__, chain[first:])
        used.reverse()
        self._policy.insert(np.array(used, np.int64), self._depths[self._slots - len(used) :])
        return fresh, gone

    def _make_room(self, count: int, used: list[int]) -> list[int]:
        """Give up so many blocks, none of which is `used`."""
        victims = self._policy.victims(count)
        if not set(used).isdisjoint(victims.tolist()):
            held = [place for place in used if place != _NOWHERE]
            self._evictable[held] = False
            victims = self._policy.victims(count, self._pick)
            self._evictable[held] = True
        self._policy.remove(victims)
        places, freed = self._places, victims.tolist()
        gone = list(map(self._names.pop, freed))
        for name in gone:
            del places[name]
        self._free += freed
        return gone
