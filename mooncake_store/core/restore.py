"""Making a shard of what another one wrote down: its rows, and around them everything else.

    restored = restore(shard, runs, end, now)
    restored = restore(shard, runs, end, now, damage)     # where stretches are missing
    restored = restore(shard, runs, end, now, cut=True)   # where the last words may be

`runs` are the words of a journal in order, cut between cells, each with its position. Rows are
taken from them as they come, and facts in order; what belongs to them (table, totals, free space,
orders of eviction, groups) is made anew afterwards, of rows alone, so nothing can be kept of it
that contradicts them.

What is not the same afterwards, and why that harms nobody:

- Who has leases is not written down: no object may leave before the last lease that was granted to
  anybody has ended, and nobody gives one back early.
- Objects stand in the order of eviction by when they were last leased, as far as snapshots saw
  that, else by when they were put.
- Copies and hauls that ran are given up. Where they wrote nothing is placed until their time is up.

Rows that cannot be true (space that is another's, a segment nobody knows) are dropped and counted.

Words may be missing behind the beginning of the newest whole snapshot only where it is known from
elsewhere where each row was last written (`last_cells.py`): a row that the missing words told of is
not believed then, whatever else says of it, and nothing that was removed or replaced comes back.
What else may be missing, and why nothing wrong follows:

- That segments, clients and tenants came, changed or went is told twice, at some distance, so both
  must be missing. Then rows that need a segment or a tenant are dropped as above, and puts of
  clients are given up. One that came back goes: a segment when the master compares shards with its
  registers, a client when it is silent. No handle or number is given to another while anything that
  was read names it.
- Extents that wait for readers and writers, and who reads and writes what is lost. So nothing is
  placed on any memory until all of these are out of time (`_rest`).
- That writers are done with what waits for them: it waits longer.
- Of which groups rows are members: told with the rows, and lost with them.

A journal that was `cut` when its host ended is true, but older than what its workers hold. On disks
and other hosts something else may lie by now where an object did. So gets tell that what was put
before is unsure there: who reads a range of it reads the whole, and compares that with its checksum
each time, because a late writer of something else may still come. What the missing words gave out
is not given out again: nothing is placed on the segments that are known until their readers and
writers are out of time, and generations go on behind those that may have been used. A segment of
which only the missing words told is new to the shard, and used at once; a late writer to it would
have to come from another host that saw it mounted.

Cost: O(words + rows log rows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core import context as places
from mooncake_store.core import journal as j
from mooncake_store.core.facts import (
    ClientFact,
    ClosedFact,
    ForgottenFact,
    MembersFact,
    SegmentFact,
    TenantFact,
    decode_fact,
)
from mooncake_store.core.kernels import cells as k
from mooncake_store.core.kernels import rebuild
from mooncake_store.core.kernels.tiers import retier
from mooncake_store.core.last_cells import KnownRows
from mooncake_store.core.reads import extents_of, replicas_of
from mooncake_store.core.records import Flag, State
from mooncake_store.core.state import Client, Tenant, as_column
from mooncake_store.core.tasks import drop_replica

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from mooncake_store.core.facts import Fact
    from mooncake_store.core.last_cells import Run
    from mooncake_store.core.shard import Shard

__all__ = ["Damage", "Restored", "StreamEnd", "restore"]

INT64 = np.dtype(np.int64)
_EXTENT_COLUMNS = 5
_SECOND_NS = 1_000_000_000
_LEAP = 1 << 24
"""More generations than words that no disk had can have told of."""


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What is known of the end of a stream of cells, as `ring.py` has it."""

    now: int
    horizon: int
    events_next: int
    generation: int
    snapshot: int
    """Where the newest whole snapshot begins."""


class Damage(NamedTuple):
    """What is known of a stream that lacks stretches."""

    last: NDArray[np.int64]
    """Where each row was last written, at the end of the stream (`last_cells.py`)."""
    end: int
    """The position of that."""
    now: int
    """A time at which all that is missing had been written."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What came of it."""

    objects: int = 0
    nbytes: int = 0
    unfinished: int = 0
    dropped: int = 0
    """Rows that could not be true."""
    lost: int = 0
    """Rows that held something, and of which the newest word is missing."""


def restore(
    shard: Shard,
    runs: Iterable[Run],
    end: StreamEnd,
    now: int,
    damage: Damage | None = None,
    *,
    cut: bool = False,
) -> Restored:
    """Fill a shard that was never used with what `runs` say.

    Nothing is missing without `damage`, but for words at the end where it was `cut`.

    Raises ValueError, with the shard in no state to be used, for words that are no cells.
    """
    reader = _Reader(shard, end.snapshot)
    known = None if damage is None else KnownRows(damage.last, end.snapshot)
    for position, run in runs:
        words = as_column(run, INT64)
        if known is not None:
            if not known.goes_on(position):
                # They would hold names and further replicas that others were given since.
                _vacate(shard, known.passed())
            known.note((position, words))
        reader.read(position, words)
    lost = 0
    if damage is not None and known is not None:
        known.reach(damage.end)
        _vacate(shard, known.unknown())
        rows = known.lost()
        lost = len(rows)
        # From now on they are free, also for whoever reads this journal next.
        shard.journal.mark(rows[rows < len(shard.rows)].astype(np.int32))
    reader.settle()
    shard.now = max(now, end.now)
    rebuilt = _Rebuild(shard, reader, end)
    restored = rebuilt.run(lost)
    if damage is not None and known is not None and (known.gaps or lost):
        rebuilt.rest(damage.now, restored)
    if cut:
        rebuilt.leap()
    shard.journal.publish()
    return restored


def _vacate(shard: Shard, rows: NDArray[np.int64]) -> None:
    k.vacate_rows(shard.words, as_column(rows[rows < len(shard.rows)], INT64))


def _overlap(
    ranges: NDArray[np.int64], offsets: NDArray[np.int64], sizes: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Which (offset, size) overlap any of these extents, which do not overlap each other."""
    order = np.argsort(offsets)
    starts, ends = offsets[order], (offsets + sizes)[order]
    first = np.searchsorted(ends, ranges[:, 0], side="right")
    starts = np.append(starts, np.iinfo(np.int64).max)
    found: NDArray[np.bool_] = starts[first] < ranges[:, 0] + ranges[:, 1]
    return found


class _Reader:
    """Takes rows and facts from the stream; later ones replace earlier ones."""

    def __init__(self, shard: Shard, snapshot: int) -> None:
        self._words = shard.words
        self._snapshot = snapshot
        # Facts and extents by the position where they were told first.
        self._told: dict[int, Fact | NDArray[np.int64]] = {}
        self.segments: dict[int, SegmentFact] = {}
        self.forgotten: list[ForgottenFact] = []
        self.clients: dict[int, ClientFact] = {}
        self.tenants: dict[int, TenantFact] = {}
        self.members: dict[int, tuple[int, str]] = {}
        self._extents: dict[int, list[NDArray[np.int64]]] = {}
        self._done: list[NDArray[np.int64]] = []

    def read(self, position: int, cells: NDArray[np.int64]) -> None:
        """Read one run, which begins at a position."""
        at = 0
        while True:
            at = k.read_cells(self._words, cells, at)
            if at == len(cells):
                return
            head = int(cells[at])
            kind, words, note = head & 0xFF, (head >> 16) & 0xFFFF, head >> 32
            if words < 1 or at + words > len(cells):
                raise ValueError(f"a cell of {words} words where {len(cells) - at} are left")
            self._read_other(kind, position + at, cells[at + 1 : at + words], note)
            at += words

    def _read_other(self, kind: int, position: int, payload: NDArray[np.int64], note: int) -> None:
        if kind == j.EXTENTS and len(payload) % _EXTENT_COLUMNS == 0:
            self._told[position] = payload.reshape(-1, _EXTENT_COLUMNS)
        elif kind == j.WRITERS:
            self._done.append(payload.copy())
        elif kind == j.FACT and 0 <= note <= payload.nbytes:
            self._told[position] = decode_fact(payload.tobytes()[:note])
        elif kind == j.FACT_AGAIN and len(payload) and 0 <= note <= payload.nbytes - 8:
            # What was told before the snapshot was told in it, if it was still so.
            if (first := int(payload[0])) >= self._snapshot:
                self._told[first] = decode_fact(payload[1:].tobytes()[:note])
        elif kind not in (j.SNAPSHOT_BEGINS, j.SNAPSHOT_ENDS):
            raise ValueError(f"a cell of the unknown kind {kind}")

    def settle(self) -> None:
        """Take what was told in the order in which it was told first."""
        for position in sorted(self._told):
            told = self._told[position]
            if isinstance(told, np.ndarray):
                for index in np.unique(told[:, 0]).tolist():
                    self._extents.setdefault(index, []).append(told[told[:, 0] == index])
            else:
                self._take(told)

    def _take(self, fact: Fact) -> None:
        match fact:
            case SegmentFact():
                self.segments[fact.index] = fact
            case ForgottenFact():
                self.forgotten.append(fact)
                self.segments.pop(fact.index, None)
                self._extents.pop(fact.index, None)
            case ClientFact():
                self.clients[fact.handle] = fact
            case ClosedFact():
                self.clients.pop(fact.handle, None)
            case TenantFact():
                self.tenants[fact.number] = fact
            case MembersFact():
                self.members |= {row: (generation, name) for row, generation, name in fact.rows}

    def extents(self, now: int) -> NDArray[np.int64]:
        """Return the extents that somebody may still use: segment, offset, size, writer, until."""
        some = [held for index in self.segments for held in self._extents.get(index, ())]
        held = np.concatenate([np.empty((0, _EXTENT_COLUMNS), np.int64), *some])
        held = held[held[:, 4] > now]
        if self._done:
            held = held[(held[:, 3] == 0) | ~np.isin(held[:, 3], np.concatenate(self._done))]
        return np.unique(held, axis=0)  # snapshots tell them again


class _Rebuild:
    """Makes everything around the rows."""

    def __init__(self, shard: Shard, reader: _Reader, end: StreamEnd) -> None:
        self._shard = shard
        self._reader = reader
        self._end = end
        self._dropped = 0
        self._found: NDArray[np.int64] | None = None
        self._ends: NDArray[np.int64]
        """Where the replicas on each segment end, when they stand by segment."""

    def run(self, lost: int) -> Restored:
        """Do it all, in the order in which each step needs the ones before."""
        shard, end = self._shard, self._end
        self._facts()
        self._drop(self._untrue())
        self._tie()
        held = self._space()
        self._table()
        self._totals()
        self._tiers()
        self._orders()
        self._groups()
        self._leases()
        if len(held):
            shard.space.hold(held)
        self._end_tasks()
        self._end_puts()
        shard.words[places.EVENTS_NEXT] = end.events_next
        shard.tally[c.GENERATION] = end.generation
        return Restored(
            objects=int(shard.tally[c.OBJECTS]),
            nbytes=int(shard.tally[c.BYTES]),
            unfinished=int(shard.tally[c.UNFINISHED]),
            dropped=self._dropped,
            lost=lost,
        )

    def rest(self, told_until: int, restored: Restored) -> None:
        """Place nothing while somebody may use space of whom the missing words told.

        Writers of puts, and workers that copied, began before the time until which words are
        missing, and so did readers of what had left its object by then. Who reads what is lost may
        have begun at any time, but has no lease beyond the last one of all.
        """
        config = self._shard.config
        writers = config.task_timeout_ns + config.put_release_ns
        until = told_until + max(writers, config.lease_ttl_max_ns)
        if restored.lost or restored.dropped:
            until = max(until, self._end.horizon)
        if until > self._shard.now:
            self._shard.space.rest(until)

    def leap(self) -> None:
        """Give out nothing that words which are missing at the end may have given out."""
        shard = self._shard
        config = shard.config
        writers = config.task_timeout_ns + config.put_release_ns
        shard.space.rest_mounted(shard.now + max(writers, config.lease_ttl_max_ns))
        # Dates of objects are whole seconds; a moment more harms nobody, since nothing is placed.
        shard.space.doubt_mounted(shard.now // _SECOND_NS + 1)
        shard.tally[c.GENERATION] = (int(shard.tally[c.GENERATION]) + _LEAP) & 0xFFFFFFFF

    @property
    def _live(self) -> NDArray[np.int64]:
        """All rows that hold something."""
        if self._found is None:
            shard = self._shard
            states = shard.rows["state"][: shard.table.rows_high]
            self._found = np.flatnonzero(states != State.FREE)
        return self._found

    def _drop(self, rows: NDArray[np.int64]) -> None:
        """Forget rows that cannot be true, also for whoever reads this journal next."""
        _vacate(self._shard, rows)
        self._found = None
        self._shard.journal.mark(rows.astype(np.int32))
        self._dropped += len(rows)

    def _facts(self) -> None:
        shard, reader = self._shard, self._reader
        for tenant in reader.tenants.values():
            shard.enter_tenant(Tenant(tenant.number, tenant.name, tenant.quota_bytes))
        # That an earlier run of a client was closed may be missing.
        by_epoch = sorted(reader.clients.values(), key=lambda client: client.epoch)
        for client in {client.uuid: client for client in by_epoch}.values():
            shard.enter_client(Client(client.handle, client.uuid, client.epoch, client.host))
        owners = [segment.owner for segment in reader.segments.values()]
        putters = int(shard.cold["owner"][self._live].max(initial=0))
        shard.handle = shard.handles_used = max([putters, *owners, *reader.clients])
        for forgotten in reader.forgotten:
            shard.space.recall(forgotten)
        for segment in reader.segments.values():
            shard.space.restore(segment, self._end.horizon)

    def _untrue(self) -> NDArray[np.int64]:
        """Rows that lie nowhere, where nobody knows of, or beyond the end of a segment."""
        shard, live = self._shard, self._live
        room = np.zeros(len(shard.space.alive), np.int64)
        for known in shard.space.all():
            room[known.index] = known.reach
        tenants = np.zeros(len(shard.tenant_use), np.bool_)
        tenants[list(shard.tenant_by_number)] = True
        right = np.empty(len(live), np.bool_)
        self._ends = np.zeros(len(room) + 1, np.int64)
        rebuild.judge_rows(shard.words, live, room, tenants, right, self._ends[1:])
        self._ends.cumsum(out=self._ends)
        untrue: NDArray[np.int64] = live[~right]
        return untrue

    def _tie(self) -> None:
        """Untie rows from other generations that are not there; a second one goes on alone."""
        shard, live = self._shard, self._live
        for row in live[(shard.rows["flags"][live] & c.UPSERT) != 0].tolist():
            other = int(shard.cold["twin"][row]) - 1
            tied = other >= 0 and bool(int(shard.rows["flags"][other]) & c.UPSERT)
            if not tied or int(shard.cold["twin"][other]) - 1 != row:
                shard.clear_flag(row, Flag.UPSERT)
                shard.cold["twin"][row] = 0
                shard.journal.mark(row)

    def _space(self) -> NDArray[np.int64]:
        """Take the space of all rows, and of what waits, which is returned."""
        shard = self._shard
        held = self._reader.extents(shard.now)
        ends = self._ends
        row, offset, size = extents = np.empty((3, ends[-1]), np.int64)
        rebuild.list_extents(shard.words, self._live, ends[:-1].copy(), extents)
        kept = np.ones(len(held), np.bool_)
        wrong = np.zeros(len(row), np.bool_)
        for known in shard.space.all():
            mine = slice(ends[known.index], ends[known.index + 1])
            waiting = held[:, 0] == known.index
            # What lies where something waited came later: that this is over was not read.
            over = _overlap(held[waiting, 1:3], offset[mine], size[mine])
            kept[waiting], waiting[waiting] = ~over, ~over
            where = np.concatenate([offset[mine], held[waiting, 1]])
            sizes = np.concatenate([size[mine], held[waiting, 2]])
            taken = known.allocator.reserve(where, sizes)
            count = len(taken) - np.count_nonzero(waiting)
            wrong[mine] = ~taken[:count]
            kept[waiting] = taken[count:]
        if wrong.any():
            bad = self._with_twins(row[wrong])
            others = np.isin(row, bad) & ~wrong
            segment = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
            shard.space.free(segment[others], offset[others])
            self._drop(bad)
        return held[kept]

    def _with_twins(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """These rows and the other generations that they are tied to."""
        twins = self._shard.cold["twin"][rows].astype(np.int64) - 1
        return np.unique(np.concatenate([rows, twins[twins >= 0]]))

    def _table(self) -> None:
        shard, live = self._shard, self._live.astype(np.int32)
        second = shard.rows["state"][live] == State.WRITING
        second &= (shard.flags(live) & c.UPSERT) != 0
        twice = shard.table.fill(live, live[~second])
        if len(twice):
            bad = self._with_twins(twice.astype(np.int64))
            _, segment, offset = extents_of(shard, bad)
            shard.space.free(segment, offset)
            self._drop(bad)
            shard.table.supply(bad.astype(np.int32))

    def _totals(self) -> None:
        shard = self._shard
        shard.replicas_most = max(1, rebuild.sum_up(shard.words, self._live))

    def _tiers(self) -> None:
        """Have every row say on which tiers it lies."""
        live = self._live.astype(np.int32)
        retier(self._shard.words, live, *np.empty((2, len(live)), np.uint8))

    def _orders(self) -> None:
        """Enter objects into the orders of eviction, those first that were leased longest ago."""
        shard, live = self._shard, self._live
        live = live[shard.rows["state"][live] == State.READABLE]
        created = shard.cold["created_s"][live].astype(np.int64) * 1_000_000_000
        used = np.maximum(shard.rows["lease_end"][live], created)
        order = np.lexsort((shard.rows["generation"][live], used))
        shard.become_readable(live[order].astype(np.int32))
        for tenant in shard.tenant_by_number.values():
            if tenant.quota_bytes is not None:
                shard.order_tenant(tenant.number)

    def _groups(self) -> None:
        shard, live = self._shard, self._live
        for row in live[(shard.rows["flags"][live] & c.GROUPED) != 0].tolist():
            generation, name = self._reader.members.get(row, (-1, ""))
            if generation == int(shard.rows["generation"][row]) and name:
                shard.groups.add(row, int(shard.cold["tenant"][row]), name)
            else:
                shard.clear_flag(row, Flag.GROUPED)

    def _leases(self) -> None:
        """Let every object be leased by nobody until the last lease has ended."""
        shard, live = self._shard, self._live
        live = live[shard.rows["state"][live] == State.READABLE]
        shard.rows["holder"][live] = 0
        shard.rows["holders"][live] = c.HOLDERS_MAX
        if self._end.horizon > shard.now:
            shard.rows["lease_end"][live] = self._end.horizon
        shard.journal.lease(self._end.horizon)

    def _end_tasks(self) -> None:
        """Give up copies that ran: their workers may write for as long as a put."""
        shard, live = self._shard, self._live
        until = shard.now + shard.config.put_release_ns
        copied = live[(shard.rows["flags"][live] & c.TASK) != 0]
        for row in copied.tolist():
            shard.clear_flag(row, Flag.TASK)
            for segment, _, life in replicas_of(shard, row):
                if life == State.WRITING:
                    drop_replica(shard, row, segment, until)
        shard.retier(copied.astype(np.int32))

    def _end_puts(self) -> None:
        """Give up puts of clients that nobody knows."""
        shard, live = self._shard, self._live
        writing = live[shard.rows["state"][live] == State.WRITING]
        owners = np.unique(shard.cold["owner"][writing]).tolist()
        unknown = [owner for owner in owners if owner not in shard.client_by_handle]
        if unknown:
            shard.closed[unknown] = 1
            shard.handles_used = max(shard.handles_used, *unknown)
            shard.janitor.clients_closed()
