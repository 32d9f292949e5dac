"""Decisions waiting to be applied, and the one outcome each of them ends in.

Owns the meaning of forces, caps, plans and tiers on tracked requests; what a scheduler does with them is the mixin's.
Pure but for the tracker it changes. Runs on the engine-core thread only.
"""

from __future__ import annotations

from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.core.dispatch_plan import DispatchPlan
from meridian_agent.core.live_request import Cap, Ending, LiveRequest
from meridian_agent.core.phases import FLAG_PARAGRAPH, FLAG_SENTENCE, Phase
from meridian_agent.core.reclaim import TIERS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meridian_agent.core.phases import PhaseState
    from meridian_agent.core.tracker import Tracker

# The one force that belongs to the scheduler section.
SOFT_CLOSE = agent_pb2.FORCE_REASON_SOFT_CLOSE


class Outcome(IntEnum):
    """The values of meridian.v1.Outcome."""

    APPLIED = agent_pb2.OUTCOME_APPLIED
    SHADOWED = agent_pb2.OUTCOME_SHADOWED
    SUPERSEDED = agent_pb2.OUTCOME_SUPERSEDED
    ENDED_NATURALLY = agent_pb2.OUTCOME_ENDED_NATURALLY
    REQUEST_GONE = agent_pb2.OUTCOME_REQUEST_GONE
    REFUSED = agent_pb2.OUTCOME_REFUSED
    AGENT_OFF = agent_pb2.OUTCOME_AGENT_OFF


# Whatever the control plane says, nobody is left out of more steps in a row, and no probed request waits longer.
MAX_SKIP_STEPS = 1024
MAX_HOLD_MS = 10_000

# Kinds of decisions, as bits: who goes first, with soft closes; how long a request may think; when the entropy
# rules end it, with their probes; cache tiers and admission. A lease ends some of them together.
ORDER, CAPS, RULES, MEMORY = 1, 2, 4, 8
ALL_BUT_CAPS = ORDER | RULES | MEMORY

# Decisions to take in before a step, and again before its masks: more come only in a flood, while requests wait.
STEP_DECISIONS = 1024

# Why what is decided about thinking is refused on an engine without known markers.
NOT_KNOWN = "the thinking markers are not known"

# The flags that the newest token must have where a probe is placed.
PLACEMENT_FLAGS = {agent_pb2.PLACEMENT_SENTENCE: FLAG_SENTENCE, agent_pb2.PLACEMENT_PARAGRAPH: FLAG_PARAGRAPH}


class Directives:
    """Applies what the control plane sent to the tracked requests, and reports outcomes into the step record."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.plan: DispatchPlan | None = None
        # Probes to place: (decision id, request, flags its newest token must have, milliseconds it then waits).
        self.probes: list[tuple[int, LiveRequest, int, int]] = []

    def report(self, decision_id: int, outcome: Outcome, live: LiveRequest | None = None, detail: str = "") -> None:
        """Record the outcome of a decision; id 0 marks what the agent does on its own account."""
        if decision_id:
            think = live.state.think_tokens if live is not None else 0
            self._tracker.record.outcomes.append((decision_id, outcome, think, detail))

    def lose_markers(self) -> None:
        """Nobody knows any more where thinking ends: refuse what would end it, endings that have begun too."""
        for live in self._tracker.by_id.values():
            if live.ending is not None and (live.cap is None or live.cap.decision_id != live.ending.decision_id):
                self.report(live.ending.decision_id, Outcome.REFUSED, live, NOT_KNOWN)
            live.drop_forced_end()
            self._close_cap(live, Outcome.REFUSED, NOT_KNOWN)
            live.set_cap(None)
        for decision_id, live, *_ in self.probes:
            self.report(decision_id, Outcome.REFUSED, live, NOT_KNOWN)
        self.probes = []

    def accept(self, message: agent_pb2.Directives) -> None:
        """Take in one message of the stream."""
        for force in message.forces:
            self._force(force, message.step)
        for cap in message.caps:
            self._cap(cap, message.step)
        for tier in message.tiers:
            self._tier(tier, message.step)
        for probe in message.probes:
            self._probe(probe, message.step)
        if message.HasField("plan"):
            self._accept_plan(message.plan, message.step)

    def _probe(self, probe: agent_pb2.EatProbe, step: int) -> None:
        live = self._thinker(probe.slot, probe.decision_id, step)
        if live is None:
            return
        for waiting in [p for p in self.probes if p[1] is live]:
            self.probes.remove(waiting)
            self.report(waiting[0], Outcome.SUPERSEDED, live)
        flags, hold_ms = PLACEMENT_FLAGS.get(probe.placement, 0), min(probe.hold_ms, MAX_HOLD_MS)
        self.probes.append((probe.decision_id, live, flags, hold_ms))

    def _target(self, slot: int, decision_id: int, step: int) -> LiveRequest | None:
        """The request a decision was meant for: one opened after the decision merely has the same slot."""
        live = self._tracker.by_slot.get(slot)
        if live is None or live.opened_step > step:
            self.report(decision_id, Outcome.REQUEST_GONE)
            return None
        return live

    def _thinker(self, slot: int, decision_id: int, step: int) -> LiveRequest | None:
        """The same for a decision about thinking, which is refused where nobody knows what thinking is."""
        live = self._target(slot, decision_id, step)
        if live is None or live.state.phase is not Phase.UNKNOWN:
            return live
        self.report(decision_id, Outcome.REFUSED, live, NOT_KNOWN)
        return None

    def _force(self, force: agent_pb2.ForceEnd, step: int) -> None:
        live = self._thinker(force.slot, force.decision_id, step)
        if live is None:
            return
        if live.state.phase is not Phase.THINK:
            self.report(force.decision_id, Outcome.ENDED_NATURALLY, live)
        elif force.shadow:
            self.report(force.decision_id, Outcome.SHADOWED, live)
        elif live.ending is not None:
            self.report(force.decision_id, Outcome.SUPERSEDED, live)
        else:
            by_order = force.reason == SOFT_CLOSE
            live.begin_forced_end(Ending(self._tracker.markers.ending, force.decision_id, by_order=by_order))
            self._tracker.due[live] = None

    def _cap(self, cap: agent_pb2.ThinkCap, step: int) -> None:
        live = self._thinker(cap.slot, cap.decision_id, step)
        if live is None:
            return
        self._supersede_cap(live)
        if not cap.HasField("max_think_tokens"):
            live.set_cap(None)
            self.report(cap.decision_id, Outcome.APPLIED, live)
            self._tracker.watch_limit(live)
            return
        live.set_cap(Cap(cap.decision_id, cap.max_think_tokens, cap.shadow))
        if not cap.shadow:
            # The default cap began what this decision would have: it is the one that counts.
            live.credit_forced_end(cap.decision_id)
        if live.state.ends and live.state.phase is not Phase.THINK:
            self._close_cap(live, Outcome.APPLIED if live.capped and not cap.shadow else Outcome.ENDED_NATURALLY)
        self._tracker.watch_limit(live)

    def _supersede_cap(self, live: LiveRequest) -> None:
        """Make place for a newer cap. An ending that has begun is finished, under the decision that began it."""
        if live.ending is not None and live.ending.by_cap and not _begun(live):
            live.drop_forced_end()
        if live.cap is not None and (live.ending is None or live.ending.decision_id != live.cap.decision_id):
            self._close_cap(live, Outcome.SUPERSEDED)

    def _tier(self, tier: agent_pb2.TierChange, step: int) -> None:
        live = self._target(tier.slot, tier.decision_id, step)
        if live is None:
            return
        if tier.tier not in TIERS:
            self.report(tier.decision_id, Outcome.REFUSED, detail=f"no tier {tier.tier} is known here")
            return
        if live.tier is not None:
            self.report(live.tier[0], Outcome.SUPERSEDED)
        live.set_tier(tier.decision_id, tier.tier, tier.shadow)

    def _accept_plan(self, plan: agent_pb2.DispatchPlan, step: int) -> None:
        if len(plan.slot) != len(plan.rank):
            self.report(plan.decision_id, Outcome.REFUSED, detail="slots and ranks differ in number")
            return
        if self.plan is not None and not self.plan.reported:
            self.report(self.plan.decision_id, Outcome.SUPERSEDED)

        def limit(name: str) -> int | None:
            return getattr(plan, name) if plan.HasField(name) else None  # type: ignore[arg-type]

        self.plan = DispatchPlan(
            plan.decision_id,
            limit("think_per_step"),
            limit("output_per_step"),
            min(plan.max_skip_steps, MAX_SKIP_STEPS),
            limit("prefill_tokens_per_step"),
            plan.hold_admission,
            plan.shadow,
            plan.stock,
        )
        for slot, rank in zip(plan.slot, plan.rank, strict=True):
            live = self._tracker.by_slot.get(slot)
            if live is not None and max(live.opened_step, live.phase_step) <= step:
                live.set_rank(rank)
        self._tracker.reorder = True

    def active_plan(self) -> DispatchPlan | None:
        """The plan to obey in this step, reported once; None when vLLM's own order holds."""
        plan = self.plan
        if plan is None:
            return None
        if not plan.reported:
            plan.reported = True
            self.report(plan.decision_id, Outcome.SHADOWED if plan.shadow else Outcome.APPLIED)
        return None if plan.shadow or plan.stock else plan

    @property
    def hold_admission(self) -> bool:
        """Whether nothing new is to be admitted but preempted answers; holds whatever the order is."""
        return self.plan is not None and self.plan.hold_admission

    def _close_cap(self, live: LiveRequest, outcome: Outcome, detail: str = "") -> None:
        if live.cap is not None and not live.cap.reported:
            live.mark_cap_reported()
            self.report(live.cap.decision_id, outcome, live, detail)

    def shadow_cap(self, live: LiveRequest) -> None:
        """Report a shadowed cap at the moment it would have ended thinking."""
        if (
            live.cap
            and live.cap.shadow
            and not live.cap.reported
            and live.state.think_tokens >= live.cap.max_think_tokens
        ):
            self._close_cap(live, Outcome.SHADOWED)

    def forced_tokens(self, live: LiveRequest, rows: int, drafts: Sequence[int] = ()) -> dict[int, int]:
        """Tokens to force in this step's rows (one row per token the step may yield): {row: token id}.

        drafts: the draft tokens of the rows, negative where only the workers know one; row r counts only when the first
        r of them are accepted. Starts an ending when the cap falls into these rows, so that it is exact with draft
        tokens too; not behind a token that is not known, which may have ended thinking already.
        """
        first = 0
        if live.ending is None:
            limit = live.limit
            reached = None if limit is None else self._row_at(live, limit, rows, drafts)
            if reached is None:
                return {}
            (first, state), cap = reached, live.cap
            counts = cap is not None and not cap.shadow and not cap.reported and cap.max_think_tokens == limit
            self._tracker.run.end()
            tokens = state.ending(self._tracker.markers)
            live.begin_forced_end(Ending(tokens, cap.decision_id if cap and counts else 0, by_cap=True))
        elif not _begun(live):
            live.rewrite_forced_end(live.state.ending(self._tracker.markers))
        return live.expect_forced_end(first, rows)

    def _row_at(self, live: LiveRequest, limit: int, rows: int, drafts: Sequence[int]) -> tuple[int, PhaseState] | None:
        """The row that finds the request thinking with `limit` thinking tokens done, and its state there, if these rows
        get there."""
        state = replace(live.state, tail=list(live.state.tail))
        for row in range(rows):
            if state.phase is Phase.THINK and state.think_tokens >= limit:
                return row, state
            if row == len(drafts) or drafts[row] < 0:
                return None
            state.feed(drafts[row], self._tracker.markers)
        return None

    def after_tokens(self, live: LiveRequest, ended: bool) -> None:
        """Settle endings and caps once a step's tokens are known."""
        ending = live.ending
        if ending is not None and ending.position == len(ending.tokens):
            live.complete_forced_end()
            if live.cap is not None and live.cap.decision_id == ending.decision_id:
                live.mark_cap_reported()
            elif not ending.by_cap:
                self._close_cap(live, Outcome.SUPERSEDED)
            self.report(ending.decision_id, Outcome.APPLIED, live)
        elif ending is not None and ended:
            live.drop_forced_end()
            if live.cap is None or live.cap.decision_id != ending.decision_id:
                self.report(ending.decision_id, Outcome.ENDED_NATURALLY, live)
        elif ending is not None and ending.position == 0:
            self._drop_unstarted_cap(live, ending)
        if ended or live.state.phase is Phase.THINK:
            self.shadow_cap(live)
        if ended:
            self._close_cap(live, Outcome.ENDED_NATURALLY)

    def _drop_unstarted_cap(self, live: LiveRequest, ending: Ending) -> None:
        """A cap that fell on a rejected draft row has not been reached yet: look again next step."""
        limit, thinks = live.limit, live.state.phase is Phase.THINK
        if not ending.by_cap or (thinks and limit is not None and live.state.think_tokens >= limit):
            return
        live.drop_forced_end()
        if live.cap is None or live.cap.decision_id != ending.decision_id:
            self.report(ending.decision_id, Outcome.SUPERSEDED, live)

    def close(self, live: LiveRequest) -> None:
        """Settle everything that still waits for a request that is gone."""
        if live.ending is not None:
            if live.cap is None or live.cap.decision_id != live.ending.decision_id:
                self.report(live.ending.decision_id, Outcome.REQUEST_GONE, live)
            live.drop_forced_end()
        self._close_cap(live, Outcome.REQUEST_GONE)
        if (tier := live.take_tier()) is not None:
            self.report(tier[0], Outcome.REQUEST_GONE)
        for decision_id, target, *_ in self.probes:
            if target is live:
                self.report(decision_id, Outcome.REQUEST_GONE, live)
        self.probes = [p for p in self.probes if p[1] is not live]

    def drop(self, parts: int, report: bool = True) -> None:
        """Forget the decisions about these parts; an ending that has begun is finished. report: False where their ids
        are void too."""
        self._drop_plan(parts, report)
        for live in self._tracker.by_id.values():
            if parts & ORDER:
                live.set_rank(None)
            if live.ending is not None and parts & _part(live.ending) and not _begun(live):
                self._drop_ending(live, live.ending, report)
            if parts & CAPS:
                self._drop_cap(live)
            if parts & MEMORY and (tier := live.take_tier()) is not None:
                self._let_go(tier[0], None, report)
        if parts & RULES:
            for decision_id, live, *_ in self.probes:
                self._let_go(decision_id, live, report)
            self.probes = []
        self._tracker.reorder = True

    def freeze(self) -> None:
        """Forget all decisions, endings that have begun too. Caps are kept for afterwards, with their outcome given."""
        for live in self._tracker.by_id.values():
            if live.ending is not None:
                self._drop_ending(live, live.ending, True)
            self._close_cap(live, Outcome.AGENT_OFF)
            live.void_decisions()
        self.drop(ALL_BUT_CAPS)

    def _let_go(self, decision_id: int, live: LiveRequest | None, report: bool) -> None:
        if report:
            self.report(decision_id, Outcome.AGENT_OFF, live)

    def _drop_plan(self, parts: int, report: bool) -> None:
        """Order and admission are in one plan: what is left of it goes on."""
        plan = self.plan
        if plan is None:
            return
        plan.stock = plan.stock or bool(parts & ORDER)
        plan.hold_admission = plan.hold_admission and not parts & MEMORY
        if plan.stock and not plan.hold_admission:
            if not plan.reported:
                self._let_go(plan.decision_id, None, report)
            self.plan = None

    def _drop_ending(self, live: LiveRequest, ending: Ending, report: bool) -> None:
        if live.cap is None or live.cap.decision_id != ending.decision_id:
            self._let_go(ending.decision_id, live, report)
        live.drop_forced_end()
        self._tracker.watch_limit(live)

    def _drop_cap(self, live: LiveRequest) -> None:
        """A cap whose ending goes on has its outcome from that."""
        if live.cap is not None and (live.ending is None or live.ending.decision_id != live.cap.decision_id):
            self._close_cap(live, Outcome.AGENT_OFF)
        live.set_cap(None)
        self._tracker.watch_limit(live)

    def new_stream(self) -> None:
        """A new session numbers its decisions afresh: keep caps in force, but no outcome of theirs is due any more."""
        self.drop(ALL_BUT_CAPS, report=False)
        self._tracker.record.outcomes.clear()
        self._tracker.record.probes.clear()
        for live in self._tracker.by_id.values():
            live.void_decisions()


def _part(ending: Ending) -> int:
    return CAPS if ending.by_cap else ORDER if ending.by_order else RULES


def _begun(live: LiveRequest) -> bool:
    """Whether a token of the ending is in the text, or in a mask that is under way to the workers."""
    return live.ending is not None and (live.ending.position > 0 or bool(live.expected))
