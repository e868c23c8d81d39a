"""One object at a time: what is put is what is got, and errors say what is wrong."""

import numpy as np
import pytest
import xxhash

from mooncake_store import (
    Digests,
    HasLeaseError,
    InvalidArgumentError,
    NoSpaceError,
    NotFoundError,
    ObjectTooLargeError,
    UnavailableError,
    ids,
)
from mooncake_store.client import writes
from mooncake_store.units import MIB
from mooncake_store.wire import shard
from mooncake_store.wire.single_key import PutOne


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("size", [1, 2, 63, 64, 4096, 65_537, 3 * MIB + 1])
def test_what_is_put_is_what_is_got(url, connect, transport, size):
    store = connect(url, transports=[transport])
    value = np.random.default_rng(size).bytes(size)
    result = store.put("key", value)
    assert (result.outcome, result.replicas, result.error) == ("stored", 1, None)
    assert store.get("key") == value
    assert store.get("key") == value  # under the lease of the first
    buffer = bytearray(size)
    assert store.get_into("key", buffer) == size
    assert buffer == value
    assert store.stats().bytes_read == {transport: 3 * size}
    assert store.stats().lease_cache_hits == 2


@pytest.mark.parametrize(
    "key", ["a", b"a", "schlüssel", b"\xff\xfe\x00not utf-8", "with\0nul", "k" * 4096]
)
def test_keys_are_text_or_bytes(store, key):
    assert store.put(key, b"value").stored
    assert store.get(key) == b"value"
    shown = "a" if key == b"a" else key  # bytes are shown as text where they are text
    assert store.stat(key).key == shown
    assert [found.key for found in store.list()] == [shown]


def test_text_and_its_utf8_form_are_one_key(store):
    store.put("schlüssel", b"1")
    assert store.get("schlüssel".encode()) == b"1"


def test_digests_are_keys_without_a_name(store):
    keys = Digests(store.identity.hash_blocks(np.arange(64), 16, salt="single"))
    assert store.put(keys[1], b"block").stored
    assert store.get(keys[1]) == b"block"
    assert store.exists(Digests(keys.words[1].tobytes()))
    assert store.find_prefix(keys) == 0
    store.put(keys[0], b"first")
    assert store.find_prefix(keys) == 2
    assert store.list() == []
    assert repr(keys[0]) == f"Digests({ids.hex(keys.words[0])})"
    with pytest.raises(InvalidArgumentError, match="one key is expected"):
        store.get(keys)


@pytest.mark.parametrize("key", ["", b"", "k" * 4097, "\ud800", 7, None, ["a"]])
def test_what_is_no_key_is_refused(store, key):
    for call in (store.get, store.exists, store.remove, store.query, store.stat):
        with pytest.raises(InvalidArgumentError):
            call(key)
    with pytest.raises(InvalidArgumentError):
        store.put(key, b"value")


def test_a_second_put_leaves_the_value_alone_unless_it_upserts(store, connect, url):
    other = connect(url)
    assert store.put("key", b"one").stored
    again = other.put("key", b"two")
    assert again.already_present
    assert not again.stored
    assert other.get("key") == b"one"
    assert store.put("key", b"three", upsert=True).stored
    assert store.get("key") == b"three"
    assert connect(url).get("key") == b"three"


def test_a_single_put_is_two_requests_and_says_where_its_bytes_went(url, connect):
    store = connect(url, transports=["shm"])
    store.put_many([f"open {n}" for n in range(256)], [b"x"] * 256)  # reach every segment
    before = store.stats()
    assert store.put("second", b"0123456789").stored
    assert store.put("second", b"elsewise").already_present
    after = store.stats()
    assert after.requests - before.requests == 3
    assert after.keys - before.keys == 2
    assert after.bytes_written["shm"] - before.bytes_written["shm"] == 10
    assert store.query("second").checksum == xxhash.xxh3_64_intdigest(b"0123456789")


def test_an_upsert_is_seen_by_its_own_client_at_once(store):
    store.put("key", b"old")
    assert store.get("key") == b"old"
    store.put("key", b"new!", upsert=True)
    assert store.get("key") == b"new!"


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"abcd"),
        memoryview(b"abcd"),
        np.frombuffer(b"abcd", np.uint8),
        np.frombuffer(b"abcd", np.uint16),
        b"abcd",
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_anything_with_memory(store, value):
    store.put_from("key", value)
    assert store.get("key") == b"abcd"


def test_values_without_memory_are_refused(store):
    for value in ("text", 5, [1], np.arange(8)[::2], np.array([object()])):
        with pytest.raises(InvalidArgumentError):
            store.put("key", value)
    with pytest.raises(InvalidArgumentError, match="1 byte"):
        store.put("key", b"")
    assert not store.exists("key")


def test_missing_objects_are_named(store):
    for call in (store.get, store.query, store.remove, store.stat):
        with pytest.raises(NotFoundError, match="'nothing'") as caught:
            call("nothing")
        assert caught.value.key == "nothing"
    assert not store.exists("nothing")


def test_a_buffer_that_is_too_small_is_not_touched(store):
    store.put("key", b"x" * 100)
    for _ in range(2):  # planned by the store, then from the lease table
        buffer = bytearray(b"-" * 99)
        with pytest.raises(InvalidArgumentError, match="100 bytes are needed"):
            store.get_into("key", buffer)
        assert buffer == b"-" * 99
    with pytest.raises(InvalidArgumentError, match="read-only"):
        store.get_into("key", bytes(100))
    larger = bytearray(b"-" * 101)
    assert store.get_into("key", larger) == 100
    assert larger == b"x" * 100 + b"-"


def test_ranges(store):
    value = bytes(range(200))
    store.put("key", value)
    assert store.get_range("key", 10, 5) == value[10:15]
    assert store.get_range("key", 10) == value[10:]
    assert store.get_range("key", 0, 200) == value
    buffer = bytearray(50)
    assert store.get_into("key", buffer, offset=150) == 50
    assert buffer == value[150:]
    assert store.get_into("key", buffer, offset=20, length=3) == 3
    assert buffer[:3] == value[20:23]
    with pytest.raises(InvalidArgumentError, match="200 bytes"):
        store.get_range("key", 190, 11)
    with pytest.raises(InvalidArgumentError, match="200 bytes"):
        store.get_range("key", 201)
    for offset, length in ((-1, 5), (0, 0), (0, -1)):
        with pytest.raises(InvalidArgumentError, match="no object has a range"):
            store.get_range("key", offset, length)
    with pytest.raises(InvalidArgumentError, match="smaller"):
        store.get_into("key", buffer, offset=100)


def test_removing_gives_own_leases_back_but_not_those_of_others(store, connect, url):
    other = connect(url)
    store.put("key", b"value")
    for _ in range(3):
        store.get("key")
    store.remove("key")
    assert not store.exists("key")
    store.put("key", b"value")
    other.get("key")
    store.get("key")
    with pytest.raises(HasLeaseError):
        store.remove("key")
    assert store.get("key") == b"value"
    store.remove("key", force=True)
    with pytest.raises(NotFoundError):
        store.get("key")


def test_pins_and_groups_show_in_stat(store):
    store.put("key", b"value", soft_pin=True, pin_ttl="90s", group="layers")
    found = store.stat("key")
    assert 80 < found.soft_pin_s <= 90
    assert (found.group, found.hard_pin, found.state, found.size) == (
        "layers", False, "readable", 5,
    )  # fmt: skip
    store.pin("key", soft=False, hard=True)
    found = store.stat("key")
    assert (found.soft_pin_s, found.hard_pin) == (0, True)
    with pytest.raises(NotFoundError):
        store.pin("nothing", soft=True)
    with pytest.raises(InvalidArgumentError, match="soft, hard or both"):
        store.pin("key")


def test_query_tells_where_an_object_is(store):
    store.put("key", b"value", replicas=2)
    info = store.query("key")
    assert (info.size, len(info.replicas)) == (5, 2)
    assert {replica.segment for replica in info.replicas} == {"worker-0", "worker-1"}
    assert info.checksum == store.stat("key").checksum
    store.put("there", b"value", preferred=["worker-1"])
    assert store.query("there").replicas[0].segment == "worker-1"
    store.put("elsewhere", b"value", excluded=["worker-1"])
    assert store.query("elsewhere").replicas[0].segment == "worker-0"


def test_an_object_larger_than_any_segment_is_refused_at_once(store):
    assert store.put("other", b"stays").stored
    with pytest.raises(ObjectTooLargeError, match="larger than any segment") as caught:
        store.put("key", bytes(65 * MIB), deadline=30)
    assert caught.value.elapsed_s < 5
    assert isinstance(caught.value, NoSpaceError)
    assert not caught.value.retryable
    with pytest.raises(ObjectTooLargeError):
        store.writer("key", 65 * MIB)
    put = store.put_many(["small", "key"], [b"fits", bytes(65 * MIB)], deadline=30)
    assert [put[0].stored, put[1].stored] == [True, False]
    assert isinstance(put.error(1), ObjectTooLargeError)
    assert store.exists_many(["other", "small", "key"]).tolist() == [True, True, False]


def test_options_are_checked(store):
    with pytest.raises(InvalidArgumentError, match="did you mean 'replicas'"):
        store.put("key", b"value", replica=2)
    with pytest.raises(InvalidArgumentError, match="no option 'verfy'"):
        store.get("key", verfy=True)
    for options in (
        {"replicas": 0},
        {"replicas": 2, "replicas_min": 3},
        {"deadline": 0},
        {"deadline": "soon"},
        {"preferred": "worker-0"},
        {"pin_ttl": "long"},
    ):
        with pytest.raises(InvalidArgumentError):
            store.put("key", b"value", **options)
    with pytest.raises(InvalidArgumentError, match="ttl"):
        store.get("key", ttl=0)
    with pytest.raises(NoSpaceError, match=r"replicas_min.*waiting does not help"):
        store.put("key", b"value", replicas=3, replicas_min=3, deadline="1h")
    assert store.put("key", b"value", replicas=3).replicas == 2


@pytest.mark.parametrize(
    "options",
    [
        {"group": "\ud800"},
        {"group": 5},
        {"preferred": ["\ud800"]},
        {"preferred": [None]},
        {"preferred": 5},
        {"excluded": None},
        {"replicas": "5"},
        {"replicas": 1.5},
        {"replicas": 1 << 70},
        {"replicas_min": None},
        {"hard_pin": "yes"},
        {"upsert": None},
        {"upsert": 1.5},
    ],
    ids=repr,
)
def test_an_option_of_a_wrong_kind_is_named(store, options):
    (option,) = options
    with pytest.raises(InvalidArgumentError, match=option):
        store.put("key", b"x", **options)
    with pytest.raises(InvalidArgumentError, match=option):
        store.put_many(["key"], [b"x"], **options)


@pytest.mark.parametrize(
    "name",
    ["get_many", "exists_many", "query_many", "remove_many", "find_prefix", "lease_many"],
)
@pytest.mark.parametrize("keys", [None, 5])
def test_what_is_no_batch_of_keys_is_refused_with_a_hint(store, name, keys):
    with pytest.raises(InvalidArgumentError, match=r"keys must be a sequence.*wrap it in a list"):
        getattr(store, name)(keys)


@pytest.mark.parametrize("number", [1 << 63, -(1 << 70), 1.5, "5", float("nan")])
def test_an_offset_a_length_and_a_size_are_whole_numbers_of_bytes(store, number):
    store.put("key", b"value")
    with pytest.raises(InvalidArgumentError, match="offset"):
        store.get_range("key", number, 1)
    with pytest.raises(InvalidArgumentError, match="length"):
        store.get_range("key", 0, number)
    with pytest.raises(InvalidArgumentError, match="offset"):
        store.get_into("key", bytearray(5), offset=number)
    with pytest.raises(InvalidArgumentError, match="size"):
        store.writer("new", number)


@pytest.mark.parametrize("prefix", ["\ud800", None, 5])
def test_what_is_no_prefix_is_refused(store, prefix):
    with pytest.raises(InvalidArgumentError, match="a prefix"):
        store.list(prefix)


def test_a_put_that_cannot_learn_where_to_write_leaves_nothing_in_the_way(
    url, connect, monkeypatch
):
    store, other = connect(url), connect(url)

    def fail(core, numbers, until):
        raise UnavailableError("the map of the cluster cannot be read")
        yield

    monkeypatch.setattr(writes, "learn_segments", fail)
    with pytest.raises(UnavailableError, match="map of the cluster"):
        store.put("key", b"value", deadline=5)
    assert not store.put_many(["key", "other"], [b"1", b"2"], deadline=5).ok
    monkeypatch.undo()
    assert other.put_many(["key", "other"], [b"1", b"2"]).replicas.tolist() == [1, 1]


def test_exists_on_several_shards(own_cluster, connect):
    store = connect(own_cluster(workers=1, shards=3).url)
    keys = [f"key-{at}" for at in range(20)]
    assert store.put_many(keys, [b"x"] * 20).ok
    assert all(store.exists(key) for key in keys)
    assert not any(store.exists(f"no-{key}") for key in keys)
    digests = Digests(store.identity.digests(keys))
    assert all(store.exists(digest) for digest in digests)
    assert store.remove_many(keys[::2]).ok
    assert [store.exists(key) for key in keys] == [False, True] * 10
    assert store.exists_many(keys).tolist() == [False, True] * 10


@pytest.mark.parametrize("name", [b"", b"k", b"12345678", b"block-0017", b"\xff" * 4096])
def test_one_put_asks_as_a_batch_of_one(name):
    fields = {
        "flags": shard.PutFlag.HARD_PIN, "replicas": 2, "replicas_min": 1, "soft_pin": 1,
        "placement": -1, "soft_pin_ttl_ms": 5000, "groups": [b"group"], "preferred": [],
        "excluded": [b"segment-1", b""],
    }  # fmt: skip
    requests = PutOne(**fields)
    some = (b"0123456789abcdef", 1, 0, 0), (b"\xff" * 16, 1 << 40, 1 << 31, (1 << 63) - 1)
    for digest, size, wait_ms, number in some:
        words = np.frombuffer(digest, np.uint64).reshape(1, 2)
        assert requests.pack(digest, name, size, wait_ms, number) == shard.PUT_START.request.pack(
            digests=words, names=[name], sizes=[size], wait_ms=wait_ms, number=number, **fields
        )
