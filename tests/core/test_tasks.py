"""Section 6 of the semantics: tasks that workers fetch, drains, and replicas made anew."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from mooncake_store.core.janitor import ATTENDED_MAX, DRAINS_KEPT, DrainState
from mooncake_store.core.options import ShardConfig, StartOptions
from mooncake_store.core.records import SegmentState, Status
from mooncake_store.core.tasks import TaskKind, TaskState
from tests.core.checked import Checked
from tests.core.lab import MIB, SECOND, Lab, digests_of

if TYPE_CHECKING:
    from collections.abc import Sequence

S = Status


def where(lab: Lab, key: int) -> set[int]:
    return {int(replica["segment"]) for replica in lab.get([key])[1]}


def state_of(lab: Lab, index: int) -> SegmentState:
    return next(info.state for info in lab.shard.segments() if info.index == index)


# Asynchronous tasks


def submit(lab: Lab, key: int, targets: list[int], *, move: bool = False) -> tuple[Status, int]:
    kind = TaskKind.MOVE if move else TaskKind.COPY
    return lab.shard.submit_task(lab.now, kind, digests_of([key])[0], targets)


def crew() -> tuple[Lab, list[int]]:
    """Two workers with a segment each, and one object on the first."""
    lab = Lab(segments=0)
    workers = [lab.open(20), lab.open(21)]
    lab.segments = [lab.mount(n, client=workers[n], host=f"host{n}") for n in range(2)]
    lab.put([1], preferred=("segment0",))
    return lab, workers


def test_tasks_are_fetched_by_their_worker_only() -> None:
    lab, workers = crew()
    status, task = submit(lab, 1, lab.segments[1:])
    assert status == S.OK
    assert list(lab.shard.fetch_tasks(lab.now, workers[1], 10)) == []
    mine = list(lab.shard.fetch_tasks(lab.now, workers[0], 10))
    assert len(mine) == 1
    wrong = lab.shard.finish_task(lab.now, workers[1], task, True, "")
    assert wrong == S.ILLEGAL_CLIENT
    assert lab.shard.tasks.get(task) is not None
    lab.check()


def test_a_task_whose_worker_never_heard_of_it_is_told_again() -> None:
    lab, (worker, _) = crew()
    lab.put([2], preferred=("segment0",))
    for key in (1, 2):
        assert submit(lab, key, lab.segments[1:])[0] == S.OK
    (first,) = lab.shard.fetch_tasks(lab.now, worker, 1)
    lab.sleep(1)
    both = lab.shard.fetch_tasks(lab.now, worker, 10)
    assert [task.number for task in both] == [first.number, first.number + 1]
    assert both[0].replicas.tolist() == first.replicas.tolist()
    for task in both:
        assert lab.shard.finish_task(lab.now, worker, task.number, True) == S.OK
    assert lab.shard.fetch_tasks(lab.now, worker, 10) == []
    assert where(lab, 1) == where(lab, 2) == set(lab.segments)
    assert lab.remove([1, 2], force=True) == [S.OK] * 2


def test_a_task_that_is_told_again_and_again_still_ends() -> None:
    lab, (worker, _) = crew()
    _, number = submit(lab, 1, lab.segments[1:])
    for _ in range(100):
        lab.shard.fetch_tasks(lab.now, worker, 10)
        lab.sleep(1)
        lab.tick()
    found = lab.shard.tasks.get(number)
    assert found is not None
    assert found.state == TaskState.FAILED
    assert lab.remove([1]) == [S.OK]


def test_a_copy_whose_source_is_gone_is_fenced_though_its_row_waits_for_the_sweep() -> None:
    """Invariants 4 and 5: no bytes that its copier or a reader may touch are given anew."""
    lab = Checked(ShardConfig(), MIB)
    worker = lab.open_client(1, 1)
    for number in range(3):
        lab.mount(worker, number, 2 * MIB, f"host{number}")
    before, last = range(ATTENDED_MAX + 44), ATTENDED_MAX + 44

    def put(keys: Sequence[int], size: int, options: StartOptions) -> None:
        lab.put_start(worker, keys, [size] * len(keys), options, lambda _: 0, str)
        begun = [i for i in lab.model.objects.values() if i.writing is not None]
        generations = [i.writing.generation for i in begun if i.writing is not None]
        lab.put_end(worker, [i.key for i in begun], generations)

    put(before, 64, StartOptions(replicas=2, excluded=("s2",)))
    put([last], 1 * MIB, StartOptions(excluded=("s1", "s2")))
    lab.submit(last, [2], 0)
    lab.fetch(worker, range(last + 1))
    (number,) = lab.model.tasks
    lab.get(worker, [last], 1000 * SECOND)
    lab.unmount(worker, 0, False)
    assert lab.shard.tasks.get(number).state == TaskState.PROCESSING  # its row was not reached
    lab.get(worker, [last], 0)  # is lost, and not absent
    put([last], 64, StartOptions())  # is busy
    for key in (last + 1, last + 2):  # evicts what it may; the target is not among that
        put([key], 3 * MIB // 2, StartOptions(excluded=("s1",)))
        assert lab.shard.tasks.get(number).state == TaskState.PROCESSING
        lab.check()
    lab.tick()
    assert lab.shard.tasks.get(number).state == TaskState.FAILED
    put([last + 3], 3 * MIB // 2, StartOptions(excluded=("s1",)))
    assert last + 3 not in lab.model.objects  # the copier may be late
    lab.mount(worker, 0, 2 * MIB, "host0")
    put([last + 4], 3 * MIB // 2, StartOptions(excluded=("s1", "s2")))
    assert last + 4 not in lab.model.objects  # the reader may read there still
    lab.at(1001 * SECOND)
    lab.tick()
    put([last + 5], 3 * MIB // 2, StartOptions(excluded=("s0", "s1")))
    put([last + 6], 3 * MIB // 2, StartOptions(excluded=("s1", "s2")))
    assert {last + 5, last + 6} <= set(lab.model.objects)
    lab.check()


def test_submitting_for_what_is_not_there() -> None:
    lab, _ = crew()
    target = lab.segments[1]
    assert submit(lab, 9, [target])[0] == S.NOT_FOUND
    assert submit(lab, 1, [77])[0] == S.SEGMENT_NOT_FOUND
    assert submit(lab, 9, [target], move=True)[0] == S.NOT_FOUND


def test_a_copy_to_where_copies_lie_is_done_at_once() -> None:
    lab, workers = crew()
    status, number = submit(lab, 1, lab.segments[:1])
    assert status == S.OK
    task = lab.shard.tasks.get(number)
    assert task is not None
    assert task.state.name == "SUCCESS"
    assert work(lab, workers) == 0
    assert where(lab, 1) == {lab.segments[0]}
    moved = submit(lab, 1, [lab.segments[0]], move=True)
    assert moved[0] == S.REPLICA_ALREADY_EXISTS


def test_tasks_are_bounded() -> None:
    lab = Lab(segments=2, tasks_max=10)
    lab.put(range(20), preferred=("segment0",))
    statuses = [int(submit(lab, key, lab.segments[1:])[0]) for key in range(20)]
    assert statuses == [S.OK] * 10 + [S.TASK_LIMIT] * 10


def ask(lab: Lab, client: int, key: int) -> Status:
    """Have a client ask for a copy to the second segment."""
    kind, digest = TaskKind.COPY, digests_of([key])[0]
    return lab.shard.submit_task(lab.now, kind, digest, lab.segments[1:], None, client)[0]


def test_one_client_asks_for_a_part_of_the_tasks_and_all_for_half() -> None:
    lab = Lab(segments=2, tasks_max=16)
    lab.put(range(20), preferred=("segment0",))
    greedy, *others = [lab.open(30 + number) for number in range(6)]
    assert [ask(lab, greedy, key) for key in range(4)] == [S.OK] * 2 + [S.TASK_LIMIT] * 2
    told = [ask(lab, other, 4 + number) for number, other in enumerate(others)]
    assert told == [S.OK] * 5
    assert [ask(lab, others[0], key) for key in (10, 11)] == [S.OK, S.TASK_LIMIT]
    assert ask(lab, others[1], 12) == S.TASK_LIMIT  # there are eight
    assert submit(lab, 13, lab.segments[1:])[0] == S.OK  # as a drain does
    done = lab.shard.fetch_tasks(lab.now, lab.client, 1)  # the first of the greedy one
    lab.shard.finish_task(lab.now, lab.client, done[0].number, True)
    assert [ask(lab, greedy, key) for key in (15, 16)] == [S.OK, S.TASK_LIMIT]


def test_what_clients_may_ask_for_agrees_with_the_model() -> None:
    lab, rng, keys = Checked(ShardConfig(tasks_max=16), MIB), random.Random(7), range(12)
    worker, *clients = [lab.open_client(number, 1) for number in range(6)]
    for number in range(2):
        lab.mount(worker, number, 2 * MIB, f"host{number}")
    lab.put_start(worker, keys, [64] * 12, StartOptions(excluded=("s1",)), lambda _: 0, str)
    begun = [i for i in lab.model.objects.values() if i.writing is not None]
    generations = [i.writing.generation for i in begun if i.writing is not None]
    lab.put_end(worker, [i.key for i in begun], generations)
    for _ in range(400):
        lab.submit(rng.choice(keys), [1], client=rng.choice(clients))
        if rng.random() < 0.3:
            lab.fetch(worker, keys, 2)
            for number in list(lab.model.tasks):
                lab.copy_end(worker, number, False)
    lab.check()


def test_a_client_that_comes_back_has_asked_for_what_it_had_before() -> None:
    lab = Lab(segments=2, tasks_max=16)
    lab.put(range(20), preferred=("segment0",))
    assert [ask(lab, lab.open(30), key) for key in (1, 2)] == [S.OK, S.OK]
    assert ask(lab, lab.open(30, 2), 3) == S.TASK_LIMIT


def work(lab: Lab, workers: list[int], *, ok: bool = True) -> int:
    """Let every worker do the tasks assigned to it; returns how many were done."""
    done = 0
    for worker in workers:
        for task in lab.shard.fetch_tasks(lab.now, worker, 100):
            assert task.worker == worker
            status = lab.shard.finish_task(lab.now, worker, task.number, ok, "" if ok else "broken")
            assert status == S.OK
            done += 1
    lab.check()
    return done


def fail_drain(lab: Lab) -> str:
    """Drain the first segment while every copy fails; returns why the drain failed."""
    _, job = lab.shard.drain(lab.now, lab.segments[0])
    for _ in range(50):
        lab.sleep(0.01)
        lab.tick()
        work(lab, [lab.client], ok=False)
    found = lab.shard.janitor.job(job)
    assert found is not None
    assert found.state == DrainState.FAILED
    return found.message


@pytest.mark.parametrize("move", [False, True])
def test_a_submitted_task_is_done_by_its_worker(move: bool) -> None:
    lab, workers = crew()
    target = lab.segments[1]
    status, number = submit(lab, 1, [target], move=move)
    assert status == S.OK
    assert where(lab, 1) == {lab.segments[0]}
    assert work(lab, workers) == 1
    assert where(lab, 1) == ({target} if move else set(lab.segments))
    task = lab.shard.tasks.get(number)
    assert task is not None
    assert task.state.name == "SUCCESS"


def test_a_task_whose_object_is_gone_is_not_run() -> None:
    lab, workers = crew()
    _, number = submit(lab, 1, lab.segments[1:])
    assert lab.remove([1]) == [S.OK]
    assert work(lab, workers) == 0
    task = lab.shard.tasks.get(number)
    assert task is None or task.state.name == "FAILED"
    assert lab.shard.stats().bytes_used == 0


def test_a_pending_task_of_a_vanished_worker_fails() -> None:
    lab, workers = crew()
    _, number = submit(lab, 1, lab.segments[1:])
    lab.shard.close_client(lab.now, workers[0])
    lab.tick()
    task = lab.shard.tasks.get(number)
    assert task is None or task.state.name == "FAILED"
    assert lab.remove([1]) == [S.OK]


def test_a_lost_replica_is_made_anew() -> None:
    lab = Lab(segments=3)
    for key in range(20):
        lab.put([key], replicas=2)
    lost = lab.segments[0]
    affected = [key for key in range(20) if lost in where(lab, key)]
    assert affected
    lab.shard.unmount(lab.now, lab.client, lab.uuid(0))
    for _ in range(10):
        lab.sleep(0.01)
        lab.tick()
        work(lab, [lab.client])
    for key in range(20):
        assert where(lab, key) == set(lab.segments[1:])


def test_a_drain_converges() -> None:
    lab = Lab(segments=3)
    lab.put(range(300), preferred=("segment0",))
    status, job = lab.shard.drain(lab.now, lab.segments[0])
    assert status == S.OK
    assert state_of(lab, lab.segments[0]) == SegmentState.DRAINING
    for _ in range(100):
        lab.sleep(0.01)
        lab.tick()
        work(lab, [lab.client])
        found = lab.shard.janitor.job(job)
        assert found is not None
        if found.state != DrainState.RUNNING:
            break
    assert found.state == DrainState.DONE
    assert found.moved == 300
    assert state_of(lab, lab.segments[0]) == SegmentState.DRAINED
    assert all(lab.exists(range(300)))
    info = next(info for info in lab.shard.segments() if info.index == lab.segments[0])
    assert info.used == 0


def test_a_drain_waits_for_readers_and_writers() -> None:
    lab = Lab(segments=2)
    lab.put([1], preferred=("segment0",))
    rows, _ = lab.start([2], preferred=("segment0",))
    lab.get([1], ttl=10)
    _, job = lab.shard.drain(lab.now, lab.segments[0])
    for _ in range(10):
        lab.sleep(0.01)
        lab.tick()
        work(lab, [lab.client])
    assert lab.end([2], rows["generation"]) == [S.OK]
    for _ in range(10):
        lab.sleep(2)
        lab.tick()
        work(lab, [lab.client])
    found = lab.shard.janitor.job(job)
    assert found is not None
    assert found.state == DrainState.DONE
    assert where(lab, 1) == where(lab, 2) == {lab.segments[1]}


def test_a_cancelled_drain_restores_the_segment() -> None:
    lab = Lab(segments=2)
    lab.put(range(300), preferred=("segment0",))
    _, job = lab.shard.drain(lab.now, lab.segments[0])
    lab.tick()
    assert lab.shard.cancel_drain(lab.now, job) == S.OK
    assert state_of(lab, lab.segments[0]) == SegmentState.OK
    assert lab.shard.cancel_drain(lab.now, job) == S.JOB_NOT_FOUND
    work(lab, [lab.client])
    lab.put([1000], preferred=("segment0",))
    assert where(lab, 1000) == {lab.segments[0]}


def test_a_cancelled_drain_takes_its_unmount_back() -> None:
    lab = Lab(segments=2)
    lab.put([1], preferred=("segment0",))
    deadline = lab.now + 10 * SECOND
    assert lab.shard.unmount_gracefully(lab.now, lab.client, lab.uuid(0), deadline) == S.OK
    _, job = lab.shard.drain(lab.now, lab.segments[0])
    assert lab.shard.cancel_drain(lab.now, job) == S.OK
    lab.sleep(11)
    lab.tick()
    assert lab.get_status(1) == S.OK
    assert state_of(lab, lab.segments[0]) == SegmentState.OK


def test_a_segment_that_leaves_takes_nothing_new_though_its_drain_failed() -> None:
    lab = Lab(segments=2)
    lab.put(range(3), preferred=("segment0",))
    deadline = lab.now + 3600 * SECOND
    assert lab.shard.unmount_gracefully(lab.now, lab.client, lab.uuid(0), deadline) == S.OK
    fail_drain(lab)
    lab.put([100], preferred=("segment0",))
    assert where(lab, 100) == {lab.segments[1]}
    assert all(lab.exists(range(3)))
    lab.sleep(3600)
    lab.tick()
    assert not any(lab.exists(range(3)))


def test_drains_of_the_past_are_forgotten_in_time() -> None:
    lab = Lab()
    numbers = []
    for _ in range(DRAINS_KEPT + 3):
        numbers.append(lab.shard.drain(lab.now, lab.segments[0])[1])
        assert lab.shard.cancel_drain(lab.now, numbers[-1]) == S.OK
    assert len(set(numbers)) == len(numbers)
    known = [number for number in numbers if lab.shard.janitor.job(number) is not None]
    assert known == numbers[2:]


def test_a_drain_that_cannot_place_an_object_fails_once() -> None:
    lab = Lab(segments=1)
    lab.put(range(100))
    _, job = lab.shard.drain(lab.now, lab.segments[0])
    for _ in range(10):
        lab.tick()
    found = lab.shard.janitor.job(job)
    assert found is not None
    assert found.state == DrainState.FAILED
    assert "NO_SPACE" in found.message
    assert all(lab.exists(range(100)))


def test_a_drain_fails_after_retries() -> None:
    lab = Lab(segments=2)
    lab.put(range(3), preferred=("segment0",))
    assert "broken" in fail_drain(lab)
    assert state_of(lab, lab.segments[0]) == SegmentState.OK
    assert all(lab.exists(range(3)))


def test_a_graceful_unmount_ends_early_when_drained() -> None:
    lab = Lab(segments=2)
    lab.put(range(20), preferred=("segment0",))
    later = lab.now + 3600 * 10**9
    assert lab.shard.unmount_gracefully(lab.now, lab.client, lab.uuid(0), later) == S.OK
    for _ in range(50):
        lab.sleep(0.01)
        lab.tick()
        work(lab, [lab.client])
    assert all(lab.exists(range(20)))
    assert all(info.index != lab.segments[0] for info in lab.shard.segments())
