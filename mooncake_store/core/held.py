"""What readers hold: how much of it may be held for long, and who holds most.

Leases of up to `lease_ttl` are granted always: a put that waits has objects under such ones leave,
and gets their space when these end (`pressure.make_way`). Longer ones, and hard pins, are what it
would have to wait for, so these two leave `writers_share` of the memory alone. Of that of long
leases one client may take half. Who asks for one that has no share left gets an ordinary one, and
is told so: its bytes stay what they are for the time it was told.

Grants are added up as they are made, which costs the get of an ordinary lease one comparison;
what ended is found by the sweep, O(rows seen) a tick, so what is shared out is never too much.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core.kernels import leases
from mooncake_store.core.records import Tier
from mooncake_store.core.state import CLIENTS_MAX
from mooncake_store.core.totals import Leased

if TYPE_CHECKING:
    from mooncake_store.core.state import ShardState

__all__ = ["HeldBytes"]

SHARE_OF_ONE = 2
"""A client may have one in so many of the bytes that may be leased for long."""


class HeldBytes:
    """Adds up what is leased, in steps of the sweep."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._bytes, self._ends = np.zeros((2, CLIENTS_MAX), np.int64)  # by client

    def share_out(self) -> None:
        """Say how much may be leased for long, of the memory there is now. O(segments).

        What waits in the quarantine is taken off: much of it was under long leases.
        """
        state = self._state
        config, tier = state.config, state.space.homes.first_tier()
        share = max(0.0, 1 - config.hard_pin_share - config.writers_share)
        most = int(share * state.space.total_bytes(tier))
        most -= sum(s.quarantined for s in state.space.all() if s.tier == tier)
        state.words[places.LONG_MOST] = max(0, most)
        state.words[places.LONG_MOST_OF_ONE] = max(0, most) // SHARE_OF_ONE
        state.words[places.UNSHARED] = c.OFF_MEMORY if tier == Tier.MEMORY else 0

    def add_up(self, start: int, cursor: int) -> None:
        """Count what is leased among the rows just seen, and tell of all at the end of a sweep."""
        state = self._state
        count = state.handles_used + 1  # of the numbers that clients have had
        leased, ends, long_of = self._bytes[:count], self._ends[:count], state.long_of[:count]
        if start == 0:
            leased[:] = ends[:] = 0
            long_of[:, 1:] = 0
            state.words[places.LONG_BEHIND] = 0
        span = np.array([start, cursor or state.table.rows_high, state.now], np.int64)
        columns = state.rows, state.shared, state.closed
        leases.survey(state.words, *columns, span, self._bytes, self._ends)
        state.words[places.SWEPT] = cursor
        if cursor == 0:
            long_of[:, 0] = long_of[:, 1] + long_of[:, 2]
            state.words[places.LONG] = state.words[places.LONG_BEHIND] + long_of[:, 2].sum()
            first = 1 + int(leased[1:].argmax()) if count > 1 else 0
            known = state.client_by_handle.get(first)
            state.leased = Leased(int(leased.sum()), of=leased.copy())
            if known is not None:
                found = int(leased[first]), known.host, int(ends[first])
                state.leased = Leased(int(leased.sum()), *found, leased.copy())
