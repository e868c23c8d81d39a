"""Puts: start (claim rows, find space), end, revoke, and upserts beside a readable generation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mooncake_store.core import _kernels_objects as k
from mooncake_store.core import pressure
from mooncake_store.core.names import NAME_BYTES_MAX, Names
from mooncake_store.core.options import PutOptions, SoftPin
from mooncake_store.core.records import (
    BATCH_MAX,
    PUT_ROW,
    REPLICA,
    SIZE_MAX,
    Flag,
    State,
    Status,
)
from mooncake_store.core.state import ShardState, as_words

__all__ = ["put_end", "put_revoke", "put_start", "upsert_start"]

REPLICAS_MAX = 64
DISABLE_PIN = -1
"""In `pin_ends` of a second generation: do not inherit the soft pin."""


def put_start(
    state: ShardState,
    client: int,
    tenant: int,
    digests: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    names: Names | None,
    options: PutOptions,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Begin objects that do not exist yet; see `Shard.put_start`."""
    status = _refusals(state, client, tenant, len(digests), sizes, names, options)
    if status is None:
        return _all_refused(len(digests), _why_whole(state, client, tenant))
    words = as_words(digests)
    found, inserted = _claim(state, tenant, words, sizes, status)
    late = np.flatnonzero(status == k.RETRY)
    if len(late):
        _clear_and_claim(state, tenant, words, sizes, status, found, inserted, late)
    return _fill(state, client, tenant, found, sizes, names, options, status)


def upsert_start(
    state: ShardState,
    client: int,
    tenant: int,
    digests: NDArray[np.uint64],
    sizes: NDArray[np.int64],
    names: Names | None,
    options: PutOptions,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Begin new generations; a readable one stays readable until its successor is complete."""
    status = _refusals(state, client, tenant, len(digests), sizes, names, options)
    if status is None:
        return _all_refused(len(digests), _why_whole(state, client, tenant))
    words = as_words(digests)
    _, first = np.unique(words, axis=0, return_index=True)
    repeated = np.ones(len(words), np.bool_)
    repeated[first] = False
    status[repeated & (status == Status.OK)] = Status.ALREADY_EXISTS
    _preempt(state, words, status)
    found, inserted = _claim(state, tenant, words, sizes, status, upsert=True)
    beside = np.flatnonzero(status == Status.ALREADY_EXISTS)
    beside = beside[~repeated[beside]]
    if len(beside):
        _second_generations(state, tenant, sizes, status, found, beside)
    return _fill(state, client, tenant, found, sizes, names, options, status)


def _refusals(
    state: ShardState,
    client: int,
    tenant: int,
    n: int,
    sizes: NDArray[np.int64],
    names: Names | None,
    options: PutOptions,
) -> NDArray[np.int16] | None:
    """Check the arguments of a put: a status per key, or None when the whole batch is refused."""
    bad_shape = (
        n > BATCH_MAX
        or len(sizes) != n
        or (names is not None and len(names.lengths) != n)
        or (names is not None and int(names.lengths.sum(dtype=np.int64)) != len(names.blob))
        or (options.groups is not None and len(options.groups) != n)
        or not 1 <= options.replicas <= REPLICAS_MAX
        or not 1 <= options.replicas_min <= options.replicas
    )
    if bad_shape or client not in state.client_by_handle or tenant not in state.tenant_by_number:
        return None
    status = np.zeros(n, np.int16)
    status[(sizes <= 0) | (sizes >= SIZE_MAX)] = Status.INVALID_PARAMS
    if names is not None:
        status[names.lengths > NAME_BYTES_MAX] = Status.INVALID_KEY
    return status


def _why_whole(state: ShardState, client: int, tenant: int) -> Status:
    if client not in state.client_by_handle:
        return Status.CLIENT_NOT_FOUND
    if tenant not in state.tenant_by_number:
        return Status.TENANT_NOT_REGISTERED
    return Status.INVALID_PARAMS


def _all_refused(n: int, status: Status) -> tuple[NDArray[Any], NDArray[Any]]:
    answers = np.zeros(n, PUT_ROW)
    answers["status"] = status
    return answers, np.empty(0, REPLICA)


def _claim(
    state: ShardState,
    tenant: int,
    words: NDArray[np.int64],
    sizes: NDArray[np.int64],
    status: NDArray[np.int16],
    *,
    upsert: bool = False,
) -> tuple[NDArray[np.int32], NDArray[np.bool_]]:
    """Give every acceptable key a row in state WRITING; `status` tells what became of it."""
    found, inserted = state.table.find_or_insert(words, status == Status.OK)
    discard = 0 if upsert else state.config.put_discard_ns
    times = np.array([state.now, discard], np.int64)
    k.claim(
        state.rows,
        state.overflow,
        state.space.alive,
        found,
        inserted,
        sizes,
        times,
        tenant,
        state.tally,
        status,
    )
    state.tenant_use[tenant, 1] += np.count_nonzero(inserted)
    return found, inserted


def _clear_and_claim(
    state: ShardState,
    tenant: int,
    words: NDArray[np.int64],
    sizes: NDArray[np.int64],
    status: NDArray[np.int16],
    found: NDArray[np.int32],
    inserted: NDArray[np.bool_],
    late: NDArray[np.int64],
) -> None:
    """Pre-empt late writers and objects without a living replica, then claim their keys."""
    state.dispose(np.unique(found[late]))
    again = np.zeros(len(late), np.int16)
    rows, new = _claim(state, tenant, words[late], sizes[late], again)
    found[late], inserted[late], status[late] = rows, new, again


def _preempt(state: ShardState, words: NDArray[np.int64], status: NDArray[np.int16]) -> None:
    """Clear away unfinished writers of these keys, and objects without a living replica."""
    found = state.table.find(words)
    asked = np.flatnonzero((found >= 0) & (status == Status.OK))
    rows = found[asked]
    if len(rows) == 0:
        return
    living = np.empty(len(rows), np.bool_)
    k.readable(state.rows, state.overflow, state.space.alive, rows, living)
    flags = state.flags(rows)
    busy = living & ((flags & Flag.TASK) != 0)
    status[asked[busy]] = Status.BUSY
    running = rows[living & ((flags & Flag.UPSERT) != 0)]
    twins = state.twins[running] - 1
    state.dispose(np.concatenate([rows[~living], twins.astype(np.int32)]))


def _second_generations(
    state: ShardState,
    tenant: int,
    sizes: NDArray[np.int64],
    status: NDArray[np.int16],
    found: NDArray[np.int32],
    beside: NDArray[np.int64],
) -> None:
    """Make a hidden WRITING row for each readable object of `beside`."""
    fresh = state.table.take_rows(len(beside))
    old = found[beside]
    got = fresh >= 0
    status[beside] = np.where(got, Status.OK, Status.NO_SPACE)
    old, new = old[got], fresh[got]
    rows = state.rows
    for name in ("digest_lo", "digest_hi"):
        rows[name][new] = rows[name][old]
    rows["state"][new] = 0
    again = np.zeros(len(new), np.int16)
    k.claim(
        rows,
        state.overflow,
        state.space.alive,
        new,
        np.ones(len(new), np.bool_),
        np.ascontiguousarray(sizes[beside[got]]),
        np.array([state.now, 0], np.int64),
        tenant,
        state.tally,
        again,
    )
    state.tenant_use[tenant, 1] += len(new)
    state.set_flag(new, Flag.UPSERT)
    state.set_flag(old, Flag.UPSERT)
    state.twins[new] = old + 1
    state.twins[old] = new + 1
    found[beside[got]] = new


def _fill(
    state: ShardState,
    client: int,
    tenant: int,
    found: NDArray[np.int32],
    sizes: NDArray[np.int64],
    names: Names | None,
    options: PutOptions,
    status: NDArray[np.int16],
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Find space for claimed rows, give up those without, and compose the answer."""
    accepted = np.flatnonzero(status == Status.OK)
    rows = found[accepted]
    if len(rows):
        _mark(state, client, rows, accepted, options, tenant)
        failed = _place(state, client, tenant, rows, sizes[accepted], options)
        bad = failed != Status.OK
        if bad.any():
            status[accepted[bad]] = failed[bad]
            state.dispose(rows[bad], writer_done=True)
        if names is not None and len(names.blob):
            keep = np.where(status == Status.OK, found, -1).astype(np.int32)
            state.names.store(keep, names)
    answers = np.empty(len(found), PUT_ROW)
    replicas = np.empty(len(found) * options.replicas, REPLICA)
    m = k.put_reply(state.rows, state.overflow, found, status, answers, replicas)
    return answers, replicas[:m]


def _mark(
    state: ShardState,
    client: int,
    rows: NDArray[np.int32],
    accepted: NDArray[np.int64],
    options: PutOptions,
    tenant: int,
) -> None:
    """Write what the options say into the columns of new rows."""
    state.owners[rows] = client
    state.created[rows] = state.now // 1_000_000_000
    state.hits[rows] = 0
    state.wanted[rows] = options.replicas
    state.pin_ends[rows] = 0
    if options.hard_pin:
        state.set_flag(rows, Flag.HARD_PIN)
    if options.soft_pin == SoftPin.DISABLE:
        state.pin_ends[rows] = DISABLE_PIN
    elif options.soft_pin == SoftPin.ENABLE:
        ttl = state.config.soft_pin_ttl_ns
        if options.soft_pin_ttl_ns is not None:
            ttl = min(options.soft_pin_ttl_ns, state.config.soft_pin_ttl_max_ns)
        if ttl > 0:
            state.set_flag(rows, Flag.SOFT_PIN)
            state.pin_ends[rows] = ttl  # counts from the moment the object is readable
    if options.groups is not None:
        for row, at in zip(rows.tolist(), accepted.tolist(), strict=True):
            if options.groups[at]:
                state.groups.add(row, tenant, options.groups[at])
                state.set_flag(row, Flag.GROUPED)


def _place(
    state: ShardState,
    client: int,
    tenant: int,
    rows: NDArray[np.int32],
    sizes: NDArray[np.int64],
    options: PutOptions,
) -> NDArray[np.int16]:
    """Allocate and attach replicas; evict and try again where there is no room."""
    result = _within_limits(state, tenant, sizes, options)
    todo = np.flatnonzero(result == Status.OK)
    order = state.space.order(state.now, options, state.client_by_handle[client].host)
    spread = not options.preferred
    for attempt in range(pressure.ATTEMPTS_MAX):
        got = state.space.place(order, sizes[todo], options.replicas, spread)
        enough = got.counts >= options.replicas_min
        for replica in range(options.replicas):
            some = enough & (got.counts > replica)
            k.attach(
                state.rows,
                state.overflow,
                rows[todo[some]],
                np.ascontiguousarray(got.segments[some, replica]),
                np.ascontiguousarray(got.offsets[some, replica]),
                state.tally,
                state.tenant_use,
            )
        if enough.all():
            return result
        for replica in range(options.replicas):
            some = ~enough & (got.counts > replica)
            state.space.free(
                got.segments[some, replica].astype(np.int64), got.offsets[some, replica]
            )
        todo = todo[~enough]
        needed = int(sizes[todo].sum()) * options.replicas_min
        if not pressure.make_room(state, order, needed, attempt):
            break
    result[todo] = Status.NO_SPACE
    return result


def _within_limits(
    state: ShardState, tenant: int, sizes: NDArray[np.int64], options: PutOptions
) -> NDArray[np.int16]:
    """Refuse what a tenant's quota or the share of hard pins does not allow, in order."""
    result = np.zeros(len(sizes), np.int16)
    ahead = np.cumsum(sizes) * options.replicas
    quota = state.tenant_by_number[tenant].quota_bytes
    if quota is not None:
        over = int(state.tenant_use[tenant, 0]) + int(ahead[-1]) - quota
        if over > 0:
            pressure.evict_tenant(state, tenant, over)
        result[ahead > quota - int(state.tenant_use[tenant, 0])] = Status.TENANT_QUOTA
    if options.hard_pin:
        room = int(state.config.hard_pin_share * state.space.total_bytes())
        result[(result == Status.OK) & (ahead > room - int(state.tally[k.HARD_BYTES]))] = (
            Status.NO_SPACE
        )
    return result


def put_end(
    state: ShardState,
    client: int,
    digests: NDArray[np.uint64],
    generations: NDArray[np.uint32],
    checksums: NDArray[np.uint64],
) -> NDArray[np.int16]:
    """Make written objects readable; see `Shard.put_end`."""
    n = len(digests)
    if n > BATCH_MAX or len(generations) != n or len(checksums) != n:
        return np.full(n, Status.INVALID_PARAMS, np.int16)
    found = state.table.find(as_words(digests))
    status, done = np.empty(n, np.int16), np.empty(n, np.int32)
    count = k.complete(
        state.rows,
        state.owners,
        state.twins,
        found,
        generations,
        checksums,
        np.array([state.now, client], np.int64),
        state.pin_ends,
        state.tally,
        status,
        done,
    )
    state.become_readable(done[:count])
    swaps = np.flatnonzero(status == k.SWAP)
    for at in swaps:
        if state.rows["flags"][found[at]] & Flag.UPSERT:  # not a repetition within the batch
            _swap_in(state, int(found[at]))
        status[at] = Status.OK
    return status


def _swap_in(state: ShardState, old: int) -> None:
    """Let the complete second generation of `old` take its place."""
    rows, new = state.rows, int(state.twins[old]) - 1
    state.twins[old] = state.twins[new] = 0
    inherited = rows["flags"][old] & Flag.HARD_PIN
    state.clear_flag(old, Flag.UPSERT)
    if inherited and not rows["flags"][new] & Flag.HARD_PIN:
        state.set_flag(new, Flag.HARD_PIN)
        state.tally[k.HARD_BYTES] += int(rows["size"][new]) * int(rows["replicas"][new])
    asked = int(state.pin_ends[new])
    if rows["flags"][new] & Flag.SOFT_PIN:
        state.pin_ends[new] = asked + state.now
    elif asked != DISABLE_PIN and rows["flags"][old] & Flag.SOFT_PIN:
        state.set_flag(new, Flag.SOFT_PIN)
        state.pin_ends[new] = state.pin_ends[old]
    state.clear_flag(new, Flag.UPSERT)
    if rows["flags"][old] & Flag.GROUPED and not rows["flags"][new] & Flag.GROUPED:
        state.groups.add(new, int(rows["tenant"][old]), state.groups.name(old))
        state.set_flag(new, Flag.GROUPED)
    if state.names.refs[new] == 0:
        state.names.refs[new], state.names.refs[old] = state.names.refs[old], 0
    rows["state"][new] = State.READABLE
    rows["lease_end"][new] = 0
    state.tally[k.UNFINISHED] -= 1
    state.tally[k.OBJECTS] += 1
    if rows["flags"][new] & Flag.SOFT_PIN:
        state.tally[k.SOFT_PINNED] += 1
    state.table.swap(old, new)
    state.dispose(np.array([old], np.int32), event=None)
    state.become_readable(np.array([new], np.int32))


def put_revoke(
    state: ShardState, client: int, digests: NDArray[np.uint64], generations: NDArray[np.uint32]
) -> NDArray[np.int16]:
    """Give up own unfinished puts; their space returns at once."""
    n = len(digests)
    if n > BATCH_MAX or len(generations) != n:
        return np.full(n, Status.INVALID_PARAMS, np.int16)
    found = state.table.find(as_words(digests))
    status, doomed = np.empty(n, np.int16), np.empty(n, np.int32)
    count = k.revoke(
        state.rows, state.owners, state.twins, found, generations, client, status, doomed
    )
    state.dispose(doomed[:count], writer_done=True)
    return status
