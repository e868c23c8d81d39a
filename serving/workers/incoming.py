"""One room for KV that other workers push.

What is pushed is written from outside, so room is somebody else's only once nobody writes to it:
when each of its senders has said so. One that says nothing is waited for `REST_S` after its
connection has ended, which is longer than a write lasts, and `STILL_S` while it is there.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from serving.workers.exchange import MOVE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.workers.jobs import Parts

__all__ = ["REST_S", "Incoming"]

REST_S = MOVE_S + 1.0
STILL_S = 60.0


class Incoming:
    """Room kept for KV that is being pushed; lives on the loop."""

    def __init__(
        self, parts: Parts, request_id: str, tokens: int, blocks: list[int], senders: int
    ) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.blocks = blocks
        self.room = parts.exchange.grant(blocks[: -(-tokens // parts.block_tokens)])
        self.ended = asyncio.Event()
        """Whether all has come, or something never will."""
        self.aborted = False
        self.taken = False
        """Whether its decode request has come; the blocks are that request's."""
        self.abandoned = False
        """Whether nobody waits for it any more."""
        self.quiet = False
        """Whether nobody writes to it any more."""
        self.timer: asyncio.TimerHandle | None = None
        self._parts = parts
        self._senders = senders
        self._rest: asyncio.TimerHandle | None = None
        self._then: list[Callable[[], object]] = []

    @property
    def whole(self) -> bool:
        """Whether all of it has come."""
        return self.ended.is_set() and not self.aborted

    def close(self, senders: int, *, abort: bool) -> None:
        """So many senders are done."""
        self._senders -= senders
        if abort:
            self.give_up()
        if self._senders <= 0:
            self.rested()

    def give_up(self, rest_s: float | None = None) -> None:
        """What comes from now on does not count, and is written to no purpose. Idempotent."""
        self._parts.exchange.revoke(self.room)
        if self.quiet:
            return
        self.aborted = True
        self.ended.set()
        if self._rest is not None:
            self._rest.cancel()
        rest_s = STILL_S if rest_s is None else rest_s
        self._rest = self._parts.loop.call_later(rest_s, self.rested)

    def when_quiet(self, then: Callable[[], object]) -> None:
        """Call `then` once nobody writes to it any more; at once where that is so."""
        if self.quiet:
            then()
        else:
            self._then.append(then)

    def rested(self) -> None:
        """Nobody writes to it any more."""
        self._parts.exchange.revoke(self.room)
        if self._rest is not None:
            self._rest.cancel()
        self.quiet = True
        self.ended.set()
        called, self._then = self._then, []
        for then in called:
            then()
