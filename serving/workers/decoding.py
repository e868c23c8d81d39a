"""The decode side of one request: get the prompt's KV, join the batch, answer.

A decode is admitted or refused before anything is loaded, by what this worker knows best: its free
blocks and its batch. What of the prompt's KV does not arrive (a block was evicted, the sender died)
is computed here, as is always the incomplete last block when the KV comes from the pool; so a loss
costs time and no answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from serving.workers import protocol as p
from serving.workers.jobs import Generating

if TYPE_CHECKING:
    from serving.workers.incoming import Incoming
    from serving.workers.jobs import Parts

__all__ = ["Decoding", "retry_after_ms", "take_blocks"]

RETRY_MS_MAX = 10_000
_RETRY_MS_MIN = 50


def take_blocks(parts: Parts, tokens: int, reserved: int) -> list[int] | p.Refused:
    """Blocks for so many tokens, or why there are none. On the computing thread.

    `reserved` counts sequences that were promised a place and are not in the engine yet.
    """
    engine = parts.computing.engine
    places = engine.running_max - len(engine.opened) - len(engine.running) - reserved
    if places <= 0:
        return p.Refused(
            f"{engine.running_max} requests are decoded here already", retry_after_ms(parts)
        )
    blocks = engine.cache.acquire(engine.cache.needed(tokens))
    if blocks is None:
        free = engine.cache.blocks - engine.cache.used
        return p.Refused(
            f"{engine.cache.needed(tokens)} KV blocks are needed, {free} are free",
            retry_after_ms(parts),
        )
    return blocks


def retry_after_ms(parts: Parts) -> int:
    """When the first of those that run now ends, if none stops early."""
    left = [each.max_new_tokens - each.generated for each in list(parts.computing.engine.running)]
    wait_ms = int(1000 * min(left, default=0) * parts.computing.tbt_s)
    return min(max(wait_ms, _RETRY_MS_MIN), RETRY_MS_MAX)


class Decoding(Generating):
    """An answer that goes on from a prompt and a first token which another worker made."""

    def __init__(self, parts: Parts, message: p.Decode, incoming: Incoming | None) -> None:
        super().__init__(parts, message)
        self.sequence.tokens.append(message.first_token)
        self._incoming = incoming
        if incoming is not None:
            self.sequence.blocks = incoming.blocks
            self.hold()
            incoming.when_quiet(lambda: parts.computing.post(self.unhold))
        self._place: p.KVPlace = message.kv
        self.task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Ask for room, or wait for what is pushed; then start."""
        self._set_timer()
        message = self.message
        if message.max_new_tokens <= 1 or message.first_token in message.stop_tokens:
            reason = "length" if message.max_new_tokens <= 1 else "stop"
            self.emit(p.Admitted(0))
            self.emit(p.Finished(reason, self.seconds()))
            self.parts.computing.post(self.finish)
            return
        self.task = self.parts.loop.create_task(self._start())

    def fail(self, code: str, message: str, advice: str = "", *, retryable: bool = False) -> None:
        """From now on nothing that is pushed counts, or is waited for: the blocks go back."""
        if self._incoming is not None:
            self._incoming.give_up()
        super().fail(code, message, advice, retryable=retryable)

    async def _start(self) -> None:
        incoming = self._incoming
        if incoming is not None:
            try:
                async with asyncio.timeout(max(0.0, self.until - time.monotonic())):
                    await incoming.ended.wait()
            except TimeoutError:
                pass  # The deadline of the request has come too, and says so.
        self.parts.computing.post(self._adopt)

    def _adopt(self) -> None:
        """Take blocks and enter the engine, or refuse."""
        if self.over:
            return
        if self._incoming is None:
            taken = take_blocks(self.parts, self.sequence.room, 0)
            if isinstance(taken, p.Refused):
                self.tell(taken)
                self.finish()
                return
            self.sequence.blocks = taken
        self.parts.computing.engine.adopt(self.sequence)

    def blocks_wanted(self) -> int:
        """Complete blocks of the prompt, as many as the prefill worker named."""
        if not self.parts.pool.configured:
            return 0
        return min(self._place.pool_blocks, len(self.prompt) // self.parts.block_tokens)

    def opened(self) -> None:
        """Load what is in the pool; with everything there, join the batch."""
        self.times.opened = time.monotonic()
        incoming = self._incoming
        if incoming is not None and incoming.whole:
            self.cached = self.sequence.computed = len(self.prompt)
            self._admit()
        elif wanted := self.blocks_wanted():
            self.start_fetch(wanted, known=True)
        else:
            self._admit()

    def _found(self, count: int) -> None:
        """Nothing starts before all layers are there."""

    def fetch_ended(self) -> None:
        """All layers are there, or the prompt is computed here."""
        fetch, self.fetch = self.fetch, None
        if fetch is not None and fetch.count and all(map(fetch.wait, fetch.layers)):
            self.cached = self.sequence.computed = fetch.count * self.parts.block_tokens
        if not self.over:
            self._admit()

    def _admit(self) -> None:
        self.sequence.ready = True
        self.times.started = time.monotonic()
        self.tell(p.Admitted(len(self.prompt) - self.cached))
