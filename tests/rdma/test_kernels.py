"""Chains of work requests, compiled and as Python: what a card would be told to do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from transfer_engine.kernels import rdma as kernels
from transfer_engine.rdma.memory import make_table

BOTH = pytest.mark.parametrize("flavour", ["compiled", "python"])


def kernel(name, flavour):
    function = getattr(kernels, name)
    return function if flavour == "compiled" else function.py_func


class Registration:
    def __init__(self, key):
        self.lkey = key


def column(values):
    return np.array(values, dtype=np.int64)


def locate(flavour, regions, ranges, statuses=None):
    table = make_table([(start, size, [Registration(7)]) for start, size in regions])
    where = np.full(len(ranges), 99, dtype=np.int64)
    statuses = np.array(statuses or [0] * len(ranges), dtype=np.int32)
    addresses, lengths = (column(part) for part in zip(*ranges, strict=True))
    found = kernel("locate", flavour)(
        addresses, lengths, statuses, table.starts, table.ends, table.reach, where
    )
    return found, [None if at < 0 else (int(table.starts[at]), int(table.ends[at])) for at in where]


@BOTH
def test_memory_is_found_in_the_region_that_holds_all_of_it(flavour):
    regions = [(1000, 100), (1100, 100), (5000, 1)]
    ranges = [(1000, 100), (1099, 1), (1099, 2), (1100, 100), (999, 2), (5000, 1), (5001, 1)]
    (inside, outside), found = locate(flavour, regions, ranges)
    first, second, third = (1000, 1100), (1100, 1200), (5000, 5001)
    assert found == [first, first, None, second, None, third, None]
    assert (inside, outside) == (202, 5)


@BOTH
def test_a_large_region_behind_small_ones_is_found(flavour):
    regions = [(0x1000, 1000), (0x1010, 10), (0x1020, 10)]
    (inside, outside), found = locate(flavour, regions, [(0x1024, 100), (0x1011, 4), (0x1399, 99)])
    assert found[0] == (0x1000, 0x1000 + 1000)
    assert found[1] in (found[0], (0x1010, 0x1010 + 10))  # both hold it
    assert found[2] is None
    assert (inside, outside) == (104, 99)


@BOTH
def test_refused_and_empty_requests_count_for_nothing(flavour):
    (inside, outside), found = locate(
        flavour, [(64, 64)], [(64, 8), (64, 0), (72, 8)], [-600, 0, 0]
    )
    assert found == [None, None, (64, 128)]
    assert (inside, outside) == (8, 0)
    assert locate(flavour, [], [(64, 8)]) == ((0, 8), [None])


def moves(flavour, requests, *, base, piece, rows, window=None, keys=(0xFFFF0001,)):
    """Build all chains of a batch and return the (remote, local, size, key) of every request."""
    offsets, lengths, addresses, where = (column(part) for part in zip(*requests, strict=True))
    total = int(lengths[where >= 0].sum())
    begin, end = window or (0, total)
    work, entries = np.zeros((2 * rows, 16), np.int64), np.zeros((2 * rows, 2), np.int64)
    state = column([0, 0, begin, end - begin])
    found, first = [], 0
    while True:
        count = kernel("build_chain", flavour)(
            offsets, lengths, addresses, where, column(keys), base, 5, kernels.WRITE, piece, work,
            entries, first, rows, state,
        )  # fmt: skip
        if not count:
            assert state[3] == 0
            return found
        assert count <= rows
        mine = slice(first, first + count)
        links = work.ctypes.data + 128 * np.arange(first + 1, first + count + 1)
        assert work[mine, 1].tolist() == [*links[:-1].tolist(), 0]
        assert work[mine, 4].tolist() == [0] * (count - 1) + [2]
        assert (work[mine, 3] == (kernels.WRITE << 32 | 1)).all()
        assert (work[mine, 6] == 5).all()
        for row in range(first, first + count):
            size, key = int(entries[row, 1]) & 0xFFFFFFFF, int(entries[row, 1]) >> 32 & 0xFFFFFFFF
            found.append((int(work[row, 5]), int(entries[row, 0]), size, key))
        first = rows - first


@BOTH
def test_neighbours_merge_and_large_requests_are_cut(flavour):
    requests = [(0, 100, 5000, 0), (100, 50, 5100, 0), (150, 10, 9000, 0), (400, 700, 9010, 0)]
    done = moves(flavour, requests, base=1 << 40, piece=300, rows=8)
    far, key = 1 << 40, 0xFFFF0001
    assert done == [
        (far, 5000, 150, key), (far + 150, 9000, 10, key), (far + 400, 9010, 300, key),
        (far + 700, 9310, 300, key), (far + 1000, 9610, 100, key),
    ]  # fmt: skip


@BOTH
def test_memory_of_another_key_is_another_request(flavour):
    requests = [(0, 8, 100, 0), (8, 8, 108, 1)]
    done = moves(flavour, requests, base=0, piece=99, rows=4, keys=(3, 4))
    assert done == [(0, 100, 8, 3), (8, 108, 8, 4)]


REQUESTS = st.lists(
    st.tuples(st.integers(0, 2000), st.integers(0, 90), st.sampled_from([-1, 0])),
    min_size=1,
    max_size=40,
)


@BOTH
@given(
    requests=REQUESTS, piece=st.integers(1, 70), rows=st.integers(1, 5),
    cut=st.floats(0, 1), merge=st.booleans(),
)  # fmt: skip
def test_windows_together_move_every_byte_once(flavour, requests, piece, rows, cut, merge):
    """Whatever the sizes, two windows of a batch move exactly its registered bytes, in order."""
    at, batch = 10_000, []
    for offset, length, where in requests:
        batch.append((offset, length, at, where))
        at += length + (0 if merge else 1)
    expected = [
        (77 + offset + byte, address + byte)
        for offset, length, address, where in batch
        if where >= 0
        for byte in range(length)
    ]
    middle = int(cut * len(expected))
    windows = [(0, middle), (middle, len(expected))]
    moved = [
        (remote + byte, local + byte)
        for window in windows
        for remote, local, size, _ in moves(
            flavour, batch, base=77, piece=piece, rows=rows, window=window
        )
        for byte in range(size)
    ]
    assert moved == expected
