"""Where a prompt is computed: Algorithm 1 of the paper, and the simpler rules it is compared with.

    policy = CacheCentric(balancing=1.5)
    policy.place(demand, prefill_views, costs)      # a Placement, None without instances

`CacheCentric` predicts the time to the first token on every instance: pulling a prefix that others
have, loading it, waiting in the queue, computing the rest. A prefix is pulled when the longest one
is more than `balancing` times the instance's own; the instance then holds it too, which is how hot
prefixes spread: nobody predicts what is hot. With `weigh` (the default) a pull that is predicted to
take longer than computing the same tokens is not made; without, the rule is exactly the paper's.

Where answers are decoded as well, each chunk of the prompt waits for a step of these.

Comparisons are strict: of equal instances the earlier one stays. O(instances + holders); what a
prompt takes is predicted once for all instances that have equally much of it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from serving.scheduling.views import DecodeView, Demand, Placement, PrefillView

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterable, Sequence

    from serving.scheduling.costs import Costs, DecodeCost

__all__ = [
    "AnyInstance",
    "CacheCentric",
    "LeastLoaded",
    "LocalCache",
    "PlacementPolicy",
    "RoundRobin",
    "choose_decode",
    "placed_on",
]


def _source(demand: Demand, costs: Costs) -> tuple[str, int]:
    """Who has the longest prefix, the quickest of several by prediction; and how long it is."""
    matches = demand.matches
    longest = max(matches.values(), default=0)
    best = min(longest, demand.tokens)
    able = [name for name, count in matches.items() if count == longest]
    if len(able) <= 1:
        return (able[0] if able else ""), best
    count = best * costs.kv_bytes
    return min(able, key=lambda name: costs.transfer.predict(name, count)), best


class PlacementPolicy(Protocol):
    """Chooses the prefill instance of a request."""

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """Return the choice; None when there is no instance."""
        ...


def _local(demand: Demand, own: int, costs: Costs, declined: str = "") -> Placement:
    """A request on some instance that uses what it has itself."""
    load_s = costs.load.predict(own * costs.kv_bytes)
    prefill_s = costs.prefill.predict(demand.tokens, own)
    return Placement("", own, "", 0, 0.0, load_s, 0.0, prefill_s, load_s + prefill_s, declined)


def _own(demand: Demand, name: str) -> int:
    """What an instance has itself, or will have when the request leaves its queue."""
    own = demand.matches.get(name, 0)
    if demand.coming:
        own = max(own, demand.coming.get(name, 0))
    return min(own, demand.tokens)


def _quickest(
    demand: Demand,
    instances: Iterable[PrefillView],
    placed: Callable[[int], Placement],
    costs: Costs,
    weight: float = 1.0,
) -> Placement | None:
    """The instance with the least time to the first token; `placed` is by what one has itself.

    A second of work counts as `weight` seconds of waiting.
    """
    by_own: dict[int, tuple[float, Placement]] = {}
    best, least_s, chosen = None, math.inf, None
    matches, coming, tokens = demand.matches, demand.coming, demand.tokens
    for instance in instances:
        name, queue_s, beside = instance
        own = matches.get(name, 0)  # as `_own`, without a call for each instance
        if name in coming and coming[name] > own:
            own = coming[name]
        if own > tokens:
            own = tokens
        found = by_own.get(own)
        if found is None:
            placement = placed(own)
            found = by_own[own] = placement.ttft_s, placement
        work_s = found[0]
        if beside is not None:
            work_s += _beside_s(demand, beside, found[1].cached, costs)
        seconds = weight * work_s + queue_s
        if best is None or seconds < least_s:
            best, least_s, chosen = found[1], seconds, instance
    return None if best is None or chosen is None else _at(chosen, demand, best, costs)


def _beside_s(demand: Demand, beside: DecodeView, cached: int, costs: Costs) -> float:
    """What the steps of an instance's answers add to a prompt that is computed beside them."""
    if not beside.batch:
        return 0.0
    chunks = math.ceil(max(1, demand.tokens - cached) / max(1, beside.chunk_tokens))
    return chunks * costs.decode.predict(beside.batch, beside.tokens)


def _at(instance: PrefillView, demand: Demand, found: Placement, costs: Costs) -> Placement:
    """What was found for an instance with so much of its own, at that instance."""
    name, queue_s, beside = instance
    if beside is None:
        return Placement(
            name,
            found.cached,
            found.source,
            found.pulled,
            found.transfer_s,
            found.load_s,
            queue_s,
            found.prefill_s,
            found.alternative_s,
            found.declined,
        )
    own = _own(demand, name)
    return found._replace(
        prefill=name,
        queue_s=queue_s,
        prefill_s=found.prefill_s + _beside_s(demand, beside, found.cached, costs),
        alternative_s=found.alternative_s + _beside_s(demand, beside, own, costs),
    )


def placed_on(demand: Demand, instance: PrefillView, costs: Costs) -> Placement:
    """The request on an instance that was chosen for another reason, with what it has itself."""
    found = _local(demand, _own(demand, instance.name), costs)
    return _at(instance, demand, found, costs)


class CacheCentric:
    """KVCache-centric scheduling, Algorithm 1: prefixes are pulled to where the queue is short."""

    def __init__(self, balancing: float = 1.5, *, weigh: bool = True) -> None:
        if balancing < 1:
            raise ValueError(f"balancing must be 1 or more, not {balancing}")
        self._balancing = balancing
        self._weigh = weigh

    def place(
        self,
        demand: Demand,
        instances: Sequence[PrefillView],
        costs: Costs,
        weight: float = 1.0,
    ) -> Placement | None:
        """The instance with the least predicted time to the first token.

        A second of work counts as `weight` seconds of waiting.
        """
        holder, best = _source(demand, costs)
        return _quickest(
            demand,
            instances,
            lambda own: self._placed(demand, own, holder, best, costs),
            costs,
            weight,
        )

    def _placed(self, demand: Demand, own: int, holder: str, best: int, costs: Costs) -> Placement:
        alone = _local(demand, own, costs)
        # Nothing of its own but something elsewhere counts as an infinite ratio.
        if best <= own * self._balancing:
            return alone
        pulled = best - own
        transfer_s = costs.transfer.predict(holder, pulled * costs.kv_bytes)
        load_s = costs.load.predict(best * costs.kv_bytes)
        prefill_s = costs.prefill.predict(demand.tokens, best)
        alone_s = alone.alternative_s
        found = Placement(
            "", best, holder, pulled, transfer_s, load_s, 0.0, prefill_s, alternative_s=alone_s
        )
        if self._weigh and transfer_s > found.saved_s:
            return alone._replace(declined=holder)
        return found


class LocalCache:
    """Algorithm 1 without transfers: instances use only what they hold."""

    def place(
        self,
        demand: Demand,
        instances: Sequence[PrefillView],
        costs: Costs,
        weight: float = 1.0,
    ) -> Placement | None:
        """The instance with the least predicted time to the first token.

        A second of work counts as `weight` seconds of waiting.
        """
        return _quickest(demand, instances, lambda own: _local(demand, own, costs), costs, weight)


def _least(instance: PrefillView) -> tuple[float, int]:
    """How much an instance has to do: work that waits, then answers beside it."""
    return instance.queue_s, instance.beside.batch if instance.beside is not None else 0


class LeastLoaded:
    """The instance with the least work waiting, whatever it holds."""

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """The one with the shortest queue; of several with one, that with the fewest answers."""
        chosen = min(instances, key=_least, default=None)
        return None if chosen is None else placed_on(demand, chosen, costs)


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
        return placed_on(demand, self._source.choice(instances), costs)


class RoundRobin:
    """The instance whose last turn is longest ago, whatever it holds and has to do."""

    def __init__(self) -> None:
        self._turns: dict[str, int] = {}
        self._count = 0

    def place(
        self, demand: Demand, instances: Sequence[PrefillView], costs: Costs
    ) -> Placement | None:
        """The next one."""
        chosen = min(
            instances, key=lambda instance: self._turns.get(instance.name, 0), default=None
        )
        if chosen is None:
            return None
        self._count += 1
        # Of instances that are gone nothing is kept; one that comes back is the next.
        self._turns = {each.name: self._turns.get(each.name, 0) for each in instances}
        self._turns[chosen.name] = self._count
        return placed_on(demand, chosen, costs)


def choose_decode(
    demand: Demand, instances: Sequence[DecodeView], cost: DecodeCost
) -> DecodeView | None:
    """The decode instance with the least predicted time between tokens, all counted that come.

    Only instances with room for the whole answer take part; None when there is none.
    """
    needed = demand.tokens + demand.max_new_tokens
    best, least_s = None, math.inf
    for each in instances:
        if each.free_tokens < needed:
            continue
        tokens = each.tokens + each.coming_tokens + demand.tokens
        seconds = cost.predict(each.batch + each.coming + 1, tokens, each.chunk_tokens)
        if best is None or seconds < least_s:
            best, least_s = each, seconds
    return best
