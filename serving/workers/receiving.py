"""Room for KV that other workers push: promised before it is computed, kept until it is used.

Room that no decode request comes for is given back: at the deadline, when its sender is gone, or
`WANTED_S` after all of its KV has come; and then only once nobody writes to it (`incoming.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from serving.workers import protocol as p
from serving.workers.decoding import take_blocks
from serving.workers.incoming import REST_S, Incoming
from transfer_engine.errors import InvalidArgumentError

if TYPE_CHECKING:
    from serving.workers.jobs import Parts

__all__ = ["Receiving"]

WANTED_S = 15.0


class Receiving:
    """The rooms that a worker promised, by tag; lives on the loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._incoming: dict[bytes, Incoming] = {}
        self._asked: dict[bytes, bool] = {}
        """Rooms that the computing thread is asked for, and whether they are still wanted."""

    @property
    def expected(self) -> int:
        """How many prompts' KV was promised room."""
        return sum(not each.taken and not each.abandoned for each in self._incoming.values())

    def close(self) -> None:
        """Expect nothing any more."""
        for incoming in list(self._incoming.values()):
            if not incoming.taken:
                self._expire(incoming)
            incoming.rested()

    async def open(self, message: p.KVOpen, owned: set[bytes]) -> p.KVOpened:
        """Promise room, if there is some; its tag joins those that the sender's connection owns."""
        parts, tag = self._parts, p.request_tag(message.request_id)
        lasts_s = p.deadline_of(message)
        if message.tokens < 1:
            raise InvalidArgumentError(f"there is no KV of {message.tokens} tokens")
        if tag in self._incoming or tag in self._asked:
            return p.KVOpened(None, "its KV is expected already", 1000)
        room = message.tokens + max(0, message.max_new_tokens - 1)
        reserved = self.expected + len(self._asked)
        asked = parts.computing.call(lambda: take_blocks(parts, room, reserved))
        self._asked[tag] = True
        try:
            taken = await asyncio.shield(asked)
        except asyncio.CancelledError:
            # The sender is gone, or has waited for too long: it does not hear of the room.
            asked.add_done_callback(self._unwanted)
            raise
        finally:
            wanted = self._asked.pop(tag)
        if isinstance(taken, p.Refused):
            return p.KVOpened(None, taken.reason, taken.retry_after_ms)
        if not wanted:
            self._release(taken)
            return p.KVOpened(None, "it was given up meanwhile")
        incoming = Incoming(parts, message.request_id, message.tokens, taken, message.senders)
        incoming.timer = parts.loop.call_later(lasts_s, lambda: self._expire(incoming))
        incoming.when_quiet(lambda: self._expect_decode(incoming))
        self._incoming[tag] = incoming
        owned.intersection_update(self._incoming)
        owned.add(tag)
        return p.KVOpened(incoming.room)

    def sender_done(self, message: p.KVClose) -> None:
        """One sender has pushed all it has, or gives up."""
        tag = p.request_tag(message.request_id)
        incoming = self._incoming.get(tag)
        if tag in self._asked:
            self._asked[tag] = not message.abort
        elif incoming is not None:
            incoming.close(message.senders, abort=message.abort)
            if message.abort and not incoming.taken:
                self._expire(incoming)  # No decode has come for it, and none will.

    def sender_gone(self, tags: set[bytes]) -> None:
        """Nothing more comes of what was not whole yet."""
        for tag in tags & self._incoming.keys():
            incoming = self._incoming[tag]
            if not incoming.quiet:
                incoming.give_up(REST_S)
                if not incoming.taken:
                    self._expire(incoming)

    def take(self, request_id: str) -> Incoming | None:
        """The decode request has come: the room is its own now."""
        incoming = self._incoming.get(p.request_tag(request_id))
        if incoming is None or incoming.abandoned or incoming.taken:
            return None
        incoming.taken = True
        if incoming.timer is not None:
            incoming.timer.cancel()
        incoming.when_quiet(lambda: self._forget(incoming))
        return incoming

    def _expect_decode(self, incoming: Incoming) -> None:
        """Whoever asked for the prefill knows by now, and asks for the decode at once."""
        if not incoming.taken and not incoming.abandoned:
            if incoming.timer is not None:
                incoming.timer.cancel()
            later = self._parts.loop.call_later
            incoming.timer = later(WANTED_S, lambda: self._expire(incoming))

    def _expire(self, incoming: Incoming) -> None:
        """Nobody came for it: give the room back when nobody writes to it."""
        if incoming.abandoned:
            return
        incoming.abandoned = True
        if incoming.timer is not None:
            incoming.timer.cancel()
        if not incoming.aborted:
            incoming.give_up()

        def give_back() -> None:
            self._forget(incoming)
            self._release(incoming.blocks)

        incoming.when_quiet(give_back)

    def _forget(self, incoming: Incoming) -> None:
        del self._incoming[p.request_tag(incoming.request_id)]

    def _unwanted(self, asked: asyncio.Future[list[int] | p.Refused]) -> None:
        """Room was taken for a sender that has left."""
        taken = asked.result()
        if isinstance(taken, list):
            self._release(taken)

    def _release(self, blocks: list[int]) -> None:
        cache = self._parts.computing.engine.cache
        self._parts.computing.post(lambda: cache.release(blocks))
