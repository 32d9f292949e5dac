"""Statistics of a calibration: bootstrap intervals and bounds on harm.

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
    from numpy.typing import NDArray

SEED = 1
# Steps of a bisection in [0, 1], after which the interval is smaller than the precision of a float.
BISECTIONS = 60


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
