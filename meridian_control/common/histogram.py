"""Histograms with fixed buckets, so that histograms of several engines, replicas and versions can be added.

The module knows nothing about the measured values. A histogram is used from one event loop.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

# The bounds follow the R10 series of ISO 3 from 1 ms to 10 s. Each bound is about a quarter above the next lower bound,
# so that a quantile is known within a quarter.
_R10 = (1.0, 1.25, 1.6, 2.0, 2.5, 3.15, 4.0, 5.0, 6.3, 8.0)
TIME_BOUNDS_S: tuple[float, ...] = *(step * 10 ** (decade + 3) / 10**6 for decade in range(4) for step in _R10), 10.0
# The bounds follow the R5 series from 1 ms to 1000 s, because requests may wait in a queue for long.
QUEUEING_BOUNDS_S: tuple[float, ...] = *(step * 10**decade / 10**3 for decade in range(6) for step in _R10[::2]), 1e3
STEP_BOUNDS = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)
TOKEN_BOUNDS = tuple(float(2**power) for power in range(4, 18))

# Number of counts of a histogram of times.
TIME_BUCKETS = len(TIME_BOUNDS_S) + 1
# Number of observations that wait at most to be counted.
WAITING = 512


class Histogram:
    """Counts of observations by bucket, and the sum of the observations. A value equal to a bound counts in the bucket
    below that bound.

    Arrays of observations wait until they have WAITING values or until somebody reads the histogram, because sorting
    many values into buckets takes hardly longer than sorting few.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds, self._bounds = np.array(bounds), tuple(bounds)
        self._counts, self._sum = np.zeros(len(bounds) + 1, np.int64), 0.0
        self._waiting: list[NDArray[np.float64] | NDArray[np.int64]] = []
        self._number = 0

    @property
    def counts(self) -> NDArray[np.int64]:
        """The number of observations in each bucket, [bounds + 1]."""
        self._count()
        return self._counts

    @property
    def sum(self) -> float:
        self._count()
        return self._sum

    def add(self, values: NDArray[np.float64] | NDArray[np.int64]) -> None:
        """Add observations, [values]. The array must not change afterwards."""
        if number := len(values):
            self._waiting.append(values)
            self._number += number
            if self._number >= WAITING:
                self._count()

    def _count(self) -> None:
        """Count the observations that wait."""
        if self._waiting:
            values = np.concatenate(self._waiting)
            self._waiting, self._number = [], 0
            self._counts += np.bincount(self.bounds.searchsorted(values), minlength=len(self._counts))
            self._sum += float(values.sum())

    def add_one(self, value: float) -> None:
        """Add a single value, for which an array would cost ten times as much."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def __iadd__(self, other: Histogram) -> Histogram:
        """Add the counts and the sum of a histogram with the same bounds."""
        self.add_counts(other.counts, other.sum)
        return self

    def add_counts(self, counts: NDArray[np.int64], total: float) -> None:
        """Add the counts, [bounds + 1], and the sum of other observations."""
        self._counts += counts
        self._sum += total

    def upper_quantile(self, share: float) -> float:
        """Return the lowest bound that at least this share of the observations does not exceed; the last bound if there
        is none, or if there are no observations."""
        within = np.cumsum(self.counts[:-1]) >= max(1, share * self.counts.sum())
        return float(self.bounds[within.argmax() if within.any() else -1])

    def message(self) -> fleet_pb2.Histogram:
        return fleet_pb2.Histogram(bounds=self.bounds.tolist(), counts=self.counts.tolist(), sum=self.sum)


def time_counts(message: fleet_pb2.Histogram) -> NDArray[np.int64]:
    """Return the counts of a histogram of times, [TIME_BUCKETS], all zero if another version used other buckets."""
    counts = message.counts if len(message.counts) == TIME_BUCKETS else [0] * TIME_BUCKETS
    return np.array(counts, np.int64)


# Make empty histograms: of times and of queueing times in seconds, of thinking tokens, and of counts of engine steps.
time_histogram = partial(Histogram, TIME_BOUNDS_S)
queueing_histogram = partial(Histogram, QUEUEING_BOUNDS_S)
token_histogram = partial(Histogram, TOKEN_BOUNDS)
step_histogram = partial(Histogram, STEP_BOUNDS)
