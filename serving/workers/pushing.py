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
    from collections.abc import Callable, Sequence

    from serving.workers.client import WorkerClient
    from serving.workers.memory import KVMemory

__all__ = ["Incoming", "Pusher"]

_MESSAGE_BYTES = p.PUSH_BYTES_MAX // 4


class Pusher:
    """The sending side for one request; lives on the loop.

    The request holds its blocks once for each `add`, and for `finish`. `sent` is called as often:
    when that is sent, or never will be. `failed` is told why the receiver cannot be reached.
    """

    def __init__(
        self,
        client: WorkerClient,
        request_id: str,
        until: float,
        memory: KVMemory,
        *,
        sent: Callable[[], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._client = client
        self._request_id = request_id
        self._until = until
        self._memory = memory
        self._sent = sent
        self._failed = failed
        self._tag = p.request_tag(request_id)
        self._waiting: deque[tuple[int, int, int, Sequence[int]] | None] = deque()
        self._news = asyncio.Event()
        self._aborted = False
        self._task: asyncio.Task[None] | None = None

    async def open(
        self, tokens: int, *, senders: int, max_new_tokens: int, revision: str
    ) -> p.KVOpened:
        """Ask for room for a prompt's tokens; raises when the worker cannot be reached."""
        left_ms = max(1, int(1000 * (self._until - time.monotonic())))
        return await self._client.kv_open(
            p.KVOpen(self._request_id, tokens, max_new_tokens, revision, senders, left_ms)
        )

    def start(self) -> None:
        """Begin to send what is added."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def add(self, layer: int, start: int, end: int, blocks: Sequence[int]) -> None:
        """Send tokens of a layer."""
        self._queue((layer, start, end, blocks))

    def finish(self) -> None:
        """Everything was added."""
        self._queue(None)

    def _queue(self, item: tuple[int, int, int, Sequence[int]] | None) -> None:
        if self._aborted:
            # Nobody takes it any more; the engine may have been within a chunk.
            self._sent()
            return
        self._waiting.append(item)
        self._news.set()

    def abort(self) -> None:
        """Send no more, and tell the receiver."""
        self._aborted = True
        self._news.set()

    async def _run(self) -> None:
        open_ = True
        try:
            while open_ and not self._aborted:
                while self._waiting and not self._aborted:
                    item = self._waiting.popleft()
                    try:
                        if item is None:
                            await self._client.kv_close(p.KVClose(self._request_id))
                            open_ = False
                        else:
                            await self._send(*item)
                    finally:
                        self._sent()
                if open_ and not self._aborted:
                    self._news.clear()
                    await self._news.wait()
        except (StoreError, OSError) as error:
            if not self._aborted:
                self._failed(error)
            self._aborted = True
        finally:
            while self._waiting:
                self._waiting.popleft()
                self._sent()
        if self._aborted:
            with contextlib.suppress(StoreError, OSError):
                await self._client.kv_close(p.KVClose(self._request_id, abort=True))

    async def _send(self, layer: int, start: int, end: int, blocks: Sequence[int]) -> None:
        step = max(1, _MESSAGE_BYTES // self._memory.token_bytes)
        for at in range(start, end, step):
            stop = min(at + step, end)
            keys, values = self._memory.tokens(layer, blocks, at, stop)
            left = self._until - time.monotonic()
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
