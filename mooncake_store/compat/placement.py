"""Calls about where things lie: replicas, copies and moves, segments of this process.

Segments are named as their owner's `get_hostname` says. A task's identifier is (shard + 1, number).
Cost: one request each; names of segments are asked for once per call that takes them.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mooncake_store.client.extension import CLUSTER, KeyBatch, ask_one
from mooncake_store.compat.base import Base, require_keys, require_text
from mooncake_store.compat.codes import INVALID_PARAMS, NOT_FOUND, NOT_SUPPORTED, OK
from mooncake_store.compat.setup import SEGMENT_BYTES_MIN, Wanted, lend
from mooncake_store.compat.values import (
    Descriptor,
    LocalDiskDescriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
    ReplicaStatus,
    TaskStatus,
    TaskType,
)
from mooncake_store.core.records import SegmentState, Status
from mooncake_store.errors import NoSpaceError, NotFoundError, OverloadedError, StoreError
from mooncake_store.program.descriptors import lendable
from mooncake_store.wire.cluster import SEGMENTS, SegmentsRequest
from mooncake_store.wire.shard import SUBMIT_TASK, TASK, SubmitTask, TaskRequest

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from mooncake_store.client.results import BatchResult, ObjectInfo
    from mooncake_store.worker.worker import Worker

__all__ = ["PlacementCalls"]

_TASK_NOT_FOUND = int(Status.TASK_NOT_FOUND)
_NO_TASK = (0, 0)
_FILE_NOT_FOUND = -1100
_TAKING = (SegmentState.OK, SegmentState.SUSPECT)
"""States of segments that objects may be copied to."""
_MOUNTED = (*_TAKING, SegmentState.DRAINING, SegmentState.DRAINED, SegmentState.ABSENT)


class PlacementCalls(Base):
    """Replicas, tasks, segments."""

    # -- replicas

    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """The readable replicas of an object; [] if there is none."""
        return self.batch_get_replica_desc([require_text(key)]).get(key, [])

    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """The readable replicas of each object there is."""
        keys = require_keys(keys)
        if not keys:
            return {}
        try:
            found = self._require().query_many(keys)
        except StoreError as error:
            self._failed("get_replica_desc", error)
            return {}
        infos = zip(keys, found.infos, strict=True)
        return {key: _described(info) for key, info in infos if info is not None}

    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove objects nobody reads; the keys of those that went.

        With a segment named only what lies there goes: an object that has replicas elsewhere stays.
        """
        keys = require_keys(keys)
        if not keys:
            return []
        try:
            result = self._cleared(keys, require_text(segment_name))
        except StoreError as error:
            self._failed("batch_replica_clear", error)
            return []
        return [
            key for key, status in zip(keys, result.statuses.tolist(), strict=True) if not status
        ]

    def _cleared(self, keys: list[str], segment_name: str) -> BatchResult:
        client = self._require()
        if not segment_name:
            return client.remove_many(keys)
        number = self._segment_numbers(_MOUNTED).get(segment_name)
        if number is None:
            raise NotFoundError(f"no segment is named {segment_name!r}")
        return client._run(client._operations.remove_replicas(keys, number, {}))

    # -- tasks

    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[tuple[int, int], int]:
        """Start to copy an object to segments; (task, 0), or ((0, 0), a negative number)."""
        return self._submit(key, require_keys(targets), None)

    def create_move_task(self, key: str, source: str, target: str) -> tuple[tuple[int, int], int]:
        """Start to move an object between segments; (task, 0), or ((0, 0), a negative number)."""
        return self._submit(key, [require_text(target)], require_text(source))

    def _submit(
        self, key: str, targets: list[str], source: str | None
    ) -> tuple[tuple[int, int], int]:
        """Start to copy an object to segments, or to move it where it has a source."""
        require_text(key)
        try:
            client = self._require()
            if not client.exists(key):
                return _NO_TASK, NOT_FOUND
            numbers = self._segment_numbers(_TAKING)
            if not targets or any(name not in numbers for name in targets):
                return _NO_TASK, INVALID_PARAMS
            kind, start = TaskType.REPLICA_COPY, -1
            if source is not None:
                if source not in numbers or source in targets:
                    return _NO_TASK, INVALID_PARAMS
                kind, start = TaskType.REPLICA_MOVE, numbers[source]
            digest = KeyBatch.single(key, client.identity).digests.tobytes()
            request = SubmitTask(int(kind), digest, tuple(numbers[name] for name in targets), start)
            shard = client._core.shard_of(digest)
            reply = self._ask(shard, SUBMIT_TASK, request)
        except OverloadedError as error:
            self._failed("create task", error)
            return _NO_TASK, int(Status.TASK_LIMIT)
        except StoreError as error:
            return _NO_TASK, self._failed("create task", error)
        if reply.status:
            return _NO_TASK, int(reply.status)
        return (shard + 1, reply.number), OK

    def query_task(self, task_id: tuple[int, int]) -> tuple[QueryTaskResponse | None, int]:
        """How a task stands; (response, 0), or (None, a negative number)."""
        high, number = task_id
        try:
            if not 1 <= high <= self._require()._core.shards:
                return None, _TASK_NOT_FOUND
            reply = self._ask(high - 1, TASK, TaskRequest(number))
        except StoreError as error:
            return None, self._failed("query_task", error)
        if reply.status:
            return None, int(reply.status)
        now_ms = int(time.time() * 1000)
        response = QueryTaskResponse(
            (high, number),
            TaskType(reply.kind),
            TaskStatus(reply.state),
            now_ms - reply.created_ms_ago,
            now_ms - reply.updated_ms_ago,
            (0, 0),
            reply.message,
        )
        return response, OK

    def _segment_numbers(self, states: Container[int]) -> dict[str, int]:
        """Numbers of the segments in one of these states, by name."""
        reply = self._ask(CLUSTER, SEGMENTS, SegmentsRequest())
        return {entry.name: entry.number for entry in reply.segments if entry.state in states}

    def _ask(self, door: int, operation: Any, request: Any) -> Any:
        client = self._require()
        body = operation.request.pack(request)
        return client._run(ask_one(door, operation, body, client._core.until({})))

    # -- segments

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Lend more memory to the pool; {"ret", "segment_ids", "allocated_size"}.

        What is refused has an "error" as well, which says why.
        """
        return self._mount("allocate_and_mount_segment", size, protocol)

    def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Take lent memory back; objects are moved away first within the grace period."""
        names = list(dict.fromkeys(require_keys(segment_ids)))
        if any(name not in self._extra_workers for name in names):
            return INVALID_PARAMS
        places = self._places
        for name in names:
            worker = self._extra_workers.pop(name)
            try:
                worker.stop(drain_s=float(grace_period_seconds), leases_s=1.0)
            finally:
                places.release()
        return OK

    unmount_segment = unmount_and_free_segment

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Lend the first bytes of a file that exists, such as one in /dev/shm.

        {"ret", "segment_ids"}, and an "error" for what is refused by the store. Nobody else may
        lend it or write to it meanwhile.
        """
        refused = {"ret": INVALID_PARAMS, "segment_ids": []}
        if offset != 0:
            return refused | {"ret": NOT_SUPPORTED}
        if not Path(require_text(path)).is_absolute():
            return refused
        if not Path(path).exists():
            return refused | {"ret": _FILE_NOT_FOUND}
        mounted = self._mount("mount_segment", size, protocol, path)
        del mounted["allocated_size"]
        return mounted

    def _mount(self, what: str, size: int, protocol: str, file: str = "") -> dict[str, Any]:
        refused = {"ret": INVALID_PARAMS, "segment_ids": [], "allocated_size": 0}
        if size < SEGMENT_BYTES_MIN:
            return refused
        try:
            worker = self._lend_more(size, require_text(protocol), file)
        except (StoreError, ValueError, OSError) as error:
            return refused | {"ret": self._failed(what, error), "error": str(error)}
        name = worker.segments[0].uuid.hex()
        self._extra_workers[name] = worker
        return {"ret": OK, "segment_ids": [name], "allocated_size": worker.segments[0].size}

    def _lend_more(self, size: int, protocol: str, file: str) -> Worker:
        client, places = self._require(), self._places
        if not places.acquire(blocking=False):
            raise NoSpaceError(
                f"process {os.getpid()} lends {lendable(client._core.shards)} segments beside its "
                "first, as many as it may",
                operation="mount",
                advice="take some back, lend fewer and larger ones, or let it open more files "
                "(ulimit -n)",
            )
        try:
            host = self._hostname.rpartition(":")[0]
            wanted = Wanted(host, global_segment_size=size, protocol=protocol, file=file)
            worker, _ = lend(wanted, client)
        except BaseException:
            places.release()
            raise
        assert worker is not None
        return worker

    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Take the disk of this store back; objects are moved to others within the grace period."""
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close(drain_s=float(grace_period_seconds), leases_s=1.0)
        return OK

    def get_offload_rpc_read_count(self) -> int:
        """How many objects this store has read from disks, whoever lends them."""
        return 0 if self._client is None else self._client.stats().disk_reads


def _described(info: ObjectInfo) -> list[ReplicaDescriptor]:
    return [
        ReplicaDescriptor(
            LocalDiskDescriptor(info.size, replica.segment)
            if replica.below
            else MemoryDescriptor(Descriptor(info.size, replica.offset, replica.segment)),
            ReplicaStatus.COMPLETE,
        )
        for replica in info.replicas
    ]
