"""A shard's share of the segments: what the master tells it, directly or over `ADMIN`.

Every segment is divided into one contiguous slice per shard, so shards never compete for space.
Boundaries are multiples of 2 MiB where slices are large, so that no huge page is shared, and of
4 KiB elsewhere. The same object serves the master's own shard (plain calls) and, behind
`handle`, the connection of a master to its shard process.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec
import numpy as np

from mooncake_store.core import codes as c
from mooncake_store.core.janitor import DrainState
from mooncake_store.core.records import SegmentState as State
from mooncake_store.core.records import Status, Tier
from mooncake_store.master.counting import Counted
from mooncake_store.metrics.of_shard import of_shard
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire import cluster as wire
from mooncake_store.wire import guests
from mooncake_store.wire.hosts import YIELD, Yield, Yielded
from mooncake_store.wire.metrics import METRICS
from mooncake_store.wire.standby import COUNT, STANDBYS, Count, ShardStandbys, StandbysRequest
from transfer_engine.errors import InvalidArgumentError, StoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

    from mooncake_store.core.segment import Segment
    from mooncake_store.master.shipping import Shipping
    from mooncake_store.master.site import Site
    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.frame import Frame
    from transfer_engine.wire.registry import Operation

__all__ = ["LocalShard", "ShardLink", "slice_of"]

RequestT = TypeVar("RequestT", bound=msgspec.Struct)
ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)

LARGE_SLICE = 64 << 20
LARGE_UNIT = 2 << 20
SMALL_UNIT = 4 << 10


def slice_of(nbytes: int, shard: int, shards: int) -> tuple[int, int]:
    """Return where in a segment the slice of a shard begins, and its length (0: too small)."""
    unit = LARGE_UNIT if nbytes // shards >= LARGE_SLICE else SMALL_UNIT
    base = nbytes * shard // shards // unit * unit
    end = nbytes if shard == shards - 1 else nbytes * (shard + 1) // shards // unit * unit
    return base, end - base


class ShardLink(Protocol):
    """How the master reaches one of its shards."""

    async def ask(
        self, operation: Operation[Cold[RequestT], Cold[ReplyT]], request: RequestT
    ) -> ReplyT:
        """Return the shard's answer to a request of `ADMIN`."""


class LocalShard:
    """A shard of this process, seen from the master; without `shipping` it has no standbys."""

    def __init__(self, site: Site, shipping: Shipping | None = None) -> None:
        self._site = site
        self._shipping = shipping
        self._shard = site.shard
        self._jobs: dict[int, int] = {}  # segment number -> drain job
        self._answers: dict[int, Callable[[Any], Any]] = {
            wire.MOUNT_SLICE.opcode: self._mount,
            wire.SEGMENT_STATE.opcode: self._change,
            wire.SLICES.opcode: self._all,
            STANDBYS.opcode: self._standbys,
            COUNT.opcode: self._count,
            YIELD.opcode: self._yield,
            guests.GUESTS.opcode: self._guests,
            guests.OUTSTANDING.opcode: self._outstanding,
            guests.GUESTS_LEFT.opcode: self._guests_left,
            METRICS.opcode: lambda _: of_shard(site),
        }

    async def ask(
        self, operation: Operation[Cold[RequestT], Cold[ReplyT]], request: RequestT
    ) -> ReplyT:
        """Answer the master of this process."""
        answer = self._answers[operation.opcode](request)
        if asyncio.iscoroutine(answer):
            answer = await answer
        told: ReplyT = answer
        return told

    def handle(self, connection: Connection, frame: Frame) -> bytes | Awaitable[bytes]:
        """Answer the master of a shard process."""
        operation = wire.ADMIN.by_opcode[frame.opcode]
        answer = self._answers[frame.opcode](operation.request.unpack(frame.body))
        if asyncio.iscoroutine(answer):
            return _packed(operation, answer)
        body: bytes = operation.reply.pack(answer)
        return body

    def place(self, bases: Iterable[tuple[int, int]]) -> None:
        """Say where in their segments the slices begin that the shard has brought along.

        Before anybody is served: where that is not known of a slice, what is put there would land
        on somebody else's, so the slice goes.
        """
        known = dict(bases)
        for segment in self._shard.segments():
            if segment.index in known:
                self._site.place_slice(segment.index, known[segment.index])
            elif segment.state != State.GONE:
                self._end(segment)

    def _end(self, segment: Segment) -> Status:
        now = self._site.now()
        status = self._shard.unmount(now, segment.owner, segment.uuid, force=True)
        self._site.clients.unmounted(now, segment.index)
        return status

    def _yield(self, request: Yield) -> Yielded:
        """Let the shard rest as it is, so that a copy comes to have all of it, or go on."""
        site = self._site
        if site.keeper is None:
            raise UnavailableError("this shard keeps no journal, so it cannot be moved")
        site.yielded, site.quiet = request.on, request.quiet
        if request.on:
            site.puts.give_up()
            site.followers.give_up()
            if site.keeper.on_publish is not None:
                site.keeper.on_publish()  # standbys wait for words, and are to hear this
        return Yielded(site.keeper.head, int(self._shard.tally[c.UNFINISHED]))

    def _guests(self, request: guests.GuestsRequest) -> guests.Guests:
        """Return some of what other shards have where this one gives out space."""
        found = self._shard.guests()
        found = found[np.argsort(found[:, 3])]
        first = int(np.searchsorted(found[:, 3], request.after))
        some = found[first : first + guests.GUESTS_MAX]
        numbers, segments, places = (some[:, at].tobytes() for at in (3, 0, 1))
        return guests.Guests(numbers, segments, places)

    async def _outstanding(self, request: guests.OutstandingRequest) -> guests.Outstanding:
        """Return which of these places hold something of this shard.

        Others give out the space of what is gone. So that has to be so for a standby as well, or
        for the disk: what came back with either would have another's bytes.
        """
        there = self._shard.outstanding(
            guests.column(request.segments), guests.column(request.places)
        )
        keeper = self._site.keeper
        if keeper is not None and keeper.waits:
            await keeper.synced()
        return guests.Outstanding(there.astype(np.uint8).tobytes())

    def _guests_left(self, request: guests.GuestsLeft) -> guests.Left:
        """Have the space of guests that are none any more."""
        numbers = guests.column(request.numbers)
        return guests.Left(self._shard.guests_left(self._site.now(), numbers))

    def _all(self, request: wire.SlicesRequest) -> wire.SlicesReply:
        """Return every slice the shard has not forgotten."""
        return wire.SlicesReply(
            tuple((s.index, s.used, int(s.state)) for s in self._shard.segments())
        )

    def _standbys(self, request: StandbysRequest) -> ShardStandbys:
        """Return who follows."""
        return ShardStandbys() if self._shipping is None else self._shipping.told()

    async def _count(self, request: Count) -> ShardStandbys:
        """Let changes wait for another standby, in an era that begins now."""
        if self._shipping is not None:
            await self._shipping.turn(Counted(request.number, request.era))
        return self._standbys(StandbysRequest())

    def _mount(self, request: wire.MountSlice) -> wire.SliceReply:
        """Mount a slice in the name of its worker."""
        site, now = self._site, self._site.now()
        try:
            run = site.clients.enroll(now, request.worker, request.worker_epoch, request.host)
        except StoreError as error:
            return wire.SliceReply(error.code, message=str(error))
        status, number = self._shard.mount(
            now,
            run.handle,
            request.uuid,
            request.name,
            request.nbytes,
            request.host,
            request.number,
            Tier(request.tier),
            request.key,
            request.namespace,
        )
        if status == Status.OK:
            if number != request.number:
                # The master numbers every segment once; another number is another segment.
                return wire.SliceReply(int(Status.SEGMENT_ALREADY_EXISTS))
            site.clients.mounted(run, number)
            site.place_slice(number, request.base)
            self._jobs.pop(number, None)
        return self._answer(status, number)

    def _change(self, request: wire.SegmentChange) -> wire.SliceReply:
        """Change or look up the state of a segment."""
        now, number = self._site.now(), request.number
        found = self._find(number)
        status = Status.OK
        if request.state in ("ok", "suspect", "absent"):
            self._shard.set_absent(now, number, request.state == "absent")
            self._shard.set_suspect(now, number, request.state == "suspect")
        elif request.state == "gone" and found is not None and found.state != State.GONE:
            status = self._end(found)
        elif request.state == "drain":
            status = self._drain(now, found, request.deadline_ms)
        elif request.state == "cancel":
            status = self._shard.cancel_drain(now, self._jobs.get(number, 0))
        elif request.state not in ("gone", "query"):
            raise InvalidArgumentError(f"a segment cannot become {request.state!r}")
        return self._answer(status, number)

    def _drain(self, now: int, found: Segment | None, deadline_ms: int) -> Status:
        if found is None or found.state == State.GONE:
            return Status.SEGMENT_NOT_FOUND
        if deadline_ms:
            self._shard.unmount_gracefully(
                now, found.owner, found.uuid, now + deadline_ms * MILLISECOND_NS
            )
        # Draining a segment that drains already answers with the job that runs.
        status, job = self._shard.drain(now, found.index)
        if status == Status.OK:
            self._jobs[found.index] = job
        return status

    def _find(self, number: int) -> Segment | None:
        return next((s for s in self._shard.segments() if s.index == number), None)

    def _answer(self, status: Status, number: int) -> wire.SliceReply:
        found = self._find(number)
        job = self._shard.janitor.job(self._jobs.get(number, 0))
        # The core may have forgotten a segment by now whose last lease still runs.
        busy_ns = max(0, self._shard.space.readers_until(number) - self._site.now())
        return wire.SliceReply(
            int(status),
            used_bytes=0 if found is None else found.used,
            busy_ms=-(-busy_ns // MILLISECOND_NS),
            state=0 if found is None else int(found.state),
            drain="none" if job is None else _DRAINS[job.state],
            moved=0 if job is None else job.moved,
            message="" if job is None else job.message,
        )


async def _packed(operation: Operation[Any, Any], answer: Awaitable[Any]) -> bytes:
    body: bytes = operation.reply.pack(await answer)
    return body


_DRAINS = {
    DrainState.RUNNING: "running",
    DrainState.DONE: "done",
    DrainState.FAILED: "failed",
    DrainState.CANCELLED: "cancelled",
}
