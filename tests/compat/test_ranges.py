"""Sessions: range by range under one lease or one put."""

import pytest


def test_a_read_session_asks_once(store, buffer):
    store.put_batch(["a", "b"], [b"0123456789", b"abcdefghij"])
    assert store.batch_get_session_start(["a", "b", "none"]) == [0, 0, -704]
    before = store.client.stats().requests
    at = buffer.ptr
    found = store.batch_get_into_multi_buffer_ranges(
        ["b", "a"], [[at, at + 50], [at + 100]], [[3, 4], [2]], [[0, 6], [8]]
    )
    assert found == [7, 2]
    assert store.client.stats().requests == before
    assert (buffer.read(3), buffer.read(4, 50), buffer.read(2, 100)) == (b"abc", b"ghij", b"89")

    def read(key, size, start):
        return store.batch_get_into_multi_buffer_ranges([key], [[at]], [[size]], [[start]])

    assert read("none", 1, 0) == [-600]  # not of the session
    assert read("a", 3, 9) == [-600]  # past its end
    assert read("a", 3, -1) == [-600]
    assert store.batch_get_into_multi_buffer_ranges(["a"], [[1]], [[1]], [[0]]) == [-600]
    assert store.batch_get_session_end(["a", "b"]) == 0
    assert read("a", 1, 0) == [-600]


def test_a_read_session_does_not_mix_generations(make, buffer_of):
    reader, writer = make(), make(segment=0)
    buffer = buffer_of(reader, 4096)
    reader.put("key", b"old old old")
    assert reader.batch_get_session_start(["key"]) == [0]
    assert writer.upsert("key", b"new new new") == 0
    reader.client.release_many(["key"])  # as if the lease had run out
    found = reader.batch_get_into_multi_buffer_ranges(["key"], [[buffer.ptr]], [[3]], [[0]])
    assert found == [-707]


def test_a_write_session_is_one_put(store, buffer):
    store.put("there", b"x")
    buffer.write(b"0123456789")
    at = buffer.ptr
    assert store.batch_put_session_start(["a", "b", "there"], [10, 4, 1]) == [0, 0, -705]

    def write(keys, addresses, sizes, offsets):
        return store.batch_put_from_multi_buffer_ranges(keys, addresses, sizes, offsets)

    before = store.client.stats().requests
    assert write(["a", "b"], [[at], [at + 2]], [[5], [2]], [[0], [0]]) == [5, 2]
    assert store.batch_is_exist(["a", "b"]) == [0, 0]
    assert store.batch_put_session_end(["a"]) == [-600]  # half of it was never written
    assert write(["a", "b"], [[at + 5, at + 8], [at + 4]], [[3, 2], [2]], [[5, 8], [2]]) == [5, 2]
    assert write(["a"], [[at]], [[5]], [[6]]) == [-600]  # past its end
    assert write(["none"], [[at]], [[1]], [[0]]) == [-600]
    assert store.client.stats().requests - before == 1  # the probe
    assert store.batch_put_session_end(["b", "a", "none"]) == [0, 0, -600]
    assert store.client.stats().requests - before == 2
    assert store.get_batch(["a", "b"]) == [b"0123456789", b"2345"]
    assert store.batch_put_session_end(["a"]) == [-600]
    assert write(["a"], [[at]], [[1]], [[0]]) == [-600]


def test_ranges_in_any_order_are_verified(make, buffer_of):
    store, other = make(), make(segment=0)
    buffer = buffer_of(store, 4096)
    buffer.write(b"0123456789")
    at = buffer.ptr
    assert store.batch_put_session_start(["key"], [10]) == [0]
    for start in (6, 0, 3):
        size = 4 if start == 6 else 3
        found = store.batch_put_from_multi_buffer_ranges(
            ["key"], [[at + start]], [[size]], [[start]]
        )
        assert found == [size]
    assert store.batch_put_session_end(["key"]) == [0]
    assert other.get("key") == b"0123456789"


def test_a_revoked_session_leaves_nothing(store, buffer):
    assert store.batch_put_session_start(["a", "b"], [4, 4]) == [0, 0]
    assert store.batch_put_session_revoke(["a", "none"]) == [0, -600]
    assert store.batch_put_session_end(["a"]) == [-600]
    assert store.is_exist("a") == 0
    assert store.put("a", b"again") == 0
    assert store.batch_put_session_revoke(["b"]) == [0]


def test_two_sessions_may_end_together(store, buffer):
    at = buffer.ptr
    buffer.write(b"xxyy")
    assert store.batch_put_session_start(["a"], [2]) == [0]
    assert store.batch_put_session_start(["b"], [2]) == [0]
    found = store.batch_put_from_multi_buffer_ranges(
        ["b", "a"], [[at + 2], [at]], [[2], [2]], [[0], [0]]
    )
    assert found == [2, 2]
    assert store.batch_put_session_end(["a", "b"]) == [0, 0]
    assert store.get_batch(["a", "b"]) == [b"xx", b"yy"]


@pytest.mark.parametrize("end", ["close", "tearDownAll"])
def test_a_closed_store_has_no_sessions(store, end):
    assert store.batch_put_session_start(["a"], [4]) == [0]
    assert getattr(store, end)() == 0
    assert store.batch_put_session_revoke(["a"]) == [-600]
