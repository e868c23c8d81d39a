"""The kernels of file segments, compiled and as plain Python, against a file held in memory."""

import ctypes
import os

import numpy as np
import pytest
from xxhash import xxh3_64_intdigest

from tests.transfer.libc import bare
from transfer_engine.kernels import file as file_kernels

BLOCK, MEMORY_BLOCK, IN_PLACE, PIECE, THROUGH, VECTOR = 64, 8, 256, 512, 256, 1024


@pytest.fixture(params=["compiled", "python"])
def kernels(request, monkeypatch):
    """The kernels; as plain Python they reach libc, and each other, without numba."""
    if request.param == "compiled":
        return file_kernels
    long, size, number = ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
    monkeypatch.setattr(file_kernels, "_memmove", bare("memmove", long, long, long, size))
    for name in ("pread", "pwrite"):
        for vector, length in (("", size), ("v", number)):
            call = bare(name + vector, ctypes.c_ssize_t, number, long, length, long)
            monkeypatch.setattr(file_kernels, f"_{name}{vector}", call)
    monkeypatch.setattr(file_kernels, "last_errno", ctypes.get_errno)
    for name, value in list(vars(file_kernels).items()):
        if hasattr(value, "py_func") and value.py_func.__module__ == file_kernels.__name__:
            monkeypatch.setattr(file_kernels, name, value.py_func)
    return file_kernels


@pytest.fixture
def file():
    fd = os.memfd_create("kernels")
    os.pwrite(fd, bytes(range(256)) * 64, 0)
    yield fd
    os.close(fd)


def columns(*rows):
    return [np.array(row, dtype=np.int64) for row in zip(*rows, strict=True)]


def cut_up(kernels, requests, statuses):
    offsets, lengths, addresses = columns(*requests)
    sizes = (BLOCK, MEMORY_BLOCK, IN_PLACE, PIECE, THROUGH)
    pieces = np.zeros((4, 1), dtype=np.int64)
    count = kernels.plan(offsets, lengths, addresses, statuses, *sizes, pieces)
    pieces = np.zeros((4, count), dtype=np.int64)
    assert kernels.plan(offsets, lengths, addresses, statuses, *sizes, pieces) == count
    pieces = np.ascontiguousarray(pieces[:, np.argsort(pieces[0], kind="stable")])
    runs = np.zeros(count + 1, dtype=np.int64)
    found = kernels.cut(
        pieces[0], pieces[1], pieces[2], BLOCK, MEMORY_BLOCK, IN_PLACE, THROUGH, VECTOR, runs
    )
    spans = np.zeros((3, found), dtype=np.int64)
    kernels.hulls(pieces[0], pieces[1], runs, found, BLOCK, *spans)
    return pieces, runs, found, spans


def test_pieces_cover_each_good_request_once(kernels):
    """Whatever the alignment, every byte of every good request is in exactly one piece."""
    rng = np.random.default_rng(1)
    requests = [
        (int(rng.integers(0, 3000)), int(rng.integers(0, 2000)), int(rng.integers(1, 9)) * 4)
        for _ in range(60)
    ]
    statuses = np.zeros(60, np.int32)
    statuses[7] = -600
    pieces, _, _, _ = cut_up(kernels, requests, statuses)
    seen = [np.zeros(length, int) for _, length, _ in requests]
    for offset, length, address, owner in pieces.T.tolist():
        start = offset - requests[owner][0]
        assert address == requests[owner][2] + start
        assert 0 < length <= PIECE
        seen[owner][start : start + length] += 1
    assert not seen.pop(7).any()
    assert all((count == 1).all() for count in seen)


def test_the_inside_of_a_large_request_moves_in_place(kernels):
    """Only where file and memory are aligned alike; head and tail go through the buffer."""
    aligned = (10, 1000, 8 * 100 + 10)
    skewed = (10_010, 1000, 8 * 100 + 11)
    pieces, _, _, _ = cut_up(kernels, [aligned, skewed], np.zeros(2, np.int32))
    assert pieces[:2, pieces[3] == 0].T.tolist() == [[10, 54], [64, 512], [576, 384], [960, 50]]
    assert pieces[1, pieces[3] == 1].max() <= THROUGH


def test_touching_blocks_are_one_run(kernels):
    requests = [(0, 10, 1), (10, 54, 1), (64, 1, 1), (200, 8, 1), (130, 4, 1), (1000, 300, 1)]
    pieces, runs, found, (begins, ends, tiled) = cut_up(kernels, requests, np.zeros(6, np.int32))
    assert list(zip(begins.tolist(), ends.tolist(), tiled.tolist(), strict=True)) == [
        (0, 256, 0),
        (960, 1216, 0),
        (1216, 1344, 0),
    ]
    assert runs[: found + 1].tolist() == [0, 5, 6, 7]
    assert (np.diff(pieces[0]) >= 0).all()
    _, _, _, (_, _, tiled) = cut_up(kernels, [(64, 60, 1), (124, 4, 9)], np.zeros(2, np.int32))
    assert tiled.tolist() == [1]


def run_all(kernels, fd, requests, writing, statuses=None, cancel=0, sums=None):
    statuses = np.zeros(len(requests), np.int32) if statuses is None else statuses
    pieces, runs, found, spans = cut_up(kernels, requests, statuses)
    buffer = np.zeros(max(THROUGH, PIECE), np.uint8)
    failure = np.zeros(2, dtype=np.int64)
    lengths = np.array([length for _, length, _ in requests], np.int64)
    sums = np.zeros(0, np.uint64) if sums is None else sums
    hashed = np.zeros(sums.size, np.uint8)
    stopped = kernels.move_runs(
        fd, pieces, runs, 0, found, BLOCK, MEMORY_BLOCK, IN_PLACE, *spans, buffer.ctypes.data,
        writing, lengths, sums, hashed, statuses, failure, np.array([cancel]), 0,
    )  # fmt: skip
    if len(sums):
        sums[hashed == 0] = 0
    return statuses.tolist(), failure.tolist(), stopped


def laid_out(memory, ranges):
    """Requests whose local memory lies one after another in `memory`."""
    at = memory.ctypes.data
    requests = []
    for offset, length in ranges:
        requests.append((offset, length, at))
        at += length
    return requests


def test_moves_both_ways_and_keeps_the_neighbours(kernels, file):
    model = bytearray(os.pread(file, 1 << 14, 0))
    rng = np.random.default_rng(2)
    memory = rng.integers(0, 256, 8000, dtype=np.uint8)
    ranges = [(3, 1), (64, 64), (200, 1500), (2048, 1024), (4000, 777), (9000, 3)]
    assert run_all(kernels, file, laid_out(memory, ranges), 1) == ([0] * 6, [0, 0], 0)
    at = 0
    for offset, length in ranges:
        model[offset : offset + length] = memory[at : at + length].tobytes()
        at += length
    assert os.pread(file, 1 << 15, 0) == bytes(model)
    back = np.zeros(8000, np.uint8)
    assert run_all(kernels, file, laid_out(back, ranges), 0) == ([0] * 6, [0, 0], 0)
    assert np.array_equal(back[:at], memory[:at])


def test_the_end_of_the_file_and_failures_are_statuses(kernels, file):
    os.ftruncate(file, 1000)
    memory = np.zeros(4000, np.uint8)
    requests = laid_out(memory, [(0, 10), (990, 10), (991, 10), (5000, 640)])
    for writing in (0, 1):
        statuses, failure, _ = run_all(kernels, file, requests, writing)
        assert statuses[0] == 0
        assert statuses[2:] == [-802, -802] or writing
        assert failure[0] == 0
    assert os.fstat(file).st_size <= 5640
    read_only = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    statuses, failure, _ = run_all(kernels, read_only, requests[:1], 1)
    os.close(read_only)
    assert (statuses, failure[0]) == ([-803], 9)
    full = os.open("/dev/full", os.O_RDWR)
    statuses, failure, _ = run_all(kernels, full, requests[:2], 1)
    os.close(full)
    assert (statuses, failure[0]) == ([-200, -200], 28)


def scattered(memory, count, length):
    """Requests that follow each other in the file, with their memory in the opposite order."""
    at = memory.ctypes.data
    return [(64 * 3 + i * length, length, at + (count - 1 - i) * length) for i in range(count)]


def test_neighbours_with_scattered_memory_move_in_one_call(kernels, file):
    """Up to a limit, as far as there is no gap; what is small or skewed is not among them."""
    memory = np.random.default_rng(3).integers(0, 256, 6 * 320, dtype=np.uint8)
    requests = scattered(memory, 6, 320)
    far = (requests[-1][0] + 2 * 320, 320, requests[0][2])
    small = (far[0] + 320, 64, requests[0][2])
    _, runs, found, _ = cut_up(kernels, [*requests, far, small], np.zeros(8, np.int32))
    assert runs[: found + 1].tolist() == [0, 3, 6, 7, 8]
    assert run_all(kernels, file, requests, 1) == ([0] * 6, [0, 0], 0)
    content = memory.reshape(6, 320)[::-1].tobytes()
    assert os.pread(file, len(content), 64 * 3) == content
    back = np.zeros(len(memory), np.uint8)
    assert run_all(kernels, file, scattered(back, 6, 320), 0) == ([0] * 6, [0, 0], 0)
    assert np.array_equal(back, memory)


def test_what_fails_for_one_of_a_call_is_not_the_failure_of_all(kernels, file):
    memory = np.zeros(3 * 320, np.uint8)
    requests = scattered(memory, 3, 320)
    nowhere = [requests[0], (requests[1][0], 320, 8), requests[2]]
    for writing in (0, 1):
        statuses, failure, _ = run_all(kernels, file, nowhere, writing)
        assert statuses == [0, -803, 0]
        assert failure == [14, requests[1][0]]  # EFAULT
    os.ftruncate(file, requests[1][0] + 100)
    statuses, failure, _ = run_all(kernels, file, requests, 0)
    assert statuses == [0, -802, -802]
    assert failure == [0, requests[1][0] + 100]
    assert memory[640:].tobytes() == os.pread(file, 320, requests[0][0])


@pytest.mark.parametrize("writing", [0, 1])
def test_requests_that_are_one_piece_are_hashed_as_they_pass(kernels, file, writing):
    """In place, joined, through the buffer: and not what failed, or moves in several pieces."""
    memory = np.random.default_rng(4).integers(0, 256, 8000, dtype=np.uint8)
    ranges = [(64, 320), (384, 320), (1001, 5), (1010, 70), (2048, 1024), (1 << 20, 320)]
    ranges = ranges[: 6 - writing]  # a write does not end with the file
    requests = laid_out(memory, ranges)
    sums = np.zeros(len(ranges), np.uint64)
    statuses, _, _ = run_all(kernels, file, requests, writing, sums=sums)
    assert statuses == [0, 0, 0, 0, 0, -802][: len(ranges)]
    here = [memory[at - memory.ctypes.data :][:n].tobytes() for _, n, at in requests]
    hashed = [xxh3_64_intdigest(each) for each in here[:4]]
    assert sums.tolist() == [*hashed, 0, 0][: len(ranges)]


def test_cancelling_stops_before_the_next_run(kernels, file):
    memory = np.zeros(100, np.uint8)
    assert run_all(kernels, file, laid_out(memory, [(0, 100)]), 0, cancel=1)[2] == 1
    assert not memory.any()
