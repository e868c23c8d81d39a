"""The XXH3 kernels against the xxhash package: every length class, seed, alignment, both modes.

`.py_func` runs the same code without JIT on the same addresses: the few primitives that touch raw
memory (load, copy, find, multiply, accumulate) have a Python form beside their LLVM form, so the
LLVM of those primitives alone is only covered by the compiled mode.
"""

import numpy as np
import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transfer_engine.kernels import xxh3 as kernels

SEEDS = st.integers(0, 2**64 - 1)
MODES = ["compiled", "python"]
# Both sides of every border between length classes, and of stripes and blocks beyond.
BORDERS = [0, 1, 3, 4, 8, 9, 16, 17, 32, 33, 64, 65, 96, 97, 128, 129, 144, 160, 239, 240, 241]
BORDERS += [256, 257, 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049]
RANDOM = np.random.default_rng(3).integers(0, 256, (1 << 20) + 64, dtype=np.uint8)


def kernel(name, mode):
    compiled = getattr(kernels, name)
    return compiled if mode == "compiled" else compiled.py_func


def int64(values):
    return np.array(values, dtype=np.int64)


def ranges_64(data, starts, lengths, seed, mode):
    out = np.empty(len(starts), dtype=np.uint64)
    with np.errstate(over="ignore"):
        kernel("xxh3_64_ranges", mode)(
            data.ctypes.data + int64(starts), int64(lengths), np.uint64(seed), out
        )
    return [int(value) for value in out]


def strings_128(strings, seed, mode):
    blob = np.frombuffer(b"/".join(strings), dtype=np.uint8)
    offsets = np.cumsum([0] + [len(string) + 1 for string in strings])
    out = np.empty((len(strings), 2), dtype=np.uint64)
    with np.errstate(over="ignore"):
        refused = kernel("xxh3_128_strings", mode)(np.uint64(seed), blob, offsets, 1 << 30, out)
    assert refused == -1
    return [int(low) | int(high) << 64 for low, high in out]


def copied_64(data, starts, lengths, mode, streaming=0):
    """Copy into a target with a guard byte after each range; give hashes, copies, guards."""
    ends = np.cumsum(int64(lengths) + 1)
    target = np.full(int(ends[-1]), 0xA5, dtype=np.uint8)
    begins = ends - int64(lengths) - 1
    out = np.empty(len(starts), dtype=np.uint64)
    with np.errstate(over="ignore"):
        kernel("copy_xxh3_64", mode)(
            data.ctypes.data + int64(starts),
            target.ctypes.data + begins,
            int64(lengths),
            out,
            streaming,
        )
    copies = [
        target[begin : begin + length].tobytes()
        for begin, length in zip(begins, lengths, strict=True)
    ]
    return [int(value) for value in out], copies, target[ends - 1]


@pytest.mark.parametrize("mode", MODES)
def test_streamed_copies_equal_their_source_at_every_alignment(mode):
    # With the guard byte after each range, targets go through all alignments; 16-fold ones stream.
    lengths = [4096 + 60 * step for step in range(70)] + [240, 241, 0, 65_535, 65_536]
    starts = [step % 67 for step in range(len(lengths))]
    hashes, copies, guards = copied_64(RANDOM, starts, lengths, mode, streaming=1)
    expected = [RANDOM[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)]
    assert copies == expected
    assert hashes == [xxhash.xxh3_64_intdigest(each) for each in expected]
    assert (guards == 0xA5).all()


@pytest.mark.parametrize("seed", [0, 1, 0x9E3779B185EBCA87, 2**64 - 1])
def test_every_length_to_1100_equals_xxhash(seed):
    lengths = list(range(1101))
    starts = [length % 67 for length in lengths]
    views = [RANDOM[s : s + n].tobytes() for s, n in zip(starts, lengths, strict=True)]
    expected = [xxhash.xxh3_64_intdigest(view, seed) for view in views]
    assert ranges_64(RANDOM, starts, lengths, seed, "compiled") == expected
    expected = [xxhash.xxh3_128_intdigest(view, seed) for view in views[1:]]
    assert strings_128(views[1:], seed, "compiled") == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, 2**64 - 5])
def test_borders_of_length_classes(mode, seed):
    views = [RANDOM[:length].tobytes() for length in BORDERS]
    starts = [0] * len(BORDERS)
    assert ranges_64(RANDOM, starts, BORDERS, seed, mode) == [
        xxhash.xxh3_64_intdigest(view, seed) for view in views
    ]
    assert strings_128(views[1:], seed, mode) == [
        xxhash.xxh3_128_intdigest(view, seed) for view in views[1:]
    ]
    hashes, copies, guards = copied_64(RANDOM, starts, BORDERS, mode)
    assert copies == views
    assert hashes == [xxhash.xxh3_64_intdigest(view) for view in views]
    assert (guards == 0xA5).all()


@given(start=st.integers(0, 63), length=st.integers(0, 1 << 20), seed=SEEDS)
@example(start=1, length=1 << 20, seed=0)
@settings(max_examples=60, deadline=None)
def test_long_unaligned_ranges(start, length, seed):
    view = RANDOM[start : start + length].tobytes()
    assert ranges_64(RANDOM, [start], [length], seed, "compiled") == [
        xxhash.xxh3_64_intdigest(view, seed)
    ]
    if length:
        assert strings_128([view], seed, "compiled") == [xxhash.xxh3_128_intdigest(view, seed)]
    hashes, copies, guards = copied_64(RANDOM, [start], [length], "compiled")
    assert (hashes, copies, guards[0]) == ([xxhash.xxh3_64_intdigest(view)], [view], 0xA5)


@pytest.mark.parametrize("mode", MODES)
@given(strings=st.lists(st.binary(max_size=300), min_size=1, max_size=6), seed=SEEDS)
@settings(max_examples=40, deadline=None)
def test_small_batches_of_any_bytes(mode, strings, seed):
    blob = np.frombuffer(b"/".join(strings) + b"/", dtype=np.uint8)
    lengths = [len(string) for string in strings]
    starts = [0, *np.cumsum(int64(lengths) + 1)[:-1].tolist()]
    assert ranges_64(blob, starts, lengths, seed, mode) == [
        xxhash.xxh3_64_intdigest(string, seed) for string in strings
    ]
    hashes, copies, _guards = copied_64(blob, starts, lengths, mode)
    assert copies == strings
    assert hashes == [xxhash.xxh3_64_intdigest(string) for string in strings]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("blob", "count", "offsets"),
    [
        (b"ab\0c", 2, [0, 3, 5]),
        (b"a", 1, [0, 2]),
        (b"", 1, [0, 1]),
        (b"\0\0", 3, [0, 1, 2, 3]),
        (b"a\0b", 1, None),
        (b"a\0b\0c", 2, None),
        (b"ab", 2, None),
        (b"", 2, None),
    ],
)
def test_split_at_zero(mode, blob, count, offsets):
    found = np.empty(count + 1, dtype=np.int64)
    split = kernel("split_at_zero", mode)(np.frombuffer(blob, dtype=np.uint8), found)
    assert bool(split) == (offsets is not None)
    if offsets is not None:
        assert found.tolist() == offsets


@pytest.mark.parametrize("mode", MODES)
def test_strings_stop_at_the_first_refused_one(mode):
    blob = np.frombuffer(b"abc//abcd", dtype=np.uint8)
    out = np.zeros((3, 2), dtype=np.uint64)
    with np.errstate(over="ignore"):
        run = kernel("xxh3_128_strings", mode)
        assert run(np.uint64(0), blob, int64([0, 4, 5, 10]), 4, out) == 1
        assert run(np.uint64(0), blob, int64([0, 4, 10]), 4, out[:2]) == 1
        assert run(np.uint64(0), blob, int64([0, 4, 10]), 5, out[:2]) == -1


@pytest.mark.parametrize("mode", MODES)
@given(
    nbytes=st.integers(0, 700),
    block_bytes=st.integers(1, 300),
    parent=st.binary(min_size=16, max_size=16),
    seed=SEEDS,
)
@settings(max_examples=40, deadline=None)
def test_chain_equals_hashing_parent_and_block(mode, nbytes, block_bytes, parent, seed):
    data = RANDOM[:nbytes].tobytes()
    key, expected = parent, []
    for begin in range(0, nbytes, block_bytes):
        block = data[begin : begin + block_bytes]
        key = xxhash.xxh3_128_intdigest(key + block, seed).to_bytes(16, "little")
        expected.append(key)
    out = np.empty((len(expected), 2), dtype=np.uint64)
    low, high = np.frombuffer(parent, dtype=np.uint64)
    with np.errstate(over="ignore"):
        kernel("xxh3_128_chain", mode)(
            RANDOM.ctypes.data, nbytes, block_bytes, low, high, np.uint64(seed), out
        )
    assert [row.tobytes() for row in out] == expected


def test_warmup_compiles_every_kernel():
    kernels.warmup()
    names = [name for name, value in vars(kernels).items() if hasattr(value, "py_func")]
    assert len(names) >= 5
    assert all(getattr(kernels, name).signatures for name in names)
