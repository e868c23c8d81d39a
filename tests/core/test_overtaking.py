"""A put of a key that somebody else is putting takes its place once it has room, and not before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mooncake_store.core.records import Status
from tests.core.keeping import Kept, assert_same
from tests.core.lab import MIB, Lab, digests_of

if TYPE_CHECKING:
    from collections.abc import Callable

KEY = 5
S = Status
SIZE = 4096
FULL = 15 * MIB
"""More than there is beside a put that is under way, in one segment."""


def lab_of(*, fill: int = 0, **config: Any) -> tuple[Lab, int]:
    """A lab and another client; with `fill` an object that never leaves has so many bytes."""
    lab = Lab(hard_pin_share=1.0, **config)
    owner = lab.open(10)
    if fill:
        stay(lab, fill)
    return lab, owner


def stay(lab: Lab, nbytes: int, **options: Any) -> None:
    """Put an object that never leaves, which is no client's share."""
    lab.put([KEY + 100], nbytes, **options)
    lab.shard.set_hard_pin(lab.now, digests_of([KEY + 100]), True)


def unfinished(lab: Lab, owner: int) -> int:
    rows, _ = lab.start([KEY], SIZE, client=owner, names=["a"])
    return int(rows["generation"][0])


def beside_another(lab: Lab, owner: int) -> int:
    lab.put([KEY], SIZE, names=["a"])
    rows, _ = lab.start([KEY], SIZE, client=owner, upsert=True, names=["a"])
    return int(rows["generation"][0])


def in_a_group(lab: Lab, owner: int) -> int:
    rows, _ = lab.start([KEY], SIZE, client=owner, groups=("g",))
    return int(rows["generation"][0])


def refused(lab: Lab, status: Status, size: int, **asked: Any) -> None:
    """Ask for room that is not there."""
    before, stats = lab.stat(KEY), lab.shard.stats()
    rows, replicas = lab.start([KEY], size, **asked)
    assert (rows["status"].tolist(), len(replicas)) == ([status], 0)
    assert (lab.stat(KEY), lab.shard.stats()) == (before, stats)


@pytest.mark.parametrize("begin", [unfinished, beside_another, in_a_group])
@pytest.mark.parametrize("asked", [{}, {"groups": ("other",)}, {"replicas": 2, "replicas_min": 1}])
def test_an_upsert_without_room_leaves_the_put_of_another(
    begin: Callable[[Lab, int], int], asked: dict[str, Any]
) -> None:
    lab, owner = lab_of(fill=FULL)
    generation = begin(lab, owner)
    refused(lab, S.NO_SPACE, 2 * MIB, upsert=True, **asked)
    assert lab.end([KEY], [generation], client=owner, checksum=3) == [S.OK]
    row = lab.get([KEY])[0][0]
    assert (row["generation"], row["checksum"]) == (generation, 3)


def test_an_upsert_without_enough_segments_leaves_the_put_of_another() -> None:
    lab, owner = lab_of()
    stay(lab, FULL)
    lab.mount(1)
    generation = unfinished(lab, owner)
    refused(lab, S.NO_SPACE, 2 * MIB, upsert=True, replicas=2, replicas_min=2)
    assert lab.end([KEY], [generation], client=owner) == [S.OK]


def test_a_put_without_room_leaves_one_that_is_late() -> None:
    lab, owner = lab_of(fill=FULL)
    generation = unfinished(lab, owner)
    lab.sleep(31)
    refused(lab, S.NO_SPACE, 2 * MIB)
    assert lab.end([KEY], [generation], client=owner) == [S.OK]


@pytest.mark.parametrize("late", [False, True])
def test_a_put_without_room_leaves_what_is_absent(late: bool) -> None:
    lab, owner = lab_of()
    generation = beside_another(lab, owner) if late else int(lab.put([KEY])[0])
    lab.mount(1)
    stay(lab, FULL, preferred=("segment1",))
    lab.sleep(31)
    lab.shard.set_absent(lab.now, 0, True)
    refused(lab, S.NO_SPACE, 2 * MIB)
    lab.shard.set_absent(lab.now, 0, False)
    if late:
        assert lab.end([KEY], [generation], client=owner) == [S.OK]
    assert int(lab.get([KEY])[0]["generation"][0]) == generation


def test_an_upsert_beyond_the_share_of_hard_pins_leaves_the_put_of_another() -> None:
    lab = Lab(hard_pin_share=0.5)
    owner = lab.open(10)
    generation = unfinished(lab, owner)
    refused(lab, S.PINS_FULL, 9 * MIB, upsert=True, hard_pin=True)
    assert lab.end([KEY], [generation], client=owner) == [S.OK]


def test_an_upsert_beyond_a_quota_leaves_the_put_of_another() -> None:
    lab = Lab()
    owner, tenant = lab.open(10), lab.shard.tenant("small", MIB)
    rows, _ = lab.start([KEY], SIZE, client=owner, tenant=tenant)
    refused(lab, S.TENANT_QUOTA, 2 * MIB, upsert=True, tenant=tenant)
    assert lab.end([KEY], rows["generation"], client=owner) == [S.OK]


@pytest.mark.parametrize("limit", ["quota", "hard pins"])
def test_what_is_overtaken_makes_room_within_limits(limit: str) -> None:
    """A put of the whole quota, or of all that may be pinned hard, is put anew."""
    lab = Lab(hard_pin_share=0.5)
    owner, tenant = lab.open(10), 0
    asked: dict[str, Any] = {"hard_pin": True}
    if limit == "quota":
        tenant, asked = lab.shard.tenant("small", 8 * MIB), {}
    lab.start([KEY], 7 * MIB, client=owner, tenant=tenant, **asked)
    rows, _ = lab.start([KEY], 5 * MIB, tenant=tenant, upsert=True, **asked)
    assert rows["status"].tolist() == [S.OK]
    rows, _ = lab.start([KEY + 1], 4 * MIB, tenant=tenant, upsert=True, **asked)
    assert rows["status"].tolist() == [S.TENANT_QUOTA if tenant else S.PINS_FULL]


def test_room_within_a_quota_that_may_not_come_is_given_to_nobody() -> None:
    """The first gets no room, so what it was to overtake stays, and counts."""
    lab = Lab(hard_pin_share=1.0)
    owner, tenant = lab.open(10), lab.shard.tenant("small", 14 * MIB)
    first, _ = lab.start([KEY], 12 * MIB, client=owner, tenant=tenant)
    rows, _ = lab.start([KEY, KEY + 1], [5 * MIB, 3 * MIB], tenant=tenant, upsert=True)
    assert rows["status"].tolist() == [S.NO_SPACE, S.TENANT_QUOTA]
    assert lab.end([KEY], first["generation"], client=owner) == [S.OK]


def test_an_upsert_whose_name_finds_no_room_leaves_the_put_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, owner = lab_of()
    generation = unfinished(lab, owner)
    heads = lab.shard.names._heads
    monkeypatch.setattr(lab.shard, "check_integrity", lambda: None)
    before, heads[0] = int(heads[0]), len(lab.shard.names._words)
    rows, _ = lab.start([KEY], upsert=True, names=["a longer name"])
    heads[0] = before
    assert rows["status"].tolist() == [S.NO_SPACE]
    assert lab.end([KEY], [generation], client=owner) == [S.OK]
    assert lab.listed() == [b"a"]


def test_an_upsert_for_which_there_is_no_row_leaves_the_put_of_another() -> None:
    lab = Lab(objects_max=64)
    owner = lab.open(10)
    count = len(lab.shard.rows)
    rows, _ = lab.start(list(range(count)), 64, client=owner)
    begun = rows["status"] == S.OK
    assert begun.all()
    refused(lab, S.NO_SPACE, 64, upsert=True)
    assert lab.end([KEY], rows["generation"][KEY : KEY + 1], client=owner) == [S.OK]


def test_of_a_batch_those_with_room_overtake_and_the_others_do_not() -> None:
    lab, owner = lab_of(fill=10 * MIB)
    keys = [KEY, KEY + 1, KEY + 2]
    first, _ = lab.start(keys, SIZE, client=owner)
    rows, _ = lab.start(keys, [SIZE, 8 * MIB, SIZE], upsert=True)
    assert rows["status"].tolist() == [S.OK, S.NO_SPACE, S.OK]
    told = lab.end(keys, first["generation"], client=owner)
    assert told == [S.SUPERSEDED, S.OK, S.SUPERSEDED]
    assert lab.end([KEY, KEY + 2], rows["generation"][[0, 2]]) == [S.OK, S.OK]


def test_of_equal_keys_that_overtake_the_first_is_put() -> None:
    lab, owner = lab_of()
    unfinished(lab, owner)
    lab.sleep(31)
    rows, _ = lab.start([KEY, KEY], SIZE)
    assert rows["status"].tolist() == [S.OK, S.ALREADY_EXISTS]
    assert lab.end([KEY], rows["generation"][:1]) == [S.OK]


def test_what_overtook_another_is_what_a_journal_tells() -> None:
    lab = Lab()
    kept = Kept(lab.shard.config)
    lab.shard = kept.shard
    lab.client = lab.open(1)
    lab.mount(0)
    owner = lab.open(10)
    unfinished(lab, owner)
    lab.put([KEY], SIZE, upsert=True)
    lab.start([KEY], SIZE, client=owner, upsert=True)
    rows, _ = lab.start([KEY], SIZE, upsert=True)
    again, restored = kept.again(lab.now)
    assert_same(lab.shard, again)
    assert restored.dropped == 0
    lab.shard = again
    assert lab.end([KEY], rows["generation"]) == [S.OK]
