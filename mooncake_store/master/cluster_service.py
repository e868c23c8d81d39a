"""Who answers what at a master's own address, and when: the desk in front of the cluster.

    service = ClusterService(cluster.handlers, lambda: cluster.begun, fence)
    service.also_answer({JOIN: hosts.join, ...})
    server = Server(CLUSTER, service.handle)

While shards are awaited only those are answered who bring them, or ask how the master is.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.wire import cluster as wire
from mooncake_store.wire.hosts import HOSTS, JOIN, SERVING, STAY
from mooncake_store.wire.standby import PROMOTE, STANDBY
from transfer_engine.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mooncake_store.program.fence import Fence
    from transfer_engine.rpc.serving import Connection, Reply
    from transfer_engine.wire.frame import Frame
    from transfer_engine.wire.registry import Operation

__all__ = ["ClusterService"]

_EARLY = frozenset(each.opcode for each in (wire.STATUS, JOIN, SERVING, STAY, HOSTS))
"""Answered before all shards are there; some may be on hosts that have yet to join."""


class ClusterService:
    """Answers requests; belongs to the event loop of the cluster."""

    def __init__(
        self,
        handlers: Mapping[Operation[Any, Any], Callable[[Connection, Any], Any]],
        begun: Callable[[], bool],
        fence: Fence | None = None,
    ) -> None:
        self._begun = begun
        self._fence = fence
        self._handlers = {each.opcode: handler for each, handler in handlers.items()}
        self.also_answer({STANDBY: _no_standby, PROMOTE: _no_standby})

    def also_answer(self, handlers: Mapping[Operation[Any, Any], Callable[[Any], Any]]) -> None:
        """Answer more, for which it does not matter who asks."""
        for operation, handler in handlers.items():
            self._handlers[operation.opcode] = partial(_without_peer, handler)

    def handle(self, connection: Connection, frame: Frame) -> Reply | Awaitable[Reply]:
        """Answer one request."""
        if self._fence is not None:
            self._fence.check()
        operation = wire.CLUSTER.by_opcode[frame.opcode]
        request = operation.request.unpack(frame.body)
        handler = self._handlers.get(frame.opcode)
        if handler is None or not (self._begun() or frame.opcode in _EARLY):
            raise UnavailableError("the master is starting", advice="try again in a second")
        answer = handler(connection, request)
        if asyncio.iscoroutine(answer):
            return _packed(operation, answer)
        body: bytes = operation.reply.pack(answer)
        return body


def _no_standby(request: Any) -> Any:
    raise UnavailableError("this master leads; it is no standby")


def _without_peer(handler: Callable[[Any], Any], _: Connection, request: Any) -> Any:
    return handler(request)


async def _packed(operation: Any, answer: Awaitable[Any]) -> bytes:
    body: bytes = operation.reply.pack(await answer)
    return body
