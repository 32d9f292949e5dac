"""Requests that the agent reads again after a fault: what it finds out about them, and how much of a step that
takes."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meridian_agent.core import catch_up as adoption
from meridian_agent.core.catch_up import NEW_TOKENS, STEP_TOKENS, CatchUp, state_of_new
from meridian_agent.core.phases import LOOK_TOKENS, PART_TOKENS, WALK_TOKENS, Markers, PhaseState, begin
from tests.fakes.counted import Counted
from tests.fakes.lines import lines_run

SINGLE = Markers(((1,),), ((2,),))
# Markers like those of gpt-oss and Granite: several tokens, some of which are text elsewhere.
CHANNELS = Markers(((5, 6, 8),), ((5, 7, 8), (9,)))
MARKERS = st.sampled_from([SINGLE, CHANNELS])
TOKENS = st.lists(st.sampled_from([1, 2, 5, 6, 7, 8, 9, 40, 41]), max_size=120)
LONG = 2 * STEP_TOKENS


def request(prompt: list[int], output: list[int]) -> Any:
    return SimpleNamespace(prompt_token_ids=prompt, output_token_ids=output, is_finished=lambda: False)


def test_a_session_whose_output_becomes_prompt_is_read_again() -> None:
    """With a streaming session's next input vLLM takes the generated tokens into the prompt, perhaps while the agent
    reads them."""
    session = request([1], [40] * LONG)
    reading = CatchUp([session])
    assert reading.some(SINGLE, True) == []
    session.prompt_token_ids, session.output_token_ids = [1, 40, 2], [41]
    [(found, state)] = reading.some(SINGLE, True)
    assert (found, state) == (session, read_at_once(SINGLE, [1, 40, 2], [41], True))


def read_at_once(markers: Markers, prompt: Any, output: Any, disabled: bool) -> PhaseState:
    state = begin(markers, prompt, disabled)
    for token in output:
        state.feed(token, markers)
    return state


@given(MARKERS, st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=4), st.booleans(), st.integers(1, 400))
def test_what_is_read_bit_by_bit_is_what_was_there(
    markers: Markers, texts: list[tuple[list[int], list[int]]], disabled: bool, step_tokens: int
) -> None:
    """Requests that are read in parts get the same state as requests that are read at once, also if they go on
    meanwhile."""
    requests = [request(list(prompt), list(output)) for prompt, output in texts]
    found: list[tuple[Any, PhaseState]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adoption, "STEP_TOKENS", step_tokens)
        under_way = CatchUp(requests)
        for token in itertools.cycle([40, 41, 2, 5, 40, 1]):
            for ref, state in (new := under_way.some(markers, disabled)):
                assert state == read_at_once(markers, ref.prompt_token_ids, ref.output_token_ids, disabled)
            found += new
            if not under_way:
                break
            for ref in requests:
                if len(ref.output_token_ids) < 200:
                    ref.output_token_ids.append(token)
    assert [ref for ref, _ in found] == requests


def each(count: int, apart: int, token: int) -> list[int]:
    """Return text of `count` tokens with `token` at every `apart`-th place."""
    return [token if at % apart == 0 else 100 + at % 7 for at in range(count)]


@pytest.mark.parametrize("apart", [1, 3, 64, 65, 256, LONG])
@pytest.mark.parametrize(
    ("markers", "token", "in_prompt"),
    [
        (SINGLE, 2, False),
        (CHANNELS, 9, False),
        # Token 8 ends a marker only after other tokens, which are missing here, so the agent must look at it and finds
        # text.
        (CHANNELS, 8, False),
        (CHANNELS, 8, True),
    ],
)
def test_a_step_does_no_more_where_markers_are_dense(markers: Markers, token: int, in_prompt: bool, apart: int) -> None:
    """A step runs fewer lines of code than it may read tokens of text, whatever the markers are."""
    text = each(LONG, apart, token)
    ref = request(text, []) if in_prompt else request([40], text)
    under_way, steps = CatchUp([ref]), list[int]()
    while under_way:
        steps.append(lines_run("meridian_agent", lambda: under_way.some(markers, True)))
    assert max(steps) < STEP_TOKENS / 2
    # The reading also ends: only the part in which a step stops is searched a second time.
    again = PART_TOKENS * (1 + WALK_TOKENS)
    work = LONG * (1 + WALK_TOKENS) + LONG / apart * LOOK_TOKENS
    assert len(steps) <= work / (STEP_TOKENS - again) + 1


def test_many_requests_are_taken_up_in_turn() -> None:
    under_way = CatchUp(request([1], []) for _ in range(100))
    steps = []
    while under_way:
        steps.append(len(under_way.some(SINGLE, True)))
    assert sum(steps) == 100
    assert max(steps) == STEP_TOKENS // adoption.REQUEST_TOKENS


def test_other_markers_have_a_request_read_anew() -> None:
    ref = request([1], each(LONG, LONG, 2))
    under_way = CatchUp([ref])
    assert under_way.some(SINGLE, True) == []
    found: list[tuple[Any, PhaseState]] = []
    while not found:
        found = under_way.some(CHANNELS, True)
    assert found == [(ref, read_at_once(CHANNELS, [1], ref.output_token_ids, True))]


def test_a_request_that_ends_while_it_is_read_is_let_go() -> None:
    ended, other = request([1], each(LONG, LONG, 2)), request([1], [])
    under_way = CatchUp([ended, other])
    under_way.some(SINGLE, True)
    ended.is_finished = lambda: True
    ((ref, _),) = under_way.some(SINGLE, True)
    assert ref is other
    assert not under_way


@given(MARKERS, TOKENS, st.booleans())
def test_a_new_request(markers: Markers, prompt: list[int], disabled: bool) -> None:
    assert state_of_new(request(prompt, []), markers, disabled) == begin(markers, prompt, disabled)


@pytest.mark.parametrize("marked", [False, True])
def test_a_new_request_with_a_million_tokens(marked: bool) -> None:
    """If a prompt ends in a marker, nearly nothing of the prompt is read; otherwise a bounded part is read at once and
    the rest later."""
    prompt = Counted([40] * 999_999 + [1 if marked else 40])
    new = request(prompt, [])
    state = state_of_new(new, SINGLE, True)
    assert prompt.read <= 2 * PART_TOKENS if marked else NEW_TOKENS <= prompt.read <= NEW_TOKENS + PART_TOKENS
    assert (state is not None) == marked
    under_way, steps, most = CatchUp(), 0, 0
    under_way.extend([new])
    while under_way:
        before, steps = prompt.read, steps + 1
        found = under_way.some(SINGLE, True)
        most = max(most, prompt.read - before)
    assert most <= STEP_TOKENS + PART_TOKENS
    assert steps <= 1 + len(prompt) // STEP_TOKENS
    assert found == [(new, begin(SINGLE, list(prompt), True))]
