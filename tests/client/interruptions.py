"""Letting something happen in the middle of what a client does."""

from mooncake_store.client import single as straight
from mooncake_store.errors import PeerLostError
from transfer_engine.rpc.aio import AsyncConnection
from transfer_engine.rpc.blocking import BlockingConnection


class SlowTransfers:
    """Runs `between` behind each transfer, as a slow network would let happen."""

    def __init__(self, store, between):
        self.move = store._driver._move
        self.between = between
        store._driver._move = self

    def __call__(self, step):
        outcome = self.move(step)
        self.between()
        return outcome


def during_copies(monkeypatch, between):
    """Run `between` once, after the bytes of a single object were copied straight."""
    copy, left = straight.copy_one, [between]

    def slow_copy(source, target, nbytes):
        found = copy(source, target, nbytes)
        while left:
            left.pop()()
        return found

    monkeypatch.setattr(straight, "copy_one", slow_copy)
    return left


class LostAnswers:
    """Loses a connection with the answer to the next request of each of these operations."""

    def __init__(self, monkeypatch, *operations, meanwhile=lambda: None):
        self.left = list(operations)
        receive, call = BlockingConnection._recv, AsyncConnection.call

        def lose(connection, request_id, operation, start, timeout_s):
            body = receive(connection, request_id, operation, start, timeout_s)
            if self._due(operation):
                connection.close()
                meanwhile()
                raise self._error(operation)
            return body

        async def lose_async(connection, operation, body, *, timeout_s):
            reply = await call(connection, operation, body, timeout_s=timeout_s)
            if self._due(operation):
                await connection.close()
                raise self._error(operation)
            return reply

        monkeypatch.setattr(BlockingConnection, "_recv", lose)
        monkeypatch.setattr(AsyncConnection, "call", lose_async)

    def _due(self, operation):
        if operation.name not in self.left:
            return False
        self.left.remove(operation.name)
        return True

    def _error(self, operation):
        return PeerLostError("the connection was lost: injected", operation=operation.name)
