"""Who leads each shard of a cluster: the master itself, another host, or nobody now; no I/O.

    seats = Seats(8)
    seats.claim(MASTER, range(4))       # what others claim is theirs
    seats[5].take(link, address)        # it serves there
    await seats.complete()              # until every one is taken

A seat is the link to its shard, whoever leads that. Its owner is decided once, and written down
with the registers before anybody acts on it: what somebody else brings is not taken for the shard.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from transfer_engine.errors import ConfigError, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mooncake_store.master.shard_link import ReplyT, RequestT, ShardLink
    from transfer_engine.rpc.address import Address
    from transfer_engine.wire.cold import Cold
    from transfer_engine.wire.registry import Operation

__all__ = ["MASTER", "NOBODY", "Seat", "Seats", "SomeSeats"]

MASTER: Final = 0
"""The owner of shards that lead beside their master; other owners are the numbers of hosts."""
NOBODY: Final = -1


class Seat:
    """One shard."""

    def __init__(self, shard: int, owner: int = NOBODY) -> None:
        self.shard = shard
        self.owner = owner
        self.address: Address | None = None
        """Where it served last, for clients."""
        self.pending = False
        """Whether it is about to be given to its owner, or taken from him, so that nobody is told
        to lead it."""
        self._link: ShardLink | None = None

    @property
    def taken(self) -> bool:
        """Whether it is led, as far as is known here."""
        return self._link is not None

    def take(self, link: ShardLink, address: Address) -> None:
        """Note how the shard is reached from now on."""
        self._link, self.address = link, address

    def leave(self) -> None:
        """Note that it is reached no more."""
        self._link = None

    async def ask(
        self, operation: Operation[Cold[RequestT], Cold[ReplyT]], request: RequestT
    ) -> ReplyT:
        """Return the answer of the shard to a request of `ADMIN`."""
        if self._link is None:
            raise UnavailableError(
                f"no host leads shard {self.shard} now",
                operation=operation.name,
                advice="see `mooncake shard list`",
            )
        return await self._link.ask(operation, request)


class SomeSeats:
    """Those that are led, by whom is chosen, each time that they are asked for."""

    def __init__(self, seats: Seats, chosen: Callable[[Seat], bool]) -> None:
        self._seats = seats
        self._chosen = chosen

    def __iter__(self) -> Iterator[Seat]:
        led = (seat for seat in self._seats if seat.taken and not seat.pending)
        return filter(self._chosen, led)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Seats:
    """All of them, by the number of the shard."""

    def __init__(self, count: int) -> None:
        self._seats: list[Seat] = []
        self.resize(count)
        self._news = asyncio.Event()
        self._given_up = False
        self.movable = False
        """Whether there are other hosts, to which a shard may be on its way."""

    def resize(self, count: int) -> None:
        """Begin anew with so many, of which nobody has any."""
        self._seats = [Seat(shard) for shard in range(count)]

    def restore(self, owners: Sequence[int]) -> None:
        """Begin with who led each shard in the run before; nobody but the master if that is empty.

        Raises ConfigError for another number of shards.
        """
        if owners and len(owners) != len(self):
            raise ConfigError(
                f"the state is of a pool with {len(owners)} shards, not {len(self)}",
                advice=f"start with --shards {len(owners)}",
            )
        for seat in self._seats:
            seat.owner = owners[seat.shard] if owners else MASTER

    def __len__(self) -> int:
        return len(self._seats)

    def __iter__(self) -> Iterator[Seat]:
        return iter(self._seats)

    def __getitem__(self, shard: int) -> Seat:
        return self._seats[shard]

    @property
    def owners(self) -> tuple[int, ...]:
        """Who leads each shard; empty while the master leads all."""
        owners = tuple(seat.owner for seat in self._seats)
        return owners if any(owners) else ()

    def beside(self) -> SomeSeats:
        """Those of shards that lead beside the master now, whichever these are."""
        return SomeSeats(self, lambda seat: seat.owner == MASTER)

    def distant(self) -> SomeSeats:
        """Those of shards that other hosts lead now, whichever these are."""
        return SomeSeats(self, lambda seat: seat.owner > MASTER)

    def owned_by(self, owner: int) -> list[int]:
        """Which shards somebody leads, or is to lead."""
        return [seat.shard for seat in self._seats if seat.owner == owner]

    def claim(self, owner: int, wanted: Iterable[int]) -> bool:
        """Give somebody those of the wanted ones that are nobody's; return if there are any."""
        free = [
            self._seats[shard]
            for shard in wanted
            if shard < len(self._seats) and self._seats[shard].owner == NOBODY
        ]
        for seat in free:
            seat.owner = owner
        return bool(free)

    @property
    def missing(self) -> list[int]:
        """Which shards nobody leads now."""
        return [seat.shard for seat in self._seats if not seat.taken]

    def changed(self) -> None:
        """Let who waits look again."""
        self._news.set()

    def give_up(self) -> None:
        """Let nobody wait any longer."""
        self._given_up = True
        self._news.set()

    async def complete(self) -> None:
        """Return when every shard is led. Raises UnavailableError when that was given up."""
        while self.missing:
            if self._given_up:
                raise UnavailableError(f"shards {self.missing} are not waited for any longer")
            self._news.clear()
            await self._news.wait()
