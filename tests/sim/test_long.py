"""A request of a million tokens in vLLM's own scheduler, with the agent in front of it and without a model."""

from __future__ import annotations

import copy
import gc
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest
from meridian.v1 import agent_pb2

from meridian_agent.core.catch_up import NEW_TOKENS, STEP_TOKENS
from meridian_agent.core.phases import PART_TOKENS, Phase
from tests.fakes.counted import Counted

NEW = 60
BLOCK, BATCH_TOKENS, PLACES = 32, 8192, 8
MILLION = 1_000_000

pytestmark = pytest.mark.filterwarnings("ignore")


class Engine:
    """vLLM's scheduler, driven step by step; the imitated model always generates the same word."""

    def __init__(self, tokens: int) -> None:
        import torch
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        from meridian_agent.engine.scheduler_mixin import governed
        from tests.sim.engine import Shape, config_of, words

        blocks = tokens // BLOCK + 4096
        config, structured = config_of(Shape(places=PLACES, blocks=blocks, batch_tokens=BATCH_TOKENS))
        config = copy.copy(config)
        config.model_config = copy.copy(config.model_config)
        config.model_config.max_model_len = 2 * tokens + 4096
        config.cache_config.block_size = BLOCK
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        cache = KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self.scheduler: Any = governed(Scheduler)(config, cache, structured, block_size=BLOCK, log_stats=False)
        self.start, _, _, text = words()
        self.word = text[0]
        self._hasher = get_request_block_hasher(BLOCK, sha256)
        self._left: dict[str, int] = {}

    @property
    def agent(self) -> Any:
        return self.scheduler._agent

    def add(self, name: str, prompt_tokens: int, new_tokens: int, opens: bool) -> None:
        """Add a request. opens: whether its prompt ends in the marker that opens thinking; otherwise the prompt has no
        marker."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        prompt = [self.word] * (prompt_tokens - 1) + [self.start if opens else self.word]
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        request = Request(name, prompt, params, None, arrival_time=0.0, block_hasher=self._hasher)
        self._left[name] = prompt_tokens
        self.scheduler.add_request(request)

    def step(self) -> int:
        """Run one step and return the number of tokens generated in it, probes left out."""
        from vllm.v1.outputs import ModelRunnerOutput

        from meridian_agent.core.step_signals import REQUEST, RESULT, StepSignals
        from tests.sim.engine import forced

        output = self.scheduler.schedule()
        masks = forced(output, self.scheduler.get_grammar_bitmask(output))
        ids = list(output.num_scheduled_tokens)
        sampled = [[self._token(masks.get(r))] if self._reaches(r, output.num_scheduled_tokens[r]) else [] for r in ids]
        result = ModelRunnerOutput(ids, {r: i for i, r in enumerate(ids)}, sampled)
        if hasattr(output, REQUEST) and ids:
            ones = np.ones(len(ids), np.float32)
            setattr(result, RESULT, StepSignals(None, ones, ones.astype(np.int32), -ones, -ones).encode())
        self.scheduler.update_from_output(output, result)
        return sum(len(s) for r, s in zip(ids, sampled, strict=True) if r in self._left)

    def _token(self, mask: dict[int, int] | None) -> int:
        """Return the token that the mask allows, or the usual word without a mask."""
        if mask is None:
            return self.word
        (token,) = mask.values()
        return token

    def _reaches(self, request_id: str, scheduled: int) -> bool:
        """Return whether `scheduled` more tokens bring a request past its prompt."""
        if request_id not in self._left:
            request = self.scheduler.requests[request_id]
            return bool(request.num_computed_tokens >= request.num_tokens)
        self._left[request_id] = left = max(0, self._left[request_id] - scheduled)
        return left == 0


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
    engine = Engine(MILLION + NEW)
    tracker, prompts = engine.agent.tracker, list[Prompt]()
    engine.agent.directives.accept(agent_pb2.Directives(plan=agent_pb2.DispatchPlan(decision_id=1)))

    def watch(request: Any) -> None:
        request.prompt_token_ids = Prompt(request.prompt_token_ids)
        prompts.append(request.prompt_token_ids)
        add(request)

    add, engine.scheduler.add_request = engine.scheduler.add_request, watch
    engine.add("long", MILLION, NEW, opens)
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
