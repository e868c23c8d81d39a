"""Digests, slots and block chains: what names become, and that they stay what they are."""

import json
import os
import struct
import subprocess
import sys
from array import array
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mooncake_store import ids
from transfer_engine.errors import InvalidArgumentError

VECTORS_PATH = Path(__file__).parents[1] / "data" / "hash_vectors.json"
VECTORS = json.loads(VECTORS_PATH.read_text(encoding="utf-8"))

TEXT_KEYS = st.text(
    st.characters(exclude_categories=["Cs"]) | st.just("\0"), min_size=1, max_size=60
)
KEYS = TEXT_KEYS | st.binary(min_size=1, max_size=60)

# Prints every vector's digest or chain, to be run under another PYTHONHASHSEED.
REPLAY = """
import json, sys
from mooncake_store import ids
vectors = json.load(open(sys.argv[1], encoding="utf-8"))
def key(entry):
    return entry["key"] if "key" in entry else bytes.fromhex(entry["key_hex"])
found = []
for entry in vectors["keys"]:
    row = ids.digests([key(entry)], ids.namespace_seed(entry["namespace"]))[0]
    assert ids.digest(key(entry), entry["namespace"]) == row.tobytes()
    found.append(ids.hex(row))
for entry in vectors["chains"]:
    parent = entry["parent_hex"] and bytes.fromhex(entry["parent_hex"])
    chain = ids.hash_blocks(entry["tokens"], entry["block_size"], parent, entry["salt"],
                            partial_tail=entry["partial_tail"])
    found.append([ids.hex(row) for row in chain])
json.dump(found, sys.stdout)
"""


def as_bytes(key):
    return key.encode() if isinstance(key, str) else key


def expected_digest(key, seed):
    return xxhash.xxh3_128_intdigest(as_bytes(key), seed).to_bytes(16, "little")


@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_vectors_hold_in_another_process(hash_seed):
    result = subprocess.run(
        [sys.executable, "-c", REPLAY, str(VECTORS_PATH)],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        timeout=100,
        check=True,
    )
    found = json.loads(result.stdout)
    assert found == [entry["hex"] for entry in VECTORS["keys"] + VECTORS["chains"]]


def test_importing_ids_does_not_import_numba():
    code = (
        "import sys; import mooncake_store.ids as ids; ids.digest('k', 'n');"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


@given(keys=st.lists(KEYS, max_size=12), namespace=st.text(max_size=8).filter(str.isascii))
@example(keys=["a\0", "b"], namespace="")
@example(keys=["a", "\0b", "é\0"], namespace="")
@example(keys=["é", "🔑"], namespace="")
@example(keys=[b"\0", b"a\0b"], namespace="")
@example(keys=["a", b"b", "a"], namespace="")
@example(keys=["a", b"\0b", "\0"], namespace="")
@settings(max_examples=150, deadline=None)
def test_digests_equal_one_hash_per_key(keys, namespace):
    seed = ids.namespace_seed(namespace)
    found = ids.digests(keys, seed)
    assert found.shape == (len(keys), 2)
    assert found.dtype == np.uint64
    assert [row.tobytes() for row in found] == [expected_digest(key, seed) for key in keys]
    assert [ids.digest(key, namespace) for key in keys] == [row.tobytes() for row in found]


def test_order_duplicates_and_kinds_of_sequence():
    keys = [f"key/{index % 7}" for index in range(1000)]
    found = ids.digests(keys, 9)
    assert len(np.unique(found, axis=0)) == 7
    assert (found[:7] == found[7:14]).all()
    assert (ids.digests(tuple(reversed(keys)), 9) == found[::-1]).all()
    assert (ids.digests([key.encode() for key in keys], 9) == found).all()


def test_namespaces_keep_equal_keys_apart():
    assert ids.digest("k", "a") != ids.digest("k", "b")
    assert ids.namespace_seed("a") == xxhash.xxh3_64_intdigest(b"a")


@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        (["a", ""], "key 1 has 0 bytes, must have 1 to 4096"),
        ([b"a", b""], "key 1 has 0 bytes"),
        (["a", "b", "x" * 4097], "key 2 has 4097 bytes"),
        (["ok", "é" * 2049], "key 1 has 4098 bytes"),
        (["a\0", ""], "key 1 has 0 bytes"),
        ([""], "key 0 has 0 bytes"),
        (["a", 7], "key 1 is a int"),
        ([7], "key 0 is a int"),
        ([None], "key 0 is a NoneType"),
        (["a", "\ud800"], "key 1 has no UTF-8 form"),
        (["\ud83d", "\udd11"], "key 0 has no UTF-8 form"),
        ("abc", "not one key"),
        (b"abc", "not one key"),
    ],
)
def test_keys_that_are_refused(keys, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        ids.digests(keys, 0)


@pytest.mark.parametrize("key", ["", b"", "x" * 4097, "\ud800"])
def test_single_keys_that_are_refused(key):
    with pytest.raises(InvalidArgumentError, match="the key has"):
        ids.digest(key, "n")


def test_longest_key_is_accepted():
    assert ids.digests(["x" * 4096], 1)[0].tobytes() == expected_digest("x" * 4096, 1)


def test_hex_of_bytes_and_row_agree():
    row = ids.digests(["k"], ids.namespace_seed("n"))[0]
    assert ids.hex(row) == ids.hex(ids.digest("k", "n")) == row.tobytes().hex()
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


def chain_by_hand(tokens, block_size, parent, salt, partial_tail):
    keys, seed = [], xxhash.xxh3_64_intdigest(salt)
    for begin in range(0, len(tokens), block_size):
        block = tokens[begin : begin + block_size]
        if len(block) < block_size and not partial_tail:
            break
        data = parent + struct.pack(f"<{len(block)}q", *block)
        parent = xxhash.xxh3_128_intdigest(data, seed).to_bytes(16, "little")
        keys.append(parent)
    return keys


@given(
    tokens=st.lists(st.integers(0, 2**63 - 1), max_size=80),
    block_size=st.integers(1, 50),
    parent=st.none() | st.binary(min_size=16, max_size=16),
    salt=st.binary(max_size=5),
    partial_tail=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_chain_equals_the_loop(tokens, block_size, parent, salt, partial_tail):
    found = ids.hash_blocks(tokens, block_size, parent, salt, partial_tail=partial_tail)
    expected = chain_by_hand(tokens, block_size, parent or bytes(16), salt, partial_tail)
    assert [row.tobytes() for row in found] == expected


def test_same_tokens_same_keys_whatever_they_come_in():
    tokens = [(index * 37) % 120 for index in range(2500)]
    expected = ids.hash_blocks(tokens, 16).tobytes()
    forms = [np.array(tokens, dtype=code) for code in ("i1", "u1", "<i2", ">i4", "u4", "u8", ">i8")]
    forms += [tuple(tokens), iter(tokens), array("i", tokens), memoryview(array("q", tokens))]
    forms += [np.repeat(tokens, 2)[::2], [np.int32(token) for token in tokens]]
    read_only = np.array(tokens)
    read_only.flags.writeable = False
    for form in [*forms, read_only]:
        assert ids.hash_blocks(form, 16).tobytes() == expected


def test_torch_tokens():
    torch = pytest.importorskip("torch")
    tokens = torch.arange(64, dtype=torch.int32)
    assert (ids.hash_blocks(tokens, 16) == ids.hash_blocks(list(range(64)), 16)).all()


def test_a_chain_can_be_continued_and_names_its_whole_prefix():
    tokens = np.arange(3 * 16)
    whole = ids.hash_blocks(tokens, 16, salt="model")
    rest = ids.hash_blocks(tokens[16:], 16, whole[0].tobytes(), "model")
    assert (rest == whole[1:]).all()
    changed = tokens.copy()
    changed[0] += 1
    assert (ids.hash_blocks(changed, 16, salt="model") != whole).all()
    changed = tokens.copy()
    changed[-1] = 2**40
    assert (ids.hash_blocks(changed, 16, salt="model")[:2] == whole[:2]).all()
    assert (ids.hash_blocks(tokens, 16, salt=b"model") == whole).all()
    assert (ids.hash_blocks(tokens, 16, salt="other") != whole).all()


def test_few_or_no_tokens():
    assert ids.hash_blocks([], 16).shape == (0, 2)
    assert ids.hash_blocks([], 16, partial_tail=True).shape == (0, 2)
    assert ids.hash_blocks([1, 2], 16).shape == (0, 2)
    assert ids.hash_blocks([1, 2], 1 << 60, partial_tail=True).shape == (1, 2)


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        ([1, -1], "token 1 is negative"),
        (np.array([1, 2, -5]), "token 2 is negative"),
        (np.array([2**63], dtype=np.uint64), "token 0 is negative or above"),
        ([2**63], "tokens must be integers"),
        ([1.5], "tokens must be integers"),
        (["a"], "tokens must be integers"),
        ("abc", "not str"),
        (b"abc", "not bytes"),
        (np.array([1.0]), "1-d float64"),
        (np.array([True]), "1-d bool"),
        (np.zeros((2, 2), dtype=int), "2-d int64"),
    ],
)
def test_tokens_that_are_refused(tokens, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        ids.hash_blocks(tokens, 1)


@pytest.mark.parametrize("block_size", [0, -4])
def test_block_size_must_be_positive(block_size):
    with pytest.raises(InvalidArgumentError, match="block_size must be at least 1"):
        ids.hash_blocks([1], block_size)


@pytest.mark.parametrize("parent", [b"", b"x" * 15, b"x" * 32])
def test_parent_must_be_a_digest(parent):
    with pytest.raises(InvalidArgumentError, match="parent must have 16 bytes"):
        ids.hash_blocks([1], 1, parent)


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64, 4096])
def test_a_single_digest_belongs_to_the_same_shard(shards):
    digests = ids.digests([f"key-{at}" for at in range(200)], ids.namespace_seed("default"))
    alone = [ids.shard_of_one(digest.tobytes(), shards) for digest in digests]
    assert alone == ids.shard_of(digests, shards).tolist()
