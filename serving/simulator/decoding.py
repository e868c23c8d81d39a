"""A node that decodes: all its sequences get a token in each step, and join and leave between two.

While nobody joins or leaves, each step takes a little longer than the one before, since every
sequence grew by a token; so the end of the n-th of them is a formula, and a stretch of hundreds of
steps is one call. A sequence that comes joins at the end of the step under way, if there is room
for all of it; those without room wait, in order. O(log batch) a change, one compiled pass over the
stretches it lived through for the times between the tokens of a sequence.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from serving.simulator.stretches import Stretches

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.simulator.hardware import Hardware
    from serving.simulator.timeline import Timeline

__all__ = ["DecodeNode", "Decoding"]


@dataclass(slots=True, eq=False)
class Decoding:
    """A sequence with its prompt's KV; `ended` is called when its last token is there."""

    context: int
    left: int
    """Tokens that are to come."""
    first_at: float
    """When its first token was there."""
    ended: Callable[[Decoding], object]
    number: int = 0
    """Of its request."""
    second_s: float = 0.0
    """Between its first token and its second, with the way from node to node. Set at its end, as"""
    slowest_s: float = 0.0
    """Mean of the longest tenth of the times between the tokens that followed."""
    joined_step: int = 0
    joined_at: float = 0.0
    last_step: int = 0

    @property
    def room(self) -> int:
        """Tokens that it may come to have."""
        return self.context + self.left


class DecodeNode:
    """One node."""

    def __init__(self, number: int, timeline: Timeline, hardware: Hardware) -> None:
        self.number = number
        self.batch = 0
        self.tokens = 0
        """Of context, at the beginning of the stretch."""
        self._timeline = timeline
        self._hardware = hardware
        self._free = hardware.kv_tokens
        self._waiting: deque[Decoding] = deque()
        self._members: list[tuple[int, int, Decoding]] = []
        self._number = 0
        self._step = 0
        self._since = 0.0
        self._version = 0
        self._boundary = 0
        self._running = self._starting = False
        self._stretches = Stretches(self._oldest)

    def join(self, sequence: Decoding) -> None:
        """A sequence and its KV are here."""
        self._waiting.append(sequence)
        if len(self._waiting) == 1:
            self._look_soon()

    def fail(self) -> list[tuple[Decoding, int]]:
        """Lose everything; returns the sequences, with how many tokens each had got here."""
        steps = 0
        if self._running:
            steps = min(self._boundary, self._steps_until(self._timeline.now) - 1)
        self._step += steps
        lost = [
            (each, min(each.left, self._step - each.joined_step)) for _, _, each in self._members
        ]
        lost += [(each, 0) for each in self._waiting]
        self._members.clear()
        self._waiting.clear()
        self.batch = self.tokens = self._boundary = 0
        self._free = self._hardware.kv_tokens
        self._version += 1
        self._running = False
        return lost

    # -- stretches

    def _look_soon(self) -> None:
        """Have a look at what waits, at the end of the step under way."""
        if self._running:
            self._call_after(self._steps_until(self._timeline.now))
        elif not self._starting:  # after what else happens at this moment
            self._starting = True
            self._timeline.at(self._timeline.now, self._start)

    def _start(self) -> None:
        self._starting = False
        self._go_on(self._timeline.now)

    def _along(self, now: float) -> tuple[float, int]:
        """What a node does besides in each step, in seconds, and for how many; 0 for any."""
        return 0.0, 0

    def _steps_until(self, moment: float) -> int:
        """The least number of steps, one at least, whose end is not before a moment."""
        step_s, slope_s = self._stretches.step_s, self._stretches.slope_s
        passed = moment - self._since
        # n steps take n step + slope n (n - 1) / 2.
        half = slope_s / 2
        linear = step_s - half
        # The usual formula divides by the slope, which may be nothing.
        root = 2 * passed / (math.sqrt(linear * linear + 4 * half * passed) + linear)
        return max(1, math.ceil(root - 1e-9))

    def _call_after(self, steps: int) -> None:
        if self._boundary and steps >= self._boundary:
            return
        self._boundary = steps
        self._version += 1
        step_s, slope_s = self._stretches.step_s, self._stretches.slope_s
        end = self._since + steps * step_s + slope_s * steps * (steps - 1) / 2
        self._timeline.at(end, self._end_stretch, self._version)

    def _end_stretch(self, version: int) -> None:
        if version != self._version:
            return  # it ended before
        steps, now = self._boundary, self._timeline.now
        self._step += steps
        self.tokens += steps * self.batch
        while self._members and self._members[0][0] <= self._step:
            self._leave(heapq.heappop(self._members)[2], now)
        self._go_on(now)

    def _leave(self, sequence: Decoding, now: float) -> None:
        self.batch -= 1
        self.tokens -= sequence.room
        self._free += sequence.room
        self._look_back(sequence)
        sequence.ended(sequence)

    def _go_on(self, now: float) -> None:
        self._since, self._boundary = now, 0
        while self._waiting and self._fits(self._waiting[0].room):
            self._enter(self._waiting.popleft(), now)
        beside_s, steps = self._along(now)
        self._running = self.batch > 0 or steps > 0
        if not self._running:
            return
        hardware, step_s = self._hardware, beside_s
        if self.batch:
            step_s += hardware.step_s(self.batch, self.tokens)
            last = self._members[0][0] - self._step
            steps = min(steps, last) if steps else last
        slope_s = hardware.step[2] * self.batch
        self._stretches.begin(self._step, step_s, slope_s)
        self._call_after(steps)

    def _fits(self, room: int) -> bool:
        """Whether there is room for a sequence; one alone is taken however long it is."""
        return room <= self._free or not self.batch

    def _enter(self, sequence: Decoding, now: float) -> None:
        sequence.joined_step, sequence.joined_at = self._step, now
        sequence.last_step = self._step + sequence.left
        self.batch += 1
        self.tokens += sequence.context
        self._free -= sequence.room
        self._number += 1
        heapq.heappush(self._members, (sequence.last_step, self._number, sequence))

    def _oldest(self) -> int:
        """The step from which on somebody here lived."""
        return min((each.joined_step for _, _, each in self._members), default=self._step)

    def _look_back(self, sequence: Decoding) -> None:
        """Note the times between the tokens of a sequence that ended."""
        first_s, slowest_s = self._stretches.look_back(sequence.joined_step, sequence.last_step)
        sequence.second_s = sequence.joined_at - sequence.first_at + first_s
        sequence.slowest_s = sequence.second_s if math.isnan(slowest_s) else slowest_s
