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

    # Needs aiohttp, so it is not in __all__.
    from mooncake_store.compat.rest import MooncakeStoreService as MooncakeStoreService
    from mooncake_store.compat.store import MooncakeDistributedStore, MooncakeDistributedStoreAsync
    from mooncake_store.compat.values import ReplicateConfig, SoftPinAction
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

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
