"""The client library: `Client` for threads, `AsyncClient` for asyncio, the same operations in both.

How it is built: operations are generators without I/O (`_operations`, `_listing`); two thin drivers
run them (`_blocking`, `_aio`). Batches are `_requests` to the shards and `_transfers` of bytes:
`_reads`, `_writes`, `_put_sessions` (range by range), `_pieces`. `_straight` does for one whole
object what they do for batches, `_sessions` shows objects. `_keys`, `_buffers` and `Pieces` are
what callers hand in, `results` what they get, `_leases` and `_directory` what a client remembers.
`extension` is for packages that build on this one.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.client._buffers import Rows
    from mooncake_store.client._core import CallOptions, ClientStats, PutOptions, ReadOptions
    from mooncake_store.client._following import News, Position
    from mooncake_store.client._keys import Digests
    from mooncake_store.client._pieces import Pieces
    from mooncake_store.client.aio import AsyncClient, AsyncView, AsyncWriter
    from mooncake_store.client.blocking import Client, View, Writer
    from mooncake_store.client.results import (
        BatchResult,
        GetResult,
        ListedColumns,
        ListedObject,
        ObjectInfo,
        ObjectStat,
        PutManyResult,
        PutResult,
        QueryResult,
        Replica,
    )

_HOME = {
    # Clients.
    "Client": "mooncake_store.client.blocking",
    "AsyncClient": "mooncake_store.client.aio",
    "View": "mooncake_store.client.blocking",
    "Writer": "mooncake_store.client.blocking",
    "AsyncView": "mooncake_store.client.aio",
    "AsyncWriter": "mooncake_store.client.aio",
    # What they take.
    "Digests": "mooncake_store.client._keys",
    "Pieces": "mooncake_store.client._pieces",
    "Rows": "mooncake_store.client._buffers",
    "CallOptions": "mooncake_store.client._core",
    "PutOptions": "mooncake_store.client._core",
    "ReadOptions": "mooncake_store.client._core",
    # What they answer.
    "BatchResult": "mooncake_store.client.results",
    "ClientStats": "mooncake_store.client._core",
    "GetResult": "mooncake_store.client.results",
    "ListedColumns": "mooncake_store.client.results",
    "ListedObject": "mooncake_store.client.results",
    "News": "mooncake_store.client._following",
    "ObjectInfo": "mooncake_store.client.results",
    "ObjectStat": "mooncake_store.client.results",
    "Position": "mooncake_store.client._following",
    "PutManyResult": "mooncake_store.client.results",
    "PutResult": "mooncake_store.client.results",
    "QueryResult": "mooncake_store.client.results",
    "Replica": "mooncake_store.client.results",
}

__all__ = [
    "AsyncClient",
    "AsyncView",
    "AsyncWriter",
    "BatchResult",
    "CallOptions",
    "Client",
    "ClientStats",
    "Digests",
    "GetResult",
    "ListedColumns",
    "ListedObject",
    "News",
    "ObjectInfo",
    "ObjectStat",
    "Pieces",
    "Position",
    "PutManyResult",
    "PutOptions",
    "PutResult",
    "QueryResult",
    "ReadOptions",
    "Replica",
    "Rows",
    "View",
    "Writer",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
