"""Measures the targets of a pressure entry on one engine over a window. The code does no I/O and reads no clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from meridian_control.capabilities.pressure.rule import FAR, ROOM, Reading
from meridian_control.common.histogram import Histogram
from meridian_control.policy.shortening_schema import TARGETS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.policy.shortening_schema import PressurePolicy

SHARE = 0.99
# Bounds of a target's histogram, as multiples of the limit. All values that levels depend on are bounds, so that it is
# known exactly whether the quantile exceeds them; the measured value itself is rounded up to the next bound.
STEP, BOUNDS_BELOW, BOUNDS_ABOVE = 1.1, 48, 128
RATIOS = np.union1d(STEP ** np.arange(-BOUNDS_BELOW, BOUNDS_ABOVE + 1, dtype=np.float64), (ROOM, FAR))
# Times are rounded to whole microseconds, so that one that meets its limit exactly does not exceed it by an error of
# floating-point arithmetic.
DECIMALS = 3
PREEMPTED = "preempted_answer_ratio"


class Window:
    """The values of one entry since `start_ms`, in milliseconds on the session's clock.

    answers: number of answers in the window so far, of which the engine has preempted the number `preempted`.
    """

    def __init__(self, entry: PressurePolicy, start_ms: float) -> None:
        self.entry = entry
        self.limits = {target: float(limit) for target in TARGETS if (limit := getattr(entry, target))}
        self.restart(start_ms)

    def restart(self, start_ms: float, answers: int = 0) -> None:
        """Begin a window. answers: number of answers that have begun before."""
        self.start_ms, self.answers, self.preempted = start_ms, answers, 0
        self._times = {t: Histogram((RATIOS * limit).tolist()) for t, limit in self.limits.items() if t != PREEMPTED}

    @property
    def targets(self) -> list[str]:
        """The targets whose times are measured."""
        return list(self._times)

    def add_times(self, target: str, times_ms: NDArray[np.float64]) -> None:
        """Add measured milliseconds of a target that the entry has."""
        self._times[target].add(times_ms.round(DECIMALS))

    @property
    def length_ms(self) -> float:
        return 1e3 * self.entry.window_s

    def is_over(self, now_ms: float) -> bool:
        return now_ms >= self.start_ms + self.length_ms

    def readings(self, waiting_ms: dict[str, NDArray[np.float64]]) -> list[Reading]:
        """Return the window's values. waiting_ms: by target, the milliseconds for which requests have waited so far; of
        these, times above the limit count as samples, because a request that waits has no time yet."""
        readings = []
        for target, histogram in self._times.items():
            limit, waited = self.limits[target], waiting_ms.get(target, np.zeros(0)).round(DECIMALS)
            histogram.add(waited[waited > limit])
            samples = int(histogram.counts.sum())
            readings.append(Reading(target, histogram.upper_quantile(SHARE) if samples else 0.0, limit, samples))
        if limit := self.limits.get(PREEMPTED, 0.0):
            ratio = self.preempted / self.answers if self.answers else 0.0
            readings.append(Reading(PREEMPTED, ratio, limit, self.answers))
        return readings
