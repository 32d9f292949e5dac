"""Replays a recorded session through `Session` under another policy, with the code that decides live.

The engine's steps stay as recorded, because it is unknown how other decisions would have changed them. The module plays
the agent: decisions that the recorded session made too get their recorded outcomes; other forces, caps, tiers and plans
count as applied at once; another EAT probe gets a sample that was recorded in its place, or no sample. The module draws
no conclusions. The module uses no clock, only the recorded times.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import UTC
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.common.enum_names import reason_name
from meridian_control.decisions.request_table import THINK
from meridian_control.decisions.token_rows import (
    FLAG_BOUNDARY,
    FLAG_END,
    FLAG_FROM_OUTPUT,
    FLAG_GOES_ON,
    FLAG_MARKER,
    FLAG_PARAGRAPH,
    TAKE_BACK_SHIFT,
)
from meridian_control.fleet.recording import given_freezes
from meridian_control.policy import formats as forms
from meridian_control.policy import model as schema
from meridian_control.session.merged_steps import ages_ms, step_of
from meridian_control.session.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import datetime

    from meridian_control.policy.model import Policy
    from meridian_control.policy.removed_fields import Found

# Field of the directives with the decisions of each kind.
LISTS = {"force": "forces", "cap": "caps", "tier": "tiers", "probe": "probes", "hand_over": "hand_overs"}
# Fields of a plan that limit a step, if the plan has them.
LIMITS: tuple[Any, ...] = ("think_per_step", "output_per_step", "prefill_tokens_per_step")
PLACES = {agent_pb2.PLACEMENT_SENTENCE: FLAG_BOUNDARY, agent_pb2.PLACEMENT_PARAGRAPH: FLAG_PARAGRAPH}


class ThinkEnd(NamedTuple):
    """An end of thinking: its reason, and the thinking tokens known when the end was decided."""

    reason: str
    think_tokens: int


class ReplayedCap(NamedTuple):
    """A cap, None for no cap, and the answer reserve that came with it."""

    max_think_tokens: int | None = None
    shadow: bool = False
    reserve_tokens: int = 0


@dataclass(slots=True)
class ReplayResult:
    """The decisions of one policy for one request. caps: by the thinking tokens from which on each is in force."""

    force: ThinkEnd | None = None
    shadowed: dict[str, int] = field(default_factory=dict)
    caps: dict[int, ReplayedCap] = field(default_factory=lambda: {0: ReplayedCap()})


class ReplayedShare(NamedTuple):
    """The limits of steps in the newest dispatch plan; None for no limit."""

    think_per_step: int | None = None
    output_per_step: int | None = None
    prefill_tokens_per_step: int | None = None
    max_skip_steps: int = 0
    hold_admission: bool = False


class ReplayedDecision(NamedTuple):
    """A decision in a message. `slot` is None for a plan; `content` has the serialized decision without its id."""

    kind: str
    decision_id: int
    slot: int | None
    message: Any
    content: bytes


class PendingProbe(NamedTuple):
    """A probe without a result yet: its decision id, its placement, and the thinking tokens when it was requested."""

    decision_id: int
    placement: int
    think_tokens: int


class _Came:
    """The steps in which a report's recorded probes and outcomes came, and the steps of their replacements.

    Raises BadReport if the report's columns of merged steps do not fit the report.
    """

    def __init__(self, report: agent_pb2.StepReport) -> None:
        ages_ms(report)
        self.last = max(report.steps, 1) - 1
        self.recorded_probes = step_of(report, "probes", len(report.probes.slot))
        self.recorded_outcomes = step_of(report, "outcomes", len(report.outcomes))
        self.probes: list[int] = []
        self._outcomes: list[tuple[int, agent_pb2.DecisionOutcome]] = []

    def add(self, step: int, outcome: agent_pb2.DecisionOutcome) -> None:
        """Add an outcome to the report, with the step in which the outcome came."""
        self._outcomes.append((step, outcome))

    def tell(self, report: agent_pb2.StepReport) -> None:
        """Write the outcomes into the report in the order of their steps, with the steps if the report merges steps."""
        self._outcomes.sort(key=lambda came: came[0])
        report.outcomes.extend(outcome for _, outcome in self._outcomes)
        if not report.HasField("merged"):
            return
        for column, steps in (
            (report.merged.probes, self.probes),
            (report.merged.outcomes, [step for step, _ in self._outcomes]),
        ):
            column[:] = np.bincount(np.array(steps, np.int64), minlength=report.steps).tolist()


@dataclass
class _EqualAnswers:
    """Counts equal trial answers in a row over the samples that this run gets, which may be fewer than the recorded.

    count: the newest count, 0 before the first sample. left_out: recorded samples since then that this run did not get.
    """

    count: int = 0
    left_out: int = 0

    def take(self, recorded: int) -> int:
        """Return the count for the next sample of this run. recorded: the count over all recorded samples."""
        if not (self.count or self.left_out):
            self.count = recorded
        else:
            self.count = self.count + 1 if self.count and recorded >= self.left_out + 2 else 1
        self.left_out = 0
        return self.count


class SessionReplay:
    """Replays one recorded session under one policy; with `policy` None, under the recorded policies."""

    def __init__(self, hello: fleet_pb2.TraceRecord, policy: Policy | None) -> None:
        self._policy, self._joined_late = policy, hello.joined_late
        self.session = Session(hello.session_id, hello.up.hello, _time(hello))
        if policy is not None:
            # The engine's earlier refusals concern other policies, so the replay forgets these refusals.
            self.session.delivery.refused.clear()
        # Recorded decisions without an outcome, by id: the id of the same decision in this run.
        self._same: dict[int, int] = {}
        # `_asked`: by slot, the probe that only this run requested. `_lent`: by recorded id, the placement of a probe
        # that only the recorded session requested.
        self._asked: dict[int, PendingProbe] = {}
        self._lent: dict[int, int] = {}
        # Ids and outcomes of decisions that only this run made; the next report brings the outcomes.
        self._due: list[tuple[int, agent_pb2.Outcome.ValueType]] = []
        # The policy given last, and this run's nonces of settings and freezes by the recorded nonces.
        self.given = policy or schema.Policy()
        # The removed fields with an effect of their own that the newest recorded policy sets.
        self.removed: list[Found] = []
        self._nonces: dict[int, int] = {}
        self._freeze_nonces: dict[int, int] = {}
        self._nonce = 0
        # By slot: the flags of the thinking's sentence ends by thinking tokens, and the number of thinking tokens.
        self._flags: dict[int, dict[int, int]] = {}
        self._think: dict[int, int] = {}
        self._equal: defaultdict[int, _EqualAnswers] = defaultdict(_EqualAnswers)
        self.fates: dict[int, ReplayResult] = {}
        self.ranks: dict[int, int] = {}
        self.share = ReplayedShare()
        # Whether the plan in force orders requests instead of keeping vLLM's order.
        self.orders = False
        self.changed = True
        self.decisions: Counter[str] = Counter()
        # Counts of recorded decisions, of recorded decisions that this run made too, of EAT probes, and of EAT samples.
        self.recorded = self.reproduced = self.probes = self.samples = 0

    def take(self, event: fleet_pb2.TraceRecord, said: list[agent_pb2.ConnectResponse]) -> None:
        """Give one recorded event to this run's session; `said` has the recorded session's responses to the event.

        A trace has no record of the given freezes, so this run derives them from the freeze message to the agent.
        """
        kind, responses = event.up.WhichOneof("message"), list[agent_pb2.ConnectResponse]()
        if event.HasField("policy"):
            responses = self._give(event, said)
        elif event.down.HasField("freeze"):
            (freeze,) = self.session.on_freezes(given_freezes(event), _time(event))
            self._freeze_nonces[event.down.freeze.nonce] = freeze.freeze.nonce
        elif event.HasField("answering_pool"):
            self.session.on_answering_engines(event.answering_pool.engines)
        elif event.HasField("budget_stages"):
            self.session.on_budget_stages(dict(event.budget_stages.stages))
        elif event.HasField("pressure_levels"):
            self.session.on_pressure_levels(event.pressure_levels.levels)
        elif event.HasField("end_thinking"):
            ended = self.session.on_end_thinking(event.end_thinking.request_id, "", _time(event))
            responses = ended.responses if ended is not None else []
        elif kind == "freeze_status":
            confirmed = deepcopy(event.up)
            confirmed.freeze_status.nonce = self._freeze_nonces.get(event.up.freeze_status.nonce, 0)
            responses = self.session.on_message(confirmed, _time(event))
        elif kind == "settings_status":
            status = deepcopy(event.up)
            status.settings_status.nonce = self._nonces.get(event.up.settings_status.nonce, self._nonce)
            responses = self.session.on_message(status, _time(event))
        elif kind == "snapshot":
            for state in (self._asked, self._flags, self._think, self._equal, self.fates):
                state.clear()
            for opened in event.up.snapshot.requests:
                self._open(opened)
            responses = self.session.on_message(event.up, _time(event))
        else:
            responses = self.session.on_message(self._translated(event.up), _time(event))
        self._pair(_decisions(responses), _decisions(said))
        ranks = self.session.table.ranks_by_slot()
        self.changed, self.ranks = self.changed or ranks != self.ranks, ranks

    def _give(
        self, event: fleet_pb2.TraceRecord, said: list[agent_pb2.ConnectResponse]
    ) -> list[agent_pb2.ConnectResponse]:
        recorded, self.removed = forms.from_older_proto(event.policy.policy)
        self.given = self._policy or recorded
        sent = self.session.on_policy(event.policy.revision, self.given)
        if not sent:
            # The engine cannot honour the policy; `session.nack_error` has the reason.
            return []
        self._nonce = sent[0].settings.nonce
        for response in said:
            if response.HasField("settings"):
                self._nonces[response.settings.nonce] = self._nonce
        if not self._joined_late or self.session.policy is not None:
            return []
        # The agent had applied the policy before the recording began.
        taken = agent_pb2.SettingsStatus(nonce=self._nonce, revision=event.policy.revision)
        return self.session.on_message(agent_pb2.ConnectRequest(settings_status=taken), _time(event))

    def _translated(self, up: agent_pb2.ConnectRequest) -> agent_pb2.ConnectRequest:
        """Return a recorded message as the agent would have sent it to this run."""
        message = deepcopy(up)
        report, came = message.step, _Came(up.step)
        report.ClearField("outcomes")
        report.ClearField("probes")
        for opened in report.opened:
            self._open(opened)
        self._count(report.tokens)
        for decision_id, outcome in self._due:
            came.add(0, agent_pb2.DecisionOutcome(decision_id=decision_id, outcome=outcome))
        self._due = []
        self._probes(up.step.probes, report, came)
        for outcome_, step in zip(up.step.outcomes, came.recorded_outcomes, strict=True):
            self._lent.pop(outcome_.decision_id, None)
            if (same := self._same.pop(outcome_.decision_id, None)) is not None:
                settled = agent_pb2.DecisionOutcome()
                settled.CopyFrom(outcome_)
                settled.decision_id = same
                came.add(step, settled)
        for closed in report.closed:
            self.changed = True
            if (ask := self._asked.pop(closed.slot, None)) is not None:
                gone = agent_pb2.OUTCOME_REQUEST_GONE
                came.add(came.last, agent_pb2.DecisionOutcome(decision_id=ask.decision_id, outcome=gone))
        came.tell(report)
        return message

    def _open(self, opened: agent_pb2.RequestOpened) -> None:
        slot = opened.slot
        self._asked.pop(slot, None)
        self._equal.pop(slot, None)
        self._flags[slot], self._think[slot], self.fates[slot] = {}, opened.think_tokens, ReplayResult()
        self.changed = True

    def _count(self, tokens: agent_pb2.TokenColumns) -> None:
        """Note the places of sentence ends, with thinking tokens counted as in the request table."""
        for slot, phase, flags in zip(tokens.slot, tokens.phase, tokens.flags, strict=False):
            if phase == THINK and slot in self._think:
                if flags & FLAG_GOES_ON and not flags & FLAG_END:
                    self._flags[slot].pop(self._think[slot], None)
                back = 0 if flags & FLAG_FROM_OUTPUT else flags >> TAKE_BACK_SHIFT
                self._think[slot] += (not flags & FLAG_MARKER) - back
                if flags & FLAG_BOUNDARY:
                    self._flags[slot][self._think[slot]] = flags

    def _probes(self, recorded: agent_pb2.ProbeColumns, out: agent_pb2.StepReport, came: _Came) -> None:
        """Give each recorded sample to the same probe of this run, or to another probe that the sample fits."""
        for row, (recorded_id, slot) in enumerate(zip(recorded.decision_id, recorded.slot, strict=True)):
            decision_id = self._same.get(recorded_id)
            if decision_id is None and (ask := self._asked.get(slot)) is not None:
                if not self._fits(ask, slot, recorded.think_tokens[row], self._lent.get(recorded_id)):
                    self._equal[slot].left_out += 1
                    continue
                decision_id = ask.decision_id
                del self._asked[slot]
                carried_out = agent_pb2.DecisionOutcome(
                    decision_id=decision_id,
                    outcome=agent_pb2.OUTCOME_APPLIED,
                    think_tokens=recorded.think_tokens[row],
                )
                came.add(came.recorded_probes[row], carried_out)
            if decision_id is None:
                self._equal[slot].left_out += 1
                continue
            self.samples += 1
            if recorded.same_answer:
                out.probes.same_answer.append(self._equal[slot].take(recorded.same_answer[row]))
            for name in ("slot", "think_tokens", "eat_nats", "cost_tokens", "empty_answer"):
                column = getattr(recorded, name)
                if column:
                    getattr(out.probes, name).append(column[row])
            out.probes.decision_id.append(decision_id)
            came.probes.append(came.recorded_probes[row])

    def _fits(self, ask: PendingProbe, slot: int, think_tokens: int, placement: int | None) -> bool:
        if think_tokens < ask.think_tokens:
            return False
        wanted = PLACES.get(ask.placement, 0)  # type: ignore[call-overload]
        return not wanted or ask.placement == placement or bool(self._flags.get(slot, {}).get(think_tokens, 0) & wanted)

    def _pair(self, mine: list[ReplayedDecision], recorded: list[ReplayedDecision]) -> None:
        """Pair equal decisions of this run and of the recording, and note the decisions without a partner."""
        left: dict[tuple[str, bytes], list[int]] = {}
        for made in recorded:
            left.setdefault((made.kind, made.content), []).append(made.decision_id)
        self.recorded += len(recorded)
        for made in mine:
            self._note(made)
            if same := left.get((made.kind, made.content)):
                self._same[same.pop(0)] = made.decision_id
                self.reproduced += 1
            elif made.kind == "probe" and made.slot is not None:
                tokens = int(self.session.table.think_tokens[made.slot])
                self._asked[made.slot] = PendingProbe(made.decision_id, made.message.placement, tokens)
            elif made.kind != "hand_over":
                # The request goes on as recorded, so a handover that only this run made gets no outcome.
                shadow = getattr(made.message, "shadow", False)
                outcome = agent_pb2.OUTCOME_SHADOWED if shadow else agent_pb2.OUTCOME_APPLIED
                self._due.append((made.decision_id, outcome))
        unpaired = {number for numbers in left.values() for number in numbers}
        for made in recorded:
            if made.kind == "probe" and made.decision_id in unpaired:
                self._lent[made.decision_id] = made.message.placement

    def _note(self, made: ReplayedDecision) -> None:
        """Note a decision of this run, as the agent would receive it."""
        message = made.message
        self.decisions[made.kind] += 1
        if made.kind == "plan":
            self.orders = not (message.shadow or message.stock)
            self.share = _share(message)
            self.changed = True
            return
        self.probes += made.kind == "probe"
        fate = self.fates.get(made.slot) if made.slot is not None else None
        if fate is None or made.slot is None:
            return
        think_tokens = int(self.session.table.think_tokens[made.slot])
        if made.kind == "cap":
            cap = message.max_think_tokens if message.HasField("max_think_tokens") else None
            fate.caps[think_tokens] = ReplayedCap(cap, message.shadow, message.answer_reserve_tokens)
        elif made.kind == "force":
            place = ThinkEnd(reason_name(message.reason), think_tokens)
            if message.shadow:
                fate.shadowed.setdefault(*place)
            else:
                fate.force = fate.force or place


def _share(plan: agent_pb2.DispatchPlan) -> ReplayedShare:
    limits: dict[str, Any] = {}
    if not (plan.shadow or plan.stock):
        given = [name for name in LIMITS if plan.HasField(name)]
        limits = {name: getattr(plan, name) for name in given} | {"max_skip_steps": plan.max_skip_steps}
    return ReplayedShare(**limits, hold_admission=plan.hold_admission)


def _decisions(responses: list[agent_pb2.ConnectResponse]) -> list[ReplayedDecision]:
    return [made for response in responses for made in _of(response.directives)]


def _of(directives: agent_pb2.Directives) -> Iterator[ReplayedDecision]:
    found: list[tuple[str, Any]] = [(kind, one) for kind, name in LISTS.items() for one in getattr(directives, name)]
    found += [("plan", directives.plan)] if directives.HasField("plan") else []
    for kind, message in found:
        content = type(message)()
        content.CopyFrom(message)
        content.ClearField("decision_id")
        if kind == "hand_over":
            content.ClearField("ref")
        text = content.SerializeToString(deterministic=True)
        yield ReplayedDecision(kind, message.decision_id, None if kind == "plan" else message.slot, message, text)


def _time(record: fleet_pb2.TraceRecord) -> datetime:
    return record.time.ToDatetime(UTC)
