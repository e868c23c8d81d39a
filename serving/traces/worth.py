"""What memory is worth to a pool: what one of each size would have found of a trace, and saved.

    worth = Worth(trace, hardware, block_bytes)
    worth.size(64 << 30).saved_s
    worth.knee()

The model is that of `eviction.simulate`: one pool in which all requests look, one after the other,
and find whole prefixes. With lru every size is known from one pass; what other policies would make
of one is replayed (`compare`). What is found saves the accelerators the computing of it and costs
them its load, as `Hardware` has it; a block of a prompt saves what it takes off with all before it
found already, so that savings add up.

It does not model time: who waits for whom, copies of one block, or what is read from where. Cost:
O(blocks log blocks) for the pass and a few arrays of blocks; a size is then O(1), a policy 20 to
80 microseconds a request.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from eviction.capacities import least_capacities
from eviction.registry import STORE_POLICIES
from eviction.simulate import hits_by_request
from eviction.trace import BLOCK_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from eviction import Trace
    from serving.simulator.hardware import Hardware

__all__ = ["COMPARED", "LIMIT", "Found", "Size", "Worth"]

GIB = 1 << 30
FEWEST_ROWS = 4
"""So many times the first size is doubled at least, however small all of it is."""
LIMIT = "opt"
"""Knows the future, so no store can run it: how far policies could come."""
COMPARED = (*STORE_POLICIES, LIMIT)


class Found(NamedTuple):
    """What a pool found of a trace, as shares of all, and the seconds that saved."""

    blocks: float
    tokens: float
    saved_s: float


class Size(NamedTuple):
    """A pool of some size with lru."""

    size_bytes: int
    blocks: int
    """That it has room for."""
    found: Found

    @classmethod
    def nothing(cls) -> Size:
        """No pool at all."""
        return cls(0, 0, Found(0.0, 0.0, 0.0))


class Worth:
    """What pools would make of one trace."""

    def __init__(self, trace: Trace, hardware: Hardware, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._trace = trace
        counts = np.diff(trace.offsets)
        depths = np.arange(len(trace.ids)) - np.repeat(trace.offsets[:-1], counts)
        lengths = np.repeat(trace.input_tokens, counts)
        ends = np.minimum((depths + 1) * BLOCK_TOKENS, lengths)
        begins = np.minimum(depths * BLOCK_TOKENS, lengths)
        self._tokens = ends - begins
        self._seconds = hardware.saved_s(lengths, ends) - hardware.saved_s(lengths, begins)
        needs = least_capacities(trace.ids, trace.offsets)
        # Of each capacity in blocks; entry 0 takes what no pool finds, and is none.
        self._curve = [
            _up_to(needs, weights) for weights in (np.ones(len(needs)), self._tokens, self._seconds)
        ]
        self.most_blocks = len(self._curve[0]) - 1
        """The fewest that find all there is to find."""

    def size(self, size_bytes: int) -> Size:
        """What a pool of so many bytes finds with lru."""
        blocks = size_bytes // self.block_bytes
        at = min(blocks, self.most_blocks)
        return Size(size_bytes, blocks, self._found(*(float(each[at]) for each in self._curve)))

    def sizes(self, *, also: Iterable[int] = ()) -> list[Size]:
        """Powers of two of GiB, up to the size that finds all; those in `also`, in their place."""
        all_bytes = self.most_blocks * self.block_bytes
        first = GIB
        while first > 1 and first << FEWEST_ROWS > all_bytes:
            first >>= 1
        steps = {all_bytes, *also} - {0}
        while first < all_bytes:
            if first >= self.block_bytes:
                steps.add(first)
            first *= 2
        return [self.size(each) for each in sorted(steps)]

    def knee(self) -> Size | None:
        """The size from which on memory saves less a GiB than on average up to what finds all.

        It is the highest point of the curve of seconds saved above the straight line from nothing
        to all. None where nothing is saved.
        """
        saved = self._curve[2]
        if saved[-1] <= 0:
            return None
        line = saved[-1] * np.arange(len(saved)) / self.most_blocks
        return self.size((1 + int(np.argmax((saved - line)[1:]))) * self.block_bytes)

    def compare(self, size_bytes: int, policies: Iterable[str] = COMPARED) -> dict[str, Found]:
        """What a pool of a size finds by policy, the one that saves most first; `LIMIT` is last.

        Raises ValueError for a size with no room for a block.
        """
        blocks = size_bytes // self.block_bytes
        found = {name: self._replayed(name, blocks) for name in policies}
        order = sorted(found, key=lambda name: (name == LIMIT, -found[name].saved_s))
        return {name: found[name] for name in order}

    def _replayed(self, policy: str, blocks: int) -> Found:
        if policy == "lru":
            return self.size(blocks * self.block_bytes).found
        trace = self._trace
        hits = hits_by_request(trace.ids, trace.offsets, policy, blocks)
        depths = np.arange(len(trace.ids)) - np.repeat(trace.offsets[:-1], np.diff(trace.offsets))
        hit = depths < np.repeat(hits, np.diff(trace.offsets))
        return self._found(
            float(hits.sum()), float(self._tokens[hit].sum()), float(self._seconds[hit].sum())
        )

    def _found(self, blocks: float, tokens: float, saved_s: float) -> Found:
        return Found(
            blocks / max(1, len(self._tokens)), tokens / max(1, int(self._tokens.sum())), saved_s
        )


def _up_to(needs: NDArray[np.int64], weights: NDArray[np.generic]) -> NDArray[np.float64]:
    """The sum of the weights that each capacity is enough for, by capacity."""
    sums = np.bincount(needs, weights)
    sums[:1] = 0.0
    return np.cumsum(sums) if len(sums) else np.zeros(1)
