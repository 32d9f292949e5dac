"""How sure one can be of a figure: intervals, a bound on rare harm, and whether a signal tells right from wrong.

Requests are what is drawn anew, never their sentence ends, which are not independent. Needs scipy, of the extra
`calibrate`. Pure, and the same in every run.
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
    """One-sided Clopper-Pearson bound: the share is below it with this confidence."""
    test = stats.binomtest(harmful, requests, alternative="less")
    return float(test.proportion_ci(confidence_level=confidence, method="exact").high)


@cache
def resampled(count: int, resamples: int) -> NDArray[np.float64]:
    """How often each request is drawn in each bootstrap sample, [resamples, count]; whole requests are drawn."""
    drawn = np.random.default_rng(SEED).integers(0, count, (resamples, count))
    flat = drawn + count * np.arange(resamples)[:, None]
    return np.bincount(flat.ravel(), minlength=resamples * count).reshape(resamples, count).astype(float)


def percentiles(values: NDArray[np.float64], confidence: float) -> Interval:
    """The interval that holds this share of the bootstrap values, as much left out above as below."""
    low, high = np.quantile(values, ((1 - confidence) / 2, (1 + confidence) / 2)).tolist()
    return Interval(low, high)


class Area:
    """Area under the ROC curve over boundaries, whose requests have weights: `area(weights)`, [samples, requests]."""

    def __init__(
        self, score: NDArray[np.float64], right: NDArray[np.bool_], owner: NDArray[np.int64], requests: int
    ) -> None:
        order = np.argsort(score, kind="stable")
        self.requests = requests
        self._owner, self._right = owner[order], right[order]
        # Equal scores count half.
        self._ties = np.flatnonzero(np.append(True, np.diff(score[order]) > 0))

    def __call__(self, weights: NDArray[np.float64]) -> NDArray[np.float64]:
        weight = weights[:, self._owner]
        right = np.add.reduceat(weight * self._right, self._ties, axis=1)
        wrong = np.add.reduceat(weight * ~self._right, self._ties, axis=1)
        below = np.cumsum(wrong, axis=1) - wrong / 2
        pairs = right.sum(1) * wrong.sum(1)
        # A sample without both kinds says nothing.
        area: NDArray[np.float64] = np.where(pairs > 0, (right * below).sum(1) / np.maximum(pairs, 1), 0.5)
        return area
