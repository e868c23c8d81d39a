"""Where the members of a pool are, as they say themselves in their etcd; and how that is looked up.

    directory = Directory([("10.0.0.9", 2379)], "prod", Access())
    lookup = directory.look_up(until)    # yields exchanges, is sent what came of them

Each member says its address under `members/` for as long as it runs, who leads under `leader`. Who
looks them up sees both at one moment. No I/O: an `Exchange` is carried out by its caller. Threads
may share a directory: what one of them loses to another is whom of the etcd it asks first.

Cost: one call for each lookup, two with a user. O(members).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from mooncake_store.coordination.base import FAULTS, checked_namespace
from mooncake_store.coordination.calls import LOG_IN, Call
from mooncake_store.coordination.election import PREFIX
from mooncake_store.coordination.exchange import Exchange
from transfer_engine.errors import AuthError, ConfigError, StoreError, UnavailableError
from transfer_engine.rpc.address import Address
from transfer_engine.wire.cold import MALFORMED

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from mooncake_store.coordination.access import Access
    from mooncake_store.coordination.calls import Answer, Pair

__all__ = ["LEADER", "MEMBERS", "Directory", "Found", "Place"]

LEADER, MEMBERS = "leader", "members/"
"""Names in etcd: who leads (`election`), and what the numbers of those who are there begin with."""
PLACES_MAX = 16


class Place(msgspec.Struct, frozen=True):
    """What a member says of itself."""

    address: str
    number: int


class Found(NamedTuple):
    """Where the members of a pool are: who leads comes first, if somebody does."""

    places: tuple[Address, ...]
    leader: Address | None


class Directory:
    """An etcd as somebody knows it who looks for the members of one pool.

    Raises InvalidArgumentError for what no pool is called.
    """

    def __init__(self, etcd: Iterable[tuple[str, int]], pool: str, access: Access) -> None:
        self.pool = pool
        self.members = tuple(Address(*place) for place in etcd)
        self._order = list(self.members)
        self._access = access
        self._prefix = checked_namespace(pool).encode()

    def __str__(self) -> str:
        return ",".join(map(str, self.members))

    @property
    def leader_key(self) -> str:
        """The key in the etcd that says who leads, while somebody does."""
        return self._key(PREFIX + LEADER)

    @property
    def members_key(self) -> str:
        """What the keys in the etcd begin with that say where members are."""
        return self._key(MEMBERS)

    def _key(self, name: str) -> str:
        return f"{self._prefix.decode()}{name}"

    def look_up(self, until: float) -> Generator[Exchange, bytes | StoreError, Found]:
        """Ask one member of the etcd after the other, each for its share of the time.

        Raises what the last one said, or UnavailableError where no member of the pool is there.
        """
        began = time.monotonic()
        asked = tuple(self._order)
        for more, member in zip(range(len(asked) - 1, -1, -1), asked, strict=True):
            now = time.monotonic()
            try:
                pairs = yield from self._read(member, now + max(until - now, 0.0) / (more + 1))
                break
            except FAULTS as error:
                self._order = sorted(self._order, key=member.__eq__)
                if not more:
                    error.peer, error.elapsed_s = str(self), time.monotonic() - began
                    raise
        return self._found(pairs)

    def _read(
        self, member: Address, until: float
    ) -> Generator[Exchange, bytes | StoreError, list[Pair]]:
        """Read all that a pool has in its etcd, which is little."""
        token = ""
        if self._access.user:
            shown = {"name": self._access.user, "password": self._access.password}
            call = Call(member, *LOG_IN, shown)
            token = (yield from self._carry_out(call, "", until)).token
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        call = Call(member, "look up", "kv/range", {"key": self._prefix, "range_end": end})
        try:
            return (yield from self._carry_out(call, token, until)).kvs
        except AuthError as error:
            error.what = f"{error.what}: keys that begin with {self._key('')}"
            raise

    def _carry_out(
        self, call: Call, token: str, until: float
    ) -> Generator[Exchange, bytes | StoreError, Answer]:
        left_s = max(until - time.monotonic(), 0.0)
        received = yield Exchange(call, call.request(token), left_s, self._access.tls)
        if isinstance(received, StoreError):
            raise received
        return call.answer(received)

    def _found(self, pairs: list[Pair]) -> Found:
        known = {pair.key.removeprefix(self._prefix): pair.value for pair in pairs}
        leader = _address(known.get((PREFIX + LEADER).encode(), b""))
        said = [
            _address(value)
            for name, value in sorted(known.items())
            if name.startswith(MEMBERS.encode())
        ]
        places = dict.fromkeys(each for each in (leader, *said) if each is not None)
        if places:
            return Found(tuple(places)[:PLACES_MAX], leader)
        what, begin = f"no member of the pool {self.pool!r} is there", self.members_key
        advice = f"start one: mooncake member --etcd {self} --name {self.pool}"
        if not known:
            what, begin = f"no pool was ever called {self.pool!r} there", self._key("")
            advice = "check the name, which is the --name of its members"
        raise UnavailableError(
            f"the etcd says that {what}: no key begins with {begin}",
            peer=str(self),
            advice=advice,
        )


def _address(value: bytes) -> Address | None:
    """Return where a member is; None for what somebody else wrote there."""
    try:
        return Address.parse(msgspec.json.decode(value, type=Place).address)
    except (*MALFORMED, ConfigError):
        return None
