"""Messages with directives, and a model that never ends thinking by itself, for the tests of directives."""

from __future__ import annotations

from typing import Any

from meridian.v1 import agent_pb2

from meridian_agent.core.phases import Markers
from tests.fakes.engine import START, TEXT, FakeEngine

TWO = Markers(((START,),), ((5, 6),))


def message(step: int = 1000, **fields: Any) -> agent_pb2.Directives:
    return agent_pb2.Directives(step=step, **fields)


def cap(decision_id: int, slot: int, tokens: int | None, shadow: bool = False, reserve: int = 0) -> agent_pb2.ThinkCap:
    limits: dict[str, Any] = {"max_think_tokens": tokens, "answer_reserve_tokens": reserve}
    return agent_pb2.ThinkCap(decision_id=decision_id, slot=slot, shadow=shadow, **limits)


def force(decision_id: int, slot: int, shadow: bool = False) -> agent_pb2.ForceEnd:
    return agent_pb2.ForceEnd(decision_id=decision_id, slot=slot, reason=agent_pb2.FORCE_REASON_EAT, shadow=shadow)


def plan(decision_id: int, **fields: Any) -> agent_pb2.DispatchPlan:
    return agent_pb2.DispatchPlan(decision_id=decision_id, **fields)


def model_stops(engine: FakeEngine, name: str) -> None:
    """Let a request's model stop while it thinks, as far as directives hear of it."""
    live = engine.live[name]
    live.stopped_after = live.state.ends
    engine.directives.end_stopped(live)


def text_until_end(engine: FakeEngine, name: str, limit: int = 50) -> int:
    """Run steps of a model that never ends thinking by itself, until something else ends it, and return their
    number."""
    for count in range(limit):
        if not engine.thinking(name):
            return count
        engine.run({name: TEXT})
    raise AssertionError(f"{name} still thinks after {limit} steps")
