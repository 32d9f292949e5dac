"""A rollout over a real engine and a simulated agent, from none to all, applied by both."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import ParseDict
from meridian.v1 import rollout_pb2, rollout_pb2_grpc

from tests.engine import chat
from tests.engine.test_decisions import endless, opened
from tests.fakes.linked import LinkedEngine
from tests.processes import RPC_S, Control, wait_for

CAP = 77


def test_from_nobody_to_everybody(llm: Any, agent: Any, control: Control) -> None:
    plan = {"step": [{"percent": 0.0, "bake_s": 1.0}, {"percent": 100.0, "bake_s": 1.0}]}
    policy = {"scheduler": {"max_think_tokens": CAP}, "entropy": {"holdout_share": 0.0}}
    request = ParseDict({"policy": policy, "plan": plan}, rollout_pb2.StartRolloutRequest())
    before = control.engine().acked_revision
    with LinkedEngine([control.target], "beside") as beside, control.channel() as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        wait_for(lambda: beside.link.lease.revision == before, 20, "the other agent to have the policy")
        started = stub.StartRollout(request, timeout=RPC_S).rollout

        def status() -> rollout_pb2.Rollout:
            return stub.GetRollout(rollout_pb2.GetRolloutRequest(), timeout=RPC_S).rollout

        try:
            wait_for(lambda: status().step == 2, 20, "the second step")
            chat(llm, [opened()], endless(agent, max_tokens=20))
            wait_for(lambda: status().state == rollout_pb2.ROLLOUT_STATE_COMPLETED, 20, "the end")
        finally:
            if status().state != rollout_pb2.ROLLOUT_STATE_COMPLETED:
                stub.AbortRollout(rollout_pb2.AbortRolloutRequest(), timeout=RPC_S)
        acked = {engine.engine_id: engine.acked_revision for engine in control.engines()}
        assert set(acked.values()) == {started.candidate_revision}
        assert [s.revision for s in beside.settings] == [before, started.candidate_revision]
    (tokens,) = chat(llm, [opened()], endless(agent, max_tokens=CAP + 5))
    assert tokens.index(agent.tracker.markers.end[0]) == CAP
