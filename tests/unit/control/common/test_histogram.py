"""Histograms: the bucket of an observation, and the sum of histograms."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from meridian_control.common.histogram import (
    ANSWER_BOUNDS,
    TIME_BOUNDS_S,
    TOKEN_BOUNDS,
    Histogram,
    answer_histogram,
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


def test_bounds() -> None:
    for bounds in (TIME_BOUNDS_S, TOKEN_BOUNDS, ANSWER_BOUNDS):
        assert list(bounds) == sorted(set(bounds))
    assert (TIME_BOUNDS_S[0], TIME_BOUNDS_S[-1]) == (0.001, 10.0)
    assert max(b / a for a, b in pairwise(TIME_BOUNDS_S)) < 1.29
    assert (ANSWER_BOUNDS[0], ANSWER_BOUNDS[-1]) == (1, 100_000)
    assert all(bound == int(bound) for bound in ANSWER_BOUNDS), "so that a bound says which whole numbers are above it"
    assert max(b / a for a, b in pairwise(ANSWER_BOUNDS) if a >= 4) < 1.34


def test_the_quantile_is_the_lowest_bound_that_enough_observations_do_not_exceed() -> None:
    made = answer_histogram()
    assert made.upper_quantile(0.95) == ANSWER_BOUNDS[-1], "nothing is known"
    made.add(np.array([100] * 95 + [500] * 5))
    assert (made.upper_quantile(0.95), made.above(100)) == (100, 5)
    made.add(np.array([500]))
    assert (made.upper_quantile(0.95), made.above(500), made.above(400)) == (500, 0, 6)
    made.add(np.array([1e9] * 100))
    assert (made.upper_quantile(0.95), made.above(ANSWER_BOUNDS[-1])) == (ANSWER_BOUNDS[-1], 100)
