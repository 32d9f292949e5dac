"""Chooses the rule and the thresholds that end thinking once the answer is settled.

A rule is chosen on one half of a trace's requests, and its figures are reported on the other half. If the labels put
requests into groups, a group lies in one half as a whole, and groups take the place of requests in all statistics. The
module owns the choice and its statistics. The module needs scipy, from the extra `calibrate`. The module's functions
are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.offline.calibrated_policy import policy_of
from meridian_control.offline.candidates import loosened, paired, single_rules
from meridian_control.offline.correctness import RIGHT
from meridian_control.offline.halves import halved
from meridian_control.offline.rule_replay import (
    CAP,
    SAME,
    SIGNALS,
    Replay,
    StoppingRule,
    Stops,
)
from meridian_control.offline.statistics import (
    Area,
    Interval,
    harmful_bound,
    mean_bound,
    percentiles,
    resampled,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from meridian_control.policy.model import Policy

RESAMPLES = 2000
SEPARATION_RESAMPLES, BATCHES = 1000, 50
# A pair of rules is preferred to the best single rule only if it saves this share of the thinking more.
PAIR_MUST_ADD = 0.02
# Number of rules of each family that are paired with rules of other families, and the largest harm that such a rule may
# do alone, in multiples of max_loss.
PAIRED_RULES, PAIRED_LOSS = 5, 2


@dataclass(frozen=True)
class Figures:
    """The effect of a rule on some requests.

    `saved` is the share of the thinking that the rule saves, less the probes' tokens. `accuracy_change` is the accuracy
    with the rule minus the natural accuracy. `harmful` counts the requests that only the stop made wrong. `harm` is the
    mean accuracy that requests (or groups, each with its requests' mean) lose, not offset by requests that turn right,
    and `harm_bound` is its upper confidence bound.
    """

    requests: int
    stopped: int
    tokens: float
    accuracy: float
    saved: float
    accuracy_change: float
    probe_share: float
    harmful: int
    saved_interval: Interval
    accuracy_interval: Interval
    harm: float
    harm_bound: float


@dataclass(frozen=True)
class Point:
    """A rule on its family's Pareto frontier on the first half, with its figures on both halves."""

    rule: StoppingRule
    fit: Figures
    held_out: Figures


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


@dataclass(frozen=True)
class Calibration:
    """The result. confirmed: the recommended rule may be put into force. proved: on the half not used for choosing, the
    bound of its harm is within the allowed loss. groups: number of groups of requests, 0 if requests are independent.
    """

    natural: Figures
    separations: list[Separation]
    # Each family's frontier, from the rule that saves least to the rule that saves most.
    fronts: dict[str, list[Point]]
    recommended: Point | None
    # The best fixed cap, chosen within the same allowed loss.
    fixed_cap: Point | None
    confirmed: bool
    proved: bool
    groups: int
    policy: Policy


@dataclass(frozen=True)
class Goal:
    """The accuracy that a rule may lose, a fraction, and the confidence of all intervals and bounds.

    strict: recommend only a rule whose harm's upper bound is within max_loss on both halves.
    """

    max_loss: float = 0.01
    confidence: float = 0.95
    strict: bool = False


def calibrate(replay: Replay, goal: Goal, split: int = 0) -> Calibration:
    """Choose a rule from a trace and compute its figures. split: number of the split into halves.

    Raises TooFewRequests.
    """
    fit, held_out, unit = halved(replay.episodes.ids, replay.judge, split)
    halves = _Halves(replay, fit, held_out, unit, goal)
    separations = [_separation(halves, name, score) for name, score in _scores(replay).items()]
    good = {s.signal for s in separations if s.separates}

    tried = {family: halves.tried(rules) for family, rules in single_rules(replay, fit).items()}
    usable = [family for family in tried if set(SIGNALS[family]) <= good and family != CAP]
    cautious = {
        family: [t.rule for t in pareto(tried[family]) if t.harm <= PAIRED_LOSS * goal.max_loss] for family in usable
    }
    pairs = {family: halves.tried(rules) for family, rules in paired(cautious, PAIRED_RULES).items()}
    single = halves.best([t for family in usable for t in tried[family]])
    best = halves.best([t for found in pairs.values() for t in found])
    if best is None or (single is not None and best.saved <= single.saved + PAIR_MUST_ADD):
        best = single

    recommended = halves.point(best) if best is not None else None
    cap = halves.best(tried[CAP])
    proved = recommended is not None and recommended.held_out.harm_bound <= goal.max_loss
    kept = recommended is not None and recommended.held_out.accuracy_change >= -goal.max_loss
    confirmed = kept and (proved or not goal.strict)
    judged = np.concatenate([fit, held_out])
    return Calibration(
        natural=halves.figures(_nothing(replay), held_out),
        separations=separations,
        fronts={family: [halves.point(t) for t in pareto(found)] for family, found in (tried | pairs).items()},
        recommended=recommended,
        fixed_cap=halves.point(cap) if cap is not None else None,
        confirmed=confirmed,
        proved=proved,
        groups=len(set(unit[fit])) + len(set(unit[held_out])) if replay.judge.groups else 0,
        policy=policy_of(replay, best.rule if best and confirmed else None, good, judged, unit[judged]),
    )


def _nothing(replay: Replay) -> Stops:
    count = len(replay.episodes.ids)
    never = np.full(count, np.inf)
    return Stops(never, replay.judge.natural, never, np.zeros(count, np.int64))


# --------------------------------------------------------------------------------------------------------- the frontier


@dataclass(frozen=True)
class _Tried:
    """A rule and its effect on the first half. `harm` is as in Figures."""

    rule: StoppingRule
    stops: Stops
    saved: float
    change: float
    harm: float


def pareto(tried: Sequence[_Tried]) -> list[_Tried]:
    """Return the rules that no other rule beats in both saving and accuracy, from least saved to most saved."""
    front: list[_Tried] = []
    for one in sorted(tried, key=lambda t: (-t.saved, -t.change)):
        if not front or one.change > front[-1].change:
            front.append(one)
    return front[::-1]


@dataclass(frozen=True)
class _Halves:
    """Both halves of the requests. unit: number of each request's group, or of the request itself, [requests]."""

    replay: Replay
    fit: NDArray[np.intp]
    held_out: NDArray[np.intp]
    unit: NDArray[np.int64]
    goal: Goal

    def tried(self, rules: Sequence[StoppingRule]) -> list[_Tried]:
        """Try rules, and return those that stop at least one request of the first half."""
        tried = (self._try(rule) for rule in rules)
        return [t for t in tried if np.isfinite(t.stops.at_tokens[self.fit]).any()]

    def _try(self, rule: StoppingRule) -> _Tried:
        stops, fit = self.replay.stops(rule), self.fit
        change = stops.right[fit] - self.replay.judge.natural[fit]
        saved = 1 - self._spent(stops, fit).sum() / self.replay.episodes.natural_tokens[fit].sum()
        return _Tried(rule, stops, float(saved), float(change.mean()), float(self._harm(stops, fit).mean()))

    def _harm(self, stops: Stops, where: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the mean accuracy that the requests of each unit lose, in [0, 1], [units]."""
        lost = np.maximum(self.replay.judge.natural[where] - stops.right[where], 0.0)
        unit = np.unique(self.unit[where], return_inverse=True)[1]
        harm: NDArray[np.float64] = np.bincount(unit, lost) / np.bincount(unit)
        return harm

    def _bound(self, harm: NDArray[np.float64]) -> float:
        """Return the upper bound of the expected harm; exact if each unit is one request that is right or wrong."""
        if self._counts:
            return harmful_bound(round(harm.sum()), len(harm), self.goal.confidence)
        return mean_bound(float(harm.mean()), len(harm), self.goal.confidence)

    @cached_property
    def _counts(self) -> bool:
        """Whether requests are independent, and each is either right or wrong, so that harm is a binomial count."""
        judge = self.replay.judge
        natural = judge.natural[~np.isnan(judge.natural)]
        return not judge.groups and bool(np.isin(judge.right, (0, 1)).all() and np.isin(natural, (0, 1)).all())

    def best(self, tried: Sequence[_Tried]) -> _Tried | None:
        """Return the rule that saves most within half the allowed loss, and within all of it with loosened thresholds.

        A threshold that the first half only just allows would often fail on the other half. Only harm counts as loss,
        because requests that become right by being stopped do so by chance. If the goal is strict, the bound of the
        harm with loosened thresholds has to be within the allowed loss, so that the other half is likely to prove it.
        """
        goal = self.goal
        for one in sorted(tried, key=lambda t: -t.saved):
            if one.saved <= 0:
                break
            if one.harm > goal.max_loss / 2:
                continue
            laxer = self._try(loosened(one.rule))
            if (self._bound(self._harm(laxer.stops, self.fit)) if goal.strict else laxer.harm) <= goal.max_loss:
                return one
        return None

    def point(self, one: _Tried) -> Point:
        return Point(one.rule, self.figures(one.stops, self.fit), self.figures(one.stops, self.held_out))

    def _spent(self, stops: Stops, where: NDArray[np.intp]) -> NDArray[Any]:
        """Return each request's thinking tokens plus its probes' tokens, [where]."""
        natural = self.replay.episodes.natural_tokens[where]
        spent: NDArray[Any] = np.minimum(stops.at_tokens[where], natural) + self._probed(stops, where)
        return spent

    def _probed(self, stops: Stops, where: NDArray[np.intp]) -> NDArray[Any]:
        probed: NDArray[Any] = stops.probes[where] * self.replay.cost_tokens
        return probed

    def figures(self, stops: Stops, where: NDArray[np.intp]) -> Figures:
        natural, before = self.replay.episodes.natural_tokens[where], self.replay.judge.natural[where]
        spent, right = self._spent(stops, where), stops.right[where]
        unit = np.unique(self.unit[where], return_inverse=True)[1]
        change, harm = right - before, self._harm(stops, where)
        weights = resampled(len(harm), RESAMPLES)

        def drawn(values: NDArray[Any]) -> NDArray[np.float64]:
            """Return the sum of the requests' values in each bootstrap sample."""
            sums: NDArray[np.float64] = weights @ np.bincount(unit, values)
            return sums

        return Figures(
            requests=len(where),
            stopped=int(np.isfinite(stops.at_tokens[where]).sum()),
            tokens=float(spent.mean()),
            accuracy=float(right.mean()),
            saved=float(1 - spent.sum() / natural.sum()),
            accuracy_change=float(change.mean()),
            probe_share=float(self._probed(stops, where).sum() / natural.sum()),
            harmful=int(((before >= RIGHT) & (right < RIGHT)).sum()),
            saved_interval=percentiles(1 - drawn(spent) / drawn(natural), self.goal.confidence),
            accuracy_interval=percentiles(drawn(change) / drawn(np.ones(len(where))), self.goal.confidence),
            harm=float(harm.mean()),
            harm_bound=self._bound(harm),
        )


# ---------------------------------------------------------------------------------------------------------- the signals


def _scores(replay: Replay) -> dict[str, NDArray[np.float64]]:
    """Return each signal at every boundary, higher if the signal's rule is more likely to stop there.

    Entropy and position have no rule and serve as comparisons. The position is the number of thinking tokens.
    """
    episodes, same = replay.episodes, replay.same_answer
    return {
        "EAT": -replay.eat_nats,
        "rank": np.where(episodes.ranks[:, 0] > 0, -episodes.ranks[:, 0], np.nan),
        "margin": -episodes.margins[:, 0],
        "RPDI": replay.rpdi,
        "same answer": np.where(same > 0, same, np.nan),
        "entropy": -episodes.entropy_nats,
        "position": episodes.think_tokens.astype(float),
    }


def _separation(halves: _Halves, name: str, score: NDArray[np.float64]) -> Separation:
    """Measure how well a signal separates right from wrong stops, over requests whose natural answer is right."""
    replay, fit, natural = halves.replay, halves.fit, halves.replay.judge.natural
    chosen = np.zeros(len(natural), bool)
    chosen[fit[natural[fit] >= RIGHT]] = True
    owner = replay.episodes.owner
    where = np.flatnonzero(chosen[owner] & np.isfinite(score))
    units, numbers = np.unique(np.where(chosen, halves.unit, -1), return_inverse=True)
    numbers -= int(units[0] < 0)
    right = replay.right[where] >= RIGHT
    if not len(where):
        return Separation(name, np.nan, Interval(np.nan, np.nan), "it was not measured")
    if name == SAME and replay.judge.is_proxy:
        return Separation(name, np.nan, Interval(np.nan, np.nan), "without labels the same trial answers judge it")
    if right.all() or not right.any():
        reason = f"every stop is {'right' if right.all() else 'wrong'}: there is nothing to tell apart"
        return Separation(name, np.nan, Interval(np.nan, np.nan), reason)
    area = Area(score[where], right, numbers[owner[where]], int((units >= 0).sum()))
    weights = resampled(area.owners, SEPARATION_RESAMPLES)
    parts = np.split(weights, BATCHES)
    interval = percentiles(np.concatenate([area(part) for part in parts]), halves.goal.confidence)
    found = float(area(np.ones((1, area.owners)))[0])
    why = "" if interval.low > RIGHT else f"AUROC {found:.2f} is not above 0.5 with confidence"
    return Separation(name, found, interval, why)
