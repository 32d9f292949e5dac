"""Measure what being governed costs an engine whose core and worker are one process, in processor time of all threads.

The module owns two such engines, stock and governed, each in a process of its own, of which one at a time runs. The
protocol is in tests/bench/cost.md.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from typing import TYPE_CHECKING, Any

from tests.bench import random_model
from tests.bench.harness import BenchError, Column
from tests.bench.starting import starting
from tests.bench.streamed import THINK_ID
from tests.processes import Control

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path

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
# Tokens of a prompt, and those of a request that thinks shortly, whose window lasts from its arrival to its end.
PROMPT_TOKENS, SHORT_TOKENS = 24, 128
# Of requests that think long, a window has so many steps in which none arrives or ends.
LONG_STEPS, LARGE_STEPS, WARM_STEPS, LONG_TOKENS = 60, 15, 40, 3800
BLOCK_TOKENS, MAX_MODEL_LEN = 32, 4096
COLUMNS = (
    Column("step_us", "wall time, us per step", 0, "ratio"),
    Column("cpu_us", "processor time of all threads", 0, "difference"),
    Column("main_us", "of the engine's thread", 0, "difference"),
    Column("meter_us", "the agent's own meter", 0),
)


class _Engine:
    """An engine in this process. Its requests never end thinking by themselves."""

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
        self._scheduler = self._engine.engine_core.engine_core.scheduler
        self._begun = 0

    def begin(self, requests: int, tokens: int) -> None:
        """Let requests arrive that think for so many tokens. Both arms get the same ones."""
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

    def end(self) -> None:
        self._engine.abort_request([str(number) for number in range(self._begun)])
        self.run(0)

    def run(self, steps: int) -> Figures:
        """Run so many steps, or those until all requests have ended for 0; return the figures of a step."""
        agent = getattr(self._scheduler, "_agent", None)
        done, meter_s = 0, agent.agent_seconds if agent else 0.0
        wall_s, cpu_s, main_s = time.perf_counter(), time.process_time(), time.thread_time()
        while done < steps or (not steps and self._engine.has_unfinished_requests()):
            self._engine.step()
            done += 1
        found = {
            "step_us": time.perf_counter() - wall_s,
            "cpu_us": time.process_time() - cpu_s,
            "main_us": time.thread_time() - main_s,
        }
        if agent:
            found["meter_us"] = agent.agent_seconds - meter_s
        return {name: seconds / max(1, done) * 1e6 for name, seconds in found.items()}

    def short(self, requests: int) -> Figures:
        """Measure requests that arrive together, from their arrival to their end."""
        self.begin(requests, SHORT_TOKENS)
        return self.run(0)


def _serve(pipe: Connection, model: Path, size: int, folder: Path, target: str) -> None:
    control = Control.existing(target) if target else None
    with starting(folder, control, VLLM_ENABLE_V1_MULTIPROCESSING="0"):
        engine = _Engine(model, size)
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        method, *given = asked
        pipe.send(getattr(engine, method)(*given))


class _Arm:
    """The benchmark's side of one engine."""

    def __init__(self, model: Path, size: int, folder: Path, target: str) -> None:
        folder.mkdir()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, model, size, folder, target), daemon=True)
        self._process.start()
        theirs.close()
        self._log = folder / "engine.log"
        self._answer()

    def __call__(self, method: str, *given: int) -> Any:
        self._pipe.send((method, *given))
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise BenchError(f"an engine ended; see {self._log}") from None

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(10)
        self._process.kill()


@contextlib.contextmanager
def _arms(model: Path, size: int, folder: Path, control: Control) -> Iterator[dict[str, _Arm]]:
    arms: dict[str, _Arm] = {}
    try:
        for name in ARMS:
            arms[name] = _Arm(model, size, folder / name, control.target if name == GOVERNED else "")
        yield arms
    finally:
        for arm in arms.values():
            arm.close()


async def _long(session: Session, arms: dict[str, _Arm], requests: int, case: str, steps: int) -> None:
    """Measure requests that think long, without those steps in which they arrive."""
    for arm in arms.values():
        arm("begin", requests, LONG_TOKENS)
        arm("run", WARM_STEPS)
    rounds: int = session.options.process_rounds
    await session.rounds(ARMS, lambda arm, _: arms[arm]("run", steps), rounds, case=case, mirrored=True)
    for arm in arms.values():
        arm("end")


async def measure(session: Session) -> dict[str, Any]:
    """Measure all sizes, policies and vocabularies, and return the part's figures of the last line."""
    for vocabulary in VOCABULARIES:
        sizes = [size for size in session.options.sizes if vocabulary == SMALL or size <= MOST_LARGE]
        if not sizes:
            continue
        folder = session.fresh()
        model = random_model.make(folder / "model", vocabulary, random_model.TINY)
        control = Control(folder)
        control.defaults = {}
        try:
            with _arms(model, max(sizes), folder, control) as arms:
                control.engine()
                for size in sizes:
                    await (_few_ids if vocabulary == SMALL else _many_ids)(session, arms, control, size)
        finally:
            control.process.stop()
        million = random_model.TINY.parameters(vocabulary) / 1e6
        text = f"Core and worker in one process, {million:.1f} M random weights; by running requests and policy."
        cases = [case for case in session.runs.cases() if case.startswith(_prefix(vocabulary))]
        session.table(f"In one process, {vocabulary:,} ids", text, COLUMNS, STOCK, cases)
    return _line(session, session.options.sizes)


async def _few_ids(session: Session, arms: dict[str, _Arm], control: Control, size: int) -> None:
    for name, policy in POLICIES.items():
        control.apply(policy)
        await _long(session, arms, size, _case(SMALL, size, name), LONG_STEPS)
    control.apply({})
    for arm in arms.values():
        arm("short", size)
    rounds, case = max(1, session.options.process_rounds // 2), _case(SMALL, size, "default", "short")
    await session.rounds(ARMS, lambda arm, _: arms[arm]("short", size), rounds, case=case)
    control.freeze()
    await _long(session, arms, size, _case(SMALL, size, FROZEN), LONG_STEPS)
    control.thaw()


async def _many_ids(session: Session, arms: dict[str, _Arm], control: Control, size: int) -> None:
    for name in ("default", "rule"):
        control.apply(POLICIES[name])
        await _long(session, arms, size, _case(LARGE, size, name), LARGE_STEPS)


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
