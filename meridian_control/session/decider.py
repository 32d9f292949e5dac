"""Turns the policy in force and the request table of one engine into directives.

The module owns the order in which the kinds of decision are made, and it sends only changes. The rules themselves are
in `termination`, `dispatch` and `eviction`. The code does no I/O and reads no clock; each object belongs to one
session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.common.enum_names import reason_name
from meridian_control.common.masks import any_in
from meridian_control.common.slices import SLICE_ROWS
from meridian_control.decisions import dispatch, eviction, loop_rules, probe_timing, termination
from meridian_control.decisions.probe_timing import EXTENSION_LEAD_TOKENS
from meridian_control.decisions.request_table import THINK
from meridian_control.decisions.table_columns import NO_CAP, UNTOLD
from meridian_control.session.merged_steps import steps

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from meridian_control.common.slices import Sliced
    from meridian_control.decisions.request_table import RequestTable
    from meridian_control.policy.model import Policy
    from meridian_control.session.control_requests import ControlRequest
    from meridian_control.session.decision_ledger import Ledger
    from meridian_control.session.effective_policies import Among, Groups

    Out = agent_pb2.Directives

PLACEMENTS = {
    "anywhere": agent_pb2.PLACEMENT_ANYWHERE,
    "sentence": agent_pb2.PLACEMENT_SENTENCE,
    "paragraph": agent_pb2.PLACEMENT_PARAGRAPH,
}
NOBODY = np.zeros(0, np.intp)
# Reason of probes that no rule reads, because they only judge what shortening would have changed.
HARM_PROBE = "harm"
# Steps that took longer than this many milliseconds were interrupted, so their durations are not used.
MAX_STEP_MS = 600_000


class Decider:
    """Makes the decisions of one session.

    `review` is set when the policy changes or the engine thaws: the next decisions then revise all earlier ones.
    `review_caps` is set when budgets or pressure shorten requests more or less: the next decisions then revise the
    caps.
    """

    def __init__(self, hello: agent_pb2.Hello, table: RequestTable, groups: Groups, ledger: Ledger) -> None:
        self._can, self._table, self._groups, self._ledger = hello.capabilities, table, groups, ledger
        # No request is known to think if the engine's thinking markers are unknown.
        self._knows_markers = not hello.unknown_markers
        self._kv_tokens = hello.num_blocks * hello.block_size_tokens
        self.cost = dispatch.StepCost()
        self._share, self._hold = dispatch.Share(), False
        # Whether a request of the engine has thought since the stream began.
        self._has_thought = False
        self.review = self.review_caps = self._reported = False

    def learn(self, report: agent_pb2.StepReport) -> None:
        """Update the estimate of the step cost with the report's steps."""
        for rows, prefill_tokens, took_ms in steps(report):
            if rows + prefill_tokens and 0 <= took_ms <= MAX_STEP_MS:
                self.cost.add(rows, prefill_tokens, took_ms)

    def end_thinking(self, policy: Policy, out: Out, reported: bool) -> Sliced[None]:
        """Decide caps and ends of thinking under the policy in force.

        reported: whether the table has just taken in a report. The rules are then asked at every moment of the report
        that concerns them, including those of requests that the report closes. If the policy has changed, the rules are
        asked about the current state of all other requests.
        """
        self._reported = reported
        if not (self._can.force_end and self._knows_markers):
            return
        yield from self._caps(policy, out)
        groups = self._groups.in_use()
        if reported:
            yield from self._ends_in_report(groups, out)
        if self.review:
            for own, among in groups:
                stays = ~self._table.closing
                yield from self._ends(own, out, self._table, stays if among is None else among & stays)
        for own, among in groups if self._table.has_loops else ():
            for slot in loop_rules.loops(own, self._table, among).tolist():
                self._end(own, agent_pb2.FORCE_REASON_LOOP, self._table, slot, out)
        self._groups.control.pass_caps()

    def decide(self, policy: Policy, out: Out, now_ms: float) -> Sliced[None]:
        """Decide probes, the plan and tiers, once the table has dropped closed requests."""
        groups, review = self._groups.in_use(), self.review
        self.review = False
        if self._can.eat_probe and self._knows_markers:
            for own, among in groups:
                self._probes(own, out, among)
            self._judging_probes(out)
        if self._can.dispatch:
            self._plan(policy, out, review, now_ms)
        yield from self._tiers(policy, out, review)

    def _caps(self, policy: Policy, out: Out) -> Sliced[None]:
        table, shadow = self._table, policy.scheduler.shadow
        extend, revises = table.cap_probed, self.review or self.review_caps
        if any_in(extend):
            extend = table.empty_answer & table.cap_probed & ~table.extended & (table.phase == THINK)
            table.extend_caps(extend)
        elif not (table.has_new or revises):
            return
        due = extend | (table.max_think_tokens == UNTOLD) | revises
        self.review_caps = False
        table.caps_decided()
        for count, slot in enumerate((table.live & due).nonzero()[0].tolist(), 1):
            if not count % SLICE_ROWS:
                yield
            cap, why = self._cap(policy, slot)
            reserve = self._groups.of(slot).scheduler.answer_reserve_tokens if cap != NO_CAP else 0
            told = table.max_think_tokens[slot], table.cap_shadow[slot], table.answer_reserve_tokens[slot]
            if (cap, shadow, reserve) != told:
                self._tell_cap(slot, (cap, shadow, reserve), "empty_answer" if extend[slot] else why, out)

    def _cap(self, policy: Policy, slot: int) -> tuple[int, str]:
        """Return a request's cap, and whether a budget or the policy's own cap sets it."""
        info = self._table.info[slot]
        assert info is not None
        if not policy.scheduler.enabled:
            return NO_CAP, "hard_cap"
        if slot in self._groups.control.by_slot:
            return self._groups.control_cap(slot), "hard_cap"
        own, extended = self._groups.of(slot).scheduler, bool(self._table.extended[slot])
        if (shortening := self._groups.shortening(slot)) is None:
            return termination.cap(own, info, extended), "hard_cap"
        without = shortening.without.scheduler
        cap = termination.cap(own, info, extended, without)
        return cap, shortening.section if cap < termination.cap(without, info, extended) else "hard_cap"

    def _tell_cap(self, slot: int, limits: tuple[int, bool, int], why: str, out: Out) -> None:
        """Decide a cap. limits: the cap, whether it is in shadow, and the answer reserve."""
        table, (cap, shadow, reserve) = self._table, limits
        first = table.max_think_tokens[slot] in (UNTOLD, NO_CAP)
        table.note_cap(slot, cap, shadow, reserve)
        if table.closing[slot]:
            return
        if cap != NO_CAP:
            made = self._ledger.make("cap", why, slot, shadow, cap_tokens=cap)
            told = {"max_think_tokens": cap, "answer_reserve_tokens": reserve}
            out.caps.add(decision_id=made, slot=slot, shadow=shadow, **told)
        elif not first:
            out.caps.add(decision_id=self._ledger.make("cap", "lifted", slot), slot=slot)

    def _ends_in_report(self, groups: list[tuple[Policy, Among]], out: Out) -> Sliced[None]:
        moments, probes_agree = termination.moments(groups, self._table)
        for (own, among), agree in zip(groups, probes_agree, strict=True) if len(moments) else ():
            yield from self._ends(own, out, moments, None if among is None else among[moments.slot], agree)

    def _ends(
        self, policy: Policy, out: Out, seen: termination.Seen, among: Among, probes_agree: bool = True
    ) -> Sliced[None]:
        for count, (index, reason) in enumerate(termination.ends(policy, seen, among, probes_agree), 1):
            self._end(policy, reason, seen, index, out)
            if not count % SLICE_ROWS:
                yield

    def _end(
        self,
        policy: Policy,
        reason: agent_pb2.ForceReason.ValueType,
        seen: termination.Seen,
        index: int,
        out: Out,
    ) -> None:
        table = self._table
        slot, shadow = int(seen.slot[index]), termination.is_shadowed(policy, reason)
        table.note_end(slot, reason, shadow)
        if shadow and (request := self._groups.control.by_slot.get(slot)) is not None:
            self._would_end(request, reason, seen, index)
        made = self._ledger.make("force", reason_name(reason), slot, shadow, (seen, index))
        if table.closing[slot]:
            self._ledger.too_late(made)
        else:
            out.forces.add(decision_id=made, slot=slot, reason=reason, shadow=shadow)

    def _would_end(
        self, request: ControlRequest, reason: agent_pb2.ForceReason.ValueType, seen: termination.Seen, index: int
    ) -> None:
        """Note that a rule would end the thinking of a request of the control group if the request were treated."""
        table, slot, gives_up = self._table, int(seen.slot[index]), reason == agent_pb2.FORCE_REASON_GIVE_UP
        kind = self._groups.kind_of_rule(slot, reason_name(reason))
        if kind is None or not request.ends_by_rule(kind, int(seen.think_tokens[index]), gives_up):
            return
        # These rules fire on the newest probe, except if a request passes its floor or a policy changes later.
        by_probe = gives_up or reason == agent_pb2.FORCE_REASON_EAT
        if by_probe and self._reported and slot in table.history.sampled:
            request.ends_at_newest_probe()

    def _judging_probes(self, out: Out) -> None:
        """Ask for the probes that show whether the answers of the control group stay, beside those that rules read."""
        for slot in self._groups.control.probes_due(self._groups.of):
            due = np.array([slot])
            self._ask(HARM_PROBE, due, agent_pb2.PLACEMENT_ANYWHERE, out, seen=(self._table, due))

    def _probes(self, policy: Policy, out: Out, among: Among) -> None:
        table, entropy = self._table, policy.entropy
        near_cap = probe_timing.cap_probes_due(policy, table, among).tolist()
        seen, indices = self._due(policy, among)
        if near_cap and len(indices):
            # The request came near its cap before the EAT probe was due, and it has one probe at a time.
            capped = np.maximum(1, table.max_think_tokens[seen.slot[indices]] - EXTENSION_LEAD_TOKENS)
            indices = indices[~(table.mask(near_cap)[seen.slot[indices]] & (capped < seen.think_tokens[indices]))]
        if len(indices):
            hold_ms = probe_timing.hold_ms(entropy)
            placement = PLACEMENTS["anywhere" if probe_timing.is_gated(entropy) else entropy.eat_probe_placement]
            due = seen.slot[indices]
            table.schedule_probe(due, seen.think_tokens[indices] + entropy.eat_probe_interval_tokens)
            self._ask("eat", due, placement, out, seen=(seen, indices), hold_ms=hold_ms)
        if near_cap := [slot for slot in near_cap if not table.probe_open[slot]]:
            due = np.array(near_cap)
            table.note_cap_probe(due)
            self._ask("empty_answer", due, agent_pb2.PLACEMENT_ANYWHERE, out, seen=(table, due))

    def _due(self, policy: Policy, among: Among) -> tuple[termination.Seen, NDArray[np.intp]]:
        """Return the table or moments, and the indices in them of the states in which EAT probes came due."""
        if not self._reported:
            return self._table, probe_timing.probes_due(policy, self._table, among)
        came = probe_timing.probes_came_due(policy, self._table, among)
        return (self._table, NOBODY) if came is None else (came, np.arange(len(came)))

    def _ask(
        self,
        reason: str,
        slots: NDArray[np.intp],
        where: agent_pb2.Placement.ValueType,
        out: Out,
        *,
        seen: tuple[termination.Seen, NDArray[np.intp]],
        hold_ms: int = 0,
    ) -> None:
        """Ask for probes of requests that have the same policy. seen: the table or moments, and the index of each
        request in it."""
        self._table.open_probe(slots)
        numbers = slots.tolist()
        made = self._ledger.make_probes(reason, numbers, *seen)
        for decision_id, slot in zip(made, numbers, strict=True):
            # Setting the fields takes half of the time of passing them as arguments.
            probe = out.probes.add()
            probe.decision_id, probe.slot, probe.placement, probe.hold_ms = decision_id, slot, where, hold_ms

    def _plan(self, policy: Policy, out: Out, review: bool, now_ms: float) -> None:
        scheduler, memory, table = policy.scheduler, policy.kv_memory, self._table
        hold = eviction.hold_admission(memory, table, self._kv_tokens) and not memory.shadow
        share, slots, ranks = dispatch.Share(), NOBODY, table.rank
        stock = not scheduler.enabled or scheduler.strategy == "stock"
        if not stock:
            if review:
                table.forget_ranks()
            self._has_thought = self._has_thought or bool(table.think_tokens.any())
            budgets = dispatch.budgets(scheduler, table, self.cost, self._has_thought)
            slots, ranks = dispatch.changed_ranks(scheduler, table, budgets, now_ms)
            table.set_ranks(ranks)
            share = dispatch.share(scheduler, table, budgets, self.cost, self._share)
        if not len(slots) and (share, hold) == (self._share, self._hold) and not review:
            return
        self._share, self._hold = share, hold
        plan = out.plan
        plan.decision_id = self._ledger.make("plan", "stock" if stock else scheduler.strategy)
        plan.slot.extend(slots.tolist())
        plan.rank.extend(ranks[slots].tolist())
        for name in dispatch.LIMITS:
            if (limit := getattr(share, name)) is not None:
                setattr(plan, name, limit)
        plan.hold_admission, plan.shadow, plan.stock = hold, scheduler.shadow, stock

    def _tiers(self, policy: Policy, out: Out, review: bool) -> Sliced[None]:
        memory, table = policy.kv_memory, self._table
        if review and memory.enabled:
            table.forget_tiers()
        elif review:
            slots, tier = eviction.reusable_again(table), agent_pb2.EVICTION_TIER_REUSABLE
            table.set_tier(slots, tier)
            yield from self._tell_tiers(slots.tolist(), "reusable", tier, False, out)
        if memory.enabled:
            slots, tier = eviction.newly_unreachable(self._can, table), agent_pb2.EVICTION_TIER_UNREACHABLE
            if len(slots):
                table.set_tier(slots, tier)
                yield from self._tell_tiers(slots.tolist(), "unreachable", tier, memory.shadow, out)

    def _tell_tiers(
        self, slots: list[int], why: str, tier: agent_pb2.EvictionTier.ValueType, shadow: bool, out: Out
    ) -> Sliced[None]:
        for count, slot in enumerate(slots, 1):
            made = self._ledger.make("tier", why, slot, shadow)
            out.tiers.add(decision_id=made, slot=slot, tier=tier, shadow=shadow)
            if not count % SLICE_ROWS:
                yield
