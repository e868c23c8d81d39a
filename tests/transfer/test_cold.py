"""A segment in a store elsewhere: what is read is what was written, or a status, in time."""

import itertools
import sys
import threading
import time
import tracemalloc
from functools import partial
from typing import ClassVar

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.waiting import until
from transfer_engine import TransferEngine, TransferServer
from transfer_engine.base import DISK_FAILED, NO_SPACE, TRUNCATED
from transfer_engine.errors import (
    AuthError,
    ChecksumMismatchError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.segments import cold, health, remote
from transfer_engine.segments.cold import ColdSegment
from transfer_engine.segments.extents import found_in
from transfer_engine.segments.file import FileSegment

MIB = 1 << 20
DAMAGED = ChecksumMismatchError.code
numbers = itertools.count()


class Faulty(MemoryFileSystem):
    """A store in memory that hangs, fails or lies when it is told to."""

    protocol = "faulty"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    hang: threading.Event | None = None
    error: Exception | None = None
    keeps = False
    lie = None
    hanging = itertools.count()

    def _misbehave(self):
        gate = Faulty.hang
        if gate is not None:
            next(Faulty.hanging)
            gate.wait(60)
        if Faulty.error is not None:
            raise Faulty.error

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._misbehave()
        found = super().cat_file(path, start, end, **kwargs)
        return found if Faulty.lie is None else Faulty.lie(path, found)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._misbehave()
        return super().pipe_file(path, value, mode=mode, **kwargs)

    def rm(self, path, recursive=False, maxdepth=None):
        if Faulty.keeps:
            raise PermissionError("nothing may be removed")
        return super().rm(path, recursive=recursive, maxdepth=maxdepth)


@pytest.fixture
def faulty():
    fsspec.register_implementation("faulty", Faulty, clobber=True)
    Faulty.store.clear()
    Faulty.pseudo_dirs[:] = [""]
    yield Faulty
    gate, Faulty.hang, Faulty.error, Faulty.lie = Faulty.hang, None, None, None
    Faulty.keeps = False
    if gate is not None:
        gate.set()


@pytest.fixture(params=["file", "memory"])
def url(request, tmp_path):
    if request.param == "file":
        return str(tmp_path)
    return f"memory://cold{next(numbers)}"


def opened(url, size=64 * MIB, uuid=None, **given):
    segment = ColdSegment.open(url, "mine", size, name="cold", uuid=uuid, **given)
    segment.tend()
    return segment


def soon():
    return time.monotonic() + 30


def columns(parts):
    """Offsets and lengths of (offset, bytes), and memory that holds the bytes side by side."""
    memory = np.frombuffer(b"".join(data for _, data in parts), np.uint8).copy()
    lengths = np.array([len(data) for _, data in parts], np.int64)
    offsets = np.array([offset for offset, _ in parts], np.int64)
    return offsets, lengths, memory, memory.ctypes.data + np.cumsum(lengths) - lengths


def write(segment, *parts, of=None):
    """Statuses of parts that were written, of these namespaces."""
    offsets, lengths, memory, at = columns(parts)
    written = segment.write(offsets, lengths, at, soon(), of).tolist()
    del memory
    return written


def read(segment, *ranges):
    """(status, bytes) of each range (offset, length)."""
    offsets, lengths, memory, at = columns([(offset, bytes(length)) for offset, length in ranges])
    statuses = segment.read(offsets, lengths, at, soon()).tolist()
    ends = np.cumsum(lengths)
    return [
        (status, memory[end - length : end].tobytes())
        for status, end, length in zip(statuses, ends, lengths, strict=True)
    ]


def files(url):
    fs, root = fsspec.core.url_to_fs(url)
    fs.invalidate_cache()
    return sorted(name for name in fs.find(root) if found_in(name.rpartition("/")[2]))


def bf16(count):
    """Numbers of two bytes each, as keys and values have them."""
    numbers = np.random.default_rng(5).normal(0, 0.7, count).astype(np.float32)
    return numbers.view(np.uint16)[1::2].tobytes()


def data(nbytes, seed=0):
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8).tobytes()


def test_numbers_are_kept_in_fewer_bytes_and_are_read_as_they_were(url):
    values, other = bf16(5 * MIB), data(3 * MIB, 2)  # nine and a half MiB of numbers, and noise
    with opened(url, smaller=True) as segment:
        assert write(segment, (0, values), (16 * MIB, other)) == [0, 0]
        assert read(segment, (0, len(values)), (16 * MIB, len(other))) == [(0, values), (0, other)]
        at = 4 * MIB - 7
        assert read(segment, (at, 5 * MIB)) == [(0, values[at : at + 5 * MIB])]
        sizes = sorted(fsspec.core.url_to_fs(url)[0].size(name) for name in files(url))
        assert sum(sizes) - len(other) < 0.72 * len(values)
        assert len(other) in sizes
    with opened(url, uuid=segment.uuid) as again:  # which makes nothing smaller itself
        assert again.extents == 2
        assert read(again, (0, len(values)), (16 * MIB, len(other))) == [(0, values), (0, other)]
        assert write(again, (0, values[:MIB])) == [0]
        again.tend()
        assert read(again, (0, MIB)) == [(0, values[:MIB])]
        sizes = sorted(fsspec.core.url_to_fs(url)[0].size(name) for name in files(url))
        assert sizes == [MIB, len(other)]


def test_what_no_codec_is_there_for_is_told_and_holds_up_nothing_else(url, monkeypatch):
    values, other = bf16(MIB), data(MIB, 2)
    with opened(url, smaller=True) as segment:
        assert write(segment, (0, values), (16 * MIB, other)) == [0, 0]
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "zstandard", None)
        with opened(url, uuid=segment.uuid) as again:
            assert "pip install zstandard" in again.health.fault  # before anybody reads
            found = read(again, (0, len(values)), (16 * MIB, len(other)))
            assert [status for status, _ in found] == [DISK_FAILED, 0]
            assert found[1][1] == other
            assert "pip install zstandard" in again.health.fault
    with opened(url, uuid=segment.uuid) as again:
        assert read(again, (0, len(values))) == [(0, values)]
        assert not again.health.fault


def test_what_was_written_is_read_whole_and_in_ranges(url):
    with opened(url) as segment:
        small, large = data(1000, 1), data(9 * MIB + 5, 2)
        assert write(segment, (4096, small), (MIB, large)) == [0, 0]
        begin, middle = MIB + 4 * MIB - 10, 20
        assert read(segment, (4096, 1000), (MIB, len(large)), (4100, 7), (begin, middle)) == [
            (0, small),
            (0, large),
            (0, small[4:11]),
            (0, large[4 * MIB - 10 : 4 * MIB + 10]),
        ]
        assert len(files(url)) == 4
        assert [status for status, _ in read(segment, (0, 10), (5000, 200), (4096, 1001))] == [
            TRUNCATED
        ] * 3


@pytest.mark.parametrize("at_once_s", [60.0, -1.0])
def test_many_small_files_are_read_and_each_that_is_lost_is_told(tmp_path, monkeypatch, at_once_s):
    monkeypatch.setattr(cold, "AT_ONCE_S", at_once_s)  # many in a call, or what is left in others
    with opened(str(tmp_path)) as segment:
        parts = [(n * 4096, data(4096 - n, n)) for n in range(200)]
        assert write(segment, *parts) == [0] * 200
        for turn in range(3):
            gone = 50 * turn
            (name,) = [each for each in files(str(tmp_path)) if f"/{gone * 4096:x}-" in each]
            (tmp_path / name).unlink()
            expected = [(0, content) for _, content in parts]
            found = read(segment, *((offset, len(content)) for offset, content in parts))
            lost = [50 * n for n in range(turn + 1)]
            assert [n for n, (status, _) in enumerate(found) if status] == lost
            assert all(found[n] == expected[n] for n in range(200) if n not in lost)


def test_what_takes_a_place_is_never_taken_for_what_was_there(url):
    with opened(url) as segment:
        write(segment, (0, data(1000, 1)), (1000, data(1000, 2)), (3000, data(10, 3)))
        assert write(segment, (500, data(1000, 4))) == [0]
        assert [status for status, _ in read(segment, (0, 1000), (1000, 1000))] == [TRUNCATED] * 2
        assert read(segment, (500, 1000), (3000, 10)) == [(0, data(1000, 4)), (0, data(10, 3))]
        segment.tend()
        assert len(files(url)) == 2


def test_the_next_segment_of_the_uuid_has_what_was_there_and_the_newest_of_a_place(url):
    with opened(url) as segment:
        write(segment, (0, data(5 * MIB, 1)), (8 * MIB, data(100, 2)))
        write(segment, (0, data(100, 3)))  # what lay there is not removed yet
        assert len(files(url)) == 4
    with opened(url, uuid=segment.uuid) as again:
        assert again.extents == 2
        assert read(again, (0, 100), (8 * MIB, 100)) == [(0, data(100, 3)), (0, data(100, 2))]
        again.tend()
        assert len(files(url)) == 2
        assert write(again, (0, data(50, 4))) == [0]
        assert read(again, (0, 50)) == [(0, data(50, 4))]


def test_what_an_earlier_segment_left_is_removed(url):
    with opened(url) as segment:
        write(segment, (0, data(100)))
    with opened(url) as other:
        until(lambda: not files(url))
        assert read(other, (0, 100))[0][0] == TRUNCATED


def test_what_is_forgotten_is_removed_unless_it_was_written_anew(url):
    with opened(url) as segment:
        write(segment, (0, data(100, 1)), (4096, data(100, 2)))
        (first, second) = segment.after(0, 10)
        assert segment.after(1, 10) == [second]
        write(segment, (0, data(100, 3)))
        segment.forget([first, second])
        segment.tend()
        assert read(segment, (0, 100), (4096, 100))[0] == (0, data(100, 3))
        assert len(files(url)) == 1


@pytest.mark.parametrize("smaller", [False, True])
@pytest.mark.parametrize("harm", ["cut", "changed", "changed within", "longer", "gone"])
def test_a_damaged_file_is_a_status_and_others_are_read(tmp_path, harm, smaller):
    url = str(tmp_path)
    with opened(url, smaller=smaller) as segment:
        write(segment, (0, bf16(5 * MIB // 2)), (8 * MIB, data(1000, 2)))
        victim = next(name for name in files(url) if "/0-" in name)
        with open(victim, "r+b") as file:
            if harm == "cut":
                file.truncate(10)
            elif harm == "longer":
                file.seek(0, 2)
                file.write(b"!")
            else:
                file.seek(100_000 if harm == "changed within" else 0)
                file.write(b"changed")
        if harm == "gone":
            (tmp_path / victim).unlink()
        (status, _), good = read(segment, (0, 5 * MIB), (8 * MIB, 1000))
        assert status == (TRUNCATED if harm == "gone" else DAMAGED)
        assert good == (0, data(1000, 2))
        assert ("is gone" if harm == "gone" else "not what was written") in segment.health.fault
        assert read(segment, (8 * MIB, 1000)) == [(0, data(1000, 2))]
        assert segment.health.fault == ""
    if harm == "cut":
        with opened(url, uuid=segment.uuid) as again:
            assert again.extents == 1 + smaller  # how long a file has to be is not known then
            assert read(again, (8 * MIB, 1000)) == [(0, data(1000, 2))]


def test_what_others_put_there_is_left_alone(tmp_path):
    with opened(str(tmp_path)) as segment:
        write(segment, (0, data(10)))
    folder = tmp_path / "mine" / segment.uuid.hex()
    (folder / "notes.txt").write_text("not of ours")
    (tmp_path / "mine" / "theirs").mkdir()
    (tmp_path / "mine" / "theirs" / "x").write_text("x")
    with opened(str(tmp_path), uuid=segment.uuid) as again:
        assert again.extents == 1
        again.tend()
    assert (folder / "notes.txt").exists()
    assert (tmp_path / "mine" / "theirs" / "x").exists()


def test_a_store_that_is_away_has_lost_nothing(tmp_path):
    here, away = tmp_path / "here", tmp_path / "away"
    here.mkdir()
    with opened(str(here)) as segment:
        write(segment, (0, data(100)))
        here.rename(away)
        here.mkdir()  # as the folder that something is mounted on
        with pytest.raises(UnavailableError, match="is away, or was emptied"):
            read(segment, (0, 100))
        with (
            pytest.raises(UnavailableError, match="is away, or was emptied"),
            ColdSegment.open(str(here), "mine", MIB, uuid=segment.uuid) as again,
        ):
            again.tend()
        here.rmdir()
        away.rename(here)
        assert until(lambda: answered(segment)) == (0, data(100))


def test_what_is_written_while_a_store_is_away_goes_nowhere(tmp_path):
    here, away = tmp_path / "here", tmp_path / "away"
    here.mkdir()
    with opened(str(here)) as segment:
        here.rename(away)
        here.mkdir()  # as the folder that something is mounted on
        assert write(segment, (0, data(100))) != [0]
        assert list(here.iterdir()) == []
        assert "is away, or was emptied" in segment.health.fault
        here.rmdir()
        away.rename(here)
        assert until(lambda: write(segment, (0, data(100))) == [0])
        assert answered(segment) == (0, data(100))


def answered(segment):
    try:
        return read(segment, (0, 100))[0]
    except StoreError:
        return None


def test_a_folder_that_is_not_there_is_not_made(tmp_path):
    segment = ColdSegment.open(str(tmp_path / "none"), "mine", MIB)
    with pytest.raises(UnavailableError, match="there is no"):
        segment.tend()
    assert not (tmp_path / "none").exists()
    (tmp_path / "none").mkdir()
    until(lambda: tended(segment))
    assert write(segment, (0, b"x")) == [0]


def tended(segment):
    try:
        segment.tend()
    except StoreError:
        return False
    return True


def test_a_store_that_hangs_holds_nobody_up_and_comes_back(faulty):
    with opened("faulty://pool", timeout_s=0.2) as segment:
        write(segment, (0, data(100, 1)))
        gate = faulty.hang = threading.Event()
        with pytest.raises(TransferTimeoutError):
            read(segment, (0, 100))
        before = data(5000, 2)
        offsets, lengths, memory, at = columns([(4096, before)])
        assert segment.write(offsets, lengths, at, soon()).tolist() == [TransferTimeoutError.code]
        memory[:] = 0  # the caller's again
        until(lambda: refused(segment))
        faulty.hang = None
        gate.set()
        assert until(lambda: answered(segment)) == (0, data(100, 1))
        assert read(segment, (4096, 5000))[0][0] == TRUNCATED
        until(lambda: tended(segment) and len(files("faulty://pool")) == 1)


def test_a_store_that_hangs_keeps_no_more_memory_than_it_has_calls(faulty):
    with opened("faulty://pool", timeout_s=0.2) as segment:
        pieces = [(n * cold.PIECE_BYTES, bytes(cold.PIECE_BYTES)) for n in range(cold.AHEAD)]
        offsets, lengths, memory, at = columns(pieces)
        del pieces
        faulty.hang = threading.Event()
        tracemalloc.start()
        try:
            assert segment.write(offsets, lengths, at, soon()).all()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept < (remote.THREADS + 1) * cold.PIECE_BYTES
        del memory


def test_who_is_in_a_hurry_does_not_say_that_a_store_fails(faulty):
    with opened("faulty://pool", timeout_s=30) as segment:
        write(segment, (0, data(100, 1)))
        gate = faulty.hang = threading.Event()
        offsets, lengths, memory, at = columns([(0, bytes(100))])
        for _ in range(remote.FAILING_AFTER):
            with pytest.raises(TransferTimeoutError):
                segment.read(offsets, lengths, at, time.monotonic() + 0.01)
        del memory
        assert segment.health.fault == ""
        faulty.hang = None
        gate.set()
        assert read(segment, (0, 100)) == [(0, data(100, 1))]


def test_a_store_that_does_not_answer_is_told_while_it_does_not(faulty, monkeypatch):
    monkeypatch.setattr(health, "default_timeout_s", lambda nbytes: 0.0)
    with opened("faulty://pool", timeout_s=30) as segment:
        write(segment, (0, data(100, 1)))
        gate = faulty.hang = threading.Event()
        reader = threading.Thread(target=read, args=(segment, (0, 100)), daemon=True)
        reader.start()
        until(lambda: segment.health.fault == "it does not answer")
        faulty.hang = None
        gate.set()
        reader.join(30)
        until(lambda: segment.health.fault == "")


def refused(segment):
    try:
        read(segment, (0, 100))
    except UnavailableError as error:
        return "left alone" in str(error)
    except StoreError:
        return False
    return False


def test_a_store_that_fails_says_why_and_comes_back(faulty):
    with opened("faulty://pool") as segment:
        write(segment, (0, data(100, 1)))
        faulty.error = PermissionError("no credentials")
        with pytest.raises(UnavailableError, match="no credentials"):
            read(segment, (0, 100))
        assert segment.health.fault == "read: PermissionError: no credentials"
        faulty.error = OSError(28, "No space left on device")
        assert write(segment, (4096, data(100, 2))) == [NO_SPACE]
        assert "room: [Errno 28] No space left" in segment.health.fault
        faulty.error = None
        assert until(lambda: answered(segment)) == (0, data(100, 1))
        assert write(segment, (4096, data(100, 2))) == [0]
        assert segment.health.fault == ""


@pytest.mark.parametrize("use", [read, write])
def test_what_failed_is_tried_again_by_who_tends_it(faulty, use):
    with opened("faulty://pool") as segment:
        write(segment, (0, data(100, 1)))
        faulty.error = PermissionError("no credentials")
        if use is read:
            with pytest.raises(UnavailableError):
                read(segment, (0, 100))
        else:
            assert write(segment, (0, data(100, 1))) != [0]
        assert segment.health.fault == f"{use.__name__}: PermissionError: no credentials"
        assert not tended(segment)
        faulty.error = None
        until(lambda: tended(segment))
        assert segment.health.fault == ""


def test_what_an_earlier_segment_left_is_removed_once_the_store_lets(faulty):
    with opened("faulty://pool") as segment:
        write(segment, (0, data(100)))
    faulty.keeps = True
    with opened("faulty://pool") as other:
        other.tend()
        assert len(files("faulty://pool")) == 1
        faulty.keeps = False
        until(lambda: tended(other) and not files("faulty://pool"))


def test_a_store_that_lies_is_found_out(faulty):
    with opened("faulty://pool") as segment:
        write(segment, (0, data(100, 1)), (4096, data(100, 2)))
        one = next(name for name in faulty.store if "/0-64" in name)
        two = next(name for name in faulty.store if "/1000-64" in name)
        swapped = {one: two, two: one}
        faulty.lie = lambda path, found: faulty.store[swapped[path]].getvalue()
        assert [status for status, _ in read(segment, (0, 100), (4096, 10))] == [DAMAGED] * 2


def test_others_read_it_over_tcp_and_cannot_write(url):
    with opened(url) as segment, TransferServer() as server, TransferEngine() as engine:
        parts = [(n * MIB, data(MIB - n, n)) for n in range(20)]
        assert write(segment, *parts) == [0] * 20
        target = engine.open(server.publish(segment))
        offsets, lengths, memory, at = columns([(o, bytes(len(d))) for o, d in parts])
        engine.register(memory)
        found = engine.read_batch(target, offsets, lengths, at)
        assert found.ok
        assert memory.tobytes() == b"".join(d for _, d in parts)
        assert engine.read_batch(target, [30 * MIB], [10], at[:1]).statuses.tolist() == [TRUNCATED]
        with pytest.raises(AuthError):
            engine.write_from(target, 0, b"x")


def test_a_store_that_hangs_is_a_status_for_who_reads_over_tcp(faulty):
    with (
        opened("faulty://pool", timeout_s=0.2) as segment,
        TransferServer() as server,
        TransferEngine() as engine,
    ):
        write(segment, (0, data(100, 1)))
        target = engine.open(server.publish(segment))
        memory = np.zeros(100, np.uint8)
        engine.register(memory)
        faulty.hang = threading.Event()
        found = engine.read_batch(target, [0], [100], [memory.ctypes.data])
        assert found.statuses.tolist() == [TransferTimeoutError.code]


def test_a_store_that_fails_is_a_status_for_who_reads_over_tcp_and_not_a_line_each(faulty, caplog):
    with (
        opened("faulty://pool") as segment,
        TransferServer() as server,
        TransferEngine() as engine,
    ):
        write(segment, (0, data(100, 1)))
        target = engine.open(server.publish(segment))
        memory = np.zeros(100, np.uint8)
        engine.register(memory)
        faulty.error = PermissionError("no credentials")
        for _ in range(10):
            found = engine.read_batch(target, [0], [100], [memory.ctypes.data])
            assert found.statuses.tolist() == [DISK_FAILED]
        assert len([each for each in caplog.records if each.levelname == "WARNING"]) == 1


def test_a_store_that_hangs_takes_no_room_from_disks(faulty, tmp_path):
    with (
        opened("faulty://pool", timeout_s=20) as segment,
        FileSegment.create(tmp_path / "disk", MIB) as disk,
        TransferServer() as server,
        TransferEngine(transports=("tcp",)) as engine,
    ):
        write(segment, (0, data(100, 1)))
        far, near = engine.open(server.publish(segment)), engine.open(server.publish(disk))
        memory = np.zeros(100, np.uint8)
        engine.register(memory)
        gate = faulty.hang = threading.Event()
        faulty.hanging = itertools.count()
        reading = partial(engine.read_batch, far, [0], [100], [memory.ctypes.data])
        waiting = [threading.Thread(target=reading, daemon=True) for _ in range(12)]
        for each in waiting:
            each.start()
        until(lambda: repr(faulty.hanging) == f"count({remote.THREADS})")
        assert engine.read_batch(near, [0], [100], [memory.ctypes.data], timeout_s=5).ok
        faulty.hang = None
        gate.set()
        for each in waiting:
            each.join(30)


def test_calls_that_nobody_waits_for_are_bounded(faulty, monkeypatch):
    monkeypatch.setattr(remote, "QUEUED_MAX", 4)
    faulty.hang = threading.Event()
    store = remote.RemoteStore("faulty://pool")
    refused = 0
    for _ in range(remote.THREADS + 10):
        try:
            store.begin(remote.Rank.READ, store.read, "x")
        except UnavailableError as error:
            refused += "too many calls wait" in str(error)
    assert 6 <= refused < remote.THREADS + 10
