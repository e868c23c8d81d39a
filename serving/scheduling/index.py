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
        table = self._table
        added = 0
        for block in blocks:
            held = table.get(block, 0)
            if not held & bit:
                table[block] = held | bit
                added += 1
        self._counts[holder] += added

    def discard(self, holder: str, blocks: Iterable[Hashable]) -> None:
        """A holder has these blocks no longer; those it had not are ignored."""
        bit = self._bits.get(holder, 0)
        for block in blocks:
            self._drop(holder, bit, block)

    def _drop(self, holder: str, bit: int, block: Hashable) -> None:
        held = self._table.get(block, 0)
        if not held & bit:
            return
        if held == bit:
            del self._table[block]
        else:
            self._table[block] = held & ~bit
        self._counts[holder] -= 1

    def forget(self, holder: str, which: Callable[[Hashable], bool] | None = None) -> None:
        """A holder has nothing left, or nothing of what `which` picks. O(blocks)."""
        bit = self._bits.get(holder, 0)
        if not bit:
            return
        if self._counts[holder]:  # else nobody need look through all
            for block in [block for block, held in self._table.items() if held & bit]:
                if which is None or which(block):
                    self._drop(holder, bit, block)
        if which is None:
            del self._bits[holder], self._counts[holder]

    def count(self, block: Hashable) -> int:
        """How many have a block."""
        return self._table.get(block, 0).bit_count()

    def match(self, chain: Sequence[Hashable]) -> dict[str, int]:
        """How many blocks from the start of the chain each holder has, without those of none.

        A hole ends a match: blocks behind it cannot be used without the ones before.
        """
        table = self._table
        names = {bit: name for name, bit in self._bits.items()}
        found: dict[str, int] = {}
        alive = -1
        for length, block in enumerate(chain):
            left = alive & table.get(block, 0)
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
            taken = 0
            for each in self._bits.values():
                taken |= each
            bit = ~taken & (taken + 1)  # the lowest bit that nobody has
            self._bits[holder] = bit
            self._counts[holder] = 0
        return bit

    def check_integrity(self) -> None:
        """Counts and table agree, no block is held by nobody. For tests; O(blocks x holders)."""
        assert all(self._table.values())
        for holder, bit in self._bits.items():
            assert bit.bit_count() == 1
            held = sum(1 for holders in self._table.values() if holders & bit)
            assert held == self._counts[holder]
        assert len(set(self._bits.values())) == len(self._bits)


def _credit(found: dict[str, int], names: dict[int, str], bits: int, length: int) -> None:
    while bits:
        bit = bits & -bits
        found[names[bit]] = length
        bits ^= bit
