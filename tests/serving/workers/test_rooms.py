"""Room for pushed KV: who gets it, who may write there, and when it is somebody else's."""

import asyncio

import msgspec
import numpy as np
import pytest

from serving.workers import incoming, receiving
from serving.workers import protocol as p
from serving.workers.client import WorkerClient
from tests.serving.workers.support import (
    asking_for_room,
    cancelled_at,
    decode,
    drain,
    fleet,
    held,
    new_id,
    prefill,
    prompts,
)
from tests.waiting import PATIENCE_S, until_async
from transfer_engine import SegmentDescriptor, TransferEngine
from transfer_engine.errors import NotFoundError, StoreError, UnavailableError

pytestmark = pytest.mark.asyncio

LONG = prompts(1, seed=31, shortest=500, longest=500)[0]
SHORT = LONG[:40]


@pytest.mark.parametrize("kind", [p.Queued, p.Started, p.FirstToken])
@pytest.mark.parametrize("grouped", [False, True])
async def test_leaving_a_pushed_prefill_gives_all_rooms_back(store, kind, grouped, monkeypatch):
    monkeypatch.setattr(incoming, "STILL_S", 3600.0)  # each sender says that it is done
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        third = await running.add(pool_url=store.url)
        message = p.Prefill(
            new_id(), p.pack_tokens(LONG), p.Sampling(), 50, 60_000, decode_at=second.address,
            group=(third.address,) if grouped else (),
        )  # fmt: skip
        await cancelled_at(first, first.prefill(message), kind)
        # Where everything had been pushed, the room is kept for the decode; nobody comes.
        for room in list(running.workers[1]._receiving._incoming.values()):
            running.workers[1]._receiving._expire(room)
        await running.settled()


def pushed_in_a_group(second, third):
    """A long prompt whose KV two workers push to a third."""
    return p.Prefill(
        new_id(), p.pack_tokens(LONG), p.Sampling(), 50, 600_000, decode_at=second.address,
        group=(third.address,),
    )  # fmt: skip


async def test_leaving_before_a_follower_is_asked_gives_the_room_back(store, monkeypatch):
    """Nobody else will say that it does not push."""
    monkeypatch.setattr(incoming, "STILL_S", 3600.0)
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        third = await running.add(pool_url=store.url)
        asked = asyncio.Event()

        async def never():
            asked.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(running.workers[0]._peer(third.address), "connect", never)
        asking = asyncio.ensure_future(drain(first.prefill(pushed_in_a_group(second, third))))
        await asyncio.wait_for(asked.wait(), PATIENCE_S)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await running.settled()


async def test_a_follower_that_refuses_its_share_gives_the_room_back(store, monkeypatch):
    monkeypatch.setattr(incoming, "STILL_S", 3600.0)
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        third = await running.add(pool_url=store.url)
        await third.drain()
        *_, last = await drain(first.prefill(pushed_in_a_group(second, third)))
        assert isinstance(last, p.Failed)
        assert (last.code, last.retryable) == ("draining", True)
        await running.settled()


async def test_leaving_a_prefill_that_asks_for_room_gives_it_back(store):
    async with fleet() as running:
        first = await running.add(pool_url=store.url)
        second = await running.add("decode", pool_url=store.url)
        receiving, closed = running.workers[1]._receiving, asyncio.Event()
        plain = receiving.sender_done

        def sender_done(message):
            plain(message)
            closed.set()

        receiving.sender_done = sender_done
        with held(running.workers[1]) as computing:
            asking = asyncio.ensure_future(
                prefill(first, LONG, decode_at=second.address, deadline_ms=600_000)
            )
            await until_async(lambda: computing._work)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            await until_async(lambda: not running.workers[0]._active)
        await asyncio.wait_for(closed.wait(), PATIENCE_S)
        await running.settled()


async def test_leaving_a_decode_whose_kv_is_still_pushed_gives_its_room_back():
    async with fleet() as running:
        client = await running.add("decode")
        name, worker = new_id(), running.workers[0]
        message = asking_for_room(worker.card, name, tokens=len(SHORT), deadline_ms=600_000)
        assert (await client.kv_open(message)).room is not None
        pushed = p.KVPlace(pushed=True)
        asking = asyncio.ensure_future(
            decode(client, SHORT, 1, pushed, request_id=name, deadline_ms=600_000)
        )
        await until_async(lambda: worker._active)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until_async(lambda: running.engine(0).cache.used and not worker._jobs)
        await client.kv_close(p.KVClose(name))
        await running.settled()


async def test_room_that_cannot_be_given_is_refused():
    async with fleet() as running:
        client = await running.add("decode")
        card = running.workers[0].card
        wanted = asking_for_room(card, "y")
        for change, why in (
            ({"revision": "another model"}, "does not fit"),
            ({"layout": "32x1x16/exact"}, "does not fit"),
            ({"tokens": -20}, "-20 tokens"),
            ({"deadline_ms": 0}, "deadline"),
        ):
            with pytest.raises(StoreError, match=why):
                await client.kv_open(msgspec.structs.replace(wanted, **change))
        with pytest.raises(NotFoundError, match="stage"):
            await client.push(p.STAGE_CHUNK, 5, request=p.request_tag("x"), start=0, count=1,
                              hidden=bytes(256))  # fmt: skip


async def test_kv_goes_to_workers_in_the_networks_that_are_given_only():
    async with fleet() as running:
        there = await running.add("decode")
        card = running.workers[0].card
        room = (await there.kv_open(asking_for_room(card, "x", tokens=20))).room
        for networks, reached in ((["127.0.0.0/8"], True), (["10.0.0.0/8"], False)):
            await running.add(transports=["tcp"], data_networks=networks)
            exchange = running.workers[-1].parts.exchange
            if reached:
                assert exchange.reach(room, "127.0.0.1").transport == "tcp"
                continue
            with pytest.raises(UnavailableError, match=r"127\.0\.0\.1 is in none of the networks"):
                exchange.reach(room, "127.0.0.1")
        await there.kv_close(p.KVClose("x", abort=True))


async def test_kv_is_written_where_room_was_promised_and_nowhere_else():
    """Over tcp the owner sees every write; what was not promised stays as it was."""
    async with fleet() as running:
        client = await running.add("decode")
        worker = running.workers[0]
        memory = worker.parts.memory
        room = (await client.kv_open(asking_for_room(worker.card, "x", tokens=20))).room
        assert room is not None
        assert len(room.blocks) == 2  # of 16 tokens
        other = next(block for block in range(memory.blocks) if block not in room.blocks)
        with TransferEngine(transports=["tcp"]) as engine:
            target = engine.open(SegmentDescriptor.decode(room.descriptor))
            data = engine.register(np.full(2 * memory.half, 7, np.uint8))

            def written(block, *, length=memory.half, fence=room.fence, past=0):
                offset = (2 * memory.blocks + block) * memory.half + past  # of layer 1
                return asyncio.to_thread(
                    engine.write_batch, target, [offset], [length], [data.address], fence=fence
                )

            for refused in (
                written(other),
                written(room.blocks[0], fence=0),
                written(room.blocks[0], fence=room.fence ^ 1),
                written(room.blocks[1], past=1),
                written(memory.blocks - 1, past=1),  # into the values
            ):
                assert not (await refused).ok
            assert not memory.tensor.any()
            reading = asyncio.to_thread(
                engine.read_batch, target, [0], [8], [data.address], fence=room.fence
            )
            assert not (await reading).ok
            assert (await written(room.blocks[0])).ok
            assert worker.parts.memory.tensor.sum() == 7 * memory.half
            assert (worker.parts.computing.engine.cache.keys[1][room.blocks[0]] != 0).all()
            await client.kv_close(p.KVClose("x", abort=True))
            assert not (await written(room.blocks[0])).ok


async def test_room_is_somebody_elses_only_when_its_senders_have_stopped():
    """A write that was begun may still be under way when the room is not wanted any more."""
    async with fleet() as running:
        client = await running.add("decode")
        worker = running.workers[0]
        cache = running.engine(0).cache
        message = asking_for_room(worker.card, "x", senders=2, deadline_ms=600_000)
        assert (await client.kv_open(message)).room is not None
        await client.kv_close(p.KVClose("x", abort=True))
        assert cache.used == 2
        assert not worker._receiving.expected
        await client.kv_close(p.KVClose("x"))
        await running.settled()


async def test_room_whose_sender_does_not_wait_for_it_is_given_back():
    async with fleet() as running:
        sender = await running.add("decode")
        worker = running.workers[0]
        message = asking_for_room(worker.card, "x")
        with held(worker) as computing:
            asking = asyncio.ensure_future(sender.kv_open(message))
            await until_async(lambda: computing._work)
            await sender.close()
            await asyncio.gather(asking, return_exceptions=True)
            await until_async(lambda: not worker._server.connections)
        await computing.call(lambda: None)  # By now the room was taken.
        await running.settled()


async def test_room_that_is_given_up_while_it_is_asked_for_is_not_kept():
    """A sender that has waited too long gives up; what it asked for is answered later."""
    async with fleet() as running:
        client = await running.add("decode")
        message = asking_for_room(running.workers[0].card, "x", deadline_ms=600_000)
        with held(running.workers[0]) as computing:
            asking = asyncio.ensure_future(client.kv_open(message))
            await until_async(lambda: computing._work)
            await client.kv_close(p.KVClose("x", abort=True))
        assert (await asking).room is None
        await running.settled()


async def test_room_for_kv_that_never_comes_is_given_back(monkeypatch):
    """Its sender is there, says nothing, and has had its time."""
    monkeypatch.setattr(incoming, "STILL_S", 0.2)
    async with fleet() as running:
        client = await running.add("decode")
        await client.kv_open(asking_for_room(running.workers[0].card, "x", deadline_ms=200))
        assert running.engine(0).cache.used
        await until_async(lambda: not running.engine(0).cache.used)


async def test_room_that_no_decode_comes_for_is_given_back_long_before_its_deadline(monkeypatch):
    """Who asked for the prefill has left between its end and the decode."""
    monkeypatch.setattr(receiving, "WANTED_S", 0.2)
    async with fleet() as running:
        first = await running.add()
        second = await running.add("decode")
        events = await prefill(first, LONG, decode_at=second.address, deadline_ms=600_000)
        assert events[-1].kv.pushed
        await running.settled()


async def test_room_for_kv_whose_sender_died_is_given_back():
    async with fleet() as running:
        await running.add("decode")
        sender = WorkerClient(running.clients[0].address)
        message = asking_for_room(running.workers[0].card, "x", deadline_ms=600_000)
        assert (await sender.kv_open(message)).room is not None
        await sender.close()
        await running.settled()


async def test_the_last_place_is_promised_to_one_sender():
    async with fleet() as running:
        client = await running.add("decode", running_max=1)
        worker = running.workers[0]
        with held(worker) as computing:
            asking = [
                asyncio.ensure_future(client.kv_open(asking_for_room(worker.card, name)))
                for name in "xy"
            ]
            await until_async(lambda: len(computing._work) == 2)
        opened = await asyncio.gather(*asking)
        assert sorted(each.room is not None for each in opened) == [False, True]
        for name in "xy":
            await client.kv_close(p.KVClose(name, abort=True))
