"""What the invariants are checked with notices each of the ways in which space is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mooncake_store.core import integrity
from tests.core.lab import Lab

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.core.state import ShardState


def _share_an_offset(state: ShardState) -> None:
    state.rows["offset_low"][1] = state.rows["offset_low"][0]


def _leave_the_segment(state: ShardState) -> None:
    state.rows["offset_high"][0] = 1 << 8


def _name_a_segment_that_is_not_there(state: ShardState) -> None:
    state.rows["segment"][0] = 77


def _lie_twice_on_one_segment(state: ShardState) -> None:
    state.overflow["segment"][state.rows["more"][0]] = state.rows["segment"][0]


def _miscount(state: ShardState) -> None:
    state.rows["replicas"][0] += 1


def _form_a_ring(state: ShardState) -> None:
    link = state.rows["more"][0]
    state.overflow["next"][link] = link


def _forget_a_replica(state: ShardState) -> None:
    state.rows["more"][0] = -1
    state.rows["replicas"][0] = 1


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (_share_an_offset, "overlap"),
        (_leave_the_segment, "after its segment"),
        (_name_a_segment_that_is_not_there, "forgotten"),
        (_lie_twice_on_one_segment, "twice"),
        (_miscount, "miscounts"),
        (_form_a_ring, "ring"),
        (_forget_a_replica, "allocations"),
    ],
)
def test_damage_to_the_space_is_noticed(
    damage: Callable[[ShardState], None], complaint: str
) -> None:
    lab = Lab(segments=2)
    lab.put(range(2), replicas=2)
    state = lab.shard
    integrity.check(state)
    damage(state)
    with pytest.raises(AssertionError, match=complaint):
        integrity.check(state)
