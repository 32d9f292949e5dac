"""One vLLM engine behind vLLM's asynchronous client, and the times at which each request's tokens arrived.

The module owns the engine's processes, the control plane if one governs the engine, and the meter on vLLM's own
statistics. The module knows neither policy nor load. The engine core and the worker are processes of their own; this
process is the client.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meridian.v1 import agent_pb2

from tests.bench.harness import BenchError
from tests.bench.starting import starting
from tests.engine import STRIPPED
from tests.processes import Control

PLACES = 32
BLOCK_TOKENS = 32
MAX_MODEL_LEN = 2048
MODEL_NAME = "random"
THINK_ID, END_ID = 4, 5
STOP_S = 20.0
# Name in a request's `extra_args`, for `tests.bench.thinking`.
THINK_TOKENS = "think_tokens"


@dataclass(frozen=True)
class Request:
    """A request for think_tokens of thinking, the end marker, and answer_tokens of answer.

    ends_with: a token that ends the answer, in addition to answer_tokens. tenant: as policies match it.
    """

    name: str
    prompt: tuple[int, ...]
    think_tokens: int
    answer_tokens: int
    ends_with: int | None = None
    tenant: str = ""


@dataclass(frozen=True)
class Timeline:
    """The timeline of one request: its due time and the arrival time of each token, in seconds of one clock."""

    request: Request
    due_s: float
    tokens: tuple[int, ...]
    times_s: tuple[float, ...]

    @property
    def answer_s(self) -> tuple[float, ...]:
        """Return the arrival time of each answer token."""
        return self.times_s[self.request.think_tokens + 1 :]

    @property
    def end_s(self) -> float:
        """Return the arrival time of the end marker."""
        return self.times_s[self.request.think_tokens]


@dataclass
class Meter:
    """vLLM's own statistics of the steps since `reset`.

    kv_peak: highest used fraction of the KV cache. queries and hits: prompt tokens that were looked up in the prefix
    cache and that were found in it, preempted requests left out.
    """

    steps: int = 0
    kv_peak: float = 0.0
    waiting_sum: int = 0
    queries: int = 0
    hits: int = 0
    preempted: int = 0

    def reset(self) -> None:
        self.__init__()  # type: ignore[misc]

    def record(self, scheduler: Any, iteration: Any) -> None:
        if scheduler is not None:
            self.steps += 1
            self.kv_peak = max(self.kv_peak, scheduler.kv_cache_usage)
            self.waiting_sum += scheduler.num_waiting_reqs
            self.queries += scheduler.prefix_cache_stats.queries
            self.hits += scheduler.prefix_cache_stats.hits
        if iteration is not None:
            self.preempted += iteration.num_preempted_reqs


@dataclass(frozen=True)
class Setup:
    """How the engine is started.

    governed: with the agent and a control plane. writes_sentences: thinking has
    sentences and ends by itself, in all arms; otherwise it is words only, and the request's own cap ends it, which only
    a governed engine obeys.
    """

    model: Path
    blocks: int
    policy: str = "fcfs"
    governed: bool = True
    writes_sentences: bool = False
    extra: dict[str, Any] = field(default_factory=dict)


class StreamedEngine:
    """The engine, its client and its control plane. The object must be created inside a running event loop."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "meridian.db").unlink(missing_ok=True)
        self.setup, self.meter = setup, Meter()
        self.control = Control(folder) if setup.governed else None
        if self.control:
            self.control.defaults = {}
        try:
            with starting(folder, self.control):
                self._llm = self._start()
            if self.control is not None:
                self.control.engine()
        except BaseException:
            self.close()
            raise

    def _start(self) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=str(self.setup.model),
            served_model_name=MODEL_NAME,
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=PLACES,
            num_gpu_blocks_override=self.setup.blocks,
            reasoning_parser="qwen3",
            scheduling_policy=self.setup.policy,
            disable_log_stats=True,
            seed=0,
            logits_processors=["tests.bench.thinking:Thinking"] if self.setup.writes_sentences else None,
            **self.setup.extra,
        )
        return AsyncLLM.from_engine_args(arguments, stat_loggers=[_logger_of(self.meter)])

    def close(self) -> None:
        """Stop all processes."""
        llm = self.__dict__.pop("_llm", None)
        try:
            if llm is not None:
                llm.shutdown(timeout=STOP_S)
        finally:
            if self.control is not None:
                self.control.process.stop()

    async def begin(self, policy: dict[str, Any]) -> None:
        """Put a policy in force on an idle engine, and empty its prefix cache. Raises BenchError."""
        if self.control is not None:
            # The requests say themselves how long they think and answer, so no answer needs a reserve.
            scheduler = {"answer_reserve_tokens": 0, **policy.get("scheduler", {})}
            self.control.apply({**policy, "scheduler": scheduler})
        if not await self._llm.reset_prefix_cache():
            raise BenchError("the engine still held KV when a run was to begin")
        self.meter.reset()

    def counters(self) -> agent_pb2.AgentCounters | None:
        """Return the agent's counters when every decision has its outcome. Raises BenchError."""
        if self.control is None:
            return None
        engine = self.control.settled()
        if engine.fault or engine.nack_error:
            raise BenchError(f"the agent is off: {engine.fault or engine.nack_error}")
        return engine.counters

    async def stream(self, request: Request, due_s: float | None = None) -> Timeline:
        """Run one request to its end. due_s: the time at which it was due, by default now. Raises BenchError."""
        submitted_s = time.perf_counter()
        tokens: list[int] = []
        times_s: list[float] = []
        prompt = {"type": "token", "prompt_token_ids": list(request.prompt)}
        async for output in self._llm.generate(prompt, self._params(request), request.name):
            new = output.outputs[0].token_ids
            tokens += new
            times_s += [time.perf_counter()] * len(new)
        self._check(request, tokens)
        return Timeline(request, submitted_s if due_s is None else due_s, tuple(tokens), tuple(times_s))

    def _check(self, request: Request, tokens: list[int]) -> None:
        """Check that the end marker is exactly where the request has it, so that all arms have the same phases."""
        expected = request.think_tokens + 1 + request.answer_tokens + (request.ends_with is not None)
        if len(tokens) != expected:
            raise BenchError(f"{request.name}: {len(tokens)} tokens came, {expected} were asked for")
        ends = [i for i, token in enumerate(tokens) if token == END_ID]
        if (self.control is not None or self.setup.writes_sentences) and ends != [request.think_tokens]:
            raise BenchError(f"{request.name}: thinking ended at {ends}, not at {request.think_tokens}")

    def _params(self, request: Request) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        length, ends_with = request.think_tokens + 1 + request.answer_tokens, request.ends_with
        thinking = THINK_TOKENS if self.setup.writes_sentences else "meridian_max_think_tokens"
        last: dict[str, Any] = {}
        if ends_with is not None:
            # The token is masked up to the length; after it, it is by far the likeliest token, and stops the request.
            last = {"stop_token_ids": [ends_with], "min_tokens": length, "logit_bias": {ends_with: 100.0}}
        return SamplingParams(
            temperature=0.0,
            max_tokens=length + (ends_with is not None),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={thinking: request.think_tokens, "meridian_tenant": request.tenant, **STRIPPED},
            **last,
        )


def _logger_of(meter: Meter) -> Any:
    """Return a vLLM stat logger that feeds the meter."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Logger(StatLoggerBase):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, iteration_stats: Any, *_: Any, **__: Any) -> None:
            meter.record(scheduler_stats, iteration_stats)

        def log_engine_initialized(self) -> None:
            pass

    return Logger
