"""KV that goes straight from a prefill worker to the decode worker, without the pool.

The sender asks for room first, so a decode worker that is full refuses before anything is computed.
Then every chunk's keys and values follow layer by layer, while the next layer is computed. The
receiver writes them where they will be used; it keeps the room until the decode request comes or
the deadline passes.

Messages follow each other: one is under way, and what waits are descriptions of blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from serving.workers import protocol as p
from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.workers.client import WorkerClient
    from serving.workers.requests import Request

__all__ = ["Incoming", "Pusher"]

_MESSAGE_BYTES = p.PUSH_BYTES_MAX // 4


class Pusher:
    """The sending side for one request; lives on the loop."""

    def __init__(self, request: Request, client: WorkerClient) -> None:
        self._request = request
        self._client = client
        self._tag = p.request_tag(request.request_id)
        self._waiting: deque[tuple[int, int, int, Sequence[int]] | None] = deque()
        self._news = asyncio.Event()
        self._aborted = False
        self._task: asyncio.Task[None] | None = None

    async def open(self, *, senders: int, max_new_tokens: int, revision: str) -> p.KVOpened:
        """Ask for room; raises when the worker cannot be reached."""
        request = self._request
        left = request.until - time.monotonic()
        message = p.KVOpen(
            request.request_id,
            len(request.prompt),
            max_new_tokens,
            revision,
            senders,
            max(1, int(left * 1000)),
        )
        return await self._client.kv_open(message)

    def start(self) -> None:
        """Begin to send what is added."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, layer: int, start: int, end: int, blocks: Sequence[int]) -> None:
        """Send tokens of a layer. The request holds its blocks once per call."""
        self._queue((layer, start, end, blocks))

    def finish(self) -> None:
        """Everything was added. The request holds its blocks until it is sent."""
        self._queue(None)

    def _queue(self, item: tuple[int, int, int, Sequence[int]] | None) -> None:
        if self._aborted:
            # Nobody takes it any more; the engine may have been within a chunk.
            self._request.parts.computing.post(self._request.unhold)
            return
        self._waiting.append(item)
        self._news.set()

    def abort(self) -> None:
        """Send no more, and tell the receiver."""
        self._aborted = True
        self._news.set()

    async def _run(self) -> None:
        post = self._request.parts.computing.post
        open_ = True
        try:
            while open_ and not self._aborted:
                while self._waiting and not self._aborted:
                    item = self._waiting.popleft()
                    try:
                        if item is None:
                            await self._client.kv_close(p.KVClose(self._request.request_id))
                            open_ = False
                        else:
                            await self._send(*item)
                    finally:
                        post(self._request.unhold)
                if open_ and not self._aborted:
                    self._news.clear()
                    await self._news.wait()
        except (StoreError, OSError) as error:
            if not self._aborted:
                self._request.fail(
                    "peer_lost", f"KV could not be pushed: {error}", "send it to another worker",
                    retryable=True,
                )  # fmt: skip
            self._aborted = True
        finally:
            while self._waiting:
                self._waiting.popleft()
                post(self._request.unhold)
        if self._aborted:
            with contextlib.suppress(StoreError, OSError):
                await self._client.kv_close(p.KVClose(self._request.request_id, abort=True))

    async def _send(self, layer: int, start: int, end: int, blocks: Sequence[int]) -> None:
        memory = self._request.parts.memory
        size = self._request.parts.block_tokens
        step = max(1, _MESSAGE_BYTES * size // memory.half)
        for at in range(start, end, step):
            stop = min(at + step, end)
            keys, values = memory.tokens(layer, blocks, at, stop)
            left = self._request.until - time.monotonic()
            await self._client.push(
                p.KV_PUSH, max(0.001, left), request=self._tag, layer=layer, start=at,
                count=stop - at, keys=keys, values=values,
            )  # fmt: skip


@dataclass(slots=True, eq=False)
class Incoming:
    """Room kept for KV that is being pushed; lives on the loop."""

    request_id: str
    tokens: int
    blocks: list[int]
    senders: int
    until: float
    whole: bool = False
    """Whether all of it has come."""
    aborted: bool = False
    taken: bool = False
    """Whether its decode request has come; the blocks are that request's."""
    abandoned: bool = False
    """Whether the blocks may be somebody else's by now: nothing is written any more."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    timer: asyncio.TimerHandle | None = None

    def close(self, *, abort: bool) -> None:
        """One sender is done."""
        self.senders -= 1
        self.aborted = self.aborted or abort
        self.whole = self.senders <= 0 and not self.aborted
        if self.senders <= 0 or self.aborted:
            self.ended.set()
