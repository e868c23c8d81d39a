"""Space for the replicas of new objects: where it is, or who leaves for them, within the limits.

Objects go into memory while there is any. Disks take what is larger than all of it, replicas for
which there is no further memory, and everything while there is none.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core import pressure
from mooncake_store.core.kernels import writes as k
from mooncake_store.core.records import Status
from mooncake_store.core.spreading import nth_largest, spread

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mooncake_store.core.options import StartOptions
    from mooncake_store.core.segment import Segment
    from mooncake_store.core.spreading import Extents
    from mooncake_store.core.state import ShardState

__all__ = ["keeps_pin", "pinnable_bytes", "pin_room", "pin_status", "pinnable_now", "place"]

PINS_OF_ONE = 0.75
"""Largest share that one client may have of what may be pinned hard."""


def place(
    state: ShardState,
    tenant: int,
    rows: NDArray[np.int32],
    sizes: NDArray[np.int64],
    options: StartOptions,
    leaving: NDArray[np.int64],
) -> NDArray[np.int16] | None:
    """Allocate and attach replicas, evicting where there is no room; None when all fitted.

    `leaving` says what each replaces: bytes, and those pinned hard among them.
    """
    homes, home = state.space.homes, state.home_of(tenant)
    order, further = homes.order(state.now, options, home), homes.further(state.now, options, home)
    result = np.zeros(len(rows), np.int16)
    large = sizes > nth_largest(order + further, options.replicas_min)
    if large.any():  # for these nobody else shall be evicted, nor anybody wait in vain
        never = sizes[large] > homes.largest_bytes(options.replicas_min, home)
        too_large = sizes[large] > homes.largest_bytes(1, home)
        refusal = np.where(too_large, Status.TOO_LARGE, Status.TOO_FEW_SEGMENTS)
        result[large] = np.where(never, refusal, Status.NO_SPACE)
    client = int(state.cold["owner"][rows[0]])
    quota = state.tenant_by_number[tenant].quota_bytes
    if options.hard_pin or quota is not None or client in state.allowances:
        _hold_limits(state, (client, tenant), sizes, options, result, leaving)
    todo = np.flatnonzero(result == c.OK)
    for attempt in range(pressure.ATTEMPTS_MAX):
        state.space.return_freed()
        got = spread(order, further, sizes[todo], options.replicas, not options.preferred)
        enough = got.counts >= options.replicas_min
        _attach(state, tenant, rows[todo], got, enough)
        todo = todo[~enough]
        if len(todo) == 0:
            break
        if not _make_room(state, order, further, sizes[todo], options, attempt):
            break
    state.retier(rows)
    result[todo] = c.NO_SPACE
    return result if result.any() else None


def _attach(
    state: ShardState,
    tenant: int,
    rows: NDArray[np.int32],
    got: Extents,
    enough: NDArray[np.bool_],
) -> None:
    """Give rows that have `enough` replicas these, and return the space of the others."""
    for replica in range(got.segments.shape[1]):
        some = enough & (got.counts > replica)
        k.attach(
            state.words,
            rows[some],
            np.ascontiguousarray(got.segments[some, replica]),
            np.ascontiguousarray(got.offsets[some, replica]),
            tenant,
        )
        rest = ~enough & (got.counts > replica)
        state.space.free(got.segments[rest, replica].astype(np.int64), got.offsets[rest, replica])


def _make_room(
    state: ShardState,
    order: list[Segment],
    further: list[Segment],
    sizes: NDArray[np.int64],
    options: StartOptions,
    attempt: int,
) -> bool:
    """Free room where these objects are to go; False when there is none."""
    copies, made = options.replicas_min, False
    fit = sizes <= nth_largest(order, 1)
    if fit.any():
        here = min(copies, len(order)) if further else copies
        made |= pressure.make_room(state, order, sizes[fit], here, attempt)
    below = ~fit if copies <= len(order) else np.ones(len(sizes), np.bool_)
    if further and below.any():
        made |= pressure.make_room(state, further, sizes[below], 1, attempt)
    return made


def _hold_limits(
    state: ShardState,
    who: tuple[int, int],
    sizes: NDArray[np.int64],
    options: StartOptions,
    result: NDArray[np.int16],
    leaving: NDArray[np.int64],
) -> None:
    """Refuse, in order, what a quota, the shares of hard pins or the writer's limits do not allow.

    `who`: the client and the tenant of all. What leaves with an object makes room for that one, and
    for no other: it may stay.
    """
    sums = [size * options.replicas for size in sizes.tolist()]  # no fixed width to overflow
    client, tenant = who
    allowance = state.allowances.get(client)
    needs = _beyond(sums, leaving[0])
    quota = state.tenant_by_number[tenant].quota_bytes
    if quota is not None:
        status = Status.TENANT_QUOTA
        _hold_bytes(
            state, sums, needs, quota, partial(_used, state, tenant), [tenant], result, status
        )
    if allowance is not None and (most := allowance.bytes_most) is not None:
        used, giving = partial(allowance.used, state), allowance.evictable(state, tenant)
        _hold_bytes(state, sums, needs, most, used, giving, result, Status.LIMIT_BYTES)
    if options.hard_pin:
        needs = _beyond(sums, leaving[1])
        _refuse_over(needs, pinnable_now(state, client), result, Status.PINS_FULL)
        if (left := _pins_left(state, client)) is not None:
            _refuse_over(needs, left, result, Status.LIMIT_PINS)


def _hold_bytes(
    state: ShardState,
    sums: list[int],
    needs: list[int],
    most: int,
    used: Callable[[], int],
    giving: list[int],
    result: NDArray[np.int16],
    status: Status,
) -> None:
    """Refuse what does not fit beside what is used, once the coldest of some tenants gave way.

    `sums` are the sizes of all, `needs` what they take beyond the room of what leaves with them.
    """
    for at, size in enumerate(sums):
        if size > most:  # at once: neither eviction nor a further segment would help
            result[at] = status
    over = sum(itertools.compress(needs, result == c.OK)) - most + used()
    for tenant in giving:
        if over > 0:
            over -= pressure.evict_tenant(state, tenant, over).bytes
    _refuse_over(needs, most - used(), result, status)


def _beyond(sums: list[int], leaving: NDArray[np.int64]) -> list[int]:
    """Return what objects need beyond the room of what leaves with them."""
    return [max(0, size - gone) for size, gone in zip(sums, leaving.tolist(), strict=True)]


def _used(state: ShardState, tenant: int) -> int:
    """Return the bytes of a tenant; what is on its way to another tier counts once."""
    return int(state.tenant_use[tenant, 0]) - state.hauls.moving_bytes(tenant)


def pinnable_bytes(state: ShardState) -> int:
    """Return the most bytes that may be pinned hard, where objects are put."""
    total = state.space.total_bytes(state.space.homes.first_tier())
    return int(state.config.hard_pin_share * total)


def pinnable_now(state: ShardState, client: int) -> int:
    """Return the most bytes that a client may pin hard beside what is pinned; 0 is nobody."""
    most = pinnable_bytes(state)
    room = most - int(state.tally[c.HARD_BYTES])
    if client:
        room = min(room, int(PINS_OF_ONE * most) - int(state.pinned_of[client]))
    return room


def pin_status(state: ShardState, client: int, nbytes: int) -> Status:
    """Whether a client may pin so many bytes more hard: OK, or what does not allow it."""
    if nbytes > pinnable_now(state, client):
        return Status.PINS_FULL
    room = _pins_left(state, client)
    return Status.OK if room is None or nbytes <= room else Status.LIMIT_PINS


def pin_room(state: ShardState, client: int) -> int:
    """Return how many bytes a client may pin hard, by all that is held against it."""
    room, left = pinnable_now(state, client), _pins_left(state, client)
    return room if left is None else min(room, left)


def keeps_pin(state: ShardState, old: int, new: int) -> bool:
    """Whether what takes the place of an object that is pinned hard is so too.

    Unless it is larger, and the limits of its writer leave no room for what it is larger by.
    """
    left = _pins_left(state, int(state.cold["owner"][new]))
    if left is None:
        return True
    rows = state.rows[[new, old]]
    more, less = (rows["size"] * rows["replicas"]).tolist()
    return bool(more - less <= max(0, left))


def _pins_left(state: ShardState, client: int) -> int | None:
    """Return what the limits of a client leave; None without one."""
    allowance = state.allowances.get(client)
    if allowance is None or (most := allowance.pins_most) is None:
        return None
    return most - allowance.pinned(state)


def _refuse_over(needs: list[int], room: int, result: NDArray[np.int16], status: Status) -> None:
    """Refuse every need that does not fit into what those accepted before it left."""
    for at, need in enumerate(needs):
        if result[at] == c.OK:
            if need > room:
                result[at] = status
            else:
                room -= need
