"""A pooled store of immutable objects: clients, a local cluster to try it on, and the errors.

from mooncake_store import Client

with Client("mooncake://127.0.0.1:50051/default") as store:
    store.put("greeting", b"hello")
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.client import (
        AsyncClient,
        BatchResult,
        Client,
        ClientStats,
        Digests,
        GetResult,
        HintResult,
        ListedObject,
        ObjectInfo,
        ObjectStat,
        Pieces,
        PutManyResult,
        PutResult,
        QueryResult,
        ReadCosts,
        Rows,
    )
    from mooncake_store.errors import (
        AlreadyExistsError,
        AuthError,
        BusyError,
        ChecksumMismatchError,
        ConfigError,
        DiskError,
        HasLeaseError,
        IllegalClientError,
        InvalidArgumentError,
        LeaseExpiredError,
        LocalProtocolError,
        NoSpaceError,
        NotFoundError,
        ObjectTooLargeError,
        OverloadedError,
        PeerLostError,
        ProtocolError,
        RemoteProtocolError,
        ReplicaNotReadyError,
        StoreError,
        TooSlowError,
        TransferError,
        TransferTimeoutError,
        TruncatedError,
        UnavailableError,
    )
    from mooncake_store.local_cluster import LocalCluster
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__version__ = "0.1.0"

__all__ = [
    # Clients, and a pool to try them on.
    "AsyncClient",
    "Client",
    "LocalCluster",
    # What clients take and answer.
    "BatchResult",
    "ClientStats",
    "Digests",
    "GetResult",
    "HintResult",
    "ListedObject",
    "ObjectInfo",
    "ObjectStat",
    "Pieces",
    "PutManyResult",
    "PutResult",
    "QueryResult",
    "ReadCosts",
    "Rows",
    # Errors.
    "AlreadyExistsError",
    "AuthError",
    "BusyError",
    "ChecksumMismatchError",
    "ConfigError",
    "DiskError",
    "HasLeaseError",
    "IllegalClientError",
    "InvalidArgumentError",
    "LeaseExpiredError",
    "LocalProtocolError",
    "NoSpaceError",
    "NotFoundError",
    "ObjectTooLargeError",
    "OverloadedError",
    "PeerLostError",
    "ProtocolError",
    "RemoteProtocolError",
    "ReplicaNotReadyError",
    "StoreError",
    "TooSlowError",
    "TransferError",
    "TransferTimeoutError",
    "TruncatedError",
    "UnavailableError",
]
