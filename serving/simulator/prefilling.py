"""A node that computes prompts, one after the other, and keeps what it computed.

A prompt that waits for a prefix of another node is passed over while others can go on. KV leaves
for the decode node layer by layer while it is computed, so all of it is there when the last layer
was sent: never before the end of the prefill, later where the network is the narrower.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from serving.simulator.cache import NodeCache
    from serving.simulator.hardware import Hardware
    from serving.simulator.network import Network
    from serving.simulator.timeline import Timeline

__all__ = ["Prefilling", "PrefillNode"]


@dataclass(slots=True, eq=False)
class Prefilling:
    """A prompt on a node. `started`, `computed` and, if it has a target, `sent` are called once."""

    number: int
    """Of its request."""
    tokens: int
    chain: Sequence[int]
    priority: int
    source: int
    """The node whose prefix is pulled; -1 for none."""
    pulled_to: int
    """How many tokens there are then."""
    target: int
    """The node that gets its KV; -1 for nobody."""
    started: Callable[[Prefilling], object]
    computed: Callable[[Prefilling], object]
    sent: Callable[[Prefilling], object]
    there: bool = True
    cached: int = 0
    own: int = 0
    from_disk: int = 0
    """Tokens of its own that were read from disk."""
    load_s: float = 0.0
    seconds: float = 0.0
    """Those included."""
    sent_from: float = 0.0
    """When its KV began to be sent."""
    sending_s: float = 0.0
    """How long that took, without what was sent at the end."""
    left: int = field(default=2, init=False)


class PrefillNode:
    """One node; `told` is called with what it keeps anew and what it lost."""

    def __init__(
        self,
        number: int,
        timeline: Timeline,
        hardware: Hardware,
        network: Network,
        cache: NodeCache,
        block_tokens: int,
        told: Callable[[list[int], list[int]], object],
    ) -> None:
        self.number = number
        self.cache = cache
        self._timeline = timeline
        self._hardware = hardware
        self._network = network
        self._block_tokens = block_tokens
        self._told = told
        self._waiting: list[tuple[int, int, Prefilling]] = []
        self._number = 0
        self._computing: Prefilling | None = None

    def take(self, prompt: Prefilling, pulled: int, read_s: float = 0.0) -> None:
        """Queue a prompt, and have `pulled` tokens of its prefix sent here.

        Whoever has them reads its disk for `read_s` before.
        """
        self._number += 1
        heapq.heappush(self._waiting, (-prompt.priority, self._number, prompt))
        if prompt.source >= 0:
            prompt.there = False
            if read_s:
                self._timeline.at(self._timeline.now + read_s, self._pull, prompt, pulled)
            else:
                self._pull(prompt, pulled)
        self.begin()

    def _pull(self, prompt: Prefilling, pulled: int) -> None:
        if not prompt.there:  # else whoever had it has failed
            count = pulled * self._hardware.kv_bytes
            self._network.send(prompt.source, self.number, count, self._arrived, prompt)

    def keep(self, chain: Sequence[int]) -> None:
        """Blocks are here, computed or sent."""
        self._told(*self.cache.insert(chain))

    def drop(self, prompt: Prefilling) -> None:
        """Give a prompt up that waits or is computed; `begin` follows."""
        prompt.there = True
        if self._computing is prompt:
            self._computing = None
        else:
            self._waiting = [each for each in self._waiting if each[2] is not prompt]
            heapq.heapify(self._waiting)

    def lose_memory(self, cache: NodeCache) -> None:
        """Go on with another one; what it was doing has been given up."""
        self.cache = cache

    def lose_source(self, number: int) -> None:
        """Nothing comes of what another node was sending: it is computed here."""
        for _, _, prompt in self._waiting:
            if prompt.source == number and not prompt.there:
                prompt.there, prompt.pulled_to = True, 0

    def _arrived(self, prompt: Prefilling) -> None:
        prompt.there = True
        self.begin()

    def begin(self) -> None:
        """Compute what waits, if it can be and nothing else is; harmless at any time."""
        if self._computing is not None or not self._waiting:
            return
        if self._waiting[0][2].there:
            prompt = heapq.heappop(self._waiting)[2]
        else:
            ready = min((each for each in self._waiting if each[2].there), default=None)
            if ready is None:
                return
            self._waiting.remove(ready)
            heapq.heapify(self._waiting)
            prompt = ready[2]
        self._computing = prompt
        self._look_at_prefix(prompt)
        prompt.started(prompt)
        self._timeline.at(self._timeline.now + prompt.seconds, self._done, prompt)
        if prompt.target >= 0:
            count = prompt.tokens * self._hardware.kv_bytes
            prompt.sent_from = self._timeline.now
            self._network.send(self.number, prompt.target, count, self._flowed, prompt)

    def _look_at_prefix(self, prompt: Prefilling) -> None:
        """What there is of it, and so how long it takes."""
        hardware, found = self._hardware, self.cache.match(prompt.chain)
        prompt.own = min(found * self._block_tokens, prompt.tokens)
        prompt.cached = max(prompt.own, prompt.pulled_to)
        below = self.cache.on_disk(prompt.chain[:found])
        prompt.from_disk = min(below * self._block_tokens, prompt.own)
        prompt.load_s = hardware.load_s(min(prompt.cached, prompt.tokens) * hardware.kv_bytes)
        prompt.load_s += hardware.disk_s(prompt.from_disk * hardware.kv_bytes)
        prompt.seconds = hardware.compute_s(prompt.tokens, prompt.cached) + prompt.load_s

    def _done(self, prompt: Prefilling) -> None:
        if prompt is not self._computing:
            return  # it was given up
        self._computing = None
        self.keep(prompt.chain)
        prompt.computed(prompt)
        if prompt.target >= 0:
            hardware = self._hardware
            # Of the last layer, which could not be sent before.
            count = prompt.tokens * hardware.kv_bytes / hardware.layers
            last_s = count / hardware.network_bytes_per_s
            self._timeline.at(self._timeline.now + last_s, self._part, prompt)
        self.begin()

    def _flowed(self, prompt: Prefilling) -> None:
        prompt.sending_s = self._timeline.now - prompt.sent_from
        self._part(prompt)

    @staticmethod
    def _part(prompt: Prefilling) -> None:
        prompt.left -= 1
        if not prompt.left:
            prompt.sent(prompt)
