"""The answer reserve on the real engine: exactly its number of tokens is left for the answer, whatever limits it.

`tests/engine/matrix` runs the reserve on both runners, under asynchronous scheduling, with drafts, and where the
context ends a request.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from meridian_agent.core import guard as guard_module
from tests.engine import SHORT, Run, chat, paced, prompt_ids, rebuild
from tests.engine.pacing import Settled
from tests.engine.test_decisions import endless, opened
from tests.engine.test_fail_static import kill, lost, state_file  # noqa: F401 - a fixture
from tests.engine.test_faults import rebuilt  # noqa: F401 - a fixture
from tests.engine.test_pressure import half_the_cache
from tests.processes import Control, wait_for


def reserve(tokens: int, **scheduler: Any) -> dict[str, Any]:
    return {"scheduler": {"answer_reserve_tokens": tokens, "answer_reserve_for": "all", **scheduler}}


def ends(control: Control) -> dict[str, int]:
    return dict(control.settled().ends)


def test_a_forced_end_of_several_tokens_leaves_the_reserve(llm: Any, agent: Any, control: Control) -> None:
    """The closing text and all tokens of the marker come out of the thinking, not out of the answer."""
    vocabulary, end = llm.get_tokenizer().get_vocab(), agent.tracker.markers.end[0]
    marker = [vocabulary["."], end, vocabulary["."]]
    start = list(agent.tracker.markers.starts[0])
    model = {"closing_text": "Wait . Wait ", "think_start_token_ids": start, "think_end_token_ids": marker}
    control.apply({**reserve(12), "model": {"maze": model}})
    (kept,) = chat(llm, [opened()], endless(agent, max_tokens=80))
    closing = llm.get_tokenizer().encode("Wait . Wait ", add_special_tokens=False)
    assert kept[80 - 12 - 3 - len(closing) : 68] == [*closing, *marker]
    assert (len(kept), kept.count(end)) == (80, 1)


@pytest.mark.parametrize("most", [1, 2, 7, 24])
def test_a_small_call_keeps_three_quarters_of_its_tokens_for_thinking(
    llm: Any, agent: Any, control: Control, settled: Settled, most: int
) -> None:
    """A reserve that cannot fit says so, and a call too small for an answer thinks as without a reserve. A call of one
    token is over before its cap arrives."""
    (free,) = chat(llm, [opened()], endless(agent, max_tokens=most))
    control.apply(reserve(40))
    run, name = Run(llm), f"tight-{most}"
    run.add(name, opened(), endless(agent, max_tokens=most))
    run.until(settled=settled)
    control.settled()
    details = [e.decision.detail for e in control.explain(name).events if e.decision.kind == "cap"]
    if most < 24:
        assert run.tokens[name] == free
    else:
        assert run.tokens[name][:19] == [*free[:18], agent.tracker.markers.end[0]]
    left = 5 if most == 24 else 0
    said = f"answer_reserve_tokens: 40 tokens do not fit, {left} of {most} are left for the answer"
    assert "".join(details) == ("" if most == 1 else said)


def test_a_chat_that_answers_in_time_is_as_without_a_reserve(llm: Any, agent: Any, control: Control) -> None:
    turns, params = [[{"role": "user", "content": text}] for text in SHORT[:4]], SamplingParams(temperature=0.0)
    params.max_tokens = 400

    def answers() -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in llm.chat(turns, params, use_tqdm=False)]

    free, end = answers(), agent.tracker.markers.end[0]
    assert all(tokens.index(end) < 300 and len(tokens) < 400 for tokens in free)
    control.apply({})
    assert answers() == free
    # With fewer tokens some of them would not answer in time.
    params.max_tokens = 100
    assert all(len(tokens) - tokens.index(end) > 1 for tokens in answers())
    assert ends(control)["answer_reserve"] > 0


def test_clients_that_sample_in_pieces_go_on_thinking(llm: Any, agent: Any, control: Control) -> None:
    """The prompt of a later piece holds the thinking of the earlier ones, which is not the last."""
    (free,) = chat(llm, [opened()], endless(agent, max_tokens=80))
    prompt, params = prompt_ids(llm, opened()), endless(agent, max_tokens=8)
    control.apply(reserve(32))
    pieces = free[:8]
    while len(pieces) < 80:
        (output,) = llm.generate([{"prompt_token_ids": [*prompt, *pieces]}], params, use_tqdm=False)
        pieces += output.outputs[0].token_ids
    assert pieces == free


def test_beam_search_thinks_as_without_a_reserve(llm: Any, agent: Any, control: Control) -> None:
    """vLLM's beam search makes a call of one token for each step of each beam."""
    from vllm.sampling_params import BeamSearchParams

    prompts = [{"prompt_token_ids": prompt_ids(llm, opened())}]
    params, end = BeamSearchParams(beam_width=2, max_tokens=12), agent.tracker.markers.end[0]

    def beams() -> list[list[int]]:
        (output,) = llm.beam_search(prompts, params)
        return [list(sequence.tokens) for sequence in output.sequences]

    free = beams()
    control.apply(reserve(32))
    assert beams() == free
    assert any(end not in tokens for tokens in free), "the beams think"


def test_a_cap_below_the_reserve_wins_and_each_request_may_have_its_own(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    override = [{"effort": "low", "scheduler": {"answer_reserve_tokens": 14}}]
    control.apply({**reserve(10), "override": override})
    params = [
        endless(agent, max_tokens=60, extra_args=own)
        for own in ({}, {"meridian_effort": "low"}, {"meridian_max_think_tokens": 7})
    ]
    end = agent.tracker.markers.end[0]
    assert [tokens.index(end) for tokens in paced(llm, [opened()] * 3, params, settled)] == [49, 45, 7]


def test_in_shadow_no_token_changes_and_the_end_is_counted(
    llm: Any, agent: Any, control: Control, settled: Settled
) -> None:
    (free,) = chat(llm, [opened()], endless(agent, max_tokens=60))
    before = ends(control)
    control.apply(reserve(14, shadow=True))
    # The end counts once the request's own reserve is known.
    assert paced(llm, [opened()], endless(agent, max_tokens=60), settled) == [free]
    after = ends(control)
    assert after["answer_reserve_shadowed"] == before.get("answer_reserve_shadowed", 0) + 1
    shadows = {s.reason: s for s in control.engine().shadow}
    assert shadows["answer_reserve"].would_end_think_tokens == 60 - 14 - 1


@pytest.mark.usefixtures("lost")
def test_without_a_control_plane_the_reserve_holds_also_after_a_restart(
    llm: Any, agent: Any, scheduler: Any, control: Control
) -> None:
    """An engine that starts without a control plane takes the reserve from its settings file."""
    revision = control.apply(reserve(14))
    end, params = agent.tracker.markers.end[0], endless(agent, max_tokens=60)
    wait_for(
        lambda: (kept := state_file(scheduler).load()) and kept.revision == revision, 20, "the settings to be kept"
    )
    kill(control, agent)
    assert chat(llm, [opened()], params)[0].index(end) == 60 - 14 - 1
    again = rebuild(scheduler)
    assert (again.default_reserves, again.link.lease.revision) == ((14, 14), revision)
    assert chat(llm, [opened()], params)[0].index(end) == 60 - 14 - 1


@pytest.mark.usefixtures("rebuilt")
def test_an_agent_that_comes_back_keeps_the_reserve_of_requests_in_flight(
    llm: Any, agent: Any, scheduler: Any, control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent counts the tokens that were generated while it was off."""
    monkeypatch.setattr(guard_module, "RESTS_S", (1.0, 3600.0))
    control.apply(reserve(70))
    run = Run(llm)
    run.add("r", opened(), endless(agent, max_tokens=300))
    run.until(lambda: len(run.tokens["r"]) > 10)

    def fails(*_: Any) -> None:
        raise RuntimeError("injected")

    agent.after_update = fails
    run.until(lambda: scheduler._agent is None)
    wait_for(lambda: scheduler._guard.rest_s() <= 0, 20, "its rest to be over")
    run.until()
    assert scheduler._agent not in {None, agent}
    assert run.tokens["r"].index(scheduler._agent.tracker.markers.end[0]) == 300 - 70 - 1


def test_preemption_does_not_change_what_is_left(llm: Any, agent: Any, control: Control) -> None:
    control.apply({**reserve(39), "entropy": {"enabled": False}})
    before, end = agent.preempted_think, agent.tracker.markers.end[0]
    run = Run(llm)
    for i in range(6):
        run.add(f"r{i}", opened(i), endless(agent, max_tokens=200))
    with half_the_cache(llm):
        run.until()
    assert agent.preempted_think > before
    assert {(t.index(end), len(t)) for t in run.tokens.values()} == {(200 - 39 - 1, 200)}
