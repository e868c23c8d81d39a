"""Objects gathered from and scattered to pieces of memory."""

import numpy as np
import pytest
import xxhash

from mooncake_store import InvalidArgumentError, Pieces

LAYERS, BLOCKS, BYTES = 3, 5, 700


def memory(seed):
    return np.random.default_rng(seed).integers(0, 255, (LAYERS, BLOCKS, BYTES), np.uint8)


def pieces_of(array, blocks, **changes):
    base, (layer_step, block_step, _) = array.ctypes.data, array.strides
    addresses = [
        [base + layer * layer_step + block * block_step for layer in range(LAYERS)]
        for block in blocks
    ]
    lengths = [[BYTES] * LAYERS for _ in blocks]
    return Pieces.of(addresses, lengths, **changes)


@pytest.mark.parametrize("transports", [("local", "shm"), ("tcp",)])
def test_a_batch_is_gathered_and_scattered_in_one_round_trip_each(url, connect, transports):
    store = connect(url, transports=transports, lease_cache=False)
    source, target = memory(1), np.zeros((LAYERS, BLOCKS, BYTES), np.uint8)
    keys = [f"block-{i}" for i in range(BLOCKS)]
    store.put("meet the segments", b"x", replicas=2)
    store.get("meet the segments")

    before = store.stats().requests
    assert store.put_many(keys, pieces_of(source, range(BLOCKS)), replicas=2).check().ok
    assert store.stats().requests - before == 2  # begin, end
    got = store.get_into_many(keys, pieces_of(target, range(BLOCKS))).check()
    assert store.stats().requests - before == 3
    assert got.sizes.tolist() == [LAYERS * BYTES] * BLOCKS
    assert np.array_equal(source, target)
    for at, key in enumerate(keys):
        whole = source[:, at].tobytes()
        assert store.get(key) == whole
        assert store.query(key).checksum == xxhash.xxh3_64_intdigest(whole)


def test_a_batch_over_several_segments_is_gathered_and_scattered(url, connect):
    store = connect(url, lease_cache=False)
    blocks = 600  # so many that each segment takes some
    source = np.random.default_rng(6).integers(0, 255, (LAYERS, blocks, BYTES), np.uint8)
    keys = [f"block-{i}" for i in range(blocks)]
    assert store.put_many(keys, pieces_of(source, range(blocks))).ok
    found = store.query_many(keys).infos
    assert {info.replicas[0].segment for info in found} == {"worker-0", "worker-1"}
    assert store.get_many(keys).check().values == [source[:, i].tobytes() for i in range(blocks)]
    target = np.zeros_like(source)
    assert store.get_into_many(keys, pieces_of(target, range(blocks))).check().ok
    assert np.array_equal(source, target)


def test_what_the_pieces_do_not_fit_fails_alone_and_untouched(store):
    source, target = memory(2), np.zeros((LAYERS, BLOCKS, BYTES), np.uint8)
    store.put("right", source[:, 0].copy())
    store.put("long", bytes(LAYERS * BYTES + 1))
    store.put("short", bytes(LAYERS * BYTES - 1))
    got = store.get_into_many(["long", "right", "short", "none"], pieces_of(target, range(4)))
    assert got.failed.tolist() == [0, 2, 3]
    assert "2101 bytes" in str(got.error(0))
    assert np.array_equal(target[:, 1], source[:, 0])
    assert not target[:, [0, 2, 3]].any()


def test_pieces_with_offsets_are_ranges(store):
    store.put("letters", b"abcdefghijklmnopqrstuvwxyz")
    target = np.zeros(8, np.uint8)
    at = target.ctypes.data
    ranges = Pieces.of([[at, at + 4], [at]], [[3, 4], [1]], [[23, 0], [26]])
    got = store.get_into_many(["letters", "letters"], ranges)
    assert got.failed.tolist() == [1]
    assert target.tobytes() == b"xyz\0abcd"


def test_a_corrupt_object_is_not_handed_out(store, connect, url):
    source, target = memory(3), np.zeros((LAYERS, BLOCKS, BYTES), np.uint8)
    store.put_many(["spoilt"], pieces_of(source, [0]))
    replica = store.query("spoilt").replicas[0]
    reached = next(
        r for r in store._core.directory.known.values() if r.entry.name == replica.segment
    )
    store._core.engine.write_from(reached.handle, replica.offset + 900, b"!!")
    result = connect(url).get_into_many(["spoilt"], pieces_of(target, [0]))
    assert result.statuses.tolist() == [-801]


def test_a_put_moves_on_from_a_segment_that_is_gone(own_cluster, connect):
    cluster = own_cluster()
    store = connect(cluster.url)
    source = memory(4)
    store.put("both", bytes(8), replicas=2)
    cluster.kill_worker(0)
    keys = [f"key-{i}" for i in range(BLOCKS)]
    assert store.put_many(keys, pieces_of(source, range(BLOCKS))).check().ok
    target = np.zeros_like(source)
    assert store.get_into_many(keys, pieces_of(target, range(BLOCKS))).check().ok
    assert np.array_equal(source, target)


def test_nonsense_is_refused(store):
    array = memory(5)
    with pytest.raises(InvalidArgumentError, match="at least one piece"):
        Pieces.of([[]], [[]])
    with pytest.raises(InvalidArgumentError, match="as many addresses"):
        Pieces.of([[1, 2]], [[1]])
    with pytest.raises(InvalidArgumentError, match="lies nowhere"):
        Pieces.of([[0]], [[1]])
    with pytest.raises(InvalidArgumentError, match="2 keys"):
        store.put_many(["a", "b"], pieces_of(array, [0]))
    with pytest.raises(InvalidArgumentError, match="without offsets"):
        store.put_many(["a"], Pieces.of([[array.ctypes.data]], [[1]], [[0]]))
