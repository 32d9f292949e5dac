"""A session decides handovers, counts them, and tells what became of them, on both engines."""

from __future__ import annotations

from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.control_group.stream import ControlGroup
from meridian_control.capabilities.handover.results import CLIENT_GONE, FINISHED, Handovers
from meridian_control.capabilities.handover.stream import EngineHandovers
from meridian_control.engine.step_cost import WARM_STEPS
from meridian_control.policy.model import Policy
from tests.fakes.parts import engine_view
from tests.unit.control.capabilities.handover.engines import (
    ANSWERING,
    BOTH,
    HandMade,
    answering,
    disagg,
    hello,
    pending,
)

APPLIED, SHADOWED = agent_pb2.OUTCOME_APPLIED, agent_pb2.OUTCOME_SHADOWED
REFUSED, SUPERSEDED = agent_pb2.OUTCOME_REFUSED, agent_pb2.OUTCOME_SUPERSEDED


def pressed(policy: Policy | None = None, results: Handovers | None = None, **fields: Any) -> HandMade:
    """Return a thinking engine whose answering engine b has room."""
    made = HandMade(policy or disagg(), hello(**fields), results)
    made.pool(answering())
    return made


def outcome(decision_id: int, said: agent_pb2.Outcome.ValueType, detail: str = "") -> dict[str, Any]:
    return {"outcomes": [agent_pb2.DecisionOutcome(decision_id=decision_id, outcome=said, detail=detail)]}


def why_of(made: HandMade, said: agent_pb2.HandOver) -> str:
    """Return why the decision log says that an earlier handover moves or is taken back."""
    logged, detail = fleet_pb2.LoggedDecision(), made.session.open_decisions[said.decision_id].own_detail
    assert detail is not None
    detail.fill(logged)
    return logged.hand_over.why


def continued(engine: HandMade, ref: str, tokens: int = 160, slot: int = 0) -> None:
    """Let an engine open a request that continues another one, and generate its first token."""
    opened: dict[str, Any] = {"phase": agent_pb2.PHASE_OUTPUT, "handed_over_ref": ref, "hand_over_candidate": False}
    engine.report(opened=[engine.opened(slot, **opened)])
    told = agent_pb2.ContinuedColumns(slot=[slot], transferred_tokens=[tokens], first_token_ms=[31.0])
    engine.report(continued=told)


# ------------------------------------------------------------------------------------------------------------ decisions


def test_a_candidate_is_handed_over_under_pressure() -> None:
    made = pressed()
    assert made.report(opened=[made.opened()], kv_used=0.5) == []
    (move,) = made.report(kv_used=0.95)
    assert (move.slot, move.shadow, move.url, move.ref) == (0, False, "http://b:8000", f"s-a-{move.decision_id}")
    assert made.report(kv_used=0.95) == []
    assert made.session.part(EngineHandovers).promised()["b"] == fleet_pb2.PromisedRequests(requests=1, blocks=10)


NO_CANDIDATES: list[dict[str, Any]] = [
    {"hand_over_candidate": False},
    {"phase": agent_pb2.PHASE_OUTPUT},
    {"phase": agent_pb2.PHASE_PROMPT},
    {"preempted": True},
    {"prompt_tokens": 48},
    {"model": "adapter"},
    {"forced": True},
]


@pytest.mark.parametrize("fields", NO_CANDIDATES)
def test_other_requests_stay(fields: dict[str, Any]) -> None:
    made = pressed()
    assert made.report(opened=[made.opened(**fields)], kv_used=0.95) == []


@pytest.mark.parametrize(
    ("policy", "fields", "why"),
    [
        (disagg(enabled=False), {}, "disagg.enabled is false"),
        (disagg(), {"labels": ANSWERING}, "it is not in disagg.thinking_pool"),
        (disagg(shadow=True), {"capabilities": {}, "no_hand_over": "no relay"}, "no relay"),
        (disagg(), {"unknown_markers": "no parser"}, "no parser"),
        (disagg(), {"kv_connector": "Other"}, 'its KV connector "Other" is not of disagg.fabric nixl'),
    ],
)
def test_an_engine_that_cannot_hands_nothing_over(policy: Policy, fields: dict[str, Any], why: str) -> None:
    made = pressed(policy, **fields)
    assert made.report(opened=[made.opened()], kv_used=0.95) == []
    assert made.session.part(EngineHandovers).no_hand_over(policy.disagg) == why


@pytest.mark.parametrize("pool", [(), (answering(unfit="it is frozen"),)])
def test_a_handover_is_taken_back_once_the_answering_engine_is_gone_or_frozen(
    pool: tuple[fleet_pb2.AnsweringEngine, ...],
) -> None:
    made = pressed()
    (move,) = made.report(opened=[made.opened()], kv_used=0.95)
    made.pool(*pool)
    (back,) = made.report(kv_used=0.95)
    assert (back.slot, back.url, back.ref) == (0, "", "")
    assert why_of(made, back) == "b cannot answer any more"
    made.report(**outcome(move.decision_id, SUPERSEDED), kv_used=0.95)
    assert made.report(**outcome(back.decision_id, APPLIED), kv_used=0.95) == []
    made.pool(*pool, answering("c"))
    (again,) = made.report(kv_used=0.95)
    assert again.url == "http://c:8000"


@pytest.mark.parametrize("changed", [disagg(enabled=False), disagg(shadow=True), disagg(answering_pool={"pool": "x"})])
def test_a_policy_that_changes_the_section_takes_handovers_back(changed: Policy) -> None:
    made = pressed()
    made.report(opened=[made.opened()], kv_used=0.95)
    (back,) = made.apply(changed).hand_overs
    assert back.url == ""
    assert why_of(made, back) == ("disagg.enabled is false" if not changed.disagg.enabled else "the policy has changed")
    assert [move.shadow for move in made.report(kv_used=0.95)] == [True] * changed.disagg.shadow


def test_a_refused_handover_is_not_repeated() -> None:
    made = pressed()
    (move,) = made.report(opened=[made.opened()], kv_used=0.95)
    assert made.report(**outcome(move.decision_id, REFUSED, "the end marker has several tokens"), kv_used=0.95) == []
    assert [m.slot for m in made.report(opened=[made.opened(1)], kv_used=0.95)] == [1]


def test_sessions_with_the_same_inputs_decide_the_same() -> None:
    decided = list[list[tuple[int, str, str]]]()
    for made in (pressed(), pressed()):
        made.report(opened=[made.opened(slot, 100 + 40 * slot) for slot in range(5)], kv_used=0.95)
        for pool in ((answering(kv_used=0.95), answering("c", kv_used=0.3)), ()):
            made.pool(*pool)
            for _ in range(WARM_STEPS):
                made.report(kv_used=0.9)
        decided.append([(d.decision_id, d.kind, d.reason) for d in made.session.open_decisions.values()])
    assert decided[0] == decided[1]
    reasons = {reason for _, kind, reason in decided[0] if kind == "hand_over"}
    assert reasons == {"kv_pressure", "other_engine", "taken_back"}


# --------------------------------------------------------------------------------------------------------------- shadow


def test_a_shadow_sums_up_what_handovers_would_have_cost_and_saved() -> None:
    results = Handovers()
    made = pressed(disagg(shadow=True), results)
    made.pool(answering(prefill_token_ms=0.5))
    (move,) = made.report(opened=[made.opened()], kv_used=0.95)
    assert move.shadow
    assert made.session.part(EngineHandovers).promised() == {}
    made.report(**outcome(move.decision_id, SHADOWED), **made.end_of_thinking())
    made.report()
    shadowed = engine_view(made.session).shadow_handovers
    assert (shadowed.requests, shadowed.recompute_ms) == (1, 80.0)
    assert shadowed.transfer_ms == pytest.approx(40.8)
    assert (pending(results), results.total()) == (0, {})


# -------------------------------------------------------------------------------------------------------------- results


def test_the_thinking_engine_may_finish_the_request_itself() -> None:
    results = Handovers()
    a = pressed(results=results)
    (move,) = a.report(opened=[a.opened()], kv_used=0.95)
    a.report(**a.end_of_thinking(handed_over=True))
    continued(a, move.ref, slot=1)
    a.report(opened=[a.opened(2)], kv_used=0.95)
    a.report(**a.end_of_thinking(2))
    assert results.total() == {FINISHED: 2}
    a.report(opened=[a.opened(3)], kv_used=0.95)
    a.report(closed=[agent_pb2.RequestClosed(slot=3, reason=agent_pb2.FINISH_REASON_ABORT)])
    assert results.total() == {FINISHED: 2, CLIENT_GONE: 1}, "an aborted request has lost its client"


# ----------------------------------------------------------------------------------------------------------- statistics


def test_a_request_that_is_handed_over_counts_its_thinking_and_no_answer() -> None:
    a = pressed()
    a.report(opened=[a.opened()], kv_used=0.95)
    a.report(**a.end_of_thinking(handed_over=True))
    totals = a.session.totals
    assert (totals.ends, totals.answers) == ({"natural": 1}, {})
    assert totals.think_tokens.counts.sum() == 1
    # The same end on one engine is an empty answer.
    a.report(opened=[a.opened()])
    a.report(**a.end_of_thinking())
    assert totals.answers == {"empty_after_natural": 1}


def test_a_continued_request_is_no_new_request_and_its_first_token_counts_as_ttot() -> None:
    b = HandMade(disagg(), hello("b", ANSWERING))
    continued(b, "elsewhere-1")
    b.report(closed=[agent_pb2.RequestClosed(slot=0, reason=agent_pb2.FINISH_REASON_STOP)])
    totals = b.session.totals
    assert (totals.requests, totals.ends, totals.answers) == (0, {}, {})
    assert totals.think_tokens.counts.sum() == 0
    assert totals.ttot.counts.sum() == 1
    assert totals.ttot.sum == pytest.approx(0.031)
    assert b.session.part(EngineHandovers).answering_engine().transfer_ms != 40.0


def test_the_control_group_keeps_the_thinking_of_requests_that_are_handed_over() -> None:
    in_force = Policy.model_validate({"entropy": {"shadow": False, "holdout_share": 0.5, "rpdi_threshold": 0.0}})
    a = HandMade(in_force, hello(capabilities={**_fields(BOTH), "token_entropy": True, "eat_probe": True}))
    for slot in range(20):
        a.report(opened=[a.opened(slot)])
        a.report(**a.end_of_thinking(slot, handed_over=True))
    counts = a.session.part(ControlGroup).experiments.total()
    assert counts.treated.requests + counts.control.requests == 20
    assert counts.treated.answers == counts.control.answers == counts.forced_ends.ends == counts.natural_ends.ends == 0


def _fields(capabilities: agent_pb2.Capabilities) -> dict[str, bool]:
    return {field.name: value for field, value in capabilities.ListFields()}


# --------------------------------------------------------------------------------------------------------------- status


def test_an_engine_shows_its_pool_and_why_it_has_no_part() -> None:
    thinking = engine_view(pressed().session)
    assert (thinking.pool, thinking.no_hand_over, thinking.answering_engine.url) == ("thinking", "", "http://a:8000")
    b = HandMade(disagg(), hello("b", ANSWERING, url=""))
    shown = engine_view(b.session)
    unfit = "it has no URL: set MERIDIAN_URL in the engine's environment"
    assert (shown.pool, shown.answering_engine.unfit) == ("answering", unfit)
    # An engine that had no request yet has sent no report.
    idle = engine_view(HandMade(disagg(), hello("e", ANSWERING)).session)
    assert idle.answering_engine.unfit == ""
    assert engine_view(HandMade(disagg(), hello("c", {})).session).pool == ""
    both = HandMade(disagg(thinking_pool={}, answering_pool={}), hello("d"))
    assert engine_view(both.session).pool == "both"
