"""Removal by key and by name, of whole objects or of single replicas, and changes of pins."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core.kernels import leases, scan
from mooncake_store.core.kernels import removal as k
from mooncake_store.core.kernels.reads import readable
from mooncake_store.core.options import SoftPin
from mooncake_store.core.patterns import compile_pattern
from mooncake_store.core.placing import pin_status
from mooncake_store.core.reads import replicas_of
from mooncake_store.core.records import KEYS_MAX, REPLICAS_REMOVED_MAX, Flag, State, Status
from mooncake_store.core.state import ShardState, as_words
from mooncake_store.core.tasks import drop_replica

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "find_readable",
    "pin",
    "remove",
    "remove_matching",
    "remove_replicas",
    "set_hard_pin",
    "set_soft_pins",
    "unpin",
]

KINDS = ("prefix", "glob", "regex", "all")


def remove(
    state: ShardState, digests: NDArray[np.uint64], force: bool = False, client: int = 0
) -> NDArray[np.int16]:
    """Remove objects; `force` also those leased or being written, space quarantined.

    Leases of the client that asks are in nobody's way; their space is quarantined as well.
    """
    n = len(digests)
    if n > KEYS_MAX:
        return np.full(n, Status.INVALID_PARAMS, np.int16)
    status, doomed = np.empty(n, np.int16), np.empty(n, np.int32)
    state.expect_disposal(n)
    count, flags, total = k.remove(
        state.words, client, state.now, force, as_words(digests), status, doomed
    )
    if total < 0:
        state.dispose_special(doomed[:count], flags)
    if len(state.hauls) and (status == Status.BUSY).any():
        # What the shard copies by itself is in nobody's way.
        busy = np.flatnonzero(status == Status.BUSY)
        rows = state.table.find(as_words(digests[busy]))
        state.hauls.let_go(rows)
        status[busy] = _remove_rows(state, client, rows, force)
    return status


def remove_replicas(
    state: ShardState, digests: NDArray[np.uint64], segment: int, client: int = 0
) -> NDArray[np.int16]:
    """Remove what lies on one segment of objects that no other client than this one reads.

    An object goes with its last replica. One replica fewer is wanted afterwards, or the repair
    would make the same again. Cold path: some microseconds of Python per key.
    """
    if len(digests) > REPLICAS_REMOVED_MAX:
        return np.full(len(digests), Status.INVALID_PARAMS, np.int16)
    found, status = find_readable(state, digests)
    for at in np.flatnonzero(status == Status.OK):
        row, digest = int(found[at]), digests[at : at + 1]
        status[at] = _remove_replica(state, client, row, digest, segment)
    return status


def _remove_replica(
    state: ShardState, client: int, row: int, digest: NDArray[np.uint64], segment: int
) -> Status:
    if state.rows["state"][row] != State.READABLE:
        return Status.NOT_FOUND  # the same key came earlier in the batch
    held = {s for s, _, _ in replicas_of(state, row) if not state.space.dead[s]}
    if segment not in held:
        return Status.REPLICA_NOT_FOUND
    if int(state.rows["flags"][row]) & c.TASK:
        state.hauls.let_go(np.array([row], np.int32))
    flags = int(state.rows["flags"][row])
    if held == {segment} or flags & (c.TASK | c.UPSERT):
        return Status(int(remove(state, digest, client=client)[0]))
    asked = state.rows, state.shared, row, client, state.now
    if leases.is_leased_to_others(*asked):
        return Status.HAS_LEASE
    wanted, left = int(state.cold["wanted"][row]), int(state.rows["replicas"][row]) - 1
    # The client may still read there under a lease of its own.
    drop_replica(state, row, segment, int(state.rows["lease_end"][row]))
    state.retier(np.array([row], np.int32))
    if wanted > left:
        state.cold["wanted"][row] = wanted - 1
        state.tally[c.MISSING] -= 1
    return Status.OK


def _remove_rows(
    state: ShardState, client: int, rows: NDArray[np.int32], force: bool
) -> NDArray[np.int16]:
    status, doomed = np.empty(len(rows), np.int16), np.empty(len(rows), np.int32)
    count = k.check_remove(state.words, client, state.now, force, rows, status, doomed)
    state.dispose(doomed[:count])
    return status


def remove_matching(
    state: ShardState,
    tenant: int,
    pattern: str,
    kind: str,
    force: bool = False,
    cursor: int = 0,
    rows_max: int = 65_536,
    client: int = 0,
) -> tuple[int, int]:
    """Remove the matching objects among the next `rows_max` rows.

    Returns how many went and the cursor to go on with, 0 when all rows were seen. What others
    lease, being written or copied is passed over. Raises ValueError for a pattern that is refused.
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind of pattern {kind!r}: use {', '.join(KINDS)}")
    wanted = compile_pattern(pattern, kind) if kind in ("glob", "regex") else None
    find = partial(scan.of_tenant, state.rows, state.cold)
    count = max(1, min(rows_max, KEYS_MAX))
    rows, following = state.scan(find, max(0, cursor), count, tenant)
    if kind == "prefix":
        rows = state.names.with_prefix(rows, pattern.encode())
    elif wanted is not None:
        rows = state.names.matching(rows, wanted)
    begun = state.now - state.config.put_discard_ns
    writing = (state.rows["state"][rows] == State.WRITING) & (state.rows["lease_end"][rows] > begun)
    rows = rows[~writing & ((state.flags(rows) & c.UPSERT) == 0)]
    state.hauls.let_go(rows)
    removed = int(np.count_nonzero(_remove_rows(state, client, rows, force) == Status.OK))
    if kind == "all" and removed and state.tenant_use[tenant, 1] == 0:
        state.events.cleared(tenant)
    return removed, following


def pin(
    state: ShardState, digests: NDArray[np.uint64], soft_pin: SoftPin, ttl_ns: int | None = None
) -> NDArray[np.int16]:
    """Set or clear the soft pin of readable objects."""
    found, status = find_readable(state, digests)
    rows = np.unique(found[status == Status.OK])
    if soft_pin == SoftPin.PRESERVE or len(rows) == 0:
        return status
    ttl = state.config.soft_pin_ttl_ns
    if ttl_ns is not None:
        ttl = max(0, min(ttl_ns, state.config.soft_pin_ttl_max_ns))
    if soft_pin == SoftPin.ENABLE and ttl > 0:
        set_soft_pins(state, rows, np.full(len(rows), state.now + ttl))
    else:
        unpin(state, rows[(state.flags(rows) & Flag.SOFT_PIN) != 0])
    return status


def set_soft_pins(
    state: ShardState,
    rows: NDArray[np.int32],
    ends: NDArray[np.int64],
    levels: NDArray[np.uint8] | int = 0,
) -> None:
    """Pin readable objects softly, in place of the soft pins they have.

    No row comes twice. One whose pin is prolonged is timed already, for when that would have
    ended: else whoever prolongs a pin all day would leave an entry behind each time.
    """
    pinned = (state.flags(rows) & Flag.SOFT_PIN) != 0
    prolonged = pinned & (state.pin_ends[rows] <= ends)
    unpin(state, rows[pinned])
    state.journal.mark(rows)
    state.set_flag(rows, Flag.SOFT_PIN)
    state.pin_ends[rows] = ends
    state.cold["pin_level"][rows] = levels
    state.words[places.PINS_USED] = 1
    state.tally[c.SOFT_PINNED] += len(rows)
    plain = rows[(state.flags(rows) & Flag.HARD_PIN) == 0]
    state.leave_order(plain)
    state.soft_policy.insert(plain)
    state.time_soft_pins(rows[~prolonged])


def unpin(state: ShardState, rows: NDArray[np.int32]) -> None:
    """Clear soft pins; the objects become the hottest of the ordinary ones."""
    if len(rows) == 0:
        return
    state.journal.mark(rows)
    state.clear_flag(rows, Flag.SOFT_PIN)
    state.pin_ends[rows] = 0
    state.cold["pin_level"][rows] = 0
    state.tally[c.SOFT_PINNED] -= len(rows)
    plain = rows[(state.flags(rows) & Flag.HARD_PIN) == 0]
    state.hand_on_notes()
    state.soft_policy.remove(plain)
    state.enter_order(plain)


def set_hard_pin(
    state: ShardState, digests: NDArray[np.uint64], pinned: bool, client: int = 0
) -> NDArray[np.int16]:
    """Set or clear the hard pin of readable objects, within what all and a client may have."""
    found, status = find_readable(state, digests)
    state.hand_on_notes()
    for at in np.flatnonzero(status == Status.OK):
        row = int(found[at])
        one = np.array([row], np.int32)
        flags = int(state.rows["flags"][row])
        if bool(flags & Flag.HARD_PIN) == pinned:
            continue
        nbytes = int(state.rows["size"][row]) * int(state.rows["replicas"][row])
        if pinned and (refused := pin_status(state, client, nbytes)):
            status[at] = refused
            continue
        state.journal.mark(row)
        state.rows["flags"][row] = flags ^ Flag.HARD_PIN
        if pinned:
            state.pinner[row] = client
        state.count_pinned(row, nbytes if pinned else -nbytes)
        if pinned:
            state.leave_order(one)
            state.soft_policy.remove(one)
        elif flags & Flag.SOFT_PIN:
            state.soft_policy.insert(one)
        else:
            state.enter_order(one)
    return status


def find_readable(
    state: ShardState, digests: NDArray[np.uint64]
) -> tuple[NDArray[np.int32], NDArray[np.int16]]:
    """Find rows, and say of each key whether it is readable."""
    n = len(digests)
    if n > KEYS_MAX:
        return np.full(n, -1, np.int32), np.full(n, Status.INVALID_PARAMS, np.int16)
    found = state.table.find(as_words(digests))
    there = np.empty(n, np.bool_)
    readable(state.words, found, there)
    status = np.where(there, Status.OK, Status.NOT_FOUND).astype(np.int16)
    writing = (found >= 0) & ~there
    writing[writing] = state.rows["state"][found[writing]] == State.WRITING
    status[writing] = Status.NOT_READY
    return found, status
