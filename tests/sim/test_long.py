"""A request of a million tokens in vLLM's own scheduler, with the agent in front of it and without a model."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING, Any

import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.catch_up import NEW_TOKENS, STEP_TOKENS
from meridian_agent.core.phases import PART_TOKENS, Phase
from tests.bench.long_requests import BATCH_TOKENS, MILLION, Case, Engine
from tests.fakes.counted import Counted

if TYPE_CHECKING:
    from types import FrameType

NEW = 60

pytestmark = pytest.mark.filterwarnings("ignore")


class Prompt(Counted):
    """A prompt that also counts the agent's reads of the whole list."""

    def __iter__(self) -> Any:
        if "/meridian_agent/" in sys._getframe(1).f_code.co_filename:
            self.read += len(self)
        return super().__iter__()


def calls_in(engine: Engine) -> int:
    """Return the number of calls that the agent makes in a step."""
    calls = 0

    def note(frame: FrameType, event: str, _: Any) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"} and "/meridian_agent/" in frame.f_code.co_filename

    sys.setprofile(note)
    try:
        engine.step()
    finally:
        sys.setprofile(None)
    return calls


@pytest.mark.parametrize("opens", [True, False])
def test_a_million_tokens(opens: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """The agent's work and memory for a long request do not grow.

    The agent reads a bounded part of the prompt in a step, makes as many calls in a late step as in an early one, knows
    the request's phase by the time its prompt is computed, and keeps nothing of the request.
    """
    monkeypatch.setenv("MERIDIAN_CONTROL", "127.0.0.1:9")
    monkeypatch.setenv("MERIDIAN_STATE_DIR", str(tmp_path))
    engine = Engine(is_governed=True, tokens=MILLION + NEW)
    tracker, prompts = engine.agent.tracker, list[Prompt]()
    engine.agent.directives.accept(agent_pb2.Directives(plan=agent_pb2.DispatchPlan(decision_id=1)))

    def watch(request: Any) -> None:
        request.prompt_token_ids = Prompt(request.prompt_token_ids)
        prompts.append(request.prompt_token_ids)
        add(request)

    add, engine.scheduler.add_request = engine.scheduler.add_request, watch
    engine.add("long", Case("", MILLION, NEW, opens))
    (prompt,) = prompts
    assert prompt.read <= (2 * PART_TOKENS if opens else NEW_TOKENS + PART_TOKENS)
    assert bool(tracker.by_id) == opens
    most = 0
    for _ in range(MILLION // BATCH_TOKENS):
        before = prompt.read
        assert engine.step() == 0
        most = max(most, prompt.read - before)
    assert most <= STEP_TOKENS + PART_TOKENS
    engine.step()
    (live,) = tracker.by_id.values()
    assert live.state.phase is (Phase.THINK if opens else Phase.OUTPUT)
    read = prompt.read
    calls = [calls_in(engine) for _ in range(NEW - 1)]
    assert prompt.read == read
    assert 0 < max(calls[-20:-1]) <= max(calls[:20])
    engine.step()
    assert (tracker.by_id, engine.scheduler.requests, engine.scheduler._guard.fault) == ({}, {}, "")
    engine.agent.link.stop()
    prompts.clear()
    del live
    gc.collect()
    # The two references are the name here and the argument of getrefcount.
    assert sys.getrefcount(prompt) == 2, "an object still refers to the request"
