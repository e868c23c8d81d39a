"""Which of several complete engines gets a request: a placement policy over what is known of them.

    router = EngineRouter(LocalCache())
    router.join("vllm-0"); router.join("vllm-1")
    name = router.choose(now, "request-1", Wanted(Demand(4000, {"vllm-1": 3072}), streamed=True))
    router.answering(now, "request-1")      # its first token is there
    router.ended(now, "request-1", Usage(4000, 3072))

Policies, ledger and cost models are those of the Conductor's workers. An engine says nothing of
when it begins with a prompt, so they are taken to be computed one after the other, as they came: a
prompt begins when the one before it has its first token, or arrives where nothing waits. How long a
prompt takes is learnt from those that found nothing to wait for. Of an answer that is not streamed
the first token cannot be seen: its prompt counts as computed after the time predicted for it.

Others may use an engine too. What waits there and is not ours is known from its own figures
(`EngineLoad`), until these are old, and each such request is taken to be like the one at hand.
Where KV has no room for the prompt, one of the requests that run has to end first.

Failed engines rest for a while that doubles. Those that do not tell of themselves, or sleep, are
passed over while there are others. Pure: time is an argument. O(engines log engines).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from serving.scheduling.costs import Costs
from serving.scheduling.ledger import DECODE, PREFILL, Flight, Instance, Ledger
from serving.scheduling.views import PrefillView

if TYPE_CHECKING:
    from collections.abc import Collection

    from serving.scheduling.placement import PlacementPolicy
    from serving.scheduling.views import Demand

__all__ = ["EngineLoad", "EngineRouter", "Predicted", "Usage", "Wanted"]

_REST_MIN_S, _REST_MAX_S = 1.0, 30.0
STALE_S = 5.0
"""What an engine told of its load is not believed for longer."""
RECENT = 256


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What an engine says of itself. `free_tokens` is room for KV, None where it is not told."""

    running: int
    waiting: int
    free_tokens: int | None = None
    awake: bool = True


class Usage(NamedTuple):
    """What an answer says of its prompt; None where it does not say how much was cached."""

    prompt_tokens: int
    cached_tokens: int | None = None


class Wanted(NamedTuple):
    """A request: its prompt, whether its first token will be seen, whether tokens were counted.

    `told` are the engines whose caches are known; of others a match of 0 means nothing.
    """

    demand: Demand
    streamed: bool = False
    counted: bool = False
    told: Collection[str] = ()


class Predicted(NamedTuple):
    """What was predicted for a first token that came, and how long it took."""

    predicted_s: float
    measured_s: float


@dataclass(slots=True)
class _Engine:
    line: dict[str, None] = field(default_factory=dict)
    """Requests whose prompts it has yet to compute, as they came; the first is being computed."""
    requests: int = 0
    turn: int = 0
    rest_s: float = 0.0
    resting_until: float = float("-inf")
    silent: bool = False
    load: EngineLoad | None = None
    others: int = 0
    """Requests of others that waited when it told its load."""
    told_at: float = float("-inf")


@dataclass(slots=True)
class _Given:
    engine: str
    wanted: Wanted
    cached: int
    alone: bool
    """Whether it found nothing to wait for, so that its first token tells what computing takes."""
    took_s: float = 0.0


class EngineRouter:
    """What each engine has to do, and who gets the next request."""

    def __init__(self, policy: PlacementPolicy, costs: Costs | None = None) -> None:
        self._policy = policy
        self.costs = costs or Costs()
        self._ledger = Ledger()
        self._engines: dict[str, _Engine] = {}
        self._given: dict[str, _Given] = {}
        self._turns = 0
        self.recent: deque[Predicted] = deque(maxlen=RECENT)
        """The first tokens of the last streamed answers."""

    @property
    def engines(self) -> dict[str, int]:
        """Every engine with the requests it has."""
        return {name: engine.requests for name, engine in self._engines.items()}

    def join(self, name: str) -> None:
        """An engine is there; one that was there stays as it is."""
        if name not in self._engines:
            self._engines[name] = _Engine()
            self._ledger.join(Instance(name, PREFILL))

    # -- requests

    def choose(
        self, now: float, request: str, wanted: Wanted, avoid: Collection[str] = ()
    ) -> str | None:
        """Give a request to an engine; None when every one rests or is to be avoided."""
        for engine in self._engines.values():
            self._pass_by(now, engine)
        demand = wanted.demand
        placement = self._policy.place(demand, self._views(now, demand, avoid), self.costs)
        if placement is None:
            return None
        placement = placement.alone  # engines pull nothing because a front says so
        name = placement.prefill
        engine = self._engines[name]
        self._turns += 1
        engine.turn = self._turns
        engine.requests += 1
        alone = not engine.line and not self._others_s(now, engine, demand)
        self._given[request] = _Given(name, wanted, placement.cached, alone)
        self.costs.duration.advance(now, self._ledger.decoding_now())
        self._ledger.assign(
            Flight(
                request=request,
                tokens=demand.tokens,
                max_new_tokens=demand.max_new_tokens,
                priority=0,
                prefill=name,
                decode=name,
                arrived=now,
                predicted_s=placement.work_s,
                ttft_s=placement.ttft_s,
            )
        )
        engine.line[request] = None
        self._begin_first(now, engine)
        return name

    def _views(self, now: float, demand: Demand, avoid: Collection[str]) -> list[PrefillView]:
        """Those that may get a request, with the work that waits there."""
        views = []
        for name in self._able(now, avoid):
            queue_s = self._ledger.queue_s(now, name)
            others_s = self._others_s(now, self._engines[name], demand)
            views.append(PrefillView(name, queue_s + others_s))
        return views

    def _able(self, now: float, avoid: Collection[str] = ()) -> list[str]:
        """Who may be asked; policies keep the first of equal ones, so they come by turns."""
        passed_over = {*avoid, *self.resting(now)}
        able = [name for name in self._engines if name not in passed_over]
        well = [name for name in able if not self._unwell(self._engines[name])]
        return sorted(well or able, key=lambda name: self._engines[name].turn)

    @staticmethod
    def _unwell(engine: _Engine) -> bool:
        return engine.silent or (engine.load is not None and not engine.load.awake)

    def _others_s(self, now: float, engine: _Engine, demand: Demand) -> float:
        """What a request would wait for that is not ours, by the engine's own figures."""
        load = engine.load
        if load is None or now - engine.told_at > STALE_S:
            return 0.0
        seconds = engine.others * self.costs.prefill.predict(demand.tokens, 0)
        if load.free_tokens is not None and load.running and demand.tokens > load.free_tokens:
            seconds += self.costs.duration.seconds / load.running
        return seconds

    def idlest(self, now: float) -> str | None:
        """Who has the fewest requests, for a question that is none; None when every one rests."""
        able = self._able(now)
        return min(able, key=lambda name: self._engines[name].requests, default=None)

    def answering(self, now: float, request: str) -> None:
        """Its first token is there: its prompt is no longer work that waits."""
        given, flight = self._given.get(request), self._ledger.flights.get(request)
        if given is None or flight is None or flight.stage != PREFILL:
            return
        if given.wanted.streamed:
            given.took_s = now - flight.arrived
        self._computed(now, request)

    def ended(
        self, now: float, request: str, usage: Usage | None = None, *, finished: bool = False
    ) -> None:
        """It ended, however; `finished` when its answer did. Harmless when it is not known."""
        self.costs.duration.advance(now, self._ledger.decoding_now())
        given, flight = self._given.pop(request, None), self._ledger.ended(request)
        if given is None or flight is None:
            return
        engine = self._engines[given.engine]
        engine.requests -= 1
        engine.line.pop(request, None)
        self._begin_first(now, engine)
        if not finished or flight.stage != DECODE:
            return  # a refusal is quick, and says nothing of what a prompt takes
        self.costs.duration.finished()
        if given.took_s:
            self.recent.append(Predicted(flight.ttft_s, given.took_s))
            if given.alone:
                self._learn(given, usage)

    def _learn(self, given: _Given, usage: Usage | None) -> None:
        """Take in how long a prompt took, where it is known how much of it was computed."""
        wanted = given.wanted
        tokens = wanted.demand.tokens if usage is None else usage.prompt_tokens
        cached = None if usage is None else usage.cached_tokens
        if cached is None and wanted.counted and given.engine in wanted.told:
            cached = given.cached
        if cached is not None and (usage is not None or wanted.counted):
            self.costs.prefill.observe(tokens, cached, given.took_s)

    # -- the order in which prompts are computed

    def _begin_first(self, at: float, engine: _Engine) -> None:
        first = next(iter(engine.line), None)
        if first is not None and self._ledger.flights[first].began is None:
            self._ledger.started(at, first)

    def _computed(self, at: float, request: str) -> None:
        engine = self._engines[self._given[request].engine]
        self.costs.duration.advance(at, self._ledger.decoding_now())
        self._ledger.decoding(at, request)
        engine.line.pop(request, None)
        self._begin_first(at, engine)

    def _pass_by(self, now: float, engine: _Engine) -> None:
        """Prompts whose first tokens cannot be seen are computed once their time is over."""
        while engine.line:
            first = next(iter(engine.line))
            flight = self._ledger.flights[first]
            if self._given[first].wanted.streamed or flight.began is None:
                return
            over = flight.began + flight.predicted_s
            if over > now:
                return
            self._computed(over, first)

    # -- what engines tell, and whether they answer

    def pending(self, name: str) -> int:
        """Requests of ours whose prompts an engine has yet to compute."""
        return len(self._engines[name].line)

    def told(self, now: float, name: str, load: EngineLoad | None, ours: int = 0) -> None:
        """An engine answered about its load; None when it has no figures that can be read.

        `ours` is what `pending` was when it was asked: what it counts lies between then and now.
        """
        engine = self._engines[name]
        engine.silent, engine.load, engine.told_at = False, load, now
        mine = max(ours, len(engine.line))
        engine.others = 0 if load is None else max(0, load.waiting - mine)

    def silent(self, name: str) -> None:
        """An engine was asked about its load and did not answer in time."""
        engine = self._engines[name]
        engine.silent, engine.load, engine.others = True, None, 0

    def failed(self, now: float, name: str) -> None:
        """An engine could not be reached or broke off: it rests."""
        engine = self._engines[name]
        engine.rest_s = min(max(_REST_MIN_S, 2 * engine.rest_s), _REST_MAX_S)
        engine.resting_until = now + engine.rest_s

    def resting(self, now: float) -> set[str]:
        """The engines that are given nothing at present."""
        return {name for name, engine in self._engines.items() if now < engine.resting_until}

    def unwell(self) -> set[str]:
        """The engines that get a request only where no other one can have it."""
        return {name for name, engine in self._engines.items() if self._unwell(engine)}

    def answered(self, name: str) -> None:
        """An engine answered well: it has nothing to rest for."""
        engine = self._engines[name]
        engine.rest_s, engine.resting_until = 0.0, float("-inf")
