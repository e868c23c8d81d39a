"""Segments that are declared for a namespace: whose objects lie there, whichever way they come."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mooncake_store.core.options import DEFAULTS, HintAction, Placement, ShardConfig
from mooncake_store.core.records import Status as S
from mooncake_store.core.records import Tier
from tests.core.keeping import Kept
from tests.core.lab import MIB, SECOND, START, Lab, digests_of
from tests.core.worlds import World

SIZE = 4096


class Town:
    """Two segments for all, and two for team-a; the tenants there are."""

    def __init__(self, **config: Any) -> None:
        self.lab = lab = Lab(segments=2, **config)
        self.shared = set(lab.segments)
        self.own = {lab.mount(10 + n, namespace="team-a", host=f"own{n}") for n in range(2)}
        self.a, self.b = lab.shard.tenant("team-a"), lab.shard.tenant("team-b")

    def where(self, *keys: int) -> set[int]:
        _, replicas = self.lab.get(list(keys))
        return {int(segment) for segment in replicas["segment"]}

    def leave(self) -> None:
        for segment in self.lab.shard.segments():
            if segment.index in self.own:
                self.lab.shard.unmount(self.lab.now, self.lab.client, segment.uuid)


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("options", [{}, {"replicas": 2}, {"preferred": ("segment0",)}], ids=str)
def test_objects_of_a_namespace_go_to_its_segments_and_no_others_do(
    placement: Placement, options: dict[str, Any]
) -> None:
    town = Town(placement=placement)
    town.lab.put(range(500), SIZE, tenant=town.a, **options)
    town.lab.put(range(500, 1000), SIZE, tenant=town.b, **options)
    own, others = town.where(*range(500)), town.where(*range(500, 1000))
    preferred = "preferred" in options
    assert own <= town.own if preferred else own == town.own
    assert others == ({0} if preferred else town.shared)


def test_a_namespace_with_a_quota_goes_where_it_belongs_as_well() -> None:
    town = Town()
    town.lab.shard.tenant("team-a", MIB)
    town.lab.put(range(50), SIZE, tenant=town.a)
    assert town.where(*range(50)) <= town.own


def test_a_namespace_waits_for_its_segments_unless_all_are_gone() -> None:
    town = Town()
    for index in town.own:
        town.lab.shard.set_suspect(town.lab.now, index, True)
    rows, _ = town.lab.start([1], SIZE, tenant=town.a)
    assert rows["status"][0] == S.NO_SPACE
    for index in town.own:
        town.lab.shard.set_absent(town.lab.now, index, True)
    rows, _ = town.lab.start([1], SIZE, tenant=town.a)
    assert rows["status"][0] == S.NO_SPACE
    town.leave()
    town.lab.put([1], SIZE, tenant=town.a)
    assert town.where(1) <= town.shared


def test_what_is_larger_than_the_segments_of_its_namespace_is_too_large() -> None:
    lab = Lab(segments=1, nbytes=64 * MIB)
    lab.mount(10, 2 * MIB, namespace="team-a")
    tenant = lab.shard.tenant("team-a")
    rows, _ = lab.start([1], 4 * MIB, tenant=tenant)
    assert rows["status"][0] == S.TOO_LARGE
    lab.put([1], 4 * MIB)
    assert lab.shard.stats(tenant).room_bytes < 2 * MIB < lab.shard.stats().room_bytes


def test_room_is_made_among_the_objects_of_the_namespace() -> None:
    lab = Lab(segments=1, nbytes=MIB)
    lab.mount(10, MIB, namespace="team-a")
    tenant = lab.shard.tenant("team-a")
    lab.put(range(100), SIZE)
    for first in range(1000, 2000, 100):
        lab.put(range(first, first + 100), SIZE, tenant=tenant)
        lab.tick()
    assert all(lab.exists(range(100)))
    assert not any(lab.exists(range(1000, 1100)))


def test_puts_that_wait_have_objects_of_their_own_segments_leave() -> None:
    lab = Lab(segments=1, nbytes=MIB)
    lab.mount(10, MIB, namespace="team-a")
    tenant = lab.shard.tenant("team-a")
    lab.put([1], 700_000)
    lab.put([2], 700_000, tenant=tenant)
    for key in (1, 2):
        lab.get([key], ttl=5)
    rows, _ = lab.start([3], 700_000, tenant=tenant)
    assert rows["status"][0] == S.NO_SPACE
    sizes, until = np.array([700_000]), lab.now + 60 * SECOND
    lab.shard.make_way(lab.now, sizes, DEFAULTS, until, tenant)
    assert lab.exists([1, 2]) == [True, False]


@pytest.mark.parametrize("move", [False, True])
def test_nothing_is_copied_to_where_it_may_not_lie(move: bool) -> None:
    town = Town()
    town.lab.put([1], SIZE, tenant=town.a)
    town.lab.put([2], SIZE, tenant=town.b)
    (at,) = town.where(1)
    (other,) = town.own - {at}
    for key, target in ((1, min(town.shared)), (2, other)):
        status, _, _ = town.lab.begin(key, [target], move=move)
        assert status == S.SEGMENT_NOT_FOUND
    status, number, _ = town.lab.begin(1, [other], move=move)
    assert status == S.OK
    assert town.lab.shard.finish_task(town.lab.now, town.lab.client, number, True) == S.OK
    assert town.where(1) == ({other} if move else town.own)


def test_a_drain_moves_to_the_other_segments_of_the_namespace() -> None:
    town = Town()
    town.lab.put(range(20), SIZE, tenant=town.a)
    first, second = sorted(town.own)
    town.lab.shard.drain(town.lab.now, first)
    for _ in range(200):
        town.lab.sleep(0.01)
        town.lab.tick()
        for task in town.lab.shard.fetch_tasks(town.lab.now, town.lab.client):
            town.lab.shard.finish_task(town.lab.now, town.lab.client, task.number, True)
    assert town.where(*range(20)) == {second}


def test_a_drain_without_another_segment_of_the_namespace_fails_and_moves_nothing() -> None:
    lab = Lab(segments=2)
    own = lab.mount(10, namespace="team-a")
    lab.put([1], SIZE, tenant=lab.shard.tenant("team-a"))
    _, number = lab.shard.drain(lab.now, own)
    for _ in range(20):
        lab.sleep(0.01)
        lab.tick()
    job = lab.shard.janitor.job(number)
    assert job is not None
    assert job.state.name == "FAILED"
    assert int(lab.get([1])[1]["segment"][0]) == own


def test_lost_replicas_are_made_again_among_the_segments_of_the_namespace() -> None:
    town = Town()
    third = town.lab.mount(20, namespace="team-a", host="own2")
    town.lab.put(range(20), SIZE, tenant=town.a, replicas=2)
    lost = min(town.own)
    uuid = next(s.uuid for s in town.lab.shard.segments() if s.index == lost)
    town.lab.shard.unmount(town.lab.now, town.lab.client, uuid)
    for _ in range(400):
        town.lab.sleep(0.01)
        town.lab.tick()
        for task in town.lab.shard.fetch_tasks(town.lab.now, town.lab.client):
            town.lab.shard.finish_task(town.lab.now, town.lab.client, task.number, True)
    assert town.lab.shard.stats().replicas_missing == 0
    assert town.where(*range(20)) == town.own - {lost} | {third}


def test_one_more_replica_is_wanted_only_where_one_may_lie() -> None:
    lab = Lab(segments=2)
    lab.mount(10, namespace="team-a")
    tenant = lab.shard.tenant("team-a")
    lab.put([1], SIZE, tenant=tenant)
    lab.put([2], SIZE)
    share = HintAction.SHARE
    assert lab.shard.hint(lab.now, tenant, digests_of([1]), share)[0] == S.NO_SPACE
    assert lab.shard.hint(lab.now, 0, digests_of([2]), share)[0] == S.OK


def _tiers(*declared: str) -> tuple[World, int]:
    """Memory for all and for team-a, and a disk for each of `declared`."""
    pool = World(random.Random(1), ShardConfig(objects_max=4096, segments_max=8))
    pool.mount("memory", MIB, Tier.MEMORY)
    pool.mount("own", MIB, Tier.MEMORY, "team-a")
    for number, namespace in enumerate(declared):
        pool.mount(f"disk{number}", MIB, Tier.DISK, namespace)
    return pool, pool.shard.tenant("team-a")


def _names(pool: World, key: int) -> set[str]:
    found = {segment: "" for segment, _ in pool.places(key)}
    return {s.name for s in pool.shard.segments() if s.index in found}


def _rows(pool: World, *keys: int) -> Any:
    return pool.shard.table.find(digests_of(keys).view(np.int64))


def test_objects_go_to_disks_and_back_within_their_namespace() -> None:
    pool, tenant = _tiers("", "team-a")
    pool.put(1, SIZE, tenant=tenant)
    pool.put(2, SIZE)
    assert pool.shard.hauls.demote(_rows(pool, 1, 2)) == 2
    while pool.work():
        pass
    assert (_names(pool, 1), _names(pool, 2)) == ({"disk1"}, {"disk0"})
    assert pool.shard.hauls.promote(_rows(pool, 1, 2)) == 2
    while pool.work():
        pass
    assert (_names(pool, 1), _names(pool, 2)) == ({"own", "disk1"}, {"memory", "disk0"})


def test_a_namespace_without_a_disk_of_its_own_goes_to_none() -> None:
    pool, tenant = _tiers("")
    pool.put(1, SIZE, tenant=tenant)
    pool.put(2, SIZE)
    assert pool.shard.hauls.demote(_rows(pool, 1, 2)) == 1
    assert pool.work() == 1
    assert (_names(pool, 1), _names(pool, 2)) == ({"own"}, {"disk0"})


def test_a_segment_is_declared_anew_when_it_is_mounted_again() -> None:
    lab = Lab(segments=1)
    tenant = lab.shard.tenant("team-a")
    lab.put([1], SIZE, tenant=tenant)
    lab.mount(0, namespace="team-a")
    rows, _ = lab.start([2], SIZE)
    assert rows["status"][0] == S.NO_SPACE
    lab.put([2], SIZE, tenant=tenant)
    assert lab.exists([1, 2]) == [True, True]


def test_a_shard_that_is_made_again_knows_whose_segments_are_and_their_keys() -> None:
    kept = Kept(ShardConfig(objects_max=64, segments_max=8))
    client = kept.shard.open_client(START, b"c" * 16, 1)
    given = START, client, b"s" * 16, "own", MIB, "host", None, Tier.MEMORY
    kept.shard.mount(*given, b"k" * 16, "team-a")
    tenant = kept.shard.tenant("team-a")
    shard, _ = kept.again(START)
    (segment,) = shard.segments()
    assert (segment.key, segment.namespace) == (b"k" * 16, "team-a")
    assert shard.space.guards.asked(())[segment.index]
    rows, _ = shard.put_start(START, client, tenant, digests_of([1]), np.array([10]))
    assert rows["status"][0] == S.OK
    rows, _ = shard.put_start(START, client, 0, digests_of([2]), np.array([10]))
    assert rows["status"][0] == S.NO_SPACE
