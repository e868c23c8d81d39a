"""Where a prompt is computed if those who come after it count as much as it does.

    policy = Considerate(CacheCentric(1.0))
    policy.place(demand, prefill_views, costs)

It weighs work as `Thrifty` does, and does one thing more. Most prompts take a moment, few take
long: one over `LONG` times the usual joins the half of the instances with more to do, which leaves
short queues to the others. While two instances have nothing to do it is in nobody's way, and goes
where any prompt would.

The mean time to the first token becomes shorter; who has a long prompt waits longer. O(instances +
holders), and sorting the instances for a long prompt.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING

from serving.scheduling.thrifty import Thrifty

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.scheduling.costs import Costs
    from serving.scheduling.views import Demand, Placement, PrefillView

__all__ = ["Considerate"]

LONG = 3.0
"""How many times the usual a prompt takes that counts as long."""
IDLE = 2
"""So many idle instances are enough for a long prompt and whoever comes next."""


class Considerate(Thrifty):
    """The same choice, for long prompts among the instances with more to do."""

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """Where work is weighed, among the busier half if it is long."""
        found = super().place(demand, instances, costs)
        if found is None or self._times_usual(found.load_s + found.prefill_s) <= LONG:
            return found
        if sum(not each.queue_s for each in instances) >= IDLE:
            return found
        busier = sorted(instances, key=attrgetter("queue_s"))[len(instances) // 2 :]
        return self._weighed(demand, busier, costs)
