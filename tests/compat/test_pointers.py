"""Calls with addresses: registered memory only, one request for a batch, numbers per key."""

import ctypes

import pytest

from mooncake_store.compat.buffer_pool import BufferPool
from mooncake_store.compat.values import ReplicateConfig


def test_registration(store):
    array = (ctypes.c_ubyte * 4096)()
    ptr = ctypes.addressof(array)
    assert store.register_buffer(ptr, 4096) == 0
    assert store.register_buffer(ptr, 4096) == -600
    assert store.unregister_buffer(ptr) == 0
    assert store.unregister_buffer(ptr) == -600
    assert store.register_buffer(1, 2) == -600  # no memory of this process
    assert store.register_buffer(ptr, 0) == -600


def test_memory_that_was_not_registered_is_not_touched(store, buffer):
    stray = (ctypes.c_ubyte * 64)()
    ptr = ctypes.addressof(stray)
    store.put("key", b"0123456789")
    assert store.get_into("key", ptr, 64) == -600
    assert store.put_from("stray", ptr, 64) == -600
    edge = buffer.ptr + buffer.nbytes
    assert store.get_into("key", edge - 5, 10) == -600  # runs over the end
    found = store.batch_get_into(["key", "key"], [ptr, buffer.ptr], [64, 64])
    assert found == [-600, 10]
    assert store.batch_put_from(["a", "b"], [ptr, buffer.ptr], [8, 8]) == [-600, 0]
    assert bytes(stray) == bytes(64)
    assert store.is_exist("a") == 0


def test_an_option_restores_the_originals_laxness(make, monkeypatch):
    monkeypatch.setenv("MOONCAKE_COMPAT_UNCHECKED_POINTERS", "1")
    store = make()
    stray = (ctypes.c_ubyte * 64)()
    store.put("key", b"0123456789")
    assert store.get_into("key", ctypes.addressof(stray), 64) == 10


def test_put_from_and_get_into(store, buffer):
    buffer.write(b"0123456789")
    assert store.put_from("key", buffer.ptr, 10) == 0
    assert store.put_from("key", buffer.ptr, 5) == 0  # there already
    assert store.get("key") == b"0123456789"
    assert store.get_into("key", buffer.ptr + 100, 50) == 10
    assert buffer.read(10, 100) == b"0123456789"
    assert store.get_into("key", buffer.ptr + 200, 9) == -600
    assert buffer.read(9, 200) == bytes(9)
    assert store.is_exist("key") == 1  # a buffer that is too small says nothing about it
    assert store.get_into("none", buffer.ptr, 10) == -704
    assert store.put_from("nothing", buffer.ptr, 0) == 0
    assert store.upsert_from("key", buffer.ptr, 4) == 0
    assert store.get("key") == b"0123"


def test_batches(store, buffer):
    buffer.write(b"aaaabbbbbb")
    keys, ptrs, sizes = ["a", "b"], [buffer.ptr, buffer.ptr + 4], [4, 6]
    assert store.batch_put_from(keys, ptrs, sizes) == [0, 0]
    targets = [buffer.ptr + 100, buffer.ptr + 200, buffer.ptr + 300]
    found = store.batch_get_into(["b", "none", "a"], targets, [10, 10, 10])
    assert found == [6, -704, 4]
    assert (buffer.read(6, 100), buffer.read(4, 300)) == (b"bbbbbb", b"aaaa")
    assert store.batch_get_into(keys, ptrs[:1], sizes) == [-600, -600]
    assert store.batch_put_from(keys, ptrs, sizes[:1]) == [-600, -600]
    assert store.batch_put_from([], [], []) == []
    assert store.batch_get_into([], [], []) == []
    assert store.batch_upsert_from(["a", "c"], ptrs, [2, 3]) == [0, 0]
    assert store.get_batch(["a", "c"]) == [b"aa", b"bbb"]


def test_duplicates_in_a_batch_keep_order(store, buffer):
    buffer.write(b"firstother")
    ptrs = [buffer.ptr, buffer.ptr + 5]
    assert store.batch_put_from(["same", "same"], ptrs, [5, 5]) == [0, 0]
    assert store.get("same") == b"first"


def test_many_buffers_for_one_object(store, buffer):
    buffer.write(b"K0K0V0V0K1K1V1V1")
    at = buffer.ptr
    blocks = [[at, at + 4], [at + 8, at + 12]]
    sizes = [[4, 4], [4, 4]]
    store.put("warm", b"x")
    store.batch_is_exist(["warm"])
    before = store.client.stats().requests
    assert store.batch_put_from_multi_buffers(["m0", "m1"], blocks, sizes) == [0, 0]
    assert store.client.stats().requests - before == 2
    assert store.get("m1") == b"K1K1V1V1"
    targets = [[at + 100, at + 200], [at + 300, at + 400], [at + 500]]
    found = store.batch_get_into_multi_buffers(["m1", "m0", "none"], targets, [*sizes, [4]])
    assert found == [8, 8, -704]
    assert [buffer.read(4, x) for x in (100, 200, 300, 400)] == [b"K1K1", b"V1V1", b"K0K0", b"V0V0"]
    assert store.batch_get_into_multi_buffers(["m0"], targets[:1], [[4, 3]]) == [-600]
    assert store.batch_get_into_multi_buffers(["m0"], targets[:1], [[4, 5]]) == [-600]
    assert store.batch_put_from_multi_buffers(["x", "y"], blocks[:1], sizes[:1]) == [-600, -600]
    assert store.batch_put_from_multi_buffers(["x", "y"], [[1], blocks[1]], [[4], [4, 4]]) == [
        -600,
        0,
    ]
    assert store.batch_put_from_multi_buffers(["z"], [[]], [[]]) == [-600]


def test_group_ids_follow_the_keys_that_are_put(store, buffer):
    config = ReplicateConfig()
    config.group_ids = ["lost", "kept"]
    found = store.batch_put_from(["a", "b"], [1, buffer.ptr], [4, 4], config)
    assert found == [-600, 0]
    assert store.client.stat("b").group == "kept"


def test_metadata_goes_first(store, buffer):
    buffer.write(b"metadata")
    assert store.put_from_with_metadata("both", buffer.ptr + 4, buffer.ptr, 4, 4) == 0
    assert store.get("both") == b"metadata"


def test_ranges_of_many_objects_into_many_buffers(store, buffer_of):
    one, other = bytes(range(36)), bytes(range(100, 136))
    store.put("one", one)
    store.put("other", other)
    first, second = buffer_of(store, 32), buffer_of(store, 32)
    found = store.get_into_ranges(
        [first.ptr, second.ptr],
        [["one", "other"], ["other", "one"]],
        [[[0, 20], [8]], [[4], [16]]],
        [[[1, 30], [2]], [[0], [10]]],
        [[[4, 3], [5]], [[6], [4]]],
    )
    assert found == [[[4, 3], [5]], [[6], [4]]]
    assert first.read(4) == one[1:5]
    assert first.read(5, 8) == other[2:7]
    assert first.read(3, 20) == one[30:33]
    assert second.read(6, 4) == other[:6]
    assert second.read(4, 16) == one[10:14]

    def read(keys, to, start, size):
        return store.get_into_ranges([first.ptr], [keys], [to], [start], [size])

    assert read(["one", "other"], [[0], []], [[0, 1], []], [[], []]) == [[[-600, -600], []]]
    assert read(["one"], [[0]], [[35]], [[4]]) == [[[-600]]]  # past the object
    assert read(["one"], [[31]], [[0]], [[4]]) == [[[-600]]]  # past the buffer
    assert read(["none", "one"], [[0], [8]], [[0], [0]], [[4], [4]]) == [[[-704], [4]]]
    assert read(["one"], [[0, 4]], [[0, 35]], [[4, 4]]) == [[[4, -600]]]
    assert store.get_into_ranges([first.ptr], [], [], [], []) == [[[-600]]]


def overwrite(store, key, data):
    """Change the first bytes of an object where it lies."""
    client = store.client
    replica = client.query(key).replicas[0]
    target = next(iter(client._core.directory.known.values()))
    client._core.engine.write_from(target.handle, replica.offset, data)


def test_a_key_whose_read_failed_is_not_reported_until_it_is_put_again(make, buffer_of):
    """Or an engine that recomputes after a failed load asks for it again for ever."""
    store = make()
    buffer = buffer_of(store, 4096)
    store.put("spoilt", b"0123456789")
    overwrite(store, "spoilt", b"!")
    assert store.batch_is_exist(["spoilt"]) == [1]
    assert store.batch_get_into(["spoilt"], [buffer.ptr], [4096]) == [-801]
    assert store.batch_is_exist(["spoilt"]) == [0]
    assert store.is_exist("spoilt") == 0
    buffer.write(b"0123456789")
    assert store.batch_put_from(["spoilt"], [buffer.ptr], [10]) == [0]
    assert store.batch_is_exist(["spoilt"]) == [1]
    assert store.get("spoilt") == b"0123456789"


def test_a_key_that_can_be_read_again_is_reported_again(store, caplog):
    store.put("spoilt", b"0123456789")
    overwrite(store, "spoilt", b"!")
    assert store.get_batch(["none", "spoilt"]) == [b"", b""]
    assert "'spoilt'" in caplog.text  # and not the key that is absent
    assert store.is_exist("spoilt") == 0
    overwrite(store, "spoilt", b"0")
    assert store.get_batch(["none", "spoilt"]) == [b"", b"0123456789"]
    assert store.is_exist("spoilt") == 1


def test_a_pool_of_buffers(store):
    pool = BufferPool(store, max_bytes=1 << 20)
    store.put("key", b"0123456789")
    with pool.buffer(100_000) as lease:
        assert store.get_into("key", lease.ptr, lease.size) == 10
        assert bytes(lease.buffer[:10]) == b"0123456789"
        address = lease.ptr
        view = lease.buffer
        with pytest.raises(RuntimeError, match="alive"):
            lease.release()
        del view
    with pytest.raises(RuntimeError, match="released"):
        lease.ptr  # noqa: B018
    again = pool.acquire(90_000)
    assert again.ptr == address
    with pytest.raises(RuntimeError, match="active leases"):
        pool.close()
    again.release()
    again.release()
    with pytest.raises(RuntimeError, match="capacity"):
        pool.acquire(2 << 20)
    held = pool.acquire(1 << 20)
    with pytest.raises(RuntimeError, match="is free"):
        pool.acquire(1000, block=False)
    with pytest.raises(RuntimeError, match="came free"):
        pool.acquire(1000, timeout=0.01)
    with pytest.raises(RuntimeError, match="came free within 0 s"):
        pool.acquire(1000, timeout=-0.01)
    held.release()
    with pool.buffer(0) as nothing:
        assert len(nothing.buffer) == 0
    pool.prewarm(1000, 2)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.acquire(1000)
    assert store.get_into("key", address, 100) == -600  # no longer registered
    with pytest.raises(RuntimeError, match="alignment"):
        BufferPool(store, alignment=12345)
