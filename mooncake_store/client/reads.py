"""Reads of batches: find, lease, transfer, check.

    1. Keys under a running lease of ours are planned from the lease table; the others are asked
       for in one request per shard, which leases them. A lease counts from when its request left.
    2. Each key gets its cheapest replica (same process, same host, then the network; segments
       that failed lately last; equal ones in turns), and the sink says where its bytes go: a
       buffer that is too small fails here, before any byte is written.
       Who said what a read is worth gets only what is predicted to be there in time (`worth.py`).
    3. One batch per segment is moved, and timed, checksums computed on the way.
    4. A failed replica is noted, the next one tried; a plan from the lease table is asked for anew.
    5. Where the lease ran out meanwhile, or was given back, the store is asked whether the same
       generation still stands where it was read. If so the bytes are good. If not, and a removal
       of this very client gave the lease back, the key is read anew; else it fails with
       LEASE_EXPIRED.

A key succeeds only if all of this did. Its buffer may have been written to otherwise.

A whole object alone takes the same steps without the columns, in `single.py`, which leaves
everything unusual to this.

Not done here: I/O (`steps.py`), what callers get (`operations.py`).
Cost: one round trip a batch; none if all leases run.
"""

from __future__ import annotations

import operator
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.client.core import every
from mooncake_store.client.costs import Sample
from mooncake_store.client.directory import COPIED
from mooncake_store.client.failures import BUFFER_SMALL, OUT_OF_RANGE, explain_absent
from mooncake_store.client.kernels import reading as k
from mooncake_store.client.results import GetResult
from mooncake_store.client.sinks import BytesSink
from mooncake_store.client.steps import Move, Moves
from mooncake_store.client.transfers import KeyTransfers, learn_segments, still_there
from mooncake_store.client.unsure import note_unsure, read_whole, remember_placeless
from mooncake_store.client.worth import timely
from mooncake_store.core.records import Status, Tier
from mooncake_store.errors import (
    ChecksumMismatchError,
    NotFoundError,
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.base import REFUSED
from transfer_engine.base import Operation as Direction
from transfer_engine.base import error_of as transfer_error

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client.core import Core
    from mooncake_store.client.directory import Target
    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.client.sinks import Sink
    from mooncake_store.client.steps import Steps
    from transfer_engine.tagging import Tagging

    Column = NDArray[np.int64]
    Values = list[bytes | memoryview | None]

__all__ = ["Answer", "Plan", "Reading", "half_of"]

# A lease that ends sooner than this is not worth starting a transfer under.
MARGIN_NS = 2_000_000
# Readings of one key when other threads of this client remove and put it all the time.
_READINGS_MAX = 8
_NO_SUMS = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a get asks for. `length` None reads to the end; `cached` allows the lease table.

    What is predicted to be there later than `ready_by`, by time.monotonic(), is not read.
    """

    ttl_ms: int
    verify: bool
    cached: bool
    offset: int = 0
    length: int | None = None
    operation: str = "get"
    ready_by: float | None = None


_MOVE = operator.itemgetter(0)


class _Begun(NamedTuple):
    """A transfer under way; `beside` is what others were moving when it began."""

    move: Move
    nbytes: int
    beside: int
    times: list[float]


class Answer(NamedTuple):
    """The reply to a get of one key, and when it was asked for."""

    reply: Any
    sent: int


class Reading(KeyTransfers):
    """One get of a batch of keys. Run `steps`, then look at `cols`, `errors` and the sink."""

    def __init__(self, core: Core, keys: KeyBatch, sink: Sink, plan: Plan, until: float) -> None:
        super().__init__(core, keys, until)
        self.sink = sink
        self.plan = plan
        # Whether whole objects are read, which is what their checksums speak of.
        self._whole = not plan.offset and plan.length is None
        n = len(self.status)
        self.lengths: Column = self.cols[k.SIZE] if self._whole else np.zeros(n, np.int64)
        self._addresses: Column = np.zeros(n, np.int64)
        self._refreshed: set[int] = set()
        self._asked_again: set[int] = set()
        # Keys that are asked for anew, once: what their answers said does not hold any more.
        self._outdated: set[int] = set()
        self._expired = 0
        # A lease that is not entered in the table is given back by who asked for it.
        self.uncounted = False
        # Keys whose places may hold something else by now: only what was compared is believed.
        self.unsure: set[int] = set()
        # What a shard answered already to a get of the only key, and when it was asked.
        self.answer: Answer | None = None

    def steps(
        self, values: Values | None = None, leased: tuple[Column, int] | None = None
    ) -> Steps[GetResult]:
        """Find, lease, transfer and check the keys; `values` are those that the sink makes.

        Who found them already says with `leased` which, and the epoch of before that.
        """
        core, status = self.core, self.status
        index, epoch = leased or (None, core.leases.epoch)
        if index is None:
            index = self.look_up()
            if not len(index) or (yield from self.find(index)) < len(status):
                index = self._where(k.FOUND)
        for _ in range(_READINGS_MAX):
            if len(index):
                yield from self._fill(index)
            if core.leases.epoch != epoch:
                # A lease of ours was given back meanwhile, perhaps the one that was read under.
                status[status == 0] = k.EXPIRED
                self._expired = len(status)
            if not self._expired:
                break
            expired = self._where(k.EXPIRED)
            began, epoch = time.monotonic_ns(), core.leases.epoch
            if len(expired):
                yield from self._ask_whether_unchanged(expired)
            lost = expired[status[expired] == Status.LEASE_EXPIRED]
            again = lost[self.cols[k.UNTIL, lost] > began]  # not the time took these leases
            if not len(again):
                break
            self._expired = 0
            index = yield from self.find_anew(again)
        return self.result(values)

    def result(self, values: Values | None = None) -> GetResult:
        """What became of the keys."""
        statuses, sizes = self.status.astype(np.int16), self.cols[k.SIZE]
        if statuses.any():
            explain_absent(statuses, self.errors, self.plan.operation)
            sizes = np.where(statuses == 0, sizes, 0)
            if values:
                for at in np.flatnonzero(statuses).tolist():
                    values[at] = None  # what it holds was not checked
        return GetResult(self.plan.operation, self.keys, statuses, self.errors, sizes, values or [])

    def look_up(self) -> Column:
        """Plan keys under a lease of ours, which are FOUND then; return the others."""
        core, status, n = self.core, self.status, len(self.status)
        core.counters.keys += n
        hits = 0
        if self.plan.cached and self.answer is None:
            now = time.monotonic_ns()
            known = self.keys.words, now + MARGIN_NS, self.cols
            if core.shown is None or self.rights is None:
                hits = core.leases.lookup(*known)
            else:
                hits = core.shown.lookup_shown(*known, self.rights)
            core.counters.lease_cache_hits += hits
        else:
            status[status == 0] = k.MISSING
        return self._where(k.MISSING) if hits or self.keys.refused else every(n)

    def _where(self, mark: int) -> Column:
        return np.flatnonzero(self.status == mark)

    def find_anew(self, index: Column) -> Steps[Column]:
        """Ask for keys as if for the first time; return those that are FOUND."""
        self.status[index] = k.MISSING
        yield from self.find(index)
        found: Column = index[self.status[index] == k.FOUND]
        return found

    # Finding.

    def find(self, index: Column) -> Steps[int]:
        """Ask the shards where objects are, choose a replica for each; return how many are."""
        core, cols = self.core, self.cols
        answer, self.answer = self.answer, None
        sent = time.monotonic_ns()
        if answer is not None:
            sent, answers = answer.sent, [(index, answer.reply)]
        else:
            answers = yield from self.ask(self.gets(index, self.plan.ttl_ms))
        found = unknown = 0
        for some, reply in answers:
            rows, replicas, base = self._take(some, reply, tagged=True)
            here, strange, doubted = k.take(
                some, rows, replicas, base, sent, time.monotonic_ns(), core.directory.targets, cols
            )
            found, unknown = found + here, unknown + strange
            if doubted:
                note_unsure(self, some)
        if unknown:
            numbers = np.unique(self._replicas[:, 1] & 0xFFFF_FFFF).tolist()
            new = core.directory.unknown(numbers, time.monotonic_ns())
            yield from learn_segments(core, new, self.until)
        self.choose(index)
        if not self.uncounted:
            if self.unsure:
                remember_placeless(self, index, sent)
            elif core.shown is None or self.rights is None:
                core.leases.remember(self.keys.words, index, sent, cols)
            else:
                core.shown.remember_shown(self.keys.words, index, sent, cols, self.rights)
        return found

    def choose(self, index: Column) -> None:
        """Give FOUND and FAILED keys the cheapest replica that was not tried, if one is left."""
        chosen, least, most = k.choose(
            index,
            self._replicas,
            self.core.directory.targets,
            time.monotonic_ns(),
            next(self.core.turns),
            self.cols,
        )
        self._together = (index, int(least)) if chosen == len(index) and least == most else None
        if self.rights is not None:
            self.rights.pick(index, self._replicas, self.cols)

    # Transferring.

    def _fill(self, index: Column) -> Steps[None]:
        """Transfer FOUND keys until each is filled, or no replica is left to try."""
        hurries = self.plan.ready_by is not None
        if hurries:
            index = yield from self.timely(index)
        if (self.unsure or self.rights is not None) and self.cuts:
            index = yield from read_whole(self, index)
        index = self.place(index)
        bytes_read = self.core.counters.bytes_read
        while len(index):
            targets, lost = yield from self._reach(index, self._attempt_until)
            begun: list[_Begun] = []
            until = self.until
            try:
                for target, some in targets:
                    begun.append(self._begin(target, some))
                    if target.transport not in COPIED:
                        until = min(until, self._attempt_until(some))
                outcomes = (yield Moves([*map(_MOVE, begun)], until)) if begun else []
            finally:
                for (target, _), each in zip(targets, begun, strict=False):
                    target.pace.under_way.pop(id(each.times), None)
            now = time.monotonic_ns()
            for (target, some), each, outcome in zip(targets, begun, outcomes, strict=True):
                if isinstance(outcome, StoreError):
                    lost.append((target, some, outcome))
                    continue
                name, (began, ended) = outcome.transport, each.times
                bytes_read[name] = bytes_read.get(name, 0) + each.nbytes
                if began < ended and not outcome.statuses.any():
                    nbytes = each.nbytes + each.beside // 2
                    target.pace.samples.append(Sample(nbytes, len(some), ended - began, ended))
                gone = self._judge(target, some, outcome, now)
                if gone is not None:
                    lost.append((target, gone, NotFoundError("it is not served there any more")))
            for target, some, error in lost:
                yield from self._lose(target, some, error)
            if not self.failures:
                return
            failed = self._where(k.FAILED)
            yield from self._find_others(failed)
            index = failed[self.status[failed] == k.FOUND]
            if (self.unsure or self.rights is not None) and self.cuts:
                index = yield from read_whole(self, index)
            if hurries:
                index = yield from self.timely(index)

    def _begin(self, target: Target, index: Column) -> _Begun:
        """A transfer, which counts as under way from now on."""
        lengths, under_way = self.lengths, target.pace.under_way
        if len(index) == 1:
            nbytes = int(lengths[index[0]])
        else:
            nbytes = int((lengths if len(index) == len(lengths) else lengths[index]).sum())
        beside, times = sum([*under_way.values()]), [0.0, 0.0]
        move = self._move(target, index, times)
        under_way[id(times)] = nbytes
        return _Begun(move, nbytes, beside, times)

    def timely(self, index: Column) -> Steps[Column]:
        """Those of FOUND keys that are predicted to be there in time; the others are refused."""
        plan = self.plan
        if plan.ready_by is None:
            return index
        return (yield from timely(self, index, plan.ready_by, plan.operation))

    @property
    def ranged(self) -> bool:
        """Whether ranges are read, of which no checksum speaks."""
        return not self._whole

    @property
    def cuts(self) -> bool:
        """Whether what is asked for may have to be cut out of whole objects."""
        return self.ranged and (bool(self.unsure) or self.rights is not None)

    def to_cut(self, index: Column) -> NDArray[np.bool_]:
        """Of which keys the whole is read: what of it is asked for is compared, or allowed, so."""
        chosen = np.isin(index, list(self.unsure))
        return chosen if self.rights is None else chosen | self.rights.needed(index)

    @property
    def compares(self) -> bool:
        """Whether whole objects are compared with their checksums."""
        return self.plan.verify or bool(self.unsure)

    def anew(self, index: Column) -> tuple[Reading, BytesSink, tuple[Column, int] | None]:
        """Another reading, of the whole of some keys' objects, and where they will be.

        What is sure is where this one has found it, and leased to it: the third is for `steps`.
        """
        core, sink = self.core, BytesSink(len(index))
        plan = replace(self.plan, verify=True, cached=False, offset=0, length=None, ready_by=None)
        whole = Reading(core, self.keys.part(index), sink, plan, self.until)
        whole.uncounted = True
        if self.unsure or self.rights is None:
            return whole, sink, None
        whole.cols[:] = self.cols[:, index]
        whole._replicas, whole.rights = self._replicas, self.rights.part(index)
        return whole, sink, (every(len(index)), core.leases.epoch)

    def targets(self, at: int) -> list[tuple[int, int, int]]:
        """(address, offset in the object, length) of what is read of a key that has its place."""
        return [(int(self._addresses[at]), self.plan.offset, int(self.lengths[at]))]

    def wanted(self, index: Column) -> Column:
        """How many bytes of each key are to be read, as far as they exist."""
        sizes: Column = self.cols[k.SIZE, index]
        if self._whole:
            return sizes
        rest = np.maximum(sizes - self.plan.offset, 0)
        return rest if self.plan.length is None else np.minimum(rest, self.plan.length)

    def place(self, index: Column) -> Column:
        """Decide what is read of each key and where it goes; return the keys that are to be."""
        plan, cols = self.plan, self.cols
        if not len(index):
            return index
        if self._whole:
            sizes = cols[k.SIZE]
            lengths = sizes if len(index) == len(sizes) else sizes[index]
        else:
            sizes = cols[k.SIZE][index]
            lengths = (
                sizes - plan.offset if plan.length is None else np.full_like(sizes, plan.length)
            )
            outside = (lengths < 0) | (plan.offset + lengths > sizes)
            self.lengths[index] = lengths
            if outside.any():
                for at in index[outside].tolist():
                    self.errors[at] = f"it has {cols[k.SIZE, at]} bytes"
                self.status[index[outside]] = OUT_OF_RANGE
                index, lengths = index[~outside], lengths[~outside]
        small = self.sink.place(index, lengths, self._addresses)
        if small is not None:
            for at, length in zip(index[small].tolist(), lengths[small].tolist(), strict=True):
                self.errors[at] = f"{length} bytes are needed"
            self.status[index[small]] = BUFFER_SMALL
            index = np.delete(index, small)
        return index

    def _attempt_until(self, index: Column) -> float:
        """When to give an attempt up: at the deadline only if no other replica is left to try.

        An owner that went silent would use up all of the time otherwise.
        """
        cols = self.cols
        all_of_them = (1 << np.minimum(cols[k.REPLICAS, index], 62)) - 1
        others = (cols[k.FIRST, index] < 0) | ((all_of_them & ~cols[k.TRIED, index]) != 0)
        return half_of(self.until) if others.any() else self.until

    def _move(self, target: Target, index: Column, times: list[float]) -> Move:
        cols, everything = self.cols, len(index) == len(self.status)
        offsets = cols[k.OFFSET] if everything else cols[k.OFFSET, index]
        if self.plan.offset:
            offsets = offsets + self.plan.offset
        whole = self._whole or bool((self.lengths[index] == cols[k.SIZE, index]).all())
        summed, tagging = whole and self.compares, None
        if summed and self.rights is not None:
            summed, tagging = self._compared_by(index)
        return Move(
            target,
            Direction.READ,
            offsets,
            self.lengths if everything else self.lengths[index],
            self._addresses if everything else self._addresses[index],
            summed,
            self.sink.keep,
            times,
            None if self.rights is None else self.rights.to_read(index),
            tagging,
        )

    def _compared_by(self, index: Column) -> tuple[bool, Tagging | None]:
        """Whether whole objects are compared with their checksums, and what makes their tags."""
        if self.rights is None or not self.compares:
            return self.compares, None
        return self.rights.compared_by(index, self.core.tagging)

    def _judge(self, target: Target, index: Column, outcome: Any, now: int) -> Column | None:
        """Say of each key of a batch whether it was read; return those whose segment moved away."""
        statuses, checksums, tags = outcome.statuses, outcome.checksums, outcome.tags
        sums = _NO_SUMS if checksums is None else checksums.view(np.int64)
        if self.rights is not None and tags is not None:  # which decide on theirs
            sums = self.rights.sums(index, tags, sums, self.cols[k.CHECKSUM, index])
        failed, expired = k.judge(index, statuses, sums, now, self.cols)
        self._expired += expired
        counters = self.core.counters
        if target.entry.tier == Tier.DISK:
            counters.disk_reads += len(index) - failed
        if not failed:
            if target.failures:
                self.core.directory.worked(target)
            return None
        bad = np.flatnonzero(statuses)
        refused = index[statuses == REFUSED] if self.rights is not None else bad[:0]
        # That a right ran out says nothing of the segment: the shard gives another one.
        self._outdated.update(refused.tolist())
        if len(refused) < len(bad):
            self.core.directory.failed(target, now)
        for at, status in zip(bad.tolist(), statuses[bad].tolist(), strict=True):
            if status == ChecksumMismatchError.code:
                counters.checksum_failures += 1
                tagged = self.rights is not None and self.rights.contents[index[at]]
                what = "the tag of the namespace differs" if tagged else "the checksum differs"
            else:
                what = transfer_error(status, operation="read", peer=target.label).what
            self.fail(index[at : at + 1], status, f"{target.label}: {what}")
        gone: Column = index[statuses == NotFoundError.code]
        return gone if len(gone) else None

    def _lose(self, target: Target, index: Column, error: StoreError) -> Steps[None]:
        """A whole batch failed: prefer others for a while, or meet a restarted owner again."""
        core = self.core
        core.directory.failed(target, time.monotonic_ns())
        status = error.code
        if isinstance(error, NotFoundError):
            status = UnavailableError.code
        self.fail(index, status, f"{target.label}: {error.what}")
        moved_away = isinstance(error, NotFoundError | PeerLostError)
        if moved_away and target.number not in self._refreshed:
            self._refreshed.add(target.number)
            # A store that does not answer must not keep the other replicas from being tried.
            with suppress(StoreError):
                yield from learn_segments(core, {target.number}, self.until)
            known = core.directory.known.get(target.number)
            if known is None:
                self._outdated.update(index.tolist())
            elif known is not target:
                # Its owner is another process now: the same replica deserves another try.
                self.cols[k.TRIED, index] = 0

    def _find_others(self, failed: Column) -> Steps[None]:
        """Give failed keys another replica.

        Those planned from the lease table ask anew, and once those that were refused, and those
        whose segment nobody has any more: a master that was started anew may have lost the objects.
        """
        core, status, tried_before = self.core, self.status, failed
        core.counters.failovers += len(failed)
        out_of_time = time.monotonic() >= self.until
        outdated = np.isin(failed, list(self._outdated - self._asked_again))
        self._asked_again |= self._outdated
        stale = failed[(self.cols[k.FIRST, failed] < 0) | outdated]
        if len(stale):
            # Also when there is no time to ask: the next get must not follow the same plan.
            core.leases.drop(self.keys.words, stale, time.monotonic_ns())
        if len(stale) and not out_of_time:
            self.place((yield from self.find_anew(stale)))
            failed = failed[status[failed] == k.FAILED]
        if not out_of_time:
            self.choose(failed)
            yield from self._doubt(failed[status[failed] == k.FAILED])
        for at in failed[status[failed] == k.FAILED].tolist():
            code, tried = self.failures[at]
            status[at] = TransferTimeoutError.code if out_of_time else code
            self.errors[at] = f"tried {tried}"
        for at in tried_before[status[tried_before] == Status.NOT_FOUND].tolist():
            # Found damaged by others as well, who took it away meanwhile.
            self.errors[at] = f"tried {self.failures[at].tried}"

    def _doubt(self, failed: Column) -> Steps[None]:
        """Find anew what differs from its checksum because its lease did not hold.

        A master that was started anew knows no lease of its former life, and gives the memory to
        others. Asked once a key: what still stands where it was read is damaged.
        """
        status, code = self.status, ChecksumMismatchError.code
        differing = {at for at in failed.tolist() if self.failures[at].code == code}
        index = np.array(sorted(differing - self._asked_again), np.int64)
        if not len(index):
            return
        self._asked_again.update(index.tolist())
        yield from self._ask_whether_unchanged(index)
        status[index[status[index] == 0]] = k.FAILED
        changed = index[status[index] == Status.LEASE_EXPIRED]
        if len(changed):
            self.place((yield from self.find_anew(changed)))

    # Checking.

    def _ask_whether_unchanged(self, index: Column) -> Steps[None]:
        """Ask whether objects read without a lease still are what and where they were.

        What is the same at a later time was not touched before it. Nothing is leased by this.
        """
        counters, cols = self.core.counters, self.cols
        counters.lease_renewals += len(index)
        for some, reply in (yield from self.ask(self.gets(index, 0))):
            places = cols[k.GENERATION, some], cols[k.SEGMENT, some], cols[k.OFFSET, some]
            same = still_there(reply, *places)
            self.status[some] = np.where(same, 0, Status.LEASE_EXPIRED)
            counters.leases_expired += int(len(some) - np.count_nonzero(same))


def half_of(until: float) -> float:
    """The middle of the time that is left."""
    now = time.monotonic()
    return now + max(0.0, until - now) / 2
