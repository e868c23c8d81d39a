"""How the original's transfer engine is called: registered buffers, its batch calls, tcp.

Peer-to-peer handshake, everything else as it comes; single requests by its plain calls. The owner
is a second process with a registered buffer. Runs under the interpreter of the environment that
`parts/upstream.py` makes, and imports nothing of this project but the bench's own files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from mooncake_store.bench.parts.driver import Side, make_buffer
from mooncake_store.bench.sides.raw import block_slots

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["UpstreamEngineSide"]

HOST = "127.0.0.1"
READY = "owner "


class UpstreamEngineSide(Side):
    """`TransferEngine` of the original behind the calls of a side."""

    def open(self, nbytes: int, transport: str = "tcp", threads: int = 1) -> None:
        """Start the owner and an engine that reaches it."""
        self._nbytes = nbytes
        self._threads = threads
        root = sys.path[-1]
        code = (
            f"import sys; sys.path.append({root!r});"
            f"from mooncake_store.bench.sides.upstream_engine import own; own({nbytes})"
        )
        self._owner = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._owner.stdout is not None
        # The library writes to standard output as well.
        while not (line := self._owner.stdout.readline()).startswith(READY):
            if not line:
                raise ConnectionError("the owner ended before it was ready")
        self._peer, self._base = json.loads(line.removeprefix(READY))
        self._engine = _engine(transport)
        self._pool = ThreadPoolExecutor(threads)

    def close(self) -> None:
        self._owner.kill()
        self._owner.wait()

    def register(self, memory: NDArray[Any]) -> None:
        _demand(self._engine.register_memory(memory.ctypes.data, memory.nbytes))

    def prepare(self, keys: list[str], rows: NDArray[Any]) -> list[tuple[list[int], ...]]:
        """Buffers, addresses at the owner and lengths, in as many parts as there are threads."""
        size = rows.shape[1]
        there = [
            self._base + slot * size for slot in block_slots(keys, size, self._nbytes).tolist()
        ]
        here = [rows.ctypes.data + at * size for at in range(len(keys))]
        step = -(-len(keys) // min(self._threads, len(keys)))
        return [
            (here[at : at + step], there[at : at + step], [size] * len(here[at : at + step]))
            for at in range(0, len(keys), step)
        ]

    def get(self, call: list[tuple[list[int], ...]]) -> None:
        engine = self._engine
        self._move(engine.transfer_sync_read, engine.batch_transfer_sync_read, call)

    def put(self, call: list[tuple[list[int], ...]]) -> None:
        engine = self._engine
        self._move(engine.transfer_sync_write, engine.batch_transfer_sync_write, call)

    def _move(self, single: Any, batch: Any, call: list[tuple[list[int], ...]]) -> None:
        if len(call) > 1:
            for code in self._pool.map(lambda part: batch(self._peer, *part), call):
                _demand(code)
        elif len(call[0][0]) == 1:
            (here,), (there,), (length,) = call[0]
            _demand(single(self._peer, here, there, length))
        else:
            _demand(batch(self._peer, *call[0]))


def _engine(transport: str) -> Any:
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    engine = TransferEngine()
    _demand(engine.initialize(HOST, "P2PHANDSHAKE", transport, ""))
    return engine


def own(nbytes: int) -> None:
    """Be the owner of a buffer until standard input ends."""
    engine = _engine("tcp")
    memory = make_buffer(nbytes)
    _demand(engine.register_memory(memory.ctypes.data, nbytes))
    where = [f"{HOST}:{engine.get_rpc_port()}", memory.ctypes.data]
    sys.stdout.write(f"\n{READY}{json.dumps(where)}\n")
    sys.stdout.flush()
    sys.stdin.read()


def _demand(code: int) -> None:
    if code != 0:
        raise RuntimeError(f"the original's engine returned {code}")
