"""A snapshot in parts takes effect with its last part, as the same snapshot in one message does."""

from __future__ import annotations

from datetime import timedelta

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.listed import STREAM_PARTS
from meridian_control.common.errors import InvalidRequest
from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.engine.session import Session
from tests.fakes.agent import hello
from tests.fakes.tables import policy
from tests.unit.sessions import NOW, govern


def governed() -> Session:
    session = Session("s", hello(), NOW, parts=STREAM_PARTS)
    govern(session, 1, policy(scheduler={"max_think_tokens": 600}))
    return session


def message(first: int, last: int, *, continues: bool, step: int = 9) -> agent_pb2.ConnectRequest:
    requests = [
        agent_pb2.RequestOpened(slot=n, request_id=f"r{n}", phase=agent_pb2.PHASE_THINK) for n in range(first, last)
    ]
    return agent_pb2.ConnectRequest(snapshot=agent_pb2.Snapshot(step=step, requests=requests, continues=continues))


def test_the_last_part_brings_the_engine_and_its_decisions() -> None:
    session, whole = governed(), governed()
    assert session.on_message(message(0, 3, continues=True), NOW) == []
    assert session.on_message(message(3, 6, continues=True), NOW) == []
    assert not session.table.live.any()
    said = session.on_message(message(6, 7, continues=False), NOW)
    assert said == whole.on_message(message(0, 7, continues=False), NOW)
    assert [cap.slot for cap in said[0].directives.caps] == list(range(7))
    assert session.table.info[:7] == whole.table.info[:7]


def test_the_requests_before_stay_until_the_last_part() -> None:
    session = governed()
    session.on_message(message(0, 2, continues=False), NOW)
    session.on_message(message(5, 6, continues=True), NOW)
    assert session.table.slots().tolist() == [0, 1]
    session.on_message(message(6, 7, continues=False), NOW)
    assert session.table.slots().tolist() == [5, 6]


def test_the_agent_learns_that_its_parts_arrive() -> None:
    """A snapshot may take longer than the lease, and the agent waits for an answer."""
    session = governed()
    assert session.on_message(message(0, 1, continues=True), NOW) == []
    later = NOW + timedelta(seconds=2)
    (answer,) = session.on_message(message(1, 2, continues=True), later)
    assert answer == agent_pb2.ConnectResponse(directives=agent_pb2.Directives(step=0))


@pytest.mark.parametrize(
    ("second", "error"),
    [
        (agent_pb2.ConnectRequest(step=agent_pb2.StepReport(step=10, steps=1)), "must not come before the last part"),
        (message(1, 2, continues=False, step=10), "a part of the snapshot of step 9 must follow; got step 10"),
        (message(0, MAX_SLOTS, continues=True), f"requests must have at most {MAX_SLOTS} entries in all parts"),
    ],
)
def test_parts_that_no_agent_sends(second: agent_pb2.ConnectRequest, error: str) -> None:
    session = governed()
    session.on_message(message(0, 1, continues=True), NOW)
    with pytest.raises(InvalidRequest, match=error):
        session.on_message(second, NOW)


def test_answers_to_settings_and_freezes_may_come_between_parts() -> None:
    session = governed()
    session.on_message(message(0, 1, continues=True), NOW)
    govern(session, 2, policy(scheduler={"max_think_tokens": 500}))
    said = session.on_message(message(1, 2, continues=False), NOW)
    assert [cap.max_think_tokens for cap in said[0].directives.caps] == [500, 500]
