"""Device memory as a segment that another process lends: on the fake device and on a real one."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xxhash

from tests.accelerators import POISON, FakeDevice, RealDevice
from transfer_engine import DeviceSegment, Operation, SegmentDescriptor, TransferServer
from transfer_engine.base import BAD_RANGE, UNKNOWN_SEGMENT
from transfer_engine.cuda import unavailable
from transfer_engine.devices import BORROWERS, borrow
from transfer_engine.errors import (
    AuthError,
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    UnavailableError,
)
from transfer_engine.testing import TransportCase, TransportContract, content

PROGRAM = Path(__file__).with_name("device_owner.py")
SIZE = 20 << 20
SOURCE = content(5, SIZE)
reason = unavailable()
gpu = [pytest.mark.gpu, pytest.mark.skipif(reason is not None, reason=f"no CUDA device: {reason}")]


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


@pytest.fixture(params=["fake", pytest.param("cuda", marks=gpu)])
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

    @pytest.fixture
    def case(self, lender, engine, memory):
        device = FakeDevice()
        device.understands_lent_memory()
        target = engine.open(lender.descriptor, require="cuda")
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


def test_tensors_are_read_and_written_without_the_owner(device, lend, engine):
    lender = lend()
    assert lender.descriptor.transports == ("cuda",)
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
    with pytest.raises(PeerLostError, match="lost the owner"):
        engine.read_into(target, 0, bytearray(100))


@pytest.mark.parametrize("policy", ["nobody", "readers"])
def test_who_may_not_write_gets_nothing(device, lend, engine, policy):
    """A mapping for reading alone does not exist on devices."""
    with pytest.raises(AuthError):
        engine.open(lend(policy).descriptor)


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


@pytest.mark.skipif(reason is None, reason="there is a CUDA device")
def test_without_cuda_borrowing_says_why():
    with pytest.raises(UnavailableError, match="no CUDA device: torch"):
        borrow(b"cuda" + bytes(16 + 8 + 8 + 64))
