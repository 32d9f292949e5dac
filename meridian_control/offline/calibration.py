"""Chooses the rule and the thresholds that end thinking once the answer is settled.

A rule is chosen on one half of a trace's requests, and its figures are reported on the other half. The module owns the
choice, its statistics and the resulting policy. The module needs scipy, from the extra `calibrate`. The module's
functions are pure.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.offline.candidates import GROUPS, loosened, paired, single_rules
from meridian_control.offline.correctness import RIGHT
from meridian_control.offline.rule_replay import (
    CAP,
    EAT_SENTENCE,
    RANK,
    RPDI,
    SIGNALS,
    SOFT,
    Replay,
    StoppingRule,
    Stops,
)
from meridian_control.offline.statistics import Area, Interval, harmful_bound, percentiles, resampled
from meridian_control.policy.model import Policy
from meridian_control.policy.section import INT32_MAX

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

RESAMPLES = 2000
SEPARATION_RESAMPLES, BATCHES = 1000, 50
# Smallest number of requests that each half must have.
MIN_REQUESTS = 10
# A pair of rules is preferred to the best single rule only if it saves this share of the thinking more.
PAIR_MUST_ADD = 0.02
# Number of rules of each family that are paired with rules of other families, and the largest harm that such a rule may
# do alone, in multiples of max_loss.
PAIRED_RULES, PAIRED_LOSS = 5, 2


class TooFewRequests(Exception):  # noqa: N818 - the name is the condition
    """A trace has too few requests to calibrate on; the message has the numbers."""


@dataclass(frozen=True)
class Figures:
    """The effect of a rule on some requests.

    `saved` is the share of the thinking that the rule saves, less the probes' tokens. `accuracy_change` is the accuracy
    with the rule minus the natural accuracy. `harmful` counts the requests that only the stop made wrong, and
    `harmful_bound` is the upper confidence bound of the share of such requests.
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
    harmful_bound: float


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
    natural: Figures
    separations: list[Separation]
    # Each family's frontier, from the rule that saves least to the rule that saves most.
    fronts: dict[str, list[Point]]
    recommended: Point | None
    # The best fixed cap, chosen within the same allowed loss.
    fixed_cap: Point | None
    confirmed: bool
    policy: Policy


@dataclass(frozen=True)
class Goal:
    """The accuracy that a rule may lose, a fraction, and the confidence of all intervals."""

    max_loss: float = 0.01
    confidence: float = 0.95


def calibrate(replay: Replay, goal: Goal) -> Calibration:
    """Choose a rule from a trace and compute its figures. Raises TooFewRequests."""
    judged = ~np.isnan(replay.judge.natural)
    first = np.array([first_half(request_id) for request_id in replay.episodes.ids], bool)
    fit, held_out = np.flatnonzero(judged & first), np.flatnonzero(judged & ~first)
    if min(len(fit), len(held_out)) < MIN_REQUESTS:
        raise TooFewRequests(f"{MIN_REQUESTS} requests are needed in each half; there are {len(fit)}, {len(held_out)}")
    separations = [_separation(replay, name, score, fit, goal) for name, score in _scores(replay).items()]
    good = {s.signal for s in separations if s.separates}

    halves = _Halves(replay, fit, held_out, goal)
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
    confirmed = recommended is not None and recommended.held_out.accuracy_change >= -goal.max_loss
    return Calibration(
        natural=halves.figures(_nothing(replay), held_out),
        separations=separations,
        fronts={family: [halves.point(t) for t in pareto(found)] for family, found in (tried | pairs).items()},
        recommended=recommended,
        fixed_cap=halves.point(cap) if cap is not None else None,
        confirmed=confirmed,
        policy=_policy(replay, best.rule if best and confirmed else None, good, np.concatenate([fit, held_out])),
    )


def first_half(request_id: str) -> bool:
    """Whether thresholds are chosen on this request; the answer depends on the id alone, so all runs agree."""
    return hashlib.sha256(request_id.encode()).digest()[0] % 2 == 0


def _nothing(replay: Replay) -> Stops:
    count = len(replay.episodes.ids)
    never = np.full(count, np.inf)
    return Stops(never, replay.judge.natural, never, np.zeros(count, np.int64))


# --------------------------------------------------------------------------------------------------------- the frontier


@dataclass(frozen=True)
class _Tried:
    """A rule and its effect on the first half. `harm` is the accuracy lost, not offset by requests that turn right."""

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
    replay: Replay
    fit: NDArray[np.intp]
    held_out: NDArray[np.intp]
    goal: Goal

    def tried(self, rules: Sequence[StoppingRule]) -> list[_Tried]:
        """Try rules, and return those that stop at least one request of the first half."""
        tried = (self._try(rule) for rule in rules)
        return [t for t in tried if np.isfinite(t.stops.at_tokens[self.fit]).any()]

    def _try(self, rule: StoppingRule) -> _Tried:
        stops, fit = self.replay.stops(rule), self.fit
        change = stops.right[fit] - self.replay.judge.natural[fit]
        saved = 1 - self._spent(stops, fit).sum() / self.replay.episodes.natural_tokens[fit].sum()
        return _Tried(rule, stops, float(saved), float(change.mean()), float(-np.minimum(change, 0).mean()))

    def best(self, tried: Sequence[_Tried]) -> _Tried | None:
        """Return the rule that saves most within half the allowed loss, and within all of it with loosened thresholds.

        A threshold that the first half only just allows would often fail on the other half. Only harm counts as loss,
        because requests that become right by being stopped do so by chance.
        """
        goal = self.goal
        for one in sorted(tried, key=lambda t: -t.saved):
            if one.saved <= 0:
                break
            if one.harm <= goal.max_loss / 2 and self._try(loosened(one.rule)).harm <= goal.max_loss:
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
        harmful = int(((before >= RIGHT) & (right < RIGHT)).sum())
        change, weights = right - before, resampled(len(where), RESAMPLES)
        return Figures(
            requests=len(where),
            stopped=int(np.isfinite(stops.at_tokens[where]).sum()),
            tokens=float(spent.mean()),
            accuracy=float(right.mean()),
            saved=float(1 - spent.sum() / natural.sum()),
            accuracy_change=float(change.mean()),
            probe_share=float(self._probed(stops, where).sum() / natural.sum()),
            harmful=harmful,
            saved_interval=percentiles(1 - (weights @ spent) / (weights @ natural), self.goal.confidence),
            accuracy_interval=percentiles(weights @ change / len(where), self.goal.confidence),
            harmful_bound=harmful_bound(harmful, len(where), self.goal.confidence),
        )


# ---------------------------------------------------------------------------------------------------------- the signals


def _scores(replay: Replay) -> dict[str, NDArray[np.float64]]:
    """Return each signal at every boundary, higher if the signal's rule is more likely to stop there.

    Entropy and position have no rule and serve as comparisons. The position is the number of thinking tokens.
    """
    episodes = replay.episodes
    return {
        "EAT": -replay.eat_nats,
        "rank": -episodes.ranks[:, 0].astype(float),
        "RPDI": replay.rpdi,
        "entropy": -episodes.entropy_nats,
        "position": episodes.think_tokens.astype(float),
    }


def _separation(replay: Replay, name: str, score: NDArray[np.float64], fit: NDArray[np.intp], goal: Goal) -> Separation:
    """Measure how well a signal separates right from wrong stops, over requests whose natural answer is right."""
    natural = replay.judge.natural
    chosen = np.zeros(len(natural), bool)
    chosen[fit[natural[fit] >= RIGHT]] = True
    owner = replay.episodes.owner
    where = np.flatnonzero(chosen[owner] & np.isfinite(score))
    numbers = np.cumsum(chosen) - 1
    right = replay.right[where] >= RIGHT
    if not len(where):
        return Separation(name, np.nan, Interval(np.nan, np.nan), "it was not measured")
    if right.all() or not right.any():
        reason = f"every stop is {'right' if right.all() else 'wrong'}: there is nothing to tell apart"
        return Separation(name, np.nan, Interval(np.nan, np.nan), reason)
    area = Area(score[where], right, numbers[owner[where]], int(chosen.sum()))
    weights = resampled(area.requests, SEPARATION_RESAMPLES)
    interval = percentiles(np.concatenate([area(part) for part in np.split(weights, BATCHES)]), goal.confidence)
    found = float(area(np.ones((1, area.requests)))[0])
    why = "" if interval.low > RIGHT else f"AUROC {found:.2f} is not above 0.5 with confidence"
    return Separation(name, found, interval, why)


# ----------------------------------------------------------------------------------------------------------- the policy


def _policy(replay: Replay, rule: StoppingRule | None, good: set[str], requests: NDArray[np.intp]) -> Policy:
    """Return the base policy with the rule in force and every other rule off.

    Without a rule, the entropy section is in shadow, and only the rules whose signals do not separate are off.
    """
    values = replay.base.model_dump(mode="json", exclude_none=True)
    entropy, scheduler = values["entropy"], values["scheduler"]
    entropy["enabled"], entropy["shadow"] = True, rule is None
    on = {GROUPS[part.family] for part in rule.parts} if rule else good | ({SOFT} if RANK in good else set())
    if EAT_SENTENCE not in on:
        entropy |= {"eat_level_threshold_nats": 0.0, "eat_probe_interval_tokens": INT32_MAX, "eat_probe_max_rank": 0}
    if RANK not in on:
        entropy["rank_conditions"] = []
    if RPDI not in on:
        entropy["rpdi_threshold"] = 0.0
    if SOFT not in on:
        scheduler["soft_think_tokens"] = 0
    if rule is not None:
        with_rule = replay.policy(rule).model_dump(mode="json", exclude_none=True)
        window = ["rpdi_window_tokens"] if RPDI in on else []
        entropy |= {name: with_rule["entropy"][name] for name in (*rule.entropy, *window)}
        scheduler |= {name: with_rule["scheduler"][name] for name in rule.scheduler}
        scheduler["min_think_tokens"] = min(_floor(replay, rule, requests), scheduler["max_think_tokens"])
    return Policy.model_validate(values)


def _floor(replay: Replay, rule: StoppingRule, requests: NDArray[np.intp]) -> int:
    """Return the fewest thinking tokens at which the rule stopped a request, because no earlier stop was judged.

    A rule with a moving mean gets 0, because the mean needs its samples from the beginning.
    """
    if rule.entropy.get("ema_alpha", 1.0) < 1:
        return 0
    seen = replay.stops(rule).first_tokens[requests]
    return int(seen.min()) if np.isfinite(seen.min()) else 0
