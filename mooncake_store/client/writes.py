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

A whole object alone takes the same steps without the columns, in `single.py`, which leaves
everything unusual to this.

Not done here: I/O (`steps.py`), what callers get (`operations.py`).
Cost: two round trips a batch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.client.arguments import count_of, flag_of, items_of, text_of
from mooncake_store.client.core import every, parts
from mooncake_store.client.directory import COPIED
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.requests import KeyRequests, shard_figures
from mooncake_store.client.results import PutManyResult
from mooncake_store.client.steps import Move, Moves
from mooncake_store.client.transfers import NO_REPLICAS, KeyTransfers, learn_segments
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
    PUT_END_SHOWN,
    PUT_REVOKE,
    PUT_START,
    PutFlag,
)
from transfer_engine.base import REFUSED
from transfer_engine.base import Operation as Direction
from transfer_engine.base import error_of as transfer_error
from transfer_engine.wire.schema import Ragged

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client.buffers import Memory
    from mooncake_store.client.core import Core, PutOptions
    from mooncake_store.client.directory import Target
    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.client.steps import Steps
    from mooncake_store.wire.shard import ShardFigures

    Column = NDArray[np.int64]

__all__ = ["StartedPut", "PutFields", "Putting", "attempt_until", "patience_ms"]

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
# Plain numbers: to compare a column with a member of an enumeration takes five times as long.
_NO_SPACE, _TENANT_QUOTA = int(Status.NO_SPACE), int(Status.TENANT_QUOTA)
_NOT_FOUND, _INVALID_WRITE = int(Status.NOT_FOUND), int(Status.INVALID_WRITE)


class PutFields:
    """The options of a put, checked. `request` has the fields that are the same for all keys."""

    def __init__(self, core: Core, options: PutOptions, count: int) -> None:
        self.upsert = flag_of(options.get("upsert", False), "upsert")
        hard_pin = flag_of(options.get("hard_pin", False), "hard_pin")
        self.replicas = count_of(options.get("replicas", core.config.replicas), "replicas")
        replicas_min = count_of(options.get("replicas_min", 1), "replicas_min")
        if not 1 <= replicas_min <= self.replicas <= REPLICAS_MAX:
            raise InvalidArgumentError(
                f"replicas_min {replicas_min} and replicas {self.replicas}: "
                f"1 <= replicas_min <= replicas <= {REPLICAS_MAX}"
            )
        wish = options.get("soft_pin")
        ttl = options.get("pin_ttl")
        soft_pin = SoftPin.PRESERVE
        if wish is not None:
            soft_pin = SoftPin.ENABLE if flag_of(wish, "soft_pin") else SoftPin.DISABLE
        elif ttl is not None:
            soft_pin = SoftPin.ENABLE
        self.excluded = _names(options.get("excluded", ()), "excluded")
        self.groups = _groups(options.get("group"), count)
        self.request: dict[str, Any] = {
            "flags": PutFlag.UPSERT * self.upsert | PutFlag.HARD_PIN * hard_pin,
            "replicas": self.replicas,
            "replicas_min": replicas_min,
            "soft_pin": soft_pin,
            "placement": -1,
            "soft_pin_ttl_ms": -1 if ttl is None else int(parse_duration(ttl) * 1000),
            "groups": Ragged.of(self.groups),
            "preferred": Ragged.of(_names(options.get("preferred", ()), "preferred")),
            "excluded": Ragged.of(self.excluded),
        }


class StartedPut(NamedTuple):
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


class Putting(KeyTransfers):
    """One put of a batch of keys."""

    def __init__(
        self, core: Core, keys: KeyBatch, memory: Memory, fields: PutFields, until: float
    ) -> None:
        super().__init__(core, keys, until)
        self.memory = memory
        self.fields = fields
        self.checksums: NDArray[np.uint64] = np.zeros(len(self.status), np.uint64)
        # Of the content, where rights are shown; 0 for none.
        self.tags: NDArray[np.uint64] = np.zeros(len(self.status), np.uint64)
        self._replicas_most = 0
        # Keys of which something may still arrive where it was written to.
        self._late: set[int] = set()
        # Segments that failed, by name, and whether they may be well again in a while.
        self._avoided: dict[bytes, bool] = {}
        # Those that refused a right to their memory.
        self._refused_by: set[bytes] = set()
        self._pause_s = _PAUSE_S
        self._fruitless = 0
        # What was done for the only key already.
        self.started: StartedPut | None = None

    def steps(self) -> Steps[PutManyResult]:
        """Begin, write and end, anew for what could not be written."""
        core, status = self.core, self.status
        core.counters.keys += len(status)
        index = self.good()
        lost = index[:0]
        while len(index):
            now, avoided, shards = time.monotonic(), len(self._avoided), core.shards
            try:
                yield from self.begin(index)
            except (TransferTimeoutError, PeerLostError, UnavailableError):
                if not self.failures and not len(lost):
                    raise
                break  # that there was no time for another attempt explains nothing
            accepted = index[status[index] == k.FOUND]
            yield from self._write(accepted)
            written = accepted[status[accepted] == k.FOUND]
            if len(written):
                yield from self.end(written)
            self.started = None
            # Other shards than those that began these puts know nothing of them.
            lost = written[(status[written] == _NOT_FOUND) & (core.shards != shards)]
            if not self.failures and not len(lost):
                break
            failed = accepted[status[accepted] == k.FAILED]
            try:
                yield from self._give_up(failed)
            except (TransferTimeoutError, PeerLostError, UnavailableError):
                break  # what was begun is in the way of another attempt
            if time.monotonic() >= self.until:
                break
            index = np.union1d(self._once_more(index, failed, now, avoided), lost)
        if self.failures:
            self._tell_tried()
        if self.fields.upsert:
            core.leases.drop(self.keys.words, every(len(status)), time.monotonic_ns())
        if (status == _NO_SPACE).any():
            yield from self._explain_no_space()
        return self.result()

    def result(self) -> PutManyResult:
        """What became of the keys."""
        status = self.status
        written = np.where(status == 0, self.cols[k.REPLICAS], 0).astype(np.uint16)
        return PutManyResult(self.keys, status.astype(np.int16), self.errors, written)

    def _once_more(self, index: Column, failed: Column, started: float, avoided: int) -> Column:
        """Return what of an attempt on `index` is worth another one.

        Of what found no room that is what was not given all the time there is, because a segment
        was avoided; and when nothing but that is left, segments may have become well again.
        """
        waiting: Column = index[self.status[index] == Status.NO_SPACE]
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
        status = self.status
        for at, (code, tried) in self.failures.items():
            if status[at] == Status.NO_SPACE:
                status[at] = code
                self.errors[at] = f"tried {tried}; no other segment had room"
            elif status[at] == code:
                self.errors[at] = f"tried {tried}"

    # Beginning.

    def begin(self, index: Column) -> Steps[None]:
        """Ask the shards for room, and to wait for it; accepted keys become FOUND."""
        if self.started is not None:
            answers = [(index, self.started.reply)]
        else:
            fields, until, groups = self.fields.request.copy(), self.until, self.fields.groups
            if groups:
                fields["groups"] = lambda some: [groups[at] for at in some.tolist()]
            if self._avoided:
                fields["excluded"] = [*self.fields.excluded, *self._avoided]
                # Those that may be well again in a while shall then be tried.
                until = min(until, time.monotonic() + self._pause_s)
            fields |= {
                "wait_ms": patience_ms(until),
                "number": lambda _: next(self.core.requests),
                "digests": self.keys.digests,
                "sizes": self.memory.sizes,
                "names": self.keys.names,
            }
            keys_max = BATCH_MAX if len(index) <= _NAMED_MAX else _NAMED_MAX
            answers = yield from self.ask(self.requests(PUT_START, index, fields, keys_max))
        self._replicas, most = NO_REPLICAS, 0
        for some, reply in answers:
            rows, _, base = self._take(some, reply)
            most = max(most, int(k.take_put(some, rows, base, self.cols)[1]))
        self._replicas_most = most
        if (self.status == _TENANT_QUOTA).any():
            yield from self._explain_quota()

    # Writing.

    def _write(self, accepted: Column) -> Steps[None]:
        """Write every replica of accepted keys; those of which one could not be written FAIL."""
        for nth in range(self._replicas_most if len(accepted) else 0):
            index = yield from self._choose(accepted, nth)
            if not len(index):
                continue
            targets, lost = yield from self._reach(index, self._opened_until)
            for target, some, error in lost:
                self.core.directory.failed(target, time.monotonic_ns())
                self._lose(target, some, error)
            if not targets:
                continue
            moves: list[Move] = []
            distant = -1
            for target, some in targets:
                moves.append(self._move(target, some, nth))
                if target.transport not in COPIED:
                    distant = max(distant, self._moved(some))
            if self.started is not None and self.started.outcome is not None:
                outcomes = [self.started.outcome]
            else:
                # A copy of memory cannot be held up by a silent owner.
                until = self.until if distant < 0 else attempt_until(self.until, distant)
                outcomes = yield Moves(moves, until)
            for (target, some), outcome in zip(targets, outcomes, strict=True):
                self._judge(target, some, outcome, nth)

    def _choose(self, accepted: Column, nth: int) -> Steps[Column]:
        """Note the place of the nth replica of each key; return the keys that have one."""
        core, cols = self.core, self.cols
        count, least, most, unknown = k.nth_replica(
            accepted, self._replicas, nth, core.directory.targets, cols
        )
        index = accepted if count == len(accepted) else accepted[cols[k.SEGMENT, accepted] >= 0]
        self._together = (index, int(least)) if least == most else None
        if unknown:
            numbers = set(cols[k.SEGMENT, index].tolist())
            new = {number for number in numbers if core.directory.known.get(number) is None}
            try:
                yield from learn_segments(core, new, self.until)
            except StoreError as error:  # what was begun is given up, not left in others' way
                self.fail(accepted, _code(error), error.what)
                return accepted[:0]
        return index

    def _opened_until(self, index: Column) -> float:
        return attempt_until(self.until, 0)

    def _move(self, target: Target, index: Column, nth: int) -> Move:
        everything = len(index) == len(self.status)
        return Move(
            target,
            Direction.WRITE,
            self.cols[k.OFFSET] if everything else self.cols[k.OFFSET, index],
            self.memory.sizes if everything else self.memory.sizes[index],
            self.memory.addresses if everything else self.memory.addresses[index],
            nth == 0,
            self.memory.keep,
            rights=None if self.rights is None else self.rights.to_write(self._places(index, nth)),
            tagging=self.core.tagging if nth == 0 else None,
        )

    def _places(self, index: Column, nth: int) -> Column:
        """Which of all replicas the nth ones of these keys are."""
        places: Column = self.cols[k.FIRST, index] + nth
        return places

    def _judge(self, target: Target, index: Column, outcome: Any, nth: int) -> None:
        """Say of each key of a batch whether this replica was written."""
        directory = self.core.directory
        if isinstance(outcome, StoreError):
            if isinstance(outcome, TransferTimeoutError) and outcome.operation != "connect":
                self._late.update(index.tolist())
            directory.failed(target, time.monotonic_ns())
            self._lose(target, index, outcome)
            return
        if outcome.checksums is not None:
            self.checksums[index] = outcome.checksums
        if outcome.tags is not None:
            self.tags[index] = outcome.tags
        if self.rights is not None:
            self.rights.written(self._places(index, nth), outcome.receipts)
        written, name = self.core.counters.bytes_written, outcome.transport
        written[name] = written.get(name, 0) + self._moved(index)
        if not outcome.statuses.any():
            if target.failures:
                directory.worked(target)
            return
        directory.failed(target, time.monotonic_ns())
        for j in np.flatnonzero(outcome.statuses).tolist():
            if outcome.statuses[j] == TransferTimeoutError.code:
                self._late.add(int(index[j]))
            error = transfer_error(int(outcome.statuses[j]), operation="put", peer=target.label)
            self._lose(target, index[j : j + 1], error)
        if self.rights is not None and (outcome.statuses == REFUSED).any():
            self._spare(target)

    def _moved(self, index: Column) -> int:
        """Bytes that one write of these keys moves."""
        return int(self.memory.sizes[index].sum())

    def _lose(self, target: Target, index: Column, error: StoreError) -> None:
        """Note replicas that were not written, and begin anew elsewhere."""
        self.fail(index, _code(error), f"{target.label}: {error.what}")
        self._avoided[target.entry.name.encode()] = _passing(error)

    def _spare(self, target: Target) -> None:
        """Try a segment again that refused a right, at once the first time: it ran out, perhaps."""
        name = target.entry.name.encode()
        if name in self._refused_by:
            self._avoided[name] = True
        else:
            self._refused_by.add(name)
            del self._avoided[name]

    # Ending.

    def end(self, index: Column) -> Steps[None]:
        """Make written keys readable."""
        fields: dict[str, Any] = {
            "digests": self.keys.digests,
            "generations": self.cols[k.GENERATION].astype(np.uint32),
            "checksums": self.checksums,
        }
        operation, rights = PUT_END, self.rights
        if rights is not None:
            operation, (first, count) = PUT_END_SHOWN, self.cols[[k.FIRST, k.REPLICAS]]
            fields["receipts"] = lambda some: rights.receipts(first[some], count[some])
            fields["tags"] = self.tags
        for some, reply in (yield from self.ask(self.requests(operation, index, fields))):
            self.status[some] = reply.statuses
        if rights is not None:
            unproven = index[self.status[index] == _INVALID_WRITE]
            if len(unproven):
                self.fail(unproven, _INVALID_WRITE, "its owners have not said that it was written")

    def _give_up(self, index: Column) -> Steps[None]:
        """Revoke keys that were not written, so that others may put them and space returns."""
        if not len(index):
            return
        for at in index.tolist():
            self.status[at] = self.failures[at].code
        yield from self._revoke(index)

    def _revoke(self, index: Column) -> Steps[None]:
        late = np.isin(index, list(self._late))
        self._late.clear()
        fields = {
            "digests": self.keys.digests,
            "generations": self.cols[k.GENERATION].astype(np.uint32),
        }
        until = max(self.until, time.monotonic() + _REVOKE_S)
        # What becomes of this changes nothing about what the keys failed with.
        apart = KeyRequests(self.core, self.keys, until)
        yield from apart.ask(
            apart.requests(PUT_REVOKE, index[~late], fields | {"late": 0})
            + apart.requests(PUT_REVOKE, index[late], fields | {"late": 1})
        )

    def _refused(self, status: int) -> list[tuple[int, Column]]:
        """The keys with this status, by the shard that refused them."""
        refused = np.flatnonzero(self.status == status)
        return parts(self.keys.words, refused, self.core.shards, BATCH_MAX)

    def _explain_no_space(self) -> Steps[None]:
        """Say with the error what holds the space."""
        found = yield from shard_figures(self.core, self.until)
        for shard, some in self._refused(Status.NO_SPACE):
            figures = found[shard]
            if not isinstance(figures, StoreError):
                text = _what_holds_space(figures)
                for at in some.tolist():
                    self.errors.setdefault(at, text)

    def _explain_quota(self) -> Steps[None]:
        """Say with the error how much of the quota is used, on the key's shard and in all."""
        core = self.core
        found = yield from shard_figures(core, self.until)
        told = [figures for figures in found if not isinstance(figures, StoreError)]
        if len(told) < len(found):
            return
        used = [figures.tenant_bytes for figures in told]
        quota = [figures.tenant_quota for figures in told]
        in_all = f"{core.namespace!r} uses {format_size(sum(used))} of {format_size(sum(quota))}"
        for shard, some in self._refused(Status.TENANT_QUOTA):
            here = ""
            if core.shards > 1:
                here = f", {format_size(used[shard])} of {format_size(quota[shard])} on its shard"
            for at in some.tolist():
                need = format_size(int(self.memory.sizes[at]) * self.fields.replicas)
                self.errors.setdefault(at, f"{in_all}{here}, and the object takes {need}")


def _code(error: StoreError) -> int:
    """What a key fails with; that a segment is not there does not say that its object is not."""
    return UnavailableError.code if isinstance(error, NotFoundError) else error.code


def _what_holds_space(figures: ShardFigures) -> str:
    """What keeps a shard from having room, as far as it does."""
    if not figures.bytes_total:
        return "no worker lends any now, those that are absent included"
    unfinished = f" and {figures.writing} unfinished puts" if figures.writing else ""
    said = [
        f"{format_size(figures.bytes_allocated)} of {format_size(figures.bytes_total)} are "
        f"allocated to {figures.objects} objects{unfinished}"
    ]
    if figures.leased_bytes:
        most, host = format_size(figures.leased_most), figures.leased_host or "an unnamed host"
        yet = f", for another {figures.leased_most_s:.0f} s" if figures.leased_most_s else ""
        of_one = f", {most} of it to one client on {host}{yet}" if figures.leased_most else ""
        said.append(f"{format_size(figures.leased_bytes)} are leased to readers{of_one}")
    if figures.hard_pinned_bytes:
        said.append(f"{format_size(figures.hard_pinned_bytes)} are pinned hard")
    if figures.quarantined_bytes:
        said.append(
            f"{format_size(figures.quarantined_bytes)} of what was removed wait for readers' "
            "leases or late writers"
        )
    return "; ".join(said)
