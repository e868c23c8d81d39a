"""Running copies and moves: fetched from every shard, written to the target, reported back.

All tasks of one fetch that go to the same target segment leave in one batch. A task whose target
cannot be reached is reported as failed, with the reason; the shard then takes its space back. The
bytes of a source do not change while its task runs, so reading them needs no lease.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from mooncake_store.wire import cluster as wire
from mooncake_store.wire import shard as shard_wire
from transfer_engine.base import SegmentDescriptor
from transfer_engine.engine import TransferEngine
from transfer_engine.errors import NotFoundError, StoreError
from transfer_engine.rpc.blocking import BlockingConnection
from transfer_engine.segments.memory import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import TypeAlias

    from transfer_engine.handle import SegmentHandle
    from transfer_engine.segments.file import FileSegment

    Lent: TypeAlias = Segment | FileSegment

__all__ = ["Copier"]

log = logging.getLogger(__name__)

CALL_S = 5.0
FETCH = 64
MESSAGE_CHARS_MAX = 500
PIECE_BYTES = 8 << 20


class Copier:
    """Copies from segments of this process into those of others; used by one thread.

    `identity` says to shards whose copies these are; `describe` asks the master for segments by
    their numbers, and leaves out those that are gone.
    """

    def __init__(
        self,
        segments: Sequence[Lent],
        descriptors: Mapping[bytes, SegmentDescriptor],
        identity: shard_wire.OpenClient,
        describe: Callable[[tuple[int, ...]], tuple[wire.SegmentEntry, ...]],
        secret: bytes | None,
    ) -> None:
        self._segments = segments
        self._identity = identity
        self._describe = describe
        self._secret = secret
        self._engine = TransferEngine(secret=secret)
        # Those that are files are read like segments of others.
        self._files: dict[bytes, SegmentHandle] = {}
        for segment in segments:
            if isinstance(segment, Segment):
                self._engine.register(segment)
            else:
                self._files[segment.uuid] = self._engine.open(descriptors[segment.uuid])
        self._connections: dict[str, BlockingConnection] = {}
        self._targets: dict[int, SegmentHandle] = {}
        self._epoch = 0

    def work(self, cluster: wire.ClusterMap, numbers: tuple[int, ...]) -> bool:
        """Run what every shard has for this worker; return whether there was anything.

        `numbers` are those under which the master knows the segments, in their order.
        """
        if cluster.epoch != self._epoch:
            self._reset(cluster.epoch)
        worked = False
        for address in cluster.shards:
            connection = self._shard(address)
            body = shard_wire.FETCH_TASKS.request.pack(shard_wire.FetchTasks(FETCH))
            reply = connection.call(shard_wire.FETCH_TASKS, body, timeout_s=CALL_S)
            tasks = shard_wire.FETCH_TASKS.reply.unpack(reply).tasks
            if tasks:
                worked = True
                lent = dict(zip(numbers, self._segments, strict=True))
                self._finish(connection, tasks, self._run(lent, tasks))
        return worked

    def _shard(self, address: str) -> BlockingConnection:
        connection = self._connections.get(address)
        if connection is not None and not connection.closed and connection.stale():
            connection.close()
        if connection is None or connection.closed:
            connection = BlockingConnection.connect(
                address, shard_wire.SHARD, secret=self._secret, timeout_s=CALL_S
            )
            self._connections[address] = connection
            opening = shard_wire.OPEN.request.pack(self._identity)
            try:
                connection.call(shard_wire.OPEN, opening, timeout_s=CALL_S)
            except BaseException:
                connection.close()  # it speaks for nobody
                raise
        return connection

    def _run(self, lent: dict[int, Lent], tasks: tuple[shard_wire.TaskWork, ...]) -> dict[int, str]:
        """Copy; return the number of each task that failed, and why."""
        failures: dict[int, str] = {}
        by_target: dict[int, list[tuple[shard_wire.TaskWork, int]]] = {}
        for task in tasks:
            for segment, offset in task.targets:
                by_target.setdefault(segment, []).append((task, offset))
        for number, parts in by_target.items():
            try:
                statuses = self._copy(lent, number, parts)
            except Exception as error:  # a target must not keep the others from being copied to
                if not isinstance(error, StoreError):
                    log.exception("copying to segment %d failed", number)
                self._drop(number)
                failures |= {task.number: str(error) for task, _ in parts}
                continue
            for (task, _), status in zip(parts, statuses, strict=True):
                if status:
                    failures[task.number] = f"segment {number} answered with status {status}"
        return failures

    def _copy(
        self,
        lent: dict[int, Lent],
        target: int,
        parts: list[tuple[shard_wire.TaskWork, int]],
    ) -> list[int]:
        for task, _ in parts:
            if task.source[0] not in lent:
                raise NotFoundError(f"segment {task.source[0]} is not of this worker", advice="")
        there = self._target(target)
        for task, offset in parts:
            source = lent[task.source[0]]
            if not isinstance(source, Segment):
                self._copy_file(self._files[source.uuid], task, there, offset)
        mapped = [
            (task, offset, source.address + task.source[1])
            for task, offset in parts
            if isinstance(source := lent[task.source[0]], Segment)
        ]
        result = self._engine.write_batch(
            there,
            np.array([offset for _, offset, _ in mapped], np.int64),
            np.array([task.size for task, _, _ in mapped], np.int64),
            np.array([address for _, _, address in mapped], np.int64),
        )
        moved = iter(result.statuses.tolist())
        # What did not raise on its way from a file has arrived.
        return [
            next(moved) if isinstance(lent[task.source[0]], Segment) else 0 for task, _ in parts
        ]

    def _copy_file(
        self, source: SegmentHandle, task: shard_wire.TaskWork, target: SegmentHandle, offset: int
    ) -> None:
        """Copy one object through memory, piece by piece; raises what goes wrong."""
        piece = memoryview(bytearray(min(task.size, PIECE_BYTES)))
        for at in range(0, task.size, PIECE_BYTES):
            part = piece[: min(PIECE_BYTES, task.size - at)]
            self._engine.read_into(source, task.source[1] + at, part)
            self._engine.write_from(target, offset + at, part)

    def _target(self, number: int) -> SegmentHandle:
        handle = self._targets.get(number)
        if handle is None:
            found = self._describe((number,))
            if not found:
                raise NotFoundError(f"segment {number} is not mounted any more", advice="")
            descriptor = SegmentDescriptor.decode(found[0].descriptor)
            handle = self._targets[number] = self._engine.open(descriptor)
        return handle

    def _finish(
        self,
        connection: BlockingConnection,
        tasks: tuple[shard_wire.TaskWork, ...],
        failures: dict[int, str],
    ) -> None:
        """Report all tasks in one write and one read."""
        ids = []
        for task in tasks:
            message = failures.get(task.number, "")
            outcome = shard_wire.FinishTask(
                task.number, task.number not in failures, message[:MESSAGE_CHARS_MAX]
            )
            body = shard_wire.FINISH_TASK.request.pack(outcome)
            ids.append(connection.send(shard_wire.FINISH_TASK, body, timeout_s=CALL_S))
        for request_id in ids:
            connection.recv(request_id, timeout_s=CALL_S)

    def _drop(self, number: int) -> None:
        handle = self._targets.pop(number, None)
        if handle is not None:
            handle.close()

    def _reset(self, epoch: int) -> None:
        """Forget what belonged to a former run of the master."""
        self._epoch = epoch
        for number in list(self._targets):
            self._drop(number)
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._reset(0)
        self._engine.close()
