"""What lay in memory that goes away: lost with its worker, or drained, in a pool with a disk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mooncake_store.core.options import Offload
from mooncake_store.core.records import Status as S
from mooncake_store.core.records import Tier
from tests.core.lab import MIB, SECOND
from tests.core.test_hauls import BOTH, DISK, SIZE, fill, lay_down, segments_of, world

if TYPE_CHECKING:
    from tests.core.worlds import World


def pass_seconds(pool: World, seconds: int) -> None:
    """Let time pass, in which workers do what there is."""
    for _ in range(10 * seconds):
        pool.pass_time(SECOND // 10)
        pool.work()
        pool.copy_tasks()


def lose(pool: World, number: int) -> None:
    """Have a segment go as one does whose worker died."""
    (segment,) = (each for each in pool.shard.segments() if each.index == number)
    assert pool.shard.unmount(pool.now, pool.client, segment.uuid, force=True) == S.OK
    pass_seconds(pool, 2)


def test_what_lost_its_memory_comes_back_from_the_disk() -> None:
    pool = world(offload=Offload.WRITE)
    keys = fill(pool, 20)
    fill(pool, 1, 100)
    pass_seconds(pool, 1)
    assert all(pool.tiers(key) == BOTH for key in [*keys, 100])
    other = pool.mount("other", MIB, Tier.MEMORY)
    lose(pool, 0)
    assert all(pool.tiers(key) == BOTH for key in keys)
    assert {segment for key in keys for segment in segments_of(pool, key)} == {1, other}
    assert all(pool.get(key) for key in keys)
    pool.check()


def test_what_did_not_lie_in_memory_stays_where_it_is() -> None:
    pool = world()
    pool.put(1, SIZE)
    lay_down(pool, 1)
    pool.mount("other", MIB, Tier.MEMORY)
    lose(pool, 0)
    assert pool.tiers(1) == DISK
    pool.check()


def test_an_object_of_two_replicas_has_two_again() -> None:
    pool = world()
    assert pool.put(1, SIZE, replicas=2) == S.OK
    other = pool.mount("other", MIB, Tier.MEMORY)
    lose(pool, 0)
    assert segments_of(pool, 1) == {1, other}
    assert pool.tiers(1) == BOTH
    pool.check()


@pytest.mark.parametrize(("room", "hits"), [(0, 2), (MIB, 0)])
def test_it_stays_below_where_there_is_no_room_or_nothing_is_to_come_back(
    room: int, hits: int
) -> None:
    pool = world(offload=Offload.WRITE, promotion_hits=hits)
    fill(pool, 1)
    pass_seconds(pool, 1)
    if room:
        pool.mount("other", room, Tier.MEMORY)
    lose(pool, 0)
    assert pool.tiers(0) == DISK
    assert pool.get(0)
    pool.check()


def test_memory_that_is_drained_goes_to_the_disk_where_other_memory_is_full() -> None:
    pool = world()
    keys = fill(pool, 30)
    small = pool.mount("small", 4 * SIZE, Tier.MEMORY)
    assert pool.shard.drain(pool.now, 0)[0] == S.OK
    pass_seconds(pool, 30)
    assert {segment for key in keys for segment in segments_of(pool, key)} <= {1, small}
    assert sum(pool.tiers(key) == DISK for key in keys) >= 26
    assert all(pool.get(key) for key in keys)
    pool.check()
