"""Polling for a moment before going to sleep, where that has paid lately.

Waking a thread takes 10 to 50 us, on virtual machines more, and it costs both ends processor
time: one sends an interrupt, the other returns to cold caches. What is a few microseconds away is
cheaper to poll for; what is not must be slept for. A `Spin` learns which it is from what happened
before: a poll in vain leaves twice as many of the following waits alone as the one before it, up
to 255, so a wait that is always long costs less than half a microsecond of polling on average.

Only brief requests are polled for: measured with two processors, single probes gain most of their
time, while with 128 keys in a request little is gained for half as much processor time again.

Whoever polls gives way to other threads of its processor at every turn, and where there is one
processor only nobody polls: the other side could not run meanwhile.

`Spin` is for blocking waits, `Vigil` for event loops. Neither is thread-safe; O(1), no I/O.
"""

from __future__ import annotations

import os
from time import perf_counter_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = ["BRIEF_BYTES_MAX", "SPIN_NS", "Spin", "Vigil"]

BRIEF_BYTES_MAX = 256
"""Bodies of requests that ask for one thing: worth polling for, at both ends."""

SPIN_NS = 100_000
"""The longest poll: twice what a wake-up costs, as the other side may have to wake first."""
_FAILURES_MAX = 8


class Spin:
    """Whether the next wait should begin with a poll."""

    __slots__ = ("_failures", "_rest")

    def __init__(self) -> None:
        self._failures = 0
        self._rest = 0 if len(os.sched_getaffinity(0)) > 1 else -1

    def worthwhile(self) -> bool:
        """Whether to poll this time; asked once for each wait."""
        if self._rest == 0:
            return True
        self._rest -= 1
        return False

    def paid(self) -> None:
        """Note that what was waited for came while polling."""
        self._failures = 0

    def failed(self) -> None:
        """Note that polling was in vain."""
        if self._failures < _FAILURES_MAX:
            self._failures += 1
        self._rest = (1 << self._failures) - 1


class Vigil:
    """Keeps an event loop awake between requests that follow each other closely."""

    __slots__ = ("_awake", "_loop", "_spin", "_until")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._spin = Spin()
        self._until = 0
        self._awake = False

    def expect(self) -> None:
        """The next request may come soon: stay awake for it if that has paid lately."""
        if self._awake:
            self._spin.paid()
        elif self._spin.worthwhile():
            self._awake = True
            self._loop.call_soon(self._watch)
        else:
            return
        self._until = perf_counter_ns() + SPIN_NS

    def rest(self) -> None:
        """The next request will not come soon."""
        self._until = 0

    def _watch(self) -> None:
        # With a callback due the loop looks for events without waiting for them.
        if perf_counter_ns() < self._until:
            os.sched_yield()
            self._loop.call_soon(self._watch)
            return
        self._awake = False
        if self._until:
            self._spin.failed()
