"""The hosts that lead shards for a master elsewhere, as that sees them.

A host says which shards it would like; what it leads is decided here, written down with the
registers, and told to it. It is granted time in which its shards may answer, again and again, so
that a host which is cut off is silent before anybody else leads in its place. What a shard is told
(`ADMIN`) goes to its host over one connection.

Cost: a request a second and host.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mooncake_store.master.seats import MASTER
from mooncake_store.wire.hosts import (
    HOST,
    RELAY,
    HostEntry,
    HostsReply,
    Joined,
    OwnShard,
    Relay,
    Stayed,
)
from transfer_engine.errors import ConfigError, InvalidArgumentError, UnavailableError
from transfer_engine.rpc.address import Address
from transfer_engine.rpc.aio import AsyncClient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from mooncake_store.master.seats import Seats
    from mooncake_store.master.shard_link import ReplyT, RequestT
    from mooncake_store.program.fence import Fence
    from mooncake_store.wire.hosts import HostCopy, Join, Serving, Stay
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.keyring import Secret
    from transfer_engine.wire.registry import Operation

__all__ = ["FIRST", "FIRST_STAYS", "Host", "Hosts", "OwnFacts"]

log = logging.getLogger(__name__)

GRANTED_MS = 10_000
"""How long shards on another host may answer without having heard of their master."""
HOSTS_MAX = 64
FIRST = 0
"""The shard that decides for which standby changes of all beside a master wait, and so stays..."""
FIRST_STAYS = "at --journal replicated shard 0 leads on the host of its master"
"""...as people are told."""
CALL_S = 5.0
"""What a host does for a shard it does at once, but for starting one."""


@dataclass(frozen=True, slots=True)
class OwnFacts:
    """What hosts are told of their master."""

    cluster: str
    secret: str
    run: int
    journal: str
    settings: bytes
    """Those of the master that all shards have in common."""
    address: str
    split: str = ""
    """Why shards could not be split before this run."""


@dataclass(slots=True)
class Host:
    """One of them, as it joined last."""

    number: int
    address: str
    client: AsyncClient
    copies: tuple[HostCopy, ...] = ()
    """What it copies, as it told last."""
    granted_until: float = 0.0
    """Until when its shards may answer, on the monotonic clock."""
    heard: float = field(default_factory=time.monotonic)

    async def ask(
        self,
        operation: Operation[Cold[RequestT], Cold[ReplyT]],
        request: RequestT,
        timeout_s: float,
    ) -> ReplyT:
        """Return what the host answers."""
        body = operation.request.pack(request)
        return operation.reply.unpack(await self.client.call(operation, body, timeout_s=timeout_s))


class _Distant:
    """A shard on another host, seen from the master."""

    def __init__(self, host: Host, shard: int, run: int) -> None:
        self._host, self._shard, self._run = host, shard, run

    async def ask(
        self, operation: Operation[Cold[RequestT], Cold[ReplyT]], request: RequestT
    ) -> ReplyT:
        """Return the shard's answer to a request of `ADMIN`."""
        body = operation.request.pack(request)
        relay = Relay(self._run, self._shard, operation.opcode, body)
        return operation.reply.unpack((await self._host.ask(RELAY, relay, CALL_S)).body)


class Hosts:
    """Belongs to the event loop of the master's cluster.

    `bases(shard)` says where the slices of a shard begin, `keep()` writes the registers down, and
    `agree()` agrees with all shards on what there is.
    """

    def __init__(
        self,
        seats: Seats,
        secret: Secret | None,
        bases: Callable[[int], list[tuple[int, int]]],
        keep: Callable[[], Awaitable[None]],
        agree: Callable[[], Awaitable[None]],
        fence: Fence | None = None,
    ) -> None:
        """`fence` says until when the master leads, where that is not for ever."""
        self._fence = fence
        self._seats = seats
        self._secret = secret
        self._bases = bases
        self._keep = keep
        self._agree = agree
        self._facts: OwnFacts | None = None
        self._began = False
        self._kept = True
        self._by_number: dict[int, Host] = {}
        self._opened = time.monotonic()

    def open(self, facts: OwnFacts) -> None:
        """Let hosts join from now on."""
        self._facts, self._opened = facts, time.monotonic()

    def begin(self) -> bool:
        """Note that all shards are there; return whether all on other hosts have what they held."""
        self._began = True
        return self._kept

    @property
    def facts(self) -> OwnFacts:
        """What hosts are told; raises UnavailableError before it is known."""
        if self._facts is None:
            raise UnavailableError("the master is starting", advice="try again in a second")
        return self._facts

    def at(self, address: str) -> Host:
        """Return the host that listens there. Raises InvalidArgumentError for an unknown one."""
        for host in self._by_number.values():
            if host.address == address:
                return host
        known = ", ".join(host.address for host in self._by_number.values()) or "none"
        raise InvalidArgumentError(
            f"no host listens at {address}; those that joined: {known}",
            advice="start one there: `mooncake shard serve --of MASTER`",
        )

    def of(self, number: int) -> Host | None:
        """Return the host of a number, if it joined."""
        return self._by_number.get(number)

    def granted_s(self, number: int) -> float:
        """For how long the shards of a host may answer at most, whatever becomes of it."""
        host = self._by_number.get(number)
        # The run before may have granted it time just before it ended.
        until = self._opened + GRANTED_MS / 1000 if host is None else host.granted_until
        return max(0.0, until - time.monotonic())

    async def join(self, request: Join) -> Joined:
        """Answer a host that asks what it leads."""
        facts = self.facts
        if request.number <= MASTER:
            raise InvalidArgumentError(f"no host has the number {request.number}")
        here = {*request.wanted, *self._seats.owned_by(request.number)}
        if facts.journal == "replicated" and FIRST in here:
            raise ConfigError(
                FIRST_STAYS,
                advice="leave that out of --lead; where it leads elsewhere, move it there at "
                "another level first",
            )
        host = self._by_number.get(request.number)
        if host is None or host.address != request.address:
            host = await self._meet(request)
        if self._seats.claim(request.number, request.wanted):
            await self._keep()
        own = [s for s in self._seats.owned_by(request.number) if not self._seats[s].pending]
        return Joined(
            facts.cluster,
            facts.secret,
            facts.run,
            len(self._seats),
            tuple(OwnShard(shard, tuple(self._bases(shard))) for shard in own),
            facts.settings,
            self._grant(host),
            tuple("" if seat.address is None else str(seat.address) for seat in self._seats),
        )

    async def _meet(self, request: Join) -> Host:
        former = self._by_number.get(request.number)
        if former is None and len(self._by_number) >= HOSTS_MAX:
            await self._forget_silent()
        if former is not None and former.granted_until > time.monotonic():
            raise UnavailableError(
                f"host {request.number:016x} was at {former.address} a moment ago",
                advice="it may be at another address once that one is silent; if both run, one "
                "has the state directory of the other",
            )
        self._seats.movable = True
        client = AsyncClient(Address.parse(request.address), HOST, secret=self._secret)
        host = self._by_number[request.number] = Host(request.number, request.address, client)
        if former is not None:
            await former.client.close()
        log.info("host %016x at %s joined", request.number, request.address)
        return host

    async def _forget_silent(self) -> None:
        """Forget the host that is silent for longest, of those that lead nothing and are.

        Raises ConfigError where there is none: all are there, or have to come back.
        """
        silent = [
            host
            for host in self._by_number.values()
            if host.granted_until < time.monotonic() and not self._seats.owned_by(host.number)
        ]
        if not silent:
            raise ConfigError(
                f"a pool has {HOSTS_MAX} hosts for its shards at most, and so many have joined",
                advice="see `mooncake shard list`, and end one that leads nothing",
            )
        host = min(silent, key=lambda each: each.heard)
        log.info("host %016x at %s is forgotten: it is silent", host.number, host.address)
        del self._by_number[host.number]
        await host.client.close()

    def _grant(self, host: Host) -> int:
        # No longer than this master leads: in place of another one it gives no orders either.
        granted_ms = GRANTED_MS if self._fence is None else min(GRANTED_MS, self._fence.left_ms)
        host.heard = time.monotonic()
        host.granted_until = host.heard + granted_ms / 1000
        return granted_ms

    async def serving(self, request: Serving) -> Stayed:
        """Hear where the shards of a host serve."""
        facts, host = self.facts, self._by_number.get(request.number)
        if host is None or request.run != facts.run:
            return Stayed(False, 0)
        for served in request.served:
            if served.shard >= len(self._seats):
                raise InvalidArgumentError(f"there is no shard {served.shard}")
            seat = self._seats[served.shard]
            if seat.owner != host.number or seat.pending:
                return Stayed(False, 0)  # it was moved meanwhile
            if not served.kept and self._began:
                raise ConfigError(
                    f"shard {served.shard} of the host at {host.address} has lost its objects",
                    advice="start the pool anew, or let a host lead that has a copy: "
                    "`mooncake shard move --lost`",
                )
            self._kept = self._kept and served.kept
            seat.take(_Distant(host, served.shard, facts.run), Address.parse(served.address))
        self._seats.changed()
        if self._began:
            await self._agree()
        return Stayed(True, self._grant(host))

    def stay(self, request: Stay) -> Stayed:
        """Grant a host more time."""
        host = self._by_number.get(request.number)
        if host is None or request.run != self.facts.run:
            return Stayed(False, 0)
        host.copies = request.copies
        return Stayed(True, self._grant(host))

    def take(self, host: Host, shard: int, address: str) -> None:
        """Note that a host leads a shard that was moved to it."""
        link = _Distant(host, shard, self.facts.run)
        self._seats[shard].take(link, Address.parse(address))

    def list(self) -> HostsReply:
        """Return who leads which shard."""
        now, seats = time.monotonic(), self._seats
        own = HostEntry(MASTER, self.facts.address, tuple(seats.owned_by(MASTER)), 0, ())
        others = tuple(
            HostEntry(
                host.number,
                host.address,
                tuple(seats.owned_by(host.number)),
                int((now - host.heard) * 1000),
                host.copies,
            )
            for host in self._by_number.values()
        )
        facts = self.facts
        return HostsReply((own, *others), tuple(seats.missing), facts.run, facts.split)

    async def close(self) -> None:
        """Speak to none any more. Idempotent."""
        for host in self._by_number.values():
            await host.client.close()
