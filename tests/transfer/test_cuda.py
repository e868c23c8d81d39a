"""Device memory as the near end of transfers, on the fake device and on a real one.

`make test-gpu` runs the tests marked gpu, which need a CUDA device; the others use the fake.
"""

import threading

import numpy as np
import pytest
import xxhash

from tests.accelerators import POISON, FakeDevice, RealDevice
from tests.on_cuda import ON_CUDA, WITHOUT_CUDA
from transfer_engine import FileSegment, Operation, Segment, TransferEngine, TransferServer
from transfer_engine.base import BAD_RANGE, REFUSED
from transfer_engine.devices.cuda import open_device
from transfer_engine.errors import (
    InvalidArgumentError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.testing import OwnerProcess, content

SIZE = 5 << 20
SOURCE = content(5, SIZE)
WAYS = ("local", "shm", "tcp", "file")
STAGED = ("tcp", "file")


@pytest.fixture(params=["fake", pytest.param("cuda", marks=ON_CUDA)])
def device(request):
    if request.param == "fake":
        made = FakeDevice()
        yield made
        assert made.pool.lent == 0
    else:
        yield RealDevice()


@pytest.fixture
def fake():
    return FakeDevice()


@pytest.fixture(params=WAYS)
def target(request, engine, tmp_path):
    """An open segment that holds `content(5, SIZE)`, reached one way."""
    way = request.param
    if way == "file":
        path = tmp_path / "segment"
        path.write_bytes(SOURCE)
        segment = FileSegment.open(path)
        read = path.read_bytes
    else:
        segment = Segment.create(SIZE)
        segment.buffer[:] = SOURCE.data
        read = segment.buffer.tobytes
    with segment, TransferServer() as server:
        opened = engine.open(server.publish(segment), require=way)
        yield Opened(way, opened, read)
        opened.close()


class Opened:
    def __init__(self, way, handle, read):
        self.way, self.handle, self.read = way, handle, read


def scattered(count=400, longest=9000):
    """Ranges of the segment, and where each lies in a tensor: adjacent, but in another order."""
    rng = np.random.default_rng(3)
    lengths = rng.integers(1, longest, count)
    offsets = rng.integers(0, SIZE - longest, count)
    positions = np.cumsum(lengths) - lengths
    return offsets, lengths, positions


def test_reads_into_a_tensor(device, engine, target):
    offsets, lengths, positions = scattered()
    tensor = device.make(SIZE)
    region = engine.register(tensor)
    assert region.location == "cuda:0"
    done = engine.read_batch(target.handle, offsets, lengths, region.address + positions)
    assert done.ok
    expected = np.full(SIZE, POISON, np.uint8)
    for offset, length, at in zip(offsets, lengths, positions, strict=True):
        expected[at : at + length] = SOURCE[offset : offset + length]
    assert np.array_equal(device.content(tensor), expected)


def test_writes_from_a_tensor_what_is_still_being_computed(device, engine, target):
    """The bytes are those of the work queued before, although nobody waited for it."""
    data = content(9, 3 << 20)
    tensor = device.make(SIZE)
    region = engine.register(tensor)
    device.fill(tensor, data)
    assert engine.write_batch(target.handle, [777], [data.size], [region.address]).ok
    expected = SOURCE.copy()
    expected[777 : 777 + data.size] = data
    assert target.read() == expected.tobytes()


def test_a_submitted_batch_comes_after_the_work_of_its_submitter(device, engine, target):
    data = content(9, 100_000)
    tensor = device.make(SIZE)
    region = engine.register(tensor)
    device.fill(tensor, data)
    submission = engine.submit(Operation.WRITE, target.handle, [5], [data.size], [region.address])
    assert submission.result().tolist() == [0]
    assert target.read()[5 : 5 + data.size] == data.tobytes()


def test_one_batch_may_name_host_and_device(device, engine, target):
    tensor, memory = device.make(5000), np.zeros(5000, np.uint8)
    near, far = engine.register(memory), engine.register(tensor)
    addresses = [near.address, far.address, near.address + 1000, far.address + 1000]
    done = engine.read_batch(target.handle, [0, 5000, 9000, SIZE - 3], [1000] * 3 + [4], addresses)
    assert done.statuses.tolist() == [0, 0, 0, BAD_RANGE]
    source = SOURCE
    assert np.array_equal(memory[:1000], source[:1000])
    assert np.array_equal(memory[1000:2000], source[9000:10_000])
    assert np.array_equal(device.content(tensor)[:1000], source[5000:6000])
    assert (device.content(tensor)[1000:] == POISON).all()


def test_checksums_are_those_of_the_bytes(device, engine, target):
    """Also of requests that pass through several pieces of staging memory."""
    lengths = np.array([100, 3 << 20, 70_001])
    offsets = np.array([4, 1000, 50])
    tensor = device.make(SIZE)
    region = engine.register(tensor)
    addresses = region.address + np.cumsum(lengths) - lengths
    for move in (engine.read_batch, engine.write_batch):
        done = move(target.handle, offsets, lengths, addresses, checksums=True)
        assert done.ok
        for offset, length, told in zip(offsets, lengths, done.checksums, strict=True):
            data = SOURCE[offset : offset + length].tobytes()
            assert int(told) == xxhash.xxh3_64_intdigest(data)


def test_threads_share_the_staging_memory(device, engine, target):
    """More transfers than pieces: all end, none sees another's bytes."""
    tensors = [device.make(1 << 20) for _ in range(6)]
    failures = []

    def work(number):
        region = engine.register(tensors[number])
        for round_number in range(3):
            offset = number * 100_003 + round_number
            done = engine.read_batch(target.handle, [offset], [1 << 20], [region.address])
            if not done.ok:
                failures.append(number)
        expected = SOURCE[offset : offset + (1 << 20)]
        if not np.array_equal(device.content(tensors[number]), expected):
            failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures


def test_only_the_device_touches_its_memory(fake, engine, target):
    """Every byte was copied by the device, and directly where the segment is mapped."""
    offsets, lengths, positions = scattered(100)
    region = engine.register(fake.make(SIZE))
    engine.read_batch(target.handle, offsets, lengths, region.address + positions).check()
    assert fake.copied == lengths.sum()
    assert bool(len(fake.pinned)) == (target.way not in STAGED)
    adjacent = np.arange(100) * 1000
    before = fake.copies
    engine.read_batch(
        target.handle, adjacent, np.full(100, 1000), region.address + adjacent
    ).check()
    assert fake.copies == before + 1, "what is adjacent at both ends is one copy"


def test_memory_that_cannot_be_pinned_is_staged(fake, engine, target):
    fake.pins = False
    data = content(9, 3 << 20)
    tensor = fake.make(SIZE)
    region = engine.register(tensor)
    fake.fill(tensor, data)
    engine.write_batch(target.handle, [1], [data.size], [region.address]).check()
    assert target.read()[1 : 1 + data.size] == data.tobytes()
    assert not fake.pinned
    assert fake.pool.lent == 0


def test_one_piece_of_staging_memory_is_enough(engine, target):
    fake = FakeDevice(piece_bytes=1 << 16, pieces_max=1)
    fake.pins = False
    data = content(9, 1 << 20)
    tensor = fake.make(SIZE)
    region = engine.register(tensor)
    fake.fill(tensor, data)
    engine.write_batch(target.handle, [1], [data.size], [region.address]).check()
    engine.read_batch(target.handle, [1], [data.size], [region.address + (2 << 20)]).check()
    assert np.array_equal(fake.content(tensor)[2 << 20 : 3 << 20], data)


def test_deadlines_and_cancellation_leave_nothing_behind(fake, engine, target):
    region = engine.register(fake.make(SIZE))
    with pytest.raises(TransferTimeoutError):
        engine.read_batch(target.handle, [0], [SIZE], [region.address], timeout_s=0.0)
    submissions = [
        engine.submit(Operation.READ, target.handle, [0], [SIZE], [region.address])
        for _ in range(30)
    ]
    for submission in reversed(submissions):
        submission.cancel()
    states = {
        submission.wait() is not None and submission.states()[0] for submission in submissions
    }
    assert states <= {"completed", "cancelled"}
    assert "cancelled" in states
    assert fake.pool.lent == 0


def test_writing_to_what_others_only_lend_for_reading_is_refused(fake, engine):
    with OwnerProcess(policy="read-only") as owner:
        handle = engine.open(owner.publish(1 << 16, 1), require="shm")
        region = engine.register(fake.make(100))
        done = engine.write_batch(handle, [0], [100], [region.address])
        assert done.statuses.tolist() == [REFUSED]
        assert engine.read_batch(handle, [0], [100], [region.address]).ok


def test_a_lost_owner_gives_staging_memory_back(fake, engine):
    with OwnerProcess() as owner:
        handle = engine.open(owner.publish(SIZE, 1), require="tcp")
        region = engine.register(fake.make(SIZE))
        owner.process.kill()
        owner.process.wait(30)
        with pytest.raises(StoreError):
            engine.read_batch(handle, [0], [SIZE], [region.address])
    assert fake.pool.lent == 0


def test_an_unregistered_tensor_is_refused(device, engine, target):
    tensor = device.make(1000)
    region = engine.register(tensor)
    engine.unregister(region)
    with pytest.raises(InvalidArgumentError, match="not registered"):
        engine.read_batch(target.handle, [0], [10], [region.address])


def test_the_fake_device_notices_a_missing_wait(fake):
    """What the tests above rely on."""
    tensor, data = fake.make(10), content(1, 10).copy()
    with fake.queue() as queue:
        queue.copy(tensor.address, data.ctypes.data, 10)
        fence = queue.mark()
        assert (fake.content(tensor) == POISON).all()
        data[:] = 7
        fence.wait()
    assert (fake.content(tensor) == 7).all(), "the copy happened when it was waited for"


@WITHOUT_CUDA
def test_without_cuda_one_sentence_says_why():
    with pytest.raises(UnavailableError, match="no CUDA device: torch"):
        open_device(0)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)], indirect=True)
def test_tensors_of_any_type_are_bytes(device):
    import torch

    with Segment.create(1 << 20) as segment, TransferServer() as server, TransferEngine() as engine:
        handle = engine.open(server.publish(segment))
        source = torch.randn(1000, 33, device="cuda:0", dtype=torch.float16)
        back = torch.zeros_like(source)
        nbytes = source.numel() * 2
        engine.write_batch(handle, [64], [nbytes], [engine.register(source).address]).check()
        engine.read_batch(handle, [64], [nbytes], [engine.register(back).address]).check()
        assert torch.equal(source, back)
        with pytest.raises(InvalidArgumentError, match="not contiguous"):
            engine.register(source.t())
