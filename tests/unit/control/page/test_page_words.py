"""The words for decisions and events: plain, and complete for all that the protocol names."""

from __future__ import annotations

import math
from typing import Any

import pytest
from meridian.v1 import agent_pb2, fleet_pb2

from meridian_control.capabilities.handover import rule as handover
from meridian_control.capabilities.preemption import rule as preemption
from meridian_control.common.decision_words import (
    DECISION_REASONS,
    ENDS,
    apart,
    comparison_texts,
    decision_text,
    outcome_text,
    short,
    spelled,
    why,
)
from meridian_control.common.enum_names import OUTCOMES, REASONS
from meridian_control.engine.part import UNREAD_PROBE
from meridian_control.journal.records import OWN_CAPS
from meridian_control.page.words import counts_text, end_row, event_row, life_rows


def event(kind: str, detail: str = "") -> fleet_pb2.RequestEvent:
    return fleet_pb2.RequestEvent(kind=kind, detail=detail, phase=agent_pb2.PHASE_THINK)


def decided(**fields: Any) -> fleet_pb2.RequestEvent:
    return fleet_pb2.RequestEvent(kind="decision", decision=fleet_pb2.LoggedDecision(**fields))


@pytest.mark.parametrize(
    ("seen", "text", "mark"),
    [
        (decided(kind="tier", reason="unreachable"), "KV blocks reused first", ""),
        (decided(kind="cap", reason="hard_cap"), "cap set", ""),
        (decided(kind="cap", reason="lifted"), "cap lifted, as scheduler.enabled is false", ""),
        (decided(kind="force", reason="eat"), "end of thinking: EAT is low and has settled", ""),
        (
            decided(kind="force", reason="rank", shadow=True),
            "end of thinking: the end marker ranks high, in shadow",
            "",
        ),
        (decided(kind="probe", reason="eat"), "EAT probe", "probe"),
        (decided(kind="force", reason="prime"), "end of thinking: prime", ""),
        (decided(kind="shift", reason="by_night"), "shift: by night", ""),
        (event("phase"), "thinking", ""),
        (event("think_end", "natural"), "thinking ended: the model ended it", ""),
        (event("think_end", "hard_cap"), "thinking ended: cap reached", "force"),
        (event("closed", "stop"), "closed: stop", ""),
        (event("opened"), "opened", ""),
    ],
)
def test_an_event_is_said_in_words(seen: fleet_pb2.RequestEvent, text: str, mark: str) -> None:
    row = event_row(seen)
    assert (row["text"], row["mark"]) == (text, mark)
    assert "_" not in row["text"]


def test_ids_and_names_in_an_event_stay_as_they_are() -> None:
    told = "request chatcmpl-Ab_1 of tenant Team_A: 412 tokens to compute again"
    assert event_row(event("preempted_for", told))["text"] == f"preempted for: {told}"


@pytest.mark.parametrize(
    ("life", "live", "state"),
    [
        ({"events": [event("opened"), event("stream_lost"), decided(kind="cap")]}, None, "lost"),
        ({"events": [event("stream_lost"), event("stream_back")]}, None, "live"),
        # The first of two replicas noticed late that its stream was lost.
        ({"events": [event("opened"), event("opened"), event("stream_lost")]}, None, "live"),
        ({"events": [event("opened"), event("opened"), event("stream_lost"), event("stream_lost")]}, None, "lost"),
        # A new stream took the place of one whose loss was not noticed.
        ({"events": [event("opened"), event("stream_back"), event("stream_lost")]}, None, "lost"),
        ({"events": [event("opened"), event("stream_lost")]}, {"think_tokens": 2}, "live"),
        ({"events": [event("closed"), event("stream_lost")], "close_time": {"seconds": 1}}, None, "finished"),
    ],
)
def test_a_life_is_live_until_its_end_or_the_loss_of_its_stream(life: Any, live: Any, state: str) -> None:
    assert life_rows(fleet_pb2.ExplainRequestResponse(life=life, live=live))["life"]["state"] == state


def test_every_reason_and_outcome_of_the_protocol_has_words() -> None:
    named = set(REASONS.values()) - {"unspecified", "extension"}
    assert named <= ENDS.keys()
    texts = {outcome_text("cap", number) for number in OUTCOMES}
    assert texts >= {"applied", "open", "in shadow", "refused by the engine", "thinking ended first"}
    assert "_" not in "".join(texts)


def test_the_reasons_of_capabilities_are_known() -> None:
    ours = {preemption.NO_PLACE, preemption.NO_KV_BLOCKS, UNREAD_PROBE, *OWN_CAPS, "budget", "pressure", "eat"}
    moves = {handover.KV_PRESSURE, handover.PREEMPTED_ANSWERS, handover.STEP_GAIN}
    moves |= {handover.OTHER_ENGINE, handover.TAKEN_BACK}
    assert ours | moves < DECISION_REASONS


def test_an_outcome_is_said_as_its_kind_of_decision_means_it() -> None:
    """No model ends a preemption or a handover."""
    for kind, text in (("preempt", "joined without it"), ("hand_over", "stayed on its engine")):
        assert outcome_text(kind, agent_pb2.OUTCOME_ENDED_NATURALLY) == text
        assert outcome_text(kind, agent_pb2.OUTCOME_APPLIED) == "applied"


def test_what_a_rule_compared_is_said_with_the_names_of_its_signals() -> None:
    rows = [
        fleet_pb2.Comparison(signal="eat_ema_nats", value=0.008, operator="<", limit_name="entropy.level", limit=0.06),
        fleet_pb2.Comparison(signal="boundary_ranks[2]", value=3, operator="<=", limit_name="x", limit=4),
        fleet_pb2.Comparison(signal="own_signal", value=float("nan"), operator="=", limit_name="y", limit=12345),
    ]
    decision = fleet_pb2.LoggedDecision(kind="force", reason="eat", comparisons=rows, detail="7 blocks")
    assert why(decision, True) == [
        "EAT mean in nats 0.008 < 0.06 (entropy.level)",
        "end marker's rank, 2 sentence ends earlier 3 ≤ 4 (x)",
        "own signal not measured = 12,345 (y)",
        "7 blocks",
    ]
    assert end_row(decision)["why"][0] == "EAT mean in nats 0.008 < 0.06"
    operator = fleet_pb2.LoggedDecision(operator_reason="stuck", outcome=agent_pb2.OUTCOME_REFUSED)
    assert (why(operator), end_row(operator)["level"]) == (["stuck"], "bad")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0089412, "0.00894"),
        (12, "12"),
        (1234.6, "1,235"),
        (0.5, "0.5"),
        (999.96, "1,000"),
        (math.nan, "not measured"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


@pytest.mark.parametrize(
    ("value", "limit", "texts"),
    [
        (0.09996, 0.1, ("0.09996", "0.1")),
        (1000.04, 1000, ("1,000.04", "1,000")),
        (12345.6, 1e4, ("12,346", "10,000")),
        (0.1 + 0.2, 0.3, ("0.30000000000000004", "0.29999999999999999")),
        (2, 2, ("2", "2")),
        (0.1234, 0.5678, ("0.123", "0.568")),
        (math.nan, 0.1, ("not measured", "0.1")),
    ],
)
def test_a_value_beside_its_limit_never_looks_equal_to_it(value: float, limit: float, texts: tuple[str, str]) -> None:
    assert apart(value, limit) == texts
    row = fleet_pb2.Comparison(signal="rpdi", value=value, operator="<", limit_name="x", limit=limit)
    assert list(comparison_texts(fleet_pb2.LoggedDecision(comparisons=[row]))) == [f"RPDI {texts[0]} < {texts[1]}"]


def test_counts_come_by_size() -> None:
    assert counts_text({"natural": 1191, "eat_shadowed": 3, "hard_cap": 3}.items()) == (
        "natural 1,191, EAT in shadow 3, hard cap 3"
    )
    assert (spelled("rpdi"), decision_text("probe", "harm")) == ("RPDI", "probe of harm")
