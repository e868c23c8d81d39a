"""Puts that were begun and whose answer was lost: who asks again is told the same once more.

An unfinished put belongs to a client and carries the number of the request that began it, from a
counter of that client's. So a request that is sent a second time, because its connection was lost
with the answer, finds what it began and goes on with that: the same generations and places. Without
that the key would wait for a writer that does not know that it is one.

Only the client may ask so that had no answer: two that write to one place would mix their bytes.
Cost: O(keys), once per lost answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core.kernels import writes as k
from mooncake_store.core.records import PUT_ROW, REPLICA, Status
from mooncake_store.core.state import ShardState, as_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["put_begun"]


def put_begun(
    state: ShardState,
    client: int,
    digests: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    request: int,
    upsert: bool = False,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return what a client's request has begun, as `put_start` or `upsert_start` answered it.

    Keys of which it began nothing are answered NO_SPACE: they are to be begun.
    """
    found = _unfinished(state, state.table.find(as_words(digests)))
    begun = _begun_by(state, client, request, found)
    status = np.full(len(digests), Status.NO_SPACE, np.int16)
    status[begun] = Status.SUPERSEDED if upsert else Status.ALREADY_EXISTS
    # Of equal keys in a batch a put begins the first, an upsert the last.
    fitting = np.flatnonzero(begun & (state.rows["size"][found] == sizes))
    if upsert:
        fitting = fitting[::-1]
    _, first = np.unique(found[fitting], return_index=True)
    status[fitting[first]] = Status.OK
    told = found[status == Status.OK]
    answers = np.empty(len(digests), PUT_ROW)
    replicas = np.empty(int(state.rows["replicas"][told].sum(dtype=np.int64)), REPLICA)
    k.put_reply(state.rows, state.overflow, found, status, answers, replicas)
    return answers, replicas


def _unfinished(state: ShardState, found: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the row where the put of each key would be, were one under way; -1: nowhere."""
    beside = np.flatnonzero((found >= 0) & ((state.flags(found) & c.UPSERT) != 0))
    beside = beside[state.rows["state"][found[beside]] == c.READABLE]
    found[beside] = state.cold["twin"][found[beside]] - 1
    return found


def _begun_by(
    state: ShardState, client: int, request: int, found: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Say of which rows a request of a client has begun the put that is under way."""
    rows = state.rows
    mine = (found >= 0) & (rows["state"][found] == c.WRITING) & (request != 0)
    mine &= state.cold["owner"][found] == client
    begun: NDArray[np.bool_] = mine & (rows["checksum"][found].view(np.int64) == request)
    return begun
