"""`mooncake.buffer_pool` of the original."""

from mooncake_store.compat.buffer_pool import BufferPool, RegisteredBufferPool

__all__ = ["BufferPool", "RegisteredBufferPool"]
