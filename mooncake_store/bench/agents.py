"""What hints are worth: cache hits of agents' sessions in a pool that is half as large as they are.

`hit_ratio` is the share of the blocks of earlier turns that a request finds, as the leading run of
its prompt, when the router says which sessions have ended; its side `lru` when nobody says a word.
`gain` is the difference, and `working_set` how many times the pool's room the sessions under way
have. Counts of a seeded trace in a real pool: repeats differ in their seeds.

The trace: agents talk in turns, each with the whole conversation before it and some blocks more,
and rest while their tools run, for a moment or (one turn in five) fifteen times as long. As many
requests again are of sub-agents, which ask once and are never heard of again. A router knows both:
with the last answer of a session it hints `demote` for its blocks. Much of a pool that is told
nothing holds what nobody reads again. Every block that is read is compared with what was put.
"""

from __future__ import annotations

import heapq
import random
import struct
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.bench.harness import alternate
from mooncake_store.client.blocking import Client
from mooncake_store.local_cluster import LocalCluster
from mooncake_store.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mooncake_store.bench.harness import Report

__all__ = ["ALTERNATIVES", "Request", "requests_of", "run"]

ALTERNATIVES = ("lru",)
AGENTS = 32
REQUESTS, REQUESTS_QUICK = 4000, 1000
REPEATS, REPEATS_QUICK = 5, 1
ROOM_BLOCKS = 1024
BLOCK_BYTES = 16 * KIB
SUB_AGENTS = 0.5
"""Share of requests that are nobody's next turn."""
TURNS, FIRST_BLOCKS, TURN_BLOCKS, SUB_AGENT_BLOCKS = 10, 16, 6, 24
"""Means, but for the first, which is what every session begins with."""
LONG_TOOLS = 0.2
SHORT_S, LONG_S = 4.0, 60.0
"""How long tools run, of the trace's own time, which nobody waits for."""


class Request(NamedTuple):
    """A turn of a session: its prompt has `old` blocks of earlier turns and then `new` ones."""

    session: int
    old: int
    new: int
    last: bool


def requests_of(seed: int, count: int) -> Iterator[tuple[Request, int]]:
    """Yield requests in their order, and how many blocks the sessions under way have."""
    rng = random.Random(seed)
    sessions = iter(range(1 << 62))
    due: list[tuple[float, int]] = []
    under_way: dict[int, tuple[int, int, int]] = {}  # blocks so far, and to come; turns to come

    def begin(at: float, blocks: int) -> None:
        session = next(sessions)
        under_way[session] = 0, blocks, _about(rng, TURNS)
        heapq.heappush(due, (at, session))

    for _ in range(AGENTS):  # of which some have talked for long
        begin(rng.uniform(0, LONG_S), FIRST_BLOCKS + rng.randrange(TURNS) * TURN_BLOCKS)
    live = 0
    for _ in range(count):
        if rng.random() < SUB_AGENTS:
            yield Request(next(sessions), 0, _about(rng, SUB_AGENT_BLOCKS), True), live
            continue
        now, session = heapq.heappop(due)
        old, new, turns = under_way.pop(session)
        live += new
        yield Request(session, old, new, turns == 1), live
        if turns == 1:
            live -= old + new
            begin(now + SHORT_S, FIRST_BLOCKS)
        else:
            under_way[session] = old + new, _about(rng, TURN_BLOCKS), turns - 1
            tool_s = LONG_S if rng.random() < LONG_TOOLS else SHORT_S
            heapq.heappush(due, (now + tool_s * rng.lognormvariate(0, 0.5), session))


def _about(rng: random.Random, mean: int) -> int:
    return 1 + int(rng.expovariate(1 / mean))


def run(report: Report, *, quick: bool, vs: tuple[str, ...]) -> None:
    """Measure all rows; `vs` may name lru."""
    count = REQUESTS_QUICK if quick else REQUESTS
    seeds = {side: iter(range(1 << 62)) for side in ("ours", "lru")}
    sides = {"ours": lambda: _replay(next(seeds["ours"]), count, hints=True)}
    if vs:
        sides["lru"] = lambda: _replay(next(seeds["lru"]), count, hints=False)
    found = alternate(sides, REPEATS_QUICK if quick else REPEATS)
    hits = {side: [ratio for ratio, _ in samples] for side, samples in found.items()}
    ours = hits.pop("ours")
    report.row("hit_ratio", "ratio", ours, vs=hits)
    for side, ratios in hits.items():
        gains = [100 * (mine - theirs) for mine, theirs in zip(ours, ratios, strict=True)]
        report.row(f"gain/{side}", "points", gains)
    report.row("working_set", "ratio", [room for _, room in found["ours"]])


def _replay(seed: int, count: int, *, hints: bool) -> tuple[float, float]:
    """Return the share of old blocks that were found, and the working set."""
    found = wanted = live_blocks = 0
    with (
        LocalCluster(segment=ROOM_BLOCKS * BLOCK_BYTES, in_process=True) as pool,
        Client(pool.url, lease_ttl=0.001) as store,  # else what was read lately cannot leave
    ):
        for request, live in requests_of(seed, count):
            names = [f"{request.session}/{number}" for number in range(request.old + request.new)]
            run = _leading(store, names[: request.old])
            values = [_content(name) for name in names[run:]]
            store.put_many(names[run:], values).check()
            if hints and request.last:
                store.hint(names[::-1], "demote")
            found, wanted, live_blocks = found + run, wanted + request.old, live_blocks + live
    return found / wanted, live_blocks / count / ROOM_BLOCKS


def _leading(store: Client, names: list[str]) -> int:
    """Read what there is of a prompt; return how long its leading run is."""
    values = store.get_many(names).values if names else []
    for name, value in zip(names, values, strict=True):
        if value is not None and value != _content(name):
            raise AssertionError(f"{name} is not what was put")
    return next((at for at, value in enumerate(values) if value is None), len(values))


def _content(name: str) -> bytes:
    """Return a block that is like no other."""
    return struct.pack("<16s", name.encode()) * (BLOCK_BYTES // 16)
