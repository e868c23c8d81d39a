"""Chunked pipeline parallelism: one prompt through several workers, each with some of the layers.

The worker that was asked leads. It looks the prefix up once, opens a stage on every follower, and
computes the first layers of chunk after chunk; hidden states go from stage to stage, so while the
second stage computes chunk i the first is at chunk i + 1. Every stage loads and stores the KV of
its own layers, under the names a single worker uses. The last one chooses the first token.

A chunk is acknowledged when it has arrived. `WINDOW` chunks may be on their way, then a stage
waits: a slow follower costs no memory. Any failure of a follower ends the request, and ending it
ends all its stages.

A stage that cannot load its share of the prefix lacks hidden states that nobody sends, and stages
before it may have finished. So the leader dissolves the group and computes the prompt alone: it
has blocks for all layers. It is rare, and a group made anew could lose its prefix again.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from serving.workers import protocol as p
from serving.workers.jobs import Prefilling
from serving.workers.prefixes import Fetch
from transfer_engine.errors import InvalidArgumentError, StoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from serving.workers.client import WorkerClient
    from serving.workers.jobs import Job, Parts

__all__ = ["ChunkSender", "Leading", "Stage", "layers_of", "to_bytes", "to_hidden"]

WINDOW = 4
"""Chunks that may be on their way from one stage to the next."""


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The layers of one stage: even shares."""
    return range(layers * stage // stages, layers * (stage + 1) // stages)


def to_bytes(hidden: torch.Tensor) -> NDArray[np.uint8]:
    """Hidden states as they travel."""
    array: NDArray[np.uint8] = hidden.contiguous().cpu().view(-1).view(torch.uint8).numpy()
    return array


def to_hidden(data: NDArray[np.uint8], width: int, like: torch.Tensor) -> torch.Tensor:
    """Hidden states that came; `like` has their type and device."""
    rows = torch.from_numpy(data.copy()).view(like.dtype).view(-1, width)
    return rows.to(like.device)


class ChunkSender:
    """Sends one request's hidden states to the next stage, in order; lives on the loop."""

    def __init__(self, request: Job, client: WorkerClient) -> None:
        self._request = request
        self._client = client
        self._tag = p.request_tag(request.request_id)
        self._waiting: deque[tuple[int, int, NDArray[np.uint8]]] = deque()
        self._task: asyncio.Task[None] | None = None
        self._under_way = 0  # of the computing thread
        self._closed = False

    def close(self) -> None:
        """Send no more; what cannot be delivered from now on was not needed. On that thread too."""
        self._closed = True

    def forward(self, start: int, end: int, hidden: torch.Tensor) -> None:
        """Take a chunk from the engine; pauses the sequence when too many are under way."""
        self._under_way += 1
        if self._under_way >= WINDOW:
            self._request.sequence.ready = False
        self._request.parts.loop.call_soon_threadsafe(self._add, start, end, to_bytes(hidden))

    def _arrived(self) -> None:
        self._under_way -= 1
        if not self._closed:
            self._request.sequence.ready = True

    def _add(self, start: int, end: int, data: NDArray[np.uint8]) -> None:
        self._waiting.append((start, end, data))
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        request = self._request
        try:
            while self._waiting and not request.ended and not self._closed:
                start, end, data = self._waiting.popleft()
                left = max(0.001, request.until - time.monotonic())
                await self._client.push(
                    p.STAGE_CHUNK, left, request=self._tag, start=start, count=end - start,
                    hidden=data,
                )  # fmt: skip
                request.parts.computing.post(self._arrived)
        except (StoreError, OSError) as error:
            if self._closed:
                return
            request.lose_peer(
                f"the next stage cannot be reached: {error}", "send it to another group"
            )


class Stage(Prefilling):
    """A follower's share of one prompt."""

    def __init__(self, parts: Parts, message: p.StageOpen, following: WorkerClient | None) -> None:
        super().__init__(parts, message)  # type: ignore[arg-type]
        self.sequence.layers = layers_of(message.stage, message.stages, parts.names.layers)
        self.sequence.inbox = {}
        if following is not None:
            self.sequence.forward = ChunkSender(self, following).forward

    def look_for_prefix(self) -> None:
        """Load the blocks that the leader found."""
        self.times.opened = time.monotonic()
        self.load_known(self.message.start // self.parts.block_tokens)

    def prefix_lost(self) -> None:
        """Nobody sends what comes before the prefix's end: wait to be ended by the leader."""
        super().prefix_lost()
        self.tell(p.PrefixLost())

    def take(self, message: Any) -> None:
        """A chunk has come. Raises InvalidArgumentError for one that does not fit the prompt."""
        decoder, size = self.parts.computing.engine.decoder, self.parts.block_tokens
        start, count = int(message.start), int(message.count)
        rows = -(-count // size) * size if decoder.exact else count
        width, like = decoder.config.hidden, decoder.weights.embedding
        nbytes = rows * width * like.element_size()
        if len(message.hidden) != nbytes or not 0 < count <= len(self.prompt) - start:
            raise InvalidArgumentError(f"hidden states of {count} tokens from {start} do not fit")
        hidden = to_hidden(message.hidden, width, like)
        self.parts.computing.post(lambda: self._accept(start, hidden))

    def _accept(self, start: int, hidden: torch.Tensor) -> None:
        inbox = self.sequence.inbox
        if inbox is not None and not self.over:
            inbox[start] = hidden


class Leading(Prefilling):
    """A prompt that is spread over a group; this worker computes the first layers."""

    def __init__(
        self, parts: Parts, message: p.Prefill, followers: Sequence[WorkerClient], revision: str
    ) -> None:
        super().__init__(parts, message)
        self._followers = list(followers)
        self._revision = revision
        self._stages = 1 + len(followers)
        self.sequence.layers = layers_of(0, self._stages, parts.names.layers)
        self._sender = ChunkSender(self, followers[0])
        self.sequence.forward = self._sender.forward
        self._places: list[p.KVPlace] = []
        self._open = 0
        self._first = -1
        self._start = 0
        self._leading: asyncio.Task[None] | None = None
        self._following: list[asyncio.Task[None]] = []

    def begin(self) -> None:
        """Look the prefix up, then open the stages."""
        self._set_timer()
        self.emit(p.Queued(self.parts.computing.engine.queued_tokens))
        self._leading = self.parts.loop.create_task(self._lead())

    async def _lead(self) -> None:
        self._start = await self._look() * self.parts.block_tokens
        chunk = self.parts.computing.engine.chunk_tokens
        if len(self.prompt) - self._start <= chunk and self.pusher is None:
            self._take_all_layers()
            self.parts.computing.post(self.submit)
            return
        ready = [asyncio.Event() for _ in self._followers]
        for number, client in enumerate(self._followers, 1):
            following = self._followers[number].address if number < len(self._followers) else ""
            message = p.StageOpen(
                request_id=self.request_id,
                tokens=self.message.tokens,
                sampling=self.message.sampling,
                stage=number,
                stages=self._stages,
                start=self._start,
                chunk_tokens=chunk,
                revision=self._revision,
                following=following,
                deadline_ms=max(1, int(1000 * (self.until - time.monotonic()))),
                priority=self.message.priority,
                fetch_deadline_ms=self.message.fetch_deadline_ms,
                decode_at=self.message.decode_at,
                room=None if self.pusher is None else self.pusher.room,
                store=self.message.store,
            )
            task = self._follow(client, message, ready[number - 1])
            self._following.append(self.parts.loop.create_task(task))
        await asyncio.gather(*(each.wait() for each in ready))
        if not self.ended:
            self.parts.computing.post(self.submit)

    def _take_all_layers(self) -> None:
        """Compute them here: one chunk would only pass through the stages one after the other."""
        self._followers = []
        self.sequence.layers = range(self.parts.names.layers)
        self.sequence.forward = None

    async def _look(self) -> int:
        """How many blocks the pool has."""
        found: Future[int] = Future()
        found.set_running_or_notify_cancel()  # It is told even when nobody waits any more.
        self.parts.prefixes.fetch(
            Fetch(
                tokens=self.prompt,
                layers=range(0),
                blocks_max=self.blocks_wanted(),
                known=False,
                until=self.fetch_until,
                found=found.set_result,
                pool_only=True,
                ended=lambda: None,
            )
        )
        return await asyncio.wrap_future(found)

    async def _follow(
        self, client: WorkerClient, message: p.StageOpen, ready: asyncio.Event
    ) -> None:
        try:
            await client.connect()
            if self.ended or not self._followers:
                return
            if self.pusher is not None:
                self.pusher.speaks_for -= 1  # whoever was asked speaks for itself
            async for event in client.stage(message):
                if isinstance(event, p.Queued):
                    ready.set()
                elif isinstance(event, p.FirstToken):
                    self._chosen(event)
                elif isinstance(event, p.Done):
                    self.parts.computing.post(partial(self._stage_done, event.kv))
                elif isinstance(event, p.PrefixLost):
                    self.parts.computing.post(self._stage_lost)
                elif isinstance(event, p.Failed):
                    self.fail(
                        event.code, f"stage {message.stage} at {client.address}: {event.message}",
                        event.advice, retryable=event.retryable,
                    )  # fmt: skip
        except (StoreError, OSError) as error:
            self.lose_peer(
                f"stage {message.stage} at {client.address}: {error}", "send it to another group"
            )
        finally:
            ready.set()

    def _chosen(self, event: p.FirstToken) -> None:
        self._first = event.token
        if event.token in self.sequence.stop_tokens:
            self._stopped, self.last = "stop", p.Chosen(event.token, event.likelihood)
            return
        if self.message.max_new_tokens <= 1:
            self._stopped = "length"
        self.emit(event)

    def _stage_done(self, place: p.KVPlace) -> None:
        if self._followers:
            self._places.append(place)
            self.released()

    def look_for_prefix(self) -> None:
        """Load the blocks that `_look` found."""
        self.times.opened = time.monotonic()
        self.load_known(self._start // self.parts.block_tokens)

    def prefix_lost(self) -> None:
        """Other stages count on it too: dissolve the group and compute the prompt alone."""
        super().prefix_lost()
        if not self._followers:
            return
        if self.times.opened and not self.times.started:
            self.started()
        self._start = 0
        self._places.clear()
        self._sender.close()
        self._take_all_layers()
        pusher, self.pusher = self.pusher, None
        if pusher is not None:
            pusher.abort()
        self.parts.loop.call_soon_threadsafe(self._dissolve)

    def _stage_lost(self) -> None:
        """A follower cannot load its share; the first layers may have been computed by now."""
        if self.over or not self._followers:
            return
        self.sequence.computed = 0
        self.prefix_lost()
        if self._computed:
            self._computed = False
            self.parts.computing.engine.reopen(self.sequence, 0, self.sequence.prompt)

    def _dissolve(self) -> None:
        """End the other stages. What they push is incomplete; decode loads from the pool then."""
        for task in self._following:
            task.cancel()

    def released(self) -> None:
        """Done when all stages are."""
        if len(self._places) == len(self._followers):
            super().released()

    def done(self) -> p.Done:
        """What all stages have put into the pool."""
        own = super().done()
        blocks = min([own.kv.pool_blocks, *(place.pool_blocks for place in self._places)])
        place = p.KVPlace(blocks, own.kv.pushed)
        return msgspec.structs.replace(own, kv=place)

    def finish(self) -> None:
        """Leave no stage behind."""
        super().finish()
        for task in (self._leading, *self._following):
            if task is not None:
                self.parts.loop.call_soon_threadsafe(task.cancel)
