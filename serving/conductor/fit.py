"""Linear models with coefficients that are never negative, fitted to measurements as they come.

    fit = NonNegativeFit(prior=(0.002, 1e-4, 1e-9), scales=(1, 1000, 1e6))
    fit.observe((1.0, tokens, tokens**2), seconds)
    fit.predict((1.0, 4096, 4096**2))

Least squares with each measurement divided by its amount of work, so that short and long requests
weigh about alike. (Dividing by the measured value would believe the quickest ones most.) Old ones
are forgotten, so a machine that became slower is believed after some dozen requests. The prior
counts as a tenth of a measurement and fades faster. Coefficients that are not negative keep
extrapolation sane: a time that falls as work grows would send every long prompt to one place.

There are few coefficients, so every subset of them is tried: O(2^k k^3) a solve, done when the next
prediction needs it. Pure: no clock, no randomness.
"""

from __future__ import annotations

from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["NonNegativeFit"]

_KEPT = 0.97
"""How much a measurement counts for once the next one is there."""
_PRIOR_WEIGHT = 0.1
_PRIOR_KEPT = 0.85
_PRIOR_WEIGHT_MIN = 1e-7
"""It never quite goes: it decides between models that explain equal measurements equally well."""


class NonNegativeFit:
    """`value = sum(c_i * feature_i)`, every c_i >= 0; `scales` are typical sizes of features."""

    def __init__(self, prior: Sequence[float], scales: Sequence[float]) -> None:
        if len(prior) != len(scales) or min(prior) < 0 or not any(prior):
            raise ValueError(f"a prior is one coefficient of 0 or more a feature, not {prior}")
        self._scales: NDArray[np.float64] = np.array(scales, np.float64)
        self._prior: NDArray[np.float64] = self._scales * np.array(prior, np.float64)
        # Of scaled features and values, both divided by the work they stand for.
        self._gram = np.zeros((len(prior), len(prior)))
        self._moment = np.zeros(len(prior))
        self._prior_weight = _PRIOR_WEIGHT
        self._solved: tuple[float, ...] | None = tuple(prior)

    def observe(self, features: Sequence[float], value: float) -> None:
        """Take a measurement in; one of no duration says nothing and is ignored."""
        if value <= 0:
            return
        row = np.array(features) / self._scales
        work = row.sum()
        row /= work
        self._moment = _KEPT * self._moment + row * (value / work)
        self._gram = _KEPT * self._gram + np.outer(row, row)
        self._prior_weight = max(_PRIOR_KEPT * self._prior_weight, _PRIOR_WEIGHT_MIN)
        self._solved = None

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The current ones, one a feature."""
        if self._solved is None:
            self._solved = tuple((self._solve() / self._scales).tolist())
        return self._solved

    def predict(self, features: Sequence[float]) -> float:
        """The value expected for these features."""
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def _solve(self) -> NDArray[np.float64]:
        """The best of all subsets of coefficients, the others being 0."""
        size = len(self._prior)
        # With the prior no matrix is singular, however alike the measurements are.
        gram = self._gram + self._prior_weight * np.eye(size)
        moment = self._moment + self._prior_weight * self._prior
        best, best_gain = self._prior, 0.0
        for count in range(1, size + 1):
            for chosen in map(list, combinations(range(size), count)):
                found = np.linalg.solve(gram[np.ix_(chosen, chosen)], moment[chosen])
                # At the optimum of a subset this is what it takes off the squared error.
                gain = float(found @ moment[chosen])
                if found.min() >= 0 and gain > best_gain:
                    best, best_gain = np.zeros(size), gain
                    best[chosen] = found
        return best
