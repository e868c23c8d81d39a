"""Large objects find a place wherever one can be made, and cost no more than they could use."""

from __future__ import annotations

import random

import numpy as np
import pytest

from mooncake_store.core.reads import extents_of
from mooncake_store.core.records import Flag, State, Status
from tests.core.lab import MIB, Lab

SEGMENT = 16 * MIB


def widest_gap(lab: Lab, segment: int) -> int:
    """The most bytes side by side between hard pins, looked for one pin after the other."""
    state = lab.shard
    live = np.flatnonzero(state.rows["state"][: state.table.rows_high] != State.FREE)
    pins = sorted(
        (offset, offset + int(state.rows["size"][row]))
        for row, where, offset in zip(*(c.tolist() for c in extents_of(state, live)), strict=True)
        if where == segment and state.rows["flags"][row] & Flag.HARD_PIN
    )
    begins = [0, *(end for _, end in pins)]
    ends = [*(begin for begin, _ in pins), SEGMENT]
    return max(end - begin for begin, end in zip(begins, ends, strict=True))


def fill(lab: Lab, chance: random.Random, pinned: float) -> None:
    sizes = (4096, 64 << 10, 100_000, 256 << 10, MIB)
    for key in range(400):
        hard = chance.random() < pinned
        rows, _ = lab.start([key], chance.choice(sizes), hard_pin=hard)
        if rows["status"][0] == Status.OK:
            lab.end([key], rows["generation"])


@pytest.mark.parametrize("seed", range(12))
def test_a_large_object_is_placed_where_one_place_can_be_made(seed: int) -> None:
    chance = random.Random(seed)
    lab = Lab(nbytes=SEGMENT, hard_pin_share=1.0)
    fill(lab, chance, pinned=chance.choice((0.02, 0.05, 0.1)))
    for key in range(1000, 1010):
        size = chance.randrange(SEGMENT // 64, SEGMENT // 2)
        gap = widest_gap(lab, lab.segments[0])
        before = lab.shard.stats().evicted_bytes
        rows, _ = lab.start([key], size)
        left = lab.shard.stats().evicted_bytes - before
        # Bytes as many in order of age, and then a place: objects stick out of each, 1 MiB at most.
        assert left <= 2 * size + 3 * MIB
        if size + 4096 <= gap:
            assert rows["status"][0] == Status.OK, (size, gap)
            lab.end([key], rows["generation"])
        elif size > gap:
            assert rows["status"][0] == Status.NO_SPACE
            assert left == 0


def test_what_is_leased_is_left_where_it_is() -> None:
    lab = Lab(nbytes=SEGMENT)
    lab.put(range(14), MIB)
    lab.get([6], ttl=100)
    rows, _ = lab.start([100], 8 * MIB)
    assert rows["status"][0] == Status.OK
    assert lab.exists([6]) == [True]
    rows, _ = lab.start([101], 9 * MIB)
    assert rows["status"][0] == Status.NO_SPACE


def test_replicas_get_a_place_each_or_nothing_leaves() -> None:
    lab = Lab(segments=2, nbytes=SEGMENT)
    for number in range(2):
        keys = range(100 * number, 100 * number + 14)
        lab.put(keys, MIB, preferred=(f"segment{number}",))
    lab.put([50], MIB // 2, hard_pin=True, preferred=("segment0",))
    lab.put([51], MIB // 2, hard_pin=True, preferred=("segment1",))
    before = lab.shard.stats().evicted_bytes
    rows, _ = lab.start([1000], 15 * MIB, replicas=2, replicas_min=2)
    assert rows["status"][0] == Status.NO_SPACE
    assert lab.shard.stats().evicted_bytes == before
    rows, _ = lab.start([1000], 12 * MIB, replicas=2, replicas_min=2)
    assert rows["status"][0] == Status.OK
    assert lab.exists([50, 51]) == [True, True]


def test_what_lies_in_two_places_leaves_once() -> None:
    lab = Lab(segments=2, nbytes=SEGMENT)
    lab.put(range(14), MIB, replicas=2, replicas_min=2)
    lab.get(range(0, 14, 2))  # so that what is coldest lies apart
    rows, _ = lab.start([1000], 9 * MIB, replicas=2, replicas_min=2)
    assert rows["status"][0] == Status.OK
    left = 14 - sum(lab.exists(range(14)))
    assert lab.shard.stats().evicted_objects == left


def test_a_group_leaves_whole_or_stays() -> None:
    lab = Lab(nbytes=SEGMENT)
    lab.put(range(12), MIB, groups=["together"] * 12)
    rows, _ = lab.start([100], 14 * MIB)
    assert rows["status"][0] == Status.OK
    assert lab.exists(range(12)) == [False] * 12
    lab.end([100], rows["generation"])
    lab.remove([100])
    lab.put(range(12), MIB, groups=["together"] * 12)
    lab.get([11], ttl=100)
    rows, _ = lab.start([101], 10 * MIB)
    assert rows["status"][0] == Status.NO_SPACE
    assert lab.exists(range(12)) == [True] * 12
