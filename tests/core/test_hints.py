"""Hints: what each asks for, what becomes of it, and what leaves when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from eviction.testing import EvictionPolicyContract
from mooncake_store.core.options import CLIPPED, HintAction, Offload, ShardConfig, SoftPin
from mooncake_store.core.pinned import PinnedOrder
from mooncake_store.core.records import Status as S
from mooncake_store.core.records import Tier
from mooncake_store.core.state import as_words
from tests.core.keeping import Kept, assert_same
from tests.core.lab import MIB, SECOND, Lab, digests_of
from tests.core.test_eviction import SIZE, gone
from tests.core.test_repair import missing, pass_time, replicas
from tests.core.test_tasks import where

if TYPE_CHECKING:
    from collections.abc import Sequence

PIN, RETAIN, PREFETCH, DEMOTE, SHARE = HintAction


def hint(
    lab: Lab, keys: Sequence[int], action: HintAction, priority: int = 0, ttl: float | None = None
) -> list[int]:
    ttl_ns = None if ttl is None else int(ttl * SECOND)
    out = lab.shard.hint(lab.now, 0, digests_of(keys), action, priority, ttl_ns)
    lab.check()
    return [int(status) for status in out]


def row_of(lab: Lab, key: int) -> int:
    return int(lab.shard.table.find(as_words(digests_of([key])))[0])


@pytest.mark.parametrize("action", HintAction)
def test_what_cannot_be_read_is_missing(action: HintAction) -> None:
    lab = Lab(segments=2)
    other = lab.shard.tenant("other")
    lab.put([1])
    lab.put([2], tenant=other)
    lab.start([3])
    lab.start([4], tenant=other)
    priority = 1 if action == PIN else 0
    statuses = [S.OK, S.NOT_FOUND, S.NOT_READY, S.NOT_FOUND, S.NOT_FOUND, S.OK]
    assert hint(lab, [1, 2, 3, 4, 5, 1], action, priority) == statuses
    assert hint(lab, [], action, priority) == []


@pytest.mark.parametrize(
    ("action", "priority", "ttl"), [(PIN, 0, None), (PIN, 4, 1), (RETAIN, 4, 1), (RETAIN, 1, 0)]
)
def test_a_hint_that_means_nothing_is_refused(
    action: HintAction, priority: int, ttl: float | None
) -> None:
    lab = Lab()
    lab.put([1])
    assert hint(lab, [1], action, priority, ttl) == [S.INVALID_PARAMS]
    assert lab.shard.stats().soft_pinned == 0


def test_the_lower_priority_leaves_first_and_the_coldest_of_equals() -> None:
    lab = Lab()
    lab.put(range(20), SIZE)
    for priority, keys in ((3, [0, 1]), (1, [2, 3]), (2, [5, 4])):
        assert hint(lab, keys, PIN, priority, 60) == [S.OK] * 2
    lab.put([20], SIZE, soft_pin=SoftPin.ENABLE)
    order: list[int] = []
    while len(order) < 21:
        assert lab.evict(1e-9, floor=1e-9).objects == 1
        order += [key for key in gone(lab, range(21)) if key not in order]
    assert order == [*range(6, 20), 2, 3, 20, 5, 4, 0, 1]


def test_a_pin_takes_the_place_of_the_one_before() -> None:
    lab = Lab()
    lab.put([1, 2])
    assert hint(lab, [1], PIN, 3, 600) == [S.OK]
    assert hint(lab, [1], PIN, 1, 60) == [S.OK]
    assert lab.stat(1).soft_pin_ns == 60 * SECOND
    assert hint(lab, [2], PIN, 2, 60) == [S.OK]
    assert lab.evict(0.5, floor=0.5).objects == 1
    assert gone(lab, range(1, 3)) == [1]


def test_to_retain_lowers_nothing() -> None:
    lab = Lab()
    lab.put([1, 2])
    assert hint(lab, [1], PIN, 3, 600) == [S.OK]
    assert hint(lab, [1, 2], RETAIN, 1, 60) == [S.OK] * 2
    assert [lab.stat(key).soft_pin_ns for key in (1, 2)] == [600 * SECOND, 60 * SECOND]
    assert lab.evict(0.5, floor=0.5).objects == 1
    assert gone(lab, range(1, 3)) == [2]


def test_to_retain_without_a_priority_is_a_use_in_the_order_of_the_request() -> None:
    lab = Lab()
    lab.put(range(10), SIZE)
    assert hint(lab, [3, 1, 3, 0], RETAIN) == [S.OK] * 4
    assert lab.stat(3).hits == 0
    order: list[int] = []
    while len(order) < 10:
        lab.evict(1e-9)
        order += [key for key in gone(lab, range(10)) if key not in order]
    assert order == [2, 4, 5, 6, 7, 8, 9, 3, 1, 0]


def test_a_longer_pin_than_there_may_be_is_clipped() -> None:
    lab = Lab(soft_pin_ttl_ns=30 * SECOND, soft_pin_ttl_max_ns=100 * SECOND)
    lab.put([1, 2, 3])
    assert hint(lab, [1], PIN, 1, 100) == [S.OK]
    assert hint(lab, [2], PIN, 1, 101) == [CLIPPED]
    assert hint(lab, [3], PIN, 1) == [S.OK]
    assert [lab.stat(key).soft_pin_ns // SECOND for key in (1, 2, 3)] == [100, 100, 30]
    assert hint(lab, [1], RETAIN, 1, 10**9) == [CLIPPED]


def test_after_the_pin_an_object_is_ordinary_again() -> None:
    lab = Lab()
    lab.put([1, 2])
    hint(lab, [1], PIN, 3, 5)
    lab.sleep(5.1)
    lab.tick()
    assert lab.stat(1).soft_pin_ns == 0
    lab.put([3], soft_pin=SoftPin.ENABLE)
    assert lab.evict(0.67).objects == 2
    assert gone(lab, range(1, 4)) == [1, 2]
    lab.put([1, 2], soft_pin=SoftPin.ENABLE)
    lab.evict(0.3, floor=0.3)
    assert gone(lab, range(1, 4)) == [3]  # what was pinned high before has no rest of that


def test_who_prolongs_a_pin_all_day_leaves_no_entry_behind_each_time() -> None:
    lab = Lab()
    lab.put([1])
    ends = []
    for _ in range(50):
        hint(lab, [1], RETAIN, 1, 10)
        ends.append(len(lab.shard.soft_ends))
        lab.sleep(1)
        lab.tick()
    assert max(ends) <= 2
    lab.sleep(8)
    lab.tick()
    assert lab.shard.stats().soft_pinned == 1
    lab.sleep(1.1)
    lab.tick()
    assert lab.shard.stats().soft_pinned == 0


def test_a_pin_that_is_shortened_ends_sooner() -> None:
    lab = Lab()
    lab.put([1])
    hint(lab, [1], PIN, 2, 600)
    hint(lab, [1], PIN, 2, 5)
    lab.sleep(5.1)
    lab.tick()
    assert lab.shard.stats().soft_pinned == 0


def test_an_upsert_keeps_the_priority_and_a_pin_of_its_own_has_another() -> None:
    lab = Lab()
    lab.put([1, 2, 3])
    hint(lab, [1, 2], PIN, 3, 600)
    hint(lab, [3], PIN, 2, 600)
    lab.put([1], upsert=True)
    lab.put([2], upsert=True, soft_pin=SoftPin.ENABLE)
    assert lab.shard.cold["pin_level"][[row_of(lab, key) for key in (1, 2, 3)]].tolist() == [
        2,
        0,
        1,
    ]


def test_hints_of_hard_pinned_objects_wait_for_the_end_of_that_pin() -> None:
    lab = Lab()
    lab.put([1, 2, 3])
    lab.shard.set_hard_pin(lab.now, digests_of([1]), True)
    assert hint(lab, [1], RETAIN) == [S.OK]
    assert hint(lab, [1], PIN, 3, 60) == [S.OK]
    assert hint(lab, [2], PIN, 1, 60) == [S.OK]
    lab.evict(1.0, floor=0.0)
    assert gone(lab, range(1, 4)) == [3]
    lab.shard.set_hard_pin(lab.now, digests_of([1]), False)
    lab.evict(0.5, floor=0.5)
    assert gone(lab, range(1, 3)) == [2]


# Demotion


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "length_aware", "sieve"])
def test_what_nobody_needs_soon_leaves_first_whatever_the_policy(policy: str) -> None:
    lab = Lab(eviction_policy=policy)
    lab.put(range(10), SIZE)
    for _ in range(3):
        lab.get(range(4, 10))
    assert hint(lab, [7, 5, 9], DEMOTE) == [S.OK] * 3
    lab.evict(0.2)
    assert gone(lab, range(10)) == [5, 7]
    lab.get([9])
    lab.evict(0.25)
    assert lab.exists([9]) == [True]


def test_what_is_used_again_leaves_as_if_there_had_been_no_hint() -> None:
    lab = Lab()
    lab.put(range(10), SIZE)
    hint(lab, [5, 6, 7], DEMOTE)
    lab.get([5])
    hint(lab, [6], RETAIN)
    lab.put([7], SIZE, upsert=True)
    lab.evict(0.7)
    assert gone(lab, range(10)) == [0, 1, 2, 3, 4, 8, 9]


def test_a_pin_of_somebody_counts_for_more_than_a_demotion() -> None:
    lab = Lab()
    lab.put(range(10), SIZE)
    hint(lab, [8], PIN, 1, 60)
    lab.shard.set_hard_pin(lab.now, digests_of([9]), True)
    assert hint(lab, [9, 7, 8, 99, 7], DEMOTE) == [S.PINNED, S.OK, S.PINNED, S.NOT_FOUND, S.OK]
    hint(lab, [7], PIN, 1, 60)
    lab.evict(0.7)
    assert gone(lab, range(10)) == list(range(7))


def test_what_nobody_needs_soon_and_cannot_leave_yet_makes_others_leave() -> None:
    lab = Lab()
    lab.put(range(10), SIZE)
    hint(lab, [8, 9], DEMOTE)
    generation = lab.shard.rows["generation"][[row_of(lab, 9)]]
    lab.renew([9], generation, ttl=1)
    lab.evict(0.3)
    assert gone(lab, range(10)) == [0, 1, 8]
    lab.sleep(2)
    lab.evict(0.1)
    assert gone(lab, range(10)) == [0, 1, 8, 9]


def test_a_put_that_needs_room_takes_it_from_what_nobody_needs_soon() -> None:
    lab = Lab(nbytes=4 * MIB)
    lab.put(range(1000), SIZE)
    hint(lab, range(900, 1000), DEMOTE)
    lab.put(range(1000, 1050), SIZE)
    assert min(gone(lab, range(1000))) >= 900


def with_disk(nbytes: int = 16 * MIB, **config: Any) -> tuple[Lab, int]:
    """A shard with a segment in memory and one on a disk: (lab, number of the latter)."""
    lab = Lab(nbytes=nbytes, **config)
    return lab, lab.mount(9, 64 * MIB, tier=Tier.DISK)


def haul(lab: Lab) -> int:
    """Have the worker do all hauls; returns how many objects they had."""
    count = 0
    tiers = lab.shard.space.tiers
    (disk,) = np.flatnonzero(tiers == Tier.DISK).tolist()
    for each in lab.shard.fetch_hauls(lab.now, lab.client, disk, 100):
        count += len(each.rows)
        arrived = np.zeros(len(each.rows), np.int16)
        assert lab.shard.finish_haul(lab.now, lab.client, each.number, arrived) == S.OK
    lab.check()
    return count


def test_what_is_demoted_goes_to_a_disk_and_comes_back_with_a_prefetch() -> None:
    lab, disk = with_disk()
    lab.put(range(6), SIZE)
    assert hint(lab, range(4), DEMOTE) == [S.OK] * 4
    assert hint(lab, range(2), DEMOTE) == [S.OK] * 2  # on their way
    assert haul(lab) == 4
    assert [where(lab, key) for key in (0, 5)] == [{disk}, set(lab.segments)]
    assert hint(lab, range(6), DEMOTE) == [S.OK] * 6
    assert haul(lab) == 2
    assert hint(lab, [0, 1], PREFETCH) == [S.OK] * 2
    assert hint(lab, [1, 2], PREFETCH) == [S.OK] * 2
    assert haul(lab) == 3
    both = {disk, *lab.segments}
    assert [where(lab, key) for key in range(4)] == [both, both, both, {disk}]
    assert hint(lab, [0], PREFETCH) == [S.OK]
    assert hint(lab, [0], DEMOTE) == [S.OK]
    assert haul(lab) == 0  # it lies there: its place in memory goes when there is need of it


def test_a_pin_keeps_what_is_to_be_demoted_in_memory() -> None:
    lab, _ = with_disk()
    lab.put([0, 1], SIZE)
    hint(lab, [0], PIN, 1, 60)
    lab.shard.set_hard_pin(lab.now, digests_of([1]), True)
    assert hint(lab, [0, 1], DEMOTE) == [S.PINNED] * 2
    assert haul(lab) == 0


def test_where_nothing_is_offloaded_what_is_demoted_only_leaves_first() -> None:
    lab, _ = with_disk(offload=Offload.NONE)
    lab.put(range(10), SIZE)
    assert hint(lab, [8, 9], DEMOTE) == [S.OK] * 2
    assert haul(lab) == 0
    lab.evict(0.2)
    assert gone(lab, range(10)) == [8, 9]


def test_a_prefetch_takes_spare_room_only() -> None:
    lab, _ = with_disk(nbytes=MIB)
    lab.put(range(4), 100_000)
    hint(lab, range(4), DEMOTE)
    assert haul(lab) == 4
    lab.put(range(10, 18), 100_000)
    assert hint(lab, [0, 10, 1], PREFETCH) == [S.NO_SPACE, S.OK, S.NO_SPACE]
    assert haul(lab) == 0


# One replica more


def test_one_replica_more_is_made_and_kept() -> None:
    lab = Lab(segments=3)
    lab.put(range(10))
    assert hint(lab, [1, 2, 1], SHARE) == [S.OK] * 3
    assert hint(lab, [2], SHARE) == [S.OK]  # until it is made it is the same one
    assert missing(lab) == 2
    assert pass_time(lab, 1) == 2
    assert replicas(lab, range(4)) == [1, 2, 2, 1]
    assert hint(lab, [2], SHARE) == [S.OK]
    assert pass_time(lab, 2) == 1
    assert replicas(lab, range(4)) == [1, 2, 3, 1]
    assert hint(lab, [2], SHARE) == [S.NO_SPACE]
    lost = next(iter(where(lab, 2)))
    lab.shard.unmount(lab.now, lab.client, lab.uuid(lab.segments.index(lost)))
    assert hint(lab, [2], SHARE) == [S.NO_SPACE]
    lab.mount(7)
    pass_time(lab, 2)
    assert len(where(lab, 2)) == 3


def test_no_replica_is_promised_where_there_is_no_spare_room() -> None:
    lab = Lab(segments=1)
    lab.put([0])
    assert hint(lab, [0], SHARE) == [S.NO_SPACE]
    lab = Lab(segments=2, nbytes=4 * MIB)
    lab.put(range(3), MIB, preferred=("segment1",))
    lab.put([3], MIB, preferred=("segment0",))
    # Copies may fill 3.4 MiB of 4, and none is made where a replica lies.
    assert hint(lab, [3], SHARE) == [S.NO_SPACE]
    assert hint(lab, [0, 1, 2], SHARE) == [S.OK, S.OK, S.NO_SPACE]
    assert missing(lab) == 2


def test_a_replica_more_of_what_left_memory_is_made_on_another_disk() -> None:
    lab, disk = with_disk()
    lab.put([0, 1], SIZE)
    hint(lab, [0], DEMOTE)
    assert haul(lab) == 1
    assert hint(lab, [0, 1], SHARE) == [S.NO_SPACE, S.OK]
    other = lab.mount(10, 64 * MIB, tier=Tier.DISK)
    assert hint(lab, [0], SHARE) == [S.OK]
    assert pass_time(lab, 2) == 2
    assert where(lab, 0) == {disk, other}
    assert len(where(lab, 1)) == 2


def test_replicas_to_be_made_are_within_the_quota_and_bounded() -> None:
    lab = Lab(segments=2, tasks_max=6)
    lab.shard.tenant("default", 10 * SIZE)
    lab.put(range(9), SIZE)
    assert hint(lab, range(9), SHARE) == [S.OK] + [S.TENANT_QUOTA] * 2 + [S.TASK_LIMIT] * 6
    lab.shard.tenant("default", 100 * SIZE)
    assert hint(lab, range(9), SHARE) == [S.OK] * 3 + [S.TASK_LIMIT] * 6
    assert missing(lab) == 3


# What is written down


def test_priorities_and_further_replicas_outlive_a_restart() -> None:
    kept = Kept(ShardConfig(objects_max=4096, segments_max=8))
    lab = Lab(segments=0)
    lab.shard = kept.shard
    lab.client = lab.open(1)
    lab.segments = [lab.mount(number) for number in range(2)]
    lab.put(range(6))
    hint(lab, [0, 1], PIN, 3, 600)
    hint(lab, [2], PIN, 2, 600)
    hint(lab, [3], PIN, 1, 600)
    hint(lab, [4], SHARE)
    lab.tick()
    after, _ = kept.again(lab.now)
    assert_same(kept.shard, after)
    lab.shard = after
    assert missing(lab) == 1
    lab.evict(0.66, floor=0.66)
    assert gone(lab, range(6)) == [2, 3, 4, 5]


class TestPinnedOrder(EvictionPolicyContract):
    """With one level: an LRU."""

    def make(self, capacity_ids: int) -> PinnedOrder:
        """A new one."""
        return PinnedOrder(capacity_ids, np.zeros(max(1, min(capacity_ids, 1 << 20)), np.uint8))


class TestPinnedOrderOfLevels(EvictionPolicyContract):
    """With several, all in use, and what the contract inserts in one of them."""

    def make(self, capacity_ids: int) -> PinnedOrder:
        """A new one, in which each level has been used."""
        levels = np.full(max(1, min(capacity_ids, 1 << 20)), 1, np.uint8)
        made = PinnedOrder(capacity_ids, levels)
        for level in (2, 0, 1):
            levels[0] = level
            made.insert(np.zeros(1, np.int64))
            made.remove(np.zeros(1, np.int64))
        return made


def test_levels_come_one_after_the_other_and_a_walk_goes_through_all() -> None:
    levels = np.array([2, 0, 1, 0, 2, 1], np.uint8)
    order = PinnedOrder(6, levels)
    order.insert(np.arange(6))
    assert order.coldest(9).tolist() == [1, 3, 2, 5, 0, 4]
    assert order.victims(3).tolist() == [1, 3, 2]
    order.touch(np.array([1, 0]))
    assert order.coldest(6).tolist() == [3, 1, 2, 5, 4, 0]
