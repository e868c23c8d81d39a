"""Renaming: an object gets another key, and nothing else of it changes.

The row stays where it is, and with it the bytes, the generation, leases, pins, group and place in
the eviction order; only the table's entry and the name are new. So it costs the same whatever the
size, and readers under a lease of the old key go on undisturbed.

A key that is in the way is replaced if that is asked for, under the rules of a removal. Pairs take
effect one after the other, each whole: O(1) expected per pair, in Python, because this is rare.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core.kernels import leases
from mooncake_store.core.kernels import removal as k
from mooncake_store.core.kernels.reads import readable
from mooncake_store.core.records import RENAMES_MAX, Status
from mooncake_store.core.state import as_words

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.core.names import Names
    from mooncake_store.core.state import ShardState

__all__ = ["rename"]


def rename(
    state: ShardState,
    sources: NDArray[np.uint64],
    targets: NDArray[np.uint64],
    names: Names | None = None,
    overwrite: bool = False,
    force: bool = False,
    client: int = 0,
) -> NDArray[np.int16]:
    """Give readable objects other keys of the same tenant, pair by pair, in order.

    Bytes, generation, leases, pins and group stay. What a new key names is in the way unless
    `overwrite` replaces it; `force` overrides leases of both, and a put under the new key.
    Leases of the client that asks are in nobody's way.
    """
    n = len(sources)
    if n > RENAMES_MAX or len(targets) != n or not _sound(names, n):
        return np.full(n, Status.INVALID_PARAMS, np.int16)
    old, new = as_words(sources), as_words(targets)
    status = np.zeros(n, np.int16)
    start = 0
    for at in range(n):
        length = 0 if names is None else int(names.lengths[at])
        name = b"" if names is None else bytes(names.blob[start : start + length])
        start += length
        if length > c.NAME_BYTES_MAX:
            status[at] = Status.INVALID_KEY
        else:
            pair = old[at : at + 1], new[at : at + 1]
            status[at] = _rename(state, client, *pair, name, overwrite, force)
    return status


def _sound(names: Names | None, n: int) -> bool:
    if names is None:
        return True
    return len(names.lengths) == n and int(np.add.reduce(names.lengths)) == len(names.blob)


def _rename(
    state: ShardState,
    client: int,
    old: NDArray[np.int64],
    new: NDArray[np.int64],
    name: bytes,
    overwrite: bool,
    force: bool,
) -> int:
    found = state.table.find(old)
    row = int(found[0])
    state.hauls.let_go(found)
    refusal = _movable(state, client, found, force)
    if refusal != c.OK or np.array_equal(old, new):
        return refusal
    if not state.names.has_room(row, len(name)):
        return c.NO_SPACE
    other = state.table.find(new)
    if other[0] >= 0:
        refusal = _clear(state, client, other, overwrite, force)
        if refusal != c.OK:
            return refusal
    state.events.removed(state.rows, state.cold, row)
    state.table.rename(row, int(new[0, 0]), int(new[0, 1]))
    state.names.replace(row, name)
    state.journal.mark(row)
    state.events.stored(state.rows, state.cold, row)
    return c.OK


def _movable(state: ShardState, client: int, found: NDArray[np.int32], force: bool) -> int:
    """Whether the object behind a key may get another one."""
    there = np.empty(1, np.bool_)
    readable(state.words, found, there)
    row = int(found[0])
    if row < 0:
        return c.NOT_FOUND
    record = state.rows[row]
    if int(record["flags"]) & c.TASK:
        return c.BUSY
    if int(record["state"]) == c.WRITING or int(record["flags"]) & c.UPSERT:
        return c.NOT_READY
    if not there[0]:
        return c.NOT_FOUND
    asked = state.rows, state.shared, row, client, state.now
    if not force and leases.is_leased_to_others(*asked):
        return c.HAS_LEASE
    return c.OK


def _clear(
    state: ShardState, client: int, other: NDArray[np.int32], overwrite: bool, force: bool
) -> int:
    """Remove what the new key names, under the rules of a removal: its readers finish reading."""
    there = np.empty(1, np.bool_)
    readable(state.words, other, there)
    if there[0] and not overwrite:
        return c.ALREADY_EXISTS
    state.hauls.let_go(other)
    status, doomed = np.empty(1, np.int16), np.empty(1, np.int32)
    if k.check_remove(state.words, client, state.now, force, other, status, doomed):
        # No event: the one of the renamed object follows and says what the key names now.
        state.dispose(doomed, silently=True)
    return int(status[0])
