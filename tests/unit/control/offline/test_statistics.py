"""The bounds and the area that a calibration is judged by."""

from __future__ import annotations

import math
from itertools import takewhile

import numpy as np
import pytest
from scipy import special  # type: ignore[import-untyped]

from meridian_control.common.inference import MOST_NEEDED, binomial_upper, confidence_of, needed_to_prove
from meridian_control.offline.separation import areas
from meridian_control.offline.statistics import mean_bound


def test_the_bound_on_a_mean() -> None:
    """Without harm the bound is the exact one; else it lies above the exact one for counts, and holds as often as it
    should."""
    assert mean_bound(0.0, 300, 0.95) == pytest.approx(binomial_upper(0, 300, 0.95))
    assert mean_bound(0.03, 100, 0.95) > binomial_upper(3, 100, 0.95)
    assert mean_bound(1.0, 10, 0.95) == 1
    # The p-value of Learn then Test, computed here from its definition.
    mean, count, bound = 0.1, 50, mean_bound(0.1, 50, 0.9)
    entropy = mean * math.log(mean / bound) + (1 - mean) * math.log((1 - mean) / (1 - bound))
    bentkus = math.e * sum(math.comb(count, k) * bound**k * (1 - bound) ** (count - k) for k in range(6))
    assert min(math.exp(-count * entropy), bentkus) == pytest.approx(0.1)
    rng = np.random.default_rng(5)
    means = rng.beta(0.2, 1.8, (400, 60)).mean(axis=1)
    assert np.mean([mean_bound(float(value), 60, 0.9) >= 0.1 for value in means]) >= 0.9


@pytest.mark.parametrize(("requests", "max_loss"), [(500, 0.01), (300, 0.05)])
def test_attempts_together_err_as_seldom_as_one(requests: int, max_loss: float) -> None:
    """A rule that loses as much as is just forbidden is proved by chance in any of 200 attempts with at most 5 %."""

    def proved(confidence: float) -> float:
        """Return the chance that one attempt proves the rule."""
        is_within = (binomial_upper(n, requests, confidence) <= max_loss for n in range(requests))
        within = range(sum(takewhile(bool, is_within)))
        return float(special.bdtr(max(within), requests, max_loss)) if within else 0.0

    assert 0.001 < sum(proved(confidence_of(k, 0.95)) for k in range(1, 201)) <= 0.05
    assert 1 - (1 - proved(0.95)) ** 200 > 0.9, "so many attempts must spend the confidence"


def test_what_the_attempts_need() -> None:
    needed = [needed_to_prove(0.01, confidence_of(attempt, 0.95)) for attempt in (1, 2, 10)]
    assert needed == [368, 477, 766]
    assert needed_to_prove(0.01, 0.95) == 299
    assert binomial_upper(0, 299, 0.95) <= 0.01 < binomial_upper(0, 298, 0.95)
    assert (needed_to_prove(0.0, 0.95), needed_to_prove(1.0, 0.95)) == (float("inf"), 1)
    assert [needed_to_prove(loss, 0.95) for loss in (1e-300, 5e-324)] == [MOST_NEEDED] * 2


def test_the_area_under_the_curve_counts_pairs() -> None:
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(6), 7)
    score, right = rng.integers(0, 5, len(owner)).astype(float), rng.random(len(owner)) < 0.4
    weights = rng.integers(0, 3, (4, 6)).astype(float)
    found = areas(score, right, owner, weights)
    for sample, value in zip(weights, found, strict=True):
        drawn = np.repeat(np.arange(len(owner)), sample[owner].astype(int))
        ones, others = score[drawn][right[drawn]], score[drawn][~right[drawn]]
        pairs = (ones[:, None] > others).mean() + (ones[:, None] == others).mean() / 2
        assert value == pytest.approx(pairs)
