"""What engines have of a prompt, by their events, and what they will have of those they were given.

    prompts = EnginePrompts(index)
    known = prompts.find("llama", tokens)     # Known(matches, coming, told, chain)
    prompts.expect("vllm-0", known.chain)
    ...
    prompts.settle("vllm-0", known.chain)     # its answer ended

Prompts that begin alike and come together go to one engine that way, before it has told of any
block. Engines that are registered under a name of the model count, with the blocks of the default
tenant. O(blocks).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from serving.front.indexer import ScopeKey
from serving.scheduling.holdings import Expected

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from serving.front.indexer import EngineIndex

__all__ = ["EnginePrompts", "Known"]


class Known(NamedTuple):
    """Tokens of a prompt that engines have and will have, who told of blocks, and its blocks."""

    matches: Mapping[str, int]
    coming: Mapping[str, int]
    told: Collection[str]
    chain: Sequence[bytes]


class EnginePrompts(Expected):
    """The index, and what is expected beside it."""

    def __init__(self, index: EngineIndex) -> None:
        super().__init__()
        self._index = index

    def find(self, model: str, tokens: Sequence[int]) -> Known:
        """What is known of a prompt; an empty model is any."""
        entries = [
            (source.registration, source.blocks)
            for source in self._index.sources.values()
            if model in ("", source.registration.model)
        ]
        matches, coming = dict[str, int](), dict[str, int]()
        blocks: list[bytes] = []
        for scope in dict.fromkeys(ScopeKey(each.model, each.block_size) for each, _ in entries):
            chain = self._index.chain(scope, tokens)
            # Blocks have other names in each scope, so those of all can be expected together.
            blocks += chain
            _raise(matches, self._index.matches(scope, chain))
            size = scope.block_size
            _raise(coming, {name: size * n for name, n in self.coming(chain).items()})
        return Known(matches, coming, {each.instance_id for each, held in entries if held}, blocks)


def _raise(counts: dict[str, int], by: Mapping[str, int]) -> None:
    """Keep the larger one of two counts."""
    for name, count in by.items():
        counts[name] = max(count, counts.get(name, 0))
