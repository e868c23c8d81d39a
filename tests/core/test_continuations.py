"""Who reads the beginning of what was put in order finds the rest in memory, where it lay below."""

from __future__ import annotations

import random

import pytest

from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import Tier
from tests.core.lab import MIB, SECOND
from tests.core.test_hauls import BOTH, DISK, MEMORY, QUICK, SIZE, rows_of, world
from tests.core.worlds import World


def laid_down(*keys: int, ahead: int = 4, hits: int = 100) -> World:
    """A pool with objects that were put in this order and lie on the disk alone."""
    pool = world(memory=8 * MIB, promotion_ahead=ahead, promotion_hits=hits)
    for key in keys:
        pool.put(key, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, *keys)) == len(keys)
    pool.work()
    assert all(pool.tiers(key) == DISK for key in keys)
    return pool


def risen(pool: World, *keys: int) -> set[int]:
    """Those that are in memory again, after what there was to do."""
    pool.pass_time(QUICK)
    pool.work()
    pool.check()
    return {key for key in keys if pool.tiers(key) == BOTH}


def test_what_was_put_behind_what_is_read_comes_up_to_a_number() -> None:
    pool = laid_down(*range(10))
    assert pool.get(1)
    assert risen(pool, *range(10)) == {2, 3, 4, 5}


def test_a_prefix_that_is_read_in_steps_is_always_ahead() -> None:
    pool = laid_down(*range(12))
    came: set[int] = set()
    for step in range(0, 12, 2):
        assert pool.get(step)
        assert pool.get(step + 1)
        came = risen(pool, *range(12))
        assert came == set(range(2, min(12, step + 6)))
    assert came == set(range(2, 12))  # the first two are left to those who count hits


def test_what_is_read_in_one_run_has_only_what_is_behind_it_come() -> None:
    pool = laid_down(*range(10))
    for key in range(5):
        assert pool.get(key)
    assert risen(pool, *range(10)) == {5, 6, 7, 8}


def test_nothing_comes_where_it_is_not_wanted_or_lies_in_memory_only() -> None:
    for unwanted in ({"ahead": 0}, {"hits": 0}):
        pool = laid_down(*range(10), **unwanted)
        assert pool.get(1)
        assert risen(pool, *range(10)) == set()
    pool = world(memory=8 * MIB, promotion_ahead=4, promotion_hits=100)
    for key in range(10):
        pool.put(key, SIZE)
    assert pool.shard.hauls.demote(rows_of(pool, *range(5, 10))) == 5
    pool.work()
    assert pool.get(2)  # whose replicas are in memory alone
    assert risen(pool, *range(10)) == set()
    assert pool.tiers(2) == MEMORY


def test_what_was_removed_ends_what_is_known_of_it() -> None:
    pool = laid_down(*range(6))
    pool.remove(2)
    assert pool.get(0)
    assert risen(pool, 0, 1, 3, 4, 5) == {1}


def test_what_another_tenant_put_in_between_is_not_brought_for_this_one() -> None:
    pool = world(memory=8 * MIB, promotion_ahead=4, promotion_hits=100)
    theirs = pool.shard.tenant("theirs")
    pool.put(0, SIZE)
    pool.put(1, SIZE, tenant=theirs)
    assert pool.shard.hauls.demote(rows_of(pool, 0, 1)) == 2
    pool.work()
    assert pool.get(0)
    assert risen(pool, 0, 1) == set()


@pytest.mark.parametrize("seed", range(5))
def test_guesses_change_nothing_but_where_objects_lie(seed: int) -> None:
    rng = random.Random(seed)
    config = ShardConfig(objects_max=4096, segments_max=8, promotion_ahead=rng.choice((1, 8, 64)))
    pool = World(rng, config)
    pool.mount("memory", MIB, Tier.MEMORY)
    pool.mount("disk", 4 * MIB, Tier.DISK)
    for _ in range(400):
        key = rng.randrange(150)
        rng.choice((pool.get, pool.remove, lambda key: pool.put(key, SIZE)))(key)
        if rng.random() < 0.3:
            pool.pass_time(rng.choice((QUICK, SECOND)))
            pool.work()
    pool.check()
