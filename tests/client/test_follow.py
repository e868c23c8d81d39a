"""Following a store: a snapshot, then every change in order, and a new snapshot after a gap.

`test_follow_model.py` does it at random.
"""

import asyncio
import contextlib
import json

import numpy as np
import pytest

from mooncake_store import AsyncClient, Client
from mooncake_store.client import Position
from mooncake_store.core.shard import Shard
from mooncake_store.errors import InvalidArgumentError, StoreError
from mooncake_store.local_cluster import LocalCluster


def digests_of(store, keys):
    return {bytes(row) for row in store.identity.digests(keys)}


class Mirror:
    """The set of digests that news tell of."""

    def __init__(self, news):
        self.news = news
        self.held = set()
        self.resets = 0

    def take(self):
        """Apply the next news; return whether there were any."""
        found = next(self.news)
        if found.reset:
            self.held.clear()
            self.resets += 1
        for digest, stored in zip(found.digests, found.stored, strict=True):
            (self.held.add if stored else self.held.discard)(bytes(digest))
        return found.snapshot or len(found.digests) > 0

    def settle(self):
        """Apply news until none come any more."""
        while self.take():
            pass
        return self.held


def test_a_follower_sees_what_is_there_and_what_changes(own_cluster, connect):
    store = connect(own_cluster().url)
    store.put_many(["a", "b", "c"], [b"1", b"2", b"3"])
    mirror = Mirror(store.follow(wait="50ms"))
    assert mirror.settle() == digests_of(store, ["a", "b", "c"])
    store.remove("b")
    store.put("d", b"4")
    store.put("a", b"new", upsert=True)
    assert mirror.settle() == digests_of(store, ["a", "c", "d"])
    assert mirror.resets == 1


def test_each_shard_has_its_own_events(own_cluster, connect):
    store = connect(own_cluster(shards=2).url)
    keys = [f"key-{n}" for n in range(100)]
    store.put_many(keys, [b"x"] * 100)
    mirrors = [Mirror(store.follow(shard, wait="50ms")) for shard in range(store.shards)]
    parts = [mirror.settle() for mirror in mirrors]
    assert parts[0] | parts[1] == digests_of(store, keys)
    assert not parts[0] & parts[1]
    assert all(parts)
    store.remove_many(keys[:50])
    left = mirrors[0].settle() | mirrors[1].settle()
    assert left == digests_of(store, keys[50:])


def test_whoever_was_away_too_long_gets_a_snapshot(connect):
    with LocalCluster(segment="64MB", master={"events_kept": 16}) as cluster:
        store = connect(cluster.url)
        mirror = Mirror(store.follow(wait="50ms"))
        mirror.settle()
        keys = [f"key-{n}" for n in range(200)]
        store.put_many(keys, [b"x"] * 200)
        store.remove_many(keys[:100])
        assert mirror.settle() == digests_of(store, keys[100:])
        assert mirror.resets == 2


def test_removing_everything_is_told_too(own_cluster, connect):
    store = connect(own_cluster().url)
    store.put_many(["a", "b"], [b"1", b"2"])
    mirror = Mirror(store.follow(wait="50ms"))
    assert len(mirror.settle()) == 2
    assert store.remove_prefix("", force=True) == 2
    assert mirror.settle() == set()


def test_a_follower_is_told_that_the_store_is_gone(own_cluster, connect):
    cluster = own_cluster()
    store = connect(cluster.url, deadline=1.0, connect_timeout=0.5)
    news = store.follow(wait="50ms")
    next(news)
    cluster.kill_master()
    with pytest.raises(StoreError):
        any(False for _ in news)  # news without an end end only by an error


async def follow_until(news, digest):
    async for found in news:
        if any(bytes(row) == digest for row in found.digests):
            return found
    raise AssertionError("a follower never ends")


@pytest.mark.asyncio
async def test_news_wake_an_asyncio_follower_at_once(url):
    async with AsyncClient(url) as store:
        news = store.follow(wait=30.0)
        first = await anext(news)
        assert first.reset
        key = "late"
        (digest,) = digests_of(store, [key])
        waiting = asyncio.create_task(follow_until(news, digest))
        await store.put(key, b"x")
        found = await asyncio.wait_for(waiting, 10)
        assert isinstance(found.digests, np.ndarray)
        assert found.stored.all()
        await news.aclose()


class Blocking:
    """A reader of a store; `Asyncio` is the same by the other client."""

    def __init__(self, url):
        self.store = Client(url)

    def follow(self, shard=0, **options):
        return self.store.follow(shard, wait="50ms", **options)

    def run(self, answer):
        return answer

    def close(self):
        self.store.close()


class Asyncio(Blocking):
    def __init__(self, url):
        self._closed = False
        self._runner = asyncio.Runner()
        self.run = self._runner.run
        self.store = self.run(self._open(url))

    async def _open(self, url):
        return await AsyncClient(url).__aenter__()

    def follow(self, shard=0, **options):
        news = super().follow(shard, **options)

        async def following():
            return await anext(news)

        return iter(lambda: self.run(following()), None)

    def close(self):
        if not self._closed:
            self._closed = True
            self.run(self.store.close())
            self._runner.close()


@pytest.fixture(params=[Blocking, Asyncio])
def reader(request):
    """Make readers that are closed when the test ends."""
    with contextlib.ExitStack() as made:
        yield lambda url: made.enter_context(contextlib.closing(request.param(url)))


@pytest.fixture
def start():
    """Start masters with some memory, as often as wanted; they are quick to start."""
    with contextlib.ExitStack() as running:

        def make(**master):
            return running.enter_context(
                LocalCluster(segment="64MB", in_process=True, master=master)
            )

        yield make


def put(store, *keys):
    store.put_many(list(keys), [b"x"] * len(keys)).check()


def position_after(reader, shard=0):
    """Where a shard's events end for a reader, as it would be kept on disk."""
    while True:
        for news in reader.follow(shard):
            if news.position is not None and not len(news.digests):
                return json.dumps(news.position)


def restored(text):
    return Position(*json.loads(text))


def test_a_store_that_was_started_anew_begins_anew(start, connect, reader, free_port):
    first = start(port=free_port)
    put(connect(first.url), "a", "b", "c")
    mine = reader(first.url)
    mirror = Mirror(mine.follow())
    mirror.settle()
    first.close()
    # More happens in the second life than the follower saw of the first: its number is not ahead.
    store = connect(start(port=free_port).url)
    keys = [f"key-{n}" for n in range(20)]
    put(store, *keys)
    assert mirror.settle() == digests_of(store, keys)
    assert mirror.resets == 2


def test_a_follower_goes_on_from_a_position_without_loss_or_repetition(start, connect, reader):
    cluster = start()
    store = connect(cluster.url)
    put(store, "a", "b", "c")
    first = reader(cluster.url)
    kept = position_after(first)
    first.close()
    store.remove("b")
    put(store, "d")
    store.put("a", b"new", upsert=True)
    told = []
    again = reader(cluster.url).follow(since=restored(kept))
    for news in again:
        assert not news.reset
        assert not news.snapshot
        told += zip(map(bytes, news.digests), news.stored.tolist(), strict=True)
        if not len(news.digests):
            break
    changed = ["b", "d", "a"]
    digests = [bytes(row) for row in store.identity.digests(changed)]
    assert [each for each in told if each != (digests[2], False)] == list(
        zip(digests, [False, True, True], strict=True)
    )
    put(store, "e")
    assert {bytes(row) for row in next(again).digests} == digests_of(store, ["e"])


def test_news_can_be_followed_from_the_position_of_any_of_them(start, connect, reader):
    cluster = start()
    store = connect(cluster.url)
    keys = [f"key-{n}" for n in range(5)]
    mine = reader(cluster.url)
    mirror = Mirror(mine.follow())
    mirror.settle()
    seen = []
    news = mine.follow()
    seen.append((next(news).position, set(mirror.held)))
    for key in keys:
        put(store, key)
        found = next(news)
        mirror.settle()
        seen.append((found.position, set(mirror.held)))
    for position, held in seen:
        later = Mirror(mine.follow(since=position))
        later.held = held
        assert later.settle() == digests_of(store, keys)
        assert later.resets == 0


def test_a_follower_that_missed_more_than_is_kept_gets_a_snapshot(start, connect, reader):
    cluster = start(events_kept=16)
    store = connect(cluster.url)
    put(store, "gone")
    kept = position_after(reader(cluster.url))
    store.remove("gone")
    keys = [f"key-{n}" for n in range(30)]
    put(store, *keys)
    mirror = Mirror(reader(cluster.url).follow(since=restored(kept)))
    assert mirror.settle() == digests_of(store, keys)
    assert mirror.resets == 1


def test_what_changes_among_pages_that_were_told_is_told_too(start, connect, reader, monkeypatch):
    """A snapshot of many objects takes several requests, and the store is used meanwhile."""
    whole = Shard.event_snapshot
    monkeypatch.setattr(
        Shard, "event_snapshot", lambda shard, cursor, **of: whole(shard, cursor, 8, **of)
    )
    url = start().url
    store = connect(url)
    keys = [f"key-{n}" for n in range(40)]
    put(store, *keys)
    mirror = Mirror(reader(url).follow())
    mirror.take()
    told = [key for key in keys if digests_of(store, [key]) <= mirror.held]
    assert 0 < len(told) < len(keys)
    store.remove_many(told).check()
    put(store, "new")
    assert mirror.settle() == digests_of(store, [*set(keys) - set(told), "new"])
    assert mirror.resets == 1


@pytest.mark.parametrize("events", [0, 1, 2, 9])
def test_a_position_in_another_life_of_the_store_leads_to_a_snapshot(
    start, connect, reader, free_port, events
):
    first = start(port=free_port)
    put(connect(first.url), "a", "b")
    mine = reader(first.url)
    kept = position_after(mine)
    mine.close()
    first.close()
    second = start(port=free_port)
    store = connect(second.url)
    keys = [f"key-{n}" for n in range(events)]
    if keys:
        put(store, *keys)
    mirror = Mirror(reader(second.url).follow(since=restored(kept)))
    assert mirror.settle() == digests_of(store, keys)
    assert mirror.resets == 1


def test_what_is_no_position_of_the_shard_leads_to_a_snapshot(two_shards, connect, reader):
    put(connect(two_shards.url), *[f"follow/{n}" for n in range(40)])
    mine = reader(two_shards.url)
    own, others = (restored(position_after(mine, shard)) for shard in (0, 1))
    expected = Mirror(mine.follow(0)).settle()
    ahead, before = own._replace(number=own.number + 1), own._replace(number=0)
    for wrong in (others, ahead, before, Position(0, 1), Position(own.stream, (1 << 64) - 1)):
        mirror = Mirror(mine.follow(0, since=wrong))
        assert mirror.settle() == expected
        assert mirror.resets == 1


@pytest.mark.parametrize("garbage", [7, "12", (), (1,), (1, 2, 3), (-1, 1), (1, 1 << 64), (1.5, 2)])
def test_what_is_no_position_at_all_is_refused(cluster, reader, garbage):
    with pytest.raises(InvalidArgumentError, match="no position"):
        next(reader(cluster.url).follow(since=garbage))
