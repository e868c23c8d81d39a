"""A node that decodes: all its sequences get a token in each step, and join and leave between two.

While nobody joins or leaves, each step takes a little longer than the one before, since every
sequence grew by a token; so the end of the n-th of them is a formula, and a stretch of hundreds of
steps is one call. A sequence that comes joins at the end of the step under way, if there is room
for all of it; those without room wait, in order. O(log batch) a change, O(stretches it lived
through) for the times between the tokens of a sequence.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from serving.simulator.hardware import Hardware
    from serving.simulator.timeline import Timeline

__all__ = ["DecodeNode", "Decoding"]

_STRETCHES_MAX = 8192


@dataclass(slots=True, eq=False)
class Decoding:
    """A sequence with its prompt's KV; `ended` is called when its last token is there."""

    context: int
    left: int
    """Tokens that are to come."""
    first_at: float
    """When its first token was there."""
    ended: Callable[[Decoding], object]
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


class _Stretch(NamedTuple):
    first: int
    step_s: float
    slope_s: float


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
        self._stretches: list[_Stretch] = []

    def join(self, sequence: Decoding) -> None:
        """A sequence and its KV are here."""
        self._waiting.append(sequence)
        if len(self._waiting) == 1:
            self._look_soon()

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
        _, step_s, slope_s = self._stretches[-1]
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
        _, step_s, slope_s = self._stretches[-1]
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
        self._stretches.append(_Stretch(self._step, step_s, slope_s))
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
        if len(self._stretches) > _STRETCHES_MAX:
            oldest = min(each.joined_step for _, _, each in self._members)
            keep = bisect_right(self._stretches, oldest, key=lambda each: each.first) - 1
            del self._stretches[: max(0, keep)]

    def _look_back(self, sequence: Decoding) -> None:
        """Note the times between the tokens of a sequence that ended."""
        stretches, step = self._stretches, sequence.joined_step
        at = bisect_right(stretches, step, key=lambda each: each.first) - 1
        first_s = stretches[at].step_s + stretches[at].slope_s * (step - stretches[at].first)
        sequence.second_s = sequence.joined_at - sequence.first_at + first_s
        times: list[tuple[float, int]] = []
        step += 1
        while step < sequence.last_step:
            if at + 1 < len(stretches) and stretches[at + 1].first <= step:
                at += 1
                continue
            stretch = stretches[at]
            until = sequence.last_step
            if at + 1 < len(stretches):
                until = min(until, stretches[at + 1].first)
            middle = step - stretch.first + (until - step - 1) / 2
            times.append((stretch.step_s + stretch.slope_s * middle, until - step))
            step = until
        sequence.slowest_s = _longest_tenth(times) if times else sequence.second_s


def _longest_tenth(times: list[tuple[float, int]]) -> float:
    """Mean of the longest tenth, at least one, of (seconds, how often)."""
    wanted = left = max(1, round(0.1 * sum(count for _, count in times)))
    total = 0.0
    for seconds, count in sorted(times, reverse=True):
        taken = min(count, left)
        total += seconds * taken
        left -= taken
        if not left:
            break
    return total / wanted
