"""Segments whose worker is absent: what lies there is hidden, kept, and back with the worker."""

from __future__ import annotations

import pytest

from mooncake_store.core import janitor
from mooncake_store.core.janitor import DrainState
from mooncake_store.core.records import EventKind, SegmentState, Status
from tests.core.lab import MIB, SECOND, Lab, digest_of, digests_of, names_of
from tests.core.test_repair import missing, pass_time
from tests.core.test_segments import state_of
from tests.core.test_tasks import submit, where, work

S = Status


def leave(lab: Lab, number: int = 0) -> None:
    lab.shard.set_absent(lab.now, lab.segments[number], True)
    lab.check()


def come_back(lab: Lab, number: int = 0) -> None:
    lab.shard.set_absent(lab.now, lab.segments[number], False)
    lab.check()


def pool(count: int = 20) -> Lab:
    """Objects from 0 on the first of two segments, from 100 on the second."""
    lab = Lab(segments=2)
    lab.put(range(count), preferred=("segment0",), names=[f"a/{key}" for key in range(count)])
    lab.put(range(100, 100 + count), preferred=("segment1",))
    return lab


def kept(lab: Lab, keys: range) -> list[int]:
    return [key for key in keys if (found := lab.stat(key)) is not None and found.absent]


def told(lab: Lab, first: int = 1) -> list[tuple[int, int]]:
    """Kinds of events from a number on, and whom they are about."""
    _, events, gap = lab.shard.events.since(first, 100_000)
    assert not gap
    return [(int(event["kind"]), int(event["digest_lo"])) for event in events]


# Hidden and shown


def test_objects_are_hidden_and_then_as_they_were() -> None:
    lab = pool()
    before, places = lab.get(range(20), ttl=1000)
    leave(lab)
    assert lab.exists([0, 19, 100]) == [False, False, True]
    rows, replicas = lab.get(range(20), ttl=10)
    assert rows["status"].tolist() == [S.ABSENT] * 20
    assert rows["lease_ns"].tolist() == [0] * 20
    assert len(replicas) == 0
    assert lab.listed() == []
    assert lab.renew([0], before["generation"][:1], 10)[0] == [S.LEASE_EXPIRED]
    assert lab.stat(0).absent
    assert not lab.stat(100).absent
    come_back(lab)
    after, again = lab.get(range(20))
    assert after["generation"].tolist() == before["generation"].tolist()
    assert again.tolist() == places.tolist()
    assert len(lab.listed()) == 20
    assert not lab.stat(0).absent


def test_leases_granted_before_are_still_held_and_given_back() -> None:
    lab = pool()
    rows, _ = lab.get([0], ttl=1000)
    leave(lab)
    assert lab.remove([0]) == [S.HAS_LEASE]
    assert lab.release([0], rows["generation"]) == [S.OK]
    assert lab.remove([0]) == [S.OK]


def test_nothing_is_swept_and_nobody_told() -> None:
    lab = pool()
    number, before = lab.shard.events.next_number, lab.shard.stats()
    leave(lab)
    for _ in range(50):
        lab.sleep(60)
        lab.tick()
    after = lab.shard.stats()
    assert (after.objects, after.bytes_used, after.lost_objects) == (
        before.objects,
        before.bytes_used,
        0,
    )
    assert lab.shard.events.next_number == number
    come_back(lab)
    assert all(lab.exists(range(20)))
    assert lab.shard.events.next_number == number


def test_what_does_not_come_back_is_lost_and_told() -> None:
    lab = pool()
    leave(lab)
    number = lab.shard.events.next_number
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == S.OK
    for _ in range(5):
        lab.tick()
    assert lab.get(range(20))[0]["status"].tolist() == [S.NOT_FOUND] * 20
    assert lab.shard.stats().lost_objects == 20
    assert sorted(told(lab, number)) == sorted(
        (EventKind.REMOVED, digest_of(key)[0]) for key in range(20)
    )
    come_back(lab)  # too late
    assert not any(lab.exists(range(20)))


def test_a_second_replica_is_read_meanwhile_and_none_is_made_before_the_first_is_lost() -> None:
    lab = Lab(segments=3)
    lab.put(range(10), replicas=2, preferred=("segment0", "segment1"))
    leave(lab)
    assert all(where(lab, key) == {lab.segments[1]} for key in range(10))
    assert pass_time(lab, 10) == 0
    assert missing(lab) == 0
    come_back(lab)
    assert where(lab, 0) == set(lab.segments[:2])
    leave(lab)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == S.OK
    assert pass_time(lab, 10) == 10
    assert all(where(lab, key) == set(lab.segments[1:]) for key in range(10))


def test_misses_of_what_is_absent_are_counted_apart() -> None:
    lab = pool()
    leave(lab)
    lab.get([0, 1, 100, 999], ttl=1)
    lab.get([0])  # a question, not a read
    stats = lab.shard.stats()
    assert (stats.hits, stats.misses, stats.misses_absent) == (1, 3, 2)


@pytest.mark.parametrize("gone", [(0,), (1,), (0, 1)], ids=str)
def test_what_is_gone_for_good_is_not_told_to_come_back(
    gone: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sweep that follows the loss has not come to the object yet."""
    monkeypatch.setattr(janitor, "SWEEP_ROWS_URGENT", 1)
    lab = Lab(segments=2)
    lab.put([0, 1], replicas=2)
    for number in {0, 1}.difference(gone):
        lab.shard.set_absent(lab.now, lab.segments[number], True)
    for number in gone:
        lab.shard.unmount(lab.now, lab.client, lab.uuid(number))
    assert lab.get_status(1) == (S.NOT_FOUND if len(gone) == 2 else S.ABSENT)


@pytest.mark.parametrize("epoch", [1, 2])
def test_its_worker_brings_a_segment_back_by_mounting_it(epoch: int) -> None:
    lab = Lab(segments=0)
    index = lab.mount(0, client=lab.open(5, epoch=1))
    lab.put([1])
    lab.shard.set_absent(lab.now, index, True)
    assert lab.get_status(1) == S.ABSENT
    assert lab.mount(0, client=lab.open(5, epoch=epoch)) == index
    assert state_of(lab, index) == SegmentState.OK
    assert lab.get_status(1) == S.OK


def test_a_suspect_is_none_any_more_when_it_is_back() -> None:
    lab = pool()
    lab.shard.set_suspect(lab.now, lab.segments[0], True)
    leave(lab)
    for suspect in (False, True):
        lab.shard.set_suspect(lab.now, lab.segments[0], suspect)
        assert state_of(lab, lab.segments[0]) == SegmentState.ABSENT
    come_back(lab)
    assert state_of(lab, lab.segments[0]) == SegmentState.OK


# Puts


def test_a_key_can_be_put_anew_and_only_the_new_object_is_there_afterwards() -> None:
    lab = pool()
    lab.get([0], ttl=100)
    leave(lab)
    number = lab.shard.events.next_number
    generation = lab.put([0, 1], 5000)
    assert where(lab, 0) == where(lab, 1) == {lab.segments[1]}
    low = [digest_of(key)[0] for key in (0, 1)]
    assert sorted(told(lab, number)) == sorted(
        (kind, each) for kind in (EventKind.STORED, EventKind.REMOVED) for each in low
    )
    come_back(lab)
    rows, _ = lab.get([0, 1])
    assert rows["generation"].tolist() == generation.tolist()
    assert where(lab, 0) == {lab.segments[1]}
    # Somebody may still read the old one under his lease.
    assert lab.shard.stats().quarantined_bytes == 4096
    lab.sleep(101)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0
    assert lab.remove(range(20)) == [S.OK] * 20


def test_an_upsert_leaves_the_absent_value_until_it_is_complete() -> None:
    lab = pool()
    leave(lab)
    rows, _ = lab.start([0, 1], 5000, upsert=True)
    assert rows["status"].tolist() == [S.OK] * 2
    assert lab.get_status(0) == S.ABSENT
    assert lab.revoke([1], rows["generation"][1:]) == [S.OK]
    assert lab.end([0], rows["generation"][:1]) == [S.OK]
    assert lab.get([0, 1])[0]["status"].tolist() == [S.OK, S.ABSENT]
    come_back(lab)
    assert lab.get([0, 1])[0]["size"].tolist() == [5000, 4096]


def test_an_upsert_of_what_falls_silent_is_in_the_way_of_puts_as_any_put_is() -> None:
    lab = pool()
    writer = lab.open(7)
    rows, _ = lab.start([0], 5000, upsert=True, client=writer, preferred=("segment1",))
    leave(lab)
    assert lab.start([0])[0]["status"].tolist() == [S.ALREADY_EXISTS]
    lab.sleep(31)
    again, _ = lab.start([0])
    assert again["status"].tolist() == [S.OK]
    assert lab.end([0], rows["generation"], client=writer) == [S.SUPERSEDED]
    assert lab.end([0], again["generation"]) == [S.OK]
    come_back(lab)
    assert lab.get([0])[0]["generation"].tolist() == again["generation"].tolist()


def test_an_unfinished_put_ends_while_its_segment_is_absent() -> None:
    lab = pool()
    rows, _ = lab.start([50], preferred=("segment0",))
    leave(lab)
    assert lab.get_status(50) == S.NOT_READY
    assert lab.end([50], rows["generation"]) == [S.OK]
    assert lab.get_status(50) == S.ABSENT
    come_back(lab)
    assert lab.get_status(50) == S.OK


def test_nothing_is_placed_there_and_what_only_it_could_hold_waits() -> None:
    lab = Lab(segments=1)
    lab.segments.append(lab.mount(1, MIB))
    leave(lab)
    rows, replicas = lab.start(range(40), preferred=("segment0",))
    assert set(replicas["segment"].tolist()) == {lab.segments[1]}
    rows, _ = lab.start([100], 2 * MIB)
    assert rows["status"].tolist() == [S.NO_SPACE]
    rows, _ = lab.start([101], 100 * MIB)
    assert rows["status"].tolist() == [S.TOO_LARGE]


# Room


def test_absent_segments_are_no_room() -> None:
    lab = Lab(segments=2)
    lab.put(range(10), 100_000, preferred=("segment0",))
    before = lab.shard.stats()
    leave(lab)
    stats = lab.shard.stats()
    assert (stats.bytes_total, stats.bytes_allocated) == (16 * MIB, 0)
    assert stats.room_bytes == before.room_bytes // 2
    assert (stats.objects, stats.bytes_used) == (10, before.bytes_used)
    come_back(lab)
    assert lab.shard.stats() == before


def test_eviction_leaves_what_is_absent() -> None:
    """It takes nobody's room, however full the rest is."""
    lab = Lab(segments=2, nbytes=MIB, high_watermark=0.5)
    lab.put(range(200), preferred=("segment0",))  # above its high watermark
    leave(lab)
    for key in range(1000, 1600):
        lab.put([key])
        if key % 50 == 0:
            lab.sleep(0.01)
            lab.tick()
    assert lab.shard.stats().evicted_objects >= 300
    assert kept(lab, range(200)) == list(range(200))
    there = sum(lab.exists(range(1000, 1600)))
    assert there > 0
    assert lab.evict(1.0).objects == there
    assert kept(lab, range(200)) == list(range(200))
    assert not any(lab.exists(range(1000, 1600)))


def test_a_pool_of_absent_segments_evicts_nothing_and_waits() -> None:
    lab = Lab(segments=1, nbytes=MIB)
    lab.put(range(200))
    leave(lab)
    assert lab.start([1000])[0]["status"].tolist() == [S.NO_SPACE]
    assert lab.evict(1.0).objects == 0
    for _ in range(5):
        lab.sleep(1)
        lab.tick()
    come_back(lab)
    assert all(lab.exists(range(200)))


def test_absent_objects_count_in_a_quota_and_leave_for_its_sake() -> None:
    lab = Lab(segments=2)
    tenant = lab.shard.tenant("guest", 10 * 4096)
    for key in range(10):
        lab.put([key], tenant=tenant, preferred=("segment0",))
        lab.sleep(0.001)
    leave(lab)
    assert lab.shard.tenant_bytes(tenant) == 10 * 4096
    lab.put([100, 101], tenant=tenant)
    assert lab.shard.tenant_bytes(tenant) == 10 * 4096
    assert kept(lab, range(10)) == list(range(2, 10))


def test_a_group_leaves_whole_with_members_that_are_absent() -> None:
    lab = Lab(segments=2)
    lab.put([1], preferred=("segment0",), groups=("g",))
    lab.put([2], preferred=("segment1",), groups=("g",))
    leave(lab)
    assert lab.evict(0.5).objects == 2
    assert lab.stat(1) is None


# Removal


@pytest.mark.parametrize("force", [False, True])
def test_what_was_removed_does_not_come_back(force: bool) -> None:
    lab = pool()
    leave(lab)
    assert lab.remove([0, 1], force=force) == [S.OK] * 2
    assert lab.remove_matching("a/1", "prefix", force=force) == 10  # 10 to 19
    come_back(lab)
    assert lab.exists(range(20)) == [False] * 2 + [True] * 8 + [False] * 10
    lab.put([0])


def test_one_replica_of_several_can_be_removed_while_its_segment_is_absent() -> None:
    lab = Lab(segments=2)
    lab.put([1, 2], replicas=2)
    leave(lab)
    for key, number in ((1, 0), (2, 1)):
        digests = digests_of([key])
        out = lab.shard.remove_replicas(lab.now, digests, lab.segments[number])
        assert out.tolist() == [S.OK]
        lab.check()
    assert lab.get([1, 2])[0]["status"].tolist() == [S.OK, S.ABSENT]
    come_back(lab)
    assert where(lab, 1) == {lab.segments[1]}
    assert where(lab, 2) == {lab.segments[0]}


def test_renames_neither_move_what_is_absent_nor_find_it_in_the_way() -> None:
    lab = pool()
    leave(lab)
    for key, target, status in ((0, 500, S.NOT_FOUND), (100, 1, S.OK)):
        digests = digests_of([key]), digests_of([target])
        out = lab.shard.rename(lab.now, *digests, names_of([f"name{target}"]))
        assert out.tolist() == [status]
        lab.check()
    come_back(lab)
    assert lab.exists([0, 1, 100]) == [True, True, False]
    assert where(lab, 1) == {lab.segments[1]}


# Copies and drains


def test_no_copy_begins_from_or_to_an_absent_segment() -> None:
    lab = pool()
    leave(lab)
    assert submit(lab, 0, lab.segments[1:])[0] == S.NOT_FOUND
    assert submit(lab, 100, lab.segments[:1])[0] == S.SEGMENT_NOT_FOUND
    come_back(lab)
    number = submit(lab, 0, lab.segments[1:])[1]
    leave(lab)
    assert work(lab, [lab.client]) == 0
    task = lab.shard.tasks.get(number)
    assert task is not None
    assert task.message == "NOT_FOUND"


@pytest.mark.parametrize("move", [False, True])
@pytest.mark.parametrize("silent", [0, 1], ids=["source", "target"])
def test_a_copy_under_way_fails_and_costs_no_replica(silent: int, move: bool) -> None:
    lab = pool()
    status, task, _ = lab.begin(0, lab.segments[1:], move=move)
    assert status == S.OK
    leave(lab, silent)
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.REPLICA_IS_GONE
    lab.check()
    come_back(lab, silent)
    assert where(lab, 0) == {lab.segments[0]}


def test_a_copy_whose_worker_does_not_come_back_in_time_is_given_up() -> None:
    lab = pool()
    assert lab.begin(0, lab.segments[1:])[0] == S.OK
    leave(lab)
    assert lab.start([0])[0]["status"].tolist() == [S.BUSY]
    lab.sleep(61)
    lab.tick()
    assert lab.shard.stats().tasks_unfinished == 0
    come_back(lab)
    assert where(lab, 0) == {lab.segments[0]}


@pytest.mark.parametrize("before", [True, False], ids=["asked before", "asked meanwhile"])
def test_a_drain_waits_for_the_worker_and_goes_on(before: bool) -> None:
    lab = pool()
    job = 0
    if before:
        job = lab.shard.drain(lab.now, lab.segments[0])[1]
    leave(lab)
    if not before:
        job = lab.shard.drain(lab.now, lab.segments[0])[1]
    found = lab.shard.janitor.job(job)
    assert found is not None
    assert pass_time(lab, 5) == 0
    assert (found.state, found.moved) == (DrainState.RUNNING, 0)
    assert state_of(lab, lab.segments[0]) == SegmentState.ABSENT
    come_back(lab)
    assert state_of(lab, lab.segments[0]) == SegmentState.DRAINING
    assert pass_time(lab, 5) == 20
    assert (found.state, found.moved) == (DrainState.DONE, 20)
    assert state_of(lab, lab.segments[0]) == SegmentState.DRAINED
    leave(lab)
    come_back(lab)
    assert state_of(lab, lab.segments[0]) == SegmentState.DRAINED


def test_a_drain_that_is_cancelled_meanwhile_leaves_a_segment_that_takes_objects() -> None:
    lab = pool()
    job = lab.shard.drain(lab.now, lab.segments[0])[1]
    leave(lab)
    assert lab.shard.cancel_drain(lab.now, job) == S.OK
    assert state_of(lab, lab.segments[0]) == SegmentState.ABSENT
    come_back(lab)
    assert state_of(lab, lab.segments[0]) == SegmentState.OK


def test_the_deadline_of_a_graceful_unmount_passes_all_the_same() -> None:
    lab = pool()
    later = lab.now + 10 * SECOND
    assert lab.shard.unmount_gracefully(lab.now, lab.client, lab.uuid(0), later) == S.OK
    leave(lab)
    lab.sleep(11)
    for _ in range(5):
        lab.tick()
    assert state_of(lab, lab.segments[0]) == SegmentState.GONE
    assert lab.get_status(0) == S.NOT_FOUND


def test_what_lies_on_an_absent_and_a_lost_segment_takes_nobodys_room() -> None:
    """Also while the sweep has not come to it yet."""
    lab = Lab(segments=3)
    keys = range(janitor.ATTENDED_MAX + 40)
    lab.put(keys, replicas=2, replicas_min=2, excluded=("segment2",))
    leave(lab)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(1)) == S.OK
    lab.evict(1.0)
    assert kept(lab, keys) == list(keys)
