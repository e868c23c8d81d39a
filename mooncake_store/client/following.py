"""What happens to objects, as it happens: a shard's events, behind a snapshot of what there is.

A follower starts with a snapshot, page by page, and goes on with the events since its first page;
or with the events since a position that an earlier follower kept. Events are numbered without gaps
within a stream, which is one life of a shard. Where the shard has not those that come next (the
follower was away for too long, the shard was started anew, the position is none of its own), and
where all objects of a namespace were removed at once, another snapshot begins. `News.reset` tells:
forget what was known of this shard.

Replayed over a snapshot, an event may repeat what the snapshot shows, so applying news must be
idempotent: the last word on a digest counts. As steps; no I/O. Memory: one page.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.client.arguments import count_of
from mooncake_store.client.steps import ask_one
from mooncake_store.core.records import EVENT, EventKind
from mooncake_store.errors import InvalidArgumentError
from mooncake_store.wire.shard import BATCH_MAX, EVENTS, SNAPSHOT

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from mooncake_store.client.steps import Steps

__all__ = ["Following", "News", "Position", "events_in"]


class Position(NamedTuple):
    """A place in a shard's events: the stream, which is one life of the shard, and a number in it.

    Two whole numbers below 2**64 without another meaning, to be kept and handed back as they are.
    """

    stream: int
    number: int


class News(NamedTuple):
    """Changes in order: `digests[i]`, as uint64[n, 2], can be read from now on if `stored[i]`.

    Otherwise it cannot be read any longer. `reset` comes with the first page of a snapshot, and
    `snapshot` with each: it is complete when news come without. `position` is where to go on once
    these are applied; all pages of a snapshot but the last have none.
    """

    shard: int
    reset: bool
    digests: NDArray[np.uint64]
    stored: NDArray[np.bool_]
    snapshot: bool = False
    position: Position | None = None


def events_in(
    reply: Any, *, of_default: bool = False
) -> tuple[NDArray[np.int64], NDArray[Any], int]:
    """Return numbers and rows (EVENT) of the events in a reply to EVENTS, and the number after it.

    Numbers that a shard gave out before it began anew may have nothing behind them, and are left
    out. `of_default` leaves out as well what happened to objects of other namespaces.
    """
    rows = np.ascontiguousarray(reply.events).reshape(-1).view(EVENT)
    told = rows["kind"] != 0
    if of_default:
        told &= rows["tenant"] == 0
    at = np.flatnonzero(told)
    first = int(reply.first)
    return at + first, rows[at], first + len(rows)


class Following:
    """Follows one shard, from `since` if it is given; `next` returns what came since the last one.

    Raises InvalidArgumentError when `since` is no position, or there is no such shard.
    """

    def __init__(self, shard: int, shards: int, since: Position | None = None) -> None:
        self.shard = count_of(shard, "a shard")
        if not 0 <= self.shard < shards:
            raise InvalidArgumentError(f"there is no shard {shard}, only {shards} from 0 on")
        self._cursor = 0
        self._position = _checked(since) if since is not None else Position(0, 0)
        self._in_snapshot = self._fresh = since is None

    def next(self, wait_s: float, until: float) -> Steps[News]:
        """The next page or events; an empty answer when nothing happened during `wait_s`."""
        if self._in_snapshot:
            return (yield from self._page(until))
        stream, number = self._position
        body = EVENTS.request.pack(
            stream=stream, number=number, limit=BATCH_MAX, wait_ms=max(0, int(wait_s * 1000))
        )
        reply = yield from ask_one(self.shard, EVENTS, body, until)
        events = np.ascontiguousarray(reply.events).reshape(-1).view(EVENT)
        if reply.gap or (events["kind"] == EventKind.CLEARED).any():
            self._in_snapshot = self._fresh = True
            return (yield from self._page(until))
        self._position = position = Position(stream, int(reply.first) + len(events))
        told = (events["kind"] == EventKind.STORED) | (events["kind"] == EventKind.REMOVED)
        events = events[told]
        digests = np.stack([events["digest_lo"], events["digest_hi"]], axis=1)
        stored = events["kind"] == EventKind.STORED
        return News(self.shard, False, digests, stored, position=position)

    def _page(self, until: float) -> Steps[News]:
        if self._fresh:
            self._cursor = 0
        body = SNAPSHOT.request.pack(cursor=self._cursor)
        reply = yield from ask_one(self.shard, SNAPSHOT, body, until)
        reset, self._fresh = self._fresh, False
        if reset:
            self._position = Position(int(reply.stream), int(reply.next_event))
        self._cursor = int(reply.cursor)
        self._in_snapshot = bool(self._cursor)
        digests = np.array(reply.digests, np.uint64).reshape(-1, 2)
        stored = np.ones(len(digests), np.bool_)
        position = None if self._in_snapshot else self._position
        return News(self.shard, reset, digests, stored, snapshot=True, position=position)


def _checked(since: Position) -> Position:
    try:
        stream, number = map(operator.index, since)
    except (TypeError, ValueError):
        stream = number = -1
    if not (0 <= stream < 1 << 64 and 0 <= number < 1 << 64):
        raise InvalidArgumentError(
            f"{since!r} is no position in a shard's events",
            operation="follow",
            advice="pass the position of the last news that were applied, or none",
        )
    return Position(stream, number)
