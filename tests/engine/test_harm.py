"""Shortening that changes answers on a real engine: the control group shows it, and it stops by itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.json_format import ParseDict
from meridian.v1 import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from vllm import SamplingParams

from tests.data import maze
from tests.engine import chat
from tests.engine.policies import CONVERGED
from tests.processes import RPC_S, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.processes import Control

RIGHT_FROM = 21
# Guardrails that a wrong answer does not violate.
GUARDRAILS = {"empty_answer_rate": 0.05, "reentry_rate": 0.05, "output_itl_p99_ms": 10_000.0, "ttot_p99_ms": 10_000.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=600)
STOPPED = (rollout_pb2.ROLLOUT_STATE_ROLLED_BACK, rollout_pb2.ROLLOUT_STATE_ABORTED)
CASES: list[dict[str, Any]] = [{"prompt": p, "template": {"open_think": True}} for p in maze.prompts(16, seed=77)]
# Rounds after which the harm is surely found, at the share of the control group that the candidate has.
MAX_ROUNDS = 25
# A calibrated policy whose rules may end thinking early, beside a budget.
CANDIDATE = {
    "scheduler": {"min_think_tokens": RIGHT_FROM},
    "entropy": {**CONVERGED["entropy"], "holdout_share": 0.5},
    "budget": [{"name": "all", "tokens_per_minute": 3000, "min_think_tokens": 1, "shadow": False}],
}


def right(llm: Any, agent: Any) -> float:
    """Ask each maze, and return the share of right answers."""
    end = agent.tracker.markers.end[0]
    answers = [tokens[tokens.index(end) + 1 :] if end in tokens else [] for tokens in chat(llm, CASES, GREEDY)]
    texts = [str(llm.get_tokenizer().decode(answer)) for answer in answers]
    return sum(maze.is_correct(case["prompt"], text) for case, text in zip(CASES, texts, strict=True)) / len(CASES)


def start(control: Control) -> int:
    """Start the rollout of the candidate, and return its revision."""
    plan = {"step": [{"percent": 100.0, "bake_s": 3600}], "guardrails": {**GUARDRAILS, "min_observations": 1}}
    request = ParseDict({"policy": CANDIDATE, "plan": plan}, rollout_pb2.StartRolloutRequest())
    with control.channel() as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        return int(stub.StartRollout(request, timeout=RPC_S).rollout.candidate_revision)


def rollout(control: Control) -> rollout_pb2.Rollout:
    with control.channel() as channel:
        stub = rollout_pb2_grpc.RolloutServiceStub(channel)
        return stub.GetRollout(rollout_pb2.GetRolloutRequest(), timeout=RPC_S).rollout


def savings(control: Control, revision: int) -> fleet_pb2.Savings:
    """Return the counts under the rules of a revision."""
    with control.channel() as channel:
        told = fleet_pb2_grpc.FleetServiceStub(channel).GetSavings(fleet_pb2.GetSavingsRequest(), timeout=RPC_S)
    (row,) = [row for row in told.savings if row.since_revision == revision]
    return row


@pytest.fixture
def ended(control: Control) -> Iterator[None]:
    yield
    if rollout(control).state == rollout_pb2.ROLLOUT_STATE_RUNNING:
        with control.channel() as channel:
            rollout_pb2_grpc.RolloutServiceStub(channel).AbortRollout(rollout_pb2.AbortRolloutRequest(), timeout=RPC_S)


@pytest.mark.usefixtures("ended")
def test_a_rollout_stops_by_itself_when_its_budget_wrecks_answers(llm: Any, agent: Any, control: Control) -> None:
    before = right(llm, agent)
    revision = start(control)
    wait_for(lambda: control.engine().acked_revision == revision, 20, "the candidate")
    shares = []
    for _ in range(MAX_ROUNDS):
        shares.append(right(llm, agent))
        control.settled()
        if rollout(control).state in STOPPED:
            break
    found = rollout(control)
    assert found.state in STOPPED, found
    assert min(shares) < before, "the candidate does harm"
    assert "harm_rate" in found.events[-1].reason or "budget all" in found.events[-1].reason
    told = savings(control, revision)
    harm = {kind.kind: kind for kind in told.kinds}["budget"]
    assert (harm.name, harm.harmful > 0) == ("all", True)
    assert harm.harm_ratio.low > told.max_loss
    wait_for(lambda: control.engine().acked_revision == found.rollback_revision, 20, "the policy from before")
