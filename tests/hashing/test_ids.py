"""Slots and shards: where digests lead, and that they stay there; their one text form."""

import numpy as np
import pytest

from mooncake_store import ids
from mooncake_store.identity import Unkeyed
from transfer_engine.errors import InvalidArgumentError


def test_hex_of_bytes_and_row_agree():
    identity = Unkeyed("n")
    row = identity.digests(["k"])[0]
    assert ids.hex(row) == ids.hex(identity.digest("k")) == row.tobytes().hex()
    with pytest.raises(InvalidArgumentError, match="16 bytes, not 3"):
        ids.hex(b"abc")


@pytest.mark.parametrize("slots", [1, 7, 4096, 1 << 32])
def test_slots_are_even_runs_of_the_digest_space(slots):
    rng = np.random.default_rng(5)
    found = rng.integers(0, 2**64, (20_000, 2), dtype=np.uint64)
    slot = ids.slot_of(found, slots)
    assert slot.min() >= 0
    assert slot.max() < slots
    assert slot.tolist() == [(int(high) >> 32) * slots >> 32 for high in found[:, 1]]
    by_high = np.argsort(found[:, 1])
    assert (np.diff(slot[by_high]) >= 0).all()
    edges = np.array([[0, 0], [0, 2**64 - 1]], dtype=np.uint64)
    assert ids.slot_of(edges, slots).tolist() == [0, slots - 1]


@pytest.mark.parametrize("shards", [1, 2, 3, 16, 4096])
def test_a_shard_is_a_function_of_the_slot(shards):
    top = np.arange(ids.SLOTS, dtype=np.uint64) << np.uint64(52)
    found = np.stack([np.zeros_like(top), top], axis=1)
    shard = ids.shard_of(found, shards)
    assert ids.slot_of(found).tolist() == list(range(ids.SLOTS))
    counts = np.bincount(shard, minlength=shards)
    assert len(counts) == shards
    assert counts.max() - counts.min() <= 1
    assert (np.diff(shard) >= 0).all()


@pytest.mark.parametrize("count", [0, -1, 2**32 + 1])
def test_slot_and_shard_counts_out_of_range(count):
    found = np.zeros((1, 2), dtype=np.uint64)
    with pytest.raises(InvalidArgumentError, match="slots must be"):
        ids.slot_of(found, count)
    with pytest.raises(InvalidArgumentError, match="shards must be"):
        ids.shard_of(found, count)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64, 4096])
def test_a_single_digest_belongs_to_the_same_shard(shards):
    digests = Unkeyed("default").digests([f"key-{at}" for at in range(200)])
    alone = [ids.shard_of_one(digest.tobytes(), shards) for digest in digests]
    assert alone == ids.shard_of(digests, shards).tolist()
