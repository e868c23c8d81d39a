"""Submissions: awaited, many at once, idle afterwards; several engines; errors name both ends."""

import asyncio
import os
import resource
import threading
import time

import numpy as np
import pytest

from tests.waiting import PATIENCE_S, until, until_async, until_idle
from transfer_engine import Operation, Segment, TransferEngine, TransferServer
from transfer_engine.base import CANCELLED, COMPLETED, Batch
from transfer_engine.errors import (
    BusyError,
    InvalidArgumentError,
    PeerLostError,
    TransferError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.submission import Submitter
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.transports.tcp import TcpTransport

SIZE = 4 << 20


@pytest.fixture
def setting(owner, engine):
    descriptor = owner.publish(SIZE, 7)
    memory = np.zeros(SIZE, np.uint8)
    yield engine, descriptor, engine.register(memory), memory
    owner.withdraw(descriptor)


def test_a_submission_is_awaited(setting):
    engine, descriptor, region, memory = setting
    target = engine.open(descriptor, require="tcp")

    async def main():
        submissions = [
            engine.submit(Operation.READ, target, [at], [1 << 18], [region.address + at])
            for at in range(0, SIZE, 1 << 18)
        ]
        return await asyncio.gather(*submissions)

    for statuses in asyncio.run(main()):
        assert statuses.tolist() == [COMPLETED]
    assert np.array_equal(memory, content(7, SIZE))


def test_an_awaited_failure_is_raised(engine):
    owner = OwnerProcess(unix=None)
    try:
        target = engine.open(owner.publish(SIZE, 7))
        region = engine.register(bytearray(8))
        owner.process.kill()
        owner.process.wait(60)

        async def main():
            await engine.submit(Operation.READ, target, [0], [8], [region.address])

        with pytest.raises(PeerLostError):
            asyncio.run(main())
    finally:
        owner.close()


def test_cancelling_the_task_cancels_the_batch(engine):
    """The owner is stopped, so that the batch would last until its deadline."""
    import signal

    owner = OwnerProcess(unix=None)
    try:
        target = engine.open(owner.publish(SIZE, 7))
        region = engine.register(np.zeros(SIZE, np.uint8))
        owner.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED | os.WNOWAIT)
        submission = engine.submit(Operation.READ, target, [0], [SIZE], [region.address])

        async def main():
            async with asyncio.timeout(0.2):
                await submission

        with pytest.raises(TimeoutError):
            asyncio.run(main())
        assert submission.wait(60).tolist() == [CANCELLED]
    finally:
        owner.close()


@pytest.fixture
def submit():
    """Submit what a function does, on one thread, as a batch of no requests."""
    submitter = Submitter(threads=1, queue_max=10)
    none = np.zeros(0, np.int64)

    def start(work):
        deadline = time.monotonic() + PATIENCE_S
        batch = Batch(Operation.READ, none, none, none, np.zeros(0, np.int32), 0, deadline)
        return batch, submitter.submit(batch, work)

    yield start
    submitter.close()


@pytest.mark.parametrize("timeout_s", [-0.005, 0.0, 0.001])
def test_who_asks_too_late_is_told_of_no_negative_time(submit, timeout_s):
    stop = threading.Event()
    _, submission = submit(lambda: str(stop.wait(PATIENCE_S)))
    with pytest.raises(TransferTimeoutError, match="still under way") as caught:
        submission.result(timeout_s)
    assert caught.value.elapsed_s >= 0
    assert "after -" not in str(caught.value)
    stop.set()
    assert submission.result(PATIENCE_S).size == 0


def test_who_is_cancelled_goes_on_when_its_memory_is_at_rest(submit):
    begun, stop, at_rest = threading.Event(), threading.Event(), threading.Event()

    def work():
        begun.set()
        stop.wait(PATIENCE_S)
        at_rest.set()
        return "test"

    batch, submission = submit(work)

    async def wait():
        return await submission

    async def main():
        task = asyncio.create_task(wait())
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        for _ in range(3):  # impatience changes nothing
            task.cancel()
            await until_async(lambda: batch.cancelled)
            await asyncio.sleep(0)
            assert not task.done()
        stop.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert at_rest.is_set()

    asyncio.run(main())


def test_work_that_breaks_something_ends_its_batch_and_no_thread(submit, caplog):
    def broken():
        raise ZeroDivisionError("not foreseen")

    for _ in range(3):
        with pytest.raises(TransferError, match="not foreseen"):
            submit(broken)[1].result(PATIENCE_S)
    assert submit(lambda: "test")[1].result(PATIENCE_S).size == 0
    assert {record.getMessage() for record in caplog.records} == {"a submitted batch failed"}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_thousand_batches_of_eight_threads(setting, owner, transport):
    """All of them end, with the right bytes, and then nobody uses the processor."""
    engine, descriptor, region, memory = setting
    target = engine.open(descriptor, require=transport)
    whole = content(7, SIZE)
    length = 4096
    failures = []
    barrier = threading.Barrier(8)

    def work(number):
        rng = np.random.default_rng(number)
        offsets = rng.integers(0, SIZE - length, 125)
        places = (number * 125 + np.arange(125)) * length
        barrier.wait(60)
        submissions = [
            engine.submit(Operation.READ, target, [at], [length], [region.address + to])
            for at, to in zip(offsets.tolist(), places.tolist(), strict=True)
        ]
        for submission, at, to in zip(submissions, offsets, places, strict=True):
            statuses = submission.result(60)
            if statuses.any() or not np.array_equal(
                memory[to : to + length], whole[at : at + length]
            ):
                failures.append((number, at))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not failures
    until_idle(os.getpid(), owner.process.pid)


def test_a_full_queue_refuses_instead_of_growing(setting):
    _, descriptor, _, memory = setting
    with TransferEngine(threads=1, queue_max=2) as engine:
        region = engine.register(memory)
        target = engine.open(descriptor, require="tcp")
        submissions = []

        def submit_many():
            for _ in range(50):
                batch = (target, [0], [SIZE], [region.address])
                submissions.append(engine.submit(Operation.READ, *batch))

        with pytest.raises(BusyError, match="raise queue_max"):
            submit_many()
        assert len(submissions) >= 2
        for submission in submissions:
            assert submission.result(30).tolist() == [COMPLETED]


def test_what_was_cancelled_in_the_queue_is_not_late_as_well(setting, monkeypatch):
    _, descriptor, _, memory = setting
    moving, go_on, plain = threading.Event(), threading.Event(), TcpTransport.move

    def move(*arguments):
        moving.set()
        assert go_on.wait(60)
        plain(*arguments)

    monkeypatch.setattr(TcpTransport, "move", move)
    with TransferEngine(threads=1) as engine:
        region = engine.register(memory)
        target = engine.open(descriptor, require="tcp")
        batch = (target, [0], [8], [region.address])
        engine.submit(Operation.READ, *batch)
        assert moving.wait(60)  # the only thread is busy
        waiting = [engine.submit(Operation.READ, *batch, timeout_s=0.05) for _ in range(2)]
        assert waiting[0].cancel()
        until(lambda: time.monotonic() > waiting[1]._batch.deadline)
        go_on.set()
        with pytest.raises(TransferTimeoutError, match="in the queue"):
            waiting[1].result(20)
        assert waiting[0].result(20).tolist() == [CANCELLED]


def test_a_closed_engine_takes_nothing_more(setting):
    engine, descriptor, region, _ = setting
    target = engine.open(descriptor)
    engine.close()
    with pytest.raises(UnavailableError, match="closed"):
        engine.submit(Operation.READ, target, [0], [8], [region.address])
    with pytest.raises(UnavailableError, match="closed"):
        engine.read_batch(target, [0], [8], [region.address])


def test_engines_of_one_process_do_not_share_what_is_registered(setting):
    first, descriptor, region, memory = setting
    with TransferEngine() as second, TransferEngine(transports=["tcp"]) as third:
        other = second.register(np.zeros(100, np.uint8))
        with pytest.raises(InvalidArgumentError, match="not registered with this engine"):
            second.read_batch(second.open(descriptor), [0], [8], [region.address])
        with pytest.raises(InvalidArgumentError, match="not registered with this engine"):
            first.read_batch(first.open(descriptor), [0], [8], [other.address])
        mine = third.register(memory)
        assert third.read_batch(third.open(descriptor), [0], [8], [mine.address]).transport == "tcp"
    # Closing some leaves the others.
    assert first.read_batch(first.open(descriptor), [0], [8], [region.address]).ok


def test_registering_does_not_touch_memory(engine):
    """Eight gigabytes of address space, in no time and no memory."""
    memory = np.zeros(8 << 30, np.uint8)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    region = engine.register(memory)
    engine.unregister(region)
    # Touched with the largest pages there are, it would be 4096 of them.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults < 2000


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_refused_range_names_both_ends(setting, transport):
    engine, descriptor, region, _ = setting
    target = engine.open(descriptor, require=transport)
    done = engine.read_batch(target, [0, SIZE - 3], [4, 4], [region.address, region.address])
    assert done.statuses.tolist()[0] == COMPLETED
    with pytest.raises(InvalidArgumentError) as caught:
        done.check()
    text = str(caught.value)
    assert "request 1" in text
    assert f"from process {os.getpid()} over {transport}" in text
    assert str(descriptor.pid) in text


def test_a_refused_range_of_this_process_as_well(engine):
    with Segment.create(4096) as segment, TransferServer(tcp=None, unix=None) as server:
        target = engine.open(server.publish(segment))
        with pytest.raises(InvalidArgumentError, match="over local"):
            engine.read_into(target, 4090, bytearray(7))


def test_a_submission_without_a_thread_is_refused_and_never_runs(owner, monkeypatch):
    descriptor = owner.publish(4096, 1)
    memory = np.zeros(4096, np.uint8)
    with TransferEngine(threads=2) as engine:
        region = engine.register(memory)
        batch = Operation.READ, engine.open(descriptor), [0], [4096], [region.address]

        def no_thread(_):
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as scarce:
            scarce.setattr(threading.Thread, "start", no_thread)
            with pytest.raises(UnavailableError, match="no thread can be started"):
                engine.submit(*batch)
        engine.submit(*batch).result(60)
        memory[:] = 0
        with monkeypatch.context() as scarce:  # one is enough
            scarce.setattr(threading.Thread, "start", no_thread)
            both = [engine.submit(*batch) for _ in range(2)]
        assert [each.result(60).tolist() for each in both] == [[0], [0]]
        assert memory.any()
        memory[:] = 0
        engine.submit(Operation.READ, batch[1], [0], [0], [region.address]).result(60)
        assert not memory.any()  # what was refused was not queued either
