"""The conductor over workers that fail at every stage: an answer or a reason, and nothing left."""

import asyncio
import contextlib

import pytest

from serving.conductor.conductor import Conductor
from serving.scheduling.costs import Costs
from serving.scheduling.index import POOL
from serving.scheduling.learnt import LearntTransfer
from serving.scheduling.requests import Failure, Finish, Piece, Request
from serving.scheduling.roles import Change
from serving.scheduling.scheduler import Policies, Scheduler
from serving.scheduling.views import Rejection, Slo
from serving.workers import protocol as p
from serving.workers.naming import chain_of
from tests.serving.fakes import CARD, Fleet, answer
from tests.waiting import until_async
from transfer_engine.errors import ConfigError

pytestmark = pytest.mark.asyncio

PROMPT = tuple(range(1, 41))


def request(name="r", count=8, deadline_s=10.0, **more):
    return Request(name, PROMPT, p.Sampling(), count, deadline_s=deadline_s, **more)


@contextlib.asynccontextmanager
async def running(fleet, **settings):
    conductor = Conductor(connect=fleet.connect, **settings)
    await conductor.start(fleet.addresses)
    try:
        yield conductor
    finally:
        await conductor.close()


async def play(conductor, asked):
    """The tokens told, and the end."""
    tokens = []
    async with asyncio.timeout(20):
        async for outcome in conductor.submit(asked):
            if isinstance(outcome, Piece):
                tokens += outcome.tokens
            else:
                end = outcome
    return tokens, end


def known(conductor, holder):
    """Let the index say that a holder has the whole blocks of the prompt."""
    conductor.index.add(holder, chain_of(conductor.names.index(PROMPT)))


def nothing_left(fleet, conductor):
    assert fleet.idle()
    assert not conductor.scheduler.ledger.flights
    assert conductor.under_way == 0


async def test_a_request_is_answered_and_leaves_nothing():
    fleet = Fleet()
    async with running(fleet) as conductor:
        tokens, end = await play(conductor, request())
        assert tokens == answer(PROMPT, 8)
        assert isinstance(end, Finish)
        assert (end.reason, end.generated_tokens, end.prompt_tokens) == ("length", 8, 40)
        assert conductor.stats.outcomes == {"length": 1}
        nothing_left(fleet, conductor)


async def test_an_answer_of_one_token_needs_no_decode():
    fleet = Fleet()
    async with running(fleet) as conductor:
        tokens, end = await play(conductor, request(count=1))
        assert tokens == answer(PROMPT, 1)
        assert end.reason == "length"
        assert not any(worker.seen for worker in fleet.decode)


async def test_a_request_goes_to_the_worker_that_holds_its_prefix():
    fleet = Fleet()
    async with running(fleet) as conductor:
        known(conductor, "p1")
        tokens, _ = await play(conductor, request())
        assert tokens == answer(PROMPT, 8)
        assert [len(worker.seen) for worker in fleet.prefill] == [0, 1]


@pytest.mark.parametrize(("bytes_per_s", "loaded"), [(1e9, True), (1.0, False)])
async def test_a_prefix_in_the_pool_is_loaded_where_that_is_quicker(bytes_per_s, loaded):
    fleet, costs = Fleet(prefill=1), Costs(transfer=LearntTransfer(bytes_per_s))
    fleet.prefill[0].pool_tokens = 32
    async with running(fleet, scheduler=Scheduler(costs=costs)) as conductor:
        known(conductor, POOL)
        tokens, end = await play(conductor, request())
        assert tokens == answer(PROMPT, 8)
        assert end.cached_tokens == conductor.stats.cached_tokens == (32 if loaded else 0)
        (asked,) = fleet.prefill[0].seen
        # A load that takes longer than it was to save is given up.
        assert (asked.prefix_blocks, asked.fetch_deadline_ms > 0) == (-1 if loaded else 0, loaded)


async def test_a_pull_that_brings_nothing_is_not_made_again_and_again():
    fleet, costs = Fleet(prefill=1), Costs(transfer=LearntTransfer(1.0))
    async with running(fleet, scheduler=Scheduler(costs=costs)) as conductor:
        known(conductor, POOL)
        fleet.prefill[0].pool_tokens = 0  # it is given up each time
        for _ in range(400):
            await play(conductor, request())
        pulls = [asked for asked in fleet.prefill[0].seen if asked.prefix_blocks]
        assert 1 <= len(pulls) < 10


@pytest.mark.parametrize(
    ("role", "stage"),
    [
        ("prefill", "prefill"),
        ("prefill", "transfer"),
        ("decode", "admission"),
        ("decode", "token 0"),
        ("decode", "token 5"),
    ],
)
async def test_a_worker_that_dies_is_replaced_and_no_token_changes(role, stage):
    fleet = Fleet()
    async with running(fleet) as conductor:
        victim = getattr(fleet, role)[0]
        reached, go = victim.holding(stage)
        playing = asyncio.create_task(play(conductor, request()))
        await asyncio.wait_for(reached.wait(), 10)
        victim.die()
        go.set()
        tokens, end = await playing
        assert tokens == answer(PROMPT, 8)
        assert (end.reason, end.resumed) == ("length", 1)
        assert conductor.stats.resumed == 1
        nothing_left(fleet, conductor)


@pytest.mark.parametrize(
    ("role", "stage", "count"), [("prefill", "transfer", 1), ("decode", "end", 8)]
)
async def test_a_worker_that_dies_after_the_last_token_costs_nothing(role, stage, count):
    fleet = Fleet()
    async with running(fleet) as conductor:
        victim = getattr(fleet, role)[0]
        reached, go = victim.holding(stage)
        playing = asyncio.create_task(play(conductor, request(count=count)))
        await asyncio.wait_for(reached.wait(), 10)
        victim.die()
        go.set()
        tokens, end = await playing
        assert tokens == answer(PROMPT, count)
        assert (end.reason, end.resumed) == ("length", 0)
        nothing_left(fleet, conductor)


async def test_a_worker_that_came_back_gets_work_again():
    fleet = Fleet(prefill=1, decode=1)
    async with running(fleet) as conductor:
        fleet.prefill[0].die()
        ledger = conductor.scheduler.ledger
        await until_async(lambda: not ledger.of_role("prefill"))
        _, end = await play(conductor, request())
        assert (end.code, end.status) == ("no_workers", 503)
        fleet.prefill[0].alive = True
        await until_async(lambda: ledger.of_role("prefill"))
        assert (await play(conductor, request()))[0] == answer(PROMPT, 8)


async def test_a_request_waits_for_a_worker_until_its_deadline():
    fleet = Fleet(prefill=1, decode=1)
    async with running(fleet) as conductor:
        reached, go = fleet.decode[0].holding("token 0")
        playing = asyncio.create_task(play(conductor, request(deadline_s=1.0)))
        await asyncio.wait_for(reached.wait(), 10)
        fleet.decode[0].die()
        go.set()
        tokens, end = await playing
        assert tokens == answer(PROMPT, len(tokens))
        assert (end.code, end.status) == ("deadline", 504)
        nothing_left(fleet, conductor)


async def test_a_retryable_failure_goes_elsewhere_and_another_one_ends():
    fleet = Fleet()
    async with running(fleet) as conductor:
        fleet.prefill[0].fail["prefill"] = p.Failed("draining", "it drains", retryable=True)
        tokens, end = await play(conductor, request())
        assert (tokens, end.resumed) == (answer(PROMPT, 8), 1)
        for worker in fleet.prefill:
            worker.fail["prefill"] = p.Failed("too_long", "too long", "shorten it")
        _, end = await play(conductor, request())
        assert (end.code, end.status) == ("too_long", 400)
        assert "shorten it" in end.message


async def test_a_member_of_which_anything_can_be_wrong_is_watched_on():
    fleet = Fleet()
    async with running(fleet) as conductor:
        worker = fleet.prefill[0]
        member = conductor.fleet.members[worker.address]

        def wrong():
            raise ValueError("injected")

        worker.check = wrong
        await until_async(lambda: not member.there)
        assert worker.address not in conductor.scheduler.ledger.instances
        del worker.check
        await until_async(lambda: member.there)


async def test_workers_that_always_fail_end_a_request_after_some_attempts():
    fleet = Fleet(prefill=1, decode=1)

    class Always(dict):
        def pop(self, name, default=None):
            return p.Failed("internal", "broken", retryable=True) if name == "prefill" else default

    fleet.prefill[0].fail = Always()
    async with running(fleet) as conductor:
        _, end = await play(conductor, request())
        assert (end.code, end.status) == ("workers_failed", 503)
        assert len(fleet.prefill[0].seen) == 5
        nothing_left(fleet, conductor)


async def test_a_refusal_at_decode_wastes_the_prefill_and_says_so():
    fleet = Fleet(decode=1)
    async with running(fleet) as conductor:
        fleet.decode[0].fail["admission"] = p.Refused("too many run", 1500)
        tokens, end = await play(conductor, request())
        assert len(tokens) == 1
        assert (end.code, end.status, end.retry_after_s) == ("refused_at_decode", 429, 1.5)
        assert conductor.stats.wasted_prefill_s == pytest.approx(0.01)
        nothing_left(fleet, conductor)


async def test_a_full_prefill_worker_is_a_429():
    fleet = Fleet()
    async with running(fleet) as conductor:
        for worker in fleet.prefill:
            worker.fail["prefill"] = p.Failed("overloaded", "its queue is full", retryable=True)
        _, end = await play(conductor, request())
        assert (end.code, end.status) == ("overloaded", 429)


async def test_a_request_that_is_resumed_waits_for_room():
    fleet = Fleet()
    async with running(fleet) as conductor:
        first, second = fleet.decode
        reached, go = first.holding("token 2")
        second.fail["admission"] = p.Refused("too many run", 100)
        playing = asyncio.create_task(play(conductor, request()))
        await asyncio.wait_for(reached.wait(), 10)
        first.die()
        go.set()
        tokens, end = await playing
        assert tokens == answer(PROMPT, 8)
        assert (end.reason, end.resumed) == ("length", 2)


@pytest.mark.parametrize("stage", ["prefill", "transfer", "admission", "token 3"])
async def test_leaving_early_cancels_the_request_where_it_is(stage):
    fleet = Fleet(prefill=1, decode=1)
    async with running(fleet) as conductor:
        worker = fleet.prefill[0] if stage in ("prefill", "transfer") else fleet.decode[0]
        reached, _ = worker.holding(stage)
        playing = asyncio.create_task(play(conductor, request()))
        await asyncio.wait_for(reached.wait(), 10)
        playing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await playing
        await until_async(fleet.idle)
        assert worker.cancelled
        assert conductor.stats.outcomes == {"cancelled": 1}
        nothing_left(fleet, conductor)


async def test_enough_ends_an_answer_early():
    fleet = Fleet(prefill=1, decode=1)
    told = []
    asked = request(count=100, enough=lambda: len(told) >= 3)
    async with running(fleet) as conductor:
        async for outcome in conductor.submit(asked):
            if isinstance(outcome, Piece):
                told += outcome.tokens
        assert told == answer(PROMPT, 3)
        assert conductor.stats.outcomes == {"stop": 1}
        await until_async(fleet.idle)
        assert fleet.decode[0].cancelled


async def test_a_full_house_refuses_at_once():
    fleet = Fleet(prefill=1, decode=1)
    async with running(fleet, requests_max=1) as conductor:
        reached, go = fleet.prefill[0].holding("prefill")
        first = asyncio.create_task(play(conductor, request("r1")))
        await asyncio.wait_for(reached.wait(), 10)
        _, end = await play(conductor, request("r2"))
        assert (end.code, end.status) == ("queue_full", 429)
        assert end.retry_after_s > 0
        go.set()
        assert (await first)[1].reason == "length"


async def test_a_refused_admission_is_a_429_with_its_reason():
    class Never:
        def refusal(self, outlook):
            return Rejection("decode_busy", "decode instances will be busy", 2.5)

    fleet = Fleet()
    scheduler = Scheduler(Slo(), Policies(admission=Never()))
    async with running(fleet, scheduler=scheduler) as conductor:
        _, end = await play(conductor, request())
        assert end == Failure("decode_busy", "decode instances will be busy", 429, 2.5)
        assert not any(worker.seen for worker in fleet.prefill)


async def test_another_model_is_refused_when_it_joins():
    fleet = Fleet()
    fleet.decode[1].card = p.ModelCard(
        **{name: getattr(CARD, name) for name in CARD.__struct_fields__} | {"revision": "r2"}
    )
    conductor = Conductor(connect=fleet.connect)
    try:
        with pytest.raises(ConfigError, match="same model"):
            await conductor.start(fleet.addresses)
    finally:
        await conductor.close()


async def test_roles_change_while_it_runs():
    fleet = Fleet(prefill=1, decode=2)
    async with running(fleet) as conductor:
        await conductor.change_role("d1", "prefill")
        assert fleet.decode[1].roles == ["prefill"]
        ledger = conductor.scheduler.ledger
        assert [each.name for each in ledger.of_role("prefill")] == ["p0", "d1"]
        fleet.prefill[0].die()
        tokens, _ = await play(conductor, request())
        assert tokens == answer(PROMPT, 8)
        assert conductor.stats.role_changes == 1


async def test_balancing_goes_on_after_it_failed():
    fleet, scheduler = Fleet(prefill=1, decode=2), Scheduler()
    answers = [("d1", Change("prefill", "as planned")), ValueError("injected")]

    def rebalance(now):
        answer = answers.pop() if answers else None
        if isinstance(answer, ValueError):
            raise answer
        return answer

    scheduler.rebalance = rebalance
    async with running(fleet, scheduler=scheduler):
        await until_async(lambda: fleet.decode[1].roles == ["prefill"])


async def test_a_role_that_somebody_else_changed_is_noticed():
    fleet = Fleet(prefill=1, decode=2)
    async with running(fleet) as conductor:
        fleet.decode[0].role = "prefill"
        ledger = conductor.scheduler.ledger
        await until_async(lambda: len(ledger.of_role("prefill")) == 2)
        assert [each.name for each in ledger.of_role("decode")] == ["d1"]


async def test_many_requests_at_once_while_workers_come_and_go():
    fleet = Fleet(prefill=3, decode=3)
    async with running(fleet) as conductor:

        async def disturb():
            for worker in (*fleet.prefill[:2], *fleet.decode[:2]):
                worker.die()
                await until_async(lambda: conductor.stats.outcomes.total() >= 5)
                worker.alive = True
                await until_async(lambda: len(conductor.scheduler.ledger.instances) == 6)

        disturbing = asyncio.create_task(disturb())
        asked = [request(f"r{n}", count=20) for n in range(60)]
        ends = await asyncio.gather(*(play(conductor, each) for each in asked))
        await disturbing
        for tokens, end in ends:
            assert tokens == answer(PROMPT, len(tokens))
            assert isinstance(end, Finish) or end.status in (429, 503)
        assert any(isinstance(end, Finish) for _, end in ends)
        nothing_left(fleet, conductor)
