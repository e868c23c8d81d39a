"""The KV that a node keeps in its memory: whole prefixes, by an eviction policy of the product.

A block is in one of `slots` places, and the policy orders places, so that it needs no more memory
than the node has blocks, however many blocks a trace names. What is inserted leaves the request's
first blocks for last: a prefix without its beginning is of no use. O(blocks) a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from eviction.base import picking

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eviction import EvictionPolicy

__all__ = ["NodeCache"]


class NodeCache:
    """Blocks by name. `make` makes a policy for so many places."""

    def __init__(self, slots: int, make: Callable[[int], EvictionPolicy]) -> None:
        self._places: dict[int, int] = {}
        self._names = [0] * slots
        self._free = list(range(slots - 1, -1, -1))
        self._policy = make(max(1, slots))
        self._slots = slots
        self._evictable = np.ones(max(1, slots), np.bool_)
        self._pick = picking(eligible=self._evictable.__getitem__)

    def __len__(self) -> int:
        return len(self._places)

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks from the start of a chain are here."""
        places = self._places
        for count, name in enumerate(chain):
            if name not in places:
                return count
        return len(chain)

    def insert(self, chain: Sequence[int]) -> tuple[list[int], list[int]]:
        """Keep a prompt's blocks; returns those that are new here and those that went for them.

        Of a prompt that is longer than the cache the beginning is kept.
        """
        places, policy = self._places, self._policy
        chain = chain[: self._slots]
        fresh = [name for name in chain if name not in places]
        gone = self._make_room(len(fresh), chain) if len(fresh) > len(self._free) else []
        for name in fresh:
            place = places[name] = self._free.pop()
            self._names[place] = name
        used = np.array([places[name] for name in chain], np.int64)[::-1].copy()
        policy.insert(used, np.arange(len(chain) - 1, -1, -1, dtype=np.int32))
        return fresh, gone

    def _make_room(self, count: int, chain: Sequence[int]) -> list[int]:
        places, evictable = self._places, self._evictable
        held = [places[name] for name in chain if name in places]
        evictable[held] = False
        victims = self._policy.victims(count - len(self._free), self._pick)
        evictable[held] = True
        self._policy.remove(victims)
        gone = [self._names[place] for place in victims.tolist()]
        for name in gone:
            self._free.append(places.pop(name))
        return gone
