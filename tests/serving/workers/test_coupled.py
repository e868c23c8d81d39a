"""Workers that compute prompts in chunks beside answers: same tokens, nothing that travels."""

import asyncio
import contextlib
import threading
import time

import pytest

from serving.workers import protocol as p
from serving.workers.jobs import Job
from serving.workers.settings import settings_from
from tests.serving.workers.support import (
    GREEDY,
    disaggregated,
    drain,
    fleet,
    generate,
    kinds,
    new_id,
    prefill,
    prompts,
    tokens_of,
)
from tests.waiting import PATIENCE_S, until_async
from transfer_engine.errors import ConfigError

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]

COUNT = 56
LONG = prompts(1, seed=82, shortest=900, longest=900)[0]
OTHER = prompts(1, seed=84, shortest=900, longest=900)[0]


def sampled(at):
    return p.Sampling(temperature=0.9, top_p=0.9, seed=at) if at % 2 else GREEDY


def noted(engine):
    """(answers, tokens of a prompt) of each step from now on."""
    plain, steps = engine.step, []

    def step():
        answers = len(engine.running)
        worked = plain()
        steps.append((answers, engine.prompt_tokens))
        return worked

    engine.step = step
    return steps


@contextlib.asynccontextmanager
async def answered(client, prompt=(1, 2, 3), count=1500):
    """A request that is answered all the while: a list that its tokens come into."""
    message = p.Generate(new_id(), p.pack_tokens(list(prompt)), GREEDY, count, 600_000)
    stream, tokens = client.generate(message), []

    async def read():
        async for event in stream:
            tokens.extend(tokens_of([event]))

    reading = asyncio.ensure_future(read())
    try:
        await until_async(lambda: len(tokens) > 1)
        yield tokens
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await stream.aclose()


async def test_tokens_are_those_of_the_split_system(store):
    """Many at once on one worker with little room in a step, and one by one on two."""
    given = prompts(COUNT, seed=83, longest=300)
    async with fleet() as running:
        first = await running.add(pool_url=store.url, own_blocks=0)
        second = await running.add("decode", pool_url=store.url, own_blocks=0)
        both = await running.add("coupled", pool_url=store.url, step_tokens=40)
        expected = [
            await disaggregated(
                first, second, prompt, sampling=sampled(at), push=at % 3 > 0, use_pool=False
            )
            for at, prompt in enumerate(given)
        ]
        assert len({tuple(each) for each in expected}) > 0.9 * COUNT
        steps = noted(running.engine(2))
        for found in (False, True):
            served = await asyncio.gather(
                *(
                    generate(both, prompt, sampling=sampled(at), use_pool=found)
                    for at, prompt in enumerate(given)
                )
            )
            assert [tokens_of(events) for events in served] == expected
            assert (sum(events[-1].cached_tokens for events in served) > 0) == found
        assert sum(1 for answers, tokens in steps if answers and tokens) > COUNT
        assert max(answers + tokens for answers, tokens in steps) <= 40


async def test_an_answer_goes_on_between_any_two_chunks(monkeypatch):
    """As its reader sees it: a token for each chunk of a long prompt that is computed beside."""
    told, plain = [], Job.emit

    def emit(job, event):
        told.append((job.request_id, event))
        plain(job, event)

    message = p.Generate("late", p.pack_tokens(LONG), GREEDY, 4, 600_000)
    monkeypatch.setattr(Job, "emit", emit)
    async with fleet() as running:
        client = await running.add("coupled", step_tokens=40)
        steps = noted(running.engine(0))
        async with answered(client):
            await drain(client.generate(message))
        own = [at for at, (whose, _) in enumerate(told) if whose == "late"]
        started, first = own[1:3]
        assert kinds([told[started][1], told[first][1]]) == ["Started", "FirstToken"]
        between = [event for _, event in told[started:first] if isinstance(event, p.Tokens)]
        chunks = [tokens for answers, tokens in steps if answers and tokens]
        assert chunks == [32] * 28 + [4]
        assert len(between) >= len(chunks) - 1
        assert all(len(event.ids) == 1 for event in between)


async def test_a_request_stays_with_one_copy_of_its_kv(store):
    async with fleet() as running:
        client = await running.add("coupled", pool_url=store.url)
        engine, worker = running.engine(0), running.workers[0]
        async with answered(client, LONG, 500):
            assert engine.cache.used == engine.cache.needed(len(LONG) + 499)
            assert not worker._receiving._incoming
            assert not worker._peers
        events = await generate(client, LONG[:40], count=3)
        *told, last = kinds(events)
        assert told[:4] == ["Queued", "Started", "FirstToken", "Computed"]
        # Two tokens more, which leave together where the sender is held up.
        assert set(told[4:]) == {"Tokens"}
        assert len(tokens_of(events)) == 3
        assert last == "Finished"
        assert (events[3].computed_tokens, events[3].cached_tokens) == (8, 32)
        assert events[3].own_tokens == 32


async def test_it_takes_what_workers_of_one_role_take(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        both = await running.add("coupled", pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        expected = tokens_of(await generate(first, LONG, use_pool=False, store=False))
        for push in (True, False):
            for pair in ((first, both), (both, second), (both, both)):
                assert await disaggregated(*pair, LONG, push=push, use_pool=False) == expected
        await both.set_role("decode")
        assert (await prefill(both, LONG))[-1].code == "wrong_role"
        await both.set_role("coupled")
        assert (await both.load()).role == "coupled"
        assert await disaggregated(both, both, LONG) == expected


async def test_prompts_that_begin_alike_compute_that_once_beside_answers(store):
    async with fleet() as running:
        client = await running.add("coupled", pool_url=store.url, step_tokens=40)
        asked = [[*LONG[:480], *end] for end in prompts(4, seed=85, shortest=20, longest=40)]
        alone = [
            tokens_of(await generate(client, each, use_pool=False, store=False)) for each in asked
        ]
        async with answered(client):
            served = await asyncio.gather(*(generate(client, each) for each in asked))
        assert [tokens_of(events) for events in served] == alone
        assert sorted(events[-1].cached_tokens for events in served) == [0, 480, 480, 480]
        assert not len(running.workers[0].parts.coming)


async def test_who_waits_for_another_prompt_lends_it_its_priority(store):
    """One of low priority computes how one of high priority begins: none between goes first."""
    async with fleet() as running:
        client = await running.add("coupled", pool_url=store.url)
        engine, chunks = running.engine(0), []
        plain, reached, go = engine._chunk, threading.Event(), threading.Event()

        def chunk(sequence):
            reached.set()
            assert go.wait(PATIENCE_S)
            chunks.append(sequence.prompt)
            return plain(sequence)

        engine._chunk = chunk
        playing = [asyncio.ensure_future(generate(client, LONG, count=1))]
        await until_async(reached.is_set)
        others = (([*LONG[:480], 1], 2, True), (OTHER[:800], 1, False))
        for number, (prompt, priority, use_pool) in enumerate(others, 2):
            asking = generate(client, prompt, count=1, priority=priority, use_pool=use_pool)
            playing.append(asyncio.ensure_future(asking))
            await until_async(lambda count=number: len(running.workers[0]._jobs) == count)
        go.set()
        await asyncio.gather(*playing)
        first = chunks.index(800)
        assert chunks[:first].count(900) == -(-900 // 64)


async def test_answers_do_not_wait_for_a_prefix_that_is_loaded(store):
    """Beside answers a prompt begins when all its layers are there, not before each of them."""
    async with fleet() as running:
        client = await running.add("coupled", pool_url=store.url, own_blocks=0)
        expected = tokens_of(await generate(client, LONG))
        await running.stored()
        pool, loading, go = running.workers[0].parts.pool, threading.Event(), threading.Event()
        plain = pool.load

        def load(*arguments, **more):
            loading.set()
            assert go.wait(PATIENCE_S)
            return plain(*arguments, **more)

        pool.load = load
        async with answered(client) as tokens:
            late = asyncio.ensure_future(generate(client, LONG, fetch_deadline_ms=600_000))
            await until_async(loading.is_set)
            before, began = len(tokens), time.monotonic()
            await until_async(lambda: len(tokens) > before + 20)
            loaded_s = time.monotonic() - began
            go.set()
            events = await late
        assert tokens_of(events) == expected
        assert events[-1].cached_tokens == 896
        done = next(event for event in events if isinstance(event, p.Computed))
        assert done.seconds["fetch"] >= loaded_s


async def test_a_budget_that_leaves_no_block_is_refused():
    assert settings_from({"step_tokens": 80, "running_max": 16}).step_tokens == 80
    with pytest.raises(ConfigError, match="step_tokens is 79"):
        settings_from({"step_tokens": 79, "running_max": 16})
