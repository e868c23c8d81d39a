"""Hauls as a worker runs them, for a shard that is played: bytes, order, and disks that fail."""

import errno
import logging
import os
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import xxhash

from mooncake_store.core.records import Tier
from mooncake_store.wire import cluster as wire
from mooncake_store.wire import shard as shard_wire
from mooncake_store.worker import errands, hauler
from mooncake_store.worker.hauler import Hauler
from transfer_engine import FileSegment, Segment, TransferServer
from transfer_engine.errors import (
    ChecksumMismatchError,
    DiskError,
    NotFoundError,
    TruncatedError,
)

MIB = 1 << 20
MEMORY, DISK, FAR, FAR_DISK, GONE = 10, 11, 12, 13, 14
SIZES = np.array([65_536, 1000, 300_000, 4097, 65_536], np.int64)


class PlayedShard:
    """Tells hauls, and keeps what is reported of them."""

    def __init__(self):
        self.closed = False
        self.waiting, self.reported, self.order = [], {}, []

    def stale(self):
        return False

    def close(self):
        self.closed = True

    def call(self, operation, body, **_):
        if operation is shard_wire.FETCH_HAULS:
            columns, self.waiting = self.waiting[:1], self.waiting[1:]
            return operation.reply.pack(**(columns[0] if columns else empty()))
        if operation is shard_wire.FINISH_HAUL:
            told = operation.request.unpack(body)
            self.reported[told.number] = told.statuses.tolist()
            self.order.append("report")
            return operation.reply.pack(status=0)
        assert operation is shard_wire.OPEN
        return b""


def empty():
    return columns_of([])


def columns_of(hauls):
    """The columns of a reply; a haul is (number, source, offsets, target, offsets, sums)."""
    sizes = [len(haul[2]) for haul in hauls]

    def each(at, kind):
        return np.repeat(np.array([haul[at] for haul in hauls], kind), sizes)

    def beside(at, kind):
        return np.concatenate([np.empty(0, kind), *(np.asarray(haul[at], kind) for haul in hauls)])

    return {
        "haul": each(0, np.int64),
        "source": each(1, np.int16),
        "source_offset": beside(2, np.int64),
        "target": each(3, np.int16),
        "target_offset": beside(4, np.int64),
        "size": np.concatenate([np.empty(0, np.int64), *(SIZES for _ in hauls)]),
        "checksum": beside(5, np.uint64),
        "namespace": each(0, np.int32) % 2,
        "namespaces": [b"even", b"odd"],
    }


class Lab:
    """A worker's memory and file, and those of another one, with a hauler between them."""

    def __init__(self, stack, folder, monkeypatch):
        self.memory = stack.enter_context(Segment.create(4 * MIB, name="memory"))
        self.path = folder / "disk"
        self.disk = stack.enter_context(FileSegment.create(self.path, 4 * MIB, name="disk"))
        self.far = stack.enter_context(Segment.create(4 * MIB, name="far"))
        self.far_disk = stack.enter_context(
            FileSegment.create(folder / "far", 4 * MIB, name="far-disk")
        )
        self.shard = PlayedShard()
        monkeypatch.setattr(
            errands.BlockingConnection, "connect", classmethod(lambda *_, **__: self.shard)
        )
        server = stack.enter_context(TransferServer())
        all_of_it = (self.memory, self.disk, self.far, self.far_disk)
        told = {segment.uuid: server.publish(segment) for segment in all_of_it}
        numbers = {MEMORY: self.memory, FAR: self.far, FAR_DISK: self.far_disk}

        def describe(asked):
            return tuple(
                wire.SegmentEntry(
                    number, found.uuid, found.name, "h", found.size, 1, told[found.uuid].encode(),
                    tier=Tier.DISK if isinstance(found, FileSegment) else Tier.MEMORY,
                )
                for number in asked
                if (found := numbers.get(number)) is not None
            )  # fmt: skip

        identity = shard_wire.OpenClient(bytes(16), 1, "host", "default")
        self.hauler = Hauler(self.disk, (self.memory, self.disk), told, identity, describe, None)
        stack.callback(self.hauler.close)
        rng = np.random.default_rng(7)
        self.values = [rng.bytes(int(size)) for size in SIZES]
        self.sums = [xxhash.xxh3_64_intdigest(value) for value in self.values]
        # With gaps, out of order, and neighbours.
        self.there = np.array([1_000_000, 0, 65_536 * 8, 1000, 5097], np.int64)
        self.here = np.array([0, 65_536, 3 * MIB, MIB, 2 * MIB], np.int64)

    def fill(self, segment, offsets):
        for value, offset in zip(self.values, offsets.tolist(), strict=True):
            if isinstance(segment, FileSegment):
                with open(f"/proc/self/fd/{segment.file._fd}", "r+b", buffering=0) as file:
                    os.pwrite(file.fileno(), value, offset)
            else:
                segment.buffer[offset : offset + len(value)] = value

    def found(self, segment, offsets):
        out = []
        for size, offset in zip(SIZES.tolist(), offsets.tolist(), strict=True):
            if isinstance(segment, FileSegment):
                with open(f"/proc/self/fd/{segment.file._fd}", "rb", buffering=0) as file:
                    out.append(os.pread(file.fileno(), size, offset))
            else:
                out.append(bytes(segment.buffer[offset : offset + size]))
        return out

    def haul(self, source, offsets, target, target_offsets, number=5):
        """Have one haul run; return its statuses."""
        self.shard.waiting.append(
            columns_of([(number, source, offsets, target, target_offsets, self.sums)])
        )
        cluster = SimpleNamespace(epoch=1, cluster="", shards=("127.0.0.1:1",))
        assert self.hauler.work(cluster, (MEMORY, DISK))
        assert not self.hauler.work(cluster, (MEMORY, DISK))
        return self.shard.reported.pop(number)


@pytest.fixture
def lab(tmp_path, monkeypatch):
    with ExitStack() as stack:
        yield Lab(stack, tmp_path, monkeypatch)


@pytest.mark.parametrize(("target", "name"), [(DISK, "disk"), (FAR_DISK, "far_disk")])
def test_what_goes_to_a_disk_is_on_its_medium_before_it_is_reported(lab, monkeypatch, target, name):
    def sync(fd, fdatasync=os.fdatasync):
        fdatasync(fd)
        path = os.readlink(f"/proc/self/fd/{fd}")
        lab.shard.order.append(f"sync {os.path.basename(path)}")

    monkeypatch.setattr(os, "fdatasync", sync)
    lab.fill(lab.memory, lab.here)
    assert lab.haul(MEMORY, lab.here, target, lab.there) == [0] * len(SIZES)
    disk = getattr(lab, name)
    assert lab.found(disk, lab.there) == lab.values
    assert lab.shard.order == [f"sync {os.path.basename(disk.file.name)}", "report"]


@pytest.mark.parametrize(("target", "name"), [(MEMORY, "memory"), (FAR, "far")])
def test_what_a_disk_changed_does_not_arrive_and_all_else_does(lab, monkeypatch, target, name):
    monkeypatch.setattr(hauler, "PART_BYTES", 100_000)
    lab.fill(lab.disk, lab.there)
    with open(lab.path, "r+b") as file:
        file.seek(int(lab.there[2]) + 5)
        file.write(b"\xff\x00\xff")
    statuses = lab.haul(DISK, lab.there, target, lab.here)
    assert statuses == [0, 0, ChecksumMismatchError.code, 0, 0]
    found = lab.found(getattr(lab, name), lab.here)
    assert [a == b for a, b in zip(found, lab.values, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
    ]


def test_nothing_has_arrived_where_the_medium_cannot_be_told_to_have_it(lab, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lab.fill(lab.memory, lab.here)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fail)
        assert lab.haul(MEMORY, lab.here, DISK, lab.there) == [DiskError.code] * len(SIZES)
        assert lab.haul(MEMORY, lab.here, FAR_DISK, lab.there) == [DiskError.code] * len(SIZES)
    assert lab.haul(MEMORY, lab.here, DISK, lab.there) == [0] * len(SIZES)


def test_what_waited_long_behind_another_haul_is_asked_for_again(lab, monkeypatch):
    """It may have been given up meanwhile, and its space be another object's."""
    now = [0.0]
    monkeypatch.setattr(hauler, "time", SimpleNamespace(monotonic=lambda: now[0]))
    lab.fill(lab.memory, lab.here)
    both = [(n, MEMORY, lab.here, DISK, lab.there, lab.sums) for n in (5, 6)]

    def run(haul, lent, run=lab.hauler.run):
        now[0] += 2 * hauler.STALE_S
        return run(haul, lent)

    lab.hauler.run = run
    lab.shard.waiting += [columns_of(both), columns_of(both[1:])]
    cluster = SimpleNamespace(epoch=1, cluster="", shards=("127.0.0.1:1",))
    assert lab.hauler.work(cluster, (MEMORY, DISK))
    assert list(lab.shard.reported) == [5]
    assert lab.hauler.work(cluster, (MEMORY, DISK))
    assert list(lab.shard.reported) == [5, 6]


def test_a_segment_that_is_gone_is_the_status_of_every_object(lab):
    assert lab.haul(MEMORY, lab.here, GONE, lab.there) == [NotFoundError.code] * len(SIZES)
    assert lab.haul(FAR, lab.here, DISK, lab.there) == [NotFoundError.code] * len(SIZES)


def test_a_disk_that_fails_again_and_again_is_told_once_and_when_it_is_well(lab, caplog):
    lab.fill(lab.disk, lab.there)
    os.truncate(lab.path, 900_000)  # the first one lies behind that
    with caplog.at_level(logging.INFO, logger="mooncake_store.worker.hauler"):
        for count in range(1, 6):
            statuses = lab.haul(DISK, lab.there, MEMORY, lab.here)
            assert statuses == [TruncatedError.code, 0, 0, 0, 0]
            told = [record for record in caplog.records if record.name == hauler.__name__]
            assert len(told) == (count >= hauler.FAILING_AFTER)
        assert "segment disk" in caplog.text
        assert "suspect" in caplog.text
        os.truncate(lab.path, 4 * MIB)
        lab.fill(lab.disk, lab.there)
        assert lab.haul(DISK, lab.there, MEMORY, lab.here) == [0] * len(SIZES)
    assert "well again" in caplog.text


def test_a_disk_that_syncs_no_more_is_told_as_well(lab, monkeypatch, caplog):
    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    lab.fill(lab.memory, lab.here)
    with caplog.at_level(logging.INFO, logger="mooncake_store.worker.hauler"):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fail)
            for _ in range(hauler.FAILING_AFTER):
                lab.haul(MEMORY, lab.here, DISK, lab.there)
        assert "segment disk" in caplog.text
        assert "Input/output error" in caplog.text
        lab.haul(MEMORY, lab.here, DISK, lab.there)
    assert "well again" in caplog.text


def test_hauls_of_one_reply_are_told_apart():
    """Each object is reported with its own haul, in the order of the reply."""
    shape = SimpleNamespace(**columns_of(
        [(3, 1, [1] * 5, 2, [2] * 5, [1] * 5), (9, 4, [3] * 5, 5, [4] * 5, [2] * 5)]
    ))  # fmt: skip
    first, second = hauler.hauls_in(shape)
    assert (first.number, first.source, first.target) == (3, 1, 2)
    assert (second.number, second.source, second.target) == (9, 4, 5)
    assert second.target_offsets.tolist() == [4] * 5
    assert first.owners() == ["odd"] * 5
    left = first._replace(namespaces=np.array([1, -1, 0, 1, -1]))
    assert left.owners() == ["odd", "", "even", "odd", ""]
    assert left.part(slice(1, 3)).owners() == ["", "even"]
    assert list(hauler.hauls_in(SimpleNamespace(**empty()))) == []
