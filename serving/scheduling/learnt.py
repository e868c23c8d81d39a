"""What things cost as far as the running system has told: models fitted to what it reports.

Until something was reported, each holds the prior it was given. Times are arguments, so a simulator
drives the same classes with its own clock.

    T_prefill(n, p)    a + b (n - p) + c (n^2 - p^2): fixed work, work a token, attention
    T_transfer(bytes)  latency + (bytes + what the source sends already) / bandwidth of the source
    T_load(bytes)      fixed work + bytes / bandwidth between memory and where it is computed
    TBT(batch, tokens) a + b batch + c tokens of context in the batch + d tokens of a prompt beside
    t_d                seconds that decoding takes, finished and unfinished ones counted

O(1) each.
"""

from __future__ import annotations

from typing import NamedTuple

from serving.scheduling.fit import KEPT, NonNegativeFit

__all__ = [
    "Learnt",
    "LearntDecode",
    "LearntDuration",
    "LearntLoad",
    "LearntPrefill",
    "LearntTransfer",
]


class Learnt(NamedTuple):
    """What was learnt of a cost: its coefficients, and from how many measurements."""

    coefficients: tuple[float, ...]
    measured: int


class LearntPrefill:
    """Seconds to compute the KV of a prompt of `tokens` of which `cached` need not be computed."""

    def __init__(
        self, prior: tuple[float, float, float] = (0.01, 2e-4, 1e-8), kept: float = KEPT
    ) -> None:
        self._fit = NonNegativeFit(prior, scales=(1.0, 1e3, 1e6), kept=kept)

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds of fixed work, a token, and a square of tokens, as learnt so far."""
        return self._fit.coefficients

    @property
    def learnt(self) -> Learnt:
        """The coefficients, and what they were learnt from."""
        return Learnt(self._fit.coefficients, self._fit.measured)

    @staticmethod
    def _work(tokens: int, cached: int) -> tuple[int, int]:
        # The last token is always computed: its logits give the first token of the answer.
        if cached >= tokens:
            cached = max(0, tokens - 1)
        return tokens - cached, tokens * tokens - cached * cached

    def observe(self, tokens: int, cached: int, seconds: float) -> None:
        """A prefill took so long, without waiting and without loading."""
        more, squares = self._work(tokens, cached)
        self._fit.observe((1.0, more, squares), seconds)

    def predict(self, tokens: int, cached: int) -> float:
        """How long it would take."""
        fixed_s, token_s, attention_s = self._fit.coefficients
        more, squares = self._work(tokens, cached)
        return fixed_s + token_s * more + attention_s * squares


class LearntTransfer:
    """Seconds to move KV from a source that may be busy sending; learnt per source.

    A short transfer tells of the latency, a long one of the bandwidth, and neither is taken for
    the other. What is predicted to take too long is not asked for, so nothing is learnt of it:
    each time it is declined the next prediction is a tenth shorter, until it is tried again.
    """

    def __init__(self, bytes_per_s: float = 1e9, latency_s: float = 1e-3) -> None:
        self._prior = (latency_s, 1 / bytes_per_s)
        self._fits: dict[str, NonNegativeFit] = {}
        self._declined: dict[str, int] = {}
        self._in_flight: dict[str, int] = {}

    @property
    def learnt(self) -> dict[str, Learnt]:
        """Seconds of latency and a byte by source, as learnt so far."""
        return {
            source: Learnt(fit.coefficients, fit.measured) for source, fit in self._fits.items()
        }

    def begin(self, source: str, count: int) -> None:
        """A transfer of so many bytes starts: others from that source are slower meanwhile."""
        self._in_flight[source] = self._in_flight.get(source, 0) + count

    def end(self, source: str, count: int) -> None:
        """It ended, well or not."""
        left = self._in_flight.get(source, 0) - count
        if left > 0:
            self._in_flight[source] = left
        else:
            self._in_flight.pop(source, None)

    def observe(self, source: str, count: int, seconds: float) -> None:
        """A transfer took so long. What shared the source meanwhile had half of its bytes to go."""
        if count <= 0:
            return
        others = max(0, self._in_flight.get(source, 0) - count)
        self._fit(source).observe((1.0, count + others / 2), seconds)
        self._declined.pop(source, None)

    def declined(self, source: str) -> None:
        """A transfer was not made because of what was predicted for it."""
        self._declined[source] = self._declined.get(source, 0) + 1

    def came_to_nothing(self, source: str) -> None:
        """A transfer was given up: what was learnt before is to be believed again."""
        self._declined.pop(source, None)

    def predict(self, source: str, count: int) -> float:
        """How long a transfer that starts now would take."""
        if count <= 0:
            return 0.0
        waiting = self._in_flight.get(source, 0)
        latency_s, byte_s = self._fit(source).coefficients
        learnt = latency_s + byte_s * (count + waiting)
        if source not in self._declined:
            return learnt
        return learnt * float(0.9 ** self._declined[source])

    def _fit(self, source: str) -> NonNegativeFit:
        fit = self._fits.get(source)
        if fit is None:
            fit = self._fits[source] = NonNegativeFit(self._prior, scales=(1.0, 1e6))
        return fit


class LearntLoad:
    """Seconds to bring KV that an instance has in its memory to where it computes."""

    def __init__(self, bytes_per_s: float = 1e10) -> None:
        self._fit = NonNegativeFit((0.0, 1 / bytes_per_s), scales=(1.0, 1e6))

    @property
    def learnt(self) -> Learnt:
        """Seconds of fixed work and a byte, as learnt so far."""
        return Learnt(self._fit.coefficients, self._fit.measured)

    def observe(self, count: int, seconds: float) -> None:
        """A load of so many bytes took so long."""
        if count > 0:
            self._fit.observe((1.0, count), seconds)

    def predict(self, count: int) -> float:
        """How long it would take."""
        if count <= 0:
            return 0.0
        fixed_s, byte_s = self._fit.coefficients
        return fixed_s + byte_s * count


class LearntDecode:
    """Seconds between two tokens of an instance that decodes `batch` requests at once.

    `chunk` tokens of a prompt are computed in the same step, where an instance does both.
    """

    def __init__(
        self,
        prior: tuple[float, float, float] = (0.01, 1e-3, 1e-8),
        prompt_token_s: float = 2e-4,
        kept: float = KEPT,
    ) -> None:
        scales = (1.0, 8.0, 1e4, 256.0)
        self._fit = NonNegativeFit((*prior, prompt_token_s), scales, kept)

    @property
    def learnt(self) -> Learnt:
        """Seconds of fixed work, a request, a token of context and one of a prompt beside."""
        return Learnt(self._fit.coefficients, self._fit.measured)

    def observe(self, batch: int, tokens: int, seconds: float, chunk: int = 0) -> None:
        """A step took so long; `tokens` is the context of the whole batch."""
        if batch > 0:
            self._fit.observe((1.0, float(batch), float(tokens), float(chunk)), seconds)

    def predict(self, batch: int, tokens: int, chunk: int = 0) -> float:
        """How long a step would take; 0 for an empty batch."""
        if batch <= 0:
            return 0.0
        fixed_s, request_s, token_s, prompt_token_s = self._fit.coefficients
        return fixed_s + request_s * batch + token_s * tokens + prompt_token_s * chunk


class LearntDuration:
    """t_d: how long a request decodes, from finished ones and from those that still run.

    Time spent decoding divided by how many finished, both fading. Counting the time of unfinished
    ones keeps the estimate from being that of the short requests, which finish first.
    """

    def __init__(self, prior_s: float = 5.0, fade_s: float = 120.0) -> None:
        self._fade_s = fade_s
        self._spent_s = prior_s
        self._finished = 1.0
        self._at: float | None = None

    def advance(self, now: float, running: int) -> None:
        """Time passes with `running` requests decoding. Call it before anything changes."""
        if self._at is not None and now > self._at:
            passed = now - self._at
            keep = 0.5 ** (passed / self._fade_s)
            self._spent_s = keep * self._spent_s + passed * running
            self._finished = keep * self._finished
        self._at = now if self._at is None else max(self._at, now)

    def finished(self) -> None:
        """One request ended its decode."""
        self._finished += 1.0

    @property
    def seconds(self) -> float:
        """The estimate."""
        return self._spent_s / max(self._finished, 1e-3)
