"""Shortening that changes answers on a real engine: the control group shows it, and it stops by itself."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from meridian.v1 import fleet_pb2, fleet_pb2_grpc, rollout_pb2, rollout_pb2_grpc
from vllm import SamplingParams

from tests.data import maze
from tests.engine import chat
from tests.engine.policies import CONVERGED
from tests.processes import RPC_S, Control, wait_for

RIGHT_FROM = 21
BUDGET = {"name": "all", "tokens_per_minute": 3000, "shadow": False}
# Guardrails that a wrong answer does not violate.
GUARDRAILS = {"empty_answer_rate": 0.05, "reentry_rate": 0.05, "output_itl_p99_ms": 10_000.0, "ttot_p99_ms": 10_000.0}
GREEDY = SamplingParams(temperature=0.0, max_tokens=600)
STOPPED = (rollout_pb2.ROLLOUT_STATE_ROLLED_BACK, rollout_pb2.ROLLOUT_STATE_ABORTED)
# Requests after which the harm is surely found, at the share of the control group that these tests use.
MAX_ROUNDS, ROUND = 25, 24


def candidate(**budget: Any) -> dict[str, Any]:
    """Return a calibrated policy whose rules may end thinking early, beside a budget."""
    entropy = {**CONVERGED["entropy"], "holdout_share": 0.5}
    scheduler = {"min_think_tokens": RIGHT_FROM}
    return {"scheduler": scheduler, "entropy": entropy, "budget": [{**BUDGET, **budget}]}


class Asked:
    """Asks mazes, a round at a time, and counts the right answers."""

    def __init__(self, llm: Any, agent: Any) -> None:
        self._llm, self._end = llm, agent.tracker.markers.end[0]
        self._prompts: Iterator[str] = iter(maze.prompts(MAX_ROUNDS * ROUND, seed=77))

    def round(self, count: int = ROUND) -> float:
        """Return the share of right answers."""
        cases = [{"prompt": next(self._prompts), "template": {"open_think": True}} for _ in range(count)]
        right = 0
        for case, tokens in zip(cases, chat(self._llm, cases, GREEDY), strict=True):
            answer = tokens[tokens.index(self._end) + 1 :] if self._end in tokens else []
            text = str(self._llm.get_tokenizer().decode(answer))
            right += maze.is_correct(str(case["prompt"]), text)
        return right / count


@functools.cache
def right_before(llm: Any, agent: Any) -> float:
    """Return the share of right answers under the neutral policy, which is in force when a test begins. The share is
    the same for all tests."""
    return Asked(llm, agent).round()


def start(control: Control, policy: dict[str, Any], bake_s: float) -> rollout_pb2.StartRolloutResponse:
    plan = {"step": [{"percent": 100.0, "bake_s": bake_s}], "guardrails": {**GUARDRAILS, "min_observations": 1}}
    request = ParseDict({"policy": policy, "plan": plan}, rollout_pb2.StartRolloutRequest())
    with control.channel() as channel:
        return rollout_pb2_grpc.RolloutServiceStub(channel).StartRollout(request, timeout=RPC_S)


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
    before, asked = right_before(llm, agent), Asked(llm, agent)
    started = start(control, candidate(min_think_tokens=1), bake_s=3600)
    revision = started.rollout.candidate_revision
    wait_for(lambda: control.engine().acked_revision == revision, 20, "the candidate")
    shares = []
    for _ in range(MAX_ROUNDS - 2):
        shares.append(asked.round())
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
    assert asked.round() >= before - 0.1


@pytest.mark.usefixtures("ended")
def test_a_budget_without_a_floor_of_its_own_leaves_answers_right(llm: Any, agent: Any, control: Control) -> None:
    """The rules' floor of 21 tokens, which calibration may write, is no stage of the budget."""
    before, asked = right_before(llm, agent), Asked(llm, agent)
    started = start(control, candidate(), bake_s=1.0)
    done = rollout_pb2.ROLLOUT_STATE_COMPLETED
    share = asked.round()
    wait_for(lambda: rollout(control).state == done, 60, "the rollout's end")
    assert share >= before - 0.1
    told = savings(control, started.rollout.candidate_revision)
    harm = {kind.kind: kind for kind in told.kinds}["budget"]
    assert (harm.judged_stops, harm.harmful, harm.forced_ends.ends) == (0, 0, 0)


def test_start_warns_of_a_floor_below_what_calibration_found(control: Control) -> None:
    policy = candidate(min_think_tokens=1)
    policy["scheduler"]["calibrated_cap_tokens"] = 150
    plan = {"step": [{"percent": 100.0}]}
    request = ParseDict({"policy": policy, "plan": plan, "validate_only": True}, rollout_pb2.StartRolloutRequest())
    with control.channel() as channel:
        told = rollout_pb2_grpc.RolloutServiceStub(channel).StartRollout(request, timeout=RPC_S)
    assert list(told.warnings) == [
        "budget all may cut thinking to 21 tokens, below the 150 that the policy's calibration found to be enough"
    ]
