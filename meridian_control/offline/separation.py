"""Measures how well each signal separates stops after which the answer is right from stops after which it is wrong.

A rule on a signal that does not separate would end thinking at random places. The module's functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meridian_control.offline.correctness import RIGHT
from meridian_control.offline.statistics import Area, Interval, percentiles, resampled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.offline.rule_replay import Replay

RESAMPLES, BATCHES = 1000, 50


@dataclass(frozen=True)
class Separation:
    """How well a signal separates right from harmful stops: the area under its ROC curve, 0.5 for a random signal."""

    signal: str
    auroc: float
    interval: Interval
    why_not: str

    @property
    def separates(self) -> bool:
        return not self.why_not


def scores(replay: Replay) -> dict[str, NDArray[np.float64]]:
    """Return each signal at every boundary, higher if the signal's rule is more likely to stop there.

    Entropy and position have no rule and serve as comparisons. The position is the number of thinking tokens.
    """
    episodes = replay.episodes
    return {
        "EAT": -replay.eat_nats,
        "rank": np.where(episodes.ranks[:, 0] > 0, -episodes.ranks[:, 0], np.nan),
        "RPDI": replay.rpdi,
        "entropy": -episodes.entropy_nats,
        "position": episodes.think_tokens.astype(float),
    }


def separation(
    replay: Replay,
    fit: NDArray[np.intp],
    unit: NDArray[np.int64],
    confidence: float,
    *,
    name: str,
    score: NDArray[np.float64],
) -> Separation:
    """Measure how well a signal separates right from wrong stops, over requests whose natural answer is right.

    fit: the requests to measure on. unit: number of each request's group, or of the request itself, [requests]. score:
    the signal at every boundary, as `scores` returns it.
    """
    natural = replay.judge.natural
    chosen = np.zeros(len(natural), bool)
    chosen[fit[natural[fit] >= RIGHT]] = True
    owner = replay.episodes.owner
    where = np.flatnonzero(chosen[owner] & np.isfinite(score))
    units, numbers = np.unique(np.where(chosen, unit, -1), return_inverse=True)
    numbers -= int(units[0] < 0)
    right = replay.right[where] >= RIGHT
    if not len(where):
        return Separation(name, np.nan, Interval(np.nan, np.nan), "it was not measured")
    if right.all() or not right.any():
        reason = f"every stop is {'right' if right.all() else 'wrong'}: there is nothing to tell apart"
        return Separation(name, np.nan, Interval(np.nan, np.nan), reason)
    area = Area(score[where], right, numbers[owner[where]], int((units >= 0).sum()))
    weights = resampled(area.owners, RESAMPLES)
    parts = np.split(weights, BATCHES)
    interval = percentiles(np.concatenate([area(part) for part in parts]), confidence)
    auroc = float(area(np.ones((1, area.owners)))[0])
    why = "" if interval.low > RIGHT else f"AUROC {auroc:.2f} is not above 0.5 with confidence"
    return Separation(name, auroc, interval, why)
