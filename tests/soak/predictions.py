"""What the simulator predicts, and what happens: `python -m tests.soak.predictions`.

A system of real processes serves prompts one by one; of what its front has learnt by then a
hardware file is made, as `mooncake simulate fit` does. Then it serves a trace that is made up, at
the times of the trace, and the simulator plays the same trace on that hardware, with the same
policy, number of workers, memory and size of blocks.

It prints mean times to the first token and how much of the prompts was found, of both, and fails
where the means are more than 20 % apart, or what was found by more than a point. That needs a
machine that does nothing else: what makes it slower after the warm-up nobody could predict. So a
third column has what the simulator says with what the front had learnt by the end, and a failure
says how far computing alone was off. `--load` keeps waiting a small part of the times.
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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from eviction.trace import BLOCK_TOKENS, columns_of
from serving.front.board import ConductorBoard
from serving.scheduling.requests import Finish, Piece, Request
from serving.simulator.cluster import Cluster, Plan
from serving.simulator.measured import fit_hardware
from serving.simulator.outcomes import summary
from serving.system import ServingSystem, SystemSettings
from serving.traces.generating import Amount, Kind, generate
from serving.traces.shape import faster
from serving.workers.protocol import Sampling
from tests.soak.overload import print_table

OWN_BLOCKS = 256
KV_BLOCKS = 64
NETWORK_BYTES_PER_S = 2e9
"""Of shared memory; nothing measures it where nothing is pulled, and first tokens wait for none."""
LOAD_BYTES_PER_S = 10e9
"""About what is measured on a quiet machine; on others noise hides the milliseconds that it is."""
WARM = 24
TTFT_OFF = 0.20
FOUND_OFF = 0.01
KIND = Kind(
    rate=1.0,
    turns=Amount(4, 4),
    prompts=3,
    zipf=1.0,
    prompt=Amount(1024, 1024),
    opening=Amount(600, 900),
    added=Amount(400, 600),
    output=Amount(6, 6),
    pause=Amount(6, 8),
    longest=4000,
)


class Figures(NamedTuple):
    """Means over all requests."""

    first_s: float
    computing_s: float
    """With the load of what was found, in what is predicted."""
    found: float


@dataclass
class Seen:
    """What users saw."""

    first_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    computing_s: float = 0.0

    @property
    def figures(self):
        """As `compare` takes them."""
        turns = len(self.first_s)
        found = self.cached_tokens / self.prompt_tokens
        return Figures(statistics.mean(self.first_s), self.computing_s / turns, found)


def prompt_of(names, count):
    """The tokens that stand for blocks of a trace: equal names, equal tokens."""
    tokens = [
        token
        for name in names
        for token in random.Random(int(name)).choices(range(256), k=BLOCK_TOKENS)
    ]
    return tuple(tokens[:count])


async def ask(system, name, prompt, answer_tokens, seen):
    """Send a prompt, and note what came of it."""
    asked = time.monotonic()
    request = Request(name, prompt, Sampling(), answer_tokens, deadline_s=120.0)
    first = True
    async for each in system.conductor.submit(request):
        if isinstance(each, Piece):
            if first:
                seen.first_s.append(time.monotonic() - asked)
            first = False
        else:
            assert isinstance(each, Finish), each
            seen.cached_tokens += each.cached_tokens
    seen.prompt_tokens += len(prompt)


async def learn(system, seed):
    """Have prompts of many lengths served one by one, some of them twice, and longer then."""
    source, name, seen = random.Random(seed), 1 << 40, Seen()
    for number in range(WARM):
        blocks = 1 + number % 6
        names = range(name, name + blocks + 2)
        count = blocks * BLOCK_TOKENS + source.randrange(BLOCK_TOKENS)
        await ask(system, f"warm-{number}", prompt_of(names, count), 6, seen)
        more = count + source.randrange(1, BLOCK_TOKENS)
        await ask(system, f"again-{number}", prompt_of(names, more), 6, seen)
        name += len(names)
    return learnt(system)


def learnt(system):
    """The hardware by what the front has learnt so far."""
    stats = ConductorBoard(system.conductor).stats()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stats.json"
        path.write_text(json.dumps(stats))
        return fit_hardware(
            path,
            network_bytes_per_s=NETWORK_BYTES_PER_S,
            load_bytes_per_s=LOAD_BYTES_PER_S,
        )


async def play(system, trace):
    """Serve a trace at its times."""
    seen, tasks, computed_s = Seen(), [], system.conductor.stats.prefill_s
    first_ms = int(trace.timestamps_ms[0])
    prompts = [
        prompt_of(trace.ids[begin:end], int(count))
        for begin, end, count in zip(
            trace.offsets[:-1], trace.offsets[1:], trace.input_tokens, strict=True
        )
    ]
    began = time.monotonic()
    for number, prompt in enumerate(prompts):
        at = began + (int(trace.timestamps_ms[number]) - first_ms) / 1e3
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        answer_tokens = int(trace.output_tokens[number])
        turn = ask(system, f"request-{number}", prompt, answer_tokens, seen)
        tasks.append(asyncio.create_task(turn))
    await asyncio.gather(*tasks)
    seen.computing_s = system.conductor.stats.prefill_s - computed_s
    return seen


def at_load(trace, hardware, plan, load):
    """The trace so much quicker or slower that computing takes this share of its time."""
    outcomes = Cluster(plan, hardware).run(trace)
    lasts_s = float(trace.timestamps_ms[-1] - trace.timestamps_ms[0]) / 1e3
    return faster(trace, load * plan.prefill * lasts_s / float(outcomes.computing_s.sum()))


async def run(options) -> int:
    """Learn, play, simulate, print; returns the exit code."""
    plan = Plan(
        prefill=options.prefill,
        decode=options.decode,
        cache_tokens=OWN_BLOCKS * BLOCK_TOKENS,
        placement=options.placement,
    )
    settings = SystemSettings(
        prefill=options.prefill,
        decode=options.decode,
        port=0,
        fixed_roles=True,
        requests_max=10_000,
        placement=options.placement,
        admission="at-decode",
        ttft_s=1000.0,
        tbt_s=1000.0,
        worker={
            "block_tokens": BLOCK_TOKENS,
            "own_blocks": OWN_BLOCKS,
            "kv_blocks": KV_BLOCKS,
        },
    )
    rows = generate(replace(KIND, requests=options.requests), options.seed)
    trace = columns_of(list(rows))
    async with ServingSystem(settings) as system:
        hardware = await learn(system, options.seed)
        print(hardware)
        trace = at_load(trace, hardware, plan, options.load)
        seen = await play(system, trace)
        afterwards = learnt(system)
    predictions = (simulated(each, plan, trace) for each in (hardware, afterwards))
    return compare(seen.figures, *predictions)


def simulated(hardware, plan, trace):
    """What the simulator says of a trace."""
    outcomes = Cluster(plan, hardware).run(trace)
    told = summary(outcomes, trace.input_tokens, plan.ttft_s, plan.tbt_s)
    return Figures(told["ttft_mean_s"], told["prefill_mean_s"], told["hit_ratio"])


def compare(happened, predicted, afterwards) -> int:
    """Print all, and say whether the first two are alike."""
    columns = {"happened": happened, "predicted": predicted, "afterwards": afterwards}
    print_table(
        {
            name: {
                "first token mean ms": round(1e3 * of.first_s, 1),
                "computing mean ms": round(1e3 * of.computing_s, 1),
                "found %": round(100 * of.found, 2),
            }
            for name, of in columns.items()
        }
    )
    complaints = []
    first_off = predicted.first_s / happened.first_s - 1
    found_off = predicted.found - happened.found
    if abs(first_off) > TTFT_OFF:
        computing_off = predicted.computing_s / happened.computing_s - 1
        complaints.append(
            f"the prediction of first tokens is {first_off:+.0%} off, and that of computing alone "
            f"{computing_off:+.0%}: if the second is as large, the machine did other things"
        )
    if abs(found_off) > FOUND_OFF:
        complaints.append(f"that of what is found is {100 * found_off:+.1f} points off")
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    return bool(complaints)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--load", type=float, default=0.3, help="of prefill")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--placement", default="cache-centric")
    parser.add_argument("--seed", type=int, default=1)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
