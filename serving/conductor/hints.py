"""Hints about prompts: what a router knows of a conversation, told to the pool block by block.

    told = await hint_prompt(store, names, tokens, "retain", ttl="5m", priority=2, deadline_s=5.0)
    told.outcomes                     # ["accepted", "accepted", "missing"]

A block is an object per layer, and what became of a block is what became of the worst of them. Only
whole blocks are in a pool, so of a prompt's last tokens nothing is said.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store import Digests

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store import AsyncClient
    from serving.workers.naming import PoolNames

__all__ = ["HINTS_MAX", "OUTCOMES", "Hinted", "HintsFullError", "hint_prompt"]

HINTS_MAX = 32
"""How many may be under way: each holds a prompt, and waits for a thread that names its blocks."""

OUTCOMES = "accepted", "clipped", "missing", "rejected"
"""What may become of a block, from the best to the worst; as `HintResult` has it."""


class HintsFullError(Exception):
    """As many hints are under way as may be."""


class Hinted(NamedTuple):
    """What became of a hint: an outcome per block, and why the first one was rejected, if any."""

    outcomes: list[str]
    reason: str


async def hint_prompt(
    store: AsyncClient,
    names: PoolNames,
    tokens: Sequence[int],
    action: str,
    *,
    ttl: float | str | None,
    priority: int | None,
    deadline_s: float,
) -> Hinted:
    """Give a hint about the blocks of a prompt. Raises StoreError where the pool cannot be asked.

    InvalidArgumentError says what is wrong with the hint.
    """

    def named() -> Digests:
        return Digests(
            np.concatenate([names.blocks(layer, tokens) for layer in range(names.layers)])
        )

    # A pass over the prompt for each layer: too long for the loop that answers others.
    keys = await asyncio.to_thread(named)
    told = await store.hint(keys, action, ttl=ttl, priority=priority, deadline=deadline_s)
    blocks = len(keys) // names.layers
    of_blocks: Any = np.zeros(blocks, np.int64)
    for rank, outcome in enumerate(OUTCOMES):
        column = getattr(told, outcome).reshape(names.layers, blocks)
        of_blocks[column.any(axis=0)] = rank
    rejected = np.flatnonzero(told.rejected)
    reason = str(told.error(int(rejected[0]))) if len(rejected) else ""
    return Hinted([OUTCOMES[rank] for rank in of_blocks.tolist()], reason)
