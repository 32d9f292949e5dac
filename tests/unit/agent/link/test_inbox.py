"""Decisions on their way to the engine: large messages arrive in parts."""

from __future__ import annotations

from meridian.v1 import agent_pb2

from meridian_agent.link.inbox import PART_DECISIONS, Inbox
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


def test_answers_to_the_heartbeats_of_an_idle_engine_do_not_pile_up() -> None:
    """Nobody takes the mark of the new stream out before the engine's next step, which may be hours away."""
    inbox = Inbox(Lease(lambda: 0.0))
    inbox.begin()
    for _ in range(3):
        inbox.put(agent_pb2.Directives(step=7))
    assert [*inbox.messages] == [None]
    assert inbox.answered_step == 7
    inbox.put(agent_pb2.Directives(step=8, caps=[agent_pb2.ThinkCap(decision_id=1)]))
    inbox.put(agent_pb2.Directives(step=9))
    assert [message and message.step for message in inbox.messages] == [None, 8, 9]
