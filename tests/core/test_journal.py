"""What a shard writes down makes the same shard again."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mooncake_store.core import journal
from mooncake_store.core import ring as header
from mooncake_store.core.kernels import cells
from mooncake_store.core.options import ShardConfig, SoftPin, StartOptions
from mooncake_store.core.records import SegmentState, Status
from mooncake_store.core.restore import StreamEnd, restore
from mooncake_store.core.tasks import TaskKind
from tests.core.keeping import Kept, assert_same, objects_of, resting_of
from tests.core.lab import MIB, SECOND, START, digests_of, names_of
from tests.core.rules import Rules

if TYPE_CHECKING:
    from mooncake_store.core.shard import Shard

TTL = 10 * SECOND


class Life:
    """A kept shard with a client and two segments."""

    def __init__(self, words: int = 1 << 14, **config: Any) -> None:
        limits = ShardConfig(objects_max=1 << 16, segments_max=16, **config)
        self.kept = Kept(limits, words)
        self.shard = self.kept.shard
        self.now = START
        self.client = self.shard.open_client(self.now, b"c" * 16, 1, "host")
        for name in "ab":
            uuid = name.encode() * 16
            assert self.shard.mount(self.now, self.client, uuid, name, 16 * MIB, name)[0] == 0

    def put(
        self, keys: list[int], nbytes: int = 1000, *, tagged: bool = False, **options: object
    ) -> np.ndarray:
        """Put objects whole; returns their generations."""
        generations = self.begin(keys, nbytes, **options)
        sums = np.array(keys, np.uint64)
        given = self.client, digests_of(keys), generations, sums
        tags = sums + np.uint64(1 << 63) if tagged else None
        ended = self.shard.put_end(self.now, *given, tags=tags)
        assert not ended.any()
        return generations

    def begin(self, keys: list[int], nbytes: int = 1000, **options: object) -> np.ndarray:
        """Begin objects; returns their generations."""
        names = names_of([f"name/{key}" for key in keys])
        given = StartOptions(**options)  # type: ignore[arg-type]
        sizes = np.full(len(keys), nbytes, np.int64)
        asked = self.client, 0, digests_of(keys), sizes, names, given
        rows, _ = self.shard.put_start(self.now, *asked)
        assert not rows["status"].any()
        return np.ascontiguousarray(rows["generation"])

    def again(self) -> Shard:
        """Return the shard that a new process makes, after it was compared."""
        after, restored = self.kept.again(self.now)
        assert restored.dropped == 0
        assert restored.objects == self.shard.objects
        assert_same(self.shard, after)
        return after


def test_objects_names_pins_groups_and_replicas_come_back() -> None:
    life = Life()
    life.put([1, 2, 3])
    life.put([4, 5], replicas=2)
    life.put([6], soft_pin=SoftPin.ENABLE, soft_pin_ttl_ns=TTL)
    life.put([7], hard_pin=True)
    life.put([8, 9], groups=("g", ""))
    after = life.again()
    assert after.exists(life.now, digests_of(list(range(1, 10)))).all()
    found = after.stat(life.now, digests_of([8])[0])
    assert found is not None
    assert (found.name, found.group, found.checksum) == (b"name/8", "g", 8)


def test_tags_of_content_come_back_with_whoever_has_one() -> None:
    """Whether it was told when a put ended, or with all of the row, and in whatever row it is."""
    life = Life()
    life.put([1, 2], tagged=True)
    life.put([3, 4])
    life.put([5], tagged=True, groups=("g",), hard_pin=True)
    life.put([6, 7], tagged=True, replicas=2)
    life.shard.rename(life.now, digests_of([2]), digests_of([20]), names_of(["other"]))
    life.shard.remove(life.now, digests_of([1, 6]))
    life.now += 2 * TTL
    life.put([8, 9])  # in rows of such as had one
    upserted = life.shard.upsert_start(
        life.now, life.client, 0, digests_of([3, 7]), np.full(2, 1000, np.int64)
    )[0]
    tags = np.array([33, 0], np.uint64)
    generations = np.ascontiguousarray(upserted["generation"])
    given = digests_of([3, 7]), generations, tags
    assert not life.shard.put_end(life.now, life.client, *given, tags=tags).any()
    keys, tagged = digests_of([20, 3, 4, 5, 7, 8, 9]), 1 << 63
    expected = [2 + tagged, 33, 0, 5 + tagged, 0, 0, 0]
    for shard in (life.shard, life.again(), of_snapshot(life)):
        rows, _ = shard.get(life.now, life.client, keys, 0)
        assert not rows["status"].any()
        told = shard.tell_tags(life.now, keys, rows).view(np.uint64)
        assert told[:, 0].tolist() == expected
    rows, _ = life.shard.get(life.now, life.client, keys[::-1], 0)
    rows["generation"][-1] += 1  # as if another one had taken its place meanwhile
    told = life.shard.tell_tags(life.now, keys[::-1], rows).view(np.uint64)
    assert told[:, 0].tolist() == [*expected[:0:-1], 0]


def of_snapshot(life: Life) -> Shard:
    """Return the shard that is made of a whole snapshot alone."""
    before = int(life.kept.ring.header[header.SNAPSHOT])
    life.shard.journal.expect_snapshot()
    while int(life.kept.ring.header[header.SNAPSHOT]) == before:
        life.shard.tick(life.now)
    life.kept.sink.forget(int(life.kept.ring.header[header.SNAPSHOT]))
    return life.again()


def test_what_was_removed_or_evicted_stays_away() -> None:
    life = Life()
    life.put(list(range(64)), 200_000)
    life.shard.remove(life.now, digests_of([1, 2, 3]))
    life.now += TTL
    assert life.shard.evict(life.now, 0.3).objects
    after = life.again()
    assert not after.exists(life.now, digests_of([1, 2, 3])).any()


def test_a_put_that_was_begun_is_ended_by_its_client_after_a_restart() -> None:
    life = Life()
    generations = life.begin([1, 2])
    after = life.again()
    sums = np.array([5, 6], np.uint64)
    assert not after.put_end(life.now, life.client, digests_of([1, 2]), generations, sums).any()
    # The first answer was lost: the same question gets the same one.
    assert not after.put_end(life.now, life.client, digests_of([1, 2]), generations, sums).any()
    other = after.open_client(life.now, b"o" * 16, 1, "host")
    refused = after.put_end(life.now, other, digests_of([1]), generations[:1], sums[:1])
    assert refused[0] == Status.ILLEGAL_CLIENT


def test_what_a_request_began_is_found_by_its_number_after_a_restart() -> None:
    life = Life()
    asked = life.client, digests_of([1, 2]), np.full(2, 1000, np.int64)
    rows, replicas = life.shard.put_start(
        life.now, life.client, 0, *asked[1:], None, StartOptions(), 77
    )
    after = life.again()
    told_rows, told_replicas = after.put_begun(life.now, *asked, 77)
    assert told_rows.tolist() == rows.tolist()
    assert told_replicas.tolist() == replicas.tolist()
    assert (after.put_begun(life.now, *asked, 78)[0]["status"] == Status.NO_SPACE).all()


def test_an_upsert_that_runs_is_ended_after_a_restart() -> None:
    life = Life()
    life.put([1])
    sizes = np.array([500], np.int64)
    rows, _ = life.shard.upsert_start(life.now, life.client, 0, digests_of([1]), sizes)
    after = life.again()
    found = after.stat(life.now, digests_of([1])[0])
    assert found is not None
    assert found.size == 1000
    generations = np.ascontiguousarray(rows["generation"])
    sums = np.array([9], np.uint64)
    assert not after.put_end(life.now, life.client, digests_of([1]), generations, sums).any()
    found = after.stat(life.now, digests_of([1])[0])
    assert found is not None
    assert (found.size, found.name) == (500, b"name/1")


def test_no_byte_that_a_late_writer_may_touch_is_given_out_after_a_restart() -> None:
    life = Life(put_discard_ns=SECOND, put_release_ns=600 * SECOND)
    life.begin([1], 12 * MIB)
    life.begin([2], 12 * MIB)
    life.now += 2 * SECOND
    life.shard.evict(life.now, 0.1)  # their time is over; their space waits
    after = life.again()
    rows, _ = after.put_start(
        life.now, life.client, 0, digests_of([3]), np.array([12 * MIB], np.int64)
    )
    assert rows["status"][0] == Status.NO_SPACE
    life.now += 600 * SECOND
    after.tick(life.now)
    rows, _ = after.put_start(
        life.now, life.client, 0, digests_of([3]), np.array([12 * MIB], np.int64)
    )
    assert rows["status"][0] == Status.OK


def test_a_writer_that_gave_its_word_does_not_hold_space_after_a_restart() -> None:
    life = Life(put_discard_ns=SECOND, put_release_ns=600 * SECOND)
    generations = life.begin([1], 12 * MIB)
    life.begin([2], 12 * MIB)
    life.now += 2 * SECOND
    life.shard.evict(life.now, 0.1)
    life.shard.put_revoke(life.now, life.client, digests_of([1]), generations)
    rows, _ = life.shard.put_start(
        life.now, life.client, 0, digests_of([3]), np.array([12 * MIB], np.int64)
    )
    assert rows["status"][0] == Status.OK
    life.again()


def test_nothing_that_was_leased_leaves_before_the_last_lease_has_ended() -> None:
    life = Life()
    life.put([1, 2])
    life.now += SECOND
    rows, _ = life.shard.get(life.now, life.client, digests_of([1]), TTL)
    assert rows["status"][0] == Status.OK
    after = life.again()
    assert after.remove(life.now, digests_of([1]))[0] == Status.HAS_LEASE
    assert not after.evict(life.now, 1.0).objects
    life.now += TTL
    assert after.remove(life.now, digests_of([1]))[0] == Status.OK
    assert after.evict(life.now, 1.0).objects == 1


def test_a_renewed_lease_holds_after_a_restart() -> None:
    life = Life()
    generations = life.put([1])
    life.shard.renew(life.now, life.client, digests_of([1]), generations, TTL)
    after = life.again()
    assert after.remove(life.now + TTL - 1, digests_of([1]))[0] == Status.HAS_LEASE


def test_what_was_read_last_is_evicted_last_after_a_restart() -> None:
    life = Life(high_watermark=1.0)
    life.put([1], 1 * MIB)
    life.now += 5 * SECOND
    life.put([2], 1 * MIB)
    life.now += 5 * SECOND
    life.shard.get(life.now, life.client, digests_of([1]), SECOND)
    life.now += 2 * SECOND
    life.kept.sink.wants_snapshot = True  # snapshots see when things were read
    life.shard.tick(life.now)
    after = life.again()
    assert after.evict(life.now, 0.5).objects == 1
    assert after.exists(life.now, digests_of([1, 2])).tolist() == [True, False]


def test_a_copy_that_ran_is_given_up_and_its_target_waits() -> None:
    life = Life()
    life.put([1], 4 * MIB)
    found = life.shard.stat(life.now, digests_of([1])[0])
    assert found is not None
    source = found.replicas[0][0]
    target = 1 - source
    assert life.shard.submit_task(life.now, TaskKind.COPY, digests_of([1]), [target])[0] == 0
    (task,) = life.shard.fetch_tasks(life.now, life.client)
    after, _ = life.kept.again(life.now)
    after.check_integrity()
    found = after.stat(life.now, digests_of([1])[0])
    assert found is not None
    assert [segment for segment, _, _ in found.replicas] == [source]
    assert after.stats().quarantined_bytes == 4 * MIB
    assert after.finish_task(life.now, life.client, task.number, True) == Status.TASK_NOT_FOUND


def test_segments_that_drain_leave_or_left_do_so_after_a_restart() -> None:
    life = Life()
    life.put([1, 2, 3])
    life.shard.drain(life.now, 0)
    after = life.again()
    assert after.segments()[0].state == SegmentState.DRAINING
    life.shard.unmount(life.now, life.client, b"a" * 16)
    after = life.again()
    for _ in range(3):
        life.now += SECOND
        after.tick(life.now)
        life.shard.tick(life.now)
    assert len(after.segments()) == len(life.shard.segments()) == 1
    life.again()


def test_memory_that_comes_back_waits_for_readers_of_its_former_life_after_a_restart() -> None:
    life = Life()
    life.put([1])
    life.shard.get(life.now, life.client, digests_of([1]), TTL)
    for name in "ab":
        life.shard.unmount(life.now, life.client, name.encode() * 16)
    for _ in range(3):
        life.shard.tick(life.now)
    after = life.again()
    usable_from = []
    for shard in (life.shard, after):
        status, index = shard.mount(life.now, life.client, b"a" * 16, "a", 16 * MIB, "a")
        assert status == Status.OK
        segment = shard.space.get(index)
        assert segment is not None
        usable_from.append(segment.usable_from)
    assert usable_from[0] == usable_from[1]


def test_tenants_keep_their_numbers_and_quotas() -> None:
    life = Life()
    number = life.shard.tenant("team", 5 * MIB)
    life.shard.tenant("other")
    after = life.again()
    assert after.tenant("team") == number
    assert after.tenant_quota(number) == 5 * MIB
    sizes = np.array([6 * MIB], np.int64)
    rows, _ = after.put_start(life.now, life.client, number, digests_of([1]), sizes)
    assert rows["status"][0] == Status.TENANT_QUOTA


def test_a_quota_that_was_taken_away_is_so_after_a_restart() -> None:
    life = Life()
    number = life.shard.tenant("team", 5 * MIB)
    life.shard.end_quota("team")
    life.shard.end_quota("nobody")
    for shard in (life.shard, life.again()):
        assert shard.tenant_quota(number) is None
        sizes = np.array([6 * MIB], np.int64)
        rows, _ = shard.put_start(life.now, life.client, number, digests_of([1]), sizes)
        assert rows["status"][0] == Status.OK
        shard.check_integrity()


def test_a_client_that_was_closed_loses_its_puts_after_a_restart() -> None:
    life = Life()
    other = life.shard.open_client(life.now, b"o" * 16, 1, "host")
    sizes = np.array([1000], np.int64)
    life.shard.put_start(life.now, other, 0, digests_of([1]), sizes)
    life.shard.close_client(life.now, other)
    after = life.again()
    assert after.stat(life.now, digests_of([1])[0]) is None


def test_a_snapshot_alone_is_enough() -> None:
    life = Life()
    life.put(list(range(100)))
    life.put([200, 201], groups=("g", "g"))
    life.begin([300])
    life.kept.sink.take()
    life.kept.sink.wants_snapshot = True
    life.shard.tick(life.now)
    life.kept.sink.wants_snapshot = False
    begun = int(life.kept.ring.header[header.SNAPSHOT])
    life.put([400])
    life.kept.sink.forget(begun)
    life.again()


def test_a_snapshot_in_slices_sees_what_changes_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal, "SNAPSHOT_ROWS", 16)
    life = Life()
    life.shard.tick(life.now)  # the first one, of nothing
    life.put(list(range(200)))
    life.kept.sink.wants_snapshot = True
    first = int(life.kept.ring.header[header.SNAPSHOT])
    key = 1000
    while int(life.kept.ring.header[header.SNAPSHOT]) == first:
        life.shard.tick(life.now)
        life.shard.remove(life.now, digests_of([key - 1000, key - 900]))
        life.put([key])
        key += 1
    life.kept.sink.wants_snapshot = False
    life.kept.sink.forget(int(life.kept.ring.header[header.SNAPSHOT]))
    assert key > 1003
    life.again()


def test_a_snapshot_whose_end_finds_no_room_is_not_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    life = Life()
    life.put(list(range(600)))
    sink, ring = life.kept.sink, life.kept.ring.header
    sink.take()
    life.put(list(range(600, 900)))
    before = int(ring[header.SNAPSHOT])
    sink.wants_snapshot = True
    with monkeypatch.context() as patched:
        patched.setattr(sink, "make_room", lambda words: False)
        life.shard.tick(life.now)
        assert life.shard.journal.behind
        life.again()
    for _ in range(2):  # writes what waits, then tells of the end once more
        life.shard.tick(life.now)
    sink.wants_snapshot = False
    assert int(ring[header.SNAPSHOT]) > before
    sink.forget(int(ring[header.SNAPSHOT]))
    life.again()


def test_a_row_is_written_down_where_there_is_just_the_room_for_the_largest() -> None:
    life = Life()
    life.put([1])
    for room, place in ((cells.CELL_WORDS_MAX - 1, 0), (cells.CELL_WORDS_MAX, 1)):
        life.shard.journal.mark(0)  # who writes waits for as much, and tries until it is written
        assert cells.write_marked(life.shard.words, 0, room) == place


def test_a_batch_that_is_larger_than_the_ring_is_written_down_whole() -> None:
    life = Life()
    life.put(list(range(5000)), 64)
    assert len(life.kept.sink.take()) > 1
    life.again()


def test_words_that_are_no_cells_are_refused() -> None:
    life = Life()
    life.put([1])
    words = life.kept.sink.take()
    at = words[-1][0] + len(words[-1][1])
    end = StreamEnd(now=life.now, horizon=0, events_next=1, generation=1, snapshot=0)
    for wrong in (99 | 1 << 16, 2 | 9 << 16, 0, 1 | 5 << 16, 1 | 20 << 16 | -1 << 32):
        fresh = Kept(life.shard.config).shard
        with pytest.raises(ValueError, match="cell"):
            restore(fresh, [*words, (at, np.array([wrong, 0, 0], np.int64))], end, life.now)


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("segment", 14),
        ("segment", -1),
        ("offset_low", 16 * MIB - 1),
        ("offset_high", 1),
        ("size", 0),
        ("size", 17 * MIB),
        ("replicas", 2),
        ("state", 3),
        ("tenant", 77),
        ("tenant", 65_535),
    ],
)
def test_a_row_that_cannot_be_true_is_dropped_alone(field: str, wrong: int) -> None:
    life = Life()
    life.put([1, 2, 3])
    row = int(life.shard.table.find(digests_of([2]).view(np.int64))[0])
    columns = life.shard.rows if field in life.shard.rows.dtype.names else life.shard.cold
    columns[field][row] = wrong
    life.shard.journal.mark(row)
    life.put([4])  # with which the row is written down
    after, restored = life.kept.again(life.now)
    assert restored.dropped == 1
    assert after.exists(life.now, digests_of([1, 2, 3, 4])).tolist() == [1, 0, 1, 1]
    after.check_integrity()


def test_a_further_replica_that_cannot_be_true_drops_its_row() -> None:
    life = Life()
    life.put([1, 2], replicas=2)
    row = int(life.shard.table.find(digests_of([2]).view(np.int64))[0])
    life.shard.overflow["segment"][life.shard.rows["more"][row]] = 9
    life.shard.journal.mark(row)
    life.put([3])
    after, restored = life.kept.again(life.now)
    assert restored.dropped == 1
    assert after.exists(life.now, digests_of([1, 2, 3])).tolist() == [1, 0, 1]
    after.check_integrity()


def test_of_rows_that_say_the_same_place_one_is_left() -> None:
    life = Life()
    life.put([1, 2, 3], replicas=2)
    rows = life.shard.rows
    one, two = life.shard.table.find(digests_of([1, 2]).view(np.int64)).tolist()
    for field in ("segment", "offset_low", "offset_high"):
        rows[field][two] = rows[field][one]
    life.shard.journal.mark(two)
    life.put([4])
    after, restored = life.kept.again(life.now)
    assert restored.dropped == 1
    assert after.exists(life.now, digests_of([1, 2, 3, 4])).sum() == 3
    after.check_integrity()


@pytest.mark.parametrize("seed", range(4))
def test_any_life_is_the_same_after_a_restart(seed: int) -> None:
    rules = Rules(random.Random(seed))
    for step in range(400):
        rules.step()
        if step % 40 == 0:
            after, _ = rules.checked.keeping.again(rules.checked.now)
            assert_same(rules.checked.shard, after)
    assert objects_of(rules.checked.shard) or seed


def test_who_owns_a_segment_is_known_after_a_restart() -> None:
    life = Life()
    life.shard.close_client(life.now, life.client)
    other = life.shard.open_client(life.now, b"o" * 16, 1, "host")
    assert life.shard.mount(life.now, other, b"a" * 16, "a", 16 * MIB, "a")[0] == Status.OK
    after = life.again()
    owner = after.segments()[0].owner
    assert after.client_by_handle[owner].uuid == b"o" * 16


def test_a_segment_that_is_to_leave_when_it_is_empty_does_so_after_a_restart() -> None:
    life = Life()
    life.shard.drain(life.now, 0)
    deadline = life.now + 5 * SECOND
    assert not life.shard.unmount_gracefully(life.now, life.client, b"a" * 16, deadline)
    after = life.again()
    assert after.segments()[0].gone_at == deadline


def test_what_an_absent_segment_was_is_known_after_a_restart() -> None:
    life = Life()
    life.put(list(range(300)), 64)
    life.shard.set_absent(life.now, 0, True)
    life.shard.drain(life.now, 0)
    after = life.again()
    assert not after.exists(life.now, digests_of(list(range(300)))).all()
    for shard in (life.shard, after):
        shard.set_absent(life.now, 0, False)
        assert shard.segments()[0].state == SegmentState.DRAINING
        assert shard.exists(life.now, digests_of(list(range(300)))).all()


def test_a_second_generation_that_goes_on_alone_is_ended_after_a_restart() -> None:
    life = Life()
    life.put([1])
    found = life.shard.stat(life.now, digests_of([1])[0])
    assert found is not None
    first = "ab"[found.replicas[0][0]]
    only_other = StartOptions(excluded=(first,))
    sizes = np.array([500], np.int64)
    asked = life.client, 0, digests_of([1]), sizes, None, only_other
    rows, _ = life.shard.upsert_start(life.now, *asked)
    life.shard.unmount(life.now, life.client, first.encode() * 16)
    life.shard.tick(life.now)
    after = life.again()
    generations, sums = np.ascontiguousarray(rows["generation"]), np.array([9], np.uint64)
    assert not after.put_end(life.now, life.client, digests_of([1]), generations, sums).any()
    assert after.exists(life.now, digests_of([1])).all()


def test_what_a_late_writer_may_touch_is_known_after_a_second_restart_as_well() -> None:
    """Also on a segment whose number another one had before, which readers still used."""
    life = Life(put_discard_ns=SECOND, put_release_ns=600 * SECOND)
    life.put([1, 2])
    life.shard.get(life.now, life.client, digests_of([1, 2]), 300 * SECOND)
    for name in "ab":
        life.shard.unmount(life.now, life.client, name.encode() * 16)
    for _ in range(3):
        life.shard.tick(life.now)
    assert not life.shard.segments()
    for name in "cd":
        asked = name.encode() * 16, name, 16 * MIB, name
        assert life.shard.mount(life.now, life.client, *asked)[0] == Status.OK
    life.begin([3], 12 * MIB)
    life.now += 2 * SECOND
    life.shard.evict(life.now, 0.1)  # its time is over; its space waits
    words = life.kept.sink.take()
    end = StreamEnd(life.now, life.now + 300 * SECOND, 1, 10, 0)
    second = Kept(life.shard.config)
    restore(second.shard, words, end, life.now)
    third = Kept(life.shard.config).shard
    restore(third, [*words, *second.sink.take()], end, life.now)
    waits = resting_of(life.shard, life.now)
    assert len(waits) == 1
    assert resting_of(second.shard, life.now) == resting_of(third, life.now) == waits


def test_the_last_lease_is_known_after_a_second_restart_as_well() -> None:
    life = Life()
    life.put([1])
    life.shard.get(life.now, life.client, digests_of([1]), TTL)
    words, ring = life.kept.sink.take(), life.kept.ring.header
    second = Kept(life.shard.config, position=int(ring[header.HEAD]))
    restore(second.shard, words, StreamEnd(life.now, life.now + TTL, 1, 10, 0), life.now)
    end = StreamEnd(life.now, int(second.ring.header[header.HORIZON]), 1, 10, 0)
    third = Kept(life.shard.config).shard
    restore(third, [*words, *second.sink.take()], end, life.now)
    assert third.remove(life.now, digests_of([1]))[0] == Status.HAS_LEASE
    assert third.remove(life.now + TTL, digests_of([1]))[0] == Status.OK
