"""What other workers bring: pushed KV, stages of pipelines and their chunks.

All of it comes with the tag of a request this worker agreed to; anything else is refused. Sizes are
compared with the model's before a byte is copied.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from serving.workers import protocol as p
from serving.workers.decoding import take_blocks
from serving.workers.pushing import Incoming, Pusher
from serving.workers.stages import Stage, to_hidden
from transfer_engine.errors import InvalidArgumentError, NotFoundError, StoreError

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.workers.requests import Prefilling, Request
    from serving.workers.worker import Worker
    from transfer_engine.rpc.serving import Connection

__all__ = ["Receiving"]


class Receiving:
    """The half of a worker's service that other workers use."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._incoming: dict[bytes, Incoming] = {}
        self._stages: dict[bytes, Stage] = {}
        self.handlers: dict[int, Callable[[Connection, Any], Any]] = {
            p.KV_OPEN.opcode: self._kv_open,
            p.KV_PUSH.opcode: self._kv_push,
            p.KV_CLOSE.opcode: self._kv_close,
            p.STAGE_OPEN.opcode: self._stage_open,
            p.STAGE_CHUNK.opcode: self._stage_chunk,
        }

    @property
    def expected(self) -> int:
        """How many prompts' KV was promised room."""
        return sum(not each.taken for each in self._incoming.values())

    def close(self) -> None:
        """Expect nothing any more."""
        for incoming in list(self._incoming.values()):
            self._expire(incoming)

    # The sending side, for requests of this worker.

    async def begin_pushing(self, request: Prefilling, message: p.Prefill, senders: int) -> None:
        """Ask the decode worker for room, then start the request; fail it without."""
        pusher = Pusher(request, self._worker.peer(message.decode_at))
        try:
            opened = await pusher.open(
                senders=senders,
                max_new_tokens=message.max_new_tokens,
                revision=self._worker.card.revision,
            )
        except (StoreError, OSError) as error:
            request.fail(
                "peer_lost", f"the decode worker {message.decode_at}: {error}",
                "choose another decode worker", retryable=True,
            )  # fmt: skip
            return
        if not opened.admitted:
            request.fail(
                "overloaded", f"the decode worker {message.decode_at} has no room: {opened.reason}",
                f"ask again in {opened.retry_after_ms} ms, or choose another", retryable=True,
            )  # fmt: skip
            return
        request.pusher = pusher
        pusher.start()
        request.begin()

    # Pushed KV.

    async def _kv_open(self, connection: Connection, message: p.KVOpen) -> p.KVOpened:
        worker = self._worker
        tag = p.request_tag(message.request_id)
        if message.revision != worker.card.revision:
            raise InvalidArgumentError(
                f"KV of model {message.revision} does not fit {worker.card.revision}",
                advice="send requests among workers of one model",
            )
        if worker.draining or worker.role != p.DECODE_ROLE or tag in self._incoming:
            return p.KVOpened(False, "it takes no decodes now", 1000)
        room = message.tokens + max(0, message.max_new_tokens - 1)
        parts, reserved = worker.parts, self.expected
        taken = await parts.computing.call(lambda: take_blocks(parts, room, reserved))
        if isinstance(taken, p.Refused):
            return p.KVOpened(False, taken.reason, taken.retry_after_ms)
        until = time.monotonic() + p.deadline_of(message)
        incoming = Incoming(message.request_id, message.tokens, taken, message.senders, until)
        incoming.timer = parts.loop.call_later(
            p.deadline_of(message), lambda: self._expire(incoming)
        )
        self._incoming[tag] = incoming
        owned = worker.owned(connection).incoming
        owned.intersection_update(self._incoming)
        owned.add(tag)
        return p.KVOpened(True)

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
        incoming = self._incoming.get(p.request_tag(request_id))
        if incoming is None or incoming.abandoned or incoming.taken:
            return None
        incoming.taken = True
        if incoming.timer is not None:
            incoming.timer.cancel()
        if incoming.ended.is_set():
            del self._incoming[p.request_tag(request_id)]
        return incoming

    def forget(self, request: Request) -> None:
        """A request is over, and what was promised to it."""
        tag = p.request_tag(request.request_id)
        incoming = self._incoming.get(tag)
        if incoming is not None and (incoming.abandoned or incoming.ended.is_set()):
            del self._incoming[tag]
        if self._stages.get(tag) is request:
            del self._stages[tag]

    def _expire(self, incoming: Incoming) -> None:
        """Nobody came for it: give the room back."""
        self._incoming.pop(p.request_tag(incoming.request_id), None)
        if incoming.timer is not None:
            incoming.timer.cancel()
        if not incoming.abandoned:
            incoming.abandoned = True
            engine = self._worker.parts.computing.engine
            self._worker.parts.computing.post(lambda: engine.cache.release(incoming.blocks))
        incoming.close(abort=True)

    def _expected(self, tag: bytes) -> Incoming:
        incoming = self._incoming.get(bytes(tag))
        if incoming is None or incoming.abandoned:
            raise NotFoundError(
                "no room was promised for this KV", advice="its request ended, or was cancelled"
            )
        return incoming

    def _kv_push(self, _connection: Connection, message: Any) -> None:
        incoming = self._expected(message.request)
        memory, card = self._worker.parts.memory, self._worker.card
        layer, start, count = int(message.layer), int(message.start), int(message.count)
        nbytes = memory.half // card.block_tokens * count
        fits = layer < card.layers and count > 0 and start + count <= incoming.tokens
        if not fits or len(message.keys) != nbytes or len(message.values) != nbytes:
            raise InvalidArgumentError(
                f"{count} tokens from {start} on of layer {layer} do not fit this prompt"
            )
        memory.accept(layer, incoming.blocks, start, count, message.keys, message.values)

    def _kv_close(self, _connection: Connection, message: p.KVClose) -> None:
        incoming = self._incoming.get(p.request_tag(message.request_id))
        if incoming is None:
            return
        incoming.close(abort=message.abort)
        if message.abort and not incoming.taken:
            self._expire(incoming)  # No decode has come for it, and none will.

    # Stages.

    def _stage_open(self, connection: Connection, message: p.StageOpen) -> None:
        worker = self._worker
        if worker.refused(connection, message, p.PREFILL_ROLE, 1):
            return
        own = (worker.card.revision, worker.parts.computing.engine.chunk_tokens)
        share = 0 < message.stage < message.stages <= worker.card.layers
        if (message.revision, message.chunk_tokens) != own or not share:
            raise InvalidArgumentError(
                "stages of one prompt must have one model and one size of chunks",
                advice="start all workers of a group with the same settings",
            )
        following = worker.peer(message.following) if message.following else None
        stage = Stage(worker.parts, message, following)
        self._stages[p.request_tag(message.request_id)] = stage
        worker.admit(connection, stage)
        if message.decode_at:
            stage.pusher = Pusher(stage, worker.peer(message.decode_at))
            stage.pusher.start()
        stage.begin()

    def _stage_chunk(self, _connection: Connection, message: Any) -> None:
        stage = self._stages.get(bytes(message.request))
        if stage is None or stage.ended:
            raise NotFoundError("no such stage is open here", advice="its request ended")
        parts = self._worker.parts
        decoder, size = parts.computing.engine.decoder, parts.block_tokens
        start, count = int(message.start), int(message.count)
        rows = -(-count // size) * size if decoder.exact else count
        width = decoder.config.hidden
        nbytes = rows * width * decoder.weights.embedding.element_size()
        if len(message.hidden) != nbytes or not 0 < count <= len(stage.prompt) - start:
            raise InvalidArgumentError(f"hidden states of {count} tokens from {start} do not fit")
        hidden = to_hidden(message.hidden, width, decoder.weights.embedding)
        parts.computing.post(lambda: stage.accept(start, hidden))
