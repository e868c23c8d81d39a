"""The standbys of a pool as its leader sees them: who follows, who counts, who counts no more.

    standbys = Standbys(election)       # or of nobody's election
    standbys.begin(shards)
    await standbys.look()               # go on without who was silent for too long, if elected
    await standbys.drop(Drop(number))   # because a person says so

The standby that counts has all that was answered, so it may lead, and nothing may be answered
without it. To go on without it, an era begins. Where leaders are elected the election has to agree
first, and does so only while this one leads: from then on whoever was told in an era of before that
it has everything may not lead. Then the shards hear of the era, one by one: each answers without
the standby of before only once it has heard, and whichever shard hears last, nobody else can lead
meanwhile. Where nobody is elected a person's word takes the place of the election.

Changes wait for another standby at once if one follows that has caught up everywhere; so they need
not stand still for long then, and less silence will do. Where none does they wait for nobody if
leaders are elected, and are refused if they are not, until one does.

Shards that other hosts lead are no business of those standbys, nor of the election: who may lead
them is written down with the registers. Changes of each wait for a host that copies it, which a
person lets lead, or drops.

Cost: one round trip to the shards every LOOK_S, where leaders are elected.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Protocol

from mooncake_store.master.all_shards import AllShards
from mooncake_store.master.bounds import ADDRESSES_OF_STANDBYS_MAX, check_label
from mooncake_store.master.counting import Counted, Term
from mooncake_store.program.logs import StateLog
from mooncake_store.wire.standby import (
    STANDBYS,
    Drop,
    Dropped,
    ShardStandbys,
    StandbyEntry,
    StandbysRequest,
)
from transfer_engine.errors import ConfigError, InvalidArgumentError, StoreError, UnavailableError
from transfer_engine.rpc.address import Address

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from mooncake_store.master.all_shards import Links
    from mooncake_store.master.shard_link import ShardLink
    from mooncake_store.program.fence import Fence
    from mooncake_store.wire.standby import ShardStandby
    from transfer_engine.rpc.serving import Connection

__all__ = ["Election", "Standbys"]

log = logging.getLogger(__name__)

LOOK_S = 0.5
FRESH_MS = 3000
"""Who took nothing for longer does not follow: standbys ask every two seconds at least."""
SWIFT_MS, AWAKE_MS = 2000, 1000
"""For how long the standby that counts may be silent where another one can take its place, and for
how long that one: what held up the leader itself makes all of them silent."""
_ANYWHERE = ("0.0.0.0", "::")


class Election(Protocol):
    """What lets this one lead, for a time."""

    fence: Fence
    era: int
    grace_s: float
    """For how long the standby that counts may be silent; 0: for ever."""

    async def settle(self) -> None:
        """Find out in which era this is, where that is not known. Raises StoreError."""
        ...

    async def advance(self, number: int) -> None:
        """Begin an era without a standby, if this one leads. Raises StoreError where it may not
        have begun."""
        ...


class Standbys:
    """Of one leader; for its event loop. Before `begin` there are none."""

    def __init__(self, election: Election | None = None) -> None:
        self._election = election
        self._counted = Counted(0, 0 if election is None else election.era)
        self._shards = AllShards(())
        self._distant: Links = ()
        self._addresses: dict[int, str] = {}
        self._watching: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()
        self._states = StateLog(log)

    @property
    def fence(self) -> Fence | None:
        """Until when answers may leave, where that is not for ever."""
        return None if self._election is None else self._election.fence

    def term(self) -> Term | None:
        """Return what a shard that starts now may do; None: what it did before."""
        election = self._election
        return None if election is None else Term(election.fence, self._counted)

    def begin(self, shards: AllShards, distant: Links = ()) -> None:
        """See who follows these, and the ones that other hosts lead."""
        self._shards, self._distant = shards, distant
        if self._election is not None:
            self._watching = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> None:
        """Look no more. Idempotent."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def met(self, connection: Connection, number: int, address: str) -> None:
        """Note where a standby listens, as this host reaches it; all that say no number are one."""
        check_label("address", address)
        try:
            said = Address.parse(address)
            if said.host in _ANYWHERE:
                said = Address(Address.parse(connection.peer).host, said.port)
        except ConfigError:
            return
        self._addresses.pop(number, None)
        self._addresses[number] = str(said)
        if len(self._addresses) > ADDRESSES_OF_STANDBYS_MAX:  # those that follow say it often
            del self._addresses[next(iter(self._addresses))]

    # -- who is waited for

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.look()
            except StoreError as error:
                self._states.change("standbys", "not looked after", error.what, logging.WARNING)
            else:
                self._states.change("standbys", "looked after")

    async def look(self) -> None:
        """Go on without who was silent for too long, and tell shards that did not hear of an era.

        Raises StoreError, and is to be tried again.
        """
        election = self._election
        assert election is not None
        async with self._lock:
            await election.settle()
            told = await self._shards.standbys()
            silent = _silent(told, election.grace_s * 1000)
            for number in silent:
                log.warning("the standby %016x is silent: it counts no more", number)
            if silent:
                await election.advance(min(silent))
            if silent or any(each.era != election.era for each in told):
                await self._count(told, election.era, silent)

    async def drop(self, request: Drop) -> Dropped:
        """Go on without a standby that is gone for good. Raises StoreError."""
        number, election = request.number, self._election
        async with self._lock:
            told = await self._shards.standbys()
            copied = await self._told_elsewhere()
            distant = [shard for _, shard in copied]
            counting = sorted({each.number for each in (*told, *distant) if each.number})
            if number not in counting:
                those = ", ".join(f"{each:016x}" for each in counting)
                raise InvalidArgumentError(
                    f"changes do not wait for the standby {number:016x}",
                    operation="drop",
                    advice=f"they wait for {those}" if those else "they wait for none",
                )
            if any(_follows(shard, number) for shard in (*told, *distant)):
                raise UnavailableError(
                    f"the standby {number:016x} follows",
                    operation="drop",
                    advice="stop it first; then changes wait for another one that follows",
                )
            log.warning("the standby %016x counts no more: a person said so", number)
            copied = [(link, shard) for link, shard in copied if shard.number == number]
            if copied:
                return await _drop_copy(copied, number)
            if election is None:
                era = 1 + max(each.era for each in told)
            else:
                await election.advance(number)
                era = election.era
            await self._count(told, era, {number})
        return Dropped(self._counted.number, election is not None)

    async def _count(
        self, told: Sequence[ShardStandbys], era: int, without: Collection[int]
    ) -> None:
        """Tell all shards for whom changes wait in an era."""
        self._counted = Counted(_successor(told, without), era)
        await self._shards.count(self._counted)
        if self._counted.number:
            log.warning("the standby %016x counts from now on", self._counted.number)

    # -- what is told of them

    async def counting(self) -> set[int]:
        """Return for whom changes wait."""
        return {shard.number for shard in await self._shards.standbys()} - {0}

    async def told(self) -> dict[str, Any]:
        """Return what a status says of standbys."""
        own = await self._shards.standbys()
        distant = [shard for _, shard in await self._told_elsewhere()]
        told = [*own, *distant]
        by_number: dict[int, list[ShardStandbys]] = {}
        for group in (own, *([each] for each in distant)):
            numbers = {each.number for shard in group for each in shard.standbys}
            for number in numbers | ({shard.number for shard in group} - {0}):
                by_number.setdefault(number, []).extend(group)
        return {
            "standbys": tuple(
                self._entry(number, group) for number, group in sorted(by_number.items())
            ),
            "refusing": next((shard.refusing for shard in told if shard.refusing), ""),
            "waiting": sum(shard.waiting for shard in told),
        }

    async def _told_elsewhere(self) -> list[tuple[ShardLink, ShardStandbys]]:
        """What shards say that other hosts lead; of a host that is away nothing."""
        found = []

        async def ask(link: ShardLink) -> None:
            with contextlib.suppress(UnavailableError):
                found.append((link, await link.ask(STANDBYS, StandbysRequest())))

        await asyncio.gather(*map(ask, self._distant))
        return found

    def _entry(self, number: int, told: Sequence[ShardStandbys]) -> StandbyEntry:
        found = [_of(shard, number) for shard in told]
        there = [each for each in found if each is not None]
        counts = [shard.number == number != 0 for shard in told]
        silent_ms = [each.silent_ms for each in there]
        silent_ms += [shard.silent_ms for shard, own in zip(told, counts, strict=True) if own]
        return StandbyEntry(
            number,
            self._addresses.get(number, ""),
            counts=any(counts),
            follows=None not in found,
            exact=all(
                shard.exact if own else each is not None and each.exact
                for shard, each, own in zip(told, found, counts, strict=True)
            ),
            behind_words=-1 if len(there) < len(told) else sum(e.behind_words for e in there),
            silent_ms=max(silent_ms),
            objects=sum(shard.objects for shard in told),
        )


def _of(shard: ShardStandbys, number: int) -> ShardStandby | None:
    """The connection of a standby to a shard; of several the one that was heard last."""
    own = (each for each in shard.standbys if each.number == number)
    return min(own, key=lambda each: each.silent_ms, default=None)


async def _drop_copy(copied: Sequence[tuple[ShardLink, ShardStandbys]], number: int) -> Dropped:
    """Let changes of shards on other hosts wait no more for a host that copied them."""
    successor = 0
    for link, shard in copied:
        successor = _successor([shard], {number})
        await AllShards([link]).count(Counted(successor, shard.era + 1))
    return Dropped(successor, False)


def _follows(shard: ShardStandbys, number: int) -> bool:
    found = _of(shard, number)
    return found is not None and found.silent_ms <= FRESH_MS


def _silent(told: Sequence[ShardStandbys], grace_ms: float) -> set[int]:
    """Those that count and were silent for too long; never, where the time is 0."""
    found = set()
    for shard in told:
        if shard.number and grace_ms:
            swift = _successor(told, {shard.number}, AWAKE_MS)
            if shard.silent_ms > (min(SWIFT_MS, grace_ms) if swift else grace_ms):
                found.add(shard.number)
    return found


def _successor(
    told: Sequence[ShardStandbys], without: Collection[int], silent_ms: int = FRESH_MS
) -> int:
    """The standby that changes can wait for at once, 0 for none; rather one that counts already."""
    counting = {shard.number for shard in told}
    able = []
    for number in {each.number for shard in told for each in shard.standbys} - {0, *without}:
        found = [_of(shard, number) for shard in told]
        if all(each and each.caught_up and each.silent_ms <= silent_ms for each in found):
            able.append(number)
    return max(able, key=lambda number: (number in counting, number), default=0)
