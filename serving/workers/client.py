"""A worker as the conductor sees it, from asyncio.

    async with WorkerClient("127.0.0.1:7100") as worker:
        hello = await worker.hello()
        async for event in worker.prefill(Prefill(...)):
            ...

`prefill`, `decode` and `generate` submit a request and go through its events until the last one.
Leaving the loop early, or cancelling it, cancels the request at the worker. What went wrong *with
the request* is an event (`Failed`, `Refused`); what went wrong with the worker is raised, as
PeerLostError, TransferTimeoutError or UnavailableError, no later than `DOUBT_S` after the worker
stopped answering.

One connection carries all requests. Not for several event loops; retries nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, Any

from serving.workers import protocol as p
from transfer_engine.errors import StoreError, TransferTimeoutError
from transfer_engine.rpc.aio import AsyncClient

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from transfer_engine.wire.registry import Operation

__all__ = ["WorkerClient"]

CALL_S = 5.0
"""For operations that are answered at once."""
WAIT_S = 2.0
"""How long one question for events waits at the worker."""
DOUBT_S = 5.0
"""How long an answer to it may take beyond that; then the worker counts as lost."""
GRACE_S = 2.0
"""A worker ends a request at its deadline itself; this much later its client does."""


class WorkerClient:
    """A connection to one worker, made when first needed and again when it was lost."""

    def __init__(self, address: str, *, secret: bytes | None = None) -> None:
        self.address = address
        self._rpc = AsyncClient(address, p.WORKER, secret=secret, in_flight_max=4096)

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

    async def push(self, operation: Operation[Any, Any], timeout_s: float, **columns: Any) -> None:
        """Send KV or hidden states (`KV_PUSH`, `STAGE_CHUNK`); returns when they are taken."""
        body = operation.request.pack(**columns)
        await self._rpc.call(operation, body, timeout_s=timeout_s)

    def stage(self, message: p.StageOpen) -> AsyncGenerator[p.Event, None]:
        """Make it a stage of a pipeline: first_token from the last one, done from each."""
        return self._events(p.STAGE_OPEN, message)

    async def _events(
        self, operation: Operation[Any, Any], message: Any
    ) -> AsyncGenerator[p.Event, None]:
        until = time.monotonic() + p.deadline_of(message) + GRACE_S
        seen, ended = 0, False
        try:
            await self._call(operation, message)
            while not ended:
                left = until - time.monotonic()
                if left <= 0:
                    raise TransferTimeoutError(
                        f"request {message.request_id} did not end by its deadline",
                        peer=self.address,
                        operation=operation.name,
                        advice="the worker is stuck: stop it, and send the request elsewhere",
                    )
                wait_s = min(WAIT_S, left)
                question = p.Next(message.request_id, seen, int(wait_s * 1000))
                answer: p.Events = await self._call(p.NEXT, question, wait_s + DOUBT_S)
                for event in answer.events:
                    seen += 1
                    ended = ended or isinstance(event, p.LAST)
                    yield event
        finally:
            if not ended:
                # Shielded: whoever cancels this still wants the worker to know.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.shield(self._leave(message.request_id))

    async def _leave(self, request_id: str) -> None:
        """Cancel a request, if the worker can be reached; nobody may be left to hear otherwise."""
        with contextlib.suppress(StoreError, OSError):
            await self.cancel(request_id, timeout_s=1.0)

    async def close(self) -> None:
        """Close the connection; the worker cancels what it still carries. Idempotent."""
        await self._rpc.close()

    async def __aenter__(self) -> WorkerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
