"""Keeps the decisions of a session until their outcomes are known.

The ledger owns the decision ids, and with it each decision ends in exactly one outcome. The ledger does not know why a
decision is made. The code does no I/O and reads no clock; each object belongs to one session.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import outcome_name, reason_name
from meridian_control.common.errors import BadReport
from meridian_control.common.opened_request import MAX_SLOTS, MAX_TEXT
from meridian_control.common.report_bounds import MAX_AGE_STEPS
from meridian_control.journal.records import Decision

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    from numpy.typing import NDArray

    from meridian_control.common.slices import Sliced
    from meridian_control.engine.effective_policies import EffectivePolicies
    from meridian_control.engine.moments import Seen
    from meridian_control.engine.request_table import RequestTable
    from meridian_control.engine.shadow_comparison import Comparison
    from meridian_control.engine.totals import Totals
    from meridian_control.journal.journal import Journal

# Kinds of decision that end thinking.
ENDING = ("force", "cap")
# Kinds of decision that the agent applies when they arrive. Caps and probes wait for their token, tiers for the end of
# the request.
AT_ONCE = ("force", "plan")
# Outcomes of a decision that ends thinking at the place where the decision wanted it.
CARRIED_OUT = (agent_pb2.OUTCOME_APPLIED, agent_pb2.OUTCOME_SHADOWED)
# Bound for decisions without an outcome. No correct agent leaves four decisions open for each request of the largest
# engine.
MAX_OPEN_DECISIONS = 4 * MAX_SLOTS
# Decisions after which work about many decisions pauses: about a millisecond of work.
SETTLED_AT_ONCE = 256


class Ledger:
    """The decisions of one session.

    `open` maps ids to decisions without an outcome. `last` maps each slot to the decision that was made or carried out
    last, and `forces` to the newest forced end that is not in shadow. `made` is the number of decisions made. `step` is
    the newest step on which decisions are based.
    """

    def __init__(
        self,
        table: RequestTable,
        policies: EffectivePolicies,
        totals: Totals,
        shadow: Comparison,
        journal: Journal | None,
    ) -> None:
        self._table, self._policies, self._totals = table, policies, totals
        self._shadow, self._journal = shadow, journal
        self.open: dict[int, Decision] = {}
        self.last: dict[int, Decision] = {}
        self.forces: dict[int, Decision] = {}
        self.made = self.step = 0

    def make(
        self,
        kind: str,
        reason: str,
        slot: int | None = None,
        shadow: bool = False,
        seen: tuple[Seen, int] | None = None,
        *,
        cap_tokens: int = 0,
        behind: str = "",
    ) -> int:
        """Make a decision and return its id.

        seen: the table or moments with the signals that the decision is based on, and the index in them; None for the
        current state of the request. cap_tokens: the cap that a decision of kind cap sets. behind: the reason that says
        which entry is behind the decision, if `reason` says another thing.
        """
        decision = self._new(kind, reason, slot, cap_tokens, shadow=shadow)
        if slot is not None:
            if self._journal is not None:
                table, index = seen or (self._table, slot)
                found = self._policies.behind(slot, behind or reason)
                self._journal.decided(decision, table, index, found)
            self.last[slot] = decision
        if slot is not None and kind == "force" and not shadow:
            self.forces[slot] = decision
        self._totals.decisions[decision.counted_as] += 1
        return decision.decision_id

    def make_probes(self, reason: str, slots: list[int], seen: Seen, indices: NDArray[np.intp]) -> list[int]:
        """Decide to probe requests that have the same policy; return the ids of the decisions.

        indices: the index of each request in `seen`, the table or moments on which the decision is based.
        """
        probes = [self._new("probe", reason, slot) for slot in slots]
        if probes:
            if self._journal is not None:
                self._journal.probed(probes, seen, indices, self._policies.behind(slots[0], reason))
            self._totals.decisions["probe"] += len(probes)
        return [decision.decision_id for decision in probes]

    def _new(self, kind: str, reason: str, slot: int | None, cap_tokens: int = 0, *, shadow: bool = False) -> Decision:
        self.made += 1
        info = self._table.info[slot] if slot is not None else None
        request_id = info.request_id if info else ""
        decision = Decision(self.made, kind, reason, slot, request_id, self.step, cap_tokens, shadow)
        self.open[self.made] = decision
        return decision

    def concerns(self, decision: Decision) -> bool:
        """Whether the request that the decision is about still lives in its slot."""
        info = self._table.info[decision.slot] if decision.slot is not None else None
        return info is not None and info.request_id == decision.request_id

    def ends_under_way(self) -> list[tuple[Decision, int]]:
        """Return the forced ends without an outcome, each with the rule that the table holds for its request."""
        forces = [decision for decision in self.open.values() if decision.kind == "force" and self.concerns(decision)]
        return [(decision, int(self._table.end_decided[decision.slot])) for decision in forces]

    def go_on(self, under_way: list[tuple[Decision, int]]) -> None:
        """Restore in the table the forced ends that the engine still carries out, for requests that still live."""
        for decision, reason in under_way:
            if decision.slot is not None and self.concerns(decision):
                self._table.restore_end(decision.slot, reason)

    def settle(
        self, outcomes: Sequence[agent_pb2.DecisionOutcome], step: int | None = None
    ) -> Sliced[list[int | None]]:
        """Note outcomes and, if they came with a step, the age of their decisions in steps.

        Return for each outcome the slot if it ends a probe, so that the request may be probed again, else None.
        """
        probed: list[int | None] = []
        settled: list[Decision] = []
        for reported in outcomes:
            if len(settled) >= SETTLED_AT_ONCE:
                self._count(settled)
                settled = []
                yield
            slot, decision = None, self.open.pop(reported.decision_id, None)
            if decision is None:
                self._totals.unknown_outcomes += 1
            else:
                outcome, detail = reported.outcome, reported.detail[:MAX_TEXT]
                settled.append(self._finish(decision, outcome, reported.think_tokens, detail, reported.reason))
                if decision.kind == "probe" and self.concerns(decision):
                    slot = decision.slot
                elif step is not None and decision.kind in AT_ONCE and outcome == agent_pb2.OUTCOME_APPLIED:
                    self._count_age(step - decision.step)
            probed.append(slot)
        self._count(settled)
        self._table.put([slot for slot in probed if slot is not None], probe_open=False)
        return probed

    def _count_age(self, age_steps: int) -> None:
        # An agent that counts its steps anew, or wrongly, does not change the sum of all engines.
        if 0 <= age_steps <= MAX_AGE_STEPS:
            self._totals.staleness_steps.add_one(age_steps)

    def too_late(self, decision_id: int) -> None:
        """Close a decision that is not sent, because its request ended in the report that led to the decision."""
        self._count([self._finish(self.open.pop(decision_id), agent_pb2.OUTCOME_REQUEST_GONE)])

    def check(self) -> None:
        """Raise BadReport if the agent leaves too many decisions without an outcome."""
        if (waiting := len(self.open)) > MAX_OPEN_DECISIONS:
            raise BadReport(f"must leave at most {MAX_OPEN_DECISIONS} decisions without an outcome; got {waiting}")

    def forget(self, slot: int) -> None:
        """Drop the last decisions of a request that has ended."""
        self.last.pop(slot, None)
        self.forces.pop(slot, None)

    def forget_gone(self) -> Sliced[None]:
        """Drop the last decisions of requests that a new snapshot no longer lists."""
        for kept in (self.last, self.forces):
            for count, (slot, decision) in enumerate(list(kept.items()), 1):
                if not self.concerns(decision):
                    del kept[slot]
                if not count % SETTLED_AT_ONCE:
                    yield

    def close(self) -> Sliced[None]:
        """Close the decisions without an outcome, because the stream has ended and no outcome can arrive any more."""
        while self.open:
            numbers = list(islice(self.open, SETTLED_AT_ONCE))
            self._count([self._finish(self.open.pop(number), agent_pb2.OUTCOME_AGENT_OFF) for number in numbers])
            if self.open:
                yield

    def _finish(
        self,
        decision: Decision,
        outcome: agent_pb2.Outcome.ValueType,
        think_tokens: int = 0,
        detail: str = "",
        limit: agent_pb2.ForceReason.ValueType = agent_pb2.FORCE_REASON_UNSPECIFIED,
    ) -> Decision:
        """Note the outcome of a decision, which the caller then counts; return the decision. limit: as in
        DecisionOutcome.reason."""
        if decision.kind == "cap" and not decision.shadow and think_tokens >= decision.cap_tokens:
            # The agent counts the policy's cap in shadow as shadowed, where the request's own has ended thinking.
            outcome = agent_pb2.OUTCOME_APPLIED if outcome == agent_pb2.OUTCOME_SHADOWED else outcome
        decision.outcome, decision.outcome_think_tokens, decision.detail = outcome, think_tokens, detail
        if decision.kind in ENDING and outcome in CARRIED_OUT:
            self._carried_out(decision, outcome == agent_pb2.OUTCOME_SHADOWED, think_tokens, limit)
        return decision

    def _count(self, settled: list[Decision]) -> None:
        # Counting many at once takes much less time than one after another.
        names = [outcome_name(decision.outcome) for decision in settled]
        self._totals.settled.update(zip([decision.counted_as for decision in settled], names, strict=True))
        self._totals.outcomes.update(names)
        if self._journal is not None:
            self._journal.settled(settled)

    def _carried_out(
        self, decision: Decision, shadowed: bool, think_tokens: int, limit: agent_pb2.ForceReason.ValueType
    ) -> None:
        reason = decision.reason if decision.kind == "force" else _limit_name(decision, think_tokens, limit)
        if shadowed:
            self._totals.ends[f"{reason}_shadowed"] += 1
        if decision.slot is not None and self.concerns(decision):
            self.last[decision.slot] = decision
            if shadowed:
                self._shadow.fired(decision.slot, reason, think_tokens)
                holdout = self._policies.holdout
                if decision.kind == "force" and self._table.control[decision.slot] and holdout is not None:
                    holdout.carried_out(decision.slot, reason, think_tokens)


def _limit_name(decision: Decision, think_tokens: int, limit: agent_pb2.ForceReason.ValueType) -> str:
    """Return what a cap in shadow would have ended thinking by, whatever has set it, as the real end would be counted.
    limit: as in DecisionOutcome.reason."""
    if limit == agent_pb2.FORCE_REASON_UNSPECIFIED:
        by_reserve = think_tokens < decision.cap_tokens
        limit = agent_pb2.FORCE_REASON_ANSWER_RESERVE if by_reserve else agent_pb2.FORCE_REASON_HARD_CAP
    return reason_name(limit)
