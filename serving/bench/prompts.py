"""Prompts that a worker has not seen, sent to it and timed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from serving.workers import protocol as p
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from serving.workers.client import WorkerClient

__all__ = ["Prompts", "Served", "prefill"]

DEADLINE_MS = 120_000


@dataclass(frozen=True, slots=True)
class Served:
    """One prefill: seconds to its first token and to its end, and what came out."""

    first_s: float
    done_s: float
    token: int
    done: p.Done


class Prompts:
    """Prompts that nobody has sent before."""

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)

    def new(self, count: int) -> list[int]:
        """So many random tokens."""
        tokens: list[int] = self._random.integers(0, 256, count).tolist()
        return tokens


async def prefill(client: WorkerClient, tokens: list[int], **fields: object) -> Served:
    """Send one prompt and time its first token and its end."""
    message = p.Prefill(
        f"bench-{time.monotonic_ns()}",
        p.pack_tokens(tokens),
        p.Sampling(),
        2,
        DEADLINE_MS,
        fetch_deadline_ms=10_000,
        **fields,  # type: ignore[arg-type]
    )
    began = time.perf_counter()
    first, token = 0.0, -1
    async for event in client.prefill(message):
        if isinstance(event, p.FirstToken):
            first, token = time.perf_counter() - began, event.token
        elif isinstance(event, p.Done):
            return Served(first, time.perf_counter() - began, token, event)
        elif isinstance(event, p.Failed):
            raise StoreError(f"a prefill failed: {event.message}", advice=event.advice)
    raise StoreError("a prefill ended without an answer")
