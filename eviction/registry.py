"""Policies by name: those of this package, of other distributions, and classes by their path.

    create_policy("lru", 1000)
    create_policy("my_package.policies:Slru", 1000)

A distribution makes policies known by name through entry points of the group
`mooncake.eviction_policies`; ours cannot be replaced by them. Finding a foreign policy imports its
module, which runs code: names must come from whoever runs the program (a command line, a
configuration), never from a peer. Nothing that is read from a connection comes here.

A class is imported only when its name is asked for, so listing our names (command line help,
configuration checks) costs nothing. This module keeps no state and knows no policy's options.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kernel_cache.foreign import Foreign

if TYPE_CHECKING:
    from eviction.base import EvictionPolicy

__all__ = [
    "GROUP",
    "POLICIES",
    "STORE_POLICIES",
    "check_store_policy",
    "create_policy",
    "find_policy",
]

GROUP = "mooncake.eviction_policies"

_HOME = {
    "lru": ("eviction.lru", "LruPolicy"),
    "fifo": ("eviction.fifo", "FifoPolicy"),
    "lfu": ("eviction.lfu", "LfuPolicy"),
    "length_aware": ("eviction.length_aware", "LengthAwarePolicy"),
    "sieve": ("eviction.sieve", "SievePolicy"),
    "lfu_perfect": ("eviction.lfu_perfect", "LfuPerfectPolicy"),
    "opt": ("eviction.opt", "OptPolicy"),
}

# Every policy of this package.
POLICIES = tuple(_HOME)

# Those a store may run: ids are reused there, so counts must not outlive an object, and no
# future is known.
STORE_POLICIES = tuple(name for name in _HOME if name not in ("lfu_perfect", "opt"))


_FOREIGN = Foreign("eviction policy", GROUP, POLICIES)


def create_policy(name: str, capacity_ids: int) -> EvictionPolicy:
    """Make the policy called `name` for ids 0 to `capacity_ids - 1`.

    "opt" starts without a future and is then the same as lru; `count_hits` gives it the trace.
    Raises ValueError for an unknown name, with the nearest known one, a bad capacity, or a policy
    of others that cannot be made.
    """
    policy = find_policy(name)
    if name in _HOME:
        return policy(capacity_ids)
    return _FOREIGN.make(name, policy, capacity_ids)


def check_store_policy(name: str) -> None:
    """Raise ValueError, with the next step, unless a store can run the policy called `name`.

    Ours are known by name and not imported for it. One of others is made once, for one id.
    """
    if name in STORE_POLICIES:
        return
    if name in POLICIES:
        listed = ", ".join(STORE_POLICIES)
        raise ValueError(f"the eviction policy {name!r} is for traces only; choose from {listed}")
    create_policy(name, 1)


def find_policy(name: str) -> type[EvictionPolicy]:
    """The class called `name`, or at `module:Class`.

    Raises ValueError, with the next step, when there is none, it cannot be imported, or it is no
    policy.
    """
    if name in _HOME:
        module, class_name = _HOME[name]
        ours: type[EvictionPolicy] = getattr(importlib.import_module(module), class_name)
        return ours
    from eviction.base import EvictionPolicy

    found = _FOREIGN.find(name)
    if not (isinstance(found, type) and issubclass(found, EvictionPolicy)):
        raise ValueError(
            f"{name!r} is no eviction policy; subclass eviction.PlainPolicy or EvictionPolicy"
        )
    return found
