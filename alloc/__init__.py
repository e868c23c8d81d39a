"""Where inside a segment an object goes: allocators on arrays, in batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alloc.base import Allocator, AllocatorStats
    from alloc.composite import CompositeAllocator
    from alloc.factory import create_allocator
    from alloc.offset import OffsetAllocator
    from alloc.share import Share
    from alloc.slab import SlabAllocator
else:
    from kernel_cache.lazy import names_of

    __getattr__ = names_of(__name__)

__all__ = [
    "Allocator",
    "AllocatorStats",
    "CompositeAllocator",
    "OffsetAllocator",
    "Share",
    "SlabAllocator",
    "create_allocator",
]
