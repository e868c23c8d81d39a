"""Who answers what at a master's own address, and when: the desk in front of the cluster.

    service = ClusterService(cluster.handlers, lambda: cluster.begun, fence)
    service.also_answer({JOIN: hosts.join, ...})
    server = Server(CLUSTER, service.handle)

While shards are awaited only those are answered who bring them, or ask how the master is. What only
an admin may do, and does now and then, is told to the log (`transfer_engine.audit`).
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from mooncake_store.program.about import about
from mooncake_store.wire import cluster as wire
from mooncake_store.wire.about import ABOUT
from mooncake_store.wire.hosts import HOSTS, JOIN, MOVE, SERVING, STAY
from mooncake_store.wire.metrics import METRICS
from mooncake_store.wire.standby import PROMOTE, REGISTERS, STANDBY
from transfer_engine import audit
from transfer_engine.errors import UnavailableError
from transfer_engine.wire.rights import Role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from mooncake_store.program.fence import Fence
    from transfer_engine.rpc.serving import Connection, Reply
    from transfer_engine.wire.frame import Frame
    from transfer_engine.wire.registry import Operation

__all__ = ["REPEATED", "ClusterService", "carried_out"]

_EARLY = frozenset(each.opcode for each in (ABOUT, wire.STATUS, JOIN, SERVING, STAY, HOSTS))
"""Answered before all shards are there; some may be on hosts that have yet to join."""
REPEATED = frozenset({JOIN, SERVING, STAY, REGISTERS, METRICS})
"""What hosts, standbys and whoever watches ask for all the time: no action of anybody."""
_ACTIONS = frozenset(
    each.opcode for each in wire.CLUSTER if each.needs == Role.ADMIN and each not in REPEATED
)


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
        self.also_answer({STANDBY: _no_standby, PROMOTE: _no_standby, ABOUT: lambda _: about()})

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
        return carried_out(
            connection, operation, request, lambda: self._answer(connection, frame.opcode, request)
        )

    def _answer(self, connection: Connection, opcode: int, request: Any) -> Any:
        handler = self._handlers.get(opcode)
        if handler is None or not (self._begun() or opcode in _EARLY):
            raise UnavailableError("the master is starting", advice="try again in a second")
        return handler(connection, request)


def carried_out(
    connection: Connection, operation: Operation[Any, Any], request: Any, answer: Callable[[], Any]
) -> Reply | Awaitable[Reply]:
    """Return the body of a reply, at once or later; an action is told to the log with its end."""
    tell = _told(connection, operation, request)
    try:
        told = answer()
    except Exception as error:
        tell(error)
        raise
    if asyncio.iscoroutine(told):
        return _later(operation, told, tell)
    tell(told)
    body: bytes = operation.reply.pack(told)
    return body


def _told(
    connection: Connection, operation: Operation[Any, Any], request: Any
) -> Callable[[Any], None]:
    """Return what is to be called with the end of a request: nothing, where it is no action."""
    # A move to no host asks how it stands.
    if operation.opcode not in _ACTIONS or (operation is MOVE and not request.to):
        return lambda _: None
    session = connection.session
    who = session.rights.who if session.proven else audit.ANYBODY
    return partial(audit.acted, who, connection.peer, operation.name, request)


def _no_standby(request: Any) -> Any:
    raise UnavailableError("this master leads; it is no standby")


def _without_peer(handler: Callable[[Any], Any], _: Connection, request: Any) -> Any:
    return handler(request)


async def _later(
    operation: Operation[Any, Any], answer: Awaitable[Any], tell: Callable[[Any], None]
) -> bytes:
    try:
        told = await answer
    except BaseException as error:
        tell(error)
        raise
    tell(told)
    body: bytes = operation.reply.pack(told)
    return body
