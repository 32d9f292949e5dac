"""A model that stops while it thinks, on the real engine: the request goes on, ends its thinking and answers.

`tests/engine/matrix` compares the answer with stock's on both runners, under asynchronous scheduling and with drafts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams

from meridian_agent.vllm_adapter import premature_stops
from tests.engine import Run, cases, chat, paced, prompt_ids
from tests.engine.pacing import Settled
from tests.engine.policies import ending_turns
from tests.engine.test_decisions import opened
from tests.engine.test_reserve import ends, reserve
from tests.processes import Control, wait_for

MOST = 100
# The thinking token at which the model stops.
AT = 16


@pytest.fixture
def stop(llm: Any, agent: Any, control: Control) -> Iterator[int]:
    """Yield a token that the model generates as its token AT, and not before, and that ends its turns."""
    (free,) = chat(llm, [opened()], SamplingParams(temperature=0.0, max_tokens=AT + 1))
    assert free.index(free[AT]) == AT
    with ending_turns(free[AT:]):
        yield free[AT]


def stopping(stop: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": MOST, "stop_token_ids": [stop], **more})


def test_by_default_a_chat_answers_and_a_completion_stops(llm: Any, agent: Any, control: Control, stop: int) -> None:
    """Stock vLLM returns a chat without an answer, with `finish_reason: stop`."""
    control.apply({})
    before, preempted = ends(control), agent.preempted_think
    (completed,) = chat(llm, [opened()], stopping(stop))
    assert (len(completed), completed[AT]) == (AT + 1, stop)
    assert ends(control) == before
    turns, template = [{"role": "user", "content": opened()["prompt"]}], opened()["template"]
    (output,) = llm.chat(turns, stopping(stop), chat_template_kwargs=template, use_tqdm=False)
    tokens, end = list(output.outputs[0].token_ids), agent.tracker.markers.end[0]
    assert tokens[: AT + 1] == [*completed[:AT], end]
    assert len(tokens) > AT + 2
    assert ends(control)["premature_stop"] == before.get("premature_stop", 0) + 1
    assert agent.preempted_think == preempted, "memory is not short"


def test_explain_shows_the_stop_and_what_is_left(
    llm: Any, agent: Any, control: Control, settled: Settled, stop: int
) -> None:
    control.apply(reserve(10))
    run = Run(llm)
    run.add("early", opened(), stopping(stop))
    run.until(settled=settled)
    control.settled()
    explained = control.explain("early")
    assert [e.detail for e in explained.events if e.kind == "think_end"] == ["premature_stop"]
    details = [e.decision.detail for e in explained.events if e.decision.kind == "cap"]
    assert details == [f"the model stopped while it thought, {MOST - AT - 1} of {MOST} tokens are left for the answer"]


def test_in_shadow_the_model_stops_and_the_stop_is_counted(
    llm: Any, agent: Any, control: Control, settled: Settled, stop: int
) -> None:
    before = ends(control)
    control.apply(reserve(10, shadow=True))
    # The stop counts once the request's own reserve is known.
    (tokens,) = paced(llm, [opened()], stopping(stop), settled)
    assert (len(tokens), tokens[AT]) == (AT + 1, stop)
    # A stop that would stay in force, too, does not count.
    end = agent.tracker.markers.end[0]
    (tokens,) = paced(llm, [opened()], stopping(stop, stop_token_ids=[stop, end]), settled)
    assert (len(tokens), tokens[AT]) == (AT + 1, stop)
    after = ends(control)
    assert after["premature_stop_shadowed"] == before.get("premature_stop_shadowed", 0) + 1
    assert after.get("answer_reserve_shadowed") == before.get("answer_reserve_shadowed")


@pytest.mark.parametrize(
    "kept",
    ["no reserve", "a client's own stop token", "ends at the marker", "no marker allowed", "tool call", "seed"],
)
def test_a_stop_that_stays_as_stock_has_it(llm: Any, agent: Any, control: Control, stop: int, kept: str) -> None:
    end, params, calls, at = agent.tracker.markers.end[0], stopping(stop), list[int](), AT
    if kept == "a client's own stop token":
        (free,) = chat(llm, [opened()], SamplingParams(temperature=0.0, max_tokens=1))
        params, at = stopping(free[0]), 0
    elif kept == "ends at the marker":
        params = stopping(stop, stop_token_ids=[stop, end])
    elif kept == "seed":
        # Torch's generators on CPUs cannot be rewound, so nothing may be computed again.
        params = stopping(stop, seed=7)
    elif kept == "no marker allowed":
        params = stopping(stop, logit_bias={end: -math.inf})
    elif kept == "tool call":
        calls = [stop]
    with ending_turns([], calls):
        control.apply(reserve(0 if kept == "no reserve" else 10))
        (tokens,) = chat(llm, [opened()], params)
    assert (len(tokens), tokens[at]) == (at + 1, params.stop_token_ids[0])


def test_each_sequence_of_a_request_goes_on(llm: Any, agent: Any, control: Control, stop: int) -> None:
    control.apply(reserve(10))
    before = ends(control)
    params = stopping(stop, n=2, temperature=1.0, top_k=1)
    (output,) = llm.generate([{"prompt_token_ids": prompt_ids(llm, opened())}], params, use_tqdm=False)
    end = agent.tracker.markers.end[0]
    assert [list(o.token_ids).index(end) for o in output.outputs] == [AT, AT]
    assert ends(control)["premature_stop"] == before.get("premature_stop", 0) + 2


def test_a_text_that_a_grammar_has_completed_ends(llm: Any, agent: Any, control: Control) -> None:
    """A start marker in the text is content, although the model thinks again by its tokens."""
    control.apply(reserve(10))
    text = StructuredOutputsParams(regex="A<think>B")
    answering = {**cases()[0], "template": {"enable_thinking": False}}
    (tokens,) = chat(llm, [answering], SamplingParams(temperature=0.0, max_tokens=MOST, structured_outputs=text))
    assert llm.get_tokenizer().convert_ids_to_tokens(tokens) == ["A", "<think>", "B", "<|im_end|>"]


def test_a_pause_that_waits_for_the_requests_does_not_wait_for_ever(
    llm: Any, agent: Any, scheduler: Any, control: Control, stop: int
) -> None:
    """vLLM takes no preempted request in again before it is resumed, so the request ends at its stop, as in stock."""
    from vllm.v1.core.sched.interface import PauseState

    control.apply(reserve(10))
    run = Run(llm)
    run.add("r", opened(), stopping(stop))
    run.until(lambda: len(run.tokens["r"]) > 2)
    scheduler.set_pause_state(PauseState.PAUSED_NEW)
    try:
        run.until(limit=2 * AT)
    finally:
        scheduler.set_pause_state(PauseState.UNPAUSED)
    assert (len(run.tokens["r"]), run.tokens["r"][AT], run.finished["r"]) == (AT + 1, stop, "stop")


def test_a_freeze_between_two_steps_after_the_stop_leaves_an_answer(
    llm: Any, agent: Any, control: Control, stop: int
) -> None:
    """The freeze drops the end that was to follow the stop; once it is over, the model stops again."""
    control.apply(reserve(10))
    run, lease = Run(llm), agent.link.lease
    run.add("r", opened(), stopping(stop))
    run.until(lambda: agent.tracker.preempted)
    control.freeze()
    wait_for(lease.frozen, 20, "the freeze to arrive")
    control.thaw()
    wait_for(lambda: not lease.frozen(), 20, "the end of the freeze to arrive")
    run.until()
    assert run.tokens["r"][AT] == agent.tracker.markers.end[0]
    assert len(run.tokens["r"]) > AT + 1


@pytest.mark.parametrize("at", ["take_out", "resume"])
def test_a_fault_leaves_stock_and_no_request_behind(llm: Any, agent: Any, control: Control, stop: int, at: str) -> None:
    """Either the client sees the stop, as from stock vLLM, or the request thinks on until it stops again."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    control.apply(reserve(10))

    def fails(*_: Any) -> None:
        raise RuntimeError("made by the test")

    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(type(agent.stops), at, fails)
        (tokens,) = chat(llm, [opened()], stopping(stop))
    assert (len(tokens), tokens[AT]) == (AT + 1, stop)
    assert "(fails)" in scheduler._guard.fault
    assert not scheduler.requests
    assert premature_stops.refusal(scheduler) == ""
    scheduler._guard._back_at = 0.0
    # A stream whose Hello reports a rest lasts as long as the rest.
    scheduler._lifecycle.link.restart()
    chat(llm, [opened()], SamplingParams(temperature=0.0, max_tokens=AT))
    assert not scheduler._guard.fault
