"""What a forked child must not keep: its parent's connections and held locks.

Objects with such state register here and drop it in the child, before the child runs anything
else. They then rebuild it when they are next used, as if they were new.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol

__all__ = ["ForkAware", "register"]


class ForkAware(Protocol):
    """Something that can drop what belongs to its parent process."""

    def after_fork(self) -> None:
        """Close inherited sockets without a word to the peer, and make new locks."""


_objects: weakref.WeakSet[ForkAware] = weakref.WeakSet()


def register(item: ForkAware) -> None:
    """Call `item.after_fork()` in every child this process forks, as long as it lives."""
    _objects.add(item)


def _in_child() -> None:
    for item in list(_objects):
        item.after_fork()


os.register_at_fork(after_in_child=_in_child)
