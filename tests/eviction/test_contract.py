"""The shared contract, once per policy, compiled; and what each policy adds to it."""

import gc

import numpy as np
import pytest

from eviction import POLICIES, STORE_POLICIES, create_policy
from eviction.opt import OptPolicy
from eviction.testing import EvictionPolicyContract


class TestLru(EvictionPolicyContract):
    def make(self, capacity_ids):
        return create_policy("lru", capacity_ids)


class TestFifo(EvictionPolicyContract):
    def make(self, capacity_ids):
        return create_policy("fifo", capacity_ids)


class TestSieve(EvictionPolicyContract):
    def make(self, capacity_ids):
        return create_policy("sieve", capacity_ids)


class TestLfu(EvictionPolicyContract):
    def make(self, capacity_ids):
        return create_policy("lfu", capacity_ids)


class TestLfuPerfect(EvictionPolicyContract):
    def make(self, capacity_ids):
        return create_policy("lfu_perfect", capacity_ids)


class TestLengthAware(EvictionPolicyContract):
    def make(self, capacity_ids):
        return create_policy("length_aware", capacity_ids)


class TestOpt(EvictionPolicyContract):
    def make(self, capacity_ids):
        return create_policy("opt", capacity_ids)


def order(policy):
    return policy.coldest(len(policy)).tolist()


def test_every_policy_has_a_name_and_the_store_gets_no_oracle():
    for name in POLICIES:
        assert create_policy(name, 4).name == name
    assert set(STORE_POLICIES) == set(POLICIES) - {"opt", "lfu_perfect"}


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"'lengthaware'.*did you mean 'length_aware'"):
        create_policy("lengthaware", 4)


def test_lru_touch_moves_to_the_hot_end():
    policy = create_policy("lru", 8)
    policy.insert(np.arange(4))
    policy.touch(np.array([1, 0, 1]))
    assert order(policy) == [2, 3, 0, 1]


def test_fifo_ignores_uses():
    policy = create_policy("fifo", 8)
    policy.insert(np.arange(3))
    policy.touch(np.array([0, 0]))
    policy.insert(np.array([0]))
    assert order(policy) == [0, 1, 2]


def test_lfu_forgets_the_count_of_what_was_removed_and_perfect_does_not():
    for name, expected in (("lfu", [0, 1]), ("lfu_perfect", [1, 0])):
        policy = create_policy(name, 8)
        policy.insert(np.array([0]))
        policy.touch(np.array([0, 0]))
        policy.remove(np.array([0]))
        policy.insert(np.array([0, 1]))
        assert order(policy) == expected


def test_length_aware_lets_the_later_block_go_first_among_equal_counts():
    policy = create_policy("length_aware", 8)
    policy.insert(np.arange(5), np.array([0, 1, 2, 1, 90_000], dtype=np.int32))
    assert order(policy) == [4, 2, 1, 3, 0]
    policy.touch(np.array([4, 2]))
    assert order(policy) == [1, 3, 0, 4, 2]


def test_length_aware_refuses_depths_of_another_length():
    policy = create_policy("length_aware", 8)
    with pytest.raises(ValueError, match="3 ids came with 2 depths"):
        policy.insert(np.arange(3), np.zeros(2, dtype=np.int32))
    assert len(policy) == 0


def test_length_aware_counts_saturate_and_then_recency_decides():
    policy = create_policy("length_aware", 4)
    policy.insert(np.array([0, 1]))
    policy.touch(np.repeat(np.array([1, 0]), 5000))
    assert order(policy) == [1, 0]
    policy.touch(np.array([1]))
    assert order(policy) == [0, 1]
    policy.check_integrity()


def test_sieve_spares_what_was_used_once_per_round():
    policy = create_policy("sieve", 16)
    policy.insert(np.arange(6))
    policy.touch(np.array([0, 1, 3]))
    assert order(policy) == [2, 4, 5, 0, 1, 3]
    policy.remove(policy.victims(2))
    # The hand stands after 4 and cleared 0, 1 and 3 on its way; 5 and what is new come first.
    policy.insert(np.array([7, 8]))
    assert order(policy) == [5, 7, 8, 0, 1, 3]


def test_sieve_hand_does_not_follow_ids_removed_for_other_reasons():
    policy = create_policy("sieve", 16)
    policy.insert(np.arange(6))
    policy.touch(np.array([0]))
    policy.victims(1)
    policy.remove(np.array([4]))
    policy.touch(np.array([1]))
    assert order(policy) == [2, 3, 5, 0, 1]


def test_opt_lets_the_furthest_next_use_go_first():
    future = np.array([0, 1, 2, 3, 2, 1, 0, 1])
    policy = OptPolicy(4, future)
    policy.insert(np.arange(4))
    assert order(policy) == [3, 0, 1, 2]
    policy.touch(np.array([2, 1]))
    assert order(policy) == [3, 2, 1, 0]


def test_opt_refuses_a_future_it_cannot_hold():
    with pytest.raises(ValueError, match="future"):
        OptPolicy(4, np.array([4]))


def test_reserving_room_for_many_ids_costs_no_memory():
    def resident_kib():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4

    create_policy("lru", 16).insert(np.arange(1))
    gc.collect()
    before = resident_kib()
    policies = [create_policy(name, 100_000_000) for name in ("lru", "lfu", "sieve")]
    for policy in policies:
        policy.insert(np.arange(1000))
    assert resident_kib() - before < 64 * 1024
