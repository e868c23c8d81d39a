"""A path that was slow may be quick again: who reads prefixes finds out, and loses little by it.

Prefixes of which each block may be computed instead, on a made-up disk and a made-up clock.
"""

import numpy as np
import pytest

from mooncake_store.client.costs import Costs, Sample
from mooncake_store.client.results import ReadCosts
from mooncake_store.core.records import Tier

BLOCKS, BLOCK_BYTES = 128, 1 << 18
QUICK_S, COMPUTED_S = 0.06, 0.72
BLOCK_COMPUTED_S = COMPUTED_S / BLOCKS


class Reader:
    """Reads prefixes as far as they are worth it, computes the rest of each."""

    def __init__(self, gap_s):
        self.pace = Costs().pace()
        self.at = 0.0
        self.gap_s = gap_s
        for _ in range(20):
            self.one(QUICK_S)

    def fitting(self):
        columns = np.zeros((2, 2, BLOCKS))
        for believed, rate in enumerate(self.pace.outlook("file", Tier.DISK, self.at)):
            columns[believed, 0] = rate.latency_s
            columns[believed, 1] = rate.object_s + BLOCK_BYTES * rate.byte_s
        keys, statuses = range(BLOCKS), np.zeros(BLOCKS, np.int16)
        sizes, lines = np.full(BLOCKS, BLOCK_BYTES), np.zeros((2, BLOCKS), np.int64)
        costs = ReadCosts(keys, statuses, None, sizes, columns, lines, {})
        return costs.fitting(each=BLOCK_COMPUTED_S)

    def one(self, whole_s, latency_s=0.0):
        """Have a prefix, all of which would be read in `whole_s`; what was read, what it took."""
        read = self.fitting()
        seconds = latency_s * (read > 0) + whole_s * read / BLOCKS
        if read:
            self.at += seconds
            self.pace.samples.append(Sample(read * BLOCK_BYTES, read, seconds, self.at))
        computed_s = BLOCK_COMPUTED_S * (BLOCKS - read)
        self.at += computed_s + self.gap_s
        return read, seconds + computed_s


@pytest.mark.parametrize("gap_s", [0, 1, 10])
@pytest.mark.parametrize("slower", [2, 5, 10])
def test_a_prefix_on_a_slow_disk_takes_no_longer_than_computing(slower, gap_s):
    """But for the first ones, which nobody could know of, and what is forgotten after minutes."""
    reader = Reader(gap_s)
    taken = [reader.one(slower * COMPUTED_S)[1] for _ in range(200)]
    minutes = reader.at / 60
    assert sum(seconds > 1.1 * COMPUTED_S for seconds in taken[4:]) <= minutes / 6
    assert sum(taken) < (1.03 + 4 * slower / 200) * 200 * COMPUTED_S


@pytest.mark.parametrize("gap_s", [0, 1, 10])
@pytest.mark.parametrize("slower", [1.5, 5, 10])
@pytest.mark.parametrize("prefixes", [5, 50])
def test_prefixes_are_read_whole_again_soon_after_the_disk_is_quick(prefixes, slower, gap_s):
    reader = Reader(gap_s)
    for _ in range(prefixes):
        reader.one(slower * COMPUTED_S)
    quick_from = reader.at
    while reader.one(QUICK_S)[0] < BLOCKS:
        assert reader.at < quick_from + 180
    assert [reader.one(QUICK_S)[0] for _ in range(20)] == [BLOCKS] * 20


def test_a_look_is_as_large_as_it_is_cheap():
    """And one block at least, where it is not."""
    sizes = []
    for slower in (2, 20):
        reader, read = Reader(0.5), BLOCKS
        while read in (0, BLOCKS):
            read, _ = reader.one(slower * COMPUTED_S)
        sizes.append(read)
    assert 2 <= sizes[0] <= 0.05 * BLOCKS
    assert sizes[1] == 1


def test_a_latency_that_became_long_is_found_to_be_over():
    """What is read to find out need not be worth its latency."""
    reader = Reader(1)
    for _ in range(20):
        reader.one(QUICK_S, latency_s=3 * COMPUTED_S)
    slow = [reader.one(QUICK_S, latency_s=3 * COMPUTED_S)[0] for _ in range(20)]
    assert max(slow) < BLOCKS / 4
    quick_from = reader.at
    while reader.one(QUICK_S)[0] < BLOCKS:
        assert reader.at < quick_from + 180
