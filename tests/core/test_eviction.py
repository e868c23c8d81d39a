"""Section 4 of the semantics: what leaves, in which order, and what must stay."""

from __future__ import annotations

from typing import Any

import pytest

from mooncake_store.core.janitor import PINS_ENDED_MAX
from mooncake_store.core.options import Placement, SoftPin
from mooncake_store.core.records import Status
from tests.core.lab import MIB, Lab, digests_of

SIZE = 4096


def gone(lab: Lab, keys: range) -> list[int]:
    return [key for key, there in zip(keys, lab.exists(keys), strict=True) if not there]


@pytest.mark.parametrize(
    ("count", "ratio", "leave"),
    [(400, 0.05, 20), (250, 0.10, 25), (200, 0.80, 160), (600, 0.50, 300)],
)
def test_exactly_the_oldest_leave(count: int, ratio: float, leave: int) -> None:
    lab = Lab()
    for key in range(count):
        lab.put([key], SIZE)
        lab.sleep(0.001)
    report = lab.evict(ratio)
    assert report.objects == leave
    assert gone(lab, range(count)) == list(range(leave))


def test_exactly_the_oldest_of_one_batch_leave() -> None:
    lab = Lab()
    lab.put(range(400), SIZE)
    assert lab.evict(0.05).objects == 20
    assert gone(lab, range(400)) == list(range(20))


def test_reading_makes_young() -> None:
    lab = Lab()
    for key in range(100):
        lab.put([key], SIZE)
    lab.sleep(1)
    lab.get(range(10))
    assert lab.evict(0.10).objects == 10
    assert gone(lab, range(100)) == list(range(10, 20))


def test_probing_does_not_make_young() -> None:
    lab = Lab()
    for key in range(100):
        lab.put([key], SIZE)
    lab.exists(range(10))
    lab.shard.find_prefix(lab.now, digests_of(range(10)))
    assert lab.evict(0.10).objects == 10
    assert gone(lab, range(100)) == list(range(10))


def test_soft_pinned_leave_last_and_only_up_to_the_floor() -> None:
    lab = Lab()
    lab.put(range(10), SIZE)
    lab.put(range(10, 20), SIZE, soft_pin=SoftPin.ENABLE)
    report = lab.evict(0.80, floor=0.80)
    assert report.objects == 16
    assert gone(lab, range(20)) == list(range(16))


def test_soft_pinned_stay_when_half_the_target_was_freed() -> None:
    lab = Lab()
    lab.put(range(10), SIZE)
    lab.put(range(10, 20), SIZE, soft_pin=SoftPin.ENABLE)
    assert lab.evict(0.80).objects == 10
    assert gone(lab, range(20)) == list(range(10))


def test_soft_pinned_stay_when_their_eviction_is_off() -> None:
    lab = Lab(evict_soft_pinned=False)
    lab.put(range(10), SIZE, soft_pin=SoftPin.ENABLE)
    lab.put(range(10, 12), SIZE)
    assert lab.evict(1.0, floor=1.0).objects == 2
    assert gone(lab, range(12)) == [10, 11]


def test_soft_pinned_leave_oldest_pin_first() -> None:
    lab = Lab()
    for key in range(10):
        lab.put([key], SIZE, soft_pin=SoftPin.ENABLE)
        lab.sleep(1)
    assert lab.evict(0.30, floor=0.30).objects == 3
    assert gone(lab, range(10)) == [0, 1, 2]


def test_an_expired_soft_pin_is_no_pin() -> None:
    lab = Lab(evict_soft_pinned=False)
    lab.put(range(5), SIZE, soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=10**9)
    lab.put(range(5, 10), SIZE)
    lab.sleep(2)
    lab.tick()
    assert lab.shard.stats().soft_pinned == 0
    assert lab.evict(1.0).objects == 10


def test_pins_that_end_in_one_moment_end_over_several_ticks_the_earliest_first() -> None:
    """All at once, a million of them would hold up every request for most of a second."""
    lab = Lab(evict_soft_pinned=False, objects_max=4 * PINS_ENDED_MAX)
    ttl = {"soft_pin": SoftPin.ENABLE, "soft_pin_ttl_ns": 10**9}
    for key in range(0, 2 * PINS_ENDED_MAX, PINS_ENDED_MAX):
        lab.put(range(key, key + PINS_ENDED_MAX), 64, **ttl)
    lab.sleep(0.5)
    later = range(2 * PINS_ENDED_MAX, 2 * PINS_ENDED_MAX + 10)
    lab.put(later, 64, **ttl)
    lab.sleep(2)
    left = []
    for _ in range(4):
        left.append(lab.shard.stats().soft_pinned)
        lab.tick()
    assert left == [2 * PINS_ENDED_MAX + 10, PINS_ENDED_MAX + 10, 10, 0]
    assert lab.evict(1.0).objects == later.stop


def test_a_group_leaves_whole() -> None:
    lab = Lab()
    lab.put(range(3), SIZE, groups=("g", "g", "g"))
    lab.put(range(3, 10), SIZE)
    assert lab.evict(0.10).objects == 3
    assert gone(lab, range(10)) == [0, 1, 2]


def test_a_group_is_as_young_as_its_youngest_or_leaves_whole() -> None:
    """Whichever member the policy meets first, the group is never torn."""
    lab = Lab()
    lab.put([0], SIZE, groups=("g",))
    lab.put(range(1, 9), SIZE)
    lab.put([9], SIZE, groups=("g",))
    lab.evict(0.10)
    left = gone(lab, range(10))
    assert left
    assert (0 in left) == (9 in left)


def test_a_group_with_a_leased_member_stays_and_another_takes_its_place() -> None:
    lab = Lab()
    lab.put(range(3), SIZE, groups=("g", "g", "g"))
    lab.put(range(3, 10), SIZE)
    lab.get([1], ttl=10)
    lab.sleep(1)
    assert lab.evict(0.10).objects == 1
    assert gone(lab, range(10)) == [3]


def test_a_group_with_a_hard_pinned_member_stays() -> None:
    lab = Lab()
    lab.put(range(3), SIZE, groups=("g", "g", "g"))
    lab.put(range(3, 6), SIZE)
    assert list(lab.shard.set_hard_pin(lab.now, digests_of([1]), True)) == [Status.OK]
    lab.evict(1.0)
    assert gone(lab, range(6)) == [3, 4, 5]


@pytest.mark.parametrize("asked", [None, ("",), ("g",)])
@pytest.mark.parametrize("before", ["", "g", "other"])
def test_an_upsert_joins_the_group_it_names_and_else_keeps_its_own(
    before: str, asked: tuple[str, ...] | None
) -> None:
    lab = Lab()
    lab.put([0], SIZE, groups=(before,))
    lab.put([1], SIZE, groups=("g",))
    lab.put([2], SIZE, groups=("other",))
    lab.put([0], SIZE, upsert=True, groups=asked)
    assert lab.stat(0).group == (before if asked in (None, ("",)) else "g")
    lab.get([1], ttl=10)
    lab.evict(1.0)
    assert lab.exists([0]) == [lab.stat(1).group == before or asked == ("g",)]


def test_groups_of_two_tenants_with_one_name_are_two() -> None:
    lab = Lab()
    other = lab.shard.tenant("other")
    lab.put([0], SIZE, groups=("g",))
    lab.put([1], SIZE, groups=("g",), tenant=other)
    lab.get([1], ttl=10)
    lab.sleep(1)
    lab.evict(1.0)
    assert gone(lab, range(2)) == [0]


def test_what_is_protected_stays() -> None:
    lab = Lab(segments=2)
    lab.put(range(10), SIZE)
    leased, pinned, copied = 0, 1, 2
    lab.get([leased], ttl=100)
    lab.shard.set_hard_pin(lab.now, digests_of([pinned]), True)
    source = int(lab.get([copied])[1]["segment"][0])
    target = next(index for index in lab.segments if index != source)
    assert lab.begin(copied, [target], source)[0] == Status.OK
    rows, _ = lab.start([10], SIZE)
    assert lab.evict(1.0, floor=1.0).objects == 7
    assert gone(lab, range(10)) == list(range(3, 10))
    assert lab.end([10], rows["generation"]) == [Status.OK]


def test_an_object_read_while_hard_pinned_is_evicted_after_the_pin() -> None:
    lab = Lab()
    lab.put([1, 2], SIZE, hard_pin=True)
    lab.get([1])
    lab.shard.set_hard_pin(lab.now, digests_of([1, 2]), False)
    assert lab.evict(1.0).objects == 2


def test_evicting_nothing() -> None:
    lab = Lab()
    assert lab.evict(1.0).objects == 0
    lab.put(range(5), SIZE)
    assert lab.evict(0.0).objects == 0


def test_a_full_segment_takes_16000_small_puts() -> None:
    lab = Lab(nbytes=4 * MIB)
    for first in range(0, 16_000, 100):
        keys = range(first, first + 100)
        rows, _ = lab.start(keys, 1024)
        assert (rows["status"] == Status.OK).all(), first
        assert lab.end(keys, rows["generation"]) == [Status.OK] * 100
        lab.sleep(0.01)
    assert lab.shard.stats().objects <= 4096
    assert all(lab.exists(range(15_900, 16_000)))


def test_one_batch_larger_than_the_segment_reports_what_did_not_fit() -> None:
    lab = Lab(nbytes=MIB)
    rows, _ = lab.start(range(1000), 4096)
    answers = set(rows["status"].tolist())
    assert answers == {int(Status.OK), int(Status.NO_SPACE)}
    placed = (rows["status"] == Status.OK).sum()
    assert 200 <= placed <= 256


def test_leased_objects_survive_pressure() -> None:
    lab = Lab(nbytes=4 * MIB)
    lab.put(range(20), 65_536)
    lab.get(range(20), ttl=100)
    for key in range(100, 400):
        lab.put([key], 65_536)
    assert all(lab.exists(range(20)))


def test_a_pool_full_of_leases_refuses_and_recovers() -> None:
    lab = Lab(nbytes=MIB)
    rows, _ = lab.start(range(300), 4096)
    placed = [key for key in range(300) if rows["status"][key] == Status.OK]
    lab.end(placed, rows["generation"][placed])
    lab.get(placed, ttl=10)
    assert lab.start([1000], 4096)[0]["status"][0] == Status.NO_SPACE
    assert all(lab.exists(placed))
    lab.sleep(11)
    assert lab.start([1000], 4096)[0]["status"][0] == Status.OK


def test_mixed_sizes_never_wedge_a_segment() -> None:
    """Small objects everywhere must not keep a large one out for good."""
    lab = Lab(nbytes=4 * MIB)
    for first in range(0, 2000, 50):
        lab.put(range(first, first + 50), 4096)
    for key in range(5000, 5020):
        rows, _ = lab.start([key], MIB)
        assert rows["status"][0] == Status.OK
        lab.end([key], rows["generation"])


def test_tick_keeps_use_below_the_watermark() -> None:
    lab = Lab(nbytes=4 * MIB)
    lab.put(range(1000), 4096)
    for _ in range(100):
        lab.sleep(0.01)
        lab.tick()
    stats = lab.shard.stats()
    assert stats.bytes_used <= 0.90 * stats.bytes_total
    assert stats.bytes_used >= 0.70 * stats.bytes_total


def test_the_watermark_counts_per_segment() -> None:
    lab = Lab(segments=2, nbytes=4 * MIB)
    lab.put(range(1000), 4096, preferred=("segment0",), excluded=("segment1",))
    for _ in range(100):
        lab.sleep(0.01)
        lab.tick()
    first, second = lab.shard.segments()[:2]
    assert first.used <= 0.90 * first.nbytes
    assert second.used == 0


@pytest.mark.parametrize(
    ("count", "options"), [(84, {}), (84, {"soft_pin": SoftPin.ENABLE}), (24, {"replicas": 2})]
)
@pytest.mark.parametrize("placement", list(Placement))
def test_nothing_leaves_while_another_segment_has_room(
    placement: Placement, count: int, options: dict[str, Any]
) -> None:
    """Large values in few batches: a batch that went to one segment alone would fill it."""
    lab = Lab(segments=3, nbytes=32 * MIB, placement=placement)
    for first in range(0, count, 12):
        lab.put(range(first, first + 12), MIB, **options)
        lab.sleep(0.01)
        lab.tick()
        assert all(lab.exists(range(first + 12)))
    assert all(segment.used <= 0.90 * segment.nbytes for segment in lab.shard.segments())


def test_what_is_pinned_softly_may_fill_one_segment_while_others_have_room() -> None:
    lab = Lab(segments=2, nbytes=16 * MIB)
    lab.put(range(15), MIB, preferred=("segment0",), soft_pin=SoftPin.ENABLE)
    lab.tick()
    assert all(lab.exists(range(15)))
    lab.put(range(15, 30), MIB, preferred=("segment1",), soft_pin=SoftPin.ENABLE)
    lab.tick()
    assert gone(lab, range(30)) != []  # all of them together are above the watermark


def test_nothing_pinned_softly_leaves_while_plain_objects_are_left_elsewhere() -> None:
    lab = Lab(segments=2, nbytes=16 * MIB)
    lab.put(range(15), MIB, preferred=("segment0",), soft_pin=SoftPin.ENABLE)
    lab.put(range(15, 29), MIB, preferred=("segment1",))
    lab.tick()
    left = gone(lab, range(29))
    assert left == list(range(15, 15 + len(left)))
    assert sum(segment.used for segment in lab.shard.segments()) <= 0.90 * 32 * MIB


def test_a_full_segment_that_drains_costs_the_others_nothing() -> None:
    lab = Lab(segments=2, nbytes=16 * MIB)
    lab.put(range(15), MIB, preferred=("segment0",), soft_pin=SoftPin.ENABLE)
    lab.put(range(15, 25), MIB, preferred=("segment1",))
    lab.shard.drain(lab.now, 0)
    for _ in range(5):
        lab.sleep(0.01)
        lab.tick()
    assert all(lab.exists(range(25)))


def test_tick_evicts_nothing_below_the_watermark() -> None:
    lab = Lab(nbytes=4 * MIB)
    lab.put(range(800), 4096)
    for _ in range(10):
        lab.sleep(100)
        lab.tick()
    assert all(lab.exists(range(800)))


def test_eviction_reclaims_late_puts_and_keeps_their_space_quarantined() -> None:
    lab = Lab()
    rows, _ = lab.start([1], SIZE)
    lab.sleep(31)
    lab.evict(1.0)
    assert lab.stat(1) is None
    assert lab.shard.stats().quarantined_bytes >= SIZE
    assert lab.end([1], rows["generation"]) == [Status.NOT_FOUND]
    assert lab.shard.stats().quarantined_bytes == 0


def test_the_room_told_is_what_pins_and_segments_leave() -> None:
    """What a put may count on were all evicted; leases and unfinished puts end, pins do not."""
    lab = Lab(segments=2, nbytes=16 * MIB, high_watermark=0.75, hard_pin_share=0.5)
    assert lab.shard.stats().room_bytes == 24 * MIB
    assert lab.shard.stats().pinnable_bytes == 16 * MIB
    lab.put([1], 4 * MIB, hard_pin=True)
    lab.put([2], 4 * MIB, soft_pin=SoftPin.ENABLE)
    lab.put([3], 4 * MIB)
    lab.get([3])
    lab.start([4], 4 * MIB)
    assert lab.shard.stats().room_bytes == 20 * MIB
    assert lab.shard.stats().pinnable_bytes == 12 * MIB
    lab.shard.unmount(lab.now, lab.client, lab.uuid(1))
    lab.tick()
    lost = 4 * MIB - lab.shard.stats().hard_pinned_bytes  # the pinned one may have lain there
    assert lab.shard.stats().room_bytes == 8 * MIB + lost
    assert lab.shard.stats().pinnable_bytes == 4 * MIB + lost


def test_a_group_leaves_whole_where_room_in_one_piece_is_made() -> None:
    lab = Lab()
    keys = range(14)
    lab.put(keys, MIB, groups=[f"group {key % 7}" for key in keys])  # of two, far from each other
    lab.put([100], 4 * MIB)
    left = gone(lab, keys)
    assert 3 <= len(left) < len(keys)
    assert sorted(left) == sorted({key + 7 if key < 7 else key - 7 for key in left})


def test_replicas_evict_only_where_room_lacks() -> None:
    lab = Lab(segments=2, nbytes=MIB, high_watermark=1.0)
    cold, warm = range(250), range(250, 500)
    lab.put(cold, SIZE, preferred=("segment0",))
    lab.put(warm, SIZE, preferred=("segment1",))
    lab.put(range(500, 508), SIZE, replicas=2, replicas_min=2)
    assert gone(lab, cold) == [0, 1]
    assert gone(lab, warm) == [250, 251]


def test_replicas_that_find_no_room_evict_nothing_elsewhere() -> None:
    lab = Lab(segments=2, nbytes=MIB, high_watermark=1.0)
    cold, leased = range(250), range(250, 506)
    lab.put(cold, SIZE, preferred=("segment0",))
    lab.put(leased, SIZE, preferred=("segment1",))
    lab.get(leased, ttl=5)
    rows, _ = lab.start(range(506, 514), SIZE, replicas=2, replicas_min=2)
    assert (rows["status"] == Status.NO_SPACE).all()
    assert gone(lab, cold) == []
