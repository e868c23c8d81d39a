"""What is open ends with its handle and its engine, whatever was under way then."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import numpy as np
import pytest

from tests.waiting import PATIENCE_S, until
from transfer_engine import Operation, TransferEngine
from transfer_engine.base import RemoteSegment, SegmentDescriptor
from transfer_engine.errors import (
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
)
from transfer_engine.lasting import LastingThread
from transfer_engine.paths.routes import Prober, Route, Routes
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.transports.tcp import TcpTransport

SIZE = 24 << 20
DESCRIPTOR = SegmentDescriptor(bytes(16), 1, "made up", True, "", bytes(16), 0, 0)


class Slow:
    """A transport that opens when it is told to, and counts what it gave out and took back."""

    name = "slow"

    def __init__(self):
        self.opening = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.opened = []
        self.released = []

    def open(self, deadline):
        self.opening.release()
        assert self.go_on.wait(60)
        remote = RemoteSegment(DESCRIPTOR)
        self.opened.append(remote)
        return remote

    def release(self, remote):
        self.released.append(remote)


@pytest.fixture
def slow():
    return Slow()


@pytest.fixture
def routes(slow):
    routes = [Route(slow, name, 0, slow.open) for name in ("one", "other")]
    return Routes(DESCRIPTOR, routes, Prober())


class Asking(threading.Thread):
    """A slice that wants its route opened."""

    def __init__(self, routes):
        super().__init__()
        self.routes = routes
        self.found = self.error = None
        self.start()

    def run(self):
        try:
            _, self.found = self.routes.remote(1, time.monotonic() + 20)
        except StoreError as error:
            self.error = error


def test_a_route_that_opens_too_late_stays_with_nobody(slow, routes):
    asking = Asking(routes)
    assert slow.opening.acquire(timeout=60)
    routes.close()
    slow.go_on.set()
    asking.join(60)
    assert isinstance(asking.error, NotFoundError)
    assert slow.released == slow.opened
    routes.close()
    assert slow.released == slow.opened


def test_a_route_opened_twice_at_once_is_kept_once(slow, routes):
    asking = [Asking(routes) for _ in range(2)]
    for _ in asking:
        assert slow.opening.acquire(timeout=60)
    slow.go_on.set()
    for one in asking:
        one.join(60)
    kept = asking[0].found
    assert asking[1].found is kept
    assert slow.released == [remote for remote in slow.opened if remote is not kept]
    routes.close()
    assert {id(remote) for remote in slow.released} == {id(remote) for remote in slow.opened}
    assert len(slow.released) == 2


def test_nobody_waits_past_his_deadline_for_a_route_that_another_opens(slow, routes):
    found = []
    thread = threading.Thread(target=lambda: found.append(routes.find(time.monotonic() + 60)))
    thread.start()
    assert slow.opening.acquire(timeout=60)
    with pytest.raises(TransferTimeoutError, match="another thread was still waiting"):
        routes.find(time.monotonic() + 0.05)
    assert not found
    slow.go_on.set()
    thread.join(60)
    assert found == [(slow, slow.opened[0])]
    routes.close()


def test_routes_that_fail_again_and_again_are_given_back(slow, routes):
    slow.go_on.set()
    for _ in range(5):
        routes.policy.revived(0)
        routes.policy.revived(1)
        _, remote = routes.find(time.monotonic() + 10)
        assert routes.fail_over(remote, PeerLostError("injected"))
    assert len(slow.opened) - len(slow.released) <= 4
    routes.close()
    assert {id(remote) for remote in slow.released} == {id(remote) for remote in slow.opened}
    assert len(slow.released) == len(slow.opened)


# Submissions run, and threads wait, when the interpreter ends.
UNCLOSED = """
import sys, threading
from transfer_engine import Operation, Segment, TransferEngine, TransferServer

server, segment = TransferServer(), Segment.create(8 << 20)
engine, memory = TransferEngine(transports=[sys.argv[1]]), bytearray(8 << 20)
target, region = engine.open(server.publish(segment)), engine.register(memory)
place = [0], [8 << 20], [region.address]
running = [engine.submit(Operation.READ, target, *place, notify=("n", b"x")) for _ in range(40)]
threading.Thread(target=server.take_notifications, args=(60,), daemon=True).start()
threading.Thread(target=running[-1].wait, args=(60,), daemon=True).start()
"""


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_program_that_closes_nothing_ends_without_a_word(transport):
    for _ in range(3):
        ended = subprocess.run(
            [sys.executable, "-c", UNCLOSED, transport],
            capture_output=True, timeout=PATIENCE_S, check=False,
        )  # fmt: skip
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_what_a_probe_raises_does_not_end_the_prober():
    turns, done = [RuntimeError("injected")], threading.Event()

    class Resting:
        def probe(self):
            if turns:
                raise turns.pop()
            done.set()

    prober, resting = Prober(), Resting()
    prober.watch(resting)
    assert done.wait(PATIENCE_S)
    until(lambda: not ours())
    prober.close()


def test_a_prober_that_gets_no_thread_asks_for_one_again(monkeypatch):
    refusals, done = [RuntimeError("can't start new thread")], threading.Event()
    start = LastingThread.start

    def starting(thread):
        if refusals:
            raise refusals.pop()
        start(thread)

    monkeypatch.setattr(LastingThread, "start", starting)

    class Resting:
        def probe(self):
            done.set()

    prober, resting = Prober(), Resting()
    prober.watch(resting)  # in the middle of a transfer that goes another way
    assert not done.is_set()
    prober.watch(resting)
    assert done.wait(PATIENCE_S)
    prober.close()
    prober.join()


def test_a_route_whose_probe_broke_is_probed_again(slow, caplog):
    failures = [PeerLostError("injected"), ValueError("a mistake of ours")]

    def reach(deadline):
        if failures:
            raise failures.pop(0)
        return RemoteSegment(DESCRIPTOR)

    slow.go_on.set()
    prober = Prober()
    paths = [Route(slow, "one", 0, reach), Route(slow, "other", 0, slow.open)]
    routes = Routes(DESCRIPTOR, paths, prober)
    routes.find(time.monotonic() + 60)
    until(lambda: routes.health()[0].state == "healthy")
    assert not failures
    assert "a mistake of ours" in caplog.text
    prober.close()
    routes.close()


def test_the_memory_of_an_owner_that_died_is_let_go():
    """Its pages belong to the machine again, though the handle had another path."""
    owner = OwnerProcess()
    memory = bytearray(8)
    with TransferEngine() as engine:
        region = engine.register(memory)
        target = engine.open(owner.publish(1 << 20, 1))
        assert target.transport == "shm"
        mapping = weakref.ref(target.memory())
        assert mapping() is not None
        owner.close()
        with pytest.raises(PeerLostError):
            engine.read_batch(target, [0], [8], [region.address])
        target.close()
        gc.collect()
        assert mapping() is None


@pytest.fixture
def opened(owner):
    """An engine with several routes to an owner, and memory; closed by the test."""
    descriptor = owner.publish(SIZE, 9)
    memory = np.zeros(SIZE, np.uint8)
    engine = TransferEngine(transports=["tcp"])
    yield engine, engine.open(descriptor), engine.register(memory), memory
    engine.close()
    owner.withdraw(descriptor)


def ours():
    names = ("mooncake-prober", "mooncake-slice", "mooncake-transfer")
    return [thread for thread in threading.enumerate() if thread.name.startswith(names)]


def test_an_engine_closed_under_slices_ends_the_batch(opened, monkeypatch):
    """Nothing touches the caller's memory once the call has failed, and no thread is left."""
    engine, target, region, memory = opened
    plain, moving = TcpTransport.move, threading.Semaphore(0)

    def move(*arguments):
        moving.release()
        plain(*arguments)

    monkeypatch.setattr(TcpTransport, "move", move)
    failed = []

    def read():
        try:
            while True:
                engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=30)
        except StoreError as error:
            memory[:] = 7
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(20):
        assert moving.acquire(timeout=60)
    engine.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(failed) == 1
    until(lambda: not ours())
    assert (memory == 7).all()


def test_a_closed_engine_leaves_no_thread(opened, owner):
    engine, target, region, memory = opened
    submissions = [
        engine.submit(Operation.READ, target, [at], [1 << 20], [region.address + at])
        for at in range(0, SIZE, 1 << 20)
    ]
    submissions[0].wait(60)
    assert ours()
    engine.close()
    until(lambda: not ours())
    whole = content(9, SIZE)
    for number, submission in enumerate(submissions):
        # Each is cancelled or whole, never neither.
        if submission.wait(60).tolist() == [0]:
            part = slice(number << 20, (number + 1) << 20)
            assert np.array_equal(memory[part], whole[part])


def test_more_threads_than_places_in_the_queue(owner):
    """The end of every thread finds its way through a queue that holds a single batch."""
    descriptor = owner.publish(1 << 20, 9)
    memory = np.zeros(1 << 20, np.uint8)
    engine = TransferEngine(transports=["tcp"], threads=4, queue_max=1)
    region = engine.register(memory)
    target = engine.open(descriptor)
    for _ in range(8):
        memory[:] = 0
        engine.submit(Operation.READ, target, [0], [1 << 20], [region.address]).result(20)
        assert np.array_equal(memory, content(9, 1 << 20))
    engine.close()
    until(lambda: not ours())
    owner.withdraw(descriptor)


def test_a_probe_under_way_is_the_last(opened, monkeypatch):
    engine, target, region, _ = opened
    plain, probing = TcpTransport.open, threading.Event()
    told = []

    def reach(transport, descriptor, deadline):
        if descriptor.tcp_host == "127.0.0.1":
            return plain(transport, descriptor, deadline)
        told.append(descriptor.tcp_host)
        if threading.current_thread().name == "mooncake-prober":
            probing.set()
            until(lambda: engine._prober.closed, 20)
        raise PeerLostError("injected")

    monkeypatch.setattr(TcpTransport, "open", reach)
    target = engine.open(target.descriptor)
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert probing.wait(60)
    count = len(told)
    engine.close()
    until(lambda: not ours())
    assert len(told) == count
