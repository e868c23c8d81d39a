"""A coordinator in one process: for a laptop, and for tests that move its clock.

    cluster = MemoryCluster()
    mine, yours = MemoryCoordinator(cluster, "c1"), MemoryCoordinator(cluster, "c1")

The coordinators of one cluster see each other's changes, as clients of one etcd do, and keep to
the same contract (`testing`). One that is `cut` reaches nothing, as if its network had failed.

For one event loop. It holds the newest changes only. Cost: O(names) a list, O(1) a change and
what its watchers do; nothing is written to disk.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mooncake_store.coordination.base import (
    TIMEOUT_S,
    Change,
    CompactedError,
    Coordinator,
    Delete,
    Entry,
    Listing,
    Put,
    check_change,
    check_name,
    checked_namespace,
    lease_ended,
)
from mooncake_store.coordination.leases import SystemPace
from transfer_engine.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Sequence

    from mooncake_store.coordination.base import Seen
    from mooncake_store.coordination.leases import Pace

__all__ = ["MemoryCluster", "MemoryCoordinator"]

HISTORY_MAX = 10_000
"""As many revisions are kept for watchers."""


@dataclass(slots=True)
class _Granted:
    ttl_ns: int
    until_ns: int


class MemoryCluster:
    """What the coordinators of a process share; leases are counted by the clock of its pace."""

    def __init__(self, pace: Pace | None = None) -> None:
        self.pace: Pace = pace or SystemPace()
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, _Granted] = {}
        self.revision = 1
        self._history: list[tuple[Change, ...]] = []
        """All changes of one revision each, the newest last."""
        self._compacted = 0
        self._numbers = itertools.count(1)
        self._news = asyncio.Event()
        self._timers: set[asyncio.Task[None]] = set()

    def apply(self, operations: Iterable[Put | Delete]) -> int:
        """Do all of these as one revision, and return it."""
        revision = self.revision + 1
        changes = []
        for operation in operations:
            key = operation.key
            old = self.entries.pop(key, None)
            if isinstance(operation, Put):
                created = old.created if old else revision
                entry = Entry(key, bytes(operation.value), revision, created, operation.lease)
                self.entries[key] = entry
                changes.append(Change(key, revision, entry))
            elif old:
                changes.append(Change(key, revision, None))
        if changes:
            self.revision = revision
            self._history.append(tuple(changes))
            if len(self._history) > HISTORY_MAX:
                self.compact(revision - HISTORY_MAX // 2)
            self.tell()
        return self.revision

    def compact(self, revision: int) -> None:
        """Forget what changed before a revision."""
        self._compacted = revision
        del self._history[: self._before(revision)]

    def since(self, revision: int) -> list[tuple[Change, ...]]:
        """Return what changed from a revision on; raises CompactedError."""
        if revision < self._compacted:
            raise CompactedError(
                f"revision {revision} was forgotten, {self._compacted} is the oldest known",
                operation="watch",
            )
        return self._history[self._before(revision) :]

    def _before(self, revision: int) -> int:
        return max(len(self._history) - (self.revision - revision + 1), 0)

    def tell(self) -> None:
        """Wake all watchers."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self) -> None:
        """Return when something may have changed."""
        await self._news.wait()

    def grant(self, ttl_s: int) -> int:
        """Make a lease that ends unless it is renewed; return its number."""
        number = next(self._numbers)
        ttl_ns = ttl_s * 10**9
        self.leases[number] = _Granted(ttl_ns, self.pace.now_ns() + ttl_ns)
        timer = asyncio.create_task(self._expire(number))
        self._timers.add(timer)
        timer.add_done_callback(self._timers.discard)
        return number

    def revoke(self, number: int) -> None:
        """End a lease, and remove what was put with it."""
        if self.leases.pop(number, None):
            gone = sorted(key for key, entry in self.entries.items() if entry.lease == number)
            self.apply(Delete(key) for key in gone)

    async def _expire(self, number: int) -> None:
        while granted := self.leases.get(number):
            left_ns = granted.until_ns - self.pace.now_ns()
            if left_ns <= 0:
                self.revoke(number)
            else:
                await self.pace.sleep(left_ns / 1e9)


class MemoryCoordinator(Coordinator):
    """One client of a `MemoryCluster`."""

    def __init__(
        self, cluster: MemoryCluster, namespace: str, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        super().__init__(cluster.pace, timeout_s)
        self._cluster = cluster
        self._prefix = checked_namespace(namespace)
        self._cut = False

    def cut(self, cut: bool = True) -> None:
        """Reach nothing from now on, or (`False`) everything again."""
        self._cut = cut
        self._cluster.tell()

    async def get(self, key: str, *, timeout_s: float | None = None) -> Entry | None:
        """Return the value of a name, None where it is absent."""
        check_name(key)
        await self._reach("get")
        entry = self._cluster.entries.get(self._prefix + key)
        return entry and self._own(entry)

    async def list(self, prefix: str, *, timeout_s: float | None = None) -> Listing:
        """Return all values whose names begin so."""
        await self._reach("list")
        found = sorted(
            entry
            for key, entry in self._cluster.entries.items()
            if key.startswith(self._prefix + prefix)
        )
        return Listing(tuple(map(self._own, found)), self._cluster.revision)

    async def change(
        self,
        *operations: Put | Delete,
        given: Sequence[Seen] = (),
        timeout_s: float | None = None,
    ) -> int | None:
        """Do all of these, or, where one condition does not hold, nothing and return None."""
        check_change(operations, given)
        await self._reach("change")
        entries = self._cluster.entries
        for seen in given:
            entry = entries.get(self._prefix + seen.key)
            if (entry.revision if entry else 0) != seen.revision:
                return None
        leases = {operation.lease for operation in operations if isinstance(operation, Put)}
        if not leases - {0} <= self._cluster.leases.keys():
            raise lease_ended("change", "memory")
        return self._cluster.apply(
            operation._replace(key=self._prefix + operation.key) for operation in operations
        )

    async def watch(self, prefix: str, revision: int) -> AsyncGenerator[tuple[Change, ...], None]:
        """Yield each change of names that begin so from a revision on: all of one at once."""
        while True:
            for batch in () if self._cut else self._cluster.since(revision):
                revision = batch[0].revision + 1
                found = tuple(
                    Change(self._stripped(key), when, entry and self._own(entry))
                    for key, when, entry in batch
                    if key.startswith(self._prefix + prefix)
                )
                if found:
                    yield found
            if self._cut or revision > self._cluster.revision:
                await self._cluster.news()

    async def grant(self, ttl_s: int, timeout_s: float) -> tuple[int, int]:
        """Make a lease."""
        await self._reach("grant a lease")
        return self._cluster.grant(ttl_s), ttl_s

    async def renew(self, lease: int, timeout_s: float) -> bool:
        """Let a lease last for its whole length from now on; False where there is none."""
        await self._reach("renew a lease")
        granted = self._cluster.leases.get(lease)
        if granted:
            granted.until_ns = self._cluster.pace.now_ns() + granted.ttl_ns
        return granted is not None

    async def revoke(self, lease: int, timeout_s: float) -> None:
        """End a lease now, and remove what was put with it."""
        await self._reach("revoke a lease")
        self._cluster.revoke(lease)

    async def _reach(self, operation: str) -> None:
        await asyncio.sleep(0)  # others take their turn, as they do while a service is asked
        if self._cut:
            raise UnavailableError(
                "this coordinator is cut off: nothing was changed",
                operation=operation,
                peer="memory",
                elapsed_s=0.0,
            )

    def _own(self, entry: Entry) -> Entry:
        return entry._replace(key=self._stripped(entry.key))

    def _stripped(self, key: str) -> str:
        return key.removeprefix(self._prefix)
