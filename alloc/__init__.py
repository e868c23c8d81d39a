"""Where inside a segment an object goes: allocators on arrays, in batches."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alloc.base import Allocator, AllocatorStats
    from alloc.composite import CompositeAllocator
    from alloc.factory import create_allocator
    from alloc.offset import OffsetAllocator
    from alloc.slab import SlabAllocator

__all__ = [
    "Allocator",
    "AllocatorStats",
    "CompositeAllocator",
    "OffsetAllocator",
    "SlabAllocator",
    "create_allocator",
]

_HOME = {
    "Allocator": "alloc.base",
    "AllocatorStats": "alloc.base",
    "CompositeAllocator": "alloc.composite",
    "OffsetAllocator": "alloc.offset",
    "SlabAllocator": "alloc.slab",
    "create_allocator": "alloc.factory",
}


def __getattr__(name: str) -> object:
    if name in _HOME:
        import importlib

        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
