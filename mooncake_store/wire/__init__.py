"""What clients, workers and masters say to each other: the operations of the store's services."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.wire.cluster import CLUSTER
    from mooncake_store.wire.shard import SHARD

__all__ = ["CLUSTER", "SHARD"]

_HOME = {"CLUSTER": "mooncake_store.wire.cluster", "SHARD": "mooncake_store.wire.shard"}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
