"""Tags of content: what they are, that they notice what checksums do not, and pieces are alike.

`.py_func` runs the same code without JIT; the reference here is written from the papers, and shares
no code with it. A wrong tag meets the right one in 2^63 tries: none here does.
"""

import hmac
import struct

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hashing.meeting import LANES, STRIPE_WORDS, constants, meeting_keys
from tests.hashing.sip import sip128
from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.base import Operation
from transfer_engine.errors import InvalidArgumentError
from transfer_engine.kernels import content_tags as kernels
from transfer_engine.tagging import Stream, Tagging

KEY = bytes(range(16))
BLOCK = kernels.BLOCK_BYTES
TAGGING = Tagging(KEY)
RANDOM = np.random.default_rng(5).integers(0, 256, 3 * BLOCK + 200, dtype=np.uint8)
# Both sides of every border: of words, stripes, groups of unrolled stripes, blocks.
BORDERS = [0, 1, 3, 4, 5, 7, 8, 9, 63, 64, 65, 127, 128, 129, 511, 512, 513, 1024, 1100]
BORDERS += [BLOCK + each for each in (-65, -1, 0, 1, 64, 513)] + [2 * BLOCK, 3 * BLOCK + 7]


def expected(data):
    """The tag as the papers say it: NH of each block, twice, and SipHash of the sums."""
    schedule = b"".join(hmac.digest(KEY, b"words of tags %d" % nth, "sha512") for nth in range(66))
    key, sip_key = schedule[: BLOCK + 64], schedule[BLOCK + 64 :][:16]
    words = []
    for begin in range(0, len(data), BLOCK):
        block = data[begin : begin + BLOCK]
        block += bytes(-len(block) % 64)
        for shift in (0, 64):
            total = 0
            for at in range(0, len(block), 8):
                low, high = struct.unpack_from("<II", block, at)
                key_low, key_high = struct.unpack_from("<II", key, at + shift)
                total += ((low + key_low) % 2**32) * ((high + key_high) % 2**32)
            words.append(total % 2**64)
    message = struct.pack(f"<{len(words) + 1}Q", *words, len(data))
    return int.from_bytes(sip128(sip_key, message)[:8], "little")


def forgery(data, lane=0):
    """Bytes, made from some, and others that have their XXH3-64: what anybody can make.

    Two words of a lane that differ, under the constants of their stripes, in the highest bit alone:
    where both are flipped they change places, and what is added to the lane beside is 2^64.
    """
    table = constants(0)
    content = bytearray(data)
    (first,) = struct.unpack_from("<Q", content, 8 * lane)
    second = first ^ table[lane] ^ table[lane + 1] ^ 1 << 63
    struct.pack_into("<Q", content, 8 * (STRIPE_WORDS + lane), second)
    forged = bytearray(content)
    for word in (lane, STRIPE_WORDS + lane):
        forged[8 * word + 7] ^= 0x80
    return bytes(content), bytes(forged)


def tag(data):
    array = np.frombuffer(data, np.uint8)
    return TAGGING.one(array.ctypes.data, len(data))


def tags_of(contents, kernel=kernels.tags_of_ranges):
    arrays = [np.frombuffer(each + b"-", np.uint8) for each in contents]
    addresses = np.array([each.ctypes.data for each in arrays], np.int64)
    lengths = np.array([len(each) for each in contents], np.int64)
    out = np.empty(len(contents), np.uint64)
    with np.errstate(over="ignore"):
        kernel(addresses, lengths, TAGGING.schedule, out)
    return out.tolist()


@pytest.mark.parametrize("kernel", [kernels.tags_of_ranges, kernels.tags_of_ranges.py_func])
def test_tags_are_what_the_papers_say(kernel):
    contents = [RANDOM[at % 7 :][:length].tobytes() for at, length in enumerate(BORDERS)]
    assert tags_of(contents, kernel) == [expected(each) for each in contents]


def test_all_kernels_make_the_same_tags():
    addresses = np.full(len(BORDERS), RANDOM.ctypes.data + 3)
    lengths = np.array(BORDERS)
    ranges = TAGGING.ranges(addresses, lengths).tolist()
    assert [TAGGING.one(RANDOM.ctypes.data + 3, each) for each in BORDERS] == ranges
    assert TAGGING.pieces(addresses, lengths, np.arange(len(BORDERS) + 1)).tolist() == ranges


@given(data=st.data())
@settings(max_examples=60)
def test_pieces_have_the_tag_of_the_whole(data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(RANDOM)), max_size=8)))
    edges = np.array([0, *cuts, len(RANDOM)])
    addresses, lengths = RANDOM.ctypes.data + edges[:-1], np.diff(edges)
    starts = np.array([0, len(lengths)])
    whole = TAGGING.one(RANDOM.ctypes.data, len(RANDOM))
    assert TAGGING.pieces(addresses, lengths, starts).tolist() == [whole]
    stream = Stream(TAGGING)
    for end, (address, length) in enumerate(
        zip(addresses.tolist(), lengths.tolist(), strict=True), 1
    ):
        stream.take(address, length)
        assert stream.tag() == TAGGING.one(RANDOM.ctypes.data, int(edges[end]))


def changes(data):
    """The same bytes with one changed, two swapped, cut short, gone on with."""
    at = len(data) // 2
    yield data + b"\0"
    yield data[:-1]
    yield b"\0" + data[:-1]
    for place in {0, at, len(data) - 1}:
        for bit in (1, 128):
            yield data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
    yield data[1:] + data[:1]
    yield data[8:16] + data[:8] + data[16:]
    yield data[64:128] + data[:64] + data[128:]
    yield data[at:] + data[:at]
    yield bytes(len(data))
    yield b"\xff" * len(data)


def test_whatever_is_changed_has_another_tag():
    for length in [*range(1, 1101), BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 5]:
        data = RANDOM[:length].tobytes()
        others = {each for each in changes(data) if each != data}
        tags = tags_of([data, *others])
        assert len(set(tags)) == len(tags), length


def test_zeros_have_a_tag_of_their_length():
    tags = tags_of([bytes(length) for length in range(2 * BLOCK, 2 * BLOCK + 300)])
    tags += tags_of([bytes(length) for length in range(300)])
    assert len(set(tags)) == len(tags)
    assert 0 not in tags


def test_another_key_makes_other_tags():
    other = Tagging(bytes(16))
    for length in BORDERS:
        assert other.one(RANDOM.ctypes.data, length) != TAGGING.one(RANDOM.ctypes.data, length)
    with pytest.raises(InvalidArgumentError, match="16 bytes, not 15"):
        Tagging(bytes(15))
    assert KEY.hex() not in repr(TAGGING)
    assert repr(KEY)[2:-1] not in repr(TAGGING)


@given(data=st.binary(min_size=256, max_size=2000), lane=st.integers(0, LANES - 1))
def test_what_leaves_a_checksum_as_it_is_does_not_leave_the_tag(data, lane):
    content, forged = forgery(data, lane)
    assert content != forged
    assert xxhash.xxh3_64_intdigest(content) == xxhash.xxh3_64_intdigest(forged)
    assert tag(content) != tag(forged)


def test_colliding_keys_have_tags_of_their_own():
    _, *keys = meeting_keys()
    assert tag(keys[0]) != tag(keys[1])


@pytest.mark.parametrize("way", ["local", "tcp"])
def test_an_engine_tags_what_it_moves(way):
    """One request, a few, more than passes at once: over the network, and not."""
    memory = np.random.default_rng(6).integers(0, 256, 3 << 20, dtype=np.uint8)
    address = memory.ctypes.data
    with (
        Segment.create(8 << 20) as segment,
        TransferServer(unix=None) as server,
        TransferEngine(transports=[way]) as engine,
    ):
        target = engine.open(server.publish(segment))
        for lengths in ([5000], [300_000], [0, 1, 64, 5000], [300_000, 7, 1 << 20, 64]):
            columns = np.cumsum(lengths) - lengths, np.array(lengths)
            addresses = address + columns[0]
            expected = TAGGING.ranges(addresses, columns[1]).tolist()
            for move in (engine.write_batch, engine.read_batch):
                done = move(target, *columns, addresses, trusted=True, tagging=TAGGING)
                assert done.ok
                assert done.checksums is None
                assert done.tags.tolist() == expected
        submitted = engine.submit(
            Operation.READ, target, [0, 8 << 20], [9, 9], [address] * 2, trusted=True,
            checksums=True, tagging=TAGGING,
        )  # fmt: skip
        assert submitted.wait().astype(bool).tolist() == [False, True]
        assert submitted.tags[0] == TAGGING.one(address, 9)
        assert submitted.checksums[0] == xxhash.xxh3_64_intdigest(memory[:9])
        target.close()
