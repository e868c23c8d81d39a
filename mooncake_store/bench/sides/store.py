"""How this project is called: arrays of rows for batches, the plain calls for single keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.bench.parts.driver import Side
from mooncake_store.client import Client
from mooncake_store.errors import NotFoundError

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["StoreSide"]

REMOVE_OK = (0, NotFoundError.code)


class StoreSide(Side):
    """`Client` behind the calls of a side."""

    def __init__(self) -> None:
        self._client: Any = None

    def open(self, url: str, **settings: Any) -> None:
        """Connect; `settings` are those of the client."""
        self._client = Client(url, **settings)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def prepare(self, keys: list[str], rows: NDArray[Any]) -> tuple[Any, NDArray[Any]]:
        return (keys[0], rows[0]) if len(keys) == 1 else (keys, rows)

    def get(self, call: tuple[Any, NDArray[Any]]) -> None:
        keys, rows = call
        if type(keys) is str:
            self._client.get_into(keys, rows)
        else:
            self._client.get_into_many(keys, rows).check()

    def put(self, call: tuple[Any, NDArray[Any]]) -> None:
        keys, rows = call
        if type(keys) is str:
            fresh = self._client.put(keys, rows).stored
        else:
            fresh = not self._client.put_many(keys, rows).check().already_present.any()
        if not fresh:
            raise RuntimeError("a key that should be fresh was there, or its put was rejected")

    def try_put(self, call: tuple[Any, NDArray[Any]]) -> bool:
        return bool(self._client.put(*call).stored)

    def put_values(self, keys: list[str], values: list[bytes]) -> None:
        self._client.put_many(keys, values).check()

    def exists(self, keys: list[str]) -> int:
        if len(keys) == 1:
            return int(self._client.exists(keys[0]))
        return int(np.count_nonzero(self._client.exists_many(keys)))

    def query(self, keys: list[str]) -> int:
        result = self._client.query_many(keys)
        return len(keys) - len(result.failed)

    def remove(self, keys: list[str]) -> None:
        # Those that left by themselves are no failure.
        result = self._client.remove_many(keys, force=True)
        if not (result.ok or np.isin(result.statuses, REMOVE_OK).all()):
            result.check()
