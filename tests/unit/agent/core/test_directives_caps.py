"""Caps end thinking after exactly their number of tokens, also over draft tokens and half-written end markers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.core.phases import Markers, Phase
from meridian_agent.core.step_record import Outcome
from tests.fakes.engine import END, MARKERS, START, TEXT, FakeEngine
from tests.unit.directive_messages import TWO, cap, force, message, text_until_end

if TYPE_CHECKING:
    from meridian.v1 import agent_pb2

# ------------------------------------------------------------------------------------------------------------- caps


@pytest.mark.parametrize("markers", [MARKERS, TWO], ids=["one token", "two tokens"])
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_caps_are_exact(markers: Markers, tokens: int) -> None:
    engine = FakeEngine(markers)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, tokens)]))
    steps = text_until_end(engine, "a")
    assert steps == tokens + len(markers.ending)
    assert (tr.state.think_tokens, tr.forced, tr.ending) == (tokens, True, None)
    assert engine.outcomes == {1: [Outcome.APPLIED]}
    assert engine.records[-1].outcomes[0][2] == tokens
    engine.run({"a": TEXT})
    assert tr.state.output_tokens == 1


@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_the_requests_own_cap_needs_no_decision(tokens: int) -> None:
    engine = FakeEngine()
    tr = engine.open("a", own_cap=tokens)
    text_until_end(engine, "a")
    assert (tr.state.think_tokens, tr.forced) == (tokens, True)
    assert engine.outcomes == {}


def test_the_own_cap_is_enforced_before_a_larger_one() -> None:
    engine = FakeEngine()
    tr = engine.open("a", own_cap=2)
    engine.accept(message(caps=[cap(1, 0, 5)]))
    text_until_end(engine, "a")
    assert tr.state.think_tokens == 2
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY]}


def test_the_default_cap_holds_until_the_first_decision() -> None:
    engine = FakeEngine()
    engine.tracker.default_cap = 3
    ended, lifted, shadowed, larger = (engine.open(name) for name in "abcd")
    assert text_until_end(engine, "a") == 3 + 1
    for name in "bcd":
        assert engine.live[name].limit == 3
    engine.accept(message(caps=[cap(1, 0, 3), cap(2, 1, None), cap(3, 2, 3, shadow=True), cap(4, 3, 5)]))
    assert [tr.limit for tr in (lifted, shadowed, larger)] == [None, None, 5]
    engine.accept(message(caps=[cap(5, 3, None)]))
    assert larger.limit is None
    engine.take()
    assert ended.state.think_tokens == 3
    assert engine.outcomes[1] == [Outcome.APPLIED], "thinking had ended at the decision's cap before the decision came"


def test_an_ending_that_comes_before_the_cap() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 5)]))
    for token in (TEXT, TEXT, END, TEXT):
        engine.run({"a": token})
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY]}
    assert not tr.forced
    # The cap outlives its outcome: it also limits thinking that begins again, and counts all thinking tokens.
    for token in (START, TEXT, TEXT, TEXT):
        engine.run({"a": token})
    assert text_until_end(engine, "a") == 1
    assert (tr.state.think_tokens, tr.forced, engine.outcomes) == (5, True, {1: [Outcome.ENDED_NATURALLY]})


def test_a_cap_that_comes_after_thinking_still_holds_for_re_entry() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    engine.run({"a": END})
    engine.accept(message(caps=[cap(1, 0, 1)]))
    engine.run({"a": START})
    assert engine.outcomes == {1: [Outcome.ENDED_NATURALLY]}
    text_until_end(engine, "a")
    assert tr.state.think_tokens == 1


def test_a_cap_on_a_request_that_never_thinks() -> None:
    engine = FakeEngine()
    engine.open("a", prompt=[])
    engine.accept(message(caps=[cap(1, 0, 0)]))
    engine.run({"a": TEXT})
    assert engine.outcomes == {}
    engine.finish("a")
    engine.take()
    assert engine.outcomes == {1: [Outcome.REQUEST_GONE]}


def test_lifting_a_cap() -> None:
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 3)]))
    engine.run({"a": TEXT})
    engine.accept(message(caps=[cap(2, 0, None)]))
    for _ in range(5):
        engine.run({"a": TEXT})
    assert engine.thinking("a")
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED]}


def test_nobody_looks_for_a_lifted_cap() -> None:
    """A lifted cap makes a request no longer due, because no step can be noted as a whole while one of its requests is
    due."""
    engine = FakeEngine()
    engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 2)]))
    engine.run({"a": TEXT})
    engine.accept(message(caps=[cap(2, 0, None)]))
    for _ in range(3):
        engine.run({"a": TEXT})
    assert engine.tracker.due == {}


def test_a_newer_cap_supersedes() -> None:
    engine = FakeEngine()
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 3)]))
    engine.run({"a": TEXT})
    engine.accept(message(caps=[cap(2, 0, 6), cap(3, 0, 5)]))
    text_until_end(engine, "a")
    assert tr.state.think_tokens == 5
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.SUPERSEDED], 3: [Outcome.APPLIED]}


@pytest.mark.parametrize("newer", [cap(2, 0, None), cap(2, 0, 40), cap(2, 0, 2, shadow=True)])
def test_a_cap_lifted_while_its_ending_is_being_written(newer: agent_pb2.ThinkCap) -> None:
    """The agent never leaves half a marker in the text: it completes the marker, and each decision has one outcome."""
    engine = FakeEngine(TWO)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 2)]))
    for _ in range(3):
        engine.run({"a": TEXT})
    assert tr.ending is not None
    assert tr.ending.position == 1
    engine.accept(message(caps=[newer]))
    engine.run({"a": TEXT})
    assert (engine.thinking("a"), tr.state.think_tokens) == (False, 2)
    engine.finish("a")
    engine.take()
    assert engine.outcomes[1] == [Outcome.APPLIED]
    assert len(engine.outcomes[2]) == 1


def test_a_cap_raised_before_its_ending_was_written() -> None:
    """The old cap's end was prepared for this step, but the step did not reach it, so the new cap counts."""
    engine = FakeEngine(lookahead=2)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 1)]))
    engine.schedule()
    assert engine.mask({"a": [TEXT, TEXT]}) == {"a": {1: END}}
    engine.accept(message(caps=[cap(2, 0, 8)]))
    engine.feed("a", [77])
    engine.take()
    assert tr.ending is None
    text_until_end(engine, "a")
    assert tr.state.think_tokens == 8
    assert engine.outcomes == {1: [Outcome.SUPERSEDED], 2: [Outcome.APPLIED]}


# ------------------------------------------------------------------------------------------------------- draft rows


def test_draft_rows() -> None:
    engine = FakeEngine(lookahead=3)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 5)]))
    engine.schedule()
    assert engine.directives.forced_tokens(tr, 4, [TEXT] * 3) == {}, "five tokens are allowed, the step has four rows"
    assert engine.directives.forced_tokens(tr, 6, [TEXT] * 5) == {5: END}
    engine.feed("a", [TEXT, TEXT])
    assert tr.ending is None, "the step did not reach the forced row"
    assert engine.directives.forced_tokens(tr, 4, [TEXT] * 3) == {3: END}
    engine.feed("a", [TEXT, TEXT, TEXT, END])
    engine.take()
    assert (tr.state.think_tokens, tr.forced) == (5, True)
    assert engine.outcomes == {1: [Outcome.APPLIED]}


def test_the_row_after_the_last_allowed_token_is_reached_but_not_taken() -> None:
    engine = FakeEngine(lookahead=3)
    tr = engine.open("a", own_cap=2)
    assert engine.directives.forced_tokens(tr, 4, [TEXT] * 3) == {2: END}
    engine.feed("a", [TEXT, TEXT])
    assert tr.ending is not None
    assert engine.directives.forced_tokens(tr, 4) == {0: END}
    engine.feed("a", [END, TEXT])
    assert (tr.state.think_tokens, tr.state.output_tokens) == (2, 1)


def test_two_token_endings_over_draft_rows() -> None:
    engine = FakeEngine(TWO, lookahead=3)
    tr = engine.open("a")
    engine.accept(message(caps=[cap(1, 0, 1)]))
    assert engine.directives.forced_tokens(tr, 4, [TEXT] * 3) == {1: 5, 2: 6}
    engine.feed("a", [TEXT, 5])
    assert engine.directives.forced_tokens(tr, 4) == {0: 6}
    engine.feed("a", [6, TEXT, TEXT])
    engine.take()
    assert (tr.state.think_tokens, tr.state.output_tokens) == (1, 2)
    assert engine.outcomes == {1: [Outcome.APPLIED]}


def test_a_draft_that_ends_thinking_before_the_cap() -> None:
    """If a draft ends thinking before the cap, no second end marker may land in the answer (vLLM #54906)."""
    engine = FakeEngine(lookahead=3)
    tr = engine.open("a", own_cap=2)
    assert engine.directives.forced_tokens(tr, 4, [TEXT, END, TEXT]) == {}
    assert engine.directives.forced_tokens(tr, 4, [TEXT, TEXT, END]) == {2: END}


def test_a_draft_that_only_the_workers_know_may_end_thinking_before_the_cap() -> None:
    engine = FakeEngine(lookahead=3)
    tr = engine.open("a", own_cap=2)
    assert engine.directives.forced_tokens(tr, 4, [-1, -1, -1]) == {}
    assert engine.directives.forced_tokens(tr, 4, [TEXT, -1, -1]) == {}
    engine.feed("a", [TEXT, TEXT])
    assert engine.directives.forced_tokens(tr, 4, [-1, -1, -1]) == {0: END}


drafts_strategy = st.lists(st.sampled_from([TEXT, TEXT, 91, END, START]), max_size=3)


@given(
    st.integers(0, 12),
    st.sampled_from([MARKERS, TWO]),
    st.lists(
        st.tuples(
            drafts_strategy, st.lists(st.sampled_from([TEXT, TEXT, TEXT, 91, END, 5, 6]), min_size=4, max_size=4)
        ),
        min_size=1,
        max_size=20,
    ),
    st.lists(st.booleans(), min_size=20, max_size=20),
)
def test_caps_are_exact_with_any_drafts(
    limit: int, markers: Markers, steps: list[tuple[list[int], list[int]]], drafts_right: list[bool]
) -> None:
    """The engine yields what the model wanted up to the cap, and one end marker there."""
    engine = FakeEngine(markers, lookahead=3)
    tr = engine.open("a", own_cap=limit)
    yielded: list[int] = []
    for (drafts, wanted), right in zip(steps, drafts_right, strict=False):
        guesses = wanted[: len(drafts)] if right else drafts
        engine.schedule()
        engine.mask({"a": guesses})
        before = tr.state.phase
        tokens = engine.sample("a", wanted, guesses)
        engine.feed("a", tokens)
        engine.take()
        yielded += tokens
        if before is Phase.THINK and tr.state.phase is Phase.THINK and tr.ending is None:
            assert tr.state.think_tokens <= limit
        if not tr.forced and tr.ending is None:
            assert tokens == wanted[: len(tokens)], "no token may differ if none was forced"
        if tr.state.ends:
            # After the first end nothing is forced, unless thinking begins again.
            assert tr.state.ends == 1 or START in yielded
            break
    assert tr.state.think_tokens <= limit + (len(markers.ending) - 1 if tr.ending or not tr.state.ends else 0)
    if tr.forced:
        # The model's last token before the cap may begin the marker; then the agent completes this marker.
        begun = len(markers.end) > 1 and yielded[:limit][-1:] == [markers.end[0]]
        assert tr.state.think_tokens == limit - begun


@pytest.mark.parametrize("by_cap", [True, False])
@pytest.mark.parametrize(("begun", "rest"), [([], [5, 6, 7]), ([5], [6, 7]), ([5, 6], [7]), ([5, 6, 5], [6, 7])])
def test_a_marker_that_the_model_has_begun_is_completed(by_cap: bool, begun: list[int], rest: list[int]) -> None:
    """If the model has begun a marker, a cap or a force completes that marker; its tokens do not count as thinking."""
    engine = FakeEngine(Markers(((START,),), ((5, 6, 7),)))
    tr = engine.open("a", own_cap=2 + len(begun) if by_cap else None)
    for token in [TEXT, TEXT, *begun]:
        engine.run({"a": token})
    if not by_cap:
        engine.accept(message(forces=[force(1, 0)]))
    for _ in rest:
        engine.run({"a": TEXT})
    assert (tr.state.phase, tr.forced) == (Phase.OUTPUT, True)
    assert tr.state.think_tokens == 2 + (begun == [5, 6, 5]) * 2
    engine.run({"a": TEXT})
    assert tr.state.output_tokens == 1
