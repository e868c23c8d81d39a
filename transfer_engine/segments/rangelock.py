"""Locks on ranges of a file, within this process and between processes of this host.

Writing part of a block means reading the block, changing it and writing all of it back: two that
do so at once lose one of the changes, although their bytes do not overlap. `exclusive` is for
them. Those who write whole blocks only must not run beside them, but may run beside each other:
they take the range `shared`. Readers take nothing.

Between threads a list under a condition decides; between processes the kernel does, by locks that
belong to the open file description (F_OFD_SETLK), so every process must open the file itself. A
holder that dies lets go. Nobody holds one range while waiting for another, so there is no
deadlock. Other hosts that share a device are not seen: see docs/guide/storage-devices.md.

Cost: O(ranges held) and two system calls.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
from typing import TYPE_CHECKING, NamedTuple

from transfer_engine import forking
from transfer_engine.base import remaining_s
from transfer_engine.errors import TransferError

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RangeLock"]

# struct flock of 64-bit Linux: type, whence, start, length, pid; and the commands for it.
_FLOCK = struct.Struct("hhxxxxqqixxxx")
_OFD_SETLK = getattr(fcntl, "F_OFD_SETLK", 37)
_PAUSE_FIRST_S = 50e-6
_PAUSE_MAX_S = 5e-3


class _Held(NamedTuple):
    begin: int
    end: int
    exclusive: bool

    def conflicts(self, other: _Held) -> bool:
        meets = self.begin < other.end and other.begin < self.end
        return meets and (self.exclusive or other.exclusive)


class RangeLock:
    """Locks of one open file. `name` is for messages."""

    def __init__(self, fd: int, name: str) -> None:
        self._fd = fd
        self._name = name
        self._changed = threading.Condition()
        self._held: list[_Held] = []
        forking.register(self)

    @contextlib.contextmanager
    def hold(self, begin: int, end: int, *, exclusive: bool, deadline: float) -> Iterator[None]:
        """Hold [begin, end). Raises TransferTimeoutError when others do not let go in time."""
        mine = _Held(begin, end, exclusive)
        with self._changed:
            while any(mine.conflicts(other) for other in self._held):
                self._changed.wait(remaining_s(deadline, "lock", self._name))
            self._held.append(mine)
        try:
            self._lock_file(mine, deadline)
            yield
        finally:
            with self._changed:
                self._held.remove(mine)
                for first, last in _uncovered(mine, self._held):
                    self._fcntl(fcntl.F_UNLCK, first, last)
                self._changed.notify_all()

    def _lock_file(self, mine: _Held, deadline: float) -> None:
        kind = fcntl.F_WRLCK if mine.exclusive else fcntl.F_RDLCK
        pause = _PAUSE_FIRST_S
        # The kernel can only wait without a deadline; a blocked range is asked for again.
        while not self._fcntl(kind, mine.begin, mine.end):
            left = remaining_s(deadline, "lock", self._name)
            threading.Event().wait(min(pause, left))
            pause = min(2 * pause, _PAUSE_MAX_S)

    def _fcntl(self, kind: int, begin: int, end: int) -> bool:
        """Change the lock of a range; return False when another process holds it."""
        request = _FLOCK.pack(kind, os.SEEK_SET, begin, end - begin, 0)
        try:
            fcntl.fcntl(self._fd, _OFD_SETLK, request)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise TransferError(
                f"cannot lock bytes [{begin}, {end}) of {self._name}: {error.strerror}",
                operation="lock",
                advice="use a file system with byte-range locks, or direct='never'",
            ) from error
        return True

    def after_fork(self) -> None:
        """Hold nothing in a forked child: the threads that held ranges are the parent's."""
        self._changed = threading.Condition()
        self._held = []


def _uncovered(gone: _Held, held: list[_Held]) -> list[tuple[int, int]]:
    """Return the parts of a range that no other holder of the same file covers.

    The kernel does not count the holders of one open file: an unlock takes the lock from all.
    """
    parts: list[tuple[int, int]] = []
    at = gone.begin
    for begin, end, _ in sorted(held):
        if begin >= gone.end:
            break
        if end <= at:
            continue
        if begin > at:
            parts.append((at, begin))
        at = end
    if at < gone.end:
        parts.append((at, gone.end))
    return parts
