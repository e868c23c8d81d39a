"""One worker, or two, in the test's own process: what is cached, pushed, refused and cleaned up."""

import asyncio
import threading

import pytest

from mooncake_store import Client, Digests
from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from tests.paces import measured
from tests.serving.workers.support import (
    NANO,
    cancelled_at,
    decode,
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
from tests.waiting import until_async
from transfer_engine.errors import InvalidArgumentError, StoreError

pytestmark = pytest.mark.asyncio

LONG = prompts(1, seed=31, shortest=500, longest=500)[0]
SHORT = LONG[:40]


async def test_a_second_prompt_loads_what_the_first_left(store):
    async with fleet() as running:
        one = await running.add(pool_url=store.url)
        two = await running.add(pool_url=store.url, own_blocks=0)
        cold = await prefill(one, LONG)
        assert kinds(cold) == ["Queued", "Started", "FirstToken", "Done"]
        assert cold[-1].cached_tokens == 0
        assert cold[-1].kv == p.KVPlace(len(LONG) // 16)
        warm = await prefill(two, LONG + [3] * 20)
        assert warm[1] == p.Started(496)
        assert warm[-1].computed_tokens == 24
        # A whole number of blocks: the last one is computed, for its logits.
        exact = await prefill(two, LONG[:480])
        assert exact[1] == p.Started(464)
        bounded = await prefill(two, LONG, prefix_blocks=2)
        assert bounded[1] == p.Started(32)
        without = await prefill(two, LONG, use_pool=False)
        assert without[1] == p.Started(0)
        assert tokens_of(cold) == tokens_of(without)


async def test_the_answer_is_found_by_the_next_turn(store):
    """Blocks that an answer completed go back to the pool; what follows does not notice."""
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        answer = await disaggregated(first, second, SHORT, count=30)
        await running.settled()
        turn = SHORT + answer + [9, 9, 9]
        served = await generate(first, turn, count=6)
        assert served[1] == p.Started(64)  # prompt and answer fill four blocks and a bit
        fresh = await generate(first, turn, count=6, use_pool=False, store=False)
        assert tokens_of(served) == tokens_of(fresh)


async def test_kv_leaves_while_the_prompt_is_computed(store):
    """The first layer's blocks are handed over before the last chunk is computed."""
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        pool = running.workers[0].parts.pool
        handed, original = [], pool.store

        def store_and_note(storing):
            handed.append((storing.layer, running.engine(0).opened[0].computed))
            original(storing)

        pool.store = store_and_note
        await prefill(client, LONG)
        assert handed[:4] == [(0, 0), (1, 0), (2, 0), (0, 64)]
        assert len(handed) == 3 * 8


@pytest.mark.parametrize("layer", [0, 1])
async def test_a_lost_layer_is_computed_again(store, layer):
    """A block whose index is in the pool but whose other layer was evicted."""
    async with fleet() as running:
        one = await running.add(pool_url=store.url, own_blocks=0)
        expected = tokens_of(await generate(one, LONG, store=False))
        await prefill(one, LONG)
        names = running.workers[0].parts.names
        with Client(store.url) as client:
            lost = Digests(names.blocks(layer, LONG)[3:4])
            assert client.remove_many(lost, force=True).ok
        events = await generate(one, LONG)
        assert tokens_of(events) == expected
        assert events[-1].cached_tokens == 0
        # It was stored again on the way.
        await running.stored()
        assert (await generate(one, LONG))[-1].cached_tokens == 496


async def test_a_prefix_that_would_come_too_late_is_computed_at_once(store):
    """Loads are as quick as ever here; a worker that expects otherwise does not try."""
    async with fleet() as running:
        one = await running.add(pool_url=store.url, own_blocks=0)
        expected = tokens_of(await generate(one, LONG))
        await running.stored()
        assert (await generate(one, LONG, store=False))[-1].cached_tokens == 496
        client = running.workers[0].parts.pool._link.client
        measured(client, 3600.0, nbytes=31 * running.workers[0].parts.memory.object_bytes)
        events = await generate(one, LONG, store=False)
        assert tokens_of(events) == expected
        assert events[-1].cached_tokens == 0
        assert client.stats().too_slow == 31  # of the first layer; nothing was asked of the others


@pytest.mark.parametrize("push", [False, True])
@pytest.mark.parametrize("layer", [0, 1])
async def test_a_group_that_loses_its_prefix_computes_it(store, layer, push):
    """The leader's share of the prefix is gone, or its follower's: the leader does all of it."""
    async with fleet() as running:
        first = await running.add(pool_url=store.url, own_blocks=0)
        second = await running.add(pool_url=store.url, own_blocks=0)
        third = await running.add("decode", pool_url=store.url, own_blocks=0)
        expected = tokens_of(await generate(first, LONG, use_pool=False, store=False))
        await prefill(first, LONG[:250])
        with Client(store.url) as client:
            lost = Digests(running.workers[0].parts.names.blocks(layer, LONG)[3:4])
            assert client.remove_many(lost, force=True).ok
        name, group = new_id(), (second.address,)
        events = await prefill(
            first, LONG, group=group, request_id=name, decode_at=third.address if push else ""
        )
        assert kinds(events) == ["Queued", "Started", "FirstToken", "Done"]
        assert events[1] == p.Started(240)
        assert events[-1].cached_tokens == 0
        # What the follower would have pushed is missing; all blocks are in the pool.
        assert events[-1].kv == p.KVPlace(len(LONG) // 16)
        rest = await decode(third, LONG, expected[0], events[-1].kv, request_id=name)
        assert tokens_of(events) + tokens_of(rest) == expected
        assert rest[0] == p.Admitted(len(LONG) % 16)


async def test_a_follower_that_loses_its_prefix_late_is_not_waited_for(store):
    """The leader has computed its share by then, and computes all layers once more."""
    async with fleet() as running:
        first = await running.add(pool_url=store.url, own_blocks=0)
        second = await running.add(pool_url=store.url, own_blocks=0)
        expected = tokens_of(await generate(first, LONG, use_pool=False, store=False))
        await prefill(first, LONG[:250])
        pool, leading = running.workers[1].parts.pool, asyncio.Event()
        loop = asyncio.get_running_loop()

        def too_late(*_, **__):
            asyncio.run_coroutine_threadsafe(leading.wait(), loop).result(20)
            return False

        pool.load = too_late
        task = asyncio.ensure_future(prefill(first, LONG, group=(second.address,)))
        await until_async(lambda: any(r._computed for r in running.workers[0]._active))
        leading.set()
        events = await task
        assert tokens_of(events) == expected[:1]
        assert events[-1].cached_tokens == 0


async def test_decode_computes_what_it_does_not_find(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        expected = tokens_of(await generate(first, LONG, use_pool=False, store=False))
        done = await prefill(first, LONG)
        with Client(store.url) as client:
            client.clear(force=True)
        events = await decode(second, LONG, expected[0], done[-1].kv)
        assert events[0] == p.Admitted(len(LONG))
        assert expected[:1] + tokens_of(events) == expected


async def test_a_short_prompt_is_not_spread_over_a_group(store):
    """One chunk, or what hits left of a long one: the followers are not asked."""
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add(pool_url=store.url)
        group = (second.address,)

        async def followed(prompt, **fields):
            before = running.engine(1)._order
            events = await prefill(first, prompt, group=group, **fields)
            assert isinstance(events[-1], p.Done), events
            expected = await generate(first, prompt, use_pool=False, store=False)
            assert tokens_of(events) == tokens_of(expected)[:1]
            return running.engine(1)._order > before

        assert not await followed(LONG[:64])
        assert await followed(LONG)
        assert not await followed(LONG)
        assert await followed(LONG, use_pool=False)
        assert not await followed([*LONG[:490], 1, 2, 3])


async def test_stop_tokens_end_an_answer_everywhere(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        free = tokens_of(await generate(first, SHORT, count=10))
        stop = free[3]
        kept = free[: free.index(stop)]
        events = await generate(first, SHORT, count=10, stop_tokens=(stop,))
        assert (tokens_of(events), events[-1].reason) == (kept, "stop")
        done = await prefill(first, SHORT, count=10, stop_tokens=(free[0],))
        assert kinds(done) == ["Queued", "Started", "Done"]
        assert done[-1].stopped == "stop"
        grouped = await prefill(first, SHORT, count=1)
        assert grouped[-1].stopped == "length"
        rest = await decode(second, SHORT, free[0], p.KVPlace(), count=10, stop_tokens=(stop,))
        assert tokens_of(rest) == kept[1:]


async def test_many_at_once_equal_one_at_a_time(store):
    """Continuous batching, chunked prompts and full caches change nothing but the order."""
    given = prompts(20, seed=33, longest=150)
    async with fleet() as running:
        alone = await running.add(pool_url=store.url)
        busy = await running.add("decode", pool_url=store.url, kv_blocks=40, running_max=6)
        expected = [tokens_of(await generate(alone, each, use_pool=False)) for each in given]
        answers = await asyncio.gather(*(generate(busy, each) for each in given))
        assert [tokens_of(each) for each in answers] == expected


# What ends a request early.


@pytest.mark.parametrize("kind", [p.Queued, p.Started, p.Tokens])
async def test_leaving_the_stream_cancels(store, kind):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        message = p.Generate(new_id(), p.pack_tokens(LONG), p.Sampling(), 1000, 60_000)
        await cancelled_at(client, client.generate(message), kind)
        await running.settled()


async def test_a_reader_that_disappears_ends_its_requests(store):
    async with fleet() as running:
        await running.add(pool_url=store.url)
        reader = WorkerClient(running.clients[0].address)
        message = p.Generate(new_id(), p.pack_tokens(LONG), p.Sampling(), 1500, 60_000)
        stream = reader.generate(message)
        await anext(stream)
        await reader.close()
        await running.settled()
        with pytest.raises(StoreError):
            await drain(stream)  # what had been fetched by then comes first


async def test_a_deadline_ends_a_request_with_a_reason(store, monkeypatch):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        engine = running.engine(0)
        plain, never = engine.step, threading.Event()
        # No machine is so quick that it answers in time.
        monkeypatch.setattr(engine, "step", lambda: never.wait(0.01) or plain())
        events = await generate(client, LONG, count=1500, deadline_ms=300)
        assert isinstance(events[-1], p.Failed)
        assert events[-1].code == "deadline"


async def test_requests_that_cannot_work_are_told_why(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url, kv_blocks=64, queued_tokens_max=600)

        async def code(*arguments, **fields):
            events = await generate(*arguments, **fields)
            assert isinstance(events[-1], p.Failed)
            assert events[-1].message
            return events[-1].code

        assert await code(client, [1] * 5000) == "too_long"
        assert await code(client, [1] * 1000, count=100) == "too_long"  # for the cache
        assert await code(client, [260]) == "bad_request"
        for wrong in ({"banned": (260,)}, {"form": "{"}, {"form": '{"pattern":"a"}'}):
            assert await code(client, [1], sampling=p.Sampling(**wrong)) == "bad_request"
        assert await code(client, [1], count=0) == "bad_request"
        assert await code(client, [1] * 700) == "overloaded"
        refused = await decode(client, [1, 2], 3, p.KVPlace())
        assert refused[-1].code == "wrong_role"
        with pytest.raises(StoreError, match="negative"):
            await generate(client, [-1])
        with pytest.raises(StoreError, match="deadline"):
            await generate(client, [1], deadline_ms=0)
        message = p.Generate("twice", p.pack_tokens(LONG), p.Sampling(), 50, 5000)
        stream = client.generate(message)
        await anext(stream)
        with pytest.raises(InvalidArgumentError, match="exists already"):
            await anext(client.generate(message))
        await stream.aclose()


async def test_who_does_not_listen_is_given_nothing(store):
    """Nobody would hear what becomes of it."""
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        message = p.Generate("unheard", p.pack_tokens(SHORT), p.Sampling(), 5, 5000)
        with pytest.raises(InvalidArgumentError, match="listen on this connection first"):
            await client._call(p.GENERATE, message)
        assert kinds(await generate(client, SHORT))[-1] == "Finished"
        with pytest.raises(InvalidArgumentError, match="listens already"):
            await client._call(p.LISTEN, p.Listen())


async def test_a_full_decode_worker_refuses_and_says_when(store):
    async with fleet() as running:
        client = await running.add("decode", pool_url=store.url, kv_blocks=16)
        busy = client.decode(
            p.Decode(new_id(), p.pack_tokens(SHORT), 1, p.Sampling(), 180, 60_000, p.KVPlace())
        )
        assert isinstance(await anext(busy), p.Admitted)
        refused = await decode(client, SHORT, 1, p.KVPlace(), count=100)
        assert kinds(refused) == ["Refused"]
        assert refused[0].retry_after_ms > 0
        assert "blocks" in refused[0].reason
        await busy.aclose()


async def test_a_full_decode_worker_is_noticed_before_a_prompt_is_computed(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url, kv_blocks=8)
        events = await prefill(first, LONG, decode_at=second.address)
        assert kinds(events) == ["Failed"]
        assert events[0].code == "overloaded"
        assert running.engine(0)._order == 0


# Roles.


async def test_a_role_changes_while_requests_run(store):
    """What runs is finished in the old role; then the new one is taken, with the same cache."""
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        other = await running.add("decode", pool_url=store.url)
        expected = tokens_of(await generate(client, LONG, count=20, use_pool=False))
        task = asyncio.ensure_future(generate(client, LONG, count=20))
        await until_async(lambda: running.workers[0]._active)
        await client.set_role("decode")
        assert tokens_of(await task) == expected
        assert (await client.hello()).role == "decode"
        await other.set_role("prefill")
        assert await disaggregated(other, client, LONG, count=20) == expected
        refused = await prefill(client, SHORT)
        assert refused[-1].code == "wrong_role"


async def test_a_drain_that_takes_too_long_is_given_up(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        stream = client.generate(
            p.Generate(new_id(), p.pack_tokens(LONG), p.Sampling(), 1500, 60_000)
        )
        await anext(stream)
        with pytest.raises(StoreError, match="still run"):
            await client.set_role("decode", drain_s=0.2)
        assert (await client.hello()).role == "prefill"
        await stream.aclose()
        await running.settled()
        await client.drain()
        assert (await generate(client, SHORT))[-1].code == "draining"
        await client.resume()
        assert tokens_of(await generate(client, SHORT))
        with pytest.raises(InvalidArgumentError, match="no role"):
            await client.set_role("prefil")


async def test_a_drain_whose_asker_is_gone_is_given_up(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        worker = running.workers[0]
        message = p.Generate(new_id(), p.pack_tokens(LONG), p.Sampling(), 1500, 60_000)
        stream = client.generate(message)
        await anext(stream)
        other = WorkerClient(client.address)
        asking = asyncio.ensure_future(other.set_role("decode"))
        await until_async(lambda: worker.draining)
        await other.close()
        await asyncio.gather(asking, return_exceptions=True)
        await until_async(lambda: not worker.draining)
        assert worker.role == "prefill"
        await stream.aclose()
        assert tokens_of(await generate(client, SHORT))


async def test_load_says_how_busy_a_worker_is(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        idle = await client.load()
        assert (idle.queued, idle.running, idle.kv_blocks_used, idle.tbt_s) == (0, 0, 0, 0.0)
        assert idle.kv_blocks == NANO["kv_blocks"]
        message = p.Generate(new_id(), p.pack_tokens(LONG), p.Sampling(), 1000, 60_000)
        stream = client.generate(message)
        async for event in stream:
            if isinstance(event, p.Tokens):
                break
        await until_async(lambda: running.workers[0].parts.computing.steps)
        busy = await client.load()
        assert (busy.queued, busy.running) == (0, 1)
        assert busy.kv_blocks_used == -(-(len(LONG) + 999) // NANO["block_tokens"])
        assert busy.tbt_s > 0
        assert busy.steps[-1][0] == 1
        await stream.aclose()
