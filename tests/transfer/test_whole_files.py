"""The kernel that reads files in a row, compiled and as plain Python."""

import ctypes
import errno
import os
import time

import numpy as np
import pytest

from tests.transfer.libc import bare
from transfer_engine.kernels import whole_files

WHILE_NS = 60_000_000_000


@pytest.fixture(params=["compiled", "python"])
def kernels(request, monkeypatch):
    if request.param == "compiled":
        return whole_files
    long, size, number = ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
    reached = {
        "_open": ("open", number, long, number),
        "_read": ("read", ctypes.c_ssize_t, number, long, size),
        "_close": ("close", number, number),
    }
    monkeypatch.setattr(whole_files, "last_errno", ctypes.get_errno)
    monkeypatch.setattr(whole_files, "now_ns", lambda clock: time.monotonic_ns())
    for name, call in reached.items():
        monkeypatch.setattr(whole_files, name, bare(*call))
    for name, value in list(vars(whole_files).items()):
        if hasattr(value, "py_func") and value.py_func.__module__ == whole_files.__name__:
            monkeypatch.setattr(whole_files, name, value.py_func)
    return whole_files


def read(kernels, folder, wanted, within_ns=WHILE_NS):
    """(lengths found, memory) of files (name, length) in a folder."""
    names = [os.fsencode(folder / name) + b"\0" for name, _ in wanted]
    lengths = np.array([length for _, length in wanted], np.int64)
    starts = np.cumsum([0, *map(len, names[:-1])])
    blob = np.frombuffer(b"".join(names), np.uint8)
    memory = np.zeros(int(lengths.sum()) + 8, np.uint8)
    found = np.full(len(names), -999, np.int64)
    tried = kernels.read_files(
        blob.ctypes.data, starts, memory.ctypes.data, lengths, within_ns, found
    )
    assert not memory[-8:].any()
    return found[:tried].tolist(), memory[:-8].tobytes()


def test_files_lie_one_behind_the_other_and_each_says_how_long_it_is(kernels, tmp_path):
    before = len(os.listdir("/proc/self/fd"))
    for name, content in {"a": b"a" * 10, "long": b"l" * 30, "short": b"s" * 3, "b": b"b"}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    wanted = [
        ("a", 10),
        ("gone", 5),
        ("long", 8),
        ("short", 6),
        ("empty", 2),
        ("folder", 1),
        ("b", 1),
    ]
    found, memory = read(kernels, tmp_path, wanted)
    assert found == [10, -errno.ENOENT, 9, 3, 0, -errno.EISDIR, 1]
    assert memory == b"a" * 10 + bytes(5) + b"l" * 8 + b"s" * 3 + bytes(3) + bytes(2) + b"\0b"
    assert len(os.listdir("/proc/self/fd")) == before


def test_no_more_are_begun_when_the_time_is_over(kernels, tmp_path):
    (tmp_path / "a").write_bytes(b"a")
    assert read(kernels, tmp_path, [("a", 1)] * 5, within_ns=0)[0] == [1]
    assert read(kernels, tmp_path, [("a", 1)] * 5)[0] == [1] * 5
