"""Texts of the status page on engines, freezes and requests, as pure functions of what FleetService shows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2, policy_pb2

from meridian_control.capabilities.budgets import shown as budgets
from meridian_control.capabilities.control_group.shown import savings_row
from meridian_control.capabilities.handover.fleet import handovers_text
from meridian_control.capabilities.pressure.fleet import levels_text
from meridian_control.capabilities.self_calibration.shown import row as self_calibration_row
from meridian_control.common.engine_words import condition, lasting
from meridian_control.common.plain_data import plain
from meridian_control.engine.freeze_state import Freeze, Match
from meridian_control.page.contents import (
    active_view,
    attention,
    freeze_row,
    phases,
    rollout_row,
)
from meridian_control.rollout.plan import Plan
from meridian_control.rollout.state import GuardrailReading, Rollout, State

NOW = datetime(2026, 5, 4, 3, 2, 1, tzinfo=UTC)
MINUTE = timedelta(minutes=1)
READY, STALE = agent_pb2.AGENT_STATE_READY, agent_pb2.AGENT_STATE_STALE
DEGRADED, OFF = agent_pb2.AGENT_STATE_DEGRADED, agent_pb2.AGENT_STATE_OFF
FREEZES = {
    7: Freeze(7, Match(("a*",)), "joao", "an incident", NOW, NOW + 9 * MINUTE),
    8: Freeze(8, Match(), "mara", "another", NOW, NOW + 30 * MINUTE),
}


def engine(connected: bool = True, state: agent_pb2.AgentState.ValueType = READY, **fields: Any) -> fleet_pb2.Engine:
    states = fleet_pb2.CONNECTION_STATE_DISCONNECTED, fleet_pb2.CONNECTION_STATE_CONNECTED
    made = fleet_pb2.Engine(
        engine_id="e", state=states[connected], agent_state=state, **{"revision": 3, "acked_revision": 3, **fields}
    )
    made.report_time.FromDatetime(NOW - timedelta(seconds=42))
    return made


def frozen(*ids: int, confirmed: bool = True, until: timedelta | None = None) -> fleet_pb2.EngineFreeze:
    made = fleet_pb2.EngineFreeze(freeze_ids=ids, confirmed=confirmed)
    if until is not None:
        made.end_time.FromDatetime(NOW + until)
    return made


@pytest.mark.parametrize(
    ("seen", "word", "cause", "level"),
    [
        (engine(), "ready", "", ""),
        (engine(acked_revision=0), "connected", "the agent has not applied a policy yet", "warn"),
        (engine(state=OFF, fault="KeyError: 1"), "off", "*until it is started again: KeyError: 1", "bad"),
        (engine(faults={"hook": 2}, last_fault="x"), "ready", "after 2 faults, the last of which was x", ""),
        (engine(unknown_markers="no parser"), "no markers", "no token counts as thinking: no parser", "warn"),
        (engine(nack_error="no such parser"), "refuses", "revision 3: no such parser", "bad"),
        (
            engine(freeze=frozen(7, 8, until=30 * MINUTE)),
            "frozen",
            "* for 30 min longer: an incident; another",
            "warn",
        ),
        (engine(freeze=frozen(7, confirmed=False)), "freezing", "an incident", "warn"),
        (engine(freeze=frozen(confirmed=False)), "thawing", "the agent has not confirmed yet", "warn"),
        (engine(freeze=frozen()), "frozen", "*MERIDIAN_FREEZE*", "warn"),
        # A replica that has not heard of the freeze itself still knows when the freeze ends.
        (engine(freeze=frozen(99, until=MINUTE / 12)), "frozen", "runs as stock vLLM for 5 s longer", "warn"),
        (engine(False, STALE, lost=True), "gone", "last heard 42 s ago*its last decisions are in force*", "warn"),
        (engine(False, DEGRADED, lost=True), "gone", "last heard 42 s ago*only caps are in force*", "bad"),
        (engine(False, OFF, lost=True, fault="KeyError: 1"), "gone", "*the agent was off: KeyError: 1", "bad"),
        # Its end is nobody's trouble.
        (engine(False, DEGRADED), "gone", "last heard 42 s ago; it has shut down", ""),
        # The worst of several states is shown.
        (engine(fault="x", nack_error="y", freeze=frozen(7)), "off", "*: x", "bad"),
    ],
)
def test_the_state_of_an_engine_has_a_cause(seen: fleet_pb2.Engine, word: str, cause: str, level: str) -> None:
    found = condition(seen, NOW, {number: freeze.reason for number, freeze in FREEZES.items()})
    assert (found.word, found.level) == (word, level)
    parts = cause.split("*")
    assert found.cause.startswith(parts[0])
    assert found.cause.endswith(parts[-1])
    assert all(part in found.cause for part in parts)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s"), (0.4, "0 s"), (119.4, "119 s"), (120, "2 min"), (3599, "59 min"), (7500, "2 h 5 min")],
)
def test_lengths_of_time(seconds: float, text: str) -> None:
    assert lasting(seconds) == text


def test_a_freeze_counts_whom_it_holds_for_and_who_has_confirmed() -> None:
    engines = [engine(freeze=frozen(7)), engine(freeze=frozen(7, 8, confirmed=False)), engine()]
    row = freeze_row(FREEZES[7], engines, NOW)
    assert (row["engines"], row["confirmed"], row["left"], row["match"]) == (2, 1, "9 min", "a*")
    labelled = Match(("a", "b"), "qwen*", (("zone", "eu"),))
    assert (str(labelled), str(Match())) == ("a, b, model qwen*, zone=eu", "every engine")


def test_phases_have_requests_that_begin_go_on_and_wait() -> None:
    requests = [
        fleet_pb2.LiveRequest(phase=agent_pb2.PHASE_THINK),
        fleet_pb2.LiveRequest(phase=agent_pb2.PHASE_THINK, think_tokens=3),
        fleet_pb2.LiveRequest(phase=agent_pb2.PHASE_OUTPUT, output_tokens=1, preempted=True),
        fleet_pb2.LiveRequest(phase=agent_pb2.PHASE_UNSPECIFIED),
    ]
    nobody = {"new": 0, "generating": 0, "preempted": 0}
    assert phases(requests) == {
        "prompt": nobody,
        "think": nobody | {"new": 1, "generating": 1},
        "output": nobody | {"preempted": 1},
    }


def test_an_engine_of_a_pool_says_what_became_of_its_requests() -> None:
    assert handovers_text(engine(handovers={"handed_over": 3})) == "", "the section is off"
    assert handovers_text(engine(pool="thinking")) == "thinking pool: none yet"
    told = handovers_text(engine(pool="thinking", handovers={"recomputed": 2, "handed_over": 31}))
    assert told == "thinking pool: handed over 31, recomputed 2"
    shadowed = fleet_pb2.ShadowHandovers(requests=4)
    assert handovers_text(engine(pool="thinking", shadow_handovers=shadowed)) == "thinking pool: in shadow 4"
    refused = handovers_text(engine(pool="both", no_hand_over="no connector", answering_engine={"unfit": "frozen"}))
    assert refused == "both pools: no connector, frozen"


def test_an_engine_under_pressure_stands_out() -> None:
    reading = fleet_pb2.PressureReading(target="ttot_p99_ms", measured=412.5, limit=250, samples=90)
    change = fleet_pb2.PressureChange(name="chat", level_before=1, level=3, reading=reading)
    row = fleet_pb2.Pressure(name="chat", level=3, changes=[change])
    told = condition(pressed := engine(pressures=[row]), NOW, {}, [levels_text(pressed)])
    assert (told.word, told.level) == ("ready", "warn")
    assert told.cause == "pressure chat at level 3 of 6: ttot_p99_ms was 412.5, limit 250"
    quiet = [fleet_pb2.Pressure(name="a", level=6, shadow=True), fleet_pb2.Pressure(name="b")]
    assert levels_text(engine(pressures=quiet)) == ""


def test_zero_was_measured_and_nan_was_not() -> None:
    told = plain(fleet_pb2.LoggedDecision(comparisons=[fleet_pb2.Comparison(value=0.0), fleet_pb2.Comparison()]))
    assert told["comparisons"][0]["value"] == 0
    assert plain(fleet_pb2.Comparison(value=float("nan")))["value"] is None


def test_a_text_that_reads_like_no_number_stays() -> None:
    told = plain(fleet_pb2.LoggedDecision(request_id="NaN", tenant="Infinity", revision=7))
    assert (told["request_id"], told["tenant"], told["revision"]) == ("NaN", "Infinity", 7)


def test_harm_and_drift_stand_beside_each_other() -> None:
    savings = fleet_pb2.Savings(max_loss=0.01, evidence_ratio=0.25, drift_evidence_ratio=0.5)
    assert (savings_row(savings)["harm"], savings_row(savings)["drift"]) == (
        "not measured: no request is judged yet",
        "not compared",
    )
    savings.harm_ratio.value, savings.harm_ratio.high = 0.02, 0.0616
    savings.eat_samples.add(max_nats=1.0, calibrated=40, seen=7)
    for edge, seen in ((1.0, 30), (5.0, 2)):
        savings.rank_samples.add(max_value=edge, calibrated=20, seen=seen)
    row = savings_row(savings)
    assert row["harm"] == "2.00 %, at most 6.16 %; allowed 1.00 %; evidence 25.00 %"
    assert row["drift"] == "EAT, 7 requests; The end marker's rank, 32 requests; evidence 50.00 %"
    savings.ClearField("drift_evidence_ratio")
    assert savings_row(savings)["drift"].endswith("32 requests"), "no replica leads, so the evidence is not known"


@pytest.mark.parametrize(
    ("stage", "shadow", "text", "level"),
    [
        (fleet_pb2.BUDGET_STAGE_UNSHORTENED, False, "unshortened", ""),
        (fleet_pb2.BUDGET_STAGE_LOWER_CAP, False, "lower cap", "warn"),
        (fleet_pb2.BUDGET_STAGE_FLOOR, False, "floor", "bad"),
        (fleet_pb2.BUDGET_STAGE_FLOOR, True, "floor, in shadow", ""),
    ],
)
def test_a_budget_that_shortens_thinking_stands_out(
    stage: fleet_pb2.BudgetStage.ValueType, shadow: bool, text: str, level: str
) -> None:
    entry = policy_pb2.BudgetPolicy(name="a", tenant="acme", effort="high", tokens_per_day=9, shadow=shadow)
    budget = fleet_pb2.Budget(policy=entry, stage=stage, used_tokens=12, left_ratio=-0.125)
    row = budgets.row(budget)
    assert (row["stage"], row["level"], row["left_ratio"]) == (text, level, -0.125)
    assert (row["requests"], row["used_tokens"]) == ("tenant acme, effort high", 12)
    shortens = f"Budget a shortens thinking: {text}, -12 % left."
    assert [line for _, line in budgets.attention([budget])] == ([shortens] if level else [])
    entry = policy_pb2.BudgetPolicy(name="a")
    assert budgets.row(fleet_pb2.Budget(policy=entry))["requests"] == "every request"


def test_a_budget_shows_what_is_left_before_what_it_saves_up() -> None:
    entry = policy_pb2.BudgetPolicy(name="a", tokens_per_minute=2_000, burst_tokens=9_000, tokens_per_day=1_000_000)
    row = budgets.row(fleet_pb2.Budget(policy=entry, minute_left_tokens=-12.4))
    assert (row["of_minute"], row["of_day"]) == ("-12 of 9,000", "")


def test_tenants_come_by_their_thinking() -> None:
    rows = budgets.tenant_rows({("a", "m"): 1, ("b", "m"): 3, ("", "n"): 0})
    assert [(row["tenant"], row["think_tokens"], row["share"]) for row in rows] == [
        ("b", 3, 0.75),
        ("a", 1, 0.25),
        ("", 0, 0.0),
    ]


def test_what_needs_attention_is_said_once_for_all_engines() -> None:
    gone = [{"level": "bad", "word": "gone", "id": f"gpu-{n}"} for n in range(5)]
    words = (("bad", "off", "c"), ("warn", "frozen", "a"), ("", "ready", "b"))
    rows = [*gone, *({"level": level, "word": word, "id": name} for level, word, name in words)]
    halted = Rollout(
        rollout_id=4,
        plan=Plan.model_validate({"step": [{"percent": 10}, {"percent": 100}]}),
        stable_revision=1,
        candidate_revision=2,
        state=State.HALTED,
        violation=GuardrailReading(guardrail="ttot_p99_ms", value=412.5, limit=250.0, observations=90),
        author="mara",
        reason="",
        create_time=NOW,
    )
    ended = halted.model_copy(update={"state": State.COMPLETED})
    freeze = freeze_row(FREEZES[7], [], NOW)
    assert attention(rows, [freeze], [halted, ended]) == [
        ("bad", "5 engines gone: gpu-0, gpu-1, gpu-2, and 2 more.", "engines"),
        ("bad", "1 engine with the agent off: c.", "engines"),
        ("warn", "Freeze 7 of a*, for 9 min longer: an incident.", "engines"),
        ("bad", "Rollout 4 is halted, step 1 of 2: revision 1 → 2 (ttot_p99_ms was 412.5, limit 250).", "policy"),
    ]
    assert attention(rows, [], [])[-1].text == "1 engine frozen: a.", "its own environment has frozen it"
    row = rollout_row(halted)
    assert (row["state"], row["level"], row["revisions"]) == ("halted", "bad", "1 → 2")
    assert row["reason"] == "ttot_p99_ms was 412.5, limit 250"


def test_a_value_of_a_rollout_never_looks_equal_to_its_limit() -> None:
    high = GuardrailReading(guardrail="harm_rate", value=0.100001, limit=0.1, observations=90)
    unknown = GuardrailReading(guardrail="nacks", limit=0.0, observations=0)
    plan = Plan.model_validate({"step": [{"percent": 100}]})
    rollout = Rollout(
        rollout_id=4,
        plan=plan,
        stable_revision=1,
        candidate_revision=2,
        state=State.HALTED,
        violation=high,
        guardrails=(high, unknown),
        author="",
        reason="",
        create_time=NOW,
    )
    view = active_view(rollout)
    assert view["violation"] == rollout_row(rollout)["reason"] == "harm_rate was 0.100001, limit 0.1"
    assert [(row["value"], row["limit"]) for row in view["guardrails"]] == [("0.100001", "0.1"), ("not measured", "0")]


def test_self_calibration_says_what_it_found_and_why_it_found_nothing() -> None:
    in_force = fleet_pb2.SelfCalibration(model="m", rule="EAT < 0.07 nats", saved_ratio=0.39, loss_bound=0.0047)
    in_force.max_loss, in_force.proved_on_requests, in_force.recorded_requests = 0.01, 1500, 40
    shown = self_calibration_row(in_force)
    assert shown["requests"] == "40 since then"
    proof = "saves 39.0 %; loses at most 0.47 % of the answers, allowed 1.00 %; 1,500 requests"
    assert shown["proof"] == f"EAT < 0.07 nats: {proof}"
    nothing = fleet_pb2.SelfCalibration(model="m", why="it may lose 3 %", needed_requests=1472)
    nothing.tried.add(requests=736, outcome="it may lose 3 %")
    shown = self_calibration_row(nothing)
    assert (shown["requests"], shown["proof"]) == ("0 of 1,472 for the next attempt", "none")
    assert shown["tried"] == "it may lose 3 %; tried on 736 requests: it may lose 3 %"
