"""Objects go from memory to disks and back: by whom, when, and what becomes of those in between."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from mooncake_store.core.options import HintAction, Offload, ShardConfig, SoftPin
from mooncake_store.core.records import Status as S
from mooncake_store.core.records import Tier
from tests.core.keeping import assert_same
from tests.core.lab import MIB, SECOND, digests_of
from tests.core.worlds import DAMAGED, World

SIZE = 16_384
MEMORY, DISK = {Tier.MEMORY}, {Tier.DISK}
BOTH = MEMORY | DISK
QUICK = 1_000_000


def world(memory: int = MIB, disk: int = 8 * MIB, **config: Any) -> World:
    """A pool of one segment in memory and one on a disk."""
    made = World(random.Random(1), ShardConfig(objects_max=4096, segments_max=8, **config))
    if memory:
        made.mount("memory", memory, Tier.MEMORY)
    if disk:
        made.mount("disk", disk, Tier.DISK)
    return made


def rows_of(pool: World, *keys: int) -> Any:
    return pool.shard.table.find(digests_of(keys).view(np.int64))


def lay_down(pool: World, key: int, *, keep: bool = False) -> None:
    """Have an object go to the disk."""
    assert pool.shard.hauls.demote(rows_of(pool, key), keep=keep) == 1
    assert pool.work() == 1
    assert pool.tiers(key) == (BOTH if keep else DISK)


def fill(pool: World, count: int, first: int = 0) -> list[int]:
    """Put objects, with pauses in which the worker does what there is."""
    keys = list(range(first, first + count))
    for key in keys:
        assert pool.put(key, SIZE) == S.OK
        pool.pass_time(QUICK)
        pool.work()
    return keys


def test_a_pool_holds_what_its_disks_hold() -> None:
    pool = world()
    keys = fill(pool, 300)  # nearly five times the memory
    pool.check()
    assert all(pool.get(key) for key in keys)
    assert pool.tiers(0) == DISK
    assert pool.tiers(299) == MEMORY
    stats = pool.shard.stats()
    assert (stats.evicted_objects, stats.lost_objects) == (0, 0)
    assert stats.demoted_objects == sum(pool.tiers(key) == DISK for key in keys)
    assert stats.demoted_bytes == stats.demoted_objects * SIZE
    assert (stats.disk_total, stats.disk_allocated) == (8 * MIB, stats.demoted_bytes)
    assert stats.bytes_total == 9 * MIB


@pytest.mark.parametrize("disk", [0, 8 * MIB])
def test_what_leaves_memory_is_gone_where_there_is_no_disk_or_it_is_not_wanted(disk: int) -> None:
    pool = world(disk=disk, offload=Offload.NONE)
    keys = fill(pool, 100)
    assert not pool.get(0)
    assert pool.get(99)
    assert sum(pool.get(key) for key in keys) < MIB // SIZE


def test_a_full_disk_gives_up_its_coldest() -> None:
    pool = world(disk=2 * MIB, promotion_hits=0)
    fill(pool, 250)
    pool.check()
    left = [key for key in range(250) if pool.get(key)]
    assert left == list(range(250 - len(left), 250))
    assert len(left) > 2 * MIB * 0.8 / SIZE
    assert pool.shard.stats().evicted_objects == 250 - len(left)


def test_a_read_of_the_disk_keeps_an_object_there() -> None:
    pool = world(disk=2 * MIB, promotion_hits=0)
    fill(pool, 100)
    assert pool.tiers(0) == DISK
    for batch in range(3):
        assert pool.get(0, 1)
        fill(pool, 40, 100 + 40 * batch)
    assert pool.get(0)
    assert not pool.get(1)


def test_what_waits_for_a_worker_is_not_evicted_meanwhile_and_counts_once() -> None:
    """Else relief would evict for the same bytes at each tick until the disk has them."""
    pool = world()
    for key in range(62):
        pool.put(key, SIZE)
    pool.pass_time(QUICK)
    begun = len(pool.shard.hauls)
    assert begun > 0
    for _ in range(10):
        pool.pass_time(QUICK)
    assert len(pool.shard.hauls) == begun
    assert pool.shard.stats().evicted_objects == 0
    assert pool.work() == begun
    assert all(pool.get(key) for key in range(62))


def test_who_needs_room_at_once_waits_for_no_disk() -> None:
    pool = world()
    for key in range(200):
        assert pool.put(key, SIZE) == S.OK
    pool.check()
    assert pool.shard.stats().evicted_objects > 100


def test_who_needs_room_at_once_has_first_what_lies_on_a_disk_too() -> None:
    pool = world()
    for key in range(60):
        pool.put(key, SIZE)
    for key in range(40, 50):  # not the coldest
        lay_down(pool, key, keep=True)
    while pool.shard.stats().demoted_objects == 0:
        assert pool.put(100 + len(pool.objects), SIZE) == S.OK
    assert pool.shard.stats().evicted_objects == 0
    assert pool.tiers(40) == DISK
    assert pool.tiers(0) == MEMORY


def test_a_lease_holds_the_space_of_what_has_moved() -> None:
    pool = world()
    pool.put(1, SIZE)
    assert pool.get(1, 5 * SECOND)
    lay_down(pool, 1)
    assert pool.shard.stats().quarantined_bytes == SIZE
    for key in range(10, 60):
        pool.put(key, SIZE)
    pool.check()  # the reader as well
    pool.pass_time(6 * SECOND)
    assert pool.shard.stats().quarantined_bytes == 0


def test_what_did_not_arrive_stays_where_it_was() -> None:
    pool = world()
    for key in range(4):
        pool.put(key, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 0, 1, 2, 3)) == 4
    pool.fetch()
    (haul,) = pool.running
    assert pool.carry(haul, [0, -5, 0, -801]) == S.OK
    assert [pool.tiers(key) for key in range(4)] == [DISK, MEMORY, DISK, MEMORY]
    pool.check()
    assert pool.shard.stats().disk_allocated == 2 * SIZE


@pytest.mark.parametrize("change", ["remove", "upsert", "move away"])
def test_who_wants_something_else_of_an_object_does_not_wait_for_its_haul(change: str) -> None:
    pool = world()
    pool.put(1, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1)) == 1
    pool.fetch()
    (haul,) = pool.running
    if change == "remove":
        assert pool.remove(1) == S.OK
    elif change == "upsert":
        assert pool.put(1, SIZE, upsert=True) == S.OK
    else:
        pool.shard.rename(pool.now, digests_of([1]), digests_of([2]))
        pool.objects[2] = pool.objects.pop(1)
    # Where the worker still writes nobody else does.
    assert pool.shard.stats().quarantined_bytes == SIZE
    assert pool.put(3, 7 * MIB) == S.OK  # fills most of the disk
    pool.copy(haul, [0])
    pool.check()
    assert pool.carry(haul) == S.OK
    assert pool.shard.stats().quarantined_bytes == 0
    pool.check()


def test_a_haul_that_was_not_told_yet_leaves_nothing_to_wait_for() -> None:
    pool = world()
    pool.put(1, SIZE)
    pool.put(2, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1, 2)) == 2
    assert pool.remove(1) == S.OK
    assert pool.shard.stats().quarantined_bytes == 0
    pool.fetch()
    assert len(pool.running[0].sizes) == 1
    assert pool.work() == 1
    assert pool.tiers(2) == DISK


def test_a_worker_that_is_late_harms_nobody() -> None:
    pool = world(disk=MIB)
    pool.put(1, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1)) == 1
    pool.fetch()
    (haul,) = pool.running
    pool.pass_time(61 * SECOND)
    assert len(pool.shard.hauls) == 0
    assert pool.tiers(1) == MEMORY
    assert pool.shard.stats().quarantined_bytes == SIZE
    pool.running = []
    lay_down(pool, 1)
    pool.running = [haul]
    pool.copy(haul, [0])
    pool.check()
    assert pool.carry(haul) == S.TASK_NOT_FOUND
    assert pool.shard.stats().quarantined_bytes == 0  # he says himself that he is done


def test_a_haul_is_told_again_until_it_is_finished_and_only_to_its_worker() -> None:
    pool = world()
    other = pool.shard.open_client(pool.now, b"o" * 16, 1)
    pool.put(1, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1)) == 1
    assert pool.shard.fetch_hauls(pool.now, other, *pool.devices()) == []
    (haul,) = pool.shard.fetch_hauls(pool.now, pool.client, *pool.devices())
    assert pool.shard.fetch_hauls(pool.now, pool.client, *pool.devices()) == [haul]
    done = np.zeros(1, np.int16)
    assert pool.shard.finish_haul(pool.now, other, haul.number, done) == S.ILLEGAL_CLIENT
    several = np.zeros(2, np.int16)
    assert pool.shard.finish_haul(pool.now, pool.client, haul.number, several) == S.INVALID_PARAMS
    pool.running.append(haul)
    assert pool.carry(haul) == S.OK
    assert pool.shard.fetch_hauls(pool.now, pool.client, *pool.devices()) == []


def test_a_haul_number_is_nobody_elses_to_end_a_wait_with() -> None:
    pool = world()
    for number in (-1, 0, 1 << 32, 1 << 40, (1 << 63) - 1):
        done = np.zeros(1, np.int16)
        assert pool.shard.finish_haul(pool.now, pool.client, number, done) == S.TASK_NOT_FOUND


def test_the_worker_that_went_gives_its_hauls_up() -> None:
    pool = world()
    pool.put(1, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1)) == 1
    pool.fetch()
    client = pool.shard.open_client(pool.now, b"c" * 16, 2)
    assert len(pool.shard.hauls) == 0
    pool.client, pool.running = client, []
    lay_down(pool, 1)
    pool.check()


@pytest.mark.parametrize("fenced", [True, False])
def test_space_waits_for_a_worker_that_went_unless_it_can_write_no_more(fenced: bool) -> None:
    pool = world()
    pool.put(1, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1)) == 1
    pool.fetch()
    pool.shard.close_client(pool.now, pool.client, fenced)
    assert len(pool.shard.hauls) == 0
    assert pool.shard.stats().quarantined_bytes == (0 if fenced else SIZE)


@pytest.mark.parametrize("absent", [True, False])
@pytest.mark.parametrize("end", ["memory", "disk"])
def test_a_haul_from_or_to_what_is_gone_gives_nothing_up(end: str, absent: bool) -> None:
    pool = world()
    pool.put(1, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1)) == 1
    pool.fetch()
    (haul,) = pool.running
    index = haul.source if end == "memory" else haul.target
    if absent:
        pool.shard.set_absent(pool.now, index, True)
    else:
        pool.shard.unmount(pool.now, pool.client, end.encode().ljust(16))
    pool.shard.check_integrity()
    pool.carry(haul)
    pool.shard.check_integrity()
    if absent:
        pool.shard.set_absent(pool.now, index, False)
        assert pool.tiers(1) == MEMORY
    else:
        assert pool.get(1) == (end == "disk")
    pool.pass_time(700 * SECOND)
    pool.check()


def test_what_is_read_twice_comes_back_to_memory_and_stays_on_the_disk() -> None:
    pool = world()
    pool.put(1, SIZE)
    lay_down(pool, 1)
    assert pool.get(1, SECOND)
    pool.pass_time(QUICK)
    assert pool.work() == 0
    assert pool.get(1, SECOND)
    pool.pass_time(QUICK)
    assert pool.work() == 1
    assert pool.tiers(1) == BOTH
    stats = pool.shard.stats()
    assert (stats.promoted_objects, stats.promoted_bytes, stats.disk_hits) == (1, SIZE, 2)
    pool.check()


def test_nothing_comes_back_where_that_is_not_wanted() -> None:
    pool = world(promotion_hits=0)
    pool.put(1, SIZE)
    lay_down(pool, 1)
    for _ in range(5):
        assert pool.get(1, SECOND)
        pool.pass_time(QUICK)
        assert pool.work() == 0


def test_what_is_read_often_comes_back_to_a_memory_that_is_always_full() -> None:
    pool = world()
    keys = fill(pool, 300)
    memory = pool.shard.space.all()[0]
    for key in range(20):  # a third of the memory
        assert pool.tiers(key) == DISK
        for _ in range(2):
            assert pool.get(key, SECOND)
            pool.pass_time(QUICK)
            pool.work()
        assert pool.tiers(key) == BOTH
        assert memory.used <= 0.95 * MIB
    pool.pass_time(2 * SECOND)
    pool.work()
    assert memory.used <= memory.full_at
    assert all(pool.get(key) for key in keys)  # what made room for them went to the disk
    assert pool.shard.stats().evicted_objects == 0
    pool.check()


def test_what_comes_back_leaves_room_for_puts() -> None:
    pool = world()
    for key in (1, 2, 3):
        pool.put(key, SIZE)
        lay_down(pool, key)
    memory, keys = pool.shard.space.all()[0], itertools.count(10)
    while memory.used <= 0.85 * MIB:
        pool.put(next(keys), SIZE)
    assert pool.shard.hauls.promote(rows_of(pool, 1)) == 0  # no spare room
    while memory.used + 2 * SIZE <= 0.95 * MIB:
        pool.put(next(keys), SIZE)
    assert pool.shard.hauls.promote(rows_of(pool, 1, 2), hot=True) == 1
    assert pool.shard.hauls.promote(rows_of(pool, 3), hot=True) == 0
    assert pool.put(next(keys), SIZE) == S.OK


def test_a_read_in_another_window_is_another_beginning() -> None:
    pool = world()
    pool.put(1, SIZE)
    lay_down(pool, 1)
    for _ in range(4):
        assert pool.get(1, SECOND)
        pool.pass_time(11 * SECOND)
        assert pool.work() == 0


def test_damage_on_a_disk_is_dropped_and_told_from_a_failure_to_read() -> None:
    pool = world()
    for key in (1, 2, 3):
        pool.put(key, SIZE)
    lay_down(pool, 1)
    lay_down(pool, 2)
    lay_down(pool, 3, keep=True)
    assert pool.shard.hauls.promote(rows_of(pool, 1, 2, 3)) == 2  # the third is there
    pool.fetch()
    (haul,) = pool.running
    assert pool.carry(haul, [DAMAGED, -2]) == S.OK
    assert not pool.get(1)
    assert pool.tiers(2) == DISK
    assert pool.shard.stats().lost_objects == 1
    del pool.objects[1]
    pool.check()


def test_writing_through_copies_what_is_put_and_evicts_without_a_copy() -> None:
    pool = world(offload=Offload.WRITE)
    for key in range(30):
        pool.put(key, SIZE)
    pool.put(30, SIZE, hard_pin=True)
    pool.put(31, SIZE, soft_pin=SoftPin.ENABLE)
    pool.pass_time(QUICK)
    pool.work()
    assert all(pool.tiers(key) == BOTH for key in range(32))
    for key in range(100, 130):  # makes the first leave memory at once
        assert pool.put(key, SIZE) == S.OK
    pool.pass_time(QUICK)
    assert pool.tiers(0) == DISK
    assert pool.shard.stats().evicted_objects == 0
    pool.check()


def test_a_namespace_that_is_told_what_all_do_still_writes_through() -> None:
    pool = world(offload=Offload.WRITE)
    pool.shard.set_offload(0, Offload.WRITE)
    assert pool.put(1, SIZE) == S.OK
    pool.pass_time(QUICK)
    pool.work()
    assert pool.tiers(1) == BOTH


def test_a_namespace_moves_as_it_was_told_to() -> None:
    pool = world(promotion_hits=0)
    kept, scratch = (pool.shard.tenant(name) for name in ("kept", "scratch"))
    pool.shard.set_offload(kept, Offload.WRITE)
    pool.shard.set_offload(scratch, Offload.NONE)
    for key in range(10):
        assert pool.put(key, SIZE, tenant=kept) == S.OK
        assert pool.put(100 + key, SIZE, tenant=scratch) == S.OK
        assert pool.put(200 + key, SIZE) == S.OK
    pool.pass_time(QUICK)
    pool.work()
    assert all(pool.tiers(key) == BOTH for key in range(10))
    assert all(pool.tiers(key) == MEMORY for key in (*range(100, 110), *range(200, 210)))
    fill(pool, 100, first=1000)  # of nobody in particular
    assert all(pool.get(key) and pool.tiers(key) == DISK for key in (*range(10), *range(200, 210)))
    assert not any(pool.get(key) for key in range(100, 110))
    assert pool.shard.stats().evicted_objects == 10
    pool.check()


def test_what_a_namespace_may_keep_is_told_by_how_it_moves() -> None:
    pool = world()
    scratch = pool.shard.tenant("scratch")
    pool.shard.set_offload(scratch, Offload.NONE)
    rooms = [pool.shard.stats(tenant).room_bytes for tenant in (0, scratch)]
    assert rooms == [9 * MIB * 9 // 10, MIB * 9 // 10]


def test_a_hint_brings_nothing_down_whose_namespace_stays_in_memory() -> None:
    pool = world()
    pool.shard.set_offload(0, Offload.NONE)
    pool.put(1, SIZE)
    assert pool.shard.hint(pool.now, 0, digests_of([1]), HintAction.DEMOTE).tolist() == [S.OK]
    assert pool.work() == 0


def test_a_pin_keeps_an_object_in_memory() -> None:
    pool = world()
    pool.put(1, SIZE, hard_pin=True)
    pool.put(2, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1, 2)) == 1
    pool.fetch()
    pool.shard.set_hard_pin(pool.now, digests_of([2]), True)
    pool.work()
    assert pool.tiers(1) == MEMORY
    assert pool.tiers(2) == BOTH
    pool.check()


def test_soft_pins_leave_memory_last_and_are_found_on_the_disk() -> None:
    pool = world()
    for key in range(10):
        pool.put(key, SIZE, soft_pin=SoftPin.ENABLE)
    fill(pool, 100, 100)
    assert all(pool.tiers(key) == MEMORY for key in range(10))
    for key in range(10, 70):
        pool.put(key, SIZE, soft_pin=SoftPin.ENABLE)
        pool.pass_time(QUICK)
        pool.work()
    assert pool.tiers(0) == DISK
    pool.pass_time(2000 * SECOND)  # the pins have ended
    pool.check()


def test_a_row_that_is_named_twice_is_hauled_once() -> None:
    pool = world()
    pool.put(1, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1, 1, 1)) == 1
    pool.work()
    pool.check()


def test_the_quota_of_a_namespace_counts_what_moves_once() -> None:
    pool = world()
    pool.shard.tenant("default", 4 * SIZE)
    for key in range(4):
        assert pool.put(key, SIZE) == S.OK
    assert pool.shard.hauls.demote(rows_of(pool, 0), keep=True) == 0
    assert pool.shard.hauls.demote(rows_of(pool, 0, 1)) == 2
    assert pool.put(4, SIZE) == S.OK
    pool.work()
    assert [pool.get(key) for key in range(5)] == [True, True, False, True, True]
    pool.check()


def test_a_group_leaves_memory_and_is_lost_as_a_whole() -> None:
    pool = world(disk=MIB)
    for key in range(4):
        assert pool.put(key, SIZE, groups=("g",)) == S.OK
    fill(pool, 70, 10)
    assert [pool.tiers(key) for key in range(4)] == [DISK] * 4
    fill(pool, 100, 100)
    assert {pool.get(key) for key in range(4)} == {False}
    pool.check()


def test_further_replicas_go_to_a_disk_where_there_is_no_further_memory() -> None:
    pool = world()
    assert pool.put(1, SIZE, replicas=2) == S.OK
    assert pool.tiers(1) == BOTH
    assert pool.put(2, SIZE) == S.OK
    assert pool.tiers(2) == MEMORY
    assert pool.put(3, SIZE, preferred=("disk",)) == S.OK
    assert pool.tiers(3) == DISK
    assert pool.put(4, 2 * MIB) == S.OK  # larger than all memory
    assert pool.tiers(4) == DISK
    assert pool.put(5, 9 * MIB) == S.TOO_LARGE
    assert pool.put(6, SIZE, replicas=3, replicas_min=3) == S.TOO_FEW_SEGMENTS
    pool.check()


def segments_of(pool: World, key: int) -> set[int]:
    return {segment for segment, _ in pool.places(key)}


def test_what_left_memory_gets_its_missing_replica_on_another_disk() -> None:
    pool = world()
    pool.put(1, SIZE, replicas=2)
    other = pool.mount("other", 8 * MIB, Tier.DISK)
    assert segments_of(pool, 1) == {0, 1}
    fill(pool, 100, 10)
    assert segments_of(pool, 1) == {1}
    for _ in range(100):
        pool.pass_time(SECOND // 10)
        pool.work()
        pool.copy_tasks()
    assert segments_of(pool, 1) == {1, other}
    pool.check()


def test_a_disk_that_is_drained_moves_to_another_disk() -> None:
    pool = world()
    pool.put(1, SIZE)
    lay_down(pool, 1)
    other = pool.mount("other", 8 * MIB, Tier.DISK)
    assert pool.shard.drain(pool.now, 1)[0] == S.OK
    for _ in range(10):
        pool.pass_time(SECOND // 10)
        pool.copy_tasks()
    assert segments_of(pool, 1) == {other}
    assert pool.tiers(1) == DISK
    pool.check()


def test_a_pool_of_disks_alone_works_as_one_of_memory() -> None:
    pool = world(memory=0, disk=MIB)
    fill(pool, 100)
    assert pool.tiers(99) == DISK
    assert not pool.get(0)
    assert pool.shard.stats().evicted_objects > 0
    pool.mount("memory", MIB, Tier.MEMORY)
    assert pool.put(200, SIZE) == S.OK
    assert pool.tiers(200) == MEMORY
    pool.check()


def test_a_shard_that_is_started_again_knows_its_tiers_and_gives_up_hauls() -> None:
    pool = world()
    fill(pool, 100)
    pool.put(200, SIZE)
    pool.put(201, SIZE)
    pool.shard.remove(pool.now, digests_of([99]))
    pool.removed.add(99)
    pool.objects.pop(99)
    assert pool.shard.hauls.demote(rows_of(pool, 200)) == 1
    pool.fetch()
    (haul,) = pool.running
    after, restored = pool.kept.again(pool.now)
    assert restored.dropped == 0
    assert_same(pool.shard, after)
    pool.kept.shard = after
    assert pool.tiers(200) == MEMORY
    pool.copy(haul, [0])
    pool.check()
    assert pool.carry(haul) == S.TASK_NOT_FOUND
    lay_down(pool, 201)
    fill(pool, 100, 300)
    pool.check()


def test_a_segment_that_its_owner_calls_a_disk_from_now_on_is_one() -> None:
    """A master of before tiers, whose state is gone on with, took all for memory."""
    pool = world(disk=0)
    pool.put(1, SIZE)
    uuid = b"memory".ljust(16)
    given = uuid, "memory", MIB, "host", None, Tier.DISK
    assert pool.shard.mount(pool.now, pool.client, *given)[0] == S.OK
    assert pool.tiers(1) == DISK
    pool.check()
    assert [fact.tier for fact in (s.fact for s in pool.shard.segments())] == [Tier.DISK]
