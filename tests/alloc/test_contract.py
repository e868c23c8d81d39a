"""Every allocator keeps the public contract."""

from __future__ import annotations

from alloc import Allocator, CompositeAllocator, OffsetAllocator, SlabAllocator
from alloc.testing import AllocatorContract


class TestOffset(AllocatorContract):
    def make(self, capacity: int, alignment: int = 1) -> Allocator:
        return OffsetAllocator(capacity, alignment)


class TestSlab(AllocatorContract):
    def make(self, capacity: int, alignment: int = 1) -> Allocator:
        return SlabAllocator(capacity, alignment)


class TestComposite(AllocatorContract):
    def make(self, capacity: int, alignment: int = 1) -> Allocator:
        return CompositeAllocator(capacity, alignment)
