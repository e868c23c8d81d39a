"""Nodes that compute prompts and decode at once, as engines without disaggregation do.

    outcomes = run_coupled(trace, hardware, CoupledPlan(nodes=16))

Prompts that wait are computed before the next step, one after the other, and every sequence waits
for them (vLLM's way without chunks). With `chunk_tokens` a step takes so many tokens of a prompt
along instead, so each step is longer and none is very long. Requests go to the node with the fewest
under way, or to each in turn. With `cache_tokens` a node keeps prefixes, in HBM, where loading
takes nothing.

It is the baseline that the paper compares with; the product's own coupled workers are not this.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eviction import create_policy
from eviction.trace import BLOCK_TOKENS
from serving.simulator.cache import NodeCache
from serving.simulator.decoding import DecodeNode, Decoding
from serving.simulator.outcomes import Outcomes
from serving.simulator.timeline import Timeline

if TYPE_CHECKING:
    from collections.abc import Callable

    from eviction import Trace
    from serving.simulator.hardware import Hardware

__all__ = ["CoupledNode", "CoupledPlan", "run_coupled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoupledPlan:
    """What is simulated."""

    nodes: int = 16
    cache_tokens: int = 0
    chunk_tokens: int = 0
    """0 computes prompts whole."""
    in_turn: bool = False
    """Whether nodes take turns; else the one with the fewest requests is next."""


@dataclass(slots=True, eq=False)
class _Prompt:
    tokens: int
    chain: list[int]
    output: int
    computed: Callable[[_Prompt], object]
    ended: Callable[[Decoding], object]
    cached: int = 0
    seconds: float = 0.0

    @property
    def room(self) -> int:
        """Tokens that it may come to have."""
        return self.tokens + self.output


class CoupledNode(DecodeNode):
    """One node; `requests` are under way on it."""

    def __init__(
        self, number: int, timeline: Timeline, hardware: Hardware, plan: CoupledPlan
    ) -> None:
        super().__init__(number, timeline, hardware)
        self.requests = 0
        self._chunk = plan.chunk_tokens
        self._prompts: deque[_Prompt] = deque()
        self._chunked: _Prompt | None = None
        self._chunks_end = 0
        self._cache = NodeCache(
            plan.cache_tokens // BLOCK_TOKENS, lambda count: create_policy("lru", count)
        )

    def take(self, prompt: _Prompt) -> None:
        """A request is here."""
        self.requests += 1
        self._prompts.append(prompt)
        if len(self._prompts) == 1:
            self._look_soon()

    def _along(self, now: float) -> tuple[float, int]:
        return self._chunks(now) if self._chunk else self._whole(now)

    def _whole(self, now: float) -> tuple[float, int]:
        """All that waits is computed, then the others have their step."""
        passed_s = 0.0
        while self._prompts and self._fits(self._prompts[0].room):
            prompt = self._prompts.popleft()
            passed_s += self._seconds_of(prompt)
            self._computed(prompt, now, now + passed_s)
        return passed_s, 1 if passed_s else 0

    def _chunks(self, now: float) -> tuple[float, int]:
        """A chunk of one prompt goes with each step."""
        prompt = self._chunked
        if prompt is not None and self._step >= self._chunks_end:
            self._computed(prompt, now, now)
            self._chunked = prompt = None
        if prompt is None and self._prompts and self._fits(self._prompts[0].room):
            prompt = self._chunked = self._prompts.popleft()
            self._seconds_of(prompt)
            self._chunks_end = self._step - (-prompt.tokens // self._chunk)
        if prompt is None:
            return 0.0, 0
        chunks = -(-prompt.tokens // self._chunk)
        return prompt.seconds / chunks, self._chunks_end - self._step

    def _seconds_of(self, prompt: _Prompt) -> float:
        prompt.cached = min(self._cache.match(prompt.chain) * BLOCK_TOKENS, prompt.tokens)
        # What is cached lies where it is computed with: nothing is loaded.
        prompt.seconds = self._hardware.compute_s(prompt.tokens, prompt.cached)
        self._cache.insert(prompt.chain)
        return prompt.seconds

    def _computed(self, prompt: _Prompt, now: float, at: float) -> None:
        self._timeline.at(at, prompt.computed, prompt)
        if prompt.output > 1:
            sequence = Decoding(prompt.tokens, prompt.output - 1, at, prompt.ended)
            self._enter(sequence, now)


def run_coupled(trace: Trace, hardware: Hardware, plan: CoupledPlan) -> Outcomes:
    """Serve every request of a trace."""
    timeline, outcomes = Timeline(), Outcomes(len(trace))
    nodes = [CoupledNode(number, timeline, hardware, plan) for number in range(plan.nodes)]
    arrivals = (trace.timestamps_ms / 1000.0).tolist()

    def arrive(number: int) -> None:
        if number + 1 < len(arrivals):
            timeline.at(arrivals[number + 1], arrive, number + 1)
        first, last = trace.offsets[number : number + 2].tolist()
        output = max(1, int(trace.output_tokens[number]))
        node = nodes[number % len(nodes)]
        if not plan.in_turn:
            node = min(nodes, key=lambda each: each.requests)
        outcomes.arrived(number, timeline.now)

        def computed(prompt: _Prompt) -> None:
            outcomes.first_token(number, timeline.now, prompt.cached, prompt.seconds)
            if output <= 1:
                over(None)

        def over(sequence: Decoding | None) -> None:
            node.requests -= 1
            if sequence is not None:
                outcomes.decoded(number, sequence.second_s, sequence.slowest_s)
            outcomes.ended(number, timeline.now, "length")

        chain = trace.ids[first:last].tolist()
        node.take(_Prompt(int(trace.input_tokens[number]), chain, output, computed, over))

    if arrivals:
        timeline.at(arrivals[0], arrive, 0)
    timeline.run()
    outcomes.lasted_s = timeline.now
    return outcomes
