"""The phase machine: every state and event, markers of every shape, and agreement with the control plane's table."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from meridian.v1 import agent_pb2

from meridian_agent.core.phases import (
    FLAG_END,
    FLAG_FROM_OUTPUT,
    FLAG_MARKER,
    NO_MARKERS,
    TAIL_TOKENS,
    TAKE_BACK_SHIFT,
    TRANSITIONS,
    Markers,
    Phase,
    PhaseState,
    TokenEvent,
    Work,
    begin,
)
from meridian_control.engine.request_table import RequestTable

# Markers of one token each; two spellings of one and of two tokens; gpt-oss channels, which share their first token.
SINGLE = Markers(((1,),), ((2,),))
SPELLED = Markers(((1,), (7, 1)), ((2,), (7, 2, 3)))
CHANNELS = Markers(((5, 6, 8),), ((5, 7, 8),))
# Markers with an end that overlaps with the start, and with an end that begins with another end.
OVERLAPPING = Markers(((1, 2),), ((2, 3), (2, 3, 4), (9,)))
ALL_MARKERS = {"single": SINGLE, "spelled": SPELLED, "channels": CHANNELS, "overlapping": OVERLAPPING}

TEXT, START, END = 90, 1, 2


def feed(state: PhaseState, tokens: list[int], markers: Markers) -> list[tuple[Phase, int]]:
    return [state.feed(token, markers) for token in tokens]


def taken_back(flags: int) -> int:
    return flags >> TAKE_BACK_SHIFT


# ------------------------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize(("phase", "event"), list(itertools.product(Phase, TokenEvent)))
def test_every_state_and_event(phase: Phase, event: TokenEvent) -> None:
    state = PhaseState(phase)
    belongs, flags = state.feed({TokenEvent.TEXT: TEXT, TokenEvent.START: START, TokenEvent.END: END}[event], SINGLE)
    assert state.phase is TRANSITIONS[phase, event]
    assert bool(flags & FLAG_MARKER) == (event is not TokenEvent.TEXT)
    ended = (phase, event) == (Phase.THINK, TokenEvent.END)
    assert bool(flags & FLAG_END) == ended
    assert state.ends == ended
    assert (state.think_tokens, state.output_tokens) == (
        event is TokenEvent.TEXT and phase is Phase.THINK,
        event is TokenEvent.TEXT and phase in (Phase.PROMPT, Phase.OUTPUT),
    )
    # The row of an end marker has the phase of the thinking that it ends; every other row has the phase after its
    # token.
    assert belongs is (Phase.THINK if ended else state.phase)


def test_the_table_says_what_the_machine_does() -> None:
    assert set(TRANSITIONS) == set(itertools.product(Phase, TokenEvent))
    assert TRANSITIONS[Phase.OUTPUT, TokenEvent.START] is Phase.THINK, "a start marker begins thinking again"
    assert TRANSITIONS[Phase.PROMPT, TokenEvent.TEXT] is Phase.OUTPUT, "text after the prompt is an answer"
    assert all(after is not Phase.PROMPT for after in TRANSITIONS.values())


def test_values_are_those_of_the_contract() -> None:
    named = {f"PHASE_{phase.name}": phase.value for phase in Phase if phase is not Phase.UNKNOWN}
    assert {**named, "PHASE_UNSPECIFIED": Phase.UNKNOWN} == dict(agent_pb2.Phase.items())


# --------------------------------------------------------------------------------------------------------- markers


END_OF_TWO = {"starts": [(6,)], "ends": [(3, 4), (5,)]}
# Markers, and what their refusal names.
UNUSABLE: list[tuple[dict[str, Any], str]] = [
    ({"starts": (), "ends": ()}, "marker"),
    ({"starts": [(1,)], "ends": ()}, "marker"),
    ({"starts": [()], "ends": [(2,)]}, "marker"),
    ({"starts": [(1,)], "ends": [()]}, "marker"),
    ({"starts": [(1, 2)], "ends": [(1, 2)]}, "marker"),
    ({"starts": [(1,), (3,)], "ends": [(2,), (3,)]}, "marker"),
    ({"starts": [(1,)], "ends": [(2,)], "own_ends": [((1,), (9,))]}, "own_ends"),
    *(({**END_OF_TWO, "closing": text}, "closing text") for text in ((5,), (1, 5, 2), (3, 4), (7, 3, 4, 7), (6,))),
]


@pytest.mark.parametrize(("markers", "names"), UNUSABLE)
def test_unusable_markers_are_refused(markers: dict[str, Any], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        Markers(**markers)


def test_no_markers_never_think() -> None:
    state = begin(NO_MARKERS, [1, 2, 3], True)
    feed(state, [1, 2, 3, 0], NO_MARKERS)
    assert (state.phase, state.think_tokens, state.output_tokens) == (Phase.UNKNOWN, 0, 0)
    read = begin(NO_MARKERS, [1], True)
    read.feed_some([2, 3, 4], 0, NO_MARKERS, Work(100))
    assert (read.phase, read.output_tokens) == (Phase.UNKNOWN, 0)


# K2 Horizon's markers: each effort has its own start and end, and a request's parser knows only those of its effort.
EFFORTS = Markers(((1,), (3,)), ((2,), (4,)), (7,), (8,), own_ends=(((1,), (2,)), ((3,), (4,))))


@pytest.mark.parametrize(("start", "end"), EFFORTS.own_ends)
def test_a_forced_end_is_that_of_the_start(start: tuple[int, ...], end: tuple[int, ...]) -> None:
    for state in (begin(EFFORTS, [50, *start, 51], True), begin(EFFORTS, [50], True)):
        if state.phase is not Phase.THINK:
            feed(state, [*start, 60], EFFORTS)
        assert state.phase is Phase.THINK
        assert state.ending(EFFORTS) == (7, *end)
        assert not state.may_be_in_marker(EFFORTS)
        assert EFFORTS.probe_of(state.start) == (*end, 8)
    assert EFFORTS.ending == (7, 2), "any end will do if the start is not known"


def test_own_ends_of_several_tokens_go_on_where_one_is_begun() -> None:
    markers = Markers(((1,), (3,)), ((5, 2), (5, 4)), own_ends=(((1,), (5, 2)), ((3,), (5, 4))))
    for start, end in ((1, 2), (3, 4)):
        state = begin(markers, [start], True)
        feed(state, [60, 5], markers)
        assert state.ending(markers) == (end,)


def test_the_longer_of_two_markers_with_one_end_wins() -> None:
    markers = Markers(((2,),), ((1, 2),))
    assert markers.match([1, 2]) == (TokenEvent.END, 2)
    assert markers.match([0, 2]) == (TokenEvent.START, 1)
    assert markers.match([2, 1]) == (TokenEvent.TEXT, 0)


def test_channels() -> None:
    """In gpt-oss's format nothing is open after the prompt; thinking and answer each begin with a channel of three
    tokens."""
    state = begin(CHANNELS, [40, 41], True)
    rows = feed(state, [5, 6, 8, 70, 71, 72, 5, 7, 8, 73, 74], CHANNELS)
    assert (state.phase, state.think_tokens, state.output_tokens, state.ends) == (Phase.OUTPUT, 3, 2, 1)
    assert rows[2] == (Phase.THINK, FLAG_MARKER | FLAG_FROM_OUTPUT | 2 << TAKE_BACK_SHIFT)
    assert rows[8] == (Phase.THINK, FLAG_MARKER | FLAG_END | 2 << TAKE_BACK_SHIFT)
    assert rows[9] == (Phase.OUTPUT, 0)


def test_a_marker_that_the_prompt_began() -> None:
    state = begin(CHANNELS, [40, 5, 6], True)
    assert state.phase is Phase.PROMPT
    assert feed(state, [8, 70], CHANNELS) == [
        (Phase.THINK, FLAG_MARKER | FLAG_FROM_OUTPUT),
        (Phase.THINK, 0),
    ]
    assert (state.think_tokens, state.output_tokens) == (1, 0), "the prompt's tokens are not counted"


# --------------------------------------------------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("prompt", "supported", "phase"),
    [
        ([], True, Phase.PROMPT),
        ([40, 41], True, Phase.PROMPT),
        ([40, START], True, Phase.THINK),
        ([40, START, 30], True, Phase.THINK),
        ([40, START, 30, END], True, Phase.OUTPUT),
        ([40, START, 30, END], False, Phase.PROMPT),
        ([40, START, END, *[30] * TAIL_TOKENS], True, Phase.OUTPUT),
        ([40, START, END, *[30] * (TAIL_TOKENS + 1)], True, Phase.PROMPT),
        # Earlier turns of the conversation thought; only the prompt's end counts.
        ([40, START, 50, END, 60, 61, 62, 63, 64], True, Phase.PROMPT),
        ([40, START, 50, END, 60, 61, 62, 63, START], True, Phase.THINK),
        ([START, 50, END, 60, START, 51, END, 30], True, Phase.OUTPUT),
        ([END, END, START, START], True, Phase.THINK),
    ],
)
def test_prompts(prompt: list[int], supported: bool, phase: Phase) -> None:
    assert begin(SINGLE, prompt, supported).phase is phase


def test_multi_token_history() -> None:
    history = [40, 5, 6, 8, 50, 5, 7, 8, 60, 61, 62, 63]
    assert begin(CHANNELS, history, True).phase is Phase.PROMPT
    assert begin(CHANNELS, [*history, 5, 6, 8], True).phase is Phase.THINK
    assert begin(CHANNELS, [*history, 5, 7, 8, 30], True).phase is Phase.OUTPUT
    assert begin(CHANNELS, [5, 7, 60, 5, 6], True).phase is Phase.PROMPT


TURN = 70


@pytest.mark.parametrize(
    ("prompt", "phase"),
    [
        # A user asks about the marker, or an earlier turn was cut in its thinking.
        ([40, START, 50, TURN, 60], Phase.PROMPT),
        ([40, START, TURN], Phase.PROMPT),
        ([40, TURN, 60, START], Phase.THINK),
        ([40, TURN, 60, START, 50, 51], Phase.THINK),
        ([40, START, 50, TURN, 60, START, END], Phase.OUTPUT),
    ],
)
def test_a_turn_ends_the_thinking_that_it_opened(prompt: list[int], phase: Phase) -> None:
    state = begin(replace(SINGLE, turn_ends=frozenset([TURN, 71])), prompt, True)
    assert (state.phase, state.start) == (phase, (START,) if phase is Phase.THINK else ())


@given(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 90]), max_size=30), st.sampled_from(sorted(ALL_MARKERS)))
def test_last_event_is_the_last_match(prompt: list[int], name: str) -> None:
    markers = ALL_MARKERS[name]
    expected = (TokenEvent.TEXT, 0)
    for at in range(len(prompt)):
        event, _ = markers.match(prompt[max(0, at + 1 - markers.longest) : at + 1])
        if event is not TokenEvent.TEXT:
            expected = (event, len(prompt) - 1 - at)
    assert markers.last_event(prompt) == expected


# ------------------------------------------------------------------------------------ agreement with the control plane


@st.composite
def generations(draw: st.DrawFn) -> tuple[Markers, list[int], list[int]]:
    """Draw markers, a prompt and a generation in which markers, pieces of markers and text are mixed."""
    markers = ALL_MARKERS[draw(st.sampled_from(sorted(ALL_MARKERS)))]
    whole = st.sampled_from([list(m) for m in (*markers.starts, *markers.ends)])
    pieces = st.one_of(whole, st.lists(st.integers(1, 10), min_size=1, max_size=3))
    prompt, tokens = (list(itertools.chain(*draw(st.lists(pieces, max_size=12)))) for _ in range(2))
    return markers, prompt, tokens


@given(generations(), st.integers(0, 8), st.booleans())
def test_counts_add_up_and_the_control_plane_agrees(
    generation: tuple[Markers, list[int], list[int]], step_tokens: int, supported: bool
) -> None:
    markers, prompt, tokens = generation
    state = begin(markers, prompt, supported)
    table = RequestTable(4)
    table.open(agent_pb2.RequestOpened(slot=3, phase=state.phase.value))
    columns, marker_tokens = agent_pb2.TokenColumns(), 0
    for at, token in enumerate(tokens, 1):
        phase, flags = state.feed(token, markers)
        marker_tokens += (1 + taken_back(flags)) if flags & FLAG_MARKER else 0
        assert flags & FLAG_MARKER or not taken_back(flags)
        columns.slot.append(3)
        columns.phase.append(phase.value)
        columns.flags.append(flags)
        columns.entropy_nats.append(0.5)
        columns.end_rank.append(1)
        columns.end_logprob_nats.append(-1.0)
        assert state.think_tokens + state.output_tokens + marker_tokens == at
        assert min(state.think_tokens, state.output_tokens) >= 0
        if len(columns.slot) > step_tokens:
            table.add_tokens(columns)
            columns.Clear()
            assert table.phase[3] == state.phase
            assert (table.think_tokens[3], table.output_tokens[3]) == (state.think_tokens, state.output_tokens)
    table.add_tokens(columns)
    assert table.phase[3] == state.phase
    assert (table.think_tokens[3], table.output_tokens[3]) == (state.think_tokens, state.output_tokens)


@given(generations())
def test_text_is_what_no_marker_covers(generation: tuple[Markers, list[int], list[int]]) -> None:
    """The counts agree with a second pass over the whole text, for markers that cannot overlap."""
    markers, _, tokens = generation
    assume(markers in (SINGLE, CHANNELS))
    state = PhaseState(Phase.PROMPT)
    feed(state, tokens, markers)
    covered: set[int] = set()
    for at in range(len(tokens)):
        _, length = markers.match(tokens[max(0, at + 1 - markers.longest) : at + 1])
        covered |= set(range(at + 1 - length, at + 1))
    assert state.think_tokens + state.output_tokens == len(tokens) - len(covered)


def test_a_forced_ending_writes_the_closing_text_first() -> None:
    markers = Markers((), ((3, 4), (5,)), (8, 9))
    assert (markers.end, markers.ending) == ((3, 4), (8, 9, 3, 4))
    state = PhaseState(Phase.THINK)
    for token in markers.ending:
        state.feed(token, markers)
    assert (state.phase, state.think_tokens, state.output_tokens) == (Phase.OUTPUT, 2, 0)


@pytest.mark.parametrize(
    ("tail", "writes"),
    [
        ([], [4, 3, 5, 7, 8]),
        ([90], [4, 3, 5, 7, 8]),
        # The model has begun an end, alone or as far as a start looks the same: the rest of the end is written. The
        # last two cases use the shorter spelling.
        ([90, 4], [3, 5, 7, 8]),
        ([90, 4, 3, 5], [7, 8]),
        ([90, 4, 3, 5, 7], [8]),
        ([90, 5, 7], [8]),
        ([90, 5], [7, 8]),
        # The model has begun a start: the start is completed, and thinking is ended after it.
        ([4, 3, 5, 6], [8, 4, 3, 5, 7, 8]),
        ([90, 5, 6], [8, 4, 3, 5, 7, 8]),
        # Tokens that only looked like the beginning of a marker are text.
        ([4, 3, 90], [4, 3, 5, 7, 8]),
        ([4, 3, 5, 7, 4], [3, 5, 7, 8]),
    ],
)
def test_a_forced_end_goes_on_where_the_model_has_begun(tail: list[int], writes: list[int]) -> None:
    """gpt-oss ends thinking with `end start channel final message` and begins it with `end start channel analysis
    message`; both also work without the first two tokens."""
    markers = Markers(((4, 3, 5, 6, 8), (5, 6, 8)), ((4, 3, 5, 7, 8), (5, 7, 8)))
    state = PhaseState(Phase.THINK)
    feed(state, tail, markers)
    assert list(state.ending(markers)) == writes
    assert state.may_be_in_marker(markers) == (writes != [4, 3, 5, 7, 8])
    feed(state, writes, markers)
    assert state.phase is Phase.OUTPUT
    feed(state, [90], markers)
    assert state.output_tokens == 1


def test_a_beginning_in_the_prompt_or_in_a_marker_is_not_gone_on_with() -> None:
    assert begin(CHANNELS, [5, 6, 8, 50, 5], True).ending(CHANNELS) == CHANNELS.ending
    state = PhaseState(Phase.THINK)
    feed(state, [1, 2], OVERLAPPING)
    assert state.ending(OVERLAPPING) == OVERLAPPING.ending
