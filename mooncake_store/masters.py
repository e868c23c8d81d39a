"""Where the master is, when several addresses are named: which are asked, and for how long each.

    masters = Masters(split_masters("10.0.0.5:50051,10.0.0.6:50051"))
    search = masters.search(until)       # yields attempts, is sent what came of them

One of several masters leads; the others refuse until they take over, or do not listen. The one that
answered last is asked first, those that were silent last. A host that is gone refuses nothing, its
packets vanish, so nobody gets all of the time: it goes round three times, for longer each time,
since one that is busy may only need longer, and another may begin to lead meanwhile. Who asks ends
at once when all refuse. With one address it has all.

Where an etcd knows them, it is asked before the first search, and again when none of those that are
known leads: they may have been replaced. Whoever knows some goes on with these while it is away.

What an attempt is, its caller decides; no I/O. Threads may share it: what one of them loses to
another is the order. O(addresses).
"""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar, cast

from mooncake_store.coordination.access import read_access
from mooncake_store.coordination.base import FAULTS
from mooncake_store.coordination.directory import Directory
from mooncake_store.coordination.exchange import Exchange
from mooncake_store.endpoint import ETCD_PORT, Etcd
from transfer_engine.errors import (
    PeerLostError,
    StoreError,
    TransferTimeoutError,
    UnavailableError,
)
from transfer_engine.rpc.address import Address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from mooncake_store.coordination.directory import Found

__all__ = ["Attempt", "Masters", "Search"]

T = TypeVar("T")

_SHARES = (0.1, 0.3, 1.0)
"""Of the time that is left, what each round over the addresses may use."""
_SILENCE = 0.9
"""Of the time that an address was given: who takes that long was cut off."""
_LOOK_S = 1.0
"""The etcd is not asked again before that: many clients may miss one master at the same time."""
_LOOK_SHARE = 0.3
"""Of the time that is left, what the etcd may use where masters are known."""


class Attempt(NamedTuple):
    """Whom to ask for the map of the cluster, and how long to wait."""

    place: Address
    timeout_s: float


Search: TypeAlias = Generator[Attempt | Exchange, T | bytes | StoreError, T]
"""Yields whom to ask: a master for the map, or an etcd for what an `Exchange` says."""


class Masters:
    """The addresses of one pool's master; `leader` is the one that answered last.

    `etcd_file` says how an etcd lets us in that knows them. Raises ConfigError, or
    InvalidArgumentError for what no pool is called.
    """

    def __init__(self, where: tuple[tuple[str, int], ...] | Etcd, etcd_file: str = "") -> None:
        self._where = where
        self._directory: Directory | None = None
        self.named: tuple[Address, ...] = ()
        """Those that are known; none before the first search where an etcd knows them."""
        if isinstance(where, Etcd):
            self._directory = Directory(where.members, where.pool, read_access(etcd_file))
        else:
            self.named = tuple(Address(*place) for place in where)
        self._leader = next(iter(self.named), None)
        self._order = list(self.named)
        # What the etcd said last, for who reads that nobody answers, and what to do about it.
        self._told = self._next = ""
        self._looked = float("-inf")

    @property
    def several(self) -> bool:
        """Whether there is another one to ask, or may be."""
        return len(self.named) > 1 or self._directory is not None

    @property
    def by_etcd(self) -> bool:
        """Whether an etcd knows them, and elects which of them leads."""
        return self._directory is not None

    @property
    def leader(self) -> Address:
        """The one that answered last. Raises UnavailableError where none is known yet."""
        if self._leader is None:
            raise UnavailableError(f"no master was found yet by {self}", operation="connect")
        return self._leader

    def __str__(self) -> str:
        return ",".join(map(str, self.named)) if self._directory is None else str(self._where)

    def search(self, until: float) -> Search[T]:
        """Ask one after the other until one answers; return its answer.

        Raises what the only one said, or an error that tells what each of them said.
        """
        started = time.monotonic()
        if not self.named:
            yield from self._find(until)
        said: dict[Address, StoreError] = {}
        for share in _SHARES if self.several else (1.0,):
            asked, silent, began = list(self._order), [], time.monotonic()
            ends = began + share * (until - began)
            for at, place in enumerate(asked):
                began = time.monotonic()
                if began >= until and said:
                    break
                timeout_s = (ends - began) / (len(asked) - at)
                outcome = yield Attempt(place, timeout_s)
                if not isinstance(outcome, StoreError):
                    self._leader = place
                    self._order = sorted(self._order, key=place.__ne__)
                    return cast("T", outcome)
                said[place] = outcome
                if time.monotonic() - began >= _SILENCE * timeout_s:
                    silent.append(place)
            others = yield from self._look_again(until)
            self._order = sorted(self._order, key=silent.__contains__)
            if not (silent or others):
                break
        raise self._refusal(said, time.monotonic() - started)

    def _find(self, until: float) -> Generator[Exchange, bytes | StoreError, None]:
        """Look up who there is, before anybody is known. Raises what that fails with."""
        assert self._directory is not None
        self._looked = time.monotonic()
        try:
            self._know((yield from self._directory.look_up(until)))
        except StoreError as error:
            error = error.again()
            if isinstance(error, TransferTimeoutError):
                error = UnavailableError(error.what, peer=error.peer, advice=error.advice)
            error.operation, error.elapsed_s = "connect", time.monotonic() - self._looked
            raise error from None

    def elected(self, until: float) -> Generator[Exchange, bytes | StoreError, Address | None]:
        """Ask the etcd who leads; None where nobody does, or it does not answer."""
        assert self._directory is not None
        try:
            return (yield from self._directory.look_up(until)).leader
        except FAULTS:
            return None

    def _look_again(self, until: float) -> Generator[Exchange, bytes | StoreError, bool]:
        """Look up who there is now; return whether there are others than those that were asked."""
        now, former = time.monotonic(), set(self.named)
        if self._directory is None or now < self._looked + _LOOK_S:
            return False
        self._looked = now
        try:
            ends = now + _LOOK_SHARE * (until - now)
            self._know((yield from self._directory.look_up(ends)))
        except StoreError as error:
            self._told, self._next = f"the etcd at {self._directory}: {error.what}", ""
        return set(self.named) != former

    def _know(self, found: Found) -> None:
        assert self._directory is not None
        who = "nobody leads" if found.leader is None else f"{found.leader} leads"
        self._told = f"the etcd at {self._directory} says that {who} {self._directory.pool!r}"
        self._next = ""
        if found.leader is None:
            self._told = f"{self._told}: there is no key {self._directory.leader_key}"
            self._next = (
                f"where that lasts, start who led last; `mooncake promote {self._where} --check` "
                "tells what those who are there have"
            )
        self.named = found.places
        self._order = list(found.places)

    def _refusal(self, said: dict[Address, StoreError], elapsed_s: float) -> StoreError:
        """Return what it means that these failed so."""
        first = next(iter(said.values()))
        if not self.several:
            error = first.again()
            error.advice = _advice(said) or error.advice
            return error
        each = [f"{place}: {error.what}" for place, error in said.items()]
        kinds = {type(error) for error in said.values()}
        alike = len(kinds) == 1 and kinds.isdisjoint({PeerLostError, TransferTimeoutError})
        count = f"none of {len(said)} masters" if len(said) > 1 else "no master"
        return (type(first) if alike else UnavailableError)(
            "; ".join([f"{count} answers: {each[0]}", *each[1:], *filter(None, [self._told])]),
            operation="connect",
            elapsed_s=elapsed_s,
            advice=_advice(said) or self._next or (first.advice if alike else None),
        )


def _advice(places: Iterable[Address]) -> str:
    """Return what to do where an etcd is taken for a master, to whom it says nothing; else ""."""
    if any(place.port == ETCD_PORT for place in places):
        return f"an etcd, which listens at {ETCD_PORT}, is named by mooncake+etcd://HOST/POOL"
    return ""
