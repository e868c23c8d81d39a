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
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.core.ring import HANDED_OVER
from mooncake_store.master.site import wait_max_ms
from mooncake_store.units import MILLISECOND_NS
from mooncake_store.wire.standby import (
    COPY_ROLE,
    JOURNAL,
    SHIPPING,
    WORDS_MAX,
    ShardStandby,
    ShardStandbys,
)
from transfer_engine.errors import RemoteProtocolError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from numpy.typing import NDArray

    from mooncake_store.core.last_cells import Run
    from mooncake_store.master.counting import Counted
    from mooncake_store.master.keeping import Keeper
    from mooncake_store.master.site import Site
    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.frame import Frame

__all__ = ["Shipping"]

log = logging.getLogger(__name__)

STANDBYS_MAX = 8
CLAIM_S = 0.05
_NONE: NDArray[np.int64] = np.empty(0, np.int64)


@dataclass(eq=False)
class _Standby:
    """One of them, on its connection."""

    peer: str
    number: int
    copy: bool
    """Whether it is a host that copies some shards, and no standby of the master."""
    runs: list[Run] = field(default_factory=list)
    """What it has yet to get from files."""
    boundary: int = 0
    """Where what it is being given comes to a boundary."""
    caught_up: bool = False
    """Whether it had all that there was, once."""
    counted: Counted | None = None
    """As what it counts, if it does..."""
    since: int = 0
    """...and from which position on all waited for it; what stands before it may not have."""
    exact: int = 0
    """What it was told of that: whether it has all that was answered."""
    held: int = 0
    """Up to where it has all."""
    idle: bool = False
    """Whether it has all and waits for more."""
    heard_ns: int = field(default_factory=time.monotonic_ns)
    """When it was idle last, or had more than before."""

    @property
    def silent_ns(self) -> int:
        """For how long it could have had more."""
        return 0 if self.idle else time.monotonic_ns() - self.heard_ns


class Shipping:
    """Answers the standbys of a shard; belongs to its event loop."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._standbys: dict[Connection, _Standby] = {}
        self._waiting: set[asyncio.Future[None]] = set()

    def answer(self, connection: Connection, frame: Frame) -> Awaitable[bytes]:
        """Return the words behind a position, when there are any. Raises StoreError."""
        request = JOURNAL.request.unpack(frame.body)
        if request.version != SHIPPING:
            raise RemoteProtocolError(
                f"the standby asks for journals of version {request.version}, this master has "
                f"them of {SHIPPING}",
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

    async def turn(self, counted: Counted) -> None:
        """Begin an era in which changes wait for another standby. Raises ConfigError."""
        keeper = self._site.keeper
        if keeper is not None:
            await keeper.counting.turn(counted)
            self._wake()  # all are told at once how they stand in it

    def told(self) -> ShardStandbys:
        """Return who is waited for, and who follows for whom changes could wait."""
        keeper = self._site.keeper
        if keeper is None:
            return ShardStandbys()
        counting, refusing, silent_ns = keeper.counting, "", 0
        number, era = counting.counted
        if keeper.replicates:
            try:
                counting.check()
            except UnavailableError as error:
                refusing = error.what
        if number:
            own = [each.silent_ns for each in self._standbys.values() if each.number == number]
            silent_ns = min(own, default=time.monotonic_ns() - counting.heard_ns)
        return ShardStandbys(
            era,
            number,
            silent_ns // MILLISECOND_NS,
            refusing,
            keeper.waiting,
            self._site.shard.objects,
            counting.exact,
            tuple(
                ShardStandby(
                    each.number,
                    each.caught_up,
                    bool(each.exact) and self._counts(each),
                    keeper.head - each.held,
                    each.silent_ns // MILLISECOND_NS,
                )
                for each in self._standbys.values()
                if each.copy == counting.alone
            ),
        )

    def _counts(self, standby: _Standby) -> bool:
        assert self._site.keeper is not None
        return standby.counted == self._site.keeper.counting.counted

    def _join(self, connection: Connection, keeper: Keeper, request: Any) -> _Standby:
        if len(self._standbys) >= STANDBYS_MAX:
            raise UnavailableError(
                f"{len(self._standbys)} standbys follow this shard already",
                operation=JOURNAL.name,
                advice="end one of them",
            )
        copy = connection.session.peer.role == COPY_ROLE
        standby = self._standbys[connection] = _Standby(connection.peer, request.standby, copy)
        keeper.on_publish = self._wake
        log.info("shard %d: %s follows as a standby", self._site.place.shard, connection.peer)
        connection.on_close(lambda: self._leave(connection, keeper))
        return standby

    def _leave(self, connection: Connection, keeper: Keeper) -> None:
        standby = self._standbys.pop(connection)
        if not self._standbys:
            keeper.on_publish = None
        if self._counts(standby) and not any(map(self._counts, self._standbys.values())):
            keeper.counting.left()
        log.warning("shard %d: the standby at %s is gone", self._site.place.shard, standby.peer)

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def _ship(self, standby: _Standby, keeper: Keeper, request: Any, wait_ms: int) -> bytes:
        position, counting = request.position, keeper.counting
        known = request.history == keeper.stream and 0 < position <= keeper.head
        held = request.held if known else 0
        if held > standby.held or held == keeper.head:
            standby.heard_ns = time.monotonic_ns()
        standby.held = held
        standby.caught_up = standby.caught_up or (known and request.held == keeper.head)
        may_count = keeper.replicates and standby.copy == counting.alone
        if known and standby.caught_up and may_count and not self._counts(standby):
            counts = await counting.claim(standby.number)
            standby.counted = counting.counted if counts else None
            # While that was written down a leader that needed none may have answered changes.
            standby.since = keeper.head
        if known and self._counts(standby):
            counting.heard(request.held)
        told = standby.exact
        # That it has all it has to know at once: it could not lead before.
        if (
            known
            and position == keeper.head
            and not standby.runs
            and told == self._exact(standby, keeper)
        ):
            standby.idle = True
            # Until one counts it is asked soon again which one: the first shard may know by then.
            undecided = may_count and standby.number and not counting.counted.number
            wait_s = min(wait_ms / 1000, CLAIM_S) if undecided else wait_ms / 1000
            await self._news(keeper, position, wait_s)
            standby.idle, standby.heard_ns = False, time.monotonic_ns()
        if standby.runs and not _covers(standby.runs, position):
            standby.runs = []
        if not known or not (standby.runs or keeper.holds(position)):
            standby.runs, begin = await self._read(keeper)
            standby.boundary = 0
            if not known or not _covers(standby.runs, position):
                position = begin
        words = self._words(standby, keeper, position)
        end = position + len(words)
        # Another one may count by now.
        standby.exact = self._exact(standby, keeper) if known else 0
        if self._counts(standby):
            counting.exact = bool(standby.exact)
        return JOURNAL.reply.pack(
            history=keeper.stream,
            position=position,
            whole=end == standby.boundary,
            exact=standby.exact,
            era=counting.counted.era,
            **keeper.facts(self._site.now()),
            words=words,
        )

    def _exact(self, standby: _Standby, keeper: Keeper) -> int:
        """Whether nothing was answered that it does not have, or goes on without it."""
        if self._site.yielded and standby.held == keeper.head:
            return HANDED_OVER
        return int(self._counts(standby) and standby.held >= standby.since)

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
