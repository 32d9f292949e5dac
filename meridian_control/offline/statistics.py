"""Statistics of a calibration: bootstrap intervals, a bound on rare harm, and the area under a signal's ROC curve.

The bootstrap draws whole requests, because the sentence ends of one request are not independent. The module needs
scipy, from the extra `calibrate`. The module's functions are pure and give the same values in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from scipy import stats  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from numpy.typing import NDArray

SEED = 1


@dataclass(frozen=True)
class Interval:
    low: float
    high: float


def harmful_bound(harmful: int, requests: int, confidence: float) -> float:
    """Return the one-sided Clopper-Pearson bound that the harmful share stays below with this confidence."""
    test = stats.binomtest(harmful, requests, alternative="less")
    return float(test.proportion_ci(confidence_level=confidence, method="exact").high)


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

    `area(weights)` takes the requests' weights, [samples, requests], and returns the areas, [samples].
    """

    def __init__(
        self, score: NDArray[np.float64], right: NDArray[np.bool_], owner: NDArray[np.int64], requests: int
    ) -> None:
        order = np.argsort(score, kind="stable")
        self.requests = requests
        self._owner, self._right = owner[order], right[order]
        # Positions at which groups of equal scores begin; pairs within a group count half.
        self._ties = np.flatnonzero(np.append(True, np.diff(score[order]) > 0))

    def __call__(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        weight = weights[:, self._owner]
        right = np.add.reduceat(weight * self._right, self._ties, axis=1)
        wrong = np.add.reduceat(weight * ~self._right, self._ties, axis=1)
        below = np.cumsum(wrong, axis=1) - wrong / 2
        pairs = right.sum(1) * wrong.sum(1)
        # A bootstrap sample without both right and wrong stops gets the area of a random signal.
        area: NDArray[np.float64] = np.where(pairs > 0, (right * below).sum(1) / np.maximum(pairs, 1), 0.5)
        return area
