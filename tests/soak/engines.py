"""Conversations over two servers of vLLM, routed by what they hold and in turn.

    python -m tests.soak.engines [--turns 96]        in an environment with vLLM: make vllm-routing

A real front (`mooncake serve --backend`) has two servers of one random model behind it, on the CPU.
Sessions begin with one of a few long system prompts and grow turn by turn. Who speaks when is drawn
beforehand (Poisson arrivals, a fixed seed), so the same turns are played under each policy; a turn
waits for the answer to the one before. The policies take turns too, each time before a new front
and servers whose caches were emptied. An engine has room for about half of what the sessions come
to, as if it served many.

It prints times to the first token and how much of the prompts was cached, by policy, and fails
where a token of an answer differs between two runs, or where the first policy has not the least
mean.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import aiohttp

from tests.soak.conversations import Outcome, tokens
from tests.soak.overload import print_table
from tests.vllm.model import add_tokenizer, make_model
from tests.vllm.servers import BLOCK, SERVED, asked, before, served

SYSTEM_PROMPTS = 4
SYSTEM_TOKENS = 1024
TURN_TOKENS = 192
ANSWER_TOKENS = 8
WARM_UP = 6
"""Prompts before those that count: the front learns from them what a prompt takes."""
DEADLINE_S = 300.0


class Script:
    """Who says what when; the same for the same seed, but for the answers in between."""

    def __init__(self, options, rate) -> None:
        source = random.Random(options.seed)
        begins = [tokens(source, SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
        self.begins = [source.choice(begins) for _ in range(options.sessions)]
        self.turns = []
        at, last = 0.0, -1
        for _ in range(options.turns):
            at += source.expovariate(rate)
            # Who has just spoken reads the answer first.
            speaker = source.choice([each for each in range(options.sessions) if each != last])
            last = speaker
            self.turns.append((at, speaker, tokens(source, TURN_TOKENS)))


async def ask(http, url, prompt, outcome):
    """The tokens of the answer to a turn."""
    body = {
        "model": SERVED, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0,
        "ignore_eos": True, "stream": True, "return_token_ids": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    began, told, answer = time.monotonic(), [], []
    async with http.post(url + "/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            for choice in event.get("choices", ()):
                if ids := choice.get("token_ids"):
                    told.append(time.monotonic())
                    answer += ids
            if usage := event.get("usage"):
                outcome.prompt_tokens += usage["prompt_tokens"]
                outcome.cached_tokens += usage["prompt_tokens_details"]["cached_tokens"]
    assert len(answer) == ANSWER_TOKENS, f"{len(answer)} tokens were told"
    outcome.first_s.append(told[0] - began)
    outcome.between_s += [later - earlier for earlier, later in pairwise(told)]
    return answer


async def converse(http, url, script, outcome):
    """All turns of a script; returns the answers in its order."""
    said = [list(begin) for begin in script.begins]
    last: dict[int, asyncio.Task] = {}

    async def turn(speaker, words, earlier):
        if earlier is not None:
            await earlier
        said[speaker] += words
        answer = await ask(http, url, said[speaker], outcome)
        said[speaker] += answer
        return answer

    began, tasks = time.monotonic(), []
    for at, speaker, words in script.turns:
        await asyncio.sleep(max(0.0, began + at - time.monotonic()))
        task = asyncio.create_task(turn(speaker, words, last.get(speaker)))
        last[speaker] = task
        tasks.append(task)
    answers = await asyncio.gather(*tasks)
    outcome.seconds += time.monotonic() - began
    return answers


async def warm_up(http, urls, seed):
    """Seconds of a system prompt alone; the first ones load code."""
    source, outcome = random.Random(seed), Outcome()
    for number in range(WARM_UP):
        count = SYSTEM_TOKENS // (1 + number % 2)
        await ask(http, urls[number % len(urls)], tokens(source, count), outcome)
    return statistics.median(outcome.first_s[2::2])


async def play(servers, policy, options, rate, outcome):
    """Play the script before a new front; returns the answers, and what it says of itself."""
    for server in servers.values():
        await asyncio.to_thread(asked, server.url + "/reset_prefix_cache", method="POST")
    timeout = aiohttp.ClientTimeout(DEADLINE_S)
    with before(servers, policy) as url:
        async with aiohttp.ClientSession(timeout=timeout) as http:
            await warm_up(http, [url], options.seed + 1)
            answers = await converse(http, url, Script(options, rate), outcome)
            return answers, await asyncio.to_thread(asked, url + "/stats")


async def run(options, servers) -> int:
    """Play, compare, print; returns the exit code."""
    rate, policies = options.rate, options.policies.split(",")
    if not rate:
        urls = [server.url for server in servers.values()]
        async with aiohttp.ClientSession() as http:
            alone_s = await warm_up(http, urls, options.seed + 2)
        rate = options.load * len(servers) / alone_s
        print(f"a system prompt takes {alone_s:.3f} s; {rate:.2f} turns a second", flush=True)
    outcomes = {policy: Outcome() for policy in policies}
    expected, stats = None, {}
    for number in range(options.rounds):
        # Who goes first changes: a machine that gets slower is nobody's fault.
        for policy in policies if number % 2 == 0 else reversed(policies):
            answers, stats[policy] = await play(servers, policy, options, rate, outcomes[policy])
            expected = expected or answers
            if answers != expected:
                at = [mine == first for mine, first in zip(answers, expected, strict=True)]
                print(f"FAILED: turn {at.index(False)} of {policy} has other tokens than before")
                return 1
            mean_ms = 1e3 * statistics.mean(outcomes[policy].first_s[-options.turns :])
            print(f"round {number}, {policy}: {mean_ms:.0f} ms", flush=True)
    rows = {policy: outcome.row() for policy, outcome in outcomes.items()}
    for policy, outcome in outcomes.items():
        rows[policy]["cached tokens"] = outcome.cached_tokens
        first = stats[policy]["first_tokens"]
        rows[policy]["predicted median ms"] = round(1e3 * first["predicted_s"])
        rows[policy]["off by, median ms"] = round(1e3 * first["off_s"])
    print_table(rows)
    print(f"tokens of {options.turns} answers are equal in all {2 * options.rounds} runs")
    if options.json:
        print(json.dumps({"rows": rows, "stats": stats}))
    means = {policy: statistics.mean(outcome.first_s) for policy, outcome in outcomes.items()}
    best = min(means, key=means.__getitem__)
    if best != policies[0]:
        print(f"FAILED: {best} has the least mean time to the first token")
        return 1
    return 0


def main() -> int:
    """Parse the command line, start the servers, run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--turns", type=int, default=96)
    parser.add_argument("--sessions", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.35, help="of both, if nothing is cached")
    parser.add_argument("--rate", type=float, default=0.0, help="turns a second; 0: by --load")
    parser.add_argument("--policies", default="cache-centric,round-robin")
    parser.add_argument("--kv-tokens", type=int, default=16_384, help="room for KV of an engine")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-soak-")))
        made = make_model(folder / "model", hidden=options.hidden, layers=options.layers)
        model, servers = add_tokenizer(made), {}
        for name in "a", "b":  # one after the other: a start takes all cores
            servers[name] = stack.enter_context(
                served(
                    model,
                    *("--num-gpu-blocks-override", str(options.kv_tokens // BLOCK)),
                    VLLM_SERVER_DEV_MODE="1",  # for emptying its cache
                )
            )
        return asyncio.run(run(options, servers))


if __name__ == "__main__":
    sys.exit(main())
