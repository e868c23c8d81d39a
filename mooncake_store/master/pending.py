"""Requests that wait: puts for space, followers for events.

A put that found no space is tried again after every tick until its time is over, oldest first.
That takes a tenth of the time at most, so that a full pool does not starve those who only read.
What readers hold under ordinary leases leaves for it: they read on, and it waits for their ends.
Answers of several attempts are merged key by key, in the order of the request. Both queues are
bounded, and what one client may have in them; who finds no place is answered at once with what
there is.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mooncake_store.core.names import Names
from mooncake_store.core.records import Status
from mooncake_store.master.bounds import Places

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from mooncake_store.core.options import StartOptions
    from mooncake_store.core.shard import Shard

__all__ = ["EventQueue", "Put", "PutQueue"]

PUTS_WAITING_MAX, OF_ONE_CLIENT_MAX = 1024, 128
FOLLOWERS_MAX, FOLLOWERS_OF_ONE_MAX = 1024, 64
EVERY_NUMBER = 1 << 64
RETRY_S, REST_S = 0.004, 0.036
"""Time for the puts that wait, and until the next time where that was too little for all."""


class Put(NamedTuple):
    """A put_start or upsert_start as the core takes it."""

    client: int
    tenant: int
    digests: NDArray[np.uint64]
    sizes: NDArray[np.int64]
    names: Names | None
    options: StartOptions
    request: int
    """The number of the request, by the counter of its client."""
    upsert: bool

    def run(self, shard: Shard, now: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Ask the core: (PUT_ROW per key, REPLICA per replica)."""
        start = shard.upsert_start if self.upsert else shard.put_start
        return start(
            now, self.client, self.tenant, self.digests, self.sizes, self.names, self.options,
            self.request,
        )  # fmt: skip

    def came_before(self, other: Put) -> bool:
        """Whether this is the same request as another one."""
        same = (self.client, self.request) == (other.client, other.request)
        return same and self.request != 0

    def part(self, chosen: NDArray[np.int64]) -> Put:
        """Return the same request for some of its keys."""
        names, options = self.names, self.options
        if names is not None:
            ends = np.cumsum(names.lengths, dtype=np.int64)
            starts = ends - names.lengths
            names = Names.of([bytes(names.blob[starts[i] : ends[i]]) for i in chosen])
        if options.groups is not None:
            options = replace(options, groups=tuple(options.groups[i] for i in chosen))
        return self._replace(
            digests=self.digests[chosen],
            sizes=self.sizes[chosen],
            names=names,
            options=options,
        )


class _WaitingPut:
    """A put with the answers so far."""

    def __init__(
        self, put: Put, rows: NDArray[Any], replicas: NDArray[Any], deadline_ns: int
    ) -> None:
        self.put = put
        self.rows = rows
        self.deadline_ns = deadline_ns
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.asked_again = False
        """Whether the same request came once more, and its answer counts instead."""
        self._way_until = 0
        self._replicas = [replicas]
        self._keys = [np.repeat(np.arange(len(rows)), rows["replicas"])]

    def missing(self) -> NDArray[np.int64]:
        """Return the keys that still lack space."""
        return np.flatnonzero(self.rows["status"] == Status.NO_SPACE)

    def retry(self, shard: Shard, now: int) -> bool:
        """Try the missing keys again; return whether none is missing any more."""
        chosen = self.missing()
        rows, replicas = self.put.part(chosen).run(shard, now)
        self.rows[chosen] = rows
        self._replicas.append(replicas)
        self._keys.append(np.repeat(chosen, rows["replicas"]))
        if now >= self._way_until and (lacks := self.missing()).size:
            sizes, options = self.put.sizes[lacks], self.put.options
            given = sizes, options, self.deadline_ns, self.put.tenant
            self._way_until = shard.make_way(now, *given)
        return not (rows["status"] == Status.NO_SPACE).any()

    def replicas(self) -> NDArray[Any]:
        """Return the replicas of all attempts in the order of the keys."""
        order = np.argsort(np.concatenate(self._keys), kind="stable")
        return np.concatenate(self._replicas)[order]

    def granted(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        """Return digests and generations of what was begun."""
        given = self.rows["status"] == Status.OK
        return self.put.digests[given], np.ascontiguousarray(self.rows["generation"][given])


class PutQueue:
    """Puts that wait for space, oldest first."""

    def __init__(self, shard: Shard, now: Callable[[], int]) -> None:
        self._shard = shard
        self._now = now
        self._waiting: deque[_WaitingPut] = deque()
        self._places = Places(PUTS_WAITING_MAX, OF_ONE_CLIENT_MAX)
        self._rests_until = 0.0

    @property
    def empty(self) -> bool:
        """Whether no put waits."""
        return not self._waiting

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many puts of each client wait, of those that wait."""
        return self._places.of

    async def wait(
        self, put: Put, rows: NDArray[Any], replicas: NDArray[Any], wait_ns: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the answers once every key has space or its time is over.

        At once where no place is left to wait at.
        """
        if not self._places.free_for(put.client):
            return rows, replicas
        waiting = _WaitingPut(put, rows, replicas, self._now() + wait_ns)
        self._waiting.append(waiting)
        self._places.take(put.client)
        try:
            await waiting.done
        except asyncio.CancelledError:
            if not waiting.asked_again:
                # Nobody hears which keys were granted, so nobody could write or revoke them.
                self._shard.put_revoke(self._now(), put.client, *waiting.granted())
            raise
        finally:
            self._places.leave(put.client)
            if waiting in self._waiting:
                self._waiting.remove(waiting)
        return waiting.rows, waiting.replicas()

    def ask_again(self, put: Put) -> tuple[NDArray[Any], NDArray[Any]]:
        """Answer a request that comes once more, because its first answer was lost.

        What it began is told again, and the rest begun.
        """
        now = self._now()
        for waiting in [each for each in self._waiting if each.put.came_before(put)]:
            waiting.asked_again = True
            self._waiting.remove(waiting)
            if not waiting.done.done():
                waiting.done.set_result(None)
        asked = put.digests, put.sizes, put.request, put.upsert
        once_more = _WaitingPut(put, *self._shard.put_begun(now, put.client, *asked), now)
        if len(once_more.missing()):
            once_more.retry(self._shard, now)
        return once_more.rows, once_more.replicas()

    def give_up(self) -> None:
        """Answer everybody with what there is."""
        for waiting in self._waiting:
            if not waiting.done.done():
                waiting.done.set_result(None)

    def retry(self, now: int) -> None:
        """Try as many as there is time for; those not reached come first next time."""
        begun = time.perf_counter()
        if begun < self._rests_until:
            self._end_late(now)
            return
        for _ in range(len(self._waiting)):
            waiting = self._waiting.popleft()
            if waiting.done.done():
                continue
            if waiting.retry(self._shard, now) or now >= waiting.deadline_ns:
                waiting.done.set_result(None)
                continue
            self._waiting.append(waiting)
            if time.perf_counter() >= begun + RETRY_S:
                self._rests_until = time.perf_counter() + REST_S
                self._end_late(now)
                return

    def _end_late(self, now: int) -> None:
        """Answer those whose time is over before it is their turn."""
        for waiting in self._waiting:
            if now >= waiting.deadline_ns and not waiting.done.done():
                waiting.done.set_result(None)


class EventQueue:
    """Followers that have seen every event and wait for the next."""

    def __init__(self) -> None:
        # Each with the number it waits for.
        self._waiting: dict[asyncio.Future[None], int] = {}
        self._places = Places(FOLLOWERS_MAX, FOLLOWERS_OF_ONE_MAX)
        self._woken = 0

    @property
    def empty(self) -> bool:
        """Whether nobody waits."""
        return not self._waiting

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests of each client wait, of those that wait."""
        return self._places.of

    async def wait(self, client: int, number: int, wait_s: float) -> None:
        """Return when the event with this number exists, or the time is over.

        At once where no place is left to wait at.
        """
        if not self._places.free_for(client):
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[news] = number
        self._places.take(client)
        try:
            async with asyncio.timeout(wait_s):
                await news
        except TimeoutError:
            pass
        finally:
            self._places.leave(client)
            del self._waiting[news]

    def wake(self, next_number: int) -> None:
        """Let those look for whom there is something new."""
        if next_number == self._woken:
            return
        self._woken = next_number
        for news, number in self._waiting.items():
            if number < next_number and not news.done():
                news.set_result(None)

    def give_up(self) -> None:
        """Let everybody go without news."""
        self.wake(EVERY_NUMBER)
