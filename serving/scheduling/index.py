"""Which blocks lie where: the longest prefix of a prompt that each holder has.

    index = PrefixIndex()
    index.add("prefill-0", chain[:3])
    index.add("pool", chain[:8])
    index.match(chain)          # {"prefill-0": 3, "pool": 8}

A holder is whoever can have blocks: an instance with a cache of its own, or the pool. Blocks are
any hashable names that chain (a block's name covers its whole prefix), so a match is the longest
run from the start. It is fed by events (the store's stream, engines' publishers), never by asking.

Every block maps to one integer whose bits are its holders; a match walks the chain once for all of
them and stops where nobody is left. So a match costs O(blocks of the longest match + holders), an
event O(1), a block about 150 bytes. No sockets, clocks or globals: a simulator uses it as it is.
"""

from __future__ import annotations

from itertools import repeat
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

__all__ = ["POOL", "PrefixIndex"]

POOL = "pool"
"""The pool's name as a holder."""


class PrefixIndex:
    """Blocks by holder. Holders appear when they are first named."""

    def __init__(self) -> None:
        self._table: dict[Hashable, int] = {}
        self._bits: dict[str, int] = {}
        self._names: dict[int, str] = {}
        """The holders of bits."""
        self._taken = 0
        """All bits that somebody has."""
        self._counts: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._table)

    @property
    def holders(self) -> dict[str, int]:
        """Every holder with the number of blocks it has."""
        return dict(self._counts)

    def add(self, holder: str, blocks: Iterable[Hashable]) -> None:
        """A holder has these blocks now; those it had before stay."""
        bit = self._bit(holder)
        table, blocks = self._table, list(blocks)
        added = 0
        for block, held in zip(blocks, map(table.get, blocks), strict=True):
            if held is None:
                table[block] = bit
                added += 1
            elif not held & bit:
                table[block] = held | bit
                added += 1
        self._counts[holder] += added

    def discard(self, holder: str, blocks: Iterable[Hashable]) -> None:
        """A holder has these blocks no longer; those it had not are ignored."""
        bit = self._bits.get(holder, 0)
        table, blocks = self._table, list(blocks)
        dropped = 0
        for block, held in zip(blocks, map(table.get, blocks), strict=True):
            if held == bit:
                del table[block]
                dropped += 1
            elif held is not None and held & bit:
                table[block] = held ^ bit
                dropped += 1
        if dropped:
            self._counts[holder] -= dropped

    def forget(self, holder: str, which: Callable[[Hashable], bool] | None = None) -> None:
        """A holder has nothing left, or nothing of what `which` picks. O(blocks)."""
        bit = self._bits.get(holder, 0)
        if not bit:
            return
        if self._counts[holder]:  # else nobody need look through all
            self.discard(
                holder,
                [
                    block
                    for block, held in self._table.items()
                    if held & bit and (which is None or which(block))
                ],
            )
        if which is None:
            del self._bits[holder], self._counts[holder], self._names[bit]
            self._taken ^= bit

    def count(self, block: Hashable) -> int:
        """How many have a block."""
        return self._table.get(block, 0).bit_count()

    def match(self, chain: Sequence[Hashable]) -> dict[str, int]:
        """How many blocks from the start of the chain each holder has, without those of none.

        A hole ends a match: blocks behind it cannot be used without the ones before.
        """
        table, names = self._table, self._names
        found: dict[str, int] = {}
        alive = -1
        for length, held in enumerate(map(table.get, chain, repeat(0))):
            left = alive & held
            if left != alive:
                # The first block shows who takes part at all; later ones show who drops out.
                _credit(found, names, alive & ~left if length else 0, length)
                alive = left
                if not alive:
                    return found
        _credit(found, names, alive if chain else 0, len(chain))
        return found

    def _bit(self, holder: str) -> int:
        bit = self._bits.get(holder)
        if bit is None:
            bit = ~self._taken & (self._taken + 1)  # the lowest bit that nobody has
            self._taken |= bit
            self._bits[holder], self._names[bit] = bit, holder
            self._counts[holder] = 0
        return bit

    def check_integrity(self) -> None:
        """Counts and table agree, no block is held by nobody. For tests; O(blocks x holders)."""
        assert all(self._table.values())
        for holder, bit in self._bits.items():
            assert bit.bit_count() == 1
            held = sum(1 for holders in self._table.values() if holders & bit)
            assert held == self._counts[holder]
        assert self._names == {bit: holder for holder, bit in self._bits.items()}
        assert self._taken == sum(self._bits.values())


def _credit(found: dict[str, int], names: dict[int, str], bits: int, length: int) -> None:
    while bits:
        bit = bits & -bits
        found[names[bit]] = length
        bits ^= bit
