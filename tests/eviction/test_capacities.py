"""Every capacity in one pass: the least capacities count what `count_hits` counts."""

import numpy as np
import pytest
from hypothesis import given, settings

from eviction import count_hits, synthetic_trace
from eviction.capacities import least_capacities
from eviction.kernels import capacities
from tests.eviction.test_simulate import columns, tries


def hits_at(needs, capacity):
    return int(np.count_nonzero((needs > 0) & (needs <= capacity)))


@settings(max_examples=150, deadline=None)
@given(requests=tries())
def test_at_every_capacity_hits_are_those_of_a_replay(requests):
    ids, offsets = columns(requests)
    needs = least_capacities(ids, offsets)
    for capacity in range(1, int(ids.max(initial=0)) + 3):
        assert hits_at(needs, capacity) == count_hits(ids, offsets, "lru", capacity).hits


def test_hits_of_a_long_trace_are_those_of_a_replay_also_where_prompts_exceed_the_pool():
    trace = synthetic_trace(1500, seed=5)
    needs = least_capacities(trace.ids, trace.offsets)
    assert int(np.diff(trace.offsets).max()) > 30
    for capacity in (1, 2, 7, 30, 300, 3000, 30_000):
        count = count_hits(trace.ids, trace.offsets, "lru", capacity)
        assert hits_at(needs, capacity) == count.hits


def test_a_block_needs_what_the_blocks_before_it_need():
    # Between the two uses of 0 and 1 come 2 and 3; of the last request 4 is new, and ends it.
    ids, offsets = columns([[0, 1], [2, 3], [1], [0, 1], [0, 4, 1]])
    assert least_capacities(ids, offsets).tolist() == [0, 0, 0, 0, 4, 4, 4, 1, 0, 0]


def test_kernels_count_the_same_without_a_compiler():
    ids, offsets = columns([[0, 1, 2], [0, 3], [0, 1, 2], [3], [0, 1]])
    needs = np.zeros(len(ids), np.int64)
    places, tree = np.zeros(4, np.int32), np.zeros(len(ids) + 1, np.int32)
    capacities.least_capacities.py_func(ids, offsets, places, tree, needs)
    assert needs.tolist() == least_capacities(ids, offsets).tolist()
    assert capacities.before.py_func(tree, len(tree)) == 4
    capacities.add.py_func(tree, 1, 1)
    assert capacities.before.py_func(tree, len(tree)) == 5


def test_what_is_no_trace_is_refused():
    with pytest.raises(ValueError, match="offsets must rise"):
        least_capacities(np.arange(3), np.array([0, 2]))
    with pytest.raises(ValueError, match="0 or more"):
        least_capacities(np.array([0, -1]), np.array([0, 2]))


def test_a_trace_of_nothing_needs_nothing():
    assert least_capacities(np.zeros(0, np.int64), np.zeros(1, np.int64)).tolist() == []


def test_warmup_leaves_nothing_to_compile():
    capacities.warmup()
    before = [len(each.signatures) for each in (capacities.least_capacities, capacities.add)]
    trace = synthetic_trace(10)
    least_capacities(trace.ids, trace.offsets)
    assert before == [
        len(each.signatures) for each in (capacities.least_capacities, capacities.add)
    ]
