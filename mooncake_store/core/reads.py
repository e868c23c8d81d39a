"""Reads: get with or without a lease, probes, lease upkeep, listing and inspection."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core.kernels import leases
from mooncake_store.core.kernels import reads as k
from mooncake_store.core.records import (
    GET_ROW,
    KEYS_MAX,
    LISTED,
    REPLICA,
    Flag,
    State,
    Status,
)
from mooncake_store.core.state import UINT32, ShardState, as_column, as_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

__all__ = [
    "ObjectStat", "exists", "find_prefix", "foreign", "get", "list_objects", "release", "renew",
    "stat",
]  # fmt: skip

SCAN_ROWS = 65_536
"""Rows looked at in one step of a listing."""


@dataclass(frozen=True, slots=True)
class ObjectStat:
    """Everything known of one object."""

    size: int
    state: State
    generation: int
    checksum: int
    lease_ns: int
    soft_pin_ns: int
    hard_pin: bool
    group: str
    tenant: int
    replicas: tuple[tuple[int, int, State], ...]
    """(segment, offset, state) each."""
    name: bytes
    created_ns: int
    hits: int
    absent: bool
    """Whether it cannot be read because what is left of it lies on absent segments."""


def get(
    state: ShardState,
    client: int,
    digests: NDArray[np.uint64],
    ttl_ns: int,
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return (GET_ROW per key, REPLICA per living replica); `ttl_ns` 0 grants no lease.

    The lease is the client's; client 0 is nobody, whose leases run to their end.
    """
    n = len(digests)
    if n > KEYS_MAX or ttl_ns < 0:
        answers = np.zeros(n, GET_ROW)
        answers["status"] = Status.INVALID_PARAMS
        return answers, np.empty(0, REPLICA)
    answers = np.empty(n, GET_ROW)
    replicas = np.empty(n * state.replicas_most, REPLICA)
    state.expect_notes()
    ttl_ns = min(ttl_ns, state.config.lease_ttl_max_ns)
    m = k.get(state.words, client, state.now, ttl_ns, as_words(digests), answers, replicas)
    if m < len(replicas):
        replicas = replicas[:m]
    if state.numbers[places.UNSURE_USED]:
        k.mark_unsure(state.words, answers, replicas)
    return answers, replicas


def exists(state: ShardState, digests: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Return whether each object can be read; neither leases nor touches."""
    out = np.empty(len(digests), np.bool_)
    if len(digests) > KEYS_MAX:
        for first in range(0, len(digests), KEYS_MAX):
            part = slice(first, first + KEYS_MAX)
            out[part] = exists(state, digests[part])
        return out
    k.exists(state.words, as_words(digests), out)
    return out


def foreign(
    state: ShardState, digests: NDArray[np.uint64], tenant: int
) -> NDArray[np.bool_] | None:
    """Return which keys are those of objects, readable or not, of other tenants; None for none."""
    out = np.empty(len(digests), np.bool_)
    if len(digests) > KEYS_MAX:
        for first in range(0, len(digests), KEYS_MAX):
            part = slice(first, first + KEYS_MAX)
            k.foreign(state.words, tenant, as_words(digests[part]), out[part])
        return out if out.any() else None
    return out if k.foreign(state.words, tenant, as_words(digests), out) else None


def find_prefix(state: ShardState, digests: NDArray[np.uint64]) -> int:
    """Return the length of the leading run of readable objects."""
    there = exists(state, digests)
    return len(there) if there.all() else int(there.argmin())


def renew(
    state: ShardState,
    client: int,
    digests: NDArray[np.uint64],
    generations: NDArray[np.uint32],
    ttl_ns: int,
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Prolong a client's leases of unchanged objects: (status, remaining ns) per key.

    Who has none is granted one; with `ttl_ns` 0 the status only says what is unchanged.
    """
    n = len(digests)
    status, remaining = np.empty(n, np.int16), np.zeros(n, np.int64)
    if n > KEYS_MAX or len(generations) != n or ttl_ns < 0:
        status[:] = Status.INVALID_PARAMS
        return status, remaining
    found = state.table.find(as_words(digests))
    ttl_ns = min(ttl_ns, state.config.lease_ttl_max_ns)
    asked = np.array([client, state.now, ttl_ns], np.int64)
    state.journal.lease(state.now + ttl_ns)
    leases.renew(
        state.words,
        state.rows,
        state.overflow,
        state.space.alive,
        state.shared,
        found,
        as_column(generations, UINT32),
        asked,
        state.space.lease_until,
        status,
        remaining,
    )
    return status, remaining


def release(
    state: ShardState,
    client: int,
    digests: NDArray[np.uint64],
    generations: NDArray[np.uint32],
) -> NDArray[np.int16]:
    """Give a client's leases back, one grant each; a lease ends when all are given back.

    What is somebody else's, or was given back already, stays as it is.
    """
    n = len(digests)
    status = np.empty(n, np.int16)
    if n > KEYS_MAX or len(generations) != n:
        status[:] = Status.INVALID_PARAMS
        return status
    found = state.table.find(as_words(digests))
    leases.release(
        state.rows,
        state.shared,
        found,
        as_column(generations, UINT32),
        client,
        state.now,
        status,
    )
    return status


def list_objects(
    state: ShardState, tenant: int, prefix: bytes = b"", cursor: int = 0, limit: int = 1000
) -> tuple[NDArray[Any], bytes, int]:
    """Return (LISTED rows, their names as one blob, next cursor or 0) of a tenant.

    At most `limit` readable objects whose name starts with `prefix`. A page may be short, or empty,
    before the end: only a cursor of 0 means the end.
    """
    limit = max(1, min(limit, KEYS_MAX))
    find = partial(k.listing, state.rows, state.overflow, state.space.alive, state.cold)
    rows, following = state.scan(find, max(0, cursor), SCAN_ROWS, tenant)
    if prefix:
        rows = state.names.with_prefix(rows, prefix)
    if len(rows) > limit:
        following = int(rows[limit])
        rows = rows[:limit]
    blob, lengths = state.names.gather(rows)
    out = np.zeros(len(rows), LISTED)
    for name in ("digest_lo", "digest_hi", "size", "replicas"):
        out[name] = state.rows[name][rows]
    out["created_s"] = state.cold["created_s"][rows]
    out["name_bytes"] = lengths
    return out, blob, following


def stat(state: ShardState, digest: NDArray[np.uint64]) -> ObjectStat | None:
    """Return everything known of one object, None when there is none."""
    row = int(state.table.find(as_words(digest.reshape(1, 2)))[0])
    if row < 0:
        return None
    record = state.rows[row]
    life = State(int(record["state"]))
    flags = Flag(int(record["flags"]))
    pinned = life == State.READABLE and Flag.SOFT_PIN in flags
    replicas = tuple(replicas_of(state, row))
    return ObjectStat(
        size=int(record["size"]),
        state=life,
        generation=int(record["generation"]),
        checksum=int(record["checksum"]),
        lease_ns=max(0, int(record["lease_end"]) - state.now) if life == State.READABLE else 0,
        soft_pin_ns=max(0, int(state.pin_ends[row]) - state.now) if pinned else 0,
        hard_pin=Flag.HARD_PIN in flags,
        group=state.groups.name(row),
        tenant=int(state.cold["tenant"][row]),
        replicas=replicas,
        name=state.names.get(row),
        created_ns=int(state.cold["created_s"][row]) * 1_000_000_000,
        hits=int(record["hits"]) & c.HITS_MASK,
        absent=life == State.READABLE and _is_absent(state, replicas),
    )


def _is_absent(state: ShardState, replicas: Iterable[tuple[int, int, State]]) -> bool:
    """Whether none of these replicas can be read, and one could if its segment were back."""
    segments = [segment for segment, _, life in replicas if life == State.READABLE]
    alive, dead = state.space.alive[segments], state.space.dead[segments]
    return not alive.any() and not dead.all()


def offsets_in(rows: Any) -> Any:
    """Where the first replicas of these rows begin on their segments."""
    return rows["offset_low"].astype(np.int64) | rows["offset_high"].astype(np.int64) << 32


def replicas_of(state: ShardState, row: int) -> list[tuple[int, int, State]]:
    """Return (segment, offset, state) of every replica of a row, living or not."""
    record = state.rows[row]
    out = []
    if record["segment"] >= 0:
        out.append((int(record["segment"]), int(offsets_in(record)), State(int(record["state"]))))
    link = int(record["more"])
    while link >= 0:
        further = state.overflow[link]
        life = State(int(further["state"])) if record["state"] == State.READABLE else State.WRITING
        out.append((int(further["segment"]), int(further["offset"]), life))
        link = int(further["next"])
    return out


def extents_of(state: ShardState, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """The row, segment and offset of every replica, living or not, of these rows, as columns."""
    most = len(rows) + int(state.overflow["offset"][0])  # all further replicas there are
    out = np.empty((3, most), np.int64)
    count = k.extents(state.words, np.ascontiguousarray(rows, np.int64), out)
    assert count >= 0, "the further replicas of a row form a ring"
    return out[0, :count], out[1, :count], out[2, :count]
