"""Who asks for all objects again and again is in nobody's way who asks for some keys."""

import asyncio
import threading

import numpy as np
import pytest

from mooncake_store import AsyncClient, Client, OverloadedError
from mooncake_store.core.shard import Shard
from mooncake_store.master import turns as module
from mooncake_store.master.turns import Turns
from mooncake_store.wire import shard as wire
from tests.master.wires import TIMEOUT_S, ShardWire, digests
from tests.waiting import PATIENCE_S
from transfer_engine.errors import StoreError

FLOOD = 200


@pytest.mark.asyncio
async def test_clients_take_turns_one_each_time_around_the_loop():
    turns, told, seen = Turns(), [], []
    assert turns.take(1) is None, "nobody has the turn"
    for client in (1, 1, 1, 2, 3):
        turns.take(client).add_done_callback(lambda _, client=client: told.append(client))
    for _ in range(20):
        seen.append(len(told))
        await asyncio.sleep(0)
    assert told == [1, 2, 3, 1, 1]
    assert set(range(6)) == set(seen), "one at a time"
    assert turns.take(1) is None


@pytest.mark.asyncio
async def test_who_finds_no_place_is_told_when_to_come_again(monkeypatch):
    monkeypatch.setattr(module, "OF_ONE_CLIENT_MAX", 2)
    turns = Turns()
    assert turns.take(1) is None
    places = [turns.take(1), turns.take(1)]
    with pytest.raises(OverloadedError, match="2 requests that look at all objects") as caught:
        turns.take(1)
    assert caught.value.retry_after_s > 0
    assert caught.value.retryable
    other = turns.take(2)
    places[0].cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert places[1].done()
    assert other.done()
    assert turns.take(1) is None
    assert turns.take(1) is not None, "a place that is free again"


def test_a_flood_of_listings_is_shed_and_keys_are_answered_in_between(pool, monkeypatch):
    served, before_exists = [], []
    began, asked = threading.Event(), threading.Event()
    list_objects, exists = Shard.list_objects, Shard.exists

    def listing(*arguments):
        served.append(1)
        began.set()
        assert asked.wait(PATIENCE_S)
        return list_objects(*arguments)

    def existing(*arguments):
        before_exists.append(len(served))
        return exists(*arguments)

    monkeypatch.setattr(Shard, "list_objects", listing)
    monkeypatch.setattr(Shard, "exists", existing)
    pool.put([b"a"], 100)
    flooder = ShardWire(pool.connection.peer)
    body = wire.LIST.request.pack(cursor=0, limit=10, prefix=np.empty(0, np.uint8))
    numbers = [flooder.connection.send(wire.LIST, body, timeout_s=TIMEOUT_S) for _ in range(FLOOD)]
    assert began.wait(PATIENCE_S)
    question = wire.EXISTS.request.pack(digests=digests(b"a"))
    number = pool.connection.send(wire.EXISTS, question, timeout_s=TIMEOUT_S)
    asked.set()
    answer = pool.connection.recv(number, timeout_s=TIMEOUT_S)
    assert wire.EXISTS.reply.unpack(answer).present.tolist() == [1]
    assert before_exists[0] < 10, f"{before_exists[0]} of {FLOOD} listings came first"
    refused = []
    for each in numbers:
        try:
            assert wire.LIST.reply.unpack(flooder.connection.recv(each, timeout_s=TIMEOUT_S))
        except StoreError as error:
            refused.append(error)
    assert 0 < len(refused) < FLOOD
    assert {type(error) for error in refused} == {OverloadedError}
    assert all(error.retry_after_s > 0 for error in refused)
    flooder.close()


@pytest.fixture
def crowded(monkeypatch):
    """Say to so many who come that there is no place for them, and for how long."""

    def crowd(times, retry_after_s):
        take, left = Turns.take, iter(range(times))

        def refuse(self, client):
            if next(left, None) is None:
                return take(self, client)
            error = OverloadedError("a thousand others wait")
            error.retry_after_s = retry_after_s
            raise error

        monkeypatch.setattr(Turns, "take", refuse)

    return crowd


def test_clients_come_again_when_they_were_told_to(start_cluster, crowded):
    async def names():
        async with AsyncClient(cluster.url) as store:
            return [found.key for found in await store.list()]

    cluster = start_cluster()
    with Client(cluster.url) as store:
        store.put("a", b"1")
        crowded(3, 0.01)
        assert [found.key for found in store.list()] == ["a"]
        crowded(3, 0.01)
        assert asyncio.run(names()) == ["a"]
        crowded(3, 3600.0)
        with pytest.raises(OverloadedError, match="a thousand others wait") as caught:
            list(store.list())
        assert caught.value.retry_after_s == 3600
