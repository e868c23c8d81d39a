"""Prompts of a trace, as the product's own requests carry them: a length and names of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["TracePrompt"]


class TracePrompt(Sequence[int]):
    """A prompt whose tokens nobody knows: all are the number of its request.

    `chain` names its blocks. Who has a copy of the tokens, as a request that is resumed, finds
    them by that number.
    """

    __slots__ = ("_count", "chain", "number")

    def __init__(self, count: int, chain: list[int], number: int = 0) -> None:
        self._count = count
        self.chain = chain
        self.number = number

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        return repeat(self.number, self._count)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        found = range(self._count)[index]
        return self.number if isinstance(found, int) else [self.number] * len(found)
