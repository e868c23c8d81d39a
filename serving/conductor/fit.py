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

if TYPE_CHECKING:
    from collections.abc import Sequence

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
        self._scales = tuple(scales)
        self._prior = [c * s for c, s in zip(prior, scales, strict=True)]
        size = len(self._prior)
        # Of scaled features and values, both divided by the work they stand for.
        self._gram = [[0.0] * size for _ in range(size)]
        self._moment = [0.0] * size
        self._prior_weight = _PRIOR_WEIGHT
        self._solved: tuple[float, ...] | None = tuple(prior)

    def observe(self, features: Sequence[float], value: float) -> None:
        """Take a measurement in; one of no duration says nothing and is ignored."""
        if value <= 0:
            return
        row = [f / s for f, s in zip(features, self._scales, strict=True)]
        work = sum(row)
        row = [entry / work for entry in row]
        target = value / work
        for i, left in enumerate(row):
            self._moment[i] = _KEPT * self._moment[i] + left * target
            self._gram[i] = [
                _KEPT * old + left * right for old, right in zip(self._gram[i], row, strict=True)
            ]
        self._prior_weight = max(_PRIOR_KEPT * self._prior_weight, _PRIOR_WEIGHT_MIN)
        self._solved = None

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The current ones, one a feature."""
        if self._solved is None:
            scaled = self._solve()
            self._solved = tuple(d / s for d, s in zip(scaled, self._scales, strict=True))
        return self._solved

    def predict(self, features: Sequence[float]) -> float:
        """The value expected for these features."""
        return sum(c * f for c, f in zip(self.coefficients, features, strict=True))

    def _solve(self) -> list[float]:
        """The best of all subsets of coefficients, the others being 0."""
        size = len(self._prior)
        pull = self._prior_weight
        gram = [
            [entry + (pull if i == j else 0.0) for j, entry in enumerate(row)]
            for i, row in enumerate(self._gram)
        ]
        moment = [m + pull * d for m, d in zip(self._moment, self._prior, strict=True)]
        best, best_gain = list(self._prior), 0.0
        for count in range(1, size + 1):
            for chosen in combinations(range(size), count):
                found = _solve_dense(
                    [[gram[i][j] for j in chosen] for i in chosen], [moment[i] for i in chosen]
                )
                if found is None or min(found) < 0:
                    continue
                # At the optimum of a subset this is what it takes off the squared error.
                gain = sum(value * moment[i] for value, i in zip(found, chosen, strict=True))
                if gain > best_gain:
                    best, best_gain = [0.0] * size, gain
                    for value, i in zip(found, chosen, strict=True):
                        best[i] = value
        return best


def _solve_dense(matrix: list[list[float]], right: list[float]) -> list[float] | None:
    """Gaussian elimination with pivoting; None for a singular matrix."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda i: abs(rows[i][at]))
        if abs(rows[pivot][at]) <= 1e-12 * abs(matrix[at][at]) or rows[pivot][at] == 0.0:
            return None
        rows[at], rows[pivot] = rows[pivot], rows[at]
        for below in range(at + 1, size):
            factor = rows[below][at] / rows[at][at]
            rows[below] = [b - factor * a for a, b in zip(rows[at], rows[below], strict=True)]
    out = [0.0] * size
    for at in reversed(range(size)):
        known = sum(rows[at][j] * out[j] for j in range(at + 1, size))
        out[at] = (rows[at][size] - known) / rows[at][at]
    return out
