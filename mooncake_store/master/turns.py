"""Requests that look at all objects take turns, so that those for keys need not wait for many.

A page of a listing or a removal by name takes milliseconds, and one read of a connection holds
hundreds of such requests. One of them is answered each time around the event loop, and whatever
else came in between; clients take turns, each with its oldest request. How many may wait is
bounded, in all and of one client: who finds no place is told when to come again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from mooncake_store.master.bounds import Places
from transfer_engine.errors import OverloadedError

__all__ = ["Turns"]

WAITING_MAX, OF_ONE_CLIENT_MAX = 1024, 64
_WEIGHT = 0.1
"""Of the newest turn in the mean of what one takes."""
_LEAST_S = 0.005


class Turns:
    """Who is next; belongs to one event loop. O(1)."""

    def __init__(self) -> None:
        self._places = Places(WAITING_MAX, OF_ONE_CLIENT_MAX)
        self._waiting: dict[int, deque[asyncio.Future[None]]] = {}
        """By client, the next one first."""
        self._taken = False
        self._began = 0.0
        self._each_s = 0.0

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._places)

    def take(self, client: int) -> asyncio.Future[None] | None:
        """Take a turn: None if it begins now, or else what is done when it does.

        It ends when the loop has been around. Raises OverloadedError where this client has no
        place to wait at.
        """
        loop = asyncio.get_running_loop()
        if not self._taken:
            self._taken, self._began = True, time.perf_counter()
            loop.call_soon(self._next)
            return None
        if not self._places.free_for(client):
            waiting = len(self._places)
            refusal = OverloadedError(
                f"{waiting} requests that look at all objects wait for their turn"
            )
            refusal.retry_after_s = max(_LEAST_S, waiting * self._each_s)
            raise refusal
        mine: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        self._places.take(client)
        mine.add_done_callback(lambda _: self._places.leave(client))
        return mine

    def _next(self) -> None:
        now = time.perf_counter()
        self._each_s += _WEIGHT * (now - self._began - self._each_s)
        self._began = now
        while self._waiting:
            client = next(iter(self._waiting))
            line = self._waiting.pop(client)
            mine = line.popleft()
            if line:
                self._waiting[client] = line
            if not mine.done():
                mine.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._taken = False
