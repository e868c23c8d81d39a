"""Missing replicas are made anew when there is room for them, a few at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mooncake_store.core import repair
from mooncake_store.core.janitor import DRAIN_IN_FLIGHT, REPAIR_IN_FLIGHT, DrainState
from mooncake_store.core.options import SoftPin
from mooncake_store.core.records import Status as S
from mooncake_store.core.tasks import TaskKind
from tests.core.lab import MIB, Lab, digests_of
from tests.core.test_tasks import submit, where, work

if TYPE_CHECKING:
    from collections.abc import Iterable

SPARE = 0.9 - 0.05
"""Share of a segment that repairs may fill: eviction begins above 90 % and leaves 85 %."""


def pass_time(lab: Lab, seconds: float, *, ok: bool = True, step: float = 0.1) -> int:
    """Tick and let the workers do their tasks; returns how many they did."""
    done = 0
    for _ in range(round(seconds / step)):
        lab.sleep(step)
        lab.tick()
        done += work(lab, [lab.client], ok=ok)
    return done


def missing(lab: Lab) -> int:
    return lab.shard.stats().replicas_missing


def replicas(lab: Lab, keys: Iterable[int]) -> list[int]:
    return [len(where(lab, key)) for key in keys]


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where the rows were searched for objects that lack replicas."""
    starts: list[int] = []
    kernel = repair.k.short_of_replicas

    def counted(*arguments: object) -> int:
        starts.append(int(arguments[6][0]))  # type: ignore[index]
        return int(kernel(*arguments))

    monkeypatch.setattr(repair.k, "short_of_replicas", counted)
    return starts


def test_what_was_put_on_one_segment_gets_its_second_replica_when_there_is_another() -> None:
    lab = Lab(segments=1)
    lab.put(range(300), replicas=2)
    lab.put(range(300, 310))
    assert missing(lab) == 300
    assert pass_time(lab, 100, step=1) == 0
    second = lab.mount(1, host="elsewhere")
    assert pass_time(lab, 1) == 300
    assert all(where(lab, key) == {lab.segments[0], second} for key in range(300))
    assert replicas(lab, range(300, 310)) == [1] * 10
    assert missing(lab) == lab.shard.stats().tasks_unfinished == 0


def test_lost_replicas_come_back_when_a_fresh_segment_is_mounted() -> None:
    lab = Lab(segments=2)
    lab.put(range(100), replicas=2)
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    assert pass_time(lab, 10) == 0
    assert missing(lab) == 100
    fresh = lab.mount(2)
    assert pass_time(lab, 1) == 100
    lab.shard.unmount(lab.now, lab.client, lab.uuid(1))
    assert all(lab.exists(range(100)))
    assert where(lab, 0) == {fresh}


def test_several_missing_replicas_come_one_after_the_other() -> None:
    lab = Lab(segments=1)
    lab.put(range(10), replicas=4)
    for number in range(1, 5):
        lab.mount(number)
    pass_time(lab, 10)
    assert replicas(lab, range(10)) == [4] * 10


def test_a_segment_that_is_well_again_takes_copies() -> None:
    lab = Lab(segments=2)
    lab.shard.set_suspect(lab.now, lab.segments[1], True)
    lab.put([1], replicas=2)
    assert pass_time(lab, 100, step=1) == 0
    lab.shard.set_suspect(lab.now, lab.segments[1], False)
    assert pass_time(lab, 1) == 1


def test_copies_that_fail_are_tried_again_less_and_less_often() -> None:
    lab = Lab(segments=1)
    lab.put([1], replicas=2)
    lab.mount(1)
    assert pass_time(lab, 1, ok=False) == 1
    tries = [pass_time(lab, 100, ok=False, step=1) for _ in range(10)]
    assert tries[0] > tries[-1]
    assert sum(tries[-3:]) in range(4, 7)  # about one a minute
    pass_time(lab, 61)
    assert replicas(lab, [1]) == [2]


def test_a_copy_that_nobody_ends_is_tried_again() -> None:
    lab = Lab(segments=1)
    lab.put([1], replicas=2)
    lab.mount(1)
    lab.tick()
    assert len(lab.shard.fetch_tasks(lab.now, lab.client, 10)) == 1
    assert missing(lab) == 0
    lab.sleep(61)
    lab.tick()
    assert pass_time(lab, 5) == 1
    assert replicas(lab, [1]) == [2]


def test_copies_fill_no_segment_beyond_what_eviction_leaves() -> None:
    lab = Lab(segments=1, nbytes=8 * MIB)
    lab.put(range(100), 64 << 10, replicas=2)
    second = lab.mount(1, 4 * MIB)
    pass_time(lab, 200, step=1)
    used = next(info.used for info in lab.shard.segments() if info.index == second)
    assert SPARE - 0.05 < used / (4 * MIB) <= SPARE
    assert all(lab.exists(range(100)))
    copied = [key for key in range(100) if second in where(lab, key)]
    assert missing(lab) == 100 - len(copied)
    lab.remove(copied)
    assert pass_time(lab, 100, step=1) == 100 - len(copied)
    assert missing(lab) == 0


def test_room_for_one_copy_is_used_for_one() -> None:
    lab = Lab(segments=1, nbytes=4 * MIB)
    lab.put([1, 2], MIB, replicas=2)
    lab.mount(1, 2 * MIB)
    lab.tick()
    assert lab.shard.stats().tasks_unfinished == 1
    assert pass_time(lab, 5) == 1
    assert sorted(replicas(lab, [1, 2])) == [1, 2]


def test_room_is_checked_again_when_a_copy_begins() -> None:
    lab = Lab(segments=1, nbytes=4 * MIB)
    lab.put([1], MIB, replicas=2)
    lab.mount(1, 4 * MIB)
    lab.tick()
    lab.put(range(10, 13), MIB, preferred=("segment1",))
    assert work(lab, [lab.client]) == 0
    assert replicas(lab, [1]) == [1]


def test_room_in_pieces_too_small_sends_a_copy_elsewhere() -> None:
    """Also where that is the better place otherwise: on another host."""
    lab = Lab(segments=1, nbytes=4 * MIB)
    lab.put([1], MIB, replicas=2)
    lab.mount(1, 4 * MIB, host="another")
    small = list(range(10, 46))
    lab.put(small, 100_000, preferred=("segment1",))
    lab.remove(small[::2])
    lab.mount(2, 4 * MIB, host="host0")
    pass_time(lab, 5)
    assert where(lab, 1) == {0, 2}


def test_only_so_many_copies_are_under_way() -> None:
    lab = Lab(segments=1)
    lab.put(range(1000), replicas=2)
    lab.mount(1)
    counts = []
    for _ in range(20):
        lab.sleep(0.01)
        lab.tick()
        counts.append(lab.shard.stats().tasks_unfinished)
    assert counts[0] == repair.SUBMITTED_PER_STEP
    assert counts[-1] == REPAIR_IN_FLIGHT
    assert pass_time(lab, 3, step=0.01) == 1000


def test_half_of_all_tasks_are_left_for_others() -> None:
    lab = Lab(segments=1, tasks_max=10)
    lab.put(range(50), replicas=2)
    target = lab.mount(1)
    for _ in range(5):
        lab.tick()
    assert lab.shard.stats().tasks_unfinished == 5
    lab.put([100])
    assert submit(lab, 100, [target])[0] == S.OK
    pass_time(lab, 5)
    assert missing(lab) == 0


def test_what_clients_ask_for_leaves_half_of_all_tasks_to_repairs() -> None:
    lab = Lab(segments=1, tasks_max=16)
    lab.put(range(50), replicas=2)
    lab.put(range(100, 108))
    target = lab.mount(1)
    for number in range(8):
        digest, client = digests_of([100 + number])[0], lab.open(30 + number)
        kind = TaskKind.COPY
        assert lab.shard.submit_task(lab.now, kind, digest, [target], None, client)[0] == S.OK
    for _ in range(5):
        lab.tick()
    assert lab.shard.stats().tasks_unfinished == 16


def test_a_drain_goes_on_beside_a_long_repair() -> None:
    lab = Lab(segments=2, nbytes=64 * MIB)
    lab.shard.set_suspect(lab.now, lab.segments[1], True)
    lab.put(range(3000), 1000, replicas=2)
    lab.shard.set_suspect(lab.now, lab.segments[1], False)
    lab.shard.set_suspect(lab.now, lab.segments[0], True)
    lab.put(range(10_000, 10_500), 1000, preferred=("segment1",))
    lab.shard.set_suspect(lab.now, lab.segments[0], False)
    lab.mount(2, 64 * MIB)
    _, job = lab.shard.drain(lab.now, lab.segments[1])
    for _ in range(30):
        lab.sleep(0.01)
        lab.tick()
        assert lab.shard.stats().tasks_unfinished <= 2 * DRAIN_IN_FLIGHT
        work(lab, [lab.client])
    found = lab.shard.janitor.job(job)
    assert found is not None
    assert found.state == DrainState.DONE
    assert missing(lab) > 0


def test_nothing_is_searched_while_nothing_is_missing(scans: list[int]) -> None:
    lab = Lab(segments=3)
    lab.put(range(50), replicas=2)
    lab.mount(3)
    pass_time(lab, 5)
    lab.shard.set_suspect(lab.now, lab.segments[0], True)
    pass_time(lab, 5)
    assert scans == []


def test_what_cannot_be_repaired_is_seldom_searched_for(scans: list[int]) -> None:
    lab = Lab(segments=1)
    lab.put(range(50), replicas=2)
    pass_time(lab, 600, step=0.2)
    assert len(scans) < 20


def test_a_step_looks_at_a_bounded_number_of_rows(
    scans: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repair, "ROWS_PER_STEP", 100)
    lab = Lab(segments=1)
    lab.put(range(1000), 1000)
    lab.put([5000], replicas=2)
    lab.mount(1)
    for step in range(1, 11):
        lab.sleep(0.01)
        lab.tick()
        assert len(scans) == step
    assert scans == list(range(0, 1000, 100))
    assert pass_time(lab, 1) == 1


def test_an_object_that_was_replaced_meanwhile_gets_no_surplus_replica() -> None:
    lab = Lab(segments=1)
    lab.put([1], replicas=2)
    lab.mount(1)
    lab.tick()
    assert lab.shard.stats().tasks_unfinished == 1
    lab.put([1], upsert=True)
    assert work(lab, [lab.client]) == 0
    pass_time(lab, 100, step=1)
    assert replicas(lab, [1]) == [1]


def test_a_repair_disturbs_neither_leases_nor_pins_nor_groups() -> None:
    lab = Lab(segments=1)
    options = {"replicas": 2, "groups": ("g", "g"), "soft_pin": SoftPin.ENABLE, "hard_pin": True}
    lab.put([1, 2], **options)
    _, before = lab.get([1], ttl=100)
    lab.mount(1)
    assert pass_time(lab, 1) == 2
    told = lab.stat(1)
    assert (told.hard_pin, told.soft_pin_ns > 0, told.lease_ns > 0) == (True, True, True)
    assert before[0] in lab.get([1])[1]
    assert lab.remove([1]) == [S.HAS_LEASE]


def test_copies_go_to_other_hosts_where_there_are_any() -> None:
    lab = Lab(segments=1)  # on host0
    lab.put(range(20), replicas=2)
    for number in range(1, 5):
        lab.mount(number, host="host0")
    elsewhere = lab.mount(9, host="host9")
    pass_time(lab, 1)
    assert all(elsewhere in where(lab, key) for key in range(20))


def test_objects_of_a_silent_worker_hold_nobody_up() -> None:
    lab = Lab(segments=2)
    lab.shard.set_suspect(lab.now, lab.segments[0], True)
    lab.put(range(2000, 2010), replicas=2)
    lab.shard.set_suspect(lab.now, lab.segments[1], True)
    lab.shard.set_suspect(lab.now, lab.segments[0], False)
    lab.put(range(3000, 3010), replicas=2)
    lab.mount(2)
    assert pass_time(lab, 1) == 10
    assert replicas(lab, range(2000, 2010)) == [1] * 10
    assert replicas(lab, range(3000, 3010)) == [2] * 10
    lab.shard.set_suspect(lab.now, lab.segments[1], False)
    assert pass_time(lab, 1) == 10


def test_a_repair_keeps_to_the_quota_of_its_tenant() -> None:
    lab = Lab(segments=1)
    guest = lab.shard.tenant("guest", 10 * 4096)
    lab.put(range(5), tenant=guest, replicas=2)
    lab.put([100, 101], replicas=2)
    lab.put(range(5, 7), tenant=guest)
    lab.mount(1)
    pass_time(lab, 20)
    assert replicas(lab, [100, 101]) == [2, 2]
    assert lab.shard.tenant_bytes(guest) == 10 * 4096
    assert all(lab.exists(range(7)))
    assert missing(lab) == 2
    lab.remove([5, 6])
    pass_time(lab, 61)
    assert missing(lab) == 0
