"""How long requests take, by operation: a histogram kept where they are answered.

    took = RequestTimes(SHARD)
    server = Server(SHARD, took.timed(service.handle))
    took.told()

A request is one, however many keys it asks for. Its time is that of the handler: from when all of
it is there until its answer is, waits for space, for a disk or for a standby included; what it
waited in a socket is not. Bounds are powers of two of a microsecond, so that its place is found by
one instruction. Cost: 0.3 us a request, nothing per key, and no lock, since an event loop answers
one request at a time.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any

from mooncake_store.wire.metrics import Took

if TYPE_CHECKING:
    from transfer_engine.rpc.serving import Handler
    from transfer_engine.wire.registry import Registry

__all__ = ["BOUNDS_S", "RequestTimes"]

_FIRST, _LAST = 4, 24
BOUNDS_S = tuple(2**power / 1e6 for power in range(_FIRST, _LAST + 1))
"""16 us to 16.8 s, each twice the one before."""
_PLACES = 64
"""More than any time has bits."""


class RequestTimes:
    """What the operations of one registry took; belongs to one event loop."""

    def __init__(self, registry: Registry) -> None:
        self._names = {each.opcode: each.name for each in registry}
        self._counts = {opcode: [0] * _PLACES for opcode in self._names}
        self._sums_ns = dict.fromkeys(self._names, 0)
        self._failed = dict.fromkeys(self._names, 0)

    def timed(self, handle: Handler) -> Handler:
        """Return a handler that does the same, and is timed."""
        counts, sums_ns, failed = self._counts, self._sums_ns, self._failed
        clock = time.perf_counter_ns

        def timed(connection: Any, frame: Any) -> Any:
            began, opcode = clock(), frame.opcode
            try:
                reply = handle(connection, frame)
            except BaseException:
                failed[opcode] += 1
                self._note(opcode, began)
                raise
            if type(reply) is not bytes and isinstance(reply, Awaitable):
                return self._later(opcode, began, reply)
            took = clock() - began
            counts[opcode][(took // 1000).bit_length()] += 1
            sums_ns[opcode] += took
            return reply

        return timed

    async def _later(self, opcode: int, began: int, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except BaseException:
            self._failed[opcode] += 1
            raise
        finally:
            self._note(opcode, began)

    def _note(self, opcode: int, began: int) -> None:
        took = time.perf_counter_ns() - began
        self._counts[opcode][(took // 1000).bit_length()] += 1
        self._sums_ns[opcode] += took

    def told(self) -> list[Took]:
        """Return the times of every operation that was asked for."""
        return [
            Took(name, _buckets(counts), self._sums_ns[opcode] / 1e9, self._failed[opcode])
            for opcode, name in self._names.items()
            if any(counts := self._counts[opcode])
        ]


def _buckets(counts: list[int]) -> tuple[int, ...]:
    """Return how many took up to each bound, and no more than the one before; longer ones last."""
    within = counts[_FIRST + 1 : _LAST + 1]
    return (sum(counts[: _FIRST + 1]), *within, sum(counts[_LAST + 1 :]))
