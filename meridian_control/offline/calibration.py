"""Chooses the rule and the thresholds that end thinking once the answer is settled.

One half of a trace's requests chooses rules and their order; the other half tests them in this order, and figures are
reported on it. If the labels put requests into groups, a group lies in one half as a whole, and groups take the place
of requests in all statistics. The module owns the choice, its statistics and the resulting policy. Groups need scipy,
from the extra `calibrate`. The module's functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, takewhile
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.common.inference import binomial_upper, confidence_of
from meridian_control.offline.calibrated_policy import floor_of, policy_of
from meridian_control.offline.candidates import give_ups, paired, single_rules
from meridian_control.offline.correctness import RIGHT
from meridian_control.offline.halves import halved
from meridian_control.offline.rule_replay import CAP, SIGNALS, SOFT, Replay, StoppingRule, Stops, either
from meridian_control.offline.separation import Separation, scores, separation
from meridian_control.offline.statistics import Interval, mean_bound, percentiles, resampled

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from meridian_control.policy.model import Policy

RESAMPLES = 2000
# A pair of rules is preferred to the best single rule, and a give-up rule to none, only if it saves this share of the
# thinking more.
PAIR_MUST_ADD = 0.02
# The first half must bound this multiple of a rule's harm, because a rule at the limit leaves none for a give-up rule.
SPARE = 2
# A rule is tested only if it saves more than this share of what the target saves, because a proof ends the search for a
# better rule.
WORTH_PROVING = 0.5
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
class SecondThreshold:
    """The give-up rule that was chosen, alone and together with the best rule, if there is one.

    given_up: requests of the half not used for choosing that the give-up rule ends sooner than the best rule. proved:
    the bound of the harm of both rules together is within the allowed loss on that half. in_force: so are those of all
    rules that are tested before.
    """

    rule: StoppingRule
    together: Point
    given_up: int
    proved: bool
    in_force: bool


@dataclass(frozen=True)
class Calibration:
    """The result. best: the proved rule that saves most, or if none is proved, the first one that was tested.
    confirmed: whether it is proved. groups: number of groups of requests, 0 if requests are independent. tried: the
    rules of each family that stop a request of the first half.
    """

    # Empty for a calibration that nobody weighs.
    separations: list[Separation]
    halves: Halves = field(compare=False, repr=False)
    tried: dict[str, list[Tried]] = field(compare=False, repr=False)
    best: Point | None
    # The best fixed cap, chosen and proved in the same way.
    fixed_cap: Point | None
    second: SecondThreshold | None
    confirmed: bool
    groups: int
    policy: Policy

    @property
    def recommended(self) -> Point | None:
        """The rule that may be put into force; None if no rule is proved to be within the allowed loss."""
        return self.best if self.confirmed else None

    @cached_property
    def natural(self) -> Figures:
        """The figures without a rule."""
        return self.halves.figures(_nothing(self.halves.replay), self.halves.held_out)

    @cached_property
    def fronts(self) -> dict[str, list[Point]]:
        """Each family's frontier, from the rule that saves least to the rule that saves most. Its figures take longer
        than the choice, so they are computed for those who show them."""
        return {family: [self.halves.point(t) for t in pareto(tried)] for family, tried in self.tried.items()}


@dataclass(frozen=True)
class Goal:
    """The accuracy that a rule may lose, a fraction, and the confidence of intervals and bounds.

    attempt: 0 for a calibration that stands alone. The attempts 1, 2, 3, … share the error that `confidence` allows, so
    that it is the confidence of all their bounds together; each attempt's intervals keep `confidence`.
    """

    max_loss: float = 0.01
    confidence: float = 0.95
    attempt: int = 0

    @property
    def bound_confidence(self) -> float:
        """The confidence of each upper bound of harm."""
        return confidence_of(self.attempt, self.confidence) if self.attempt else self.confidence


def calibrate(
    replay: Replay,
    goal: Goal,
    split: int = 0,
    families: Collection[str] = tuple(SIGNALS),
    *,
    unattended: bool = False,
) -> Calibration:
    """Choose a rule from a trace and compute its figures. split: number of the split into halves. families: those that
    are tried, beside the fixed cap. unattended: nobody weighs the result, so that only the bounds on the other half
    count, and no separation of signals is measured.

    The other half tests rules one after the other until it does not prove one (fixed sequence testing, as in Learn then
    Test, arXiv 2110.01052). The first half has settled their order, so a rule that loses more than is allowed can be
    proved only if the bound of the first such rule fails, and no bound needs a correction for the number of rules.

    Raises TooFewRequests.
    """
    fit, held_out, unit = halved(replay.episodes.ids, replay.judge, split)
    halves = Halves(replay, fit, held_out, unit, goal)
    signals = {} if unattended else scores(replay)
    separations = [separation(replay, fit, unit, goal.confidence, name=n, score=s) for n, s in signals.items()]
    good = {s.signal for s in separations if not s.why_not}

    scheduler = replay.base.scheduler
    # Soft close acts with the scheduler's section, which calibration leaves as it is.
    offered = {*families, CAP} - (set() if scheduler.enabled and not scheduler.shadow else {SOFT})
    tried = {family: halves.tried(rules) for family, rules in single_rules(replay, fit).items() if family in offered}
    usable = [family for family in tried if (unattended or set(SIGNALS[family]) <= good) and family != CAP]
    target, pairs = _target(halves, {family: tried[family] for family in usable})
    family = (tried | pairs)[target.rule.family] if target is not None else []
    path, alone = halves.path(family, target), halves.target(family)
    if give_up_path := _give_up_path(halves, target, alone.saved if alone is not None else 0.0):
        # Give-up rules, each together with the target, are tested next.
        path = [t for t in path if target is not None and t.saved <= target.saved]
    best, proved = halves.proved(path)
    second = _second(halves, best, give_up_path, is_tested=proved == len(path))
    given_up = (second.rule, second.in_force) if second is not None else None
    cap, proved_caps = halves.proved(halves.path(tried[CAP], halves.target(tried[CAP])))
    judged = np.concatenate([fit, held_out])
    return Calibration(
        separations=separations,
        halves=halves,
        tried=tried | pairs,
        best=halves.point(best) if best is not None else None,
        fixed_cap=halves.point(cap) if cap is not None else None,
        second=second,
        confirmed=proved > 0,
        groups=len(set(unit[fit])) + len(set(unit[held_out])) if replay.judge.groups else 0,
        policy=_with_goal(
            policy_of(replay, best.rule if best and proved else None, good, judged, unit[judged], second=given_up),
            _cap_tokens(halves, cap if proved_caps else None),
            goal,
        ),
    )


def _target(halves: Halves, tried: dict[str, list[Tried]]) -> tuple[Tried | None, dict[str, list[Tried]]]:
    """Return the rule that the first half would choose, None if no rule saves anything safely; and the pairs of rules
    that were tried, by family. tried: single rules, by family."""
    most = PAIRED_LOSS * halves.goal.max_loss
    cautious = {family: [t.rule for t in pareto(rules) if t.harm <= most] for family, rules in tried.items()}
    pairs = {family: halves.tried(rules) for family, rules in paired(cautious, PAIRED_RULES).items()}
    target, pair = (halves.target([*chain(*each.values())], SPARE) for each in (tried, pairs))
    if pair is not None and (target is None or pair.saved > target.saved + PAIR_MUST_ADD):
        target = pair
    return target, pairs


def _cap_tokens(halves: Halves, proved: Tried | None) -> int:
    """Return the smallest cap whose loss is proved to be within the allowed loss, in thinking tokens: without a proved
    cap the longest thinking of the trace, which no cap shortens."""
    if proved is not None:
        return int(proved.rule.scheduler["max_think_tokens"])
    judged = np.concatenate([halves.fit, halves.held_out])
    return int(halves.replay.episodes.natural_tokens[judged].max())


def _with_goal(policy: Policy, cap_tokens: int, goal: Goal) -> Policy:
    """Return a policy with the smallest cap that was found to be enough, and the allowed loss, beyond which the control
    plane withdraws the rule. A goal of no loss at all leaves the policy's own."""
    scheduler = policy.scheduler.model_copy(update={"calibrated_cap_tokens": cap_tokens})
    entropy = policy.entropy.model_copy(update={"max_loss": goal.max_loss or policy.entropy.max_loss})
    return policy.model_copy(update={"scheduler": scheduler, "entropy": entropy})


def _give_up_path(halves: Halves, first: Tried | None, alone: float) -> list[Tried]:
    """Return give-up rules, each together with the rule `first`, in the order of their tests; empty if none adds much.

    The harm is that of both rules. The proxy counts each answer that changes as harm, so it cannot judge the rules.
    alone: what a rule of the first one's family saves on the first half without a give-up rule.
    """
    replay, fit = halves.replay, halves.fit
    if replay.judge.is_proxy:
        return []
    rules = give_ups(replay, fit, first.rule if first else None, floor_of(replay, first.rule, fit) if first else 0)
    tried = halves.tried([either(first.rule, rule) if first else rule for rule in rules])
    adding = [t for t in tried if t.saved > alone + PAIR_MUST_ADD]
    return halves.path(adding, halves.target(adding))


def _second(halves: Halves, best: Tried | None, path: list[Tried], *, is_tested: bool) -> SecondThreshold | None:
    """Return the give-up rule that is proved, or else the first one; None without any. is_tested: whether all rules
    that are tested before the path are proved."""
    chosen, proved = halves.proved(path if is_tested else path[:1])
    if chosen is None:
        return None
    rule = chosen.rule.parts[-1]
    if best is not None and not is_tested:
        (chosen,) = halves.tried([either(best.rule, rule)])
    before = best.stops.at_tokens if best is not None else np.full(len(chosen.stops.at_tokens), np.inf)
    together = halves.point(chosen)
    return SecondThreshold(
        rule=rule,
        together=together,
        given_up=int((chosen.stops.at_tokens < before)[halves.held_out].sum()),
        proved=together.held_out.harm_bound <= halves.goal.max_loss,
        in_force=is_tested and proved > 0,
    )


# --------------------------------------------------------------------------------------------------------- the frontier


@dataclass(frozen=True)
class Tried:
    """A rule and its effect on the first half. `harm` is the field of Figures."""

    rule: StoppingRule
    stops: Stops
    saved: float
    change: float
    harm: float


def pareto(tried: Sequence[Tried]) -> list[Tried]:
    """Return the rules that no other rule beats in both saving and accuracy, from least saved to most saved."""
    front: list[Tried] = []
    for candidate in sorted(tried, key=lambda t: (-t.saved, -t.change)):
        if not front or candidate.change > front[-1].change:
            front.append(candidate)
    return front[::-1]


@dataclass(frozen=True)
class Halves:
    """Both halves of the requests. unit: number of each request's group, or of the request itself, [requests]."""

    replay: Replay
    fit: NDArray[np.intp]
    held_out: NDArray[np.intp]
    unit: NDArray[np.int64]
    goal: Goal

    def tried(self, rules: Sequence[StoppingRule]) -> list[Tried]:
        """Try rules, and return those that stop at least one request of the first half."""
        tried = (self._try(rule) for rule in rules)
        return [t for t in tried if np.isfinite(t.stops.at_tokens[self.fit]).any()]

    def _try(self, rule: StoppingRule) -> Tried:
        stops, fit = self.replay.stops(rule), self.fit
        change = stops.right[fit] - self.replay.judge.natural[fit]
        saved = 1 - self.spent(stops, fit).sum() / self.replay.episodes.natural_tokens[fit].sum()
        return Tried(rule, stops, float(saved), float(change.mean()), float(self._harm(stops, fit).mean()))

    def _harm(self, stops: Stops, where: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return the mean accuracy that the requests of each unit lose, in [0, 1], [units]."""
        lost = np.maximum(self.replay.judge.natural[where] - stops.right[where], 0.0)
        unit = np.unique(self.unit[where], return_inverse=True)[1]
        harm: NDArray[np.float64] = np.bincount(unit, lost) / np.bincount(unit)
        return harm

    def _bound(self, harm: NDArray[np.float64], times: int = 1) -> float:
        """Return the upper bound of the expected harm if so many times as much were seen; exact if each unit is one
        request that is right or wrong."""
        if self._counts:
            return binomial_upper(times * round(harm.sum()), len(harm), self.goal.bound_confidence)
        return mean_bound(min(1.0, times * float(harm.mean())), len(harm), self.goal.bound_confidence)

    @cached_property
    def _counts(self) -> bool:
        """Whether requests are independent, and each is either right or wrong, so that harm is a binomial count."""
        judge = self.replay.judge
        natural = judge.natural[~np.isnan(judge.natural)]
        return not judge.groups and bool(np.isin(judge.right, (0, 1)).all() and np.isin(natural, (0, 1)).all())

    def _is_safe(self, candidate: Tried, half: NDArray[np.intp], times: int = 1) -> bool:
        """Whether a half bounds so many times the harm of a rule by the allowed loss. Only harm counts as loss, because
        requests that become right by being stopped do so by chance."""
        return self._bound(self._harm(candidate.stops, half), times) <= self.goal.max_loss

    def target(self, tried: Sequence[Tried], times: int = 1) -> Tried | None:
        """Return the rule that saves most of those that the first half finds safe at so many times their harm."""
        saving = sorted((t for t in tried if t.saved > 0), key=lambda t: (-t.saved, t.harm))
        return next((t for t in saving if self._is_safe(t, self.fit, times)), None)

    def path(self, tried: Sequence[Tried], target: Tried | None) -> list[Tried]:
        """Return rules in the order in which the other half tests them: harm and saving on the first half rise, and the
        target is one of them. target: of these rules; without one, no rule is tested."""
        path = list[Tried]()
        least = WORTH_PROVING * target.saved if target is not None else np.inf
        for candidate in sorted(tried, key=lambda t: (t.harm, t.saved)):
            if candidate.saved > least:
                path.append(candidate)
                least = candidate.saved
        return path

    def proved(self, path: list[Tried]) -> tuple[Tried | None, int]:
        """Return the last rule that the other half proves, or if it proves none, the first; and how many it proves: all
        before the first that it does not."""
        safe = list(takewhile(lambda t: self._is_safe(t, self.held_out), path))
        return (safe[-1] if safe else path[0] if path else None), len(safe)

    def point(self, candidate: Tried) -> Point:
        return Point(
            candidate.rule, self.figures(candidate.stops, self.fit), self.figures(candidate.stops, self.held_out)
        )

    def spent(self, stops: Stops, where: NDArray[np.intp]) -> NDArray[Any]:
        """Return each request's thinking tokens plus its probes' tokens, [where]."""
        natural = self.replay.episodes.natural_tokens[where]
        spent: NDArray[Any] = np.minimum(stops.at_tokens[where], natural) + self._probed(stops, where)
        return spent

    def _probed(self, stops: Stops, where: NDArray[np.intp]) -> NDArray[Any]:
        probed: NDArray[Any] = stops.probes[where] * self.replay.cost_tokens
        return probed

    def figures(self, stops: Stops, where: NDArray[np.intp]) -> Figures:
        natural, before = self.replay.episodes.natural_tokens[where], self.replay.judge.natural[where]
        spent, right = self.spent(stops, where), stops.right[where]
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


def _nothing(replay: Replay) -> Stops:
    count = len(replay.episodes.ids)
    never = np.full(count, np.inf)
    return Stops(never, replay.judge.natural, never, np.zeros(count, np.int64))
