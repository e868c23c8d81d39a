"""Keys name everything that decides what the bytes mean, and nothing else."""

from dataclasses import replace

import numpy as np
import pytest

from mooncake_store.identity import Unkeyed
from serving.connectors.keys import KVScope

BASE = KVScope(
    model="/models/a/llama",
    revision="one",
    dtype="bfloat16",
    layout="NHD/16",
    tp_size=4,
    kv_heads=8,
)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "/models/b/llama"},
        {"revision": "two"},
        {"dtype": "float8_e4m3fn"},
        {"layout": "HND/16"},
        {"tp_rank": 1},
        {"tp_size": 8},
        {"pp_size": 2},
        {"kv_heads": 16},
        {"group": "sliding"},
        {"lora": "adapter"},
        {"salt": "tenant"},
    ],
)
def test_everything_that_matters_changes_the_key(change):
    assert replace(BASE, **change).key(b"\x01") != BASE.key(b"\x01")


def test_names_cannot_run_into_each_other():
    one = replace(BASE, model="ab", revision="c")
    assert one.digest != replace(BASE, model="a", revision="bc").digest
    assert "tenant" not in replace(BASE, salt="tenant").key("00")


def test_the_same_scope_gives_the_same_keys_everywhere():
    assert BASE.prefix == "kv1/9e4e2fc0/" or BASE.prefix.startswith("kv1/")
    assert BASE.keys([b"\x01\x02", "ab", 7]) == [
        BASE.prefix + "0102",
        BASE.prefix + "ab",
        BASE.prefix + "0000000000000007",
    ]


def test_latent_attention_is_stored_once():
    ranks = [replace(BASE, kv_heads=0, tp_rank=rank) for rank in range(4)]
    assert len({scope.key("ab") for scope in ranks}) == 1
    assert [scope.is_writer for scope in ranks] == [True, False, False, False]
    assert len(ranks[0].all_ranks()) == 1
    # And whoever has another number of ranks shares it, too.
    assert replace(BASE, kv_heads=0, tp_size=8).key("ab") == ranks[0].key("ab")


def test_replicated_heads_are_stored_once():
    ranks = [replace(BASE, tp_size=8, kv_heads=2, tp_rank=rank) for rank in range(8)]
    assert [scope.shard for scope in ranks] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [scope.is_writer for scope in ranks] == [True, *[False] * 3, True, *[False] * 3]
    assert len({scope.key("ab") for scope in ranks}) == 2
    pieces = ranks[5].all_ranks()
    assert {scope.key("ab") for scope in pieces} == {scope.key("ab") for scope in ranks}
    assert all(scope.is_writer for scope in pieces)


def test_every_stage_and_shard_is_asked_for():
    scope = replace(BASE, pp_size=2, tp_size=2)
    assert len({each.prefix for each in scope.all_ranks()}) == 4


def test_blocks_of_a_prompt_are_those_of_the_scope():
    tokens, identity = np.arange(40), Unkeyed("default")
    digests = BASE.blocks(identity, tokens, 16)
    assert digests.shape == (2, 2)
    assert np.array_equal(digests, BASE.blocks(identity, tokens.tolist(), 16))
    assert not np.array_equal(digests, replace(BASE, salt="x").blocks(identity, tokens, 16))


@pytest.mark.parametrize(
    "change",
    [
        {"model": ""},
        {"dtype": ""},
        {"layout": ""},
        {"tp_rank": 4},
        {"pp_rank": 1},
        {"kv_heads": -1},
    ],
)
def test_nonsense_is_refused(change):
    with pytest.raises(ValueError, match=r"."):
        replace(BASE, **change)
    with pytest.raises(ValueError, match="empty"):
        BASE.key("")
