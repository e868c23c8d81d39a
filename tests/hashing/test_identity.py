"""Digests and chains of blocks: what keys and tokens become, and that they stay what they are.

What holds for every identity is asked of each; what a digest is exactly, of each in its own way.
"""

import hmac
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

from mooncake_store.errors import RemoteProtocolError
from mooncake_store.identity import (
    KEYED,
    SECRET_BYTES,
    UNKEYED,
    Keyed,
    Unkeyed,
    identity_of,
    secret_of,
)
from tests.hashing import sip
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
from mooncake_store.identity import Keyed, Unkeyed
vectors = json.load(open(sys.argv[1], encoding="utf-8"))
def key(entry):
    return entry["key"] if "key" in entry else bytes.fromhex(entry["key_hex"])
found = []
for entry in vectors["keys"]:
    identity = Unkeyed(entry["namespace"])
    row = identity.digests([key(entry)])[0]
    assert identity.digest(key(entry)) == row.tobytes()
    found.append(ids.hex(row))
for entry in vectors["chains"]:
    parent = entry["parent_hex"] and bytes.fromhex(entry["parent_hex"])
    chain = Unkeyed("").hash_blocks(entry["tokens"], entry["block_size"], parent, entry["salt"],
                                    partial_tail=entry["partial_tail"])
    found.append([ids.hex(row) for row in chain])
json.dump(found, sys.stdout)
"""


def as_bytes(key):
    return key.encode() if isinstance(key, str) else key


SECRET = bytes(range(SECRET_BYTES))
IDENTITIES = {UNKEYED: Unkeyed("n"), KEYED: Keyed(SECRET)}


@pytest.fixture(params=IDENTITIES)
def identity(request):
    return IDENTITIES[request.param]


def derived(label, secret=SECRET):
    return hmac.digest(secret, b"mooncake " + label, "sha256")[:16]


def expected_digest(kind, key):
    if kind == KEYED:
        return sip.sip128(derived(b"key of names"), as_bytes(key))
    seed = xxhash.xxh3_64_intdigest(b"n")
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


@pytest.mark.parametrize("kind", IDENTITIES)
@given(keys=st.lists(KEYS, max_size=12))
@example(keys=["a\0", "b"])
@example(keys=["a", "\0b", "é\0"])
@example(keys=["é", "🔑"])
@example(keys=[b"\0", b"a\0b"])
@example(keys=["a", b"b", "a"])
@example(keys=["a", b"\0b", "\0"])
@settings(max_examples=100, deadline=None)
def test_digests_equal_one_hash_per_key(kind, keys):
    identity = IDENTITIES[kind]
    found = identity.digests(keys)
    assert found.shape == (len(keys), 2)
    assert found.dtype == np.uint64
    assert [row.tobytes() for row in found] == [expected_digest(kind, key) for key in keys]
    assert [identity.digest(key) for key in keys] == [row.tobytes() for row in found]


def test_order_duplicates_and_kinds_of_sequence(identity):
    keys = [f"key/{index % 7}" for index in range(1000)]
    found = identity.digests(keys)
    assert len(np.unique(found, axis=0)) == 7
    assert (found[:7] == found[7:14]).all()
    assert (identity.digests(tuple(reversed(keys))) == found[::-1]).all()
    assert (identity.digests([key.encode() for key in keys]) == found).all()


def test_namespaces_keep_equal_keys_apart():
    assert Unkeyed("k").digest("k") != Unkeyed("b").digest("k")
    secrets = {secret_of(root, namespace) for root in (b"x" * 16, b"y" * 16) for namespace in "ab"}
    assert len(secrets) == 4
    assert len({Keyed(secret).digest("k") for secret in secrets}) == 4
    assert secret_of(SECRET, "a") == derived(b"secret of the namespace a")


def test_a_name_is_not_found_where_a_block_of_its_bytes_is():
    tokens = np.arange(1, 17)
    identity = Keyed(SECRET)
    chain = identity.hash_blocks(tokens, 16)[0]
    block = sip.sip128(derived(b"key of blocks"), tokens.tobytes())
    assert identity.digest(tokens.tobytes()) not in (block, chain.tobytes())


def test_an_identity_is_what_the_master_says():
    told = secret_of(SECRET, "default")
    assert identity_of(KEYED, told, "default").digest("k") == Keyed(told).digest("k")
    assert identity_of(UNKEYED, b"", "default").digest("k") == Unkeyed("default").digest("k")
    for kind, secret in ((KEYED, b""), (KEYED, b"x" * 15), ("sha512", told)):
        with pytest.raises(RemoteProtocolError, match=kind):
            identity_of(kind, secret, "default")
    with pytest.raises(InvalidArgumentError, match="has 3 bytes"):
        Keyed(b"abc")


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
def test_keys_that_are_refused(identity, keys, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        identity.digests(keys)


@pytest.mark.parametrize("key", ["", b"", "x" * 4097, "\ud800"])
def test_single_keys_that_are_refused(identity, key):
    with pytest.raises(InvalidArgumentError, match="the key has"):
        identity.digest(key)


@pytest.mark.parametrize("kind", IDENTITIES)
def test_longest_key_is_accepted(kind):
    found = IDENTITIES[kind].digests(["x" * 4096])
    assert found[0].tobytes() == expected_digest(kind, "x" * 4096)


def chain_by_hand(kind, tokens, block_size, parent, salt, partial_tail):
    whole = len(tokens) if partial_tail else len(tokens) // block_size * block_size
    if kind == KEYED:
        parent = sip.sip128(derived(b"key of salts"), salt) if parent is None else parent
        link, block = derived(b"key of links"), derived(b"key of blocks")
        return sip.chain(tokens[:whole], block_size, parent, link, block)
    keys, seed, parent = [], xxhash.xxh3_64_intdigest(salt), parent or bytes(16)
    for begin in range(0, whole, block_size):
        block = tokens[begin : begin + block_size]
        data = parent + struct.pack(f"<{len(block)}q", *block)
        parent = xxhash.xxh3_128_intdigest(data, seed).to_bytes(16, "little")
        keys.append(parent)
    return keys


@pytest.mark.parametrize("kind", IDENTITIES)
@given(
    tokens=st.lists(st.integers(0, 2**63 - 1), max_size=80),
    block_size=st.integers(1, 50),
    parent=st.none() | st.binary(min_size=16, max_size=16),
    salt=st.binary(max_size=5),
    partial_tail=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_chain_equals_the_loop(kind, tokens, block_size, parent, salt, partial_tail):
    identity = IDENTITIES[kind]
    found = identity.hash_blocks(tokens, block_size, parent, salt, partial_tail=partial_tail)
    expected = chain_by_hand(kind, tokens, block_size, parent, salt, partial_tail)
    assert [row.tobytes() for row in found] == expected


def test_same_tokens_same_keys_whatever_they_come_in(identity):
    tokens = [(index * 37) % 120 for index in range(2500)]
    expected = identity.hash_blocks(tokens, 16).tobytes()
    forms = [np.array(tokens, dtype=code) for code in ("i1", "u1", "<i2", ">i4", "u4", "u8", ">i8")]
    forms += [tuple(tokens), iter(tokens), array("i", tokens), memoryview(array("q", tokens))]
    forms += [np.repeat(tokens, 2)[::2], [np.int32(token) for token in tokens]]
    read_only = np.array(tokens)
    read_only.flags.writeable = False
    for form in [*forms, read_only]:
        assert identity.hash_blocks(form, 16).tobytes() == expected


def test_torch_tokens(identity):
    torch = pytest.importorskip("torch")
    tokens = torch.arange(64, dtype=torch.int32)
    assert (identity.hash_blocks(tokens, 16) == identity.hash_blocks(list(range(64)), 16)).all()


def test_a_chain_can_be_continued_and_names_its_whole_prefix(identity):
    tokens = np.arange(3 * 16)
    whole = identity.hash_blocks(tokens, 16, salt="model")
    rest = identity.hash_blocks(tokens[16:], 16, whole[0].tobytes(), "model")
    assert (rest == whole[1:]).all()
    changed = tokens.copy()
    changed[0] += 1
    assert (identity.hash_blocks(changed, 16, salt="model") != whole).all()
    changed = tokens.copy()
    changed[-1] = 2**40
    assert (identity.hash_blocks(changed, 16, salt="model")[:2] == whole[:2]).all()
    assert (identity.hash_blocks(tokens, 16, salt=b"model") == whole).all()
    assert (identity.hash_blocks(tokens, 16, salt="other") != whole).all()


def test_few_or_no_tokens(identity):
    assert identity.hash_blocks([], 16).shape == (0, 2)
    assert identity.hash_blocks([], 16, partial_tail=True).shape == (0, 2)
    assert identity.hash_blocks([1, 2], 16).shape == (0, 2)
    assert identity.hash_blocks([1, 2], 1 << 60, partial_tail=True).shape == (1, 2)


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
def test_tokens_that_are_refused(identity, tokens, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        identity.hash_blocks(tokens, 1)


@pytest.mark.parametrize("block_size", [0, -4])
def test_block_size_must_be_positive(identity, block_size):
    with pytest.raises(InvalidArgumentError, match="block_size must be at least 1"):
        identity.hash_blocks([1], block_size)


@pytest.mark.parametrize("parent", [b"", b"x" * 15, b"x" * 32])
def test_parent_must_be_a_digest(identity, parent):
    with pytest.raises(InvalidArgumentError, match="parent must have 16 bytes"):
        identity.hash_blocks([1], 1, parent)
