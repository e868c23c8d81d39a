"""The paged KV cache: blocks of a fixed number of tokens, owned by sequences.

Keys and values of each layer are one tensor [blocks, block_tokens, kv_heads, head_dim], so a block
is one contiguous range of each: what the pool stores. All of them lie in one piece of memory, which
others may be let into (`memory`). A sequence has a list of blocks and need not
know where they lie. Where they happen to follow each other, which `acquire` tries for, attention
reads them in place; else they are gathered first.

`acquire` gives out all a sequence will ever need or nothing, so nothing that was admitted has to be
thrown out again. Not thread-safe: it belongs to the engine's thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from serving.engine.config import ModelConfig

__all__ = ["KVCache", "cache_bytes"]


def cache_bytes(config: ModelConfig, blocks: int, block_tokens: int) -> int:
    """How much memory a cache takes."""
    return blocks * block_tokens * config.kv_bytes_per_token


class KVCache:
    """Memory for `blocks` blocks of `block_tokens` tokens in all layers."""

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_tokens: int,
        device: torch.device,
        *,
        memory: Tensor | None = None,
    ) -> None:
        shape = (blocks, block_tokens, config.kv_heads, config.head_dim)
        dtype = getattr(torch, config.dtype)
        self.blocks = blocks
        self.block_tokens = block_tokens
        if memory is None:
            # Zeros, not whatever was there: padding is masked by a factor of zero, and 0 * NaN is
            # NaN. Given memory must be zeroed as well.
            size = cache_bytes(config, blocks, block_tokens)
            memory = torch.zeros(size, dtype=torch.uint8, device=device)
        self.memory = memory
        """Of all layers, keys before values, as bytes."""
        parts = memory.view(dtype).view(config.layers, 2, *shape)
        self.keys = [layer[0] for layer in parts]
        self.values = [layer[1] for layer in parts]
        self._flat_keys = [layer.view(-1, *shape[2:]) for layer in self.keys]
        self._flat_values = [layer.view(-1, *shape[2:]) for layer in self.values]
        self._free = set(range(blocks))

    # Ownership.

    @property
    def used(self) -> int:
        """Blocks that belong to somebody."""
        return self.blocks - len(self._free)

    def needed(self, tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-tokens // self.block_tokens)

    def acquire(self, count: int) -> list[int] | None:
        """Take `count` blocks, neighbours if there are; None if there are not enough. O(blocks)."""
        if count > len(self._free):
            return None
        free = sorted(self._free)
        start = 0
        for at in range(len(free)):
            if at and free[at] != free[at - 1] + 1:
                start = at
            if at - start + 1 == count:
                chosen = free[start : at + 1]
                break
        else:
            chosen = free[:count]
        self._free.difference_update(chosen)
        return chosen

    def release(self, blocks: Sequence[int]) -> None:
        """Give blocks back. A block that is free already is a defect."""
        if not self._free.isdisjoint(blocks) or len(set(blocks)) != len(blocks):
            raise AssertionError(f"blocks {blocks} are given back twice")
        self._free.update(blocks)

    def check_integrity(self, owned: Sequence[Sequence[int]]) -> None:
        """Every block has exactly one owner: one of these sequences, or the free set."""
        taken = [block for blocks in owned for block in blocks]
        if len(taken) != len(set(taken)):
            raise AssertionError("a block has two owners")
        if not self._free.isdisjoint(taken):
            raise AssertionError("a free block has an owner")
        if len(taken) + len(self._free) != self.blocks:
            raise AssertionError(f"{self.blocks - len(taken) - len(self._free)} blocks are lost")

    # Contents.

    def slots(self, blocks: Sequence[int], start: int, count: int) -> Tensor:
        """Where `count` tokens of a sequence from `start` on lie among all of a layer's rows."""
        positions = torch.arange(start, start + count)
        table = torch.tensor(blocks, dtype=torch.int64)
        size = self.block_tokens
        slots = table[positions // size] * size + positions % size
        return slots.to(self.keys[0].device)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put keys and values [n, kv_heads, head_dim] into slots of a layer."""
        self._flat_keys[layer].index_copy_(0, slots, keys)
        self._flat_values[layer].index_copy_(0, slots, values)

    def read(self, layer: int, place: slice | Tensor, tokens: int) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, kv_heads, head_dim] of the first tokens of a sequence.

        `place` is what `place` returned for its blocks. The result has the same strides whether it
        is a view or was gathered, so arithmetic on it is the same.
        """
        if isinstance(place, slice):
            rows = slice(place.start, place.start + tokens)
            return self._flat_keys[layer][rows], self._flat_values[layer][rows]
        shape = self._flat_keys[layer].shape[1:]
        keys = self.keys[layer].index_select(0, place).view(-1, *shape)[:tokens]
        values = self.values[layer].index_select(0, place).view(-1, *shape)[:tokens]
        return keys, values

    def place(self, blocks: Sequence[int]) -> slice | Tensor:
        """How to read these blocks: in place if they follow each other, else by number."""
        first = blocks[0]
        if list(blocks) == list(range(first, first + len(blocks))):
            return slice(first * self.block_tokens, (first + len(blocks)) * self.block_tokens)
        return torch.tensor(blocks, dtype=torch.int64, device=self.keys[0].device)
