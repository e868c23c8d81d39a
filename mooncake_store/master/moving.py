"""Moving a shard to another host, while clients use it.

    moves.begin(Move(5, "10.0.0.6:50061"))       # or how the one that runs stands

The other host copies the shard first, as a standby does, which takes as long as it takes and
disturbs nobody. Then the shard rests: it answers nobody, so the copy comes to have everything, its
leases included. That the other host is the owner is written down, and it leads from its copy. Up to
there any failure lets the shard go on where it was; from there on it is the other's, also after a
start of either. Whoever asks again after any of it finds the rest to be done.

A host that is gone for good is not asked. What leads then is a copy that was made before, which may
lack the last moments, and not before the time is over in which the former might still answer.

A standby that could lead in place of the master has to know who leads what before anybody acts on
it: it would lead from its own copy what another host has gone on with. So it is told first, and a
shard whose move fails then goes on only once it has heard of that as well.

One move at a time. While the shard rests its clients wait: as long as a process takes to start.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from mooncake_store.master.farm import RESTS
from mooncake_store.master.hosts import FIRST, FIRST_STAYS
from mooncake_store.master.seats import MASTER
from mooncake_store.wire.hosts import (
    COPY,
    LEAD,
    YIELD,
    Copy,
    CopyState,
    Lead,
    Move,
    MoveState,
    Yield,
)
from transfer_engine.errors import InvalidArgumentError, StoreError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mooncake_store.master.farm import Farm
    from mooncake_store.master.hosts import Host, Hosts
    from mooncake_store.master.seats import Seat, Seats

__all__ = ["HERE", "Moves"]

log = logging.getLogger(__name__)

HERE = "master"
"""What people call the host of the master."""
POLL_S = 0.05
NEAR_WORDS = 1 << 16
"""So little is left of a copy that the shard may rest for it."""
SILENT_S = 5.0
"""How long the shard may not be heard where it is copied to."""
REST_S = 5.0
STOP_S = 1.0
LEAD_S = 60.0


class Moves:
    """Belongs to the event loop of the master's cluster.

    `lock` is held while the cluster is not to change, `keep()` writes the registers down,
    `announce()` tells them to the standby that could lead, and `agree()` agrees with all shards on
    what there is.
    """

    def __init__(
        self,
        seats: Seats,
        hosts: Hosts,
        farm: Farm,
        lock: asyncio.Lock,
        keep: Callable[[], Awaitable[None]],
        announce: Callable[[], Awaitable[None]],
        agree: Callable[[], Awaitable[None]],
        end_own: Callable[[int], Awaitable[None]],
    ) -> None:
        self._seats = seats
        self._hosts = hosts
        self._farm = farm
        self._lock = lock
        self._keep = keep
        self._announce = announce
        self._agree = agree
        self._end_own = end_own
        self._states: dict[int, MoveState] = {}
        self._running: asyncio.Task[None] | None = None

    def begin(self, request: Move) -> MoveState:
        """Begin to move a shard, or only say how its last move stands. Raises StoreError."""
        shard = request.shard
        if shard >= len(self._seats):
            raise InvalidArgumentError(
                f"there is no shard {shard}, but {len(self._seats)} from 0 on"
            )
        stays = shard == FIRST and self._hosts.facts.journal == "replicated"
        if stays and request.to not in ("", HERE):
            raise InvalidArgumentError(FIRST_STAYS)
        if not request.to:
            return self._states.get(shard, MoveState("none"))
        if self._running is not None and not self._running.done():
            raise UnavailableError("another shard is being moved", advice="wait for that one")
        target = None if request.to == HERE else self._hosts.at(request.to)
        self._states[shard] = MoveState("copying")
        self._running = asyncio.ensure_future(self._carry_out(shard, target, request.lost))
        return self._states[shard]

    async def stop(self) -> None:
        """Move nothing any more. Idempotent."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait({self._running}, timeout=STOP_S)

    async def _carry_out(self, shard: int, target: Host | None, lost: bool) -> None:
        seat, number = self._seats[shard], MASTER if target is None else target.number
        try:
            if seat.owner == number:
                if not seat.taken:
                    await self._lead(seat, target, incomplete=lost)
            elif lost:
                await self._take_over(seat, target, number)
            else:
                await self._hand_over(seat, target, number)
        except StoreError as error:
            log.error("shard %d was not moved: %s", shard, error)
            self._states[shard] = MoveState("failed", why=str(error))
        else:
            paused_ms = self._states[shard].paused_ms
            self._states[shard] = MoveState("done", paused_ms=paused_ms)

    # -- to a host, or here

    async def _copy(self, target: Host | None, shard: int, source: str) -> CopyState:
        if target is None:
            return await self._farm.copy(shard, source, soon=True)
        request = Copy(self._hosts.facts.run, shard, source, soon=True)
        return await target.ask(COPY, request, LEAD_S)

    async def _lead(self, seat: Seat, target: Host | None, *, incomplete: bool = False) -> None:
        if target is None:
            address = await self._farm.lead(seat.shard, incomplete=incomplete)
            seat.take(self._farm.link(seat.shard), address)
            return
        request = Lead(self._hosts.facts.run, seat.shard, True, incomplete)
        led = await target.ask(LEAD, request, LEAD_S)
        self._hosts.take(target, seat.shard, led.address)

    async def _end(self, owner: int, shard: int) -> None:
        """Let the former owner end the shard; one that cannot be reached does when it joins."""
        try:
            if owner == MASTER:
                await self._end_own(shard)
            elif (host := self._hosts.of(owner)) is not None:
                await host.ask(LEAD, Lead(self._hosts.facts.run, shard, False), LEAD_S)
        except StoreError as error:
            log.warning("shard %d: its former host does not end it yet: %s", shard, error)

    # -- moving

    async def _hand_over(self, seat: Seat, target: Host | None, number: int) -> None:
        shard, source = seat.shard, str(seat.address)
        try:
            await self._copy_most(target, shard, source)
            await self._announce()  # a standby that does not hear now would hold the shard up
        except BaseException:
            await self._forget_copy(target, shard)
            raise
        began, former = time.monotonic(), seat.owner
        self._states[shard] = MoveState("handing over")
        async with self._lock:
            try:
                await seat.ask(YIELD, Yield(True))
                await self._copy_all(target, shard, source)
                await self._give(seat, number)
            except Exception:  # who is to stop leaves it to whoever leads next
                await self._go_on(seat, target)
                raise
            # From here on it is the other's, whatever fails.
            seat.leave()
            try:
                await self._lead(seat, target)
            except BaseException:
                await self._end(former, shard)
                raise
        paused_ms = int((time.monotonic() - began) * 1000)
        self._states[shard] = MoveState("handing over", paused_ms=paused_ms)
        log.info("shard %d leads at %s now; it rested for %d ms", shard, seat.address, paused_ms)
        await self._end(former, shard)
        await self._agree()

    async def _give(self, seat: Seat, number: int) -> None:
        """Let a shard that nobody is answered by be somebody else's, or raise and let it be."""
        former, seat.owner, seat.pending = seat.owner, number, True
        try:
            await self._announce()
            await self._keep()
        except Exception:
            seat.owner = former
            await self._announce_surely(seat)
            raise
        finally:
            seat.pending = False

    async def _announce_surely(self, seat: Seat) -> None:
        """Return when the standby that could lead knows whose a shard is still."""
        while True:
            try:
                await self._announce()
            except StoreError as error:
                log.error("shard %d rests until its standby has heard: %s", seat.shard, error)
                await asyncio.sleep(POLL_S)
            else:
                return

    async def _copy_most(self, target: Host | None, shard: int, source: str) -> None:
        """Return when the copy is whole, and has nearly all."""
        best, since = -1, time.monotonic()
        while True:
            copy = await self._copy(target, shard, source)
            behind = copy.head - copy.position
            self._states[shard] = MoveState("copying", behind, copy.why)
            if copy.state == "following" and behind < NEAR_WORDS:
                return
            if copy.position != best or 0 <= copy.silent_ms < SILENT_S * 1000:
                best, since = copy.position, time.monotonic()
            if copy.state == "failing" or time.monotonic() > since + SILENT_S:
                raise UnavailableError(
                    f"shard {shard} cannot be copied there: {copy.why}",
                    advice="where its host is gone for good, and the other has a copy: --lost",
                )
            await asyncio.sleep(POLL_S)

    async def _copy_all(self, target: Host | None, shard: int, source: str) -> None:
        """Return when the copy of a shard that rests has everything."""
        until = time.monotonic() + REST_S
        while True:
            copy = await self._copy(target, shard, source)
            if copy.state == RESTS:
                return
            if time.monotonic() > until:
                raise UnavailableError(
                    f"the copy of shard {shard} did not come to its end in time: {copy.why}",
                    elapsed_s=REST_S,
                    advice="move it again when less is written, or the network is quicker",
                )
            await asyncio.sleep(POLL_S / 10)

    async def _go_on(self, seat: Seat, target: Host | None) -> None:
        """Let a shard go on where it was."""
        try:
            await seat.ask(YIELD, Yield(False))
        except StoreError as error:
            log.error(
                "shard %d rests, and does not hear that it is to go on: %s", seat.shard, error
            )
        await self._forget_copy(target, seat.shard)

    async def _forget_copy(self, target: Host | None, shard: int) -> None:
        try:
            await self._copy(target, shard, "")
        except StoreError as error:
            log.warning("the copy of shard %d is not given up: %s", shard, error)

    async def _take_over(self, seat: Seat, target: Host | None, number: int) -> None:
        """Let a copy lead whose shard was lost with its host."""
        if seat.owner == MASTER:
            raise InvalidArgumentError(f"shard {seat.shard} leads here, so it is not lost")
        wait_s = self._hosts.granted_s(seat.owner)
        if wait_s:
            log.warning("shard %d may be answered for %.1f s more", seat.shard, wait_s)
            await asyncio.sleep(wait_s)
        async with self._lock:
            await self._give(seat, number)
            seat.leave()
            await self._lead(seat, target, incomplete=True)
        await self._agree()
