"""What a rule that was found by itself is in a policy: an override for one traffic. Functions are pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from meridian_control.common.inference import SequentialTest, ShiftTest
from meridian_control.policy.model import Override, Policy, Who
from meridian_control.rollout.plan import Plan, Step

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.capabilities.self_calibration.learner import Rule

AUTHOR = "meridian-self-calibration"
# Largest probability that a rule which loses at most the allowed share is ever withdrawn for its harm, or one whose
# traffic is as it was for drift; each for each rule and leader.
FALSE_ALARM_RATE = 0.01
# A rollout on at least so many engines begins with half of them; a step of a smaller one might select no engine.
HALVED_FROM, BAKE_S = 8, 600.0


def who_of(traffic: str) -> Who:
    """Return the facts that the name of a traffic has."""
    found = re.fullmatch(r"(.*?)#([0-9a-f]*)#(.*)", traffic, re.DOTALL)
    model, fingerprint, slo_class = found.groups() if found else (traffic, "", "")
    return Who(model, slo_class=slo_class, fingerprint=fingerprint)


def override_of(traffic: str, rule: Rule) -> Override:
    """Return the override that puts a rule in force, and no other rule of the entropy section with it."""
    others = {"margin_threshold_nats": 0.0, "rpdi_threshold": 0.0, "give_up_tokens": 0}
    values = {"enabled": True, "shadow": False, **others, **rule.entropy}
    given = {"traffic": traffic, "entropy": values, "scheduler": {"min_think_tokens": rule.floor_tokens}}
    return Override.model_validate(given)


def with_override(policy: Policy, traffic: str, override: Override | None) -> Policy:
    """Return a policy with this override as the only one for the traffic, or with none. Overrides that people wrote
    come later, so that they win."""
    others = tuple(each for each in policy.override if each.traffic != traffic)
    mine = (override,) if override is not None else ()
    return policy.model_copy(update={"override": (*mine, *others)})


def has(policy: Policy, override: Override) -> bool:
    return [each for each in policy.override if each.traffic == override.traffic] == [override]


def obstacle(own: Policy) -> str:
    """Return why no rule can be found under a policy; empty if one can. own: the policy that holds for the traffic
    without a rule that was found by itself."""
    if not own.entropy.holdout_share:
        return "entropy.holdout_share is 0, so no request is recorded"
    if own.entropy.rank_conditions:
        return "entropy.rank_conditions would come into force with the rule, and cannot be switched off for one traffic"
    return ""


def plan_for(engines: int) -> Plan:
    """Return the plan of a rule's rollout on so many engines."""
    steps = (50.0, 100.0) if engines >= HALVED_FROM else (100.0,)
    return Plan(step=tuple(Step(percent=percent, bake_s=BAKE_S) for percent in steps))


class Watch:
    """The tests of one rule in force: of its harm, and of drift of the first EAT that it reads.

    after: number of the newest episode that the tests have taken in. judged, harmful: what they have taken in.
    """

    def __init__(self, rule: Rule, max_loss: float, after: int) -> None:
        self.rule, self.after = rule, after
        self.judged = self.harmful = 0
        self._harm = SequentialTest(max_loss)
        self._edges = [edge for edge, _ in rule.reference]
        self._shift = ShiftTest([count for _, count in rule.reference]) if len(rule.reference) > 1 else None
        self._seen = [0] * len(self._edges)

    def add(self, judged: int, harmful: int, first_eat: Iterable[float]) -> str:
        """Take in newer episodes. Return why the rule is to be withdrawn; empty if it is not."""
        self.judged, self.harmful = self.judged + judged, self.harmful + harmful
        if self._harm.add_trials(harmful, judged) * FALSE_ALARM_RATE >= 1:
            return f"it would have changed {self.harmful} of {self.judged} answers of the control group"
        if self._shift is None:
            return ""
        new = [0] * len(self._edges)
        for value in first_eat:
            new[next((at for at, edge in enumerate(self._edges) if value <= edge), len(new) - 1)] += 1
        self._seen = [before + more for before, more in zip(self._seen, new, strict=True)]
        if self._shift.add_counts(new) * FALSE_ALARM_RATE >= 1:
            return f"the traffic has changed: {self._drift()}"
        return ""

    def _drift(self) -> str:
        """Describe the bin that has gained most."""
        counts = [count for _, count in self.rule.reference]
        seen, calibrated = sum(self._seen), sum(counts)
        gains = [mine / max(1, seen) - count / calibrated for mine, count in zip(self._seen, counts, strict=True)]
        at = gains.index(max(gains))
        low = f"above {self._edges[at - 1]:g}" if at else f"up to {self._edges[0]:g}"
        high = f" and up to {self._edges[at]:g}" if 0 < at < len(gains) - 1 else ""
        return (
            f"{self._seen[at]} of {seen} requests have a first EAT {low}{high} nats, where the calibration had "
            f"{counts[at]} of {calibrated}"
        )
