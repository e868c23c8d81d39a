"""Telling those who copy the registers that these have changed, and knowing that they have them.

    news.changed()
    await news.taken(2.0)       # now a standby knows as much, if one follows and answers

Who asks for what comes after a version has written that one down. A standby that counts would lead
if this master was lost at once, so a master that has just begun expects it for a moment: what was
lent to a run of which it does not know would be of no use to it. Belongs to one event loop.
O(followers) per question.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from transfer_engine.rpc.serving import Connection

__all__ = ["RegisterNews"]


class RegisterNews:
    """Counts changes, and lets others wait for the next."""

    def __init__(self) -> None:
        self.version = 1
        self._waiting: set[asyncio.Future[None]] = set()
        # With who each is, and the version that he has.
        self._followers: dict[Connection, tuple[int, int]] = {}
        self._expected: set[int] = set()
        self._expected_until = 0.0

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
        if version == self.version:
            await self._wait(wait_s)

    def expect(self, numbers: Iterable[int], wait_s: float) -> None:
        """Count these standbys among those who follow, for so long at most."""
        self._expected = set(numbers)
        self._expected_until = asyncio.get_running_loop().time() + wait_s

    def heard(self, follower: Connection, version: int, number: int = 0) -> None:
        """Note up to which version somebody has everything; 0 for nothing."""
        self._expected.discard(number)
        if follower not in self._followers:
            follower.on_close(lambda: self._left(follower))
        if self._followers.get(follower) != (number, version):
            self._followers[follower] = number, version
            self.give_up()

    def _left(self, follower: Connection) -> None:
        del self._followers[follower]
        self.give_up()

    async def taken_by(self, number: int, wait_s: float) -> bool:
        """Wait until this standby has what there is now, but not for long; say whether it does."""
        loop = asyncio.get_running_loop()
        ends = loop.time() + wait_s
        while (number, self.version) not in self._followers.values():
            if ends <= loop.time():
                return False
            await self._wait(ends - loop.time())
        return True

    async def taken(self, wait_s: float) -> bool:
        """Wait until all who follow have what there is now, but not for long; say whether they do.

        Nobody follows: that is all of them.
        """
        loop, wanted = asyncio.get_running_loop(), self.version
        ends = loop.time() + wait_s
        while True:
            until = ends
            if not any(version < wanted for _, version in self._followers.values()):
                if not self._expected:
                    return True
                until = min(ends, self._expected_until)
            if until <= loop.time():
                self._expected.clear()  # one that is away holds nobody else up
                return False
            await self._wait(until - loop.time())

    async def _wait(self, wait_s: float) -> None:
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(news)
        await asyncio.wait({news}, timeout=wait_s)
        self._waiting.discard(news)
