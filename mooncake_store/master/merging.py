"""Making one shard of every few neighbours of a state directory that no master uses.

    merge_state(path, 4, SystemClock(), put_release_ns, objects_max)

The inverse of `splitting`: keys belong to shards by runs of slots, so neighbours become one with
all their slots. Objects stay where they are. Of every segment the new shard gives out what each of
them did, so runs that lie side by side become one again; what was the guest of one and another's
object is its own now, and what belongs to a shard beyond them stays a guest.

Each shard counted for itself, so what they know is brought together first (`_Union`): clients and
namespaces have other numbers in each, times are those of its own clock, and two may have given one
number to different puts. Puts that were under way end; what they may still write to waits for its
whole time, since a number no longer says whose it is.

All or nothing: see `resharding`. O(bytes of the journals), in the memory that the new shard takes,
one of those it is made of, and what all of these wrote down.
"""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, TypeVar

import msgspec
import numpy as np

from mooncake_store.core.facts import ClientFact, ForgottenFact, SegmentFact, TenantFact
from mooncake_store.core.journal import extent_cells, fact_cell
from mooncake_store.core.portable import cells_of, objects_of, readable_rows, unfinished_extents
from mooncake_store.core.reads import extents_of
from mooncake_store.core.records import SEGMENT_BYTES_MAX, SegmentState
from mooncake_store.core.restore import StreamEnd
from mooncake_store.core.segment import GUEST, NEVER
from mooncake_store.core.state import CLIENTS_MAX, TENANTS_MAX
from mooncake_store.master.counting import counting_standby
from mooncake_store.master.exporting import restored_shard
from mooncake_store.master.registers import SEGMENT_NUMBERS
from mooncake_store.master.resharding import Change, reshard
from mooncake_store.master.shard_link import slice_of
from mooncake_store.master.shifting import Shift
from mooncake_store.units import SECOND_NS
from transfer_engine.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from mooncake_store.clock import Clock
    from mooncake_store.core.portable import Objects
    from mooncake_store.core.shard import Shard
    from mooncake_store.master.registers import KeptSegment
    from mooncake_store.master.resharding import Making, Resharded

__all__ = ["merge_state"]

GENERATIONS = 1 << 32
_OFFSET_BITS = 47
"""An offset in a segment has no more, its number 15."""


def merge_state(
    path: Path, factor: int, clock: Clock, put_release_ns: int, objects_max: int
) -> Resharded:
    """Make one shard of every `factor` neighbours of a state directory.

    Raises what `reshard` does, and InvalidArgumentError where one shard would have more than it can
    hold: `objects_max` objects, or a longest piece of a segment.
    """

    def make(making: Making) -> int:
        merging = _Merging(making, factor, clock, put_release_ns, objects_max)
        merging.check()
        objects = 0
        for number in range(making.shards):
            objects += merging.merge(number)
            gc.collect()  # a shard, whose parts know each other
        making.write_registers(merging.segments())
        return objects

    return reshard(path, Change(factor, merges=True), make)


class _Merging:
    def __init__(
        self, making: Making, factor: int, clock: Clock, put_release_ns: int, objects_max: int
    ) -> None:
        self._making = making
        self._factor = factor
        self._clock = clock
        self._put_release_ns = put_release_ns
        self._objects_max = objects_max
        self._shares_of = cache(self._shares)

    def check(self) -> None:
        """Refuse segments of which one shard would have too much."""
        for known in self._making.registers.segments:
            shares = self._shares_of(known.nbytes, known.shares)
            longest = max(slice_of(known.nbytes, at, shares)[1] for at in range(shares))
            if longest > SEGMENT_BYTES_MAX:
                raise InvalidArgumentError(
                    f"a shard can give out at most {SEGMENT_BYTES_MAX} bytes of a segment, and "
                    f"would have {longest} of {known.name}",
                    advice="merge fewer",
                )

    def segments(self) -> tuple[KeptSegment, ...]:
        """Return what the registers say of segments from then on."""
        return tuple(
            msgspec.structs.replace(known, shares=self._shares_of(known.nbytes, known.shares))
            for known in self._making.registers.segments
        )

    def _shares(self, nbytes: int, shares: int) -> int:
        """Return into how many slices a segment is divided from then on.

        Each has to be made of whole slices of before, which may begin at other places, since large
        ones have another unit, and each new shard has to lie in one.
        """
        before = shares or self._making.journals.shards
        most = math.gcd(before, self._making.shards)
        for count in range(most, 1, -1):
            if most % count == 0 and all(
                slice_of(nbytes, at, count)[0] == slice_of(nbytes, at * before // count, before)[0]
                for at in range(count)
            ):
                return count
        return 1

    def merge(self, number: int) -> int:
        """Write the shard that some neighbours become; return how many objects it has."""
        making, factor = self._making, self._factor
        some = [making.look(number * factor + at) for at in range(factor)]
        facts = [seen.contents.facts for seen in some if seen.contents.facts is not None]
        ahead_ns, clock_ns = max(seen.ahead_ns for seen in some), self._clock.now_ns()
        # The time of each, on its own clock; the new one goes on where the latest is.
        times = [
            max(each.now, clock_ns + seen.ahead_ns) for each, seen in zip(facts, some, strict=True)
        ]
        now = max(times)
        shifts = [Shift(now - time, (now - time) // SECOND_NS) for time in times]
        end = StreamEnd(
            now,
            max(shift.until(each.horizon) for shift, each in zip(shifts, facts, strict=True)),
            max(each.events_next for each in facts),
            _newest([each.generation for each in facts]),
            1,
        )
        # The first shard of a pool decides for whom all of them wait.
        counted = counting_standby(making.journals.path / "shard-0")
        shards = [restored_shard(some.pop(0), each, self._put_release_ns) for each in facts]
        objects = sum(shard.objects for shard in shards)
        if objects > self._objects_max:
            raise InvalidArgumentError(
                f"shard {number} would have {objects} objects, and may have {self._objects_max}",
                advice="start the master with a larger --objects-max, or merge fewer",
            )
        layouts = {known.number: self._layout(known, number) for known in making.registers.segments}
        union = _Union(shards, shifts, layouts)
        del shards
        made = making.write(number, objects, union.cells(), end, ahead_ns, counted)
        if made != objects:
            raise StoreError(f"shard {number} would have {made} of {objects} objects")
        return made

    def _layout(self, known: KeptSegment, number: int) -> _Layout:
        before, after = self._making.journals.shards, self._making.shards
        shares = known.shares or before
        fresh = self._shares_of(known.nbytes, known.shares)
        base, nbytes = slice_of(known.nbytes, number * fresh // after, fresh)
        slices = [
            slice_of(known.nbytes, (number * self._factor + at) * shares // before, shares)
            for at in range(self._factor)
        ]
        return _Layout(known.uuid, nbytes, tuple((begin - base, size) for begin, size in slices))


def _newest(generations: list[int]) -> int:
    """Return the generation behind which the most were not used by any of some shards lately.

    Each counts for itself and begins anew at the end, so that may be another than the greatest.
    """
    some = sorted({each % GENERATIONS for each in generations})
    gaps = [
        ((following - each) % GENERATIONS or GENERATIONS, each)
        for each, following in zip(some, [*some[1:], some[0]], strict=True)
    ]
    return max(gaps)[1]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the slices that some shards had of a segment lie in that of the new one."""

    uuid: bytes
    nbytes: int
    slices: tuple[tuple[int, int], ...]
    """Of each: where it begins, and its length."""

    def fits(self, facts: dict[int, SegmentFact]) -> bool:
        """Whether it is about the segment that all of these shards know."""
        return len(facts) == len(self.slices) and all(
            (fact.uuid, fact.nbytes) == (self.uuid, self.slices[at][1])
            for at, fact in facts.items()
        )

    def part(self, facts: dict[int, SegmentFact]) -> tuple[tuple[int, int], ...]:
        """Return the runs in which any of them gives out space; empty for all of it."""
        runs: list[tuple[int, int]] = []
        for begin, end in sorted(
            (self.slices[at][0] + start, self.slices[at][0] + stop)
            for at, fact in facts.items()
            for start, stop in fact.part or ((0, fact.nbytes),)
        ):
            if runs and runs[-1][1] == begin:
                runs[-1] = runs[-1][0], end
            else:
                runs.append((begin, end))
        return () if runs == [(0, self.nbytes)] else tuple(runs)

    @classmethod
    def of_gone(cls, facts: dict[int, SegmentFact], count: int) -> _Layout:
        """Return one for a segment that is of no use any more: slices one behind the other."""
        sizes = [facts[at].nbytes if at in facts else 0 for at in range(count)]
        begins = np.cumsum([0, *sizes]).tolist()
        slices = tuple(zip(begins[:-1], sizes, strict=True))
        return cls(b"", begins[-1], slices)


class _Union:
    """What some shards know together."""

    def __init__(
        self, shards: list[Shard], shifts: list[Shift], layouts: dict[int, _Layout]
    ) -> None:
        self._shards = shards
        self._shifts = shifts
        self._tenants = self._tenant_facts()
        self._clients = self._client_facts()
        self._layouts = layouts
        self._segments = self._segment_facts()

    def cells(self) -> Iterator[NDArray[np.int64]]:
        """Yield the words that say all of them; each goes as soon as it is told."""
        # Segments behind those that are forgotten: some of these shards may still know one.
        yield from map(fact_cell, self._forgotten())
        facts = self._tenants, self._clients, self._segments
        yield from (fact_cell(fact) for some in facts for fact in some.values())
        waiting = [self._waiting(at) for at in range(len(self._shards))]
        for each in waiting:
            yield from extent_cells(each)
        yield from extent_cells(self._left_guests(waiting))
        first = 0
        for at in range(len(self._shifts)):
            for objects in self._objects(at):
                yield from cells_of(objects, first)
                first += len(objects.sizes)

    def _told(self, kind: type[T]) -> Iterator[tuple[int, T]]:
        """Yield all that these shards know of a kind, and which of them does."""
        for at, shard in enumerate(self._shards):
            for fact in shard.all_but_rows():
                if isinstance(fact, kind):
                    yield at, fact

    # -- what has other numbers in each

    def _tenant_facts(self) -> dict[str, TenantFact]:
        """Namespaces by name. A quota is divided among shards, so its parts are summed up."""
        facts: dict[str, TenantFact] = {}
        for _, fact in self._told(TenantFact):
            known = facts.get(fact.name)
            number = len(facts) if known is None else known.number
            quota = fact.quota_bytes
            if known is not None and quota is not None and known.quota_bytes is not None:
                quota += known.quota_bytes
            facts[fact.name] = TenantFact(number, fact.name, quota)
        _check_count("namespaces", len(facts), TENANTS_MAX)
        return facts

    def _client_facts(self) -> dict[bytes, ClientFact]:
        """Clients by uuid, each in its newest run."""
        facts: dict[bytes, ClientFact] = {}
        for _, fact in self._told(ClientFact):
            known = facts.get(fact.uuid)
            handle = len(facts) + 1 if known is None else known.handle  # 0 is nobody
            if known is None or known.epoch < fact.epoch:
                facts[fact.uuid] = msgspec.structs.replace(fact, handle=handle)
        _check_count("clients", len(facts) + 1, CLIENTS_MAX)
        return facts

    def _objects(self, at: int) -> Iterator[Objects]:
        """Yield the objects of the first shard that is left, which goes then.

        A client that nobody knows any more has no number.
        """
        shard, shift = self._shards.pop(0), self._shifts[at]
        handles = np.zeros(CLIENTS_MAX, np.uint16)
        for client in shard.client_by_handle.values():
            handles[client.handle] = self._clients[client.uuid].handle
        tenants = np.zeros(TENANTS_MAX, np.uint16)
        for tenant in shard.tenant_by_number.values():
            tenants[tenant.number] = self._tenants[tenant.name].number
        begins = self._begins(at)
        for rows in readable_rows(shard):
            objects = shift.objects(objects_of(shard, rows))
            yield objects._replace(
                namespaces=tenants[objects.namespaces],
                writers=handles[objects.writers],
                offsets=objects.offsets + begins[objects.segments],
            )
        del shard
        gc.collect()  # parts of it know each other

    # -- segments

    def _segment_facts(self) -> dict[int, SegmentFact]:
        """Segments by number. One that not all of them have is of no use, as for their master."""
        told: dict[int, dict[int, SegmentFact]] = {}
        for at, fact in self._told(SegmentFact):
            told.setdefault(fact.index, {})[at] = fact
        facts = {}
        for index, known in told.items():
            layout = self._layouts.get(index)
            if layout is None or not layout.fits(known):
                layout = self._layouts[index] = _Layout.of_gone(known, len(self._shards))
            facts[index] = self._joined(layout, known)
        return facts

    def _joined(self, layout: _Layout, known: dict[int, SegmentFact]) -> SegmentFact:
        """Return what the new shard knows of a segment."""
        moved = [(self._shifts[at], fact) for at, fact in known.items()]
        states = [SegmentState(fact.state) for fact in known.values()]
        lives = [
            SegmentState(fact.returns_as if fact.state == SegmentState.ABSENT else fact.state)
            for fact in known.values()
        ]
        gone_at = min(
            NEVER if fact.gone_at >= NEVER else shift.until(fact.gone_at) for shift, fact in moved
        )
        owner, host = self._owner(known)
        return msgspec.structs.replace(
            next(iter(known.values())),
            host=host,
            nbytes=layout.nbytes,
            owner=owner,
            state=int(_together(states) if layout.uuid else SegmentState.GONE),
            usable_from=max(shift.until(fact.usable_from) for shift, fact in moved),
            gone_at=gone_at,
            busy_until=max(shift.until(fact.busy_until) for shift, fact in moved),
            returns_as=int(_together(lives)),
            unsure_s=max(shift.date(fact.unsure_s) for shift, fact in moved),
            part=layout.part(known),
        )

    def _owner(self, known: dict[int, SegmentFact]) -> tuple[int, str]:
        """Return the handle and the host of the newest run that has a segment."""
        owners = [
            (client.epoch, self._clients[client.uuid].handle, fact.host)
            for at, fact in known.items()
            if (client := self._shards[at].client_by_handle.get(fact.owner)) is not None
        ]
        return max(owners)[1:] if owners else (0, next(iter(known.values())).host)

    def _begins(self, at: int) -> NDArray[np.int64]:
        """Return where the slice of a shard begins in that of the new one, by segment."""
        begins = np.zeros(SEGMENT_NUMBERS, np.int64)
        for index, layout in self._layouts.items():
            begins[index] = layout.slices[at][0]
        return begins

    def _forgotten(self) -> list[ForgottenFact]:
        """Return what is known of segments that are no more."""
        memories: dict[bytes, int] = {}
        readers: dict[int, int] = {}
        for at, fact in self._told(ForgottenFact):
            shift = self._shifts[at]
            if fact.uuid:
                until = max(memories.get(fact.uuid, 0), shift.until(fact.busy_until))
                memories[fact.uuid] = until
            else:
                until = max(readers.get(fact.index, 0), shift.until(fact.readers_until))
                readers[fact.index] = until
        return [
            *(ForgottenFact(-1, uuid, until, 0) for uuid, until in memories.items()),
            *(ForgottenFact(index, b"", 0, until) for index, until in readers.items()),
        ]

    # -- space that no object has

    def _waiting(self, at: int) -> NDArray[np.int64]:
        """Return what waits for readers and writers of a shard, and is nobody's guest.

        Of writers no more is known than when they are out of time: two shards may have numbered
        theirs alike, and what one says of its put would free the space of the other.
        """
        shard = self._shards[at]
        held = np.concatenate([shard.waiting_extents(), unfinished_extents(shard)])
        held = held[(held[:, 4] < NEVER) & np.isin(held[:, 0], list(self._segments))]
        held[:, 1] += self._begins(at)[held[:, 0]]
        held[:, 3] = 0
        held[:, 4] = self._shifts[at].ends(held[:, 4])
        return held

    def _left_guests(self, waiting: list[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Return what shards have that are not among these where the new one gives out space.

        Or had: what nobody has any more is found out by the master. What one of these has is no
        guest of another any more.
        """
        live = [index for index, layout in self._layouts.items() if layout.uuid]
        every = [self._moved(at, shard.guests()) for at, shard in enumerate(self._shards)]
        guests = np.concatenate(every)
        guests = guests[np.isin(guests[:, 0], live)]
        own = [each[:, :3] for each in waiting]
        if len(guests):
            own += [self._places(at) for at in range(len(self._shards))]
        begins, ends = _ranges(np.concatenate(own))
        order = np.argsort(begins)
        # Where what begins before the end of a guest ends, at the latest.
        reach = np.maximum.accumulate(np.concatenate([[-1], ends[order]]))
        starts, stops = _ranges(guests)
        left = guests[reach[np.searchsorted(begins[order], stops)] <= starts]
        number = GUEST + 1 + np.arange(len(left))
        return np.column_stack([left, number, np.full(len(left), NEVER)])

    def _moved(self, at: int, extents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where extents of a shard lie for the new one: segment, offset, size."""
        moved = extents[:, :3].copy()
        moved[:, 1] += self._begins(at)[moved[:, 0]]
        return moved

    def _places(self, at: int) -> NDArray[np.int64]:
        """Return where the objects of a shard lie, as `_moved` does."""
        shard = self._shards[at]
        found = [np.empty((0, 3), np.int64)]
        for rows in readable_rows(shard):
            row, segment, offset = extents_of(shard, rows)
            size = shard.rows["size"][row].astype(np.int64)
            found.append(np.column_stack([segment, offset, size]).astype(np.int64))
        return self._moved(at, np.concatenate(found))


def _ranges(extents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where extents begin and end, as numbers that differ between segments."""
    begins = (extents[:, 0] << _OFFSET_BITS) + extents[:, 1]
    return begins, begins + extents[:, 2]


def _together(states: Iterable[SegmentState]) -> SegmentState:
    """Return what a segment is that is this for several shards: nothing is put there too early."""
    found = set(states)
    if found == {SegmentState.DRAINING, SegmentState.DRAINED} or len(found) == 1:
        return min(found)
    order = SegmentState.GONE, SegmentState.ABSENT, SegmentState.DRAINING, SegmentState.DRAINED
    first = next((state for state in order if state in found), SegmentState.SUSPECT)
    # Some of them still have something there, or take something.
    return SegmentState.DRAINING if first == SegmentState.DRAINED else first


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidArgumentError(
            f"one shard can know {most} {what}, and would know {count}", advice="merge fewer"
        )
