"""Hints, given to real masters: what becomes of each key, and what the pool does about it."""

import asyncio

import numpy as np
import pytest

from mooncake_store import AsyncClient, InvalidArgumentError, NotFoundError
from mooncake_store.errors import BusyError, NoSpaceError
from tests.waiting import until

VALUE = bytes(4096)


def columns(result):
    """Each key's outcome; there is one of each."""
    kinds = ("accepted", "clipped", "rejected", "missing")
    table = np.array([getattr(result, kind) for kind in kinds])
    assert (table.sum(axis=0) == 1).all()
    return [kinds[at] for at in table.argmax(axis=0)]


@pytest.fixture(params=["one shard", "two shards"])
def store(request, url, connect, two_shards):
    if request.param == "two shards":
        url = f"mooncake://{two_shards.address}/{url.rpartition('/')[2]}"
    return connect(url)


def test_every_key_has_one_outcome_in_order(store):
    keys = [f"key-{at}" for at in range(40)]
    store.put_many(keys[::2], [VALUE] * 20).check()
    hinted = store.hint(keys, "pin", ttl="10m", priority=2)
    assert columns(hinted) == ["accepted", "missing"] * 20
    assert isinstance(hinted.error(1), NotFoundError)
    assert hinted.error(1).key == "key-1"
    assert not hinted.ok
    assert 500 < store.stat("key-0").soft_pin_s <= 600
    assert columns(store.hint(keys[:3], "retain", ttl="365d", priority=1)) == [
        "clipped", "missing", "clipped",
    ]  # fmt: skip
    assert columns(store.hint(["key-0", ""], "retain")) == ["accepted", "rejected"]
    assert columns(store.hint([], "retain")) == []


def test_a_hint_that_is_refused_says_why(store):
    store.put("pinned", VALUE, hard_pin=True)
    hinted = store.hint(["pinned", "gone"], "demote")
    assert columns(hinted) == ["rejected", "missing"]
    assert isinstance(hinted.error(0), BusyError)
    assert "pinned" in hinted.error(0).what
    with pytest.raises(BusyError):
        hinted.check()


@pytest.mark.parametrize(
    ("action", "options", "word"),
    [
        ("keep", {}, "choose from pin, retain, prefetch, demote, share"),
        (None, {}, "choose from pin"),
        ("pin", {"priority": 0}, "1 to 3, not 0"),
        ("retain", {"priority": 4}, "0 to 3, not 4"),
        ("retain", {"priority": "high"}, "whole number"),
        ("retain", {"ttl": "5s"}, "give retain a priority"),
        ("demote", {"ttl": "5s"}, "not of demote"),
        ("share", {"priority": 1}, "share has no priority"),
        ("pin", {"ttl": "soon"}, "not a duration"),
        ("pin", {"ttl": 0}, "1 ms or more"),
    ],
)
def test_what_is_no_hint_is_refused_with_the_choices(store, action, options, word):
    with pytest.raises(InvalidArgumentError, match=word):
        store.hint(["key"], action, **options)


def test_another_namespace_has_none_of_these_objects(cluster, url, connect, store):
    store.put("mine", VALUE)
    other = connect(f"{url}-other")
    assert columns(other.hint(["mine"], "demote")) == ["missing"]


def test_more_keys_than_a_request_takes(url, connect):
    store = connect(url)
    keys = [f"key-{at}" for at in range(20_000)]
    store.put_many(keys, [b"x"] * len(keys)).check()
    assert store.hint(keys, "retain").accepted.all()
    assert store.remove_many(keys).ok


def test_one_replica_more_is_made(url, connect):
    store = connect(url)
    store.put("popular", VALUE)
    assert store.hint(["popular"], "share").ok
    until(lambda: len(store.query("popular").replicas) == 2, what="the second replica")
    again = store.hint(["popular"], "share")
    assert columns(again) == ["rejected"]  # there are two workers
    assert isinstance(again.error(0), NoSpaceError)


def test_what_is_demoted_leaves_before_what_was_not_read_for_longest(own_cluster, connect):
    store = connect(own_cluster(workers=1, segment="8MB").url)
    keys = [f"key-{at}" for at in range(6)]
    store.put_many(keys, [bytes(1_000_000)] * 6).check()
    assert store.hint(keys[3:], "demote").ok
    assert store.hint([keys[0]], "pin", priority=3).ok
    # Leases of what is put there are none, so each of these makes the coldest leave.
    store.put_many(["new-0", "new-1", "new-2"], [bytes(1_000_000)] * 3).check()
    assert not store.exists(keys[3])
    assert store.exists_many(keys[:3]).all()


def test_asyncio_gives_the_same_hints(url):
    async def main():
        async with AsyncClient(url) as store:
            await store.put("key", VALUE)
            hinted = await store.hint(["key", "gone"], "pin", ttl=5)
            assert columns(hinted) == ["accepted", "missing"]
            with pytest.raises(InvalidArgumentError):
                await store.hint(["key"], "keep")

    asyncio.run(main())


def test_the_command_says_what_became_of_each_key(mooncake):
    mooncake("put", "here", "-", stdin=b"hello")
    mooncake("put", "kept", "-", "--hard-pin", stdin=b"hello")
    assert mooncake("hint", "pin", "here", "--ttl", "10m", "--priority", "3")[:2] == (
        0,
        "here: accepted\n",
    )
    assert "soft pin" in mooncake("stat", "here")[1]
    code, out, _ = mooncake("hint", "demote", "kept", "gone")
    assert code == 5
    assert out.startswith("kept: rejected (the object is pinned")
    assert "gone: missing (" in out
    code, _, err = mooncake("hint", "share", "here", "--ttl", "5s")
    assert code == 2
    assert "not of share" in err
    code, out, _ = mooncake("hint", "retain", "here", "gone", "--json")
    assert code == 5
    assert '"outcome": "accepted"' in out
    assert '"outcome": "missing"' in out
