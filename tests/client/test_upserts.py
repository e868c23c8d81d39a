"""Upserts and puts of one key that race: each is stored or superseded, and nothing is left over."""

import threading

import pytest

from mooncake_store.units import MIB
from tests.client.interruptions import SlowTransfers, during_copies
from tests.waiting import PATIENCE_S


@pytest.mark.parametrize("upsert", [False, True])
@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_put_that_another_replaced_meanwhile_is_superseded(
    store, connect, url, monkeypatch, own, there, upsert
):
    other = store if own else connect(url)
    store.put_many([f"open {n}" for n in range(256)], [b"x"] * 256)  # reach every segment
    if there and upsert:
        store.put("key", b"first")
    left = during_copies(monkeypatch, lambda: other.put("key", b"newer", upsert=True))
    SlowTransfers(store, lambda: left.pop()() if left else None)  # a batch is moved instead
    put = store.put("key", b"older", **({"upsert": True} if upsert else {}))
    assert not left
    assert (put.outcome, put.superseded, put.stored) == ("superseded", True, False)
    assert put.error is None
    assert store.get("key") == b"newer"


def test_a_batch_and_a_session_are_told_which_keys_were_superseded(store, connect, url):
    other, left = connect(url), [1]

    def between():
        if left:
            left.pop()
            other.put("b", b"newer", upsert=True)

    SlowTransfers(store, between)
    put = store.put_many(["a", "b"], [b"older"] * 2, upsert=True)
    assert put.ok
    assert put.superseded.tolist() == [False, True]
    assert [put[at].outcome for at in range(2)] == ["stored", "superseded"]
    assert store.get_many(["a", "b"]).values == [b"older", b"newer"]
    with store.writer("a", 4, upsert=True) as writer:
        writer.write(0, b"late")
        other.put("a", b"newest", upsert=True)
    assert writer.result.superseded
    assert store.get("a") == b"newest"


def test_of_equal_keys_in_a_batch_of_upserts_the_last_is_stored(store):
    keys, values = ["a", "b", "a", "a"], [b"1", b"2", b"3", b"4"]
    for _ in range(2):  # a new key, then one that is there
        put = store.put_many(keys, values, upsert=True)
        assert put.ok
        assert put.superseded.tolist() == [True, False, True, False]
        assert put.replicas.tolist() == [0, 1, 0, 1]
        assert store.get_many(["a", "b"]).values == [b"4", b"2"]


def test_upserts_of_one_key_by_many_threads_are_stored_or_superseded(own_cluster, connect):
    clients = [connect(own_cluster().url)] * 2
    clients.append(connect(clients[0].config.url))
    told, values = [[] for _ in clients], [bytes([n]) * 50_000 for n in range(len(clients))]

    def upsert(n):
        told[n] += [clients[n].put("key", values[n], upsert=True).outcome for _ in range(300)]

    threads = [threading.Thread(target=upsert, args=(n,)) for n in range(len(clients))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert [len(outcomes) for outcomes in told] == [300] * len(clients)
    assert set().union(*told) == {"stored", "superseded"}
    assert clients[0].get("key") in values


def test_large_upserts_of_one_key_do_not_fill_a_small_pool(own_cluster, connect):
    """What another overtook is written, and its memory used again, long before put_release."""
    url = own_cluster(workers=1).url
    clients, told = [connect(url), connect(url)], []

    def upsert(client):
        told.extend(client.put("key", bytes(MIB), upsert=True).outcome for _ in range(300))

    threads = [threading.Thread(target=upsert, args=[client]) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(told) == 600
    assert set(told) <= {"stored", "superseded"}


def test_what_was_overtaken_gives_its_memory_back_when_it_ends(own_cluster, connect):
    url = own_cluster(workers=1, segment="16MB").url
    one, other = connect(url), connect(url)
    for _ in range(40):  # more than fit
        with one.writer("key", MIB, upsert=True) as writer:
            writer.write(0, bytes(MIB))
            assert other.put("key", bytes(MIB), upsert=True).stored
        assert writer.result.superseded
