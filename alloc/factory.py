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


def allocator_class(kind: str) -> type[Allocator]:
    """The class for "composite", "offset" or "slab"; ValueError names the nearest for others."""
    if kind not in KINDS:
        near = difflib.get_close_matches(kind, KINDS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"allocator must be one of {', '.join(KINDS)}, not {kind!r}{hint}")
    module, name = KINDS[kind]
    found: type[Allocator] = getattr(import_module(module), name)
    return found


def create_allocator(kind: str, capacity: int, **options: Any) -> Allocator:
    """A new allocator over `capacity` bytes; `options` go to its constructor."""
    return allocator_class(kind)(capacity, **options)  # type: ignore[call-arg]


def load_allocator(state: dict[str, Any]) -> Allocator:
    """The allocator a `dump` was made of, whatever its kind."""
    return allocator_class(str(state["kind"])).load(state)
