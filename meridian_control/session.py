"""One engine's stream: messages in, messages out.

Owns the engine's request table, its decisions and their outcomes. No I/O and no clock: time is passed in, so that a
recorded stream replays exactly. Used from one event loop, one call at a time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from meridian.v1 import agent_pb2

from meridian_control import capabilities, dispatch, eviction, termination
from meridian_control.errors import InvalidRequest
from meridian_control.policy import ModelPolicy, Policy, Who
from meridian_control.requests import (
    FLAG_BY_CAP,
    FLAG_END,
    FLAG_FORCED,
    MAX_SLOTS,
    NO_CAP,
    THINK,
    UNTOLD,
    RequestTable,
)
from meridian_control.shadow import Comparison
from meridian_control.signals import add_eat_sample
from meridian_control.totals import Totals
from meridian_control.words import how, outcome_name, phase_name, reason_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from numpy.typing import NDArray

    from meridian_control.decision_log import Journal, Logged
    from meridian_control.freezes import Freeze

# A report without decisions is answered all the same after this long, or this part of the shortest lease, so that the
# agent knows it is heard.
ACK_INTERVAL_S, ACK_LEASE_SHARE = 1.0, 0.25

PLACEMENTS = {
    "anywhere": agent_pb2.PLACEMENT_ANYWHERE,
    "sentence": agent_pb2.PLACEMENT_SENTENCE,
    "paragraph": agent_pb2.PLACEMENT_PARAGRAPH,
}
FINISHED = (agent_pb2.FINISH_REASON_STOP, agent_pb2.FINISH_REASON_LENGTH)
# An answer is long that has LONG_ANSWER times the median tokens of the newest USUAL_ANSWERS answers after natural ends,
# once MIN_ANSWERS of them are known.
LONG_ANSWER, USUAL_ANSWERS, MIN_ANSWERS = 4, 128, 16
MAX_HELLO_BYTES = 64 << 10
# Decisions without an outcome; four for each request of the largest engine are more than any agent leaves open.
MAX_OPEN_DECISIONS = 4 * MAX_SLOTS
# A step that takes longer than this was interrupted.
MAX_STEP_MS = 600_000
# Kinds of decision that end thinking.
ENDING = ("force", "cap")
# Kinds that are applied as soon as they arrive; caps and probes wait for their place, tiers for the request's end.
AT_ONCE = ("force", "plan")

Out = list[agent_pb2.ConnectResponse]
Among: TypeAlias = "NDArray[np.bool_] | None"


@dataclass(slots=True)
class Decision:
    """One decision, from when it is made until its outcome is known."""

    decision_id: int
    kind: str
    reason: str
    slot: int | None = None
    request_id: str = ""
    # Newest step of the engine when it was made.
    step: int = 0
    outcome: agent_pb2.Outcome.ValueType = agent_pb2.OUTCOME_UNSPECIFIED
    # In the decision log, where the request's life is kept.
    logged: Logged | None = None

    @property
    def counted_as(self) -> str:
        return f"force/{self.reason}" if self.kind == "force" else self.kind


class Session:
    """The control plane's side of one stream, after its Hello. `journal` is where its decisions are kept."""

    def __init__(self, session_id: str, hello: agent_pb2.Hello, now: datetime, journal: Journal | None = None) -> None:
        if not hello.engine_id:
            raise InvalidRequest("hello.engine_id", "must not be empty")
        if (size := hello.ByteSize()) > MAX_HELLO_BYTES:
            raise InvalidRequest("hello", f"must be at most {MAX_HELLO_BYTES} bytes; got {size}")
        self.session_id, self.hello, self.connected_at = session_id, hello, now
        # The window's length comes with the first policy.
        self.table = RequestTable(1)
        self.totals = Totals()
        self.journal = journal
        self.shadow = Comparison()
        self.open_decisions: dict[int, Decision] = {}
        self.last_decision: dict[int, Decision] = {}
        self.last_report: agent_pb2.StepReport | None = None
        self.reported_at: datetime | None = None
        self.policy: Policy | None = None
        # The policy, and with overrides what it comes to for the live requests; the table's `group` points here.
        self._policies: list[Policy] = []
        self.revision = self.acked_revision = 0
        self.nack_error = ""
        # Revision that the agent has in force, as it says, and those it has refused.
        self.agent_revision = hello.revision
        self.refused = dict(hello.refused)
        self._pending: tuple[int, int, Policy] | None = None
        self.agent_state = hello.state
        # The freezes that are to hold, and whether the agent has answered; it may be frozen before that, and after.
        self.freezes: tuple[Freeze, ...] = ()
        self.frozen, self.frozen_locally = hello.freeze.frozen, hello.freeze.locally
        self.freeze_confirmed = hello.freeze.locally
        # The agent has dropped what it was told, and sends a snapshot once it has thawed.
        self._void = False
        self._nonce = self._freeze_nonce = self._decision_id = 0
        # Newest step that the table knows of.
        self._step = 0
        self._cost = dispatch.StepCost()
        self._share = dispatch.Share()
        self._hold = False
        # The policy changed since the last decisions: what agents were told is gone over again.
        self._review = False
        self._answered_at = now
        self._ack_interval_s = ACK_INTERVAL_S
        # Lengths of the newest answers after natural ends, in tokens.
        self._usual_answers: deque[int] = deque(maxlen=USUAL_ANSWERS)

    @property
    def identity(self) -> tuple[str, str]:
        """One start of one engine process."""
        return self.hello.engine_id, self.hello.incarnation

    @property
    def lease_s(self) -> float:
        """How long the agent goes on with what was decided once the stream has ended."""
        return (self.policy or Policy()).fallback.lease_ms / 1000

    # ---------------------------------------------------------------------------------------------------- what comes

    def on_policy(self, revision: int, policy: Policy) -> Out:
        """A policy to bring into force: sent to the agent, obeyed here from its ACK on.

        One that this engine has refused, or cannot honour, is not sent, and what is in force stays.
        """
        self.revision, self.nack_error = revision, self.refused.get(revision, "")
        if not self.nack_error and (error := capabilities.missing(policy, self.hello)):
            self.totals.nacks += 1
            self.nack_error = self.refused[revision] = error
        if self.nack_error:
            return []
        return self._send(revision, policy)

    def on_last_good(self, revision: int, policy: Policy) -> Out:
        """What the agent has in force already, from an earlier stream: given again where the newest was refused."""
        return self._send(revision, policy)

    @property
    def last_good_wanted(self) -> int:
        """Revision to give by `on_last_good`, 0 for none: the newest was refused, and none is in force here."""
        governed = not self.nack_error or self.policy is not None or self._pending is not None
        return 0 if governed or self.agent_revision in self.refused else self.agent_revision

    @property
    def given(self) -> list[tuple[int, Policy]]:
        """What is in force, and what is under way to the agent."""
        found = [(self.acked_revision, self.policy)] if self.policy is not None else []
        return found + ([self._pending[1:]] if self._pending is not None else [])

    def _send(self, revision: int, policy: Policy) -> Out:
        self._nonce += 1
        self._pending = (self._nonce, revision, policy)
        model = self._model(policy)
        settings = agent_pb2.Settings(
            revision=revision,
            nonce=self._nonce,
            think_start_token_ids=model.think_start_token_ids,
            think_end_token_ids=model.think_end_token_ids,
            reasoning_parser=model.reasoning_parser,
            supports_think_disable=model.supports_think_disable,
            closing_text=model.closing_text,
            eat_answer_prefix=model.eat_answer_prefix,
            observe_entropy=termination.needs_signals(policy) and self.hello.capabilities.token_entropy,
            report_interval_steps=policy.telemetry.report_interval_steps,
            lease_ms=policy.fallback.lease_ms,
            scheduler_lease_ms=policy.scheduler.lease_ms,
            entropy_lease_ms=policy.entropy.lease_ms,
            kv_memory_lease_ms=policy.kv_memory.lease_ms,
        )
        if policy.scheduler.enabled and not policy.scheduler.shadow and self.hello.capabilities.force_end:
            settings.max_think_tokens = policy.scheduler.max_think_tokens
        return [agent_pb2.ConnectResponse(settings=settings)]

    def _model(self, policy: Policy) -> ModelPolicy:
        return policy.model.get(self.hello.model) or ModelPolicy()

    def on_message(self, message: agent_pb2.ConnectRequest, now: datetime) -> Out:
        """Answer one message of the agent's. Raises InvalidRequest when it breaks the contract."""
        kind = message.WhichOneof("message")
        if self.journal is not None:
            self.journal.now = now
        try:
            if kind == "step":
                return self._on_step(message.step, now)
            if kind == "snapshot":
                return self._on_snapshot(message.snapshot, now)
            if kind == "settings_status":
                return self._on_settings_status(message.settings_status, now)
            if kind == "freeze_status":
                return self._on_freeze_status(message.freeze_status, now)
        except ValueError as error:
            raise InvalidRequest(str(kind), str(error)) from error
        raise InvalidRequest("message", f"must be a report, a snapshot or a settings status; got {kind}")

    def on_freezes(self, freezes: tuple[Freeze, ...], now: datetime) -> Out:
        """The freezes that match this engine now: nothing is decided from here on until the agent has thawed."""
        self.freezes, self.freeze_confirmed = freezes, False
        if freezes and not self.frozen:
            self.frozen = self._void = True
        self._freeze_nonce += 1
        return [agent_pb2.ConnectResponse(freeze=self.freeze_message(now))]

    def freeze_message(self, now: datetime) -> agent_pb2.Freeze:
        """What the agent is told of the freezes that match it now; nonce 0 where it was told nothing."""
        last = max(self.freezes, key=lambda freeze: freeze.end_time, default=None)
        remaining_ms = 0 if last is None else max(0, math.ceil((last.end_time - now).total_seconds() * 1e3))
        reason = "" if last is None else last.reason
        return agent_pb2.Freeze(nonce=self._freeze_nonce, remaining_ms=remaining_ms, reason=reason)

    def _on_freeze_status(self, status: agent_pb2.FreezeStatus, now: datetime) -> Out:
        if status.nonce != self._freeze_nonce:
            return []
        self.freeze_confirmed, self.frozen, self.frozen_locally = True, status.frozen, status.locally
        if self.frozen:
            return []
        self._review = True
        return self._respond(self._step, now)

    def _on_settings_status(self, status: agent_pb2.SettingsStatus, now: datetime) -> Out:
        if self._pending is None or status.nonce != self._pending[0]:
            return []
        (_, revision, policy), self._pending = self._pending, None
        self.agent_revision = status.revision
        if status.error:
            self.totals.nacks += 1
            self.nack_error = self.refused[revision] = status.error
            return []
        self.agent_state = agent_pb2.AGENT_STATE_READY
        leases = (policy.fallback, policy.scheduler, policy.entropy, policy.kv_memory)
        shortest_s = min(section.lease_ms for section in leases if section.lease_ms) / 1000
        self._ack_interval_s = min(ACK_INTERVAL_S, ACK_LEASE_SHARE * shortest_s)
        self.policy, self.acked_revision, self._review = policy, revision, True
        self.table.set_window(policy.entropy.rpdi_window_tokens)
        self._policies = [policy]
        self.table.group[:] = 0
        for slot, opened in self.table.requests():
            self._assign(slot, opened)
        # What was only shadowed under the old policy may be due under the new one.
        under_way = [d.slot for d in self.open_decisions.values() if d.kind == "force" and d.slot is not None]
        self.table.end_decided[~np.isin(np.arange(len(self.table.info)), under_way)] = 0
        self.table.shadow_decided[:] = 0
        self.shadow.applied(revision, policy)
        return self._respond(self._step, now)

    def _on_snapshot(self, snapshot: agent_pb2.Snapshot, now: datetime) -> Out:
        table = self.table
        table.clear()
        self._void = False
        for opened in snapshot.requests:
            table.open(opened, self._clock_ms(now))
            self._assign(opened.slot, opened)
        self.shadow.new_stream()
        if self.journal is not None:
            self.journal.snapshot(snapshot.requests, self._sample_ratio)
        self.last_decision = {s: d for s, d in self.last_decision.items() if self._concerns(d)}
        self._step = snapshot.step
        return self._respond(self._step, now)

    def _clock_ms(self, now: datetime) -> float:
        """Milliseconds since the stream began."""
        return (now - self.connected_at).total_seconds() * 1e3

    def _on_step(self, report: agent_pb2.StepReport, now: datetime) -> Out:
        if not report.steps:
            for outcome in report.outcomes:
                self._settle(outcome)
            return []
        table = self.table
        self.last_report, self.reported_at = report, now
        self.agent_state = report.state or self.agent_state
        self.totals.reports += 1
        self.totals.requests += len(report.opened)
        now_ms = self._clock_ms(now)
        for opened in report.opened:
            self._open(opened, now_ms)
        phases = table.phase.copy()
        self.totals.token_events += table.add_tokens(report.tokens, now_ms)
        self.totals.output_itl.add(table.output_itl_ms / 1e3)
        self.totals.ttot.add(table.ttot_ms / 1e3)
        ended = self._count_ends(report.tokens)
        self._add_probes(report.probes)
        for slot in report.preempted:
            if table.holds(slot):
                table.preempted[slot] = True
                self.totals.preempted[phase_name(int(table.phase[slot]))] += 1
        for slot in report.resumed:
            if table.holds(slot):
                table.preempted[slot] = False
        for outcome in report.outcomes:
            self._settle(outcome, report.step)
        self._compare([*ended, *(c.slot for c in report.closed if c.reason in FINISHED and self._thinks(c.slot))])
        if self.journal is not None:
            self.journal.reported(report, table, phases)
        for closed in report.closed:
            self._count_answer(table, closed)
            table.close(closed.slot)
            self.last_decision.pop(closed.slot, None)
        if (waiting := len(self.open_decisions)) > MAX_OPEN_DECISIONS:
            raise ValueError(f"leaves {waiting} decisions without an outcome; at most {MAX_OPEN_DECISIONS} may be")
        rows, took_ms = len(report.tokens.slot), report.step_time_ms
        if report.steps == 1 and rows + report.prefill_tokens and 0 <= took_ms <= MAX_STEP_MS:
            self._cost.add(rows, report.prefill_tokens, took_ms)
        self._step = report.step
        return self._respond(self._step, now, awaited=len(report.probes.slot) > 0)

    def _open(self, opened: agent_pb2.RequestOpened, now_ms: float) -> None:
        self.table.open(opened, now_ms)
        self._assign(opened.slot, opened)
        self.shadow.opened(opened.slot)
        if self.journal is not None:
            self.journal.opened(opened, self._sample_ratio)

    def _compare(self, ended: list[int]) -> None:
        """Hold the rules in shadow against what became of the thinking in these slots, if any had a policy."""
        for slot in ended if self.policy is not None else ():
            cap = int(self.table.max_think_tokens[slot]) if self.table.cap_shadow[slot] else NO_CAP
            think_tokens = int(self.table.think_tokens[slot])
            for (section, reason), saved in self.shadow.ended(slot, think_tokens, self._policy_of(slot), cap).items():
                self.totals.shadow_saved[section, reason or "any"] += saved
                self.totals.shadow_think_tokens[section] += 0 if reason else think_tokens

    def _assign(self, slot: int, opened: agent_pb2.RequestOpened) -> None:
        """Find the policy that holds for a request."""
        if self.policy is None or not self.policy.override:
            return
        labels = dict(self.hello.labels)
        own = self.policy.of(Who(opened.model, opened.tenant, opened.slo_class, opened.effort, labels))
        if own not in self._policies:
            self._policies.append(own)
        self.table.group[slot] = self._policies.index(own)

    def _thinks(self, slot: int) -> bool:
        return self.table.holds(slot) and bool(self.table.phase[slot] == THINK)

    @property
    def _sample_ratio(self) -> float:
        return self.policy.telemetry.decision_log_sample_ratio if self.policy is not None else 1.0

    def _policy_of(self, slot: int) -> Policy:
        return self._policies[int(self.table.group[slot])]

    def _groups(self) -> Iterator[tuple[Policy, Among]]:
        """Each policy in use with the requests it holds for, [slots]; None for all."""
        if len(self._policies) == 1:
            yield self._policies[0], None
            return
        for index, policy in enumerate(self._policies):
            among = self.table.live & (self.table.group == index)
            if among.any():
                yield policy, among

    def _add_probes(self, probes: agent_pb2.ProbeColumns) -> None:
        table = self.table
        # Agents of the first version do not say whether the answer would be empty.
        empty_answers = probes.empty_answer or [False] * len(probes.slot)
        columns = probes.decision_id, probes.slot, probes.eat_nats, empty_answers
        if len({len(column) for column in columns}) != 1:
            raise ValueError("probe columns must have one length")
        for decision_id, slot, eat_nats, empty_answer in zip(*columns, strict=True):
            decision = self.open_decisions.get(decision_id)
            if self.policy and decision and decision.slot == slot and self._concerns(decision):
                add_eat_sample(table, slot, eat_nats, self._policy_of(slot).entropy.ema_alpha)
                table.empty_answer[slot] = empty_answer
                if decision.logged is not None:
                    decision.logged.measured_eat_nats = eat_nats

    def _settle(self, report: agent_pb2.DecisionOutcome, step: int | None = None) -> None:
        """Note an outcome, and where it came with a step, how many steps old the decision was."""
        decision = self.open_decisions.pop(report.decision_id, None)
        if decision is None:
            self.totals.unknown_outcomes += 1
            return
        self._finish(decision, report.outcome, report.think_tokens, report.detail)
        if step is not None and decision.kind in AT_ONCE and report.outcome == agent_pb2.OUTCOME_APPLIED:
            self.totals.staleness_steps.add(np.array([float(step - decision.step)]))
        if decision.kind == "probe" and decision.slot is not None and self._concerns(decision):
            self.table.probe_open[decision.slot] = False

    def _concerns(self, decision: Decision) -> bool:
        """Whether the request a decision was about still lives in its slot."""
        info = self.table.info[decision.slot] if decision.slot is not None else None
        return info is not None and info.request_id == decision.request_id

    def _finish(
        self, decision: Decision, outcome: agent_pb2.Outcome.ValueType, think_tokens: int = 0, detail: str = ""
    ) -> None:
        decision.outcome = outcome
        if self.journal is not None and decision.logged is not None:
            self.journal.settled(decision.logged, outcome, think_tokens, detail)
        name = outcome_name(outcome)
        self.totals.outcomes[name] += 1
        self.totals.settled[decision.counted_as, name] += 1
        if decision.kind not in ENDING or name not in ("applied", "shadowed"):
            return
        if name == "shadowed":
            self.totals.ends[f"{decision.reason}_shadowed"] += 1
        if decision.slot is not None and self._concerns(decision):
            self.last_decision[decision.slot] = decision
            if name == "shadowed" and decision.kind == "force":
                self.shadow.fired(decision.slot, decision.reason, think_tokens)

    def _count_answer(self, table: RequestTable, closed: agent_pb2.RequestClosed) -> None:
        """Count what a finished request made of its thinking; an aborted one says nothing."""
        slot = closed.slot
        if not table.holds(slot) or closed.reason not in FINISHED:
            return
        if think_tokens := int(table.think_tokens[slot]):
            self.totals.think_tokens.add(np.array([think_tokens]))
        if self._thinks(slot):
            self.totals.answers["unended"] += 1
        elif table.ended[slot]:
            length, usual = int(table.output_tokens[slot]), self._usual_answers
            known = len(usual) >= MIN_ANSWERS
            is_long = known and length > LONG_ANSWER * statistics.median(usual)
            answer = "empty" if length <= 1 else "long" if is_long else "answered"
            self.totals.answers[f"{answer}_after_{how(bool(table.forced[slot]))}"] += 1
            if not table.forced[slot]:
                usual.append(length)

    def _count_ends(self, tokens: agent_pb2.TokenColumns) -> list[int]:
        """Count why thinking ended, from what the agent did, whether or not a decision of ours was behind it.

        Returns the slots of live requests in which it did.
        """
        ended = []
        flags = np.fromiter(tokens.flags, np.int64, len(tokens.flags))
        for row in np.flatnonzero(flags & FLAG_END).tolist():
            slot, table = tokens.slot[row], self.table
            if flags[row] & FLAG_BY_CAP:
                reason = "hard_cap"
            elif flags[row] & FLAG_FORCED and table.holds(slot):
                reason = reason_name(int(table.end_decided[slot]))
                if table.max_think_tokens[slot] >= 0 and not table.cap_shadow[slot]:
                    left = table.max_think_tokens[slot] - table.think_tokens[slot]
                    self.totals.below_cap[reason] += max(0, int(left))
            else:
                reason = "natural"
            self.totals.ends[reason] += 1
            if table.holds(slot):
                if table.ended[slot]:
                    self.totals.answers[f"reentry_after_{how(bool(table.forced[slot]))}"] += 1
                table.ended[slot], table.forced[slot] = True, bool(flags[row] & FLAG_FORCED)
                ended.append(slot)
                if self.journal is not None:
                    self.journal.ended(slot, reason, table)
        return ended

    def close(self, now: datetime) -> None:
        """The stream is gone: what is still open can no longer be reported."""
        if self.journal is not None:
            self.journal.now = now
        for decision in self.open_decisions.values():
            self._finish(decision, agent_pb2.OUTCOME_AGENT_OFF)
        self.open_decisions.clear()
        if self.journal is not None:
            self.journal.lost()

    # -------------------------------------------------------------------------------------------------- what is decided

    def _respond(self, step: int, now: datetime, awaited: bool = False) -> Out:
        directives = agent_pb2.Directives()
        self._void = self._void and bool(self.table.live.any())
        if self.policy is not None and not (self.hello.fault or self.frozen or self._void):
            self._decide(self.policy, self.table, directives, self._clock_ms(now))
        decided = bool(directives.ListFields())
        directives.step = step
        # A wall clock that was set back does not silence us.
        recent = 0 <= (now - self._answered_at).total_seconds() < self._ack_interval_s
        # Requests may be held for what is decided from their probes, if only that nothing is.
        if not decided and not awaited and recent:
            return []
        self._answered_at = now
        return [agent_pb2.ConnectResponse(directives=directives)]

    def _decide(self, policy: Policy, table: RequestTable, out: agent_pb2.Directives, now_ms: float) -> None:
        can, review, groups = self.hello.capabilities, self._review, list(self._groups())
        self._review = False
        if can.force_end:
            self._decide_caps(policy, table, out, review)
            for own, among in groups:
                self._decide_ends(own, table, out, among)
        if can.eat_probe:
            for own, among in groups:
                self._decide_probes(own, table, out, among)
        if can.dispatch:
            self._decide_plan(policy, table, out, review, now_ms)
        self._decide_tiers(policy, table, out, review)

    def _decide_caps(self, policy: Policy, table: RequestTable, out: agent_pb2.Directives, review: bool) -> None:
        scheduler = policy.scheduler
        extend = table.empty_answer & table.cap_probed & ~table.extended & (table.phase == THINK)
        table.extended[extend] = True
        for slot in np.flatnonzero(table.live & (review | extend | (table.max_think_tokens == UNTOLD))).tolist():
            info, own = table.info[slot], self._policy_of(slot).scheduler
            assert info is not None
            cap = termination.cap(own, info, bool(table.extended[slot])) if scheduler.enabled else NO_CAP
            told = cap, scheduler.shadow
            if told == (table.max_think_tokens[slot], table.cap_shadow[slot]):
                continue
            first = table.max_think_tokens[slot] in (UNTOLD, NO_CAP)
            table.max_think_tokens[slot], table.cap_shadow[slot] = told
            if cap != NO_CAP:
                why = "empty_answer" if extend[slot] else "hard_cap"
                made = self._decision("cap", why, slot, scheduler.shadow)
                out.caps.add(decision_id=made, slot=slot, max_think_tokens=cap, shadow=scheduler.shadow)
            elif not first:
                out.caps.add(decision_id=self._decision("cap", "lifted", slot), slot=slot)

    def _decide_tiers(self, policy: Policy, table: RequestTable, out: agent_pb2.Directives, review: bool) -> None:
        memory = policy.kv_memory
        if review:
            for slot in eviction.reusable_again(memory, table).tolist():
                made = self._decision("tier", "reusable", slot)
                out.tiers.add(decision_id=made, slot=slot, tier=agent_pb2.EVICTION_TIER_REUSABLE)
        if memory.enabled:
            for slot in eviction.newly_unreachable(self.hello.capabilities, table).tolist():
                made = self._decision("tier", "unreachable", slot, memory.shadow)
                tier = agent_pb2.EVICTION_TIER_UNREACHABLE
                out.tiers.add(decision_id=made, slot=slot, tier=tier, shadow=memory.shadow)

    def _decide_ends(self, policy: Policy, table: RequestTable, out: agent_pb2.Directives, among: Among) -> None:
        for slot, reason in termination.ends(policy, table, among):
            shadow = termination.is_shadowed(policy, reason)
            if shadow:
                table.shadow_decided[slot] |= 1 << reason
            else:
                table.end_decided[slot] = reason
            made = self._decision("force", reason_name(reason), slot, shadow)
            out.forces.add(decision_id=made, slot=slot, reason=reason, shadow=shadow)

    def _decide_probes(self, policy: Policy, table: RequestTable, out: agent_pb2.Directives, among: Among) -> None:
        hold_ms = 0 if policy.entropy.shadow else policy.entropy.eat_hold_ms
        gated = policy.entropy.eat_probe_max_rank > 0
        placement = PLACEMENTS["anywhere" if gated else policy.entropy.eat_probe_placement]
        for slot in termination.probes_due(policy, table, among).tolist():
            table.next_probe_tokens[slot] = table.think_tokens[slot] + policy.entropy.eat_probe_interval_tokens
            self._probe(slot, "eat", placement, out).hold_ms = hold_ms
        for slot in termination.cap_probes_due(policy, table, among).tolist():
            table.cap_probed[slot] = True
            self._probe(slot, "empty_answer", agent_pb2.PLACEMENT_ANYWHERE, out)

    def _probe(
        self, slot: int, reason: str, where: agent_pb2.Placement.ValueType, out: agent_pb2.Directives
    ) -> agent_pb2.EatProbe:
        self.table.probe_open[slot] = True
        return out.probes.add(decision_id=self._decision("probe", reason, slot), slot=slot, placement=where)

    def _decide_plan(
        self, policy: Policy, table: RequestTable, out: agent_pb2.Directives, review: bool, now_ms: float
    ) -> None:
        scheduler, memory = policy.scheduler, policy.kv_memory
        kv_tokens = self.hello.num_blocks * self.hello.block_size_tokens
        hold = eviction.hold_admission(memory, table, kv_tokens) and not memory.shadow
        share, slots, ranks = dispatch.Share(), np.zeros(0, np.intp), list[int]()
        stock = not scheduler.enabled or scheduler.strategy == "stock"
        if not stock:
            if review:
                table.rank[:] = UNTOLD
            budgets = dispatch.budgets(scheduler, table, self._cost)
            slots, ranks = dispatch.changed_ranks(scheduler, table, budgets, now_ms)
            share = dispatch.share(scheduler, table, budgets, self._cost, self._share)
        if not len(slots) and (share, hold) == (self._share, self._hold) and not review:
            return
        self._share, self._hold = share, hold
        plan = out.plan
        plan.decision_id = self._decision("plan", "stock" if stock else scheduler.strategy)
        plan.slot.extend(slots.tolist())
        plan.rank.extend(ranks)
        for name, limit in asdict(share).items():
            if limit is not None:
                setattr(plan, name, limit)
        plan.hold_admission, plan.shadow, plan.stock = hold, scheduler.shadow, stock

    def _decision(self, kind: str, reason: str, slot: int | None = None, shadow: bool = False) -> int:
        self._decision_id += 1
        info = self.table.info[slot] if slot is not None else None
        made = Decision(self._decision_id, kind, reason, slot, info.request_id if info else "", self._step)
        self.open_decisions[made.decision_id] = made
        if self.journal is not None and slot is not None:
            self.journal.decided(made, shadow, self.table, self._policy_of(slot), self.acked_revision)
        if slot is not None and kind != "probe":
            self.last_decision[slot] = made
        self.totals.decisions[made.counted_as] += 1
        return made.decision_id
