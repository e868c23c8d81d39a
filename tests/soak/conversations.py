"""Conversations that share how they begin: `python -m tests.soak.conversations [--turns 224]`.

A system of real processes serves sessions, each of which begins with one of a few long system
prompts and grows turn by turn. Turns come at random times (Poisson), from a session whose last
answer has come. The same turns are played under each placement policy in turn, each time on a
system that has just been started and has served one prompt; at last under the cache-centric one by
as many coupled workers as there were of both roles.

It prints the times to the first token and between tokens and how much of the prompts was found, by
policy, and fails where a policy that predicts nothing, or pulls nothing, has the least mean of all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass, field

from serving.scheduling.policies import PLACEMENTS
from serving.scheduling.requests import Finish, Piece, Request
from serving.system import ServingSystem, SystemSettings
from serving.workers.protocol import Sampling
from tests.soak.overload import print_table

SYSTEM_PROMPTS = 4
SYSTEM_TOKENS = 1024
TURN_TOKENS = 256
ANSWER_TOKENS = 4
DEADLINE_S = 120.0
KV_BLOCKS = 1024
"""So many that none is refused for want of them."""


@dataclass
class Outcome:
    """What a policy led to."""

    first_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0

    def row(self):
        """Figures by name."""
        return {
            "turns": len(self.first_s),
            "first token mean ms": round(1e3 * statistics.mean(self.first_s)),
            "first token median ms": round(1e3 * statistics.median(self.first_s)),
            "first token p90 ms": round(1e3 * statistics.quantiles(self.first_s, n=10)[-1]),
            "between tokens mean ms": round(1e3 * statistics.mean(self.between_s), 1),
            "between tokens p90 ms": round(1e3 * statistics.quantiles(self.between_s, n=10)[-1], 1),
            "found %": round(100 * self.cached_tokens / self.prompt_tokens, 1),
            "seconds": round(self.seconds, 1),
        }


class Sessions:
    """Conversations under way; tokens are the same for the same seed."""

    def __init__(self, count: int, seed: int) -> None:
        source = random.Random(seed)
        begins = [tokens(source, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        self._said = [list(source.choice(begins)) for _ in range(count)]
        self._idle = list(range(count))
        self._idle_again = asyncio.Condition()
        self._random = random.Random(seed + 1)

    async def next_turn(self):
        """A session whose turn it is, and its prompt."""
        async with self._idle_again:
            await self._idle_again.wait_for(lambda: self._idle)
            session = self._idle.pop(self._random.randrange(len(self._idle)))
        self._said[session] += tokens(self._random, TURN_TOKENS)
        return session, tuple(self._said[session])

    async def answered(self, session, answer):
        """It may say something again."""
        self._said[session] += answer
        async with self._idle_again:
            self._idle.append(session)
            self._idle_again.notify()


def tokens(source, count):
    return [source.randrange(256) for _ in range(count)]


async def ask(system, name, prompt, outcome):
    """The answer to a turn."""
    last = time.monotonic()
    answer: list[int] = []
    request = Request(name, prompt, Sampling(), ANSWER_TOKENS, deadline_s=DEADLINE_S)
    async for each in system.conductor.submit(request):
        if isinstance(each, Piece):
            now = time.monotonic()
            times = outcome.between_s if answer else outcome.first_s
            times.append(now - last)
            last = now
            answer += each.tokens
        else:
            assert isinstance(each, Finish), each
            outcome.cached_tokens += each.cached_tokens
    outcome.prompt_tokens += len(prompt)
    return answer


async def converse(system, options, rate):
    """All turns, at random times."""
    outcome, sessions, tasks = Outcome(), Sessions(options.sessions, options.seed), []
    source = random.Random(options.seed)

    async def turn(number, session, prompt):
        answer = await ask(system, f"turn-{number}", prompt, outcome)
        await sessions.answered(session, answer)

    began = at = time.monotonic()
    for number in range(options.turns):
        at += source.expovariate(rate)
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        session, prompt = await sessions.next_turn()
        tasks.append(asyncio.create_task(turn(number, session, prompt)))
    await asyncio.gather(*tasks)
    outcome.seconds = time.monotonic() - began
    return outcome


async def play(policy, options, rate, *, coupled=False):
    """The figures of one policy, and the rate of turns."""
    split = {"prefill": options.prefill, "decode": options.decode}
    settings = SystemSettings(
        **({"coupled": sum(split.values())} if coupled else split),
        port=0,
        fixed_roles=True,
        requests_max=10_000,
        model=options.model,
        placement=policy,
        balancing=options.balancing,
        ttft_s=1000.0,
        tbt_s=1000.0,
        worker={"own_blocks": options.own_blocks, "kv_blocks": KV_BLOCKS},
    )
    async with ServingSystem(settings) as system:
        source, cold = random.Random(options.seed + 2), Outcome()
        for number in range(2):  # the first one loads code
            await ask(system, f"cold-{number}", tuple(tokens(source, SYSTEM_TOKENS)), cold)
        if not rate:
            rate = options.load * options.prefill / cold.first_s[-1]
            print(f"a system prompt takes {cold.first_s[-1]:.3f} s; {rate:.2f} turns a second")
        return await converse(system, options, rate), rate


async def run(options) -> int:
    """Play, print; returns the exit code."""
    rows, rate = {}, options.rate
    for policy in options.policies.split(","):
        outcome, rate = await play(policy, options, rate)
        rows[policy] = outcome.row()
        print(f"{policy}: {rows[policy]['first token mean ms']} ms", flush=True)
    means = {policy: row["first token mean ms"] for policy, row in rows.items()}
    outcome, _ = await play("cache-centric", options, rate, coupled=True)
    rows["coupled"] = outcome.row()
    print_table(rows)
    if options.json:
        print(json.dumps(rows))
    best = min(means, key=means.__getitem__)
    if best not in ("cache-centric", "thrifty", "considerate") and "cache-centric" in means:
        print(f"FAILED: {best} has the least mean time to the first token")
        return 1
    return 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=224)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--load", type=float, default=0.65, help="of prefill, if nothing is found")
    parser.add_argument("--rate", type=float, default=0.0, help="turns a second; 0: by --load")
    parser.add_argument("--policies", default=",".join(PLACEMENTS))
    parser.add_argument("--prefill", type=int, default=2)
    parser.add_argument("--decode", type=int, default=2)
    parser.add_argument("--balancing", type=float, default=1.5)
    parser.add_argument("--own-blocks", type=int, default=256)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
