"""The conductor over workers that have both roles, and fail at every stage."""

import asyncio

import pytest

from serving.scheduling.placement import LeastLoaded
from serving.scheduling.requests import Finish
from serving.scheduling.scheduler import Policies, Scheduler
from serving.workers import protocol as p
from tests.serving.conductor.test_conductor import PROMPT, nothing_left, play, request, running
from tests.serving.fakes import Fleet, answer
from tests.waiting import until_async

pytestmark = pytest.mark.asyncio


def asked(worker):
    return [type(message).__name__ for message in worker.seen]


async def test_a_request_is_one_for_its_worker():
    fleet = Fleet(0, 0, coupled=2)
    async with running(fleet) as conductor:
        tokens, end = await play(conductor, request())
        assert tokens == answer(PROMPT, 8)
        assert isinstance(end, Finish)
        assert (end.reason, end.generated_tokens, end.prompt_tokens) == ("length", 8, 40)
        assert [asked(worker) for worker in fleet.coupled] == [["Generate"], []]
        tokens, end = await play(conductor, request(count=1))
        assert tokens == answer(PROMPT, 1)
        (line, _) = conductor.stats.lines
        assert line.prefill == line.decode == "c0"
        assert conductor.stats.prefill_s == pytest.approx(0.02)
        nothing_left(fleet, conductor)


@pytest.mark.parametrize("stage", ["prefill", "token 0", "token 3", "end"])
async def test_a_worker_that_dies_at_any_stage_costs_no_token(stage):
    fleet = Fleet(0, 0, coupled=2)
    async with running(fleet) as conductor:
        first, second = fleet.coupled
        reached, go = first.holding(stage)
        playing = asyncio.create_task(play(conductor, request()))
        await asyncio.wait_for(reached.wait(), 10)
        first.die()
        go.set()
        tokens, end = await playing
        assert tokens == answer(PROMPT, 8)
        assert (end.reason, end.generated_tokens) == ("length", 8)
        # Who died after the last token has answered.
        assert end.resumed == len(second.seen) == (stage != "end")
        nothing_left(fleet, conductor)


@pytest.mark.parametrize("stage", ["prefill", "token 2"])
async def test_a_failure_is_tried_elsewhere_and_a_cancel_ends_it(stage):
    fleet = Fleet(0, 0, coupled=2)
    async with running(fleet) as conductor:
        first, second = fleet.coupled
        first.fail[stage] = p.Failed("internal", "a defect", "see its log", True)
        tokens, end = await play(conductor, request())
        assert (tokens, end.resumed) == (answer(PROMPT, 8), 1)
        assert asked(second) == ["Generate"]
        reached, _ = first.holding(stage)
        playing = asyncio.create_task(play(conductor, request()))
        await asyncio.wait_for(reached.wait(), 10)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await until_async(fleet.idle)
        assert first.cancelled
        nothing_left(fleet, conductor)


async def test_beside_workers_of_one_role_it_replaces_those_that_are_gone():
    fleet = Fleet(1, 1, coupled=1)
    async with running(fleet) as conductor:
        for gone in (fleet.prefill[0], fleet.decode[0]):
            tokens, _ = await play(conductor, request())
            assert tokens == answer(PROMPT, 8)
            await conductor.leave(gone.address)
        tokens, _ = await play(conductor, request())
        assert tokens == answer(PROMPT, 8)
        assert asked(fleet.prefill[0]) == ["Prefill"]
        assert asked(fleet.decode[0]) == ["Decode"]
        assert asked(fleet.coupled[0])[-1] == "Generate"
        nothing_left(fleet, conductor)


class OnFirst(LeastLoaded):
    """All prompts are computed by the first one."""

    def place(self, demand, instances, costs):
        return super().place(demand, instances[:1], costs)


async def test_a_full_one_hands_its_answers_to_another():
    """The KV is pushed there, as from a prefill to a decode worker."""
    fleet = Fleet(0, 0, coupled=2)
    first, second = fleet.coupled
    first.kv_blocks = 6  # of 16 tokens: two prompts of 40 and their answers
    async with running(fleet, scheduler=Scheduler(None, Policies(OnFirst()))) as conductor:
        reached, go = first.holding("token 3")
        playing = [asyncio.create_task(play(conductor, request(f"r{n}"))) for n in range(2)]
        await asyncio.wait_for(reached.wait(), 10)
        tokens, _ = await play(conductor, request("r2"))
        assert tokens == answer(PROMPT, 8)
        assert asked(first) == ["Generate", "Generate", "Prefill"]
        assert first.seen[-1].decode_at == "c1"
        assert asked(second) == ["Decode"]
        go.set()
        for tokens, _ in await asyncio.gather(*playing):
            assert tokens == answer(PROMPT, 8)
        nothing_left(fleet, conductor)


async def test_what_steps_with_and_without_a_prompt_take_is_learnt():
    fleet = Fleet(0, 0, coupled=1)
    async with running(fleet) as conductor:
        worker, cost = fleet.coupled[0], conductor.scheduler.costs.decode
        before = cost.predict(4, 0, 256) - cost.predict(4, 0)
        for number in range(40):
            worker.steps = ((4, 256 * (number % 2), 0.01 + 0.5 * (number % 2)),)
            seen = cost._fit.coefficients
            await until_async(lambda seen=seen: cost._fit.coefficients != seen)
            if cost.predict(4, 0, 256) - cost.predict(4, 0) > 5 * before:
                break
        assert cost.predict(4, 0, 256) - cost.predict(4, 0) > 5 * before
