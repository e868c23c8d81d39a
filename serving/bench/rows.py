"""What `mooncake bench serving` measures; here: hits, a group of two, KV stored meanwhile."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

from mooncake_store.local_cluster import LocalCluster
from serving.bench.decisions import measure_decisions
from serving.bench.prompts import Prompts, prefill
from serving.bench.pushing import measure_pushes
from serving.bench.smaller import measure_codec
from serving.bench.streaming import SEGMENT, Streamed, Workload, on_loopback, over_a_link
from serving.workers.client import WorkerClient
from serving.workers.local import LocalWorkers
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from mooncake_store.bench.harness import Report

__all__ = ["measure"]

SHARED_TOKENS = 4096
OWN_TOKENS = 32
LONG_TOKENS = 4096
STREAM_MODEL = "tiny,layers=16,hidden=64,heads=8,kv_heads=8,head_dim=256,intermediate=128"
"""Wide keys and values, little else: 256 KiB of KV a token, so that moving it matters."""
STREAM_TOKENS = 512
CODEC_TOKENS = 1024
PUSH_MODEL = "tiny"


def measure(report: Report, *, repeats: int) -> None:
    """All rows."""
    stored = Workload(model=STREAM_MODEL, tokens=STREAM_TOKENS, rounds=repeats)
    with LocalCluster(workers=1, segment=SEGMENT) as cluster:
        asyncio.run(_with_workers(report, cluster.url, repeats))
        streamed = asyncio.run(on_loopback(stored, cluster.url))
    _streaming(report, "over tcp", streamed)
    _streaming(report, "over a link as slow as compute", over_a_link(stored))
    measure_pushes(report, PUSH_MODEL, repeats=3 * repeats)
    measure_codec(report, "tiny", Prompts().new(CODEC_TOKENS), repeats=repeats)
    measure_decisions(report, repeats=repeats)


async def _with_workers(report: Report, url: str, repeats: int) -> None:
    settings: dict[str, Any] = {"block_tokens": 64, "kv_blocks": 256}
    with LocalWorkers(prefill=2, decode=0, model="tiny", pool_url=url, **settings) as workers:
        apart = _pin([child.pid for child in workers.children])
        clients = [WorkerClient(address) for address in workers.addresses]
        try:
            await _hits(report, clients[0], repeats)
            await _pipeline(report, clients[0], clients[1], repeats, apart=apart)
        finally:
            for client in clients:
                await client.close()


def _pin(pids: list[int]) -> bool:
    """Give each process a processor of its own; whether there are enough."""
    free = sorted(os.sched_getaffinity(0))
    if len(free) < len(pids):
        return False
    for pid, processor in zip(pids, free, strict=False):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), {processor})
    return True


async def _hits(report: Report, client: WorkerClient, repeats: int) -> None:
    """The time to the first token behind a shared prefix, found and computed."""
    prompts = Prompts()
    shared = prompts.new(SHARED_TOKENS)
    await prefill(client, shared + prompts.new(OWN_TOKENS))
    found, computed = [], []
    for _ in range(repeats):
        warm = await prefill(client, shared + prompts.new(OWN_TOKENS))
        cold = await prefill(client, prompts.new(SHARED_TOKENS + OWN_TOKENS))
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
    report: Report, leader: WorkerClient, follower: WorkerClient, repeats: int, *, apart: bool
) -> None:
    """A long prompt through one worker and through a group of two, and one each at once."""
    names = [f"{LONG_TOKENS} tokens, two workers", f"{LONG_TOKENS} tokens each, two workers"]
    if not apart:
        for name in names:
            report.row(f"first token/{name}", "ms", [], why="two workers need two processors")
        return
    prompts = Prompts(seed=1)
    alone, together, both = [], [], []
    for number in range(repeats + 1):
        tokens = prompts.new(LONG_TOKENS)
        plain = {"use_pool": False, "store": False}
        one = await prefill(leader, tokens, **plain)
        two = await prefill(leader, tokens, group=(follower.address,), **plain)
        if one.token != two.token:
            raise StoreError(f"a group answers {two.token}, one worker {one.token}")
        if not number:
            continue  # a warm-up
        pair = await asyncio.gather(
            *(prefill(client, tokens, **plain) for client in (leader, follower))
        )
        alone.append(1e3 * one.first_s)
        together.append(1e3 * two.first_s)
        both.append(1e3 * max(each.first_s for each in pair))
    for name, samples in zip(names, (together, both), strict=True):
        report.row(f"first token/{name}", "ms", samples, vs={"one worker": alone},
                   higher_is_better=False)  # fmt: skip


def _streaming(report: Report, way: str, times: Streamed | str) -> None:
    """How long a prompt takes whose KV is stored, and how much of that its compute hides."""
    if isinstance(times, str):
        for what, unit in (("layer by layer", "ms"), ("time hidden", "%")):
            report.row(f"KV stored/{way}, {what}", unit, [], why=times)
        return
    sides = {"after": times.after, "never": times.never}
    report.row(f"KV stored/{way}, layer by layer", "ms", times.layered, vs=sides,
               higher_is_better=False)  # fmt: skip
    report.row(f"KV stored/{way}, time hidden", "%", times.hidden)
    rate = times.link_bytes_per_s
    if rate:
        report.row(f"KV stored/{way}, its rate", "MB/s", [rate / 1e6])
