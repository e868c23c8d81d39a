"""What happened to requests: counts, times, and the last ones by name, for metrics and the page.

Counters only grow; times are kept as histograms of fixed bounds (what scrapers want), as the last
few hundred values and by spans of the last minutes (what people want). Every key of a counter is
one of a small fixed set, so that it can be a label. No I/O. O(1) an event.

A request is in one stage at a time, and its stages add up to its time:

    queue       until its prompt's turn comes, with all that failed before
    load        loading what others have of its prefix
    prefill     computing the rest, up to the first token
    transfer    until its KV is where it is decoded
    decode      until the answer ends

How much of the time before the first token was which of the first three is told by the worker at
the end; until then what passes after the queue counts as prefill.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from serving.scheduling.history import History

__all__ = [
    "OUTCOMES",
    "SOURCES",
    "STAGES",
    "UNDER_WAY",
    "Histogram",
    "RequestLine",
    "Stats",
]

TTFT_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TBT_BOUNDS_S = (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
RECENT = 256
LINES = 64
REFUSALS = 32
WHY_MAX = 400

STAGES = ("queue", "load", "prefill", "transfer", "decode")
SOURCES = ("own", "worker", "pool", "computed")
"""Where the KV of a prompt came from: the memory of the worker that computes it, another worker's,
the pool; or from nowhere."""

OUTCOMES = {
    "answered": ("stop", "length"),
    "refused": (
        "prefill_busy", "decode_busy", "no_room", "queue_full", "overloaded", "refused_at_decode",
        "no_workers",
    ),
    "failed": (
        "deadline", "too_long", "bad_request", "wrong_role", "draining", "peer_lost", "internal",
        "workers_failed", "other",
    ),
    "cancelled": ("cancelled",),
}  # fmt: skip
"""How requests end, by kind."""
_KIND = {outcome: kind for kind, outcomes in OUTCOMES.items() for outcome in outcomes}
_WAITING = "waiting"
UNDER_WAY = (_WAITING, "queue", "prefill", "transfer", "decode")
"""What the stage of a request can be while it is under way. Who waits is in the queue of no worker,
as there is none that could take it; who loads is in prefill, as it may compute at the same time."""


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
    stage: str = "queue"
    """Or, when it has ended, how."""
    since: float = 0.0
    """When its stage began."""
    prefill: str = ""
    decode: str = ""
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft_s: float = 0.0
    total_s: float = 0.0
    outcome: str = ""
    why: str = ""
    """What a refusal or failure says."""
    attempts: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))
    sources: dict[str, int] = field(default_factory=dict)
    """Tokens of the prompt; empty until it is computed."""
    told_s: tuple[float, float] = 0.0, 0.0
    """How long workers loaded and computed, by their own account."""

    def shown(self, now: float) -> dict[str, Any]:
        """As the page reads it, with ages instead of times of no meaning."""
        seconds = dict(self.seconds)
        if not self.outcome:
            seconds[_counted(self.stage)] += now - self.since
        return {
            "request": self.request,
            "age_s": now - self.arrived,
            "stage": self.stage,
            "kind": _KIND.get(self.outcome, "under way"),
            "why": self.why,
            "prefill": self.prefill,
            "decode": self.decode,
            "attempts": self.attempts,
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "generated_tokens": self.generated_tokens,
            "sources": self.sources,
            "ttft_s": self.ttft_s,
            "total_s": self.total_s if self.outcome else now - self.arrived,
            "seconds": seconds,
        }


@dataclass(slots=True)
class Stats:
    """The figures of one conductor since it started."""

    outcomes: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    """Requests under way."""
    stage_s: Counter[str] = field(default_factory=Counter)
    """Seconds of requests that ended."""
    sources: Counter[str] = field(default_factory=Counter)
    """Tokens of prompts that were computed, those of each attempt."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    resumed: int = 0
    prefill_s: float = 0.0
    wasted_prefill_s: float = 0.0
    role_changes: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS_S))
    tbt: Histogram = field(default_factory=lambda: Histogram(TBT_BOUNDS_S))
    lines: deque[RequestLine] = field(default_factory=lambda: deque(maxlen=LINES))
    refusals: deque[RequestLine] = field(default_factory=lambda: deque(maxlen=REFUSALS))
    """Those that were refused on arrival: however many, they do not push out who was served."""
    history: History = field(default_factory=History)

    def arrive(self, line: RequestLine) -> RequestLine:
        """A request is there; it is taken, or it ends."""
        line.since = line.arrived
        self.stages[line.stage] += 1
        return line

    def take(self, line: RequestLine) -> None:
        """It is taken."""
        self.lines.append(line)

    def refuse(self, line: RequestLine, outcome: str, why: str) -> None:
        """A request is there, and is refused at once."""
        self.arrive(line)
        self.end(line, line.arrived, outcome, why)

    def enter(self, line: RequestLine, stage: str, now: float) -> None:
        """It is in another stage from now on."""
        self._leave(line, now)
        line.stage, line.since = stage, now
        self.stages[stage] += 1

    def _leave(self, line: RequestLine, now: float) -> None:
        line.seconds[_counted(line.stage)] += now - line.since
        self.stages[line.stage] -= 1

    def first_token(self, line: RequestLine, now: float) -> None:
        """A first token is there, of the answer or of an attempt to go on with it."""
        self.enter(line, "transfer", now)
        if not line.ttft_s:
            line.ttft_s = now - line.arrived
            self.ttft.observe(line.ttft_s)
            self.history.at(now).ttft.add(line.ttft_s)

    def tokens(self, now: float, seconds: float, count: int) -> None:
        """So many tokens came, within so many seconds."""
        each_s = seconds / max(1, count)
        self.tbt.observe(each_s, count)
        self.history.at(now).tbt.add(each_s, count)

    def computed(
        self,
        line: RequestLine,
        now: float,
        sources: dict[str, int],
        *,
        load_s: float,
        compute_s: float,
    ) -> None:
        """Its prompt is computed; the worker told where its KV came from and what took how long."""
        _add(self.sources, sources)
        _add(self.history.at(now).sources, sources)
        line.sources = line.sources or sources
        seconds = line.seconds
        told = line.told_s = line.told_s[0] + load_s, line.told_s[1] + compute_s
        whole = seconds["queue"] + seconds["load"] + seconds["prefill"]
        seconds["load"] = min(whole, told[0])
        seconds["prefill"] = min(whole - seconds["load"], told[1])
        seconds["queue"] = whole - seconds["load"] - seconds["prefill"]

    def end(self, line: RequestLine, now: float, outcome: str, why: str = "") -> None:
        """It ended; `outcome` is "stop", "length" or the code of its failure, which says why."""
        self._leave(line, now)
        outcome = outcome if outcome in _KIND else "other"
        line.outcome = line.stage = outcome
        line.why = why[:WHY_MAX]
        line.total_s = now - line.arrived
        self.outcomes[outcome] += 1
        span = self.history.at(now)
        span.outcomes[outcome] += 1
        _add(self.stage_s, line.seconds)
        if _KIND[outcome] == "refused" and not line.attempts:
            self.refusals.append(line)
        if _KIND[outcome] == "answered":
            _add(span.stage_s, line.seconds)
            self.prompt_tokens += line.prompt_tokens
            self.cached_tokens += line.cached_tokens
            self.generated_tokens += line.generated_tokens

    def load(self, now: float, prefill: float, decode: float) -> None:
        """The loads of this moment."""
        span = self.history.at(now)
        span.loads = max(prefill, span.loads[0]), max(decode, span.loads[1])

    def recent(self) -> list[RequestLine]:
        """The last requests, newest first."""
        lines = [*self.lines, *self.refusals]
        return sorted(lines, key=lambda line: line.arrived, reverse=True)


def _counted(stage: str) -> str:
    """The stage whose seconds these are."""
    return "queue" if stage == _WAITING else stage


def _add(counts: Counter[str], more: dict[str, Any]) -> None:
    """Count what came besides; Counter's own way looks at what it is given for longer than this."""
    for key, count in more.items():
        counts[key] += count
