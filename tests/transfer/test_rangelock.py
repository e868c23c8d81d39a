"""Range locks between threads and between open files, which stand for processes."""

import os
import threading
import time

import pytest

from transfer_engine.errors import TransferTimeoutError
from transfer_engine.segments.rangelock import RangeLock


def soon():
    return time.monotonic() + 0.05


def late():
    return time.monotonic() + 30


@pytest.fixture
def locks(tmp_path):
    """Two locks on one file, opened twice."""
    path = tmp_path / "file"
    path.touch()
    fds = [os.open(path, os.O_RDWR) for _ in range(2)]
    yield [RangeLock(fd, "it") for fd in fds]
    for fd in fds:
        os.close(fd)


@pytest.fixture(params=["threads", "processes"])
def pair(request, locks):
    """The lock of the holder and that of whoever else wants the range."""
    return (locks[0], locks[0]) if request.param == "threads" else tuple(locks)


def free(lock, begin, end, *, exclusive):
    """A range that is taken would never be had: its holder waits for this test."""
    with lock.hold(begin, end, exclusive=exclusive, deadline=late()):
        return True


def taken(lock, begin, end, *, exclusive):
    try:
        with lock.hold(begin, end, exclusive=exclusive, deadline=soon()):
            return False
    except TransferTimeoutError:
        return True


def test_exclusive_excludes_both_kinds_where_it_meets_them(pair):
    mine, other = pair
    with mine.hold(100, 200, exclusive=True, deadline=late()):
        assert taken(other, 199, 300, exclusive=True)
        assert taken(other, 0, 101, exclusive=False)
        assert free(other, 0, 100, exclusive=True)
        assert free(other, 200, 300, exclusive=True)
    assert free(other, 100, 200, exclusive=True)


def test_shared_excludes_only_exclusive(pair):
    mine, other = pair
    with mine.hold(100, 200, exclusive=False, deadline=late()):
        assert free(other, 150, 250, exclusive=False)
        assert taken(other, 150, 250, exclusive=True)
    assert free(other, 150, 250, exclusive=True)


def test_what_another_thread_still_holds_stays_locked_for_processes(locks):
    """The kernel does not count holders of one open file, so an unlock must leave theirs."""
    mine, other = locks
    with mine.hold(0, 100, exclusive=False, deadline=late()):
        with mine.hold(20, 40, exclusive=False, deadline=late()):
            pass
        with mine.hold(90, 150, exclusive=False, deadline=late()):
            pass
        assert taken(other, 25, 30, exclusive=True)
        assert taken(other, 95, 120, exclusive=True)
        assert free(other, 100, 150, exclusive=True)
    assert free(other, 0, 150, exclusive=True)


def test_a_waiter_gets_the_range_when_it_is_let_go(pair):
    mine, other = pair
    begun, done = threading.Event(), threading.Event()

    def wait():
        begun.set()
        with other.hold(0, 10, exclusive=True, deadline=late()):
            done.set()

    waiter = threading.Thread(target=wait)
    with mine.hold(5, 6, exclusive=True, deadline=late()):
        waiter.start()
        assert begun.wait(60)
        assert not done.is_set()
    assert done.wait(60)
    waiter.join(60)
