"""Views: the memory of an object under a lease of its own, as steps.

A view shows the memory of a replica itself where that is shared with its owner; elsewhere it holds
a copy. No I/O.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.client.kernels import reading as k
from mooncake_store.client.leases import RELEASE_MARGIN_NS
from mooncake_store.client.reads import Plan, Reading
from mooncake_store.client.requests import KeyRequests, give_back
from mooncake_store.client.sinks import BytesSink
from mooncake_store.client.steps import Opens, ReshardedError, ask_one
from mooncake_store.core.records import Status
from mooncake_store.errors import LeaseExpiredError, StoreError
from mooncake_store.wire.shard import RENEW
from transfer_engine.checksum import checksum_one

if TYPE_CHECKING:
    from mooncake_store.client.core import Core
    from mooncake_store.client.directory import Target
    from mooncake_store.client.keys import KeyBatch
    from mooncake_store.client.steps import Steps
    from transfer_engine.segments.mapping import Mapping

__all__ = ["Viewing"]

_UNSIGNED = 0xFFFF_FFFF_FFFF_FFFF


class Viewing:
    """A lease of its own on one object, and its bytes in `data`.

    With `ttl_ms` 0 any lease will do that runs for half of the client's `lease_ttl`: one of those
    that gets of this client were granted is taken out of the lease table, without a request, and
    entered there again at the end.
    """

    def __init__(
        self,
        core: Core,
        keys: KeyBatch,
        ttl_ms: int,
        verify: bool,
        until: float,
        ready_by: float | None = None,
    ) -> None:
        self.core = core
        self.data: memoryview = memoryview(b"")
        self.zero_copy = False
        self.lease_end_ns = 0
        self._keys = keys
        self._ttl_ms = ttl_ms
        self._verify = verify
        self._until = until
        self._ready_by = ready_by
        self._generation = 0
        self._place = (0, 0)  # segment and offset of what is shown
        self._leased = False

    @property
    def key(self) -> str | bytes:
        """What is shown."""
        return self._keys.label(0)

    def begin(self) -> Steps[None]:
        """Lease the object and show it; a replica that cannot be shown is copied instead."""
        core = self.core
        if not self._ttl_ms and core.config.lease_cache and self._show_leased():
            return
        self._ttl_ms = self._ttl_ms or max(1, int((self._until - time.monotonic()) * 1000))
        plan = Plan(self._ttl_ms, self._verify, False, operation="view", ready_by=self._ready_by)
        sink = BytesSink(1)
        reading = Reading(core, self._keys, sink, plan, self._until)
        reading.uncounted = True
        epoch = core.leases.epoch
        reading.status[0] = k.MISSING
        yield from reading.find(np.zeros(1, np.int64))
        if reading.status[0] == k.FOUND:
            self._generation = int(reading.cols[k.GENERATION, 0])
            self._hold(int(reading.cols[k.UNTIL, 0]))
            yield from reading.timely(np.zeros(1, np.int64))
        if reading.status[0] == k.FOUND:
            target = core.directory.known.get(int(reading.cols[k.SEGMENT, 0]))
            # What may change under a view is copied, and compared.
            sure = target is not None and not reading.unsure
            if target is not None and sure and (yield from self._show(reading, target)):
                return
            yield from reading.steps(None, (np.zeros(1, np.int64), epoch))
            if reading.status[0] == 0 and sink.values[0] is not None:
                self.data = memoryview(sink.values[0])
                return
        try:
            reading.result().check()
        finally:
            yield from self.release()

    def _show_leased(self) -> bool:
        """Show memory under a lease that a get was granted; False without either."""
        core, (low, high) = self.core, self._keys.words[0].tolist()
        enough = time.monotonic_ns() + core.lease_ns // 2
        found = core.leases.one(low, high, enough, taken=True)
        if not found[0]:
            return False
        end, size, wanted, self._generation, segment, offset = found
        content = 0 if core.shown is None else core.shown.content(low, high)
        self._place = segment, offset
        self._hold(end)
        target = core.directory.known.get(segment)
        if (
            target is not None
            and target.handle is not None
            and not target.failures
            and self._in_time(target, size)
        ):
            try:
                memory = target.handle.memory()
                if memory is not None and self._take_in(
                    memory, offset, size, (wanted, content), end
                ):
                    return True
            except StoreError:
                pass  # asked for in earnest by who called, which also tells what is wrong
        self._leased = False
        core.leases.view_ends(low)
        core.leases.take_back(low, high, self._generation, time.monotonic_ns())
        return False

    def _in_time(self, target: Target, size: int) -> bool:
        """Whether a segment is predicted to give so many bytes in time."""
        if self._ready_by is None:
            return True
        now = time.monotonic()
        return now + target.outlook(now).hoped.seconds(size, 1) <= self._ready_by

    def _hold(self, end: int) -> None:
        """Note that this has a lease of its own."""
        if not self._leased:
            self.core.leases.view_begins(int(self._keys.words[0, 0]))
        self._leased, self.lease_end_ns = True, end

    def _take_in(
        self, memory: Mapping, offset: int, size: int, wanted: tuple[int, int], end: int
    ) -> bool:
        """Show a range of memory if it is what was put and its lease runs.

        wanted: the checksum, and the tag that is looked at in its place if there is one.
        """
        data, place = memory.view(offset, size), memory.address + offset
        checksum, content = wanted
        tagging = self.core.tagging if content else None
        if not self._verify:
            same = True
        elif tagging is not None:
            same = tagging.one(place, size) == content & _UNSIGNED
        else:
            same = checksum_one(place, size) == checksum & _UNSIGNED
        mark, _ = k.verdict(0, same, end, time.monotonic_ns())
        if mark == k.FAILED:
            self.core.counters.checksum_failures += 1
        if mark:
            return False
        self.data, self.zero_copy = data, True
        return True

    def _show(self, reading: Reading, target: Target) -> Steps[bool]:
        """Map the replica that was chosen; False if it cannot be shown, or is not what was put."""
        if target.handle is None:
            outcome = yield Opens([target], self._until)
            if outcome[0] is not None:
                return False
        try:
            memory = None if target.handle is None else target.handle.memory()
        except StoreError:
            return False
        if memory is None:
            return False
        offset, size, wanted = (int(reading.cols[row, 0]) for row in (k.OFFSET, k.SIZE, k.CHECKSUM))
        self._place = target.number, offset
        content = 0 if reading.rights is None else int(reading.rights.contents[0])
        if self._take_in(memory, offset, size, (wanted, content), self.lease_end_ns):
            return True
        if self.remaining_s <= 0:
            raise LeaseExpiredError("the lease ended before the view began", key=self.key)
        return False

    @property
    def remaining_s(self) -> float:
        """Seconds until the lease ends; not positive once it has."""
        return (self.lease_end_ns - time.monotonic_ns()) / 1e9

    def renew(self, until: float) -> Steps[None]:
        """Prolong the lease; raises LeaseExpiredError when the object is another one by now."""
        if self.lease_end_ns <= time.monotonic_ns() + RELEASE_MARGIN_NS:
            yield from self._lease_anew(until)
            return
        generations = np.array([self._generation], np.uint32)
        ttl_ms = self._ttl_ms or self.core.ttl_ms
        digests = self._keys.digests
        body = RENEW.request.pack(ttl_ms=ttl_ms, digests=digests, generations=generations)
        sent = time.monotonic_ns()
        while True:
            try:
                shard = self.core.shard_of(digests.tobytes())
                reply = yield from ask_one(shard, RENEW, body, until)
            except ReshardedError:
                continue
            break
        if reply.statuses[0] != Status.OK:
            raise LeaseExpiredError("the object is gone or was replaced", key=self.key)
        self.lease_end_ns = max(self.lease_end_ns, sent + int(reply.remaining_ns[0]))

    def _lease_anew(self, until: float) -> Steps[None]:
        """Get another lease for one that ran out, if the same bytes are still where they were.

        A lease that ran out cannot be prolonged: the store does not count it any more.
        """
        core = self.core
        plan = Plan(self._ttl_ms or core.ttl_ms, verify=False, cached=False, operation="view")
        reading = Reading(core, self._keys, BytesSink(1), plan, until)
        reading.uncounted = True
        reading.status[0] = k.MISSING
        if (yield from reading.find(np.zeros(1, np.int64))):
            generation = int(reading.cols[k.GENERATION, 0])
            same = generation == self._generation
            if same and (not self.zero_copy or self._place in reading.places(0)):
                self._hold(int(reading.cols[k.UNTIL, 0]))
                return
            yield from self._give_back(generation)
        raise LeaseExpiredError("the object is gone or was replaced", key=self.key)

    def release(self) -> Steps[None]:
        """Give the lease back. Idempotent; a store that cannot be reached lets it run out."""
        if not self._leased:
            return
        self._leased = False
        low, high = self._keys.words[0].tolist()
        self.core.leases.view_ends(low)
        now = time.monotonic_ns()
        if self.lease_end_ns <= now + RELEASE_MARGIN_NS:
            return
        if not self._ttl_ms and self.core.leases.take_back(low, high, self._generation, now):
            return
        yield from self._give_back(self._generation)

    def _give_back(self, generation: int) -> Steps[None]:
        core = self.core
        asked = KeyRequests(core, self._keys, time.monotonic() + core.config.deadline_s)
        yield from asked.tell(give_back(core, self._keys.digests, np.array([generation])))
