"""What a real engine reports and confirms while it makes no step: after the last request, and between the
calls of a program that has the engine in its own process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
from meridian.v1 import agent_pb2
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams, StructuredOutputsParams

from meridian_agent.link.lease import LATE_S
from tests.engine import Run, cases, chat, confirmed
from tests.engine.pacing import Settled
from tests.engine.policies import NEUTRAL
from tests.engine.recording import records
from tests.engine.test_decisions import endless, opened
from tests.engine.test_equality import GREEDY
from tests.processes import Control, wait_for


@pytest.fixture
def resting(llm: Any, agent: Any) -> Iterator[Run]:
    """Yield an engine with two requests that thinks no further, because nobody calls it."""
    run = Run(llm)
    for name in ("rests-0", "rests-1"):
        run.add(name, opened(), endless(agent, max_tokens=200))
    run.until(lambda: len(run.tokens["rests-0"]) > 20)
    yield run
    run.until()


@pytest.fixture
def answers_seldom(control: Control) -> Iterator[None]:
    """Run the product's own program as the control plane, which answers at most once a second."""
    control.process.stop()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "module", Control.module)
        control.start()
        # The stream begins before the first request does.
        control.apply(NEUTRAL)
        yield
        control.process.stop()
    control.start()


def test_a_request_that_ends_at_a_stop_string_is_reported(
    llm: Any, agent: Any, scheduler: Any, control: Control
) -> None:
    """vLLM's front end finds the stop string after the step that was the last, and aborts the request."""
    case = cases()[2:3]
    (tokens,) = chat(llm, case, SamplingParams(temperature=0.0, max_tokens=40))
    text = llm.get_tokenizer().decode(tokens)
    stop = text.split()[3]
    steps = scheduler.current_step
    (stopped,) = chat(llm, case, SamplingParams(temperature=0.0, max_tokens=40, stop=[stop], detokenize=True))
    assert 0 < len(stopped) < len(tokens)
    last = scheduler.current_step
    assert last > steps
    assert agent.link.lease.idle
    control.settled()
    assert control.requests() == []
    control.apply({**NEUTRAL, "scheduler": {"max_think_tokens": 77}})
    control.freeze()
    confirmed(control, True)
    control.thaw()
    confirmed(control, False)
    assert scheduler.current_step == last


def test_an_answer_that_repeats_a_pattern_is_told_as_one(llm: Any, control: Control) -> None:
    word = llm.get_tokenizer().convert_tokens_to_ids(".")
    repeats = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
    params = SamplingParams(temperature=0.0, max_tokens=40, logit_bias={word: 100.0}, repetition_detection=repeats)
    run = Run(llm)
    run.add("repeats", opened(), params)
    run.until()
    assert run.tokens["repeats"] == [word] * 3
    control.settled()
    closed = control.explain("repeats").events[-1]
    assert (closed.kind, closed.detail) == ("closed", "repetition")


def test_an_error_of_vllm_is_told_as_one(llm: Any, scheduler: Any, control: Control) -> None:
    """vLLM ends a request whose grammar cannot be compiled."""

    def fails(*_: Any) -> None:
        raise RuntimeError("made by the test")

    params = SamplingParams(max_tokens=40, structured_outputs=StructuredOutputsParams(regex="A"))
    run = Run(llm)
    with pytest.MonkeyPatch.context() as meanwhile:
        meanwhile.setattr(scheduler.structured_output_manager, "_create_grammar", fails)
        run.add("fails", opened(), params)
        run.until()
    assert run.finished == {"fails": "error"}
    control.settled()
    closed = control.explain("fails").events[-1]
    assert (closed.kind, closed.detail) == ("closed", "error")


def test_settings_and_freezes_are_confirmed_without_a_step(
    agent: Any, scheduler: Any, control: Control, resting: Run, stock: list[list[int]]
) -> None:
    step, running = scheduler.current_step, list(scheduler.running)
    revision = control.apply({"scheduler": {"max_think_tokens": 30}})
    assert agent.link.lease.revision == revision
    control.freeze()
    confirmed(control, True)
    assert (scheduler.current_step, scheduler.running) == (step, running), "nothing of vLLM's has changed"
    # The next step is stock's, and so are all others of the freeze.
    resting.add("frozen", cases()[2], GREEDY)
    resting.until(lambda: "frozen" in resting.finished)
    assert resting.tokens["frozen"] == stock[2]
    assert scheduler._agent.frozen
    control.thaw()
    confirmed(control, False)
    resting.step()
    resting.until(lambda: bool(resting.finished.keys() >= {"rests-0", "rests-1"}))
    assert not scheduler._guard.fault
    control.settled()


def test_a_freeze_that_is_over_before_the_next_step_leaves_nothing_open(
    agent: Any, control: Control, resting: Run
) -> None:
    control.apply({"scheduler": {"max_think_tokens": 150}})
    control.freeze()
    confirmed(control, True)
    control.thaw()
    confirmed(control, False)
    decided = control.engine().decisions["cap"]
    resting.step()
    # The control plane decides again, because it has got a snapshot.
    resting.until(lambda: control.engine().decisions["cap"] > decided)
    resting.until()
    control.settled()


def test_what_comes_and_goes_between_steps_is_reported(
    llm: Any, agent: Any, scheduler: Any, control: Control, resting: Run
) -> None:
    step = scheduler.current_step
    resting.add("arrived-1", opened(1), endless(agent, max_tokens=20))
    wait_for(lambda: len(control.requests()) == 3, 20, "the request that arrived")
    assert control.engine().waiting == 1
    llm.llm_engine.abort_request(["rests-0"])
    wait_for(lambda: len(control.requests()) == 2, 20, "the request to be gone")
    assert scheduler.current_step == step


def test_a_new_stream_gets_a_snapshot_without_a_step(
    agent: Any, scheduler: Any, control: Control, resting: Run
) -> None:
    step, before = scheduler.current_step, control.engine().connect_time
    agent.link.restart("the test wants another one")
    wait_for(lambda: control.engine().connect_time != before, 20, "another stream")
    wait_for(lambda: len(control.requests()) == 2, 20, "the requests on it")
    wait_for(lambda: control.engine().acked_revision == agent.link.lease.revision, 20, "its settings")
    assert scheduler.current_step == step
    resting.until()
    control.settled()


def test_an_engine_that_falls_idle_while_answers_are_late_is_ready(
    llm: Any, agent: Any, control: Control, settled: Settled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for them no more, and no report follows its last one until the next request."""
    lease, run = agent.link.lease, Run(llm)
    run.add("late", opened(), endless(agent, max_tokens=40))
    # No answer is under way when the control plane stops.
    run.until(lambda: len(run.tokens["late"]) > 10, settled=settled)
    control.process.signal(signal.SIGSTOP)
    try:
        run.until(lambda: lease.unheard_since is not None)
        clock = lease.clock
        monkeypatch.setattr(lease, "clock", lambda: clock() + LATE_S + 1.0)
        with records(agent) as sent:
            run.until()
        assert agent_pb2.AGENT_STATE_STALE in [record.state for record, *_ in sent]
        assert (lease.idle, lease.connected, lease.state) == (True, True, agent_pb2.AGENT_STATE_READY)
    finally:
        control.process.signal(signal.SIGCONT)
    wait_for(lambda: (e := control.engine()).step == sent[-1][0].step and e, 20, "the last report")
    assert control.engine().agent_state == agent_pb2.AGENT_STATE_READY


@pytest.mark.usefixtures("answers_seldom")
def test_no_stream_is_cut_after_a_long_rest(
    agent: Any, control: Control, resting: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control plane answers at most once a second, so the last report before the rest may have had no answer."""
    lease, before = agent.link.lease, control.engine().connect_time
    wait_for(lambda: lease.unheard_since is None, 20, "an answer to all reports")
    clock = lease.clock
    monkeypatch.setattr(lease, "clock", lambda: clock() + 1000.0)
    resting.step()
    assert lease.state == 1, "READY"
    resting.until()
    control.settled()
    assert control.engine().connect_time == before
