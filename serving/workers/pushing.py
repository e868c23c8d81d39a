"""KV that goes straight from a prefill worker to the decode worker, without the pool: the sender.

Room is asked for first, so a decode worker that is full refuses before anything is computed. Then
every chunk's keys and values follow layer by layer, while the next layer is computed: written from
the memory they were computed in to where they will be used, by threads of the transfer engine. When
the last write has ended the receiver is told.

At most `WRITES_MAX` writes of a request are under way, each of what has come together but no more
than `WRITE_BYTES`; what waits are descriptions of blocks.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from serving.workers import protocol as p
from serving.workers.exchange import Part
from transfer_engine.errors import StoreError, TransferError
from transfer_engine.rpc.address import Address

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from serving.workers.client import WorkerClient
    from serving.workers.exchange import Exchange
    from serving.workers.memory import KVMemory
    from transfer_engine import SegmentHandle, Submission

__all__ = ["Pusher"]

WRITES_MAX = 4
WRITE_BYTES = 2 << 20


class Pusher:
    """The sending side for one request.

    The request holds its blocks once for each part that `add` tells of, and for `finish`. `sent` is
    told of as many: when they are sent, or never will be. `failed` is told, on the loop, why the
    receiver cannot be reached. `open` and `reach` belong to the loop, the others to any thread.
    """

    def __init__(
        self,
        client: WorkerClient,
        request_id: str,
        until: float,
        memory: KVMemory,
        exchange: Exchange,
        loop: asyncio.AbstractEventLoop,
        *,
        sent: Callable[[int], object],
        failed: Callable[[Exception], object],
    ) -> None:
        self._client = client
        self._request_id = request_id
        self._until = until
        self._memory = memory
        self._exchange = exchange
        self._loop = loop
        self._sent = sent
        self._failed = failed
        self.room: p.Room | None = None
        self.speaks_for = 1
        """How many senders have pushed all they will when this one has."""
        self._target: SegmentHandle | None = None
        self._lock = threading.Lock()
        self._waiting: deque[Part] = deque()
        self._under_way: dict[Submission, int] = {}  # with how many parts of it are in them
        self._beginning = False
        self._finishing = False
        self._aborted = False
        self._told = False
        self._closing: asyncio.Task[None] | None = None

    async def open(
        self, tokens: int, *, senders: int, max_new_tokens: int, card: p.ModelCard
    ) -> p.KVOpened:
        """Ask for room for a prompt's tokens; raises when the worker cannot be reached."""
        self.speaks_for = senders
        left_ms = max(1, int(1000 * (self._until - time.monotonic())))
        message = p.KVOpen(
            self._request_id, tokens, max_new_tokens, card.revision, card.layout, senders, left_ms
        )
        return await self._client.kv_open(message)

    async def reach(self, room: p.Room) -> None:
        """Find the way to a room that was promised; raises when there is none."""
        host = Address.parse(self._client.address).host
        find = partial(self._exchange.reach, room, host)
        self._target = await self._loop.run_in_executor(None, find)
        self.room = room

    def add(self, layer: int, start: int, end: int, blocks: Sequence[int]) -> int:
        """Send tokens of a layer; return in how many parts."""
        self._memory.settle()
        size = self._memory.block_tokens
        step = max(1, WRITE_BYTES // self._memory.object_bytes) * size
        borders = [start, *range((start // step + 1) * step, end, step), end]
        with self._lock:
            gone = self._aborted
            if not gone:
                for at, stop in pairwise(borders):
                    self._waiting.append(Part(layer, at, stop, blocks))
        if gone:  # nobody takes it any more; the engine may have been within a chunk
            self._sent(len(borders) - 1)
        self._go_on()
        return len(borders) - 1

    def finish(self) -> None:
        """Everything was added."""
        with self._lock:
            self._finishing = True
            told = self._told
        if told:
            self._sent(1)
        else:
            self._go_on()

    def abort(self) -> None:
        """Send no more, and tell the receiver."""
        with self._lock:
            self._aborted = True
            dropped = len(self._waiting)
            self._waiting.clear()
            under_way = list(self._under_way)
        for submission in under_way:
            submission.cancel()
        self._sent(dropped)
        self._go_on()

    def _go_on(self) -> None:
        """Begin what may begin; with nothing left, say so to the receiver."""
        with self._lock:
            if self._beginning:
                return  # by another thread, or further up: a write may end while it is begun
            self._beginning = True
        while (submission := self._begin_one()) is not None:
            submission.add_done_callback(partial(self._ended, submission))
        with self._lock:
            over = not self._waiting and not self._under_way
        if over and (self._finishing or self._aborted):
            self._on_loop(self._close)

    def _begin_one(self) -> Submission | None:
        room, target = self.room, self._target
        with self._lock:
            full = len(self._under_way) >= WRITES_MAX
            if not self._waiting or full or room is None or target is None:
                self._beginning = False
                return None
            parts = self._next_parts()
            left_s = self._until - time.monotonic()
            try:
                submission = self._exchange.write(target, room, parts, left_s)
            except StoreError as error:
                self._beginning = False
                self._on_loop(self._give_up, error)
                self._sent(len(parts))
                return None
            self._under_way[submission] = len(parts)
            return submission

    def _next_parts(self) -> list[Part]:
        """What waits first and fits in one write. Held: the lock."""
        room = WRITE_BYTES // (2 * self._memory.token_bytes)
        parts = [self._waiting.popleft()]
        room -= parts[0].end - parts[0].start
        while self._waiting and (size := self._waiting[0].end - self._waiting[0].start) <= room:
            parts.append(self._waiting.popleft())
            room -= size
        return parts

    def _ended(self, submission: Submission) -> None:
        """A write has, on whatever thread."""
        error: Exception | None = submission.error
        if error is None and submission.poll().any():
            error = TransferError(
                "its room is gone",
                peer=self._client.address,
                operation="push",
                advice="its decode request has ended, or its time is over",
            )
        if error is not None and not self._aborted:
            self._on_loop(self._give_up, error)
        with self._lock:
            parts = self._under_way.pop(submission)
        self._sent(parts)
        self._go_on()

    def _on_loop(self, call: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # it has ended, and the worker with it
            self._loop.call_soon_threadsafe(call, *arguments)

    def _give_up(self, error: Exception) -> None:
        if self._aborted:
            return
        if self._target is not None:
            self._exchange.failed(self._target, error)
        self.abort()
        self._failed(error)

    def _close(self) -> None:
        if self._closing is None:
            self._closing = self._loop.create_task(self._tell_receiver())

    async def _tell_receiver(self) -> None:
        error: Exception | None = None
        whole = not self._aborted
        if whole:
            error = await self._tell(self.speaks_for, abort=False)
        if self._aborted or error is not None:
            # Or it was not wanted any more, or could not be told of, while the receiver was told.
            await self._tell(0 if whole else self.speaks_for, abort=True)
        if error is not None and not self._aborted:
            self._failed(error)
        with self._lock:
            self._told = True
            finishing = self._finishing
        if finishing:
            self._sent(1)

    async def _tell(self, senders: int, *, abort: bool) -> Exception | None:
        """Say so to the receiver; what is late is read all the same when it goes on."""
        try:
            await self._client.kv_close(p.KVClose(self._request_id, abort, senders))
        except (StoreError, OSError) as error:
            return error
        return None
