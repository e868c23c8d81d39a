"""Prompts whose beginning another prompt here is about to have computed: they wait for it.

Of several prompts that begin alike and come together, the first one computes the beginning and the
others find it among the blocks that the worker keeps. Of the computing thread. Cost: O(blocks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["Coming"]

Who = TypeVar("Who")


class Coming(Generic[Who]):
    """Blocks that somebody looks for or computes, by name, and who waits for them."""

    def __init__(self) -> None:
        self._who: dict[bytes, Who] = {}
        self._blocks: dict[Who, Sequence[bytes]] = {}
        self._waiting: dict[bytes, list[Callable[[], object]]] = {}

    def begin(self, who: Who, blocks: Sequence[bytes]) -> None:
        """Somebody looks for these blocks, and computes those that are not found."""
        mine = [name for name in blocks if self._who.setdefault(name, who) is who]
        self._blocks[who] = mine

    def found(self, who: Who, count: int) -> None:
        """The first of them are there for anybody."""
        mine = self._blocks.get(who)
        if mine and count > 0:
            self._blocks[who] = mine[count:]
            self._free(mine[:count])

    def end(self, who: Who) -> None:
        """What somebody computed is kept, or will not be. Idempotent."""
        self._free(self._blocks.pop(who, ()))

    def wait(self, block: bytes, then: Callable[[], object]) -> Who | None:
        """Call `then` when a block is there, or will not be; return who computes it, if anybody."""
        who = self._who.get(block)
        if who is not None:
            self._waiting.setdefault(block, []).append(then)
        return who

    def _free(self, blocks: Sequence[bytes]) -> None:
        waited: list[Callable[[], object]] = []
        for name in blocks:
            del self._who[name]
            waited += self._waiting.pop(name, ())
        for then in waited:
            then()

    def __len__(self) -> int:
        return len(self._who) + len(self._blocks) + len(self._waiting)
