"""Looks at a pool for whoever watches it: once a second while somebody does, else every five.

All watchers share one look, and one JSON document of it; what is new of the history and of events
goes to each from where it is. Who is slow gets the newest look next, and none of those between: a
watcher costs the document that is under way to it, and nothing once it is gone. A pool that does
not answer is told as such, with what was known last.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import StoreError
from mooncake_store.page.events import Events
from mooncake_store.page.figures import figures
from mooncake_store.page.history import FIELDS, SPAN_S, History, added, filled, totals

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from mooncake_store.client.aio import AsyncClient

__all__ = ["Sampler"]

_log = logging.getLogger(__name__)

WATCHED_S = 1.0
"""Between two looks while somebody watches."""
SIGN_S = 5.0
"""After which a watcher is told that there is nothing new: a server has less patience."""


class Sampler:
    """Belongs to one event loop; `connected` returns the client that it asks."""

    def __init__(self, connected: Callable[[], Awaitable[AsyncClient]]) -> None:
        self.events = Events()
        self.watchers = 0
        self._connected = connected
        self._history = History()
        self._before: tuple[float, dict[str, int]] | None = None
        self._known: dict[str, Any] = {}
        self._document = b""
        self._looks = 0
        self._looked = asyncio.Event()
        self._wanted = asyncio.Event()

    async def run(self) -> None:
        """Look again and again, until it is cancelled."""
        while True:
            began = time.monotonic()
            failed = ""
            try:
                await self._look(await self._connected())
            except StoreError as error:
                failed = str(error)
            except Exception:
                _log.exception("the pool could not be looked at")
                failed = "internal error"
            self._document = _event("figures", self._known | {"failed": failed})
            self._looks += 1
            self._looked.set()
            self._looked = asyncio.Event()
            await self._pause(began)

    async def _pause(self, began: float) -> None:
        """Until the next look is due, which is sooner once somebody comes."""
        while True:
            self._wanted.clear()
            every = WATCHED_S if self.watchers else SPAN_S
            left = began + every - time.monotonic()
            if left <= 0:
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._wanted.wait()

    async def _look(self, client: AsyncClient) -> None:
        status, shards = await asyncio.gather(client.status(), client.store_stats())
        now, counters = time.monotonic(), totals(shards)
        objects, tiers = sum(each.objects for each in shards), filled(status.segments)
        self._history.take(now, counters, objects, tiers)
        self.events.compare(status)
        await self.events.follow(client)
        rates = dict.fromkeys(counters, 0.0)
        if self._before is not None:
            since, before = self._before
            passed = max(now - since, 1e-3)
            rates = {name: value / passed for name, value in added(before, counters).items()}
        self._before = now, counters
        self._known = figures(status, shards) | {
            "now": round(now, 1),
            "rates": rates,
            "tiers": tiers,
            "objects": objects,
            "evicted": counters["evicted_objects"],
        }

    async def live(self) -> AsyncGenerator[bytes]:
        """Yield server-sent events: what there is, then what is new, without an end."""
        spans = events = looks = 0
        fields = {"fields": FIELDS, "span_s": SPAN_S}
        self.watchers += 1
        self._wanted.set()
        try:
            while True:
                if looks == self._looks:
                    if not await self._next():
                        yield b": nothing new\n\n"
                    continue
                looks = self._looks
                told = b""
                if not spans or self._history.ended > spans:
                    told += _event("spans", fields | {"spans": self._history.since(spans)})
                    spans = self._history.ended
                if found := self.events.since(events):
                    told += _event("events", found)
                    events = self.events.told
                yield told + self._document
        finally:
            self.watchers -= 1

    async def _next(self) -> bool:
        """Wait for the next look; False where there was none for a while."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SIGN_S):
                return await self._looked.wait()
        return False


def _event(kind: str, content: Any) -> bytes:
    body = json.dumps(content, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()
