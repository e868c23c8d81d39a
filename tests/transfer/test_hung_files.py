"""Files whose device hangs: what of other files goes on, and what is told of which."""

import os
import threading
import time

import numpy as np
import pytest

from tests.waiting import PATIENCE_S
from transfer_engine import FileSegment, Operation, TransferServer
from transfer_engine.base import Batch
from transfer_engine.errors import TransferTimeoutError
from transfer_engine.segments import blockfile
from transfer_engine.segments.blockfile import BlockFile
from transfer_engine.segments.geometry import measure


class Hanging:
    """Files whose device hangs: calls for them wait until `go_on` is set."""

    def __init__(self, monkeypatch):
        self.go_on, self.inodes = threading.Event(), set()
        self._move, self._sync = blockfile.file.move_runs, os.fdatasync
        monkeypatch.setattr(blockfile.file, "move_runs", self._moving)
        monkeypatch.setattr(os, "fdatasync", self._syncing)

    def hang(self, path):
        self.inodes.add(path.stat().st_ino)

    def _wait(self, fd):
        if os.fstat(fd).st_ino in self.inodes:
            assert self.go_on.wait(10 * PATIENCE_S)  # longer than any test waits for another

    def _moving(self, fd, *rest):
        self._wait(fd)
        return self._move(fd, *rest)

    def _syncing(self, fd):
        self._wait(fd)
        self._sync(fd)


@pytest.fixture
def hanging(monkeypatch):
    found = Hanging(monkeypatch)
    yield found
    found.go_on.set()


def one_read(data, timeout_s):
    column = np.zeros(1, np.int64)
    columns = column, column + data.size, column + data.ctypes.data, np.zeros(1, np.int32)
    return Batch(Operation.READ, *columns, data.size, time.monotonic() + timeout_s)


def test_disks_that_hang_keep_nothing_that_reads_of_another_need(tmp_path, hanging):
    """As clients have them: the deadline ends the wait, what waits in the kernel stays there."""
    size, files = 16 << 20, []
    for number in range(6):
        path = tmp_path / f"{number}"
        path.write_bytes(bytes([number + 1]) * size)
        fd = os.open(path, os.O_RDWR)
        files.append(BlockFile(fd, f"file {number}", measure(fd), punctual=True))
        hanging.hang(path)
    hanging.inodes.remove(path.stat().st_ino)
    for file in files[:-1]:
        with pytest.raises(TransferTimeoutError, match="does not answer"):
            file.move(one_read(np.zeros(size, np.uint8), 0.2), "a test")
    data = np.zeros(size, np.uint8)
    batch = one_read(data, PATIENCE_S)
    files[-1].move(batch, "a test")
    assert (batch.statuses == 0).all()
    assert (data == 6).all()


def test_a_disk_that_hangs_keeps_no_other_from_being_synced(tmp_path, hanging, engine):
    paths = [tmp_path / name for name in ("hangs", "works")]
    with (
        FileSegment.create(paths[0], 1 << 20) as hangs,
        FileSegment.create(paths[1], 1 << 20) as works,
        TransferServer(tcp=None) as server,
    ):
        target, other = engine.open(server.publish(hangs)), engine.open(server.publish(works))
        hanging.hang(paths[0])
        for _ in range(blockfile.THREADS + 2):
            with pytest.raises(TransferTimeoutError, match="sync"):
                engine.sync(target, timeout_s=0.02)
        engine.sync(other, timeout_s=PATIENCE_S)
        assert works.file.health.fault == ""
        assert hangs.file.health.fails("sync")
        hanging.go_on.set()


def test_a_sync_without_time_says_nothing_of_the_disk(tmp_path):
    with FileSegment.create(tmp_path / "segment", 1 << 20) as segment:
        with pytest.raises(TransferTimeoutError, match="deadline has passed"):
            segment.file.sync(time.monotonic() - 1)
        assert segment.file.health.fault == ""
