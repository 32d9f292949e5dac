"""One engine's stream: messages in, messages out.

Owns which of its parts a message concerns, and when something is answered. `report_intake` takes reports in, `decider`
says what follows, `decision_ledger` keeps the decisions, `settings_delivery` and `freeze_state` what the agent was
given. No I/O and no clock: time is passed in, so that a recorded stream replays. One event loop, one call at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meridian.v1 import agent_pb2

from meridian_control.common.errors import InvalidRequest
from meridian_control.decisions.request_table import RequestTable
from meridian_control.policy.model import Policy
from meridian_control.session.counters import Totals
from meridian_control.session.decider import Decider
from meridian_control.session.decision_ledger import Ledger
from meridian_control.session.effective_policies import Groups
from meridian_control.session.freeze_state import FreezeState
from meridian_control.session.report_intake import Intake
from meridian_control.session.settings_delivery import Delivery
from meridian_control.session.shadow_comparison import Comparison

if TYPE_CHECKING:
    from datetime import datetime

    from meridian_control.decision_log.journal import Journal
    from meridian_control.decision_log.records import Decision
    from meridian_control.session.freeze_state import Freeze

# A report without decisions is answered all the same after this long, or this part of the shortest lease, so that the
# agent knows it is heard.
ACK_INTERVAL_S, ACK_LEASE_SHARE = 1.0, 0.25
MAX_HELLO_BYTES = 64 << 10
# They are logged, and labels of metrics.
MAX_ID_CHARS = 512

Out = list[agent_pb2.ConnectResponse]


class Session:
    """The control plane's side of one stream, after its Hello.

    `journal` is where its decisions are kept, `shadow` what is compared on this engine over its streams.
    """

    def __init__(
        self,
        session_id: str,
        hello: agent_pb2.Hello,
        now: datetime,
        journal: Journal | None = None,
        shadow: Comparison | None = None,
    ) -> None:
        _check(hello)
        self.session_id, self.hello, self.connected_at = session_id, hello, now
        # The window's length comes with the first policy.
        self.table = RequestTable(1)
        self.totals = Totals()
        self.shadow = shadow or Comparison()
        self.shadow.new_stream()
        self.delivery = Delivery(hello, self.totals)
        self.freezing = FreezeState(hello.freeze)
        self.agent_state = hello.state
        self.last_report: agent_pb2.StepReport | None = None
        self.reported_at: datetime | None = None
        self._journal = journal
        self._groups = Groups(self.table, hello)
        self._ledger = Ledger(self.table, self._groups, self.totals, self.shadow, journal)
        self._intake = Intake(self.table, self._groups, self._ledger, self.totals, shadow=self.shadow, journal=journal)
        self._decider = Decider(hello, self.table, self._groups, self._ledger)
        self._answered_at = now
        self._ack_interval_s = ACK_INTERVAL_S

    # ---------------------------------------------------------------------------------------------------- what is seen

    @property
    def identity(self) -> tuple[str, str]:
        """One start of one engine process."""
        return self.hello.engine_id, self.hello.incarnation

    @property
    def policy(self) -> Policy | None:
        """In force on the engine since its ACK; None for none yet."""
        return self._groups.policy

    @property
    def acked_revision(self) -> int:
        return self._groups.revision

    @property
    def revision(self) -> int:
        """The newest that the engine was to have."""
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
        """How long the agent goes on with what was decided once the stream has ended."""
        return (self.policy or Policy()).fallback.lease_ms / 1000

    @property
    def last_good_wanted(self) -> int:
        """Revision to give by `on_last_good`, 0 for none: the newest was refused, and none is in force here."""
        delivery = self.delivery
        governed = not delivery.nack_error or self.policy is not None or delivery.pending is not None
        return 0 if governed or delivery.agent_revision in delivery.refused else delivery.agent_revision

    @property
    def given(self) -> list[tuple[int, Policy]]:
        """The settings in force, and those under way to the agent."""
        found = [(self.acked_revision, self.policy)] if self.policy is not None else []
        return found + ([self.delivery.pending] if self.delivery.pending is not None else [])

    # ---------------------------------------------------------------------------------------------------- what comes

    def on_policy(self, revision: int, policy: Policy) -> Out:
        """A policy to bring into force: sent to the agent, obeyed here from its ACK on.

        One that this engine has refused, or cannot honour, is not sent, and what is in force stays.
        """
        settings = self.delivery.offer(revision, policy)
        return [agent_pb2.ConnectResponse(settings=settings)] if settings is not None else []

    def on_last_good(self, revision: int, policy: Policy) -> Out:
        """Note the settings that the agent has in force already, from an earlier stream: given again where the newest
        was refused."""
        return [agent_pb2.ConnectResponse(settings=self.delivery.send(revision, policy))]

    def on_freezes(self, freezes: tuple[Freeze, ...], now: datetime) -> Out:
        """The freezes that match this engine now: nothing is decided from here on until the agent has thawed."""
        return [agent_pb2.ConnectResponse(freeze=self.freezing.give(freezes, now))]

    def on_message(self, message: agent_pb2.ConnectRequest, now: datetime) -> Out:
        """Answer one message of the agent's. Raises InvalidRequest when it breaks the contract."""
        kind = message.WhichOneof("message")
        if self._journal is not None:
            self._journal.now = now
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

    def close(self, now: datetime) -> None:
        """The stream is gone."""
        if self._journal is not None:
            self._journal.now = now
        self._ledger.close()
        if self._journal is not None:
            self._journal.lost()

    def _on_freeze_status(self, status: agent_pb2.FreezeStatus, now: datetime) -> Out:
        if not self.freezing.answered(status):
            return []
        self._decider.review = True
        return self._decide(now)

    def _on_settings_status(self, status: agent_pb2.SettingsStatus, now: datetime) -> Out:
        if (taken := self.delivery.answered(status)) is None:
            return []
        revision, policy = taken
        self.agent_state = agent_pb2.AGENT_STATE_READY
        leases = (policy.fallback, policy.scheduler, policy.entropy, policy.kv_memory)
        shortest_s = min(section.lease_ms for section in leases if section.lease_ms) / 1000
        self._ack_interval_s = min(ACK_INTERVAL_S, ACK_LEASE_SHARE * shortest_s)
        self._groups.apply(revision, policy)
        self._decider.review = True
        # An end that was only shadowed under the old policy may be due under the new one.
        under_way = self._ends_under_way()
        self.table.forget_ends()
        self._go_on(under_way)
        self.shadow.applied(revision, policy)
        return self._decide(now)

    def _on_snapshot(self, snapshot: agent_pb2.Snapshot, now: datetime) -> Out:
        # Nothing goes on that a freeze has ended.
        under_way = [] if self.freezing.void else self._ends_under_way()
        self.freezing.void = False
        self._intake.begin_anew(snapshot, self._clock_ms(now))
        self._go_on(under_way)
        self._ledger.forget_gone()
        self._ledger.step = snapshot.step
        return self._decide(now)

    def _ends_under_way(self) -> list[tuple[Decision, int]]:
        """Forces without an outcome, with the reasons of the ends that were decided with them."""
        forces = [d for d in self.open_decisions.values() if d.kind == "force" and self._ledger.concerns(d)]
        return [(d, int(self.table.end_decided[d.slot])) for d in forces]

    def _go_on(self, under_way: list[tuple[Decision, int]]) -> None:
        """Take up again the ends that the engine still carries out, by the requests that still live."""
        for decision, reason in under_way:
            if decision.slot is not None and self._ledger.concerns(decision):
                self.table.restore_end(decision.slot, reason)

    def _on_step(self, report: agent_pb2.StepReport, now: datetime) -> Out:
        if not report.steps:
            for outcome in report.outcomes:
                self._ledger.settle(outcome)
            return []
        self.last_report, self.reported_at = report, now
        self.agent_state = report.state or self.agent_state
        self._intake.take(report, self._clock_ms(now))
        self._ledger.step = report.step
        directives = self._ends_of_thinking(reported=True)
        self._intake.finish(report)
        self._decider.learn(report)
        return self._respond(now, directives, awaited=len(report.probes.slot) > 0)

    def _decide(self, now: datetime) -> Out:
        """The directives that follow from the state of things, without a report."""
        return self._respond(now, self._ends_of_thinking(reported=False))

    def _ends_of_thinking(self, reported: bool) -> agent_pb2.Directives:
        self._ledger.check()
        directives = agent_pb2.Directives()
        if (policy := self._deciding) is not None:
            self._decider.end_thinking(policy, directives, reported)
        return directives

    @property
    def _deciding(self) -> Policy | None:
        """The policy to decide by; None while nothing is decided."""
        freezing = self.freezing
        freezing.void = freezing.void and bool(self.table.live.any())
        return None if self.hello.fault or freezing.frozen or freezing.void else self.policy

    def _respond(self, now: datetime, directives: agent_pb2.Directives, awaited: bool = False) -> Out:
        """With the ends of thinking, all else that is decided. awaited: an answer is."""
        if (policy := self._deciding) is not None:
            self._decider.decide(policy, directives, self._clock_ms(now))
        decided = bool(directives.ListFields())
        directives.step = self._ledger.step
        # A wall clock that was set back does not silence us.
        recent = 0 <= (now - self._answered_at).total_seconds() < self._ack_interval_s
        # Requests may be held for what is decided from their probes, if only that nothing is.
        if not decided and not awaited and recent:
            return []
        self._answered_at = now
        return [agent_pb2.ConnectResponse(directives=directives)]

    def _clock_ms(self, now: datetime) -> float:
        """Milliseconds since the stream began."""
        return (now - self.connected_at).total_seconds() * 1e3


def _check(hello: agent_pb2.Hello) -> None:
    """Raises InvalidRequest."""
    if not hello.engine_id:
        raise InvalidRequest("hello.engine_id", "must not be empty")
    for name in ("engine_id", "incarnation"):
        said = getattr(hello, name)
        if len(said) > MAX_ID_CHARS or not said.isprintable():
            raise InvalidRequest(
                f"hello.{name}", f"must have at most {MAX_ID_CHARS} characters, all printable; got {said[:20]!a}"
            )
    if (size := hello.ByteSize()) > MAX_HELLO_BYTES:
        raise InvalidRequest("hello", f"must be at most {MAX_HELLO_BYTES} bytes; got {size}")
