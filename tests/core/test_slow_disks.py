"""Hauls by slow disks and by such as fail or hang: what waits, what gives way, what is told."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_store.core import hauls
from mooncake_store.core.options import HintAction, Offload
from mooncake_store.core.records import Status as S
from mooncake_store.core.records import Tier
from tests.core.lab import MIB, SECOND, digests_of
from tests.core.test_hauls import BOTH, DISK, QUICK, SIZE, rows_of, segments_of, world


def test_an_object_that_memory_has_no_room_for_keeps_none_behind_it_on_the_disk() -> None:
    pool = world(promotion_hits=0, memory=0)
    assert pool.put(1, 2 * MIB) == S.OK
    assert pool.put(2, SIZE) == S.OK
    pool.mount("memory", MIB, Tier.MEMORY)
    answers = pool.shard.hint(pool.now, 0, digests_of([1, 2]), HintAction.PREFETCH)
    assert answers.tolist() == [S.NO_SPACE, S.OK]
    pool.work()
    assert [pool.tiers(key) for key in (1, 2)] == [DISK, BOTH]
    pool.check()


def test_hauls_wait_for_their_turn_as_long_as_the_worker_ends_some() -> None:
    pool = world(promotion_hits=0)
    for key in range(16):
        pool.put(key, SIZE)
        assert pool.shard.hauls.demote(rows_of(pool, key)) == 1
    for _ in range(16):
        pool.fetch(limit=1)
        pool.pass_time(50 * SECOND)
        pool.carry(pool.running[0])
    assert [pool.tiers(key) for key in range(16)] == [DISK] * 16
    pool.check()


def test_a_haul_that_is_not_told_ends_though_its_worker_is_busy_once() -> None:
    pool = world()
    for key in range(3):
        pool.put(key, SIZE)
        assert pool.shard.hauls.demote(rows_of(pool, key)) == 1
    pool.fetch(limit=1)
    pool.pass_time(50 * SECOND)
    pool.carry(pool.running[0])
    pool.pass_time(59 * SECOND)
    assert len(pool.shard.hauls) == 2
    pool.pass_time(2 * SECOND)
    assert len(pool.shard.hauls) == 0


def test_a_large_object_has_the_time_that_a_slow_disk_takes(monkeypatch: Any) -> None:
    monkeypatch.setattr(hauls, "SLOWEST_BYTES_PER_S", SIZE // 100)
    pool = world()
    pool.put(1, SIZE)
    pool.put(2, 4 * SIZE)  # but no longer than late writers have
    for key in (1, 2):
        assert pool.shard.hauls.demote(rows_of(pool, key)) == 1
    pool.fetch()
    pool.pass_time(159 * SECOND)
    assert pool.carry(pool.running[0]) == S.OK
    assert pool.tiers(1) == DISK
    pool.pass_time(200 * SECOND)
    assert len(pool.shard.hauls) == 1
    pool.pass_time(2 * SECOND)
    assert len(pool.shard.hauls) == 0
    pool.check()


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("wish", ["demote", "write"])
def test_room_is_had_where_all_is_on_its_way_to_a_disk_that_hangs(
    wish: str, large: bool, told: bool
) -> None:
    size = MIB // 8 if large else SIZE
    count = MIB // size
    pool = world(offload=Offload.WRITE if wish == "write" else Offload.EVICT)
    for first in range(0, 4 * count, count):
        for key in range(first, first + count):
            assert pool.put(key, size) == S.OK
        if wish == "demote":
            pool.shard.hauls.demote(rows_of(pool, *range(first, first + count)))
        pool.pass_time(QUICK)
        if told:
            pool.fetch()
    pool.check()
    for haul in list(pool.running):
        pool.copy(haul, [0] * len(haul.sizes))  # late, where nobody else writes
        pool.check()
        pool.carry(haul)
    pool.check()


def test_what_has_no_reader_gives_way_before_what_has_one() -> None:
    pool = world()
    for key in range(64):
        pool.put(key, SIZE)
    assert pool.get(0, 5 * SECOND)
    assert pool.shard.hauls.demote(rows_of(pool, *range(64))) == 64
    for key in range(100, 150):
        assert pool.put(key, SIZE) == S.OK
    assert pool.get(0)
    pool.check()


def test_a_worker_that_is_busy_is_asked_for_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hauls, "HAUL_OBJECTS", 2)
    monkeypatch.setattr(hauls, "HAULS_PER_LANE", 3)
    pool = world()
    for key in range(10):
        pool.put(key, SIZE)
    rows = rows_of(pool, *range(10))
    outcome = pool.shard.hauls.offer(rows)
    assert outcome.tolist() == [hauls.TAKEN] * 6 + [hauls.LATER] * 4
    assert pool.shard.hauls.demote(rows) == 0
    assert pool.work() == 3
    assert pool.shard.hauls.demote(rows) == 4


def test_a_disk_that_hangs_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hauls, "HAUL_OBJECTS", 1)
    monkeypatch.setattr(hauls, "HAULS_PER_LANE", 3)
    pool = world(promotion_hits=0)
    other = pool.mount("other", 8 * MIB, Tier.DISK)
    for key in range(20):
        pool.put(key, SIZE)
    (hangs,) = set(pool.devices()) - {other}
    for key in range(20):
        outcome = pool.shard.hauls.offer(rows_of(pool, key))
        assert outcome.tolist() == [hauls.TAKEN], f"{key} has to wait"
        pool.fetch(device=other)  # of the first one nobody asks again
        for haul in list(pool.running):
            assert haul.target == other
            pool.carry(haul)
    assert sum(pool.tiers(key) == DISK for key in range(20)) == 17
    assert len(pool.shard.hauls) == 3
    assert pool.shard.hauls.promote(rows_of(pool, 19)) == 1  # and back
    assert pool.work() == 4
    pool.check()
    assert {segment for key in range(20) for segment in segments_of(pool, key)} >= {hangs, other}
