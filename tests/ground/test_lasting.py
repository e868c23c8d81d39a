"""Threads and tasks that go on: what a turn raises is told, sparingly, and ends nothing."""

import asyncio
import errno
import threading

import pytest

from tests.waiting import PATIENCE_S, until
from transfer_engine.lasting import (
    FAILURES_MAX,
    PAUSE_S_MAX,
    QUIET_S,
    LastingThread,
    Setbacks,
    keep_going,
)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def thread_of():
    """Start a thread for a turn; it is stopped when the test ends."""
    started = []

    def start(turn):
        thread = LastingThread("a thread", turn)
        thread.start()
        started.append(thread)
        return thread

    yield start
    for thread in started:
        thread.stop()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_a_turn_that_fails_is_followed_by_another_one(thread_of, caplog):
    done = threading.Event()
    turns = iter([ValueError("bad peer"), RecursionError("worse peer")])

    def turn():
        error = next(turns, None)
        if error is not None:
            raise error
        done.set()
        return False

    thread = thread_of(turn)
    assert done.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert thread.sound  # it ended as it should
    told = [record.getMessage() for record in caplog.records]
    assert told == ["a thread failed, and goes on: ValueError: bad peer"]


def test_turn_after_turn_that_fails_is_not_sound_until_one_works(thread_of):
    turns, works = [], threading.Event()

    def turn():
        turns.append(1)
        if not works.wait(0.001):
            raise ValueError

    thread = thread_of(turn)
    until(lambda: not thread.sound)
    assert len(turns) >= FAILURES_MAX
    works.set()
    until(lambda: thread.sound)


def test_a_turn_that_lasts_is_sound_whatever_came_before_it(thread_of):
    waits, over = threading.Event(), threading.Event()

    def turn():
        if not waits.wait(0.001):
            raise ValueError
        over.wait(PATIENCE_S)

    thread = thread_of(turn)
    until(lambda: not thread.sound)
    waits.set()
    until(lambda: thread.sound)
    over.set()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ended_unasked_is_not_sound(thread_of):
    def turn():
        raise SystemExit

    thread = thread_of(turn)
    thread.join(PATIENCE_S)
    assert not thread.sound


def test_a_stopped_thread_does_not_wait_for_its_pause_to_end(thread_of, monkeypatch):
    monkeypatch.setattr("transfer_engine.lasting.PAUSE_S_MIN", 1000.0)
    failed = threading.Event()

    def turn():
        failed.set()
        raise ValueError

    thread = thread_of(turn)
    assert failed.wait(PATIENCE_S)
    thread.stop()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_failures_are_told_once_in_a_while_however_many_there_are(caplog):
    clock = Clock()
    setbacks = Setbacks("work", clock)
    for _ in range(1000):
        setbacks.failed(ValueError("x"))
        setbacks.worked()
    assert len(caplog.records) == 1
    clock.now += QUIET_S
    setbacks.failed(ValueError("x"))
    assert "1000 times since" in caplog.records[1].getMessage()


def test_pauses_grow_to_a_bound_and_begin_anew():
    setbacks = Setbacks("work")
    pauses = [setbacks.failed(ValueError()) for _ in range(20)]
    assert pauses == sorted(pauses)
    assert pauses[0] < pauses[-1] == PAUSE_S_MAX
    setbacks.worked()
    assert setbacks.failed(ValueError()) == pauses[0]


def test_a_shortage_of_descriptors_is_no_reason_to_give_up(caplog):
    setbacks = Setbacks("work")
    for _ in range(5 * FAILURES_MAX):
        assert setbacks.failed(OSError(errno.EMFILE, "Too many open files")) > 0
    assert setbacks.few
    assert "Too many open files" in caplog.text


def test_a_task_goes_on_after_what_it_could_not_foresee(caplog):
    turns = []

    async def main():
        again = asyncio.Event()

        async def turn():
            turns.append(1)
            if len(turns) == 1:
                raise ValueError("bad peer")
            again.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(keep_going("a task", turn))
        await again.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert "a task failed, and goes on: ValueError: bad peer" in caplog.text
