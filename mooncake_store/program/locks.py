"""Files that one process at a time holds: who lives is told by the system, and not by a number.

    lock = lock_file(path)              # or BlockingIOError; `holder_of(path)` tells who it is
    sign_lock(lock)                     # for that
    ...
    os.close(lock)

The lock (flock) goes when the last descriptor of it is closed, however its process ends; one that
is handed on to a child is held by both. A forked child has a copy that it should close.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["holder_of", "lock_file", "sign_lock", "taken"]

RETRY_S = 0.02


def lock_file(path: Path, wait_s: float = 0.0) -> int:
    """Return a descriptor that holds a file, which is made if need be, for this user alone.

    Raises BlockingIOError where another one holds it for longer than `wait_s`, and OSError.
    """
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        if not taken(lock, wait_s):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
    except BaseException:
        os.close(lock)
        raise
    return lock


def sign_lock(lock: int) -> None:
    """Write into a file that is held who holds it: the number of this process and nothing else."""
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


def holder_of(path: Path) -> str:
    """Return the number of the process that held a file last, for people; it may have ended."""
    try:
        return path.read_text(errors="replace")[:32].strip() or "unknown"
    except OSError:
        return "unknown"


def taken(lock: int, wait_s: float = 0.0) -> bool:
    """Hold what a descriptor leads to; False where another one holds it for longer than that."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(RETRY_S)
        else:
            return True
