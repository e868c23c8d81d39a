"""Puts of keys that somebody else is putting: they begin beside that, and overtake it once placed.

    beside = begin_beside(state, who, sizes, replicas, status, found, at, replacing)
    ... space and names are found for the rows in `found`, as for all others ...
    settle(state, beside, status)

A put that gets no room has taken nothing from anybody: until it is known to have space and a name,
its row stands in no table, tied to what the key names as a second generation is, and whatever it
is to overtake stays as it was. `settle` then lets go either the one or the other. All within one
request: nobody sees what is in between, but for eviction, which passes over rows that are tied, and
over puts that are flagged here, however late these are.

Cost: O(keys).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core.kernels import writes as k
from mooncake_store.core.records import Flag
from mooncake_store.core.space import writers_of
from mooncake_store.core.state import INT64, as_column

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.state import ShardState

__all__ = ["Beside", "Who", "begin_beside", "leaving_bytes", "settle"]

Who: TypeAlias = tuple[int, int, int]
"""Client, tenant, and the number of the request."""


@dataclass(frozen=True, slots=True)
class Beside:
    """Rows that began beside others, side by side in columns."""

    at: NDArray[np.int64]
    """Where their keys stand in the batch."""
    new: NDArray[np.int32]
    old: NDArray[np.int32]
    """What the keys name."""
    second: NDArray[np.int32]
    """The put that is under way beside what the key names, -1 where there is none."""
    replaces: NDArray[np.bool_]
    """Whether what the key names goes; else it stays readable until the new one is complete."""

    def leaving(self, chosen: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Return the rows that those of `chosen` have go, each once."""
        return np.concatenate([self.old[chosen & self.replaces], self.second[chosen & self._two]])

    def flagged(self, state: ShardState) -> NDArray[np.int32]:
        """Return the puts that are to be overtaken."""
        writing = state.rows["state"][self.old] == c.WRITING
        return np.concatenate([self.old[writing], self.second[self._two]])

    @property
    def _two(self) -> NDArray[np.bool_]:
        return self.second >= 0


def begin_beside(
    state: ShardState,
    who: Who,
    sizes: NDArray[np.int64],
    replicas: int,
    status: NDArray[np.int16],
    found: NDArray[np.int32],
    at: NDArray[np.int64],
    replacing: bool,
) -> Beside | None:
    """Open a hidden WRITING row for each key of the batch at `at`, which names a row of `found`.

    `replacing` says that complete objects are to go as well. None where nothing was begun.
    """
    if len(at) == 0:
        return None
    fresh = state.table.take_rows(len(at))
    got = fresh >= 0
    status[at] = np.where(got, c.OK, c.NO_SPACE)
    at, new = at[got], fresh[got]
    old = found[at]
    tied = (state.flags(old) & c.UPSERT) != 0
    second = np.where(tied, state.cold["twin"][old] - 1, -1).astype(np.int32)
    replaces = (state.rows["state"][old] == c.WRITING) | replacing
    begun = Beside(at, new, old, second, replaces)
    chosen_sizes = as_column(sizes[at], INT64)
    tallies = state.tally, state.tenant_use
    k.beside(state.rows, state.cold, old, new, chosen_sizes, state.now, who, replicas, *tallies)
    state.set_flag(begun.flagged(state), Flag.DOOMED)
    state.journal.mark(old, new)
    found[at] = new
    return begun


def leaving_bytes(
    state: ShardState, beside: Beside | None, tenant: int, count: int
) -> NDArray[np.int64]:
    """Return what leaves with each key of a batch once it is placed: (bytes, those pinned hard).

    Only what counts for a tenant.
    """
    out = np.zeros((2, count), np.int64)
    if beside is not None:
        for rows, some in ((beside.old, beside.replaces), (beside.second, beside.second >= 0)):
            gone, at = rows[some], beside.at[some]
            nbytes = state.rows["size"][gone] * state.rows["replicas"][gone]
            nbytes[state.cold["tenant"][gone] != tenant] = 0
            out[0, at] += nbytes
            out[1, at] += np.where(state.flags(gone) & c.HARD_PIN, nbytes, 0)
    return out


def settle(state: ShardState, beside: Beside | None, status: NDArray[np.int16]) -> None:
    """Let rows that found room overtake what was before them; the others are gone already."""
    if beside is None:
        return
    state.clear_flag(beside.flagged(state), Flag.DOOMED)
    placed = status[beside.at] == c.OK
    _tie_again(state, beside, ~placed)
    taking = placed & beside.replaces
    _tie_again(state, beside, taking)
    old, new = beside.old[taking], beside.new[taking]
    state.cold["twin"][new] = 0
    state.clear_flag(new, Flag.UPSERT)
    state.table.swap(old, new)
    second = beside.second[placed & ~beside.replaces & (beside.second >= 0)]
    state.cold["twin"][second] = 0
    state.clear_flag(second, Flag.UPSERT)
    state.journal.mark(new)
    _let_go(state, beside.leaving(placed))


def _tie_again(state: ShardState, beside: Beside, chosen: NDArray[np.bool_]) -> None:
    """Tie what keys name to what it was tied to before."""
    old, second = beside.old[chosen], beside.second[chosen]
    state.cold["twin"][old] = second + 1
    state.clear_flag(old, Flag.UPSERT)
    state.set_flag(old[second >= 0], Flag.UPSERT)
    state.journal.mark(old)


def _let_go(state: ShardState, rows: NDArray[np.int32]) -> None:
    """Dispose of what was overtaken; a writer among it may come and hear of that."""
    writers = writers_of(state.cold["owner"][rows], state.rows["generation"][rows])
    state.dispose(rows)
    for writer in writers.tolist():
        if writer in state.space.late:
            state.space.late[writer].overtaken = True
