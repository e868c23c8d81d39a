"""What happens to requests on its way to who asked for them: a frame for each step of the engine.

Events are made on the computing thread and on the loop. `Telling` brings the tokens of a step over
to the loop together, and `News` sends what has come together, of all requests of one connection, as
one answer to its `listen`. A peer that does not read makes frames longer, not more: tokens of a
request that follow each other become one event, so what waits is bounded by the answers.

Where nothing happens a worker sends an empty frame every BEAT_S, which says that it is still there.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from serving.workers import protocol as p

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.frame import Frame

__all__ = ["News", "Telling", "failed"]

log = logging.getLogger(__name__)

_REQUESTS_MAX = 1024
"""Of one frame; there are limits on its length."""
_MESSAGE_CHARS = 2000


class News:
    """What one connection is told; lives on the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, connection: Connection, asked: Frame
    ) -> None:
        self._loop = loop
        self._connection = connection
        self._asked = asked
        self._pending: dict[str, list[p.Event]] = {}
        self._scheduled = False
        self._sent_at = self._taken_at = time.monotonic()
        connection.on_writable(self._flush)

    def add(self, request_id: str, event: p.Event) -> None:
        """Tell of an event, soon; the log has those that end a request without its answer."""
        if isinstance(event, p.Failed):
            log.info("%s: %s", event.code, event.message, extra={"request": request_id})
        events = self._pending.setdefault(request_id, [])
        if events and isinstance(event, p.Tokens) and isinstance(events[-1], p.Tokens):
            before = events[-1]
            event = p.Tokens(before.ids + event.ids, before.likelihoods + event.likelihoods)
            events.pop()
        events.append(event)
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._flush)

    def beat(self, every_s: float) -> None:
        """Say that this worker is there, unless something was said for less than `every_s`."""
        if self._connection.writable and time.monotonic() - self._sent_at >= every_s:
            self._send(())

    @property
    def stuck_s(self) -> float:
        """For how long the peer has taken nothing."""
        if self._connection.writable:
            self._taken_at = time.monotonic()
        return time.monotonic() - self._taken_at

    def _flush(self) -> None:
        self._scheduled = False
        while self._pending and self._connection.writable:
            chosen = list(self._pending)[:_REQUESTS_MAX]
            self._send(tuple((name, tuple(self._pending.pop(name))) for name in chosen))

    def _send(self, told: tuple[tuple[str, tuple[p.Event, ...]], ...]) -> None:
        self._sent_at = time.monotonic()
        self._connection.send(self._asked, p.LISTEN.reply.pack(p.Events(told)))


class Telling:
    """Events on their way from the computing thread to the loop, in order.

    To wake the loop lets it run at once, in the middle of a step: tokens wait for its end.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: deque[tuple[Callable[[Any], None], p.Event]] = deque()

    def gather(self, emit: Callable[[Any], None], event: p.Event) -> None:
        """Have `emit` called with an event, on the loop, behind the next `flush`."""
        self._events.append((emit, event))

    def tell(self, emit: Callable[[Any], None], event: p.Event) -> None:
        """Have it called soon, behind all that was gathered."""
        self._events.append((emit, event))
        self._loop.call_soon_threadsafe(self._deliver)

    def flush(self) -> None:
        """Have all that was gathered told. From the computing thread, as are the others."""
        if self._events:
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        while self._events:
            emit, event = self._events.popleft()
            emit(event)


def failed(code: str, message: str, advice: str, *, retryable: bool) -> p.Failed:
    """Return the end of a request without an answer; a frame has a limit."""
    return p.Failed(code, message[:_MESSAGE_CHARS], advice[:_MESSAGE_CHARS], retryable)
