"""Measure what being governed costs an engine whose core and worker are one process, in processor time of all threads.

The module owns one governed engine in a process of its own, whose scheduler and model runner are vLLM's own in every
other window. The protocol is in tests/bench/cost.md.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from meridian_agent.core.step_record import COUNTERS
from tests.bench import random_model
from tests.bench.harness import BenchError, Column
from tests.bench.starting import starting
from tests.bench.streamed import THINK_ID
from tests.processes import Control

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

    from meridian_agent.engine.agent import Agent
    from tests.bench.harness import Figures, Interval, Session

ARMS = STOCK, GOVERNED = "stock", "governed"
SIZES = (1, 16, 64, 256)
VOCABULARIES = SMALL, LARGE = 640, 151_936
# With the large vocabulary a step of a CPU takes too long for more requests.
MOST_LARGE = 16
# Policies by name. Nothing ends thinking: no probability is spread so narrowly that an EAT rule would.
RULE: dict[str, Any] = {"entropy": {"shadow": False, "eat_level_threshold_nats": 1e-6, "holdout_share": 0.0}}
POLICIES: dict[str, dict[str, Any]] = {
    "default": {},
    "all measured": {"telemetry": {"shadow_sample_ratio": 1.0}},
    "rule": RULE,
    "off": {"entropy": {"enabled": False}},
}
FROZEN = "frozen"
# Goals under the default policy by the number of running requests: processor time over stock's, and throughput.
GOALS_US, GOALS = {1: 40, 16: 60, 64: 100, 256: 250}, {16: 0.985, 64: 0.99}
# Tokens of a prompt, and those of a request that thinks shortly, whose window lasts from its arrival to its end.
PROMPT_TOKENS, SHORT_TOKENS = 24, 128
# Requests that think long have arrived so many steps before a window, in which none arrives or ends. Windows are short,
# so that both arms meet the same moods of the machine.
WARM_STEPS, LONG_STEPS, LONG_TOKENS = 24, 48, 1000
# How many times as many rounds the smallest sizes get.
MORE_ROUNDS = 4
# With the large vocabulary.
LARGE_WARM_STEPS, LARGE_STEPS = 12, 15
BLOCK_TOKENS, MAX_MODEL_LEN = 32, 4096
COLUMNS = (
    Column("step_us", "wall time, us per step", 0, "ratio"),
    Column("cpu_us", "processor time of all threads", 0, "difference"),
    Column("main_us", "of the engine's thread", 0, "difference"),
    Column("meter_us", "the agent's own meter", 0),
)


class _Engine:
    """A governed engine in this process. Its requests never end thinking by themselves."""

    def __init__(self, model: Path, size: int) -> None:
        import vllm

        self._llm = vllm.LLM(
            model=str(model),
            enforce_eager=True,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=size,
            num_gpu_blocks_override=size * MAX_MODEL_LEN // BLOCK_TOKENS + 1,
            reasoning_parser="qwen3",
            disable_log_stats=True,
            seed=0,
        )
        self._engine = self._llm.llm_engine
        core = self._engine.engine_core.engine_core
        self._scheduler: Any = core.scheduler
        self._classes = {GOVERNED: type(core.scheduler), STOCK: _as_stock(type(core.scheduler))}
        self._runner = core.model_executor.driver_worker.worker.model_runner
        # The worker's part of the agent: methods on the instance, which hide those of vLLM.
        self._observed = {name: method for name, method in vars(self._runner).items() if hasattr(method, "__wrapped__")}
        self._begun = 0

    def window(self, arm: str, requests: int, warm: int, steps: int) -> Figures:
        """Measure requests that think long, without the steps in which they arrive; return the figures of a step."""
        self._become(arm)
        self._begin(requests, LONG_TOKENS)
        self._run(warm)
        found = self._run(steps)
        self._engine.abort_request([str(number) for number in range(self._begun - requests, self._begun)])
        self._run(0)
        return found

    def short(self, arm: str, requests: int) -> Figures:
        """Measure requests that arrive together, from their arrival to their end."""
        self._become(arm)
        self._begin(requests, SHORT_TOKENS)
        return self._run(0)

    def _become(self, arm: str) -> None:
        """Let the agent take part in what follows, or not. No request is live now."""
        self._scheduler.__class__ = self._classes[arm]
        for name, method in self._observed.items():
            if arm == GOVERNED:
                setattr(self._runner, name, method)
            else:
                vars(self._runner).pop(name, None)

    def _begin(self, requests: int, tokens: int) -> None:
        from vllm import SamplingParams

        for number in range(self._begun, self._begun + requests):
            first = random_model.FIRST_WORD
            words = [first + (37 * number + 11 * at) % (random_model.LAST_WORD - first) for at in range(PROMPT_TOKENS)]
            params = SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=True,
                # The ids of the large vocabulary are no tokens of the tokenizer.
                detokenize=False,
            )
            self._engine.add_request(str(number), {"prompt_token_ids": [*words, THINK_ID]}, params)
        self._begun += requests

    def _run(self, steps: int) -> Figures:
        """Run so many steps, or those until all requests have ended for 0; return the figures of a step."""
        agent = self._scheduler._agent
        if agent is None:
            raise BenchError("the agent has switched itself off")
        done, meter_s = 0, _meter_s(agent)
        wall_s, cpu_s, main_s = time.perf_counter(), time.process_time(), time.thread_time()
        while done < steps or (not steps and self._engine.has_unfinished_requests()):
            self._engine.step()
            done += 1
        found = {
            "step_us": time.perf_counter() - wall_s,
            "cpu_us": time.process_time() - cpu_s,
            "main_us": time.thread_time() - main_s,
            "meter_us": _meter_s(agent) - meter_s,
        }
        return {name: seconds / max(1, done) * 1e6 for name, seconds in found.items()}


def _meter_s(agent: Agent) -> float:
    """Return the seconds that an agent says it has spent."""
    return agent._counters()[COUNTERS.index("agent_seconds")]


def _as_stock(governed: type) -> type:
    """Return a class for a governed scheduler, whose hooks are the methods of vLLM's own class."""
    mixin, chosen = governed.__mro__[1:3]
    hooks = {name for name in vars(mixin) if not name.startswith("__") and callable(getattr(chosen, name, None))}
    return type("Stock", (governed,), {name: getattr(chosen, name) for name in hooks})


def _serve(pipe: Connection, model: Path, size: int, folder: Path, target: str) -> None:
    with starting(folder, Control.existing(target), VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        engine = _Engine(model, size)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        method, *given = asked
        pipe.send(getattr(engine, method)(*given))


class _Remote:
    """The benchmark's side of the engine."""

    def __init__(self, model: Path, size: int, folder: Path, target: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, size, folder, target), daemon=True)
        self._process.start()
        theirs.close()
        self._log = folder / "engine.log"
        self._answer()

    def __call__(self, method: str, *given: Any) -> Figures:
        self._pipe.send((method, *given))
        found: Figures = self._answer()
        return found

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise BenchError(f"the engine ended; see {self._log}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


@contextlib.contextmanager
def _engine(session: Session, vocabulary: int, size: int) -> Iterator[tuple[_Remote, Control]]:
    """Start an engine with its control plane. size: largest number of running requests."""
    folder = session.fresh()
    model = random_model.make(folder / "model", vocabulary, random_model.TINY)
    control = Control(folder)
    control.defaults = {}
    try:
        engine = _Remote(model, size, folder, control.target)
        try:
            control.engine()
            yield engine, control
        finally:
            engine.close()
    finally:
        control.process.stop()


async def measure(session: Session) -> dict[str, Any]:
    """Measure all sizes, policies and vocabularies, and return the part's figures of the last line."""
    for vocabulary in VOCABULARIES:
        sizes = [size for size in session.options.sizes if vocabulary == SMALL or size <= MOST_LARGE]
        if not sizes:
            continue
        with _engine(session, vocabulary, max(sizes)) as (engine, control):
            for size in sizes:
                await (_few_ids if vocabulary == SMALL else _many_ids)(session, engine, control, size)
        million = random_model.TINY.parameters(vocabulary) / 1e6
        text = f"Core and worker in one process, {million:.1f} M random weights; by running requests and policy."
        cases = [case for case in session.runs.cases() if case.startswith(_prefix(vocabulary))]
        session.table(f"In one process, {vocabulary:,} ids", text, COLUMNS, STOCK, cases)
    return _line(session, session.options.sizes)


async def _rounds(session: Session, engine: _Remote, case: str, method: str, size: int, *given: int) -> None:
    rounds: int = session.options.process_rounds
    if case.startswith(_prefix(SMALL)):
        # Steps of few requests are short and cost little, so that chance weighs most there.
        rounds *= max(1, min(MORE_ROUNDS, 64 // size))
    await session.rounds(ARMS, lambda arm, _: engine(method, arm, size, *given), rounds, case=case, mirrored=True)


async def _few_ids(session: Session, engine: _Remote, control: Control, size: int) -> None:
    for name, policy in POLICIES.items():
        control.apply(policy)
        await _rounds(session, engine, _case(SMALL, size, name), "window", size, WARM_STEPS, LONG_STEPS)
    control.apply({})
    await _rounds(session, engine, _case(SMALL, size, "default", "short"), "short", size)
    control.freeze()
    await _rounds(session, engine, _case(SMALL, size, FROZEN), "window", size, WARM_STEPS, LONG_STEPS)
    control.thaw()


async def _many_ids(session: Session, engine: _Remote, control: Control, size: int) -> None:
    for name in ("default", "rule"):
        control.apply(POLICIES[name])
        await _rounds(session, engine, _case(LARGE, size, name), "window", size, LARGE_WARM_STEPS, LARGE_STEPS)


def _prefix(vocabulary: int) -> str:
    return f"{vocabulary} ids, "


def _case(vocabulary: int, size: int, policy: str, thinking: str = "long") -> str:
    return f"{_prefix(vocabulary)}{size} {thinking}, {policy}"


def _line(session: Session, sizes: list[int]) -> dict[str, Any]:
    runs = session.runs

    def extra(size: int, policy: str) -> Interval:
        return runs.difference(GOVERNED, STOCK, "cpu_us", _case(SMALL, size, policy))

    def faster(size: int) -> Interval:
        """Return the governed engine's throughput over stock's."""
        return runs.ratio(STOCK, GOVERNED, "step_us", _case(SMALL, size, "default"))

    for size, most_us in GOALS_US.items():
        if size in sizes:
            session.goal(f"µs a step more than stock, {size} running", f"<= {most_us}", extra(size, "default"), 0)
    for size, least in GOALS.items():
        if size in sizes:
            session.goal(f"throughput over stock's, {size} running", f">= {least}", faster(size))
    meters = {size: runs.median(GOVERNED, "meter_us", _case(SMALL, size, "default")).value for size in sizes}
    return {
        "extra_us": {str(size): extra(size, "default").rounded(0) for size in sizes},
        "extra_us_rule": {str(size): extra(size, "rule").rounded(0) for size in sizes},
        "extra_us_off": {str(size): extra(size, "off").rounded(0) for size in sizes},
        "extra_us_frozen": {str(size): extra(size, FROZEN).rounded(0) for size in sizes},
        "throughput": {str(size): faster(size).rounded() for size in sizes},
        "interval": {str(size): [round(bound, 4) for bound in (faster(size).low, faster(size).high)] for size in sizes},
        "meter_of_truth": {str(size): round(meters[size] / extra(size, "default").value, 2) for size in sizes},
    }
