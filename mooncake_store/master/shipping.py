"""A shard's words for its standbys: from the ring, and from files where they have left that.

A standby asks for the words behind a position and is answered as soon as there are any. It may have
fallen behind what the ring holds, or have nothing at all: then files are read once, on a thread,
from where the newest whole snapshot begins, and given out of memory that is mapped until it has
come to their end.

Words may be cut anywhere between two replies, but count only as a whole: a standby publishes them
when it has them up to a boundary of the stream, which the last reply says it has come to. Such a
boundary is where HEAD was when the first of these replies was made.

The hot path pays for a standby what it costs to wake who waits here, once a turn of the loop.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.ring import HANDED_OVER
from mooncake_store.journal.layout import VERSION
from mooncake_store.master.site import wait_max_ms
from mooncake_store.wire.standby import JOURNAL, WORDS_MAX
from transfer_engine.errors import AuthError, RemoteProtocolError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from numpy.typing import NDArray

    from mooncake_store.core.last_cells import Run
    from mooncake_store.master.keeping import Keeper
    from mooncake_store.master.site import Site
    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.frame import Frame

__all__ = ["Shipping"]

log = logging.getLogger(__name__)

STANDBYS_MAX = 8
_NONE: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(eq=False)
class _Standby:
    """One of them, on its connection."""

    peer: str
    number: int
    runs: list[Run] = field(default_factory=list)
    """What it has yet to get from files."""
    boundary: int = 0
    """Where what it is being given comes to a boundary."""
    caught_up: bool = False
    """Whether it had all that there was, once."""
    counts: bool = False
    """Whether it is the one that changes wait for..."""
    since: int = 0
    """...and from which position on all did; what stands before it may not have."""
    exact: int = 0
    """What it was told of that: whether it has all that was answered."""


class Shipping:
    """Answers the standbys of a shard; belongs to its event loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._standbys: dict[Connection, _Standby] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    def answer(self, connection: Connection, frame: Frame) -> Awaitable[bytes]:
        """Return the words behind a position, when there are any. Raises StoreError."""
        request = JOURNAL.request.unpack(frame.body)
        if connection.session.read_only:
            raise AuthError(
                "the credential is read-only, and journals hold the names of all objects",
                operation=JOURNAL.name,
                advice="start the standby with the shared secret itself",
            )
        if request.version != VERSION:
            raise RemoteProtocolError(
                f"the standby keeps journals of version {request.version}, this master of "
                f"{VERSION}",
                operation=JOURNAL.name,
                advice="start the standby with the version of its leader",
            )
        keeper = self._site.keeper
        if keeper is None:
            raise UnavailableError(
                "this master keeps no journal, so nothing can be copied",
                operation=JOURNAL.name,
                advice="start it with --state DIRECTORY and without --journal none",
            )
        standby = self._standbys.get(connection) or self._join(connection, keeper, request)
        wait_ms = wait_max_ms(request.wait_ms, frame.deadline_ms)
        return self._ship(standby, keeper, request, wait_ms)

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        self._wake()

    def _join(self, connection: Connection, keeper: Keeper, request: Any) -> _Standby:
        if len(self._standbys) >= STANDBYS_MAX:
            raise UnavailableError(
                f"{len(self._standbys)} standbys follow this shard already",
                operation=JOURNAL.name,
                advice="end one of them",
            )
        standby = self._standbys[connection] = _Standby(connection.peer, request.standby)
        keeper.on_publish = self._wake
        log.info("shard %d: %s follows as a standby", self._site.place.shard, connection.peer)
        connection.on_close(lambda: self._leave(connection, keeper))
        return standby

    def _leave(self, connection: Connection, keeper: Keeper) -> None:
        standby = self._standbys.pop(connection)
        if not self._standbys:
            keeper.on_publish = None
        if standby.counts:
            keeper.followed(None)
        log.warning("shard %d: the standby at %s is gone", self._site.place.shard, standby.peer)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def _ship(self, standby: _Standby, keeper: Keeper, request: Any, wait_ms: int) -> bytes:
        position = request.position
        known = request.history == keeper.stream and 0 < position <= keeper.head
        standby.caught_up = standby.caught_up or (known and request.held == keeper.head)
        if known and standby.caught_up and not standby.counts:
            standby.counts = await keeper.claim(standby.number)
            # While that was written down a leader that needed none may have answered changes.
            standby.since = keeper.head
        if known and standby.counts:
            keeper.followed(request.held)
        exact = int(known and standby.counts and request.held >= standby.since)
        if self._site.yielded and known and request.held == keeper.head:
            exact = HANDED_OVER
        told, standby.exact = standby.exact, exact
        # That it has all it has to know at once: it could not lead before.
        if known and position == keeper.head and not standby.runs and told == exact:
            await self._news(keeper, position, wait_ms / 1000)
        if standby.runs and not _covers(standby.runs, position):
            standby.runs = []
        if not known or not (standby.runs or keeper.holds(position)):
            standby.runs, begin = await self._read(keeper)
            standby.boundary = 0
            if not known or not _covers(standby.runs, position):
                position = begin
        words = self._words(standby, keeper, position)
        end = position + len(words)
        return JOURNAL.reply.pack(
            history=keeper.stream,
            position=position,
            whole=end == standby.boundary,
            exact=exact,
            **keeper.facts(self._site.now()),
            words=words,
        )

    async def _news(self, keeper: Keeper, position: int, wait_s: float) -> None:
        """Wait until there is something behind a position, but not for long."""
        if keeper.head != position or not wait_s or self._site.stopped:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        await asyncio.wait({news}, timeout=wait_s)
        self._waiting.discard(news)

    async def _read(self, keeper: Keeper) -> tuple[list[Run], int]:
        """Return all that files and ring hold, and where the newest whole snapshot begins."""
        runs, snapshot = await asyncio.to_thread(keeper.read)
        if not snapshot or not _covers(runs, snapshot):
            raise UnavailableError(
                "there is no whole snapshot of the shard in its files yet",
                operation=JOURNAL.name,
                advice="ask again in a moment",
            )
        return runs, snapshot

    def _words(self, standby: _Standby, keeper: Keeper, position: int) -> NDArray[np.int64]:
        if standby.runs:
            at = bisect.bisect_right(standby.runs, position, key=lambda run: run[0]) - 1
            begin, run = standby.runs[at]
            standby.boundary = begin + len(run)
            if standby.boundary == position + len(run[position - begin :][:WORDS_MAX]):
                standby.runs = standby.runs[at + 1 :]
            return run[position - begin :][:WORDS_MAX]
        if position >= standby.boundary:
            standby.boundary = keeper.head
        return keeper.words(position, min(position + WORDS_MAX, standby.boundary))


def _covers(runs: list[Run], position: int) -> bool:
    """Whether a position is one of those that runs hold; they leave nothing out."""
    return bool(runs) and runs[0][0] <= position < runs[-1][0] + len(runs[-1][1])
