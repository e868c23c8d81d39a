"""Until when a process may answer, in a word that it shares with its children.

    fence = Fence.make()                # handed on by its descriptor, fence.fd
    fence.open_until(deadline_ns)       # again and again
    fence.check()                       # UnavailableError once that is over, in any of them

Who leads for a time has to stop when it is over, also where it stood still meanwhile and comes back
with an answer in its hands. So each answer looks at the clock. It counts on that of this boot,
which all processes of a host share. O(1), a tenth of a microsecond.
"""

from __future__ import annotations

import mmap
import os
import time

import numpy as np

from transfer_engine.errors import UnavailableError

__all__ = ["Fence"]


class Fence:
    """The word; made closed."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._word = np.frombuffer(mmap.mmap(fd, mmap.PAGESIZE), np.int64, 1)

    @classmethod
    def make(cls) -> Fence:
        """Return a new one."""
        fd = os.memfd_create("mooncake-fence")
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, mmap.PAGESIZE)
        return cls(fd)

    def open_until(self, until_ns: int) -> None:
        """Let answers leave until then, on the monotonic clock."""
        self._word[0] = until_ns

    @property
    def left_ms(self) -> int:
        """For how long answers may leave."""
        return max(0, (int(self._word[0]) - time.monotonic_ns()) // 1_000_000)

    def check(self) -> None:
        """Raise UnavailableError where the time is over."""
        if time.monotonic_ns() >= self._word[0]:
            raise UnavailableError(
                "this process may answer no more: another one may lead",
                operation="open",  # nothing of it was done, so it may be asked elsewhere
                advice="ask that one; clients that know all of them do so by themselves",
            )

    def close(self) -> None:
        """Let the descriptor go."""
        os.close(self.fd)
