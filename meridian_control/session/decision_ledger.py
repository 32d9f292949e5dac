"""A session's decisions, from when they are made until their outcomes are known.

Owns decision ids, and that each decision ends in exactly one outcome here. Knows nothing of why one is made. Pure; one
session at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import outcome_name
from meridian_control.decision_log.records import Decision
from meridian_control.decisions.request_table import MAX_SLOTS, MAX_TEXT

if TYPE_CHECKING:
    from meridian_control.decision_log.journal import Journal
    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.decisions.termination import Seen
    from meridian_control.session.counters import Totals
    from meridian_control.session.effective_policies import Groups
    from meridian_control.session.shadow_comparison import Comparison

# Kinds of decision that end thinking.
ENDING = ("force", "cap")
# Kinds that are applied as soon as they arrive; caps and probes wait for their place, tiers for the request's end.
AT_ONCE = ("force", "plan")
# Decisions without an outcome; four for each request of the largest engine are more than any agent leaves open.
MAX_OPEN_DECISIONS = 4 * MAX_SLOTS


class Ledger:
    """`open` has the decisions without an outcome by id, `last` by slot the newest that was made, or carried out.

    `made` counts all. `step` is the newest step that decisions are taken from.
    """

    def __init__(
        self, table: RequestTable, groups: Groups, totals: Totals, shadow: Comparison, journal: Journal | None
    ) -> None:
        self._table, self._groups, self._totals = table, groups, totals
        self._shadow, self._journal = shadow, journal
        self.open: dict[int, Decision] = {}
        self.last: dict[int, Decision] = {}
        self.made = self.step = 0

    def make(
        self,
        kind: str,
        reason: str,
        slot: int | None = None,
        shadow: bool = False,
        seen: tuple[Seen, int] | None = None,
    ) -> int:
        """The id of a new decision. seen: where its signals are, and which; as the request stands when absent."""
        self.made += 1
        info = self._table.info[slot] if slot is not None else None
        made = Decision(self.made, kind, reason, slot, info.request_id if info else "", self.step)
        self.open[made.decision_id] = made
        if self._journal is not None and slot is not None:
            self._journal.decided(
                made, shadow, seen or (self._table, slot), self._groups.of(slot), self._groups.revision
            )
        if slot is not None and kind != "probe":
            self.last[slot] = made
        self._totals.decisions[made.counted_as] += 1
        return made.decision_id

    def concerns(self, decision: Decision) -> bool:
        """Whether the request a decision was about still lives in its slot."""
        info = self._table.info[decision.slot] if decision.slot is not None else None
        return info is not None and info.request_id == decision.request_id

    def settle(self, report: agent_pb2.DecisionOutcome, step: int | None = None) -> int | None:
        """Note an outcome, and where it came with a step, how many steps old the decision was.

        Returns the slot of a request that may be probed again.
        """
        decision = self.open.pop(report.decision_id, None)
        if decision is None:
            self._totals.unknown_outcomes += 1
            return None
        self._finish(decision, report.outcome, report.think_tokens, report.detail[:MAX_TEXT])
        if step is not None and decision.kind in AT_ONCE and report.outcome == agent_pb2.OUTCOME_APPLIED:
            self._totals.staleness_steps.add(np.array([float(step - decision.step)]))
        if decision.kind != "probe" or decision.slot is None or not self.concerns(decision):
            return None
        self._table.close_probe(decision.slot)
        return decision.slot

    def too_late(self, decision_id: int) -> None:
        """The request that a decision was about is gone: nobody is told."""
        self._finish(self.open.pop(decision_id), agent_pb2.OUTCOME_REQUEST_GONE)

    def check(self) -> None:
        """Raises ValueError where the agent leaves too much open."""
        if (waiting := len(self.open)) > MAX_OPEN_DECISIONS:
            raise ValueError(f"leaves {waiting} decisions without an outcome; at most {MAX_OPEN_DECISIONS} may be")

    def forget_gone(self) -> None:
        """The table was filled anew."""
        self.last = {slot: decision for slot, decision in self.last.items() if self.concerns(decision)}

    def close(self) -> None:
        """The stream is gone: what is still open can no longer be reported."""
        for decision in self.open.values():
            self._finish(decision, agent_pb2.OUTCOME_AGENT_OFF)
        self.open.clear()

    def _finish(
        self, decision: Decision, outcome: agent_pb2.Outcome.ValueType, think_tokens: int = 0, detail: str = ""
    ) -> None:
        decision.outcome = outcome
        if self._journal is not None and decision.logged is not None:
            self._journal.settled(decision.logged, outcome, think_tokens, detail)
        name = outcome_name(outcome)
        self._totals.outcomes[name] += 1
        self._totals.settled[decision.counted_as, name] += 1
        if decision.kind in ENDING and name in ("applied", "shadowed"):
            self._carried_out(decision, name == "shadowed", think_tokens)

    def _carried_out(self, decision: Decision, shadowed: bool, think_tokens: int) -> None:
        if shadowed:
            self._totals.ends[f"{decision.reason}_shadowed"] += 1
        if decision.slot is not None and self.concerns(decision):
            self.last[decision.slot] = decision
            if shadowed and decision.kind == "force":
                self._shadow.fired(decision.slot, decision.reason, think_tokens)
