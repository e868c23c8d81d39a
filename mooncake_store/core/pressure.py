"""Making room: eviction in the order of the policy, with leases, pins, groups and tenants heeded.

Each tier has an order of its own. What leaves one and lies on another as well is not lost; the rest
is first copied to a lower one by background relief, where there is one (`hauls.py`). Who needs room
at once waits for no copy: where all is on its way, that gives way.

Two passes. The first takes objects without pins, coldest first, until the target is met. Only if
it freed less than the floor does the second take soft-pinned ones, until the floor is met. A group
leaves whole or not at all. What still has a reader is never a candidate, but for puts that
wait: what leaves for those rests until its leases have ended.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from eviction.base import picking
from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core import windows
from mooncake_store.core.choice import Choice, plainly
from mooncake_store.core.hauls import REFUSED
from mooncake_store.core.kernels import scan as k
from mooncake_store.core.kernels import tiers
from mooncake_store.core.options import Offload
from mooncake_store.core.records import Tier
from mooncake_store.core.space import UNREADABLE
from mooncake_store.core.spreading import nth_largest
from mooncake_store.core.totals import evicts_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from eviction.base import EvictionPolicy
    from mooncake_store.core.choice import Filter
    from mooncake_store.core.options import StartOptions
    from mooncake_store.core.segment import Segment
    from mooncake_store.core.state import ShardState

__all__ = [
    "ATTEMPTS_MAX",
    "EvictReport",
    "evict",
    "evict_tenant",
    "make_room",
    "make_way",
    "relieve",
]

ATTEMPTS_MAX = 8
VICTIMS_MAX = 16_384
"""Most objects evicted on the way of one request, or in one tick."""

BYTES_MAX = 1 << 62
"""More than any pool holds, and what kernels can count to."""
RECLAIM_ROWS = 65_536
"""Rows searched for late puts in one eviction."""

COPIED_AMONG = 4096
"""Coldest objects of memory among which a request that needs room looks for those on disks too."""

PIECES_MAX = 64
"""Objects of a smaller share of their segment find room wherever some others leave."""


@dataclass(frozen=True, slots=True)
class EvictReport:
    """What an eviction freed (quarantined bytes included)."""

    objects: int = 0
    bytes: int = 0

    def __add__(self, other: EvictReport) -> EvictReport:
        return EvictReport(self.objects + other.objects, self.bytes + other.bytes)


@evicts_for("asked")
def evict(
    state: ShardState, ratio: float, floor: float | None = None, limit: int | None = None
) -> EvictReport:
    """Evict `ratio` of the bytes in use; soft-pinned objects only up to `floor` of them.

    From memory, unless all that is lent is disks.
    """
    if not 0 <= ratio <= 1 or not (floor is None or 0 <= floor <= 1):
        raise ValueError(f"evict: ratio {ratio} and floor {floor} must be between 0 and 1")
    _reclaim_late_puts(state)
    used = state.numbers[places.TALLY + c.BYTES]
    if used == 0 or ratio == 0:
        return EvictReport()
    target = _share(ratio, used)
    least = _share(ratio / 2 if floor is None else floor, used)
    where, tier = _present(state), state.space.homes.first_tier()
    leave = partial(_leave, state, tier)
    first = _pass(state, state.order_of(tier), tier, target, where, limit, leave)
    state.space.release_quarantine(state.now)
    if first.bytes >= least or not state.config.evict_soft_pinned:
        return first
    least -= first.bytes
    return first + _pass(state, state.soft_policy, tier, least, where, limit, leave)


def _share(ratio: float, used: int) -> int:
    """Return ratio of used, rounded up; a hair of float error does not make a further victim."""
    return max(1, math.ceil(ratio * used - 1e-6))


@evicts_for("watermark")
def relieve(state: ShardState) -> EvictReport:
    """Evict a bounded number of objects from the segments above their high watermark.

    Where that leaves one full, of what is pinned softly, and all of them together are above theirs
    as well, the coldest go wherever they lie, and those with pins last. Lower tiers come first:
    what then leaves a higher one finds room there.
    """
    if not state.numbers[places.BELOW_USED]:
        return _relieve(state, Tier.MEMORY)
    report = EvictReport()
    for tier in reversed(Tier):
        report += _relieve(state, tier)
    return report


def _relieve(state: ShardState, tier: Tier) -> EvictReport:
    config = state.config
    full = []
    target = 0
    for segment in state.space.all():
        if segment.tier != tier or segment.state in UNREADABLE:
            continue
        used = segment.used - state.hauls.leaving_bytes(segment.index)
        if used > segment.full_at:
            full.append(segment)
            excess = used / segment.nbytes - config.high_watermark + config.eviction_ratio
            target += _share(min(1.0, max(config.eviction_ratio, excess)), used)
    if not full:
        return EvictReport()
    _reclaim_late_puts(state)
    where, order = _on_segments(state, full, tier), state.order_of(tier)
    leave = partial(_leave, state, tier)
    if state.moves_down and state.hauls.tier_below(tier) is not None:
        leave = partial(_offload, state, tier)
    first = _pass(state, order, tier, target, where, VICTIMS_MAX, leave)
    over = state.space.excess_bytes(tier)
    over -= state.hauls.leaving_bytes_of_all(tier)
    if 2 * first.bytes >= target or over <= 0:
        return first
    present = _present(state)
    second = _pass(state, order, tier, over, present, VICTIMS_MAX, leave)
    if config.evict_soft_pinned:
        over -= second.bytes
        second += _pass(state, state.soft_policy, tier, over, present, VICTIMS_MAX, leave)
    return first + second


def _on_segments(
    state: ShardState, segments: list[Segment], tier: Tier | None = None
) -> Filter | None:
    """Return a filter for objects with a replica on one of `segments`; None if that is all.

    All, that is, of a tier if one is named.
    """
    some = state.space.all()
    if len(segments) == sum(tier is None or segment.tier == tier for segment in some):
        return None
    wanted = state.space.mask(lambda s: s in segments)

    def on_these(ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        out = np.empty(len(ids), np.bool_)
        k.on_segments(state.rows, state.overflow, wanted, ids, out)
        return out

    return on_these


def _present(state: ShardState) -> Filter | None:
    """Return a filter for objects that do not lie on absent segments alone; None if that is all.

    To evict those makes room for nobody: where they lie nothing is put.
    """
    if not state.space.absent:
        return None
    segments = [s for s in state.space.all() if s.state not in UNREADABLE]
    return _on_segments(state, segments)


def _reclaim_late_puts(state: ShardState) -> None:
    """Give up unfinished puts past their deadline; a late writer's space is quarantined."""
    if state.numbers[places.TALLY + c.UNFINISHED] == 0:
        return
    late = state.now - state.config.put_discard_ns
    find = partial(k.late_puts, state.rows)
    found, state.late_cursor = state.scan(find, state.late_cursor, RECLAIM_ROWS, late)
    state.totals.expired_puts += len(found)
    state.dispose(found)


@evicts_for("room")
def make_room(
    state: ShardState, order: list[Segment], sizes: NDArray[np.int64], copies: int, attempt: int
) -> bool:
    """Free room for objects of these sizes on the segments of `order`; False when there is none.

    Later attempts free more: the free space may lie in pieces too small for the request. Replicas
    need segments of their own, so for several of them only what lies where room lacks leaves. Where
    bytes abound, and an object is large, room in one piece is made instead, or nothing leaves;
    not among so many objects that looking for it would hold up everybody else.
    """
    if len(order) < copies:
        return False  # room on fewer segments is of no use
    made = False
    for tier in Tier:  # as copies are placed: in memory, and elsewhere what has no segment there
        some = [segment for segment in order if segment.tier == tier]
        here = min(copies, len(some))
        if here:
            made |= _make_room(state, some, tier, sizes, here, attempt)
            copies -= here
    return made


def _make_room(
    state: ShardState,
    order: list[Segment],
    tier: Tier,
    sizes: NDArray[np.int64],
    copies: int,
    attempt: int,
) -> bool:
    """Free room on one tier, where need be of what is on its way to a disk: it does not arrive."""
    given = state, order, tier, sizes, copies, attempt
    if _free_room(*given):
        return True
    sources, nbytes = {segment.index for segment in order}, sum(sizes.tolist()) * copies
    while tier == Tier.MEMORY and state.hauls.give_way(sources, min(nbytes, BYTES_MAX)):
        if _free_room(*given):
            return True
        nbytes *= 2  # what was let go may lie in pieces, or be in a group that is held
    return False


def _free_room(
    state: ShardState,
    order: list[Segment],
    tier: Tier,
    sizes: NDArray[np.int64],
    copies: int,
    attempt: int,
) -> bool:
    needed = sum(sizes.tolist()) * copies  # no fixed width to overflow
    _reclaim_late_puts(state)
    released = state.space.release_quarantine(state.now)
    largest = int(sizes.max())
    large = largest >= min(segment.nbytes for segment in order) // PIECES_MAX
    if large and state.table.rows_high <= windows.ROWS_MAX:
        # What is coldest leaves first: it may lie side by side. Not where it would be in vain.
        lacks_a_piece = _have_room(order, largest if attempt else 2 * largest, copies)
        if lacks_a_piece or state.numbers[places.TALLY + c.HARD_BYTES]:
            found, choice = _windows(state, order, tier, largest, copies)
            if lacks_a_piece and choice is not None:
                return _clear(state, tier, found, choice, largest)
            if choice is None:
                return released > 0
    lacking = _lacking(order, needed // copies, copies) if copies > 1 else []
    freed = 0
    for segments, nbytes in lacking or [(order, max(needed, 1))]:
        got = _free(state, tier, segments, nbytes, attempt)
        freed += got
        if not got:
            break  # then room on the others is of no use
    return released > 0 or freed > 0


@evicts_for("wait")
def make_way(
    state: ShardState,
    sizes: NDArray[np.int64],
    options: StartOptions,
    until: int,
    tenant: int = 0,
) -> int:
    """Have objects under leases leave for puts of a tenant that wait: space comes when these end.

    Only where that is by `until`, and under no long lease. Coldest first, as ever; readers go on
    to read until their leases end, and find nothing afterwards. Returns when the room is there at
    the latest: nothing is gained by asking again before.
    """
    until = min(until, state.now + state.config.lease_ttl_ns)
    homes, copies = state.space.homes, options.replicas_min
    order = homes.order(state.now, options, state.home_of(tenant))
    sizes = sizes[sizes <= nth_largest(order, copies)] if len(order) >= copies else sizes[:0]
    if len(sizes) and until > state.now:
        state.foresight_ns = until - state.now
        try:
            _make_way(state, order, sizes, copies)
        finally:
            state.foresight_ns = 0
    return until


def _make_way(
    state: ShardState, order: list[Segment], sizes: NDArray[np.int64], copies: int
) -> None:
    tier, largest, needed = order[0].tier, int(sizes.max()), sum(sizes.tolist())
    large = largest >= min(segment.nbytes for segment in order) // PIECES_MAX
    if large and state.table.rows_high <= windows.ROWS_MAX:
        found, choice = _windows(state, order, tier, largest, copies)
        if choice is not None:
            _clear(state, tier, found, choice, largest)
        needed -= largest
    lacking = _lacking(order, needed, copies) if copies > 1 else [(order, needed)]
    for segments, nbytes in lacking:
        if nbytes > 0:
            _free(state, tier, segments, nbytes, 0)


def _lacking(order: list[Segment], nbytes: int, copies: int) -> list[tuple[list[Segment], int]]:
    """Where room lacks for copies of so many bytes, and how much; nothing if it is in pieces.

    Where there are as many segments as copies each needs it all, the fullest first; else it is
    told of all that have less together, because any of them may do.
    """
    free = {segment.index: segment.nbytes - segment.used for segment in order}
    short = sorted((s for s in order if free[s.index] < nbytes), key=lambda s: free[s.index])
    if len(order) == copies:
        return [([segment], nbytes - free[segment.index]) for segment in short]
    lacking = copies * nbytes - sum(min(room, nbytes) for room in free.values())
    return [(short, lacking)] if lacking > 0 else []


def _free(state: ShardState, tier: Tier, segments: list[Segment], nbytes: int, attempt: int) -> int:
    """Have objects leave these segments, what is pinned softly last; return how many."""
    where, target = _on_segments(state, segments, tier), nbytes << attempt
    leave = partial(_leave, state, tier)
    report = _drop_copied(state, tier, target, where)
    if report.bytes < target:
        left = target - report.bytes
        report += _pass(state, state.order_of(tier), tier, left, where, VICTIMS_MAX, leave)
    if report.bytes < nbytes and state.config.evict_soft_pinned:
        left = target - report.bytes
        report += _pass(state, state.soft_policy, tier, left, where, VICTIMS_MAX, leave)
    return report.objects


def _drop_copied(state: ShardState, tier: Tier, target: int, where: Filter | None) -> EvictReport:
    """Take from memory what lies below as well, among the coldest: nothing is lost by that."""
    if tier != Tier.MEMORY or not len(state.disk_policy) + len(state.cold_policy):
        return EvictReport()
    state.hand_on_notes()
    rows = state.policy.coldest(COPIED_AMONG)
    rows = rows[(state.rows["flags"][rows] & c.BELOW) != 0]
    choice = Choice(state, state.policy, tier, where)
    rows = rows[choice.eligible(rows)].astype(np.int32)
    rows = rows[_lies_also(state, rows, tier)]
    ends = np.cumsum(choice.sizes(rows.astype(np.int64)))
    return _drop(state, rows[: int(np.searchsorted(ends, target)) + 1], tier)


def _have_room(order: list[Segment], nbytes: int, copies: int) -> bool:
    """Whether as many segments have so many bytes that are free, wherever these lie."""
    return sum(segment.nbytes - segment.used >= nbytes for segment in order) >= copies


def _windows(
    state: ShardState, order: list[Segment], tier: Tier, size: int, copies: int
) -> tuple[list[windows.Window], Choice | None]:
    """The cheapest places for `size` bytes, and what chose them; None if there are too few."""
    for soft in (False, True)[: 1 + state.config.evict_soft_pinned]:
        policy = state.soft_policy if soft else state.order_of(tier)
        choice = Choice(state, policy, tier, None)
        found = windows.cheapest(state, order, size, choice.eligible, soft)
        if len(found) >= copies:
            return found[:copies], choice
    return [], None


def _clear(
    state: ShardState, tier: Tier, found: list[windows.Window], choice: Choice, size: int
) -> bool:
    """Evict what lies in these places; whether each is one hole now."""
    # At once: an object may lie in two of these places, or its group in both.
    rows = np.unique(np.concatenate([window.rows for window in found]))
    _leave(state, tier, choice.with_groups(rows.astype(np.int32)))
    state.space.release_quarantine(state.now)
    holes = [windows.gather(state, window, size) for window in found]
    return all(holes)


@evicts_for("quota")
def evict_tenant(state: ShardState, tenant: int, needed: int) -> EvictReport:
    """Evict the coldest objects of one tenant, which has a quota.

    Pinned ones stay: soft pins have one order for all tenants, and a walk over it for the sake of
    one would hold up the others. What lies on absent segments may leave: it counts as the others.
    """
    leave = partial(_evict, state)
    report = _pass(state, state.quota_orders[tenant], None, needed, None, VICTIMS_MAX, leave)
    if report.bytes < needed:
        _reclaim_late_puts(state)
    return report


def _pass(
    state: ShardState,
    policy: EvictionPolicy,
    tier: Tier | None,
    target: int,
    where: Filter | None,
    limit: int | None,
    leave: Callable[[NDArray[np.int32]], EvictReport],
) -> EvictReport:
    """Have objects `leave` a tier, or all, coldest first, until `target` bytes of it are free.

    Before the ordinary objects in memory those leave that hints say nobody needs soon.
    """
    state.hand_on_notes()
    if policy is not state.policy or len(state.chilled) == 0:
        return _take(state, policy, tier, target, where, limit, leave)
    first = _take(state, state.chilled, tier, target, where, limit, leave)
    state.hand_on_notes()
    limit = None if limit is None else limit - first.objects
    return first + _take(state, policy, tier, target - first.bytes, where, limit, leave)


def _take(
    state: ShardState,
    policy: EvictionPolicy,
    tier: Tier | None,
    target: int,
    where: Filter | None,
    limit: int | None,
    leave: Callable[[NDArray[np.int32]], EvictReport],
) -> EvictReport:
    target = min(target, BYTES_MAX)
    if target <= 0 or len(policy) == 0:
        return EvictReport()
    if where is None and len(state.groups) == 0:
        victims = policy.victims(target, plainly(state, tier), limit)
    else:
        choice = Choice(state, policy, tier, where)
        ids = policy.victims(target, picking(choice.sizes, choice.eligible), limit)
        victims = choice.with_groups(ids.astype(np.int32))
    return leave(victims)


def _evict(state: ShardState, victims: NDArray[np.int32]) -> EvictReport:
    """Evict these rows, and count them."""
    if len(victims) == 0:
        return EvictReport()
    report = EvictReport(len(victims), state.dispose(victims))
    state.totals.evicted_objects += report.objects
    state.totals.evicted_bytes += report.bytes
    return report


def _leave(state: ShardState, tier: Tier, victims: NDArray[np.int32]) -> EvictReport:
    """Take these rows from a tier: those that lie on another as well go on there.

    Of a group that would lose a member nothing stays.
    """
    if not state.numbers[places.BELOW_USED]:
        return _evict(state, victims)
    stays = _lies_also(state, victims, tier)
    stays &= ~_in_groups_of(state, victims, victims[~stays])
    return _drop(state, victims[stays], tier) + _evict(state, victims[~stays])


def _offload(state: ShardState, tier: Tier, victims: NDArray[np.int32]) -> EvictReport:
    """Take these rows from a tier: those on another as well at once, others when they are below.

    Those whose worker is busy stay for now, and what nothing below takes is evicted.
    """
    copied = _lies_also(state, victims, tier)
    report = _drop(state, victims[copied], tier)
    rest = victims[~copied]
    outcome = np.full(len(rest), REFUSED, np.uint8)
    goes_down = state.offload_of(rest) != Offload.NONE
    outcome[goes_down] = state.hauls.offer(rest[goes_down], tier)
    waits = rest[outcome != REFUSED]  # nobody else has to leave for those
    report += EvictReport(0, int(state.rows["size"][waits].sum()))
    refused = rest[outcome == REFUSED]
    goes = ~_in_groups_of(state, refused, victims[copied])
    goes &= ~_in_groups_of(state, refused, waits)
    return report + _evict(state, refused[goes])


def _drop(state: ShardState, rows: NDArray[np.int32], tier: Tier) -> EvictReport:
    """Take rows from a tier that lie on another as well."""
    if len(rows) == 0:
        return EvictReport()
    report = EvictReport(len(rows), state.drop_tier(rows, tier))
    if tier == Tier.MEMORY:
        state.totals.demoted_objects += report.objects
        state.totals.demoted_bytes += report.bytes
    return report


def _lies_also(state: ShardState, rows: NDArray[np.int32], tier: Tier) -> NDArray[np.bool_]:
    """Which rows can be read on another tier as well."""
    out = np.empty(len(rows), np.bool_)
    tiers.lies_also(state.words, rows, int(tier), out)
    return out


def _in_groups_of(
    state: ShardState, rows: NDArray[np.int32], others: NDArray[np.int32]
) -> NDArray[np.bool_]:
    """Which rows are in a group that one of `others` is in."""
    out = np.zeros(len(rows), np.bool_)
    if len(state.groups):
        grouped = others[(state.flags(others) & c.GROUPED) != 0]
        numbers = {state.groups.number(int(row)) for row in grouped}
        for at in np.flatnonzero(state.flags(rows) & c.GROUPED).tolist():
            out[at] = state.groups.number(int(rows[at])) in numbers
    return out
