"""Handles the stream of one engine: messages of the agent come in, responses go out.

The session passes each message to the part that it concerns, and decides when to respond. `report_intake` takes reports
in, the parts of the capabilities make decisions (see `part`), `decision_ledger` keeps the decisions, and
`settings_delivery` and `freeze_state` keep the settings and freezes that were sent. The session does no I/O and has no
clock: time is passed in, so that a recorded stream replays exactly. A session runs on one event loop, one call at a
time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common import report_bounds
from meridian_control.common.enum_names import reason_name
from meridian_control.common.errors import BadReport, InvalidRequest
from meridian_control.common.slices import at_once
from meridian_control.engine.decision_ledger import Ledger
from meridian_control.engine.effective_policies import EffectivePolicies
from meridian_control.engine.freeze_state import FreezeState
from meridian_control.engine.operator_ends import ENDING, OperatorEnd, state_of
from meridian_control.engine.part import Stream, Turn
from meridian_control.engine.report_intake import Intake, gauges_of
from meridian_control.engine.request_table import RequestTable
from meridian_control.engine.settings_delivery import Delivery
from meridian_control.engine.shadow_comparison import Comparison
from meridian_control.engine.snapshot_parts import SnapshotParts
from meridian_control.engine.totals import Totals
from meridian_control.policy.effects import shortest_lease_s
from meridian_control.policy.model import Policy
from meridian_control.policy.shortening_kinds import acts_on_thinking

if TYPE_CHECKING:
    from collections.abc import Iterable
    from datetime import datetime

    from meridian.v1 import fleet_pb2

    from meridian_control.common.opened_request import OpenedRequest
    from meridian_control.common.slices import Sliced
    from meridian_control.engine.freeze_state import Freeze
    from meridian_control.engine.part import AnyPart, PartMaker
    from meridian_control.journal.journal import Journal
    from meridian_control.journal.records import Decision
    from meridian_control.policy.model import Who

# A report that leads to no decision is answered after ACK_INTERVAL_S seconds, or after ACK_LEASE_SHARE of the shortest
# lease if that is sooner, so that the agent knows that the control plane receives its reports.
ACK_INTERVAL_S, ACK_LEASE_SHARE = 1.0, 0.25
# About the memory of a decision without an outcome, with the values that its rule saw.
DECISION_BYTES = 640
# Largest number of bytes of Directives; gRPC accepts four times as many. A plan, which stays whole, has at most 8 bytes
# for each request of the largest engine.
DIRECTIVES_BYTES = 1 << 20
# Lists of decisions in the order in which an agent takes them in, which is that of the fields; the plan comes last.
KINDS = tuple(field.name for field in agent_pb2.Directives.DESCRIPTOR.fields if field.is_repeated)

Out = list[agent_pb2.ConnectResponse]


class Session:
    """The control plane's side of one stream, after its Hello.

    `journal` records the session's decisions. `shadow` compares rules in shadow with real ends of thinking, over all
    streams of the engine. `parts` makes the parts of the capabilities in the stream, in the order in which they decide;
    what a part shares with other streams, its maker gives it.
    """

    def __init__(
        self,
        session_id: str,
        hello: agent_pb2.Hello,
        now: datetime,
        journal: Journal | None = None,
        shadow: Comparison | None = None,
        *,
        parts: Iterable[PartMaker],
    ) -> None:
        report_bounds.check_hello(hello)
        hello.DiscardUnknownFields()
        self.session_id, self.hello, self.connected_at = session_id, hello, now
        # The policy that comes into force first sets the length of the entropy window.
        self.table = RequestTable(1)
        self.totals = Totals()
        self.shadow = shadow or Comparison()
        self.shadow.new_stream()
        self.delivery = Delivery(hello, self.totals)
        self.freezing = FreezeState(hello.freeze)
        self.agent_state = hello.state
        # Whether the agent has announced that its engine shuts down.
        self.shuts_down = False
        self.gauges: agent_pb2.StepReport | None = None
        self.reported_at: datetime | None = None
        self._journal = journal
        if journal is not None:
            journal.is_frozen = self.freezing.frozen
        self._policies = EffectivePolicies(self.table, hello, self.shadow)
        self._ledger = Ledger(self.table, self._policies, self.totals, self.shadow, journal)
        self._stream = Stream(
            session_id,
            now,
            hello,
            table=self.table,
            policies=self._policies,
            ledger=self._ledger,
            totals=self.totals,
            freezing=self.freezing,
            journal=journal,
            makers=parts,
        )
        self._parts = self._stream.parts
        self.delivery.reads_signals = self._parts.reads_signals
        self._intake = Intake(self._stream, self.totals, self.shadow)
        self._snapshot_parts = SnapshotParts()
        self._answered_at = now
        self._ack_interval_s = ACK_INTERVAL_S

    # ------------------------------------------------------------------------------------------------------------ state

    @property
    def held_bytes(self) -> int:
        """About the memory that the session takes."""
        table, parts = self.table, self._snapshot_parts
        return table.column_bytes + table.text_bytes + DECISION_BYTES * len(self._ledger.open) + parts.held_bytes

    @property
    def identity(self) -> tuple[str, str]:
        """The engine's id and its incarnation, which together name one start of the engine process."""
        return self._stream.identity

    @property
    def policy(self) -> Policy | None:
        """The policy that is in force on the engine since the agent's ACK; None before the first ACK."""
        return self._policies.policy

    @property
    def acked_revision(self) -> int:
        return self._policies.revision

    @property
    def revision(self) -> int:
        """The newest revision that the engine should have."""
        return self.delivery.revision

    @property
    def nack_error(self) -> str:
        return self.delivery.nack_error

    @property
    def frozen(self) -> bool:
        return self.freezing.frozen

    @property
    def open_decisions(self) -> dict[int, Decision]:
        return self._ledger.open

    @property
    def last_decision(self) -> dict[int, Decision]:
        return self._ledger.last

    @property
    def lease_s(self) -> float:
        """Seconds for which the agent keeps obeying earlier decisions after the stream has ended."""
        return (self.policy or Policy()).fallback.lease_ms / 1000

    @property
    def last_good_wanted(self) -> int:
        """Revision to pass to `on_last_good`, 0 for none.

        A revision is needed if the agent refused the newest one and this session has no policy in force.
        """
        delivery = self.delivery
        governed = not delivery.nack_error or self.policy is not None or delivery.pending is not None
        return 0 if governed or delivery.agent_revision in delivery.refused else delivery.agent_revision

    @property
    def given(self) -> list[tuple[int, Policy]]:
        """Revision and policy of the settings in force, and of the settings that were sent but not yet confirmed."""
        in_force = [(self.acked_revision, self.policy)] if self.policy is not None else []
        return in_force + ([self.delivery.pending] if self.delivery.pending is not None else [])

    def cap_in_force(self, slot: int) -> int:
        """Return the cap, in thinking tokens, that the agent enforces for a live request; 0 for none."""
        return max(0, self.table.cap_in_force(slot)) if self._governed and self._stream.ends_thinking else 0

    def changed_values(self, slot: int) -> dict[str, tuple[object, str]]:
        """Return the values of the policy that hold for a live request because something else than the policy changes
        them, by dotted path, each with what does; empty while no decision is made."""
        return self._policies.changed(slot) if self._governed and self.policy is not None else {}

    def rank_in_force(self, slot: int) -> int:
        """Return the rank by which the engine orders a live request; 0 for all in vLLM's own order."""
        policy = self.policy if self._governed else None
        orders = policy is not None and acts_on_thinking(policy) and policy.scheduler.strategy != "stock"
        return max(0, int(self.table.rank[slot])) if orders else 0

    def tier_in_force(self, slot: int) -> int:
        """Return the eviction tier of a live request; unspecified if none is in force."""
        policy = self.policy.kv_memory if self._governed and self.policy is not None else None
        return int(self.table.tier[slot]) if policy is not None and policy.enabled and not policy.shadow else 0

    @property
    def _governed(self) -> bool:
        """Whether the agent obeys decisions."""
        return not (self.hello.fault or self.frozen)

    def part(self, kind: type[AnyPart]) -> AnyPart:
        """Return the part of this class in the stream, for the part of the same capability over all engines. Raises
        LookupError if the stream has none."""
        return self._parts.of(kind)

    def part_records(self) -> list[fleet_pb2.TraceRecord]:
        """Return what has reached the parts from outside of the stream and is still in force, for a recording that
        begins now. The records have neither time nor ids."""
        return [record for part in self._parts.all for record in part.records()]

    # ----------------------------------------------------------------------------------------------------------- events

    def on_policy(self, revision: int, policy: Policy) -> Out:
        """Bring a policy into force: send its settings to the agent, and decide by the policy from the agent's ACK on.

        A policy that the engine has refused, or that needs a capability which the engine lacks, is not sent, and the
        policy in force stays.
        """
        settings = self.delivery.offer(revision, policy)
        return [agent_pb2.ConnectResponse(settings=settings)] if settings is not None else []

    def on_last_good(self, revision: int, policy: Policy) -> Out:
        """Send the settings that are in force on the agent since an earlier stream; it has refused a newer revision."""
        return [agent_pb2.ConnectResponse(settings=self.delivery.send(revision, policy))]

    def on_freezes(self, freezes: tuple[Freeze, ...], now: datetime) -> Out:
        """Set the freezes that match this engine; the session makes no decision until the agent has thawed."""
        return [agent_pb2.ConnectResponse(freeze=self.freezing.set_freezes(freezes, now))]

    def on_record(self, record: fleet_pb2.TraceRecord) -> None:
        """Take in what has reached a part from outside of the stream, as a recording has it."""
        for part in self._parts.all:
            part.recorded(record)

    def on_end_thinking(self, request_id: str, reason: str, now: datetime) -> OperatorEnd | None:
        """End a request's thinking because an operator asks for it; None if no live request has this id.

        A request has at most one forced end under way, so no decision is made while another one has no outcome.
        """
        if self._journal is not None:
            self._journal.now = now
        if (slot := self.table.slot_of(request_id)) is None:
            return None
        newest, think_tokens = self._ledger.forces.get(slot), int(self.table.think_tokens[slot])
        frozen = self.frozen or self.freezing.void
        state = state_of(self.hello, self._deciding, frozen, int(self.table.phase[slot]), newest)
        if state != ENDING:
            return OperatorEnd(state, newest, think_tokens, [])
        self.table.note_end(slot, agent_pb2.FORCE_REASON_OPERATOR, shadow=False)
        decision_id = self._ledger.make("force", reason_name(agent_pb2.FORCE_REASON_OPERATOR), slot)
        newest = self.open_decisions[decision_id]
        newest.operator_reason = reason
        directives = agent_pb2.Directives(step=self._ledger.step)
        directives.forces.add(decision_id=decision_id, slot=slot, reason=agent_pb2.FORCE_REASON_OPERATOR)
        return OperatorEnd(state, newest, think_tokens, [agent_pb2.ConnectResponse(directives=directives)])

    def who(self, opened: OpenedRequest) -> Who:
        """Return the facts about a live request that overrides match on."""
        return self._policies.who(opened)

    def on_message(self, message: agent_pb2.ConnectRequest, now: datetime) -> Out:
        """Take in a message of the agent and return the responses. Raises InvalidRequest if it breaks the contract;
        every other exception is an error of the control plane itself."""
        return at_once(self.taking_in(message, now))

    def taking_in(self, message: agent_pb2.ConnectRequest, now: datetime) -> Sliced[Out]:
        """Do what `on_message` does, in slices. No other event may reach the session before the work is done, but
        everything may be read at each pause."""
        kind = message.WhichOneof("message")
        if self._journal is not None:
            self._journal.now = now
        self.rest(now)
        try:
            if kind == "snapshot":
                return (yield from self._on_snapshot_part(message.snapshot, now))
            if kind == "step":
                self._snapshot_parts.check_complete()
                return (yield from self._on_step(message.step, now))
            if kind == "heartbeat":
                self.shuts_down = message.heartbeat.last
                return self._answer(agent_pb2.ConnectResponse(), now, awaited=True)
            if kind == "settings_status":
                return (yield from self._on_settings_status(message.settings_status, now))
            if kind == "freeze_status":
                return (yield from self._on_freeze_status(message.freeze_status, now))
        except BadReport as error:
            raise BadReport(error.violation.message, str(kind)) from error
        raise InvalidRequest("message", f"must be a report, a snapshot or a settings status; got {kind}")

    def rest(self, now: datetime) -> None:
        """Let the parts take in the time that has passed. The fleet calls it about once a second, too, because an
        engine without requests sends no reports."""
        self._parts.rest(now)

    def closing(self, now: datetime, followed: bool = False) -> Sliced[None]:
        """End the session, because its stream has ended. followed: whether a newer one of the same process is open."""
        if self._journal is not None:
            self._journal.now = now
        # Nothing pauses before this, so what the parts learn is still true.
        self._parts.stream_ended(now, followed)
        yield from self._ledger.close()
        if self._journal is not None:
            yield from self._journal.lost()

    def _on_freeze_status(self, status: agent_pb2.FreezeStatus, now: datetime) -> Sliced[Out]:
        has_thawed = self.freezing.take_confirmation(status)
        if self._journal is not None and self.freezing.confirmed:
            yield from self._journal.frozen(self.freezing.frozen, self.freezing.why)
        if not has_thawed:
            return []
        self._parts.revise()
        return (yield from self._decide(now))

    def _on_settings_status(self, status: agent_pb2.SettingsStatus, now: datetime) -> Sliced[Out]:
        if (accepted := self.delivery.answered(status)) is None:
            return []
        revision, policy = accepted
        self.agent_state = agent_pb2.AGENT_STATE_READY
        shortest_s = shortest_lease_s(policy.fallback, policy.scheduler, policy.entropy, policy.kv_memory)
        self._ack_interval_s = min(ACK_INTERVAL_S, ACK_LEASE_SHARE * shortest_s)
        before, rules = self.policy, self._policies.compared_rules(policy)
        self.shadow.applied(revision, rules)
        self._parts.policy_begins(revision, policy, now)
        yield from self._policies.apply(revision, policy)
        self._parts.policy_changed(now)
        self._parts.revise()
        if before is None or self._policies.compared_rules(before) != rules:
            # A rule that was in shadow under the old policy may be in force under the new one, so its ends are
            # forgotten.
            under_way = self._ledger.ends_under_way()
            self.table.forget_ends()
            self._ledger.go_on(under_way)
        return (yield from self._decide(now))

    def _on_snapshot_part(self, part: agent_pb2.Snapshot, now: datetime) -> Sliced[Out]:
        """Take in a snapshot with its last part. Before that the agent only learns that its messages arrive."""
        report_bounds.check_step(part.step)
        if (snapshot := self._snapshot_parts.take_part(part)) is not None:
            return (yield from self._on_snapshot(snapshot, now))
        return self._answer(agent_pb2.ConnectResponse(), now)

    def _on_snapshot(self, snapshot: agent_pb2.Snapshot, now: datetime) -> Sliced[Out]:
        # A freeze has ended all forced ends, so none is kept after it.
        under_way = [] if self.freezing.void else self._ledger.ends_under_way()
        self.freezing.void = False
        awaited = yield from self._intake.begin_anew(snapshot, now)
        self._ledger.go_on(under_way)
        yield from self._ledger.forget_gone()
        self._ledger.step = snapshot.step
        response = yield from self._ends_of_thinking(now)
        return (yield from self._respond(now, response, awaited=awaited))

    def _on_step(self, report: agent_pb2.StepReport, now: datetime) -> Sliced[Out]:
        report_bounds.check(report)
        if not report.steps:
            yield from self._ledger.settle(report.outcomes)
            return []
        self.gauges, self.reported_at = gauges_of(report, self.gauges), now
        self.agent_state = report.state or self.agent_state
        yield from self._parts.report_begins(now, self._deciding is not None)
        yield from self._intake.take_report(report, now)
        self._ledger.step = report.step
        response = yield from self._ends_of_thinking(now, reported=True)
        yield from self._intake.finish_report(report, governed=self._deciding is not None)
        responses = yield from self._respond(now, response, reported=True, awaited=len(report.probes.slot) > 0)
        self.table.end_report()
        return responses

    def _decide(self, now: datetime) -> Sliced[Out]:
        """Make decisions from the current state, without a report, and return the responses."""
        response = yield from self._ends_of_thinking(now)
        return (yield from self._respond(now, response))

    def _ends_of_thinking(self, now: datetime, reported: bool = False) -> Sliced[agent_pb2.ConnectResponse]:
        self._ledger.check()
        self._end_void()
        response = agent_pb2.ConnectResponse()
        if (policy := self._deciding) is not None:
            yield from self._parts.ends(self._turn(policy, response, now, reported))
        return response

    @property
    def _deciding(self) -> Policy | None:
        """The policy by which decisions are made; None while no decision is made."""
        return self.policy if self._governed and not self.freezing.void else None

    def _end_void(self) -> None:
        """Note that no snapshot need come after a freeze if the engine has no requests."""
        if self.freezing.void:
            self.freezing.void = bool(self.table.live.any())

    def _turn(self, policy: Policy, response: agent_pb2.ConnectResponse, now: datetime, reported: bool) -> Turn:
        return Turn(policy, self._policies.in_use(), response.directives, reported, self._stream.clock_ms(now))

    def _respond(
        self, now: datetime, response: agent_pb2.ConnectResponse, *, reported: bool = False, awaited: bool = False
    ) -> Sliced[Out]:
        """Add all other decisions to the ends of thinking and return the response, if one is due.

        reported: whether a report led to the decisions. awaited: whether the agent waits for a response.
        """
        self._end_void()
        if (policy := self._deciding) is not None:
            yield from self._parts.decide(self._turn(policy, response, now, reported))
        return self._answer(response, now, awaited)

    def _answer(self, response: agent_pb2.ConnectResponse, now: datetime, awaited: bool = False) -> Out:
        """Return the response if it has decisions, if the agent waits for it, or if the newest response is old. A
        large response is split into several."""
        directives = response.directives
        decided = (size := directives.ByteSize()) > 0
        directives.step = self._ledger.step
        # If the wall clock was set back, the difference is negative and the report is answered.
        recent = 0 <= (now - self._answered_at).total_seconds() < self._ack_interval_s
        # The agent may hold requests until it has the response to their probes, even if no decision follows from them.
        if not decided and not awaited and recent:
            return []
        self._answered_at = now
        return [response] if size <= DIRECTIVES_BYTES else parts_of(directives)


def parts_of(directives: agent_pb2.Directives) -> Out:
    """Return the same decisions, in the order in which an agent takes them in, as messages of at most DIRECTIVES_BYTES
    each."""
    parts = [agent_pb2.Directives(step=directives.step)]
    used = empty = parts[0].ByteSize()
    for kind in KINDS:
        for decision in getattr(directives, kind):
            size = decision.ByteSize() + 8
            if used + size > DIRECTIVES_BYTES and used > empty:
                parts.append(agent_pb2.Directives(step=directives.step))
                used = empty
            getattr(parts[-1], kind).append(decision)
            used += size
    if directives.HasField("plan"):
        if used + directives.plan.ByteSize() + 8 > DIRECTIVES_BYTES and used > empty:
            parts.append(agent_pb2.Directives(step=directives.step))
        parts[-1].plan.CopyFrom(directives.plan)
    return [agent_pb2.ConnectResponse(directives=part) for part in parts]
