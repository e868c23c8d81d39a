"""Many objects at a time: a status per key, in order, and never an exception for one of them."""

import numpy as np
import pytest

from mooncake_store import Digests, InvalidArgumentError, NotFoundError, Rows
from mooncake_store.client.keys import KeyBatch
from mooncake_store.client.results import BatchResult
from mooncake_store.errors import PeerLostError
from mooncake_store.identity import Unkeyed


def pairs(count, size=100):
    return [f"key-{i}" for i in range(count)], [bytes([i % 251]) * size for i in range(count)]


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("count", [1, 2, 128, 3000])
def test_batches_come_back_in_order(url, connect, transport, count):
    store = connect(url, transports=[transport])
    keys, values = pairs(count)
    put = store.put_many(keys, values)
    assert put.ok
    assert put.replicas.tolist() == [1] * count
    assert store.get_many(keys).values == values
    assert store.get_many(keys[::-1]).values == values[::-1]
    assert store.exists_many(keys).all()
    assert store.find_prefix(keys) == count
    assert store.remove_many(keys).ok
    assert not store.exists_many(keys).any()


def test_keys_of_one_lost_request_have_an_error_each():
    lost = PeerLostError("the shard went away", peer="127.0.0.1:1")
    statuses = np.full(2, lost.code, np.int16)
    result = BatchResult(
        "remove", KeyBatch.of(["a", "b"], Unkeyed("default")), statuses, {0: lost, 1: lost}
    )
    assert [error.key for _, error in result.errors()] == ["a", "b"]
    assert {error.peer for _, error in result.errors()} == {"127.0.0.1:1"}
    first, second = result.error(0), result.error(1)
    assert (first.key, second.key) == ("a", "b")


def test_one_bad_key_spoils_nothing(store):
    put = store.put_many(["a", "", "b", "k" * 5000], [b"1", b"2", b"3", b"4"])
    assert put.failed.tolist() == [1, 3]
    assert put[0].stored
    assert put[1].outcome == "rejected"
    assert isinstance(put[1].error, InvalidArgumentError)
    got = store.get_many(["a", "", "missing", "b"])
    assert got.values == [b"1", None, None, b"3"]
    assert got.sizes.tolist() == [1, 0, 0, 1]
    assert not got.ok
    assert [type(error) for _, error in got.errors()] == [InvalidArgumentError, NotFoundError]
    assert got.error(0) is None
    assert got.error(2).key == "missing"
    with pytest.raises(InvalidArgumentError) as caught:
        got.check()
    assert caught.value.__notes__ == ["1 more of 4 keys failed"]
    assert store.exists_many(["a", "", None, "b"]).tolist() == [True, False, False, True]
    assert store.find_prefix(["a", "b", ""]) == 2
    assert store.query_many(["a", ""]).infos[1] is None
    assert store.remove_many(["a", "", "missing"]).statuses.tolist() == [0, -400, -704]


def test_empty_batches_ask_nobody(store):
    before = store.stats().requests
    assert store.put_many([], []).ok
    assert store.get_many([]).values == []
    assert store.exists_many([]).tolist() == []
    assert store.find_prefix([]) == 0
    assert len(store.query_many([])) == 0
    assert store.remove_many([]).ok
    assert store.stats().requests == before


def test_repeated_keys_in_one_batch(store):
    put = store.put_many(["a", "a", "b"], [b"1", b"2", b"3"])
    assert [put[at].outcome for at in range(3)] == ["stored", "already_present", "stored"]
    assert put.ok
    assert store.get_many(["a", "a"]).values == [b"1", b"1"]
    assert store.remove_many(["a", "a"]).statuses.tolist() == [0, -704]


def test_rows_of_an_array_and_addresses(store):
    keys, _ = pairs(64)
    rows = np.random.default_rng(1).integers(0, 255, (64, 512), dtype=np.uint8)
    assert store.put_many(keys, rows).ok
    out = np.zeros_like(rows)
    got = store.get_into_many(keys, out)
    assert got.ok
    assert got.values == []
    assert got.sizes.tolist() == [512] * 64
    assert (out == rows).all()
    wide = np.zeros((64, 1024), np.uint8)
    address = wide.__array_interface__["data"][0]
    assert store.get_into_many(keys, Rows(address, 512, 64, 1024)).ok
    assert (wide[:, :512] == rows).all()
    assert not wide[:, 512:].any()


def test_buffers_are_a_list_too_and_each_must_be_large_enough(store):
    store.put_many(["a", "b", "c"], [b"1" * 10, b"2" * 20, b"3" * 30])
    buffers = [bytearray(10), bytearray(b"-" * 19), np.zeros(40, np.uint8)]
    got = store.get_into_many(["a", "b", "c"], buffers)
    assert got.statuses.tolist() == [0, -10, 0]
    assert "20 bytes are needed" in str(got.error(1))
    assert buffers[0] == b"1" * 10
    assert buffers[1] == b"-" * 19
    assert buffers[2].tobytes() == b"3" * 30 + bytes(10)


def test_wrong_numbers_of_buffers_are_refused(store):
    for buffers in ([b"1"], np.zeros((3, 4), np.uint8), Rows(1 << 20, 4, 3, 4), b"12", 5):
        with pytest.raises(InvalidArgumentError):
            store.put_many(["a", "b"], buffers)
    with pytest.raises(InvalidArgumentError, match="not one key"):
        store.get_many("ab")
    with pytest.raises(InvalidArgumentError, match="overlap"):
        store.put_many(["a", "b"], Rows(1 << 20, 8, 2, 4))
    assert not store.exists_many(["a", "b"]).any()


def test_views_of_one_arena(store):
    keys, values = pairs(10, 77)
    store.put_many(keys, values)
    got = store.get_many([*keys, "missing"], copy=False)
    assert got.values[-1] is None
    assert [bytes(view) for view in got.values[:-1]] == values
    assert all(view.readonly for view in got.values[:-1])
    assert all(np.frombuffer(v, np.uint8).ctypes.data % 64 == 0 for v in got.values[:-1])


def test_a_part_under_lease_and_a_part_not(store):
    keys, values = pairs(20)
    store.put_many(keys, values)
    store.get_many(keys[5:10])
    hits = store.stats().lease_cache_hits
    assert store.get_many(keys).values == values
    assert store.stats().lease_cache_hits == hits + 5


def test_keys_of_every_kind_in_one_batch(store):
    keys = ["text", b"\xff", "schlüssel", b"bytes"]
    assert store.put_many(keys, [b"1", b"2", b"3", b"4"]).ok
    assert store.get_many(keys).values == [b"1", b"2", b"3", b"4"]
    assert {found.key for found in store.list()} == {"text", b"\xff", "schlüssel", "bytes"}


def test_digests_in_batches(store):
    keys = Digests(store.identity.hash_blocks(np.arange(160), 16))
    rows = np.arange(40, dtype=np.uint8).reshape(10, 4)
    assert store.put_many(keys, rows).ok
    assert store.get_many(keys).values == [row.tobytes() for row in rows]
    assert store.get_many(keys[2:4]).values == [row.tobytes() for row in rows[2:4]]
    missing = store.get_many(Digests([bytes(16)]))
    assert missing.error(0).key == "0" * 32


def test_replicas_of_a_batch_lie_apart(store):
    keys, values = pairs(50)
    assert store.put_many(keys, values, replicas=2).replicas.tolist() == [2] * 50
    for info in store.query_many(keys).infos:
        assert {replica.segment for replica in info.replicas} == {"worker-0", "worker-1"}
    assert store.get_many(keys).values == values


def test_groups_one_for_all_or_one_each(store):
    store.put_many(["a", "b"], [b"1", b"2"], group="one")
    store.put_many(["c", "d"], [b"1", b"2"], group=["x", "y"])
    assert [store.stat(key).group for key in "abcd"] == ["one", "one", "x", "y"]
    with pytest.raises(InvalidArgumentError, match="groups"):
        store.put_many(["e", "f"], [b"1", b"2"], group=["x"])


def test_more_keys_than_one_request_holds(own_cluster, connect):
    store = connect(own_cluster(workers=1).url)
    count = 16_384 + 3
    keys = [f"k{i}" for i in range(count)]
    rows = np.arange(count, dtype=np.uint32).view(np.uint8).reshape(count, 4)
    assert store.put_many(keys, rows).ok
    out = np.zeros_like(rows)
    assert store.get_into_many(keys, out).ok
    assert (out == rows).all()
    assert store.exists_many(keys).all()
    assert store.find_prefix([*keys, "missing"]) == count
    assert sum(1 for _ in store.scan()) == count
    assert store.clear(force=True) == count


def test_two_shards_behave_as_one(two_shards, connect):
    store = connect(two_shards.url)
    keys, values = pairs(500)
    of_others = sum(figures.objects for figures in store.store_stats())  # other tests' namespaces
    assert store.put_many(keys, values).ok
    assert store.get_many(keys).values == values
    assert store.get_many(keys[::-1]).values == values[::-1]
    assert store.exists_many([*keys, "missing"]).tolist() == [True] * 500 + [False]
    assert store.find_prefix([*keys, "missing", *keys]) == 500
    for key, value in zip(keys[:20], values, strict=False):
        assert store.get(key) == value
        assert store.stat(key).size == len(value)
    assert {found.key for found in store.scan("key-1")} == {k for k in keys if k[:5] == "key-1"}
    assert sum(figures.objects for figures in store.store_stats()) == of_others + 500
    assert all(figures.objects for figures in store.store_stats())
    assert store.remove_many(keys[:100]).ok
    assert store.remove_prefix("key-2") == len([k for k in keys[100:] if k[:5] == "key-2"])
    store.clear()
    assert not store.exists_many(keys).any()


def test_names(store):
    store.put_many(["a/1", "a/2", "b/1"], [b"x", b"yy", b"zzz"])
    assert sorted(f.key for f in store.list("a/")) == ["a/1", "a/2"]
    assert len(store.list(limit=2)) == 2
    after, pages = "", []
    while after or not pages:
        page, after = store.list_page(after=after, limit=2)
        assert len(page) <= 2
        pages.append({found.key for found in page})
    assert set().union(*pages) == {found.key for found in store.list()}
    for nowhere in ("x", "0", "-1.0", "99.0", "0.x"):
        with pytest.raises(InvalidArgumentError):
            store.list_page(after=nowhere)
    with pytest.raises(InvalidArgumentError):
        store.list_page(limit=0)
    found = {f.key: f for f in store.list()}
    assert found["b/1"].size == 3
    assert found["b/1"].digest == store.identity.digest("b/1")
    assert store.remove_matching(r"/2$") == 1
    assert store.remove_matching("b/*", kind="glob") == 1
    with pytest.raises(InvalidArgumentError):
        store.remove_matching(r"(a)\1")
    assert [f.key for f in store.list()] == ["a/1"]
    assert store.remove_prefix("a") == 1


def test_namespaces_do_not_see_each_other(cluster, connect):
    one = connect(f"mooncake://{cluster.address}/one")
    other = connect(f"mooncake://{cluster.address}/other")
    one.put("key", b"1")
    assert not other.exists("key")
    other.put("key", b"2")
    assert (one.get("key"), other.get("key")) == (b"1", b"2")
    assert other.clear() == 1
    assert one.get("key") == b"1"
    one.clear()


def test_query_answers_are_made_when_they_are_looked_at(own_cluster, connect):
    store = connect(own_cluster(workers=1, shards=2).url)
    keys, values = pairs(50)
    assert store.put_many(keys, values).ok
    found = store.query_many([*keys, "", "missing"])
    assert found.failed.tolist() == [50, 51]
    assert isinstance(found.error(51), NotFoundError)
    infos = found.infos
    assert [info.size for info in infos[:50]] == [len(value) for value in values]
    assert infos[50:] == [None, None]
    assert infos[-1] is None
    assert infos[7] == store.query(keys[7])
    assert infos == list(infos)
    assert {replica.segment for info in infos[:50] for replica in info.replicas} == {"worker-0"}
    with pytest.raises(IndexError):
        infos[52]
    store.remove(keys[0])  # what was answered stays what it was
    assert infos[0].size == len(values[0])


def test_query_of_nothing(store):
    found = store.query_many([])
    assert found.ok
    assert list(found.infos) == []
    assert list(store.query_many(["", ""]).infos) == [None, None]
