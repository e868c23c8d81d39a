"""A secret seed makes no tag of XXH3-64: it is told by one short object, and need not be known.

What is hashed of up to eight bytes is turned back step by step, to the seed. In what is longer the
seed is added to the constants that words are compared with, so those of two stripes differ, much
of the time, by what anybody can compute; two changes can then take each other back.
"""

import struct

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from tests.hashing.meeting import STRIPE_WORDS, constants

WORD = (1 << 64) - 1
MIX = 0x9FB21C651E98DF25
SEEDS = [int(seed) for seed in np.random.default_rng(1).integers(0, WORD, 2000, dtype=np.uint64)]


def swapped(half):
    return int.from_bytes((half & 0xFFFFFFFF).to_bytes(4, "little"), "big")


def rotated(x, bits):
    return (x << bits | x >> (64 - bits)) & WORD


def seed_of(data, checksum):
    """The seed under which 4 to 8 bytes have a checksum."""
    h = checksum ^ checksum >> 28 ^ checksum >> 56
    h = h * pow(MIX, -1, 1 << 64) & WORD
    h ^= (h >> 35) + len(data)  # what is shifted is of the upper bits, which stay
    h = h * pow(MIX, -1, 1 << 64) & WORD
    for _ in range(63):  # the step done 64 times leaves a word as it is
        h ^= rotated(h, 49) ^ rotated(h, 24)
    first, last = struct.unpack("<I", data[:4])[0], struct.unpack("<I", data[-4:])[0]
    table = constants(0)
    mixed = ((table[1] ^ table[2]) - (h ^ (last + (first << 32)))) & WORD
    return mixed ^ swapped(mixed) << 32


@given(seed=st.integers(0, WORD), data=st.binary(min_size=4, max_size=8))
def test_one_short_object_and_its_checksum_tell_the_seed(seed, data):
    assert seed_of(data, xxhash.xxh3_64_intdigest(data, seed)) == seed


def test_what_is_changed_without_the_seed_keeps_its_checksum_again_and_again():
    stripes, known, others = (0, 12), SEEDS[:1000], SEEDS[1000:]
    halves = np.array(
        [[constants(seed)[stripe] & 0xFFFFFFFF for stripe in stripes] for seed in known]
    )
    differences, times = np.unique(halves[:, 0] ^ halves[:, 1], return_counts=True)
    words = np.arange(256, dtype=np.uint64)
    one, two = (stripe * STRIPE_WORDS for stripe in stripes)
    words[two] = words[one] ^ np.uint64(differences[times.argmax()])
    changed = words.copy()
    changed[[one, two]] ^= np.uint64(1 << 63)
    kept = sum(
        xxhash.xxh3_64_intdigest(words.tobytes(), seed)
        == xxhash.xxh3_64_intdigest(changed.tobytes(), seed)
        for seed in others
    )
    assert kept > len(others) // 200
