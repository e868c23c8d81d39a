"""File descriptors: programs have as many as the system lets them, and promise no more than that.

    raise_limit()                     # first of all
    settings = fitted(settings)       # no more connections than fit
    more = lendable(shards=4)         # segments that are lent one by one, each by a worker

Shells and service managers give a program a soft limit, often 1024, which it may raise to the hard
one. What was promised beyond that would be refused to whoever comes last, and to the files of the
program itself. Children have what their parent has.
"""

from __future__ import annotations

import contextlib
import logging
import resource
from typing import TypeVar

import msgspec

from transfer_engine.rpc.entrance import STRANGERS_MAX, spare_descriptors

__all__ = ["LENDABLE_MAX", "fitted", "lendable", "raise_limit"]

S = TypeVar("S", bound=msgspec.Struct)

log = logging.getLogger(__name__)

OWN_MAX = 64
"""What a program opens for itself: its files, listeners, and connections to others."""
LEAST = 16
LENDABLE_MAX = 256
"""Segments that a process lends one by one; each has half a dozen threads, too."""
OF_WORKER = 10
"""What a worker with one segment opens: two ports, its memory, and ways to the master."""
OF_WORKER_AT_SHARD = 2


def raise_limit() -> None:
    """Raise the soft limit of this process to its hard one, where the system allows that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fitted(settings: S) -> S:
    """Return the settings of a program without connections that do not fit; says so."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = getattr(settings, "connections_max", 0)
    if limit == resource.RLIM_INFINITY:
        return settings
    room = max(LEAST, limit - spare_descriptors(limit) - OWN_MAX - min(STRANGERS_MAX, limit // 8))
    if wanted <= room:
        return settings
    log.warning(
        "%d connections are served at once, not %d: the process may open %d files (ulimit -n)",
        room, wanted, limit,
    )  # fmt: skip
    return msgspec.structs.replace(settings, connections_max=room)


def lendable(shards: int) -> int:
    """Return how many segments this process may lend one by one, in half of what it may open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return LENDABLE_MAX
    return min(LENDABLE_MAX, limit // 2 // (OF_WORKER + OF_WORKER_AT_SHARD * shards))
