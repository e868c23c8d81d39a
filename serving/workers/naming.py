"""Which objects of the pool hold a prompt's KV: one per block and layer.

A layer is what is loaded ahead of compute and stored behind it, and what a stage of a pipeline
owns, so it is an object of its own: a worker loads and stores exactly the layers it computes, and a
group of any size shares blocks with a single worker. The price is one small object per layer
instead of one large one per block.

Layers are stored in order, so a block whose *last* layer is in the pool has all the others, unless
one was evicted since; a load that misses one falls back to computing. The digests of the last layer
are therefore the index: one `find_prefix` finds the longest prefix, and KV events that name these
digests say what the pool holds. Digests chain over the whole prefix and are salted with all that
decides what the bytes mean (`connectors.keys.KVScope`). They are made as the pool names things, so
there are none before it was reached, and who shares blocks shares a namespace of the pool.

No I/O. Cost: one pass over the tokens per layer asked for.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.ids import DIGEST_BYTES
from serving.connectors.keys import KVScope

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    from mooncake_store.identity import Identity
    from serving.workers.protocol import ModelCard

__all__ = ["PoolNames", "chain_of", "split"]


def split(names: bytes) -> list[bytes]:
    """Names of blocks that follow each other, one by one."""
    return [names[at : at + DIGEST_BYTES] for at in range(0, len(names), DIGEST_BYTES)]


def chain_of(digests: NDArray[np.uint64]) -> list[bytes]:
    """Digests, uint64[n, 2], as indexes name blocks: 16 bytes each."""
    return split(digests.tobytes())


class PoolNames:
    """Digests of KV objects of one model; `identity` is the pool's, None while it is not known."""

    def __init__(self, card: ModelCard, identity: Callable[[], Identity | None]) -> None:
        self.card = card
        self._identity = identity
        self.block_tokens = card.block_tokens
        self.layers = card.layers
        self._scope = lru_cache(maxsize=1024)(self._new_scope)

    def _new_scope(self, layer: int) -> KVScope:
        card = self.card
        return KVScope(
            model=card.name,
            revision=card.revision,
            dtype=card.dtype,
            layout=card.layout,
            kv_heads=card.kv_heads,
            group=f"layer {layer} of {card.layers}",
        )

    @property
    def known(self) -> bool:
        """Whether blocks can be named: the pool has been reached."""
        return self._identity() is not None

    def blocks(self, layer: int, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint64]:
        """Digests, uint64[n, 2], of one layer of the complete blocks of a prompt.

        There are none while they cannot be named.
        """
        identity = self._identity()
        if identity is None:
            return np.empty((0, 2), np.uint64)
        return self._scope(layer).blocks(identity, tokens, self.block_tokens)

    def index(self, tokens: Sequence[int] | NDArray[np.int64]) -> NDArray[np.uint64]:
        """The digests that say whether a block is in the pool: those of the last layer."""
        return self.blocks(self.layers - 1, tokens)
