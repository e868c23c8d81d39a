"""A stream that lacks stretches makes a shard that lacks what these told, and nothing else."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mooncake_store.core import ring as header
from mooncake_store.core.last_cells import last_cells
from mooncake_store.core.options import ShardConfig
from mooncake_store.core.records import Status
from mooncake_store.core.restore import Damage, Restored, StreamEnd, restore
from tests.core.damaged import Runs, assert_exact, overlapping, used_by_writers
from tests.core.keeping import Kept, objects_of
from tests.core.lab import MIB, SECOND, START, Lab, digests_of, names_of
from tests.core.rules import Rules

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.shard import Shard

HOUR = 3600 * SECOND
SHORT = {
    "put_discard_ns": SECOND,
    "put_release_ns": 60 * SECOND,
    "task_timeout_ns": 5 * SECOND,
    "lease_ttl_max_ns": 30 * SECOND,
}


def end_of(kept: Kept) -> StreamEnd:
    words = [int(word) for word in kept.ring.header[: header.SNAPSHOT + 1]]
    return StreamEnd(
        words[header.NOW], words[header.HORIZON], words[header.EVENTS_NEXT],
        words[header.GENERATION], words[header.SNAPSHOT],
    )  # fmt: skip


def restored(
    kept: Kept, left: Runs, now: int, told_until: int | None = None
) -> tuple[Kept, Restored]:
    """Make a shard, which writes down again, of what is left of a stream."""
    whole = kept.sink.take()
    until = int(kept.ring.header[header.NOW]) if told_until is None else told_until
    end = int(kept.ring.header[header.HEAD])
    again = Kept(kept.shard.config, position=end)
    again.ring.header[header.SNAPSHOT] = kept.ring.header[header.SNAPSHOT]
    damage = Damage(last_cells(whole), end, until)
    return again, restore(again.shard, left, end_of(kept), now, damage)


class Life:
    """A kept shard each of whose operations is a run of its own."""

    def __init__(self, **config: int) -> None:
        self.kept = Kept(ShardConfig(objects_max=1 << 14, segments_max=16, **config))
        self.shard = self.kept.shard
        self.now = START
        self.shard.tick(self.now)
        self.cut()
        self.client = self.shard.open_client(self.now, b"c" * 16, 1, "host")
        for name in "ab":
            self.shard.mount(self.now, self.client, name.encode() * 16, name, 16 * MIB, name)
        self.cut()
        self.shard.tick(self.now)  # tells of these once more
        self.cut()

    def cut(self) -> int:
        """Let a run end here; returns how many there are."""
        return len(self.kept.sink.take())

    def begin(
        self, keys: list[int], nbytes: int = 1000, upsert: bool = False
    ) -> NDArray[np.uint32]:
        start = self.shard.upsert_start if upsert else self.shard.put_start
        sizes, names = np.full(len(keys), nbytes, np.int64), names_of([f"n/{k}" for k in keys])
        rows, _ = start(self.now, self.client, 0, digests_of(keys), sizes, names)
        assert not rows["status"].any()
        self.cut()
        return np.ascontiguousarray(rows["generation"])

    def end(self, keys: list[int], generations: NDArray[np.uint32]) -> None:
        sums = np.array(keys, np.uint64)
        ended = self.shard.put_end(self.now, self.client, digests_of(keys), generations, sums)
        assert not ended.any()
        self.cut()

    def put(self, keys: list[int], nbytes: int = 1000) -> None:
        self.end(keys, self.begin(keys, nbytes))

    def without(self, *runs: int, told_until: int | None = None) -> tuple[Shard, Restored]:
        """Return the shard that is made without some of the runs, after it was compared."""
        whole = self.kept.sink.take()
        gone = {run % len(whole) for run in runs}
        left = [run for at, run in enumerate(whole) if at not in gone]
        before, _ = self.kept.again(self.now)
        after, what = restored(self.kept, left, self.now, told_until)
        since = end_of(self.kept).snapshot
        assert assert_exact(before, after.shard, whole, left, since) == what.lost
        return after.shard, what

    def there(self, shard: Shard, keys: list[int]) -> list[bool]:
        found: list[bool] = shard.exists(self.now, digests_of(keys)).astype(bool).tolist()
        return found


def test_what_was_put_before_and_after_is_there_and_what_was_put_between_is_not() -> None:
    life = Life()
    life.put([1])
    first = life.cut()
    life.put([2])
    life.put([3])
    shard, what = life.without(first, first + 1)
    assert life.there(shard, [1, 2, 3]) == [True, False, True]
    assert (what.objects, what.lost, what.dropped) == (2, 1, 0)


def test_a_put_that_began_in_the_missing_words_and_one_that_ended_there_are_lost() -> None:
    life = Life()
    ended_there = life.begin([1])
    missing = life.cut()
    life.end([1], ended_there)
    began_there = life.begin([2])
    last = life.cut()
    life.end([2], began_there)
    shard, what = life.without(*range(missing, last))
    assert life.there(shard, [1, 2]) == [False, False]
    assert what.lost == 2


def test_a_put_that_began_before_and_ended_behind_is_there() -> None:
    life = Life()
    generations = life.begin([1])
    missing = life.cut()
    life.put([2])
    life.end([1], generations)
    shard, _ = life.without(missing, missing + 1)
    assert life.there(shard, [1, 2]) == [True, False]


def test_what_was_removed_in_the_missing_words_does_not_come_back() -> None:
    life = Life()
    life.put([1, 2])
    missing = life.cut()
    life.shard.remove(life.now, digests_of([1]))
    life.cut()
    life.put([3])
    shard, what = life.without(missing)
    assert life.there(shard, [1, 2, 3]) == [False, True, True]
    assert what.lost == 0


def test_what_was_replaced_in_the_missing_words_is_lost_and_not_old() -> None:
    life = Life()
    life.put([1])
    missing = life.cut()
    life.end([1], life.begin([1], 500, upsert=True))
    shard, _ = life.without(*range(missing, life.cut()))
    assert life.there(shard, [1]) == [False]


def test_a_put_over_an_object_that_is_lost_goes_on_alone() -> None:
    life = Life()
    life.put([1])
    generations = life.begin([1], 500, upsert=True)
    life.shard.set_hard_pin(life.now, digests_of([1]), True)  # of the object, not of the put
    life.cut()
    shard, what = life.without(-1)
    assert what.lost == 1
    sums = np.array([7], np.uint64)
    assert not shard.put_end(life.now, life.client, digests_of([1]), generations, sums).any()
    found = shard.stat(life.now, digests_of([1])[0])
    assert found is not None
    assert (found.size, found.checksum) == (500, 7)
    shard.check_integrity()


def test_the_end_may_be_missing_as_well() -> None:
    life = Life()
    life.put([1])
    life.put([2])
    shard, what = life.without(-1, -2)
    assert life.there(shard, [1, 2]) == [True, False]
    assert what.lost == 1


def test_no_damage_takes_what_was_told_twice() -> None:
    life = Life()
    whole = life.cut()
    life.put([1])
    for run in range(1, whole):
        shard, _ = life.without(run)
        assert life.there(shard, [1]) == [True], f"run {run}"
        assert life.client in shard.client_by_handle


def test_nothing_is_told_twice_in_one_run() -> None:
    life = Life()
    missing = life.cut()
    client = life.shard.open_client(life.now, b"d" * 16, 1, "host")
    life.shard.tick(life.now)  # while nobody has taken away what was told
    behind = life.cut()
    life.shard.tick(life.now)
    shard, _ = life.without(*range(missing, behind))
    assert client in shard.client_by_handle


def test_what_was_told_later_counts_though_what_it_replaced_was_told_again_behind_it() -> None:
    life = Life()
    missing = life.cut()
    life.shard.tenant("default", 8 * MIB)
    behind = life.cut()
    life.shard.tenant("default", 4 * MIB)
    life.cut()
    life.shard.tick(life.now)
    shard, _ = life.without(*range(missing, behind))
    assert shard.tenant_quota(0) == 4 * MIB


def test_what_lay_on_a_segment_nobody_was_told_of_is_dropped() -> None:
    life = Life()
    whole = life.cut()
    life.put([1])
    shard, what = life.without(*range(1, whole))
    assert life.there(shard, [1]) == [False]
    assert (what.lost, what.dropped) == (0, 1)
    # Its worker brings it again: nothing is placed there before the time is over.
    client = shard.open_client(life.now, b"d" * 16, 1, "host")
    assert client > life.client, "a handle was given out twice"
    status, _ = shard.mount(life.now, client, b"a" * 16, "a", 16 * MIB, "a")
    assert status == Status.OK
    assert not places(shard, client, life.now)
    assert places(shard, client, life.now + HOUR)


def test_a_tenant_gets_no_number_that_another_has() -> None:
    life = Life()
    life.shard.tenant("one")
    first = life.cut()
    life.shard.tenant("two")
    life.shard.tick(life.now)
    life.cut()
    life.shard.tick(life.now)
    kept_by_the_last = life.cut()
    shard, _ = life.without(*range(first - 1, kept_by_the_last - 1))
    names = {name: shard.tenant(name) for name in ("default", "one", "two", "three")}
    assert len(set(names.values())) == 4


def places(shard: Shard, client: int, now: int) -> list[tuple[int, int, int]]:
    """Put as many objects as there is room for; returns where they lie."""
    found: list[tuple[int, int, int]] = []
    shard.tick(now)
    for key in range(10_000, 10_064):
        sizes = np.array([MIB // 2], np.int64)
        rows, replicas = shard.put_start(now, client, 0, digests_of([key]), sizes)
        if rows["status"][0] == Status.OK:
            found.append((int(replicas["segment"][0]), int(replicas["offset"][0]), MIB // 2))
    shard.check_integrity()
    return found


def test_no_space_that_a_lost_writer_may_write_to_is_given_out_before_its_time() -> None:
    life = Life(**SHORT)
    life.begin([1], 4 * MIB)
    last = life.cut()
    shard, _ = life.without(last - 1)
    assert not places(shard, life.client, life.now + 59 * SECOND)
    assert places(shard, life.client, life.now + 66 * SECOND)


def test_space_is_given_out_at_once_where_all_that_is_missing_is_old() -> None:
    life = Life(**SHORT)
    life.put([1])
    missing = life.cut()
    life.put([2])
    told_until = life.now
    life.now += HOUR
    life.put([3])
    shard, what = life.without(missing, told_until=told_until)
    assert what.lost == 1
    assert places(shard, life.client, life.now)


def test_space_of_what_is_lost_waits_for_the_last_lease() -> None:
    life = Life(**SHORT | {"lease_ttl_max_ns": HOUR})
    life.put([1])
    missing = life.cut()
    told_until = life.now
    life.now += 2 * HOUR
    life.put([2])
    life.shard.get(life.now, life.client, digests_of([1]), HOUR)
    life.cut()
    shard, _ = life.without(missing - 1, told_until=told_until)
    assert not places(shard, life.client, life.now + HOUR - SECOND)
    assert places(shard, life.client, life.now + HOUR + SECOND)


def test_space_of_what_left_while_it_was_read_waits_for_its_reader() -> None:
    life = Life(**SHORT | {"lease_ttl_max_ns": HOUR})
    life.put([1])
    life.shard.get(life.now, life.client, digests_of([1]), HOUR)
    missing = life.cut()
    life.shard.remove(life.now, digests_of([1]), force=True)
    behind = life.cut()
    life.put([2])
    shard, what = life.without(*range(missing, behind))
    assert (what.lost, what.dropped) == (0, 0)
    assert not places(shard, life.client, life.now + HOUR - SECOND)
    assert places(shard, life.client, life.now + HOUR + SECOND)


def test_what_was_lost_stays_lost_and_its_space_spared_after_another_restart() -> None:
    life = Life(**SHORT)
    life.put([1, 2])
    life.put([3])
    whole = life.kept.sink.take()
    left = whole[:-2]
    first, what = restored(life.kept, left, life.now)
    assert what.lost == 1
    since = first.sink.take()
    last = last_cells(since, last_cells(whole), int(life.kept.ring.header[header.HEAD]))
    damage = Damage(last, int(first.ring.header[header.HEAD]), life.now)
    second = Kept(life.shard.config).shard
    told = restore(second, [*left, *since], end_of(first), life.now, damage)
    assert (told.objects, told.lost) == (2, 0)
    assert objects_of(second) == objects_of(first.shard)
    assert not places(second, life.client, life.now + 59 * SECOND)
    assert places(second, life.client, life.now + 66 * SECOND)


@pytest.mark.parametrize("seed", range(6))
def test_any_stream_that_lacks_some_runs_loses_what_these_told(seed: int) -> None:
    chance = random.Random(seed)
    rules = Rules(chance)
    kept = rules.checked.keeping
    for _ in range(300):
        rules.step()
        kept.sink.take()
    now, whole = rules.checked.now, kept.sink.take()
    before, _ = kept.again(now)
    writers = used_by_writers(before, now)
    for _ in range(12):
        gone = {chance.randrange(len(whole)) for _ in range(chance.choice((1, 2, 5, 20)))}
        left = [run for at, run in enumerate(whole) if at not in gone]
        after, what = restored(kept, left, now)
        exact = before, after.shard, whole, left, end_of(kept).snapshot
        assert assert_exact(*exact) == what.lost
        for client in list(after.shard.client_by_handle)[:1]:
            for place in places(after.shard, client, now):
                assert not any(overlapping(place, each) for each in writers)


def test_what_was_put_in_the_last_second_that_is_not_known_is_not_believed() -> None:
    lab = Lab()
    lab.sleep(-(lab.now % SECOND) / SECOND)
    second = lab.now // SECOND
    lab.put([1])
    lab.sleep(0.999)
    lab.put([2])
    lab.sleep(0.001)
    lab.put([3])
    lab.shard.space.doubt_mounted(second)
    _, replicas = lab.get([1, 2, 3])
    assert replicas["unsure"].tolist() == [1, 1, 0]
