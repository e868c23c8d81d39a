"""The hash table against a dict, while it grows, shrinks, and does both at once."""

import numpy as np
import pytest

from kernel_cache.columns import reserve
from mooncake_store.core.context import Context
from mooncake_store.core.kernels import table as kernels
from mooncake_store.core.records import ROW
from mooncake_store.core.table import Table

ROWS = 1 << 17


class Checked:
    """A table and the dict it must equal."""

    def __init__(self):
        self.rows = reserve(ROWS, ROW)
        self.table = Table(self.rows, Context())
        self.known = {}

    def insert(self, digests):
        n = len(digests)
        self.table.maintain(n)
        found, inserted = np.empty(n, np.int32), np.empty(n, np.bool_)
        digests.flags.writeable = False
        status = np.zeros(n, np.int16)
        table = self.table
        kernels.find_or_insert(
            table.head,
            *table.tables,
            self.rows,
            table.free_rows,
            digests,
            status,
            found,
            inserted,
        )
        for key, row, new in zip(
            map(tuple, digests.tolist()), found.tolist(), inserted, strict=True
        ):
            assert new == (key not in self.known)
            assert self.known.setdefault(key, row) == row

    def remove(self, count):
        keys = list(self.known)[:count]
        self.table.delete(np.array([self.known.pop(key) for key in keys], np.int32))

    def check(self):
        self.table.check_integrity()
        assert len(self.table) == len(self.known)


def some_digests(random, n, span):
    low = random.integers(0, span, n) * 0x1E3779B97F4A7C15 % (1 << 62)
    return np.stack([low, low + 1], axis=1)


@pytest.mark.parametrize("seed", range(3))
def test_it_equals_a_dict_through_growth_and_shrinking(seed):
    random, checked = np.random.default_rng(seed), Checked()
    for step in range(600):
        if random.random() < (0.8 if step % 200 < 120 else 0.2):
            checked.insert(some_digests(random, int(random.integers(1, 400)), 40_000))
        else:
            checked.remove(int(random.integers(1, 600)))
        if step % 20 == 0:
            checked.check()
    while checked.known:
        checked.remove(500)
    checked.check()


def test_a_burst_right_after_shrinking_finds_room():
    random, checked = np.random.default_rng(1), Checked()
    checked.insert(some_digests(random, 20_000, 1 << 40))
    while checked.known:
        checked.remove(100)
    assert checked.table.slots < 20_000
    for _ in range(3):
        checked.insert(some_digests(random, 4096, 1 << 40))
        checked.check()
    assert len(checked.known) < 0.75 * checked.table.slots


def test_keys_with_one_home_are_all_found():
    checked = Checked()
    digests = np.array([[n << 32, n] for n in range(1, 300)], np.int64)  # equal low words
    checked.insert(digests)
    checked.remove(100)
    checked.check()
