"""Measures how well each signal separates stops after which the answer is right from stops after which it is wrong.

A rule on a signal that does not separate would end thinking at random places. The module's functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from meridian_control.offline.correctness import RIGHT
from meridian_control.offline.statistics import Interval, percentiles, resampled

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.offline.rule_replay import Replay

RESAMPLES, BATCHES = 1000, 50


@dataclass(frozen=True)
class Separation:
    """How well a signal separates right from harmful stops: the area under its ROC curve, 0.5 for a random signal, and
    its interval; None if there is nothing to separate. why_not: empty if the signal separates."""

    signal: str
    auroc: float | None = None
    interval: Interval | None = None
    why_not: str = ""


def scores(replay: Replay) -> dict[str, NDArray[np.float64]]:
    """Return each signal at every boundary, higher if the signal's rule is more likely to stop there."""
    ranks = replay.episodes.ranks[:, 0]
    return {"EAT": -replay.eat_nats, "rank": np.where(ranks > 0, -ranks, np.nan), "RPDI": replay.rpdi}


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
    right = replay.right[where] >= RIGHT
    if not len(where):
        return Separation(name, why_not="it was not measured")
    if right.all() or not right.any():
        which = "right" if right.all() else "wrong"
        return Separation(name, why_not=f"every stop is {which}: there is nothing to tell apart")
    units, numbers = np.unique(np.where(chosen, unit, -1), return_inverse=True)
    numbers -= int(units[0] < 0)
    owners = int((units >= 0).sum())
    area = partial(areas, score[where], right, numbers[owner[where]])
    parts = np.split(resampled(owners, RESAMPLES), BATCHES)
    interval = percentiles(np.concatenate([area(part) for part in parts]), confidence)
    auroc = float(area(np.ones((1, owners)))[0])
    why = "" if interval.low > RIGHT else f"AUROC {auroc:.2f} is not above 0.5 with confidence"
    return Separation(name, auroc, interval, why)


def areas(
    score: NDArray[np.float64], right: NDArray[np.bool_], owner: NDArray[np.int64], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the areas under the ROC curve over boundaries, [samples].

    weights: of the boundaries' owners (requests or groups), [samples, owners].
    """
    order = np.argsort(score, kind="stable")
    # Positions at which groups of equal scores begin; pairs within a group count half.
    ties = np.flatnonzero(np.append(True, np.diff(score[order]) > 0))
    weight, is_right = weights[:, owner[order]], right[order]
    ones, others = (np.add.reduceat(weight * which, ties, axis=1) for which in (is_right, ~is_right))
    below = np.cumsum(others, axis=1) - others / 2
    pairs = ones.sum(1) * others.sum(1)
    # A bootstrap sample without both right and wrong stops gets the area of a random signal.
    area: NDArray[np.float64] = np.where(pairs > 0, (ones * below).sum(1) / np.maximum(pairs, 1), 0.5)
    return area
