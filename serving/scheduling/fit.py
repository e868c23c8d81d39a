"""Linear models with coefficients that are never negative, fitted to measurements as they come.

    fit = NonNegativeFit(prior=(0.002, 1e-4, 1e-9), scales=(1, 1000, 1e6))
    fit.observe((1.0, tokens, tokens**2), seconds)
    fixed_s, token_s, square_s = fit.coefficients

Least squares with each measurement divided by its amount of work, so that short and long requests
weigh about alike. (Dividing by the measured value would believe the quickest ones most.) Old ones
are forgotten, so a machine that became slower is believed after some dozen requests, unless all are
to count alike (`kept=1`). The prior counts as a tenth of a measurement and fades faster.
Coefficients that are not negative keep extrapolation sane: a time that falls as work grows would
send every long prompt to one place.

There are few coefficients, so where one would be negative every subset of them is tried: O(2^k k^3)
a measurement. For so few, plain numbers are quicker than arrays. Pure: no clock, no randomness.
"""

from __future__ import annotations

from itertools import combinations
from operator import mul
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KEPT", "NonNegativeFit"]

KEPT = 0.97
"""How much a measurement counts for once the next one is there."""
_PRIOR_WEIGHT = 0.1
_PRIOR_KEPT = 0.85
_PRIOR_WEIGHT_MIN = 1e-7
"""It never quite goes: it decides between models that explain equal measurements equally well."""


class NonNegativeFit:
    """`value = sum(c_i * feature_i)`, every c_i >= 0; `scales` are typical sizes of features."""

    def __init__(self, prior: Sequence[float], scales: Sequence[float], kept: float = KEPT) -> None:
        if len(prior) != len(scales) or min(prior) < 0 or not any(prior):
            raise ValueError(f"a prior is one coefficient of 0 or more a feature, not {prior}")
        size = range(len(prior))
        self._scales = tuple(map(float, scales))
        self._prior = list(map(mul, self._scales, prior))
        self._subsets = [each for n in size for each in combinations(size, len(prior) - n)]
        # Of scaled features and values, both divided by the work they stand for.
        self._gram = [[0.0] * len(prior) for _ in size]
        self._moment = [0.0] * len(prior)
        self._prior_weight = _PRIOR_WEIGHT
        self._kept = kept
        self.measured = 0
        """Measurements taken in."""
        self.coefficients: tuple[float, ...] = tuple(prior)
        """The current ones, one a feature."""

    def observe(self, features: Sequence[float], value: float) -> None:
        """Take a measurement in; one of no duration says nothing and is ignored."""
        if value <= 0:
            return
        self.measured += 1
        row = [feature / scale for feature, scale in zip(features, self._scales, strict=True)]
        work = sum(row)
        row = [each / work for each in row]
        for at, share in enumerate(row):
            self._moment[at] = self._kept * self._moment[at] + share * (value / work)
            line = self._gram[at]
            for other, another in enumerate(row):
                line[other] = self._kept * line[other] + share * another
        self._prior_weight = max(_PRIOR_KEPT * self._prior_weight, _PRIOR_WEIGHT_MIN)
        # Now, since nobody waits for it: a request waits for a prediction.
        found = zip(self._solve(), self._scales, strict=True)
        self.coefficients = tuple(each / scale for each, scale in found)

    def _solve(self) -> list[float]:
        """The best of all subsets of coefficients, the others being 0."""
        weight = self._prior_weight
        moment = [
            each + weight * prior for each, prior in zip(self._moment, self._prior, strict=True)
        ]
        best, best_gain = self._prior, 0.0
        for chosen in self._subsets:
            # With the prior no matrix is singular, however alike the measurements are.
            system = [
                [self._gram[i][j] + (weight if i == j else 0.0) for j in chosen] + [moment[i]]
                for i in chosen
            ]
            found = _eliminated(system)
            if min(found) < 0:
                continue
            if len(chosen) == len(moment):
                return found  # no subset of it explains more
            # At the optimum of a subset this is what it takes off the squared error.
            gain = sum(each * moment[i] for each, i in zip(found, chosen, strict=True))
            if gain > best_gain:
                best, best_gain = [0.0] * len(moment), gain
                for each, i in zip(found, chosen, strict=True):
                    best[i] = each
        return best


def _eliminated(rows: list[list[float]]) -> list[float]:
    """Solve a positive definite system, whose last column is its right side, in place.

    Such a system needs no exchange of rows.
    """
    for at, row in enumerate(rows):
        for below in rows[at + 1 :]:
            factor = below[at] / row[at]
            for column in range(at + 1, len(row)):
                below[column] -= factor * row[column]
    found: list[float] = []
    for at in reversed(range(len(rows))):
        row = rows[at]
        known = sum(map(mul, row[at + 1 : -1], found))
        found.insert(0, (row[-1] - known) / row[at])
    return found
