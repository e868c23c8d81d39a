"""What a process finds around it, told to who looks for what is wrong with a pool: clock, limits.

    surroundings().clock_ms

Cost: three system calls.
"""

from __future__ import annotations

import os
import resource
import time

import msgspec

__all__ = ["UNLIMITED", "Surroundings", "surroundings"]

UNLIMITED = -1
_SHARED = "/dev/shm"


class Surroundings(msgspec.Struct, frozen=True, array_like=True):
    """The clock and the limits of a process; 0 is what it does not tell."""

    clock_ms: int = 0
    """Milliseconds since 1970."""
    open_files: int = 0
    locked_bytes: int = 0
    """Memory that it may lock; both -1 where there is no limit."""
    shared_bytes: int = 0
    """How large /dev/shm is..."""
    shared_free: int = 0
    """...and how much of it is free."""


def surroundings() -> Surroundings:
    """Return those of this process."""
    try:
        space = os.statvfs(_SHARED)
        shared = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    except OSError:
        shared = 0, 0
    return Surroundings(
        time.time_ns() // 1_000_000,
        _limit(resource.RLIMIT_NOFILE),
        _limit(resource.RLIMIT_MEMLOCK),
        *shared,
    )


def _limit(which: int) -> int:
    soft, _ = resource.getrlimit(which)
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft
