"""Time as an argument, so that everything above it can be simulated and replayed.

The core never asks what time it is: it is told `now_ns`. The shells around it ask a `Clock`, which
is the system's in production and one that moves when told to in tests.

Not done here: sleeping and timers, which belong to the event loops. Every call is O(1).
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["AheadClock", "Clock", "SystemClock"]


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


class AheadClock:
    """Another clock, so much further: intervals go on over a start of the machine."""

    __slots__ = ("_ahead_ns", "_clock")

    def __init__(self, clock: Clock, ahead_ns: int) -> None:
        self._clock = clock
        self._ahead_ns = ahead_ns

    def now_ns(self) -> int:
        """Return the time of the other clock, and what it is ahead of it."""
        return self._clock.now_ns() + self._ahead_ns

    def wall_ns(self) -> int:
        """Return what the other clock says."""
        return self._clock.wall_ns()
