"""The invariants of a shard's state, checked from scratch. O(rows), for tests and debugging."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core import codes as k
from mooncake_store.core.reads import extents_of, replicas_of
from mooncake_store.core.records import Flag, SegmentState, State, Tier
from mooncake_store.core.space import UNREADABLE

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from eviction.base import EvictionPolicy
    from mooncake_store.core.state import ShardState

__all__ = ["check"]

# Members of an enum are looked up by a function of Python, each time anew.
FREE, WRITING, READABLE = (int(state) for state in (State.FREE, State.WRITING, State.READABLE))
UPSERT, DOOMED, HARD_PIN, SOFT_PIN, OFF_MEMORY, BELOW = (
    int(flag)
    for flag in (
        Flag.UPSERT, Flag.DOOMED, Flag.HARD_PIN, Flag.SOFT_PIN, Flag.OFF_MEMORY, Flag.BELOW,
    )
)  # fmt: skip


def check(state: ShardState) -> None:
    """Raise AssertionError, naming the broken invariant."""
    state.table.check_integrity()
    state.hand_on_notes()
    state.policy.check_integrity()
    state.disk_policy.check_integrity()
    state.cold_policy.check_integrity()
    state.soft_policy.check_integrity()
    state.groups.check_integrity()
    live = np.flatnonzero(state.rows["state"][: state.table.rows_high] != FREE)
    _check_table(state, live)
    _check_orders(state, live)
    _check_space(state, live)
    _check_totals(state, live)


def _check_table(state: ShardState, live: NDArray[np.int64]) -> None:
    """Every row in use is found by its digest, except second generations, which have a first."""
    rows = state.rows[live]
    second = (rows["state"] == WRITING) & ((rows["flags"] & UPSERT) != 0)
    named = live[~second]
    digests = np.stack([rows["digest_lo"][~second], rows["digest_hi"][~second]], axis=1)
    assert len(state.table) == len(named), "the table counts other objects than there are"
    assert np.array_equal(state.table.find(np.ascontiguousarray(digests)), named), (
        "a digest leads to another row"
    )
    for row in live[(rows["flags"] & UPSERT) != 0]:
        twin = int(state.cold["twin"][row]) - 1
        assert twin >= 0, f"row {row} lost its other half"
        assert state.cold["twin"][twin] - 1 == row, f"row {row}: its other half denies it"
    assert not (rows["flags"] & DOOMED).any(), "a doomed row survived"


def _check_orders(state: ShardState, live: NDArray[np.int64]) -> None:
    """Exactly the readable objects without pins are in the eviction order, and so on."""
    rows = state.rows[live]
    readable = rows["state"] == READABLE
    hard = (rows["flags"] & HARD_PIN) != 0
    soft = (rows["flags"] & SOFT_PIN) != 0
    in_memory, on_disk, far = _tiers_of(state, live)
    told = (rows["flags"] & OFF_MEMORY) == 0, (rows["flags"] & BELOW) != 0
    assert np.array_equal(told[0], in_memory), "a row is wrong about whether it lies in memory"
    assert np.array_equal(told[1], on_disk | far), "a row is wrong about whether it lies below"
    bits = on_disk << Tier.DISK | far << Tier.COLD
    assert np.array_equal(state.cold["tiers"][live], bits), "a row is wrong about lower tiers"
    plain = live[readable & ~hard & ~soft]
    for policy, tier, there in (
        (state.policy, "memory", in_memory),
        (state.disk_policy, "disks", on_disk),
        (state.cold_policy, "cold segments", far),
    ):
        belong = live[readable & ~hard & ~soft & there]
        assert len(policy) == len(belong), (
            f"{len(policy)} objects in the order of {tier}, {len(belong)} belong there"
        )
        assert np.array_equal(_ids_in(policy), belong), f"an object is missing: {tier}"
    pinned = live[readable & soft & ~hard]
    assert np.array_equal(_ids_in(state.soft_policy), pinned), "a soft pin has no place"
    for tenant, order in state.quota_orders.items():
        order.check_integrity()
        mine = plain[state.cold["tenant"][plain] == tenant]
        assert np.array_equal(_ids_in(order), mine), f"tenant {tenant}: order"
    levels = state.cold["pin_level"][live]
    assert not levels[~(readable & soft)].any(), "what has no soft pin has a level of one"
    walked = state.cold["pin_level"][state.soft_policy.coldest(len(pinned))].astype(np.int64)
    assert (np.diff(walked) >= 0).all(), "a soft pin of a higher level comes first"
    state.chilled.check_integrity()
    chilled = set(_ids_in(state.chilled).tolist())
    assert chilled <= set(_ids_in(state.policy).tolist()), "what leaves first is in no order"


def _ids_in(policy: EvictionPolicy) -> NDArray[np.int64]:
    """What is in an order, sorted."""
    return np.sort(policy.coldest(len(policy)))


def _tiers_of(state: ShardState, live: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which rows have a complete replica on each tier."""
    found = np.zeros((len(Tier), len(live)), np.bool_)
    if not state.space.tiers.any():
        found[Tier.MEMORY] = True
        return found
    for at, row in enumerate(live.tolist()):
        unfinished = state.rows["state"][row] == WRITING
        for segment, _, life in replicas_of(state, row):
            if unfinished or life == READABLE:
                found[state.space.tiers[segment], at] = True
    return found


def _check_space(state: ShardState, live: NDArray[np.int64]) -> None:
    """Every byte of a segment has one owner: an extent, the quarantine or the free structure."""
    owner, segment, offset = extents_of(state, live)
    count = np.bincount(owner, minlength=state.table.rows_high)[live]
    wrong = live[count != state.rows["replicas"][live]]
    assert not len(wrong), f"row {wrong[0]} miscounts its replicas"
    assert len(set((owner << 32 | segment).tolist())) == len(owner), "a row is on a segment twice"
    resting = state.space.quarantine.entries()
    segment = np.concatenate([segment, resting[:, 0]])
    offset = np.concatenate([offset, resting[:, 1]])
    size = np.concatenate([state.rows["size"][owner].astype(np.int64), resting[:, 2]])
    unknown = set(segment.tolist()) - {s.index for s in state.space.all()}
    assert not unknown, f"forgotten segments own space: {unknown}"
    for segment_ in state.space.all():
        hidden = segment_.state in UNREADABLE, segment_.state == SegmentState.GONE
        told = not state.space.alive[segment_.index], bool(state.space.dead[segment_.index])
        assert told == hidden, f"segment {segment_.name}: readers are told that it is {told}"
        segment_.allocator.check_integrity()
        mine = np.flatnonzero(segment == segment_.index)
        mine = mine[np.argsort(offset[mine], kind="stable")]
        ends = offset[mine] + size[mine]
        assert (ends[:-1] <= offset[mine][1:]).all(), f"segment {segment_.name}: extents overlap"
        if len(mine):
            assert offset[mine[0]] >= 0, "an extent starts before its segment"
            assert ends[-1] <= segment_.reach, "an extent ends after its segment"
        if segment_.state != SegmentState.GONE:
            allocations = segment_.allocator.stats().allocations
            assert allocations == len(mine), (
                f"segment {segment_.name}: {allocations} allocations, {len(mine)} owners"
            )


def _check_totals(state: ShardState, live: NDArray[np.int64]) -> None:
    rows = state.rows[live]
    nbytes = rows["size"] * rows["replicas"]
    readable = rows["state"] == READABLE
    hard = (rows["flags"] & HARD_PIN) != 0
    soft = (rows["flags"] & SOFT_PIN) != 0
    missing = state.cold["wanted"][live].astype(np.int64) - rows["replicas"]
    expected = {
        k.OBJECTS: np.count_nonzero(readable),
        k.UNFINISHED: np.count_nonzero(~readable),
        k.BYTES: nbytes.sum(),
        k.SOFT_PINNED: np.count_nonzero(readable & soft),
        k.HARD_BYTES: nbytes[hard].sum(),
        k.MISSING: np.maximum(missing, 0)[readable].sum(),
    }
    for place, value in expected.items():
        assert state.tally[place] == value, (
            f"total {place} says {state.tally[place]}, it is {value}"
        )
    pinned = np.bincount(state.pinner[live][hard], nbytes[hard], len(state.pinned_of))
    assert (state.pinned_of == pinned).all(), "bytes that clients have pinned"
    for tenant in state.tenant_by_number:
        mine = state.cold["tenant"][live] == tenant
        assert state.tenant_use[tenant, 0] == nbytes[mine].sum(), f"tenant {tenant}: bytes"
        assert state.tenant_use[tenant, 1] == np.count_nonzero(mine), f"tenant {tenant}: objects"
        pinned = nbytes[mine & hard].sum()
        assert state.tenant_pins[tenant] == pinned, f"tenant {tenant}: bytes pinned hard"
