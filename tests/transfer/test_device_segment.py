"""Device memory as a segment that another process lends: on the fake device and on a real one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.accelerators import POISON, FakeDevice, RealDevice
from tests.on_cuda import ON_CUDA, WITHOUT_CUDA
from transfer_engine import DeviceSegment, Operation, SegmentDescriptor, TransferServer
from transfer_engine.accelerators import BORROWERS, borrow
from transfer_engine.base import BAD_RANGE, FAILED, REFUSED, UNKNOWN_SEGMENT
from transfer_engine.errors import (
    AuthError,
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    TransferError,
    UnavailableError,
)
from transfer_engine.testing import TransportCase, TransportContract, content

PROGRAM = Path(__file__).with_name("device_owner.py")
SIZE = 20 << 20
SOURCE = content(5, SIZE)


class Lender:
    """Another process with device memory, published."""

    def __init__(self, kind, policy="everybody"):
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, kind, str(SIZE), policy],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.descriptor = SegmentDescriptor.decode(bytes.fromhex(self.process.stdout.readline()))

    def ask(self, command="content"):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(params=["fake", pytest.param("cuda", marks=ON_CUDA)])
def kind(request):
    return request.param


@pytest.fixture
def device(kind):
    if kind == "cuda":
        yield RealDevice()
        return
    made = FakeDevice()
    made.understands_lent_memory()
    yield made
    del BORROWERS[b"fake"]
    assert made.pool.lent == 0


@pytest.fixture
def lend(kind):
    made = []

    def make(policy="everybody"):
        made.append(Lender(kind, policy))
        return made[-1]

    yield make
    for lender in made:
        lender.close()


@pytest.fixture(scope="module")
def lender():
    made = Lender("fake")
    yield made
    made.close()


class TestFake(TransportContract):
    """The conformance suite, with host memory at the near end."""

    transport = "cuda"

    @pytest.fixture
    def case(self, lender, engine, memory):
        device = FakeDevice()
        device.understands_lent_memory()
        target = engine.open(lender.descriptor, require=self.transport)
        memory[:] = SOURCE[: memory.size]
        region = engine.register(memory)
        # Every test begins with the bytes that it expects.
        rest = SOURCE[memory.size :].copy()
        engine.write_batch(target, [0], [memory.size], [region.address]).check()
        engine.write_from(target, memory.size, rest)
        memory[:] = 0
        yield TransportCase(engine, target, region, memory, SOURCE.copy(), lender.ask)
        target.close()
        del BORROWERS[b"fake"]


class TestFakeOverTcp(TestFake):
    """The same with an owner whose device copies for those who cannot."""

    transport = "tcp"


def test_tensors_are_read_and_written_without_the_owner(device, lend, engine):
    lender = lend()
    assert lender.descriptor.transports == ("cuda", "tcp")
    target = engine.open(lender.descriptor)
    assert target.transport == "cuda"
    tensor = device.make(SIZE)
    region = engine.register(tensor)
    offsets = np.array([4, 100_000, 50])
    engine.read_batch(target, offsets, [1000] * 3, region.address + offsets).check()
    for at in offsets.tolist():
        assert np.array_equal(device.content(tensor)[at : at + 1000], SOURCE[at : at + 1000])
    assert (device.content(tensor)[200_000:] == POISON).all()
    expected = SOURCE.copy()
    data = content(8, 5000)
    device.fill(tensor, data)
    engine.write_batch(target, [7], [5000], [region.address]).check()
    expected[7:5007] = data
    assert lender.ask() == xxhash.xxh3_128_hexdigest(expected)


def test_checksums_and_bad_ranges(device, lend, engine):
    target = engine.open(lend().descriptor)
    tensor = device.make(1 << 20)
    region = engine.register(tensor)
    done = engine.read_batch(
        target, [10, SIZE, 70_000], [60_000, 1, 50], region.address + np.array([0, 0, 60_000]),
        checksums=True,
    )  # fmt: skip
    assert done.statuses.tolist() == [0, BAD_RANGE, 0]
    assert int(done.checksums[0]) == xxhash.xxh3_64_intdigest(SOURCE[10:60_010].tobytes())
    assert int(done.checksums[2]) == xxhash.xxh3_64_intdigest(SOURCE[70_000:70_050].tobytes())
    assert np.array_equal(device.content(tensor)[:60_000], SOURCE[10:60_010])


def test_a_withdrawn_segment_is_unknown_and_its_memory_given_back(device, kind, lend, engine):
    lender = lend()
    target = engine.open(lender.descriptor)
    memory = np.zeros(100, np.uint8)
    engine.read_into(target, 0, memory)
    lender.ask("withdraw")
    done = engine.read_batch(target, [0], [100], [engine.register(memory).address])
    assert done.statuses.tolist() == [UNKNOWN_SEGMENT]
    if kind == "fake":
        assert not device.borrowed


def test_a_killed_owner_is_lost(device, lend, engine):
    lender = lend()
    target = engine.open(lender.descriptor)
    lender.process.kill()
    lender.process.wait()
    with pytest.raises(PeerLostError, match=r"cannot (reach|connect)|lost"):
        engine.read_into(target, 0, bytearray(100))


def test_who_may_do_nothing_gets_nothing(device, lend, engine):
    with pytest.raises(AuthError):
        engine.open(lend("nobody").descriptor)


def test_who_may_not_write_gets_no_mapping(device, lend, engine):
    """One for reading alone does not exist on devices. Over TCP the owner judges each batch."""
    lender = lend("readers")
    with pytest.raises(AuthError):
        engine.open(lender.descriptor, require="cuda")
    target = engine.open(lender.descriptor)
    assert target.transport == "tcp"
    memory = np.zeros(100, np.uint8)
    batch = ([5], [100], [engine.register(memory).address])
    engine.read_batch(target, *batch).check()
    assert np.array_equal(memory, SOURCE[5:105])
    assert engine.write_batch(target, *batch).statuses.tolist() == [REFUSED]
    assert lender.ask() == xxhash.xxh3_128_hexdigest(SOURCE)


def test_over_tcp_both_ends_may_be_tensors(device, lend, engine):
    """Without a device of its own, a process is served by the owner's."""
    lender = lend()
    target = engine.open(lender.descriptor, require="tcp")
    tensor = device.make(SIZE)
    region = engine.register(tensor)
    engine.read_batch(target, [0], [SIZE], [region.address]).check()
    assert np.array_equal(device.content(tensor), SOURCE)
    data = content(9, SIZE)
    device.fill(tensor, data)
    # More than a window of the owner's staging memory, at odd places.
    engine.write_batch(target, [3], [SIZE - 5], [region.address + 1]).check()
    expected = np.concatenate((SOURCE[:3], data[1 : SIZE - 4], SOURCE[-2:]))
    assert lender.ask() == xxhash.xxh3_128_hexdigest(expected)


def test_a_process_without_the_device_goes_over_tcp(lend, kind, engine, monkeypatch):
    monkeypatch.delitem(BORROWERS, kind.encode(), raising=False)
    target = engine.open(lend().descriptor)
    assert target.transport == "tcp"
    back = bytearray(1000)
    engine.read_into(target, 7, back)
    assert back == SOURCE[7:1007].tobytes()


def test_a_device_that_fails_is_a_status(engine):
    """Reads and writes; the connection stays, and what is too late to tell cuts it."""

    class Broken(FakeDevice):
        failing = False

        def execute(self, target, source, length):
            if self.failing:
                raise TransferError("an unknown error (700)", operation="copy")
            super().execute(target, source, length)

    device = Broken()
    tensor = device.make(SIZE)
    device.fill(tensor, SOURCE)
    device.fence().wait()
    memory = np.zeros(SIZE, np.uint8)
    address = engine.register(memory).address
    with TransferServer() as server:
        target = engine.open(server.publish(DeviceSegment.wrap(tensor)), require="tcp")
        device.failing = True
        for move in (engine.read_batch, engine.write_batch):
            assert move(target, [0, 9], [5, 70], [address] * 2).statuses.tolist() == [FAILED] * 2
        with pytest.raises(PeerLostError):
            engine.read_batch(target, [0], [SIZE], [address])
        device.failing = False
        engine.read_batch(target, [0], [SIZE], [address]).check()
    assert np.array_equal(memory, SOURCE)


def test_a_segment_of_this_process_is_used_directly(device, engine):
    tensor = device.make(SIZE)
    device.fill(tensor, SOURCE)
    getattr(device, "device", device).fence().wait()
    with TransferServer() as server:
        segment = DeviceSegment.wrap(tensor)
        target = engine.open(server.publish(segment))
        back = np.zeros(1000, np.uint8)
        region = engine.register(back)
        assert engine.submit(Operation.READ, target, [5], [1000], [region.address]).result(30) == 0
        assert np.array_equal(back, SOURCE[5:1005])
        segment.close()
        with pytest.raises(NotFoundError):
            engine.read_into(target, 0, back)
        with pytest.raises(NotFoundError):
            segment.share(writable=True)


def test_what_is_no_device_memory_is_refused():
    with pytest.raises(InvalidArgumentError, match="no memory of a device"):
        DeviceSegment.wrap(bytearray(8))
    for token in (b"", b"none", b"cud", b"\0" * 96):
        with pytest.raises(InvalidArgumentError):
            borrow(token)
    with pytest.raises(InvalidArgumentError):
        borrow(b"cuda" + bytes(7))


@WITHOUT_CUDA
def test_without_cuda_borrowing_says_why():
    with pytest.raises(UnavailableError, match="no CUDA device: torch"):
        borrow(b"cuda" + bytes(16 + 8 + 8 + 64))
