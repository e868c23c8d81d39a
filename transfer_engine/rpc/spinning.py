"""Polling for a moment before going to sleep, where that has paid lately.

Waking a thread takes 10 to 50 us, on virtual machines more, and it costs both ends processor
time: one sends an interrupt, the other returns to cold caches. What is a few microseconds away is
cheaper to poll for; what is not must be slept for. A `Spin` learns which it is from what happened
before: a poll in vain leaves twice as many of the following waits alone as the one before it, up
to 63, so a wait that is always long costs a few microseconds of polling on average.

A poll is long enough for the other side to wake and work, and for a client to move an object over
the network between two requests. With 100 us the ends taught each other to sleep for good: a poll
ended before a server that slept had answered, and a server that stayed awake heard nothing from a
client that slept, or was busy with the owner of a segment. With 300 us, measured in turn with that
on a virtual machine with two processors and slow wake-ups, single gets and puts of 4 KiB over tcp
took 0.48 and 0.57 of the time, single puts over shared memory 0.35.

Batches of 128 keys took 0.7 to 0.8 of their time with that length. Their replies are polled for
as well; alone that changed nothing that could be told from noise (0.9 to 1.2 of the rate). But a
server stays awake after brief requests, and those of operations that it is told: with 128 keys in a
request the rate rose to 1.4 times for half as much processor time a key again, so a shard's probes
do without and its removals have it (1.5 and 1.7 times as many in two runs). Gets and puts of
batches do without as well: with it they were 1.0 to 1.2 times as many on an idle machine, and 0.8
to 1.0 times as many on a busy one, where a master that polls takes the processor from its clients.

Whoever polls gives way to other threads of its processor at every turn. Where those have work that
can take longer than sleeping would have, so what came late was polled for in vain. Where there is
one processor only nobody polls: the other side could not run meanwhile.

`Spin` is for blocking waits, `LoopSpin` for event loops. Neither is thread-safe; O(1), no I/O.
"""

from __future__ import annotations

import os
from time import perf_counter_ns
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "AWAITED_BYTES_MAX",
    "BRIEF_BYTES_MAX",
    "SPIN_NS",
    "Spin",
    "LoopSpin",
]

BRIEF_BYTES_MAX = 256
"""Bodies of requests that ask for one thing: worth staying awake for at the server."""
AWAITED_BYTES_MAX = 16 << 10
"""Bodies of requests whose replies are worth polling for: some hundred keys."""

SPIN_NS = 300_000
"""The longest poll: the other side may have to wake first, and has something to do."""
_FAILURES_MAX = 6


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


class LoopSpin:
    """Keeps an event loop awake between requests that follow each other closely."""

    __slots__ = ("_awake", "_loop", "_spin", "_until")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._spin = Spin()
        self._until = 0
        self._awake = False

    def expect(self) -> None:
        """The next request may come soon: stay awake for it if that has paid lately."""
        now = perf_counter_ns()
        if self._awake:
            if now <= self._until:
                self._spin.paid()
            elif self._until:
                self._spin.failed()
        elif self._spin.worthwhile():
            self._awake = True
            self._loop.call_soon(self._watch)
        else:
            return
        self._until = now + SPIN_NS

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
