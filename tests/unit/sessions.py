"""A session connected to a fake agent that checks every message, for the tests of sessions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core.phases import FLAG_SENTENCE
from meridian_agent.core.step_record import StepRecord
from meridian_agent.link.messages import step_report as merge
from meridian_control.capabilities.budgets.stream import EngineBudgets
from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.common.slices import at_once
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.engine.operator_ends import OperatorEnd
from meridian_control.engine.session import Session
from meridian_control.journal.journal import Journal
from meridian_control.journal.log import DecisionLog
from meridian_control.journal.messages import explain_request
from meridian_control.policy.model import Policy
from tests.fakes.agent import ALL, FakeAgent, Script, StreamChecker, hello
from tests.fakes.engine import TEXT
from tests.fakes.sentences import ends_by_id
from tests.fakes.tables import policy

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
EARLY = {"min_think_tokens": 0}
CALIBRATED = {
    "shadow": False,
    "ema_alpha": 1.0,
    "eat_warmup_samples": 4,
    "eat_probe_interval_tokens": 2,
    "rpdi_threshold": 0.0,
}


@dataclass
class Stream:
    """A session connected to a fake agent; `now` moves only when a test moves it."""

    agent: FakeAgent = field(default_factory=FakeAgent)
    capabilities: agent_pb2.Capabilities = field(default_factory=lambda: ALL)
    hello_fields: dict[str, Any] = field(default_factory=dict)
    now: datetime = NOW
    revision: int = 0
    session_id: str = "s"
    # The session's messages, and policies with their revisions, with their times.
    trace: list[tuple[datetime, agent_pb2.ConnectRequest | tuple[int, Policy]]] = field(default_factory=list)
    responses: list[agent_pb2.ConnectResponse] = field(default_factory=list)
    log: DecisionLog = field(default_factory=DecisionLog)

    def __post_init__(self) -> None:
        self.agent.checker.capabilities = self.capabilities
        self.hello = hello(capabilities=self.capabilities, **self.hello_fields)
        journal = Journal(self.log, self.hello.engine_id, self.hello.incarnation, self.session_id, self.now)
        self.session = Session(self.session_id, self.hello, self.now, journal, parts=STREAM_PARTS)
        self.agent.receive(agent_pb2.ConnectResponse(welcome=agent_pb2.Welcome(session_id=self.session_id)))

    def deliver(self, responses: list[agent_pb2.ConnectResponse]) -> None:
        self.responses += responses
        for response in responses:
            self.agent.receive(response)

    def pump(self) -> list[agent_pb2.ConnectResponse]:
        """Exchange messages until session and agent have sent all of theirs; return what the session sent."""
        before = len(self.responses)
        while said := self.agent.heard():
            for message in said:
                self.trace.append((self.now, message))
                self.deliver(self.session.on_message(message, self.now))
        return self.responses[before:]

    def apply(self, new: Policy) -> list[agent_pb2.ConnectResponse]:
        self.revision += 1
        self.trace.append((self.now, (self.revision, new)))
        before = len(self.responses)
        self.deliver(self.session.on_policy(self.revision, new))
        self.pump()
        return self.responses[before:]

    def end(self, name: str, reason: str = "") -> OperatorEnd:
        """Let an operator end the thinking of a request."""
        ended = self.session.on_end_thinking(name, reason, self.now)
        assert ended is not None
        self.deliver(ended.responses)
        return ended

    def stages(self, **stages: int) -> None:
        """Set the stages of thinking budgets."""
        at_once(self.session.part(EngineBudgets).set_stages(stages))

    def thinks_under(self, stages: dict[int, int], think: int, answer: int) -> None:
        """Run request `a` to its end while the stage of budget `b` changes before these steps."""
        for step in range(think + answer + 15):
            if step in stages:
                self.stages(b=stages[step])
            if step == 0:
                self.open("a", think=think, answer=answer)
            self.step()

    def step(self, count: int = 1, then_ms: float = 5.0) -> agent_pb2.Directives:
        """Make engine steps and return all directives that the session sent, merged into one message."""
        merged = agent_pb2.Directives()
        for _ in range(count):
            self.agent.now_s = (self.now - NOW).total_seconds()
            self.agent.step()
            self.now += timedelta(milliseconds=then_ms)
            for response in self.pump():
                merged.MergeFrom(response.directives)
        return merged

    def open(self, name: str, think: int = 1000, answer: int = 1000, **fields: Any) -> int:
        own = ("entropy_nats", "eat_nats", "trial_answer", "end_rank", "rethink_at")
        script = {name: fields.pop(name) for name in own if name in fields}
        self.agent.now_s = (self.now - NOW).total_seconds()
        return self.agent.open(name, Script(think, answer, **script), **fields).slot

    def say(self, steps: int = 1, **fields: Any) -> None:
        """Send the session a report of the next steps, which the agent did not make."""
        step = self.session._ledger.step + steps
        self.session.on_message(step_report(step=step, steps=steps, **fields), self.now)

    def merged(self, records: list[StepRecord]) -> None:
        """Send the session one report of steps that the agent has made, at the time of the last step."""
        report = merge(records)
        self.session.on_message(agent_pb2.ConnectRequest(step=report), NOW + timedelta(seconds=records[-1].ended_s))

    def caps(self) -> dict[str, int]:
        """Return the caps in force on the agent, by request."""
        live = self.agent.engine.live.values()
        return {one.info.request_id: one.cap.max_think_tokens for one in live if one.cap is not None}

    def life(self, request_id: str) -> fleet_pb2.RequestLife:
        return explain_request(self.log, [], fleet_pb2.ExplainRequestRequest(request_id=request_id)).life

    def balanced(self) -> bool:
        totals = self.session.totals
        return sum(totals.decisions.values()) == sum(totals.outcomes.values()) + len(self.session.open_decisions)


def stream(first: Policy | None = None, **fields: Any) -> Stream:
    made = Stream(**fields)
    made.apply(first or policy())
    return made


# What happens to a stream, one after the other, in a table of tests: a number of steps, a new policy, the stages of
# budgets, or anything else that a function does with the stream, an assertion too.
Act: TypeAlias = "int | Policy | Mapping[str, int] | Callable[[Stream], object]"


def play(made: Stream, *acts: Act) -> Stream:
    """Let all this happen to the stream."""
    for act in acts:
        if isinstance(act, int):
            made.step(act)
        elif isinstance(act, Policy):
            made.apply(act)
        elif not callable(act):
            made.stages(**act)
        else:
            act(made)
    return made


def each_token_ends_a_sentence(made: Stream) -> None:
    made.agent.engine.tracker.sentences = ends_by_id(bytes(TEXT) + bytes([FLAG_SENTENCE]))


def freezes(made: Stream) -> None:
    made.deliver(made.session.on_freezes((Freeze(1, Match(), "", "", made.now, made.now + timedelta(1)),), made.now))
    made.pump()


def thaws(made: Stream) -> None:
    made.deliver(made.session.on_freezes((), made.now))
    made.pump()


def govern(session: Session, revision: int, held: Policy, now: datetime = NOW) -> None:
    """Give a session a policy, which its agent confirms."""
    (response,) = session.on_policy(revision, held)
    status = agent_pb2.SettingsStatus(nonce=response.settings.nonce, revision=revision)
    session.on_message(agent_pb2.ConnectRequest(settings_status=status), now)


def reconnected(made: Stream, under: Policy) -> Stream:
    """Connect the same agent, with a snapshot of its requests, on a new stream to a control plane with a policy."""
    agent = made.agent
    agent.checker, agent.outbox = StreamChecker(), []
    agent.engine.directives.new_stream()
    again = Stream(agent, session_id="t", log=made.log, now=made.now)
    agent.say(snapshot=agent.snapshot())
    again.apply(under)
    return again


def opens(name: str, *script: int, **fields: Any) -> Callable[[Stream], int]:
    return lambda made: made.open(name, *script, **fields)


def aborts(name: str) -> Callable[[Stream], None]:
    return lambda made: made.agent.abort(name)


def preempts(name: str, waits: bool = True) -> Callable[[Stream], None]:
    return lambda made: made.agent.preempt(name, waits=waits)


def totals(**wanted: Any) -> Callable[[Stream], None]:
    """Assert what the session has counted."""

    def check(made: Stream) -> None:
        assert {name: getattr(made.session.totals, name) for name in wanted} == wanted

    return check


def step_report(**fields: Any) -> agent_pb2.ConnectRequest:
    return agent_pb2.ConnectRequest(step=agent_pb2.StepReport(**{"step": 1, "steps": 1, **fields}))
