"""How keys are named: by a secret that the master tells, one for all clients of a namespace."""

import numpy as np
import pytest

from mooncake_store import AsyncClient, Client, Digests, InvalidArgumentError, NotFoundError
from mooncake_store.errors import StoreError
from mooncake_store.identity import Keyed, Unkeyed
from tests.hashing.meeting import meeting_keys
from tests.waiting import until

KEYS = ["a", b"b", "schlüssel", "x" * 4096]


@pytest.mark.asyncio
async def test_clients_of_a_namespace_agree_and_those_of_others_differ(url):
    other = f"{url}-other"
    with Client(url) as one, Client(url) as two, Client(other) as stranger:
        assert isinstance(one.identity, Keyed)
        expected = one.identity.digests(KEYS).tolist()
        assert two.identity.digests(KEYS).tolist() == expected
        async with AsyncClient(url) as third:
            assert third.identity.digests(KEYS).tolist() == expected
        found = stranger.identity.digests(KEYS).tolist()
        assert not [digest for digest in found if digest in expected]
        chain = one.identity.hash_blocks(np.arange(64), 16).tolist()
        assert two.identity.hash_blocks(np.arange(64), 16).tolist() == chain
        assert stranger.identity.hash_blocks(np.arange(64), 16).tolist() != chain


def test_what_a_client_names_is_what_the_store_has(store):
    store.put_many(["a", "b"], [b"1", b"2"])
    digests = Digests(store.identity.digests(["a", "b"]))
    assert store.get_many(digests).values == [b"1", b"2"]
    assert store.get(Digests(store.identity.digest("b"))) == b"2"
    with pytest.raises(NotFoundError):
        store.get(Digests(Unkeyed(store.namespace).digest("a")))


@pytest.mark.parametrize("number", [int, np.int64, np.uint8])
def test_one_of_several_digests_is_found_by_any_whole_number(number):
    digests = Digests([bytes(16), bytes(range(16))])
    assert digests[number(1)] == Digests(bytes(range(16)))
    with pytest.raises(IndexError, match="digest 2 of 2"):
        digests[number(2)]
    with pytest.raises(TypeError):
        digests[1.0]


def test_digests_are_counted_from_their_end_as_well():
    each = [bytes([number]) * 16 for number in range(3)]
    digests = Digests(each)
    assert [digests[at] for at in (-1, -2, -3)] == [Digests(one) for one in reversed(each)]
    with pytest.raises(IndexError, match="digest -4 of 3"):
        digests[-4]


def test_a_master_that_keeps_its_state_goes_on_with_the_names(own_cluster, connect):
    cluster = own_cluster(workers=1)
    store = connect(cluster.url)
    before = store.identity.digests(KEYS).tolist()
    cluster.restart_master()
    with Client(cluster.url) as other:
        assert other.identity.digests(KEYS).tolist() == before
    # As soon as the worker is back, and without an error that says that names have changed.
    until(lambda: cluster_takes(store), what="the worker of the restarted master")
    assert store.identity.digests(KEYS).tolist() == before
    assert store.get("probe") == b"value"


def cluster_takes(store):
    try:
        return store.put("probe", b"value").stored
    except StoreError as error:
        if "names keys anew" in str(error):
            raise
        return False


@pytest.mark.parametrize(
    "ask",
    [
        lambda store: store.put("key", b"value"),
        lambda store: store.get("key"),
        lambda store: store.exists("key"),
        lambda store: store.put_many(["key", "other"], [b"1", b"2"]).check(),
    ],
)
def test_nothing_is_believed_that_was_asked_under_old_names(own_cluster, connect, ask, free_port):
    settings = {"state": "none", "port": free_port}
    cluster = own_cluster(workers=1, master=settings)
    store = connect(cluster.url)
    before = store.identity
    cluster.restart_master()

    def refused():
        named = store.identity
        try:
            ask(store)
        except StoreError:  # at first perhaps that the connection was lost
            return store.identity is not before
        assert named is not before, "an answer about names of the former master was believed"
        return True

    until(refused, what="the restarted master")
    assert store.identity is not before
    until(lambda: cluster_takes(store), what="the worker of the restarted master")
    with Client(cluster.url) as other:
        assert other.get("probe") == b"value"


def test_keys_that_meet_are_refused_where_they_can_be_made(own_cluster, connect):
    store = connect(own_cluster(workers=1, master={"identity": "xxh3"}).url)
    assert store.identity.digest("k") == Unkeyed("default").digest("k")
    other = connect(store.config.url.replace("/default", f"/{meeting_keys()[0]}"))
    _, one, two = meeting_keys()
    assert other.identity.digest(one) == other.identity.digest(two)
    other.put(one, b"1")
    with pytest.raises(InvalidArgumentError, match="another name has the digest") as caught:
        other.put(two, b"2")
    assert caught.value.key == two
    with pytest.raises(InvalidArgumentError, match="another name"):
        other.put(two, b"2", upsert=True)
    result = other.put_many([b"free", two, one], [b"3", b"2", b"1"])
    assert [type(result.error(at)).__name__ for at in result.failed] == ["InvalidArgumentError"]
    assert result.failed.tolist() == [1]
    assert other.get(one) == b"1"
    assert other.get(b"free") == b"3"
