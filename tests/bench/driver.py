"""One governed vLLM engine with its control plane, and requests sent to it with a steady number in flight.

The module owns both processes and the counts of each request. The module knows no rule for ending thinking.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.bench.harness import BenchError
from tests.bench.starting import starting
from tests.processes import Control

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from meridian.v1 import fleet_pb2

    from tests.bench.tasks import Task

# The engine has more places than requests in flight, because an engine with every place taken refuses probes.
IN_FLIGHT, PLACES = 32, 48
STOP_S = 20.0
FINISHED = ("stop", "length")


@dataclass(frozen=True)
class Sample:
    """One request, with the same prompt and sampling seed in every arm. `round` is the benchmark's seed that it belongs
    to."""

    name: str
    round: int
    prompt: str
    seed: int


@dataclass(frozen=True)
class Completion:
    """The result of one request.

    think_tokens: tokens before the end marker, without markers; without an end marker, all tokens up to the limit.
    ended: whether the end marker was generated. late_tokens: thinking tokens after the newest end of a paragraph.
    tokens: all generated tokens.
    """

    tokens: tuple[int, ...]
    think_tokens: int
    late_tokens: int
    answer_tokens: int
    ended: bool
    right: bool


@dataclass(frozen=True)
class Batch:
    """The results of one run in the order of its requests, and FleetService's counts of the run.

    decode_s: time of the engine's steps without the pace, which is the worker's processor time plus the time of the
    scheduler and the agent in the engine core.
    """

    completions: list[Completion]
    decode_s: float
    probe_tokens: int
    probes: int
    ends: dict[str, int]

    def mean_think_tokens(self) -> float:
        return sum(c.think_tokens for c in self.completions) / len(self.completions)


class Engine:
    """A vLLM engine, whose core is a process of its own, and the meridian-control that governs it. step_ms: least
    duration of a step."""

    def __init__(self, task: Task, folder: Path, step_ms: float) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meridian.db").unlink(missing_ok=True)
        self.task, self.control = task, Control(folder)
        pace = {
            "MERIDIAN_DEMO_STEP_MS": str(step_ms),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        try:
            with starting(folder, self.control, **pace):
                self._llm = self._start()
            self.control.engine()
        except BaseException:
            self.close()
            raise
        tokenizer = self._llm.get_tokenizer()
        self._decode = tokenizer.decode
        self._template = tokenizer.apply_chat_template
        self._open, self._close, self._paragraph = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "\n\n"])

    def _start(self) -> Any:
        import vllm

        return vllm.LLM(
            model=str(self.task.model),
            served_model_name=self.task.name,
            enforce_eager=True,
            dtype="float32",
            block_size=32,
            max_model_len=1024,
            max_num_seqs=PLACES,
            # The reasoning parser also switches on vLLM's own thinking_token_budget.
            reasoning_parser="qwen3",
            seed=0,
            worker_cls="tests.bench.metered.MeteredWorker",
        )

    def close(self) -> None:
        """Stop both processes."""
        llm = self.__dict__.pop("_llm", None)
        try:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown(timeout=STOP_S)
        finally:
            self.control.process.stop()

    def prompt_ids(self, prompt: str) -> list[int]:
        turns = [{"role": "user", "content": prompt}]
        return list(self._template(turns, add_generation_prompt=True, return_dict=False))

    def run(
        self,
        samples: Sequence[Sample],
        policy: dict[str, Any],
        budget: int | None = None,
        max_tokens: int | None = None,
    ) -> Batch:
        """Run all samples under one policy. budget: vLLM's own thinking_token_budget. max_tokens: of each request,
        instead of the task's. Raises BenchError."""
        self.begin(policy)
        before, busy_s = self.state(), self._busy_s()
        finished = self.generate(samples, max_tokens or self.task.max_tokens, budget)
        after = self.state()
        completions = [self.completion(sample, tuple(finished[sample.name][0])) for sample in samples]
        ends = {name: n for name in sorted(after.ends) if (n := _count(after.ends, name) - _count(before.ends, name))}
        return Batch(
            completions,
            self._busy_s() - busy_s + _scheduling_s(after) - _scheduling_s(before),
            after.counters.probe_tokens - before.counters.probe_tokens,
            _count(after.decisions, "probe") - _count(before.decisions, "probe"),
            ends if budget is None else _budget_ends(completions, budget),
        )

    def _busy_s(self) -> float:
        return float(self._llm.collective_rpc("busy_seconds")[0])

    def begin(self, policy: dict[str, Any]) -> None:
        """Put a policy in force. All arms have the same prompts, so no arm may find their KV in the prefix cache."""
        self.control.apply(policy)
        self._llm.reset_prefix_cache()

    def state(self) -> fleet_pb2.Engine:
        """Return the engine as FleetService shows it when every decision has its outcome. Raises BenchError."""
        engine: fleet_pb2.Engine = self.control.settled()
        if engine.fault or engine.nack_error:
            raise BenchError(f"the agent is off: {engine.fault or engine.nack_error}")
        return engine

    def generate(
        self,
        samples: Sequence[Sample],
        max_tokens: int,
        budget: int | None = None,
        due_s: Sequence[float] | None = None,
    ) -> dict[str, tuple[list[int], list[float]]]:
        """Return the tokens of each request, and the seconds from the beginning at which each token arrived.

        budget: as in `run`. due_s: seconds from the beginning at which each request is sent; None to keep IN_FLIGHT
        requests in flight. Raises BenchError.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        engine, live, most = self._llm.llm_engine, 0, IN_FLIGHT if due_s is None else len(samples)
        waiting = deque(zip(samples, [0.0] * len(samples) if due_s is None else due_s, strict=True))
        prompts = {sample.name: self.prompt_ids(sample.prompt) for sample in samples}
        found: dict[str, tuple[list[int], list[float]]] = {sample.name: ([], []) for sample in samples}
        began_s = time.perf_counter()
        while waiting or live:
            while waiting and live < most and (waiting[0][1] <= time.perf_counter() - began_s or not live):
                sample, due = waiting.popleft()
                time.sleep(max(0.0, began_s + due - time.perf_counter()))
                params = SamplingParams(
                    temperature=1.0,
                    max_tokens=max_tokens,
                    seed=sample.seed,
                    thinking_token_budget=budget,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                )
                engine.add_request(sample.name, {"prompt_token_ids": prompts[sample.name]}, params)
                live += 1
            for output in engine.step():
                completion, (tokens, times_s) = output.outputs[0], found[output.request_id]
                tokens += completion.token_ids
                times_s += [time.perf_counter() - began_s] * len(completion.token_ids)
                if output.finished and completion.finish_reason not in FINISHED:
                    raise BenchError(f"request {output.request_id} ended with {completion.finish_reason!r}")
                live -= output.finished
        return found

    def completion(self, sample: Sample, tokens: tuple[int, ...]) -> Completion:
        text = self._decode(list(tokens), skip_special_tokens=True)
        ended = self._close in tokens
        begin = tokens.index(self._open) + 1 if self._open in tokens else 0
        end = tokens.index(self._close) if ended else len(tokens)
        answer_tokens = len(tokens) - end - 1 if ended else 0
        late_tokens = next((n for n in range(end - begin) if tokens[end - 1 - n] == self._paragraph), end - begin)
        right = self.task.is_correct(sample.prompt, text)
        return Completion(tokens, end - begin, late_tokens, answer_tokens, ended, right)


def _scheduling_s(engine: fleet_pb2.Engine) -> float:
    spent = engine.counters
    return float(spent.agent_seconds - spent.worker_seconds - spent.thread_seconds + spent.scheduler_seconds)


def _budget_ends(completions: Sequence[Completion], budget: int) -> dict[str, int]:
    """Count the ends by vLLM's own budget, because FleetService counts them as natural ends."""
    spent = sum(c.think_tokens >= budget for c in completions)
    return {name: count for name, count in (("budget", spent), ("natural", len(completions) - spent)) if count}


def _count(counts: Mapping[str, int], name: str) -> int:
    return counts.get(name, 0)
