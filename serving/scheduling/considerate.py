"""Where a prompt is computed if those who come after it count as much as it does.

    policy = Considerate(CacheCentric(1.0, shared=True))
    policy.place(demand, prefill_views, costs)

An instance computes its prompts one after the other, and Algorithm 1 asks only when the prompt at
hand would be done. Two things that it does to others are counted here. All who stand behind it wait
for its work, so a second of that counts the more, the more instances are busy (`shared`): rather
than have a prefix computed once more, a prompt waits for the instance that has it. And most prompts
take a moment, few take long: one over `LONG` times the mean joins the half of the instances with
more to do, which leaves short queues to the others. While two instances have nothing to do it is in
nobody's way, and goes where any prompt would.

The mean is of what came lately; nothing else is kept. The mean time to the first token becomes
shorter; who has a long prompt waits longer. O(instances + holders), and sorting the instances for a
long prompt.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.scheduling.costs import Costs
    from serving.scheduling.placement import PlacementPolicy
    from serving.scheduling.views import Demand, Placement, PrefillView

__all__ = ["Considerate"]

LONG = 3.0
"""How many times the mean a prompt takes that counts as long."""
IDLE = 2
"""So many idle instances are enough for a long prompt and whoever comes next."""
REMEMBERED = 1000
"""From how many prompts on what is older counts half."""


class Considerate:
    """The choice of another policy, for long prompts among the instances with more to do."""

    def __init__(self, policy: PlacementPolicy) -> None:
        self._policy = policy
        self._seconds = 0.0
        self._prompts = 0

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """Where the other policy has it, among the busier half if it is long."""
        found = self._policy.place(demand, instances, costs)
        if found is None or not self._is_long(found.load_s + found.prefill_s):
            return found
        if sum(not each.queue_s for each in instances) >= IDLE:
            return found
        busier = sorted(instances, key=attrgetter("queue_s"))[len(instances) // 2 :]
        return self._policy.place(demand, busier, costs)

    def _is_long(self, seconds: float) -> bool:
        """Whether a prompt takes much longer than others, which it is one of from now on."""
        if self._prompts == REMEMBERED:
            self._seconds /= 2
            self._prompts //= 2
        self._seconds += seconds
        self._prompts += 1
        return seconds * self._prompts > LONG * self._seconds
