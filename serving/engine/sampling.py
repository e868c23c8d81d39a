"""Choosing a token: from its logits, a seed and its position; from nothing else.

A generator that is carried from token to token would make the choice depend on how many numbers
were drawn before, so a request that is resumed elsewhere, or whose first token comes from another
worker, would go another way. Here the random number of a token is a function of (seed, position).

Greedy takes the highest logit, the lowest number among equals. O(vocabulary), or one sort of it
when `top_k` or `top_p` cut it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Sampling", "choose"]


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a token is chosen. Temperature 0 takes the likeliest one; ties go to the lower number.

    A token depends on the logits, on `seed` and on its position, on nothing else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    seed: int = 0


def choose(logits: NDArray[np.float32], sampling: Sampling, position: int) -> tuple[int, float]:
    """The token at `position` of its sequence, and the logarithm of its probability.

    The probability is that of the untouched model: temperature and cuts do not change it.
    """
    values = logits.astype(np.float64)
    if sampling.temperature <= 0:
        token = int(values.argmax())
    else:
        token = _drawn(values / sampling.temperature, sampling, position)
    top = float(values.max())
    logprob = float(values[token]) - top - math.log(float(np.exp(values - top).sum()))
    return token, logprob


def _drawn(scaled: NDArray[np.float64], sampling: Sampling, position: int) -> int:
    # Stable, so equal logits keep the order of their numbers.
    order = np.argsort(-scaled, kind="stable")
    if sampling.top_k > 0:
        order = order[: sampling.top_k]
    weights = np.exp(scaled[order] - scaled[order[0]])
    shares = np.cumsum(weights)
    if sampling.top_p < 1:
        kept = int(np.searchsorted(shares, sampling.top_p * shares[-1])) + 1
        order, shares = order[:kept], shares[:kept]
    at = int(np.searchsorted(shares, _uniform(sampling.seed, position) * shares[-1], side="right"))
    return int(order[min(at, len(order) - 1)])


def _uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that belongs to this seed and position."""
    key = np.array([seed & 0xFFFF_FFFF_FFFF_FFFF, position], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key)).random())
