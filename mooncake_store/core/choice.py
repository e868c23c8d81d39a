"""Which objects may leave a tier now, and what each of them frees: with groups, or plainly.

What has a reader may not, but for puts that wait until its lease has ended (`foresight_ns`). A
group leaves whole or not at all, and counts once. O(candidates).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core.kernels import scan as k
from mooncake_store.core.records import Flag, Tier

if TYPE_CHECKING:
    from eviction.base import EvictionPolicy, Pick
    from mooncake_store.core.state import ShardState

__all__ = ["Choice", "Filter", "plainly"]

Filter = Callable[[NDArray[np.int64]], NDArray[np.bool_]]
"""Says of rows which are meant."""


def plainly(state: ShardState, tier: Tier | None) -> Pick:
    """Return a choice in one kernel call: of objects anywhere, none of them in a group."""
    number, until = _number(state, tier), state.now + state.foresight_ns

    def pick(ids: NDArray[np.int64], wanted: int, room: int) -> tuple[NDArray[np.int32], int]:
        out = np.empty(len(ids), np.int32)
        count, total = k.choose(state.words, ids, until, number, wanted, room, out)
        return out[:count], total

    return pick


def _number(state: ShardState, tier: Tier | None) -> int:
    """Return a tier as kernels know it; where there is but one, nothing is looked at."""
    if tier is None or not state.numbers[places.BELOW_USED]:
        return int(k.ALL_TIERS)
    return int(tier)


class Choice:
    """What one pass may evict, and what it counts: a group counts once, as a whole."""

    def __init__(
        self,
        state: ShardState,
        policy: EvictionPolicy,
        tier: Tier | None,
        where: Filter | None,
    ) -> None:
        self._state = state
        self._number = _number(state, tier)
        self._until = state.now + state.foresight_ns
        self._soft = policy is state.soft_policy
        self._where = where
        self._groups: dict[int, bool] = {}
        self._counted: set[int] = set()

    def eligible(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Filter candidates of the policy."""
        state = self._state
        out = np.empty(len(ids), np.bool_)
        k.eligible(state.words, ids, self._until, self._number, out)
        if self._where is not None:
            out &= self._where(ids)
        if len(state.groups):
            for at in np.flatnonzero(out & ((state.rows["flags"][ids] & Flag.GROUPED) != 0)):
                out[at] = self._whole(state.groups.number(int(ids[at])))
        return out

    def _whole(self, number: int) -> bool:
        """Whether every member of a group may leave now."""
        if number not in self._groups:
            state = self._state
            members = np.array(list(state.groups.members(number)), np.int64)
            out = np.empty(len(members), np.bool_)
            k.eligible(state.words, members, self._until, k.ALL_TIERS, out)
            pinned = (state.rows["flags"][members] & Flag.SOFT_PIN) != 0
            self._groups[number] = bool(out.all()) and (self._soft or not pinned.any())
        return self._groups[number]

    def sizes(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bytes each id frees; a group's first member stands for all."""
        state = self._state
        out = np.empty(len(ids), np.int64)
        k.row_bytes(state.words, ids, self._number, out)
        if len(state.groups):
            for at in np.flatnonzero(state.rows["flags"][ids] & Flag.GROUPED):
                number = state.groups.number(int(ids[at]))
                out[at] = 0 if number in self._counted else self._group_bytes(number)
                self._counted.add(number)
        return out

    def _group_bytes(self, number: int) -> int:
        members = np.array(list(self._state.groups.members(number)), np.int64)
        out = np.empty(len(members), np.int64)
        k.row_bytes(self._state.words, members, self._number, out)
        return int(out.sum())

    def with_groups(self, victims: NDArray[np.int32]) -> NDArray[np.int32]:
        """Add the members of every group that a victim belongs to."""
        state = self._state
        if len(state.groups) == 0:
            return victims
        grouped = (state.flags(victims) & c.GROUPED) != 0
        numbers = {state.groups.number(int(row)) for row in victims[grouped]}
        members = [row for number in sorted(numbers) for row in state.groups.members(number)]
        return np.concatenate([victims[~grouped], np.array(members, np.int32)])
