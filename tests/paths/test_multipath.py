"""Several routes to one owner, for real: loopback addresses, faults injected, pauses, probes."""

import threading
import time

import numpy as np
import pytest
import xxhash

from tests.paths.conftest import RAILS
from tests.waiting import PATIENCE_S, long_before, until
from transfer_engine import Operation, TransferEngine
from transfer_engine.base import CANCELLED, UNKNOWN_SEGMENT
from transfer_engine.errors import NotFoundError, PeerLostError, TransferError, TransferTimeoutError
from transfer_engine.paths.policy import Rules
from transfer_engine.testing import OwnerProcess, content
from transfer_engine.transports.tcp import TcpTransport

SIZE = 24 << 20
WINDOW = Rules().window


@pytest.fixture
def setting(owner, faults):
    descriptor = owner.publish(SIZE, 9)
    memory = np.zeros(SIZE, np.uint8)
    with TransferEngine(transports=["tcp"]) as engine:
        target = engine.open(descriptor)
        yield engine, target, engine.register(memory), memory
    owner.withdraw(descriptor)


class Faults:
    """What happens to messages, by the address they go to; installed around `TcpTransport.move`."""

    def __init__(self, monkeypatch):
        self.refuse = set()
        self.gone = set()
        self.stall = set()
        self.calls = []
        self.patience = []
        self.stalled = threading.Event()
        self._plain = TcpTransport.move
        self._open = TcpTransport.open
        faults = self

        def move(transport, target, batch):
            faults.meet(target.descriptor.tcp_host, batch.deadline, batch.total_bytes)
            faults._plain(transport, target, batch)

        def reach(transport, descriptor, deadline):
            faults.meet(descriptor.tcp_host, deadline, 0)
            return faults._open(transport, descriptor, deadline)

        monkeypatch.setattr(TcpTransport, "move", move)
        monkeypatch.setattr(TcpTransport, "open", reach)

    def meet(self, host, deadline, size):
        self.calls.append((host, size))
        if host in self.gone:
            raise NotFoundError("injected", peer=host, operation="open")
        if host in self.refuse:
            raise PeerLostError("injected", peer=host)
        if host in self.stall:
            self.stalled.set()
            self.patience.append(deadline - time.monotonic())
            threading.Event().wait(max(0.0, deadline - time.monotonic()))
            raise TransferTimeoutError("injected", peer=host)


@pytest.fixture
def faults(monkeypatch):
    return Faults(monkeypatch)


def hosts(faults):
    return {host for host, size in faults.calls if size}


def test_a_descriptor_names_every_rail(owner):
    descriptor = owner.publish(1 << 20, 1)
    assert [rail.rpartition(":")[0] for rail in descriptor.rails] == ["127.0.0.2", "127.0.0.3"]
    assert type(descriptor).decode(descriptor.encode()) == descriptor
    owner.withdraw(descriptor)


def test_a_large_batch_uses_every_rail(setting, faults):
    engine, target, region, memory = setting
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert np.array_equal(memory, content(9, SIZE))
    assert hosts(faults) == {"127.0.0.1", "127.0.0.2", "127.0.0.3"}
    moved = [path.moved_bytes for path in target.paths]
    assert sum(moved) == SIZE
    assert all(path.bandwidth > 0 for path in target.paths)
    assert [path.name for path in target.paths] == [f"tcp 127.0.0.{n}" for n in (1, 2, 3)]


def test_a_small_batch_uses_one(setting, faults):
    engine, target, region, memory = setting
    assert engine.read_batch(target, [5], [1000], [region.address]).ok
    assert np.array_equal(memory[:1000], content(9, SIZE)[5:1005])
    assert len(hosts(faults)) == 1


def test_requests_of_every_size_arrive_with_their_own_verdict(owner, setting):
    engine, target, region, memory = setting
    rng = np.random.default_rng(4)
    lengths = rng.integers(0, 200_000, 120)
    lengths[7] = 3 << 20
    offsets = rng.integers(0, SIZE - (3 << 20), 120)
    offsets[3] = SIZE  # refused, unless nothing is asked for
    lengths[3] = 10
    positions = np.cumsum(lengths) - lengths
    whole = content(9, SIZE)
    done = engine.read_batch(target, offsets, lengths, region.address + positions, checksums=True)
    assert np.flatnonzero(done.statuses).tolist() == [3]
    for at in range(120):
        if at != 3:
            expected = whole[offsets[at] : offsets[at] + lengths[at]]
            assert np.array_equal(memory[positions[at] : positions[at] + lengths[at]], expected)
            assert int(done.checksums[at]) == xxhash.xxh3_64_intdigest(expected.tobytes())


def test_writes_arrive_whole(owner, setting):
    engine, target, region, memory = setting
    memory[:] = np.random.default_rng(8).integers(0, 256, SIZE, np.uint8)
    assert engine.write_batch(target, [0], [SIZE], [region.address]).ok
    assert owner.digest(target.descriptor) == xxhash.xxh3_128_hexdigest(memory.data)


def test_a_rail_that_fails_rests_and_comes_back(setting, faults, caplog):
    engine, target, region, memory = setting
    whole = content(9, SIZE)
    faults.refuse.add("127.0.0.2")
    for _ in range(3):
        memory[:] = 0
        assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
        assert np.array_equal(memory, whole)
    resting = target.paths[1]
    assert resting.state != "healthy"
    assert "injected" in resting.why
    # Told once, whatever the number of slices and batches it met.
    assert len([r for r in caplog.records if "127.0.0.2" in r.message]) == 1
    faults.refuse.clear()
    until(lambda: target.paths[1].state == "healthy")
    faults.calls.clear()
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert "127.0.0.2" in hosts(faults)
    until(lambda: not any(t.name == "mooncake-prober" for t in threading.enumerate()))


def test_the_next_small_batches_avoid_a_rail_that_failed(setting, faults):
    engine, target, region, _ = setting
    small = target, [5], [1000], [region.address]
    assert engine.read_batch(*small).ok
    (used,) = hosts(faults)
    faults.refuse.add(used)
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    faults.calls.clear()
    for _ in range(5):
        assert engine.read_batch(*small).ok
    assert used not in hosts(faults)


def test_a_rail_that_goes_silent_costs_its_patience_once(setting, faults):
    engine, target, region, memory = setting
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    memory[:] = 0
    faults.stall.add("127.0.0.3")
    faults.calls.clear()
    assert engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=60).ok
    assert np.array_equal(memory, content(9, SIZE))
    # As many slices as one rail carries at a time meet it, and nobody waits for the deadline. None
    # do where it was so slow before that the others have done all by the time it is its turn.
    assert sum(host == "127.0.0.3" and size > 0 for host, size in faults.calls) <= WINDOW
    assert max(faults.patience, default=0.0) < 30
    silent = bool(faults.patience)
    faults.calls.clear()
    assert engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=60).ok
    if silent:  # it rests now; which of the others carry the batch depends on how quick they were
        assert "127.0.0.3" not in hosts(faults)


def test_threads_that_fail_together_leave_one_rail(setting, faults):
    """Small batches of many threads meet one broken rail: that one rests, and no other."""
    engine, target, region, _ = setting
    assert engine.read_batch(target, [0], [1], [region.address]).ok
    faults.refuse.add("127.0.0.1")
    barrier = threading.Barrier(6)
    failures = []

    def work(number):
        barrier.wait(60)
        try:
            engine.read_batch(target, [0], [1], [region.address + number]).check()
        except PeerLostError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert [path.failures for path in target.paths][1:] == [0, 0]


def test_when_every_rail_fails_the_error_is_that_of_a_peer(setting, faults):
    engine, target, region, _ = setting
    faults.refuse.update({"127.0.0.1", "127.0.0.2", "127.0.0.3"})
    with long_before(60), pytest.raises(PeerLostError, match="injected"):
        engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=60)
    faults.refuse.clear()
    assert engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=60).ok


def test_a_segment_that_is_gone_when_a_rail_is_opened_anew_fails_its_ranges_alone(setting, faults):
    """As where a message about its bytes finds it gone: who moves batches hears of both alike."""
    engine, target, region, _ = setting
    faults.gone = {"127.0.0.1", "127.0.0.2", "127.0.0.3"}
    done = engine.read_batch(target, [0], [SIZE], [region.address])
    assert done.statuses.tolist() == [UNKNOWN_SEGMENT]


def test_when_every_rail_is_silent_the_deadline_ends_it(setting, faults):
    engine, target, region, _ = setting
    assert engine.read_batch(target, [0], [1], [region.address]).ok
    faults.stall.update({"127.0.0.1", "127.0.0.2", "127.0.0.3"})
    with long_before(60), pytest.raises(TransferTimeoutError):
        engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=1.5)
    # Nobody was given more time than the batch had.
    assert max(faults.patience) <= 1.5


def test_a_cancelled_batch_ends_and_touches_nothing_more(setting, faults):
    engine, target, region, memory = setting
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    faults.stall.update({"127.0.0.1", "127.0.0.2", "127.0.0.3"})
    submission = engine.submit(Operation.READ, target, [0], [SIZE], [region.address])
    assert faults.stalled.wait(60)
    assert submission.cancel()
    assert submission.wait(60).tolist() == [CANCELLED]
    memory[:] = 7
    faults.stall.clear()
    assert (memory == 7).all()


@pytest.mark.parametrize("end", ["cancelled", "out of time"])
def test_a_batch_that_has_ended_writes_to_nobodys_memory(setting, monkeypatch, end):
    engine, target, region, memory = setting
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    go_on, begun, ended = threading.Event(), [], []

    def move(transport, target, batch):
        """Write when it is cut off, as what has come from the network already does."""
        batch.interrupt = go_on.set
        begun.append(batch)
        assert go_on.wait(PATIENCE_S)
        memory[int(batch.addresses[0]) - region.address] = 1
        ended.append(batch)
        raise PeerLostError("it was cut off")

    monkeypatch.setattr(TcpTransport, "move", move)
    whole = target, [0], [SIZE], [region.address]
    if end == "cancelled":
        submission = engine.submit(Operation.READ, *whole)
        until(lambda: begun)
        submission.cancel()
        submission.wait(PATIENCE_S)
    else:
        with pytest.raises(TransferTimeoutError):
            engine.read_batch(*whole, timeout_s=0.5)
    memory[:] = 7  # it is the caller's own again
    go_on.set()
    until(lambda: len(ended) == len(begun))
    assert (memory == 7).all()


def test_threads_share_the_rails(setting):
    engine, target, region, memory = setting
    whole = content(9, SIZE)
    share = SIZE // 4
    failures = []

    def work(number):
        for _ in range(5):
            at = number * share
            done = engine.read_batch(target, [at], [share], [region.address + at], timeout_s=30)
            if not done.ok or not np.array_equal(memory[at : at + share], whole[at : at + share]):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert all(path.inflight_bytes == 0 for path in target.paths)


def test_a_killed_owner_is_lost_on_every_rail():
    owner = OwnerProcess(rails=RAILS, unix=None)
    descriptor = owner.publish(SIZE, 9)
    memory = np.zeros(SIZE, np.uint8)
    with TransferEngine() as engine:
        region = engine.register(memory)
        target = engine.open(descriptor)
        assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
        owner.close()
        with pytest.raises(PeerLostError) as caught:
            engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=20)
        assert "127.0.0." in str(caught.value)


def test_a_better_transport_is_taken_up_again(monkeypatch):
    """Shared memory that failed once is used again after a probe, without anybody asking."""
    from transfer_engine.transports.shm import ShmTransport

    owner = OwnerProcess()
    broken = [True]
    plain = ShmTransport._resource

    def resource(*arguments):
        if broken:
            raise PeerLostError("injected")
        return plain(*arguments)

    monkeypatch.setattr(ShmTransport, "_resource", resource)
    try:
        memory = np.zeros(1000, np.uint8)
        with TransferEngine() as engine:
            region = engine.register(memory)
            target = engine.open(owner.publish(1 << 20, 1))
            assert engine.read_batch(target, [0], [1000], [region.address]).transport == "tcp"
            report = {path.transport: path for path in target.report}
            assert "injected" in report["shm"].reason
            assert report["tcp"].chosen
            broken.clear()
            until(lambda: target.paths[0].state == "healthy")
            assert engine.read_batch(target, [0], [1000], [region.address]).transport == "shm"
            assert {p.transport: p.chosen for p in target.report}["shm"]
    finally:
        owner.close()


def test_closing_an_engine_ends_its_probes(owner, faults):
    descriptor = owner.publish(SIZE, 9)
    engine = TransferEngine(transports=["tcp"])
    memory = np.zeros(SIZE, np.uint8)
    region = engine.register(memory)
    target = engine.open(descriptor)
    faults.refuse.add("127.0.0.2")
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    engine.close()
    engine.close()
    until(lambda: not any(t.name == "mooncake-prober" for t in threading.enumerate()))
    faults.refuse.clear()
    owner.withdraw(descriptor)


def test_a_defect_on_one_route_ends_the_transfer_with_its_reason(setting, faults, monkeypatch):
    engine, target, region, _ = setting
    meet = faults.meet

    def stumble(host, deadline, size):
        if host == "127.0.0.2" and size:
            raise RuntimeError("a defect")
        meet(host, deadline, size)

    monkeypatch.setattr(faults, "meet", stumble)
    with long_before(PATIENCE_S), pytest.raises(TransferError, match=r"RuntimeError\('a defect'\)"):
        engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=PATIENCE_S)
    monkeypatch.setattr(faults, "meet", meet)
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
