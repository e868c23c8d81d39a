"""Blocks out of objects: whole when every piece is there, gone with the first piece."""

import pytest

from serving.connectors.keys import KVScope, parse_key, scope_prefix
from serving.connectors.presence import Presence


def scope(**changes):
    return KVScope(**{"model": "m", "dtype": "float32", "layout": "x"} | changes)


def parts(of, block="ab", suffix=""):
    return parse_key(of.key(block) + suffix)


def test_keys_are_read_as_they_are_made():
    two = scope(tp_size=2, tp_rank=1, pp_size=3, pp_rank=2, kv_heads=2)
    assert parts(two, "00ab", "/last") == (two.digest, (1, 2), 6, "00ab", "last")
    assert parts(two, b"\x01") == (two.digest, (1, 2), 6, "01", "")
    assert two.key("ab").startswith(scope_prefix(two.digest))
    assert two.key("ab").startswith(scope_prefix())


@pytest.mark.parametrize("name", ["", "kv1/", "kv1/zz/t0of1.p0of1/ab", "file/name", "kv1/ab/x/ab"])
def test_other_names_are_none(name):
    assert parse_key(name) is None


def test_every_rank_and_stage_is_needed():
    ranks = [scope(tp_size=2, kv_heads=2, tp_rank=r, pp_size=2, pp_rank=p)
             for r in range(2) for p in range(2)]  # fmt: skip
    blocks = Presence([ranks[0].digest])
    told = [blocks.add(parts(each)) for each in (*ranks, ranks[0])]
    assert told == [False, False, False, True, False]
    assert blocks.whole == ["ab"]
    assert [blocks.drop(parts(each)) for each in ranks] == [True, False, False, False]
    assert blocks.whole == []
    assert not blocks.add(parts(ranks[0]))


def test_every_group_of_a_hybrid_model_is_needed():
    full, window = scope(group="0"), scope(group="1")
    blocks = Presence([full.digest, window.digest])
    assert not blocks.add(parts(full))
    assert blocks.add(parts(window))
    assert blocks.drop(parts(window))
    assert blocks.add(parts(window))


def test_the_last_layers_stand_for_all():
    one = scope()
    blocks = Presence([one.digest])
    assert not blocks.add(parts(one, suffix="/0"))
    assert blocks.add(parts(one, suffix="/last"))
    assert not blocks.drop(parts(one, suffix="/0"))
    assert blocks.drop(parts(one, suffix="/last"))


def test_other_models_are_not_told_of():
    blocks = Presence([scope().digest])
    other = parts(scope(salt="x"))
    assert not blocks.counts(other)
    assert not blocks.add(other)
    assert not blocks.drop(other)
