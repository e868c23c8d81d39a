"""Workers killed under load: `python -m tests.soak.serving [--kills 20] [--seed N]`.

A system with two workers of each role answers a few clients over HTTP, streaming, while workers
are killed one after the other, at random times. Every request has to end within its deadline, in
the whole answer or in a clear error; answers are compared with those of a quiet system, token by
token told. Afterwards nothing may be left: no request, no KV block in a worker, no unfinished put
and no pin in the store, no lease that keeps an object from being removed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path

import aiohttp

from mooncake_store import AsyncClient, Digests
from mooncake_store.errors import StoreError
from serving.system import ServingSystem, SystemSettings
from tests.waiting import until_async

CLIENTS = 6
DEADLINE_S = 60.0
SLACK_S = 6.0
PROMPTS = 12
ANSWER_TOKENS = 24
SETTLE_S = 60.0
"""Leases and unfinished puts of killed workers end by their own deadlines."""


class Clients:
    """Several clients, each with one request at a time."""

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.random = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.complaints: list[str] = []
        self.worst_s = 0.0
        shared = "Of every prompt the pool keeps what it has cost. " * 12
        self.prompts = [f"{shared[: 50 * n]} Number {n}." for n in range(1, PROMPTS + 1)]
        self.expected: list[str] = []

    async def learn(self, http: aiohttp.ClientSession) -> None:
        """The answers of the system while nobody disturbs it."""
        for prompt in self.prompts:
            end, text = await self.ask(http, prompt)
            assert end == "answered", end
            self.expected.append(text)

    async def ask(self, http: aiohttp.ClientSession, prompt: str) -> tuple[str, str]:
        """(how it ended, the text told)."""
        body = {
            "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "stream": True,
            "ignore_eos": True, "timeout": DEADLINE_S,
        }  # fmt: skip
        text, reason = "", ""
        async with http.post(self.url + "/v1/completions", json=body) as response:
            if response.status != 200:
                error = (await response.json())["error"]
                return f"refused: {error['code']}", text
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    return f"broke off: {piece['error']['code']}", text
                text += piece["choices"][0]["text"]
                reason = piece["choices"][0]["finish_reason"] or reason
        return ("answered" if reason == "length" else f"ended without a reason {reason}"), text

    async def play(self, http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        """Ask until it is enough."""
        while not stop.is_set():
            number = self.random.randrange(PROMPTS)
            began = time.monotonic()
            end, text = await self.ask(http, self.prompts[number])
            seconds = time.monotonic() - began
            self.worst_s = max(self.worst_s, seconds)
            self.ends[end] += 1
            if seconds > DEADLINE_S + SLACK_S:
                self.complaints.append(f"a request took {seconds:.1f} s")
            expected = self.expected[number]
            right = text == expected if end == "answered" else expected.startswith(text)
            if not right:
                self.complaints.append(f"{end}: {text!r} instead of {expected!r}")
            if end.startswith("ended"):
                self.complaints.append(end)
            if end.startswith("refused"):
                await asyncio.sleep(0.5)


async def kill(system: ServingSystem, kills: int, source: random.Random) -> None:
    """Kill workers one after the other; each is back before the next one goes."""
    for number in range(kills):
        role = ("prefill", "decode")[number % 2]
        await asyncio.sleep(source.uniform(0.2, 1.5))
        victim = source.choice(worker_numbers(system, role))
        before = system.workers.addresses[victim]
        await asyncio.to_thread(system.workers.kill, victim)
        try:
            await until_async(partial(replaced, system, victim, before), 60, "a new worker")
        except AssertionError:
            print(await store_health(system), flush=True)
            raise
        print(f"kill {number + 1} of {kills}: worker {victim}, {role}", flush=True)


def worker_numbers(system: ServingSystem, role: str) -> list[int]:
    """Places of the workers that have a role now."""
    members = system.conductor.fleet.members
    return [
        number
        for number, address in enumerate(system.workers.addresses)
        if address in members and members[address].hello.role == role
    ]


def replaced(system: ServingSystem, number: int, before: str) -> bool:
    """Whether another worker has joined in the place of the one at an address."""
    address = system.workers.addresses[number]
    return address != before and address in system.conductor.fleet.members


async def store_health(system: ServingSystem) -> str:
    """Whether the store answers, and what its processes do: a worker starts only with a store."""

    def cpu_s(pid: int) -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = [cpu_s(pid) for pid in system.store.pids]
    began = time.monotonic()
    try:
        async with AsyncClient(system.store.url, deadline=5.0) as store:
            answered = f"answered {await store.store_stats()}"
    except StoreError as error:
        answered = f"did not answer: {error}"
    seconds = time.monotonic() - began
    spent = [cpu_s(pid) - was for pid, was in zip(system.store.pids, before, strict=True)]
    return f"the store {answered} within {seconds:.1f} s; its processes computed for {spent} s"


async def left_over(system: ServingSystem) -> list[str]:
    """What has not gone, after time for leases and unfinished puts of the dead to end."""
    until, found = time.monotonic() + SETTLE_S, ["nobody looked"]
    async with AsyncClient(system.store.url) as store:
        while found and time.monotonic() < until:
            await asyncio.sleep(0.5)
            found = await remains(system, store)
    return found


async def remains(system: ServingSystem, store: AsyncClient) -> list[str]:
    """What is left at this moment."""
    found = []
    if system.conductor.under_way or system.conductor.scheduler.ledger.flights:
        found.append(f"{system.conductor.under_way} requests in the conductor")
    for member in system.conductor.fleet.members.values():
        load = await member.client.load()
        if load.kv_blocks_used or load.running or load.queued or load.pending_puts:
            found.append(
                f"{member.hello.worker_id}: {load.kv_blocks_used} KV blocks, {load.running} "
                f"running, {load.queued} queued, {load.pending_puts} puts"
            )
    found += [
        f"store: {shard.writing} unfinished, {shard.soft_pinned} pinned"
        for shard in await store.store_stats()
        if shard.writing or shard.soft_pinned or shard.hard_pinned_bytes
    ]
    if found:
        return found
    for shard in range(store.shards):
        news = store.follow(shard)
        page = await anext(news)
        await news.aclose()
        if len(page.digests):
            removed = await store.remove_many(Digests(page.digests))
            kept = len(removed.failed)
            if kept:
                found.append(f"store: {kept} objects under a lease")
    return found


async def soak(kills: int, seed: int) -> list[str]:
    """Play; returns complaints."""
    settings = SystemSettings(
        prefill=2, decode=2, port=0, segment="256MB", deadline_s=DEADLINE_S, fixed_roles=True,
        ttft_s=DEADLINE_S, tbt_s=10.0,
    )  # fmt: skip
    stop = asyncio.Event()
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S + 2 * SLACK_S)
    async with (
        ServingSystem(settings) as system,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        clients = Clients(system.url, seed)
        await clients.learn(http)
        playing = [asyncio.create_task(clients.play(http, stop)) for _ in range(CLIENTS)]
        try:
            await kill(system, kills, random.Random(seed))
        finally:
            stop.set()
            await asyncio.gather(*playing)
        complaints = clients.complaints + await left_over(system)
        print(
            f"{sum(clients.ends.values())} requests, the longest {clients.worst_s:.1f} s, "
            f"{system.conductor.stats.resumed} times one went on elsewhere:"
        )
        for end, count in clients.ends.most_common():
            print(f"  {count:>6}  {end}")
    if not clients.ends["answered"]:
        complaints.append("no request was answered")
    return complaints


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    complaints = asyncio.run(soak(options.kills, options.seed))
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    if not complaints:
        print("every request ended in its answer or a clear error, and nothing was left")
    return bool(complaints)


if __name__ == "__main__":
    sys.exit(main())
