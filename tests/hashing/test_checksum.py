"""Checksums and checksummed copies as a user of the transfer engine sees them."""

import ctypes
import mmap
import subprocess
import sys

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_engine.checksum import (
    address_of,
    checksum_ranges,
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
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        address_of(torch.zeros(4, 4).t()[1:], True)
    with pytest.raises(InvalidArgumentError, match="not contiguous"):
        address_of(torch.zeros(4, 4).to_sparse(), True)
    with pytest.raises(InvalidArgumentError, match="lazy conjugate"):
        address_of(torch.ones(2, dtype=torch.complex64).conj(), True)
    with pytest.raises(InvalidArgumentError, match="device meta"):
        address_of(torch.empty(2, device="meta"), True)


@given(sizes=st.lists(st.integers(0, 3000), max_size=20))
@settings(max_examples=40, deadline=None)
def test_every_range_is_hashed(sizes):
    starts = np.cumsum([0, *sizes])
    memory = np.random.default_rng(len(sizes)).integers(0, 256, starts[-1], dtype=np.uint8)
    hashes = checksum_ranges(address_of(memory, False)[0] + starts[:-1], sizes)
    expected = [
        xxhash.xxh3_64_intdigest(memory[start : start + size])
        for start, size in zip(starts[:-1], sizes, strict=True)
    ]
    assert hashes.tolist() == expected


def test_empty_batch():
    assert checksum_ranges([], []).tolist() == []


@pytest.mark.parametrize(
    ("addresses", "lengths", "complaint"),
    [
        ([1], [-1], r"lengths\[0\] is -1"),
        ([4096, 0], [0, 1], r"addresses\[1\] is not an address"),
        ([1, 2], [0], "2 addresses and 1 lengths"),
        ([1.5], [0], "addresses must be one column of integers"),
        ([[1]], [0], "addresses must be one column of integers"),
    ],
)
def test_bad_columns_are_refused_before_memory_is_touched(addresses, lengths, complaint):
    with pytest.raises(InvalidArgumentError, match=complaint):
        checksum_ranges(addresses, lengths)


def test_an_address_needs_no_numba():
    code = (
        "import sys; from transfer_engine.checksum import address_of; address_of(b'x', 0);"
        "sys.exit('numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
