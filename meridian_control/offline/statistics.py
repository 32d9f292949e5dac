"""Statistics of a calibration: bootstrap intervals, bounds on harm, and the area under a signal's ROC curve.

The bootstrap draws whole requests, because the sentence ends of one request are not independent; if requests belong to
groups, it draws whole groups. `mean_bound` needs scipy, from the extra `calibrate`. The module's functions are pure and
give the same values in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

SEED = 1
# Steps of a bisection in [0, 1], after which the interval is smaller than the precision of a float.
BISECTIONS = 60
# Largest size, in multiples of the number of boundaries, of a matrix of scores and owners.
DENSE = 4


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def mean_bound(mean: float, count: int, confidence: float) -> float:
    """Return the Hoeffding-Bentkus bound that an expectation stays below with this confidence.

    mean: of `count` independent values in [0, 1]. The bound is the largest r whose p-value is not below 1 - confidence:
    p(r) = min(exp(-n h(mean, r)), e P(Binomial(n, r) <= ceil(n mean))), where h(a, b) = a ln(a / b) + (1 - a) ln((1 -
    a) / (1 - b)). It is used in Learn then Test (arXiv 2110.01052) and comes from arXiv 2101.02703. Without harm it
    equals the exact bound for counts, 1 - (1 - confidence) ** (1 / n).
    """
    # Self-calibration has no groups, and so runs without scipy.
    from scipy import special  # type: ignore[import-untyped]

    most = math.ceil(count * mean - 1e-9)

    def p_value(r: float) -> float:
        entropy = special.rel_entr(mean, r) + special.rel_entr(1 - mean, 1 - r)
        return float(min(np.exp(-count * entropy), np.e * special.bdtr(most, count, r)))

    low, high = mean, 1.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if p_value(middle) >= 1 - confidence else (low, middle)
    return high


@cache
def resampled(count: int, resamples: int) -> NDArray[np.float64]:
    """Return how often each request is drawn in each bootstrap sample, [resamples, count]."""
    drawn = np.random.default_rng(SEED).integers(0, count, (resamples, count))
    flat = drawn + count * np.arange(resamples)[:, None]
    return np.bincount(flat.ravel(), minlength=resamples * count).reshape(resamples, count).astype(float)


def percentiles(values: NDArray[np.float64], confidence: float) -> Interval:
    """Return the central interval that contains this share of the bootstrap values."""
    low, high = np.quantile(values, ((1 - confidence) / 2, (1 + confidence) / 2)).tolist()
    return Interval(low, high)


class Area:
    """Computes areas under the ROC curve over boundaries.

    `area(weights)` takes the weights of the boundaries' owners (requests or groups), [samples, owners], and returns the
    areas, [samples].
    """

    def __init__(
        self, score: NDArray[np.float64], right: NDArray[np.bool_], owner: NDArray[np.int64], owners: int
    ) -> None:
        order = np.argsort(score, kind="stable")
        self.owners = owners
        self._owner, self._right = owner[order], right[order]
        # Positions at which groups of equal scores begin; pairs within a group count half.
        self._ties = np.flatnonzero(np.append(True, np.diff(score[order]) > 0))
        # Numbers of right and of wrong boundaries by owner and score, if so many boundaries share a score that these
        # matrices are small: their product with the weights is much faster.
        self._counts: list[NDArray[np.float64]] = []
        if (size := owners * len(self._ties)) <= DENSE * len(score):
            tie = np.repeat(np.arange(len(self._ties)), np.diff(np.append(self._ties, len(score))))
            cell = self._owner * len(self._ties) + tie
            shape = owners, len(self._ties)
            for which in (self._right, ~self._right):
                self._counts.append(np.bincount(cell[which], minlength=size).reshape(shape).astype(float))

    def _sums(self, weights: NDArray[np.float64]) -> Iterator[NDArray[np.float64]]:
        """Yield the summed weights of the right and of the wrong boundaries with each score, [samples, scores]."""
        if self._counts:
            yield from (weights @ count for count in self._counts)
            return
        weight = weights[:, self._owner]
        for which in (self._right, ~self._right):
            yield np.add.reduceat(weight * which, self._ties, axis=1)

    def __call__(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        right, wrong = self._sums(weights)
        below = np.cumsum(wrong, axis=1) - wrong / 2
        pairs = right.sum(1) * wrong.sum(1)
        # A bootstrap sample without both right and wrong stops gets the area of a random signal.
        area: NDArray[np.float64] = np.where(pairs > 0, (right * below).sum(1) / np.maximum(pairs, 1), 0.5)
        return area
