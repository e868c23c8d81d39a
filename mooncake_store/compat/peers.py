"""How two engines meet: what memory a peer has registered, notes it left, whether it is there.

A session is named "host:port", the port of the peer's own small service. It tells which ranges of
memory the peer registered and how the transports reach each; an address of the original's API is
then translated here into (segment, offset), and its owner checks every access again.

The service runs an event loop on a thread of its own. Without a secret it listens on loopback only.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from transfer_engine.base import SegmentDescriptor
from transfer_engine.errors import InvalidArgumentError, UnavailableError
from transfer_engine.rpc.pool import BlockingPool
from transfer_engine.rpc.server import Server, run
from transfer_engine.wire.cold import Cold
from transfer_engine.wire.registry import Operation, Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from transfer_engine.engine import TransferEngine
    from transfer_engine.handle import SegmentHandle
    from transfer_engine.rpc.address import Address
    from transfer_engine.rpc.serving import Connection
    from transfer_engine.wire.frame import Frame

__all__ = ["REGISTRY", "Note", "Peer", "Range", "Service"]

NOTES_MAX = 65_536
_CALL_S = 5.0
_START_S = 30.0
_CONNECTIONS_MAX = 8


class Range(msgspec.Struct, frozen=True, array_like=True):
    """Registered memory of a process: where it lies there, and how to reach it."""

    address: int
    nbytes: int
    descriptor: bytes


class RangesRequest(msgspec.Struct, frozen=True, array_like=True, tag="ranges?"):
    """Asks for the memory a process has registered, in the order of registration."""


class Ranges(msgspec.Struct, frozen=True, array_like=True, tag="ranges"):
    """Registered memory."""

    ranges: tuple[Range, ...]


class Note(msgspec.Struct, frozen=True, array_like=True, tag="note"):
    """A short text for the other process."""

    name: str
    text: str


class Noted(msgspec.Struct, frozen=True, array_like=True, tag="noted"):
    """A note has arrived."""


RANGES = Operation(
    "ranges",
    0x60,
    Cold(RangesRequest),
    Cold(Ranges, bytes_max=16 << 20),
    "memory a process has registered",
)
NOTE = Operation("note", 0x61, Cold(Note), Cold(Noted), "a text for the process")
REGISTRY = Registry("mooncake-engine", [RANGES, NOTE])


class Service:
    """This process's side: answers peers from `ranges` and keeps their notes."""

    def __init__(
        self, ranges: Callable[[], tuple[Range, ...]], *, secret: bytes | None, insecure: bool
    ) -> None:
        self._ranges = ranges
        self._secret = secret
        self._insecure = insecure
        self._notes: deque[Note] = deque(maxlen=NOTES_MAX)
        self._stop: Callable[[], object] = lambda: None
        self._thread: threading.Thread | None = None
        self.address: Address | None = None

    def start(self, host: str, port: int) -> None:
        """Listen; raises what keeps it from that, and may be called again then."""
        listening: Future[None] = Future()
        self._thread = threading.Thread(
            target=self._body, args=(host, port, listening), name="mooncake-engine", daemon=True
        )
        self._thread.start()
        try:
            listening.result(_START_S)
        except TimeoutError:
            raise UnavailableError("the engine's service was not ready in time") from None

    def _body(self, host: str, port: int, listening: Future[None]) -> None:
        try:
            run(self._serve(host, port, listening))
        except Exception as error:
            if not listening.done():
                listening.set_exception(error)

    async def _serve(self, host: str, port: int, listening: Future[None]) -> None:
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        async with Server(REGISTRY, self._handle, secret=self._secret) as server:
            self.address = await server.listen(host, port, insecure=self._insecure)
            self._stop = lambda: loop.call_soon_threadsafe(stopped.set)
            listening.set_result(None)
            await stopped.wait()

    def _handle(self, connection: Connection, frame: Frame) -> bytes:
        if frame.opcode == RANGES.opcode:
            RANGES.request.unpack(frame.body)
            return RANGES.reply.pack(Ranges(self._ranges()))
        self._notes.append(NOTE.request.unpack(frame.body))
        return NOTE.reply.pack(Noted())

    def take_notes(self) -> list[Note]:
        """The notes that arrived since the last time, oldest first."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

    def close(self) -> None:
        """Stop listening. Idempotent."""
        with suppress(RuntimeError):  # its loop has ended
            self._stop()
        if self._thread is not None:
            self._thread.join(_CALL_S)


class Known(NamedTuple):
    """Memory of a peer, sorted by address."""

    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    handles: list[SegmentHandle]


class Peer:
    """Another engine, by its session name."""

    def __init__(self, address: Address, engine: TransferEngine, secret: bytes | None) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._pool = BlockingPool(
            address, REGISTRY, connections_max=_CONNECTIONS_MAX, connect_s=_CALL_S, secret=secret
        )
        self._handles: dict[bytes, SegmentHandle] = {}
        self._known: Known | None = None

    def ranges(self) -> tuple[Range, ...]:
        """Ask what memory the peer has registered."""
        body = self._pool.call(RANGES, RANGES.request.pack(RangesRequest()), timeout_s=_CALL_S)
        found: Ranges = RANGES.reply.unpack(body)
        return found.ranges

    def note(self, name: str, text: str) -> None:
        """Leave a note."""
        self._pool.call(NOTE, NOTE.request.pack(Note(name, text)), timeout_s=_CALL_S)

    def translate(self, addresses: NDArray[np.int64], lengths: NDArray[np.int64]) -> Any:
        """Groups of (handle, positions, offsets); asks the peer anew for addresses not known.

        Raises InvalidArgumentError for memory the peer has not registered.
        """
        known = self._known
        slots = None if known is None else _slots(known, addresses, lengths)
        if known is None or slots is None:
            known = self._learn()
            slots = _slots(known, addresses, lengths)
        if slots is None:
            raise InvalidArgumentError(
                "an address is not in memory that the peer has registered",
                peer=str(self._pool.address),
                advice="register it there, whole, before it is used",
            )
        for slot in np.unique(slots).tolist():
            at = np.flatnonzero(slots == slot)
            yield known.handles[slot], at, addresses[at] - known.starts[slot]

    def _learn(self) -> Known:
        ranges = sorted(self.ranges(), key=lambda one: one.address)
        with self._lock:
            handles = []
            for one in ranges:
                handle = self._handles.get(one.descriptor)
                if handle is None:
                    handle = self._engine.open(SegmentDescriptor.decode(one.descriptor))
                    self._handles[one.descriptor] = handle
                handles.append(handle)
            gone = set(self._handles) - {one.descriptor for one in ranges}
            for descriptor in gone:
                self._handles.pop(descriptor).close()
            self._known = Known(
                np.array([one.address for one in ranges], np.int64),
                np.array([one.address + one.nbytes for one in ranges], np.int64),
                handles,
            )
            return self._known

    def forget(self) -> None:
        """Ask anew before the next transfer: something there was not as it was known."""
        self._known = None

    def close(self) -> None:
        """Give the peer up."""
        self._pool.close()
        for handle in self._handles.values():
            handle.close()
        self._handles = {}


def _slots(
    known: Known, addresses: NDArray[np.int64], lengths: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """The range each address lies in; None if one lies in none. O(n log r)."""
    if not len(known.starts):
        return None
    slots = np.searchsorted(known.starts, addresses, "right") - 1
    inside = (slots >= 0) & (lengths >= 0) & (lengths <= known.ends[slots] - addresses)
    found: NDArray[np.int64] | None = slots if inside.all() else None
    return found
