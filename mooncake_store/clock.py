"""Time and randomness as arguments, so that everything above them can be simulated and replayed.

The core never asks what time it is: it is told `now_ns`. The shells around it ask a `Clock`, which
is the system's in production and a `ManualClock` in tests and in the simulator. Randomness is a
`random.Random` made by `make_random` from a seed and the name of its consumer: each consumer has
a stream of its own, so adding one does not change what the others draw, and a failing run is
repeated from its seed in any process on any machine.

Not done here: sleeping and timers, which belong to the event loops. Every call is O(1).
"""

from __future__ import annotations

import hashlib
import random
import time
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock", "make_random"]


class Clock(Protocol):
    """What the time is: one clock for intervals and one for dates."""

    def now_ns(self) -> int:
        """Return nanoseconds from an arbitrary start; never goes backwards. For intervals."""
        ...

    def wall_ns(self) -> int:
        """Return nanoseconds since 1970 in UTC; may jump when corrected. For dates only."""
        ...


class SystemClock:
    """The clocks of this machine."""

    __slots__ = ()

    def now_ns(self) -> int:
        """Return the monotonic clock, which other processes of this boot share."""
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        """Return the real-time clock."""
        return time.time_ns()


class ManualClock:
    """A clock that moves only when told to; both of its hands move together."""

    __slots__ = ("_now_ns", "_wall_offset_ns")

    def __init__(self, now_ns: int = 0, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        self._now_ns = now_ns
        self._wall_offset_ns = wall_ns - now_ns

    def now_ns(self) -> int:
        """Return the time set so far."""
        return self._now_ns

    def wall_ns(self) -> int:
        """Return the date that belongs to it."""
        return self._now_ns + self._wall_offset_ns

    def advance(self, delta_ns: int) -> int:
        """Move forward and return the new `now_ns`.

        Raises:
            ValueError: `delta_ns` is negative; going back is a different wish, see `rewind`.
        """
        if delta_ns < 0:
            raise ValueError(f"advance by {delta_ns} ns goes back; use rewind if that is meant")
        self._now_ns += delta_ns
        return self._now_ns

    def rewind(self, delta_ns: int) -> int:
        """Move both hands back, as no real machine does, to prove that code survives it.

        Raises:
            ValueError: `delta_ns` is negative.
        """
        if delta_ns < 0:
            raise ValueError(f"rewind by {delta_ns} ns goes forward; use advance if that is meant")
        self._now_ns -= delta_ns
        return self._now_ns

    def step_wall(self, delta_ns: int) -> None:
        """Correct the date by `delta_ns` of either sign, as NTP does; `now_ns` does not change."""
        self._wall_offset_ns += delta_ns


def make_random(seed: int, *consumer: str | int) -> random.Random:
    """Return the random stream of one consumer, the same for the same arguments everywhere.

    It does not depend on the process, on `PYTHONHASHSEED` or on other streams. Not for secrets.
    """
    name = repr((seed, *consumer)).encode()
    return random.Random(int.from_bytes(hashlib.blake2b(name, digest_size=16).digest(), "big"))
