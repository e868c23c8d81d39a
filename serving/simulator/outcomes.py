"""What became of the requests of a run, in columns; and what one wants to know of all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from serving.scheduling.stats import OUTCOMES

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Outcomes", "summary"]

ANSWERED, FAILED = frozenset(OUTCOMES["answered"]), frozenset(OUTCOMES["failed"])


class Outcomes:
    """One entry a request, by its number in the trace. Times that never came are nan."""

    def __init__(self, requests: int) -> None:
        self.arrived_s = np.full(requests, np.nan)
        self.first_s = np.full(requests, np.nan)
        self.ended_s = np.full(requests, np.nan)
        self.second_s = np.full(requests, np.nan)
        """Between the first token and the second, with the way from node to node."""
        self.slowest_s = np.full(requests, np.nan)
        """Mean of the longest tenth of the times between the tokens that followed. These two are
        those of its last attempt, if nodes failed it."""
        self.sending_s = np.full(requests, np.nan)
        """How long its KV took to where it is decoded, for which it leaves as it is computed."""
        self.there_s = np.full(requests, np.nan)
        """When all of that was there."""
        self.computing_s = np.zeros(requests)
        self.cached_tokens = np.zeros(requests, np.int64)
        self.disk_tokens = np.zeros(requests, np.int64)
        """Those of the cached ones that lay on the disk of the node that computed it."""
        self.retries = np.zeros(requests, np.int32)
        """How often it was gone on with elsewhere."""
        self.codes: list[str] = [""] * requests
        self.lasted_s = 0.0
        self.open = requests
        """How many have not ended."""
        self.role_changes = 0
        self.copied_tokens = 0
        """Those sent ahead of requests."""

    def __len__(self) -> int:
        return len(self.codes)

    def arrived(self, number: int, now: float) -> None:
        """It is there."""
        self.arrived_s[number] = now

    def first_token(
        self, number: int, now: float, cached: int, seconds: float, from_disk: int = 0
    ) -> None:
        """Its prompt was computed, from so many cached tokens on.

        Where that happens again, after a node failed it, only the time is added.
        """
        if not self.computing_s[number]:
            self.first_s[number] = now
            self.cached_tokens[number] = cached
            if from_disk:
                self.disk_tokens[number] = from_disk
        self.computing_s[number] += seconds

    def sent(self, number: int, now: float, seconds: float) -> None:
        """Its KV is where it is decoded, after so long on its way."""
        self.there_s[number], self.sending_s[number] = now, seconds

    def decoded(self, number: int, second_s: float, slowest_s: float) -> None:
        """All its tokens are there."""
        self.second_s[number], self.slowest_s[number] = second_s, slowest_s

    def ended(self, number: int, now: float, code: str, retries: int = 0) -> None:
        """It ended, by its length, refused or failed."""
        self.ended_s[number] = now
        self.codes[number] = code
        self.open -= 1
        if retries:
            self.retries[number] = retries

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
        return np.array([code in ANSWERED for code in self.codes], np.bool_)

    @property
    def failed(self) -> NDArray[np.bool_]:
        """Which of them were taken, and given up because of nodes that failed."""
        return np.array([code in FAILED for code in self.codes], np.bool_)

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
    failed = int(np.count_nonzero(outcomes.failed))
    first_s = outcomes.first_s - outcomes.arrived_s
    slowest_s = outcomes.slowest_s
    in_time = outcomes.finished & (first_s <= ttft_slo_s)
    in_time &= np.isnan(slowest_s) | (slowest_s <= tbt_slo_s)
    computed = ~np.isnan(outcomes.first_s)
    figures: dict[str, float | int] = {
        "requests": len(outcomes),
        "answered": answered,
        "refused": len(outcomes) - answered - failed,
        "failed": failed,
        "retried": int(np.count_nonzero(outcomes.retries)),
        "role_changes": outcomes.role_changes,
        "copied_tokens": outcomes.copied_tokens,
        "simulated_s": outcomes.lasted_s,
        "hit_ratio": float(outcomes.cached_tokens.sum() / max(1, input_tokens[computed].sum())),
        "disk_ratio": float(outcomes.disk_tokens.sum() / max(1, input_tokens[computed].sum())),
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
