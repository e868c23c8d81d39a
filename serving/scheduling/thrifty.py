"""Where a prompt is computed if work counts the more, the longer everybody has to wait for it.

    policy = Thrifty(CacheCentric(1.0))
    policy.place(demand, prefill_views, costs)

Algorithm 1 asks only when the prompt at hand would be done, so it has a prefix computed once more
to save a moment of waiting, and all who stand behind wait for that work. How many do is taken from
the shortest queue, for which who comes next waits at least: as many as it is times as long as a
prompt usually takes. So a second of work counts 1 + shortest queue / usual work seconds of waiting.
While any instance is idle nobody stands behind, however many are busy, and it is Algorithm 1; the
longer the wait, the longer a prompt waits for an instance that has its prefix.

What is usual is the mean of what came lately; nothing else is kept. O(instances + holders).
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.scheduling.costs import Costs
    from serving.scheduling.views import Demand, Placement, PrefillView

__all__ = ["Thrifty", "WeighingPolicy"]

_queue_s = attrgetter("queue_s")
REMEMBERED = 1000
"""From how many prompts on what is older counts half."""


class WeighingPolicy(Protocol):
    """A placement policy that can be told what a second of work counts."""

    def place(
        self,
        demand: Demand,
        instances: Sequence[PrefillView],
        costs: Costs,
        weight: float = 1.0,
    ) -> Placement | None:
        """Return the choice; a second of work counts as `weight` seconds of waiting."""
        ...


class Thrifty:
    """The choice of another policy, with work weighed by how long everybody has to wait."""

    def __init__(self, policy: WeighingPolicy) -> None:
        self._policy = policy
        self._seconds = 0.0
        self._prompts = 0

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """Where the other policy has it, given what a second of work counts."""
        found = self._weighed(demand, instances, costs)
        if found is not None:
            self._note(found.load_s + found.prefill_s)
        return found

    def _weighed(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        shortest_s = min(map(_queue_s, instances), default=0.0)
        behind = shortest_s * self._prompts / self._seconds if self._seconds else 0.0
        return self._policy.place(demand, instances, costs, 1.0 + behind)

    def _note(self, seconds: float) -> None:
        """A prompt takes so long, which belongs to what is usual from now on."""
        if self._prompts == REMEMBERED:
            self._seconds /= 2
            self._prompts //= 2
        self._seconds += seconds
        self._prompts += 1

    def _times_usual(self, seconds: float) -> float:
        """How many times the usual work that is."""
        return seconds * self._prompts / self._seconds if self._seconds else 0.0
