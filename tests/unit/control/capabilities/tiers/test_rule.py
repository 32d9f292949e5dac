"""KV tiers of thinking requests, and the conditions under which no request is admitted."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.order.rule import hold_admission
from meridian_control.capabilities.tiers.rule import newly_unreachable, reusable_again
from meridian_control.engine.request_table import PROMPT
from meridian_control.policy.schema import KvMemoryPolicy
from tests.fakes.tables import answering, table, thinking

REUSABLE, UNREACHABLE = agent_pb2.EVICTION_TIER_REUSABLE, agent_pb2.EVICTION_TIER_UNREACHABLE
CAN = agent_pb2.Capabilities(reclaim=True, template_strips_think=True)


def test_what_thinks_is_told_once() -> None:
    made = table(thinking(), answering(), {"phase": PROMPT}, thinking())
    assert newly_unreachable(CAN, made).tolist() == [0, 3]
    made.set_tier(newly_unreachable(CAN, made), UNREACHABLE)
    assert made.tier[:4].tolist() == [UNREACHABLE, 0, 0, UNREACHABLE]
    assert newly_unreachable(CAN, made).tolist() == []
    made.close(3)
    made.open(agent_pb2.RequestOpened(slot=3, phase=agent_pb2.PHASE_THINK))
    assert newly_unreachable(CAN, made).tolist() == [3]


@pytest.mark.parametrize(
    "capabilities",
    [
        agent_pb2.Capabilities(reclaim=True),
        agent_pb2.Capabilities(template_strips_think=True),
        agent_pb2.Capabilities(),
    ],
)
def test_both_capabilities_are_needed(capabilities: agent_pb2.Capabilities) -> None:
    made = table(thinking())
    assert newly_unreachable(capabilities, made).tolist() == []


def test_a_policy_that_is_switched_off_takes_tiers_back_once() -> None:
    made = table(thinking(), thinking(), answering())
    made.set_tier(newly_unreachable(CAN, made), UNREACHABLE)
    made.close(1)
    assert reusable_again(made).tolist() == [0]
    made.set_tier(reusable_again(made), REUSABLE)
    assert reusable_again(made).tolist() == []


def test_a_policy_that_stays_on_tells_all_anew() -> None:
    made = table(thinking())
    made.set_tier(newly_unreachable(CAN, made), UNREACHABLE)
    made.forget_tiers()
    assert newly_unreachable(CAN, made).tolist() == [0]


HOLDS = thinking(prompt_tokens=100, think_tokens=250, output_tokens=51)
WAITS = answering(preempted=True, prompt_tokens=900)


def test_admission_is_held_while_thinking_has_too_much_and_an_answer_waits() -> None:
    assert hold_admission(KvMemoryPolicy(), table(HOLDS, WAITS), 1000)
    assert not hold_admission(KvMemoryPolicy(), table(HOLDS | {"output_tokens": 50}, WAITS), 1000)


@pytest.mark.parametrize(
    "rows",
    [
        (HOLDS,),
        (HOLDS, answering(prompt_tokens=900)),
        (HOLDS, thinking(preempted=True)),
        (HOLDS | {"preempted": True}, WAITS),
        (HOLDS | {"live": False}, WAITS),
        (HOLDS, WAITS | {"live": False}),
        (answering(prompt_tokens=900), WAITS),
    ],
)
def test_when_it_is_not(rows: tuple[dict[str, Any], ...]) -> None:
    assert not hold_admission(KvMemoryPolicy(), table(*rows), 1000)


def test_the_fraction_has_an_effect() -> None:
    made = table(HOLDS, WAITS)
    assert not hold_admission(KvMemoryPolicy(think_phase_memory_fraction=0.41), made, 1000)
    assert hold_admission(KvMemoryPolicy(think_phase_memory_fraction=0.41), made, 900)
    assert not hold_admission(KvMemoryPolicy(enabled=False), made, 900)


def test_an_engine_that_does_not_say_how_much_it_has() -> None:
    assert not hold_admission(KvMemoryPolicy(), table(HOLDS, WAITS), 0)
