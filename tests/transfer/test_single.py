"""A batch of one over shared memory takes a way of its own; what becomes of it is the same."""

import itertools
import os
import signal

import numpy as np
import pytest
import xxhash

from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.errors import (
    InvalidArgumentError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.testing import OwnerProcess, content

SIZE = 1 << 20


@pytest.fixture(params=["local", "shm", "tcp"])
def target(request, engine, owner):
    if request.param == "local":
        with Segment.create(SIZE) as segment, TransferServer(tcp=None, unix=None) as server:
            np.frombuffer(segment.buffer, np.uint8)[:] = content(4, SIZE)
            yield engine.open(server.publish(segment), require="local")
    else:
        descriptor = owner.publish(SIZE, 4)
        yield engine.open(descriptor, require=request.param)
        owner.withdraw(descriptor)


def outcome(move, target, columns, **options):
    try:
        done = move(target, *columns, **options)
    except StoreError as error:
        return type(error)
    return int(done.statuses[-1]), done.transport


def test_one_is_judged_as_it_is_among_several(engine, target):
    """Whatever the numbers: the same verdict, or the same error."""
    memory = np.zeros(3 * SIZE, np.uint8)
    whole = engine.register(memory[:SIZE])
    engine.register(memory[SIZE : 2 * SIZE])  # touches the first: one range of two regions
    offsets = (0, 7, SIZE - 1, SIZE, -1, -(1 << 62), (1 << 63) - 1)
    lengths = (0, 1, 5, SIZE, SIZE + 1, -1, (1 << 63) - 1)
    places = (-1, 0, 1, SIZE - 2, 2 * SIZE - 1, 2 * SIZE, -whole.address, 5 - whole.address)
    seen = set()
    for offset, length, place in itertools.product(offsets, lengths, places):
        address = whole.address + place
        one = [np.array([number]) for number in (offset, length, address)]
        two = [np.array([good, number]) for good, number in zip((0, 0, whole.address),
                                                               (offset, length, address),
                                                               strict=True)]  # fmt: skip
        verdict = outcome(engine.read_batch, target, two)
        assert outcome(engine.read_batch, target, one) == verdict, (offset, length, place)
        assert outcome(engine.read_batch, target, [c.tolist() for c in one]) == verdict
        seen.add(verdict)
    assert {(0, target.transport), (-600, target.transport), InvalidArgumentError} <= seen


@pytest.mark.parametrize("length", [1, 4096, 300_000, SIZE - 100])
def test_one_arrives_whole_and_touches_nothing_else(engine, target, length):
    memory = np.full(SIZE + 200, 7, np.uint8)
    region = engine.register(memory)
    engine.read_batch(target, [33], [length], [region.address + 77]).check()
    assert np.array_equal(memory[77 : 77 + length], content(4, SIZE)[33 : 33 + length])
    assert (memory[:77] == 7).all()
    assert (memory[77 + length :] == 7).all()
    fresh = np.random.default_rng(length).integers(0, 256, length, np.uint8)
    engine.write_from(target, 51, fresh)
    whole = bytearray(SIZE)
    engine.read_into(target, 0, whole)
    expected = content(4, SIZE)
    expected[51 : 51 + length] = fresh
    assert np.array_equal(np.frombuffer(whole, np.uint8), expected)


def test_unregistered_memory_needs_a_caller_who_vouches(engine, target):
    memory = np.zeros(100, np.uint8)
    columns = [0], [100], [memory.ctypes.data]
    with pytest.raises(InvalidArgumentError, match="not registered"):
        engine.read_batch(target, *columns)
    assert not memory.any()
    engine.read_batch(target, *columns, trusted=True).check()
    assert np.array_equal(memory, content(4, SIZE)[:100])
    with pytest.raises(InvalidArgumentError):
        engine.read_batch(target, [0], [100], [0], trusted=True)


def test_no_time_is_no_time(engine, target):
    region = engine.register(bytearray(8))
    for timeout_s in (0, -1):
        with pytest.raises(TransferTimeoutError):
            engine.read_batch(target, [0], [8], [region.address], timeout_s=timeout_s)


def test_a_closed_engine_copies_nothing(target):
    with TransferEngine() as engine:
        region = engine.register(bytearray(8))
        other = engine.open(target.descriptor)
        assert engine.read_batch(other, [0], [8], [region.address]).ok
    with pytest.raises(UnavailableError):
        engine.read_batch(other, [0], [8], [region.address])


def test_a_segment_that_may_only_be_read_is_not_written(engine):
    with Segment.create(SIZE) as segment, TransferServer(authorize=reading) as server:
        target = engine.open(server.publish(segment), require="shm")
        region = engine.register(bytearray(8))
        assert engine.read_batch(target, [0], [8], [region.address]).ok
        assert engine.write_batch(target, [0], [8], [region.address]).statuses.tolist() == [-1011]


def reading(access):
    return access.operation.name == "READ"


def test_an_owner_that_died_is_lost_to_the_next_one(engine):
    owner = OwnerProcess()
    try:
        target = engine.open(owner.publish(SIZE, 4), require="shm")
        region = engine.register(bytearray(8))
        assert engine.read_batch(target, [0], [8], [region.address]).ok
        owner.process.kill()
        owner.process.wait(60)
        with pytest.raises(PeerLostError) as caught:
            engine.read_batch(target, [0], [8], [region.address])
        assert caught.value.operation == "read"
    finally:
        owner.close()


def test_one_with_a_checksum_or_a_fence_is_what_several_are(engine):
    """Over TCP the owner is shown the fence; a refused one changes nothing."""
    memory = np.random.default_rng(3).integers(0, 256, SIZE, np.uint8)
    region = engine.register(memory)
    with OwnerProcess(policy="fence=5") as owner:
        descriptor = owner.publish(SIZE, 4)
        target = engine.open(descriptor, require="tcp")
        expected = content(4, SIZE)
        for length in (1, 4096, 300_000):
            one = ([77], [length], [region.address])
            for fence, status in ((4, -1011), (5, 0), ((1 << 64) - 1, 0)):
                done = engine.write_batch(target, *one, fence=fence, checksums=True)
                assert (done.statuses.tolist(), done.transport) == ([status], "tcp")
                if not status:
                    hashed = xxhash.xxh3_64_intdigest(memory[:length].tobytes())
                    assert done.checksums.tolist() == [hashed]
                    expected[77 : 77 + length] = memory[:length]
            assert owner.digest(descriptor) == xxhash.xxh3_128_hexdigest(expected.data)
            memory[:] = np.roll(memory, 1)
            done = engine.read_batch(target, *one, checksums=True)
            assert np.array_equal(memory[:length], expected[77 : 77 + length])
            hashed = xxhash.xxh3_64_intdigest(memory[:length].tobytes())
            assert done.checksums.tolist() == [hashed]
        for fence in (-1, 1 << 64):
            with pytest.raises(InvalidArgumentError, match="fence"):
                engine.read_batch(target, *one, fence=fence)


def test_one_finds_its_connection_dead_and_goes_over_another(engine):
    """Whoever dropped it: the request was not lost, and nobody is told of it."""
    memory = np.zeros(100, np.uint8)
    region = engine.register(memory)
    with Segment.create(SIZE) as segment, TransferServer() as server:
        np.frombuffer(segment.buffer, np.uint8)[:] = content(4, SIZE)
        target = engine.open(server.publish(segment), require="tcp")
        for turn in range(3):
            for link in list(server._tcp._links):
                link.abort()
            done = engine.read_batch(target, [turn], [100], [region.address])
            assert done.ok
            assert np.array_equal(memory, content(4, SIZE)[turn : turn + 100])


def test_one_that_is_not_answered_ends_at_its_deadline(engine, monkeypatch):
    # Those with less time than this go the long way.
    monkeypatch.setattr("transfer_engine.engine.OPEN_TIMEOUT_S", 0.1)
    with OwnerProcess() as owner:
        target = engine.open(owner.publish(SIZE, 4), require="tcp")
        region = engine.register(bytearray(8))
        os.kill(owner.process.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, owner.process.pid, os.WSTOPPED)  # all its threads
        with pytest.raises(TransferTimeoutError) as caught:
            engine.read_batch(target, [0], [8], [region.address], timeout_s=0.3)
        assert caught.value.operation == "read"
        os.kill(owner.process.pid, signal.SIGCONT)
        assert engine.read_batch(target, [0], [8], [region.address]).ok
