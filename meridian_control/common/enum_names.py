"""Gives the names of the protocol's enum values for metric labels, logs and pages: `ended_naturally`, `soft_close`.

A value that only a newer version of the protocol defines has the name `unknown`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import agent_pb2, fleet_pb2

if TYPE_CHECKING:
    from collections.abc import Callable


def _names(enum: Any, prefix: str) -> dict[int, str]:
    return {number: name.removeprefix(prefix).lower() for name, number in enum.items()}


OUTCOMES = _names(agent_pb2.Outcome, "OUTCOME_")
REASONS = _names(agent_pb2.ForceReason, "FORCE_REASON_")
PHASES = _names(agent_pb2.Phase, "PHASE_")
STATES = _names(agent_pb2.AgentState, "AGENT_STATE_")
FAULT_CAUSE_NAMES = _names(agent_pb2.FaultCause, "FAULT_CAUSE_")
ENTROPY_BACKENDS = _names(agent_pb2.EntropyBackend, "ENTROPY_BACKEND_")
# The names of the rules of the section entropy that end thinking.
ENTROPY_REASONS = ("eat", "rank", "rpdi", "give_up")
EVICTION_TIERS = _names(agent_pb2.EvictionTier, "EVICTION_TIER_")
BUDGET_STAGES = _names(fleet_pb2.BudgetStage, "BUDGET_STAGE_")


def _namer(names: dict[int, str]) -> Callable[[int], str]:
    return lambda number: names.get(number, "unknown")


outcome_name = _namer(OUTCOMES)
reason_name = _namer(REASONS)
phase_name = _namer(PHASES)
state_name = _namer(STATES)
entropy_backend_name = _namer(ENTROPY_BACKENDS)
stage_name = _namer(BUDGET_STAGES)
tier_name = _namer(EVICTION_TIERS)
