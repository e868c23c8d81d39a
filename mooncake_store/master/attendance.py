"""Whether the standby that the changes of a shard wait for follows, and how long it is missed.

A standby that is started anew is back within seconds, and so is the first one of a leader that has
just been promoted. For that long changes wait, so that nobody notices; then they are refused at
once. O(1); belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time

__all__ = ["RETURN_S", "Attendance"]

RETURN_S = 10.0
"""How long changes wait for a standby that was there a moment ago, or has yet to come."""


class Attendance:
    """It; nobody is there at first."""

    def __init__(self) -> None:
        self.there = False
        self._until = time.monotonic() + RETURN_S
        self._ended = False
        self._waiting: set[asyncio.Future[None]] = set()

    def come(self) -> None:
        """Note that it follows; whoever waits goes on."""
        self.there = True
        for each in self._waiting:
            if not each.done():
                each.set_result(None)

    def leave(self) -> None:
        """Note that it is gone."""
        self.there, self._until = False, time.monotonic() + RETURN_S

    @property
    def may_come(self) -> bool:
        """Whether it is worth waiting for."""
        return not (self.there or self._ended) and time.monotonic() < self._until

    async def wait(self, longest_s: float) -> None:
        """Return when it follows, or is not waited for any longer.

        Raises CancelledError when this shard ends: another one may do what is waited for.
        """
        timeout_s = min(longest_s, self._until - time.monotonic())
        if self.there or timeout_s <= 0:
            return
        coming: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(coming)
        await asyncio.wait({coming}, timeout=timeout_s)
        self._waiting.discard(coming)
        if coming.cancelled():
            raise asyncio.CancelledError

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        self._ended = True
        for each in self._waiting:
            each.cancel()
