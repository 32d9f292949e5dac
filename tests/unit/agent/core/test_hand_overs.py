"""Decisions to hand requests over: which are refused, and the one outcome of each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import ALL_BUT_CAPS, ORDER
from meridian_agent.core.hand_overs import stops
from meridian_agent.core.phases import Markers
from meridian_agent.core.step_record import NOT_KNOWN, Outcome
from tests.fakes.engine import ABORT, END, LENGTH, MARKERS, START, STOP, TEXT, FakeEngine

if TYPE_CHECKING:
    from meridian_agent.core.live_request import LiveRequest

URL = "http://b:8000"


def engine_with(markers: Markers = MARKERS, **own: Any) -> tuple[FakeEngine, LiveRequest]:
    """Return an engine that can hand requests over, with one thinking candidate."""
    engine = FakeEngine(markers)
    engine.directives.hand_overs.refusal = ""
    live = engine.open("a", **{"hand_over_candidate": True, **own})
    engine.run({"a": TEXT})
    return engine, live


def decide(engine: FakeEngine, decision_id: int, *, url: str = URL, shadow: bool = False, slot: int = 0) -> None:
    decided = agent_pb2.HandOver(decision_id=decision_id, slot=slot, url=url, ref="r", shadow=shadow)
    engine.accept(agent_pb2.Directives(step=engine.step, hand_overs=[decided]))


def test_a_request_is_handed_over_with_its_blocks() -> None:
    engine, live = engine_with()
    decide(engine, 1)
    assert engine.directives.hand_overs.take_changed() == [live]
    decided = engine.directives.hand_overs.of(live)
    assert decided is not None
    assert (decided.url, decided.ref) == (URL, "r")
    engine.feed("a", [END])
    engine.finish("a", handed_over=7)
    ((_, outcome, think_tokens, detail),) = engine.take().outcomes
    assert (outcome, think_tokens, detail) == (Outcome.APPLIED, 1, "7 blocks")


@pytest.mark.parametrize(
    ("end", "outcome"),
    [(STOP, Outcome.ENDED_NATURALLY), (LENGTH, Outcome.ENDED_NATURALLY), (ABORT, Outcome.REQUEST_GONE)],
)
def test_a_request_that_ends_before_its_marker(end: int, outcome: Outcome) -> None:
    engine, _ = engine_with()
    decide(engine, 1)
    engine.finish("a", end)
    engine.take()
    assert engine.outcomes == {1: [outcome]}


def test_in_shadow_the_request_goes_on_and_the_outcome_comes_with_the_end_of_thinking() -> None:
    engine, live = engine_with()
    decide(engine, 1, shadow=True)
    assert engine.directives.hand_overs.of(live) is None
    engine.run({"a": TEXT})
    assert not engine.outcomes
    engine.run({"a": END})
    assert engine.outcomes == {1: [Outcome.SHADOWED]}


def test_an_empty_url_takes_a_handover_back() -> None:
    engine, live = engine_with()
    decide(engine, 1)
    engine.directives.hand_overs.take_changed()
    decide(engine, 2, url="")
    assert engine.directives.hand_overs.take_changed() == [live]
    assert engine.directives.hand_overs.of(live) is None
    engine.take()
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED]}


@pytest.mark.parametrize(
    ("own", "markers", "refusal", "detail"),
    [
        ({"hand_over_candidate": False}, MARKERS, "", "no relay stands ready to continue the request"),
        ({}, Markers(((START,),), ((END, 3),)), "", "the end marker has several tokens"),
        ({}, MARKERS, "kv_role is kv_consumer", "kv_role is kv_consumer"),
        ({}, Markers(((START,),), ((END,),), unknown="no parser"), "", NOT_KNOWN),
    ],
)
def test_what_cannot_be_handed_over_is_refused(
    own: dict[str, Any], markers: Markers, refusal: str, detail: str
) -> None:
    engine, live = engine_with(markers, **own)
    engine.directives.hand_overs.refusal = refusal
    decide(engine, 1)
    ((_, outcome, _, told),) = engine.take().outcomes
    assert (outcome, told) == (Outcome.REFUSED, detail)
    assert engine.directives.hand_overs.of(live) is None


def test_a_request_that_answers_already_stays() -> None:
    engine, _ = engine_with()
    engine.run({"a": END})
    engine.run({"a": TEXT})
    decide(engine, 1)
    engine.take()
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY]}


@pytest.mark.parametrize(("parts", "stays"), [(ALL_BUT_CAPS, False), (ORDER, True)])
def test_the_end_of_the_lease_lets_requests_answer_where_they_are(parts: int, stays: bool) -> None:
    engine, live = engine_with()
    decide(engine, 1)
    engine.directives.drop(parts)
    engine.take()
    assert (engine.directives.hand_overs.of(live) is not None) == stays
    assert engine.outcomes == ({} if stays else {1: [Outcome.AGENT_OFF]})


@pytest.mark.parametrize(
    ("markers", "tokens"),
    [
        (MARKERS, [END]),
        (Markers(((START,),), ((END,), (5,), (6, 7))), [END, 5]),
        (Markers(((START,), (8,)), ((END,), (6, 7)), own_ends=(((8,), (6, 7)),)), []),
    ],
)
def test_the_tokens_that_stop_a_request(markers: Markers, tokens: list[int]) -> None:
    assert stops(markers) == sorted(tokens)


@given(st.lists(st.sampled_from(["decide", "shadow", "back", "end", "freeze", "lease"]), max_size=12), st.booleans())
def test_each_decision_has_one_outcome(events: list[str], aborted: bool) -> None:
    engine, live = engine_with()
    made = 0
    for event in events:
        if event in ("decide", "shadow", "back"):
            made += 1
            decide(engine, made, url="" if event == "back" else URL, shadow=event == "shadow")
        elif event == "freeze":
            engine.directives.freeze()
        elif event == "lease":
            engine.directives.drop(ALL_BUT_CAPS)
        elif engine.directives.hand_overs.of(live) is None:
            engine.run({"a": END if engine.thinking("a") else START})
    armed = engine.directives.hand_overs.of(live) is not None
    engine.finish("a", ABORT if aborted else STOP, handed_over=3 if armed and not aborted else None)
    engine.take()
    assert sorted(engine.outcomes) == list(range(1, made + 1))
    assert all(len(outcomes) == 1 for outcomes in engine.outcomes.values())
    assert not engine.directives.hand_overs.take_changed()
