"""The SipHash kernels against published digests and a plain Python form of it, in both modes.

`.py_func` runs the same code without JIT; the LLVM of eight lanes has a Python form of its own, so
that LLVM alone is covered by the compiled mode only.
"""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.hashing.sip import chain, sip128
from transfer_engine.kernels import siphash as kernels

MODES = ["compiled", "python"]
KEYS = st.binary(min_size=16, max_size=16)
KEY, OTHER = bytes(range(16)), bytes(range(16, 32))
RANDOM = np.random.default_rng(5).integers(0, 256, 1 << 16, dtype=np.uint8).tobytes()

# By length: digests of the bytes 0, 1, 2, ... under the key 0, 1, ... 15, published with the
# reference implementation (`vectors_sip128`).
PUBLISHED = {
    0: "a3817f04ba25a8e66df67214c7550293",
    1: "da87c1d86b99af44347659119b22fc45",
    2: "8177228da4a45dc7fca38bdef60affe4",
    3: "9c70b60c5267a94e5f33b6b02985ed51",
    4: "f88164c12d9c8faf7d0f6e7c7bcd5579",
    5: "1368875980776f8854527a07690e9627",
    6: "14eeca338b208613485ea0308fd7a15e",
    7: "a1f1ebbed8dbc153c0b84aa61ff08239",
    8: "3b62a9ba6258f5610f83e264f31497b4",
    9: "264499060ad9baabc47f8b02bb6d71ed",
    10: "00110dc378146956c95447d3f3d0fbba",
    11: "0151c568386b6677a2b4dc6f81e5dc18",
    12: "d626b266905ef35882634df68532c125",
    13: "9869e247e9c08b10d029934fc4b952f7",
    14: "31fcefac66d7de9c7ec7485fe4494902",
    15: "5493e99933b0a8117e08ec0f97cfc3d9",
    16: "6ee2a4ca67b054bbfd3315bf85230577",
    17: "473d06e8738db89854c066c47ae47740",
    23: "c9d184ddd5a9f5e0cf8ce29a9abf691c",
    24: "2db479ae78bd50d8882a8a178a6132ad",
    32: "7c3956ca5eeafc3e363e9d556546eb68",
    40: "df6a301e95c95dad97ae0cc8c6913bd8",
    63: "5150d1772f50834a503e069a973fbd7c",
}


def kernel(name, mode):
    compiled = getattr(kernels, name)
    return compiled if mode == "compiled" else compiled.py_func


def words(sixteen_bytes):
    return tuple(np.frombuffer(sixteen_bytes, dtype=np.uint64))


def alone(data, key=KEY, mode="compiled"):
    column = np.frombuffer(data, dtype=np.uint8)
    with np.errstate(over="ignore"):
        low, high = kernel("sip128_one", mode)(column.ctypes.data, len(data), *words(key))
    return np.array([low, high], dtype=np.uint64).tobytes()


def together(strings, key=KEY, mode="compiled", length_max=4096):
    blob = np.frombuffer(b"/".join(strings), dtype=np.uint8)
    offsets = np.cumsum([0] + [len(string) + 1 for string in strings])
    out = np.zeros((len(strings), 2), dtype=np.uint64)
    with np.errstate(over="ignore"):
        refused = kernel("sip128_strings", mode)(*words(key), blob, offsets, length_max, out)
    assert refused == -1
    return [row.tobytes() for row in out]


def chained(
    tokens,
    block_tokens,
    parent=bytes(16),
    link=KEY,
    block=OTHER,
    *,
    mode="compiled",
    partial_tail=True,
):
    column = np.array(tokens, dtype=np.int64)
    full, rest = divmod(len(tokens), block_tokens)
    out = np.zeros((full + (1 if partial_tail and rest else 0), 2), dtype=np.uint64)
    with np.errstate(over="ignore"):
        kernel("sip128_chain", mode)(
            column.ctypes.data, len(column), block_tokens,
            *words(parent), *words(link), *words(block), out,
        )  # fmt: skip
    return [row.tobytes() for row in out]


@pytest.mark.parametrize("length", PUBLISHED)
def test_published_digests(length):
    data, expected = bytes(range(length)), bytes.fromhex(PUBLISHED[length])
    assert sip128(KEY, data) == expected
    for mode in MODES:
        assert alone(data, mode=mode) == expected
        if length:
            assert together([data] * 9, mode=mode) == [expected] * 9


@pytest.mark.parametrize("length", range(101))
def test_every_length_alone_and_in_lanes(length):
    strings = [RANDOM[67 * at : 67 * at + length] for at in range(40)]
    expected = [alone(string) for string in strings]
    assert expected[:3] == [sip128(KEY, string) for string in strings[:3]]
    if length:
        for count in range(1, 41):
            assert together(strings[:count]) == expected[:count]


@given(lengths=st.lists(st.integers(1, 100), min_size=1, max_size=40), key=KEYS)
@example(lengths=[1, 2] * 20, key=KEY)
@example(lengths=[8] * 9 + [7] * 10 + [8] * 3, key=KEY)
@example(lengths=list(range(1, 41)), key=KEY)
@settings(max_examples=100)
def test_strings_of_mixed_lengths_equal_each_alone(lengths, key):
    ends = np.cumsum(lengths)
    strings = [RANDOM[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    found = together(strings, key)
    assert found == [alone(string, key) for string in strings]
    assert found[0] == sip128(key, strings[0])


@given(
    strings=st.lists(
        st.sampled_from([1, 7, 8, 20]).flatmap(lambda n: st.binary(min_size=n, max_size=n)),
        min_size=1,
        max_size=12,
    ),
    key=KEYS,
)
@settings(max_examples=20)
def test_small_batches_of_any_bytes(strings, key):
    expected = [sip128(key, string) for string in strings]
    for mode in MODES:
        assert together(strings, key, mode) == expected


def test_thousands_of_strings_and_the_longest():
    lengths = np.random.default_rng(6).integers(1, 90, 5000).tolist()
    strings = [RANDOM[at : at + length] for at, length in enumerate(lengths)]
    strings[17] = RANDOM[:4096]
    assert together(strings) == [alone(string) for string in strings]
    names = [b"model/layer/07/block/%06d" % at for at in range(1024)]
    assert together(names) == [alone(name) for name in names]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("lengths", "length_max", "refused"),
    [([3, 0, 4], 4, 1), ([3, 4, 5], 4, 2), ([0], 4, 0), ([3, 4, 5], 5, -1), ([1] * 9 + [0], 4, 9)],
)
def test_the_first_string_that_is_refused(mode, lengths, length_max, refused):
    offsets = np.cumsum([0] + [length + 1 for length in lengths])
    blob = np.frombuffer(bytes(int(offsets[-1]) - 1), dtype=np.uint8)
    out = np.zeros((len(lengths), 2), dtype=np.uint64)
    with np.errstate(over="ignore"):
        found = kernel("sip128_strings", mode)(*words(KEY), blob, offsets, length_max, out)
    assert found == refused


def test_no_strings():
    out = np.empty((0, 2), dtype=np.uint64)
    blob, offsets = np.frombuffer(b"", dtype=np.uint8), np.zeros(1, dtype=np.int64)
    assert kernels.sip128_strings(*words(KEY), blob, offsets, 4096, out) == -1


@given(
    count=st.integers(0, 300),
    block_tokens=st.integers(1, 40),
    partial_tail=st.booleans(),
    parent=KEYS,
    link=KEYS,
    block=KEYS,
)
@example(
    count=300, block_tokens=1, partial_tail=True, parent=bytes(16), link=KEY, block=OTHER
)  # fmt: skip
@example(
    count=3, block_tokens=300, partial_tail=True, parent=bytes(16), link=KEY, block=OTHER
)  # fmt: skip
@settings(max_examples=60)
def test_a_chain_equals_the_loop(count, block_tokens, partial_tail, parent, link, block):
    tokens = np.random.default_rng(count).integers(0, np.iinfo(np.int64).max, count).tolist()
    found = chained(tokens, block_tokens, parent, link, block, partial_tail=partial_tail)
    expected = chain(tokens, block_tokens, parent, link, block)
    assert found == (expected if partial_tail else expected[: count // block_tokens])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("count", "block_tokens"), [(0, 4), (3, 4), (8, 4), (50, 4), (44, 4)])
def test_chains_in_both_modes(mode, count, block_tokens):
    tokens = [at * 7919 % 100_003 for at in range(count)]
    expected = chain(tokens, block_tokens, bytes(16), KEY, OTHER)
    assert chained(tokens, block_tokens, mode=mode) == expected


def test_a_chain_can_be_continued_and_names_its_whole_prefix():
    tokens = list(range(1000, 1000 + 20 * 16))
    whole = chained(tokens, 16)
    assert len(set(whole)) == 20
    assert whole[:5] + chained(tokens[5 * 16 :], 16, parent=whole[4]) == whole
    changed = chained([tokens[0] + 1, *tokens[1:]], 16)
    assert not set(changed) & set(whole)
    changed = chained([*tokens[:-1], 7], 16)
    assert changed[:-1] == whole[:-1]
    assert changed[-1] != whole[-1]
    # A block that is short is another one than a block that ends in zeros.
    assert chained([5, 6, 7], 4) != chained([5, 6, 7, 0], 4)


@pytest.mark.parametrize("bit", range(0, 128, 9))
def test_each_bit_of_a_key_changes_all_digests(bit):
    other = (int.from_bytes(KEY, "little") ^ (1 << bit)).to_bytes(16, "little")
    names = [b"name %03d" % at for at in range(20)]
    assert not set(together(names, other)) & set(together(names))
    tokens = list(range(200))
    whole = set(chained(tokens, 10))
    assert len(whole) == 20
    assert not set(chained(tokens, 10, link=other)) & whole
    changed_block = (int.from_bytes(OTHER, "little") ^ (1 << bit)).to_bytes(16, "little")
    assert not set(chained(tokens, 10, block=changed_block)) & whole
    assert not set(chained(tokens, 10, parent=other)) & whole


def test_warmup_compiles_every_kernel():
    kernels.warmup()
    names = [name for name, value in vars(kernels).items() if hasattr(value, "py_func")]
    assert len(names) >= 3
    assert all(getattr(kernels, name).signatures for name in names)
