"""Renames: what goes along, what is in the way, what is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake_store.core.options import SoftPin
from mooncake_store.core.records import RENAMES_MAX, EventKind, Status
from tests.core.lab import MIB, Lab, digests_of, names_of

S = Status


def rename(lab: Lab, key: int, target: int, **options: Any) -> int:
    names = names_of([f"name{target}"])
    (status,) = lab.shard.rename(lab.now, digests_of([key]), digests_of([target]), names, **options)
    lab.check()
    return int(status)


def test_all_of_an_object_goes_along_but_its_name() -> None:
    lab = Lab(2)
    lab.put([1], names=["name1"], replicas=2, soft_pin=SoftPin.ENABLE, groups=("g",))
    before, (_, places) = lab.stat(1), lab.get([1])
    assert rename(lab, 1, 2) == S.OK
    assert lab.exists([1, 2]) == [False, True]
    assert lab.listed() == [b"name2"]
    after = lab.stat(2)
    assert after.name == b"name2"
    for name in ("size", "generation", "checksum", "soft_pin_ns", "hard_pin", "group", "replicas"):
        assert getattr(after, name) == getattr(before, name), name
    assert lab.get([2])[1].tolist() == places.tolist()


def test_a_missing_or_unfinished_source_is_refused() -> None:
    lab = Lab()
    lab.start([3])
    assert rename(lab, 1, 2) == S.NOT_FOUND
    assert rename(lab, 3, 2) == S.NOT_READY
    assert rename(lab, 3, 2, force=True) == S.NOT_READY
    lab.put([4])
    lab.start([4], upsert=True)
    assert rename(lab, 4, 2, force=True) == S.NOT_READY


def test_a_leased_source_is_refused_unless_forced_and_keeps_its_memory() -> None:
    lab = Lab(nbytes=MIB)
    (generation,) = lab.put([1], MIB // 2)
    place = lab.get([1], ttl=10)[1].tolist()
    assert rename(lab, 1, 2) == S.HAS_LEASE
    assert rename(lab, 1, 2, force=True) == S.OK
    assert lab.remove([2]) == [S.HAS_LEASE]
    assert lab.renew([1], [generation], 10)[0] == [S.LEASE_EXPIRED]
    assert lab.get([2])[1].tolist() == place
    # Not even eviction takes what a reader of the old key may look at.
    rows, _ = lab.start([5], MIB * 3 // 4)
    assert rows["status"].tolist() == [S.NO_SPACE]
    lab.sleep(10)
    assert rename(lab, 2, 3) == S.OK


def test_a_target_is_in_the_way_unless_it_may_be_replaced() -> None:
    lab = Lab()
    (generation,) = lab.put([1])
    lab.put([2])
    assert rename(lab, 1, 2) == S.ALREADY_EXISTS
    assert rename(lab, 1, 2, overwrite=True) == S.OK
    assert lab.exists([1, 2]) == [False, True]
    assert lab.stat(2).generation == generation
    assert lab.shard.stats().objects == 1


def test_a_leased_target_is_replaced_by_force_and_its_memory_quarantined() -> None:
    lab = Lab(nbytes=MIB)
    lab.put([1], 1000)
    lab.put([2], MIB // 2)
    lab.get([2], ttl=10)
    assert rename(lab, 1, 2, overwrite=True) == S.HAS_LEASE
    assert rename(lab, 1, 2, overwrite=True, force=True) == S.OK
    assert lab.shard.stats().quarantined_bytes >= MIB // 2
    lab.sleep(10)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0


@pytest.mark.parametrize(("age", "force", "expected"), [(0, False, S.NOT_READY), (31, False, S.OK)])
def test_a_put_under_the_new_key_is_in_the_way_until_its_deadline(
    age: int, force: bool, expected: Status
) -> None:
    lab = Lab()
    lab.put([1])
    rows, _ = lab.start([2])
    lab.sleep(age)
    assert rename(lab, 1, 2, force=force) == expected
    late = lab.end([2], rows["generation"])
    assert late == ([S.OK] if expected else [S.NOT_FOUND])
    assert lab.exists([2]) == [True]


def test_a_running_copy_keeps_both_ends() -> None:
    lab = Lab(2)
    lab.put([1], preferred=("segment0",))
    lab.put([2])
    assert lab.begin(1, [1])[0] == S.OK
    assert rename(lab, 1, 3, force=True) == S.BUSY
    assert rename(lab, 2, 1, overwrite=True, force=True) == S.BUSY


def test_a_key_renamed_to_itself_stays() -> None:
    lab = Lab()
    lab.put([1], names=["name1"])
    assert rename(lab, 1, 1) == S.OK
    assert lab.listed() == [b"name1"]


def test_pairs_take_effect_in_order() -> None:
    lab = Lab()
    one, two = lab.put([1, 2]).tolist()
    # 1 and 2 change places.
    sources, targets = digests_of([1, 2, 3]), digests_of([3, 1, 2])
    assert lab.shard.rename(lab.now, sources, targets).tolist() == [0, 0, 0]
    lab.check()
    assert [lab.stat(key).generation for key in (1, 2)] == [two, one]
    assert lab.exists([3]) == [False]


def test_events_tell_both_keys() -> None:
    lab = Lab()
    lab.put([1, 2])
    first = lab.shard.events.next_number
    rename(lab, 1, 2, overwrite=True)
    _, events, _ = lab.shard.events.since(first, 100)
    told = [(int(event["kind"]), int(event["digest_lo"])) for event in events]
    old, new = (int(digest[0]) for digest in digests_of([1, 2]))
    assert told == [(EventKind.REMOVED, old), (EventKind.STORED, new)]


def test_a_policy_forgets_nothing_of_what_was_renamed() -> None:
    lab = Lab()
    lab.put(range(10))
    for key in range(5):
        assert rename(lab, key, 100 + key) == S.OK
    lab.evict(0.5)
    assert lab.exists(range(100, 105)) == [False] * 5
    assert lab.exists(range(5, 10)) == [True] * 5


def test_many_renames_while_the_table_grows_lose_nothing() -> None:
    lab = Lab(1, 16 * MIB)
    keys = list(range(3000))
    lab.put(keys, 64)
    for first in range(0, 3000, 500):
        some = keys[first : first + 500]
        targets = digests_of([key + 10_000 for key in some])
        assert not lab.shard.rename(lab.now, digests_of(some), targets).any()
        lab.put([key + 50_000 for key in some], 64)
    lab.check()
    assert not any(lab.exists(keys))
    assert all(lab.exists([key + 10_000 for key in keys]))


def test_bad_batches_are_refused_whole() -> None:
    lab = Lab()
    lab.put([1])
    many = np.zeros((RENAMES_MAX + 1, 2), np.uint64)
    one = digests_of([1])
    assert set(lab.shard.rename(lab.now, many, many).tolist()) == {S.INVALID_PARAMS}
    assert lab.shard.rename(lab.now, one, many).tolist() == [S.INVALID_PARAMS]
    two_names = names_of(["a", "b"])
    assert lab.shard.rename(lab.now, one, digests_of([2]), two_names).tolist() == [S.INVALID_PARAMS]
    long = names_of(["x" * 4097])
    assert lab.shard.rename(lab.now, one, digests_of([2]), long).tolist() == [S.INVALID_KEY]
    assert lab.exists([1]) == [True]
