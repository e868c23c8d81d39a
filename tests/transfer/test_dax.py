"""Mapped segments: a file or DAX device as memory, through every transport that moves memory."""

import os

import numpy as np
import pytest

from tests.storage import DAX_DEVICE, SEGMENT_BYTES, make_case, needs_dax_device
from transfer_engine import Segment
from transfer_engine.errors import ConfigError, InvalidArgumentError, NotFoundError
from transfer_engine.kernels import dax
from transfer_engine.segments import geometry
from transfer_engine.testing import TransportContract, content


@pytest.fixture
def path(tmp_path):
    place = tmp_path / "mapped"
    with place.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, SEGMENT_BYTES)
    return place


class MappedContract(TransportContract):
    __test__ = False
    transport = ""

    @pytest.fixture
    def case(self, owner, engine, memory, place):
        descriptor = owner.publish_map(place, SEGMENT_BYTES, 5)
        yield from make_case(owner, engine, memory, descriptor, self.transport)


class TestMappedFileOverShm(MappedContract):
    __test__ = True
    transport = "shm"

    @pytest.fixture
    def place(self, path):
        return str(path)


class TestMappedFileOverTcp(TestMappedFileOverShm):
    transport = "tcp"


class TestDeviceOverShm(MappedContract):
    __test__ = bool(DAX_DEVICE)
    transport = "shm"

    @pytest.fixture
    def place(self):
        return DAX_DEVICE


class TestDeviceOverTcp(TestDeviceOverShm):
    transport = "tcp"


@needs_dax_device
def test_a_device_keeps_what_was_flushed():
    with Segment.map(DAX_DEVICE) as segment:
        assert segment.size >= SEGMENT_BYTES
        np.frombuffer(segment.buffer, np.uint8)[100:10_100] = content(8, 10_000)
        segment.flush(100, 10_000)
    with Segment.map(DAX_DEVICE, 20_000) as segment:
        assert np.array_equal(
            np.frombuffer(segment.buffer, np.uint8)[100:10_100], content(8, 10_000)
        )


def test_a_flushed_file_holds_the_bytes(path):
    with Segment.map(path) as segment:
        assert (segment.size, segment.page_kind) == (SEGMENT_BYTES, "file")
        view = np.frombuffer(segment.buffer, np.uint8)
        view[5000:15_000] = content(8, 10_000)
        segment.flush(5000, 10_000)
        segment.flush(0, 0)
        segment.flush()
        for offset, length in ((-1, 5), (SEGMENT_BYTES, 1), (0, SEGMENT_BYTES + 1)):
            with pytest.raises(InvalidArgumentError, match="outside"):
                segment.flush(offset, length)
    assert path.read_bytes()[5000:15_000] == content(8, 10_000).tobytes()
    with Segment.map(path, 15_000) as again:
        assert bytes(again.view(5000, 10_000)) == content(8, 10_000).tobytes()


def test_only_mapped_segments_are_flushed():
    with Segment.create(4096) as segment, pytest.raises(InvalidArgumentError, match="is memory"):
        segment.flush()


def test_what_cannot_be_mapped_says_why(path, tmp_path):
    with pytest.raises(NotFoundError, match="No such file"):
        Segment.map(tmp_path / "nothing")
    with pytest.raises(InvalidArgumentError, match=f"holds {SEGMENT_BYTES} bytes"):
        Segment.map(path, SEGMENT_BYTES + 1)
    with pytest.raises(InvalidArgumentError, match="no DAX device"):
        Segment.map("/dev/null")
    with pytest.raises(ConfigError, match="Is a directory"):
        Segment.map(tmp_path)


def test_a_dax_device_tells_its_size_in_sysfs(tmp_path, monkeypatch):
    """Both places where kernels have kept the alignment."""
    monkeypatch.setattr(geometry, "_SYS_CHARACTER", str(tmp_path / "{}:{}"))
    device = tmp_path / "1:3"  # /dev/null
    device.mkdir()
    (device / "size").write_text("4294967296\n")
    (device / "align").write_text("2097152\n")
    with open("/dev/null", "rb") as null:
        expected = ("dax", 1 << 32, 2 << 20, 1)
        assert geometry.measure(null.fileno()) == expected
        (device / "device").mkdir()
        (device / "align").rename(device / "device" / "align")
        assert geometry.measure(null.fileno()) == expected


@pytest.mark.parametrize("instruction", range(dax.instruction() + 1))
def test_lines_are_written_back_and_unchanged(instruction):
    memory = content(4, 10_000).copy()
    address = memory.ctypes.data
    first, last = (address + 3) // 64, (address + 3 + 9000 - 1) // 64
    assert dax.write_back(address + 3, 9000, instruction) == last - first + 1
    assert np.array_equal(memory, content(4, 10_000))


def test_the_walk_over_lines_as_plain_python(monkeypatch):
    touched = []
    for name in ("_clwb", "_clflushopt", "_clflush"):
        monkeypatch.setattr(dax, name, touched.append)
    monkeypatch.setattr(dax, "_fence", lambda: touched.append("fence"))
    for instruction in range(3):
        touched.clear()
        assert dax.write_back.py_func(130, 64, instruction) == 2
        assert touched == [128, 192, "fence"]
