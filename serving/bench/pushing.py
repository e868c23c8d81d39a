"""How quickly KV goes from the worker that computed it to the one that decodes.

The sender is in this process and computes nothing, the receiver is a process of its own. What is
sent, and in which parts, is what a prompt of as many tokens would be.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.local import LocalWorkers
from serving.workers.pushing import Pusher
from serving.workers.settings import settings_from
from serving.workers.worker import Worker
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report

__all__ = ["measure_pushes"]

PUSH_BYTES = 8 << 20
WAYS = ("shm", "tcp")
PUSH_S = 60.0
_BLOCK_TOKENS = 64
_CHUNK_TOKENS = 256


def measure_pushes(report: Report, model: str, *, repeats: int) -> None:
    """A row for each way."""
    settings: dict[str, Any] = {"model": model, "block_tokens": _BLOCK_TOKENS, "kv_blocks": 256}
    with LocalWorkers(prefill=0, decode=1, **settings) as receivers:
        for way in WAYS:
            sending = _rates(settings | {"transports": [way]}, receivers.addresses[0], repeats)
            name = f"KV pushed/{PUSH_BYTES >> 20} MiB over {way}"
            report.row(name, "MB/s", asyncio.run(sending))


async def _rates(settings: dict[str, Any], receiver: str, repeats: int) -> list[float]:
    worker, client = Worker(settings_from(settings)), WorkerClient(receiver)
    await worker.start()
    try:
        tokens = PUSH_BYTES // worker.card.kv_bytes_per_token
        seconds = [
            await _push(worker, client, f"push-{number}", tokens) for number in range(repeats + 1)
        ]
    finally:
        await client.close()
        await worker.stop()
    return [PUSH_BYTES / each / 1e6 for each in seconds[1:]]  # the first connects


async def _push(worker: Worker, client: WorkerClient, name: str, tokens: int) -> float:
    """Seconds until the receiver knows that it has all of it."""
    parts, told = worker.parts, asyncio.Event()
    wrong: list[Exception] = []
    left = 1 << 30  # until it is known how many parts there are

    def sent(count: int) -> None:
        nonlocal left
        left -= count
        if not left:
            told.set()

    pusher = Pusher(
        client, name, time.monotonic() + PUSH_S, parts.memory, parts.exchange, parts.loop,
        sent=lambda count: parts.loop.call_soon_threadsafe(sent, count), failed=wrong.append,
    )  # fmt: skip
    opened = await pusher.open(tokens, senders=1, max_new_tokens=1, card=worker.card)
    if opened.room is None:
        raise StoreError(f"there is no room for {tokens} tokens: {opened.reason}")
    await pusher.reach(opened.room)
    blocks = range(-(-tokens // _BLOCK_TOKENS))
    began = time.perf_counter()
    added = sum(
        pusher.add(layer, start, min(start + _CHUNK_TOKENS, tokens), blocks)
        for start in range(0, tokens, _CHUNK_TOKENS)
        for layer in range(worker.card.layers)
    )
    pusher.finish()
    left -= (1 << 30) - added - 1
    async with asyncio.timeout(PUSH_S):
        await told.wait()
    spent = time.perf_counter() - began
    if wrong:
        raise wrong[0]
    await client.kv_close(p.KVClose(name, abort=True))  # no decode request comes for it
    return spent
