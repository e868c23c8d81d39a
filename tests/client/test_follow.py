"""Following a store: a snapshot, then every change in order, and a new snapshot after a gap."""

import asyncio

import numpy as np
import pytest

from mooncake_store import AsyncClient, ids
from mooncake_store.errors import StoreError
from mooncake_store.local_cluster import LocalCluster


def digests_of(keys, namespace):
    return {bytes(row) for row in ids.digests(keys, ids.namespace_seed(namespace))}


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
        return found.reset or len(found.digests) > 0

    def settle(self):
        """Apply news until none come any more."""
        while self.take():
            pass
        return self.held


def test_a_follower_sees_what_is_there_and_what_changes(own_cluster, connect):
    store = connect(own_cluster().url)
    store.put_many(["a", "b", "c"], [b"1", b"2", b"3"])
    mirror = Mirror(store.follow(wait="50ms"))
    assert mirror.settle() == digests_of(["a", "b", "c"], "default")
    store.remove("b")
    store.put("d", b"4")
    store.put("a", b"new", upsert=True)
    assert mirror.settle() == digests_of(["a", "c", "d"], "default")
    assert mirror.resets == 1


def test_each_shard_has_its_own_events(own_cluster, connect):
    store = connect(own_cluster(shards=2).url)
    keys = [f"key-{n}" for n in range(100)]
    store.put_many(keys, [b"x"] * 100)
    mirrors = [Mirror(store.follow(shard, wait="50ms")) for shard in range(store.shards)]
    parts = [mirror.settle() for mirror in mirrors]
    assert parts[0] | parts[1] == digests_of(keys, "default")
    assert not parts[0] & parts[1]
    assert all(parts)
    store.remove_many(keys[:50])
    left = mirrors[0].settle() | mirrors[1].settle()
    assert left == digests_of(keys[50:], "default")


def test_whoever_was_away_too_long_gets_a_snapshot(connect):
    with LocalCluster(segment="64MB", master={"events_kept": 16}) as cluster:
        store = connect(cluster.url)
        mirror = Mirror(store.follow(wait="50ms"))
        mirror.settle()
        keys = [f"key-{n}" for n in range(200)]
        store.put_many(keys, [b"x"] * 200)
        store.remove_many(keys[:100])
        assert mirror.settle() == digests_of(keys[100:], "default")
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
        (digest,) = digests_of([key], store.namespace)
        waiting = asyncio.create_task(follow_until(news, digest))
        await store.put(key, b"x")
        found = await asyncio.wait_for(waiting, 10)
        assert isinstance(found.digests, np.ndarray)
        assert found.stored.all()
        await news.aclose()
