"""The measurements behind `mooncake bench serving`; see the package."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store import Client
from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.local import LocalWorkers
from serving.workers.program import share_interpreter
from serving.workers.settings import settings_from
from serving.workers.worker import Worker
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.bench.harness import Report
    from serving.workers.pool import Storing

__all__ = ["measure"]

SHARED_TOKENS = 4096
OWN_TOKENS = 32
LONG_TOKENS = 4096
STREAM_MODEL = "tiny,layers=16,hidden=64,heads=8,kv_heads=8,head_dim=256,intermediate=128"
"""Wide keys and values, little else: 256 KiB of KV a token, so that moving it matters."""
STREAM_TOKENS = 512
STREAM_ROUNDS = 3
"""How many times as often this is measured: it is quick, and a difference of differences."""
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


async def prefill(client: WorkerClient, tokens: list[int], number: int, **fields: object) -> Served:
    """Send one prompt and time its first token and its end."""
    message = p.Prefill(
        f"bench-{number}-{time.monotonic_ns()}",
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


async def measure(report: Report, url: str, *, repeats: int) -> None:
    """All rows."""
    settings: dict[str, Any] = {"block_tokens": 64, "kv_blocks": 256}
    with LocalWorkers(prefill=2, decode=0, model="tiny", pool_url=url, **settings) as workers:
        clients = [WorkerClient(address) for address in workers.addresses]
        try:
            await _hits(report, clients[0], repeats)
            await _pipeline(report, clients[0], clients[1], repeats)
        finally:
            for client in clients:
                await client.close()
    await _streaming(report, url, repeats)


async def _hits(report: Report, client: WorkerClient, repeats: int) -> None:
    """The time to the first token behind a shared prefix, found and computed."""
    prompts = Prompts()
    shared = prompts.new(SHARED_TOKENS)
    await prefill(client, shared + prompts.new(OWN_TOKENS), 0)
    found, computed = [], []
    for number in range(repeats):
        warm = await prefill(client, shared + prompts.new(OWN_TOKENS), number)
        cold = await prefill(client, prompts.new(SHARED_TOKENS + OWN_TOKENS), number)
        if warm.done.cached_tokens != SHARED_TOKENS or cold.done.cached_tokens:
            raise StoreError(f"{warm.done.cached_tokens} tokens were found in the pool")
        found.append(1e3 * warm.first_s)
        computed.append(1e3 * cold.first_s)
    name = f"first token/{SHARED_TOKENS} tokens shared"
    report.row(f"{name}, in the pool", "ms", found, vs={"computed": computed},
               higher_is_better=False)  # fmt: skip
    shares = [100 * a / b for a, b in zip(found, computed, strict=True)]
    report.row(f"{name}, of the time computed", "%", shares)


async def _pipeline(
    report: Report, leader: WorkerClient, follower: WorkerClient, repeats: int
) -> None:
    """A long prompt through one worker and through a group of two."""
    prompts = Prompts(seed=1)
    alone, together = [], []
    for number in range(repeats + 1):
        tokens = prompts.new(LONG_TOKENS)
        plain = {"use_pool": False, "store": False}
        one = await prefill(leader, tokens, number, **plain)
        two = await prefill(leader, tokens, number, group=(follower.address,), **plain)
        if one.token != two.token:
            raise StoreError(f"a group answers {two.token}, one worker {one.token}")
        if number:  # the first of each is a warm-up
            alone.append(1e3 * one.first_s)
            together.append(1e3 * two.first_s)
    report.row(f"first token/{LONG_TOKENS} tokens, two workers", "ms", together,
               vs={"one worker": alone}, higher_is_better=False)  # fmt: skip


async def _streaming(report: Report, url: str, repeats: int) -> None:
    """How much of the time to store a prompt's KV its compute hides, layer by layer."""
    worker = Worker(
        settings_from(
            {
                "model": STREAM_MODEL, "pool_url": url, "block_tokens": 64,
                "chunk_tokens": STREAM_TOKENS, "kv_blocks": 16,
                "pool": {"transports": ["tcp"]},
            }
        )
    )  # fmt: skip
    client = WorkerClient(await worker.start())
    share_interpreter()
    prompts, pool = Prompts(seed=2), Client(url)
    times: dict[str, list[float]] = {"not stored": [], "stored after": [], "streamed": []}
    try:
        for number in range(STREAM_ROUNDS * repeats + 1):
            for side, samples in times.items():
                pool.clear(force=True)  # nobody waits for evictions
                with _storing(worker, after=side == "stored after"):
                    store = side != "not stored"
                    served = await prefill(
                        client, prompts.new(STREAM_TOKENS), number, use_pool=False, store=store
                    )
                if number:
                    samples.append(1e3 * served.done_s)
    finally:
        pool.close()
        await client.close()
        await worker.stop()
    never, after, streamed = times.values()
    megabytes = STREAM_TOKENS * worker.card.kv_bytes_per_token / 1e6
    name = f"KV stored/{megabytes:.0f} MB over tcp"
    report.row(f"{name}, layer by layer", "ms", streamed,
               vs={"after": after, "never": never}, higher_is_better=False)  # fmt: skip
    middle = [float(np.median(each)) for each in (never, after, streamed)]
    hidden = 100 * (middle[1] - middle[2]) / (middle[1] - middle[0])
    report.row(f"{name}, time hidden", "%", [hidden])


class _storing:
    """Within it a worker stores a prompt's KV only after it is computed, if `after`."""

    def __init__(self, worker: Worker, *, after: bool) -> None:
        self._pool = worker.parts.pool
        self._original: Callable[[Storing], None] = self._pool.store
        self._after = after
        self._held: list[Storing] = []
        self._layers = worker.card.layers

    def _hold(self, storing: Storing) -> None:
        self._held.append(storing)
        if len(self._held) == self._layers:  # one chunk: this was its last layer
            for each in self._held:
                self._original(each)
            self._held.clear()

    def __enter__(self) -> None:
        if self._after:
            self._pool.store = self._hold  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        if self._after:
            del self._pool.store
