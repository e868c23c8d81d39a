"""The third tier: what goes into cold segments, what comes back, and who may write there."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mooncake_store.core.options import Offload, ShardConfig
from mooncake_store.core.records import EventKind, Tier
from mooncake_store.core.records import Status as S
from mooncake_store.core.tasks import TaskKind
from tests.core.keeping import assert_same
from tests.core.lab import MIB, SECOND, digests_of
from tests.core.worlds import DAMAGED, World

SIZE = 16_384
MEMORY, DISK, COLD = {Tier.MEMORY}, {Tier.DISK}, {Tier.COLD}
QUICK = 1_000_000


def world(memory: int = MIB, disk: int = 0, cold: int = 16 * MIB, **config: Any) -> World:
    made = World(random.Random(1), ShardConfig(objects_max=4096, segments_max=8, **config))
    sizes = (("memory", memory, Tier.MEMORY), ("disk", disk, Tier.DISK), ("cold", cold, Tier.COLD))
    for name, nbytes, tier in sizes:
        if nbytes:
            made.mount(name, nbytes, tier)
    return made


def fill(pool: World, count: int, first: int = 0) -> list[int]:
    keys = list(range(first, first + count))
    for key in keys:
        assert pool.put(key, SIZE) == S.OK
        pool.pass_time(QUICK)
        pool.work()
    return keys


def rows_of(pool: World, *keys: int) -> Any:
    return pool.shard.table.find(digests_of(keys).view(np.int64))


def sink(pool: World, key: int) -> None:
    """Have an object go to the cold segment of a pool without disks."""
    assert pool.put(key, SIZE) == S.OK
    assert pool.shard.hauls.demote(rows_of(pool, key)) == 1
    assert pool.work() == 1
    assert pool.tiers(key) == COLD


def test_what_leaves_memory_goes_cold_where_there_is_no_disk() -> None:
    pool = world()
    keys = fill(pool, 300)
    pool.check()
    assert pool.tiers(0) == COLD
    assert pool.tiers(299) == MEMORY
    assert all(pool.get(key) for key in keys)
    stats = pool.shard.stats()
    assert (stats.evicted_objects, stats.lost_objects, stats.disk_total) == (0, 0, 0)
    assert stats.cold_total == 16 * MIB
    assert stats.cold_allocated == sum(pool.tiers(key) == COLD for key in keys) * SIZE


def test_what_leaves_disks_goes_cold_and_not_what_leaves_memory() -> None:
    pool = world(disk=2 * MIB, promotion_hits=0)
    keys = fill(pool, 500)  # eight times the memory, and four times the disk
    pool.check()
    assert pool.tiers(0) == COLD
    assert pool.tiers(400) == DISK
    assert pool.tiers(499) == MEMORY
    assert all(pool.get(key, 1) for key in keys)
    stats = pool.shard.stats()
    assert stats.evicted_objects == 0
    far, near = (sum(pool.tiers(key) == tier for key in keys) for tier in (COLD, DISK))
    assert (stats.cold_hits, stats.disk_hits) == (far, near)
    assert far > 300


def test_a_full_cold_segment_gives_up_its_coldest() -> None:
    pool = world(cold=2 * MIB, promotion_hits=0)
    fill(pool, 250)
    pool.check()
    left = [key for key in range(250) if pool.get(key)]
    assert left == list(range(250 - len(left), 250))
    assert pool.shard.stats().evicted_objects == 250 - len(left)
    assert len(left) > 2 * MIB * 0.8 / SIZE


def test_nothing_goes_cold_where_that_is_not_wanted() -> None:
    pool = world(offload=Offload.NONE)
    fill(pool, 100)
    assert not pool.get(0)
    assert pool.shard.stats().cold_allocated == 0


def test_what_is_read_again_comes_back_and_stays_cold_too() -> None:
    pool = world()
    sink(pool, 1)
    for _ in range(2):
        assert pool.get(1, 1)
    pool.pass_time(QUICK)
    assert pool.work() == 1
    assert pool.tiers(1) == MEMORY | COLD
    pool.check()


def test_nothing_is_put_into_cold_segments() -> None:
    pool = world(memory=0, disk=0)
    assert pool.put(1, SIZE) == S.NO_SPACE
    pool.mount("memory", MIB, Tier.MEMORY)
    assert pool.put(2, SIZE, preferred=("cold",), replicas=2) == S.OK
    assert pool.tiers(2) == MEMORY
    assert pool.put(3, 2 * MIB) == S.TOO_LARGE
    cold = pool.shard.space.by_uuid(b"cold".ljust(16))
    assert cold is not None
    status, _ = pool.shard.submit_task(pool.now, TaskKind.COPY, digests_of([2])[0], [cold.index])
    assert status == S.SEGMENT_NOT_FOUND


def test_a_cold_segment_takes_from_its_own_worker_only() -> None:
    pool = world(cold=0)
    other = pool.shard.open_client(pool.now, b"o" * 16, 1)
    given = pool.now, other, b"x" * 16, "cold", 16 * MIB, "host", None, Tier.COLD
    assert pool.shard.mount(*given)[0] == S.OK
    assert pool.put(1, SIZE) == S.OK
    assert pool.shard.hauls.demote(rows_of(pool, 1)) == 0
    fill(pool, 100, 2)
    assert not pool.get(1)  # evicted, as without


def test_hauls_from_and_to_cold_segments_are_told_to_who_asks_for_those() -> None:
    pool = world(disk=8 * MIB)
    for key in (1, 2):
        pool.put(key, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1, 2)) == 2
    pool.work()
    assert pool.shard.hauls.offer(rows_of(pool, 1), Tier.DISK).tolist() == [1]
    assert pool.shard.hauls.promote(rows_of(pool, 2)) == 1
    (other,), (cold,) = (
        pool.shard.fetch_hauls(pool.now, pool.client, device) for device in pool.devices()
    )
    assert cold.rows.tolist() == rows_of(pool, 1).tolist()
    assert other.rows.tolist() == rows_of(pool, 2).tolist()
    for haul in (cold, other):
        pool.running.append(haul)
        assert pool.carry(haul) == S.OK
    assert pool.tiers(1) == COLD
    assert pool.tiers(2) == MEMORY | DISK
    pool.check()


def test_many_hauls_to_a_slow_store_hold_up_none_to_a_disk() -> None:
    pool = world(memory=8 * MIB, disk=0)
    for key in range(40):
        pool.put(key, SIZE)
        pool.shard.hauls.demote(rows_of(pool, key))
    assert len(pool.shard.hauls) == 16
    pool.mount("disk", 8 * MIB, Tier.DISK)
    assert pool.shard.hauls.demote(rows_of(pool, 39)) == 1


def test_what_the_store_damaged_is_lost_and_nothing_else() -> None:
    pool = world()
    sink(pool, 1)
    sink(pool, 2)
    assert pool.shard.hauls.promote(rows_of(pool, 1, 2)) == 2
    (haul,) = pool.shard.fetch_hauls(pool.now, pool.client, *pool.devices())
    pool.running.append(haul)
    gone = pool.objects.pop(1)
    assert gone
    pool.carry(haul, [DAMAGED if row == rows_of(pool, 1)[0] else 0 for row in haul.rows])
    assert not pool.get(1)
    assert pool.tiers(2) == MEMORY | COLD
    assert pool.shard.stats().lost_objects == 1
    pool.check()


def test_what_a_disk_damaged_is_read_from_below_it() -> None:
    pool = world(disk=2 * MIB)
    pool.put(1, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, 1)) == 1
    assert pool.work() == 1
    pool.shard.hauls.offer(rows_of(pool, 1), Tier.DISK, keep=True)
    assert pool.work() == 1
    assert pool.tiers(1) == DISK | COLD
    assert pool.shard.hauls.promote(rows_of(pool, 1)) == 1
    pool.fetch()
    (haul,) = pool.running
    assert pool.carry(haul, [DAMAGED]) == S.OK
    assert pool.tiers(1) == COLD
    assert pool.get(1)
    assert pool.shard.stats().lost_objects == 0
    pool.check()


def test_the_owner_learns_what_is_not_there_any_more() -> None:
    pool = world()
    for key in (1, 2, 3):
        sink(pool, key)
    cold = pool.shard.space.by_uuid(b"cold".ljust(16))
    assert cold is not None
    at = {key: pool.places(key)[0][1] for key in (1, 2, 3)}
    offsets = np.array([*at.values(), 8 * MIB], np.int64)

    def held(client: int) -> list[bool]:
        found: list[bool] = pool.shard.held(client, cold.index, offsets).tolist()
        return found

    assert held(pool.client) == [True, True, True, False]
    assert pool.remove(1) == S.OK
    assert pool.get(2, SECOND)
    assert pool.remove(2, force=True) == S.OK
    assert held(pool.client) == [False, True, True, False]  # the lease runs
    pool.pass_time(2 * SECOND)
    assert held(pool.client) == [False, False, True, False]
    assert held(pool.client + 1) == [True] * 4
    assert pool.shard.held(pool.client, 7, offsets).all()


def test_a_restart_knows_what_lies_cold() -> None:
    pool = world(disk=2 * MIB, promotion_hits=0)
    keys = fill(pool, 400)
    before = {key: pool.tiers(key) for key in keys}
    shard = pool.shard
    pool.restart()
    assert_same(shard, pool.shard)
    pool.check()
    assert {key: pool.tiers(key) for key in keys} == before


def test_events_say_where_an_object_lay() -> None:
    pool = world()
    sink(pool, 1)
    assert pool.remove(1) == S.OK
    _, events, _ = pool.shard.events.since(1)
    assert [(int(e["kind"]), int(e["tier"])) for e in events] == [
        (EventKind.STORED, Tier.MEMORY),
        (EventKind.REMOVED, Tier.COLD),
    ]


def test_events_of_a_rename_say_where_an_object_lies() -> None:
    pool = world()
    sink(pool, 1)
    pool.shard.rename(pool.now, digests_of([1]), digests_of([2]))
    _, events, _ = pool.shard.events.since(2)
    assert [(int(e["kind"]), int(e["tier"])) for e in events] == [
        (EventKind.REMOVED, Tier.COLD),
        (EventKind.STORED, Tier.COLD),
    ]


@pytest.mark.parametrize("tiers", ["memory and cold", "all"])
def test_a_tenant_with_a_quota_evicts_what_lies_cold(tiers: str) -> None:
    pool = world(disk=MIB if tiers == "all" else 0)
    fill(pool, 150)
    pool.shard.tenant("default", 160 * SIZE)
    fill(pool, 40, 1000)
    pool.check()
    left = [key for key in [*range(150), *range(1000, 1040)] if pool.get(key)]
    assert len(left) <= 160
    assert left[-40:] == list(range(1000, 1040))
