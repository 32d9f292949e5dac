"""A thinking budget on a real engine: it shortens the thinking of its tenant alone until it is raised, and in shadow it
changes no token."""

from __future__ import annotations

from typing import Any

from meridian.v1 import fleet_pb2, fleet_pb2_grpc

from meridian_control.engine.shortening import FLOOR, UNSHORTENED
from tests.engine import chat, paced
from tests.engine.pacing import Settled
from tests.engine.test_decisions import endless, opened
from tests.processes import RPC_S, Control, wait_for

FLOOR_TOKENS, CAP = 6, 60
ACME = {"name": "engine", "tenant": "ac*", "tokens_per_day": CAP, "max_think_tokens": CAP, "min_think_tokens": 1}


def budgeted(**fields: Any) -> dict[str, Any]:
    limits = {"min_think_tokens": FLOOR_TOKENS, "max_think_tokens": CAP}
    return {"scheduler": limits, "entropy": {"enabled": False}, "budget": [{**ACME, **fields}]}


def shown(control: Control) -> fleet_pb2.Budget:
    with control.channel() as channel:
        stub = fleet_pb2_grpc.FleetServiceStub(channel)
        (found,) = stub.ListBudgets(fleet_pb2.ListBudgetsRequest(), timeout=RPC_S).budgets
    return found


def in_stage(control: Control, stage: int) -> None:
    """Wait until the usage is counted, once a second, and the engine has the stage."""
    wait_for(lambda: shown(control).stage == stage, RPC_S, f"stage {stage}")


def test_a_budget_shortens_the_thinking_of_its_tenant_until_it_is_raised(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    end = agent.tracker.markers.end[0]
    params = [endless(agent, max_tokens=100, extra_args={"meridian_tenant": name}) for name in ("acme", "other")]
    both = [opened(), opened(1)]

    def thought() -> list[int]:
        return [tokens.index(end) for tokens in paced(llm, both, params, settled)]

    control.apply(budgeted(shadow=True))
    before = chat(llm, both, params)
    in_stage(control, FLOOR)
    assert chat(llm, both, params) == before
    assert [tokens.index(end) for tokens in before] == [CAP, CAP]
    control.apply(budgeted(shadow=False))
    assert thought() == [FLOOR_TOKENS, CAP]
    control.apply(budgeted(shadow=False, tokens_per_day=10**9))
    in_stage(control, UNSHORTENED)
    assert thought() == [CAP, CAP]
    used = 3 * CAP + FLOOR_TOKENS
    wait_for(lambda: shown(control).used_tokens >= used, RPC_S, "the usage")
    assert shown(control).used_tokens == used
