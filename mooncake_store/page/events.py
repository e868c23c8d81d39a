"""What happened lately, as a page tells it: to workers, segments and standbys, and to objects.

What happened to the pool is the difference between two looks at its state. Of what happened to
objects of the default namespace a look takes those among the newest `LOOKED_AT` of each shard,
however many there were, and says how many it passed over: a page is no follower. A shard tells
digests; names are asked for, a few at a look, and remembered, so that an object that is gone has
one. The newest are kept, those of the pool and those of objects apart, so that neither push the
others out. Memory: bounded. O(what changed).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.client.extension import ask_one, events_in
from mooncake_store.core.records import TIER_NAMES, EventKind, SegmentState
from mooncake_store.wire.shard import EVENTS, SNAPSHOT, STAT, StatRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.client.aio import AsyncClient
    from mooncake_store.wire.cluster import ClusterStatus

__all__ = ["Events"]

KEPT_OF_POOL, KEPT_OF_OBJECTS = 200, 300
LOOKED_AT = 64
NAMED_AT_ONCE = 32
NAMES_MAX = 4096
_OF_OBJECTS = {"stored", "removed", "cleared", "objects"}
_NO_PAGE = 1 << 62
"""A cursor behind all rows: the answer has no digests, but says where events are."""


class Events:
    """The newest ones; belongs to one event loop."""

    def __init__(self) -> None:
        self._of_pool: deque[dict[str, Any]] = deque(maxlen=KEPT_OF_POOL)
        self._of_objects: deque[dict[str, Any]] = deque(maxlen=KEPT_OF_OBJECTS)
        self.told = 0
        """How many there were."""
        self._names: OrderedDict[bytes, str] = OrderedDict()
        self._streams: list[tuple[int, int]] = []
        self._pool: dict[tuple[str, str], str] | None = None

    def since(self, number: int) -> list[dict[str, Any]]:
        """Return those after so many, in order."""
        if self.told == number:
            return []
        found = [*self._of_pool, *self._of_objects]
        return sorted(
            (each for each in found if each["number"] > number), key=lambda each: each["number"]
        )

    def of(self, digest: bytes) -> list[dict[str, Any]]:
        """Return those of one object, the newest first."""
        wanted = digest.hex()
        return [each for each in reversed(self._of_objects) if each.get("digest") == wanted]

    def _tell(self, kind: str, what: str, **more: Any) -> None:
        self.told += 1
        event = {"number": self.told, "time_s": round(time.time(), 1), "kind": kind, "what": what}
        ring = self._of_objects if kind in _OF_OBJECTS else self._of_pool
        ring.append(event | more)

    # -- of the pool

    def compare(self, status: ClusterStatus) -> None:
        """Tell what changed since the last look."""
        now: dict[tuple[str, str], str] = {}
        for worker in status.workers:
            now["worker", worker.name] = worker.state
        for segment in status.segments:
            fault = f", fails: {segment.fault}" if segment.fault else ""
            now["segment", segment.name] = SegmentState(segment.state).name.lower() + fault
        for standby in status.standbys:
            counts = "counts" if standby.counts else "is a copy"
            follows = "follows" if standby.follows else "does not follow"
            now["standby", f"{standby.number:016x}"] = f"{follows}, {counts}"
        now["pool", ""] = "ready" if status.ready else f"not ready: {status.refusing}".strip(": ")
        now["shards", ""] = str(len(status.shards))
        if self._pool is not None:
            for key in self._pool.keys() - now.keys():
                self._tell(key[0], f"{key[1]} is gone")
            for key, state in now.items():
                if self._pool.get(key) != state:
                    self._tell(key[0], f"{key[1]} {state}".strip())
        self._pool = now

    # -- of objects

    async def follow(self, client: AsyncClient) -> None:
        """Tell what happened to objects since the last look."""
        if len(self._streams) != client.shards:
            self._streams = [(0, 0)] * client.shards
        for shard in range(client.shards):
            await self._follow_shard(client, shard)

    async def _follow_shard(self, client: AsyncClient, shard: int) -> None:
        stream, number = self._streams[shard]
        at = await _ask(client, shard, SNAPSHOT, SNAPSHOT.request.pack(cursor=_NO_PAGE))
        newest = int(at.next_event)
        if int(at.stream) != stream:
            number = max(1, newest - LOOKED_AT)  # another life of the shard: what there is of it
        first = max(number, newest - LOOKED_AT)
        self._streams[shard] = int(at.stream), newest
        if first > number:
            self._tell("objects", f"{first - number:,} changes of objects passed over")
        if newest <= first:
            return
        body = EVENTS.request.pack(
            stream=int(at.stream), number=first, limit=newest - first, wait_ms=0
        )
        reply = await _ask(client, shard, EVENTS, body)
        _, events, _ = events_in(reply, of_default=True)
        digests = np.stack([events["digest_lo"], events["digest_hi"]], axis=1)
        cut = [row.tobytes() for row in digests]
        stored = [
            digest
            for digest, kind in zip(cut, events["kind"].tolist(), strict=True)
            if kind == EventKind.STORED
        ]
        await self._name(client, shard, stored[-NAMED_AT_ONCE:])
        for digest, event in zip(cut, events, strict=True):
            kind = EventKind(int(event["kind"]))
            if kind == EventKind.CLEARED:
                self._tell("cleared", "the default namespace was cleared")
                continue
            name = self._names.get(digest, "")
            tier = TIER_NAMES[int(event["tier"])]
            self._tell(kind.name.lower(), name, digest=digest.hex(), tier=tier)

    async def _name(self, client: AsyncClient, shard: int, digests: Sequence[bytes]) -> None:
        unknown = [each for each in digests if each not in self._names]
        found = await asyncio.gather(
            *(_ask(client, shard, STAT, STAT.request.pack(StatRequest(each))) for each in unknown)
        )
        for digest, reply in zip(unknown, found, strict=True):
            if reply.found and reply.name:
                self._names[digest] = reply.name.decode(errors="backslashreplace")
        while len(self._names) > NAMES_MAX:
            self._names.popitem(last=False)


async def _ask(client: AsyncClient, shard: int, operation: Any, body: bytes) -> Any:
    return await client._run(ask_one(shard, operation, body, client._core.until({})))
