"""Nodes that change sides in simulated time, when the product's balancer says so.

As the conductor does it: loads are looked at twice a second, and an instance that should change is
given nothing new, finishes what needs it, and joins with its new role; one that does not get there
in time keeps the old one. It is looked at when loads are, so it may be half a second late. What it
keeps in memory stays there, and others pull it, as from any worker of the product. O(nodes) a look,
O(requests under way) while a node changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from serving.scheduling.roles import DRAIN_S, REBALANCE_S

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.scheduling.scheduler import Scheduler
    from serving.simulator.timeline import Timeline

__all__ = ["RoleChanges"]


class RoleChanges:
    """Of one cluster. `take` gives a node its new role, `needed` says whether requests need it."""

    def __init__(
        self,
        scheduler: Scheduler,
        timeline: Timeline,
        take: Callable[[str, str], object],
        needed: Callable[[str], bool],
    ) -> None:
        self._scheduler = scheduler
        self._timeline = timeline
        self._take = take
        self._needed = needed
        self._changing: dict[str, tuple[str, float]] = {}
        """Nodes with the roles they will have, and until when they may take."""

    def look(self) -> None:
        """See what has changed and what should."""
        now, ledger = self._timeline.now, self._scheduler.ledger
        for name, (role, until) in list(self._changing.items()):
            drained = not self._needed(name)
            if drained or now >= until:
                del self._changing[name]
                ledger.instances[name].usable = True
            if drained:
                self._take(name, role)
        found = self._scheduler.rebalance(now)
        if found is not None:
            name, change = found
            ledger.instances[name].usable = False
            self._changing[name] = change.to, now + DRAIN_S

    def look_often(self, going_on: Callable[[], bool]) -> None:
        """Look now and again for as long as something is under way or to come."""
        if going_on():
            self.look()
            self._timeline.at(self._timeline.now + REBALANCE_S, self.look_often, going_on)

    def forget(self, name: str) -> None:
        """A node failed: it comes back with the role that it had."""
        self._changing.pop(name, None)
