"""The kernels of the client, compiled and as Python: lease table, answers, choices, verdicts."""

import numpy as np
import pytest

from mooncake_store import ids
from mooncake_store.client.kernels import reading as k
from mooncake_store.core.records import GET_ROW, PUT_ROW, REPLICA
from tests import interpreting


def plain(name):
    return getattr(k, name)


def interpreted(name):
    return getattr(k, name).py_func


@pytest.fixture(params=[plain, interpreted], ids=["compiled", "python"])
def kernel(request, monkeypatch):
    if request.param is interpreted:
        for helper in (
            "_ask_for_places", "_ask_for_row", "_cheapest", "_enter", "_find", "_row_of",
            "_set_of", "_set_tag", "_shard", "_victim",
        ):  # fmt: skip
            monkeypatch.setattr(k, helper, getattr(k, helper).py_func)
        monkeypatch.setattr(k, "first_equal", interpreting.first_equal)
        monkeypatch.setattr(k, "ask_for", interpreting.ask_for)
    return request.param


def columns(n, status=0):
    cols = np.zeros((k.COLUMNS, n), np.int64)
    cols[k.STATUS] = status
    return cols


def some_digests(n, seed=0):
    return np.random.default_rng(seed).integers(-(1 << 62), 1 << 62, (n, 2), dtype=np.int64)


def targets(costs, rests=None):
    out = np.full((2, 8), -1, np.int64)
    out[1] = 0
    out[0, : len(costs)] = costs
    if rests is not None:
        out[1, : len(rests)] = rests
    return out


def replicas_of(*places):
    rows = np.zeros(len(places), REPLICA)
    for at, (segment, offset) in enumerate(places):
        rows[at] = (offset, segment, 0)
    return np.frombuffer(rows.tobytes(), np.int64).reshape(len(places), 2)


def test_the_lease_table_agrees_with_a_dict(kernel):
    table = np.zeros(64 * k.SET_WORDS, np.int64)
    digests = some_digests(60)
    model = {}
    random = np.random.default_rng(1)
    for step in range(1, 60):
        picked = np.unique(random.integers(0, 60, 5))
        cols = columns(60)
        cols[k.STATUS, picked] = k.FOUND
        cols[k.UNTIL] = step + random.integers(1, 40, 60)
        cols[k.SIZE] = random.integers(1, 100, 60)
        cols[k.GENERATION] = random.integers(0, 1 << 32, 60)
        kernel("remember")(table, digests, picked, step, cols)
        for at in picked.tolist():
            model[at] = (cols[k.UNTIL, at], cols[k.SIZE, at], cols[k.GENERATION, at])
        gone = random.integers(0, 60, 1)
        kernel("forget")(table, digests, gone, step, np.zeros(1, np.int64), np.zeros(1, np.int64))
        model.pop(int(gone[0]), None)
        seen = columns(60)
        hits = kernel("lookup")(table, digests, step, seen)
        running = {at for at, (until, _, _) in model.items() if until > step}
        assert set(np.flatnonzero(seen[k.STATUS] == k.FOUND).tolist()) == running
        assert hits == len(running)
        for at in running:
            assert tuple(seen[[k.UNTIL, k.SIZE, k.GENERATION], at]) == model[at]


def test_a_full_set_gives_up_the_lease_that_ends_first(kernel):
    table = np.zeros(k.SET_WORDS, np.int64)
    digests = some_digests(k.WAYS + 1)
    index = np.arange(k.WAYS + 1)
    cols = columns(k.WAYS + 1, k.FOUND)
    # Around where the tags' steps of 1 ms begin anew.
    now = (1 << 52) - 45 * (1 << 20)
    cols[k.UNTIL] = now + (np.array([50, 40, 30, 20, 10, 60, 70, 80, 90]) << 20)
    kernel("remember")(table, digests, index, now, cols)
    seen = columns(k.WAYS + 1)
    kernel("lookup")(table, digests, now, seen)
    assert np.flatnonzero(seen[k.STATUS] == k.MISSING).tolist() == [4]
    # One that has ended goes before those that run.
    cols[k.STATUS], cols[k.UNTIL] = k.FOUND, now + (100 << 20)
    kernel("remember")(table, digests, index[4:5], now + (25 << 20), cols)
    seen = columns(k.WAYS + 1)
    kernel("lookup")(table, digests, now, seen)
    assert np.flatnonzero(seen[k.STATUS] == k.MISSING).tolist() == [3]


def test_keys_with_the_same_tag_are_told_apart(kernel):
    table = np.zeros(k.SET_WORDS, np.int64)
    digests = some_digests(4)
    digests[:, 0] = [0, 0, 5 << 32, 5 << 32]
    cols, index = columns(4, k.FOUND), np.arange(4)
    cols[k.UNTIL], cols[k.SIZE] = 100, [1, 2, 3, 4]
    kernel("remember")(table, digests, index[::2], 1, cols)
    seen = columns(4)
    assert kernel("lookup")(table, digests, 1, seen) == 2
    assert seen[k.STATUS].tolist() == [k.FOUND, k.MISSING, k.FOUND, k.MISSING]
    kernel("remember")(table, digests, index, 1, cols)
    gone, counts = np.zeros(2, np.int64), np.zeros(2, np.int64)
    assert kernel("forget")(table, digests, index[:2], 1, gone, counts) == 3
    seen = columns(4)
    assert kernel("lookup")(table, digests, 1, seen) == 2
    assert seen[k.SIZE, 2:].tolist() == [3, 4]


def test_grants_are_counted_and_handed_out_once(kernel):
    table = np.zeros(k.SET_WORDS, np.int64)
    digests, index = some_digests(1), np.zeros(1, np.int64)
    cols = columns(1, k.FOUND)
    cols[k.UNTIL], cols[k.GENERATION] = 100, 7
    for _ in range(3):
        kernel("remember")(table, digests, index, 1, cols)
    generations, counts = np.zeros(1, np.int64), np.zeros(1, np.int64)
    assert kernel("forget")(table, digests, index, 1, generations, counts) == 3
    assert (generations[0], counts[0]) == (7, 3)
    assert kernel("forget")(table, digests, index, 1, generations, counts) == 0
    kernel("remember")(table, digests, index, 1, cols)
    assert kernel("forget")(table, digests, index, 101, generations, counts) == 0  # it has ended


def test_a_lease_that_ended_and_was_granted_again_counts_once(kernel):
    table = np.zeros(k.SET_WORDS, np.int64)
    digests, index = some_digests(1), np.zeros(1, np.int64)
    cols = columns(1, k.FOUND)
    cols[k.UNTIL], cols[k.GENERATION] = 100, 7
    kernel("remember")(table, digests, index, 1, cols)
    cols[k.UNTIL] = 300
    kernel("remember")(table, digests, index, 200, cols)
    generations, counts = np.zeros(1, np.int64), np.zeros(1, np.int64)
    assert kernel("forget")(table, digests, index, 201, generations, counts) == 1


def test_leases_of_the_same_generation_last_as_long_as_the_longest(kernel):
    table = np.zeros(k.SET_WORDS, np.int64)
    digests, index = some_digests(2), np.arange(2)
    cols = columns(2, k.FOUND)
    for until, generations in ((200, [7, 7]), (100, [7, 8])):
        cols[k.UNTIL], cols[k.GENERATION] = until, generations
        kernel("remember")(table, digests, index, 1, cols)
    seen = columns(2)
    assert kernel("lookup")(table, digests, 50, seen) == 2
    assert seen[k.UNTIL].tolist() == [200, 100]


def test_an_answer_is_read_and_the_cheapest_replica_chosen(kernel):
    rows = np.zeros(3, GET_ROW)
    rows[0] = (10, 1 << 63, 500, 0xFFFFFFFF, 0, 2)
    rows[1] = (0, 0, 0, 0, -704, 0)
    rows[2] = (30, 5, 900, 3, 0, 1)
    words = np.frombuffer(rows.tobytes(), np.int64).reshape(3, 4)
    replicas = replicas_of((0, 100), (1, 200), (2, 300))
    cols, index = columns(3), np.arange(3)
    known = targets([3, 1, 2])
    assert kernel("take")(index, words, replicas, 0, 1000, 1000, known, cols) == (2, 0, 0)
    assert cols[k.STATUS].tolist() == [k.FOUND, -704, k.FOUND]
    assert cols[k.UNTIL, 0] == 1500
    assert cols[k.GENERATION, 0] == 0xFFFFFFFF
    assert kernel("choose")(index, replicas, known, 1000, 0, cols) == (2, 1, 2)
    assert cols[k.SEGMENT, [0, 2]].tolist() == [1, 2]
    assert cols[k.OFFSET, [0, 2]].tolist() == [200, 300]
    # The one that was tried is not chosen again; then there is none left.
    cols[k.STATUS, 0] = k.FAILED
    assert kernel("choose")(index[:1], replicas, known, 1000, 0, cols)[0] == 1
    assert cols[k.SEGMENT, 0] == 0
    cols[k.STATUS, 0] = k.FAILED
    assert kernel("choose")(index[:1], replicas, known, 1000, 0, cols)[0] == 0
    assert cols[k.STATUS, 0] == k.FAILED
    assert kernel("take")(index, words, replicas, 0, 1000, 1000, targets([3]), cols) == (2, 2, 0)


def test_resting_segments_come_last_and_equal_ones_take_turns(kernel):
    replicas = replicas_of((0, 0), (1, 0), (2, 0))
    index = np.zeros(1, np.int64)

    def chosen(known, turn):
        cols = columns(1, k.FOUND)
        cols[k.REPLICAS] = 3
        kernel("choose")(index, replicas, known, 1000, turn, cols)
        return int(cols[k.SEGMENT, 0])

    assert {chosen(targets([1, 1, 1]), turn) for turn in range(3)} == {0, 1, 2}
    assert {chosen(targets([0, 1, 1], [2000]), turn) for turn in range(3)} == {1, 2}
    assert {chosen(targets([0, 1, 1], [1000]), turn) for turn in range(3)} == {0}
    assert {chosen(targets([5, -1, -1], [2000]), turn) for turn in range(3)} == {0}


def test_verdicts(kernel):
    cols = columns(4, k.FOUND)
    cols[k.CHECKSUM] = [1, 2, 3, 4]
    cols[k.UNTIL] = [100, 100, 50, 100]
    statuses = np.array([0, 0, 0, -900], np.int32)
    sums = np.array([1, 9, 3, 4])
    assert kernel("judge")(np.arange(4), statuses, sums, 60, cols) == (2, 1)
    assert cols[k.STATUS].tolist() == [0, k.FAILED, k.EXPIRED, k.FAILED]
    assert statuses.tolist() == [0, -801, 0, -900]
    statuses = np.zeros(4, np.int32)
    assert kernel("judge")(np.arange(4), statuses, sums[:0], 60, cols) == (0, 1)


def test_objects_line_up_behind_those_that_are_read(kernel):
    ready = np.zeros(4)
    lengths = np.array([100, 1000, 100, 200], np.int64)
    end = kernel("line_up")(lengths, 1.0, 0.5, 0.01, 6.0, ready)
    # The second one would be late, so the third does not wait for it.
    assert ready.tolist() == pytest.approx([2.5, 13.0, 4.0, 6.5])
    assert end == pytest.approx(4.0)


def test_answers_to_puts(kernel):
    rows = np.zeros(3, PUT_ROW)
    rows[0], rows[1], rows[2] = (5, 0, 2), (0, -705, 0), (6, 0, 1)
    words = np.frombuffer(rows.tobytes(), np.int64)
    replicas = replicas_of((0, 10), (1, 20), (3, 30))
    cols, index = columns(3), np.arange(3)
    assert kernel("take_put")(index, words, 0, cols) == (2, 2)
    assert cols[k.STATUS].tolist() == [k.FOUND, -705, k.FOUND]
    known = targets([0, 0])
    assert kernel("nth_replica")(index, replicas, 0, known, cols) == (2, 0, 3, 1)
    assert cols[k.OFFSET].tolist()[::2] == [10, 30]
    assert kernel("nth_replica")(index, replicas, 1, known, cols) == (1, 1, 1, 0)
    assert cols[k.SEGMENT].tolist() == [1, -1, -1]


@pytest.mark.parametrize("shards", [2, 3, 7])
def test_keys_are_split_by_the_shard_that_serves_them(kernel, shards):
    digests = np.random.default_rng(shards).integers(0, 1 << 64, (200, 2), dtype=np.uint64)
    index = np.flatnonzero(np.arange(200) % 3)
    ends, out = np.empty(shards, np.int64), np.empty(len(index), np.int64)
    kernel("by_shard")(digests.view(np.int64), index, ids.SLOTS, shards, ends, out)
    of = ids.shard_of(digests, shards)
    assert out.tolist() == [at for shard in range(shards) for at in index if of[at] == shard]
    assert np.diff(ends, prepend=0).tolist() == np.bincount(of[index], minlength=shards).tolist()


def test_warmup_compiles_one_signature_each():
    k.warmup()
    for name in ("lookup", "take", "choose", "remember", "judge", "take_put", "nth_replica"):
        assert getattr(k, name).signatures, name


def test_an_answer_with_one_replica_is_taken_as_one_of_several_would_be(kernel):
    """`take_single` and `take_one` say and remember the same of what a shard answers alike."""
    random = np.random.default_rng(5)
    known = targets([3, 1, -1, 2], rests=[0, 0, 0, 10_000])
    for _ in range(300):
        low, high = (int(word) for word in some_digests(1, int(random.integers(1 << 30)))[0])
        status = 0 if random.random() < 0.7 else -704
        segment, left = int(random.integers(0, 9)), int(random.integers(0, 3)) * 1000
        row = np.zeros(1, GET_ROW)
        row[0] = (64, random.integers(1 << 63), left, random.integers(1 << 32), status, 1)
        words = np.frombuffer(row.tobytes(), np.int64).reshape(1, 4)
        places = replicas_of((segment, int(random.integers(1 << 40))))
        tables = np.zeros((2, k.SET_WORDS), np.int64)
        one = kernel("take_one")(tables[0], low, high, words, places, 500, 1200, known, 0)
        numbers = (*words[0].tolist(), *places[0].tolist())
        single = kernel("take_single")(tables[1], low, high, *numbers, 500, 1200, known)
        assert tuple(map(int, single)) == tuple(map(int, one))
        assert (tables[0] == tables[1]).all()
        taken = status == 0 and left > 700 and segment in (0, 1)
        assert (single[0] != 0) == taken == tables[1].any()
        if taken:
            assert single[:3] == (500 + left, 64, words[0, 1])
            assert single[4:] == (segment, places[0, 0])
