"""The control group on the real engine: its thinking equals the free run's, and its probes judge the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from meridian.v1 import fleet_pb2, fleet_pb2_grpc

from tests.engine import Run, chat
from tests.engine.policies import CONVERGED
from tests.engine.test_rules import CASES, GREEDY
from tests.processes import RPC_S

if TYPE_CHECKING:
    from tests.engine.pacing import Settled
    from tests.processes import Control


def test_the_control_group_thinks_to_its_own_end(llm: Any, agent: Any, control: Control, settled: Settled) -> None:
    """vLLM completes request ids with random letters, so each run has other requests in the control group."""
    free = chat(llm, CASES, GREEDY)
    # A request is held until its decision comes, so that a busy machine does not change the result.
    control.apply({**CONVERGED, "entropy": {**CONVERGED["entropy"], "holdout_share": 0.5, "eat_hold_ms": 5000}})
    run, end = Run(llm), agent.tracker.markers.end[0]
    for number, case in enumerate(CASES):
        run.add(f"arm-{number}", case, GREEDY)
    run.until(settled=settled)
    control.settled()
    with control.channel() as channel:
        fleet = fleet_pb2_grpc.FleetServiceStub(channel)
        (savings,) = [s for s in fleet.GetSavings(fleet_pb2.GetSavingsRequest(), timeout=RPC_S).savings if s.in_force]
    held = [any(event.kind == "control_group" for event in control.explain(name).events) for name in run.tokens]
    for is_control, alone, tokens in zip(held, free, run.tokens.values(), strict=True):
        at, natural = tokens.index(end), alone.index(end)
        assert tokens[:at] == alone[:at]
        assert at == natural if is_control else at <= natural
    assert (savings.control.requests, savings.treated.requests) == (sum(held), len(held) - sum(held))
    thought = {False: 0, True: 0}
    for is_control, tokens in zip(held, run.tokens.values(), strict=True):
        thought[is_control] += tokens.index(end)
    assert (savings.control.think_tokens, savings.treated.think_tokens) == (thought[True], thought[False])
    # EAT fires on a probe, so each stop is judged by a probe.
    assert (savings.judged, savings.unjudged) == (sum(held), 0)
    assert savings.judged_stops == savings.control.stopped
