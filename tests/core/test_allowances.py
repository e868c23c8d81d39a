"""Limits of principals in the core: bytes, hard pins and groups of the namespaces they are for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_store.core.allowances import ORDERS_MAX, Allowance
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import Status as S
from tests.core.keeping import Kept
from tests.core.lab import MIB, Lab, digests_of

SIZE = MIB
NAMES = ("a", "b")


class Bounded:
    """A lab with a client that has an allowance of two namespaces, and one without."""

    def __init__(self, shards: int = 1, **limits: int) -> None:
        self.limits = limits
        self.lab = Lab(debug_integrity=True)
        self.a, self.b = (self.lab.shard.tenant(name) for name in NAMES)
        self.free = self.lab.open(2)
        self.allowance = Allowance(NAMES, self.limits, shards)
        self.lab.shard.allowances[self.lab.client] = self.allowance

    def start(self, keys: Any, size: Any = SIZE, **options: Any) -> list[S]:
        options = {"tenant": self.a, **options}
        return [S(each) for each in self.lab.start(keys, size, **options)[0]["status"].tolist()]

    def put(self, keys: Any, **options: Any) -> None:
        self.lab.put(keys, SIZE, **{"tenant": self.a, **options})

    def pin(self, keys: Any, client: int = -1) -> list[S]:
        client = self.lab.client if client < 0 else client
        out = self.lab.shard.set_hard_pin(self.lab.now, digests_of(keys), True, client)
        return [S(each) for each in out.tolist()]


def test_the_coldest_of_its_namespaces_give_way_and_nobody_elses() -> None:
    one = Bounded(bytes=4 * SIZE)
    one.put(range(50, 53), tenant=0, client=one.free)
    one.put([0, 1], tenant=one.b)
    one.put([2, 3])
    one.put([4])
    assert one.lab.exists(range(5)) == [True, True, False, True, True], "of this namespace first"
    one.put(range(5, 9))
    assert one.lab.exists(range(5)) == [False] * 5, "then of its others"
    assert one.lab.exists(range(50, 53)) == [True] * 3


@pytest.mark.parametrize("upsert", [False, True])
def test_what_cannot_give_way_is_refused_with_the_rest_of_its_batch(upsert: bool) -> None:
    one = Bounded(bytes=4 * SIZE)
    one.put([0, 1])
    one.lab.get([0, 1], ttl=10)
    statuses = one.start([2, 3, 4, 5], upsert=upsert)
    assert statuses == [S.OK, S.OK, S.LIMIT_BYTES, S.LIMIT_BYTES]


def test_an_object_larger_than_the_limit_harms_nobody() -> None:
    one = Bounded(bytes=4 * SIZE)
    one.put([0, 1])
    assert one.start([2], 5 * SIZE) == [S.LIMIT_BYTES]
    assert one.start([2], 3 * SIZE, replicas=2) == [S.LIMIT_BYTES], "every replica counts"
    assert one.lab.exists([0, 1]) == [True, True]


def test_what_others_put_there_counts_and_they_are_not_held_to_it() -> None:
    one = Bounded(bytes=2 * SIZE)
    one.put([0, 1, 2], client=one.free)
    one.lab.get([0, 1, 2], ttl=10)
    assert one.start([3]) == [S.LIMIT_BYTES]
    assert one.start([4], client=one.free) == [S.OK]


def test_a_replaced_object_makes_room_for_its_successor() -> None:
    one = Bounded(bytes=2 * SIZE)
    one.put([0, 1])
    one.lab.get([0, 1], ttl=10)
    assert one.start([2]) == [S.LIMIT_BYTES]
    one.lab.sleep(11)
    one.put([0], upsert=True)
    one.put([0], upsert=True)
    assert one.lab.exists([0]) == [True]


def test_a_shard_has_its_part_of_bytes_and_pins_and_all_groups() -> None:
    one = Bounded(shards=4, bytes=8 * SIZE, pins=4 * SIZE, groups=1)
    assert (one.allowance.bytes_most, one.allowance.pins_most) == (2 * SIZE, SIZE)
    assert one.start([0, 1, 2]) == [S.OK, S.OK, S.LIMIT_BYTES]
    assert one.allowance.groups_most == 1


def test_another_number_counts_at_once_and_none_means_any() -> None:
    one = Bounded(bytes=SIZE)
    assert one.start([0, 1]) == [S.OK, S.LIMIT_BYTES]
    one.limits["bytes"] = 2 * SIZE
    assert one.start([1, 2]) == [S.OK, S.LIMIT_BYTES]
    del one.limits["bytes"]
    assert one.start([2, 3]) == [S.OK, S.OK]


def test_pins_are_refused_beyond_the_limit_and_come_back_with_objects() -> None:
    one = Bounded(pins=2 * SIZE)
    one.put(range(4))
    assert one.pin(range(3)) == [S.OK, S.OK, S.LIMIT_PINS]
    assert one.start([9], hard_pin=True) == [S.LIMIT_PINS]
    assert one.pin([3], client=one.free) == [S.OK], "others are not held to it"
    assert one.allowance.pinned(one.lab.shard) == 3 * SIZE
    one.lab.remove([0, 1])
    assert one.start([8, 9], hard_pin=True) == [S.OK, S.LIMIT_PINS]


@pytest.mark.parametrize(("size", "kept"), [(1, True), (2, True), (3, False)])
def test_a_successor_keeps_a_pin_as_far_as_the_limit_goes(size: int, kept: bool) -> None:
    """Or who pins a byte and puts a larger object there would be limited by nothing."""
    one = Bounded(pins=2 * SIZE)
    one.put([0])
    assert one.pin([0]) == [S.OK]
    one.lab.put([0], size * SIZE, upsert=True, tenant=one.a)
    assert one.allowance.pinned(one.lab.shard) == size * SIZE * kept
    assert one.lab.stat(0).hard_pin == kept
    one.lab.put([1], SIZE, tenant=one.a, client=one.free, hard_pin=True)
    one.lab.put([1], 5 * SIZE, upsert=True, tenant=one.a, client=one.free)
    assert one.lab.stat(1).hard_pin, "others are not held to it"


def test_pins_outlive_the_client_that_set_them() -> None:
    one = Bounded(pins=2 * SIZE)
    one.put([0, 1])
    assert one.pin([0, 1]) == [S.OK, S.OK]
    one.lab.shard.close_client(one.lab.now, one.lab.client)
    one.lab.sleep(1)
    for _ in range(100):
        one.lab.tick()
    again = one.lab.open(9)
    one.lab.shard.allowances[again] = one.allowance
    assert one.start([2], client=again, hard_pin=True) == [S.LIMIT_PINS]


def test_groups_that_are_there_may_grow_and_new_ones_are_counted() -> None:
    one = Bounded(groups=2)
    put = one.start([0, 1, 2], groups=("x", "x", ""))
    assert put == [S.OK] * 3
    assert one.start([3, 4], groups=("x", "y")) == [S.OK] * 2
    assert one.start([5, 6], groups=("x", "z")) == [S.LIMIT_GROUPS] * 2, "whole, as it is one wish"
    assert one.start([7], groups=("z",), upsert=True, tenant=one.b) == [S.LIMIT_GROUPS]
    assert one.start([8], groups=("z",), tenant=0) == [S.LIMIT_GROUPS], "wherever it puts"
    assert one.start([9], groups=("z",), client=one.free) == [S.OK]


def test_a_group_whose_last_object_left_counts_no_more() -> None:
    one = Bounded(groups=1)
    one.put([0], groups=("x",))
    assert one.start([1], groups=("y",)) == [S.LIMIT_GROUPS]
    one.lab.remove([0])
    assert one.start([1], groups=("y",)) == [S.OK]


def test_the_next_client_of_a_handle_has_no_allowance() -> None:
    one = Bounded(bytes=SIZE)
    one.lab.shard.close_client(one.lab.now, one.lab.client)
    assert one.lab.shard.allowances == {}


def test_orders_of_eviction_are_bounded() -> None:
    one = Bounded(bytes=2 * SIZE)
    for number in range(ORDERS_MAX):
        one.lab.shard.tenant(f"quota{number}", 4 * SIZE)
    one.put([0, 1])
    assert one.start([2]) == [S.LIMIT_BYTES], "nothing was evicted for it"


@given(
    most=st.integers(1, 6),
    steps=st.lists(
        st.tuples(
            st.sampled_from(["put", "upsert", "pinned put", "remove", "pin"]),
            st.integers(0, 7),
            st.booleans(),
            st.integers(1, 3),
        ),
        max_size=25,
    ),
)
def test_nothing_it_does_goes_beyond_its_limits(
    most: int, steps: list[tuple[str, int, bool, int]]
) -> None:
    """Whatever it puts, replaces, pins and removes; integrity is checked after every step."""
    one = Bounded(bytes=most * SIZE, pins=2 * SIZE)
    for what, key, other, size in steps:
        if what == "remove":
            one.lab.remove([key])
        elif what == "pin":
            one.pin([key])
        else:
            options = {"upsert": what == "upsert", "hard_pin": what == "pinned put"}
            tenant = one.b if other else one.a
            rows, _ = one.lab.start([key], size * SIZE, tenant=tenant, **options)
            if rows["status"][0] == S.OK:
                one.lab.end([key], rows["generation"])
        assert one.allowance.used(one.lab.shard) <= most * SIZE
        assert one.allowance.pinned(one.lab.shard) <= 2 * SIZE


def test_what_counts_is_the_same_in_the_shard_that_is_made_of_its_words() -> None:
    """After a restart, on a standby: nothing of it is kept apart from the objects."""
    kept, lab = Kept(ShardConfig(debug_integrity=True)), Lab(segments=0)
    lab.shard = kept.shard
    lab.client = lab.open(1)
    lab.mount(0)
    for number, name in enumerate(NAMES):
        tenant, keys = kept.shard.tenant(name), (2 * number, 2 * number + 1)
        lab.put(keys, SIZE, tenant=tenant, hard_pin=True, groups=("x", f"y{number}"))
    after, _ = kept.again(lab.now)
    allowance = Allowance(NAMES, {}, shards=1)
    assert allowance.used(after) == allowance.pinned(after) == 4 * SIZE
    assert allowance.groups(after) == 4
