"""Where a prompt is computed: Algorithm 1 of the paper, and the simpler rules it is compared with.

    policy = CacheCentric(balancing=1.5)
    policy.place(demand, prefill_views, costs)      # a Placement, None without instances

`CacheCentric` predicts the time to the first token on every instance: pulling a prefix that others
have, waiting in the queue, computing the rest. A prefix is pulled when the longest one is more than
`balancing` times the instance's own; the instance then holds it too, which is how hot prefixes
spread: nobody predicts what is hot. With `weigh` (the default) a pull that is predicted to take
longer than computing the same tokens is not made; without, the rule is exactly the paper's.

Comparisons are strict: of equal instances the earlier one stays. O(instances + holders).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from serving.conductor.views import DecodeView, Demand, Placement, PrefillView

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from serving.conductor.costs import Costs, DecodeCost

__all__ = [
    "AnyInstance",
    "CacheCentric",
    "LeastLoaded",
    "LocalCache",
    "PlacementPolicy",
    "choose_decode",
]


class PlacementPolicy(Protocol):
    """Chooses the prefill instance of a request."""

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """Return the choice; None when there is no instance."""
        ...


def _local(demand: Demand, instance: PrefillView, costs: Costs) -> Placement:
    """The request on an instance that uses what it has itself."""
    own = min(demand.matches.get(instance.name, 0), demand.tokens)
    seconds = costs.prefill.predict(demand.tokens, own)
    return Placement(
        prefill=instance.name,
        cached=own,
        source="",
        pulled=0,
        transfer_s=0.0,
        queue_s=instance.queue_s,
        prefill_s=seconds,
        alternative_s=seconds,
    )


class CacheCentric:
    """KVCache-centric scheduling, Algorithm 1: prefixes are pulled to where the queue is short."""

    def __init__(self, balancing: float = 1.5, *, weigh: bool = True) -> None:
        if balancing < 1:
            raise ValueError(f"balancing must be 1 or more, not {balancing}")
        self._balancing = balancing
        self._weigh = weigh

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """The instance with the least predicted time to the first token."""
        matches = demand.matches
        holder = max(matches, key=matches.__getitem__, default="")
        best = min(matches.get(holder, 0), demand.tokens)
        found = [self._on(demand, instance, holder, best, costs) for instance in instances]
        return min(found, key=lambda placement: placement.ttft_s, default=None)

    def _on(
        self, demand: Demand, instance: PrefillView, holder: str, best: int, costs: Costs
    ) -> Placement:
        local = _local(demand, instance, costs)
        # Nothing of its own but something elsewhere counts as an infinite ratio.
        if best <= local.cached * self._balancing:
            return local
        pulled = best - local.cached
        pulling = Placement(
            prefill=instance.name,
            cached=best,
            source=holder,
            pulled=pulled,
            transfer_s=costs.transfer.predict(holder, pulled * costs.kv_bytes),
            queue_s=instance.queue_s,
            prefill_s=costs.prefill.predict(demand.tokens, best),
            alternative_s=local.prefill_s,
        )
        if self._weigh and pulling.transfer_s > pulling.saved_s:
            return replace(local, declined=holder)
        return pulling


class LocalCache:
    """Algorithm 1 without transfers: instances use only what they hold."""

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """The instance with the least predicted time to the first token."""
        found = [_local(demand, instance, costs) for instance in instances]
        return min(found, key=lambda placement: placement.ttft_s, default=None)


class LeastLoaded:
    """The instance with the least work waiting, whatever it holds."""

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """The one with the shortest queue."""
        chosen = min(instances, key=lambda instance: instance.queue_s, default=None)
        return None if chosen is None else _local(demand, chosen, costs)


class AnyInstance:
    """Any instance, each as likely as the others; `source` is the caller's own generator."""

    def __init__(self, source: random.Random) -> None:
        self._source = source

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """One at random."""
        if not instances:
            return None
        return _local(demand, self._source.choice(instances), costs)


def choose_decode(
    demand: Demand, instances: Sequence[DecodeView], cost: DecodeCost
) -> DecodeView | None:
    """The decode instance with the least predicted time between tokens.

    Only instances with room for the whole answer take part; None when there is none.
    """
    needed = demand.tokens + demand.max_new_tokens
    return min(
        (each for each in instances if each.free_tokens >= needed),
        key=lambda each: cost.predict(each.batch + 1, each.tokens + demand.tokens),
        default=None,
    )
