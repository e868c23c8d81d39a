"""Requests that were carried out, and whose answers were lost with their connections."""

import pytest

from mooncake_store import AsyncClient, Client
from mooncake_store.errors import NotFoundError, PeerLostError
from tests.client.interruptions import LostAnswers

KEYS = [f"key-{at}" for at in range(20)]
VALUES = [key.encode() * 100 for key in KEYS]


def put(store):
    assert [store.put(*pair).outcome for pair in zip(KEYS, VALUES, strict=True)] == ["stored"] * 20


def put_twice(store):
    assert store.put_many(KEYS, [b"older"] * 20).ok
    result = store.put_many(KEYS, VALUES, upsert=True)
    assert [each.outcome for each in result] == ["stored"] * 20


def put_many(store):
    result = store.put_many(KEYS, VALUES)
    assert [each.outcome for each in result] == ["stored"] * 20


def write(store):
    for key, value in zip(KEYS, VALUES, strict=True):
        with store.writer(key, len(value)) as writer:
            writer.write(0, value)


def put_with_repetitions(store):
    """Of equal keys in a batch one is stored, which is the first."""
    result = store.put_many(KEYS + KEYS, VALUES + [b"other"] * 20)
    assert [each.outcome for each in result] == ["stored"] * 20 + ["already_present"] * 20


def upsert_with_repetitions(store):
    """Of equal keys in a batch one is stored, which is the last."""
    result = store.put_many(KEYS + KEYS, [b"other"] * 20 + VALUES, upsert=True)
    assert [each.outcome for each in result] == ["superseded"] * 20 + ["stored"] * 20


@pytest.mark.parametrize(
    "puts",
    [put, put_twice, put_many, write, put_with_repetitions, upsert_with_repetitions],
    ids=lambda puts: puts.__name__,
)
@pytest.mark.parametrize("lost", ["put_start", "put_end"])
def test_a_put_goes_on_with_what_it_began(two_shards, connect, monkeypatch, puts, lost):
    url = f"mooncake://{two_shards.address}/lost-{lost}-{puts.__name__}"
    losing = LostAnswers(monkeypatch, lost)
    puts(connect(url))
    assert not losing.left
    other = connect(url)
    assert other.get_many(KEYS).check().values == VALUES
    other.remove_many(KEYS, force=True).check()


@pytest.mark.parametrize("removal", [Client.remove, lambda store, key: store.remove_many([key])])
def test_what_a_lost_answer_said_to_be_gone_is_removed(store, monkeypatch, removal):
    store.put("key", b"value")
    losing = LostAnswers(monkeypatch, "remove")
    result = removal(store, "key")
    assert result is None or result.ok
    assert not losing.left
    assert not store.exists("key")
    with pytest.raises(NotFoundError):  # by a request that was answered
        store.remove("key")


def test_a_change_that_is_not_made_twice_says_that_nobody_knows(store, monkeypatch):
    store.put("old", b"value")
    LostAnswers(monkeypatch, "rename")
    with pytest.raises(PeerLostError, match="nobody knows whether it was done: look") as caught:
        store.rename("old", "new")
    assert caught.value.operation == "rename"
    assert store.get("new") == b"value"


def test_leases_are_given_back_without_an_error_where_nobody_is(own_cluster, connect):
    cluster = own_cluster(workers=1)
    store = connect(cluster.url)
    store.put("key", b"value")
    assert store.get("key") == b"value"
    with store.view("key", ttl="60s") as view:
        cluster.kill_master()
        assert bytes(view.data) == b"value"
    store.release_many(["key"])


@pytest.mark.asyncio
async def test_an_asyncio_client_goes_on_with_what_it_began(url, monkeypatch):
    losing = LostAnswers(monkeypatch, "put_start", "put_end", "remove")
    async with AsyncClient(url) as store:
        assert (await store.put("key", b"value")).outcome == "stored"
        assert await store.get("key") == b"value"
        assert losing.left == ["remove"]
        await store.remove("key")
        assert not losing.left
        assert not await store.exists("key")


@pytest.mark.slow
@pytest.mark.parametrize("lost", ["put_start", "put_end"])
def test_a_put_goes_on_at_a_master_that_was_killed_before_it_answered(
    own_cluster, connect, monkeypatch, lost
):
    cluster = own_cluster(workers=1, master={"journal": "written"})
    store = connect(cluster.url)
    losing = LostAnswers(monkeypatch, lost, meanwhile=cluster.restart_master)
    assert [each.outcome for each in store.put_many(KEYS, VALUES)] == ["stored"] * 20
    assert not losing.left
    assert connect(cluster.url).get_many(KEYS).check().values == VALUES
