"""What became of the requests of a run, in columns; and what one wants to know of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Outcomes", "summary"]


class Outcomes:
    """One entry a request, by its number in the trace. Times that never came are nan."""

    def __init__(self, requests: int) -> None:
        self.arrived_s = np.full(requests, np.nan)
        self.first_s = np.full(requests, np.nan)
        self.ended_s = np.full(requests, np.nan)
        self.second_s = np.full(requests, np.nan)
        """Between the first token and the second, with the way from node to node."""
        self.slowest_s = np.full(requests, np.nan)
        """Mean of the longest tenth of the times between the tokens that followed."""
        self.computing_s = np.zeros(requests)
        self.cached_tokens = np.zeros(requests, np.int64)
        self.codes: list[str] = [""] * requests
        self.lasted_s = 0.0

    def __len__(self) -> int:
        return len(self.codes)

    def arrived(self, number: int, now: float) -> None:
        """It is there."""
        self.arrived_s[number] = now

    def first_token(self, number: int, now: float, cached: int, seconds: float) -> None:
        """Its prompt was computed, from so many cached tokens on."""
        self.first_s[number] = now
        self.cached_tokens[number] = cached
        self.computing_s[number] = seconds

    def decoded(self, number: int, second_s: float, slowest_s: float) -> None:
        """All its tokens are there."""
        self.second_s[number], self.slowest_s[number] = second_s, slowest_s

    def ended(self, number: int, now: float, code: str) -> None:
        """It ended, by its length or refused."""
        self.ended_s[number] = now
        self.codes[number] = code

    def is_over(self, number: int) -> bool:
        """Whether it ended."""
        return bool(self.codes[number])

    def first_at(self, number: int) -> float:
        """When its first token was there."""
        return float(self.first_s[number])

    # -- of all of them

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        """Times to the first token, of those that got one."""
        times = self.first_s - self.arrived_s
        found: NDArray[np.float64] = times[~np.isnan(times)]
        return found

    @property
    def finished(self) -> NDArray[np.bool_]:
        """Which of them got their whole answer."""
        return np.array([code in ("length", "stop") for code in self.codes])

    @property
    def wasted_s(self) -> float:
        """Time spent on prompts whose answers were refused afterwards."""
        return float(self.computing_s[~self.finished].sum())

    def within(self, tbt_s: float) -> float:
        """The share of all requests that finished with times between tokens of at most this."""
        return float(np.count_nonzero(self.slowest_s <= tbt_s)) / max(1, len(self))


def summary(
    outcomes: Outcomes, input_tokens: NDArray[np.int64], ttft_slo_s: float, tbt_slo_s: float
) -> dict[str, float | int]:
    """What one wants to know of a run, by name. `goodput` counts what met both SLOs."""
    ttft_s, answered = outcomes.ttft_s, int(np.count_nonzero(outcomes.finished))
    first_s = outcomes.first_s - outcomes.arrived_s
    slowest_s = outcomes.slowest_s
    in_time = outcomes.finished & (first_s <= ttft_slo_s)
    in_time &= np.isnan(slowest_s) | (slowest_s <= tbt_slo_s)
    computed = ~np.isnan(outcomes.first_s)
    figures: dict[str, float | int] = {
        "requests": len(outcomes),
        "answered": answered,
        "refused": len(outcomes) - answered,
        "simulated_s": outcomes.lasted_s,
        "hit_ratio": float(outcomes.cached_tokens.sum() / max(1, input_tokens[computed].sum())),
        "prefill_mean_s": float(outcomes.computing_s[computed].mean()) if computed.any() else 0.0,
        "prefill_wasted_s": outcomes.wasted_s,
        "goodput_per_s": float(np.count_nonzero(in_time) / max(outcomes.lasted_s, 1e-9)),
        "within_slo": float(np.count_nonzero(in_time) / max(1, len(outcomes))),
    }
    for name, times in (("ttft", ttft_s), ("tbt", slowest_s[~np.isnan(slowest_s)])):
        if len(times):
            figures[f"{name}_mean_s"] = float(times.mean())
            for share in (50, 90, 99):
                figures[f"{name}_p{share}_s"] = float(np.percentile(times, share))
    return figures
