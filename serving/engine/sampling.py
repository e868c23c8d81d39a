"""Choosing a token: from its logits, a seed and its position; from nothing else.

A generator that is carried from token to token would make the choice depend on how many numbers
were drawn before, so a request that is resumed elsewhere, or whose first token comes from another
worker, would go another way. Here the random number of a token is a function of (seed, position).

Greedy takes the highest logit, the lowest number among equals. O(vocabulary), or one sort of it
when it is drawn. What is told of probabilities (`likelihood`) is a function of its own, so that who
does not ask for it does not pay for it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Chosen", "Likelihood", "Sampling", "choose", "likelihood"]


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How a token is chosen. Temperature 0 takes the likeliest one; ties go to the lower number.

    A token depends on the logits, on `seed` and on its position, on nothing else.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all."""
    seed: int = 0
    likeliest: int = -1
    """How many of the likeliest tokens are told with each; -1 tells no probability at all."""
    banned: tuple[int, ...] = ()
    banned_before: int = 0
    """The `banned` are not chosen before this position."""
    form: str = ""
    """A JSON schema that the answer must satisfy, as JSON; empty where it may be anything."""
    form_from: int = 0
    """The position of the answer's first token."""


class Likelihood(msgspec.Struct, frozen=True, array_like=True):
    """Logarithms of probabilities: of the chosen token, and of the likeliest, those first."""

    chosen: float
    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()


class Chosen(msgspec.Struct, frozen=True, array_like=True):
    """A token, and what is told of it."""

    token: int
    likelihood: Likelihood | None = None


def choose(
    logits: NDArray[np.float32],
    sampling: Sampling,
    position: int,
    allowed: NDArray[np.bool_] | None = None,
) -> int:
    """The token at `position` of its sequence, one of the `allowed`."""
    values = logits.astype(np.float64)
    if allowed is not None:
        values[~allowed] = -math.inf
    if sampling.banned and position < sampling.banned_before:
        values[list(sampling.banned)] = -math.inf
    if sampling.temperature <= 0:
        return int(values.argmax())
    return _drawn(values / sampling.temperature, sampling, position)


def likelihood(logits: NDArray[np.float32], token: int, count: int) -> Likelihood:
    """What the untouched model thinks of a token, and of the `count` likeliest ones.

    The log-softmax of its logits: temperature, cuts and bans do not change it.
    """
    values = logits.astype(np.float64)
    top = float(values.max())
    values -= top + math.log(float(np.exp(values - top).sum()))
    count = min(count, len(values))
    if not count:
        return Likelihood(float(values[token]))
    # All that are as likely as the last one: of these the lower numbers come first.
    least = np.partition(values, len(values) - count)[len(values) - count]
    likely = np.flatnonzero(values >= least)
    best = likely[np.argsort(-values[likely], kind="stable")][:count]
    return Likelihood(float(values[token]), tuple(best.tolist()), tuple(values[best].tolist()))


def _drawn(scaled: NDArray[np.float64], sampling: Sampling, position: int) -> int:
    # Stable, so equal logits keep the order of their numbers.
    order = np.argsort(-scaled, kind="stable")
    order = order[: np.count_nonzero(scaled > -math.inf)]
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
