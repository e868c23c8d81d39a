"""What of a prompt lies where, and what will, once what was assigned is computed.

    holdings = Holdings(index, name)
    found = holdings.find(tokens)          # Found(chain, matches, coming), in tokens
    holdings.expect("prefill-0", found.chain)
    ...
    holdings.settle("prefill-0", found.chain)   # computed, and told of; or never

An instance that was given a prompt will have its blocks by the time at which a later prompt leaves
its queue. Nobody can pull them before, so they count for that instance alone. Pure. O(blocks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from serving.scheduling.index import PrefixIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

__all__ = ["Expected", "Found", "Holdings"]


class Found(NamedTuple):
    """A prompt's blocks, and how many tokens of it each holder has, or will have."""

    chain: Sequence[Hashable]
    matches: Mapping[str, int]
    coming: Mapping[str, int]


class Expected:
    """Blocks that instances will have, once what they were given is computed."""

    def __init__(self) -> None:
        self._expected = PrefixIndex()
        self._counts: dict[str, dict[Hashable, int]] = {}
        """By holder, how many prompts each block is expected for."""

    def coming(self, chain: Sequence[Hashable]) -> Mapping[str, int]:
        """How many blocks of a prompt each of them will have."""
        return self._expected.match(chain)

    def expect(self, holder: str, chain: Sequence[Hashable]) -> None:
        """An instance was given a prompt; `settle` follows once for each of these."""
        if not chain:
            return
        counts = self._counts.get(holder)
        if counts is None:  # as often as not
            self._counts[holder] = dict.fromkeys(chain, 1)
        else:
            for block in chain:
                counts[block] = counts.get(block, 0) + 1
        self._expected.add(holder, chain)

    def settle(self, holder: str, chain: Sequence[Hashable]) -> None:
        """It is computed, and the index has it; or it will not be."""
        if not chain:
            return
        counts, gone = self._counts[holder], []
        for block in chain:
            left = counts.get(block, 0)
            if left > 1:
                counts[block] = left - 1
            elif left:  # else the chain names it twice
                del counts[block]
                gone.append(block)
        self._expected.discard(holder, gone)
        if not counts:
            del self._counts[holder]
            self._expected.forget(holder)


class Holdings(Expected):
    """An index of what is there, and what is expected beside it.

    `name` takes tokens and returns the names of their whole blocks and the size of a block.
    """

    def __init__(
        self,
        index: PrefixIndex,
        name: Callable[[Sequence[int]], tuple[Sequence[Hashable], int]],
    ) -> None:
        super().__init__()
        self._index = index
        self._name = name

    def find(self, tokens: Sequence[int]) -> Found:
        """Who has how much of a prompt, and who will."""
        chain, size = self._name(tokens)
        there, coming = self._index.match(chain), self.coming(chain)
        return Found(
            chain,
            {holder: count * size for holder, count in there.items()},
            {holder: count * size for holder, count in coming.items()},
        )
