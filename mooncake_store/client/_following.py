"""What happens to objects, as it happens: a shard's events, behind a snapshot of what there is.

A follower starts with a snapshot, page by page, and goes on with the events since its first page.
Events are numbered without gaps; where the shard no longer has those that come next (the follower
was away for too long, or the shard was started anew), and where all objects of a namespace were
removed at once, another snapshot begins. `News.reset` tells: forget what was known of this shard.

Replayed over a snapshot, an event may repeat what the snapshot shows, so applying news must be
idempotent: the last word on a digest counts. As steps; no I/O. Memory: one page.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mooncake_store.client._steps import ask_one
from mooncake_store.core.records import EVENT, EventKind
from mooncake_store.wire.shard import BATCH_MAX, EVENTS, SNAPSHOT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client._steps import Steps

__all__ = ["Following", "News"]


class News(NamedTuple):
    """Changes in order: `digests[i]`, as uint64[n, 2], can be read from now on if `stored[i]`.

    Otherwise it cannot be read any longer. `reset` comes with the first page of a snapshot, and
    `snapshot` with each: it is complete when news come without.
    """

    shard: int
    reset: bool
    digests: NDArray[np.uint64]
    stored: NDArray[np.bool_]
    snapshot: bool = False


class Following:
    """Follows one shard; `next` returns what came since the last one."""

    def __init__(self, shard: int) -> None:
        self.shard = shard
        self._cursor = 0
        self._number = 0
        self._in_snapshot = True
        self._fresh = True

    def next(self, wait_s: float, until: float) -> Steps[News]:
        """The next page or events; an empty answer when nothing happened during `wait_s`."""
        if self._in_snapshot:
            return (yield from self._page(until))
        body = EVENTS.request.pack(
            number=self._number, limit=BATCH_MAX, wait_ms=max(0, int(wait_s * 1000))
        )
        reply = yield from ask_one(self.shard, EVENTS, body, until)
        events = np.ascontiguousarray(reply.events).reshape(-1).view(EVENT)
        if reply.gap or (events["kind"] == EventKind.CLEARED).any():
            self._in_snapshot = self._fresh = True
            return (yield from self._page(until))
        self._number = int(reply.first) + len(events)
        told = (events["kind"] == EventKind.STORED) | (events["kind"] == EventKind.REMOVED)
        events = events[told]
        digests = np.stack([events["digest_lo"], events["digest_hi"]], axis=1)
        return News(self.shard, False, digests, events["kind"] == EventKind.STORED)

    def _page(self, until: float) -> Steps[News]:
        if self._fresh:
            self._cursor = 0
        body = SNAPSHOT.request.pack(cursor=self._cursor)
        reply = yield from ask_one(self.shard, SNAPSHOT, body, until)
        reset, self._fresh = self._fresh, False
        if reset:
            self._number = int(reply.next_event)
        self._cursor = int(reply.cursor)
        self._in_snapshot = bool(self._cursor)
        digests = np.array(reply.digests, np.uint64).reshape(-1, 2)
        return News(self.shard, reset, digests, np.ones(len(digests), np.bool_), snapshot=True)
