"""Measure the agent's time per engine step in the engine-core thread and in the worker, beside stock vLLM's.

The module owns one engine whose core runs in this process, so that its thread can be measured; the worker is a process
of its own. The protocol is in tests/bench/cost.md.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.harness import BenchError, Column, Figures, Session
from tests.bench.starting import starting
from tests.demo.pace import STEP_MS
from tests.engine import ENGINE_ARGS, prompt_ids
from tests.processes import Control

SIZES = (1, 16, 64, 256)
# Tokens of a request that thinks shortly, and of one that thinks long; steps of a window with long thinking.
TOKENS, LONG_TOKENS, LONG_STEPS = 200, 2000, 500
CONTEXT = LONG_TOKENS + max(SIZES) + 300
# Every feature has its default, but the cap is too high to end any thinking; probes are requested in shadow.
NEUTRAL: dict[str, Any] = {"scheduler": {"max_think_tokens": 100_000}}
# Categories of the agent's time, named after its hooks, and whether the engine's step waits for the hook.
HOOKS = {"before schedule": True, "after schedule": True, "mask": False, "after update": True, "requests": True}
STOCK = ("schedule", "update")
STEPS_MS = 10.0
# Goals of the agent's time over stock's, by case.
GOALS = {"16 short": 0.15, "64 long": 0.06, "256 long": 0.03}
ARMS = AGENT, STOCK_ARM = "agent", "stock"
# The figures of stock are those of its own code, and the figures of the agent those of the agent's part. "waited": what
# the step waits for; "worker": of the agent the observer's calls, of stock the worker's whole step.
COLUMNS = (
    Column("us", "time, us per step", 1, "ratio"),
    Column("waited_us", "waited for", 1, "ratio"),
    Column("cpu_us", "processor time", 1, "ratio"),
    Column("worker_us", "worker's processor time", 0, "ratio"),
    *(Column(f"{hook.replace(' ', '_')}_us", hook, 1) for hook in HOOKS),
    Column("step_ms", "step, ms", 1),
    Column("round_trip_ms", "round trip, ms", 1),
    Column("probe_tokens", "probe tokens per step", 2),
    Column("probe_token_us", "us per probe token", 0),
    Column("probe_share", "probes' share of decode time, %", 2, factor=100),
    Column("probe_share_error", "its standard error", 2, factor=100),
)


OUTSIDE = "outside"


class Clock:
    """Seconds by category, either of wall time or of the thread's processor time, depending on `read`.

    Each wrapped call costs about 0.2 us at its begin and at its end, which the figures contain.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.read: Callable[[], float] = time.perf_counter
        self._whose, self._since = OUTSIDE, 0.0

    def reset(self, read: Callable[[], float]) -> None:
        """Clear all figures, and use `read` as the clock from now on."""
        self.seconds.clear()
        self.calls.clear()
        self.read, self._whose, self._since = read, OUTSIDE, read()

    def wrap(self, owner: Any, name: str, category: str) -> None:
        """Book the time of `owner.name` under `category`; `owner` is a class or an instance."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            before = self._enter(category)
            try:
                return function(*args, **kwargs)
            finally:
                self._enter(before)

        setattr(owner, name, timed)

    def _enter(self, category: str) -> str:
        now, before = self.read(), self._whose
        self.seconds[before] += now - self._since
        self.calls[category] += 1
        self._whose, self._since = category, now
        return before


def instrument(clock: Clock, scheduler: Any) -> None:
    """Book the time of the scheduler's calls, stock vLLM's own code and the agent's apart."""
    from meridian_agent.engine.scheduler_mixin import GovernedScheduler

    stock = next(cls for cls in type(scheduler).__mro__ if cls.__module__.startswith("vllm."))
    for name, category in (("schedule", "schedule"), ("update_from_output", "update")):
        clock.wrap(stock, name, category)
    clock.wrap(stock, "get_grammar_bitmask", "stock mask")
    for name in ("add_request", "finish_requests", "_preempt_request", "_free_request_blocks"):
        clock.wrap(stock, name, "stock requests")
        clock.wrap(GovernedScheduler, name, "requests")
    clock.wrap(GovernedScheduler, "schedule", "before schedule")
    clock.wrap(GovernedScheduler, "get_grammar_bitmask", "mask")
    clock.wrap(GovernedScheduler, "update_from_output", "after update")
    clock.wrap(scheduler._agent, "after_schedule", "after schedule")


@dataclass(frozen=True)
class Step:
    """One engine step. seconds: decode time; prefill: whether a request arrived."""

    seconds: float
    probe_tokens: int
    prefill: bool


def probe_cost(windows: Sequence[Sequence[Step]]) -> Figures:
    """Return what probes took in all steps of these windows.

    Steps of one window differ little but for their probes, so the time of a probe token is the slope of a step's time
    over its probe tokens: ordinary least squares with an intercept for each window, over the steps in which no request
    arrived. probe_share: of the decode time of all steps.
    """
    steps = [step for window in windows for step in window]
    decode_s, tokens = sum(step.seconds for step in steps), sum(step.probe_tokens for step in steps)
    x, y = (np.concatenate(columns) for columns in zip(*map(_centred, windows), strict=True))
    slope_s = error_s = 0.0
    if tokens and (spread := float(x @ x)):
        slope_s = float(x @ y) / spread
        residual = y - slope_s * x
        error_s = float(np.sqrt(residual @ residual / max(1, len(x) - len(windows) - 1) / spread))
    share = tokens / decode_s
    return {
        "probe_tokens": tokens / len(steps),
        "probe_token_us": slope_s * 1e6,
        "probe_share": slope_s * share,
        "probe_share_error": error_s * share,
        "decode_s": decode_s,
    }


def _centred(window: Sequence[Step]) -> tuple[np.ndarray, np.ndarray]:
    """Return probe tokens and seconds of the steps without arrivals, each less its mean in the window."""
    steps = [step for step in window if not step.prefill]
    x, y = np.array([step.probe_tokens for step in steps], float), np.array([step.seconds for step in steps])
    return x - x.mean(), y - y.mean()


class Steps:
    """The engine, its control plane, and windows of steps with and without the agent."""

    def __init__(self, folder: Path) -> None:
        """Start the engine."""
        self._control = Control(folder)
        self._control.defaults = {}
        self.clock, self.noted = Clock(), list[list[Step]]()
        try:
            with starting(folder, self._control, **{"VLLM_ENABLE_V1_MULTIPROCESSING": "0", STEP_MS: str(STEPS_MS)}):
                self._llm = self._start()
            self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
            self._agent = self._scheduler._agent
            instrument(self.clock, self._scheduler)
            self._control.apply(NEUTRAL)
        except BaseException:
            self.close()
            raise

    def _start(self) -> Any:
        import vllm

        args = {
            **ENGINE_ARGS,
            "max_num_seqs": max(SIZES),
            "max_model_len": CONTEXT,
            "hf_overrides": {"max_position_embeddings": CONTEXT},
            "num_gpu_blocks_override": max(SIZES) * (CONTEXT // ENGINE_ARGS["block_size"] + 1),
            "worker_cls": "tests.bench.cost_worker.CountingWorker",
        }
        # If the engine core runs in this process, vLLM's default would run the worker in it, too.
        return vllm.LLM(**args, distributed_executor_backend="mp")

    def close(self) -> None:
        """Stop all processes."""
        if (llm := self.__dict__.pop("_llm", None)) is not None:
            llm.llm_engine.engine_core.shutdown()
        self._control.process.stop()

    def run(self, requests: int, arm: str, *, long: bool) -> Figures:
        """Measure a window in wall time and one in the thread's processor time.

        Without the agent the mixin's own frames are booked as hooks, not as stock's time, because stock vLLM does not
        have these frames. long: whether the requests think long and begin one after another. Raises BenchError.
        """
        window = self._long_window if long else self._short_window
        self.noted = []
        wall, cpu = (window(requests, arm == AGENT, read) for read in (time.perf_counter, time.thread_time))
        if arm == AGENT:
            figures = {f"{hook.replace(' ', '_')}_us": wall[hook] for hook in HOOKS}
            figures["us"], figures["cpu_us"] = (sum(found[hook] for hook in HOOKS) for found in (wall, cpu))
            figures["waited_us"] = sum(wall[hook] for hook, waits in HOOKS.items() if waits)
            figures["worker_us"] = statistics.fmean((wall["observe_us"], cpu["observe_us"]))
        else:
            stock = (*STOCK, "stock requests")
            figures = {"us": sum(wall[name] for name in stock), "cpu_us": sum(cpu[name] for name in stock)}
            figures["waited_us"] = figures["us"]
            figures["worker_us"] = statistics.fmean((wall["worker_us"], cpu["worker_us"]))
        return figures | {name: wall[name] for name in ("step_ms", "round_trip_ms")}

    def _prompts(self, requests: int) -> list[dict[str, list[int]]]:
        from tests.data import maze

        cases = [{"prompt": p, "template": {"open_think": True}} for p in maze.prompts(requests, seed=1)]
        return [{"prompt_token_ids": prompt_ids(self._llm, case)} for case in cases]

    def _params(self, tokens: int, seed: int | None = None) -> Any:
        """Return sampling that never ends thinking. seed: for tokens drawn at random; None for the likeliest tokens."""
        from vllm import SamplingParams

        end, drawn = self._agent.tracker.markers.end[0], {"temperature": 1.0, "seed": seed}
        sampling: dict[str, Any] = {"temperature": 0.0} if seed is None else drawn
        return SamplingParams(**sampling, max_tokens=tokens, ignore_eos=True, logit_bias={end: -30.0})

    def _short_window(self, requests: int, governed: bool, read: Callable[[], float]) -> Figures:
        """Measure one batch of requests that begin together, from its first step to its last."""
        prompts, params = self._prompts(requests), self._params(TOKENS)
        self._scheduler._agent = self._agent if governed else None
        window = self._measured(read, lambda: self._llm.generate(prompts, params, use_tqdm=False))
        self._scheduler._agent = self._agent
        return window

    def _long_window(self, requests: int, governed: bool, read: Callable[[], float]) -> Figures:
        """Measure steps while requests think for LONG_TOKENS tokens each; one begins whenever one ends.

        The first requests begin one step after another, so that their probes fall into different steps, and have fewer
        tokens, so that their ends are spread evenly. The tokens are drawn at random, because the likeliest tokens of
        endless thinking repeat, and loops are rare in thinking that is long because its task is hard.
        """
        engine, prompts, live = self._llm.llm_engine, self._prompts(requests), dict[str, int]()

        def begin(number: int, tokens: int) -> None:
            name = f"long-{self._scheduler.current_step}-{number}"
            live[name] = number
            engine.add_request(name, prompts[number], self._params(tokens, seed=number))

        noted: list[Step] = []

        def run(steps: int) -> None:
            prefill = True
            for _ in range(steps):
                seconds, probe_tokens = self._so_far()
                outputs = engine.step()
                now_s, now_tokens = self._so_far()
                noted.append(Step(now_s - seconds, now_tokens - probe_tokens, prefill))
                prefill = False
                for output in outputs:
                    if output.finished:
                        begin(live.pop(output.request_id), LONG_TOKENS)
                        prefill = True

        self._scheduler._agent = self._agent if governed else None
        for number in range(requests):
            begin(number, requests - number + LONG_TOKENS * (number + 1) // requests)
            run(1)
        noted.clear()
        window = self._measured(read, lambda: run(LONG_STEPS))
        self.noted.append(self._with_worker(noted))
        engine.abort_request(list(live))
        while engine.has_unfinished_requests():
            engine.step()
        self._scheduler._agent = self._agent
        return window

    def _so_far(self) -> tuple[float, int]:
        """Return the seconds of scheduling, vLLM's and the agent's, and the probe tokens so far."""
        booked = (s for name, s in self.clock.seconds.items() if name != OUTSIDE)
        return sum(booked), self._agent.probing.tokens

    def _with_worker(self, steps: Sequence[Step]) -> list[Step]:
        """Return the steps with the worker's processor time added. Raises BenchError."""
        (seconds,) = self._llm.collective_rpc("step_seconds")
        if len(seconds) < len(steps):
            raise BenchError(f"the worker ran {len(seconds)} of {len(steps)} steps")
        pairs = zip(steps, seconds[-len(steps) :], strict=True)
        return [Step(step.seconds + s, step.probe_tokens, step.prefill) for step, s in pairs]

    def _measured(self, read: Callable[[], float], run: Callable[[], object]) -> Figures:
        """Measure the steps of `run`."""
        busy_s, observe_s = self._worker()
        first = self._scheduler.current_step
        self.clock.reset(read)
        began = time.perf_counter()
        run()
        took, steps = time.perf_counter() - began, self._scheduler.current_step - first
        seconds = {name: s / steps * 1e6 for name, s in self.clock.seconds.items()}
        now = self._worker()
        return {
            **{name: seconds.get(name, 0.0) for name in (*HOOKS, *STOCK, "stock requests")},
            "step_ms": took / steps * 1e3,
            "worker_us": (now[0] - busy_s) / steps * 1e6,
            "observe_us": (now[1] - observe_s) / steps * 1e6,
            "round_trip_ms": self._agent.link.outbox.round_trip_ms,
        }

    def _worker(self) -> tuple[float, float]:
        (counted,) = self._llm.collective_rpc("counted")
        busy_s, observe_s = counted
        return busy_s, observe_s


async def measure(session: Session) -> dict[str, Any]:
    """Measure all sizes, with short requests that begin together and with long thinking, and return the part's figures
    of the last line."""
    options, runs = session.options, session.runs
    session.say("starting the engine")
    running = Steps(session.fresh())
    shares: list[Figures] = []
    try:
        for long in (False, True):
            for size in options.sizes:
                case, windows = f"{size} {'long' if long else 'short'}", list[list[Step]]()

                def run(arm: str, _: int, size: int = size, long: bool = long, windows: Any = windows) -> Figures:
                    figures = running.run(size, arm, long=long)
                    if long and arm == AGENT:
                        windows.extend(running.noted)
                    return figures

                run(AGENT, 0)
                windows.clear()
                await session.rounds(ARMS, run, options.pairs, case=case)
                if long:
                    shares.append(found := probe_cost(windows))
                    for each in (each for each in runs.all if (each.arm, each.case) == (AGENT, case)):
                        each.figures.update(found)
                text = f"Maze model, steps of {STEPS_MS:g} ms or more, by number of running requests."
                session.table("Per step", text, COLUMNS, STOCK_ARM)
    finally:
        running.close()
    ratios = {case: runs.ratio(AGENT, STOCK_ARM, "us", case).rounded(3) for case in runs.cases()}
    for case, most in GOALS.items():
        if case in ratios:
            session.goal(f"agent's time over stock's, {case}", f"<= {most}", runs.ratio(AGENT, STOCK_ARM, "us", case))
    probes_s, decode_s = sum(f["probe_share"] * f["decode_s"] for f in shares), sum(f["decode_s"] for f in shares)
    return {
        "agent_of_stock": {case.split()[0]: ratio for case, ratio in ratios.items() if case.endswith("long")},
        "agent_of_stock_short": {case.split()[0]: ratio for case, ratio in ratios.items() if case.endswith("short")},
        "probe_time_share": round(probes_s / decode_s, 4),
    }
