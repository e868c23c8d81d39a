"""Calls with values in Python objects: put and get, their batches, upserts, probes, removal.

Numbers and shapes of results are the original's; its semantics are in docs/reference/compat.md.
`is_exist` leases what it reports, so that a read that follows finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_store.client import Pieces
from mooncake_store.compat.base import Base, require_keys, require_text
from mooncake_store.compat.codes import INVALID_PARAMS, NOT_FOUND, OK, codes
from mooncake_store.compat.memory import BufferHandle, HandleSink
from mooncake_store.errors import NotFoundError, StoreError
from transfer_engine.checksum import address_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mooncake_store.compat.values import ReplicateConfig

__all__ = ["BytesCalls"]


class BytesCalls(Base):
    """Values as bytes."""

    # -- puts

    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a buffer under a key; one that exists keeps its value, and the answer is 0 too."""
        return self._put_values("put", [require_text(key)], [value], config)[0]

    def put_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """Store a batch; the first error, or 0."""
        return self._first("put_batch", keys, values, config)

    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Store buffers one after the other as one object."""
        return self._put_parts("put_parts", key, parts, config)

    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a buffer under a key, in place of what it named."""
        return self._put_values("upsert", [require_text(key)], [value], config, upsert=True)[0]

    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """Upsert a batch; the first error, or 0."""
        return self._first("upsert_batch", keys, values, config, upsert=True)

    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Upsert buffers one after the other as one object."""
        return self._put_parts("upsert_parts", key, parts, config, upsert=True)

    def _first(
        self,
        what: str,
        keys: Sequence[str],
        values: Sequence[Any],
        config: ReplicateConfig | None,
        *,
        upsert: bool = False,
    ) -> int:
        keys = require_keys(keys)
        if len(keys) != len(values):
            return INVALID_PARAMS
        found = self._put_values(what, keys, list(values), config, upsert=upsert)
        return next((number for number in found if number), OK)

    def _put_values(
        self,
        what: str,
        keys: list[str],
        values: list[Any],
        config: ReplicateConfig | None,
        *,
        upsert: bool = False,
    ) -> list[int]:
        nbytes = sum(_bytes_of(value) for value in values)
        return self._put(what, keys, values, nbytes, config, upsert=upsert)

    def _put_parts(
        self,
        what: str,
        key: str,
        parts: tuple[Any, ...],
        config: ReplicateConfig | None,
        *,
        upsert: bool = False,
    ) -> int:
        require_text(key)
        for part in parts:
            if memoryview(part).ndim != 1:
                raise RuntimeError("a part is a buffer of one dimension")
        places = [address_of(part, writable=False) for part in parts]
        nbytes = sum(size for _, size in places)
        if not nbytes:
            return OK  # of nothing there is no object, and the original says so too
        pieces = Pieces(
            [address for address, _ in places],
            [size for _, size in places],
            [0, len(places)],
            keep=parts,
        )
        return self._put(what, [key], pieces, nbytes, config, upsert=upsert)[0]

    # -- gets

    def get(self, key: str) -> bytes:
        """Return an object, or b"" whatever went wrong."""
        return self.get_batch([require_text(key)])[0]

    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """Return objects, b"" where one could not be read."""
        keys = require_keys(keys)
        if not keys:
            return [b""]
        try:
            result = self._require().get_many(keys)
        except StoreError as error:
            self._failed("get", error)
            return [b""] * len(keys)
        self._judge_reads("get", keys, result)
        return [value if isinstance(value, bytes) else b"" for value in result.values]

    def get_buffer(self, key: str) -> BufferHandle | None:
        """Return an object as memory of this process, or None."""
        return self.batch_get_buffer([require_text(key)])[0]

    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Return objects as memory of this process, None where one could not be read."""
        keys = require_keys(keys)
        sink = HandleSink(len(keys))
        try:
            client = self._require()
            result = client._run(client._operations.get_many_to(keys, sink, {}))
        except StoreError as error:
            self._failed("get_buffer", error)
            return [None] * len(keys)
        self._judge_reads("get_buffer", keys, result)
        for at in result.failed.tolist():
            sink.handles[at] = None  # what it holds was not checked
        return sink.handles

    # -- probes

    def is_exist(self, key: str) -> int:
        """1 if the object can be read, else 0; also 0, with a line in the log, without a store."""
        return max(0, self.batch_is_exist([require_text(key)])[0])

    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """1, 0, or a negative number per key. What is there is leased; one request for all."""
        keys = require_keys(keys)
        if not keys:
            return []
        try:
            client = self._require()
            result = client._run(client._operations.lease_many(keys, True, {}))
        except StoreError as error:
            return [self._failed("is_exist", error)] * len(keys)
        there: list[int] = (result.statuses == 0).astype(np.int64).tolist()
        if self._doubts:
            there = [
                int(bool(found) and key not in self._doubts)
                for key, found in zip(keys, there, strict=True)
            ]
        return there

    def get_size(self, key: str) -> int:
        """Bytes of an object, or a negative number."""
        try:
            return self._require().query(require_text(key)).size
        except StoreError as error:
            return NOT_FOUND if isinstance(error, NotFoundError) else self._failed("size", error)

    # -- removal

    def remove(self, key: str, force: bool = False) -> int:
        """Remove an object; -704 if there is none, -706 while others read it, unless `force`."""
        return self.batch_remove([require_text(key)], force)[0]

    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove a batch; a number per key."""
        keys = require_keys(keys)
        if not keys:
            return []
        try:
            result = self._require().remove_many(keys, force=bool(force))
        except StoreError as error:
            return [self._failed("remove", error)] * len(keys)
        if self._doubts:
            self._doubts.clear(keys)
        self._tell("remove", result)
        return codes(result.statuses)

    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove the objects whose key matches; how many, or a negative number."""
        try:
            return self._require().remove_matching(require_text(regex_pattern), force=bool(force))
        except StoreError as error:
            return self._failed("remove_by_regex", error)

    def remove_all(self, force: bool = False) -> int:
        """Remove all objects of this tenant that nobody reads; how many, or a negative number."""
        try:
            return self._require().clear(force=bool(force))
        except StoreError as error:
            return self._failed("remove_all", error)


def _bytes_of(value: Any) -> int:
    """Size of a buffer; raises TypeError for what is none."""
    if isinstance(value, bytes | bytearray):
        return len(value)
    if hasattr(value, "data_ptr"):
        return address_of(value, writable=False)[1]
    return memoryview(value).nbytes
