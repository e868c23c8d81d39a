"""A cluster of prefill and decode nodes under the product's scheduler, in simulated time.

    cluster = Cluster(Plan(prefill=8, decode=8, cache_tokens=3_000_000), hardware)
    outcomes = cluster.run(trace)

Each request is a `Course` of the product, asked what to do next and told what came of it, as the
conductor's sockets do it; `Scheduler`, `Holdings` and the index are those that run. What is made up
are machines: `PrefillNode`, `DecodeNode` and the network, whose times `Hardware` says. Nothing is
random but a placement that is, by the seed of the plan: the same plan, the same outcomes.

A node that fails loses its memory and what it was doing, and leaves ledger and index. Courses that
need it, where a prompt is computed, on its way or decoded, are told at once, and find another node;
the product notices when it next has to do with it. Who waits is woken when it comes back. Where
nodes change roles, each is both kinds of node, of which one has nothing to do.

The 12,031 requests of the published conversation trace take 8 + 8 nodes 2 s of one core, 100,000
made-up ones take 500 + 500 nodes 170 s, since the scheduler looks at every node for each of them.
Outcomes are columns, and a request that has ended is only there: nothing else grows with a trace.
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
from serving.scheduling.roles import RoleBalancer
from serving.scheduling.scheduler import Policies, Scheduler
from serving.scheduling.views import Slo
from serving.simulator.arrivals import requests
from serving.simulator.cache import NodeCache
from serving.simulator.decoding import DecodeNode, Decoding
from serving.simulator.network import FairShare, Fifo
from serving.simulator.outages import Outage, check_outages
from serving.simulator.outcomes import Outcomes
from serving.simulator.predictions import exact_costs
from serving.simulator.prefilling import Prefilling, PrefillNode
from serving.simulator.prompts import TracePrompt
from serving.simulator.replication import WINDOW_S, Replication
from serving.simulator.role_changes import RoleChanges
from serving.simulator.tiers import TieredCache
from serving.simulator.timeline import Timeline
from serving.simulator.unread import UnreadStats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from eviction import EvictionPolicy, Trace
    from serving.scheduling.admission import Outlook
    from serving.scheduling.views import Rejection
    from serving.simulator.arrivals import Coming
    from serving.simulator.hardware import Hardware
    from serving.simulator.network import Network
    from serving.simulator.replication import Copy

__all__ = ["Cluster", "Plan"]

_NEVER_S = 1e9
_SAMPLING = Sampling()
NETWORKS: dict[str, Callable[[Timeline, float], Network]] = {"fair": FairShare, "fifo": Fifo}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is simulated."""

    prefill: int = 8
    decode: int = 8
    """Nodes that decode; without any, requests end with their first token."""
    cache_tokens: int = 3_000_000
    """Of each prefill node, in whole blocks of its trace; 0 keeps nothing."""
    disk_tokens: int = 0
    """Of the disk below that, where the hardware says how quick it is; 0 has none."""
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
    outages: tuple[Outage, ...] = ()
    """Which nodes fail when, and for how long."""
    roles: bool = False
    """Whether nodes change sides, as loads ask for it."""
    copies: int = 0
    """How many prefill nodes hot prefixes are brought to ahead of requests; 0 leaves that to
    them."""

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
        if self.copies < 0:
            raise InvalidArgumentError(
                f"{self.copies} nodes cannot have copies", advice="0 or more"
            )
        if self.roles and not self.decode:
            raise InvalidArgumentError("roles change between nodes that compute and that decode")
        if self.speed <= 0 or not math.isfinite(self.speed):
            raise InvalidArgumentError(f"requests cannot come {self.speed} times as fast")
        if self.disk_tokens < 0 or (self.disk_tokens and self.cache_tokens < BLOCK_TOKENS):
            raise InvalidArgumentError(
                f"a disk of {self.disk_tokens} tokens below a memory of {self.cache_tokens}: "
                "blocks reach a disk through memory, and sizes are 0 or more"
            )
        check_outages(self.outages, self.prefill, self.decode)

    def check_on(self, hardware: Hardware) -> None:
        """Raise InvalidArgumentError where it needs to know of machines what is not said."""
        if self.disk_tokens and not hardware.disk_bytes_per_s:
            raise InvalidArgumentError(
                f"how quick disks are, on which {self.disk_tokens} tokens should lie, is not said",
                advice="name hardware with disk_bytes_per_s in its file",
            )


@contextmanager
def _as_argument() -> Iterator[None]:
    """What is wrong with a policy that was named is a mistake in the plan."""
    try:
        yield
    except ValueError as error:
        raise InvalidArgumentError(str(error)) from error


class _Flight:
    """One request under way."""

    __slots__ = (
        "act", "chain", "course", "first_at", "number", "prompt", "sequence", "waits",
    )  # fmt: skip

    def __init__(self, number: int, chain: list[int], course: Course) -> None:
        self.number = number
        self.chain = chain
        self.course = course
        self.act: Compute
        self.prompt: Prefilling | None = None
        """Being computed, or on its way to where it is decoded."""
        self.sequence: Decoding | None = None
        self.first_at = 0.0
        """When the first token of this attempt was there."""
        self.waits = 0
        """How often it waited, as the number of the last time."""


class Cluster:
    """Runs one trace, once."""

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        plan.check_on(hardware)
        self._plan = plan
        self._hardware = hardware
        self._timeline = timeline = Timeline()
        self._stats = UnreadStats()
        self._index = PrefixIndex()
        self._holdings = Holdings(self._index, self._named)
        self._scheduler = _scheduler(plan, hardware)
        network = NETWORKS[plan.network](timeline, hardware.network_bytes_per_s)
        self._roles = {f"prefill-{number}": PREFILL for number in range(plan.prefill)}
        self._roles |= {f"decode-{number}": DECODE for number in range(max(1, plan.decode))}
        able = (PREFILL, DECODE) if plan.roles else ()
        self._prefill: dict[str, PrefillNode] = {}
        self._decode: dict[str, DecodeNode] = {}
        for number, (name, role) in enumerate(self._roles.items()):
            if PREFILL in (role, *able):
                self._prefill[name] = self._prefill_node(name, number, network)
            if DECODE in (role, *able):
                self._decode[name] = DecodeNode(number, timeline, hardware)
            self._join(name)
        self._changes = RoleChanges(self._scheduler, timeline, self._take_role, self._is_needed)
        self._network = network
        self._replication = Replication(plan.copies, self._index, self._scheduler.ledger)
        self._flights: dict[int, _Flight] = {}
        self._waiting: dict[int, None] = {}
        """Who waits for a node, by number."""
        self._watched: dict[int, int] = {}
        self._outcomes: Outcomes

    def _join(self, name: str) -> None:
        if self._roles[name] == PREFILL:
            instance = Instance(name, PREFILL)
        else:
            # Where nobody is refused, what has no room waits for it.
            room = self._hardware.kv_tokens if self._plan.admission else 1 << 60
            instance = Instance(name, DECODE, room)
        self._scheduler.ledger.join(instance)

    def _take_role(self, name: str, role: str) -> None:
        self._roles[name] = role
        self._outcomes.role_changes += 1
        self._come_back(name)

    def _is_needed(self, name: str) -> bool:
        return any(self._needs(each, name) for each in self._flights.values())

    def _prefill_node(self, name: str, number: int, network: Network) -> PrefillNode:
        index = self._index

        def told(fresh: Sequence[int], gone: Sequence[int]) -> None:
            index.discard(name, gone)
            index.add(name, fresh)
            for block in self._watched:
                self._watched[block] = max(self._watched[block], index.count(block))

        cache = self._cache()
        return PrefillNode(
            number, self._timeline, self._hardware, network, cache, BLOCK_TOKENS, told
        )

    def _cache(self) -> NodeCache:
        def make(count: int) -> EvictionPolicy:
            with _as_argument():
                return create_policy(self._plan.eviction, count)

        slots, disk_slots = (
            tokens // BLOCK_TOKENS for tokens in (self._plan.cache_tokens, self._plan.disk_tokens)
        )
        return TieredCache(slots, disk_slots, make) if disk_slots else NodeCache(slots, make)

    def _named(self, prompt: Sequence[int]) -> tuple[Sequence[int], int]:
        """The names of a prompt's blocks, and their size; the blocks of an answer have none."""
        if isinstance(prompt, TracePrompt):
            return prompt.chain, BLOCK_TOKENS
        return self._flights[prompt[0]].chain, BLOCK_TOKENS

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
        self._coming = requests(trace, self._plan.speed)
        for outage in self._plan.outages:
            self._timeline.at(outage.at_s, self._fail, outage)
        self._expect_next()
        self._timeline.run()
        self._outcomes.lasted_s = float(np.nanmax(self._outcomes.ended_s, initial=0.0))
        return self._outcomes

    # -- one request

    def _expect_next(self) -> None:
        coming = next(self._coming, None)  # one at a time: a trace may be long
        if coming is not None:
            self._timeline.at(coming.at_s, self._arrive, coming)

    def _arrive(self, coming: Coming) -> None:
        self._expect_next()
        number, now = coming.number, self._timeline.now
        if self._plan.roles and not number:
            self._changes.look_often(lambda: self._outcomes.open > 0)
        if self._plan.copies:
            if not number:
                self._timeline.at(now + WINDOW_S, self._copy_often)
            self._replication.asked(coming.chain)
        output = max(1, coming.output_tokens) if self._plan.decode else 1
        prompt = TracePrompt(coming.input_tokens, coming.chain, number)
        request = Request(str(number), prompt, _SAMPLING, output, deadline_s=_NEVER_S)
        course = Course(request, self._scheduler, self._stats, self._holdings, now)
        flight = self._flights[number] = _Flight(number, coming.chain, course)
        self._outcomes.arrived(number, now)
        self._go_on(flight)

    def _go_on(self, flight: _Flight) -> None:
        now, course = self._timeline.now, flight.course
        act = course.next(now)
        if isinstance(act, Compute):
            self._compute(flight, act)
        elif isinstance(act, Wait):
            flight.waits += 1
            self._waiting[flight.number] = None
            self._timeline.at(now + act.seconds, self._waited, flight, flight.waits)
        elif not isinstance(act, Decode):  # which it does as soon as its KV is there
            course.close(now)
            del self._flights[flight.number]
            code = act.reason if isinstance(act, Finish) else act.code
            self._outcomes.ended(flight.number, now, code, max(0, course.line.attempts - 1))

    def _waited(self, flight: _Flight, which: int) -> None:
        if flight.waits == which and flight.number in self._waiting:
            del self._waiting[flight.number]
            self._go_on(flight)

    def _compute(self, flight: _Flight, act: Compute) -> None:
        place = act.placement
        flight.act = act
        source = self._prefill[place.source].number if place.source else -1
        prompt = flight.prompt = Prefilling(
            number=flight.number,
            tokens=len(act.prompt),
            chain=flight.chain,
            priority=0,
            source=source,
            pulled_to=place.cached if place.source else 0,
            target=self._decode[act.decode].number if act.new_tokens > 1 else -1,
            started=self._started,
            computed=self._computed,
            sent=self._sent,
        )
        read_s = 0.0
        if place.source:
            own = (place.cached - place.pulled) // BLOCK_TOKENS
            read_s = self._read_s(place.source, flight.chain[own : place.cached // BLOCK_TOKENS])
        self._prefill[place.prefill].take(prompt, place.pulled, read_s)

    def _read_s(self, owner: str, blocks: Sequence[int]) -> float:
        """How long the owner of blocks reads its disk for them."""
        count = self._prefill[owner].cache.on_disk(blocks)
        return self._hardware.disk_s(count * BLOCK_TOKENS * self._hardware.kv_bytes)

    def _started(self, prompt: Prefilling) -> None:
        self._flights[prompt.number].course.started(self._timeline.now, prompt.cached)

    def _computed(self, prompt: Prefilling) -> None:
        flight, now = self._flights[prompt.number], self._timeline.now
        course, cached = flight.course, prompt.cached
        self._outcomes.first_token(flight.number, now, cached, prompt.seconds, prompt.from_disk)
        flight.first_at = now
        course.first(now, 0)
        whole = prompt.target < 0
        course.prefilled(
            now,
            Prefilled(
                computed_tokens=prompt.tokens - cached,
                cached_tokens=cached,
                fetch_s=prompt.load_s,
                compute_s=prompt.seconds - prompt.load_s,
                kv=None,
                stopped="length" if whole else "",
                own_tokens=prompt.own,
                lent_tokens=cached - prompt.own,
            ),
        )
        if not whole and self._turned_away(prompt, flight.act.decode):
            flight.prompt = None
            course.turned_away("refused_at_decode", "it decodes too slowly", 1.0)
        self._go_on(flight)

    def _turned_away(self, prompt: Prefilling, name: str) -> bool:
        """Whether a decode node's own check refuses a sequence."""
        if not self._plan.admission:
            return False
        # Also those whose KV is on its way, which the node has taken.
        taken = [each for each in self._scheduler.ledger.on(name) if each.stage == DECODE]
        tokens = prompt.tokens + sum(each.context for each in taken)
        return bool(taken) and self._hardware.step_s(len(taken) + 1, tokens) > self._plan.tbt_s

    def _sent(self, prompt: Prefilling) -> None:
        flight = self._flights.get(prompt.number)
        if flight is None or flight.prompt is not prompt:  # it was refused or lost meanwhile
            return
        self._outcomes.sent(flight.number, self._timeline.now, prompt.sending_s)
        flight.prompt, act = None, flight.act
        flight.sequence = sequence = Decoding(
            prompt.tokens, act.new_tokens - 1, flight.first_at, self._decoded, flight.number
        )
        self._decode[act.decode].join(sequence)

    def _decoded(self, sequence: Decoding) -> None:
        flight, now = self._flights[sequence.number], self._timeline.now
        flight.sequence = None
        self._outcomes.decoded(flight.number, sequence.second_s, sequence.slowest_s)
        flight.course.tokens(now, bytes(sequence.left))
        flight.course.finished("length")
        self._go_on(flight)

    # -- copies ahead of requests

    def _copy_often(self) -> None:
        now = self._timeline.now
        for copy in self._replication.due(now):
            read_s = self._read_s(copy.source, copy.chain[copy.own :])
            self._timeline.at(now + read_s, self._send_copy, copy)
        if self._outcomes.open:
            self._timeline.at(now + WINDOW_S, self._copy_often)

    def _send_copy(self, copy: Copy) -> None:
        source, target = self._prefill[copy.source], self._prefill[copy.target]
        tokens = (len(copy.chain) - copy.own) * BLOCK_TOKENS
        self._outcomes.copied_tokens += tokens
        count = tokens * self._hardware.kv_bytes
        self._network.send(source.number, target.number, count, self._copied, copy)

    def _copied(self, copy: Copy) -> None:
        if copy.target in self._scheduler.ledger.instances:  # else it has failed meanwhile
            self._prefill[copy.target].keep(copy.chain)

    # -- nodes that fail

    def _fail(self, outage: Outage) -> None:
        name, now = outage.node, self._timeline.now
        self._timeline.at(now + outage.lasts_s, self._come_back, name)
        self._scheduler.ledger.leave(name)
        self._index.forget(name)
        self._changes.forget(name)
        lost = [each for each in self._flights.values() if self._needs(each, name)]
        for flight in lost:
            if flight.prompt is not None:
                self._prefill[flight.act.placement.prefill].drop(flight.prompt)
            flight.prompt = flight.sequence = None
        if name in self._prefill:
            number = self._prefill[name].number
            self._prefill[name].lose_memory(self._cache())
        if name in self._decode:
            number = self._decode[name].number
            for sequence, done in self._decode[name].fail():
                if done:
                    self._flights[sequence.number].course.tokens(now, bytes(done))
        self._network.cut(number)
        for node in self._prefill.values():
            node.lose_source(number)
            node.begin()
        for flight in lost:
            flight.course.blame(name)
            self._go_on(flight)

    @staticmethod
    def _needs(flight: _Flight, name: str) -> bool:
        """Whether a request cannot go on as it does without a node."""
        prompt = flight.prompt
        if prompt is not None:
            act = flight.act
            return act.placement.prefill == name or (prompt.target >= 0 and act.decode == name)
        return flight.sequence is not None and flight.act.decode == name

    def _come_back(self, name: str) -> None:
        self._join(name)
        waiting, self._waiting = self._waiting, {}
        for number in waiting:
            self._go_on(self._flights[number])


def _check_order(trace: Trace) -> None:
    back = np.flatnonzero(np.diff(trace.timestamps_ms) < 0)
    if len(back):
        number = int(back[0]) + 1
        raise InvalidArgumentError(
            f"request {number} of the trace, counted from 0, comes before the one ahead of it: at "
            f"{trace.timestamps_ms[number]} ms after {trace.timestamps_ms[number - 1]}",
            advice="sort the trace by time",
        )


class _Everybody:
    """Refuses nobody."""

    def refusal(self, outlook: Outlook) -> Rejection | None:
        return None


def _scheduler(plan: Plan, hardware: Hardware) -> Scheduler:
    with _as_argument():
        admission = make_admission(plan.admission) if plan.admission else _Everybody()
        placement = make_placement(plan.placement, plan.balancing, random.Random(plan.seed))
    roles = RoleBalancer() if plan.roles else None
    policies = Policies(placement=placement, admission=admission, roles=roles)
    return Scheduler(
        Slo(plan.ttft_s, plan.tbt_s),
        policies,
        exact_costs(hardware, plan.decode_s, disks=plan.disk_tokens > 0),
    )
