"""What a shard is seldom asked: removal, pins, listings, inspection, totals and tasks.

Same rules as in `shard_service`; answered at once, with work bounded by the request's limits.
"""

from __future__ import annotations

import resource
import time
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.core.options import SoftPin
from mooncake_store.core.records import Status
from mooncake_store.master.bodies import names_of, words
from mooncake_store.units import MILLISECOND_NS, SECOND_NS
from mooncake_store.wire import shard as wire
from mooncake_store.wire.shard import RemoveFlag
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mooncake_store.core.shard import Shard
    from mooncake_store.core.tasks import Task
    from mooncake_store.master.clients import Peer
    from mooncake_store.master.shard_service import ShardService
    from transfer_engine.wire.frame import Frame

__all__ = ["RareOperations"]

TASKS_PER_FETCH = 256
ROWS_PER_REMOVAL = 262_144
_PAGE_BYTES = resource.getpagesize()
_SOFT_PINS = {1: SoftPin.ENABLE, 2: SoftPin.DISABLE}


class RareOperations:
    """The rest of a shard's operations, over the same core."""

    def __init__(self, service: ShardService) -> None:
        self._service = service
        self._shard: Shard = service.shard
        self._now = service.now

    def table(self) -> dict[int, Callable[[Peer, Frame], bytes]]:
        """Return the handler of each opcode."""
        return {
            wire.REMOVE.opcode: self.remove,
            wire.REMOVE_REPLICAS.opcode: self.remove_replicas,
            wire.RENAME.opcode: self.rename,
            wire.PIN.opcode: self.pin,
            wire.LIST.opcode: self.list_objects,
            wire.SNAPSHOT.opcode: self.snapshot,
            wire.STAT.opcode: self.stat,
            wire.REMOVE_MATCHING.opcode: self.remove_matching,
            wire.STATS.opcode: self.stats,
            wire.SUBMIT_TASK.opcode: self.submit_task,
            wire.TASK.opcode: self.task,
            wire.FETCH_TASKS.opcode: self.fetch_tasks,
            wire.FINISH_TASK.opcode: self.finish_task,
        }

    # -- objects

    def remove(self, peer: Peer, frame: Frame) -> bytes:
        """Remove objects."""
        flags, digests = wire.REMOVE.request.unpack(frame.body)
        self._service.keys += len(digests)
        client = peer.handle if flags & RemoveFlag.OWN_LEASES else 0
        force = bool(flags & RemoveFlag.FORCE)
        return wire.REMOVE.reply.pack(
            statuses=self._shard.remove(self._now(), digests, force, client)
        )

    def remove_replicas(self, peer: Peer, frame: Frame) -> bytes:
        """Remove what lies on one segment."""
        flags, segment, digests = wire.REMOVE_REPLICAS.request.unpack(frame.body)
        self._service.keys += len(digests)
        client = peer.handle if flags & RemoveFlag.OWN_LEASES else 0
        return wire.REMOVE_REPLICAS.reply.pack(
            statuses=self._shard.remove_replicas(self._now(), digests, segment, client)
        )

    def rename(self, peer: Peer, frame: Frame) -> bytes:
        """Give objects other keys."""
        overwrite, flags, sources, targets, names = wire.RENAME.request.unpack(frame.body)
        self._service.keys += len(sources)
        self._service.check_routing(sources)
        self._service.check_routing(targets)
        client = peer.handle if flags & RemoveFlag.OWN_LEASES else 0
        force = bool(flags & RemoveFlag.FORCE)
        statuses = self._shard.rename(
            self._now(), sources, targets, names_of(names), bool(overwrite), force, client
        )
        return wire.RENAME.reply.pack(statuses=statuses)

    def pin(self, peer: Peer, frame: Frame) -> bytes:
        """Change soft and hard pins; the first refusal of a key is its status."""
        soft, hard, ttl_ms, digests = wire.PIN.request.unpack(frame.body)
        self._service.keys += len(digests)
        if soft not in (0, 1, 2) or hard not in (-1, 0, 1):
            raise InvalidArgumentError(f"pin {soft}, {hard}: use 0 to 2 and -1 to 1")
        now = self._now()
        statuses = np.zeros(len(digests), np.int16)
        if soft:
            ttl_ns = None if ttl_ms < 0 else ttl_ms * MILLISECOND_NS
            statuses = self._shard.pin(now, digests, _SOFT_PINS[soft], ttl_ns)
        if hard >= 0:
            further = self._shard.set_hard_pin(now, digests, bool(hard))
            statuses = np.where(statuses == 0, further, statuses)
        return wire.PIN.reply.pack(statuses=statuses)

    def list_objects(self, peer: Peer, frame: Frame) -> bytes:
        """Return one page of named objects; fewer than asked when their names are long."""
        cursor, limit, prefix = wire.LIST.request.unpack(frame.body)
        limit = max(1, min(limit, wire.BATCH_MAX))
        while True:
            rows, names, following = self._shard.list_objects(
                self._now(), peer.tenant, prefix.tobytes(), min(cursor, 1 << 62), limit
            )
            if len(names) <= wire.LIST_BYTES_MAX:
                break
            limit = max(1, limit // 2)
        rows["created_s"] += np.uint32(self._epoch_s())
        return wire.LIST.reply.pack(cursor=following, rows=words(rows), names=names)

    def _epoch_s(self) -> int:
        """The date of the core's second 0: its seconds are those of its clock."""
        clock = self._service.clock
        return (clock.wall_ns() - clock.now_ns()) // SECOND_NS

    def snapshot(self, peer: Peer, frame: Frame) -> bytes:
        """Return one page of the digests of readable objects."""
        (cursor,) = wire.SNAPSHOT.request.unpack(frame.body)
        digests, following, next_event = self._shard.event_snapshot(min(cursor, 1 << 62))
        return wire.SNAPSHOT.reply.pack(
            cursor=following, stream=self._service.stream, next_event=next_event, digests=digests
        )

    def stat(self, peer: Peer, frame: Frame) -> bytes:
        """Return everything known of one object."""
        now = self._now()
        found = self._shard.stat(now, _digest(wire.STAT.request.unpack(frame.body).digest))
        if found is None:
            return wire.STAT.reply.pack(wire.StatReply(False))
        bases = self._service.bases
        return wire.STAT.reply.pack(
            wire.StatReply(
                found=True,
                name=found.name,
                size=found.size,
                state=int(found.state),
                generation=found.generation,
                checksum=found.checksum,
                lease_ms=found.lease_ns // MILLISECOND_NS,
                soft_pin_ms=found.soft_pin_ns // MILLISECOND_NS,
                hard_pin=found.hard_pin,
                group=found.group,
                age_ms=max(0, now - found.created_ns) // MILLISECOND_NS,
                hits=found.hits,
                replicas=tuple(
                    (segment, offset + int(bases[segment]), int(state))
                    for segment, offset, state in found.replicas
                ),
                created_s=found.created_ns // SECOND_NS + self._epoch_s(),
            )
        )

    def remove_matching(self, peer: Peer, frame: Frame) -> bytes:
        """Remove by name within a bounded number of rows."""
        request = wire.REMOVE_MATCHING.request.unpack(frame.body)
        try:
            removed, cursor = self._shard.remove_matching(
                self._now(),
                peer.tenant,
                request.pattern,
                request.kind,
                request.force,
                max(0, request.cursor),
                max(1, min(request.rows_max, ROWS_PER_REMOVAL)),
                peer.handle if request.own_leases else 0,
            )
        except ValueError as error:
            raise InvalidArgumentError(str(error), operation="remove_matching") from error
        return wire.REMOVE_MATCHING.reply.pack(wire.Removed(removed, cursor))

    def stats(self, peer: Peer, frame: Frame) -> bytes:
        """Return the totals of the shard and of the asking tenant."""
        wire.STATS.request.unpack(frame.body)
        found = self._shard.stats()
        quota = self._shard.tenant_quota(peer.tenant)
        room = found.room_bytes if quota is None else min(found.room_bytes, quota)
        return wire.STATS.reply.pack(
            wire.ShardFigures(
                objects=found.objects,
                writing=found.writing,
                bytes_used=found.bytes_used,
                bytes_allocated=found.bytes_allocated,
                bytes_total=found.bytes_total,
                quarantined_bytes=found.quarantined_bytes,
                leased_bytes=found.leased_bytes,
                leased_most=found.leased_most,
                leased_host=found.leased_host,
                soft_pinned=found.soft_pinned,
                hard_pinned_bytes=found.hard_pinned_bytes,
                evicted_objects=found.evicted_objects,
                evicted_bytes=found.evicted_bytes,
                expired_puts=found.expired_puts,
                lost_objects=found.lost_objects,
                tasks_unfinished=found.tasks_unfinished,
                replicas_missing=found.replicas_missing,
                tenant_objects=self._shard.tenant_objects(peer.tenant),
                tenant_bytes=self._shard.tenant_bytes(peer.tenant),
                tenant_quota=quota or 0,
                requests=self._service.requests,
                keys=self._service.keys,
                clients=len(self._service.clients),
                cpu_s=time.process_time(),
                rss_bytes=_rss_bytes(),
                event_number=self._service.next_event(),
                room_bytes=room,
                pinnable_bytes=min(room, found.pinnable_bytes),
                hits=found.hits,
                misses=found.misses,
                read_bytes=found.read_bytes,
                written_bytes=found.written_bytes,
            )
        )

    # -- tasks

    def submit_task(self, peer: Peer, frame: Frame) -> bytes:
        """Queue a copy or a move."""
        request = wire.SUBMIT_TASK.request.unpack(frame.body)
        digest, targets = _digest(request.digest), list(request.targets)
        source = None if request.source < 0 else request.source
        now = self._now()
        if request.kind == 0 and targets:
            status, number = self._shard.submit_copy(now, digest, targets, source)
        elif request.kind == 1 and len(targets) == 1:
            status, number = self._shard.submit_move(now, digest, targets[0], source)
        else:
            raise InvalidArgumentError("a copy (0) has targets, a move (1) has exactly one")
        return wire.SUBMIT_TASK.reply.pack(
            wire.TaskReply(int(status), number) if status else self._described(number)
        )

    def task(self, peer: Peer, frame: Frame) -> bytes:
        """Say how a task stands."""
        number = wire.TASK.request.unpack(frame.body).number
        return wire.TASK.reply.pack(self._described(number))

    def _described(self, number: int) -> wire.TaskReply:
        found = self._shard.task(number)
        if found is None:
            return wire.TaskReply(int(Status.TASK_NOT_FOUND), number)
        now = self._now()
        return wire.TaskReply(
            0,
            number,
            int(found.kind),
            int(found.state),
            found.message,
            max(0, now - found.created_ns) // MILLISECOND_NS,
            max(0, now - found.updated_ns) // MILLISECOND_NS,
        )

    def fetch_tasks(self, peer: Peer, frame: Frame) -> bytes:
        """Hand out work of the asking worker."""
        limit = max(0, min(wire.FETCH_TASKS.request.unpack(frame.body).limit, TASKS_PER_FETCH))
        tasks = self._shard.fetch_tasks(self._now(), peer.handle, limit)
        work = tuple(work for task in tasks if (work := self._work(peer, task)) is not None)
        return wire.FETCH_TASKS.reply.pack(wire.TaskList(work))

    def _work(self, peer: Peer, task: Task) -> wire.TaskWork | None:
        """Say what a worker has to copy; a task whose source is gone ends here."""
        now, bases = self._now(), self._service.bases
        found = self._shard.stat(now, np.array(task.digest, np.uint64))
        at = [] if found is None else [o for s, o, _ in found.replicas if s == task.source]
        if found is None or not at:
            self._shard.finish_task(now, peer.handle, task.number, False, "the source is gone")
            return None
        return wire.TaskWork(
            task.number,
            found.size,
            (task.source, at[0] + int(bases[task.source])),
            tuple(
                (int(r["segment"]), int(r["offset"]) + int(bases[r["segment"]]))
                for r in task.replicas
            ),
        )

    def finish_task(self, peer: Peer, frame: Frame) -> bytes:
        """End a task of the asking worker."""
        request = wire.FINISH_TASK.request.unpack(frame.body)
        status = self._shard.finish_task(
            self._now(), peer.handle, request.number, request.ok, request.message
        )
        return wire.FINISH_TASK.reply.pack(wire.TaskOutcome(int(status)))


def _digest(data: bytes) -> NDArray[np.uint64]:
    if len(data) != 16:
        raise InvalidArgumentError(f"a digest has 16 bytes, not {len(data)}")
    return np.frombuffer(data, "<u8")


def _rss_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * _PAGE_BYTES
