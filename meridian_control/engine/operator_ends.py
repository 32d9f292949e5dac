"""Decides what follows when an operator asks to end a request's thinking.

An operator's end obeys no floor and is never in shadow, and it needs no enabled section of the policy. The module owns
the states that FleetService.EndThinking returns. The code does no I/O and reads no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.engine.request_table import OUTPUT, PROMPT, UNKNOWN

if TYPE_CHECKING:
    from meridian_control.journal.records import Decision
    from meridian_control.policy.model import Policy

    State: TypeAlias = fleet_pb2.EndThinkingState.ValueType

ENDING = fleet_pb2.END_THINKING_STATE_ENDING


class OperatorEnd(NamedTuple):
    """The answer of a session to an operator.

    `decision` is the newest forced end of the request, None if there is none; it was made for this operator if `state`
    is ENDING. `think_tokens` are those of the newest report. `responses` are the messages for the agent.
    """

    state: State
    decision: Decision | None
    think_tokens: int
    responses: list[agent_pb2.ConnectResponse]


def state_of(
    hello: agent_pb2.Hello, deciding: Policy | None, frozen: bool, phase: int, newest: Decision | None
) -> State:
    """Return the state of a live request for an operator who asks to end its thinking.

    deciding: the policy by which the session makes decisions, None if it makes none at the moment. newest: the newest
    forced end of the request, None if there is none.
    """
    under_way = newest is not None and newest.outcome == agent_pb2.OUTCOME_UNSPECIFIED
    obstacles: tuple[tuple[bool, State], ...] = (
        (phase == OUTPUT, fleet_pb2.END_THINKING_STATE_ANSWERING),
        (bool(hello.fault), fleet_pb2.END_THINKING_STATE_AGENT_OFF),
        (deciding is None and frozen, fleet_pb2.END_THINKING_STATE_FROZEN),
        (deciding is None, fleet_pb2.END_THINKING_STATE_NO_POLICY),
        (bool(hello.unknown_markers) or phase == UNKNOWN, fleet_pb2.END_THINKING_STATE_UNKNOWN_MARKERS),
        (not hello.capabilities.force_end, fleet_pb2.END_THINKING_STATE_CANNOT_FORCE),
        (phase == PROMPT, fleet_pb2.END_THINKING_STATE_NOT_THINKING_YET),
        (under_way, fleet_pb2.END_THINKING_STATE_ALREADY_ENDING),
    )
    return next((state for holds, state in obstacles if holds), ENDING)
