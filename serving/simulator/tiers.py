"""A node's memory with a disk below it: what leaves memory goes down, what is used comes up.

A block is in one of the two. Each has an eviction policy of its own, and what leaves the disk is
gone. Blocks go down in the background, and coming up takes the time of the disk.

The product's index knows holders and not what they hold blocks in, so the scheduler takes a prefix
on a node's disk for one in its memory. What loading takes is then learnt, as in production, and is
the mean of both: a prompt whose prefix lies on the disk waits for longer than was predicted. Where
another node pulls a prefix, its owner reads it first; a disk is never too busy for that.

`length_aware` is told on the disk how late a block left memory instead of its place in the prompt.
O(blocks) a call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.simulator.cache import NodeCache

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from eviction import EvictionPolicy

__all__ = ["TieredCache"]


class TieredCache(NodeCache):
    """Blocks by name, in memory or on disk."""

    def __init__(self, slots: int, disk_slots: int, make: Callable[[int], EvictionPolicy]) -> None:
        super().__init__(slots, make)
        self._disk = NodeCache(disk_slots, make)

    def __len__(self) -> int:
        return super().__len__() + len(self._disk)

    def match(self, chain: Sequence[int]) -> int:
        """How many blocks from the start of a chain are here."""
        places, disk = self._places, self._disk
        for count, name in enumerate(chain):
            if name not in places and name not in disk:
                return count
        return len(chain)

    def on_disk(self, chain: Sequence[int]) -> int:
        """How many of these blocks lie on disk."""
        return sum(name in self._disk for name in chain)

    def insert(self, chain: Sequence[int]) -> tuple[list[int], list[int]]:
        """Keep a prompt's blocks in memory; returns those that are new here and those that went."""
        chain = chain[: self._slots]
        up = [name for name in chain if name in self._disk]
        self._disk.remove(up)
        fresh, down = super().insert(chain)
        down.reverse()  # what was the last to leave is worth the most
        kept, lost = self._disk.insert(down)
        lost += down[len(kept) :]  # for which the whole disk had no room
        came = set(up)
        return [name for name in fresh if name not in came], lost
