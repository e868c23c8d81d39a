"""The rdma transport on a real device, soft-RoCE in the virtual machine: conformance and faults."""

import os
import signal
import threading
import time

import numpy as np
import pytest

from tests.storage import DAX_DEVICE, needs_dax_device
from tests.waiting import until
from transfer_engine import Operation, TransferEngine
from transfer_engine.base import REFUSED, TIMED_OUT, UNKNOWN_SEGMENT, BatchRequest
from transfer_engine.errors import (
    AuthError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferError,
    TransferTimeoutError,
)
from transfer_engine.rdma import verbs
from transfer_engine.testing import TransportCase, TransportContract, content

pytestmark = pytest.mark.rdma
SIZE = 1 << 20


@pytest.fixture(autouse=True)
def _device():
    if reason := verbs.unavailable():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def owners():
    """The owner processes of this module, the last of which tests share while it lives."""
    running = []
    yield running
    for owner in running:
        owner.close()


def start(owners, **options):
    from tests.rdma.owner import ForkedOwner

    owners.append(ForkedOwner(**options))
    return owners[-1]


@pytest.fixture
def owner(owners):
    if not owners or not owners[-1].process.is_alive():
        start(owners)
    return owners[-1]


@pytest.fixture
def setting(owner, engine):
    descriptor = owner.publish(SIZE, 3)
    memory = np.zeros(SIZE, np.uint8)
    return descriptor, memory, engine.register(memory)


def transport_of(engine):
    return next(transport for transport in engine._transports if transport.name == "rdma")


class TestContract(TransportContract):
    def publish(self, owner, size):
        return owner.publish(size, 5)

    @pytest.fixture
    def case(self, owner, engine):
        size = 20 << 20
        descriptor = self.publish(owner, size)
        memory = np.zeros(18 << 20, np.uint8)
        target = engine.open(descriptor, require="rdma")
        yield TransportCase(
            engine, target, engine.register(memory), memory, content(5, size),
            lambda: owner.digest(descriptor),
        )  # fmt: skip
        owner.withdraw(descriptor)


@needs_dax_device
class TestContractOnDax(TestContract):
    """The cards read and write a DAX device."""

    def publish(self, owner, size):
        return owner.publish_map(DAX_DEVICE, size, 5)


def test_every_card_takes_part_in_a_large_batch(engine, setting):
    descriptor, memory, region = setting
    assert [nic.name for nic in verbs.find_nics()] == ["rxe0", "rxe1"]
    target = engine.open(descriptor, require="rdma")
    assert [path.name for path in target.paths] == ["rdma rxe0", "rdma rxe1"]
    big = np.zeros(2 << 20, np.uint8)
    engine.register(big)
    twice = [big.ctypes.data, big.ctypes.data + SIZE]

    def both_moved_some():
        memory[:] = big[:] = 0
        engine.read_batch(target, [0], [SIZE], [region.address]).check()
        assert np.array_equal(memory, content(3, SIZE))
        engine.read_batch(target, [0, 0], [SIZE, SIZE], twice).check()
        assert np.array_equal(big, np.tile(content(3, SIZE), 2))
        return all(path.moved_bytes for path in target.paths)

    until(both_moved_some)


def test_unregistered_memory_goes_through_the_arena(engine, setting):
    descriptor, _, _ = setting
    target = engine.open(descriptor, require="rdma")
    here = bytearray(SIZE - 7)
    engine.read_into(target, 7, here)
    assert here == content(3, SIZE)[7:].tobytes()
    engine.write_from(target, 0, b"written by nobody's registered memory")
    engine.read_into(target, 0, here)
    assert here.startswith(b"written by nobody's registered memory")


def test_a_killed_owner_is_lost(owner, engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="rdma")
    owner.process.kill()
    owner.process.join(30)
    begin = time.monotonic()
    for move in (engine.read_batch, engine.write_batch):
        with pytest.raises(PeerLostError, match=str(descriptor.tcp_port)):
            move(target, [0], [4096], [region.address], timeout_s=10)
    assert time.monotonic() - begin < 5
    assert not memory.any()


def test_an_owner_killed_under_way_is_lost(owner, engine, setting):
    descriptor, _, region = setting
    target = engine.open(descriptor, require="rdma")
    failures, moved = [], []

    def read():
        try:
            while True:
                engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=20).check()
                moved.append(1)
        except StoreError as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(moved) > 3, timeout_s=60)
    owner.process.kill()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert [type(error) for error in failures] == [PeerLostError] * 3


def test_a_restarted_owner_is_another_one(owners, engine):
    uuid = os.urandom(16)
    memory = np.zeros(SIZE, np.uint8)
    region = engine.register(memory)
    first = start(owners)
    old = first.publish(SIZE, 3, uuid=uuid)
    target = engine.open(old, require="rdma")
    assert engine.read_batch(target, [0], [8], [region.address]).ok
    memory[:] = 0
    first.close()
    owners.remove(first)
    second = start(owners, tcp=f"127.0.0.1:{old.tcp_port}")
    new = second.publish(SIZE, 4, uuid=uuid)
    with pytest.raises(PeerLostError, match=r"restarted.*new descriptor"):
        engine.read_batch(target, [0], [1], [region.address])
    with pytest.raises(PeerLostError, match=r"restarted.*new descriptor"):
        engine.open(old, require="rdma")
    assert not memory.any()
    target = engine.open(new, require="rdma")
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert np.array_equal(memory, content(4, SIZE))


def test_a_stale_endpoint_is_replaced_without_a_word(engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="rdma")
    engine.read_batch(target, [0], [8], [region.address]).check()
    stale = transport_of(engine)._pool.items()
    for endpoint in stale:
        endpoint.abort()  # as when the owner drops an idle connection

    def replaced():
        """A batch that comes before the owner has noticed may still pass."""
        memory[:] = 0
        engine.read_batch(target, [0], [SIZE], [region.address]).check()
        assert np.array_equal(memory, content(3, SIZE))
        return not set(stale) & set(transport_of(engine)._pool.items())

    until(replaced, timeout_s=30)


def test_a_withdrawn_segment_is_unknown(owner, engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="rdma")
    other = owner.publish(4096, 9)
    assert engine.read_batch(target, [0], [8], [region.address]).ok
    memory[:] = 0
    owner.withdraw(descriptor)
    for move in (engine.read_batch, engine.write_batch):
        done = move(target, [0, 9], [8, 1], [region.address] * 2)
        assert done.statuses.tolist() == [UNKNOWN_SEGMENT] * 2
        with pytest.raises(NotFoundError):
            done.check()
    with pytest.raises(NotFoundError):
        engine.open(descriptor, require="rdma")
    assert not memory.any()
    assert engine.read_batch(engine.open(other, require="rdma"), [0], [4096], [region.address]).ok
    assert np.array_equal(memory[:4096], content(9, 4096))


def test_withdrawing_under_load_ends_every_transfer(owner, engine, setting):
    descriptor, _, region = setting
    target = engine.open(descriptor, require="rdma")
    outcomes, moved = [], []

    def read():
        while True:
            try:
                done = engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=20)
            except TransferError as error:
                outcomes.append(error)
                return
            if not done.ok:
                outcomes.append(int(done.statuses[0]))
                return
            moved.append(1)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    until(lambda: len(moved) > 3, timeout_s=60)
    owner.withdraw(descriptor)
    for thread in threads:
        thread.join(30)
    assert outcomes == [UNKNOWN_SEGMENT] * 3


def test_local_memory_unregistered_under_way_stays_until_the_end(engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="rdma")
    offsets = np.arange(256) * 4096
    submissions = [
        engine.submit(Operation.READ, target, offsets, np.full(256, 4096), region.address + offsets)
        for _ in range(4)
    ]
    engine.unregister(region)
    assert all((one.result(60) == 0).all() for one in submissions)
    assert np.array_equal(memory, content(3, SIZE))


def test_a_wrong_key_is_refused_by_the_card(engine, setting):
    import msgspec

    descriptor, memory, region = setting
    target = engine.open(descriptor, require="rdma")
    transport = transport_of(engine)

    def forge(endpoint):
        for uuid, grant in endpoint._grants.items():
            endpoint._grants[uuid] = msgspec.structs.replace(grant, key=grant.key ^ 0x5500)

    for endpoint in transport._pool.items():
        forge(endpoint)
    # The first refusal gets the key anew, and that one is right.
    engine.read_batch(target, [0], [SIZE], [region.address]).check()
    assert np.array_equal(memory, content(3, SIZE))

    from transfer_engine.rdma import endpoint as rdma_endpoint

    grant = rdma_endpoint.Endpoint.grant

    def forged(endpoint, *arguments):
        return msgspec.structs.replace(grant(endpoint, *arguments), key=7)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rdma_endpoint.Endpoint, "grant", forged)
        with pytest.raises(TransferError, match=r"rxe.*of process \d+ and rxe.*refuses access"):
            engine.read_batch(target, [0], [8], [region.address], timeout_s=30)


def test_a_range_past_the_end_is_refused_by_the_card_as_well(owner, engine, setting):
    """The owner does not rely on its clients' checks."""
    from transfer_engine.rdma.endpoint import Job, RefusedByCard, Transfer

    descriptor, _, region = setting
    target = engine.open(descriptor, require="rdma")
    transport = transport_of(engine)
    before = owner.digest(descriptor)
    for offset, length in ((SIZE - 4, 8), (SIZE, 1), (1 << 40, 8), (-8, 8)):
        engine.read_batch(target, [0], [8], [region.address]).check()
        batch = engine._prepare(
            target,
            BatchRequest(Operation.READ, [0], [length], [region.address], timeout_s=30),
        )
        batch.offsets[0] = offset
        remote = transport.open(descriptor, batch.deadline)
        endpoint, used = transport._pool.acquire(remote.key, None, batch.deadline)
        assert used  # by opening
        table = transport._memory.table(verbs.find_nics())
        job = Job(
            batch, batch.offsets, batch.lengths, batch.addresses, np.zeros(1, np.int64), table.keys
        )
        grant = endpoint.grant(descriptor, batch.deadline)
        with pytest.raises(RefusedByCard):
            Transfer(endpoint, job, grant, 0, length).run()
        transport._pool.discard(endpoint)
    assert owner.digest(descriptor) == before


def test_cancelling_wakes_a_blocked_transfer(owner, engine, setting):
    descriptor, _, region = setting
    target = engine.open(descriptor, require="rdma")
    engine.read_batch(target, [0], [8], [region.address]).check()
    many = np.zeros(4096, np.int64)
    arguments = (target, many, np.full(4096, SIZE), np.full(4096, region.address))
    submission = engine.submit(Operation.READ, *arguments, timeout_s=300)
    until(lambda: submission._batch.interrupt is not None, timeout_s=60)
    begin = time.monotonic()
    assert submission.cancel()
    submission.wait(30)
    assert "cancelled" in submission.states()
    assert time.monotonic() - begin < 5
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok


def test_a_deadline_ends_a_transfer_under_way(engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="rdma")
    many = np.zeros(4096, np.int64)
    arguments = (target, many, np.full(4096, SIZE), np.full(4096, region.address))
    begin = time.monotonic()
    with pytest.raises(TransferTimeoutError):
        engine.read_batch(*arguments, timeout_s=1.0)
    assert time.monotonic() - begin < 6
    submission = engine.submit(Operation.READ, *arguments, timeout_s=1.0)
    assert set(submission.wait(20).tolist()) == {TIMED_OUT}
    # Nothing is written behind the caller's back once the error is out.
    memory[:] = 0
    assert engine.read_batch(target, [0], [8], [region.address]).ok
    assert not memory[8:].any()


def test_a_stopped_owner_still_serves(owner, engine, setting):
    """One-sided means that the owner takes no part; opening needs it."""
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="rdma")
    engine.read_batch(target, [0], [8], [region.address]).check()
    os.kill(owner.process.pid, signal.SIGSTOP)
    try:
        engine.read_batch(target, [0], [SIZE // 2], [region.address], timeout_s=30).check()
        with TransferEngine() as other, pytest.raises(TransferTimeoutError):
            other.open(descriptor, require="rdma", timeout_s=1)
    finally:
        os.kill(owner.process.pid, signal.SIGCONT)
    assert np.array_equal(memory[: SIZE // 2], content(3, SIZE)[: SIZE // 2])


def test_more_owners_than_endpoints(owners, engine):
    """The pool evicts; every batch still moves."""
    transport = transport_of(engine)
    transport._pool.limit = 2
    some = [start(owners) for _ in range(3)]
    memory = np.zeros(64, np.uint8)
    region = engine.register(memory)
    descriptors = [owner.publish(4096, 20 + at) for at, owner in enumerate(some * 2)]
    targets = [engine.open(descriptor, require="rdma") for descriptor in descriptors]
    for _ in range(4):
        for at, target in enumerate(targets):
            engine.read_batch(target, [64], [64], [region.address]).check()
            assert np.array_equal(memory, content(20 + at, 4096)[64:128])
        assert len(transport._pool) <= 2


def test_the_access_hook_decides(owners, engine):
    memory = np.full(SIZE, 77, np.uint8)
    region = engine.register(memory)
    owner = start(owners, policy="read-only")
    descriptor = owner.publish(SIZE, 3)
    before = owner.digest(descriptor)
    target = engine.open(descriptor, require="rdma")
    done = engine.write_batch(target, [0, 5], [4, 100], [region.address] * 2)
    assert done.statuses.tolist() == [REFUSED] * 2
    assert owner.digest(descriptor) == before
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    assert np.array_equal(memory, content(3, SIZE))
    nobody = start(owners, policy="nobody")
    with pytest.raises(AuthError):
        engine.open(nobody.publish(SIZE, 3), require="rdma")
    owners.remove(nobody)
    nobody.close()
    owners.remove(owner)
    owner.close()


def test_the_secret_is_needed(owners, engine):
    owner = start(owners, secret=b"the secret of the owner".hex())
    descriptor = owner.publish(4096, 3)
    with pytest.raises(AuthError):
        engine.open(descriptor, require="rdma")
    with TransferEngine(secret=b"the secret of the owner") as knowing:
        assert knowing.open(descriptor, require="rdma").transport == "rdma"
    owners.remove(owner)
    owner.close()


def test_a_forked_child_goes_on_by_itself(engine, setting):
    descriptor, memory, region = setting
    target = engine.open(descriptor, require="rdma")
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
    expected = content(3, SIZE)
    pid = os.fork()
    if pid == 0:
        verdict = 1
        try:
            memory[:] = 0
            if engine.read_batch(target, [0], [SIZE], [region.address], timeout_s=60).ok:
                verdict = 0 if np.array_equal(memory, expected) else 2
        finally:
            os._exit(verdict)
    for _ in range(5):
        memory[:] = 0
        assert engine.read_batch(target, [0], [SIZE], [region.address]).ok
        assert np.array_equal(memory, expected)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert engine.read_batch(target, [0], [SIZE], [region.address]).ok


def test_idle_costs_no_processor_time(owner, engine, setting):
    """Neither end spins when there is nothing to do, nor while an owner does not answer."""
    descriptor, _, region = setting
    target = engine.open(descriptor, require="rdma")
    engine.read_batch(target, [0], [SIZE], [region.address]).check()

    def used(pid):
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    pids = (os.getpid(), owner.process.pid)
    before = [used(pid) for pid in pids]
    idle = threading.Event()
    begin = time.monotonic()
    assert not idle.wait(4)  # the measured time itself
    span = time.monotonic() - begin
    assert all(used(pid) - was < 0.01 * span + 0.02 for pid, was in zip(pids, before, strict=True))


def test_descriptors_say_which_way_was_chosen(engine, setting):
    descriptor, _, _ = setting
    assert descriptor.transports == ("shm", "rdma", "tcp")
    report = {path.transport: path for path in engine.explain(descriptor)}
    assert report["shm"].chosen
    with TransferEngine(transports=("rdma", "tcp")) as other:
        assert other.open(descriptor).transport == "rdma"
