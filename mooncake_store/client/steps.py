"""The client's operations are generators; this is what they ask of whoever drives them.

An operation yields a step and is sent its outcome; it returns the result. So its logic is written
once, does no I/O, and is driven by the blocking client (`blocking_driver.py`), by the asyncio
client (`aio_driver.py`) and by tests that play the store themselves.

    Calls     requests to shards (or to the cluster), sent to all before any answer is awaited
    Moves     batches between local memory and segments
    Opens     segments to be reached for the first time

Outcomes are lists in the same order whose entries may be errors: one shard or segment that fails
does not decide about the others. Cost of a step: 0.2 us.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from mooncake_store.errors import StoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from mooncake_store.client.directory import Target
    from transfer_engine.base import Operation as Direction
    from transfer_engine.tagging import Tagging
    from transfer_engine.wire.frame import Body
    from transfer_engine.wire.registry import Operation

__all__ = [
    "CLUSTER",
    "Call",
    "Calls",
    "Move",
    "Moves",
    "Opens",
    "ReshardedError",
    "Steps",
    "anew",
    "ask_all",
    "ask_one",
    "clock",
    "fetch",
]

Call: TypeAlias = "tuple[int, Operation[Any, Any], bytes]"
"""A request: the shard, the operation, the packed body."""
CLUSTER = -1
"""In place of a shard's number: the cluster service."""


class ReshardedError(UnavailableError):
    """There is another number of shards than when a request was made; it was not sent.

    Requests for keys are made anew. Who asks shards one after the other begins again.
    """


class Calls(NamedTuple):
    """Requests; outcome: the body of the reply or an error each."""

    calls: list[Call]
    until: float


class Move(NamedTuple):
    """One batch; `keep` holds the buffers that `addresses` point into.

    Who drives it writes to `times` when it began and ended, in seconds.
    """

    target: Target
    direction: Direction
    offsets: NDArray[Any]
    lengths: NDArray[Any]
    addresses: NDArray[Any]
    checksums: bool
    keep: object
    times: list[float] | None = None
    rights: NDArray[Any] | None = None
    """Tag and stamp for each range, where the owner asks for them."""
    tagging: Tagging | None = None
    """What makes tags of what is moved."""


class Moves(NamedTuple):
    """Batches; outcome: a `BatchResult` of the transfer engine or an error each."""

    moves: list[Move]
    until: float


class Opens(NamedTuple):
    """Segments to open; outcome: None or an error each."""

    targets: list[Target]
    until: float


T = TypeVar("T")

Step: TypeAlias = Calls | Moves | Opens
Steps: TypeAlias = Generator[Step, Any, T]


def fetch(shard: int, operation: Operation[Any, Any], body: bytes, until: float) -> Steps[Body]:
    """Send one request and return the body of its reply; raises what it failed with."""
    replies = yield Calls([(shard, operation, body)], until)
    if isinstance(replies[0], StoreError):
        raise replies[0].again()
    answer: Body = replies[0]
    return answer


def ask_one(shard: int, operation: Operation[Any, Any], body: bytes, until: float) -> Steps[Any]:
    """Send one request and return its reply; raises what it failed with."""
    return operation.reply.unpack((yield from fetch(shard, operation, body, until)))


def ask_all(calls: list[Call], until: float) -> Steps[list[Any]]:
    """Send requests side by side and return their replies; raises what one failed with."""
    bodies = yield Calls(calls, until)
    for body in bodies:
        if isinstance(body, StoreError):
            raise body.again()
    return [each[1].reply.unpack(body) for each, body in zip(calls, bodies, strict=True)]


def anew(make: Callable[[float], Steps[T]], until: float) -> Steps[T]:
    """Ask all shards until then, and begin again where there is another number of them by now."""
    while True:
        try:
            return (yield from make(until))
        except ReshardedError:
            continue


def clock(times: list[float]) -> Callable[[], None]:
    """A batch begins now in the background: what to call when it ends, on whatever thread."""
    began = time.monotonic()

    def ended() -> None:
        times[:] = began, time.monotonic()

    return ended
