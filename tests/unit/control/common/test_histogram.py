"""Histograms: the bucket of an observation, and the sum of histograms."""

from __future__ import annotations

import numpy as np

from meridian_control.common.histogram import (
    TIME_BOUNDS_S,
    Histogram,
    time_histogram,
)


def test_a_bound_belongs_to_the_bucket_below_it() -> None:
    made = Histogram((1.0, 2.0))
    made.add(np.array([0.5, 1.0, 1.5, 2.0, 2.5, 1e9]))
    made.add(np.array([]))
    message = made.message()
    assert (list(message.bounds), list(message.counts)) == ([1, 2], [2, 2, 2])
    assert message.sum == 0.5 + 1 + 1.5 + 2 + 2.5 + 1e9


def test_adding_up() -> None:
    one, two = time_histogram(), time_histogram()
    one.add(np.array([0.02, 0.02]))
    two.add(np.array([0.02, 60.0]))
    one += two
    assert one.counts[TIME_BOUNDS_S.index(0.02)] == 3
    assert (one.counts[-1], one.sum, two.counts.sum()) == (1, 60.06, 2)


def test_the_quantile_is_the_lowest_bound_that_enough_observations_do_not_exceed() -> None:
    made = Histogram((100.0, 500.0, 1000.0))
    assert made.upper_quantile(0.95) == 1000, "nothing is known"
    made.add(np.array([100] * 95 + [500] * 5))
    assert made.upper_quantile(0.95) == 100
    made.add(np.array([500]))
    assert made.upper_quantile(0.95) == 500
    made.add(np.array([1e9] * 100))
    assert made.upper_quantile(0.95) == 1000
