"""The state of one shard: its columns, its parts, and the one way an object leaves them.

Operations live in modules of their own (`puts`, `reads`, `removal`, `pressure`, `tasks`); each is
a set of functions on this state. `dispose` is the only place where rows die, so whatever a row is
known to (table, policies, groups, names, tenants, space, events) is told exactly once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from eviction import create_policy
from eviction.base import INSERT, NOTE_SHIFT
from kernel_cache.columns import reserve
from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core.context import Context
from mooncake_store.core.continuations import Continuations
from mooncake_store.core.events import Events
from mooncake_store.core.facts import ClientFact, MembersFact, TenantFact
from mooncake_store.core.groups import Groups
from mooncake_store.core.journal import Journal
from mooncake_store.core.kernels import leases, tiers
from mooncake_store.core.kernels import removal as k
from mooncake_store.core.names import NameArena
from mooncake_store.core.options import Offload
from mooncake_store.core.pinned import PinnedOrder
from mooncake_store.core.records import COLD, KEYS_MAX, OVERFLOW, ROW, Flag, Tier
from mooncake_store.core.ring import Ring
from mooncake_store.core.space import Space
from mooncake_store.core.table import Table
from mooncake_store.core.totals import Leased, Totals
from mooncake_store.core.wheel import Wheel

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from eviction.base import EvictionPolicy
    from mooncake_store.core.allowances import Allowance
    from mooncake_store.core.facts import Fact, SegmentFact
    from mooncake_store.core.journal import Sink
    from mooncake_store.core.options import ShardConfig

__all__ = [
    "INT64",
    "UINT32",
    "UINT64",
    "Client",
    "ShardState",
    "Tenant",
    "as_column",
    "as_words",
]

INT64, UINT32, UINT64 = np.dtype(np.int64), np.dtype(np.uint32), np.dtype(np.uint64)

CLIENTS_MAX = 1 << 16
TENANTS_MAX = 1 << 16
MEMBERS_PER_FACT = 16
NOTES_KEPT = 4096
"""Uses, arrivals and departures that wait, about, to be told to the policies together."""
WAITING_MAX = 65_536
"""Rows of a kind that wait, most."""
_ON_DISK, _COLD = 1 << Tier.DISK, 1 << Tier.COLD
"""Bits of the column `tiers`."""
_NO_ROWS = np.empty(0, np.int32)
ROW_MASK = (1 << NOTE_SHIFT) - 1
"""The row in a note."""


@dataclass(slots=True)
class Client:
    """A program that writes objects or owns segments; a new boot epoch makes a new client."""

    handle: int
    uuid: bytes
    epoch: int
    host: str


@dataclass(slots=True)
class Tenant:
    """A namespace with an optional limit on its bytes."""

    number: int
    name: str
    quota_bytes: int | None


class Waiting:
    """Rows that something is to be done for soon. What finds no room is not, which harms nobody."""

    def __init__(self) -> None:
        self._some: list[NDArray[np.int32]] = []
        self._count = 0

    def add(self, rows: NDArray[Any]) -> None:
        """Have rows wait."""
        rows = rows[: WAITING_MAX - self._count]
        if len(rows):
            self._some.append(rows.astype(np.int32))
            self._count += len(rows)

    def take(self, about: int) -> NDArray[np.int32]:
        """Return about so many rows, which wait no more."""
        some: list[NDArray[np.int32]] = []
        while self._some and about > 0:
            some.append(self._some.pop(0))
            about -= len(some[-1])
            self._count -= len(some[-1])
        return np.concatenate(some) if some else _NO_ROWS


class Hauling(Protocol):
    """What operations on the state ask of `hauls.py`, where each is explained."""

    def __len__(self) -> int: ...
    def demote(self, rows: NDArray[np.int32], *, keep: bool = False) -> int: ...
    def offer(
        self, rows: NDArray[np.int32], tier: Tier = ..., *, keep: bool = False
    ) -> NDArray[np.uint8]: ...
    def tier_below(self, tier: Tier) -> Tier | None: ...
    def promote(self, rows: NDArray[np.int32], *, hot: bool = False) -> int: ...
    def expire(self) -> None: ...
    def abandon(self, segment: int) -> None: ...
    def let_go(self, rows: NDArray[np.int32]) -> None: ...
    def give_way(self, segments: set[int], nbytes: int) -> bool: ...
    def leaving_bytes(self, segment: int) -> int: ...
    def leaving_bytes_of_all(self, tier: Tier) -> int: ...
    def moving_bytes(self, tenant: int) -> int: ...


class ShardState:
    """All columns and parts of a shard."""

    hauls: Hauling
    """Made with the shard that this is the state of."""

    def __init__(
        self, config: ShardConfig, ring: Ring | None = None, sink: Sink | None = None
    ) -> None:
        ring = ring or Ring.private(1, config.events_kept)
        rows_max = config.objects_max
        self.config = config
        self.now = 0
        self.check: Callable[[ShardState], None] | None = None
        """What is done after each operation, to find what broke an invariant."""
        self.rng = random.Random(config.seed)
        self.context = Context()
        self.words = self.context.words
        self.numbers = self.context.numbers
        bind = self.context.bind
        self.journal = Journal(self, rows_max, ring, sink)
        self.rows = bind(places.ROWS, reserve(rows_max, ROW))
        bind(places.ROW_WORDS, self.rows.view(np.int64))
        self.table = Table(self.rows, self.context)
        self.shared = bind(places.SHARED, reserve(leases.SETS * leases.SET_WORDS, np.int64))
        self._bind_shares()
        self.overflow = bind(places.OVERFLOW_ROWS, reserve(2 * rows_max + 1, OVERFLOW))
        self.cold = bind(places.COLD_ROWS, reserve(rows_max, COLD))
        bind(places.COLD_WORDS, self.cold.view(np.int64))
        self.names = NameArena(self.cold, self.context)
        self.groups = Groups(rows_max)
        # 0 unless soft-pinned, so seldom real memory.
        self.pin_ends = bind(places.PIN_ENDS, reserve(rows_max, np.int64))
        self.tags = bind(places.TAGS, reserve(rows_max, np.int64))  # of rows that are readable
        self.space = Space(config, self.rng, self.context, self.journal)
        self.policy = create_policy(config.eviction_policy, rows_max)
        self.soft_policy = PinnedOrder(rows_max, self.cold["pin_level"])
        # Of what is in the order of memory: it leaves before the coldest, until somebody uses it.
        self.chilled = create_policy("lru", rows_max)
        # What lies on disks; what lies in memory as well has a place in both orders.
        self.disk_policy = create_policy(config.eviction_policy, rows_max)
        self.cold_policy = create_policy(config.eviction_policy, rows_max)
        self.risers, self.fresh = Waiting(), Waiting()
        ahead = config.promotion_ahead if config.promotion_hits else 0
        self._continuations = Continuations(rows_max, ahead)
        self._offloads = np.full(TENANTS_MAX, config.offload, np.uint8)
        self.writes_through = config.offload == Offload.WRITE  # some namespace, and likewise...
        self.moves_down = config.offload != Offload.NONE
        # Tenants with a quota have an order of their own beside: a walk over everybody's objects
        # to find the coldest of one took 105 ms among two million.
        self.quota_orders: dict[int, EvictionPolicy] = {}
        self.soft_ends = Wheel(2)
        self._notes = bind(places.NOTES, reserve(NOTES_KEPT + KEYS_MAX, np.int64))
        self.found = bind(places.FOUND, reserve(KEYS_MAX, np.int32))
        self.status = bind(places.STATUS, reserve(KEYS_MAX, np.int16))
        bind(places.FRESH, reserve(KEYS_MAX, np.uint8))
        self.events = Events(config.events_kept, ring.events, self.context)
        self.tally = self.context.part(places.TALLY, c.TALLY_WORDS)
        self.tenant_use = bind(places.TENANT_USE, np.zeros((TENANTS_MAX, 2), np.int64))
        self.words[places.DISCARD_NS] = config.put_discard_ns
        self.words[places.RELEASE_NS] = config.put_release_ns
        self.words[places.HITS_WINDOW_NS] = config.hits_window_ns
        self.tenants: dict[str, Tenant] = {"default": Tenant(0, "default", None)}
        self.tenant_by_number = {0: self.tenants["default"]}
        self.clients: dict[bytes, Client] = {}
        self.client_by_handle: dict[int, Client] = {}
        self.allowances: dict[int, Allowance] = {}
        """By handle of a client; those without one may have anything."""
        self.closed = np.zeros(CLIENTS_MAX, np.uint8)  # 1 closed, 2 closed and fenced
        self.closed[0] = 1  # handle 0 is nobody
        self.leased = Leased()
        self.totals = Totals()
        self.late_cursor = 0  # where the search for late puts goes on
        self.handle = 0  # of the client opened last
        self.handles_used = 0  # the greatest there was
        self.replicas_most = 1  # replicas of one object, at most, ever

    def _bind_shares(self) -> None:
        """Make the columns of what clients hold: bytes under long leases and hard pins."""
        bind = self.context.bind
        self.long_of = bind(places.LONG_OF, reserve(3 * CLIENTS_MAX, np.int64)).reshape(-1, 3)
        self.pinner = bind(places.PINNER, reserve(self.config.objects_max, np.uint16))
        self.pinned_of = bind(places.PINNED_OF, reserve(CLIENTS_MAX, np.int64))
        self.tenant_pins = bind(places.TENANT_PINS, reserve(TENANTS_MAX, np.int64))
        self.words[places.BRIEF_NS] = self.config.lease_ttl_ns
        self.foresight_ns = 0
        """Leases that end within this time do not keep an object from being chosen to leave."""

    def enter_client(self, client: Client) -> None:
        """Know a client from now on."""
        self.clients[client.uuid] = self.client_by_handle[client.handle] = client

    def enter_tenant(self, tenant: Tenant) -> None:
        """Know a tenant from now on."""
        self.tenants[tenant.name] = self.tenant_by_number[tenant.number] = tenant

    def home_of(self, tenant: int) -> str:
        """Return where objects of a tenant go: see `homes.py`."""
        homes = self.space.homes
        return homes.of(self.tenant_by_number[tenant].name) if homes.declared else ""

    # -- what the journal asks

    @property
    def rows_high(self) -> int:
        """No row from here on was ever used."""
        return self.table.rows_high

    def changed_segments(self) -> list[SegmentFact]:
        """Tell of the segments that changed since this was asked last."""
        return self.space.changed()

    def has_members(self) -> bool:
        """Whether any row is a member of a group."""
        return len(self.groups) > 0

    def members(self, rows: list[int]) -> Iterator[MembersFact]:
        """Tell of which groups rows are members."""
        members = tuple(
            (row, int(self.rows["generation"][row]), self.groups.name(row)) for row in rows
        )
        for first in range(0, len(members), MEMBERS_PER_FACT):
            yield MembersFact(members[first : first + MEMBERS_PER_FACT])

    def all_but_rows(self) -> Iterator[Fact]:
        """Tell all that is no row."""
        for tenant in self.tenant_by_number.values():
            yield TenantFact(tenant.number, tenant.name, tenant.quota_bytes)
        for client in self.client_by_handle.values():
            yield ClientFact(client.handle, client.uuid, client.epoch, client.host)
        for segment in self.space.all():
            yield segment.fact
        yield from self.space.forgotten()

    def waiting_extents(self) -> NDArray[np.int64]:
        """Return extents that wait in the quarantine, as `Journal.tell_extents` takes them."""
        return self.space.quarantine.timed()

    # -- rows

    def digests(self, rows: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the digests of rows, (n, 2)."""
        words = np.stack([self.rows["digest_lo"][rows], self.rows["digest_hi"][rows]], axis=1)
        out: NDArray[np.uint64] = words.view(np.uint64)
        return out

    def flags(self, rows: NDArray[np.int32]) -> NDArray[np.uint8]:
        """Return the flags of rows."""
        out: NDArray[np.uint8] = self.rows["flags"][rows]
        return out

    def set_flag(self, rows: NDArray[np.int32] | int, flag: Flag) -> None:
        """Set a flag of rows."""
        self.rows["flags"][rows] |= np.uint8(flag)

    def clear_flag(self, rows: NDArray[np.int32] | int, flag: Flag) -> None:
        """Clear a flag of rows."""
        self.rows["flags"][rows] &= np.uint8(~flag & 0xFF)

    def count_pinned(self, row: int, nbytes: int) -> None:
        """Note that a row pins more bytes hard, or fewer, for the client that did it."""
        self.tally[c.HARD_BYTES] += nbytes
        self.pinned_of[self.pinner[row]] += nbytes
        self.tenant_pins[self.cold["tenant"][row]] += nbytes

    def dispose(
        self,
        doomed: NDArray[np.int32],
        *,
        writer_done: bool = False,
        silently: bool = False,
    ) -> int:
        """Let objects go: their space returns now, or when no reader or writer can touch it.

        `writer_done` says that an unfinished writer has given its word, or was fenced, so that
        it writes no more. Second generations go with their first. `silently` makes no event.
        Returns the bytes. O(n).
        """
        if len(doomed) == 0:
            return 0
        self.expect_disposal(len(doomed))
        flags, total = k.dispose_plain(self.words, self.now, silently, doomed)
        if total < 0:
            return self.dispose_special(doomed, flags, writer_done, silently)
        return int(total)

    def expect_disposal(self, count: int) -> None:
        """Prepare what `dispose_plain` needs for up to `count` rows."""
        self.table.maintain(count, growing=False)
        self.space.expect_freed(count)
        self.expect_notes()
        self.journal.expect_marks(count)

    def dispose_special(
        self,
        doomed: NDArray[np.int32],
        flags: int,
        writer_done: bool = False,
        silently: bool = False,
    ) -> int:
        """Dispose of rows that `dispose_plain` refused: tied to others, waited for, or too many.

        `flags` are those of all of them. Returns the bytes.
        """
        if flags & (c.UPSERT | c.GROUPED):
            doomed = self._untied(doomed)
        self.table.maintain(len(doomed), growing=False)
        self.journal.expect_marks(len(doomed))
        replicas = int(self.rows["replicas"][doomed].sum(dtype=np.int64))
        out = np.empty(5 * replicas, np.int64)
        m, total = k.dispose(self.words, self.now, writer_done, silently, doomed, False, out)
        self.space.free_or_quarantine(out.reshape(5, replicas)[:, :m])
        self.leave_order(doomed)
        if self.numbers[places.PINS_USED]:
            self.soft_policy.remove(doomed)
        return int(total)

    def expect_notes(self) -> None:
        """Make room in NOTES for a batch."""
        if self.numbers[places.NOTED] >= NOTES_KEPT:
            self.hand_on_notes()

    def hand_on_notes(self) -> None:
        """Tell the policies what happened since; before they are told or asked anything else."""
        count = self.numbers[places.NOTED]
        if count:
            notes = self._notes[:count]
            self.policy.replay(notes)
            if len(self.chilled):
                self.chilled.remove(notes & ROW_MASK)
            if self.numbers[places.PINS_USED]:  # what comes by a note is not pinned
                self.soft_policy.replay(notes[notes >> NOTE_SHIFT != INSERT])
            for tenant, order in self.quota_orders.items():
                ours = self.cold["tenant"][notes & ROW_MASK] == tenant
                order.replay(notes[ours | (notes >> NOTE_SHIFT != INSERT)])  # ignores the absent
            if self.numbers[places.BELOW_USED]:
                self._tell_below(notes)
            self.numbers[places.NOTED] = 0

    def _tell_below(self, notes: NDArray[np.int64]) -> None:
        """Tell the orders below memory what concerns them, and note what is to change its tier."""
        below, risers = np.empty(len(notes), np.int64), np.empty(len(notes), np.int32)
        wanted = self.config.promotion_hits
        count, rising = tiers.sort_notes(self.words, notes, wanted, below, risers)
        self.disk_policy.replay(below[:count])
        self.cold_policy.replay(below[:count])  # each ignores the absent
        self.risers.add(risers[:rising])
        self.risers.add(self._continuations.follow(self.words, notes))
        if self.writes_through:
            self._write_through(notes[notes >> NOTE_SHIFT == INSERT] & ROW_MASK)

    def _write_through(self, rows: NDArray[Any]) -> None:
        """Note those of completed objects that are to be copied below at once."""
        self.fresh.add(rows[self.offload_of(rows) == Offload.WRITE])

    def offload_of(self, rows: NDArray[Any]) -> NDArray[np.uint8]:
        """Return the `Offload` of the namespace of each row."""
        found: NDArray[np.uint8] = self._offloads[self.cold["tenant"][rows]]
        return found

    def offloads(self, tenant: int) -> bool:
        """Whether anything of a namespace goes to lower tiers by itself."""
        return bool(self._offloads[tenant] != Offload.NONE)

    def set_offload(self, tenant: int, offload: Offload) -> None:
        """Have a namespace move by a policy of its own."""
        self._offloads[tenant] = offload
        self.writes_through = bool((self._offloads == Offload.WRITE).any())
        self.moves_down = bool((self._offloads != Offload.NONE).any())

    def order_of(self, tier: Tier) -> EvictionPolicy:
        """Return the order in which objects without pins leave a tier."""
        return (self.policy, self.disk_policy, self.cold_policy)[tier]

    def enter_order(self, rows: NDArray[Any]) -> None:
        """Make objects candidates for eviction, the hottest of all."""
        self.hand_on_notes()
        if self.numbers[places.BELOW_USED]:
            flags = self.rows["flags"][rows]
            self.policy.insert(rows[flags & c.OFF_MEMORY == 0])
            lie = self.cold["tiers"][rows]
            self.disk_policy.insert(rows[lie & _ON_DISK != 0])
            self.cold_policy.insert(rows[lie & _COLD != 0])
        else:
            self.policy.insert(rows)
        for tenant, order in self.quota_orders.items():
            order.insert(rows[self.cold["tenant"][rows] == tenant])

    def leave_order(self, rows: NDArray[Any]) -> None:
        """Make objects candidates no more."""
        self.hand_on_notes()
        self.policy.remove(rows)
        if self.numbers[places.BELOW_USED]:
            self.disk_policy.remove(rows)
            self.cold_policy.remove(rows)
        self.chilled.remove(rows)
        for order in self.quota_orders.values():
            order.remove(rows)

    def use(self, rows: NDArray[Any]) -> None:
        """Note a use of objects, as a get does: each becomes the hottest of its order."""
        self.hand_on_notes()
        self.chilled.remove(rows)
        below = self.disk_policy, self.cold_policy
        for order in (self.policy, *below, self.soft_policy, *self.quota_orders.values()):
            order.touch(rows)

    def chill(self, rows: NDArray[Any]) -> None:
        """Let objects without pins leave first, whatever the policy, unless they are used again."""
        self.hand_on_notes()
        self.chilled.insert(rows)

    def order_tenant(self, tenant: int) -> None:
        """Give a tenant an eviction order of its own. O(objects of all) when it has none yet."""
        if tenant not in self.quota_orders:
            self.hand_on_notes()
            rows = self.policy.coldest(len(self.policy))
            cold = self.cold_policy.coldest(len(self.cold_policy))
            disk = self.disk_policy.coldest(len(self.disk_policy))
            below = np.concatenate([cold[self.cold["tiers"][cold] & _ON_DISK == 0], disk])
            rows = np.concatenate([below[self.rows["flags"][below] & c.OFF_MEMORY != 0], rows])
            order = create_policy(self.config.eviction_policy, self.config.objects_max)
            order.insert(rows[self.cold["tenant"][rows] == tenant])
            self.quota_orders[tenant] = order

    def _untied(self, doomed: NDArray[np.int32]) -> NDArray[np.int32]:
        """Untie doomed rows from groups and other generations; a first one takes its second."""
        flags = self.flags(doomed)
        along = []
        for row in doomed[(flags & c.UPSERT) != 0]:
            other = int(self.cold["twin"][row]) - 1
            if other < 0:
                continue  # untied as the other of the pair
            self.cold["twin"][row] = self.cold["twin"][other] = 0
            self.clear_flag(other, Flag.UPSERT)
            self.journal.mark(other)
            if self.rows["state"][row] == c.READABLE and other not in doomed:
                along.append(other)
        doomed = np.concatenate([doomed, np.array(along, np.int32)])
        for row in doomed[(self.flags(doomed) & c.GROUPED) != 0]:
            self.groups.remove(int(row))
        return doomed

    def become_readable(self, rows: NDArray[np.int32]) -> None:
        """Enter completed objects into the eviction order their pins call for. O(n)."""
        if len(rows) == 0:
            return
        if self.writes_through:
            self._write_through(rows)
        pins = self.flags(rows) & (c.SOFT_PIN | c.HARD_PIN)
        self.enter_order(rows[pins == 0])
        self.soft_policy.insert(rows[pins == c.SOFT_PIN])
        self.time_soft_pins(rows[(pins & c.SOFT_PIN) != 0])

    def retier(self, rows: NDArray[np.int32]) -> None:
        """Have rows whose replicas came or went know on which tiers they lie, and stand there.

        Cheap where nothing but memory was ever lent. O(n + replicas).
        """
        if not self.numbers[places.BELOW_USED] or len(rows) == 0:
            return
        self.hand_on_notes()
        before, lay = np.empty((2, len(rows)), np.uint8)
        tiers.retier(self.words, rows, before, lay)
        now, lie = self.flags(rows), self.cold["tiers"][rows]
        ordered = (now & (c.SOFT_PIN | c.HARD_PIN) == 0) & (self.rows["segment"][rows] >= 0)
        ordered &= self.rows["state"][rows] == c.READABLE
        moved = ordered & ((before ^ now) & c.OFF_MEMORY != 0)
        off = rows[moved & (now & c.OFF_MEMORY != 0)]
        self.policy.remove(off)
        self.chilled.remove(off)
        self.policy.insert(rows[moved & (now & c.OFF_MEMORY == 0)])
        for order, bit in ((self.disk_policy, _ON_DISK), (self.cold_policy, _COLD)):
            sank = ordered & ((lay ^ lie) & bit != 0)
            order.remove(rows[sank & (lie & bit == 0)])
            order.insert(rows[sank & (lie & bit != 0)])

    def drop_tier(self, rows: NDArray[np.int32], tier: Tier) -> int:
        """Drop the replicas of readable objects on a tier; they have others. Returns the bytes.

        Space that is read under leases waits for their end.
        """
        if len(rows) == 0:
            return 0
        self.journal.expect_marks(len(rows))
        out = np.empty((5, int(self.rows["replicas"][rows].sum(dtype=np.int64))), np.int64)
        count, total = tiers.drop_tier(self.words, self.now, rows, int(tier), out)
        self.space.free_or_quarantine(out[:, :count])
        self.retier(rows)
        return int(total)

    def time_soft_pins(self, rows: NDArray[np.int32]) -> None:
        """Note when soft pins end; under a hard pin their time runs as well."""
        if len(rows):
            entries = np.stack([rows, self.rows["generation"][rows]], axis=1).astype(np.int64)
            self.soft_ends.add(self.pin_ends[rows], entries)

    def scan(
        self, find: Callable[[NDArray[Any], NDArray[Any]], int], start: int, count: int, *asked: int
    ) -> tuple[NDArray[np.int32], int]:
        """Run a kernel over a range of at most `count` rows from `start`.

        `find(span, out)` is told the range and what else is `asked` as `span`. Returns the rows
        found and where to go on, 0 when the end was reached.
        """
        stop = min(self.table.rows_high, start + count)
        out = np.empty(max(0, stop - start), np.int32)
        span = np.array([start, stop, *asked], np.int64)
        found = int(find(span, out)) if stop > start else 0
        return out[:found], 0 if stop >= self.table.rows_high else stop


def as_words(digests: NDArray[Any]) -> NDArray[np.int64]:
    """View digests (n, 2) as the signed words rows are made of, without copying."""
    return as_column(digests, INT64)


def as_column(values: NDArray[Any], kind: Any) -> NDArray[Any]:
    """View input of a request as kernels take it: contiguous and read-only.

    What arrives from the network is read-only, and for numba that is a type of its own; with
    every input made so, each kernel is compiled once.
    """
    flags = values.flags
    if not flags.c_contiguous:
        values = np.ascontiguousarray(values)
        flags = values.flags
    if values.dtype is not kind:
        values = values.view(kind)
    elif flags.writeable:
        values = values.view()
    if flags.writeable:  # then so is the view
        values.flags.writeable = False
    return values
