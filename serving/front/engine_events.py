"""Events of engines as they travel: vLLM's and SGLang's batches, and those of the original store.

    number, events = read_batch(frames)      # three frames: topic, number, MessagePack

vLLM and SGLang send arrays that begin with a class name, the original's store sends maps. Unknown
events and fields are left out, because publishers add some. `Subscription` receives them over
ZeroMQ, asks for what is missing where there is a replay endpoint, and otherwise clears the source:
an index with a hole would promise blocks that are gone. Needs `pyzmq` to receive, not to read.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.errors import (
    ConfigError,
    InvalidArgumentError,
    RemoteProtocolError,
    StoreError,
)
from serving.front.indexer import Cleared, Removed, Stored
from transfer_engine.lasting import keep_going
from transfer_engine.wire.cold import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.front.indexer import BlockHash, Source

__all__ = ["Subscription", "read_batch"]

log = logging.getLogger(__name__)

Event = Stored | Removed | Cleared
REPLAY_S = 2.0
BATCH_BYTES_MAX = 64 << 20
"""Longest message that is taken in: some million tokens. A publisher that sends more is left."""
_END_OF_REPLAY = -1


def read_batch(frames: Sequence[bytes]) -> tuple[int, list[Event]]:
    """The number of a batch and its events. Raises RemoteProtocolError for what is none."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        raise RemoteProtocolError(f"{len(frames)} frames are no batch of events")
    number = int.from_bytes(frames[-2], "big", signed=True)
    try:
        content = msgspec.msgpack.decode(frames[-1]) if frames[-1] else [0, []]
    except MALFORMED as error:
        raise RemoteProtocolError(f"a batch of events is no MessagePack: {error}") from error
    if not isinstance(content, list) or len(content) < 2 or not isinstance(content[1], list):
        raise RemoteProtocolError("a batch of events has no list of events")
    found = [_event(each) for each in content[1]]
    return number, [each for each in found if each is not None]


def _event(raw: Any) -> Event | None:
    if isinstance(raw, dict):
        return _of_map(raw)
    if not isinstance(raw, list) or not raw:
        return None
    kind, *fields = raw
    if kind == "BlockStored" and len(fields) >= 3:
        hashes, parent, tokens = fields[:3]
        medium = fields[5] if len(fields) > 5 and isinstance(fields[5], str) else "GPU"
        lora = fields[6] if len(fields) > 6 and isinstance(fields[6], str) else ""
        return Stored(_hashes(hashes), _hash(parent), _tokens(tokens), medium, lora)
    if kind == "BlockRemoved" and fields:
        medium = fields[1] if len(fields) > 1 and isinstance(fields[1], str) else "GPU"
        return Removed(_hashes(fields[0]), medium)
    return Cleared() if kind == "AllBlocksCleared" else None


def _of_map(raw: dict[str, Any]) -> Event | None:
    kind = raw.get("event_type") or raw.get("type")
    hashes = _hashes(raw.get("seq_hashes") or raw.get("block_hashes") or [])
    medium = raw.get("medium") or ""
    if kind in ("stored", "BlockStored"):
        lora = raw.get("lora_name") or ""
        if not _of_tokens_alone(raw.get("extra_keys"), lora):
            return None
        parent = _hash(raw.get("parent_hash", raw.get("parent_block_hash")))
        tokens = _tokens(raw.get("token_ids") or [])
        return Stored(hashes, parent, tokens, medium or "GPU", str(lora))
    if kind in ("removed", "BlockRemoved"):
        return Removed(hashes, medium)
    return Cleared() if kind in ("cleared", "AllBlocksCleared") else None


def _of_tokens_alone(keys: Any, lora: str) -> bool:
    """Whether nothing but tokens and an adapter makes blocks what they are: no image, no salt."""
    return not isinstance(keys, list) or all(not each or each == [lora] for each in keys)


def _hashes(raw: Any) -> tuple[BlockHash, ...]:
    if not isinstance(raw, list):
        return ()
    return tuple(each for each in raw if isinstance(each, int | bytes | str))


def _hash(raw: Any) -> BlockHash | None:
    return raw if isinstance(raw, int | bytes | str) else None


def _tokens(raw: Any) -> tuple[int, ...]:
    """Tokens of an event; none where they are no numbers."""
    if not isinstance(raw, list) or not all(isinstance(token, int) for token in raw):
        return ()
    return tuple(raw)


class Subscription:
    """Follows one publisher until it is closed.

    Raises ConfigError without pyzmq, or without a socket to be had, InvalidArgumentError for an
    endpoint that is none. What goes wrong later empties the source and is logged, and the next
    batch is taken in.
    """

    def __init__(self, source: Source) -> None:
        try:
            import zmq.asyncio
        except ImportError as error:
            raise ConfigError(
                "following the events of engines needs pyzmq",
                advice="pip install 'mooncake-store[indexer]'",
            ) from error
        self._zmq = zmq
        self._source = source
        self._next = 0
        self._context: Any = zmq.asyncio.Context()
        try:
            self._subscribe()
            if source.registration.replay_endpoint:
                self._connected(zmq.DEALER, source.registration.replay_endpoint).close(linger=0)
        except StoreError:
            self._context.destroy(linger=0)
            raise
        following = keep_going(f"following {source.registration.name}", self._take)
        self._task = asyncio.get_running_loop().create_task(following)

    def _subscribe(self) -> None:
        """Connect, and be told when the connection is lost."""
        zmq = self._zmq
        self._socket = self._connected(zmq.SUB, self._source.registration.endpoint)
        try:
            self._socket.setsockopt(zmq.SUBSCRIBE, b"")
            self._lost = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise _no_socket(error) from error
        self._poller = zmq.asyncio.Poller()
        for each in self._socket, self._lost:
            self._poller.register(each, zmq.POLLIN)

    def _connected(self, kind: int, endpoint: str) -> Any:
        """A socket that has begun to connect."""
        try:
            socket = self._context.socket(kind)
        except self._zmq.ZMQError as error:
            raise _no_socket(error) from error
        try:
            socket.setsockopt(self._zmq.MAXMSGSIZE, BATCH_BYTES_MAX)
            socket.connect(endpoint)
        except (self._zmq.ZMQError, ValueError, UnicodeError) as error:
            socket.close(linger=0)
            raise InvalidArgumentError(
                f"{endpoint!r} is no endpoint of a publisher: {error}",
                advice="write one such as tcp://10.0.0.5:5557",
            ) from error
        return socket

    async def close(self) -> None:
        """End. Idempotent."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self._context.destroy(linger=0)

    async def _take(self) -> None:
        """Take in one batch. What cannot be taken in empties the source: it may say what is not."""
        if self._socket.closed:  # none could be had when the last connection was lost
            self._subscribe()
        ready = [each for each, _ in await self._poller.poll()]
        if self._lost in ready:
            self._begin_anew()
            return
        try:
            frames = await self._socket.recv_multipart()
            try:
                number, events = read_batch(frames)
            except RemoteProtocolError as error:
                log.warning("%s: %s", self._source.registration.name, error)
                return
            if number > self._next:
                await self._catch_up(number)
            elif number < self._next:
                # The publisher was started anew: what it held before is gone.
                self._source.clear()
            self._apply(number, events)
        except Exception:
            self._source.clear()
            raise

    def _begin_anew(self) -> None:
        """The connection was lost: whoever comes back may be another one, that counts from 0.

        Its first batches may be missed while it is connected to, so its numbers need not show it.
        What of the former one still waits to be read goes with the socket.
        """
        log.info("%s: its publisher is away", self._source.registration.name)
        self._source.clear()
        self._next = 0
        self._socket.disable_monitor()
        for each in self._lost, self._socket:
            each.close(linger=0)
        self._subscribe()

    def _apply(self, number: int, events: list[Event]) -> None:
        for event in events:
            self._source.apply(event)
        self._next = number + 1

    async def _catch_up(self, upto: int) -> None:
        """Ask for the batches before `upto`; clear the source when they cannot be had."""
        if self._source.registration.replay_endpoint and await self._replayed(upto):
            return
        log.warning(
            "%s: batches %d to %d are missing, starting anew",
            self._source.registration.name, self._next, upto - 1,
        )  # fmt: skip
        self._source.clear()

    async def _replayed(self, upto: int) -> bool:
        socket = self._connected(self._zmq.DEALER, self._source.registration.replay_endpoint)
        try:
            async with asyncio.timeout(REPLAY_S):
                await socket.send_multipart([b"", self._next.to_bytes(8, "big")])
                while self._next < upto:
                    number, events = read_batch(await socket.recv_multipart())
                    if number == _END_OF_REPLAY or number > self._next:
                        return False
                    if number == self._next:
                        self._apply(number, events)
        except (TimeoutError, RemoteProtocolError):
            return False
        finally:
            socket.close(linger=0)
        return True


def _no_socket(error: Exception) -> ConfigError:
    return ConfigError(
        f"no socket to follow a publisher with: {error}",
        advice="raise the limit of open files (ulimit -n)",
    )
