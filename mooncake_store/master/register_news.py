"""Telling those who copy the registers that these have changed.

Belongs to one event loop.
"""

from __future__ import annotations

import asyncio

__all__ = ["RegisterNews"]


class RegisterNews:
    """Counts changes, and lets others wait for the next."""

    def __init__(self) -> None:
        self.version = 1
        self._waiting: set[asyncio.Future[None]] = set()

    def changed(self) -> None:
        """Note a change."""
        self.version += 1
        self.give_up()

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        waiting, self._waiting = self._waiting, set()
        for each in waiting:
            if not each.done():
                each.set_result(None)

    async def after(self, version: int, wait_s: float) -> None:
        """Wait until there is another version than this one, but not for long."""
        if version != self.version:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        await asyncio.wait({news}, timeout=wait_s)
        self._waiting.discard(news)
