"""Killed and stopped workers, a store that goes away: an answer, or a reason in time."""

import asyncio
import os
import signal
import time

import pytest

from mooncake_store.local_cluster import LocalCluster
from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from serving.workers.local import LocalWorkers
from serving.workers.settings import settings_from
from tests.serving.workers.support import (
    NANO,
    asking_for_room,
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
from transfer_engine.errors import ConfigError, StoreError, UnavailableError

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

LONG = prompts(1, seed=41, shortest=1500, longest=1500)[0]
# Slow enough to be killed in the middle of a prompt.
SLOW = {**NANO, "model": "tiny"}
# Half of the deadline of what is to fail long before it.
SOON_S = 30


@pytest.fixture
def trio(store):
    """Two prefill workers and a decode worker, as processes that a test may kill."""
    with LocalWorkers(prefill=2, decode=1, pool_url=store.url, **SLOW) as workers:
        yield workers


async def outcome(stream):
    """The last event of a stream, or the error it raised, and how long that took."""
    began = time.monotonic()
    last = None
    try:
        async for event in stream:
            last = event
    except StoreError as error:
        last = error
    return last, time.monotonic() - began


async def reached(stream, kind):
    async for event in stream:
        if isinstance(event, kind):
            return
    raise AssertionError(f"no {kind} came")


async def test_a_worker_killed_at_any_stage_is_an_error_soon(trio, store):
    """Killed while it computes a prompt, while KV is pushed to it, while it decodes."""
    first, second, third = (WorkerClient(address) for address in trio.addresses)
    try:
        # In transfer: the decode worker dies while the prompt's KV is pushed to it.
        message = p.Prefill(
            new_id(), p.pack_tokens(LONG), p.Sampling(), 20, 60_000, decode_at=third.address
        )
        stream = first.prefill(message)
        await reached(stream, p.Started)
        trio.kill(2)
        last, seconds = await outcome(stream)
        assert isinstance(last, p.Failed)
        assert (last.code, last.retryable) == ("peer_lost", True)
        assert seconds < SOON_S
        # In a pipeline: a follower dies.
        message = p.Prefill(
            new_id(), p.pack_tokens(LONG), p.Sampling(), 20, 60_000, group=(second.address,),
            use_pool=False,
        )  # fmt: skip
        stream = first.prefill(message)
        await reached(stream, p.Started)
        trio.kill(1)
        last, seconds = await outcome(stream)
        assert isinstance(last, p.Failed)
        assert last.code == "peer_lost"
        assert seconds < SOON_S
        load = await first.load()
        await until_async_load(first)
        assert load.role == "prefill"
        # In prefill, then in decode: the worker that was asked dies.
        stream = first.generate(
            p.Generate(new_id(), p.pack_tokens(LONG), p.Sampling(), 500, 60_000, use_pool=False)
        )
        await reached(stream, p.Started)
        trio.kill(0)
        last, seconds = await outcome(stream)
        assert isinstance(last, StoreError)
        assert seconds < SOON_S
        third = WorkerClient(trio.replace(2, "decode"))
        stream = third.decode(
            p.Decode(new_id(), p.pack_tokens(LONG[:64]), 5, p.Sampling(), 500, 60_000, p.KVPlace())
        )
        await reached(stream, p.Tokens)
        trio.kill(2)
        last, seconds = await outcome(stream)
        assert isinstance(last, StoreError)
        assert seconds < SOON_S
    finally:
        for client in (first, second, third):
            await client.close()


async def test_room_of_a_worker_killed_while_it_pushes_is_given_back(trio):
    """It may have been in the middle of a write, so its room rests, and then comes back."""
    first, third = WorkerClient(trio.addresses[0]), WorkerClient(trio.addresses[2])
    try:
        message = p.Prefill(
            new_id(), p.pack_tokens(LONG), p.Sampling(), 20, 600_000, decode_at=third.address
        )
        stream = first.prefill(message)
        await reached(stream, p.Started)
        assert (await third.load()).kv_blocks_used
        trio.kill(0)
        await outcome(stream)
        await until_async_load(third)
    finally:
        await first.close()
        await third.close()


@pytest.mark.parametrize("way", ["shm", "tcp"])
async def test_pushed_kv_is_whole_over_every_way(way):
    """Between processes: nothing of the prompt is computed again, and the answer is the same."""
    prompt = LONG[:700]
    with LocalWorkers(prefill=1, decode=1, transports=[way], **NANO) as workers:
        first, second = (WorkerClient(address) for address in workers.addresses)
        try:
            expected = tokens_of(await generate(first, prompt))
            name = new_id()
            begun = await prefill(first, prompt, request_id=name, decode_at=second.address)
            assert begun[-1].kv.pushed
            token = tokens_of(begun)[0]
            rest = await decode(second, prompt, token, begun[-1].kv, request_id=name)
            assert rest[0] == p.Admitted(0)
            assert [token, *tokens_of(rest)] == expected
        finally:
            await first.close()
            await second.close()


async def until_async_load(client):
    """Wait until a worker has given all its blocks back."""
    async with asyncio.timeout(PATIENCE_S):
        while (load := await client.load()).kv_blocks_used or load.pending_puts:
            pass


async def test_a_worker_that_stands_still_is_an_error_by_the_deadline(trio):
    """SIGSTOP: the connection lives, nobody answers."""
    first, _, third = (WorkerClient(address) for address in trio.addresses)
    try:
        message = p.Prefill(
            new_id(), p.pack_tokens(LONG), p.Sampling(), 20, 3_000, decode_at=third.address
        )
        stream = first.prefill(message)
        await reached(stream, p.Started)
        os.kill(trio.children[2].pid, signal.SIGSTOP)
        last, seconds = await outcome(stream)
        assert isinstance(last, p.Failed)
        assert seconds < SOON_S
        await until_async_load(first)
        os.kill(trio.children[0].pid, signal.SIGSTOP)
        last, seconds = await outcome(
            first.generate(p.Generate(new_id(), p.pack_tokens(LONG), p.Sampling(), 5, 2_000))
        )
        assert isinstance(last, StoreError)
        assert seconds < SOON_S
    finally:
        for child in trio.children:
            child.signal(signal.SIGCONT)
        await first.close()
        await third.close()


async def test_serving_goes_on_without_the_store():
    """The store is gone before, and comes to be gone while workers run: no hits, no failures."""
    prompt = LONG[:300]
    with LocalCluster(workers=1, segment="64MB") as cluster:
        async with fleet() as running:
            without = await running.add(pool_url="mooncake://127.0.0.1:9/default")
            assert not running.workers[0].parts.pool.up
            expected = tokens_of(await generate(without, prompt))
            first = await running.add(pool_url=cluster.url)
            second = await running.add("decode", pool_url=cluster.url)
            assert await disaggregated(first, second, prompt) == expected
            assert (await generate(first, prompt))[-1].cached_tokens == 288
            cluster.kill_master()
            events = await generate(first, prompt)
            assert tokens_of(events) == expected
            await until_async(lambda: not running.workers[1].parts.pool.up)
            # Through the pool the decode worker computes all of it; pushed, nothing.
            assert await disaggregated(first, second, prompt) == expected
            assert await disaggregated(first, second, prompt, push=True) == expected


async def test_a_slow_store_is_not_waited_for():
    """A master that stands still costs a fetch its deadline and no more."""
    prompt = LONG[:300]
    with LocalCluster(workers=1, segment="64MB") as cluster:
        async with fleet() as running:
            client = await running.add(pool_url=cluster.url, store_deadline_ms=60_000, own_blocks=0)
            expected = tokens_of(await prefill(client, prompt))
            cluster.stop_master()
            try:
                with long_before(60):
                    events = await prefill(client, prompt, fetch_deadline_ms=300, store=False)
                assert tokens_of(events) == expected
                assert events[-1].cached_tokens == 0
            finally:
                cluster.resume_master()


async def test_a_full_store_keeps_what_fits_and_serves_all():
    with LocalCluster(workers=1, segment="1MiB") as cluster:
        async with fleet() as running:
            first = await running.add(pool_url=cluster.url)
            second = await running.add("decode", pool_url=cluster.url)
            for prompt in prompts(6, seed=43, shortest=900, longest=1000):
                expected = tokens_of(await generate(second, prompt, use_pool=False, store=False))
                assert await disaggregated(first, second, prompt) == expected


async def test_a_defect_in_a_step_fails_its_requests_and_nothing_else(store):
    async with fleet() as running:
        client = await running.add(pool_url=store.url)
        expected = tokens_of(await generate(client, LONG[:50]))
        engine = running.engine(0)
        original = engine._chunk

        def broken(sequence):
            engine._chunk = original
            raise RuntimeError("as planned")

        engine._chunk = broken
        events = await generate(client, LONG[:50])
        assert isinstance(events[-1], p.Failed)
        assert events[-1].code == "internal"
        assert "as planned" in events[-1].message
        assert tokens_of(await generate(client, LONG[:50])) == expected


async def test_a_wrong_model_for_pushed_kv_is_refused(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", model="nano,seed=5", pool_url=store.url)
        events = await prefill(first, LONG[:50], decode_at=second.address)
        assert isinstance(events[-1], p.Failed)
        grouped = await running.add(model="nano,seed=5", pool_url=store.url)
        events = await prefill(first, LONG[:100], group=(grouped.address,))
        assert isinstance(events[-1], p.Failed)
        # Other weights never hit these blocks.
        await prefill(first, LONG[:50])
        assert (await prefill(grouped, LONG[:50]))[-1].cached_tokens == 0


async def test_decode_after_a_pushed_prefill_that_was_aborted(store):
    """The sender died in the middle: what came is thrown away, the prompt is computed."""
    async with fleet() as running:
        client = await running.add("decode", pool_url=store.url)
        prompt = LONG[:100]
        expected = tokens_of(await generate(client, prompt))
        name = new_id()
        card = running.workers[0].card
        await client.kv_open(asking_for_room(card, name, tokens=len(prompt), max_new_tokens=8))
        task = asyncio.ensure_future(
            decode(client, prompt, expected[0], p.KVPlace(pushed=True), request_id=name)
        )
        await until_async(lambda: running.workers[0]._active)
        await client.kv_close(p.KVClose(name, abort=True))
        events = await task
        assert events[0] == p.Admitted(len(prompt))
        assert expected[:1] + tokens_of(events) == expected


async def test_settings_may_be_text():
    given = {"transports": "shm, tcp", "data_networks": "10.0.0.0/8"}
    made = settings_from({"kv_blocks": "64", "exact": "false", "worker_id": "7", **given})
    assert (made.transports, made.data_networks) == (("shm", "tcp"), ("10.0.0.0/8",))
    assert (made.kv_blocks, made.exact, made.worker_id) == (64, False, "7")


async def test_settings_are_checked_at_the_start():
    with pytest.raises(ConfigError, match="did you mean 'role'"):
        settings_from({"rol": "prefill"})
    with pytest.raises(ConfigError, match="role is 'x'"):
        settings_from({"role": "x"})
    with pytest.raises(ConfigError, match="kv_blocks is 0"):
        settings_from({"kv_blocks": 0})
    with pytest.raises(ConfigError, match="Expected `int`"):
        settings_from({"kv_blocks": "many"})
    with pytest.raises((ConfigError, UnavailableError), match="no model"):
        LocalWorkers(prefill=1, decode=0, model="tinny").start()
