"""Two keys, and two blocks of tokens, that meet in one digest: easily found for XXH3, not for ours.

XXH3 adds up, over stripes of 64 bytes, (low ^ a) * (high ^ b) of each word, with constants that
anybody knows, and the words themselves into the lane beside. What leaves both sums as they were
leaves the digest. Who writes prompts chooses tokens; who names objects chooses keys.
"""

import functools
import itertools

import numpy as np
import xxhash

from transfer_engine.kernels.xxh3 import SECRET

PRINTABLE = range(0x20, 0x7F)
VOCABULARY = 1 << 17
LANES, STRIPE_WORDS = 8, 8


def constants(seed):
    """The words of XXH3's secret under a seed; stripe n meets word n + i of it in lane i."""
    words = [int(word) for word in SECRET.view("<u8")]
    return [(word + (-seed if at % 2 else seed)) % (1 << 64) for at, word in enumerate(words)]


def printable_pair(mask, delta, up):
    """Printable (low, high) with low ^ high = mask ^ delta, whose bit delta is 0 in low if `up`."""
    low, high = [], []
    for wanted, flip in zip(
        (mask ^ delta).to_bytes(4, "little"), delta.to_bytes(4, "little"), strict=True
    ):
        for each in PRINTABLE:
            other = each ^ wanted
            fits = {each, other, each ^ flip, other ^ flip} <= set(PRINTABLE)
            if fits and (not flip or bool(each & flip) != up):
                low.append(each)
                high.append(other)
                break
        else:
            return None
    return int.from_bytes(bytes(low), "little"), int.from_bytes(bytes(high), "little")


def colliding_keys(seed):
    """Two printable keys of 400 bytes with one XXH3 of 128 bits under this seed, or None.

    Exchanging the factors of a product leaves it as it is. What that changes in the word goes into
    the lane beside, where a second exchange in the same lane takes it back.
    """
    table = constants(seed)
    for lane in range(LANES):
        places = [(stripe, table[stripe + lane]) for stripe in range(5)]
        masks = [(stripe, (word ^ word >> 32) & 0xFFFFFFFF) for stripe, word in places]
        fine = [(stripe, mask) for stripe, mask in masks if not mask & 0x80808080]
        for (first, one), (second, two) in itertools.pairwise(fine):
            for bit in range(5):
                delta = 1 << bit
                if (one ^ two) & delta:
                    continue
                pairs = printable_pair(one, delta, True), printable_pair(two, delta, False)
                if None in pairs:
                    continue
                key = np.full(50, int.from_bytes(b"mooncake", "little"), np.uint64)
                other = key.copy()
                for stripe, (low, high) in zip((first, second), pairs, strict=True):
                    at = stripe * STRIPE_WORDS + lane
                    key[at] = high << 32 | low
                    other[at] = (high ^ delta) << 32 | (low ^ delta)
                return key.tobytes(), other.tobytes()
    return None


def colliding_tokens(seed, rng):
    """Two blocks of 64 tokens with one XXH3 after 16 bytes of a parent, under this seed.

    A token's upper half is 0, so its product is (token ^ a) * b. Six tokens of a lane are changed
    by d with sum(d * b) = 0, found among small d by sorting the sums of three and three; then
    their values are drawn until what goes into the lane beside adds up to nothing as well.
    """
    lane, table = 3, constants(seed)
    low = np.array([table[stripe + lane] % VOCABULARY for stripe in range(6)], np.int64)
    b = np.array([table[stripe + lane] >> 32 for stripe in range(6)], np.int64)
    step = np.arange(-64, 65)
    grid = np.stack(np.meshgrid(step, step, step, indexing="ij"), axis=-1).reshape(-1, 3)
    left, right = grid @ b[:3], -(grid @ b[3:])
    order = np.argsort(right)
    at = np.searchsorted(right[order], left)
    met = np.flatnonzero((at < len(order)) & (right[order[at % len(order)]] == left))
    for one in met:
        change = np.concatenate([grid[one], grid[order[at[one]]]])
        if not change.any():
            continue
        for _ in range(200):
            u = rng.integers(256, VOCABULARY - 256, (4096, 6))
            old, new = u ^ low, (u + change) ^ low
            even = np.flatnonzero((new - old).sum(axis=1) == 0)
            if len(even):
                tokens = np.full(64, 7, np.int64)
                other = tokens.copy()
                places = np.arange(6) * STRIPE_WORDS + lane - 2  # two words are the parent's
                places, keep = places[places >= 0], places >= 0
                tokens[places], other[places] = old[even[0]][keep], new[even[0]][keep]
                return tokens, other
    return None


@functools.cache
def meeting_keys():
    """A namespace, and two keys that meet in it under XXH3."""
    for number in range(100):
        namespace = f"tenant-{number}"
        found = colliding_keys(xxhash.xxh3_64_intdigest(namespace.encode()))
        if found is not None:
            return namespace, *found
    raise AssertionError("no namespace of a hundred has such keys")


@functools.cache
def meeting_tokens():
    """Two blocks of 64 tokens that meet under XXH3 where nothing is salted."""
    return colliding_tokens(xxhash.xxh3_64_intdigest(b""), np.random.default_rng(1))
