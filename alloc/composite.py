"""CompositeAllocator, the default: slabs for sizes asked for often, extents for the rest.

A KV-cache pool mostly stores blocks of two or three sizes that depend on the model, which slabs
suit perfectly, and beside them sizes that never come back, for which a slab would be waste. So
a size starts as extents and becomes a class when it has been asked for 16 times lately, or when
objects of it lie as in a slab in a table that `reserve` gets; and only if eight objects of it fit
into 1/64 of the pool, because a few large objects gain nothing from slabs and a small pool cannot
afford the slack.
"""

from __future__ import annotations

from typing import ClassVar

from alloc.slab import SlabAllocator


class CompositeAllocator(SlabAllocator):
    """A SlabAllocator that makes a class only of sizes that pay; same costs."""

    learn: ClassVar[int] = 16
    slots_min: ClassVar[int] = 8
