"""Prompts of a trace, as the product's own requests carry them: a length and names of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

__all__ = ["TracePrompt"]


class TracePrompt(Sequence[int]):
    """A prompt whose tokens nobody knows: all are 0, and `chain` names its blocks."""

    __slots__ = ("_count", "chain")

    def __init__(self, count: int, chain: list[int]) -> None:
        self._count = count
        self.chain = chain

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...
    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        zeros = range(self._count)[index]
        return 0 if isinstance(zeros, int) else [0] * len(zeros)
