"""How the original is called, in the way its documentation recommends for speed.

Registered buffers, `batch_*` calls for batches and the plain calls for single keys; protocol tcp,
peer-to-peer handshake, everything else as it comes. Runs under the interpreter of the environment
that `parts/upstream.py` makes, and imports nothing of this project.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["UpstreamSide"]

LOCAL_BUFFER_BYTES = 64 << 20
REMOVE_OK = (0, -704)
"""Removed, or not there."""


class UpstreamSide:
    """`MooncakeDistributedStore` behind the calls of a side."""

    def __init__(self) -> None:
        self._store: Any = None
        self._known: NDArray[Any] | None = None

    def open(self, address: str, segment_bytes: int = 0) -> None:
        """Connect to a master; with `segment_bytes`, own a segment of its pool."""
        from mooncake.store import MooncakeDistributedStore  # type: ignore[import-not-found]

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BUFFER_BYTES, "tcp", "", address
        )
        if code != 0:
            raise ConnectionError(f"setup({address}) returned {code}")
        if self._known is not None:
            self.register(self._known)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None

    def register(self, memory: NDArray[Any]) -> None:
        _demand("register_buffer", self._store.register_buffer(memory.ctypes.data, memory.nbytes))
        self._known = memory

    def prepare(self, keys: list[str], rows: NDArray[Any]) -> tuple[Any, Any, Any]:
        address, size = rows.ctypes.data, rows.shape[1]
        if len(keys) == 1:
            return keys[0], address, size
        return keys, [address + size * at for at in range(len(keys))], [size] * len(keys)

    def get(self, call: tuple[Any, Any, Any]) -> None:
        keys, pointers, sizes = call
        if type(keys) is str:
            _demand("get_into", self._store.get_into(keys, pointers, sizes) - sizes)
        else:
            got = self._store.batch_get_into(keys, pointers, sizes)
            if got != sizes:
                _demand("batch_get_into", min(got))

    def put(self, call: tuple[Any, Any, Any]) -> None:
        keys, pointers, sizes = call
        if type(keys) is str:
            _demand("put_from", self._store.put_from(keys, pointers, sizes))
        else:
            codes = self._store.batch_put_from(keys, pointers, sizes)
            if any(codes):
                _demand("batch_put_from", min(codes))

    def try_put(self, call: tuple[Any, Any, Any]) -> bool:
        return bool(self._store.put_from(*call) == 0)

    def put_values(self, keys: list[str], values: list[bytes]) -> None:
        _demand("put_batch", self._store.put_batch(keys, values))

    def exists(self, keys: list[str]) -> int:
        if len(keys) == 1:
            return int(self._store.is_exist(keys[0]) == 1)
        return int(self._store.batch_is_exist(keys).count(1))

    def query(self, keys: list[str]) -> int:
        found = self._store.batch_get_replica_desc(keys)
        return len(keys) if len(found) == len(set(keys)) else len(found)

    def remove(self, keys: list[str]) -> None:
        codes = self._store.batch_remove(keys, True)
        if any(codes):
            _demand("batch_remove", min(code if code not in REMOVE_OK else 0 for code in codes))


def _demand(call: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{call} returned {code}")
