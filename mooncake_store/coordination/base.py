"""What a coordinator can do: small values under names, changed by all in one order.

    listing = await coordinator.list("shards/")
    async with aclosing(coordinator.watch("shards/", listing.revision + 1)) as changes:
        async for batch in changes: ...

Every change that takes effect has a revision, one more than the one before; a read sees all that
was answered before it was asked. A name is a text, a value up to a mebibyte of bytes; both belong
to one namespace, and another namespace of the same service does not see them.

A call that cannot be done until its deadline raises UnavailableError or TransferTimeoutError. For
a change the error says whether it may have been made nonetheless: read before you repeat it.

Not done here: who leads (`election`). Cost: one round trip a call.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Self

from mooncake_store.coordination.leases import Lease, SystemPace
from transfer_engine.errors import (
    InvalidArgumentError,
    LeaseExpiredError,
    RemoteProtocolError,
    TransferTimeoutError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from mooncake_store.coordination.leases import Pace

__all__ = [
    "FAULTS",
    "Change",
    "CompactedError",
    "Coordinator",
    "Delete",
    "Entry",
    "Listing",
    "Put",
    "Seen",
    "check_change",
    "check_name",
    "checked_namespace",
    "lease_ended",
]

TIMEOUT_S = 5.0
TTL_S_MIN, TTL_S_MAX = 2, 3600
"""etcd as it is installed makes shorter leases longer."""
KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 1 << 20
OPERATIONS_MAX = 128


class CompactedError(UnavailableError):
    """What was to be watched is no longer known, so changes were missed."""

    retryable: ClassVar[bool] = False
    default_advice = "list what there is now, and watch from the revision of the list on"


FAULTS = (UnavailableError, TransferTimeoutError, RemoteProtocolError)
"""What a call may raise that goes well another time, or with another member of the service."""


class Entry(NamedTuple):
    """A value as it was read."""

    key: str
    value: bytes
    revision: int
    """Of its newest change."""
    created: int
    """The revision at which it came to be; it was not absent since."""
    lease: int = 0
    """The lease with which it goes; 0 for none."""


class Listing(NamedTuple):
    """What there was at one moment, in the order of names."""

    entries: tuple[Entry, ...]
    revision: int


class Change(NamedTuple):
    """One name changed; `entry` is None where it was removed."""

    key: str
    revision: int
    entry: Entry | None


class Seen(NamedTuple):
    """A condition: the newest change of a name is this one; 0: it is absent."""

    key: str
    revision: int


class Put(NamedTuple):
    """Set a value; it is removed when its lease ends, if it has one."""

    key: str
    value: bytes
    lease: int = 0


class Delete(NamedTuple):
    """Remove a value; nothing where it is absent."""

    key: str


class Coordinator(ABC):
    """A client of the service, for one event loop. Leases end when it is closed."""

    def __init__(self, pace: Pace | None, timeout_s: float) -> None:
        self.pace: Pace = pace or SystemPace()
        """The clock by which leases are held."""
        self.timeout_s = timeout_s
        self._leases: set[Lease] = set()

    @abstractmethod
    async def get(self, key: str, *, timeout_s: float | None = None) -> Entry | None:
        """Return the value of a name, None where it is absent."""

    @abstractmethod
    async def list(self, prefix: str, *, timeout_s: float | None = None) -> Listing:
        """Return all values whose names begin so."""

    @abstractmethod
    async def change(
        self,
        *operations: Put | Delete,
        given: Sequence[Seen] = (),
        timeout_s: float | None = None,
    ) -> int | None:
        """Do all of these, or, where one condition does not hold, nothing and return None.

        Returns the revision, of which all of them are.

        Raises:
            LeaseExpiredError: there is no such lease (any more); nothing was changed.
            InvalidArgumentError: a name comes twice, or something is too large.
        """

    @abstractmethod
    def watch(self, prefix: str, revision: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """Yield each change of names that begin so from a revision on: all of one revision at once.

        It goes on until it is closed (`contextlib.aclosing`) and outlasts a service that is away.

        Raises:
            CompactedError: changes since then are no longer known, if there were any.
        """

    @abstractmethod
    async def grant(self, ttl_s: int, timeout_s: float) -> tuple[int, int]:
        """Make a lease, for `lease`; return its number and its length, which may be longer."""

    @abstractmethod
    async def renew(self, lease: int, timeout_s: float) -> bool:
        """Let a lease last for its whole length from now on; False where there is none."""

    @abstractmethod
    async def revoke(self, lease: int, timeout_s: float) -> None:
        """End a lease now, and remove what was put with it."""

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        seen: int | None = None,
        lease: int = 0,
        timeout_s: float | None = None,
    ) -> int | None:
        """Set a value, if its newest revision is still the one `seen` (0: only if absent).

        Returns its revision, None where another one came first.
        """
        given = () if seen is None else (Seen(key, seen),)
        return await self.change(Put(key, value, lease), given=given, timeout_s=timeout_s)

    async def delete(
        self, key: str, *, seen: int | None = None, timeout_s: float | None = None
    ) -> int | None:
        """Remove a value, if its newest revision is still the one `seen`; returns as `put`."""
        given = () if seen is None else (Seen(key, seen),)
        return await self.change(Delete(key), given=given, timeout_s=timeout_s)

    async def lease(self, ttl_s: int, *, timeout_s: float | None = None) -> Lease:
        """Take a lease of so many whole seconds, which a task keeps alive from now on."""
        if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:
            raise InvalidArgumentError(
                f"a lease lasts for {TTL_S_MIN} to {TTL_S_MAX} seconds, not {ttl_s}"
            )
        sent_ns = self.pace.now_ns()
        number, granted_s = await self.grant(ttl_s, timeout_s or self.timeout_s)
        lease = Lease(number, granted_s, sent_ns, self, self.pace, self._leases.discard)
        self._leases.add(lease)
        return lease

    async def close(self) -> None:
        """Release every lease; harmless when done twice."""
        await asyncio.gather(*(lease.release(self.timeout_s) for lease in tuple(self._leases)))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def check_change(operations: Sequence[Put | Delete], given: Sequence[Seen]) -> None:
    """Raise InvalidArgumentError for what no coordinator does at once."""
    for kind, names in (
        ("operations", [operation.key for operation in operations]),
        ("conditions", [seen.key for seen in given]),
    ):
        if len(names) > OPERATIONS_MAX:
            raise InvalidArgumentError(f"one change has up to {OPERATIONS_MAX} {kind}")
        for name in names:
            check_name(name)
    if len({operation.key for operation in operations}) < len(operations):
        raise InvalidArgumentError("one change sets or removes a name once")
    for operation in operations:
        if isinstance(operation, Put) and len(operation.value) > VALUE_BYTES_MAX:
            raise InvalidArgumentError(
                f"a value has up to {VALUE_BYTES_MAX} bytes, not {len(operation.value)}",
                key=operation.key,
            )


def check_name(name: str) -> None:
    """Raise InvalidArgumentError for what cannot be a name."""
    if not 0 < len(name.encode()) <= KEY_BYTES_MAX:
        raise InvalidArgumentError(f"a name has 1 to {KEY_BYTES_MAX} bytes", key=name[:80])


def checked_namespace(namespace: str) -> str:
    """Return what the names of a namespace begin with.

    The slash at its end keeps one whose name another one begins with apart.
    """
    if not namespace or "/" in namespace or len(namespace.encode()) > 255:
        raise InvalidArgumentError(
            f"{namespace!r} cannot be a namespace: give 1 to 255 bytes without a slash"
        )
    return f"mooncake/{namespace}/"


def lease_ended(operation: str, peer: str) -> LeaseExpiredError:
    """The error for a change with a lease that the service does not know (any more)."""
    return LeaseExpiredError(
        "the lease of this change has ended: nothing was changed",
        operation=operation,
        peer=peer,
        advice="take a new lease",
    )
