"""Sections 5 and 6 of the semantics: segments, copies, moves, tasks, drains, hits, events."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mooncake_store.core import janitor
from mooncake_store.core.janitor import ATTENDED_MAX, SWEEP_ROWS_URGENT
from mooncake_store.core.records import REPLICAS_MAX, EventKind, SegmentState, Status
from tests.core.lab import MIB, SECOND, Lab, digest_of

S = Status


def state_of(lab: Lab, index: int) -> Any:
    """The state of a segment, GONE once it is no longer listed."""
    states = {info.index: info.state for info in lab.shard.segments()}
    return states.get(index, SegmentState.GONE)


def where(lab: Lab, key: int) -> set[int]:
    return {int(replica["segment"]) for replica in lab.get([key])[1]}


# Mounting


def test_mount_twice_is_one_segment() -> None:
    lab = Lab()
    lab.put([1])
    assert lab.mount(0, host="host0") == lab.segments[0]
    assert len(lab.shard.segments()) == 1
    assert lab.get_status(1) == S.OK


def test_unmount_twice() -> None:
    lab = Lab()
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == S.OK
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == S.SEGMENT_NOT_FOUND
    lab.tick()


def test_unmount_hides_replicas_at_once() -> None:
    lab = Lab()
    lab.put(range(10))
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    lab.check()
    assert not any(lab.exists(range(10)))
    assert lab.get(range(10))[0]["status"].tolist() == [S.NOT_FOUND] * 10
    assert lab.listed() == []


def test_a_key_whose_replicas_are_gone_can_be_put_again_at_once() -> None:
    lab = Lab(segments=2)
    lab.put([1], preferred=("segment0",))
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    lab.put([1])
    assert where(lab, 1) == {lab.segments[1]}


def test_objects_with_a_second_replica_stay_readable() -> None:
    lab = Lab(segments=2)
    lab.put(range(10), replicas=2)
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    rows, replicas = lab.get(range(10), ttl=1)
    assert rows["status"].tolist() == [S.OK] * 10
    assert rows["replicas"].tolist() == [1] * 10
    assert set(replicas["segment"].tolist()) == {lab.segments[1]}
    for _ in range(5):
        lab.tick()
    assert all(lab.exists(range(10)))
    lab.sleep(2)
    assert lab.remove(range(10)) == [S.OK] * 10
    assert lab.shard.stats().bytes_used == 0


def test_a_swept_segment_gives_its_space_and_rows_back() -> None:
    lab = Lab(segments=2)
    lab.put(range(500), preferred=("segment0",))
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    for _ in range(20):
        lab.sleep(0.01)
        lab.tick()
    stats = lab.shard.stats()
    assert (stats.objects, stats.bytes_used) == (0, 0)
    assert state_of(lab, lab.segments[0]) == SegmentState.GONE


@pytest.mark.parametrize("ticks", [0, 1, 20])
def test_a_segment_may_come_back_empty(ticks: int) -> None:
    lab = Lab(segments=2)
    lab.put(range(500), preferred=("segment0",))
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    for _ in range(ticks):
        lab.tick()
    lab.mount(0, host="host0")
    assert not any(lab.exists(range(500)))
    lab.put(range(500), preferred=("segment0",))
    for _ in range(20):
        lab.tick()
    assert all(lab.exists(range(500)))


@pytest.mark.parametrize("ticks", [0, 1, 20])
def test_a_lease_outlives_unmount_sweep_and_return(ticks: int) -> None:
    lab = Lab(nbytes=MIB)
    lab.put([1], 700_000)
    lab.get([1], ttl=100)
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    for _ in range(ticks):
        lab.sleep(0.01)
        lab.tick()
    lab.mount(0, MIB, host="host0")
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.NO_SPACE]
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    for _ in range(ticks):
        lab.sleep(0.01)
        lab.tick()
    lab.mount(0, MIB, host="host0")
    assert lab.start([3], 700_000)[0]["status"].tolist() == [S.NO_SPACE]
    lab.sleep(100)
    lab.tick()
    assert lab.start([4], 700_000)[0]["status"].tolist() == [S.OK]


def test_quarantine_outlives_unmount_sweep_and_return() -> None:
    lab = Lab(nbytes=MIB)
    lab.put([1], 700_000)
    lab.get([1], ttl=100)
    lab.remove([1], force=True)
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    for _ in range(20):
        lab.sleep(0.01)
        lab.tick()
    lab.mount(0, MIB, host="host0")
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.NO_SPACE]


@pytest.mark.parametrize("ticks", [0, 1, 20])
def test_a_late_writer_is_waited_for_over_unmount_and_return(
    ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before the sweep has seen all rows."""
    monkeypatch.setattr(janitor, "SWEEP_ROWS_URGENT", 5)
    lab = Lab(nbytes=MIB)
    lab.put(range(100, 120), 100)
    lab.start([1], 700_000)
    lab.sleep(31)
    lab.evict(1.0)  # nobody waits for the put any more, but it may still be written
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    for _ in range(ticks):
        lab.sleep(0.01)
        lab.tick()
    lab.mount(0, MIB, host="host0")
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.NO_SPACE]
    lab.sleep(570)
    lab.tick()
    assert lab.start([2], 700_000)[0]["status"].tolist() == [S.OK]


def test_a_segment_that_ends_while_rows_are_swept_is_known_to_be_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By all that is asked, as it is while none are."""
    monkeypatch.setattr(janitor, "SWEEP_ROWS", 8)
    lab = Lab(segments=2, nbytes=MIB)
    lab.put(range(50), 1000, preferred=("segment0",))
    lab.put(range(50, 100), 1000, preferred=("segment1",))
    lab.tick()  # from here on a sweep is under way
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    assert lab.remove([1, 60]) == [S.NOT_FOUND, S.OK]
    assert lab.shard.stats().objects == 49


def test_only_owner_or_admin_unmounts() -> None:
    lab = Lab()
    stranger = lab.open(99)
    lab.put([1])
    assert lab.shard.unmount(lab.now, stranger, lab.uuid(0)) == S.ILLEGAL_CLIENT
    later = lab.now + SECOND
    assert lab.shard.unmount_gracefully(lab.now, stranger, lab.uuid(0), later) == S.ILLEGAL_CLIENT
    assert lab.get_status(1) == S.OK
    assert state_of(lab, lab.segments[0]) == SegmentState.OK
    assert lab.shard.unmount(lab.now, stranger, lab.uuid(0), True) == S.OK


def test_graceful_unmount_reads_until_its_deadline() -> None:
    lab = Lab(segments=2)
    lab.put([1], preferred=("segment0",))
    later = lab.now + 10 * SECOND
    assert lab.shard.unmount_gracefully(lab.now, lab.client, lab.uuid(0), later) == S.OK
    assert state_of(lab, lab.segments[0]) == SegmentState.DRAINING
    _, replicas = lab.start(range(100, 140))
    assert set(replicas["segment"].tolist()) == {lab.segments[1]}
    lab.sleep(9)
    lab.tick()
    assert lab.get_status(1) == S.OK
    lab.sleep(2)
    lab.tick()
    assert lab.get_status(1) == S.NOT_FOUND


def test_a_suspect_segment_is_read_but_not_written() -> None:
    lab = Lab(segments=2)
    lab.put([1], preferred=("segment0",))
    lab.shard.set_suspect(lab.now, lab.segments[0], True)
    assert lab.get_status(1) == S.OK
    _, replicas = lab.start(range(100, 140), preferred=("segment0",))
    assert set(replicas["segment"].tolist()) == {lab.segments[1]}
    lab.shard.set_suspect(lab.now, lab.segments[0], False)
    _, replicas = lab.start([200], preferred=("segment0",))
    assert set(replicas["segment"].tolist()) == {lab.segments[0]}


def test_segments_of_a_closed_client_stay() -> None:
    lab = Lab(segments=0)
    worker = lab.open(5)
    lab.mount(0, client=worker)
    lab.put([1])
    lab.shard.close_client(lab.now, worker)
    assert lab.get_status(1) == S.OK


def test_a_returning_worker_keeps_its_objects() -> None:
    lab = Lab(segments=0)
    index = lab.mount(0, client=lab.open(5, epoch=1))
    lab.put([1])
    again = lab.open(5, epoch=2)
    assert lab.mount(0, client=again) == index
    assert lab.get_status(1) == S.OK
    assert lab.shard.unmount(lab.now, again, lab.uuid(0)) == S.OK


# Copy and move


def placed() -> tuple[Lab, int, list[int]]:
    """One readable object, the segment it is on, and the others."""
    lab = Lab(segments=4)
    lab.put([1])
    (source,) = where(lab, 1)
    return lab, source, [index for index in lab.segments if index != source]


def test_a_copy_adds_replicas_when_it_ends() -> None:
    lab, source, others = placed()
    status, task, replicas = lab.begin(1, others[:2])
    assert status == S.OK
    assert {int(r["segment"]) for r in replicas} == set(others[:2])
    assert where(lab, 1) == {source}
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.OK
    assert where(lab, 1) == {source, *others[:2]}
    assert lab.remove([1]) == [S.OK]
    assert lab.shard.stats().bytes_used == 0


def test_a_failed_copy_leaves_nothing() -> None:
    lab, source, others = placed()
    used = lab.shard.stats().bytes_used
    _, task, _ = lab.begin(1, others[:2])
    assert lab.shard.finish_task(lab.now, lab.client, task, False) == S.OK
    assert where(lab, 1) == {source}
    assert lab.shard.stats().bytes_used == used
    assert lab.begin(1, others[:1])[0] == S.OK


def test_a_move_changes_places_when_it_ends() -> None:
    lab, source, others = placed()
    used = lab.shard.stats().bytes_used
    status, task, _ = lab.begin(1, others[:1], source, move=True)
    assert status == S.OK
    assert where(lab, 1) == {source}
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.OK
    assert where(lab, 1) == {others[0]}
    assert lab.shard.stats().bytes_used == used


def test_a_move_under_a_lease_quarantines_its_source() -> None:
    lab, _, others = placed()
    _, task, _ = lab.begin(1, others[:1], move=True)
    lab.get([1], ttl=10)
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.OK
    lab.check()
    assert where(lab, 1) == {others[0]}
    assert lab.shard.stats().quarantined_bytes >= 4096
    lab.sleep(11)
    lab.tick()
    assert lab.shard.stats().quarantined_bytes == 0


def test_a_failed_move_leaves_the_source() -> None:
    lab, source, others = placed()
    _, task, _ = lab.begin(1, others[:1], move=True)
    assert lab.shard.finish_task(lab.now, lab.client, task, False) == S.OK
    assert where(lab, 1) == {source}


def test_targets_that_hold_a_replica_are_skipped() -> None:
    lab, source, others = placed()
    status, task, replicas = lab.begin(1, [source, others[0]])
    assert status == S.OK
    assert [int(r["segment"]) for r in replicas] == [others[0]]
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.OK


def test_a_target_named_twice_is_one() -> None:
    lab, source, others = placed()
    status, task, replicas = lab.begin(1, [others[0], others[0]])
    assert status == S.OK
    assert [int(r["segment"]) for r in replicas] == [others[0]]
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.OK
    assert where(lab, 1) == {source, others[0]}


def test_no_object_gets_more_replicas_than_a_put_could_give_it() -> None:
    """A row counts its replicas in one byte, and replies are sized by that."""
    lab = Lab(segments=REPLICAS_MAX + 2, nbytes=MIB)
    lab.put([1], preferred=("segment0",))
    assert lab.begin(1, lab.segments[1:])[0] == S.INVALID_PARAMS
    status, task, _ = lab.begin(1, lab.segments[:REPLICAS_MAX])
    assert status == S.OK
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.OK
    assert len(where(lab, 1)) == REPLICAS_MAX
    assert lab.begin(1, lab.segments[-1:])[0] == S.INVALID_PARAMS
    assert lab.begin(1, lab.segments[-1:], move=True)[0] == S.INVALID_PARAMS


@pytest.mark.parametrize("move", [False, True])
def test_a_copy_whose_target_is_gone_costs_no_replica(move: bool) -> None:
    """Also while the sweep that would give the task up is still far from its object."""
    lab = Lab(segments=2)
    lab.put(range(SWEEP_ROWS_URGENT + 1), 64, preferred=("segment0",))
    key = SWEEP_ROWS_URGENT
    _, task, _ = lab.begin(key, lab.segments[1:], move=move)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(1)) == S.OK
    told = lab.shard.tasks.get(task)
    assert told is not None
    assert told.state.name == "PROCESSING"
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.REPLICA_IS_GONE
    lab.check()
    assert where(lab, key) == {lab.segments[0]}


def test_errors_of_copy_and_move() -> None:
    lab, source, others = placed()
    for move in (False, True):
        assert lab.begin(9, others[:1], move=move)[0] == S.NOT_FOUND
        assert lab.begin(1, others[:1], others[1], move=move)[0] == S.REPLICA_NOT_FOUND
        assert lab.begin(1, [4000], move=move)[0] == S.SEGMENT_NOT_FOUND
    lab.start([2])
    assert lab.begin(2, others[:1])[0] == S.REPLICA_NOT_FOUND
    assert lab.begin(1, others[:1])[0] == S.OK
    assert lab.begin(1, others[1:2])[0] == S.BUSY
    assert lab.begin(1, others[1:2], source, move=True)[0] == S.BUSY
    assert lab.remove([1]) == [S.BUSY]
    assert lab.start([1], upsert=True)[0]["status"].tolist() == [S.BUSY]


def test_only_the_worker_of_a_task_ends_it() -> None:
    lab, source, others = placed()
    stranger = lab.open(50)
    _, task, _ = lab.begin(1, others[:1])
    assert lab.shard.finish_task(lab.now, stranger, task, True) == S.ILLEGAL_CLIENT
    assert where(lab, 1) == {source}
    assert lab.shard.finish_task(lab.now, lab.client, task, True) == S.OK
    assert lab.shard.finish_task(lab.now, lab.client, task, True) in (
        S.TASK_NOT_FOUND,
        S.NO_TASK,
        S.OK,
    )


def test_a_copy_without_end_is_given_up() -> None:
    lab, source, others = placed()
    _, task, _ = lab.begin(1, others[:1])
    lab.sleep(61)
    lab.tick()
    assert where(lab, 1) == {source}
    assert lab.shard.finish_task(lab.now, lab.client, task, True) != S.OK
    assert where(lab, 1) == {source}
    assert lab.remove([1]) == [S.OK]


def test_a_given_up_copy_may_still_write_so_its_target_stays_reserved() -> None:
    """Invariant 5 for copies: the late write of a slow copier lands in nobody's data."""
    lab = Lab(segments=2, nbytes=MIB)
    lab.put([1], 600_000, preferred=("segment0",))
    assert lab.begin(1, lab.segments[1:])[0] == S.OK
    lab.sleep(61)
    lab.tick()
    rows, _ = lab.start([2], 600_000, excluded=("segment0",))
    assert rows["status"].tolist() == [S.NO_SPACE]
    lab.sleep(601)
    lab.tick()
    assert lab.start([2], 600_000, excluded=("segment0",))[0]["status"].tolist() == [S.OK]


@pytest.mark.parametrize("move", [False, True])
def test_a_copy_does_not_land_in_leased_memory_that_came_back(move: bool) -> None:
    lab = Lab(segments=2, nbytes=MIB)
    lab.put([1], 700_000, preferred=("segment0",))
    lab.put([2], 700_000, preferred=("segment1",))
    lab.get([1], ttl=100)
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    target = lab.mount(0, MIB, host="host0")
    assert lab.begin(2, [target], move=move)[0] != S.OK
    lab.sleep(101)
    lab.tick()
    assert lab.begin(2, [target], move=move)[0] == S.OK


def test_force_remove_waits_for_a_copy() -> None:
    lab, _, others = placed()
    _, task, _ = lab.begin(1, others[:1])
    assert lab.remove([1], force=True) == [S.BUSY]
    lab.shard.finish_task(lab.now, lab.client, task, True)
    assert lab.remove([1], force=True) == [S.OK]


@pytest.mark.parametrize("ok", [True, False])
@pytest.mark.parametrize("lost", ["source", "target"])
@pytest.mark.parametrize("move", [True, False])
def test_a_segment_that_goes_away_during_a_copy(move: bool, lost: str, ok: bool) -> None:
    lab, source, others = placed()
    _, task, _ = lab.begin(1, others[:1], source, move=move)
    gone = source if lost == "source" else others[0]
    number = lab.segments.index(gone)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(number)) == S.OK
    lab.tick()
    lab.shard.finish_task(lab.now, lab.client, task, ok)
    lab.check()
    assert gone not in where(lab, 1)
    if lost == "target":
        assert where(lab, 1) == {source}
    for _ in range(10):
        lab.sleep(61)
        lab.tick()
    lab.remove([1], force=True)
    lab.sleep(601)
    lab.tick()
    assert lab.shard.stats().bytes_used == 0


# Hits and events


def test_hits_are_counted_anew_in_each_window() -> None:
    lab = Lab(hits_window_ns=10 * SECOND)
    lab.put(range(5))
    for _ in range(8):
        lab.get([3], ttl=1)
    lab.get([1, 2], ttl=1)
    assert [lab.stat(key).hits for key in range(5)] == [0, 1, 1, 8, 0]
    lab.sleep(10)
    lab.get([3])
    assert lab.stat(3).hits == 1


def test_events_tell_what_is_readable() -> None:
    lab = Lab()
    lab.put([1, 2])
    lab.start([3])
    lab.remove([1])
    first, events, gap = lab.shard.events.since(1, 100)
    assert not gap
    told = [(int(event["kind"]), int(event["digest_lo"])) for event in events]
    low = {key: digest_of(key)[0] for key in (1, 2)}
    assert told == [
        (EventKind.STORED, low[1]),
        (EventKind.STORED, low[2]),
        (EventKind.REMOVED, low[1]),
    ]
    after, none, gap = lab.shard.events.since(first + len(events), 100)
    assert (len(none), gap) == (0, False)
    assert after == first + len(events)


def test_events_lost_are_a_gap() -> None:
    lab = Lab(events_kept=16)
    lab.put(range(100))
    _, events, gap = lab.shard.events.since(1, 1000)
    assert gap
    assert len(events) <= 16
    found: set[int] = set()
    cursor = 0
    for _ in range(1000):
        digests, cursor, _ = lab.shard.event_snapshot(cursor, 7)
        found |= {int(low) for low in np.asarray(digests, np.uint64)[:, 0]}
        if not cursor:
            break
    assert found == {digest_of(key)[0] for key in range(100)}


def test_following_events_gives_the_set_of_readable_objects() -> None:
    """Whatever takes an object away (eviction, unmount, upsert, expiry), followers are told."""
    lab = Lab(segments=2, nbytes=MIB)
    lab.put(range(100), 4096)
    lab.put(range(100, 150), 4096, replicas=2)
    lab.evict(0.3)
    lab.put(range(120, 130), 100, upsert=True)
    lab.remove(range(110, 115))
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    for _ in range(20):
        lab.sleep(0.01)
        lab.tick()
    _, events, gap = lab.shard.events.since(1, 100_000)
    assert not gap
    known: set[int] = set()
    for event in events:
        if event["kind"] == EventKind.STORED:
            known.add(int(event["digest_lo"]))
        elif event["kind"] == EventKind.REMOVED:
            known.discard(int(event["digest_lo"]))
        elif event["kind"] == EventKind.CLEARED:
            known.clear()
    there = [key for key in range(150) if lab.exists([key])[0]]
    assert known == {digest_of(key)[0] for key in there}
    assert there


def test_a_number_is_given_anew_only_when_no_object_names_its_segment_any_more() -> None:
    lab = Lab(segments=2)
    keys = range(ATTENDED_MAX + 200)
    lab.put(keys, replicas=2)
    assert lab.shard.unmount(lab.now, lab.client, lab.uuid(0)) == S.OK
    for _ in range(100):
        lab.tick()
        if lab.shard.space.get(0) is None:
            break
    fresh = lab.mount(9)
    assert fresh == 0
    _, replicas = lab.get(keys)
    assert set(replicas["segment"].tolist()) == {1}
    assert len(replicas) == len(keys)


def test_a_uuid_of_zeros_is_that_of_one_segment() -> None:
    lab = Lab(segments=1)
    status, _ = lab.shard.mount(lab.now, lab.client, bytes(16), "zeros", MIB, "host0")
    assert status == Status.OK
    lab.put([0], preferred=("zeros",))
    lab.get([0], ttl=100)
    assert lab.shard.unmount(lab.now, lab.client, bytes(16)) == Status.OK
    lab.mount(5)
    rows, replicas = lab.start([1], preferred=("segment5",))
    assert rows["status"].tolist() == [Status.OK]
    assert [lab.shard.space.get(int(at)).name for at in replicas["segment"]] == ["segment5"]
