"""Whose hard pins are: one client cannot take what all may pin."""

from __future__ import annotations

import pytest

from mooncake_store.core.records import Status
from tests.core.lab import MIB, Lab, digests_of

S = Status
SHARE, OF_ONE = 8, 6
"""Of objects of a mebibyte in a pool of 16: a half, and three quarters of that."""


def pinned(lab: Lab, keys: range, client: int, *, pin: bool = True) -> int:
    """How many of these objects a client has pinned, or unpinned, by that."""
    out = lab.shard.set_hard_pin(lab.now, digests_of(keys), pin, client)
    lab.check()
    assert set(out.tolist()) <= {S.OK, S.PINS_FULL}
    return out.tolist().count(S.OK)


@pytest.fixture
def lab() -> Lab:
    lab = Lab()
    lab.put(range(14), MIB)
    return lab


def test_others_can_pin_when_one_has_pinned_all_he_may(lab: Lab) -> None:
    other = lab.open(2)
    assert pinned(lab, range(14), lab.client) == OF_ONE
    assert pinned(lab, range(6, 14), other) == SHARE - OF_ONE
    assert pinned(lab, range(14), lab.client, pin=False) == 14
    assert pinned(lab, range(14), other) == OF_ONE, "nothing is left of what was unpinned"


def test_a_put_is_pinned_by_its_writer() -> None:
    lab = Lab()
    other = lab.open(2)
    first = lab.start(range(8), MIB, hard_pin=True)[0]["status"].tolist()
    assert first == [S.OK] * OF_ONE + [S.PINS_FULL] * 2
    second = lab.start(range(10, 13), MIB, hard_pin=True, client=other)[0]["status"].tolist()
    assert second == [S.OK] * 2 + [S.PINS_FULL]


def test_what_was_pinned_and_is_gone_counts_no_more(lab: Lab) -> None:
    assert pinned(lab, range(14), lab.client) == OF_ONE
    lab.remove(range(3))
    assert pinned(lab, range(3, 14), lab.client) == OF_ONE, "three are already"


def test_a_pinned_object_that_is_put_anew_stays_that_of_who_pinned_it(lab: Lab) -> None:
    other = lab.open(2)
    assert pinned(lab, range(OF_ONE), other) == OF_ONE
    lab.put(range(2), MIB, upsert=True)
    assert pinned(lab, range(8, 9), other) == 0
    assert pinned(lab, range(8, 10), lab.client) == 2


def test_pins_of_who_is_gone_are_nobody_s_and_not_those_of_his_heir(lab: Lab) -> None:
    gone = lab.open(2)
    assert pinned(lab, range(OF_ONE), gone) == OF_ONE
    lab.shard.close_client(lab.now, gone)
    lab.tick()
    assert lab.shard.pinned_of[gone] == 0
    assert lab.shard.pinned_of[0] == OF_ONE * MIB
    assert pinned(lab, range(6, 14), lab.client) == SHARE - OF_ONE
