"""Decisions to hand requests over: which are refused, and the one outcome of each."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import ALL_BUT_CAPS, ORDER
from meridian_agent.core.hand_overs import stops
from meridian_agent.core.live_request import LiveRequest
from meridian_agent.core.phases import Markers
from meridian_agent.core.step_record import NOT_KNOWN, Outcome
from tests.fakes.engine import ABORT, END, LENGTH, MARKERS, START, STOP, TEXT, FakeEngine

URL = "http://b:8000"


def engine_with(markers: Markers = MARKERS, **own: Any) -> tuple[FakeEngine, LiveRequest]:
    """Return an engine that can hand requests over, with one thinking candidate."""
    engine = FakeEngine(markers)
    engine.directives.hand_overs.refusal = ""
    live = engine.open("a", **{"hand_over_candidate": True, **own})
    engine.run({"a": TEXT})
    return engine, live


def decide(engine: FakeEngine, decision_id: int, *, slot: int = 0, **fields: Any) -> None:
    decided = agent_pb2.HandOver(decision_id=decision_id, slot=slot, **{"url": URL, "ref": "r", **fields})
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
    ((_, outcome, think_tokens, detail, _),) = engine.take().outcomes
    assert (outcome, think_tokens, detail) == (Outcome.APPLIED, 1, "7 blocks")


APPLIED, SHADOWED, SUPERSEDED = Outcome.APPLIED, Outcome.SHADOWED, Outcome.SUPERSEDED
NATURALLY, GONE, OFF = Outcome.ENDED_NATURALLY, Outcome.REQUEST_GONE, Outcome.AGENT_OFF


@pytest.mark.parametrize(
    ("story", "outcomes", "changes", "in_force"),
    [
        ("decide stop", [NATURALLY], False, False),
        ("decide length", [NATURALLY], False, False),
        ("decide abort", [GONE], False, False),
        ("end text decide", [NATURALLY], False, False),
        # In shadow the request goes on here, and the outcome comes with the end of its thinking.
        ("shadow text", [], True, False),
        ("shadow text end", [SHADOWED], True, False),
        ("decide text", [], True, True),
        ("decide back", [SUPERSEDED, APPLIED], True, False),
        ("decide lease", [OFF], True, False),
        ("decide order", [], True, True),
    ],
)
def test_stories(story: str, outcomes: list[Outcome], changes: bool, in_force: bool) -> None:
    """`back` is a decision with an empty URL; `lease` ends all decisions, and `order` those of another part."""
    engine, live = engine_with()
    hand_overs, decisions = engine.directives.hand_overs, 0
    for event in story.split():
        if event in ("decide", "shadow", "back"):
            decisions += 1
            decide(engine, decisions, url="" if event == "back" else URL, shadow=event == "shadow")
        elif event in ("lease", "order"):
            engine.directives.drop(ALL_BUT_CAPS if event == "lease" else ORDER)
        elif event in ("text", "end"):
            engine.run({"a": TEXT if event == "text" else END})
        else:
            engine.finish("a", {"stop": STOP, "length": LENGTH, "abort": ABORT}[event])
    engine.take()
    assert engine.outcomes == {number: [outcome] for number, outcome in enumerate(outcomes, 1)}
    assert hand_overs.take_changed() == [live] * changes
    assert (hand_overs.of(live) is not None) == in_force


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
    ((_, outcome, _, told, _),) = engine.take().outcomes
    assert (outcome, told) == (Outcome.REFUSED, detail)
    assert engine.directives.hand_overs.of(live) is None


@pytest.mark.parametrize(("url", "ref", "is_refused"), [(2048, 128, False), (2049, 128, True), (2048, 129, True)])
def test_texts_that_no_control_plane_sends_are_refused(url: int, ref: int, is_refused: bool) -> None:
    """They would be kept, and written into the client's answer."""
    engine, live = engine_with()
    decide(engine, 1, url="u" * url, ref="r" * ref)
    assert (engine.directives.hand_overs.of(live) is None) == is_refused
    assert [outcome for _, outcome, *_ in engine.take().outcomes] == [Outcome.REFUSED] * is_refused


@pytest.mark.parametrize(
    ("markers", "tokens"),
    [
        (MARKERS, [END]),
        # The other ends may begin the answer, as <tool_call> does.
        (Markers(((START,),), ((END,), (5,), (6, 7))), [END]),
        (Markers(((START,), (8,)), ((END,), (5,), (6,)), own_ends=(((8,), (6,)),)), [END, 6]),
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
