"""The Python API of the original, on this store: its names, arguments, return codes, variables.

    from mooncake_store.compat import MooncakeDistributedStore, ReplicateConfig

Programs that import `mooncake.store` and `mooncake.engine` need no change: the small distribution
in `compat/` provides those names from here. What differs, and why, is in docs/reference/compat.md.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mooncake_store.compat.buffer_pool import BufferPool
    from mooncake_store.compat.config import MooncakeConfig
    from mooncake_store.compat.engine import TransferEngine
    from mooncake_store.compat.numa import bind_to_numa_node
    from mooncake_store.compat.store import MooncakeDistributedStore, MooncakeDistributedStoreAsync
    from mooncake_store.compat.values import ReplicateConfig, SoftPinAction

_HOME = {
    "BufferPool": "mooncake_store.compat.buffer_pool",
    "MooncakeConfig": "mooncake_store.compat.config",
    "MooncakeDistributedStore": "mooncake_store.compat.store",
    "MooncakeDistributedStoreAsync": "mooncake_store.compat.store",
    "MooncakeStoreService": "mooncake_store.compat.rest",  # needs aiohttp, so it is not in __all__
    "ReplicateConfig": "mooncake_store.compat.values",
    "SoftPinAction": "mooncake_store.compat.values",
    "TransferEngine": "mooncake_store.compat.engine",
    "bind_to_numa_node": "mooncake_store.compat.numa",
}

__all__ = [
    "BufferPool",
    "MooncakeConfig",
    "MooncakeDistributedStore",
    "MooncakeDistributedStoreAsync",
    "ReplicateConfig",
    "SoftPinAction",
    "TransferEngine",
    "bind_to_numa_node",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
