"""The wheel: everything comes due once, earliest slots first, however few are taken at a time."""

from __future__ import annotations

import numpy as np
import pytest

from mooncake_store.core.wheel import SLOT_NS, Wheel


@pytest.mark.parametrize("limit", [1, 3, 7, 100])
def test_a_bounded_pop_leaves_the_rest_in_order(limit: int) -> None:
    wheel = Wheel(1)
    for slot in (5, 2, 9, 2):
        entries = np.array([[slot], [slot], [slot]], np.int64)
        wheel.add(np.full(3, slot * SLOT_NS), entries)
    taken: list[int] = []
    while (due := wheel.pop(5 * SLOT_NS, limit)) is not None:
        assert 0 < len(due) <= limit
        taken += due[:, 0].tolist()
        assert len(wheel) == 12 - len(taken)
    assert taken == [2] * 6 + [5] * 3
    rest = wheel.pop(9 * SLOT_NS, 100)
    assert rest is not None
    assert rest[:, 0].tolist() == [9] * 3
    assert wheel.pop(100 * SLOT_NS, 100) is None


def test_what_was_taken_does_not_come_due() -> None:
    wheel = Wheel(2)
    for slot in (1, 1, 2):
        entries = np.array([[slot, 5], [slot, 6], [slot, 7]], np.int64)
        wheel.add(np.full(3, slot * SLOT_NS), entries)
    assert wheel.take({SLOT_NS, 9 * SLOT_NS}, 1, np.array([5, 7])).tolist() == [[1, 5], [1, 7]] * 2
    assert wheel.take({2 * SLOT_NS - 1}, 1, np.array([5, 6, 7]))[:, 1].tolist() == [5, 6, 7]
    assert wheel.take(set(), 1, np.array([6])).tolist() == []
    assert len(wheel) == 2
    due = wheel.pop(2 * SLOT_NS, 100)
    assert due is not None
    assert due.tolist() == [[1, 6], [1, 6]]
    assert wheel.pop(2 * SLOT_NS, 100) is None


def test_a_slot_of_which_all_was_taken_is_nothing_due() -> None:
    wheel = Wheel(1)
    wheel.add(np.full(1, SLOT_NS), np.array([[1]], np.int64))
    assert len(wheel.take({SLOT_NS}, 0, np.array([1]))) == 1
    assert wheel.pop(SLOT_NS, 100) is None
    assert not wheel.due(SLOT_NS)


def test_what_was_discarded_does_not_count() -> None:
    wheel = Wheel(1)
    wheel.add(np.full(4, SLOT_NS), np.array([[1], [2], [1], [2]], np.int64))
    wheel.add(np.full(2, SLOT_NS), np.array([[1], [1]], np.int64))
    wheel.discard(0, 1)
    due = wheel.pop(SLOT_NS, 3)
    assert due is not None
    assert due[:, 0].tolist() == [2, 2]
    assert len(wheel) == 0
