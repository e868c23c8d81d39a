"""The client library: `Client` for threads, `AsyncClient` for asyncio, the same operations in both.

How it is built: operations are generators without I/O (`operations`, `listing`); two thin drivers
run them (`blocking_driver`, `aio_driver`). Batches are `requests` to the shards and `transfers` of
bytes: `reads`, `writes`, `sessions` (range by range), `pieces`. `single` does for one whole object
what they do for batches, `views` shows objects. `keys`, `buffers` and `Pieces` are
what callers hand in, `results` what they get, `leases`, `directory` and `costs` what a client
remembers. `worth` leaves out reads that would take longer than they are worth.
`extension` is for packages that build on this one.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.client.aio import AsyncClient, AsyncView, AsyncWriter
    from mooncake_store.client.blocking import Client, View, Writer
    from mooncake_store.client.buffers import Rows
    from mooncake_store.client.core import CallOptions, ClientStats, PutOptions, ReadOptions
    from mooncake_store.client.following import News, Position
    from mooncake_store.client.keys import Digests
    from mooncake_store.client.pieces import Pieces
    from mooncake_store.client.results import (
        BatchResult,
        GetResult,
        HintResult,
        ListedColumns,
        ListedObject,
        ObjectInfo,
        ObjectStat,
        PutManyResult,
        PutResult,
        QueryResult,
        ReadCost,
        ReadCosts,
        ReadPlace,
        Replica,
    )
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

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
    "HintResult",
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
    "ReadCost",
    "ReadCosts",
    "ReadOptions",
    "ReadPlace",
    "Replica",
    "Rows",
    "View",
    "Writer",
]
