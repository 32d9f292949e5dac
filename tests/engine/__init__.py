"""Shared by the engine tests: how the engine is started, and the prompts of the stock reference."""

from __future__ import annotations

import copy
import itertools
import time
from typing import TYPE_CHECKING, Any

from meridian_agent.core.request_info import in_sample
from tests.data import maze
from tests.processes import MODEL, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import pytest

    from tests.engine.pacing import Settled
    from tests.processes import Control

ENGINE_ARGS: dict[str, Any] = {
    "model": str(MODEL),
    "served_model_name": "maze",
    "enforce_eager": True,
    "dtype": "float32",
    "block_size": 32,
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "num_gpu_blocks_override": 64,
    "reasoning_parser": "qwen3",
    "disable_log_stats": False,
    "seed": 0,
}
# As the API server tells of a chat that the model's own template has rendered, which strips thinking.
STRIPPED = {"meridian_chat_template": "{}"}
# Tokens of stock's reference, and the first of them that most tests compare. By then each case has ended its thinking,
# by itself or by a test's cap.
MAX_TOKENS, FIRST_TOKENS = 128, 64
CASES = 6
# How long a test waits for another process on a busy machine before it fails.
PATIENCE_S = 120.0
# Prompts about which the model thinks for a few blocks; about most others it thinks for more.
SHORT = [maze.prompts(60, seed=52)[index] for index in (15, 1, 45, 33, 44, 29, 58, 50, 8, 18, 36, 46, 2, 6)]


def cases() -> list[dict[str, Any]]:
    """Return chat requests whose prompts open thinking, leave it to the model, or close it."""
    modes: list[dict[str, Any]] = [{"open_think": True}, {}, {"enable_thinking": False}]
    prompts = maze.prompts(CASES, seed=11)
    return [{"prompt": p, "template": modes[i % len(modes)]} for i, p in enumerate(prompts)]


def choose(monkeypatch: pytest.MonkeyPatch, share: float, wanted: Mapping[str, bool]) -> None:
    """Let vLLM complete all ids with letters by which these requests belong, or do not belong, to a sample and a
    control group of a share. vLLM's own letters are random, so a test would have to ask until chance gives it both."""

    def fits(letters: str) -> bool:
        return all(in_sample(f"{name}-{letters}", share) == chosen for name, chosen in wanted.items())

    letters = next(filter(fits, (f"{number:08x}" for number in itertools.count())))
    monkeypatch.setattr("vllm.v1.engine.input_processor.random_uuid", lambda: letters)


def stops_next(scheduler: Any, name: str) -> None:
    """Let a request end with its next token, as if the model had ended the turn. name: its id in the scheduler."""
    params = scheduler.requests[name].sampling_params
    params.stop_token_ids = list(range(scheduler.vllm_config.model_config.get_vocab_size()))


def rebuild(scheduler: Any) -> Any:
    """Return a new agent, as a restart of the engine makes it."""
    from meridian_agent.core.guard import Guard

    scheduler._lifecycle.stop()
    scheduler._lifecycle.link._thread.join(10)
    scheduler._lifecycle.limits.restore()
    scheduler._guard = Guard()
    scheduler._agent = scheduler._begin()
    return scheduler._agent


def confirmed(control: Control, frozen: bool) -> None:
    """Wait until the engine has confirmed that it is frozen, or that it is not."""
    wait_for(lambda: control.engine().freeze.confirmed is frozen, 20, f"frozen: {frozen}")


def prompt_ids(llm: Any, case: dict[str, Any]) -> list[int]:
    """Return the token ids of a case as the chat template renders it."""
    turns = [{"role": "user", "content": case["prompt"]}]
    template = llm.get_tokenizer().apply_chat_template
    return list(template(turns, add_generation_prompt=True, return_dict=False, **case["template"]))


def chat(llm: Any, chosen: list[dict[str, Any]], params: Any) -> list[list[int]]:
    """Run the chosen cases together and return the generated token ids.

    `params` is one SamplingParams, or one for each case.
    """
    prompts = [{"prompt_token_ids": prompt_ids(llm, case)} for case in chosen]
    # `generate` changes the parameters that it is given.
    outputs = llm.generate(prompts, copy.deepcopy(params), use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def paced(llm: Any, chosen: list[dict[str, Any]], params: Any, settled: Settled) -> list[list[int]]:
    """Run the cases like `chat`, but let each step wait until the reports before it are answered.

    Decisions are then as late as on an engine whose steps take longer than an answer.
    """
    run = Run(llm)
    each = params if isinstance(params, list) else [params] * len(chosen)
    for i, case in enumerate(chosen):
        run.add(f"paced-{i}", case, copy.deepcopy(each[i]))
    run.until(settled=settled)
    return [run.tokens[f"paced-{i}"] for i in range(len(chosen))]


class Run:
    """Requests driven step by step, so that a test can act between two engine steps."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        # The stop_reason of each request that has one.
        self.stopped: dict[str, Any] = {}

    def add(self, name: str, case: dict[str, Any], params: Any, **more: Any) -> None:
        self.put(name, prompt_ids(self._llm, case), params, **more)

    def put(self, name: str, prompt: list[int], params: Any, *, salt: str | None = None, **more: Any) -> None:
        """Add a request by token ids; `salt` keeps the prompt's blocks apart in the prefix cache."""
        self.tokens[name] = []
        self._llm.llm_engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": salt}, params, **more)

    def abort(self, name: str) -> None:
        self._llm.llm_engine.abort_request([name])
        self.finished[name] = "abort"
        # An engine core in its own process takes one more step to clear aborted requests; this engine core steps only
        # on call.
        self.step()

    def step(self) -> bool:
        """Make one step; return whether it gave a request something."""
        outputs = self._llm.llm_engine.step()
        for output in outputs:
            self.tokens[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                self.finished[output.request_id] = str(output.outputs[0].finish_reason)
                self.stopped[output.request_id] = output.outputs[0].stop_reason
        return bool(outputs)

    def until(self, done: Any = None, limit: int = 3000, settled: Callable[[], object] | None = None) -> None:
        """Step until `done()` is true, or without it until no request is left.

        With `settled`, each step waits until the reports before it are answered. A step that gives nothing, as when all
        requests are held, does not count towards the limit, and pauses as an engine core in its own process does.
        """
        steps, progress = 0, time.monotonic()
        while self._llm.llm_engine.has_unfinished_requests() and not (done is not None and done()):
            if self.step():
                steps, progress = steps + 1, time.monotonic()
            else:
                time.sleep(0.001)
            if settled is not None:
                settled()
            assert steps < limit, f"not done after {limit} steps"
            assert time.monotonic() - progress < PATIENCE_S, f"no token for {PATIENCE_S} s, after {steps} steps"
        assert done is None or done(), f"all requests ended within {steps} steps, before what the test waits for"
