"""Twice what a serving system can do: `python -m tests.soak.overload [--seconds 60] [--seed N]`.

One system of real processes; prompts that share nothing, answers of one length, arrivals at random
times at `--factor` times the capacity that was measured just before. The same arrivals are played
under each admission policy in turn. KV goes through the pool, so that a decode worker says whether
it has room after the prefill, as the paper's baseline does.

It prints, by policy, who was refused where, the prefill time that was spent on requests which got
no answer, and how prefill and decode load went together (correlation; below 0 they take turns). It
fails on a request that outlasts its deadline, and when early rejection wastes no less prefill time
than rejection at decode.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

from serving.scheduling.policies import ADMISSIONS
from serving.scheduling.requests import Failure, Finish, Request
from serving.scheduling.views import Slo
from serving.system import ServingSystem, SystemSettings
from serving.workers.protocol import Sampling

PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX = 256, 4096
ANSWER_TOKENS = 256
RUNNING_MAX = 4
"""Answers that a decode worker computes at a time."""
DEADLINE_S = 60.0
SLACK_S = 5.0
SAMPLE_S = 0.2


@dataclass
class Outcome:
    """What a policy led to."""

    ends: Counter = field(default_factory=Counter)
    offered: int = 0
    late: int = 0
    prefill_s: float = 0.0
    wasted_s: float = 0.0
    seconds: float = 0.0
    loads: list[tuple[float, float]] = field(default_factory=list)

    def row(self):
        """Figures by name."""
        answered = self.ends["length"] + self.ends["stop"]
        early = self.ends["prefill_busy"] + self.ends["decode_busy"] + self.ends["no_room"]
        prefill, decode = zip(*self.loads, strict=True)
        spent = self.prefill_s + self.wasted_s
        return {
            "offered": self.offered,
            "answered": answered,
            "refused early": early,
            "refused at decode": self.ends["refused_at_decode"],
            "other ends": self.offered - answered - early - self.ends["refused_at_decode"],
            "answered/s": round(answered / self.seconds, 3),
            "prefill s": round(spent, 2),
            "wasted s": round(self.wasted_s, 2),
            "wasted %": round(100 * self.wasted_s / spent, 1) if spent else 0.0,
            "load correlation": round(correlation(prefill, decode), 3),
            "decode load mean": round(statistics.mean(decode), 3),
            "decode load deviation": round(statistics.pstdev(decode), 3),
            "prefill load deviation": round(statistics.pstdev(prefill), 3),
        }


def correlation(left, right):
    """Pearson's; 0 when one of them never changes."""
    if len(left) < 3 or statistics.pstdev(left) == 0 or statistics.pstdev(right) == 0:
        return 0.0
    return statistics.correlation(left, right)


class Load:
    """Requests against one conductor."""

    def __init__(self, system: ServingSystem, seed: int) -> None:
        self.conductor = system.conductor
        self.random = random.Random(seed)
        self.serial = 0
        self.prompt_tokens = PROMPT_TOKENS_MIN

    def request(self, source: random.Random) -> Request:
        """A prompt nobody sent before."""
        self.serial += 1
        tokens = tuple(source.randrange(256) for _ in range(self.prompt_tokens))
        return Request(f"r{self.serial}", tokens, Sampling(), ANSWER_TOKENS, deadline_s=DEADLINE_S)

    async def play(self, request: Request, outcome: Outcome) -> None:
        """Send one and note its end."""
        began, end = time.monotonic(), None
        async for each in self.conductor.submit(request):
            end = each
        outcome.late += time.monotonic() - began > request.deadline_s + SLACK_S
        outcome.ends[end.reason if isinstance(end, Finish) else end.code] += 1
        assert isinstance(end, Finish | Failure)

    async def closed_loop(self, count: int) -> tuple[float, float, float]:
        """(requests a second, seconds of a prefill, of a decode), with full batches."""
        stats, scratch = self.conductor.stats, Outcome()
        before, began = stats.prefill_s, time.monotonic()
        gate = asyncio.Semaphore(RUNNING_MAX)

        async def one():
            async with gate:
                await self.play(self.request(self.random), scratch)

        await asyncio.gather(*(one() for _ in range(count)))
        seconds = time.monotonic() - began
        lines = list(stats.lines)[-count:]
        decode_s = statistics.median(line.total_s - line.ttft_s for line in lines)
        return count / seconds, (stats.prefill_s - before) / count, decode_s

    async def calibrate(self, prefills: int) -> tuple[float, float, float]:
        """Choose a length of prompts at which prefill could do half as much again as decode."""
        for _ in range(2):  # the first round loads code
            _, _, decode_s = await self.closed_loop(2 * RUNNING_MAX)
        wanted_s = prefills * decode_s / (1.5 * RUNNING_MAX)
        predict = self.conductor.scheduler.costs.prefill.predict
        lengths = range(PROMPT_TOKENS_MIN, PROMPT_TOKENS_MAX, 64)
        self.prompt_tokens = min(lengths, key=lambda n: abs(predict(n, 0) - wanted_s))
        return await self.closed_loop(4 * RUNNING_MAX)

    async def overload(self, rate: float, seconds: float, seed: int) -> Outcome:
        """Arrivals at random times, the same for the same seed; waits for the last end."""
        outcome, source = Outcome(), random.Random(seed)
        stats = self.conductor.stats
        prefill_s, wasted_s = stats.prefill_s, stats.wasted_prefill_s
        began = at = time.monotonic()
        sampling = asyncio.create_task(self.sample(outcome))
        tasks = []
        while at - began < seconds:
            await asyncio.sleep(max(0.0, at - time.monotonic()))
            outcome.offered += 1
            tasks.append(asyncio.create_task(self.play(self.request(source), outcome)))
            at += source.expovariate(rate)
        sampling.cancel()
        async with asyncio.timeout(DEADLINE_S + SLACK_S):
            await asyncio.gather(*tasks)
        outcome.seconds = time.monotonic() - began
        outcome.prefill_s = stats.prefill_s - prefill_s
        outcome.wasted_s = stats.wasted_prefill_s - wasted_s
        return outcome

    async def sample(self, outcome: Outcome) -> None:
        """Note the loads until cancelled."""
        while True:
            loads = self.conductor.scheduler.loads(self.conductor.clock())
            outcome.loads.append((loads.prefill, loads.decode))
            await asyncio.sleep(SAMPLE_S)


def print_table(rows):
    names = list(next(iter(rows.values())))
    width = max(map(len, names))
    print(" " * width, *(f"{policy:>10}" for policy in rows))
    for name in names:
        print(f"{name:<{width}}", *(f"{row[name]:>10}" for row in rows.values()))


async def run(options) -> int:
    """Calibrate, play, print; returns the exit code."""
    settings = SystemSettings(
        prefill=options.prefill,
        decode=options.decode,
        port=0,
        push=False,
        fixed_roles=True,
        segment="512MB",
        requests_max=10_000,
        model=options.model,
        worker={"running_max": RUNNING_MAX},
        admission="at-decode",
        ttft_s=1000.0,
        tbt_s=1000.0,
    )
    async with ServingSystem(settings) as system:
        load, scheduler = Load(system, options.seed), system.conductor.scheduler
        rate, prefill_s, decode_s = await load.calibrate(options.prefill)
        tokens = RUNNING_MAX * (load.prompt_tokens + ANSWER_TOKENS // 2)
        tbt_s = 1.15 * scheduler.costs.decode.predict(RUNNING_MAX, tokens)
        # A first token may wait for a few prompts; a batch that is full is at the other limit.
        ttft_s = 4 * prefill_s
        scheduler.slo = Slo(ttft_s, tbt_s)
        print(
            f"{options.prefill} prefill, {options.decode} decode workers; prompts of "
            f"{load.prompt_tokens} tokens; capacity {rate:.2f}/s, "
            f"a prefill {prefill_s:.3f} s, a decode {decode_s:.2f} s; SLO: first token "
            f"{ttft_s:.2f} s, next one {tbt_s * 1000:.1f} ms; offered {options.factor * rate:.2f}/s"
        )
        rows, late = {}, 0
        for policy in options.policies.split(","):
            scheduler.policies.admission = ADMISSIONS[policy]()
            outcome = await load.overload(options.factor * rate, options.seconds, options.seed)
            rows[policy], late = outcome.row(), late + outcome.late
    print_table(rows)
    if options.json:
        print(json.dumps(rows))
    complaints = [f"{late} requests outlasted their deadline"] if late else []
    if {"at-decode", "forecast"} <= rows.keys():
        baseline, forecast = rows["at-decode"]["wasted s"], rows["forecast"]["wasted s"]
        if forecast >= baseline > 0:
            complaints.append(f"early rejection wasted {forecast} s, the baseline {baseline} s")
    for complaint in complaints:
        print(f"FAILED: {complaint}")
    return bool(complaints)


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--factor", type=float, default=2.0)
    parser.add_argument("--policies", default="at-decode,load,forecast")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
