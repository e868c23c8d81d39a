"""A master or its standby, whichever an election says: the same program on two hosts or more.

    await serve_member(config, MemberConfig(etcd="10.0.0.9:2379"), secret, on_ready, stop)

One member leads for as long as its lease in etcd lasts, and answers no longer than that (`Fence`).
The others follow it. When its lease is over they campaign, but only who may lead does: who led
last, or who has a copy of that one's journals from which nothing is missing that was ever answered.
Which that is needs no more than this: changes wait for the one standby that counts (`counting`),
and that one is told so with each reply, and in which era. Who led last is written in etcd by every
leader, before it answers.

A leader that is to go on without the standby that counted begins another era in etcd, on condition
that it still leads. So either that standby may not lead any more, or it may and the leader does not
go on; both cannot be, whichever of them is cut off from etcd, and whenever that happens.

Each says in etcd where it is, for as long as it runs: so clients and workers that know the etcd
know all members.

Where nobody may lead nobody does: better no pool than one that has forgotten. That is so while the
last leader and its standby are both away.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec

from mooncake_store.coordination.access import read_access
from mooncake_store.coordination.base import FAULTS, Put
from mooncake_store.coordination.directory import LEADER, MEMBERS, Place
from mooncake_store.coordination.election import campaign, leaders
from mooncake_store.coordination.etcd import EtcdCoordinator
from mooncake_store.credentials import gate_of, sealing
from mooncake_store.endpoint import split_addresses, split_etcd
from mooncake_store.journal.origin import Origin
from mooncake_store.master.ahead import Ahead
from mooncake_store.master.kept_files import unusable, write_whole
from mooncake_store.master.registers import RegisterFile
from mooncake_store.master.running import lead
from mooncake_store.master.seats import MASTER
from mooncake_store.master.state_directory import held, read_kept
from mooncake_store.masters import Masters
from mooncake_store.program.fence import Fence
from mooncake_store.program.logs import StateLog
from mooncake_store.standby.mirror import is_exact
from mooncake_store.standby.renewing import copied_shards, settle
from mooncake_store.standby.service import Desk, Standby, number_of, state_path
from mooncake_store.wire.cluster import CLUSTER
from transfer_engine.errors import ConfigError, LeaseExpiredError, UnavailableError
from transfer_engine.lasting import Setbacks
from transfer_engine.rpc.address import Address, is_loopback
from transfer_engine.rpc.server import Server
from transfer_engine.wire.cold import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Callable

    from mooncake_store.config.member import MemberConfig
    from mooncake_store.config.settings import MasterConfig
    from mooncake_store.coordination.base import Coordinator
    from mooncake_store.coordination.election import Leader, Leadership
    from mooncake_store.coordination.leases import Lease
    from transfer_engine.wire.keyring import Secret

__all__ = ["serve_member"]

log = logging.getLogger(__name__)

LED, DROPPED = "led", "dropped"
"""Names in etcd: who led last, and which standby was dropped last. The revision of that is the era:
only what was said in it of a copy is worth anything."""
FOLLOWED = "followed"
"""The file with the number of whom a member follows or followed."""
LEASE_S = 3
PRESENCE_S = 10
"""For how long a member that was killed is still said to be there."""
LOOK_S = 0.5
FENCE_S = 0.05
_WILDCARDS = ("0.0.0.0", "::", "")


class _Office:
    """What a member leads by (`Election`)."""

    def __init__(
        self,
        coordinator: Coordinator,
        leadership: Leadership,
        era: int,
        grace_s: float,
        fence: Fence,
    ) -> None:
        self.fence = fence
        self.era = era
        self.grace_s = grace_s
        self._coordinator = coordinator
        self._leadership = leadership
        self._unsure = False

    async def settle(self) -> None:
        """Find out which era this is, since an answer was lost: it may also come to be later."""
        if self._unsure:
            self.era = await _era(self._coordinator)

    async def advance(self, number: int) -> None:
        """Begin an era without a standby. Raises UnavailableError where this may not have been."""
        value = f"{number:016x}".encode()
        try:
            era = await self._coordinator.change(
                Put(DROPPED, value), given=[self._leadership.still]
            )
        except (*FAULTS, LeaseExpiredError):
            self._unsure = True
            raise
        if era is None:
            raise UnavailableError("this master leads no more", operation="drop")
        self.era, self._unsure = era, False


class _Term:
    """What is made before it: its end, and the processes that know of that."""

    def __init__(self, config: MasterConfig, secret: Secret | None) -> None:
        self.fence = Fence.make()
        self.ahead = Ahead(config, secret, self.fence)

    async def close(self) -> None:
        """Let no answer leave any more."""
        self.fence.open_until(0)
        await self.ahead.forget_all()
        self.fence.close()


class _Watch:
    """Who leads, as far as it is known."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._news = asyncio.Event()
        self.known = asyncio.Event()
        self.latest: Leader | None = None

    async def run(self) -> None:
        """Go on until cancelled."""
        async with aclosing(leaders(self._coordinator, LEADER)) as news:
            async for who in news:
                self.latest = who
                self.known.set()
                self._news.set()
                self._news = asyncio.Event()

    async def other_than(self, seen: Leader | None) -> None:
        """Return when somebody else leads, or nobody."""
        while self.latest == seen:
            await self._news.wait()


class _Member:
    def __init__(
        self,
        config: MasterConfig,
        coordinator: Coordinator,
        secret: Secret | None,
        on_ready: Callable[[dict[str, Any]], object],
        stop: asyncio.Event,
        grace_s: float,
    ) -> None:
        self._config = config
        self._grace_s = grace_s
        self._coordinator = coordinator
        secret = self._secret = sealing(config, secret)
        self._on_ready = on_ready
        self._stop = stop
        self._path = state_path(config)
        self._place = Place(str(Address(config.host, config.port)), number_of(self._path))
        self._watch = _Watch(coordinator)
        self._states = StateLog(log)
        self._next = _Term(config, secret)
        self._ending = asyncio.ensure_future(self._end())

    async def run(self) -> None:
        """Lead and follow until told to stop. Raises what keeps it from both for good."""
        try:
            await _first_of(asyncio.ensure_future(self._watch.known.wait()), self._ending)
            while not self._ending.done():
                seen = self._watch.latest
                place = None if seen is None else _place_of(seen)
                if place is not None and place.number != self._place.number:
                    await self._follow(seen, place)
                elif await self._era_to_lead() is not None:
                    await self._try_to_lead(seen)
                else:
                    waiting = asyncio.ensure_future(self._watch.other_than(seen))
                    await _first_of(waiting, self._ending, timeout_s=LOOK_S)
            self._ending.result()
        finally:
            self._ending.cancel()
            await asyncio.gather(self._ending, return_exceptions=True)
            await self._next.close()

    async def _end(self) -> None:
        """Return when told to stop; raise what watching, or saying where this is, fails with."""
        works = [
            asyncio.ensure_future(self._watch.run()),
            asyncio.ensure_future(self._say_where()),
        ]
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await _first_of(stopping, *works)
            for work in works:
                if work.done():
                    work.result()
        finally:
            for each in (stopping, *works):
                each.cancel()
            await asyncio.gather(stopping, *works, return_exceptions=True)

    async def _say_where(self) -> None:
        """Have in etcd where this member is, again whenever that is gone."""
        setbacks = Setbacks("the presence of this member in etcd")
        name, value = f"{MEMBERS}{self._place.number:016x}", msgspec.json.encode(self._place)
        lease: Lease | None = None
        while True:
            try:
                if lease is None or not lease.held():
                    lease = await self._coordinator.lease(PRESENCE_S)
                await self._coordinator.put(name, value, lease=lease.id)
            except (*FAULTS, LeaseExpiredError) as error:
                await asyncio.sleep(setbacks.failed(error))
                continue
            setbacks.worked()
            await lease.ended()

    async def _follow(self, seen: Leader | None, place: Place) -> None:
        """Be the standby of a leader for as long as it leads."""
        config = self._config
        masters = Masters(split_addresses(place.address))
        standby = Standby(config, masters, self._secret, self._next.ahead)
        desk = Desk(standby, elected=True)
        server = Server(CLUSTER, desk.handle, **gate_of(self._config, self._secret))
        other = asyncio.ensure_future(self._watch.other_than(seen))
        begun = asyncio.ensure_future(self._begin(standby, place))
        try:
            await server.listen(config.host, config.port)
            self._states.change("this member", "follows")
            self._on_ready({"address": self._place.address, "leads": False, "of": place.address})
            await _first_of(begun, other, self._ending)
            if begun.done():
                begun.result()
                await _first_of(other, self._ending)
        finally:
            for each in (begun, other):
                each.cancel()
            await server.stop(grace_s=0.5)
            await standby.close()
            if standby.shards:
                self._config = msgspec.structs.replace(config, shards=standby.shards)

    async def _begin(self, standby: Standby, place: Place) -> None:
        await standby.begin(self._place.address)
        # Before anything of it can be exact: whose copy this is.
        await asyncio.to_thread(self._note, place.number)

    def _note(self, number: int) -> None:
        try:
            write_whole(self._path / FOLLOWED, f"{number:016x}\n".encode())
        except OSError as error:
            raise unusable(self._path, error) from error

    async def _era_to_lead(self) -> int | None:
        """Return the era in which it may lead, having all that was ever answered; else None.

        Also None where etcd does not say who led last.
        """
        try:
            led, era = await self._coordinator.get(LED), await _era(self._coordinator)
        except FAULTS:
            return None
        number = 0 if led is None else int(led.value, 16)
        if number in (0, self._place.number):
            return era
        if await asyncio.to_thread(self._has_all_of, number, era):
            return era
        why = f"member {number:016x} led last, and what that answered may be lacking here"
        self._states.change("this member", "may not lead", why, logging.WARNING)
        return None

    def _has_all_of(self, number: int, era: int) -> bool:
        """Whether this is a copy of that member's journals that lacks nothing."""
        try:
            if int((self._path / FOLLOWED).read_text(encoding="ascii"), 16) != number:
                return False
            kept, registers = read_kept(self._path), RegisterFile(self._path).read()
            count = copied_shards(self._path)
        except (OSError, ValueError):
            return False
        if kept is None or registers is None or not count:
            return False
        owners = registers.hosts or (MASTER,) * count  # what others lead needs no copy here
        return all(
            is_exact(self._path / f"shard-{at}", Origin(kept.cluster, at, count), era)
            for at in range(count)
            if owners[at] == MASTER
        )

    async def _try_to_lead(self, seen: Leader | None) -> None:
        """Campaign until this member has led, or another one leads."""
        value = msgspec.json.encode(self._place)
        trying = asyncio.ensure_future(campaign(self._coordinator, LEADER, value, ttl_s=LEASE_S))
        other = asyncio.ensure_future(self._watch.other_than(seen))
        await _first_of(trying, other, self._ending)
        if not trying.done() and not self._ending.done():
            # It may be this very campaign that was won.
            await _first_of(trying, self._ending, timeout_s=LOOK_S)
        other.cancel()
        if not trying.done():
            trying.cancel()
            await asyncio.wait({trying})
            return
        leadership = trying.result()
        try:
            # Looked at once more: somebody may have led since, or begun another era. From now on
            # nobody else can.
            era = await self._era_to_lead()
            if era is not None and await self._say_who_leads(leadership):
                await self._lead(leadership, era)
        finally:
            await leadership.resign()

    async def _say_who_leads(self, leadership: Leadership) -> bool:
        number = f"{self._place.number:016x}".encode()
        try:
            done = await self._coordinator.change(Put(LED, number), given=[leadership.still])
        except (*FAULTS, LeaseExpiredError) as error:
            log.warning("etcd could not be told who leads: %s", error)
            return False
        return done is not None

    async def _lead(self, leadership: Leadership, era: int) -> None:
        term, self._next = self._next, _Term(self._config, self._secret)
        fence, over = term.fence, asyncio.Event()
        office = _Office(self._coordinator, leadership, era, self._grace_s, fence)
        fence.open_until(leadership.leading_until_ns())
        works = [
            asyncio.ensure_future(self._keep_open(fence, leadership)),
            asyncio.ensure_future(self._notice_the_end(leadership, over)),
        ]
        self._states.change("this member", "leads", f"epoch {leadership.epoch}", logging.WARNING)
        try:
            await lead(
                self._config,
                self._secret,
                lambda facts: self._on_ready({**facts, "leads": True}),
                over,
                office,
                ahead=term.ahead,
            )
        finally:
            for work in works:
                work.cancel()
            await term.close()

    async def _keep_open(self, fence: Fence, leadership: Leadership) -> None:
        while True:
            fence.open_until(leadership.leading_until_ns())
            await asyncio.sleep(FENCE_S)

    async def _notice_the_end(self, leadership: Leadership, over: asyncio.Event) -> None:
        ended = asyncio.ensure_future(leadership.ended())
        await _first_of(ended, self._ending)
        if ended.done():
            log.warning("this member leads no more")
        over.set()


def _place_of(seen: Leader) -> Place:
    try:
        return msgspec.json.decode(seen.value, type=Place)
    except MALFORMED:
        raise ConfigError(
            "who leads under this name in the etcd is no member of a pool",
            advice="name the pool otherwise with --name",
        ) from None


async def _era(coordinator: Coordinator) -> int:
    dropped = await coordinator.get(DROPPED)
    return 0 if dropped is None else dropped.revision


async def _first_of(*ends: asyncio.Future[Any], timeout_s: float | None = None) -> None:
    await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)


async def serve_member(
    config: MasterConfig,
    member: MemberConfig,
    secret: Secret | None,
    on_ready: Callable[[dict[str, Any]], object],
    stop: asyncio.Event,
) -> None:
    """Be a member of the pool that has this name in an etcd, until told to stop.

    As its leader it goes on without a standby that is silent for its grace. Raises ConfigError for
    settings that a member cannot have, AuthError where the etcd lets it not do what it must.
    """
    if config.host in _WILDCARDS or not config.port:
        raise ConfigError(
            f"{config.host}:{config.port} is no address that the other members can be told",
            advice="name with --host and --port where this one is reached",
        )
    etcd = [Address(*place) for place in split_etcd(member.etcd)]
    if is_loopback(config.host) and not all(is_loopback(each.host) for each in etcd):
        raise ConfigError(
            f"others would be told {config.host}:{config.port}, where each of them is itself",
            advice="name with --host an address of this machine that they reach",
        )
    if config.journal not in ("written", "replicated"):
        raise ConfigError(
            f"members keep what a standby needs, not --journal {config.journal}",
            advice="leave that out",
        )
    config = msgspec.structs.replace(config, journal="replicated")
    path = state_path(config)
    try:
        with held(path):
            settle(path)  # before it is looked at whether what is there may lead
    except OSError as error:
        raise unusable(path, error) from error
    places, access = [*map(str, etcd)], read_access(member.etcd_file)
    async with EtcdCoordinator(places, member.name, access=access) as coordinator:
        grace_s = member.standby_grace_s
        await _Member(config, coordinator, secret, on_ready, stop, grace_s).run()
