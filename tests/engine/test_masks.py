"""When a forced end may be written, tested on vLLM's own requests without an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

from meridian_agent.core.directives import Directives
from meridian_agent.core.live_request import Cap, Ending
from meridian_agent.core.phases import Markers
from meridian_agent.core.request_info import RequestInfo
from meridian_agent.core.tracker import Tracker
from meridian_agent.engine.token_masks import TokenMasks

START, END, TEXT, BEGUN, LAST = 1, 2, 3, 4, 5
FLOOR, DRAFTS = 6, 4


class Thinker:
    """A request whose end is to be forced, and whose min_tokens is not reached in its thinking."""

    def __init__(self, lookahead: int, closing: tuple[int, ...] = ()) -> None:
        from vllm.v1.request import Request

        params = SamplingParams(min_tokens=FLOOR, stop_token_ids=[END], max_tokens=40)
        self.request: Any = Request("r", [START], params, None, arrival_time=0.0)
        self.tracker = tracker = Tracker(Markers(((START,),), ((END,),), closing=closing))
        tracker.lookahead = lookahead
        live = tracker.open(RequestInfo("r", "m", "", "", 1, 40, None), [START], 0, self.request)
        live.ending = Ending((END,), 1)
        tracker.due[live] = None
        self.masks = TokenMasks(tracker, Directives(tracker), words=1)


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_an_end_that_min_tokens_rules_out_waits_for_as_many_tokens_as_were_made(drafts: int) -> None:
    """Under asynchronous scheduling vLLM counts a place for each token that a step may make, even if no draft is
    accepted."""
    thinker = Thinker(lookahead=1 + 2 * drafts)
    request, masks = thinker.request, thinker.masks
    step = SimpleNamespace(num_scheduled_tokens={"r": 1 + drafts}, scheduled_spec_decode_tokens={"r": [-1] * drafts})
    while request.num_output_tokens < FLOOR:
        request.num_output_placeholders = 1 + drafts
        assert masks.with_ends(step, None) is None, request.num_output_tokens
        request.append_output_token_ids(TEXT)
    last = masks.with_ends(step, None)
    assert last is not None
    assert last.structured_output_request_ids == ["r"]


def forced(params: SamplingParams, markers: Markers, thought: list[int]) -> list[list[int]] | None:
    """Return the mask rows of a request with a cap of two tokens that has thought these; None for no rows."""
    from vllm.v1.request import Request

    request: Any = Request("r", [START], params, None, arrival_time=0.0)
    tracker = Tracker(markers)
    live = tracker.open(RequestInfo("r", "m", "", "", 1, 40, None), [START], 0, request)
    live.set_cap(Cap(0, 2, False, 0))
    tracker.feed(live, thought, 0)
    step = SimpleNamespace(num_scheduled_tokens={"r": 1}, scheduled_spec_decode_tokens={})
    made = TokenMasks(tracker, Directives(tracker), words=1).with_ends(step, None)
    return None if made is None else made.grammar_bitmask.tolist()


@pytest.mark.parametrize("allowed", [None, [START, END, BEGUN, TEXT], [START, END, BEGUN, TEXT, LAST]])
def test_the_rest_of_a_marker_is_forced_only_if_the_request_allows_it(allowed: list[int] | None) -> None:
    """The model has begun another end marker than the one that the agent would write."""
    params = SamplingParams(allowed_token_ids=allowed, max_tokens=40)
    rows = forced(params, Markers(((START,),), ((END,), (BEGUN, LAST))), [TEXT, BEGUN])
    assert rows == ([[1 << LAST]] if allowed is None or LAST in allowed else None)


@pytest.mark.parametrize(("stops", "ends"), [((), True), ((END,), True), ((TEXT,), False)])
def test_no_end_is_forced_whose_closing_text_stops_the_request(stops: tuple[int, ...], ends: bool) -> None:
    """A stop token in the closing text would end the request without an answer."""
    params = SamplingParams(stop_token_ids=list(stops), max_tokens=40)
    rows = forced(params, Markers(((START,),), ((END,),), closing=(LAST, TEXT)), [BEGUN, BEGUN])
    assert rows == ([[1 << LAST]] if ends else None)


@pytest.mark.parametrize(("trace", "ends"), [(None, True), ([TEXT] * 9, False)])
def test_no_end_is_forced_into_a_replayed_trace(trace: list[int] | None, ends: bool) -> None:
    """vLLM generates the trace's token all the same."""
    params = SamplingParams(max_tokens=40, trace_decode_token_ids=trace)
    rows = forced(params, Markers(((START,),), ((END,),)), [TEXT, TEXT])
    assert rows == ([[1 << END]] if ends else None)


@pytest.mark.parametrize(("constrained", "ends"), [((), True), ((0, 1, 2), False), ((2,), True)])
def test_no_end_begins_where_a_grammar_constrains_the_token(constrained: tuple[int, ...], ends: bool) -> None:
    """Behind a draft of the end marker vLLM constrains the rows of an answer that the forced token prevents. A grammar
    that allows all tokens to force does not matter."""
    from vllm.v1.core.sched.output import GrammarOutput

    thinker = Thinker(lookahead=1 + 2 * DRAFTS, closing=(BEGUN, TEXT))
    thinker.request.append_output_token_ids([TEXT] * FLOOR)
    rows = np.full((2 + DRAFTS, 1), -1, np.int32)
    for row in constrained:
        rows[1 + row] = 1 << END | 1 << BEGUN
    drafts = {"r": [TEXT, END, TEXT, TEXT], "other": []}
    step = SimpleNamespace(num_scheduled_tokens={"r": 1 + DRAFTS, "other": 1}, scheduled_spec_decode_tokens=drafts)
    masks = thinker.masks.with_ends(step, GrammarOutput(["other", "r"], rows))
    assert masks is not None
    made = masks.grammar_bitmask
    ending = [[1 << BEGUN], [1 << TEXT], [1 << END]]
    assert made[1:4].tolist() == (ending if ends else rows[1:4].tolist())
    details = [detail for *_, detail, _ in thinker.tracker.record.outcomes]
    assert details == ([] if ends else ["a grammar constrains the answer"])


def test_a_step_waits_for_tokens_that_may_be_the_last_of_min_tokens() -> None:
    thinker = Thinker(lookahead=1 + 2 * DRAFTS)
    # A step with drafts is under way, and one without drafts has been scheduled.
    thinker.request.num_output_placeholders = 1 + DRAFTS + 1
    step, waits = SimpleNamespace(num_scheduled_tokens={"r": 1}, scheduled_spec_decode_tokens={}), []
    for _ in range(FLOOR):
        waits.append(thinker.masks.waits_for_tokens(step))
        thinker.request.append_output_token_ids(TEXT)
    assert waits == [made + 1 + DRAFTS >= FLOOR for made in range(FLOOR)]


@pytest.mark.parametrize("drafts", [0, DRAFTS])
@pytest.mark.parametrize("before", [0, 1])
def test_a_request_waits_for_its_own_tokens_only(before: int, drafts: int) -> None:
    """vLLM counts a place for each token that a step may bring the request. before: places of the step before."""
    thinker = Thinker(lookahead=1 + 2 * drafts)
    thinker.request.append_output_token_ids([TEXT] * FLOOR)
    thinker.request.num_output_placeholders = 1 + drafts + before
    step = SimpleNamespace(num_scheduled_tokens={"r": 1 + drafts}, scheduled_spec_decode_tokens={"r": [-1] * drafts})
    assert thinker.masks.waits_for_tokens(step) is bool(before)
    assert (thinker.masks.with_ends(step, None, settled=False) is None) is bool(before)
