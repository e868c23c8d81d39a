"""The kernels of a client that shows rights, compiled and as Python: beside which lease each is."""

import numpy as np
import pytest

from mooncake_store.client.kernels import reading as k
from mooncake_store.client.kernels import shown as s
from mooncake_store.core.records import GET_ROW
from tests import interpreting
from tests.client.test_kernels import columns, replicas_of, some_digests, targets

SECOND = 1_000_000_000


@pytest.fixture(params=["compiled", "python"])
def kernel(request, monkeypatch):
    if request.param == "compiled":
        return lambda name: getattr(s, name)
    for name in (
        "_ask_for_places", "_ask_for_row", "_cheapest", "_enter", "_find", "_row_of", "_set_of",
        "_set_tag", "_victim", "take_single",
    ):  # fmt: skip
        monkeypatch.setattr(k, name, getattr(k, name).py_func)
    for name in ("_enter", "_right_of"):
        monkeypatch.setattr(s, name, getattr(s, name).py_func)
    for name in ("_find", "lookup", "lookup_one", "remember", "take_one", "take_single"):
        found = getattr(k, name)
        monkeypatch.setattr(s, name, getattr(found, "py_func", found))
    monkeypatch.setattr(k, "first_equal", interpreting.first_equal)
    monkeypatch.setattr(k, "ask_for", interpreting.ask_for)
    return lambda name: getattr(s, name).py_func


def empty(sets=1):
    rights = np.zeros((sets * k.WAYS, s.RIGHT_WORDS), np.int64)
    return np.zeros(sets * k.SET_WORDS, np.int64), rights


def granted(n, until):
    cols = columns(n, k.FOUND)
    cols[k.UNTIL] = until
    return cols


def rights_of(n, first=100):
    return np.arange(first, first + 2 * n, dtype=np.int64).reshape(n, 2)


def test_every_lease_has_the_right_that_came_with_it(kernel):
    """Also where entries replace each other: twice as many keys as the table has room for."""
    table, rights = empty(4)
    digests, told, tags = some_digests(64), rights_of(64), np.arange(64) - 32
    for at in range(64):
        index, cols = np.array([at]), granted(64, 9 * SECOND + at)
        kernel("remember_shown")(table, rights, digests, index, SECOND, cols, told, tags)
    seen, found, contents = columns(64), np.zeros((64, 2), np.int64), np.zeros(64, np.int64)
    hits = kernel("lookup_shown")(table, rights, digests, SECOND, seen, found, contents)
    there = np.flatnonzero(seen[k.STATUS] == k.FOUND)
    assert 4 < hits == len(there) <= 4 * k.WAYS
    assert (found[there] == told[there]).all()
    assert (contents[there] == tags[there]).all()
    for at in range(64):
        low, high = map(int, digests[at])
        one = kernel("lookup_one_shown")(table, rights, low, high, SECOND)
        assert (one[0] != 0) == (at in there)
        if one[0]:
            assert tuple(one[6:]) == (*told[at], tags[at])
        assert kernel("content_of")(table, rights, low, high) == (tags[at] if one[0] else 0)


def test_a_right_ends_before_its_lease_and_is_not_prolonged_with_it(kernel):
    table, rights = empty()
    digests, index, told = some_digests(1), np.zeros(1, np.int64), rights_of(1)
    given = granted(1, 5 * SECOND), told, index
    kernel("remember_shown")(table, rights, digests, index, 1, *given)
    k.remember(table, digests, index, 1, granted(1, 9 * SECOND))  # the lease alone
    low, high = map(int, digests[0])
    for now, known in ((4 * SECOND, True), (5 * SECOND - s.EARLIER_NS, False), (6 * SECOND, False)):
        seen, found = columns(1), np.zeros((1, 2), np.int64)
        assert kernel("lookup_shown")(table, rights, digests, now, seen, found, index) == known
        assert seen[k.STATUS, 0] == (k.FOUND if known else k.MISSING)
        assert (kernel("lookup_one_shown")(table, rights, low, high, now)[0] != 0) == known
        assert k.lookup(table, digests, now, columns(1)) == 1


def test_what_needs_no_right_is_known_for_as_long_as_its_lease(kernel):
    table, rights = empty()
    digests, index, none = some_digests(1), np.zeros(1, np.int64), np.zeros((1, 2), np.int64)
    given = granted(1, 5 * SECOND), none, index
    kernel("remember_shown")(table, rights, digests, index, 1, *given)
    seen, found = columns(1), rights_of(1)
    look = kernel("lookup_shown")
    assert look(table, rights, digests, 5 * SECOND - 1, seen, found, index) == 1
    assert found.tolist() == [[0, 0]]
    assert look(table, rights, digests, 5 * SECOND, columns(1), found, index) == 0


def answer(status=0, replicas=1, left=5 * SECOND):
    row = np.zeros(1, GET_ROW)
    row[0] = (64, 77, left, 7, status, replicas)
    return np.frombuffer(row.tobytes(), np.int64).reshape(1, 4)


def test_the_answer_to_one_key_brings_the_right_to_the_replica_that_is_chosen(kernel):
    known = targets([3, 1, 2])
    told = np.frombuffer(rights_of(3).tobytes(), np.int64).reshape(3, 2)
    low, high = map(int, some_digests(1)[0])
    table, rights = empty()
    places = replicas_of((0, 4096), (1, 4096), (2, 4096))
    found = kernel("take_one_shown")(
        table, rights, low, high, answer(replicas=3), places, told, told[:1], 1, 2, known, 0
    )
    assert found[4:] == (1, 4096, *told[1], told[0, 0])
    assert kernel("lookup_one_shown")(table, rights, low, high, SECOND) == found
    table, rights = empty()
    numbers = (*answer()[0].tolist(), 4096, 2, *told[2].tolist(), -9, 0)
    single = kernel("take_single_shown")(table, rights, low, high, *numbers, 1, 2, known)
    assert single[4:] == (2, 4096, *told[2], -9)
    assert kernel("lookup_one_shown")(table, rights, low, high, SECOND) == single


def test_an_answer_that_is_unusual_leaves_nothing_behind(kernel):
    table, rights = empty()
    low, high = map(int, some_digests(1)[0])
    places = replicas_of((0, 4096))
    for words in (answer(-704), answer(left=0)):
        told = np.frombuffer(rights_of(1).tobytes(), np.int64).reshape(1, 2)
        found = kernel("take_one_shown")(
            table, rights, low, high, words, places, told, told, 1, 2, targets([1]), 0
        )
        assert found[0] == 0
        numbers = (*words[0].tolist(), 4096, 0, 1, 2, 3, 0)
        known = targets([1])
        assert kernel("take_single_shown")(table, rights, low, high, *numbers, 1, 2, known)[0] == 0
    assert not table.any()
    assert not rights.any()


def test_the_right_of_each_key_is_that_to_its_replica(kernel):
    replicas = replicas_of((0, 8), (1, 8), (0, 16), (1, 16), (2, 8))
    shown = np.frombuffer(rights_of(5).tobytes(), np.int64).reshape(5, 2)
    cols = columns(4, k.FOUND)
    cols[k.FIRST], cols[k.REPLICAS] = [0, 2, -1, 4], [2, 2, 1, 1]
    cols[k.SEGMENT], cols[k.OFFSET] = [1, 0, 5, -1], [8, 16, 24, 0]
    chosen = np.full((4, 2), -7, np.int64)
    kernel("pick")(np.arange(4), replicas, shown, cols, chosen)
    assert chosen.tolist() == [shown[1].tolist(), shown[2].tolist(), [-7, -7], [-7, -7]]


def test_warmup_compiles_one_signature_each():
    s.warmup()
    for name in (
        "lookup_shown", "lookup_one_shown", "remember_shown", "take_one_shown",
        "take_single_shown", "content_of", "pick",
    ):  # fmt: skip
        assert len(getattr(s, name).signatures) == 1, name
