"""Measure the agent's time per engine step in the engine-core thread and in the worker, beside stock vLLM's.

The module owns the arms, the windows, and one engine whose core runs in this process, so that its thread can be
measured. The worker is a process of its own. The protocol is in tests/bench/README.md.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.bench.cost_clock import OUTSIDE, Clock
from tests.bench.cost_probes import Probes, Step, probe_cost
from tests.bench.program import BenchError, output_into
from tests.demo.pace import STEP_MS
from tests.engine import ENGINE_ARGS, prompt_ids
from tests.processes import ENGINE_ENV, ROOT, Control

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

SIZES = (1, 16, 64, 256)
# Tokens of a request that thinks shortly, and of one that thinks long; steps of a window with long thinking.
TOKENS, LONG_TOKENS, LONG_STEPS = 200, 2000, 500
CONTEXT = LONG_TOKENS + max(SIZES) + 300
# Every feature has its default, but the cap is too high to end any thinking; probes are requested in shadow.
NEUTRAL: dict[str, Any] = {"scheduler": {"max_think_tokens": 100_000}}
# Categories of the agent's time, named after its hooks, and whether the engine's step waits for the hook.
HOOKS = {"before schedule": True, "after schedule": True, "mask": False, "after update": True, "requests": True}
STOCK = ("schedule", "update")


@dataclass
class Row:
    """The figures of one batch size. All times are microseconds per step, medians over windows.

    long: whether the requests thought long and began one after another. agent_us: all of the agent's time. critical_us:
    the part of it that the step waits for. stock_us: stock schedule and update_from_output without the agent. with_us:
    the same calls with the agent. cpu: processor time of the thread instead of wall time. hooks_us: wall time by hook.
    probes: what probes took in the windows with the agent; None for short requests, of which few are probed.
    """

    requests: int
    long: bool
    step_ms: float
    agent_us: float
    critical_us: float
    stock_us: float
    with_us: float
    agent_cpu_us: float
    stock_cpu_us: float
    hooks_us: dict[str, float]
    observe_us: float
    worker_us: float
    round_trip_ms: float
    windows: int
    probes: Probes | None = None
    ratios: list[float] = field(default_factory=list)

    @property
    def ratio(self) -> float:
        """Return the agent's time divided by stock's time, as the median over the pairs of windows."""
        return statistics.median(self.ratios)


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


class Steps:
    """The engine, its control plane, and windows of steps with and without the agent."""

    def __init__(self, folder: Path, step_ms: float, args: Mapping[str, Any] = {}) -> None:
        """Start the engine. args: arguments of the engine, in place of the benchmark's."""
        self._control = Control(folder)
        self.clock = Clock()
        try:
            with output_into(folder / "engine.log"):
                self._llm = self._start(step_ms, args)
            self._scheduler = self._llm.llm_engine.engine_core.engine_core.scheduler
            self._agent = self._scheduler._agent
            instrument(self.clock, self._scheduler)
            self._control.apply(NEUTRAL)
        except BaseException:
            self.close()
            raise

    def _start(self, step_ms: float, own_args: Mapping[str, Any]) -> Any:
        os.environ.update(ENGINE_ENV)
        os.environ.update(
            MERIDIAN_CONTROL=self._control.target,
            PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            # vLLM must not fork this process, because it has gRPC threads, which a fork does not survive.
            VLLM_WORKER_MULTIPROCESSING_METHOD="spawn",
            VLLM_LOGGING_LEVEL="WARNING",
        )
        os.environ[STEP_MS] = str(step_ms)
        import torch
        import vllm

        torch.set_num_threads(1)
        args = {
            **ENGINE_ARGS,
            "max_num_seqs": max(SIZES),
            "max_model_len": CONTEXT,
            "hf_overrides": {"max_position_embeddings": CONTEXT},
            "num_gpu_blocks_override": max(SIZES) * (CONTEXT // ENGINE_ARGS["block_size"] + 1),
            "worker_cls": "tests.bench.cost_worker.CountingWorker",
            **own_args,
        }
        # If the engine core runs in this process, vLLM's default would run the worker in it, too.
        return vllm.LLM(**args, distributed_executor_backend="mp")

    def close(self) -> None:
        """Stop all processes."""
        if (llm := self.__dict__.pop("_llm", None)) is not None:
            llm.llm_engine.engine_core.shutdown()
        self._control.process.stop()

    def measure(self, requests: int, pairs: int, say: Callable[[str], None], *, long: bool) -> Row:
        """Measure pairs of windows, one with and one without the agent, after one window to warm up.

        The order within a pair alternates. Of each two pairs the first is measured in wall time, the second in
        processor time. long: whether the requests think long and begin one after another. say: gets a text before each
        pair. Raises BenchError.
        """
        window = self._long_window if long else self._short_window
        wall: dict[bool, list[_Window]] = defaultdict(list)
        cpu: dict[bool, list[_Window]] = defaultdict(list)
        window(requests, True, time.perf_counter)
        for pair in range(2 * pairs):
            say(f"{requests} running, {'long' if long else 'short'}: pair {pair + 1} of {2 * pairs}")
            into, read = (wall, time.perf_counter) if pair % 2 == 0 else (cpu, time.thread_time)
            for governed in (True, False) if pair // 2 % 2 == 0 else (False, True):
                into[governed].append(window(requests, governed, read))
        return _row(requests, long, wall, cpu)

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

    def _short_window(self, requests: int, governed: bool, read: Callable[[], float]) -> _Window:
        """Measure one batch of requests that begin together, from its first step to its last."""
        prompts, params = self._prompts(requests), self._params(TOKENS)
        self._scheduler._agent = self._agent if governed else None
        window = self._measured(read, lambda: self._llm.generate(prompts, params, use_tqdm=False))
        self._scheduler._agent = self._agent
        return window

    def _long_window(self, requests: int, governed: bool, read: Callable[[], float]) -> _Window:
        """Measure steps while requests think for LONG_TOKENS tokens each; one begins whenever one ends.

        The first requests begin one step after another, so that their probes fall into different steps, and have fewer
        tokens, so that their ends are spread evenly. The tokens are drawn at random, because the likeliest tokens of
        endless thinking repeat, and loops are rare in thinking that is long because its task is hard.
        """
        engine, prompts = self._llm.llm_engine, self._prompts(requests)
        live: dict[str, int] = {}

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
        window.steps = self._with_worker(noted)
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
        return [step.plus(s) for step, s in zip(steps, seconds[-len(steps) :], strict=True)]

    def _measured(self, read: Callable[[], float], run: Callable[[], object]) -> _Window:
        """Measure the steps of `run`."""
        busy_s, observe_s = self._worker()
        first = self._scheduler.current_step
        self.clock.reset(read)
        began = time.perf_counter()
        run()
        took, steps = time.perf_counter() - began, self._scheduler.current_step - first
        seconds = {name: s / steps * 1e6 for name, s in self.clock.seconds.items()}
        now = self._worker()
        return _Window(
            step_ms=took / steps * 1e3,
            us={name: seconds.get(name, 0.0) for name in (*HOOKS, *STOCK, "stock requests")},
            worker_us=(now[0] - busy_s) / steps * 1e6,
            observe_us=(now[1] - observe_s) / steps * 1e6,
            round_trip_ms=self._agent.link.outbox.round_trip_ms,
        )

    def _worker(self) -> tuple[float, float]:
        (counted,) = self._llm.collective_rpc("counted")
        busy_s, observe_s = counted
        return busy_s, observe_s


@dataclass
class _Window:
    step_ms: float
    us: dict[str, float]
    worker_us: float
    observe_us: float
    round_trip_ms: float
    # The steps of a window of long thinking.
    steps: list[Step] = field(default_factory=list)

    @property
    def agent_us(self) -> float:
        return sum(self.us[name] for name in HOOKS)

    @property
    def critical_us(self) -> float:
        return sum(self.us[name] for name, waits in HOOKS.items() if waits)

    @property
    def stock_us(self) -> float:
        return sum(self.us[name] for name in (*STOCK, "stock requests"))


def _row(requests: int, long: bool, wall: dict[bool, list[_Window]], cpu: dict[bool, list[_Window]]) -> Row:
    def median(windows: list[_Window], of: Callable[[_Window], float]) -> float:
        return statistics.median(map(of, windows))

    on, off = wall[True], wall[False]
    # In windows without the agent the mixin's own frames are booked as hooks, not as stock's time, because stock vLLM
    # does not have these frames.
    return Row(
        requests=requests,
        long=long,
        step_ms=median(on, lambda w: w.step_ms),
        agent_us=median(on, lambda w: w.agent_us),
        critical_us=median(on, lambda w: w.critical_us),
        stock_us=median(off, lambda w: w.stock_us),
        with_us=median(on, lambda w: w.stock_us),
        agent_cpu_us=median(cpu[True], lambda w: w.agent_us),
        stock_cpu_us=median(cpu[False], lambda w: w.stock_us),
        hooks_us={name: median(on, lambda w, name=name: w.us[name]) for name in HOOKS},  # type: ignore[misc]
        observe_us=median(on + cpu[True], lambda w: w.observe_us),
        worker_us=median(off + cpu[False], lambda w: w.worker_us),
        round_trip_ms=median(on, lambda w: w.round_trip_ms),
        windows=len(on) + len(off),
        probes=probe_cost([window.steps for window in on + cpu[True]]) if long else None,
        ratios=[a.agent_us / b.stock_us for a, b in zip(on, off, strict=True)],
    )
