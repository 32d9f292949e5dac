"""Tests a rule in force: whether it loses too many answers, and whether its traffic is still as it was calibrated.

Objects belong to the replica that leads. The module does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian_control.capabilities.control_group.harm_guard import FALSE_ALARM_RATE
from meridian_control.common.drift_bins import where
from meridian_control.common.inference import SequentialTest, ShiftTest
from meridian_control.policy.drift_schema import bin_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from meridian_control.capabilities.self_calibration.learner import Rule


class Watch:
    """The tests of one rule in force: of its harm, and of drift of the first EAT that it reads.

    after: number of the newest episode that the tests have taken in. why: why the rule is to be withdrawn, empty while
    it is not.
    """

    def __init__(self, rule: Rule, max_loss: float, after: int) -> None:
        self.rule, self.max_loss, self.after, self.why = rule, max_loss, after, ""
        self._judged = self._harmful = 0
        self._harm = SequentialTest(max_loss)
        counts = [eat_bin.requests for eat_bin in rule.reference]
        self._shift = ShiftTest(counts) if len(counts) > 1 else None
        self._seen = [0] * len(counts)

    def add(self, judged: int, harmful: int, first_eat: Iterable[float]) -> None:
        """Take in newer episodes.

        judged, harmful: how many of them the rule was judged on, and how many answers it would have lost. first_eat:
        the first EAT that the rule reads of each, in nats.
        """
        self._judged, self._harmful = self._judged + judged, self._harmful + harmful
        if self._harm.add_trials(harmful, judged) * FALSE_ALARM_RATE >= 1:
            self.why = f"it would have changed {self._harmful} of {self._judged} answers of the control group"
        if self.why or self._shift is None:
            return
        new = [0] * len(self._seen)
        for value in first_eat:
            new[bin_of(self.rule.reference, value)] += 1
        self._seen = [before + more for before, more in zip(self._seen, new, strict=True)]
        if self._shift.add_counts(new) * FALSE_ALARM_RATE >= 1:
            self.why = f"the traffic has changed: {self._drift()}"

    def _drift(self) -> str:
        """Describe the bin that has gained most."""
        edges = [eat_bin.max_nats for eat_bin in self.rule.reference]
        counts = [eat_bin.requests for eat_bin in self.rule.reference]
        seen, calibrated = sum(self._seen), sum(counts)
        gains = [mine / max(1, seen) - count / calibrated for mine, count in zip(self._seen, counts, strict=True)]
        at = gains.index(max(gains))
        return (
            f"{self._seen[at]} of {seen} requests have a first EAT {where(edges, at)} nats, where the calibration had "
            f"{counts[at]} of {calibrated}"
        )
