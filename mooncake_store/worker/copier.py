"""Running copies and moves: fetched from every shard, written to the target, reported back.

All tasks of one fetch that go to the same target segment leave in one batch. A task whose target
cannot be reached is reported as failed, with the reason; the shard then takes its space back. The
bytes of a source do not change while its task runs, so reading them needs no lease. Where something
else may lie by now than the object, they are compared with its checksum: another's are no copy.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from mooncake_store.wire import shard as shard_wire
from mooncake_store.worker.errands import CALL_S, Errands
from transfer_engine.errors import ChecksumMismatchError, NotFoundError, StoreError
from transfer_engine.segments.memory import Segment

if TYPE_CHECKING:
    from mooncake_store.worker.errands import Lent
    from transfer_engine.handle import SegmentHandle
    from transfer_engine.rpc.blocking import BlockingConnection

__all__ = ["Copier"]

log = logging.getLogger(__name__)

FETCH = 64
MESSAGE_CHARS_MAX = 500
PIECE_BYTES = 8 << 20


class Copier(Errands):
    """Copies from segments of this process into those of others."""

    def _serve(self, connection: BlockingConnection, lent: dict[int, Lent]) -> bool:
        body = shard_wire.FETCH_TASKS.request.pack(shard_wire.FetchTasks(FETCH))
        reply = connection.call(shard_wire.FETCH_TASKS, body, timeout_s=CALL_S)
        tasks = shard_wire.FETCH_TASKS.reply.unpack(reply).tasks
        if tasks:
            self._finish(connection, tasks, self._run(lent, tasks))
        return bool(tasks)

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
        there = self._target(target).handle
        filed = iter(
            [
                self._copy_file(self._files[source.uuid], task, there, offset)
                for task, offset in parts
                if not isinstance(source := lent[task.source[0]], Segment)
            ]
        )
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
            checksums=any(task.checksum is not None for task, _, _ in mapped),
        )
        if result.checksums is not None:
            for at, seen in enumerate(result.checksums.tolist()):
                if mapped[at][0].checksum not in (None, seen) and not result.statuses[at]:
                    result.statuses[at] = ChecksumMismatchError.code
        moved = iter(result.statuses.tolist())
        return [
            next(moved if isinstance(lent[task.source[0]], Segment) else filed) for task, _ in parts
        ]

    def _copy_file(
        self, source: SegmentHandle, task: shard_wire.TaskWork, target: SegmentHandle, offset: int
    ) -> int:
        """Copy one object through memory, piece by piece; raises what goes wrong on the way."""
        seen = xxhash.xxh3_64()
        piece = memoryview(bytearray(min(task.size, PIECE_BYTES)))
        for at in range(0, task.size, PIECE_BYTES):
            part = piece[: min(PIECE_BYTES, task.size - at)]
            self._engine.read_into(source, task.source[1] + at, part)
            self._engine.write_from(target, offset + at, part)
            seen.update(part)
        same = task.checksum in (None, seen.intdigest())
        return 0 if same else ChecksumMismatchError.code

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
