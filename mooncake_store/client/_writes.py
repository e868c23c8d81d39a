"""Puts of batches: begin, write every replica, end.

    1. One request per shard begins the batch; each key is accepted with its replicas, present
       already, or refused. A full pool makes the shard wait within the deadline.
    2. One batch per segment writes the bytes; the checksum is computed as they pass.
    3. One request per shard makes what was written readable, with its checksum.

A key whose replica could not be written is given up and begun anew elsewhere, until the deadline.
Where no other segment has room, the shard waits for some, and after a pause that doubles up to 2 s
those that failed may be tried again: their owner may be back. An owner over the network has 2 s and
a time by the bytes to take a write, so one that stands still does not use up the deadline. After
such a timeout something of the write may still arrive: the space is given up as a late writer's.

A whole object alone takes the same steps without the columns, in `_straight.py`, which leaves
everything unusual to this.

Not done here: I/O (`_steps.py`), what callers get (`_operations.py`).
Cost: two round trips a batch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.client import _kernels as k
from mooncake_store.client._arguments import count_of, flag_of, items_of, text_of
from mooncake_store.client._core import every, parts
from mooncake_store.client._reads import copied, learn_segments
from mooncake_store.client._steps import Move, Moves, Opens, ask
from mooncake_store.core.options import SoftPin
from mooncake_store.core.records import REPLICAS_MAX, Status
from mooncake_store.errors import (
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from mooncake_store.units import format_size, parse_duration
from mooncake_store.wire.shard import (
    BATCH_MAX,
    NAME_BLOB_MAX,
    PUT_END,
    PUT_REVOKE,
    PUT_START,
    STATS,
    PutFlag,
    StatsRequest,
)
from transfer_engine.base import Operation as Direction
from transfer_engine.base import error_of as transfer_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client._buffers import Memory
    from mooncake_store.client._core import Core, PutOptions
    from mooncake_store.client._directory import Road
    from mooncake_store.client._keys import KeyBatch
    from mooncake_store.client._steps import Steps
    from mooncake_store.wire.shard import ShardFigures

    Column = NDArray[np.int64]

__all__ = ["Begun", "Putting", "Wishes", "attempt_until", "patience_ms"]

_FRUITLESS_MAX = 3
"""Attempts that failed without naming a segment that could be avoided next time."""
_PAUSE_S = 0.25
_PAUSE_MAX_S = 2.0
_STANDSTILL_S = 2.0
_SLOWEST_BYTES_PER_S = 4_000_000
"""An owner that takes less is given up, as far as there is time to try others."""
_REVOKE_S = 0.5
"""What giving up may take beyond the deadline: others would wait far longer for the key."""
# The longest key is 4 KiB: a request of this many keys cannot pass the limit of its names.
_NAMED_MAX = NAME_BLOB_MAX // 4096
_NO_REPLICAS = np.empty((0, 2), np.int64)
_NO_REPLICAS.flags.writeable = False


class Wishes:
    """The options of a put as the fields of its request."""

    def __init__(self, core: Core, options: PutOptions, count: int) -> None:
        self.upsert = flag_of(options.get("upsert", False), "upsert")
        hard_pin = flag_of(options.get("hard_pin", False), "hard_pin")
        self.flags = PutFlag.UPSERT * self.upsert | PutFlag.HARD_PIN * hard_pin
        self.replicas = count_of(options.get("replicas", core.config.replicas), "replicas")
        self.replicas_min = count_of(options.get("replicas_min", 1), "replicas_min")
        if not 1 <= self.replicas_min <= self.replicas <= REPLICAS_MAX:
            raise InvalidArgumentError(
                f"replicas_min {self.replicas_min} and replicas {self.replicas}: "
                f"1 <= replicas_min <= replicas <= {REPLICAS_MAX}"
            )
        wish = options.get("soft_pin")
        ttl = options.get("pin_ttl")
        self.soft_pin = SoftPin.PRESERVE
        if wish is not None:
            self.soft_pin = SoftPin.ENABLE if flag_of(wish, "soft_pin") else SoftPin.DISABLE
        elif ttl is not None:
            self.soft_pin = SoftPin.ENABLE
        self.soft_pin_ttl_ms = -1 if ttl is None else int(parse_duration(ttl) * 1000)
        self.preferred = _names(options.get("preferred", ()), "preferred")
        self.excluded = _names(options.get("excluded", ()), "excluded")
        self.groups = _groups(options.get("group"), count)

    def fields(self) -> dict[str, Any]:
        """The fields of a request that do not depend on the keys."""
        return {
            "flags": self.flags,
            "replicas": self.replicas,
            "replicas_min": self.replicas_min,
            "soft_pin": self.soft_pin,
            "placement": -1,
            "soft_pin_ttl_ms": self.soft_pin_ttl_ms,
            "groups": self.groups,
            "preferred": self.preferred,
            "excluded": self.excluded,
        }


class Begun(NamedTuple):
    """The reply to the begin of one key, and what a first transfer failed with, if one was made."""

    reply: Any
    outcome: Any


def patience_ms(until: float) -> int:
    """How long a shard may wait for space: the answer has to be back before the deadline."""
    left_ms = max(0, int((until - time.monotonic()) * 1000))
    return max(0, left_ms - max(50, left_ms // 10))


def attempt_until(until: float, nbytes: int) -> float:
    """When to give a write over the network up: never after `until`."""
    now = time.monotonic()
    enough_s = min(_STANDSTILL_S, (until - now) / 2) + nbytes / _SLOWEST_BYTES_PER_S
    return min(until, now + enough_s)


def _passing(error: StoreError) -> bool:
    """Whether a segment that failed like this may be well again in a while."""
    if isinstance(error, UnavailableError):
        return error.operation == "connect"
    return isinstance(error, PeerLostError | TransferTimeoutError | NotFoundError)


def _names(names: Any, option: str) -> list[bytes]:
    if isinstance(names, str):
        raise InvalidArgumentError(f"{option} is a list of segment names, not one name")
    return [text_of(name, f"each of {option}") for name in items_of(names, option)]


def _groups(group: Any, count: int) -> list[bytes]:
    if group is None:
        return []
    groups = [group] * count if isinstance(group, str) else items_of(group, "group")
    if len(groups) != count:
        raise InvalidArgumentError(f"{count} keys and {len(groups)} groups")
    return [text_of(name, "a group") for name in groups]


class Putting:
    """One put of a batch of keys. Run `steps`, then look at `statuses`, `errors`, `written`."""

    def __init__(
        self, core: Core, keys: KeyBatch, memory: Memory, wishes: Wishes, until: float
    ) -> None:
        self.core = core
        self.keys = keys
        self.memory = memory
        self.wishes = wishes
        self.until = until
        self.errors: dict[int, StoreError | str] = {}
        n = len(keys)
        self.cols: NDArray[np.int64] = np.zeros((k.COLUMNS, n), np.int64)
        self.cols[k.STATUS] = keys.statuses()
        self.checksums: NDArray[np.uint64] = np.zeros(n, np.uint64)
        self._replicas: Column = _NO_REPLICAS
        self._tried: dict[int, str] = {}
        # Keys of which something may still arrive where it was written to.
        self._late: set[int] = set()
        # Segments that failed, by name, and whether they may be well again in a while.
        self._avoided: dict[bytes, bool] = {}
        self._pause_s = _PAUSE_S
        self._fruitless = 0
        # What was done for the only key already.
        self.begun: Begun | None = None

    def statuses(self) -> NDArray[np.int16]:
        """The final status of each key; ALREADY_EXISTS and SUPERSEDED are no failures."""
        statuses: NDArray[np.int16] = self.cols[k.STATUS].astype(np.int16)
        return statuses

    @property
    def written(self) -> NDArray[np.uint16]:
        """Replicas of each key that was stored."""
        stored = self.cols[k.STATUS] == 0
        return np.where(stored, self.cols[k.REPLICAS], 0).astype(np.uint16)

    def steps(self) -> Steps[None]:
        """Put; see the module."""
        core, cols = self.core, self.cols
        core.counters.keys += len(self.keys)
        index = every(len(self.keys))
        if self.keys.refused:
            index = np.flatnonzero(cols[k.STATUS] == 0)
        while len(index):
            started, avoided = time.monotonic(), len(self._avoided)
            try:
                yield from self.begin(index)
            except (TransferTimeoutError, PeerLostError, UnavailableError):
                if not self._tried:
                    raise
                break  # that there was no time for another attempt explains nothing
            failed = yield from self._write(index)
            self.begun = None
            try:
                yield from self._give_up(failed)
            except (TransferTimeoutError, PeerLostError, UnavailableError):
                break  # what was begun is in the way of another attempt
            if time.monotonic() >= self.until:
                break
            index = self._once_more(index, failed, started, avoided)
        self._tell_tried()
        if self.wishes.upsert:
            core.leases.drop(self.keys.words, every(len(self.keys)), time.monotonic_ns())
        if (cols[k.STATUS] == Status.NO_SPACE).any():
            yield from self._explain_no_space()

    def _once_more(self, index: Column, failed: Column, started: float, avoided: int) -> Column:
        """Return what of an attempt on `index` is worth another one.

        Of what found no room that is what was not given all the time there is, because a segment
        was avoided; and when nothing but that is left, segments may have become well again.
        """
        waiting: Column = index[self.cols[k.STATUS, index] == Status.NO_SPACE]
        nothing: Column = index[:0]
        if len(failed):
            self._fruitless += len(self._avoided) == avoided
            again: Column = np.union1d(failed, waiting) if avoided else failed
            return again if self._fruitless < _FRUITLESS_MAX else nothing
        passing = [name for name, may_be_well in self._avoided.items() if may_be_well]
        if not passing or time.monotonic() - started < self._pause_s / 2:
            return nothing  # that changes anything, or the shard lets nobody wait
        for name in passing:
            del self._avoided[name]
        self._pause_s = min(2 * self._pause_s, _PAUSE_MAX_S)
        return waiting

    def _tell_tried(self) -> None:
        """Say of keys that failed what was tried, also where that left no segment to try."""
        status, cause = self.cols[k.STATUS], self.cols[k.CHECKSUM]
        for at, tried in self._tried.items():
            if status[at] == Status.NO_SPACE:
                status[at] = cause[at]
                self.errors[at] = f"tried {tried}; no other segment had room"
            elif status[at] == cause[at]:
                self.errors[at] = f"tried {tried}"

    # Beginning.

    def begin(self, index: Column) -> Steps[None]:
        """Ask the shards for room, and to wait for it; accepted keys become FOUND."""
        keys, cols = self.keys, self.cols
        batch = BATCH_MAX if len(index) <= _NAMED_MAX else _NAMED_MAX
        split = parts(keys, index, self.core.shards, batch)
        if self.begun is not None:
            replies = [self.begun.reply]
        else:
            calls = [(shard, PUT_START, self._request(some)) for shard, some in split]
            replies = yield from ask(calls, self.until)
        most = 0
        self._replicas = _NO_REPLICAS
        for (_, some), reply in zip(split, replies, strict=True):
            if isinstance(reply, StoreError):
                self._blame(some, reply)
                continue
            rows, replicas = reply.rows.view(np.int64), reply.replicas.view(np.int64)
            if len(rows) != len(some):
                raise UnavailableError(f"{len(rows)} answers came to {len(some)} keys")
            base = len(self._replicas)
            most = max(most, int(k.take_put(some, rows, base, cols)[1]))
            self._replicas = replicas if not base else _joined(self._replicas, replicas)
        cols[k.TRIED] = most
        if (cols[k.STATUS] == Status.TENANT_QUOTA).any():
            yield from self._explain_quota()

    def places(self, at: int) -> list[tuple[int, int]]:
        """(segment, offset) of each replica an accepted key was given."""
        first, count = int(self.cols[k.FIRST, at]), int(self.cols[k.REPLICAS, at])
        rows = self._replicas[first : first + count]
        return [(int(row[1]) & 0xFFFF_FFFF, int(row[0])) for row in rows]

    def _request(self, some: Column) -> bytes:
        wishes, keys, until = self.wishes, self.keys, self.until
        if self._avoided:
            until = min(until, time.monotonic() + self._pause_s)
        everything = len(some) == len(keys)
        groups = wishes.groups
        if groups and not everything:
            groups = [groups[at] for at in some.tolist()]
        return PUT_START.request.pack(
            wait_ms=patience_ms(until),
            digests=keys.digests if everything else keys.digests[some],
            sizes=self.memory.sizes if everything else self.memory.sizes[some],
            names=keys.names(None if everything else some),
            **wishes.fields() | {"groups": groups, "excluded": [*wishes.excluded, *self._avoided]},
        )

    def _blame(self, index: Column, error: StoreError) -> None:
        self.cols[k.STATUS, index] = error.code
        self.errors.update(dict.fromkeys(index.tolist(), error))

    # Writing.

    def _write(self, index: Column) -> Steps[Column]:
        """Write accepted keys and end them; return those that have to be given up."""
        cols = self.cols
        accepted: Column = index[cols[k.STATUS, index] == k.FOUND]
        if not len(accepted):
            return accepted
        for nth in range(int(cols[k.TRIED, 0])):
            yield from self._write_replica(accepted, nth)
        failed: Column = accepted[cols[k.STATUS, accepted] != k.FOUND]
        written = accepted if not len(failed) else accepted[cols[k.STATUS, accepted] == k.FOUND]
        if len(written):
            yield from self.end(written)
        failed = failed[cols[k.STATUS, failed] == k.FAILED]
        return failed

    def _write_replica(self, accepted: Column, nth: int) -> Steps[None]:
        """Write the nth replica of each key that has one."""
        core, cols = self.core, self.cols
        count, least, most, unknown = k.nth_replica(
            accepted, self._replicas, nth, core.directory.roads, cols
        )
        if unknown:
            numbers = set(cols[k.SEGMENT, accepted].tolist()) - {-1}
            new = {number for number in numbers if core.directory.get(number) is None}
            try:
                yield from learn_segments(core, new, self.until)
            except StoreError as error:  # what was begun is given up, not left in others' way
                self._fail(accepted, error, "")
                return
        if count == len(accepted) and least == most:
            groups = [(int(least), accepted)]
        else:
            segments = cols[k.SEGMENT, accepted]
            groups = [
                (int(s), accepted[segments == s]) for s in np.unique(segments).tolist() if s >= 0
            ]
        roads: list[tuple[Road, Column]] = []
        for number, some in groups:
            road = core.directory.get(number)
            if road is None:
                self._fail(some, UnavailableError(f"segment {number} is unknown"), "")
            else:
                roads.append((road, some))
        roads = yield from self._reached(roads)
        if not roads:
            return
        if self.begun is not None and self.begun.outcome is not None:
            outcomes = [self.begun.outcome]
        else:
            moves = [self._move(road, some, nth) for road, some in roads]
            outcomes = yield Moves(moves, self._attempt_until(roads))
        for (road, some), outcome in zip(roads, outcomes, strict=True):
            self._judge(road, some, outcome, nth)

    def _reached(self, roads: list[tuple[Road, Column]]) -> Steps[list[tuple[Road, Column]]]:
        """Open what is not open; a segment whose owner restarted is looked up once more."""
        closed = [road for road, _ in roads if road.handle is None]
        if not closed:
            return roads
        outcome = yield Opens(closed, attempt_until(self.until, 0))
        failures = {road.number: error for road, error in zip(closed, outcome, strict=True)}
        reached = []
        for road, some in roads:
            error = failures.get(road.number)
            if error is None:
                reached.append((road, some))
                continue
            self.core.directory.failed(road, time.monotonic_ns())
            self._fail(some, error, road.label)
            self._avoid(road, error)
        return reached

    def _attempt_until(self, roads: list[tuple[Road, Column]]) -> float:
        """When to give a write up; a copy of memory cannot be held up by a silent owner."""
        if all(copied(road) for road, _ in roads):
            return self.until
        return attempt_until(self.until, max(self._moved(some) for _, some in roads))

    def _move(self, road: Road, index: Column, nth: int) -> Move:
        everything = len(index) == len(self.keys)
        return Move(
            road,
            Direction.WRITE,
            self.cols[k.OFFSET] if everything else self.cols[k.OFFSET, index],
            self.memory.sizes if everything else self.memory.sizes[index],
            self.memory.addresses if everything else self.memory.addresses[index],
            nth == 0,
            self.memory.keep,
        )

    def _judge(self, road: Road, index: Column, outcome: Any, nth: int) -> None:
        core = self.core
        if isinstance(outcome, StoreError):
            core.directory.failed(road, time.monotonic_ns())
            self._fail(index, outcome, road.label)
            if isinstance(outcome, TransferTimeoutError) and outcome.operation != "connect":
                self._late.update(index.tolist())
            self._avoid(road, outcome)
            return
        if outcome.checksums is not None:
            self.checksums[index] = outcome.checksums
        name = outcome.transport
        counters = core.counters
        counters.bytes_written[name] = counters.bytes_written.get(name, 0) + self._moved(index)
        if not outcome.statuses.any():
            core.directory.worked(road)
            return
        core.directory.failed(road, time.monotonic_ns())
        for j in np.flatnonzero(outcome.statuses).tolist():
            if outcome.statuses[j] == TransferTimeoutError.code:
                self._late.add(int(index[j]))
            error = transfer_error(int(outcome.statuses[j]), operation="put", peer=road.label)
            self._fail(index[j : j + 1], error, road.label)
            self._avoid(road, error)

    def _moved(self, index: Column) -> int:
        """Bytes that one write of these keys moves."""
        return int(self.memory.sizes[index].sum())

    def _avoid(self, road: Road, error: StoreError) -> None:
        """Begin anew elsewhere."""
        self._avoided[road.entry.name.encode()] = _passing(error)

    def _fail(self, index: Column, error: StoreError, label: str) -> None:
        """Note a replica that was not written."""
        what = f"{label}: {error.what}" if label else error.what
        code = UnavailableError.code if isinstance(error, NotFoundError) else error.code
        for at in index.tolist():
            before = self._tried.get(at, what)
            self._tried[at] = before if what in before else f"{before}; {what}"
        self.cols[k.STATUS, index] = k.FAILED
        self.cols[k.CHECKSUM, index] = code

    # Ending.

    def end(self, index: Column) -> Steps[None]:
        """Make written keys readable."""
        keys, cols = self.keys, self.cols
        split = parts(keys, index, self.core.shards, BATCH_MAX)
        calls = []
        for shard, some in split:
            everything = len(some) == len(keys)
            body = PUT_END.request.pack(
                digests=keys.digests if everything else keys.digests[some],
                generations=cols[k.GENERATION, some].astype(np.uint32),
                checksums=self.checksums if everything else self.checksums[some],
            )
            calls.append((shard, PUT_END, body))
        replies = yield from ask(calls, self.until)
        for (_, some), reply in zip(split, replies, strict=True):
            if isinstance(reply, StoreError):
                self._blame(some, reply)
            else:
                cols[k.STATUS, some] = reply.statuses

    def _give_up(self, index: Column) -> Steps[None]:
        """Revoke keys that were not written, so that others may put them and space returns."""
        keys, cols = self.keys, self.cols
        if not len(index):
            return
        cols[k.STATUS, index] = cols[k.CHECKSUM, index]
        late = np.isin(index, list(self._late))
        self._late.clear()
        calls = [
            (
                shard,
                PUT_REVOKE,
                PUT_REVOKE.request.pack(
                    late=is_late,
                    digests=keys.digests[some],
                    generations=cols[k.GENERATION, some].astype(np.uint32),
                ),
            )
            for is_late, chosen in ((0, index[~late]), (1, index[late]))
            for shard, some in parts(keys, chosen, self.core.shards, BATCH_MAX)
            if len(some)
        ]
        yield from ask(calls, max(self.until, time.monotonic() + _REVOKE_S))

    def _explain_no_space(self) -> Steps[None]:
        """Say with the error what holds the space."""
        core, request = self.core, STATS.request.pack(StatsRequest())
        try:
            found = yield from ask([(n, STATS, request) for n in range(core.shards)], self.until)
        except (TransferTimeoutError, PeerLostError, UnavailableError):
            return
        refused = np.flatnonzero(self.cols[k.STATUS] == Status.NO_SPACE)
        for shard, some in parts(self.keys, refused, core.shards, BATCH_MAX):
            if not isinstance(found[shard], StoreError):
                text = _what_holds_space(found[shard])
                for at in some.tolist():
                    self.errors.setdefault(at, text)

    def _explain_quota(self) -> Steps[None]:
        """Say with the error how much of the quota is used, on the key's shard and in all."""
        core, request = self.core, STATS.request.pack(StatsRequest())
        try:
            found = yield from ask([(n, STATS, request) for n in range(core.shards)], self.until)
        except (TransferTimeoutError, PeerLostError, UnavailableError):
            return
        if any(isinstance(figures, StoreError) for figures in found):
            return
        used = [figures.tenant_bytes for figures in found]
        quota = [figures.tenant_quota for figures in found]
        in_all = f"{core.namespace!r} uses {format_size(sum(used))} of {format_size(sum(quota))}"
        refused = np.flatnonzero(self.cols[k.STATUS] == Status.TENANT_QUOTA)
        for shard, some in parts(self.keys, refused, core.shards, BATCH_MAX):
            here = ""
            if core.shards > 1:
                here = f", {format_size(used[shard])} of {format_size(quota[shard])} on its shard"
            for at in some.tolist():
                need = format_size(int(self.memory.sizes[at]) * self.wishes.replicas)
                self.errors.setdefault(at, f"{in_all}{here}, and the object takes {need}")


def _what_holds_space(figures: ShardFigures) -> str:
    """What keeps a shard from having room."""
    leased = f"{format_size(figures.leased_bytes)} are leased to readers"
    if figures.leased_most:
        most, host = format_size(figures.leased_most), figures.leased_host or "an unnamed host"
        leased = f"{leased}, {most} of it to one client on {host}"
    return (
        f"{format_size(figures.bytes_allocated)} of {format_size(figures.bytes_total)} are "
        f"allocated to {figures.objects} objects and {figures.writing} unfinished puts; "
        f"{leased}; {format_size(figures.hard_pinned_bytes)} are pinned hard; "
        f"{format_size(figures.quarantined_bytes)} of what was removed wait for readers' leases "
        "or late writers"
    )


def _joined(one: Column, other: Column) -> Column:
    out: Column = np.concatenate((one, other))
    out.flags.writeable = False  # the one type the kernels are compiled for
    return out
