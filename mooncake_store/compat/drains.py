"""Drain jobs as the original's control port knows them: some segments, one number for all.

The store drains segment by segment; a job is which ones, and is over when all of them are. Jobs
are kept in memory, the latest `JOBS_MAX`; how one ended is kept, since its segments may go.
"""

from __future__ import annotations

import re
import secrets
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from mooncake_store.client.extension import CLUSTER, ask_one
from mooncake_store.core.records import SegmentState
from mooncake_store.errors import StoreError
from mooncake_store.wire.cluster import DRAIN, DRAIN_STATUS, Drain, DrainReply, DrainStatusRequest

if TYPE_CHECKING:
    from mooncake_store.client.aio import AsyncClient
    from mooncake_store.wire.cluster import SegmentEntry

__all__ = ["DrainRefused", "Drains"]

JOBS_MAX = 1024
SEGMENTS_MAX = 1024

_INVALID, _NO_SEGMENT, _WRONG_STATE, _NO_JOB = -600, -101, -1010, -1402
_DONE = "SUCCEEDED", 3
_WORST = {"failed": ("FAILED", 4), "running": ("RUNNING", 2), "cancelled": ("CANCELED", 5)}
"""What a job is called, and numbered, for the states of its segments: the worst first."""


class DrainRefused(Exception):
    """A wish that cannot be, by the original's number for it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@dataclass(slots=True)
class _Job:
    """A drain of some segments."""

    number: str
    segments: dict[str, int]
    """Their numbers by name."""
    used_bytes: int
    created_ms: int
    ended: dict[str, Any] | None = None
    """What is answered once it is over."""


class Drains:
    """The jobs of one control port."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Job] = {}

    async def start(self, client: AsyncClient, body: bytes) -> str:
        """Begin to drain what a request names; its number. Raises DrainRefused."""
        wanted, targets = _wish(body)
        known = {entry.name: entry for entry in (await client.status()).segments}
        for name in (*wanted, *targets):
            if name not in known:
                raise DrainRefused(_NO_SEGMENT)
            if known[name].state != SegmentState.OK:
                raise DrainRefused(_WRONG_STATE)
        while len(self._jobs) >= JOBS_MAX:
            del self._jobs[next(iter(self._jobs))]
        job = _Job(
            f"{secrets.randbits(64)}-{secrets.randbits(64)}",
            {name: known[name].number for name in wanted},
            sum(known[name].used_bytes for name in wanted),
            _now_ms(),
        )
        try:
            for number in job.segments.values():
                await _ask(client, DRAIN, Drain(number))
        except (DrainRefused, StoreError):  # one has just gone, or the master: all or none
            for number in job.segments.values():
                with suppress(DrainRefused, StoreError):
                    await _ask(client, DRAIN, Drain(number, cancel=True))
            raise
        self._jobs[job.number] = job
        return job.number

    async def status(self, client: AsyncClient, number: str) -> dict[str, Any]:
        """How a job stands. Raises DrainRefused."""
        job = self._find(number)
        if job.ended is not None:
            return job.ended
        replies = [await _drain_of(client, each) for each in job.segments.values()]
        left = {entry.number: entry for entry in (await client.status()).segments}
        told = _told(job, replies, left)
        if told["status_name"] != "RUNNING":
            job.ended = told
        return told

    async def cancel(self, client: AsyncClient, number: str) -> str:
        """Stop a job that runs; objects that were moved stay where they are."""
        job = self._find(number)
        if (await self.status(client, number))["status_name"] != "RUNNING":
            raise DrainRefused(_WRONG_STATE)
        for each in job.segments.values():
            await _ask(client, DRAIN, Drain(each, cancel=True))
        return number

    def _find(self, number: str) -> _Job:
        if not re.fullmatch(r"\d{1,20}-\d{1,20}", number):
            raise DrainRefused(_INVALID)
        if number not in self._jobs:
            raise DrainRefused(_NO_JOB)
        return self._jobs[number]


class Wish(msgspec.Struct, frozen=True):
    """Segments to drain, and where their objects may go."""

    segments: Annotated[list[str], msgspec.Meta(min_length=1, max_length=SEGMENTS_MAX)]
    target_segments: Annotated[list[str], msgspec.Meta(max_length=SEGMENTS_MAX)] | None = None
    max_concurrency: Any = 4


def _wish(body: bytes) -> tuple[list[str], list[str]]:
    """Segments to drain, and where their objects may go; raises DrainRefused."""
    try:
        wish = msgspec.json.decode(body, type=Wish)
    except (ValueError, RecursionError):  # its own errors, and of what is no UTF-8
        raise DrainRefused(_INVALID) from None
    wanted, targets = wish.segments, wish.target_segments or []
    if len(set(wanted)) < len(wanted) or set(wanted) & set(targets) or wish.max_concurrency == 0:
        raise DrainRefused(_INVALID)
    return wanted, targets


def _told(job: _Job, replies: list[DrainReply], left: dict[int, SegmentEntry]) -> dict[str, Any]:
    """The answer about a job; the segment that stands worst decides."""
    states = {reply.state if reply.status == 0 else "failed" for reply in replies}
    word, status = next((told for state, told in _WORST.items() if state in states), _DONE)
    used = sum(left[number].used_bytes for number in job.segments.values() if number in left)
    return {
        "success": True,
        "job_id": job.number,
        "type": 0,
        "type_name": "DRAIN",
        "status": status,
        "status_name": word,
        "created_at_ms_epoch": job.created_ms,
        "last_updated_at_ms_epoch": _now_ms(),
        "segments": list(job.segments),
        "succeeded_units": sum(reply.moved for reply in replies),
        "failed_units": int(word == "FAILED"),
        "blocked_units": 0,
        "active_units": int(word == "RUNNING"),
        # What left the segments: bytes that were removed or evicted meanwhile are among them.
        "migrated_bytes": max(0, job.used_bytes - used),
        "message": next((reply.message for reply in replies if reply.message), ""),
        "error_code": 0,
        "error_message": "",
    }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


async def _ask(client: AsyncClient, operation: Any, request: Any) -> DrainReply:
    body = operation.request.pack(request)
    reply: DrainReply = await client._run(ask_one(CLUSTER, operation, body, client._core.until({})))
    if reply.status:
        raise DrainRefused(_NO_SEGMENT)
    return reply


async def _drain_of(client: AsyncClient, number: int) -> DrainReply:
    try:
        return await _ask(client, DRAIN_STATUS, DrainStatusRequest(number))
    except DrainRefused:
        return DrainReply(_NO_SEGMENT, message="a segment went away before it was seen drained")
