"""The pool of staging memory: bounded, reusable, honest when a piece cannot be prepared."""

import threading
import time

import numpy as np
import pytest

from tests.waiting import until
from transfer_engine.errors import InvalidArgumentError, TransferTimeoutError
from transfer_engine.staging import StagingPool, windows

PIECE = 1 << 16


def in_time(seconds=30):
    return time.monotonic() + seconds


def test_pieces_are_aligned_distinct_and_used_again():
    pool = StagingPool(PIECE, 2)
    with pool.lease(in_time(), "read", "x") as one, pool.lease(in_time(), "read", "x") as two:
        assert one.bytes == two.bytes == PIECE
        assert one.address % 4096 == two.address % 4096 == 0
        assert one.address != two.address
        assert pool.lent == 2
    assert pool.lent == 0
    assert pool.take(in_time(), "read", "x") in (one, two)


def test_whoever_finds_none_waits_until_the_deadline_or_a_return():
    pool = StagingPool(PIECE, 1)
    piece = pool.take(in_time(), "read", "x")
    assert pool.try_take() is None
    with pytest.raises(TransferTimeoutError):
        pool.take(in_time(0.02), "read", "x")
    got = []
    waiter = threading.Thread(target=lambda: got.append(pool.take(in_time(), "read", "x")))
    waiter.start()
    pool.give(piece)
    waiter.join(60)
    assert got == [piece]
    pool.give(piece)
    assert pool.try_take() is piece


def test_a_piece_that_cannot_be_prepared_is_not_counted():
    refuse = [True]

    def prepare(piece):
        if refuse:
            raise OSError(refuse.pop())

    pool = StagingPool(PIECE, 1, prepare=prepare)
    with pytest.raises(OSError, match="True"):
        pool.take(in_time(), "read", "x")
    assert until(lambda: pool.take(in_time(), "read", "x"))


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([10], [[(0, 0, 10, 0)]]),
        ([4, 6, 1, 9], [[(0, 0, 4, 0), (1, 0, 6, 4)], [(2, 0, 1, 0), (3, 0, 9, 1)]]),
        ([9, 2], [[(0, 0, 9, 0)], [(1, 0, 2, 0)]]),
        ([0, 0, 10, 0, 5], [[(2, 0, 10, 0)], [(4, 0, 5, 0)]]),
        ([25, 3], [[(0, 0, 10, 0)], [(0, 10, 10, 0)], [(0, 20, 5, 0), (1, 0, 3, 5)]]),
    ],
)
def test_windows_hold_what_fits_in_order(lengths, expected):
    """Pieces as (request, where in it, bytes, where in the window)."""
    found = windows(np.array(lengths, dtype=np.int64), 10)
    pieces = [[tuple(map(int, piece)) for piece in zip(*window, strict=True)] for window in found]
    assert pieces == expected


@pytest.mark.parametrize(("size", "count"), [(0, 1), (100, 1), (4096, 0)])
def test_impossible_pools_are_refused(size, count):
    with pytest.raises(InvalidArgumentError, match="staging pool"):
        StagingPool(size, count)
