"""Leases: until when something is surely held, told by this process's own clock.

The service counts a lease from when it heard of a renewal, the holder from before it sent it. So
the holder's time is over first, if its clock runs no slower than the service's by more than
`DRIFT`: a share of each lease that is given away for that. Clocks that are kept in step by
slewing differ by at most 0.0005. What the time of day is plays no part.

A lease that is over stays over, whatever the service answers later. `held()` reads the clock each
time; so it is right also where the event loop stood still and `ended()` comes late.

Cost: one renewal in a third of its length.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Protocol

from transfer_engine.errors import StoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

__all__ = ["DRIFT", "Keeper", "Lease", "Pace", "SystemPace"]

log = logging.getLogger(__name__)

DRIFT = 0.05
RENEWALS = 3
"""In the time of a lease; so two in a row may fail."""
PAUSE_SHARE = 0.05
"""Of a lease, between a renewal that failed and the next one."""


class Pace(Protocol):
    """A clock that one can also wait for."""

    def now_ns(self) -> int:
        """Return nanoseconds from an arbitrary start; never goes backwards."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""
        ...


class SystemPace:
    """The monotonic clock of this machine."""

    __slots__ = ()

    def now_ns(self) -> int:
        """Return the monotonic clock."""
        return time.monotonic_ns()

    async def sleep(self, seconds: float) -> None:
        """Return when so much time has passed."""
        await asyncio.sleep(seconds)


class Keeper(Protocol):
    """The service as a lease sees it."""

    async def renew(self, lease: int, timeout_s: float) -> bool:
        """Let a lease last for its whole length from now on; False where there is none."""
        ...

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """End a lease now, and remove what was put with it."""
        ...


class Lease:
    """Kept alive by a task until it is released, or lost; `id` is what `Put.lease` takes."""

    def __init__(
        self,
        number: int,
        ttl_s: int,
        sent_ns: int,
        keeper: Keeper,
        pace: Pace,
        over: Callable[[Lease], object],
    ) -> None:
        self.id = number
        self.ttl_s = ttl_s
        self._keeper = keeper
        self._pace = pace
        self._tell = over
        self._sure_ns = int(ttl_s * (1 - DRIFT) * 1e9)
        self._until_ns = sent_ns + self._sure_ns
        self._over = asyncio.Event()
        self._tasks = [asyncio.create_task(self._renewing()), asyncio.create_task(self._ending())]

    def held_until_ns(self) -> int:
        """Return until when it is surely held, on the clock of its pace; 0 when it is over.

        Any thread may ask; all else is for the event loop of the lease.
        """
        return self._until_ns

    def held(self) -> bool:
        """Whether it is surely held now; once False, always False."""
        if self._pace.now_ns() >= self._until_ns:
            self.lose()
        return not self._over.is_set()

    async def ended(self) -> None:
        """Return when it is over."""
        await self._over.wait()

    def lose(self) -> None:
        """End it for the holder, without telling the service."""
        if self._over.is_set():
            return
        self._until_ns = 0
        self._over.set()
        for task in self._tasks:
            task.cancel()
        self._tell(self)

    def accompany(self, work: Coroutine[None, None, None]) -> None:
        """Run a task that is cancelled when it is over."""
        task = asyncio.create_task(work)
        if self._over.is_set():
            task.cancel()
        self._tasks.append(task)

    async def release(self, timeout_s: float) -> None:
        """End it, for the holder at once; the service removes what was put with it.

        A service that does not answer removes that when the lease has run out.
        """
        self.lose()
        try:
            await self._keeper.revoke(self.id, timeout_s)
        except StoreError as error:
            log.info("lease %x will run out by itself: %s", self.id, error)

    def _left_s(self) -> float:
        return (self._until_ns - self._pace.now_ns()) / 1e9

    async def _ending(self) -> None:
        while self.held():
            await self._pace.sleep(max(self._left_s(), 0.0))

    async def _renewing(self) -> None:
        pause_s = self.ttl_s / RENEWALS
        while True:
            await self._pace.sleep(pause_s)
            sent_ns = self._pace.now_ns()
            try:
                # Half of what is left, so that one that hangs is not the last one.
                alive = await self._keeper.renew(self.id, max(self._left_s() / 2, 0.05))
            except Exception as error:
                log.warning("lease %x was not renewed, %.1f s left: %s",
                            self.id, self._left_s(), error)  # fmt: skip
                pause_s = self.ttl_s * PAUSE_SHARE
                continue
            pause_s = self.ttl_s / RENEWALS
            if not self.held():
                return
            if not alive:
                log.warning("lease %x is lost: the service has ended it", self.id)
                self.lose()
                return
            self._until_ns = max(self._until_ns, sent_ns + self._sure_ns)
