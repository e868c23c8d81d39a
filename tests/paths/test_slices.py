"""Slices: every byte once, at the place it belongs, in runs of about the size asked for."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from transfer_engine.paths.slices import cut, fold


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 5000), max_size=40), slice_bytes=st.integers(1, 6000))
def test_pieces_are_the_requests(lengths, slice_bytes):
    sizes = np.array(lengths, dtype=np.int64)
    offsets = np.arange(sizes.size) * 10_000 + 7
    addresses = np.arange(sizes.size) * 20_000 + 3
    made = cut(offsets, sizes, addresses, slice_bytes)
    at = 0
    for number, length in enumerate(lengths):
        assert made.firsts[number] == at
        done = 0
        while done < length or (length == 0 and done == 0):
            assert made.offsets[at] == offsets[number] + done
            assert made.addresses[at] == addresses[number] + done
            # A tail of up to a quarter may be added to a piece.
            assert made.lengths[at] <= slice_bytes + slice_bytes // 4
            done += int(made.lengths[at])
            at += 1
            if length == 0:
                break
        assert done == length
    assert at == made.offsets.size


@settings(max_examples=200, deadline=None)
@given(lengths=st.lists(st.integers(0, 5000), max_size=40), slice_bytes=st.integers(1, 6000))
def test_slices_are_runs_of_pieces_of_about_the_size(lengths, slice_bytes):
    sizes = np.array(lengths, dtype=np.int64)
    zeros = np.zeros_like(sizes)
    made = cut(zeros, sizes, zeros, slice_bytes)
    assert made.sizes.sum() == sizes.sum()
    assert made.bounds.tolist() == sorted(set(made.bounds.tolist()))
    assert len(made) == made.bounds.size - 1
    assert len(made) == 0 or made.bounds[0] == 0
    assert made.bounds[-1] == made.lengths.size
    for number in range(len(made)):
        run = made.lengths[made.bounds[number] : made.bounds[number + 1]]
        assert run.sum() == made.sizes[number]
        assert run[:-1].sum() <= slice_bytes
        assert run.sum() <= 2.25 * slice_bytes


def test_one_long_request_is_cut_and_its_short_tail_stays():
    one = np.array([1050])
    made = cut(np.array([5]), one, np.array([9]), 100)
    assert made.lengths.tolist() == [100] * 10 + [50]
    assert cut(one, np.array([1025]), one, 100).lengths.tolist() == [100] * 9 + [125]
    assert made.sizes.tolist() == made.lengths.tolist()


def test_the_worst_piece_decides():
    made = cut(np.arange(3), np.array([250, 0, 90]), np.arange(3), 100)
    assert made.lengths.tolist() == [100, 100, 50, 0, 90]
    pieces = np.array([0, -5, 0, 0, -902], dtype=np.int32)
    assert fold(made, pieces).tolist() == [-5, 0, -902]
    empty = np.zeros(0, dtype=np.int64)
    assert fold(cut(empty, empty, empty, 10), np.zeros(0, np.int32)).size == 0


def test_slices_of_nothing_are_refused():
    empty = np.zeros(0, dtype=np.int64)
    with pytest.raises(ValueError, match="0 bytes"):
        cut(empty, empty, empty, 0)
