"""What pictures need of a run: how its times are distributed, and what was under way when.

    curves = curves_of(outcomes)
    curves.ttft_s[50]      # the median

A few hundred numbers, whatever the length of the trace, so that runs of other processes can be
drawn. O(n log n) of its requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from serving.simulator.outcomes import Outcomes

__all__ = ["SHARES", "Curves", "curves_of"]

SHARES = [percent / 100 for percent in range(101)]
"""Of requests, for which distributions tell the times."""
MOMENTS = 120


class Curves(NamedTuple):
    """Plain lists, which go from process to process."""

    ttft_s: list[float]
    """At each of `SHARES`, of the requests that got a first token; empty where none did."""
    tbt_s: list[float]
    """The same of the slowest tenth of times between tokens."""
    at_s: list[float]
    waiting: list[int]
    """Requests that are there without a first token, at each moment."""
    answering: list[int]
    """Those that got their first token, and not yet the last."""


def curves_of(outcomes: Outcomes) -> Curves:
    """Reduce a run to its curves."""
    moments = np.linspace(0.0, outcomes.lasted_s, MOMENTS + 1)
    arrived, first, ended = outcomes.arrived_s, outcomes.first_s, outcomes.ended_s
    # Who is refused, or given up before, leaves the queue without a first token.
    left = np.where(np.isnan(first), ended, first)
    over = ended[~np.isnan(first)]
    slowest = outcomes.slowest_s
    return Curves(
        ttft_s=_quantiles(outcomes.ttft_s),
        tbt_s=_quantiles(slowest[~np.isnan(slowest)]),
        at_s=moments.tolist(),
        waiting=(_until(arrived, moments) - _until(left, moments)).tolist(),
        answering=(_until(first, moments) - _until(over, moments)).tolist(),
    )


def _quantiles(times: NDArray[np.float64]) -> list[float]:
    return np.quantile(times, SHARES).tolist() if len(times) else []


def _until(times: NDArray[np.float64], moments: NDArray[np.float64]) -> NDArray[np.int64]:
    """How many of these times have come by each moment; those that never come are nan."""
    return np.searchsorted(np.sort(times), moments, side="right")
