"""Where KV of (layer, block) pairs lies, as the store's client and the wire need it.

One object of the pool is the keys of a block followed by its values. On a host both are read and
written where they lie. Memory of an accelerator cannot be addressed from here: it is copied through
page-locked rows of the host, one per object, made when first used.

Used by the threads that move bytes; the engine computes on other blocks meanwhile.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from mooncake_store import Pieces, Rows
    from serving.engine.cache import KVCache

__all__ = ["KVMemory"]

_STAGING_BYTES = 64 << 20


class KVMemory:
    """The memory of one cache. `batch_max` objects can be moved at once."""

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self.blocks = cache.blocks
        self.block_tokens = cache.block_tokens
        self.layers = len(cache.keys)
        self.tensor = cache.memory
        """All of it, as bytes."""
        self.address = self.tensor.data_ptr()
        layer = cache.keys[0]
        self.half = layer[0].numel() * layer.element_size()
        """Bytes of the keys of a block in one layer; the values take as many."""
        self.object_bytes = 2 * self.half
        self.token_bytes = self.half // self.block_tokens
        """Bytes of the keys of one token in one layer."""
        self._on_host = layer.device.type == "cpu"
        self.batch_max = 1 << 20 if self._on_host else max(1, _STAGING_BYTES // self.object_bytes)
        self._bases = np.array(
            [
                (keys.data_ptr(), values.data_ptr())
                for keys, values in zip(cache.keys, cache.values, strict=True)
            ],
            np.int64,
        )
        self._local = threading.local()

    def buffers(self, layers: Sequence[int], blocks: Sequence[int]) -> Pieces | Rows:
        """What a get fills, one object per pair; `filled` follows it."""
        if self._on_host:
            return self._pieces(layers, blocks)
        return self._rows(len(blocks))

    @torch.inference_mode()
    def gathered(self, layers: Sequence[int], blocks: Sequence[int]) -> Pieces | Rows:
        """What a put reads, one object per pair, after they were computed."""
        if self._on_host:
            return self._pieces(layers, blocks)
        rows = self._staging(len(blocks))
        for at, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
            rows[at, : self.half] = self._bytes(self._cache.keys[layer][block])
            rows[at, self.half :] = self._bytes(self._cache.values[layer][block])
        torch.accelerator.synchronize(self._cache.keys[0].device)
        return self._rows(len(blocks))

    @torch.inference_mode()
    def filled(self, layers: Sequence[int], blocks: Sequence[int]) -> None:
        """Bring what a get has put into `buffers` to where it belongs."""
        if self._on_host:
            return
        rows = self._staging(len(blocks))
        for at, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
            self._bytes(self._cache.keys[layer][block]).copy_(rows[at, : self.half])
            self._bytes(self._cache.values[layer][block]).copy_(rows[at, self.half :])
        torch.accelerator.synchronize(self._cache.keys[0].device)

    def _pieces(self, layers: Sequence[int], blocks: Sequence[int]) -> Pieces:
        from mooncake_store import Pieces

        numbers = np.asarray(blocks, np.int64)
        addresses = self._bases[np.asarray(layers, np.int64)] + numbers[:, None] * self.half
        return Pieces(
            addresses.ravel(),
            np.full(2 * len(numbers), self.half),
            np.arange(0, 2 * len(numbers) + 1, 2),
            keep=self._cache,
        )

    def _rows(self, count: int) -> Rows:
        from mooncake_store import Rows

        staging = self._staging(count)
        return Rows(staging.data_ptr(), self.object_bytes, count, self.object_bytes)

    def _staging(self, count: int) -> Any:
        rows = getattr(self._local, "rows", None)
        if rows is None:
            shape = (self.batch_max, self.object_bytes)
            rows = torch.empty(shape, dtype=torch.uint8, pin_memory=not self._on_host)
            self._local.rows = rows
        return rows[:count]

    @staticmethod
    def _bytes(block: torch.Tensor) -> torch.Tensor:
        return block.view(-1).view(torch.uint8)

    # Ranges of tokens, for KV that is pushed.

    def spans(
        self, layer: int, blocks: Sequence[int], start: int, end: int, of_blocks: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Offsets and lengths of a sequence's tokens in one layer of a cache of `of_blocks` blocks.

        Keys come first, block by block, then values: two caches give equally many of equal length.
        """
        size = self.block_tokens
        first, last = start // size, -(-end // size)
        skipped = start % size * self.token_bytes
        lengths = np.full(last - first, self.half, np.int64)
        lengths[0] -= skipped
        lengths[-1] -= (last * size - end) * self.token_bytes
        keys = (2 * layer * of_blocks + np.asarray(blocks[first:last], np.int64)) * self.half
        keys[0] += skipped
        return np.concatenate([keys, keys + of_blocks * self.half]), np.tile(lengths, 2)

    def settle(self) -> None:
        """Return when what the calling thread computed is in the memory."""
        if not self._on_host:
            torch.accelerator.synchronize(self.tensor.device)
