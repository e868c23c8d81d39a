"""Blocks that workers keep: found again, read by other workers, told of; and the same answers."""

import asyncio
import signal

import pytest

from mooncake_store import Client
from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.local import LocalWorkers
from serving.workers.naming import split
from tests.serving.workers.support import (
    NANO,
    decode,
    disaggregated,
    fleet,
    generate,
    new_id,
    prefill,
    prompts,
    tokens_of,
)
from tests.waiting import PATIENCE_S, long_before, until_async

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

LONG = prompts(1, seed=61, shortest=500, longest=500)[0]
BLOCKS = len(LONG) // 16


def emptied(store):
    """Nothing is in the pool any more: what is found from now on is a worker's own."""
    with Client(store.url) as client:
        client.clear(force=True)


async def kept(running, at=0, count=BLOCKS):
    table = running.workers[at].parts.keeping.kept
    await until_async(lambda: len(table) >= count, what=f"{len(table)} of {count} blocks are kept")
    return table


async def test_a_prompt_is_found_again_without_the_pool(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        expected = tokens_of(await generate(client, LONG, use_pool=False, store=False))
        await prefill(client, LONG)
        await kept(running)
        emptied(store)
        done = (await prefill(client, LONG))[-1]
        assert (done.cached_tokens, done.own_tokens) == (496, 496)
        assert tokens_of(await generate(client, LONG)) == expected


async def test_an_answer_is_found_by_the_next_turn_without_the_pool(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        answer = tokens_of(await generate(client, LONG[:40], count=30))
        await kept(running, count=4)
        emptied(store)
        turn = [*LONG[:40], *answer, 9, 9, 9]
        served = await generate(client, turn, count=6)
        assert served[1] == p.Started(64)
        assert tokens_of(served) == tokens_of(
            await generate(client, turn, count=6, use_pool=False, store=False)
        )


async def test_the_first_part_is_its_own_and_the_rest_from_the_pool(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add(pool_url=store.url)
        expected = tokens_of(await generate(first, LONG))
        await running.stored()
        await prefill(second, LONG[:130])
        await kept(running, 1, 8)
        done = (await prefill(second, LONG))[-1]
        assert (done.cached_tokens, done.own_tokens, done.lent_tokens) == (496, 128, 0)
        assert tokens_of(await generate(second, LONG)) == expected


async def test_another_workers_blocks_are_read_and_kept(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add(pool_url=store.url)
        expected = tokens_of(await generate(first, LONG, use_pool=False, store=False))
        await prefill(first, LONG)
        lender = await kept(running)
        emptied(store)
        done = (await prefill(second, LONG, source=first.address))[-1]
        assert (done.cached_tokens, done.own_tokens, done.lent_tokens) == (496, 0, 496)
        table = await kept(running, 1)
        assert table.copies == BLOCKS
        emptied(store)
        assert tokens_of(await generate(second, LONG)) == expected
        keeping = running.workers[0].parts.keeping
        await until_async(lambda: not keeping._lent)
        assert not lender._pins.any()


async def test_who_decodes_finds_in_the_pool_what_was_found_here(store):
    """Its own blocks are offered to a pool that has lost them."""
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        expected = await disaggregated(first, second, LONG)
        await kept(running)
        emptied(store)
        name = new_id()
        done = (await prefill(first, LONG, request_id=name))[-1]
        assert done.own_tokens == 496
        assert done.kv == p.KVPlace(BLOCKS)
        rest = await decode(second, LONG, expected[0], done.kv, request_id=name)
        assert rest[0] == p.Admitted(len(LONG) % 16)
        assert expected[:1] + tokens_of(rest) == expected


async def test_a_source_that_is_gone_or_has_nothing_costs_a_computation(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add(pool_url=store.url)
        expected = tokens_of(await generate(first, LONG, use_pool=False, store=False))
        for source in (second.address, "127.0.0.1:9"):
            events = await prefill(first, LONG, source=source, store=False)
            assert tokens_of(events) == expected[:1]
            assert events[-1].cached_tokens == 0


async def test_what_is_lent_for_too_short_a_time_is_not_believed(store, monkeypatch):
    """The time is over before the bytes are there: they may be somebody else's."""
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add(pool_url=store.url)
        expected = tokens_of(await generate(first, LONG, use_pool=False, store=False))
        await prefill(first, LONG)
        lender = await kept(running)
        emptied(store)
        loop, exchange = asyncio.get_running_loop(), running.workers[1].parts.exchange
        plain, given_back = exchange.read, running.workers[0].parts.keeping._lent

        async def over():
            await until_async(lambda: not given_back)

        def slow(*arguments):
            asyncio.run_coroutine_threadsafe(over(), loop).result(PATIENCE_S)
            return plain(*arguments)

        monkeypatch.setattr(exchange, "read", slow)
        message = p.Prefill(
            new_id(), p.pack_tokens(LONG), p.Sampling(), 8, 600_000, source=first.address,
            fetch_deadline_ms=500,
        )  # fmt: skip
        events = [event async for event in second.prefill(message)]
        assert tokens_of(events) == expected[:1]
        assert events[-1].cached_tokens == 0
        assert not lender._pins.any()


async def test_who_follows_knows_what_is_kept(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url, own_blocks=BLOCKS)
        await prefill(client, LONG)
        table = await kept(running)
        known, told = set(), []

        def take(held):
            told.append(held.whole)
            if held.whole:
                known.clear()
            known.difference_update(split(held.removed))
            known.update(split(held.stored))

        following = asyncio.ensure_future(client.follow_kept(take))
        try:
            await until_async(lambda: known == set(table.names()))
            other = prompts(1, seed=62, shortest=200, longest=200)[0]
            await prefill(client, other)
            names = running.workers[0].parts.names
            new = set(split(names.index(other).tobytes()))
            await until_async(lambda: new <= known)
            assert known == set(table.names())
            assert len(known) == BLOCKS
            assert told.count(True) == 1
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


async def test_a_worker_that_keeps_nothing(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url, own_blocks=0)
        await prefill(client, LONG)
        await running.settled()
        assert not running.workers[0].parts.keeping.kept.names()
        assert (await prefill(client, LONG))[-1].own_tokens == 0


@pytest.mark.parametrize("way", ["shm", "tcp"])
async def test_blocks_are_read_from_other_processes(store, way):
    settings = {**NANO, "pool_url": store.url, "transports": [way]}
    with LocalWorkers(prefill=2, decode=0, **settings) as workers:
        first, second = (WorkerClient(address) for address in workers.addresses)
        try:
            expected = tokens_of(await generate(first, LONG))
            held = asyncio.Event()
            following = asyncio.ensure_future(
                first.follow_kept(lambda news: held.set() if news.stored else None)
            )
            await asyncio.wait_for(held.wait(), PATIENCE_S)
            following.cancel()
            emptied(store)
            done = (await prefill(second, LONG, source=first.address, store=False))[-1]
            assert (done.cached_tokens, done.own_tokens) == (496, 0)
            events = await generate(second, LONG, source=first.address, store=False)
            assert tokens_of(events) == expected
            # One that stands still costs the fetch its deadline, no answer.
            workers.children[0].signal(signal.SIGSTOP)
            emptied(store)
            with long_before(60):
                events = await prefill(
                    second, LONG, source=first.address, fetch_deadline_ms=300, store=False
                )
            assert tokens_of(events) == expected[:1]
        finally:
            workers.children[0].signal(signal.SIGCONT)
            await asyncio.gather(first.close(), second.close())


async def test_prompts_that_begin_alike_and_come_together_compute_that_once(store):
    """Those behind the first one wait for what it computes, and compute their own ends."""
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        ends = prompts(4, seed=63, shortest=20, longest=40)
        asked = [[*LONG[:480], *end] for end in ends]
        alone = [
            tokens_of(await generate(client, each, use_pool=False, store=False)) for each in asked
        ]
        served = await asyncio.gather(*(generate(client, each) for each in asked))
        assert [tokens_of(events) for events in served] == alone
        found = sorted(events[-1].cached_tokens for events in served)
        assert found == [0, 480, 480, 480]
        assert not len(running.workers[0].parts.coming)


async def test_a_prompt_whose_forerunner_is_cancelled_computes_for_itself(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        expected = tokens_of(await generate(client, LONG, use_pool=False, store=False))
        engine, coming = running.engine(0), running.workers[0].parts.coming
        plain, reached, go = engine._chunk, asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()

        def held(sequence):
            loop.call_soon_threadsafe(reached.set)
            asyncio.run_coroutine_threadsafe(go.wait(), loop).result(PATIENCE_S)
            engine._chunk = plain
            return plain(sequence)

        engine._chunk = held
        first = asyncio.ensure_future(generate(client, LONG))
        await asyncio.wait_for(reached.wait(), PATIENCE_S)
        second = asyncio.ensure_future(generate(client, LONG))
        await until_async(lambda: len(running.workers[0]._jobs) == 2)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        go.set()
        events = await second
        assert tokens_of(events) == expected
        assert events[-1].cached_tokens <= 64  # the first one's first chunk is in the pool
        assert not len(coming)
