"""`mooncake.async_store` of the original."""

from mooncake_store.compat.store import MooncakeDistributedStoreAsync

__all__ = ["MooncakeDistributedStoreAsync"]
