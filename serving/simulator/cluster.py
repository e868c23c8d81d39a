"""A cluster of prefill and decode nodes under the product's scheduler, in simulated time.

    cluster = Cluster(Plan(prefill=8, decode=8, cache_tokens=3_000_000), hardware)
    outcomes = cluster.run(trace)

Each request is a `Course` of the product, asked what to do next and told what came of it, as the
conductor's sockets do it; `Scheduler`, `Holdings` and the index are those that run. What is made up
are machines: `PrefillNode`, `DecodeNode` and the network, whose times `Hardware` says. Nothing is
random but a placement that is, by the seed of the plan: the same plan, the same outcomes.

The 12,031 requests of the published conversation trace take 8 + 8 nodes 7 s of one core. Outcomes
are columns, and a request that has ended is only there.
"""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from eviction import create_policy
from eviction.registry import find_policy
from eviction.trace import BLOCK_TOKENS
from mooncake_store.errors import InvalidArgumentError
from serving.engine.sampling import Sampling
from serving.scheduling.admission import AtDecode
from serving.scheduling.course import Compute, Course, Decode, Prefilled, Wait
from serving.scheduling.holdings import Holdings
from serving.scheduling.index import PrefixIndex
from serving.scheduling.ledger import DECODE, PREFILL, Instance
from serving.scheduling.policies import (
    check_admission,
    check_placement,
    make_admission,
    make_placement,
)
from serving.scheduling.requests import Finish, Request
from serving.scheduling.scheduler import Policies, Scheduler
from serving.scheduling.stats import Stats
from serving.scheduling.views import Slo
from serving.simulator.cache import NodeCache
from serving.simulator.decoding import DecodeNode, Decoding
from serving.simulator.network import FairShare, Fifo
from serving.simulator.outcomes import Outcomes
from serving.simulator.predictions import exact_costs
from serving.simulator.prefilling import Prefilling, PrefillNode
from serving.simulator.prompts import TracePrompt
from serving.simulator.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eviction import EvictionPolicy, Trace
    from serving.simulator.hardware import Hardware
    from serving.simulator.network import Network

__all__ = ["Cluster", "Plan"]

_NEVER_S = 1e9
NETWORKS: dict[str, Callable[[Timeline, float], Network]] = {"fair": FairShare, "fifo": Fifo}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is simulated."""

    prefill: int = 8
    decode: int = 8
    """Nodes that decode; without any, requests end with their first token."""
    cache_tokens: int = 3_000_000
    """Of each prefill node, in whole blocks of its trace; 0 keeps nothing."""
    eviction: str = "lru"
    placement: str = "cache-centric"
    balancing: float = 1.5
    admission: str = ""
    """at-decode, load or forecast; empty refuses nobody."""
    ttft_s: float = 30.0
    tbt_s: float = 0.1
    decode_s: float = 0.0
    """How long a decode is taken to last; 0 learns it."""
    network: str = "fair"
    """fair or fifo."""
    speed: float = 1.0
    """How much faster than the trace requests come."""
    seed: int = 1

    def __post_init__(self) -> None:
        with _as_argument():
            find_policy(self.eviction)
            check_placement(self.placement)
            if self.admission:
                check_admission(self.admission)
        if self.network not in NETWORKS:
            raise InvalidArgumentError(
                f"there is no network {self.network!r}", advice=f"choose from {', '.join(NETWORKS)}"
            )
        if self.prefill < 1 or min(self.decode, self.cache_tokens, self.decode_s) < 0:
            raise InvalidArgumentError(
                f"{self.prefill} prefill and {self.decode} decode nodes with {self.cache_tokens} "
                "tokens of cache: one node computes prompts at least, nothing is below 0"
            )
        if self.speed <= 0 or not math.isfinite(self.speed):
            raise InvalidArgumentError(f"requests cannot come {self.speed} times as fast")


@contextmanager
def _as_argument() -> Iterator[None]:
    """What is wrong with a policy that was named is a mistake in the plan."""
    try:
        yield
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error


class _Flight:
    """One request under way."""

    __slots__ = ("act", "chain", "course", "number", "output", "prefilling", "request")

    def __init__(self, number: int, request: Request, chain: list[int], output: int) -> None:
        self.number = number
        self.request = request
        self.chain = chain
        self.output = output
        self.course: Course
        self.act: Compute
        self.prefilling: Prefilling


class Cluster:
    """Runs one trace, once."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        self._plan = plan
        self._hardware = hardware
        self._timeline = timeline = Timeline()
        self._stats = Stats()
        self._index = PrefixIndex()
        self._holdings = Holdings(self._index, _named)
        self._scheduler = _scheduler(plan, hardware)
        network = NETWORKS[plan.network](timeline, hardware.network_bytes_per_s)
        slots = plan.cache_tokens // BLOCK_TOKENS
        self._prefill = {
            f"prefill-{number}": self._prefill_node(number, slots, network)
            for number in range(plan.prefill)
        }
        self._decode = {
            f"decode-{number}": DecodeNode(plan.prefill + number, timeline, hardware)
            for number in range(max(1, plan.decode))
        }
        ledger = self._scheduler.ledger
        for name in self._prefill:
            ledger.join(Instance(name, PREFILL))
        for name in self._decode:
            # Where nobody is refused, what has no room waits for it.
            ledger.join(Instance(name, DECODE, hardware.kv_tokens if plan.admission else 1 << 60))
        self._watched: dict[int, int] = {}
        self._outcomes: Outcomes

    def _prefill_node(self, number: int, slots: int, network: Network) -> PrefillNode:
        name, index = f"prefill-{number}", self._index

        def told(fresh: Sequence[int], gone: Sequence[int]) -> None:
            index.discard(name, gone)
            index.add(name, fresh)
            for block in self._watched:
                self._watched[block] = max(self._watched[block], index.count(block))

        def make(count: int) -> EvictionPolicy:
            with _as_argument():
                return create_policy(self._plan.eviction, count)

        cache = NodeCache(slots, make)
        return PrefillNode(
            number, self._timeline, self._hardware, network, cache, BLOCK_TOKENS, told
        )

    def watch(self, blocks: Sequence[int]) -> dict[int, int]:
        """Have the most nodes that some blocks lie on at a time counted during the run."""
        self._watched = dict.fromkeys(blocks, 0)
        return self._watched

    def run(self, trace: Trace) -> Outcomes:
        """Serve every request of a trace.

        Raises:
            InvalidArgumentError: its requests are not in the order of their times.
        """
        _check_order(trace)
        self._outcomes = Outcomes(len(trace))
        self._trace = trace
        self._arrivals = (trace.timestamps_ms / (1000.0 * self._plan.speed)).tolist()
        if len(trace):
            self._timeline.at(self._arrivals[0], self._arrive, 0)
        self._timeline.run()
        self._outcomes.lasted_s = self._timeline.now
        return self._outcomes

    # -- one request

    def _arrive(self, number: int) -> None:
        if number + 1 < len(self._arrivals):  # one at a time: a trace may be long
            self._timeline.at(self._arrivals[number + 1], self._arrive, number + 1)
        trace, now = self._trace, self._timeline.now
        first, last = trace.offsets[number : number + 2].tolist()
        chain = trace.ids[first:last].tolist()
        tokens, output = int(trace.input_tokens[number]), int(trace.output_tokens[number])
        output = max(1, output) if self._plan.decode else 1
        prompt = TracePrompt(tokens, chain)
        request = Request(str(number), prompt, Sampling(), output, deadline_s=_NEVER_S)
        flight = _Flight(number, request, chain, output)
        flight.course = Course(request, self._scheduler, self._stats, self._holdings, now)
        self._outcomes.arrived(number, now)
        self._go_on(flight)

    def _go_on(self, flight: _Flight) -> None:
        now = self._timeline.now
        act = flight.course.next(now)
        if isinstance(act, Compute):
            self._compute(flight, act)
        elif isinstance(act, Decode):
            flight.act = flight.act._replace(decode=act.decode)
        elif isinstance(act, Wait):
            self._timeline.at(now + act.seconds, self._go_on, flight)
        else:
            flight.course.close(now)
            code = act.reason if isinstance(act, Finish) else act.code
            self._outcomes.ended(flight.number, now, code)

    def _compute(self, flight: _Flight, act: Compute) -> None:
        place = act.placement
        flight.act = act
        source = self._prefill[place.source].number if place.source else -1
        flight.prefilling = prompt = Prefilling(
            tokens=len(act.prompt),
            chain=flight.chain,
            priority=flight.request.priority,
            source=source,
            pulled_to=place.cached if place.source else 0,
            target=self._decode[act.decode].number if flight.output > 1 else -1,
            started=lambda prompt: flight.course.started(self._timeline.now, prompt.cached),
            computed=lambda _: self._computed(flight),
            sent=lambda _: self._sent(flight),
        )
        self._prefill[place.prefill].take(prompt, place.pulled)

    def _computed(self, flight: _Flight) -> None:
        course, prompt, now = flight.course, flight.prefilling, self._timeline.now
        self._outcomes.first_token(flight.number, now, prompt.cached, prompt.seconds)
        course.first(now, 0)
        whole = flight.output <= 1
        course.prefilled(
            now,
            Prefilled(
                computed_tokens=prompt.tokens - prompt.cached,
                cached_tokens=prompt.cached,
                fetch_s=0.0,
                compute_s=prompt.seconds,
                kv=None,
                stopped="length" if whole else "",
                own_tokens=prompt.own,
                lent_tokens=prompt.cached - prompt.own,
            ),
        )
        node = self._decode[flight.act.decode]
        if not whole and self._turned_away(flight, node):
            course.turned_away("refused_at_decode", "it decodes too slowly", 1.0)
        self._go_on(flight)

    def _turned_away(self, flight: _Flight, node: DecodeNode) -> bool:
        """Whether the decode node's own check refuses a sequence."""
        if not self._plan.admission:
            return False
        tokens = node.tokens + flight.prefilling.tokens
        step_s = self._hardware.step_s(node.batch + 1, tokens)
        return node.batch > 0 and step_s > self._plan.tbt_s

    def _sent(self, flight: _Flight) -> None:
        if self._outcomes.is_over(flight.number):  # it was refused meanwhile
            return
        first_at = self._outcomes.first_at(flight.number)
        sequence = Decoding(
            flight.prefilling.tokens,
            flight.output - 1,
            first_at,
            lambda sequence: self._decoded(flight, sequence),
        )
        self._decode[flight.act.decode].join(sequence)

    def _decoded(self, flight: _Flight, sequence: Decoding) -> None:
        now, course = self._timeline.now, flight.course
        self._outcomes.decoded(flight.number, sequence.second_s, sequence.slowest_s)
        course.tokens(now, range(flight.output - 1))
        course.finished("length")
        self._go_on(flight)


def _check_order(trace: Trace) -> None:
    back = np.flatnonzero(np.diff(trace.timestamps_ms) < 0)
    if len(back):
        number = int(back[0]) + 1
        raise InvalidArgumentError(
            f"request {number} of the trace, counted from 0, comes before the one ahead of it: at "
            f"{trace.timestamps_ms[number]} ms after {trace.timestamps_ms[number - 1]}",
            advice="sort the trace by time",
        )


def _named(prompt: Sequence[int]) -> tuple[Sequence[int], int]:
    """The names of a prompt's blocks, and their size."""
    assert isinstance(prompt, TracePrompt)
    return prompt.chain, BLOCK_TOKENS


def _scheduler(plan: Plan, hardware: Hardware) -> Scheduler:
    slo = Slo(plan.ttft_s, plan.tbt_s) if plan.admission else Slo(_NEVER_S, _NEVER_S)
    with _as_argument():
        admission = make_admission(plan.admission) if plan.admission else AtDecode()
        placement = make_placement(plan.placement, plan.balancing, random.Random(plan.seed))
    policies = Policies(placement=placement, admission=admission)
    return Scheduler(slo, policies, exact_costs(hardware, plan.decode_s))
