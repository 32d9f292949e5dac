"""What the link hands to the engine's thread, without its own thread and without a stream."""

from __future__ import annotations

from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.link import Link


def link_of(idle: bool) -> Link:
    made = Link(["nowhere:1"], agent_pb2.Hello, lambda _: None, lambda _: None, clock=lambda: 1.0)
    made.idle = idle
    return made


def hear(link: Link, step: int, **decisions: Any) -> None:
    directives = agent_pb2.Directives(step=step, **decisions)
    link._receive(agent_pb2.ConnectResponse(directives=directives))


def test_an_answer_that_decides_nothing_is_only_a_number() -> None:
    link = link_of(idle=False)
    hear(link, 7)
    assert (link.inbox.answered_step, len(link.inbox.messages)) == (7, 0)


def test_what_came_before_is_taken_in_first() -> None:
    """A request that waits for an answer must not go on before what was decided earlier is in force."""
    link = link_of(idle=False)
    hear(link, 7, forces=[agent_pb2.ForceEnd(decision_id=1)])
    hear(link, 8)
    assert link.inbox.answered_step == 0
    assert [message.step for message in link.inbox.messages if message] == [7, 8]
    link.inbox.messages.clear()
    hear(link, 9)
    assert link.inbox.answered_step == 9


def test_each_kind_of_decision_is_handed_over() -> None:
    for decisions in (
        {"forces": [agent_pb2.ForceEnd()]},
        {"caps": [agent_pb2.ThinkCap()]},
        {"tiers": [agent_pb2.TierChange()]},
        {"probes": [agent_pb2.EatProbe()]},
        {"plan": agent_pb2.DispatchPlan()},
    ):
        for step in (0, 3):
            link = link_of(idle=False)
            hear(link, step, **decisions)
            assert len(link.inbox.messages) == 1, decisions
