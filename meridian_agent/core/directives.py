"""Applies decisions to the tracked requests, and reports the one outcome of each decision.

The module owns the meaning of forced ends, caps, plans and tiers for a tracked request; the modules of `engine` carry
them out in vLLM. Pure but for the tracker that it changes. Runs on the engine-core thread only.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_agent.core.hand_overs import HandOvers
from meridian_agent.core.live_request import NEVER_STOPPED, Cap, Ending, LiveRequest
from meridian_agent.core.phases import Phase
from meridian_agent.core.preempts import MAX_VICTIMS, Preempts
from meridian_agent.core.probe_admission import NOT_THINKING, PendingProbes
from meridian_agent.core.sentences import DIVIDES
from meridian_agent.core.step_record import NOT_KNOWN, TIERS, Outcome
from meridian_agent.core.think_limit import (
    ending_tokens,
    first_due_row,
    held_back,
    is_limited,
    limit_in,
    reserve_note,
    stop_note,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from meridian_agent.core.phases import PhaseState
    from meridian_agent.core.tracker import Tracker


# A soft close waits at most this many steps for the end of a number or an abbreviation.
MAX_WAIT_STEPS = 16
# Whatever the control plane decides, no request is left out of more steps in a row.
MAX_SKIP_STEPS = 1024

# Parts of the directives, as bits. ORDER: dispatch plans and soft closes. CAPS: caps on thinking. RULES: forced ends by
# the entropy rules, and all probes. MEMORY: eviction tiers and admission. OTHER_ENDS: forced ends by operators, by the
# loop rule and by capabilities of one's own. HAND_OVERS: requests that go to another engine. PREEMPTS: waiting requests
# that may preempt others. A lease ends one or more of these parts; a section's own lease never ends OTHER_ENDS,
# HAND_OVERS or PREEMPTS.
ORDER, CAPS, RULES, MEMORY, OTHER_ENDS, HAND_OVERS, PREEMPTS = 1, 2, 4, 8, 16, 32, 64
ALL_BUT_CAPS = ORDER | RULES | MEMORY | OTHER_ENDS | HAND_OVERS | PREEMPTS
# Part of a forced end by its reason; all other reasons, also those of a newer control plane, belong to RULES.
PARTS = {
    agent_pb2.FORCE_REASON_SOFT_CLOSE: ORDER,
    agent_pb2.FORCE_REASON_OPERATOR: OTHER_ENDS,
    agent_pb2.FORCE_REASON_LOOP: OTHER_ENDS,
    agent_pb2.FORCE_REASON_EXTENSION: OTHER_ENDS,
}

# Decisions to take in before a step, and again before its masks. More than that wait only in a flood of messages,
# during which requests must not wait.
STEP_DECISIONS = 1024


@dataclass(slots=True)
class DispatchPlan:
    """A meridian.v1.DispatchPlan without its ranks, which are kept with the live requests. None means no limit. Two
    plans are equal if they differ at most in their ranks."""

    decision_id: int = field(compare=False)
    think_per_step: int | None
    output_per_step: int | None
    max_skip_steps: int
    prefill_tokens_per_step: int | None
    hold_admission: bool
    shadow: bool
    stock: bool
    reported: bool = field(default=False, compare=False)


class Directives:
    """Applies decisions to the tracked requests, and reports their outcomes into the step record."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self.plan: DispatchPlan | None = None
        self.probes = PendingProbes(self.report)
        self.hand_overs = HandOvers(self.report)
        self.preempts = Preempts(self.report)

    def report(self, decision_id: int, outcome: Outcome, live: LiveRequest | None = None, detail: str = "") -> None:
        """Record the outcome of a decision; an id of 0 means that the agent acted without a decision, and records
        nothing."""
        if decision_id:
            think = live.think_tokens if live is not None else 0
            self._tracker.record.outcomes.append((decision_id, outcome, think, detail, 0))

    def lose_markers(self) -> None:
        """Refuse all decisions that would end thinking, also ends that have begun, because the thinking markers are not
        known any more."""
        for live in self._tracker.by_id.values():
            self._drop_ending(live, Outcome.REFUSED, NOT_KNOWN)
            self._close_cap(live, Outcome.REFUSED, NOT_KNOWN)
            live.set_cap(None)
        self.probes.drop(Outcome.REFUSED, detail=NOT_KNOWN)
        self.hand_overs.drop(Outcome.REFUSED, NOT_KNOWN)

    def accept(self, message: agent_pb2.Directives) -> None:
        """Apply the decisions of one message."""
        for force in message.forces:
            self._force(force, message.step)
        for cap in message.caps:
            self._cap(cap, message.step)
        for tier in message.tiers:
            self._tier(tier, message.step)
        for probe in message.probes:
            self._probe(probe, message.step)
        for hand_over in message.hand_overs:
            if (live := self._target(hand_over.slot, hand_over.decision_id, message.step)) is not None:
                self.hand_overs.accept(hand_over, live, self._tracker.markers)
        for preempt in message.preempts:
            if (live := self._target(preempt.slot, preempt.decision_id, message.step)) is not None:
                self.preempts.accept(preempt, live, self._known(preempt.victims, message.step))
        if message.HasField("plan"):
            self._accept_plan(message.plan, message.step)

    def _probe(self, probe: agent_pb2.EatProbe, step: int) -> None:
        live = self._thinker(probe.slot, probe.decision_id, step)
        if live is not None and live.phase is not Phase.THINK:
            self.report(probe.decision_id, Outcome.REFUSED, live, NOT_THINKING)
        elif live is not None:
            self.probes.add(probe, live)

    def _known(self, slots: Iterable[int], step: int) -> list[LiveRequest]:
        """Return the requests in these slots, as they were in the report of this step; of very many slots the first
        ones count."""
        known = map(self._tracker.by_slot.get, dict.fromkeys(islice(slots, MAX_VICTIMS)))
        return [live for live in known if live is not None and live.opened_step <= step]

    def _target(self, slot: int, decision_id: int, step: int) -> LiveRequest | None:
        """Return the request that a decision was made for; None if the slot belongs to a later request by now, or to
        none."""
        live = self._tracker.by_slot.get(slot)
        if live is None or live.opened_step > step:
            self.report(decision_id, Outcome.REQUEST_GONE)
            return None
        return live

    def _thinker(self, slot: int, decision_id: int, step: int) -> LiveRequest | None:
        """Return the request that a decision about thinking was made for; None, and the decision is refused, if the
        request's phase is not known."""
        live = self._target(slot, decision_id, step)
        if live is None or live.phase is not Phase.UNKNOWN:
            return live
        self.report(decision_id, Outcome.REFUSED, live, NOT_KNOWN)
        return None

    def _force(self, force: agent_pb2.ForceEnd, step: int) -> None:
        live = self._thinker(force.slot, force.decision_id, step)
        if live is None:
            return
        if live.phase is not Phase.THINK:
            self.report(force.decision_id, Outcome.ENDED_NATURALLY, live)
        elif force.shadow:
            self.report(force.decision_id, Outcome.SHADOWED, live)
        elif live.ending is not None:
            self.report(force.decision_id, Outcome.SUPERSEDED, live)
        else:
            live.ending = Ending(self._tracker.markers.ending, force.decision_id, reason=force.reason)
            self._tracker.watch_limit(live)

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
        live.set_cap(Cap(cap.decision_id, cap.max_think_tokens, cap.shadow, cap.answer_reserve_tokens, cap.extended))
        if not cap.shadow:
            # If the default cap has begun a forced end, that end counts as this decision's.
            live.credit_forced_end(cap.decision_id)
        if live.state.ends and live.phase is not Phase.THINK:
            if live.capped and not cap.shadow:
                self._close_cap(live, Outcome.APPLIED, live.capped_detail)
            self._close_cap(live, Outcome.ENDED_NATURALLY)
        self._tracker.watch_limit(live)

    def _supersede_cap(self, live: LiveRequest) -> None:
        """Supersede the request's cap. A forced end that is bound to come is completed, and is reported for the
        decision that began it."""
        if live.ending is not None and live.ending.by_cap and not _bound(live):
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
        live.tier = tier.decision_id, tier.tier, tier.shadow

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
                live.rank = rank
        self._tracker.reorder = True

    def active_plan(self) -> DispatchPlan | None:
        """Return the plan to obey in this step, and report its outcome once; None if vLLM's own order applies."""
        plan = self.plan
        if plan is None:
            return None
        if not plan.reported:
            plan.reported = True
            self.report(plan.decision_id, Outcome.SHADOWED if plan.shadow else Outcome.APPLIED)
        return None if plan.shadow or plan.stock else plan

    @property
    def hold_admission(self) -> bool:
        """Whether vLLM may admit preempted answers only; this applies under a plan with vLLM's own order too."""
        return self.plan is not None and self.plan.hold_admission

    def _close_cap(self, live: LiveRequest, outcome: Outcome, detail: str = "") -> None:
        if live.cap is not None and not live.cap.reported:
            live.cap.reported = True
            self.report(live.cap.decision_id, outcome, live, detail)

    def shadow_cap(self, live: LiveRequest) -> None:
        """Report a shadowed cap once it, or its answer reserve, would have ended thinking."""
        cap, think_tokens, reserved = live.cap, live.think_tokens, live.shadow_reserved
        if cap is None or not cap.shadow or cap.reported:
            return
        if reserved < cap.max_think_tokens and reserved <= think_tokens:
            detail = f"answer_reserve_tokens is {cap.answer_reserve_tokens}"
            self._shadowed(cap, reserved, agent_pb2.FORCE_REASON_ANSWER_RESERVE, detail)
        elif think_tokens >= cap.max_think_tokens:
            self._shadowed(cap, think_tokens, agent_pb2.FORCE_REASON_HARD_CAP)

    def _shadowed(self, cap: Cap, think_tokens: int, reason: agent_pb2.ForceReason.ValueType, detail: str = "") -> None:
        """Report a cap in shadow. reason: what would have ended thinking after `think_tokens` thinking tokens."""
        cap.reported = True
        self._tracker.record.outcomes.append((cap.decision_id, Outcome.SHADOWED, think_tokens, detail, reason))

    def forced_tokens(self, live: LiveRequest, rows: int, drafts: Sequence[int] = ()) -> dict[int, int]:
        """Return the tokens to force in this step's rows as {row: token id}; a step has one row for each token that it
        may yield.

        drafts: the draft tokens of the rows, negative if only the workers know a draft token; row r counts only if the
        first r draft tokens are accepted. Begins a forced end if the cap falls into these rows, so that caps are exact
        with draft tokens too; but not after a draft token that only the workers know, because that token may end
        thinking itself.
        """
        first, ending = 0, live.ending
        if ending is None:
            reached = first_due_row(live, rows, drafts, self._tracker.markers) if is_limited(live) else None
            if reached is None:
                return {}
            first, state, limit = reached
            cap = _open_cap(live)
            counts = cap is not None and (limit.by_reserve or cap.max_think_tokens == limit.tokens)
            self._tracker.run.leave(live)
            ending = Ending((), cap.decision_id if cap and counts else 0, by_cap=True, by_reserve=limit.by_reserve)
            live.ending = ending
            ending.tokens, ending.detail = self._written(live, state, ending)
        elif not _begun(live):
            if self._waits(live, ending, rows):
                ending.waited_steps += 1
                return {}
            ending.tokens, ending.detail = self._written(live, live.state, ending)
        return live.expect_forced_end(first, rows)

    def end_stopped(self, live: LiveRequest) -> None:
        """End the thinking of a request whose model has stopped while it thought, in the coming steps. An end that was
        decided before stays as it is; an end that a freeze has voided meanwhile does not follow."""
        # An end that a cap began after a draft token, of which the stop takes the place, is written anew.
        live.expected = {}
        if live.ending is None and live.has_stopped:
            cap = _open_cap(live)
            ending = Ending((), cap.decision_id if cap else 0, by_cap=True, by_reserve=True, at_stop=True)
            live.ending = ending
            ending.tokens, ending.detail = self._written(live, live.state, ending)
            self._tracker.watch_limit(live)

    def shadow_stop(self, live: LiveRequest, think_tokens: int) -> None:
        """Report a cap whose answer reserve is in shadow, because the model stops after `think_tokens` thinking tokens
        and the reserve would have ended the thinking there."""
        cap = live.cap
        if cap is not None and cap.shadow and not cap.reported and cap.answer_reserve_tokens:
            detail = "the model stopped while it thought"
            self._shadowed(cap, think_tokens, agent_pb2.FORCE_REASON_PREMATURE_STOP, detail)

    def _waits(self, live: LiveRequest, ending: Ending, rows: int) -> bool:
        """Return whether a soft close waits, because it would divide a number or an abbreviation. It does not wait past
        a limit that the step may reach, nor for a model that has stopped."""
        if ending.reason != agent_pb2.FORCE_REASON_SOFT_CLOSE or ending.waited_steps >= MAX_WAIT_STEPS or _bound(live):
            return False
        limit = limit_in(live, live.state, self._tracker.markers)
        near = limit is not None and live.think_tokens + rows > limit.tokens
        return bool(live.sentence_flags & DIVIDES) and not near

    def _written(self, live: LiveRequest, state: PhaseState, ending: Ending) -> tuple[tuple[int, ...], str]:
        """Return the tokens that a forced end writes in `state`, and the detail of its outcome."""
        if not ending.by_reserve:
            return state.ending(self._tracker.markers), ""
        most, reserve, markers = live.info.most_tokens, live.reserve_tokens, self._tracker.markers
        left = most - state.generated_tokens
        if ending.at_stop:
            tokens = state.ending(markers)
            return tokens, stop_note(left - len(tokens), most)
        tokens = ending_tokens(state, markers, left - held_back(state, markers, reserve, most))
        return tokens, reserve_note(left - len(tokens), most, reserve)

    def after_tokens(self, live: LiveRequest, ended: bool) -> None:
        """Report the outcomes of forced ends and caps that follow from a step's tokens. ended: thinking ended in the
        step."""
        ending = live.ending
        if ending is not None and ending.position == len(ending.tokens):
            live.complete_forced_end()
            if not ending.by_cap:
                self._tracker.saved_tokens += max(0, (live.limit or 0) - live.think_tokens)
            if live.cap is not None and live.cap.decision_id == ending.decision_id:
                live.cap.reported = True
            elif not ending.by_cap:
                self._close_cap(live, Outcome.SUPERSEDED)
            self.report(ending.decision_id, Outcome.APPLIED, live, ending.detail)
        elif ending is not None and ending.position and live.phase is Phase.THINK:
            # If thinking ended in the step, the model began to think again, and the end belongs to that thinking.
            ended = False
        elif ending is not None and ended:
            self._drop_ending(live, Outcome.ENDED_NATURALLY)
        elif ending is not None and ending.position == 0:
            self._drop_unstarted_cap(live, ending)
        if ended or live.phase is Phase.THINK:
            self.shadow_cap(live)
        if ended:
            self._close_cap(live, Outcome.ENDED_NATURALLY)

    def _drop_unstarted_cap(self, live: LiveRequest, ending: Ending) -> None:
        """Drop the forced end of a cap whose row was rejected with its draft: the cap has not been reached, so the next
        step looks again."""
        if _bound(live):
            return
        limit, thinks = limit_in(live, live.state, self._tracker.markers), live.phase is Phase.THINK
        if not ending.by_cap or (thinks and limit is not None and live.state.think_tokens >= limit.tokens):
            return
        self._drop_ending(live, Outcome.SUPERSEDED)

    def close(self, live: LiveRequest) -> None:
        """Report an outcome for every open decision about a request that has ended, but not for an eviction tier, which
        waits until vLLM frees the blocks."""
        self._drop_ending(live, Outcome.REQUEST_GONE)
        self._close_cap(live, Outcome.REQUEST_GONE, self._nothing_reserved(live))
        self.probes.drop(Outcome.REQUEST_GONE, live)
        self.preempts.settle(live, Outcome.REQUEST_GONE)

    def _nothing_reserved(self, live: LiveRequest) -> str:
        """Return what to say of a request that has thought to its last token because no token of its answer reserve
        fits; empty for every other request."""
        state, reserve, most = live.state, live.reserve_tokens, live.info.most_tokens
        if not reserve or live.phase is not Phase.THINK or state.continues or state.generated_tokens < most:
            return ""
        return "" if held_back(state, self._tracker.markers, reserve, most) else reserve_note(0, most, reserve)

    def drop(self, parts: int, report: bool = True) -> None:
        """Drop the decisions about these parts of the directives; a forced end that is bound to come is completed.
        report: False if the ids of the decisions are void too, so that no outcome is due."""
        self._drop_plan(parts, report)
        for live in self._tracker.by_id.values():
            if parts & ORDER:
                live.rank = None
            if live.ending is not None and parts & _part(live.ending) and not _bound(live):
                self._drop_ending(live, Outcome.AGENT_OFF if report else None)
                self._tracker.watch_limit(live)
            if parts & CAPS:
                self._drop_cap(live)
        for live in self._tracker.with_blocks() if parts & MEMORY else ():
            if (tier := live.take_tier()) is not None:
                self._let_go(tier[0], report)
        outcome = Outcome.AGENT_OFF if report else None
        if parts & RULES:
            self.probes.drop(outcome)
        if parts & HAND_OVERS:
            self.hand_overs.drop(outcome)
        if parts & PREEMPTS:
            self.preempts.drop(outcome)
        self._tracker.reorder = True

    def freeze(self) -> None:
        """Drop all decisions, also forced ends that have begun. Caps are kept for the time after the freeze, but their
        outcomes are reported now."""
        for live in self._tracker.by_id.values():
            if live.ending is not None:
                self._drop_ending(live, Outcome.AGENT_OFF)
                self._tracker.watch_limit(live)
            self._close_cap(live, Outcome.AGENT_OFF)
            live.void_decisions()
            # No end follows a stop that was taken back, so that the next stop may be taken back, too.
            live.stopped_after = NEVER_STOPPED
        self.drop(ALL_BUT_CAPS)

    def _let_go(self, decision_id: int, report: bool) -> None:
        if report:
            self.report(decision_id, Outcome.AGENT_OFF)

    def _drop_plan(self, parts: int, report: bool) -> None:
        """Drop the plan's order or its hold on admission, whichever has ended; the other one stays in force."""
        plan = self.plan
        if plan is None:
            return
        plan.stock = plan.stock or bool(parts & ORDER)
        plan.hold_admission = plan.hold_admission and not parts & MEMORY
        if plan.stock and not plan.hold_admission:
            if not plan.reported:
                self._let_go(plan.decision_id, report)
            self.plan = None

    def refuse_end(self, live: LiveRequest, detail: str) -> None:
        """Drop a forced end that cannot be written, refuse its decision, and force no further end of the request."""
        if live.cap is not None and live.ending is not None and live.cap.decision_id == live.ending.decision_id:
            self._close_cap(live, Outcome.REFUSED, detail)
        self._drop_ending(live, Outcome.REFUSED, detail)
        live.allowed = False
        self._tracker.watch_limit(live)

    def _drop_ending(self, live: LiveRequest, outcome: Outcome | None, detail: str = "") -> None:
        """Drop a request's forced end, if there is one, and report this outcome of its decision, None for no outcome. A
        cap whose end it was gets its own outcome."""
        ending = live.ending
        if ending is not None and outcome and (live.cap is None or live.cap.decision_id != ending.decision_id):
            self.report(ending.decision_id, outcome, live, detail)
        live.drop_forced_end()

    def _drop_cap(self, live: LiveRequest) -> None:
        """Drop a request's cap. If the cap's forced end has begun, the outcome is reported when that end is
        complete."""
        if live.cap is not None and (live.ending is None or live.ending.decision_id != live.cap.decision_id):
            self._close_cap(live, Outcome.AGENT_OFF)
        live.set_cap(None)
        self._tracker.watch_limit(live)

    def new_stream(self) -> None:
        """Drop the decisions of the old stream, because a new session counts its decisions from 1 again. Caps stay in
        force, but their outcomes are not reported any more."""
        self.drop(ALL_BUT_CAPS, report=False)
        self._tracker.record.outcomes.clear()
        self._tracker.record.probes.clear()
        for live in self._tracker.by_id.values():
            live.void_decisions()


def _part(ending: Ending) -> int:
    return CAPS if ending.by_cap else PARTS.get(ending.reason, RULES)


def _open_cap(live: LiveRequest) -> Cap | None:
    """Return the cap in force whose decision has no outcome yet, if there is one."""
    cap = live.cap
    return None if cap is None or cap.shadow or cap.reported else cap


def _begun(live: LiveRequest) -> bool:
    """Return whether a token of the forced end has been generated, or is in a mask on its way to the workers."""
    return live.ending is not None and (live.ending.position > 0 or bool(live.expected))


def _bound(live: LiveRequest) -> bool:
    """Return whether a forced end is completed although its decision is dropped: it has begun, or the model's own stop
    has been taken back in its favour, so that without it the request would stop there again without an answer."""
    return _begun(live) or live.has_stopped
