"""What happened to requests: counts, times, and the last ones by name, for metrics and the page.

Counters only grow; times are kept as histograms of fixed bounds (what scrapers want) and as the
last few hundred values (what people want: medians that follow). No I/O. O(1) an event.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["Histogram", "RequestLine", "Stats"]

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TBT_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
RECENT = 256
HISTORY = 600
"""Samples of the load that are kept: five minutes, two a second."""


class Histogram:
    """Counts by upper bound, their sum, and the last values."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.recent: deque[float] = deque(maxlen=RECENT)

    def observe(self, value: float, times: int = 1) -> None:
        """Take a value in, that was there so many times; of the last ones it is one."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += times * value
        if times:
            self.recent.append(value)

    def quantile(self, share: float) -> float:
        """Of the last values; 0 when there are none."""
        if not self.recent:
            return 0.0
        ordered = sorted(self.recent)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(slots=True)
class RequestLine:
    """One request as the page shows it. Times are on the conductor's clock."""

    request: str
    arrived: float
    prompt_tokens: int
    stage: str = "arrived"
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    outcome: str = ""


@dataclass(slots=True)
class Stats:
    """The figures of one conductor since it started."""

    outcomes: Counter[str] = field(default_factory=Counter)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    resumed: int = 0
    prefill_s: float = 0.0
    wasted_prefill_s: float = 0.0
    role_changes: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    tbt: Histogram = field(default_factory=lambda: Histogram(TBT_BOUNDS_S))
    lines: deque[RequestLine] = field(default_factory=lambda: deque(maxlen=64))
    loads: deque[tuple[float, float, float]] = field(default_factory=lambda: deque(maxlen=HISTORY))
    """When, and the load of prefill and decode then."""

    def arrive(self, line: RequestLine) -> RequestLine:
        """A request is there."""
        self.lines.append(line)
        return line

    def first_token(self, line: RequestLine, now: float) -> None:
        """Its first token is there."""
        if not line.ttft_s:
            line.ttft_s = now - line.arrived
            self.ttft.observe(line.ttft_s)

    def end(self, line: RequestLine, now: float, outcome: str) -> None:
        """It ended; `outcome` is "stop", "length" or the code of its failure."""
        line.outcome = line.stage = outcome
        line.total_s = now - line.arrived
        self.outcomes[outcome] += 1
        if outcome in ("stop", "length"):
            self.prompt_tokens += line.prompt_tokens
            self.cached_tokens += line.cached_tokens
            self.generated_tokens += line.generated_tokens

    def history(self, now: float) -> list[dict[str, float]]:
        """The load of the last minutes, oldest first."""
        return [
            {"age_s": now - at, "prefill": prefill, "decode": decode}
            for at, prefill, decode in self.loads
        ]

    def recent(self, now: float) -> list[dict[str, Any]]:
        """The last requests, newest first, with their age instead of a time of no meaning."""
        out = []
        for line in reversed(self.lines):
            values = asdict(line)
            values["age_s"] = now - values.pop("arrived")
            out.append(values)
        return out
