"""A system of coupled workers, as processes: the tokens of the split one, whoever dies."""

import asyncio
import contextlib

import pytest

from serving.scheduling.requests import Failure, Finish, Piece, Request
from serving.system import ServingSystem, SystemSettings
from serving.workers.client import WorkerClient
from serving.workers.local import LocalWorkers
from serving.workers.protocol import Sampling
from tests.serving.engine.support import prompts
from tests.serving.workers.support import disaggregated
from tests.soak.serving import left_over
from tests.waiting import until_async

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

# Many layers for small blocks: slow enough to be killed in the middle of a prompt.
MODEL = "nano,layers=24,context_max=8192"
WORKER = {"block_tokens": 8, "chunk_tokens": 64, "kv_blocks": 2000, "step_tokens": 32}
LONG = prompts(1, seed=91, shortest=800, longest=800)[0]
SAMPLING = Sampling(temperature=0.8, seed=7)


@contextlib.asynccontextmanager
async def coupled(**settings):
    given = SystemSettings(
        coupled=2, port=0, model=MODEL, segment="256MB", worker=WORKER, ttft_s=3600.0,
        tbt_s=600.0, **settings,
    )  # fmt: skip
    async with ServingSystem(given) as system:
        yield system
        assert await left_over(system) == []


async def play(system, name, tokens, count, told=None, **more):
    """The tokens of an answer, and its end."""
    told = [] if told is None else told
    request = Request(name, tuple(tokens), SAMPLING, count, **{"deadline_s": 250.0} | more)
    async for outcome in system.conductor.submit(request):
        if isinstance(outcome, Piece):
            told.extend(outcome.tokens)
    return told, outcome


async def expected(asked):
    """The answers of a prefill and a decode worker."""
    with LocalWorkers(model=MODEL, **WORKER) as workers:
        first, second = (WorkerClient(address) for address in workers.addresses)
        try:
            return [
                await disaggregated(
                    first,
                    second,
                    tokens,
                    count=count,
                    sampling=SAMPLING,
                    push=True,
                    deadline_ms=250_000,
                )
                for tokens, count in asked
            ]
        finally:
            await asyncio.gather(first.close(), second.close())


async def kill_who_has(system, name):
    """Kill the worker that computes and answers a request."""
    flight = system.conductor.scheduler.ledger.flights[name]
    assert flight.prefill == flight.decode
    number = system.workers.addresses.index(flight.decode)
    await asyncio.to_thread(system.workers.kill, number)


async def test_tokens_survive_workers_that_are_killed_while_they_compute_and_answer():
    asked = [(LONG, 40), *((prompt, 12) for prompt in prompts(8, seed=92, longest=100))]
    right = await expected(asked)
    async with coupled() as system:
        flights = system.conductor.scheduler.ledger.flights
        told = []
        playing = [asyncio.create_task(play(system, "long", LONG, 40, told))]
        await until_async(lambda: "long" in flights and flights["long"].began is not None)
        assert flights["long"].stage == "prefill"
        await kill_who_has(system, "long")
        playing += [
            asyncio.create_task(play(system, f"r{at}", *each)) for at, each in enumerate(asked[1:])
        ]
        await until_async(lambda: len(told) > 3, 200)
        assert flights["long"].stage == "decode"
        await kill_who_has(system, "long")
        ends = await asyncio.gather(*playing)
        assert [tokens for tokens, _ in ends] == right
        assert all(isinstance(end, Finish) for _, end in ends)
        assert ends[0][1].resumed == 2
        members = system.conductor.fleet.members.values
        await until_async(lambda: [m.hello.role for m in members() if m.there] == ["coupled"] * 2)
        # A deadline in the middle of a prompt, and of an answer.
        for tokens, count in (
            (prompts(1, seed=93, shortest=4000, longest=4000)[0], 4),
            ([1], 6000),
        ):
            _, end = await play(system, "late", tokens, count, deadline_s=1.0)
            assert isinstance(end, Failure)
            assert end.code == "deadline"
