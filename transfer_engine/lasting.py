"""Work that goes on as long as its process: threads and tasks that no single failure ends.

    thread = LastingThread("mooncake-tcp-7000", turn)    # calls turn() again and again
    thread.start()
    ...
    thread.stop()                                        # and wake whoever waits within turn()

Who accepts connections, or says that a process is alive, meets whatever its peers make of it. What
can be foreseen a turn deals with itself. Anything else leaves it as an exception, and is told (once
in a while, however often it happens), and the next turn comes after a pause. So one bad peer costs
its own connection, and a mistake of ours one turn.

`sound` says whether the work goes on: not when its thread has ended unasked, and not when turn
after turn fails. A program one of whose threads is not sound says so; a worker stops its heart
beat. Being short of descriptors or memory does not count: who is served already is served on, and
ends, which frees some.

`keep_going` does the same on an event loop. Cost: nothing while nothing fails.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["LastingThread", "Seldom", "Setbacks", "keep_going"]

log = logging.getLogger(__name__)

PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 1.0
QUIET_S = 60.0
"""The same is told at most this often."""
FAILURES_MAX = 8
"""As many turns that failed, one after the other, and it is no longer believed to recover."""
_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})


class Seldom:
    """Says when to tell of what may happen often: at most once in `QUIET_S`. No thread-safety.

    `clock` is time.monotonic, or what a test moves.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._untold = 0
        self._quiet_until = clock()

    def due(self) -> str | None:
        """Note that it happened; return how often besides, to be told, None to be silent."""
        self._untold += 1
        now = self._clock()
        if now < self._quiet_until:
            return None
        self._quiet_until = now + QUIET_S
        times, self._untold = self._untold, 0
        return f" ({times} times since this was told last)" if times > 1 else ""


class Setbacks:
    """What one piece of work has met: tells it, and says for how long to pause. No thread-safety.

    `clock` is time.monotonic, or what a test moves.
    """

    def __init__(self, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._seldom = Seldom(clock)
        self._failures = 0
        self._pause_s = PAUSE_S_MIN

    def failed(self, error: Exception) -> float:
        """Note that a turn failed; return the seconds until the next one."""
        short = isinstance(error, OSError) and error.errno in _SHORTAGES
        self._failures += not short
        more = self._seldom.due()
        if more is not None:
            why = f"{type(error).__name__}: {error}"
            log.error(
                "%s failed, and goes on: %s%s", self._name, why, more,
                exc_info=None if short else error,
            )  # fmt: skip
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, PAUSE_S_MAX)
        return pause_s

    def worked(self) -> None:
        """Note that a turn did what it should."""
        if self._pause_s != PAUSE_S_MIN:
            self._failures, self._pause_s = 0, PAUSE_S_MIN

    @property
    def few(self) -> bool:
        """Whether there is reason to believe that the next turn works."""
        return self._failures < FAILURES_MAX


class LastingThread(threading.Thread):
    """A daemon thread that calls `turn` until that returns False, or `stop` was called."""

    def __init__(self, name: str, turn: Callable[[], bool | None]) -> None:
        super().__init__(name=name, daemon=True)
        self._turn = turn
        self._over = threading.Event()
        self._setbacks = Setbacks(name)
        self._began = math.inf

    def run(self) -> None:
        """Take turns until one returns False, or `stop` was called."""
        while not self._over.is_set():
            self._began = time.monotonic()
            try:
                if self._turn() is False:
                    self._over.set()
            except Exception as error:
                self._began = math.inf
                if not self._over.is_set():  # else it is what ended the last turn
                    self._over.wait(self._setbacks.failed(error))
            else:
                self._setbacks.worked()

    def stop(self) -> None:
        """Begin no further turn. Who waits within one is woken by whoever knows what for."""
        self._over.set()

    @property
    def sound(self) -> bool:
        """Whether it goes on with its work, or ended as it should.

        A turn that lasts, such as one that waits for a connection, did not fail as others before.
        """
        lasts = self.turn_s > PAUSE_S_MAX
        return self._over.is_set() or (self.is_alive() and (self._setbacks.few or lasts))

    @property
    def turn_s(self) -> float:
        """For how long its turn lasts by now; below 0 between two of which the first failed."""
        return time.monotonic() - self._began


async def keep_going(name: str, turn: Callable[[], Awaitable[object]]) -> None:
    """Await `turn` again and again, until cancelled."""
    setbacks = Setbacks(name)
    while True:
        try:
            await turn()
        except Exception as error:
            await asyncio.sleep(setbacks.failed(error))
        else:
            setbacks.worked()
