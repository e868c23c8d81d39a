"""How our transfer engine is called: one segment of another process (or of this one), columns.

The owner is a process of `transfer_engine.testing`; for `local` the segment is in this process.
What an application has ready, the three columns of a batch, is made off the clock.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.bench.parts.driver import Side
from mooncake_store.bench.sides.raw import block_slots
from transfer_engine import Segment, TransferEngine, TransferServer
from transfer_engine.testing import OwnerProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from transfer_engine import BatchResult

__all__ = ["EngineSide"]


class EngineSide(Side):
    """Blocks in a segment; block n lies in slot n."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._threads = 1

    def open(self, nbytes: int, transport: str, threads: int = 1) -> None:
        """Start the owner, and open its segment over this transport and no other."""
        self._nbytes = nbytes
        self._threads = threads
        self._engine = self._stack.enter_context(TransferEngine())
        if transport == "local":
            segment = self._stack.enter_context(Segment.create(nbytes))
            np.frombuffer(segment.buffer, np.uint8)[:] = 1
            server = self._stack.enter_context(TransferServer(tcp=None, unix=None))
            descriptor = server.publish(segment)
        else:
            owner = OwnerProcess()
            self._stack.callback(owner.close)
            descriptor = owner.publish(nbytes, 1)
        self._target = self._engine.open(descriptor, require=transport)
        self._pool = self._stack.enter_context(ThreadPoolExecutor(threads))

    def close(self) -> None:
        self._stack.close()

    def register(self, memory: NDArray[Any]) -> None:
        self._engine.register(memory.data)

    def prepare(self, keys: list[str], rows: NDArray[Any]) -> list[tuple[NDArray[Any], ...]]:
        """The columns of a batch, in as many parts as there are threads."""
        size = rows.shape[1]
        offsets = block_slots(keys, size, self._nbytes) * size
        addresses = rows.ctypes.data + np.arange(len(keys)) * size
        lengths = np.full(len(keys), size)
        parts = min(self._threads, len(keys))
        columns = (np.array_split(column, parts) for column in (offsets, lengths, addresses))
        return list(zip(*columns, strict=True))

    def get(self, call: list[tuple[NDArray[Any], ...]]) -> None:
        self._move(self._engine.read_batch, call)

    def put(self, call: list[tuple[NDArray[Any], ...]]) -> None:
        self._move(self._engine.write_batch, call)

    def _move(self, move: Callable[..., BatchResult], call: list[tuple[NDArray[Any], ...]]) -> None:
        if len(call) == 1:
            move(self._target, *call[0]).check()
            return
        for done in self._pool.map(lambda part: move(self._target, *part), call):
            done.check()
