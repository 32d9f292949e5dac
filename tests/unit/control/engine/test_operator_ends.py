"""Ends of thinking that operators ask for, in one session: their states, their one outcome, and their traces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_agent.core import tracker
from meridian_control.engine.operator_ends import OperatorEnd
from meridian_control.policy.model import Policy
from tests.fakes.agent import ALL, FakeAgent
from tests.fakes.engine import END, START, TEXT
from tests.fakes.tables import policy
from tests.unit.sessions import CALIBRATED, EARLY, Stream, freezes, step_report, stream, thaws

State = fleet_pb2.EndThinkingState
APPLIED, OFF = agent_pb2.OUTCOME_APPLIED, agent_pb2.OUTCOME_AGENT_OFF
ENDING, ALREADY = State.END_THINKING_STATE_ENDING, State.END_THINKING_STATE_ALREADY_ENDING
ANSWERING = State.END_THINKING_STATE_ANSWERING
NOTHING = {"enabled": False}


def state(ended: OperatorEnd) -> str:
    return State.Name(ended.state).removeprefix("END_THINKING_STATE_")


@pytest.mark.parametrize(
    "held",
    [
        policy(scheduler=NOTHING, entropy=NOTHING, kv_memory=NOTHING),
        policy(scheduler={"shadow": True}, entropy={"shadow": True}, kv_memory={"shadow": True}),
        policy(scheduler={"min_think_tokens": 500}),
    ],
    ids=["everything off", "everything in shadow", "far below the floor"],
)
def test_an_operator_ends_thinking_whatever_the_policy_is(held: Policy) -> None:
    """The call makes one decision with one outcome; calls that are repeated get the same decision."""
    made = stream(held)
    made.open("a", min_think_tokens=400)
    made.step(3)
    first = made.end("a", "a customer waits")
    again = made.end("a", "another reason")
    assert (first.state, again.state) == (ENDING, ALREADY)
    assert again.decision is first.decision is not None
    assert (first.decision.reason, first.think_tokens, again.responses) == ("operator", 3, [])
    made.step(2)
    assert not made.agent.engine.thinking("a")
    assert (first.decision.outcome, first.decision.outcome_think_tokens) == (APPLIED, 3)
    after = made.end("a")
    assert (after.state, after.decision, after.responses) == (ANSWERING, first.decision, [])
    totals = made.session.totals
    assert (totals.decisions["force/operator"], totals.ends["operator"]) == (1, 1)
    assert totals.settled["force/operator", "applied"] == 1
    assert totals.answers.keys().isdisjoint({"unended"})
    assert made.balanced()


PHASES = {"NOT_THINKING_YET": agent_pb2.PHASE_PROMPT, "ANSWERING": agent_pb2.PHASE_OUTPUT}


@pytest.mark.parametrize(
    ("expected", "hello"),
    [
        ("UNKNOWN_MARKERS", {"unknown_markers": "no parser"}),
        ("UNKNOWN_MARKERS", {}),
        ("AGENT_OFF", {"fault": "KeyError: 1"}),
        *((name, {}) for name in ("CANNOT_FORCE", "NO_POLICY", "NOT_THINKING_YET", "FROZEN", "ANSWERING")),
    ],
    ids=lambda value: value if isinstance(value, str) else "".join(value) or "phase",
)
def test_states_in_which_nothing_is_decided(expected: str, hello: dict[str, Any]) -> None:
    can = agent_pb2.Capabilities()
    can.CopyFrom(ALL)
    can.force_end = expected != "CANNOT_FORCE"
    made = Stream(FakeAgent(capabilities=can), can, hello)
    if expected != "NO_POLICY":
        made.apply(policy())
    made.pump()
    # A phase that is not known counts as unknown markers.
    unknown = expected == "UNKNOWN_MARKERS" and not hello
    phase = agent_pb2.PHASE_UNSPECIFIED if unknown else PHASES.get(expected, agent_pb2.PHASE_THINK)
    made.session.on_message(step_report(opened=[{"slot": 0, "request_id": "a", "phase": phase}]), made.now)
    if expected in ("FROZEN", "ANSWERING"):
        freezes(made)
    before = made.session._ledger.made
    ended = made.session.on_end_thinking("a", "", made.now)
    assert ended is not None
    assert (state(ended), ended.decision, ended.responses) == (expected, None, [])
    assert made.session._ledger.made == before


def test_while_a_rule_ends_thinking_the_rules_decision_is_the_answer() -> None:
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED))
    made.open("a")
    while not made.session.totals.decisions["force/eat"]:
        made.step()
    ended = made.end("a")
    assert (ended.state, ended.responses) == (ALREADY, [])
    assert ended.decision is not None
    assert (ended.decision.reason, made.session.totals.decisions["force/operator"]) == ("eat", 0)
    made.step(2)
    assert made.end("a").decision is ended.decision


def test_no_rule_and_no_probe_follows_an_operators_end() -> None:
    """The FakeAgent's checker fails if a second end is sent for the request."""
    made = stream(policy(scheduler=EARLY, entropy=CALIBRATED | {"eat_warmup_samples": 1}))
    made.open("a")
    made.step()
    made.end("a")
    told = made.step(30)
    assert (list(told.forces), list(told.probes)) == ([], [])
    assert made.balanced()


def generates(made: Stream, *tokens: int, meanwhile: Callable[[], Any] = lambda: None) -> Any:
    """Let request `a` generate these tokens in one step. meanwhile: what happens before the agent reports them."""
    made.agent.engine.schedule()
    for token in tokens:
        made.agent.engine.feed("a", [token])
    found = meanwhile()
    made.agent._measured([0.5] * len(tokens), [1] * len(tokens))
    made.agent._report()
    made.pump()
    return found


def test_thinking_that_begins_anew_can_be_ended_again() -> None:
    made = stream()
    made.open("a", answer=100)
    made.step(3)
    first = made.end("a")
    made.step(3)
    assert made.end("a").state == ANSWERING
    generates(made, START)
    second = made.end("a")
    assert second.state == ENDING
    assert second.decision is not first.decision
    made.step(2)
    assert not made.agent.engine.thinking("a")
    assert made.session.totals.settled["force/operator", "applied"] == 2
    assert made.balanced()


def test_a_new_policy_keeps_an_end_under_way() -> None:
    made = stream()
    made.open("a")
    made.step(3)
    first = made.end("a")
    made.apply(policy(scheduler=EARLY, entropy=CALIBRATED))
    assert made.end("a").decision is first.decision
    made.step(2)
    assert first.decision is not None
    assert first.decision.outcome == APPLIED
    assert made.session.totals.ends["operator"] == 1


def test_a_snapshot_keeps_an_end_under_way_and_forgets_those_of_requests_that_are_gone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tracker, "RESTING_SLOTS", 0)
    made = stream()
    for name in "ab":
        made.open(name)
    made.step(3)
    first, gone = made.end("a"), made.end("b")
    made.agent.abort("b")
    made.agent.engine.take()
    made.agent.say(snapshot=made.agent.snapshot())
    made.pump()
    assert (made.end("a").state, made.end("a").decision) == (ALREADY, first.decision)
    slot = made.open("c")
    assert gone.decision is not None
    assert slot == gone.decision.slot
    made.step()
    fresh = made.end("c")
    assert (fresh.state, fresh.decision is gone.decision) == (ENDING, False)


def test_a_freeze_drops_the_end_and_the_request_can_be_ended_after_it() -> None:
    made = stream()
    made.open("a")
    made.step(3)
    first = made.end("a")
    freezes(made)
    made.step(2)
    assert first.decision is not None
    assert (first.decision.outcome, made.agent.engine.thinking("a")) == (OFF, True)
    assert state(made.end("a")) == "FROZEN"
    thaws(made)
    made.step(2)
    assert made.end("a").state == ENDING
    made.step(2)
    assert not made.agent.engine.thinking("a")
    assert made.balanced()


def test_the_model_ends_thinking_first() -> None:
    made = stream()
    made.open("a", think=3)
    for _ in range(3):
        made.agent.step()
    made.pump()
    ended = generates(made, END, TEXT, meanwhile=lambda: made.end("a"))
    assert ended.state == ENDING
    assert ended.decision is not None
    assert ended.decision.outcome == agent_pb2.OUTCOME_ENDED_NATURALLY
    assert (made.session.totals.ends["natural"], made.session.totals.ends["operator"]) == (1, 0)
    assert made.end("a").decision is ended.decision
