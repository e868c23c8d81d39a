"""Who leads something that has a name: one at a time, and each with a larger number.

    leadership = await campaign(coordinator, "shards/3", b"10.0.0.7:50061", ttl_s=5)
    while leadership.leads(): ...                       # or: until leadership.leading_until_ns()
    await coordinator.change(Put(...), given=[leadership.still])
    await leadership.resign()

Who leads holds a value under the name, which goes with its lease. `epoch` is the revision at which
the value was set: the next leader's is larger. Two things keep a leader of before from doing harm:

- It stops in time: its lease is over by its own clock before the service lets another one begin
  (`leases`), whatever hangs between them. Where the value is removed early it hears that too.
- It is refused when it does not, because it stood still at the wrong moment, or a clock ran
  wrong: who takes orders refuses an epoch below the largest it has seen, and a change through the
  coordinator is made only as long as the leadership is `still` there.

Not done here: who should campaign, and what a leader does. Cost: one watch for each name.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, NamedTuple

from mooncake_store.coordination.base import FAULTS, CompactedError, Seen
from transfer_engine.errors import LeaseExpiredError
from transfer_engine.lasting import Setbacks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from mooncake_store.coordination.base import Coordinator, Entry
    from mooncake_store.coordination.leases import Lease

__all__ = ["PREFIX", "Leader", "Leadership", "campaign", "leader", "leaders"]

log = logging.getLogger(__name__)

PREFIX = "leaders/"


class Leader(NamedTuple):
    """Who leads, as others see it: it may have just stopped."""

    value: bytes
    """What it said of itself, such as its address."""
    epoch: int


class Leadership:
    """That this process leads, until it ends; it is never taken up again."""

    def __init__(self, coordinator: Coordinator, name: str, epoch: int, lease: Lease) -> None:
        self.name = name
        self.epoch = epoch
        self.still = Seen(PREFIX + name, epoch)
        """The condition for changes that only who leads may make."""
        self._coordinator = coordinator
        self._lease = lease
        lease.accompany(self._heed())

    def leading_until_ns(self) -> int:
        """Return until when nobody else can lead, on the clock of the pace; 0 when it is over.

        Any thread may ask; all else is for the event loop of the coordinator.
        """
        return self._lease.held_until_ns()

    def leads(self) -> bool:
        """Whether nobody else can lead now; once False, always False."""
        return self._lease.held()

    async def ended(self) -> None:
        """Return when it is over."""
        await self._lease.ended()

    async def resign(self) -> None:
        """Lead no more, from now on; the next one may begin as soon as the service knows."""
        await self._lease.release(self._coordinator.timeout_s)

    async def _heed(self) -> None:
        """End it when the value is removed or replaced while the lease seems to go on."""
        async with aclosing(leaders(self._coordinator, self.name)) as news:
            async for who in news:
                if who is None or who.epoch != self.epoch:
                    log.warning("epoch %d of %s is over: its value is gone", self.epoch, self.name)
                    self._lease.lose()


async def campaign(coordinator: Coordinator, name: str, value: bytes, *, ttl_s: int) -> Leadership:
    """Return when this process leads, however long that takes; `value` tells others who it is.

    It goes on while the service cannot be reached. To give up, cancel it: it then holds nothing.
    """
    key = PREFIX + name
    setbacks = Setbacks(f"the campaign for {name!r}")
    lease: Lease | None = None
    try:
        while True:
            try:
                # What an answer that was lost would have said shows here: it may be ours already.
                entry = await _vacancy(coordinator, key, lease)
                if lease is None or not lease.held():
                    lease = await coordinator.lease(ttl_s)
                if entry is None:
                    epoch = await coordinator.put(key, value, seen=0, lease=lease.id)
                else:
                    epoch = entry.created if entry.lease == lease.id else None
            except (*FAULTS, LeaseExpiredError) as error:
                await coordinator.pace.sleep(setbacks.failed(error))
                continue
            if epoch is not None and lease.held():
                won, lease = lease, None
                return Leadership(coordinator, name, epoch, won)
            lost, lease = lease, None
            await lost.release(coordinator.timeout_s)
    finally:
        if lease:
            await lease.release(coordinator.timeout_s)


async def leader(coordinator: Coordinator, name: str) -> Leader | None:
    """Return who leads now, None for nobody."""
    entry = await coordinator.get(PREFIX + name)
    return Leader(entry.value, entry.created) if entry else None


async def leaders(coordinator: Coordinator, name: str) -> AsyncGenerator[Leader | None, None]:
    """Yield who leads now, and again whenever that changes; None for nobody.

    It goes on until it is closed (`contextlib.aclosing`). One that led shortly may be left out.
    """
    async with aclosing(_entries(coordinator, PREFIX + name)) as entries:
        async for entry in entries:
            yield Leader(entry.value, entry.created) if entry else None


async def _vacancy(coordinator: Coordinator, key: str, lease: Lease | None) -> Entry | None:
    """Wait until nobody else holds a name; return what is there with this lease."""
    async with aclosing(_entries(coordinator, key)) as entries:
        async for entry in entries:
            if entry is None or (lease and entry.lease == lease.id):
                return entry
    raise AssertionError("it goes on")


async def _entries(coordinator: Coordinator, key: str) -> AsyncGenerator[Entry | None, None]:
    """Yield what a name has now, and after each change, as far as they are known."""
    setbacks = Setbacks(f"the watch of {key!r}")
    while True:
        try:
            listing = await coordinator.list(key)
            yield next((entry for entry in listing.entries if entry.key == key), None)
            async with aclosing(coordinator.watch(key, listing.revision + 1)) as batches:
                async for batch in batches:
                    for change in batch:
                        if change.key == key:
                            yield change.entry
                    setbacks.worked()
        except CompactedError:
            continue
        except FAULTS as error:
            await coordinator.pace.sleep(setbacks.failed(error))
