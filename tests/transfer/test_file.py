"""File segments: the conformance suite on each kind of file, and what only files can do wrong."""

import errno
import os
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import xxhash

from tests.storage import (
    BLOCK_DEVICE,
    SEGMENT_BYTES,
    make_case,
    needs_block_device,
)
from tests.strangers import descriptors
from tests.waiting import PATIENCE_S, until
from transfer_engine import FileSegment, Operation, TransferEngine, TransferServer
from transfer_engine.base import NO_SPACE, TRUNCATED, Batch
from transfer_engine.errors import (
    AlreadyExistsError,
    AuthError,
    ConfigError,
    DiskError,
    InvalidArgumentError,
    NoSpaceError,
    NotFoundError,
    PeerLostError,
    RemoteProtocolError,
    TransferTimeoutError,
    TruncatedError,
)
from transfer_engine.segments import blockfile
from transfer_engine.segments.blockfile import BlockFile
from transfer_engine.segments.geometry import Geometry
from transfer_engine.testing import OwnerProcess, TransportCase, TransportContract, content
from transfer_engine.transports.file import FileTransport


def file_case(owner, engine, memory, path, transport="file", **options):
    descriptor = owner.publish_file(str(path), SEGMENT_BYTES, 5, **options)
    yield from make_case(owner, engine, memory, descriptor, transport)


class TestDirect(TransportContract):
    @pytest.fixture
    def case(self, owner, engine, memory, tmp_path):
        yield from file_case(owner, engine, memory, tmp_path / "segment", direct="require")


class TestOverTcp(TransportContract):
    @pytest.fixture
    def case(self, owner, engine, memory, tmp_path):
        yield from file_case(owner, engine, memory, tmp_path / "segment", "tcp")


class TestCached(TransportContract):
    @pytest.fixture
    def case(self, owner, engine, memory, tmp_path):
        yield from file_case(owner, engine, memory, tmp_path / "segment", direct="never")


class TestDurable(TransportContract):
    @pytest.fixture
    def case(self, owner, engine, memory, tmp_path):
        yield from file_case(owner, engine, memory, tmp_path / "segment", durable=True)


class TestBlockDevice(TransportContract):
    __test__ = bool(BLOCK_DEVICE)

    @pytest.fixture
    def case(self, owner, engine, memory):
        yield from file_case(owner, engine, memory, BLOCK_DEVICE, direct="require")


@needs_block_device
def test_a_block_device_is_claimed_and_used_directly():
    """Its contract is `TestBlockDevice`; nobody else may claim it meanwhile."""
    with FileSegment.open(BLOCK_DEVICE, direct="require") as segment:
        assert segment.page_kind == "direct"
        assert segment.file.block in (512, 4096)
        with pytest.raises(ConfigError, match="claimed"):
            FileSegment.open(BLOCK_DEVICE)


class TestInThisProcess(TransportContract):
    """The owner's own transfers, without a socket."""

    @pytest.fixture
    def case(self, engine, memory, tmp_path):
        path = tmp_path / "segment"
        path.write_bytes(content(5, SEGMENT_BYTES))
        with FileSegment.open(path) as segment, TransferServer(tcp=None, unix=None) as server:
            target = engine.open(server.publish(segment))
            assert target.transport == "file"
            yield TransportCase(
                engine,
                target,
                engine.register(memory),
                memory,
                content(5, SEGMENT_BYTES),
                lambda: digest_of(path),
            )


def digest_of(path):
    import xxhash

    return xxhash.xxh3_128_hexdigest(path.read_bytes())


@pytest.fixture(params=["direct", "cached"])
def mode(request):
    return {"direct": "require" if request.param == "direct" else "never"}


@pytest.fixture
def own(engine, tmp_path):
    """A function that opens a file segment of this process for the engine."""
    made = []

    def make(size=1 << 20, **options):
        path = tmp_path / f"segment{len(made)}"
        path.write_bytes(content(3, size))
        segment = FileSegment.open(path, **options)
        server = TransferServer(tcp=None, unix=None)
        made.append((segment, server))
        return path, segment, engine.open(server.publish(segment))

    yield make
    for segment, server in made:
        server.close()
        segment.close()


def move(engine, target, operation, offset, data):
    region = engine.register(data)
    try:
        run = engine.read_batch if operation is Operation.READ else engine.write_batch
        return run(target, [offset], [data.size], [region.address])
    finally:
        engine.unregister(region)


def test_blocks_side_by_side_go_to_memory_all_over_the_place(own, engine, mode):
    """Runs of neighbours, a large one, skewed ones and none at all, each with its checksum."""
    path, _, target = own(16 << 20, **mode)
    block, large, base = 64 << 10, 5 << 20, 4 << 20
    offsets = [*range(0, 40 * block, block), base, base + large, base + large + 4096, 100]
    lengths = [block] * 40 + [large, 4096, 5001, 0]
    starts = np.cumsum([0, *(-(-n // 4096) * 4096 for n in lengths[::-1])])[-2::-1]
    memory = np.empty(int(starts[0]) + block + 4096, np.uint8)
    region = engine.register(memory)
    first = -(-region.address // 4096) * 4096
    at = first + starts
    done = engine.read_batch(target, offsets, lengths, at, checksums=True).check()
    here = first - region.address + starts
    whole = path.read_bytes()
    places = list(zip(here.tolist(), offsets, lengths, strict=True))
    for (start, offset, length), told in zip(places, done.checksums.tolist(), strict=True):
        read = memory[start : start + length].tobytes()
        assert read == whole[offset : offset + length]
        assert told == xxhash.xxh3_64_intdigest(read)
    memory[:] = np.random.default_rng(8).integers(0, 256, memory.size, np.uint8)
    done = engine.write_batch(target, offsets, lengths, at, checksums=True).check()
    whole = path.read_bytes()
    for (start, offset, length), told in zip(places, done.checksums.tolist(), strict=True):
        assert whole[offset : offset + length] == memory[start : start + length].tobytes()
        assert told == xxhash.xxh3_64_intdigest(memory[start : start + length].tobytes())


def test_writers_of_one_block_keep_each_others_bytes(own, engine, mode):
    """Threads that own interleaved bytes of the same blocks lose none of them."""
    path, _, target = own(64 << 10, **mode)
    threads, rounds = 6, 40

    def work(number):
        data = np.empty(1000, np.uint8)
        region = engine.register(data)
        offsets = (np.arange(100) * threads + number) * 10
        for value in range(rounds):
            data[:] = value + number
            at = region.address + np.arange(100) * 10
            engine.write_batch(target, offsets, np.full(100, 10), at).check()

    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    expected = content(3, 64 << 10).copy()
    expected[: 100 * threads * 10] = np.tile(
        np.repeat(np.arange(threads, dtype=np.uint8) + rounds - 1, 10), 100
    )
    assert path.read_bytes() == expected.tobytes()


WRITER = """
import sys
import numpy as np
from transfer_engine import SegmentDescriptor, TransferEngine

engine = TransferEngine()
target = engine.open(SegmentDescriptor.decode(bytes.fromhex(sys.argv[1])), require="file")
data = np.empty(2000, np.uint8)
address = engine.register(data).address + np.arange(200) * 10
for value in range(200):
    data[:] = value
    engine.write_batch(target, np.arange(200) * 20, np.full(200, 10), address).check()
"""


def test_processes_writing_one_block_keep_each_others_bytes(tmp_path, engine):
    """Another process writes even tens of bytes while this one writes odd ones."""
    path = tmp_path / "shared"
    with OwnerProcess() as owner:
        descriptor = owner.publish_file(str(path), 64 << 10, 3, direct="require")
        target = engine.open(descriptor, require="file")
        told = descriptor.encode().hex()
        other = subprocess.Popen([sys.executable, "-c", WRITER, told])
        data = np.full(2000, 0xEE, np.uint8)
        address = engine.register(data).address + np.arange(200) * 10
        rounds = 0
        while other.poll() is None or rounds < 200:
            engine.write_batch(target, np.arange(200) * 20 + 10, np.full(200, 10), address).check()
            rounds += 1
    assert other.returncode == 0
    written = np.fromfile(path, np.uint8)
    interleaved = written[:4000].reshape(200, 20)
    assert (interleaved[:, 10:] == 0xEE).all()
    assert (interleaved[:, :10] == 199).all()
    assert np.array_equal(written[4000:], content(3, 64 << 10)[4000:])


@pytest.mark.parametrize("size", [1, 511, 4097, 70_000])
def test_the_whole_segment_up_to_its_last_byte(engine, tmp_path, size, mode):
    """A segment need not be whole blocks, nor its file."""
    with (
        FileSegment.create(tmp_path / "odd", size, **mode) as segment,
        TransferServer(tcp=None, unix=None) as server,
    ):
        target = engine.open(server.publish(segment))
        data = content(9, size).copy()
        assert move(engine, target, Operation.WRITE, 0, data).ok
        assert (tmp_path / "odd").read_bytes()[:size] == data.tobytes()
        back = np.zeros(size, np.uint8)
        assert move(engine, target, Operation.READ, 0, back).ok
        assert np.array_equal(back, data)
        assert not move(engine, target, Operation.READ, 1, back).ok


def test_a_shortened_file_fails_the_requests_behind_its_end(own, engine, mode, caplog):
    path, _, target = own(**mode)
    os.truncate(path, 500_000)
    data = np.zeros(3 * 1000, np.uint8)
    region = engine.register(data)
    at = region.address + np.arange(3) * 1000
    offsets = [0, 499_500, 700_000]
    done = engine.read_batch(target, offsets, [1000] * 3, at)
    assert done.statuses.tolist() == [0, TRUNCATED, TRUNCATED]
    assert np.array_equal(data[:1000], content(3, 1 << 20)[:1000])
    with pytest.raises(TruncatedError, match="ended before"):
        done.check()
    engine.read_batch(target, offsets, [1000] * 3, at)
    complaints = [record for record in caplog.records if "ends there" in record.getMessage()]
    assert len(complaints) == 1, "a failing file is logged once"


def test_a_shortened_file_read_over_tcp_is_never_partly_told_as_whole(engine, tmp_path):
    """Small replies carry a status; one that was promised already ends its connection."""
    size = 20 << 20
    with (
        FileSegment.create(tmp_path / "s", size) as segment,
        TransferServer(unix=None) as server,
    ):
        target = engine.open(server.publish(segment), require="tcp")
        os.truncate(tmp_path / "s", 10 << 20)
        data = np.zeros(size, np.uint8)
        region = engine.register(data)
        done = engine.read_batch(
            target, [0, (10 << 20) - 5], [10, 10], [region.address, region.address + 10]
        )
        assert done.statuses.tolist() == [0, TRUNCATED]
        with pytest.raises(PeerLostError):
            engine.read_batch(target, [0], [size], [region.address])
        assert engine.read_batch(target, [0], [1 << 20], [region.address]).ok


def test_a_full_disk_is_an_error_of_the_request():
    """/dev/full takes no byte; the batch says so and nothing else."""
    fd = os.open("/dev/full", os.O_RDWR)
    with BlockFile(fd, "/dev/full", Geometry("file", 1 << 20, 1, 1)) as file:
        data = np.ones(8, np.uint8)
        batch = one_write(0, data)
        file.move(batch, "nobody")
        assert batch.statuses.tolist() == [NO_SPACE]


def test_what_a_disk_has_no_room_for_is_refused_before_it_takes_any(tmp_path, monkeypatch):
    """Else the disk is full for a moment, and who else writes there fails."""
    path, free = tmp_path / "huge", os.statvfs(tmp_path)
    asked = []
    monkeypatch.setattr(os, "posix_fallocate", lambda *request: asked.append(request))
    with pytest.raises(NoSpaceError, match=r"huge: \d+ bytes are wanted, \d+ free"):
        FileSegment.create(path, free.f_blocks * free.f_frsize * 2)
    assert not asked
    assert not path.exists()


def test_creating_reserves_space_or_leaves_nothing(tmp_path, monkeypatch):
    def taken_meanwhile(*request):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "segment"
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", taken_meanwhile)
        with pytest.raises(NoSpaceError, match="cannot open"):
            FileSegment.create(path, 1 << 20)
    assert not path.exists()
    with FileSegment.create(path, 1 << 20):
        assert path.stat().st_blocks * 512 >= 1 << 20
    with pytest.raises(AlreadyExistsError):
        FileSegment.create(path, 1 << 20)


def test_what_cannot_be_opened_says_why(tmp_path):
    with pytest.raises(NotFoundError, match="No such file"):
        FileSegment.open(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="Is a directory"):
        FileSegment.open(tmp_path)
    with pytest.raises(InvalidArgumentError, match="no DAX device"):
        FileSegment.open("/dev/null")
    (tmp_path / "empty").touch()
    with pytest.raises(InvalidArgumentError, match="is empty"):
        FileSegment.open(tmp_path / "empty")
    (tmp_path / "odd").write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match="not whole blocks"):
        FileSegment.open(tmp_path / "odd", direct="require")
    with FileSegment.open(tmp_path / "odd") as segment:
        assert segment.page_kind == "cached"
    with pytest.raises(InvalidArgumentError, match="holds 5000"):
        FileSegment.open(tmp_path / "odd", size=5001)
    with pytest.raises(ConfigError, match="direct='maybe'"):
        FileSegment.open(tmp_path / "odd", direct="maybe")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop to a user without the right")
def test_a_file_without_the_right_to_it_is_refused(tmp_path):
    path = tmp_path / "private"
    path.write_bytes(bytes(4096))
    path.chmod(0o600)
    tmp_path.chmod(0o755)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setresuid(65534, 65534, 65534)
            FileSegment.open(path)
        except AuthError as error:
            os.write(write_end, str(error).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as answer:
        told = answer.read().decode()
    os.waitpid(child, 0)
    assert "Permission denied" in told or "cannot open" in told


def test_read_only_segments_refuse_writes(own, engine, mode):
    _, segment, target = own(writable=False, **mode)
    data = np.ones(100, np.uint8)
    with pytest.raises(AuthError):
        move(engine, target, Operation.WRITE, 0, data).check()
    assert move(engine, target, Operation.READ, 0, data).ok
    with pytest.raises(AuthError, match="reading only"):
        segment.share(writable=True)


def test_the_owner_decides_who_may_write(tmp_path):
    with OwnerProcess(policy="read-only") as owner, TransferEngine() as engine:
        descriptor = owner.publish_file(str(tmp_path / "s"), 1 << 20, 3)
        target = engine.open(descriptor, require="file")
        data = np.ones(100, np.uint8)
        assert move(engine, target, Operation.READ, 5, data).ok
        with pytest.raises(AuthError):
            move(engine, target, Operation.WRITE, 5, data).check()


def test_a_killed_owner_is_a_lost_peer(tmp_path):
    with OwnerProcess() as owner, TransferEngine() as engine:
        descriptor = owner.publish_file(str(tmp_path / "s"), 1 << 20, 3)
        target = engine.open(descriptor, require="file")
        owner.process.kill()
        owner.process.wait(30)
        with pytest.raises(PeerLostError, match="lost the owner"):
            move(engine, target, Operation.READ, 0, np.ones(9, np.uint8))


def test_a_withdrawn_segment_is_unknown(owner, engine, tmp_path):
    descriptor = owner.publish_file(str(tmp_path / "s"), 1 << 20, 3)
    target = engine.open(descriptor, require="file")
    owner.withdraw(descriptor)
    with pytest.raises(NotFoundError):
        move(engine, target, Operation.READ, 0, np.ones(9, np.uint8)).check()


def test_a_forged_descriptor_names_no_file(engine, owner, tmp_path):
    """A descriptor holds no path, so it cannot lead anybody to a file of its own choice."""
    descriptor = owner.publish_file(str(tmp_path / "s"), 1 << 20, 3)
    assert str(tmp_path).encode() not in descriptor.encode()
    owner.withdraw(descriptor)


def test_what_is_lent_as_a_file_and_is_none_costs_no_descriptor(tmp_path, monkeypatch):
    read_end, write_end = os.pipe()
    monkeypatch.setattr(FileTransport, "_own", lambda *_: None)
    monkeypatch.setattr(FileSegment, "share", lambda *_, **__: os.dup(read_end))
    with (
        FileSegment.create(tmp_path / "s", 1 << 20) as segment,
        TransferServer(tcp=None) as server,
        TransferEngine(transports=["file"]) as engine,
    ):
        descriptor = server.publish(segment)

        def attempt():
            with pytest.raises(RemoteProtocolError, match="neither a regular file"):
                engine.open(descriptor)

        attempt()
        before = descriptors()
        for _ in range(5):
            attempt()
        until(lambda: descriptors() <= before)
    os.close(read_end)
    os.close(write_end)


def test_memory_unregistered_under_way_ends_whole(own, engine):
    """A batch that was accepted ends; the next one is refused."""
    _, _, target = own(16 << 20)
    data = np.zeros(16 << 20, np.uint8)
    region = engine.register(data)
    submission = engine.submit(Operation.READ, target, [0], [data.size], [region.address])
    engine.unregister(region)
    assert submission.result().tolist() == [0]
    assert np.array_equal(data, content(3, 16 << 20))
    with pytest.raises(InvalidArgumentError, match="not registered"):
        engine.read_batch(target, [0], [data.size], [region.address])


def test_without_threads_to_help_the_caller_moves_all(own, engine, monkeypatch):
    def no_more(thread):
        raise RuntimeError("can't start new thread")

    _, _, target = own(16 << 20)
    data = np.zeros(16 << 20, np.uint8)
    region = engine.register(data)
    monkeypatch.setattr(threading.Thread, "start", no_more)
    assert engine.read_batch(target, [0], [data.size], [region.address]).ok
    assert np.array_equal(data, content(3, 16 << 20))


def test_what_a_helping_thread_gave_up_is_not_told_as_moved(own, engine, monkeypatch):
    """Its time was over, while the caller moved the rest."""
    _, _, target = own(16 << 20)
    data = np.zeros(16 << 20, np.uint8)
    region = engine.register(data)
    run_task, caller = BlockFile._run_task, threading.current_thread()
    gave_up = threading.Event()

    def run_or_give_up(*work):
        if threading.current_thread() is caller:
            assert gave_up.wait(PATIENCE_S)
            return run_task(*work)
        gave_up.set()
        raise TransferTimeoutError("no time was left")

    monkeypatch.setattr(BlockFile, "_run_task", run_or_give_up)
    with pytest.raises(TransferTimeoutError, match="no time was left"):
        engine.read_batch(target, [0], [data.size], [region.address])


def test_waiting_for_a_block_ends_at_the_deadline(own, engine):
    path, segment, target = own(direct="require")
    held, data = segment.file._lock, np.ones(10, np.uint8)
    region = engine.register(data)
    with held.hold(0, 4096, exclusive=True, deadline=time.monotonic() + 5):
        with pytest.raises(TransferTimeoutError):
            engine.write_batch(target, [0], [10], [region.address], timeout_s=0.05)
        assert engine.write_batch(target, [8192], [10], [region.address]).ok
    assert engine.write_batch(target, [0], [10], [region.address]).ok
    assert path.read_bytes()[:10] == data.tobytes()


@pytest.mark.slow
def test_moves_one_gibibyte_in_one_request(engine, tmp_path):
    size = 1 << 30
    with (
        FileSegment.create(tmp_path / "big", size) as segment,
        TransferServer(tcp=None, unix=None) as server,
    ):
        target = engine.open(server.publish(segment))
        memory = content(1, size)
        expected = xxhash.xxh3_128_digest(memory.data)
        region = engine.register(memory)
        engine.write_batch(target, [0], [size], [region.address], timeout_s=100).check()
        memory[:] = 0
        engine.read_batch(target, [0], [size], [region.address], timeout_s=100).check()
        assert xxhash.xxh3_128_digest(memory.data) == expected


def one_write(offset, data):
    def column(value):
        return np.array([value], dtype=np.int64)

    statuses = np.zeros(1, np.int32)
    address = column(data.ctypes.data)
    columns = column(offset), column(data.size), address, statuses
    return Batch(Operation.WRITE, *columns, data.size, time.monotonic() + 5)


def test_a_device_that_does_not_sync_holds_nobody_longer_than_its_deadline(tmp_path, monkeypatch):
    going_on, done = threading.Event(), threading.Event()

    def hang(fd):
        going_on.wait(PATIENCE_S)
        done.set()

    with (
        FileSegment.create(tmp_path / "segment", 1 << 20) as segment,
        TransferServer(tcp=None) as server,
        TransferEngine() as engine,
    ):
        target = engine.open(server.publish(segment))
        engine.sync(target)
        monkeypatch.setattr(os, "fdatasync", hang)
        with pytest.raises(TransferTimeoutError, match="sync"):
            engine.sync(target, timeout_s=0.05)
        going_on.set()
        assert done.wait(PATIENCE_S)


def test_a_read_that_failed_is_tried_again_where_it_failed(own, engine, monkeypatch):
    """And not where a write did afterwards, which a read there says nothing of."""
    _, segment, target = own(16 << 20, direct="never")
    move_runs, bad = blockfile.file.move_runs, 1 << 20

    def failing(fd, pieces, runs, first, last, *rest):
        statuses, failure = rest[-4], rest[-3]
        statuses[0] = DiskError.code
        failure[:] = 5, pieces[0, 0]
        return 0

    monkeypatch.setattr(blockfile.file, "move_runs", failing)
    data = np.zeros(10, np.uint8)
    assert not move(engine, target, Operation.READ, bad, data).ok
    assert not move(engine, target, Operation.WRITE, 8 << 20, data).ok
    monkeypatch.setattr(blockfile.file, "move_runs", move_runs)
    asked = []
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: asked.append(offset))
    segment.file.look_again()
    assert asked == [bad]


def test_what_is_no_file_is_not_synced(owner, engine):
    with pytest.raises(NotFoundError, match="no medium"):
        engine.sync(engine.open(owner.publish(1 << 16, 5)))
