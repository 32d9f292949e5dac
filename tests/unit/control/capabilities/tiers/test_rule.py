"""KV tiers of thinking requests, and the conditions under which no request is admitted."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2

from meridian_control.capabilities.order.rule import hold_admission
from meridian_control.capabilities.tiers.stream import newly_unreachable, unreachable
from meridian_control.engine.request_table import PROMPT
from meridian_control.policy.schema import KvMemoryPolicy
from tests.fakes.tables import answering, table, thinking

REUSABLE, UNREACHABLE = agent_pb2.EVICTION_TIER_REUSABLE, agent_pb2.EVICTION_TIER_UNREACHABLE
CAN = agent_pb2.Capabilities(reclaim=True, template_strips_think=True)


def test_what_thinks_is_told_once() -> None:
    made = table(thinking(), answering(), {"phase": PROMPT}, thinking())
    assert newly_unreachable(CAN, made).tolist() == [0, 3]
    made.put(newly_unreachable(CAN, made), tier=UNREACHABLE)
    assert made.tier[:4].tolist() == [UNREACHABLE, 0, 0, UNREACHABLE]
    assert newly_unreachable(CAN, made).tolist() == []
    made.close(3)
    made.open(agent_pb2.RequestOpened(slot=3, phase=agent_pb2.PHASE_THINK))
    assert newly_unreachable(CAN, made).tolist() == [3]
    made.put(slice(None), tier=0)
    assert newly_unreachable(CAN, made).tolist() == [0, 3]
    # Both capabilities are needed.
    for can in ({"reclaim": True}, {"template_strips_think": True}, {}):
        assert newly_unreachable(agent_pb2.Capabilities(**can), made).tolist() == []


def test_a_policy_that_is_switched_off_takes_tiers_back_once() -> None:
    made = table(thinking(), thinking(), answering())
    made.put(newly_unreachable(CAN, made), tier=UNREACHABLE)
    made.close(1)
    assert unreachable(made).tolist() == [0]
    made.put(unreachable(made), tier=REUSABLE)
    assert unreachable(made).tolist() == []


HOLDS = thinking(prompt_tokens=100, think_tokens=250, output_tokens=51)
WAITS = answering(preempted=True, prompt_tokens=900)


FRACTION = {"think_phase_memory_fraction": 0.41}


@pytest.mark.parametrize(
    ("rows", "fields", "capacity", "holds"),
    [
        # Thinking has too much, and an answer waits.
        ((HOLDS, WAITS), {}, 1000, True),
        ((HOLDS | {"output_tokens": 50}, WAITS), {}, 1000, False),
        ((HOLDS,), {}, 1000, False),
        ((HOLDS, answering(prompt_tokens=900)), {}, 1000, False),
        ((HOLDS, thinking(preempted=True)), {}, 1000, False),
        ((HOLDS | {"preempted": True}, WAITS), {}, 1000, False),
        ((HOLDS | {"live": False}, WAITS), {}, 1000, False),
        ((HOLDS, WAITS | {"live": False}), {}, 1000, False),
        ((answering(prompt_tokens=900), WAITS), {}, 1000, False),
        # The fraction has an effect.
        ((HOLDS, WAITS), FRACTION, 1000, False),
        ((HOLDS, WAITS), FRACTION, 900, True),
        ((HOLDS, WAITS), {"enabled": False}, 900, False),
        # An engine that does not say how much it has.
        ((HOLDS, WAITS), {}, 0, False),
    ],
)
def test_when_admission_is_held(
    rows: tuple[dict[str, Any], ...], fields: dict[str, Any], capacity: int, holds: bool
) -> None:
    assert hold_admission(KvMemoryPolicy(**fields), table(*rows), capacity, 0.0) is holds


SHARED = [thinking(prompt_tokens=100, think_tokens=25)] * 8


@pytest.mark.parametrize(
    ("rows", "fraction", "kv_used", "holds"),
    [
        # 8 requests with 125 tokens each, 100 of which they share: 300 tokens in the cache.
        ([*SHARED, WAITS], 0.40, 0.3, False),
        ([*SHARED, WAITS], 0.29, 0.3, True),
        # Half of the tokens belong to an answer.
        ([*SHARED, answering(prompt_tokens=1000), WAITS], 0.40, 0.7, False),
        ([*SHARED, answering(prompt_tokens=1000), WAITS], 0.40, 0.9, True),
        # What waits for its first step has nothing in the cache.
        ([*SHARED, answering(prompt_tokens=1000, queued=True), WAITS], 0.40, 0.7, True),
        # 1.0 never holds, whatever is known.
        ([*SHARED, *SHARED, WAITS], 1.0, 1.0, False),
        ([*SHARED, *SHARED, WAITS], 1.0, 0.0, False),
    ],
)
def test_requests_that_share_blocks_hold_less_than_their_tokens(
    rows: list[dict[str, Any]], fraction: float, kv_used: float, holds: bool
) -> None:
    assert hold_admission(KvMemoryPolicy(think_phase_memory_fraction=fraction), table(*rows), 1000, kv_used) is holds
