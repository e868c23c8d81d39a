"""KV events in the format that vLLM and SGLang publish, for the indexes of their routers.

A batch is three ZeroMQ frames: topic, number (8 bytes, big-endian, without gaps), and MessagePack
`[time, [event, ...], rank]` with events as maps of a `type`: `BlockStored`, `BlockRemoved`,
`AllBlocksCleared`. Who missed batches asks a second socket for those from a number on and gets
them, then an end mark with number -1. A request for batches that are no longer kept cannot be
answered whole; `publish_anew` is called then, and what is there is published from the start.

Needs `pyzmq` (the extra `indexer`). Cost: one encoding a batch, `kept` batches of memory.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.errors import ConfigError
from transfer_engine.lasting import keep_going

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["AllBlocksCleared", "BlockRemoved", "BlockStored", "Publisher"]

KEPT = 10_000
_QUEUED_MAX = 100_000
_QUESTION_BYTES_MAX = 4096
_ANEW_S = 1.0
"""All is told anew at most so often: several who missed much are served by one telling."""
_END = (-1).to_bytes(8, "big", signed=True)

Hash = int | bytes


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    """An event; encoded with its class's name as `type`."""


class BlockStored(Event):
    """Blocks can be loaded from now on. A store does not know their tokens."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None


class BlockRemoved(Event):
    """Blocks cannot be loaded any longer."""

    block_hashes: list[Hash]
    medium: str | None


class AllBlocksCleared(Event):
    """Forget every block of this publisher."""


class Publisher:
    """Publishes on an event loop. `publish_anew` is awaited when somebody missed too much."""

    def __init__(
        self,
        endpoint: str,
        replay: str = "",
        *,
        topic: str = "",
        publish_anew: Callable[[], Awaitable[None]] | None = None,
        kept: int = KEPT,
    ) -> None:
        try:
            import zmq
            import zmq.asyncio
        except ImportError as error:
            raise ConfigError(
                "publishing KV events needs pyzmq", advice="pip install 'mooncake-store[indexer]'"
            ) from error
        self._topic = topic.encode()
        self._publish_anew = publish_anew
        self._told_anew = -_ANEW_S
        self._numbers = itertools.count()
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=kept)
        self._context: Any = zmq.asyncio.Context()
        self._events = self._bound(zmq.PUB, endpoint)
        self._events.set_hwm(_QUEUED_MAX)
        self._replays = self._bound(zmq.ROUTER, replay) if replay else None
        self._answering: asyncio.Task[None] | None = None
        if self._replays is not None:
            answers = keep_going("telling missed events", partial(self._answer, self._replays))
            self._answering = asyncio.get_running_loop().create_task(answers)

    def _bound(self, kind: int, endpoint: str) -> Any:
        import zmq

        try:
            socket = self._context.socket(kind)
            socket.linger = 0
            socket.setsockopt(zmq.MAXMSGSIZE, _QUESTION_BYTES_MAX)
            socket.bind(endpoint)
        except (zmq.ZMQError, ValueError, TypeError) as error:  # or text that is no UTF-8
            self._context.destroy(linger=0)
            raise ConfigError(f"cannot publish KV events at {endpoint}: {error}") from None
        return socket

    @property
    def endpoint(self) -> str:
        """Where to subscribe."""
        return _endpoint(self._events)

    @property
    def replay_endpoint(self) -> str:
        """Where to ask for what was missed; empty without."""
        return "" if self._replays is None else _endpoint(self._replays)

    async def publish(self, events: list[Event]) -> None:
        """Send a batch."""
        number = next(self._numbers)
        payload = msgspec.msgpack.encode([time.time(), events, 0])
        self._kept.append((number, payload))
        await self._events.send_multipart([self._topic, number.to_bytes(8, "big"), payload])

    async def _answer(self, replays: Any) -> None:
        frames = await replays.recv_multipart()
        if len(frames) != 3 or len(frames[2]) != 8:
            return  # Not a request of this protocol.
        who, _, asked = frames
        first = int.from_bytes(asked, "big")
        for number, payload in list(self._kept):
            if number >= first:
                batch = [who, b"", self._topic, number.to_bytes(8, "big"), payload]
                await replays.send_multipart(batch)
        await replays.send_multipart([who, b"", b"", _END, b""])
        if self._kept and first < self._kept[0][0]:
            await self._tell_anew()

    async def _tell_anew(self) -> None:
        if self._publish_anew is None or time.monotonic() - self._told_anew < _ANEW_S:
            return
        await self._publish_anew()
        self._told_anew = time.monotonic()

    async def close(self) -> None:
        """Stop. Idempotent."""
        task, self._answering = self._answering, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._context.destroy(linger=0)


def _endpoint(socket: Any) -> str:
    import zmq

    bound: bytes = socket.getsockopt(zmq.LAST_ENDPOINT)
    return bound.rstrip(b"\0").decode()
