"""Policies by name: the names a configuration may use, and the factory behind them.

A class is imported only when its name is asked for, so listing the names (command line help,
configuration checks) costs nothing. This module keeps no state and knows no policy's options.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eviction.base import EvictionPolicy

__all__ = ["POLICIES", "STORE_POLICIES", "create_policy"]

_HOME = {
    "lru": ("eviction.lru", "LruPolicy"),
    "fifo": ("eviction.fifo", "FifoPolicy"),
    "lfu": ("eviction.lfu", "LfuPolicy"),
    "length_aware": ("eviction.length_aware", "LengthAwarePolicy"),
    "sieve": ("eviction.sieve", "SievePolicy"),
    "lfu_perfect": ("eviction.lfu_perfect", "LfuPerfectPolicy"),
    "opt": ("eviction.opt", "OptPolicy"),
}

# Every policy the simulator knows.
POLICIES = tuple(_HOME)

# Those a store may run: ids are reused there, so counts must not outlive an object, and no
# future is known.
STORE_POLICIES = tuple(name for name in _HOME if name not in ("lfu_perfect", "opt"))


def create_policy(name: str, capacity_ids: int) -> EvictionPolicy:
    """Make the policy called `name` for ids 0 to `capacity_ids - 1`.

    "opt" starts without a future and is then the same as lru; `count_hits` gives it the trace.
    Raises ValueError for an unknown name, with the nearest known one, or a bad capacity.
    """
    if name not in _HOME:
        near = difflib.get_close_matches(name, POLICIES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown eviction policy {name!r}; did you mean {near!r}? known: {', '.join(POLICIES)}"
        )
    module, class_name = _HOME[name]
    policy: EvictionPolicy = getattr(importlib.import_module(module), class_name)(capacity_ids)
    return policy
