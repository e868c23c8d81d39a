"""Checksums and checksummed copies as a user of the transfer engine sees them."""

import ctypes
import mmap
import subprocess
import sys
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_engine import checksum as checksums
from transfer_engine.checksum import (
    address_of,
    checksum,
    checksum_ranges,
    copy_with_checksum,
)
from transfer_engine.errors import InvalidArgumentError


def at(address, nbytes):
    return ctypes.string_at(address, nbytes)


@pytest.mark.parametrize(
    "buffer",
    [
        b"some bytes",
        bytearray(b"some bytes"),
        memoryview(b"xxsome bytes")[2:],
        np.frombuffer(b"some bytes", dtype=np.uint8),
        np.frombuffer(b"some bytes", dtype=">u2"),
        (ctypes.c_char * 10)(*b"some bytes"),
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_address_of_finds_the_bytes(buffer):
    address, nbytes = address_of(buffer, False)
    assert at(address, nbytes) == b"some bytes"
    assert checksum(buffer) == xxhash.xxh3_64_intdigest(b"some bytes")


def test_address_of_multidimensional_array_and_mmap():
    grid = np.arange(12, dtype=np.int32).reshape(3, 4)
    assert at(*address_of(grid, True)) == grid.tobytes()
    assert at(*address_of(memoryview(grid), True)) == grid.tobytes()
    with mmap.mmap(-1, 4096) as memory:
        memory[:4] = b"mmap"
        address, nbytes = address_of(memory, True)
        assert (at(address, 4), nbytes) == (b"mmap", 4096)


@pytest.mark.parametrize("empty", [b"", bytearray(), memoryview(b""), np.empty((0, 3))])
def test_empty_buffers(empty):
    assert address_of(empty, False)[1] == 0
    assert checksum(empty) == xxhash.xxh3_64_intdigest(b"")


@pytest.mark.parametrize(
    ("buffer", "complaint"),
    [
        (b"read", "bytes is read-only"),
        (memoryview(b"read"), "memoryview is read-only"),
        (np.frombuffer(b"read", dtype=np.uint8), "ndarray is read-only"),
        (np.zeros((4, 4))[:, 1], "ndarray is not C-contiguous"),
        (np.asfortranarray(np.zeros((4, 3))), "ndarray is not C-contiguous"),
        (memoryview(bytearray(8))[::2], "memoryview is not C-contiguous"),
        (np.array([object()]), "ndarray holds references"),
        (memoryview(np.array([object()])), "memoryview holds references"),
        ("text", "str has no memory"),
        (7, "int has no memory"),
    ],
)
def test_refused_buffers(buffer, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        address_of(buffer, True)


def test_arrays_without_a_buffer_have_an_address_too():
    days = np.arange("2026-01-01", "2026-01-06", dtype="datetime64[D]")
    assert at(*address_of(days, True)) == days.tobytes()


def test_torch_tensors():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.float32).to(torch.bfloat16)
    expected = tensor.view(torch.uint8).numpy().tobytes()
    assert at(*address_of(tensor, True)) == expected
    assert checksum(tensor) == xxhash.xxh3_64_intdigest(expected)
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        address_of(torch.zeros(4, 4).t()[1:], True)
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        address_of(torch.zeros(4, 4).to_sparse(), True)
    with pytest.raises(InvalidArgumentError, match="lazy conjugate"):
        address_of(torch.ones(2, dtype=torch.complex64).conj(), True)
    with pytest.raises(InvalidArgumentError, match="device meta"):
        address_of(torch.empty(2, device="meta"), True)


@given(sizes=st.lists(st.integers(0, 3000), max_size=20), threads=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_copy_moves_and_hashes_every_range(sizes, threads):
    starts = np.cumsum([0, *sizes])
    source = np.random.default_rng(len(sizes)).integers(0, 256, starts[-1], dtype=np.uint8)
    target = np.zeros_like(source)
    old = checksums.SHARE_BYTES_MIN
    checksums.SHARE_BYTES_MIN = 1000
    try:
        hashes = copy_with_checksum(
            address_of(source, False)[0] + starts[:-1],
            address_of(target, True)[0] + starts[:-1],
            sizes,
            threads,
        )
    finally:
        checksums.SHARE_BYTES_MIN = old
    assert (target == source).all()
    expected = [
        checksum(source[start : start + size])
        for start, size in zip(starts[:-1], sizes, strict=True)
    ]
    assert hashes.tolist() == expected
    again = checksum_ranges(address_of(target, False)[0] + starts[:-1], sizes)
    assert again.tolist() == expected


def test_threads_share_a_large_batch(monkeypatch):
    monkeypatch.setattr(checksums, "SHARE_BYTES_MIN", 1)
    started = []
    start = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (started.append(thread.name), start(thread))
    )
    source, target = bytearray(b"abcdefgh" * 1000), bytearray(8000)
    begins = np.arange(0, 8000, 1000)
    hashes = copy_with_checksum(
        address_of(source, False)[0] + begins,
        address_of(target, True)[0] + begins,
        np.full(8, 1000),
        threads=3,
    )
    assert started == ["copy-with-checksum"] * 2
    assert target == source
    assert hashes.tolist() == [xxhash.xxh3_64_intdigest(source[:1000])] * 8


def test_small_batches_start_no_thread(monkeypatch):
    monkeypatch.setattr(threading, "Thread", None)
    source, target = bytearray(b"abcd"), bytearray(4)
    copy_with_checksum(
        [address_of(source, False)[0]], [address_of(target, True)[0]], [4], threads=8
    )
    assert target == source


def test_empty_batch():
    assert checksum_ranges([], []).tolist() == []
    assert copy_with_checksum([], [], [], threads=2).tolist() == []


@pytest.mark.parametrize(
    ("addresses", "lengths", "complaint"),
    [
        ([1], [-1], r"lengths\[0\] is -1"),
        ([4096, 0], [0, 1], r"addresses\[1\] is not an address"),
        ([1, 2], [0], "addresses has 2 entries but lengths has 1"),
        ([1.5], [0], "addresses must be one column of integers"),
        ([[1]], [0], "addresses must be one column of integers"),
    ],
)
def test_bad_columns_are_refused_before_memory_is_touched(addresses, lengths, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        checksum_ranges(addresses, lengths)


def test_bad_copies_are_refused():
    with pytest.raises(InvalidArgumentError, match=r"targets\[0\] is not an address"):
        copy_with_checksum([4096], [0], [1])
    with pytest.raises(InvalidArgumentError, match="threads must be at least 1"):
        copy_with_checksum([], [], [], threads=0)


def test_one_checksum_needs_no_numba():
    code = (
        "import sys; from transfer_engine.checksum import checksum; checksum(b'x');"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
