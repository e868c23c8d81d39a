"""The Conductor's decisions, without its sockets: admit or refuse, where to, and what to learn.

    scheduler = Scheduler(Slo(ttft_s=5, tbt_s=0.1))
    scheduler.ledger.join(Instance("p0", "prefill"))
    scheduler.ledger.join(Instance("d0", "decode"))
    answer = scheduler.arrive(now, "request-1", demand)        # an Admission or a Rejection
    scheduler.started(now, "request-1")                        # its prefill left the queue
    scheduler.decoding(now, "request-1")                       # its first token is there
    scheduler.ended(now, "request-1", finished=True)

It joins the policies (placement, admission, roles), the cost models and the ledger. The asyncio
Conductor drives it with events from workers, a simulator with its own clock; neither changes a
line of it. Each call costs what the views of the ledger cost: O(instances).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from serving.scheduling.admission import ByForecast, Outlook, decode_load
from serving.scheduling.costs import Costs
from serving.scheduling.ledger import COUPLED, DECODE, PREFILL, Flight, Ledger
from serving.scheduling.placement import CacheCentric, choose_decode
from serving.scheduling.views import Demand, Placement, Rejection, Slo

if TYPE_CHECKING:
    from collections.abc import Sequence

    from serving.scheduling.admission import AdmissionPolicy
    from serving.scheduling.pipelines import PipelineRule
    from serving.scheduling.placement import PlacementPolicy
    from serving.scheduling.roles import Change, RoleBalancer
    from serving.scheduling.views import DecodeView

__all__ = ["Admission", "Loads", "Policies", "Scheduler"]

_NOBODY_RETRY_S = 1.0


@dataclass(slots=True)
class Policies:
    """The exchangeable rules."""

    placement: PlacementPolicy = field(default_factory=CacheCentric)
    admission: AdmissionPolicy = field(default_factory=ByForecast)
    roles: RoleBalancer | None = None
    pipeline: PipelineRule | None = None


class Admission(NamedTuple):
    """A request that is taken: where its prompt is computed and where its answer is."""

    placement: Placement
    decode: str
    helpers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Loads:
    """Predicted times over their SLOs: the worst prefill queue, the mean of decode instances."""

    prefill: float
    decode: float


class Scheduler:
    """Decides by the policies, and learns from what instances report."""

    def __init__(
        self, slo: Slo | None = None, policies: Policies | None = None, costs: Costs | None = None
    ) -> None:
        self.slo = slo or Slo()
        self.policies = policies or Policies()
        self.costs = costs or Costs()
        self.ledger = Ledger()

    def arrive(self, now: float, request: str, demand: Demand) -> Admission | Rejection:
        """Decide about a new request; an admitted one is in the ledger."""
        decodes = self.ledger.decode_views()
        chosen = self._choose(now, demand, decodes)
        if isinstance(chosen, Rejection):
            return chosen
        placement = chosen.placement
        outlook = Outlook(
            now=now,
            slo=self.slo,
            ttft_s=placement.ttft_s,
            queue_s=placement.queue_s,
            tokens=demand.tokens,
            decode=next(each for each in decodes if each.name == chosen.decode),
            under_way=self.ledger.under_way,
            costs=self.costs,
        )
        refusal = self.policies.admission.refusal(outlook)
        if refusal is not None:
            return refusal
        self._assign(now, request, demand, chosen)
        return chosen

    def move(
        self, now: float, request: str, demand: Demand, avoid: frozenset[str]
    ) -> Admission | Rejection:
        """Place an admitted request again, after an instance failed it, whatever the load."""
        self.ended(now, request, finished=False)
        decodes = [each for each in self.ledger.decode_views() if each.name not in avoid]
        chosen = self._choose(now, demand, decodes, avoid)
        if isinstance(chosen, Admission):
            self._assign(now, request, demand, chosen)
        return chosen

    def decode_at(self, request: str, avoid: frozenset[str]) -> str:
        """Where a request whose prompt is computed decodes, by what instances do now.

        For one whose KV any of them can load; without another choice it stays where it is.
        """
        flight = self.ledger.flights[request]
        views = [
            each if each.name != flight.decode else _without(each, flight)
            for each in self.ledger.decode_views()
            if each.name not in avoid
        ]
        left = flight.tokens + flight.max_new_tokens - flight.context
        chosen = choose_decode(Demand(flight.context, {}, left), views, self.costs.decode)
        if chosen is not None:
            self.ledger.redirect(request, chosen.name)
        return flight.decode

    def _choose(
        self,
        now: float,
        demand: Demand,
        decodes: Sequence[DecodeView],
        avoid: frozenset[str] = frozenset(),
    ) -> Admission | Rejection:
        prefills = self.ledger.prefill_views(now, demand.priority)
        if avoid:
            prefills = [each for each in prefills if each.name not in avoid]
        placement = self.policies.placement.place(demand, prefills, self.costs)
        if placement is None:
            return Rejection("no_workers", "no prefill instance is there", _NOBODY_RETRY_S)
        if not decodes:
            return Rejection("no_workers", "no decode instance is there", _NOBODY_RETRY_S)
        decode = self._stay(demand, placement, decodes) or choose_decode(
            demand, decodes, self.costs.decode
        )
        if decode is None:
            return Rejection(
                "no_room",
                f"no decode instance has room for {demand.tokens + demand.max_new_tokens} tokens",
                max(_NOBODY_RETRY_S, self.costs.duration.seconds / 2),
            )
        helpers: tuple[str, ...] = ()
        rule, to_compute = self.policies.pipeline, demand.tokens - placement.cached
        if rule is not None:
            helpers = rule.helpers(placement, to_compute, prefills)
        if rule is not None and helpers:
            quicker = placement.prefill_s / rule.speed_up(to_compute, 1 + len(helpers))
            placement = placement._replace(prefill_s=quicker)
        return Admission(placement, decode.name, helpers)

    def _stay(
        self, demand: Demand, placement: Placement, decodes: Sequence[DecodeView]
    ) -> DecodeView | None:
        """Where its prompt is computed, if it can be decoded there: no KV has to travel then.

        Not where tokens would come too late: another instance may be idle.
        """
        if self.ledger.instances[placement.prefill].role != COUPLED:
            return None
        here = [each for each in decodes if each.name == placement.prefill]
        chosen = choose_decode(demand, here, self.costs.decode)
        if chosen is None:
            return None
        batch = chosen.batch + chosen.coming + 1
        tokens = chosen.tokens + chosen.coming_tokens + demand.tokens
        tbt_s = self.costs.decode.predict(batch, tokens, chosen.chunk_tokens)
        return chosen if batch == 1 or tbt_s <= self.slo.tbt_s else None

    def _assign(self, now: float, request: str, demand: Demand, chosen: Admission) -> None:
        self._pass_time(now)
        placement = chosen.placement
        if placement.declined:
            self.costs.transfer.declined(placement.declined)
        flight = Flight(
            request=request,
            tokens=demand.tokens,
            max_new_tokens=demand.max_new_tokens,
            priority=demand.priority,
            prefill=placement.prefill,
            decode=chosen.decode,
            arrived=now,
            predicted_s=placement.work_s,
            ttft_s=placement.ttft_s,
            helpers=chosen.helpers,
        )
        self.ledger.assign(flight)

    # -- what instances report

    def started(self, now: float, request: str) -> None:
        """Its prefill left the queue."""
        self.ledger.started(now, request)

    def decoding(self, now: float, request: str) -> None:
        """Its first token is there."""
        self._pass_time(now)
        self.ledger.decoding(now, request)

    def ended(self, now: float, request: str, *, finished: bool) -> None:
        """It ended; `finished` when it decoded to its end. Harmless when it is not known."""
        self._pass_time(now)
        flight = self.ledger.ended(request)
        if flight is not None and flight.stage == DECODE and finished:
            self.costs.duration.finished()

    def _pass_time(self, now: float) -> None:
        self.costs.duration.advance(now, self.ledger.decoding_now())

    # -- load and roles

    def loads(self, now: float) -> Loads:
        """The two loads of this moment."""
        queues = [view.queue_s for view in self.ledger.prefill_views(now)]
        worst = max(queues, default=0.0) / self.slo.ttft_s
        return Loads(worst, decode_load(self.ledger.decode_views(), self.costs, self.slo))

    def load_of(self, now: float, name: str, role: str) -> float:
        """The load of one instance: a predicted time over its SLO."""
        prefill = self.ledger.queue_s(now, name) / self.slo.ttft_s if role != DECODE else 0.0
        views = [view for view in self.ledger.decode_views() if view.name == name]
        return max(prefill, decode_load(views, self.costs, self.slo))

    def rebalance(self, now: float) -> tuple[str, Change] | None:
        """Which instance should change its role now, if any: the one with the least to do."""
        if self.policies.roles is None:
            return None
        ledger, loads = self.ledger, self.loads(now)
        prefills, decodes = ledger.of_role(PREFILL), ledger.of_role(DECODE)
        change = self.policies.roles.step(
            now, loads.prefill, loads.decode, len(prefills), len(decodes)
        )
        if change is None:
            return None
        both = decodes if change.to == PREFILL else prefills
        giving = [each for each in both if each.role != COUPLED]
        if not giving:
            return None
        idlest = min(giving, key=lambda instance: len(ledger.on(instance.name)))
        return idlest.name, change


def _without(view: DecodeView, flight: Flight) -> DecodeView:
    """An instance as it would be without a request that comes to it."""
    return view._replace(
        free_tokens=view.free_tokens + flight.tokens + flight.max_new_tokens,
        coming=view.coming - 1,
        coming_tokens=view.coming_tokens - flight.context,
    )
