"""Directives of any number of decisions reach the agent in messages that gRPC accepts."""

from __future__ import annotations

import pytest
from meridian.v1 import agent_pb2

from meridian_control.common.opened_request import MAX_SLOTS
from meridian_control.engine import session
from meridian_control.engine.session import KINDS, parts_of

MOST, SLOTS = 2**63, MAX_SLOTS // 16


def large() -> agent_pb2.Directives:
    """Return one decision of each kind for each request of a large engine."""
    directives = agent_pb2.Directives(step=MOST)
    for slot in range(SLOTS):
        made = {"decision_id": MOST - slot, "slot": slot}
        directives.forces.add(**made, reason=agent_pb2.FORCE_REASON_EAT, shadow=True)
        directives.caps.add(**made, max_think_tokens=2**31, shadow=True, answer_reserve_tokens=2**31)
        directives.tiers.add(**made, tier=agent_pb2.EVICTION_TIER_UNREACHABLE, shadow=True)
        directives.probes.add(**made, placement=agent_pb2.PLACEMENT_PARAGRAPH, hold_ms=2**31)
        directives.hand_overs.add(**made, url="http://engine.example/" + "x" * 100, ref="r" * 40)
        directives.preempts.add(**made, victims=[2**16], max_preemptions=2**31, max_wait_ms=2**31)
    directives.plan.decision_id = MOST
    directives.plan.slot.extend(range(SLOTS))
    directives.plan.rank.extend([1023] * SLOTS)
    return directives


def test_the_parts_have_all_decisions_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, most = large(), session.DIRECTIVES_BYTES // 16
    monkeypatch.setattr(session, "DIRECTIVES_BYTES", most)
    assert whole.ByteSize() > 16 * most
    parts = [response.directives for response in parts_of(whole)]
    assert max(part.ByteSize() for part in parts) <= most
    assert {part.step for part in parts} == {MOST}
    joined = agent_pb2.Directives()
    for part in parts:
        joined.MergeFrom(part)
    assert joined == whole
    first = [next(n for n, part in enumerate(parts) if getattr(part, kind)) for kind in KINDS]
    assert first == sorted(first), "an agent takes them in in this order"
    assert [part.HasField("plan") for part in parts] == [False] * (len(parts) - 1) + [True]


def test_the_agent_takes_kinds_in_in_the_same_order() -> None:
    from meridian_agent.link.messages import DECISION_KINDS

    assert KINDS == DECISION_KINDS
