"""Room for KV that other workers push: promised before it is computed, kept until it is used.

What is pushed comes with the tag of a request that room was promised to; anything else is refused.
Sizes are compared with the model's before a byte is copied. Room that no decode request comes for,
by the deadline or because its sender is gone, is given back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from serving.workers import protocol as p
from serving.workers.decoding import take_blocks
from serving.workers.pushing import Incoming
from transfer_engine.errors import InvalidArgumentError, NotFoundError

if TYPE_CHECKING:
    from serving.workers.jobs import Parts

__all__ = ["Receiving"]


class Receiving:
    """The rooms that a worker promised, by tag; lives on the loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._incoming: dict[bytes, Incoming] = {}
        self._asked = 0
        """Rooms that the computing thread is asked for."""

    @property
    def expected(self) -> int:
        """How many prompts' KV was promised room."""
        return sum(not each.taken for each in self._incoming.values())

    def close(self) -> None:
        """Expect nothing any more."""
        for incoming in list(self._incoming.values()):
            self._expire(incoming)

    async def open(self, message: p.KVOpen, owned: set[bytes]) -> p.KVOpened:
        """Promise room, if there is some; its tag joins those that the sender's connection owns."""
        parts, tag = self._parts, p.request_tag(message.request_id)
        lasts_s = p.deadline_of(message)
        if message.tokens < 1:
            raise InvalidArgumentError(f"there is no KV of {message.tokens} tokens")
        if tag in self._incoming:
            return p.KVOpened(False, "its KV is expected already", 1000)
        room = message.tokens + max(0, message.max_new_tokens - 1)
        reserved = self.expected + self._asked
        asked = parts.computing.call(lambda: take_blocks(parts, room, reserved))
        self._asked += 1
        try:
            taken = await asyncio.shield(asked)
        except asyncio.CancelledError:
            # The sender is gone, or has waited for too long: it does not hear of the room.
            asked.add_done_callback(self._unwanted)
            raise
        finally:
            self._asked -= 1
        if isinstance(taken, p.Refused):
            return p.KVOpened(False, taken.reason, taken.retry_after_ms)
        incoming = Incoming(message.request_id, message.tokens, taken, message.senders)
        incoming.timer = parts.loop.call_later(lasts_s, lambda: self._expire(incoming))
        self._incoming[tag] = incoming
        owned.intersection_update(self._incoming)
        owned.add(tag)
        return p.KVOpened(True)

    def push(self, message: Any) -> None:
        """Write keys and values of some tokens where they will be used."""
        parts, incoming = self._parts, self._incoming.get(bytes(message.request))
        if incoming is None or incoming.abandoned:
            raise NotFoundError(
                "no room was promised for this KV", advice="its request ended, or was cancelled"
            )
        layer, start, count = int(message.layer), int(message.start), int(message.count)
        nbytes = parts.memory.token_bytes * count
        fits = layer < parts.names.layers and count > 0 and start + count <= incoming.tokens
        if not fits or len(message.keys) != nbytes or len(message.values) != nbytes:
            raise InvalidArgumentError(
                f"{count} tokens from {start} on of layer {layer} do not fit this prompt"
            )
        parts.memory.accept(layer, incoming.blocks, start, count, message.keys, message.values)

    def sender_done(self, message: p.KVClose) -> None:
        """One sender has pushed all it has, or gives up."""
        incoming = self._incoming.get(p.request_tag(message.request_id))
        if incoming is not None:
            incoming.close(abort=message.abort)
            if message.abort and not incoming.taken:
                self._expire(incoming)  # No decode has come for it, and none will.

    def sender_gone(self, tags: set[bytes]) -> None:
        """Nothing more comes of what was not whole yet."""
        for tag in tags & self._incoming.keys():
            incoming = self._incoming[tag]
            if not incoming.ended.is_set():
                incoming.close(abort=True)
                if not incoming.taken:
                    self._expire(incoming)

    def take(self, request_id: str) -> Incoming | None:
        """The decode request has come: the room is its own now."""
        tag = p.request_tag(request_id)
        incoming = self._incoming.get(tag)
        if incoming is None or incoming.abandoned or incoming.taken:
            return None
        incoming.taken = True
        if incoming.timer is not None:
            incoming.timer.cancel()
        if incoming.ended.is_set():
            del self._incoming[tag]
        return incoming

    def forget(self, request_id: str) -> None:
        """A request is over, and what was promised to it."""
        tag = p.request_tag(request_id)
        incoming = self._incoming.get(tag)
        if incoming is not None and (incoming.abandoned or incoming.ended.is_set()):
            del self._incoming[tag]

    def _expire(self, incoming: Incoming) -> None:
        """Nobody came for it: give the room back."""
        self._incoming.pop(p.request_tag(incoming.request_id), None)
        if incoming.timer is not None:
            incoming.timer.cancel()
        if not incoming.abandoned:
            incoming.abandoned = True
            self._release(incoming.blocks)
        incoming.close(abort=True)

    def _unwanted(self, asked: asyncio.Future[list[int] | p.Refused]) -> None:
        """Room was taken for a sender that has left."""
        taken = asked.result()
        if isinstance(taken, list):
            self._release(taken)

    def _release(self, blocks: list[int]) -> None:
        cache = self._parts.computing.engine.cache
        self._parts.computing.post(lambda: cache.release(blocks))
