"""Chooses the control group among one engine's requests, follows it, and counts what becomes of it and of all other
requests."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control.capabilities.control_group.experiments import Experiments
from meridian_control.capabilities.control_group.going_on import GoingOn, drop, lease, stop_tokens
from meridian_control.capabilities.control_group.requests import ControlRequests
from meridian_control.capabilities.control_group.rule import (
    compared_signals,
    held_out,
    kind_of_cap,
    kind_of_rule,
    sampled_from,
    unshortened,
    unshortened_cap,
)
from meridian_control.common.enum_names import ENTROPY_REASONS
from meridian_control.common.opened_request import is_under_way
from meridian_control.common.table_columns import FORCED_END, NO_CAP
from meridian_control.engine.moments import sentence_ends
from meridian_control.engine.part import UNREAD_PROBE, Part
from meridian_control.engine.request_table import THINK
from meridian_control.engine.token_rows import differs
from meridian_control.journal.request_ids import is_later_choice
from meridian_control.policy.drift_schema import SIGNALS
from meridian_control.policy.effects import self_calibrates
from meridian_control.policy.shortening_kinds import ENTROPY, Kind, acts_on_thinking, kinds_for_request, may_shorten

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import datetime

    from meridian_control.capabilities.control_group.cohorts import Cohort
    from meridian_control.capabilities.control_group.experiments import Experiment
    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.engine.part import ProbeResult, Stream, Turn
    from meridian_control.engine.shortening import Held, Staged
    from meridian_control.policy.model import Policy
    from meridian_control.policy.schema import SchedulerPolicy
    from meridian_control.policy.shortening_schema import StagedEntry

# Bit of each signal in the table's column `awaited_signals`; and of each signal that is read at sentence ends, the
# column with its values at the newest ones.
BITS = {signal: 1 << number for number, signal in enumerate(SIGNALS)}
AT_SENTENCE_ENDS = {"rank": "boundary_ranks", "rpdi": "boundary_rpdi"}
BITS_AT_SENTENCE_ENDS = sum(BITS[signal] for signal in AT_SENTENCE_ENDS)
# Bit of each entropy rule in the table's column `shadow_decided`.
RULE_BITS = {reason: 1 << agent_pb2.ForceReason.Value(f"FORCE_REASON_{reason.upper()}") for reason in ENTROPY_REASONS}
# Rules that fire on the newest probe, except if a request passes its floor or a policy changes later.
BY_PROBE = ("eat", "give_up")
# Events of a request that joins and that leaves the group, and what a life says of them.
TURNS = "control_group", "control_group_left"
JOINED = "no rule, budget or lower cap shortens this request, so that others can be compared with it"
LEFT = "the policy has changed"


class ControlGroup(Part):
    """The control group of one engine.

    experiments: the counts of treated requests and of the control group, over all engines, or of this engine alone if
    none are given. experiment: those under the rules in force, None before a policy. requests: the live requests of the
    group. verdicts: closed requests of this stream by what they show, as `Engine.control_group` in fleet.proto names
    them.
    """

    def __init__(self, stream: Stream, experiments: Experiments | None = None) -> None:
        self._stream, self._table = stream, stream.table
        stream.policies.holdout = self
        self.experiments = experiments or Experiments()
        self.requests = ControlRequests(stream.table)
        self.verdicts: Counter[str] = Counter()
        self.experiment: Experiment | None = None
        self._policy: Policy | None = None
        # Whether the policy in force has the same rules as the one before, so that requests go on counting.
        self._same_rules = False
        # By slot, the kind of shortening that ended the thinking of a treated request first.
        self._ended_by: dict[int, Kind] = {}
        # By slot of a request that counts, its cohort, and what an earlier stream of the engine process knew of it.
        self._cohorts: dict[int, Cohort] = {}
        self._before: dict[int, GoingOn] = {}
        # By slot, the requests that the next snapshot may list.
        self._expected: dict[int, GoingOn] = {}
        self._now = stream.now

    def rest(self, now: datetime) -> None:
        self._now = now
        if self._cohorts and (self._stream.freezing.frozen or self._stream.freezing.void):
            self._leave_all()

    # ------------------------------------------------------------------------------------------------ who belongs to it

    def policy_begins(self, revision: int, policy: Policy, now: datetime) -> None:
        before, self.experiment = self.experiment, self.experiments.experiment_of(revision, policy)
        self._policy, self._same_rules = policy, self.experiment is before

    def assign(
        self, slot: int, opened: OpenedRequest, own: Policy, entries: Sequence[StagedEntry], again: bool
    ) -> bool:
        table, same_rules = self._table, self._takes_up(slot, opened) or (again and self._same_rules)
        # One engine sees the answer of a request that two engines serve, the other one its thinking.
        is_whole = not (opened.remote_decode or opened.handed_over_ref)
        share = own.entropy.holdout_share
        in_force = is_whole and share > 0 and (may_shorten(own, entries) or self_calibrates(own))
        control = in_force and held_out(opened.request_id, share)
        begins = not (table.think_tokens[slot] or table.output_tokens[slot] or opened.handed_over_ref)
        counted = in_force and (begins or (same_rules and bool(table.counted[slot] or self.goes_on(slot))))
        table.put(slot, control=control, counted=counted)
        self._join(slot, counted=counted, same_rules=same_rules)
        self._await_signals(slot, own, opened, begins=begins, same_rules=same_rules)
        if not same_rules:
            self._ended_by.pop(slot, None)
        if self._stream.journal is not None:
            self._stream.journal.turned(slot, TURNS, control, JOINED if control else LEFT)
        if not control:
            self.requests.leave(slot)
            return False
        self.requests.join(slot, same_rules)
        return True

    def _takes_up(self, slot: int, opened: OpenedRequest) -> bool:
        """Take up the request of the stream before that goes on in this slot under the same rules; return whether there
        is one."""
        if (before := self._expected.pop(slot, None)) is None:
            return False
        assert self.experiment is not None
        same_rules = before.cohort.whole is self.experiment.cohorts
        if not (same_rules and before.is_still(opened, int(self._table.phase[slot]))):
            before.cohort.leave()
            return False
        self._cohorts[slot] = before.cohort
        if is_under_way(opened):
            self._before[slot] = before
            self._table.put(slot, first_end=before.first_end, reentered=before.reentered)
        if before.ended_by is not None:
            self._ended_by[slot] = before.ended_by
        return True

    def goes_on(self, slot: int) -> bool:
        """Return whether a request that counts had tokens before the newest snapshot, so that this stream does not know
        all that happened to it."""
        return slot in self._before

    def _join(self, slot: int, *, counted: bool, same_rules: bool) -> None:
        """Let a request that counts belong to a cohort of the present rules."""
        assert self.experiment is not None
        if not (counted and same_rules):
            self._leave(slot)
        if counted and slot not in self._cohorts:
            self._cohorts[slot] = self.experiment.cohorts.join(self._now)

    def _leave(self, slot: int) -> None:
        self._before.pop(slot, None)
        if (expected := self._expected.pop(slot, None)) is not None:
            expected.cohort.leave()
        if (joined := self._cohorts.pop(slot, None)) is not None:
            joined.leave()

    def _await_signals(self, slot: int, own: Policy, opened: OpenedRequest, *, begins: bool, same_rules: bool) -> None:
        """Note the signals of a request that are compared with the calibration once their first values come. Of several
        choices of one prompt the first is compared, because they are alike."""
        assert self._policy is not None
        assert self.experiment is not None
        control, described = bool(self._table.control[slot]), self.experiment.references
        signals = compared_signals(self._policy, own, opened.min_think_tokens, described, control=control)
        before = int(self._table.awaited_signals[slot]) if same_rules else 0
        alone = not (signals and is_later_choice(opened.request_id))
        awaited = sum(BITS[signal] for signal in signals) if alone else 0
        self._table.put(slot, awaited_signals=awaited if begins else awaited & before)

    def unshortened(self, policy: Policy) -> Policy:
        return unshortened(policy)

    def unshortened_cap(self, scheduler: SchedulerPolicy) -> SchedulerPolicy:
        return unshortened_cap(scheduler)

    # ----------------------------------------------------------------------------------------- what would shorten them

    def exposed(self, slots: Sequence[int], held: Held, staged: Sequence[Staged], before: Held | None) -> None:
        kinds, acts = set(kinds_for_request(held.own)), acts_on_thinking(held.treated)
        kinds |= {ENTROPY} & kinds_for_request(held.treated)
        kinds |= {
            Kind(staged_entry.section, staged_entry.entry.name)
            for staged_entry in staged
            if acts and not staged_entry.entry.shadow
        }
        if before is not None and before.treated.entropy.shadow and not held.treated.entropy.shadow:
            # An entropy rule that has fired while it was in shadow for treated requests, too, fires again.
            in_force = sum(RULE_BITS[reason] for reason in RULE_BITS if kind_of_rule(held, reason) is not None)
            self._table.put(slots, shadow_decided=self._table.shadow_decided[slots] & ~np.uint32(in_force))
        for slot in slots:
            request, opened = self.requests.by_slot[slot], self._table.info[slot]
            assert opened is not None
            request.kinds |= kinds
            own, extended = (
                kind_of_cap(held, opened, extended=extends) if acts else (NO_CAP, None) for extends in (False, True)
            )
            self.requests.set_cap(slot, own, extended)

    def would_end(self, slot: int, reason: str, think_tokens: int, *, reported: bool) -> None:
        kind, request = kind_of_rule(self._stream.policies.held(slot), reason), self.requests.by_slot[slot]
        ends = kind is not None and request.ends_by_rule(kind, think_tokens, gives_up=reason == "give_up")
        unsampled = self._table.history.unsampled if reported else None
        if ends and reason in BY_PROBE and unsampled is not None and unsampled.steps[slot] >= 0:
            request.ends_at_newest_probe()

    def carried_out(self, slot: int, reason: str, think_tokens: int) -> None:
        if (kind := kind_of_rule(self._stream.policies.held(slot), reason)) is not None:
            self.requests.carried_out(slot, kind, think_tokens)

    def ends(self, turn: Turn) -> None:
        if self.requests.by_slot and self._stream.ends_thinking:
            self.requests.pass_caps()

    def decide(self, turn: Turn) -> None:
        if self.requests.by_slot and self._stream.may_probe:
            for slot in self.requests.probes_due(self._stream.policies.of):
                self._stream.probe(turn, UNREAD_PROBE, np.array([slot]))

    # ------------------------------------------------------------------------------------------------- what comes of it

    def snapshot_begins(self, snapshot: agent_pb2.Snapshot) -> None:
        self.expect(self.left())
        self.requests.clear()
        self._ended_by.clear()

    def snapshot_ends(self, now: datetime) -> None:
        for slot in [slot for slot in self._expected if not self._table.holds(slot)]:
            self._leave(slot)

    def stream_ended(self, now: datetime, followed: bool) -> None:
        self._leave_all()
        drop(self._expected.values())

    def _leave_all(self) -> None:
        for slot in [*self._cohorts]:
            self._leave(slot)

    def expect(self, left: dict[int, GoingOn]) -> None:
        """Take what a stream has left, but for requests that a lease has ceased to govern meanwhile, or a freeze or a
        fault."""
        is_governed = not (self._stream.hello.fault or self._stream.freezing.frozen)
        for slot, before in left.items():
            if is_governed and self._now <= before.until:
                self._expected[slot] = before
            else:
                before.cohort.leave()

    def left(self) -> dict[int, GoingOn]:
        """Return the requests that count, by slot, for the snapshot that comes next, in this stream or the engine
        process's next one: they count here no more."""
        table, left = self._table, dict[int, GoingOn]()
        if self._policy is None:
            return left
        until = self._now + lease(self._policy)
        for slot, cohort in self._cohorts.items():
            opened, thinks = table.info[slot], bool(table.phase[slot] == THINK)
            assert opened is not None
            left[slot] = GoingOn(
                opened.identity,
                cohort,
                until,
                phase=int(table.phase[slot]),
                think_tokens=int(table.think_tokens[slot]),
                first_end=int(table.first_end[slot]),
                reentered=bool(table.reentered[slot] or (table.first_end[slot] and thinks)),
                ended_by=self._ended_by.get(slot),
                stop_tokens=stop_tokens(self.requests.by_slot.get(slot), self._before.get(slot)),
            )
        self._cohorts, self._before = {}, {}
        return left

    def probed(self, results: Sequence[ProbeResult]) -> None:
        for result in results:
            if (request := self.requests.by_slot.get(result.slot)) is not None:
                request.probed(result)
        for result in results if self.experiment is not None and self.experiment.references else ():
            # NaN is no sample.
            is_sample = result.reason != UNREAD_PROBE and np.isfinite(result.eat_nats)
            is_awaited = is_sample and int(self._table.awaited_signals[result.slot]) & BITS["eat"]
            if is_awaited and result.think_tokens >= sampled_from(self._stream.policies.of(result.slot)):
                self._count_first(result.slot, "eat", result.eat_nats)

    def reported(self, report: agent_pb2.StepReport, now: datetime) -> None:
        """Count the report's values at sentence ends that are the first ones that a rule could read."""
        table = self._table
        if self.experiment is None or not self.experiment.references or self._policy is None:
            return
        ends = sentence_ends(table)
        if not np.count_nonzero(ends.awaited_signals & BITS_AT_SENTENCE_ENDS):
            return
        passed = ends.think_tokens >= self._policy.scheduler.min_think_tokens
        for signal, name in AT_SENTENCE_ENDS.items():
            values = getattr(ends, name)[:, 0]
            awaited = (ends.awaited_signals & BITS[signal]) != 0
            first = (awaited & passed & np.isfinite(values)).nonzero()[0]
            first = first[differs(ends.slot[first])]
            for slot, value in zip(ends.slot[first].tolist(), values[first].tolist(), strict=True):
                self._count_first(slot, signal, value)

    def _count_first(self, slot: int, signal: str, value: float) -> None:
        assert self.experiment is not None
        self._table.put(slot, awaited_signals=int(self._table.awaited_signals[slot]) & ~BITS[signal])
        self.experiment.sampled(signal, value)

    def thinking_ended(self, ends: Sequence[tuple[int, str]]) -> None:
        """Note the kind of shortening that has ended the thinking of each treated request first, if one has; and
        whether a request of the control group was cut although nothing should shorten it."""
        table = self._table
        for slot, reason in ends if self._policy is not None else ():
            if slot not in self._cohorts:
                continue
            if (request := self.requests.by_slot.get(slot)) is not None:
                # The engine's cap holds until the request's own cap arrives, which a very low cap may not wait for.
                request.is_cut |= reason == "hard_cap" and bool(table.think_tokens[slot] < table.max_think_tokens[slot])
                continue
            opened, held = table.info[slot], self._stream.policies.held(slot)
            if reason == "hard_cap" and opened is not None:
                kind = kind_of_cap(held, opened, extended=bool(table.extended[slot]))[1]
            else:
                kind = kind_of_rule(held, reason)
            if kind is not None and table.first_end[slot] == FORCED_END:
                self._ended_by.setdefault(slot, kind)

    def closed(self, rows: Sequence[agent_pb2.RequestClosed], governed: bool) -> None:
        """Count the requests as treated or as control. While no decisions are made, they are neither."""
        for closed in rows:
            if governed:
                self._count(closed)
            self.requests.leave(closed.slot)
            self._ended_by.pop(closed.slot, None)
            self._leave(closed.slot)

    def _count(self, closed: agent_pb2.RequestClosed) -> None:
        slot, experiment = closed.slot, self.experiment
        if experiment is None or slot not in self._cohorts:
            return
        # An abort without a client that has gone may be a stop string, which does no harm.
        known = closed.reason != agent_pb2.FINISH_REASON_ABORT or closed.client_gone
        names = experiment.closed(
            self._table,
            slot,
            closed.reason if known else agent_pb2.FINISH_REASON_UNSPECIFIED,
            self.requests.by_slot.get(slot),
            ended_by=self._ended_by.get(slot),
            cohort=self._cohorts[slot],
            before=self._before.get(slot),
            handed_over=closed.handed_over,
        )
        self.verdicts.update(names)
