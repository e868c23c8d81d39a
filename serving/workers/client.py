"""A worker as the conductor sees it, from asyncio.

    async with WorkerClient("127.0.0.1:7100") as worker:
        hello = await worker.hello()
        async for event in worker.prefill(Prefill(...)):
            ...

`prefill`, `decode` and `generate` submit a request and go through its events until the last one.
Leaving the loop early, or cancelling it, cancels the request at the worker. What went wrong *with
the request* is an event (`Failed`, `Refused`); what went wrong with the worker is raised, as
PeerLostError, TransferTimeoutError or UnavailableError, no later than `DOUBT_S` after the worker
was heard last.

One connection carries all requests, and the worker tells on it what happens to them. Not for
several event loops; retries nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from typing import TYPE_CHECKING, Any

from serving.workers import protocol as p
from transfer_engine.errors import (
    InvalidArgumentError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rpc.aio import AsyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from transfer_engine.rpc.aio import AsyncConnection, Following
    from transfer_engine.wire.frame import Body
    from transfer_engine.wire.registry import Operation

__all__ = ["WorkerClient"]

CALL_S = 5.0
"""For operations that are answered at once."""
DOUBT_S = 7 * p.BEAT_S
"""Who is told nothing for so long takes the worker for lost."""
GRACE_S = 2.0
"""A worker ends a request at its deadline itself; this much later its client does."""


class _Listener:
    """What a worker tells over one connection, by request."""

    def __init__(self, connection: AsyncConnection) -> None:
        self.connection = connection
        self.failure: StoreError | None = None
        """Why nothing will be told any more."""
        self._told: dict[str, deque[p.Event]] = {}
        self._news: dict[str, asyncio.Event] = {}
        following = connection.follow(p.LISTEN, p.LISTEN.request.pack(p.Listen()), self._take)
        self._task = asyncio.get_running_loop().create_task(self._watch(following))

    def open(self, request_id: str) -> None:
        """Keep what is told of a request from now on."""
        if request_id in self._told:
            raise InvalidArgumentError(f"request {request_id} exists already")
        self._told[request_id] = deque()
        self._news[request_id] = asyncio.Event()

    def forget(self, request_id: str) -> None:
        """Keep nothing of a request."""
        self._told.pop(request_id, None)
        self._news.pop(request_id, None)

    async def next(self, request_id: str, left_s: float) -> p.Event | None:
        """Return the next event; None when none comes in time. Raises why none can come."""
        told, news = self._told[request_id], self._news[request_id]
        if not told and self.failure is None:
            news.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await news.wait()
        if told:
            return told.popleft()
        if self.failure is not None:
            raise self.failure.again()
        return None

    def _take(self, body: Body) -> None:
        for request_id, events in p.LISTEN.reply.unpack(body).told:
            told = self._told.get(request_id)  # None: it was left meanwhile
            if told is not None:
                told.extend(events)
                self._news[request_id].set()

    async def _watch(self, following: Following) -> None:
        try:
            self.failure = await following.ended(DOUBT_S)
        finally:
            self.failure = self.failure or UnavailableError("the client is closed")
            for news in self._news.values():
                news.set()
        # What a worker that stood still says later is about requests that nobody has any more.
        await self.connection.close()

    async def close(self) -> None:
        """Listen no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


class WorkerClient:
    """A connection to one worker, made when first needed and again when it was lost."""

    def __init__(self, address: str, *, secret: bytes | None = None) -> None:
        self.address = address
        self._rpc = AsyncClient(address, p.WORKER, secret=secret, in_flight_max=4096)
        self._listener: _Listener | None = None

    async def _call(
        self, operation: Operation[Any, Any], message: Any, timeout_s: float = CALL_S
    ) -> Any:
        body = await self._rpc.call(operation, operation.request.pack(message), timeout_s=timeout_s)
        return operation.reply.unpack(body)

    async def hello(self, timeout_s: float = CALL_S) -> p.Hello:
        """Who serves there."""
        answer: p.Hello = await self._call(p.HELLO, p.HelloRequest(), timeout_s)
        return answer

    async def load(self, timeout_s: float = CALL_S) -> p.Load:
        """How busy it is."""
        answer: p.Load = await self._call(p.LOAD, p.LoadRequest(), timeout_s)
        return answer

    async def set_role(self, role: str, *, drain_s: float = 30.0) -> None:
        """Change its role; what runs is finished first. Raises when that takes too long."""
        message = p.SetRole(role, int(drain_s * 1000))
        await self._call(p.SET_ROLE, message, drain_s + CALL_S)

    async def drain(self, *, drain_s: float = 30.0) -> None:
        """Let it finish what runs and take nothing new."""
        await self._call(p.DRAIN, p.Drain(int(drain_s * 1000)), drain_s + CALL_S)

    async def resume(self) -> None:
        """Let it take requests again after `drain`."""
        await self._call(p.DRAIN, p.Drain(0, resume=True))

    async def cancel(self, request_id: str, timeout_s: float = CALL_S) -> None:
        """End a request; harmless when it is unknown or has ended."""
        await self._call(p.CANCEL, p.Cancel(request_id), timeout_s)

    def prefill(self, message: p.Prefill) -> AsyncGenerator[p.Event, None]:
        """Compute a prompt: queued, started, first_token, done; or failed."""
        return self._events(p.PREFILL, message)

    def decode(self, message: p.Decode) -> AsyncGenerator[p.Event, None]:
        """Go on from a prompt: admitted or refused, tokens..., finished; or failed."""
        return self._events(p.DECODE, message)

    def generate(self, message: p.Generate) -> AsyncGenerator[p.Event, None]:
        """Do both on this worker: queued, started, tokens..., finished; or failed."""
        return self._events(p.GENERATE, message)

    async def kv_open(self, message: p.KVOpen, timeout_s: float = CALL_S) -> p.KVOpened:
        """Ask for room for KV that will be pushed."""
        answer: p.KVOpened = await self._call(p.KV_OPEN, message, timeout_s)
        return answer

    async def kv_close(self, message: p.KVClose, timeout_s: float = CALL_S) -> None:
        """Say that a sender pushed all it has, or gives up."""
        await self._call(p.KV_CLOSE, message, timeout_s)

    async def kv_lend(self, message: p.KVLend, timeout_s: float) -> p.KVLent:
        """Ask for blocks that it keeps, to read them."""
        answer: p.KVLent = await self._call(p.KV_LEND, message, timeout_s)
        return answer

    async def kv_return(self, message: p.KVReturn, timeout_s: float = CALL_S) -> None:
        """Say that they are read no more; if it cannot be told, it will find out by itself."""
        with contextlib.suppress(StoreError, OSError):
            await self._call(p.KV_RETURN, message, timeout_s)

    async def follow_kept(self, take: Callable[[p.Held], None]) -> StoreError:
        """Have `take` called with what it keeps and what changes; return why that has ended."""
        connection = await self._rpc.connected(CALL_S)
        asking = p.FOLLOW_KEPT.request.pack(p.FollowKept())
        following = connection.follow(
            p.FOLLOW_KEPT, asking, lambda body: take(p.FOLLOW_KEPT.reply.unpack(body))
        )
        return await following.ended(DOUBT_S)

    async def push(self, operation: Operation[Any, Any], timeout_s: float, **columns: Any) -> None:
        """Send hidden states (`STAGE_CHUNK`); returns when they are taken."""
        body = operation.request.pack(**columns)
        await self._rpc.call(operation, body, timeout_s=timeout_s)

    async def connect(self) -> None:
        """Connect, unless it is; raises when it cannot be reached."""
        await self._listening()

    def stage(self, message: p.StageOpen) -> AsyncGenerator[p.Event, None]:
        """Make it a stage of a pipeline: first_token from the last one, done from each."""
        return self._events(p.STAGE_OPEN, message)

    async def _events(
        self, operation: Operation[Any, Any], message: Any
    ) -> AsyncGenerator[p.Event, None]:
        until = time.monotonic() + p.deadline_of(message) + GRACE_S
        listener, ended = await self._listening(), False
        listener.open(message.request_id)
        try:
            body = operation.request.pack(message)
            await listener.connection.call(operation, body, timeout_s=CALL_S)
            while not ended:
                event = await listener.next(message.request_id, until - time.monotonic())
                if event is None:
                    raise TransferTimeoutError(
                        f"request {message.request_id} did not end by its deadline",
                        peer=self.address,
                        operation=operation.name,
                        advice="the worker is stuck: stop it, and send the request elsewhere",
                    )
                ended = isinstance(event, p.LAST)
                yield event
        finally:
            listener.forget(message.request_id)
            if not ended:
                # Shielded: whoever cancels this still wants the worker to know.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(self._leave(message.request_id))

    async def _listening(self) -> _Listener:
        """The listener of the present connection."""
        connection = await self._rpc.connected(CALL_S)
        if self._listener is None or self._listener.connection is not connection:
            self._listener = _Listener(connection)
        return self._listener

    async def _leave(self, request_id: str) -> None:
        """Cancel a request, if the worker can be reached; nobody may be left to hear otherwise."""
        with contextlib.suppress(StoreError, OSError):
            await self.cancel(request_id, timeout_s=1.0)

    async def close(self) -> None:
        """Close the connection; the worker cancels what it still carries. Idempotent."""
        if self._listener is not None:
            await self._listener.close()
        await self._rpc.close()

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
