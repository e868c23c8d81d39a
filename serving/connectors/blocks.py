"""Blocks of an engine that looks up, locks and moves them in one process.

What `Moves` does, and lookups. A lookup is one round trip and leases nothing unless asked to; a
block whose read failed, though it is there, counts as absent for a while and is stored anew by the
next save (`mooncake_store.failed_reads`). A lock is a lease: the store keeps the block where it is
until it is unlocked or the lease ends, and a read of a locked block asks no master.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from mooncake_store.errors import NotFoundError
from mooncake_store.failed_reads import FailedReads
from serving.connectors.moves import Moves

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.connectors.counts import Counts
    from serving.connectors.link import StoreLink
    from serving.connectors.options import StoreOptions

__all__ = ["Blocks"]


class Blocks(Moves):
    """Looks blocks up, locks and moves them. Thread-safe; a store that is away is a miss."""

    def __init__(self, link: StoreLink, options: StoreOptions, counts: Counts) -> None:
        super().__init__(link, options, counts)
        self._lookup_s = options.lookup_deadline_s
        self._doubts: FailedReads[str] = FailedReads(options.distrust_s)
        self._holders: dict[str, int] = {}
        self._holding = threading.Lock()

    # Lookups.

    def leading(
        self, names: list[str], lease_s: float = 0.0, *, each_s: float = 0.0, step: int = 1
    ) -> int:
        """How many names from the first one on are there, without a gap. One round trip.

        With `lease_s` the store keeps them where they are for so long. With `each_s`, the seconds
        that each is worth, they are no more than load in that time, in steps of so many that are of
        use only together; both are two round trips.
        """
        if self._doubts:
            names = names[
                : next((at for at, name in enumerate(names) if name in self._doubts), None)
            ]
        if each_s and names:
            names = names[: self._worthwhile(names, each_s, step)]
            if not lease_s:
                return len(names)
        if not names:
            return 0
        if lease_s:
            there = self._leased(names, lease_s)
            return there.index(False) if False in there else len(there)
        found: int = self._looked_up(lambda c: c.find_prefix(names, deadline=self._lookup_s), 0)
        return found

    def _worthwhile(self, names: list[str], each_s: float, step: int) -> int:
        costs = self._looked_up(lambda c: c.read_cost(names, deadline=self._lookup_s), None)
        if costs is None:
            return 0
        fitting: int = costs.fitting(each=each_s, step=step)
        there = int(costs.failed[0]) if len(costs.failed) else len(names)
        self.counts.add("lookup_too_slow", there - fitting)
        return fitting

    def present(self, names: list[str]) -> list[bool]:
        """Which names are there. One round trip."""
        if not names:
            return []
        absent = [False] * len(names)
        found: list[bool] = self._looked_up(
            lambda c: c.exists_many(names, deadline=self._lookup_s).tolist(), absent
        )
        if self._doubts:
            return [
                each and name not in self._doubts for name, each in zip(names, found, strict=True)
            ]
        return found

    def _looked_up(self, ask: Callable[[Any], Any], absent: Any) -> Any:
        with self.counts.timed("lookup_seconds"):
            found = self.link.call(ask)
        self.counts.add("lookups", 1)
        self.counts.add("lookup_failures", found is None)
        return absent if found is None else found

    def _leased(self, names: list[str], ttl_s: float) -> list[bool]:
        """Lease a batch; which names are there."""
        found: list[bool] = self._looked_up(
            lambda c: (
                c.lease_many(names, ttl=ttl_s, deadline=self._lookup_s).statuses == 0
            ).tolist(),
            [False] * len(names),
        )
        return found

    # Locks.

    def lock(self, names: list[str], ttl_s: float) -> list[bool]:
        """Lease what is there for `ttl_s`; which names are. One round trip."""
        trusted = [name for name in names if name not in self._doubts]
        if not trusted:
            return [False] * len(names)
        there = self._leased(trusted, ttl_s)
        locked = {name for name, found in zip(trusted, there, strict=True) if found}
        with self._holding:
            for name in locked:
                self._holders[name] = self._holders.get(name, 0) + 1
        return [name in locked for name in names]

    def unlock(self, names: Sequence[str]) -> None:
        """End locks; each is given back when as many unlocked it as had locked it."""
        free = []
        with self._holding:
            for name in names:
                held = self._holders.pop(name, 0)
                if held > 1:
                    self._holders[name] = held - 1
                elif held:
                    free.append(name)
        if free:
            self.link.call(lambda c: c.release_many(free, deadline=self._lookup_s))

    @property
    def locked(self) -> int:
        """How many names are locked."""
        return len(self._holders)

    # Moves.

    def _see_to(self, names: list[str], got: Any, failed: list[int]) -> None:
        super()._see_to(names, got, failed)
        self._doubts.note(
            names[at] for at in failed if not isinstance(got.error(at), NotFoundError)
        )

    def write(
        self,
        names: list[str],
        gather: Callable[[], Any],
        sizes: Sequence[int],
        *,
        groups: Sequence[str] | None = None,
    ) -> tuple[list[int], list[int]]:
        """Offer a batch; one with blocks in doubt replaces what is there."""
        stored, refused = super().write(names, gather, sizes, groups=groups)
        if self._doubts:
            self._doubts.clear(names[at] for at in stored)
        return stored, refused

    def _in_doubt(self, names: list[str]) -> bool:
        return bool(self._doubts) and any(name in self._doubts for name in names)

    def remove(self, names: list[str], deadline_s: float) -> list[bool]:
        """Remove blocks, whoever reads them; which ones went."""
        done = self.link.call(lambda c: c.remove_many(names, force=True, deadline=deadline_s))
        return [False] * len(names) if done is None else (done.statuses == 0).tolist()

    def clear(self, prefixes: Sequence[str], deadline_s: float) -> bool:
        """Remove all blocks whose names begin so; whether the store answered."""
        removed = self.link.call(
            lambda c: [c.remove_prefix(each, force=True, deadline=deadline_s) for each in prefixes]
        )
        return removed is not None
