"""Copies of hot prefixes, made ahead of the requests that will ask for them.

    replication = Replication(4, index, ledger)
    replication.asked(chain)                # for each request, before it is placed
    for copy in replication.due(now):       # after each `WINDOW_S`
        ...                                 # send it

Algorithm 1 copies a prefix when a request is computed where it is not, and that request waits for
it. Here what was asked for more than once since the last look is brought to so many nodes: to those
with the least work, from whichever holder has given least. A prefix is what anybody had of a prompt
when it came. O(blocks) a request, O(prefixes x nodes) a look; nothing is kept from look to look.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from serving.scheduling.index import PrefixIndex
    from serving.scheduling.ledger import Ledger

__all__ = ["WINDOW_S", "Copy", "Replication"]

WINDOW_S = 60.0
ASKED_MIN = 2


class Copy(NamedTuple):
    """A prefix to bring to a node, which has the first `own` blocks of it."""

    chain: Sequence[int]
    own: int
    source: str
    target: str


class Replication:
    """Of one cluster; `copies` is how many nodes should have what is hot."""

    def __init__(self, copies: int, index: PrefixIndex, ledger: Ledger) -> None:
        self._copies = copies
        self._index = index
        self._ledger = ledger
        self._asked: Counter[int] = Counter()
        """By the last block of a prefix, which names all of it."""
        self._chains: dict[int, Sequence[int]] = {}

    def asked(self, chain: Sequence[int]) -> None:
        """A request with this prompt is there."""
        there = max(self._index.match(chain).values(), default=0)
        if there:
            end = chain[there - 1]
            self._asked[end] += 1
            self._chains[end] = chain[:there]

    def due(self, now: float) -> Iterator[Copy]:
        """What to copy now, the hottest first; counting begins anew."""
        asked, chains = self._asked, self._chains
        self._asked, self._chains = Counter(), {}
        work = {each.name: each.queue_s for each in self._ledger.prefill_views(now)}
        takes: Counter[str] = Counter()
        gives: Counter[str] = Counter()
        for end, count in asked.most_common():
            if count < ASKED_MIN:
                return
            chain = chains[end]
            match = self._index.match(chain)
            holders = [name for name, own in match.items() if own == len(chain)]
            if not holders:
                continue  # nobody has all of it any more
            others = sorted(work.keys() - holders, key=lambda name: (takes[name], work[name], name))
            for target in others[: max(0, self._copies - len(holders))]:
                source = min(holders, key=lambda name: gives[name])
                takes[target] += 1
                gives[source] += 1
                yield Copy(chain, match.get(target, 0), source, target)
