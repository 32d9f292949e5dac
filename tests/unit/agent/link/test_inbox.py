"""Decisions on their way to the engine: large messages arrive in parts."""

from __future__ import annotations

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.link.inbox import INBOX_MESSAGES, PART_DECISIONS, Inbox
from meridian_agent.link.lease import Lease


def test_a_message_is_over_with_its_last_part() -> None:
    """A request that is held for the answer to a report waits until all decisions of the answer are taken out."""
    inbox = Inbox(Lease(lambda: 0.0))
    caps = [agent_pb2.ThinkCap(decision_id=number + 1) for number in range(3 * PART_DECISIONS)]
    inbox.put(agent_pb2.Directives(step=7, caps=caps))
    inbox.put(agent_pb2.Directives(step=8, caps=caps[:1]))
    over = []
    while inbox.messages:
        message, _ = inbox.take()
        assert message is not None
        over.append((message.step, inbox.is_over(message)))
    assert over == [(7, False), (7, False), (7, True), (8, True)]


@pytest.mark.parametrize("plan", [None, agent_pb2.DispatchPlan(think_per_step=2)])
def test_an_idle_engine_keeps_one_of_the_answers_to_its_heartbeats(plan: agent_pb2.DispatchPlan | None) -> None:
    """It makes no step that takes out the mark of the stream, or a plan, so that the answers wait behind these."""
    inbox = Inbox(Lease(lambda: 0.0))
    inbox.begin()
    if plan is not None:
        inbox.put(agent_pb2.Directives(step=1, plan=plan))
    for step in range(INBOX_MESSAGES):
        inbox.put(agent_pb2.Directives(step=step))
        assert not inbox.too_much(0, 0)
    steps = [message and message.step for message, _ in [inbox.take() for _ in range(len(inbox.messages))]]
    assert steps == [None, *[1] * (plan is not None), INBOX_MESSAGES - 1]
