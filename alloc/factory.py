"""Allocators by name, imported only when asked for: kernels cost numba's import time."""

from __future__ import annotations

import difflib
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alloc.base import Allocator

KINDS = {
    "composite": ("alloc.composite", "CompositeAllocator"),
    "offset": ("alloc.offset", "OffsetAllocator"),
    "slab": ("alloc.slab", "SlabAllocator"),
}


def create_allocator(kind: str, capacity: int, **options: Any) -> Allocator:
    """A new allocator over `capacity` bytes; `options` go to its constructor.

    Raises ValueError for another kind than "composite", "offset" and "slab", with the nearest.
    """
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"allocator must be one of {', '.join(KINDS)}, not {kind!r}{hint}")
    module, name = KINDS[kind]
    allocator: Allocator = getattr(import_module(module), name)(capacity, **options)
    return allocator
