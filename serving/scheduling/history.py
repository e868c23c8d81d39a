"""The last minutes in spans of seconds: what ended how, where prefixes came from, how long it took.

    history = History()
    history.at(now).outcomes["stop"] += 1
    history.at(now).ttft.add(0.2)
    for ends, span in history.spans(now): ...      # oldest first, without gaps

Times of a span are counted in steps of 5 %, so a span takes the same memory whatever the load, and
a quantile is exact to that. O(1) an event. No I/O and no clock.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass, field

__all__ = ["History", "Span", "Spread"]

SPAN_S = 5.0
SPANS = 60
"""So many are kept: five minutes."""

_STEP = math.log(1.05)
_LEAST_S = 1e-6


class Spread:
    """Times by their logarithm."""

    __slots__ = ("_counts", "total")

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.total = 0

    def add(self, seconds: float, times: int = 1) -> None:
        """Take a time in, that was there so many times."""
        self._counts[round(math.log(max(seconds, _LEAST_S)) / _STEP)] += times
        self.total += times

    def quantile(self, share: float) -> float:
        """What this share of the times does not exceed; 0 when there are none."""
        left = max(1, math.ceil(share * self.total))
        for step in sorted(self._counts):
            left -= self._counts[step]
            if left <= 0:
                return math.exp(step * _STEP)
        return 0.0


@dataclass(slots=True)
class Span:
    """What happened within a few seconds."""

    number: int
    outcomes: Counter[str] = field(default_factory=Counter)
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens of prompts by where their KV came from."""
    stage_s: Counter[str] = field(default_factory=Counter)
    """Seconds by stage, of requests that were answered."""
    ttft: Spread = field(default_factory=Spread)
    tbt: Spread = field(default_factory=Spread)
    loads: tuple[float, float] = 0.0, 0.0
    """Of prefill and decode, each the largest."""


class History:
    """The last `SPANS` spans in which something happened."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=SPANS)
        self._first: int | None = None

    def at(self, now: float) -> Span:
        """The span of this moment; time never goes back."""
        number = int(now // SPAN_S)
        if not self._spans or self._spans[-1].number < number:
            self._spans.append(Span(number))
        if self._first is None:
            self._first = number
        return self._spans[-1]

    def spans(self, now: float) -> list[tuple[float, Span]]:
        """Those up to now with the age of their end, oldest first; empty ones fill gaps."""
        last = int(now // SPAN_S)
        first = max(last - SPANS + 1, last if self._first is None else self._first)
        known = {span.number: span for span in self._spans}
        return [
            (max(0.0, now - (number + 1) * SPAN_S), known.get(number) or Span(number))
            for number in range(first, last + 1)
        ]
