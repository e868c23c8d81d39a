"""Segments, registration, choice of paths, background batches, servers: what a caller relies on."""

import errno
import logging
import math
import os
import threading

import numpy as np
import pytest
import xxhash

from tests.waiting import until
from transfer_engine import (
    Operation,
    Segment,
    SegmentDescriptor,
    TransferEngine,
    TransferServer,
)
from transfer_engine.base import CANCELLED, COMPLETED
from transfer_engine.errors import (
    AlreadyExistsError,
    AuthError,
    BusyError,
    ConfigError,
    InvalidArgumentError,
    NotFoundError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.segments.mapping import thp_policy
from transfer_engine.testing import content
from transfer_engine.transports import copying


def test_a_segment_is_zeroed_shared_and_sealed():
    with Segment.create(100_001, name="pool") as segment:
        assert (segment.size, segment.shareable, segment.writable) == (100_001, True, True)
        assert not any(segment.view(0, 100_001))
        fd = segment.share(writable=True)
        for size in (1, 1 << 20):
            with pytest.raises(OSError, match="not permitted"):
                os.ftruncate(fd, size)
        os.close(fd)
        fd = segment.share(writable=False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.write(fd, b"x")
        os.close(fd)
    with pytest.raises(NotFoundError):
        segment.buffer  # noqa: B018
    segment.close()


def test_a_segment_may_have_the_longest_name_in_any_script():
    with Segment.create(4096, name="名" * 128) as segment:  # three bytes each
        assert segment.name == "名" * 128


def test_shared_memory_that_cannot_be_had_leaves_nothing(monkeypatch):
    def refuse(fd, size):
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    made = []
    create = os.memfd_create
    monkeypatch.setattr(os, "memfd_create", lambda *given: made.append(create(*given)) or made[-1])
    monkeypatch.setattr(os, "ftruncate", refuse)
    with pytest.raises(ConfigError, match="4096 bytes of shared memory: File too large"):
        Segment.create(4096)
    (fd,) = made
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_a_named_segment_survives_its_process(tmp_path):
    path = tmp_path / "segment"
    pid = os.fork()
    if pid == 0:
        segment = Segment.create(8192, path=path, uuid=b"u" * 16)
        segment.buffer[5:8] = b"abc"
        os._exit(0)
    os.waitpid(pid, 0)
    with Segment.attach(path, uuid=b"u" * 16) as segment:
        assert segment.uuid == b"u" * 16
        assert bytes(segment.view(5, 3)) == b"abc"
    with pytest.raises(AlreadyExistsError):
        Segment.create(10, path=path)
    with pytest.raises(NotFoundError):
        Segment.attach(tmp_path / "none", uuid=b"u" * 16)


def test_a_named_segment_has_all_its_pages_and_only_the_first_bytes_may_be_wanted(tmp_path):
    path = tmp_path / "segment"
    Segment.create(3 << 20, path=path).close()
    assert path.stat().st_blocks * 512 >= 3 << 20
    with Segment.attach(path, uuid=b"u" * 16, size=1 << 20) as segment:
        assert segment.size == 1 << 20
    with pytest.raises(InvalidArgumentError, match="the file holds 3145728 bytes"):
        Segment.attach(path, uuid=b"u" * 16, size=4 << 20)


def test_a_named_segment_in_which_others_have_a_hand_is_refused(tmp_path):
    path = tmp_path / "segment"
    Segment.create(8192, path=path).close()
    os.link(path, tmp_path / "another name")
    with pytest.raises(AuthError, match="2 names"):
        Segment.attach(path, uuid=b"u" * 16)
    (tmp_path / "another name").unlink()
    os.symlink(path, tmp_path / "link")
    with pytest.raises(ConfigError, match="symbolic links"):
        Segment.attach(tmp_path / "link", uuid=b"u" * 16)


def test_prefaulting_changes_no_byte():
    with Segment.create(40 << 20) as segment:
        segment.buffer[7] = 9
        assert segment.prefault(threads=2).wait(30)
        assert bytes(segment.view(6, 3)) == b"\0\x09\0"


def test_required_huge_pages_are_had_or_refused_with_the_setting():
    try:
        with Segment.create(4 << 20, hugepages="require") as segment:
            kind = segment.page_kind
    except ConfigError as error:
        kind = str(error)
    if thp_policy() in ("never", "deny"):
        assert kind == "hugetlb" or ("shmem_enabled" in kind and "vm.nr_hugepages" in kind)
    else:
        assert kind == "thp"


@pytest.mark.parametrize("size", [0, -1])
def test_impossible_segments_are_refused(size):
    with pytest.raises(InvalidArgumentError):
        Segment.create(size)
    with pytest.raises(InvalidArgumentError):
        Segment.wrap(bytearray())
    with pytest.raises(InvalidArgumentError):
        Segment.create(10, name="new\nline")
    with pytest.raises(InvalidArgumentError):
        Segment.create(10, uuid=b"short")


def test_a_wrapped_buffer_is_served_over_tcp_only(engine):
    data = np.arange(1000, dtype=np.int32)
    with Segment.wrap(data) as segment, TransferServer() as server:
        descriptor = server.publish(segment)
        assert descriptor.transports == ("tcp",)
        target = engine.open(descriptor, require="tcp")
        out = np.zeros(1000, np.int32)
        engine.read_into(target, 0, out)
        assert np.array_equal(out, data)
        engine.write_from(target, 8, b"\xff" * 4)
        assert data[2] == -1
        fixed = server.publish(Segment.wrap(b"constant"))
        with pytest.raises(PermissionError):
            engine.write_from(engine.open(fixed, require="tcp"), 0, b"x")


def test_local_is_preferred_and_the_reasons_are_told(engine):
    with Segment.create(4096) as segment, TransferServer() as server:
        descriptor = server.publish(segment)
        report = engine.explain(descriptor)
        names = ["local", "shm", "cuda", "file", "rdma", "tcp"]
        assert [(path.transport, path.chosen) for path in report] == [
            (name, name == "local") for name in names
        ]
        assert engine.open(descriptor).transport == "local"
        assert engine.open(descriptor, require="shm").transport == "shm"
        with pytest.raises(ConfigError, match="pigeon"):
            engine.open(descriptor, require="pigeon")


def test_a_required_path_is_never_replaced(owner):
    descriptor = owner.publish(4096, 1)
    with TransferEngine(transports=["tcp"]) as engine:
        assert engine.open(descriptor).transport == "tcp"
        with pytest.raises(ConfigError, match="shm"):
            engine.open(descriptor, require="shm")
    elsewhere = SegmentDescriptor(**{
        **{name: getattr(descriptor, name) for name in descriptor.__struct_fields__},
        "host": "another boot",
    })  # fmt: skip
    with TransferEngine(networks=["127.0.0.0/8"]) as engine:
        with pytest.raises(UnavailableError, match="another host"):
            engine.open(elsewhere, require="shm")
        assert engine.open(elsewhere).transport == "tcp"


def test_a_failing_path_gives_way_to_the_next_once(owner, caplog):
    descriptor = owner.publish(1 << 20, 1)
    fields = {name: getattr(descriptor, name) for name in descriptor.__struct_fields__}
    broken = SegmentDescriptor(**{**fields, "unix_address": "@nobody-listens-here"})
    memory = np.zeros(1 << 20, np.uint8)
    with TransferEngine() as engine, caplog.at_level(logging.WARNING):
        region = engine.register(memory)
        target = engine.open(broken)
        for _ in range(3):
            assert engine.read_batch(target, [0], [1 << 20], [region.address]).transport == "tcp"
        assert np.array_equal(memory, content(1, 1 << 20))
        assert [path.chosen for path in target.report] == [False, False, False, False, False, True]
        assert "refused" in target.report[1].reason
    assert len([record for record in caplog.records if "over tcp" in record.message]) == 1


def test_registration_is_counted_by_range(engine):
    with Segment.create(1 << 16) as segment, TransferServer() as server:
        target = engine.open(server.publish(segment))
        data = bytearray(b"abcdefgh")
        region, again = engine.register(data), engine.register(memoryview(data))
        engine.write_batch(target, [0], [8], [region.address]).check()
        engine.unregister(region)
        engine.write_batch(target, [100], [2], [again.address + 2]).check()
        with pytest.raises(NotFoundError):
            engine.unregister(region)
        engine.unregister(again)
        with pytest.raises(InvalidArgumentError):
            engine.write_batch(target, [0], [8], [region.address])
        assert bytes(segment.view(0, 8)) == b"abcdefgh"
        assert bytes(segment.view(100, 2)) == b"cd"


@pytest.mark.parametrize("part", [slice(0, 4), slice(2, 6), slice(4, 8), slice(7, 8)])
def test_registrations_that_overlap_in_part_are_refused(engine, part):
    data = bytearray(8)
    for first, second in (
        (memoryview(data), memoryview(data)[part]),
        (memoryview(data)[part], memoryview(data)),
        (memoryview(data)[1:8], memoryview(data)[0:2]),
    ):
        region = engine.register(first)
        with pytest.raises(AlreadyExistsError) as caught:
            engine.register(second)
        assert f"{region.address:#x}" in str(caught.value)
        assert f"process {os.getpid()}" in str(caught.value)
        engine.unregister(region)
        engine.unregister(engine.register(second))


def test_neighbours_and_nothing_overlap_with_nobody(engine):
    data = memoryview(bytearray(8))
    left, right = engine.register(data[:4]), engine.register(data[4:])
    engine.register(data[2:2])
    with Segment.create(4096) as segment, TransferServer() as server:
        target = engine.open(server.publish(segment))
        engine.write_batch(target, [0], [8], [left.address]).check()
        engine.unregister(right)
        with pytest.raises(InvalidArgumentError):
            engine.write_batch(target, [0], [8], [left.address])


def test_arguments_that_do_not_match_are_refused(engine):
    with Segment.create(4096) as segment, TransferServer() as server:
        target = engine.open(server.publish(segment))
        for columns in (([0], [1, 2], [3]), ([[0]], [[1]], [[2]])):
            with pytest.raises(InvalidArgumentError):
                engine.read_batch(target, *columns)
        with pytest.raises(InvalidArgumentError):
            engine.read_into(target, 0, b"read only")
        with pytest.raises(InvalidArgumentError):
            engine.read_into(target, 4090, bytearray(7))
        target.close()
        with pytest.raises(NotFoundError):
            engine.read_into(target, 0, bytearray(7))


def test_a_full_queue_refuses_at_once(owner):
    descriptor = owner.publish(1 << 20, 1)
    memory = np.zeros(1 << 20, np.uint8)
    with TransferEngine(threads=1, queue_max=2) as engine:
        region = engine.register(memory)
        target = engine.open(descriptor, require="tcp")
        batch = (Operation.READ, target, [0], [1 << 20], [region.address])
        first = engine.submit(*batch)
        with pytest.raises(BusyError):
            all(engine.submit(*batch) for _ in range(10_000))
        assert not first.result().any()
    with pytest.raises(UnavailableError):
        engine.read_batch(target, [0], [1], [region.address])


def test_non_loopback_needs_a_secret():
    with pytest.raises(ConfigError, match="secret"):
        TransferServer(tcp="0.0.0.0:0", advertise_host="10.0.0.1")
    with pytest.raises(ConfigError, match="advertise_host"):
        TransferServer(tcp="0.0.0.0:0", secret=b"a secret of a port")
    for address in ("nonsense", "127.0.0.1:", "127.0.0.1:70000", ":1"):
        with pytest.raises(ConfigError):
            TransferServer(tcp=address)
    with TransferServer(
        tcp="0.0.0.0:0", secret=b"a secret of a port", advertise_host="10.0.0.1"
    ) as server:
        assert server.tcp_address[0] == "10.0.0.1"


def test_closing_a_server_is_clean_and_idempotent(engine):
    before = set(threading.enumerate())
    segment = Segment.create(4096)
    server = TransferServer()
    descriptor = server.publish(segment)
    assert server.publish(segment) == descriptor
    with pytest.raises(AlreadyExistsError):
        server.publish(Segment.create(4096, uuid=segment.uuid))
    engine.open(descriptor, require="tcp")
    engine.open(descriptor, require="shm")
    server.close()
    server.close()
    # The thread of a connection has nothing left to do, but may not have ended yet.
    # Nor may those of tests before, which end meanwhile.
    until(lambda: set(threading.enumerate()) <= before, what="all threads have ended")
    with pytest.raises(ConnectionError):
        engine.open(descriptor, require="tcp")


def test_descriptors_survive_the_wire_and_reject_nonsense(owner):
    descriptor = owner.publish(4096, 1)
    assert SegmentDescriptor.decode(descriptor.encode()) == descriptor
    for data in (b"", b"\xc1", b"\x93\x01\x02\x03", descriptor.encode()[:-3]):
        with pytest.raises(InvalidArgumentError):
            SegmentDescriptor.decode(data)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_trusted_buffers_need_no_registration(owner, engine, transport):
    descriptor = owner.publish(1 << 20, 9)
    target = engine.open(descriptor, require=transport)
    memory = np.zeros(300_000, np.uint8)
    address = int(memory.ctypes.data)
    batch = (target, [10, 500_000], [100_000, 200_000], [address, address + 100_000])
    for move in (engine.read_batch, engine.write_batch):
        with pytest.raises(InvalidArgumentError, match="not registered"):
            move(*batch)
    assert not memory.any()
    expected = content(9, 1 << 20)
    assert engine.read_batch(*batch, trusted=True).ok
    assert np.array_equal(memory[:100_000], expected[10:100_010])
    assert np.array_equal(memory[100_000:], expected[500_000:700_000])
    memory[:] = memory[::-1].copy()
    assert engine.write_batch(*batch, trusted=True).ok
    memory, wanted = np.zeros_like(memory), memory
    address = int(memory.ctypes.data)
    again = (target, [10, 500_000], [100_000, 200_000], [address, address + 100_000])
    assert not engine.submit(Operation.READ, *again, trusted=True).result().any()
    assert np.array_equal(memory, wanted)
    # What is vouched for is the memory; the segment's bounds are checked all the same.
    outside = engine.read_batch(target, [1 << 20], [1], [address], trusted=True)
    assert outside.statuses.tolist() == [InvalidArgumentError.code]
    with pytest.raises(InvalidArgumentError, match="not registered"):
        engine.read_batch(target, [0], [1], [0], trusted=True)
    owner.withdraw(descriptor)


def test_callbacks_come_once_the_statuses_are_final_and_at_once_after_that(owner, engine):
    descriptor = owner.publish(16 << 20, 9)
    target = engine.open(descriptor, require="tcp")
    memory = np.zeros(16 << 20, np.uint8)
    region = engine.register(memory)
    submission = engine.submit(Operation.READ, target, [0], [16 << 20], [region.address])
    seen, told = [], threading.Event()
    submission.add_done_callback(lambda: seen.append((submission.done, submission.poll().tolist())))
    submission.add_done_callback(told.set)
    assert told.wait(60)
    assert seen == [(True, [0])]
    here = []
    submission.add_done_callback(lambda: here.append(threading.current_thread()))
    assert here == [threading.current_thread()]
    assert len(seen) == 1
    owner.withdraw(descriptor)


def test_callbacks_come_for_what_is_cancelled_in_the_queue(owner):
    descriptor = owner.publish(16 << 20, 9)
    memory = np.zeros(16 << 20, np.uint8)
    with TransferEngine(threads=1) as engine:
        region = engine.register(memory)
        target = engine.open(descriptor, require="tcp")
        batch = (Operation.READ, target, [0], [16 << 20], [region.address])
        submissions = [engine.submit(*batch) for _ in range(8)]
        ended = []
        for at, submission in enumerate(submissions):
            submission.add_done_callback(lambda at=at: ended.append(at))
        for submission in submissions:
            submission.cancel()
        for submission in submissions:
            submission.wait(60)
        until(lambda: len(ended) == 8)
        assert sorted(ended) == list(range(8))
    owner.withdraw(descriptor)


def test_memory_is_lent_where_it_is_shared_only(owner, engine):
    descriptor = owner.publish(1 << 20, 9)
    assert engine.open(descriptor, require="tcp").memory() is None
    target = engine.open(descriptor, require="shm")
    mapping = target.memory()
    assert bytes(mapping.view(7, 100)) == content(9, 1 << 20)[7:107].tobytes()
    owner.withdraw(descriptor)
    until(lambda: target.memory() is None)
    target.close()
    assert target.memory() is None


class TestLongBatchesWithChecksums:
    """They are copied in pieces of whole requests, between which somebody looks up."""

    LENGTHS = np.array([3000, 7000, 1, 30_000, 0, 5000, 9999, 12_000])

    @pytest.fixture
    def setting(self, engine, monkeypatch):
        monkeypatch.setattr(copying, "_PIECE_BYTES", 10_000)
        self.after = lambda _piece: None
        self.pieces = []
        plain = copying._copy_hashed

        def copy(mapping, batch):
            plain(mapping, batch)
            self.pieces.append(batch.statuses.size)
            self.after(self.pieces)

        monkeypatch.setattr(copying, "_copy_hashed", copy)
        total = int(self.LENGTHS.sum())
        with Segment.create(total) as segment, TransferServer(tcp=None, unix=None) as server:
            segment.buffer[:] = content(6, total).tobytes()
            memory = np.zeros(total, np.uint8)
            target, region = engine.open(server.publish(segment)), engine.register(memory)
            at = np.cumsum(self.LENGTHS) - self.LENGTHS
            yield (target, at, self.LENGTHS, region.address + at), memory

    def test_every_request_arrives_with_its_own(self, engine, setting):
        batch, memory = setting
        done = engine.read_batch(*batch, checksums=True)
        assert done.ok
        assert len(self.pieces) > 3
        assert sum(self.pieces) == self.LENGTHS.size
        assert np.array_equal(memory, content(6, memory.size))
        for at, length, found in zip(batch[1], self.LENGTHS, done.checksums, strict=True):
            assert found == xxhash.xxh3_64_intdigest(memory[at : at + length].tobytes())

    def test_cancelling_ends_them(self, engine, setting):
        batch, memory = setting
        here = threading.Event()
        self.after = lambda _pieces: here.wait(60)
        submission = engine.submit(Operation.READ, *batch, checksums=True)
        until(lambda: self.pieces)
        assert submission.cancel()
        here.set()
        statuses = submission.result(20).tolist()
        first = self.pieces[0]
        assert statuses == [COMPLETED] * first + [CANCELLED] * (len(statuses) - first)
        assert not memory[int(batch[1][first]) :].any()

    def test_a_deadline_ends_them(self, engine, setting, monkeypatch):
        batch, _ = setting

        class Clock:
            """Late as soon as a piece was copied."""

            monotonic = staticmethod(lambda: math.inf if self.pieces else 0.0)

        monkeypatch.setattr(copying, "time", Clock)
        with pytest.raises(TransferTimeoutError, match="bytes were copied when the deadline"):
            engine.read_batch(*batch, checksums=True)
        assert len(self.pieces) == 1
