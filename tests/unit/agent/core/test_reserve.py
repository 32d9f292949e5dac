"""The answer reserve ends thinking so that exactly its number of tokens is left for the answer.

Drafts, markers of several tokens, closing texts and thinking that begins again make no difference.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.directives import CAPS
from meridian_agent.core.phases import (
    FLAG_BY_CAP,
    FLAG_BY_RESERVE,
    FLAG_END,
    TAIL_TOKENS,
    Markers,
    Phase,
    PhaseState,
    Work,
    begin,
)
from meridian_agent.core.step_record import Outcome
from meridian_agent.core.think_limit import ending_tokens, held_back
from tests.fakes.engine import END, MARKERS, START, TEXT, FakeEngine
from tests.reached import reached, reaches
from tests.unit.directive_messages import TWO, cap, message, text_until_end

CLOSING = Markers(((START,),), ((END,),), closing=(31, 32, 33))
TWO_CLOSING = Markers(((START,),), ((5, 6),), closing=(31, 32))
# A start marker and an end marker that begin with the same token, as Granite has them.
LONG = Markers(((5, 7, 8),), ((5, 6),), closing=(31,))
# A start marker that shares no token with the end marker.
APART = Markers(((7, 8, 9),), ((5, 6),))
# Two kinds of thinking, each with an end marker of its own.
PAIRS = Markers(((START,), (3,)), ((END,), (4,)), own_ends=(((START,), (END,)), ((3,), (4,))))
# Both markers may follow a message's end, and share their beginning, as gpt-oss's do.
HARMONY = Markers(((7, 8, 9), (5, 7, 8, 9)), ((5, 7, 6),), closing=(31,))
ALL = (MARKERS, TWO, CLOSING, TWO_CLOSING, LONG, APART, PAIRS, HARMONY)
NAMES = ("one token", "two tokens", "closing", "two and closing", "long start", "start apart", "pairs", "harmony")
MAX = 10**6


def generated(engine: FakeEngine, slot: int = 0) -> list[int]:
    """Return the flags of the request's generated tokens, oldest first."""
    rows = [zip(r.slots, r.flags, strict=True) for r in engine.records]
    return [flags for step in rows for s, flags in step if s == slot]


def left_after_end(engine: FakeEngine, most: int) -> int:
    """Return how many of the request's `most` tokens were left when its thinking had ended."""
    flags = generated(engine)
    return most - next(i for i, f in enumerate(flags, 1) if f & FLAG_END)


def details(engine: FakeEngine) -> dict[int, str]:
    return {decision_id: detail for r in engine.records for decision_id, _, _, detail, _ in r.outcomes}


@pytest.mark.parametrize("markers", ALL, ids=NAMES)
@pytest.mark.parametrize("reserve", [1, 7, 30])
@pytest.mark.parametrize("by_context", [False, True])
def test_the_answer_has_exactly_the_reserve(markers: Markers, reserve: int, by_context: bool) -> None:
    engine = FakeEngine(markers)
    limits: dict[str, Any] = (
        {"max_tokens": 500, "context_tokens": 160} if by_context else {"max_tokens": 160, "context_tokens": 500}
    )
    tr = engine.open("a", markers.starts[0], **limits)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=reserve)]))
    text_until_end(engine, "a", 170)
    assert left_after_end(engine, 160) == reserve
    assert tr.state.think_tokens == 160 - reserve - len(markers.end)
    assert (tr.forced, tr.ending, engine.outcomes) == (True, None, {1: [Outcome.APPLIED]})
    assert details(engine)[1] == f"answer_reserve_tokens: {reserve} of 160 tokens are left for the answer"
    assert generated(engine)[-1] & (FLAG_BY_CAP | FLAG_BY_RESERVE) == FLAG_BY_CAP | FLAG_BY_RESERVE


@pytest.mark.parametrize("markers", ALL, ids=NAMES)
@pytest.mark.parametrize("most", [1, 2, 5, 8, 12, 29, 30, 64])
def test_a_reserve_leaves_three_quarters_of_a_small_call_to_thinking(markers: Markers, most: int) -> None:
    """Clients that sample in pieces, such as beam search with its calls of one token, go on thinking."""
    engine = FakeEngine(markers)
    tr = engine.open("a", markers.starts[0], max_tokens=most)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=40)]))
    held = most // 4 - len(markers.ending)
    if held <= 0:
        for _ in range(most):
            engine.run({"a": TEXT})
        assert (tr.state.think_tokens, engine.outcomes) == (most, {})
        engine.finish("a")
        engine.run({})
        assert details(engine)[1] == f"answer_reserve_tokens: 40 tokens do not fit, 0 of {most} are left for the answer"
        return
    text_until_end(engine, "a", most)
    assert left_after_end(engine, most) == held
    assert tr.state.think_tokens - len(markers.closing) == most - most // 4
    assert details(engine)[1] == (
        f"answer_reserve_tokens: 40 tokens do not fit, {held} of {most} are left for the answer"
    )


def test_nothing_is_said_of_a_reserve_that_a_request_did_not_come_to() -> None:
    engine = FakeEngine()
    engine.open("a", MARKERS.starts[0], max_tokens=4)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=40)]))
    engine.run({"a": TEXT})
    engine.finish("a")
    engine.run({})
    assert (engine.outcomes, details(engine)[1]) == ({1: [Outcome.REQUEST_GONE]}, "")


@pytest.mark.parametrize("shadow", [False, True])
def test_a_reserve_holds_nothing_back_from_a_call_that_goes_on_thinking(shadow: bool) -> None:
    """The prompt holds open thinking with content, so an earlier call has begun it; a template's newlines are none."""
    for content, ends in ((0, True), (TAIL_TOKENS, True), (TAIL_TOKENS + 1, False), (500, False)):
        engine = FakeEngine()
        tr = engine.open("a", (START, *[TEXT] * content), max_tokens=40)
        engine.accept(message(caps=[cap(1, 0, MAX, shadow, reserve=9)]))
        for _ in range(40 - 9 - 1):
            engine.run({"a": TEXT})
        engine.run({"a": END if tr in engine.tracker.due else TEXT})
        assert (tr.state.phase is Phase.OUTPUT) == (ends and not shadow), content
        assert (Outcome.SHADOWED in engine.outcomes.get(1, [])) == (ends and shadow), content


def test_the_smaller_of_cap_and_reserve_holds_and_the_cap_wins_a_tie() -> None:
    for own, tokens, reserve, expected in (
        (None, 10, 5, (10, 0)),
        (None, 50, 5, (24, FLAG_BY_RESERVE)),
        (None, 24, 5, (24, 0)),
        (3, 50, 5, (3, 0)),
        (40, 50, 5, (24, FLAG_BY_RESERVE)),
    ):
        engine = FakeEngine()
        tr = engine.open("a", own_cap=own, max_tokens=30)
        engine.accept(message(caps=[cap(1, 0, tokens, reserve=reserve)]))
        text_until_end(engine, "a")
        assert (tr.state.think_tokens, generated(engine)[-1] & FLAG_BY_RESERVE) == expected


def test_the_reserve_of_the_settings_holds_until_the_first_decision() -> None:
    engine = FakeEngine()
    engine.tracker.limit_new(None, (8, 8), over=False)
    ended, replaced, lifted, shadowed = (engine.open(name, max_tokens=40 if name == "a" else 60) for name in "abcd")
    assert text_until_end(engine, "a") == 40 - 8
    engine.accept(
        message(caps=[cap(1, 0, MAX, reserve=8), cap(2, 1, MAX, reserve=3), cap(3, 2, None), cap(4, 3, MAX, True, 9)])
    )
    assert [tr.reserve_tokens for tr in (ended, replaced, lifted, shadowed)] == [8, 3, 0, 0]
    engine.take()
    assert engine.outcomes[1] == [Outcome.APPLIED], "the settings' reserve had ended thinking before the decision came"
    assert details(engine)[1] == "answer_reserve_tokens: 8 of 40 tokens are left for the answer"
    engine.tracker.limit_new(None, (8, 8), over=True)
    assert engine.open("e", max_tokens=20).reserve_tokens == 0


def test_the_lease_of_caps_ends_the_reserve() -> None:
    engine = FakeEngine()
    tr = engine.open("a", max_tokens=10)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=5)]))
    engine.directives.drop(CAPS)
    assert tr.reserve_tokens == 0
    for _ in range(9):
        engine.run({"a": TEXT})
    assert engine.thinking("a")


def test_a_longer_closing_text_leaves_room_earlier() -> None:
    """New settings may change the length of a forced end while a request thinks."""
    engine = FakeEngine()
    tr = engine.open("a", max_tokens=40)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=5)]))
    engine.run({"a": TEXT})
    engine.tracker.use(CLOSING)
    text_until_end(engine, "a")
    assert left_after_end(engine, 40) == 5
    assert tr.state.think_tokens == 40 - 5 - 1


# ----------------------------------------------------------------------------------------------------------- in shadow


@pytest.mark.parametrize("lookahead", [0, 3])
def test_a_reserve_in_shadow_reports_where_it_would_have_ended_thinking(lookahead: int) -> None:
    engine = FakeEngine(lookahead=lookahead)
    engine.open("a", max_tokens=44)
    engine.accept(message(caps=[cap(1, 0, 37, shadow=True, reserve=10)]))
    while engine.live["a"].state.think_tokens < 37:
        engine.schedule()
        engine.mask()
        engine.feed("a", [TEXT] * (1 + lookahead))
        engine.take()
    assert engine.thinking("a")
    assert engine.outcomes == {1: [Outcome.SHADOWED]}
    (outcome,) = (o for r in engine.records for o in r.outcomes)
    assert outcome[2:] == (33, "answer_reserve_tokens is 10", agent_pb2.FORCE_REASON_ANSWER_RESERVE)


def test_a_reserve_in_shadow_that_was_not_reached() -> None:
    engine = FakeEngine()
    engine.open("a", max_tokens=44)
    engine.open("b", max_tokens=44)
    engine.accept(message(caps=[cap(1, 0, 15, True, 10), cap(2, 1, 6, True, 10)]))
    for _ in range(8):
        engine.run({"a": TEXT, "b": TEXT})
    engine.run({"a": END, "b": TEXT})
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY], 2: [Outcome.SHADOWED]}
    assert details(engine)[2] == "", "the cap came first"


# --------------------------------------------------------------------------------------------------- markers and counts


@given(st.lists(st.sampled_from([TEXT, 31, START, END, 5, 6, 7, 8, 9, 3, 4]), max_size=60), st.sampled_from(ALL))
def test_every_generated_token_is_counted_once(tokens: list[int], markers: Markers) -> None:
    one = begin(markers, [7, 5], supports_think_disable=True)
    for token in tokens:
        one.feed(token, markers)
    some = begin(markers, [7, 5], supports_think_disable=True)
    some.feed_some(tokens, 0, markers, Work(10**9))
    assert one.generated_tokens == some.generated_tokens == len(tokens)
    assert one == some


def test_a_start_marker_that_the_model_has_begun_costs_the_answer_nothing() -> None:
    """A cap completes the marker. The reserve writes the end at once if the answer would lack the marker's rest, unless
    the beginning and the end would read as something else."""
    engine = FakeEngine(APART)
    engine.open("a", (7, 8, 9), max_tokens=60)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=10)]))
    for token in (*[TEXT] * 47, 7, TEXT, TEXT):
        engine.run({"a": token})
    assert left_after_end(engine, 60) == 10
    state = PhaseState(Phase.THINK, 8, tail=[TEXT, TEXT, 7], text_run=8, start=(7, 8, 9))
    assert ending_tokens(state, APART, 4) == (8, 9, 5, 6)
    assert [ending_tokens(state, APART, most) for most in (3, 2, 0, -5)] == [(5, 6)] * 4
    # With this end marker the beginning of the start marker and the end marker would read as a start marker.
    alike = Markers(((7, 5, 6),), ((5, 6, 4),))
    state = PhaseState(Phase.THINK, 8, tail=[TEXT, TEXT, 7], text_run=8, start=(7, 5, 6))
    assert ending_tokens(state, alike, 3) == (5, 6, 5, 6, 4)


# ------------------------------------------------------------------------------------------------------- whole outputs

WORDS = st.sampled_from([*[TEXT] * 20, 91, START, END, 5, 6, 7, 8, 9, 3, 4])
# Each step makes at least one token, so that every request reaches its limit.
MOST = 40
STEPS = st.lists(
    st.tuples(st.lists(WORDS, max_size=3), st.lists(WORDS, min_size=4, max_size=4)), min_size=MOST, max_size=MOST
)


def play(engine: FakeEngine, steps: list[Any], right: list[bool]) -> tuple[list[int], list[bool], list[int]]:
    """Run the steps; return the tokens, whether a mask forced each of them, and the step of each."""
    tokens: list[int] = []
    masked: list[bool] = []
    made_in: list[int] = []
    for (drafts, wanted), is_right in zip(steps, right, strict=False):
        guesses = wanted[: len(drafts)] if is_right else drafts
        engine.schedule()
        # The engine's scheduler also asks for requests that may begin to think within their drafts.
        tr = engine.live["a"]
        mask = engine.mask({"a": guesses}) if tr in engine.tracker.due else {}
        if not mask and tr.state.phase is not Phase.THINK:
            engine._masks = {"a": dict(engine.directives.forced_tokens(tr, 1 + len(guesses), guesses))}
        yielded = engine.sample("a", wanted, guesses)
        masked += [row in engine._masks.get("a", {}) for row in range(len(yielded))]
        engine.feed("a", yielded)
        engine.take()
        tokens += yielded
        made_in += [engine.step] * len(yielded)
    return tokens, masked, made_in


@reaches("an end that leaves exactly the reserve")
@given(
    st.sampled_from(ALL),
    st.integers(1, 12),
    st.sampled_from([*range(1, MOST), *[MOST] * MOST]),
    STEPS,
    st.lists(st.booleans(), min_size=MOST, max_size=MOST),
    st.sampled_from([True, True, True, False]),
)
def test_reserves_are_exact_with_any_drafts_markers_and_phases(  # noqa: PLR0917
    markers: Markers, reserve: int, most: int, steps: list[Any], right: list[bool], thinks: bool
) -> None:
    engine = FakeEngine(markers, lookahead=3)
    prompt = list(markers.starts[0]) if thinks else []
    engine.open("a", prompt, max_tokens=most)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=reserve)]))
    tokens, masked, made_in = play(engine, steps, right)
    flags = generated(engine)
    assert len(flags) == len(tokens) >= most
    state, run, ended_in = begin(markers, prompt, supports_think_disable=True), 0, 0
    wanted = reserve
    reserve = held_back(state, markers, wanted, most)
    fits = len(markers.ending_of(state.start)) + reserve <= most
    is_exact = False
    for count, (token, was_forced, step) in enumerate(zip(tokens[:most], masked, made_in, strict=False)):
        ending = len(markers.ending_of(state.start))
        thinks = state.phase is Phase.THINK
        reserve = held_back(state, markers, wanted, most)
        due = thinks and reserve > 0 and count + ending + reserve >= most
        opening = len(state.opening(markers))
        if not was_forced:
            # A step forces one end. If its drafts begin to think again after that end, the next step forces another.
            assert not due or ended_in == step, f"token {count} of {most} is a thinking token of the model's own"
        run = run + 1 if was_forced else 0
        if run == 1:
            # The beginning of a marker may make the forced end longer.
            assert thinks, "only thinking is ended"
            assert due or count + ending + opening + reserve >= most, f"token {count} of {most} is forced too early"
            is_exact = not state.may_be_in_marker(markers)
        state.feed(token, markers)
        if state.phase is Phase.THINK and not thinks:
            reserve = held_back(state, markers, wanted, most)
            fits = count + 1 + len(markers.ending_of(state.start)) + reserve <= most
        if flags[count] & FLAG_END and run:
            assert flags[count] & FLAG_BY_RESERVE
            left = most - count - 1
            assert not fits or left >= reserve
            if fits and is_exact:
                assert left == reserve, "the answer has exactly the reserve"
                reached("an end that leaves exactly the reserve")
            run, ended_in = 0, step


def test_an_end_that_begins_in_thinking_after_an_end_of_the_models_own_goes_on() -> None:
    """The model ends its thinking and begins to think again within its drafts, and the reserve begins in the same
    step."""
    engine = FakeEngine(CLOSING, lookahead=3)
    engine.open("a", CLOSING.starts[0], max_tokens=20)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=1)]))
    steps: list[Any] = (
        [([], [TEXT] * 4)] * 12 + [([TEXT, END, START], [TEXT, END, START, TEXT])] + [([], [TEXT] * 4)] * 4
    )
    tokens, _, _ = play(engine, steps, [False] * len(steps))
    assert tokens == [TEXT] * 13 + [END, START, *CLOSING.ending, TEXT]
    assert engine.outcomes[1] == [Outcome.APPLIED]


@pytest.mark.parametrize("markers", [MARKERS, CLOSING], ids=["one token", "closing"])
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_a_run_of_text_stops_before_the_reserve(markers: Markers, rows: int) -> None:
    """Steps of one text token each are counted as a whole only as long as no forced token can be due."""
    engine = FakeEngine(markers, lookahead=rows - 1)
    tr = engine.open("a", max_tokens=40)
    engine.accept(message(caps=[cap(1, 0, MAX, reserve=6)]))
    free = 40 - 6 - len(markers.ending)
    assert tr.text_tokens() == free - (rows - 1) - 1
    engine.run({"a": TEXT})
    assert tr.text_tokens() == free - (rows - 1) - 2
