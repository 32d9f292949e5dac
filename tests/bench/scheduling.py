"""Compare scheduling strategies on a real engine, and their effect on latency and throughput: `make bench-scheduling`.

The protocol is in tests/bench/scheduling.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import Any

from tests.bench import harness, random_model, scheduling_load, scheduling_runs
from tests.bench.harness import Column, Figures, Interval, Session
from tests.bench.scheduling_load import Process
from tests.bench.scheduling_runs import QUIET, STOCK, Capacity, Costs, Plan
from tests.bench.streamed import PLACES, Setup, StreamedEngine

STOCK_FCFS, STOCK_PRIORITY, PLAIN = "stock FCFS", "stock priority", "vLLM without the agent"
STRATEGIES = ("reasoning_first", "output_first", "deadline")
DEFAULT = "output_first"
# Positions of the explicit answer budgets on the line from the step time of few sequences (0) to that of a full batch
# (1) and beyond.
FRONTIER = (0.0, 0.5, 1.0, 2.0, 3.0)
# Position of the reader's pace on the same line of step times; `reasoning_first` paces answers at it.
READER = 2.0
THINK_BUDGETS = 4.0
# `reasoning_first` demotes a request that thinks longer than this, which is twice the median of the benchmark's
# requests.
LONG_THINK_TOKENS = 200
MIN_PREFILL_TOKENS = 16


def budget_ms(costs: Costs, position: float) -> float:
    return costs.few_ms + position * (costs.full_ms - costs.few_ms)


def strategy(name: str, costs: Costs) -> dict[str, Any]:
    """Return a strategy with the policy's defaults and budgets that follow the engine; entropy rules are off."""
    scheduler: dict[str, Any] = {"strategy": name}
    if name == "reasoning_first":
        reading_ms = round(budget_ms(costs, READER), 2)
        scheduler |= {"output_tpot_budget_ms": reading_ms, "long_think_tokens": LONG_THINK_TOKENS}
    return {**QUIET, "scheduler": scheduler}


def explicit(costs: Costs, position: float) -> dict[str, Any]:
    """Return the default strategy with an explicit budget, of which prompts may take at least half."""
    budget = budget_ms(costs, position)
    scheduler = {
        "strategy": DEFAULT,
        "output_tpot_budget_ms": round(budget, 2),
        "think_tpot_budget_ms": round(THINK_BUDGETS * budget, 2),
        "min_prefill_tokens": max(MIN_PREFILL_TOKENS, int(budget / 2 / costs.prompt_token_ms)),
    }
    return {**QUIET, "scheduler": scheduler}


# A number of KV blocks that a full batch never uses up, and the share of the blocks in use then that the engine has
# under pressure.
AMPLE_BLOCKS, PRESSURE = 1024, 0.5
OTHER_LOADS = (0.7, 1.3)
CAPACITY_REQUESTS, WARM_REQUESTS = 4 * PLACES, 8
RATIOS = {
    "itl_p99": "itl_p99_ms",
    "ttot_p99": "ttot_p99_ms",
    "ttfvt_p99": "ttfvt_p99_ms",
    "throughput": "throughput_tokens_per_s",
}
COLUMNS = (
    Column("itl_p50_ms", "ITL P50, ms"),
    Column("itl_p99_ms", "ITL P99", 1, "ratio"),
    Column("ttot_p50_ms", "TTOT P50"),
    Column("ttot_p99_ms", "TTOT P99", 1, "ratio"),
    Column("ttft_p50_ms", "TTFT P50", 0),
    Column("ttft_p99_ms", "TTFT P99", 0),
    Column("ttfvt_p50_ms", "TTFVT P50", 0),
    Column("ttfvt_p99_ms", "TTFVT P99", 0, "ratio"),
    Column("qoe", "QoE", 3),
    Column("throughput_tokens_per_s", "tokens/s", 0, "ratio"),
    Column("think_preempted", "preempted thinking", 0),
    Column("answers_preempted", "preempted answers", 0),
    Column("preempted", "preempted in all", 0),
    Column("kv_peak", "KV peak", 2),
    Column("waiting_mean", "mean of waiting requests", 1),
)


PREEMPTION = "preemption"
CROWDED = "short requests while thinking has all places"
PREEMPTIONS: dict[str, dict[str, Any]] = {
    STOCK_FCFS: STOCK,
    PREEMPTION: {
        **STOCK,
        # The thinking here is a tenth as long as real models', and so is what makes it preemptible.
        "preemption": {"shadow": False, "preemptible_from_tokens": 32},
        "override": [{"tenant": scheduling_load.URGENT, "preemption": {"may_preempt": True}}],
    },
}
CROWDED_COLUMNS = (
    Column("urgent_ttft_p50_ms", "TTFT P50 of short requests, ms", 0, "ratio"),
    Column("urgent_ttft_p99_ms", "TTFT P99 of short requests", 0, "ratio"),
    Column("throughput_tokens_per_s", "tokens/s", 0, "ratio"),
    Column("preempted", "preemptions", 0),
    Column("recomputed_share", "computed again, %", 2, factor=100.0),
)


def case_of(process: Process, part: float, *, pressure: bool) -> str:
    return f"{process} {part:g}, {'with' if pressure else 'without'} pressure"


JUDGED = case_of("poisson", 1.0, pressure=True)


class Benchmark:
    """Runs all cases on one engine after the other."""

    def __init__(self, session: Session) -> None:
        self.session, self.options = session, session.options
        self.model = random_model.make(session.folder / "model")
        self.capacities: dict[str, Capacity] = {}
        self.processes: list[Process] = ["poisson"] if self.options.quick else ["poisson", "gamma"]
        self.costs: Costs
        self.plan: Plan

    async def run(self) -> None:
        own, folder = self.options, self.session.folder
        with closing(StreamedEngine(Setup(self.model, AMPLE_BLOCKS), folder / "ample")) as running:
            await self._measure(running)
            arms = {STOCK_FCFS: STOCK} | {name: strategy(name, self.costs) for name in STRATEGIES}
            frontier = {f"{DEFAULT} at {at:g}": explicit(self.costs, at) for at in FRONTIER}
            await self._runs(running, arms, pressure=False)
            await self._runs(running, frontier, pressure=False, processes=["poisson"], repetitions=1)
        blocks = math.ceil(PRESSURE * self.capacities["ample"].kv_peak_blocks) + 1
        with closing(StreamedEngine(Setup(self.model, blocks), folder / "pressure")) as running:
            await scheduling_runs.warm(running, WARM_REQUESTS)
            self.capacities["pressure"] = await self._capacity(running)
            await self._runs(running, arms, pressure=True)
            await self._runs(running, frontier, pressure=True, processes=["poisson"], repetitions=1)
            if not own.quick:
                pair = {name: arms[name] for name in (STOCK_FCFS, DEFAULT)}
                for part in OTHER_LOADS:
                    await self._runs(running, pair, pressure=True, processes=["poisson"], part=part)
        for pressure, size in (False, AMPLE_BLOCKS), (True, blocks):
            with closing(
                StreamedEngine(Setup(self.model, size, policy="priority"), folder / f"priority-{size}")
            ) as running:
                await scheduling_runs.warm(running, WARM_REQUESTS)
                await self._runs(running, {STOCK_PRIORITY: STOCK}, pressure=pressure)
        if not own.quick:
            with closing(StreamedEngine(Setup(self.model, blocks, governed=False), folder / "plain")) as running:
                await scheduling_runs.warm(running, WARM_REQUESTS)
                await self._runs(running, {PLAIN: {}}, pressure=True, processes=["poisson"])

    async def _measure(self, running: StreamedEngine) -> None:
        await scheduling_runs.warm(running, WARM_REQUESTS)
        self.costs = await self.session.measured(partial(scheduling_runs.measure_costs, running))
        self.capacities["ample"] = capacity = await self._capacity(running)
        self.plan = Plan(capacity.requests_per_s, self.options.counted, budget_ms(self.costs, READER) / 1e3)
        self.session.say(f"{self.costs}, {capacity}, {self.plan}")

    async def _capacity(self, running: StreamedEngine) -> Capacity:
        measure = partial(scheduling_runs.measure_capacity, running, CAPACITY_REQUESTS)
        found: Capacity = await self.session.measured(measure)
        return found

    async def _runs(
        self,
        running: StreamedEngine,
        arms: Mapping[str, dict[str, Any]],
        *,
        pressure: bool,
        processes: Sequence[Process] = (),
        part: float = 1.0,
        repetitions: int = 0,
    ) -> None:
        for process in processes or self.processes:

            async def run(arm: str, seed: int, process: Process = process) -> Figures:
                return await scheduling_runs.run(running, arms[arm], self.plan, seed, process=process, part=part)

            case = case_of(process, part, pressure=pressure)
            await self.session.rounds(list(arms), run, repetitions or self.options.repetitions, case=case)

    def text(self) -> str:
        costs, ample, pressure = self.costs, self.capacities["ample"], self.capacities["pressure"]
        return (
            f"{random_model.MEDIUM.parameters() / 1e6:.0f} M random weights, {PLACES} places. A decode step takes "
            f"{costs.few_ms:.1f} ms with {scheduling_runs.FEW} sequences and {costs.full_ms:.1f} ms with {PLACES}, a "
            f"prompt token {costs.prompt_token_ms:.2f} ms. Capacity: {ample.requests_per_s:.2f} requests/s, "
            f"{ample.tokens_per_s:.0f} tokens/s; with half of the blocks in use then, {pressure.requests_per_s:.2f} "
            f"requests/s. {self.options.counted} requests of a run count; the reader expects a token every "
            f"{self.plan.pace_s * 1e3:.1f} ms."
        )


async def crowded(session: Session) -> dict[str, Any]:
    """Measure the short requests of one tenant while thinking has all places, stock and with preemption."""
    own, model = session.options, random_model.make(session.folder / "model")
    with closing(StreamedEngine(Setup(model, AMPLE_BLOCKS), session.folder / "crowded")) as running:
        await scheduling_runs.warm(running, WARM_REQUESTS)
        costs = await session.measured(partial(scheduling_runs.measure_costs, running))

        async def run(arm: str, seed: int) -> Figures:
            return await scheduling_runs.run_crowded(running, PREEMPTIONS[arm], seed, own.crowded)

        await session.rounds(list(PREEMPTIONS), run, own.repetitions, case=CROWDED)
    text = (
        f"{random_model.MEDIUM.parameters() / 1e6:.0f} M random weights, {PLACES} places, "
        f"{PLACES + scheduling_load.BEHIND} requests present, which think {scheduling_load.LONG_THINK} tokens each; "
        f"{own.crowded} short requests of {scheduling_load.PROMPT[0]} prompt tokens one after another. A decode step "
        f"takes {costs.few_ms:.1f} ms with {scheduling_runs.FEW} sequences and {costs.full_ms:.1f} ms with {PLACES}."
    )
    session.table("Preemption", text, CROWDED_COLUMNS, STOCK_FCFS, [CROWDED])
    wanted = {"urgent_ttft_p50_ms": "<= 0.2", "throughput_tokens_per_s": ">= 0.95"}
    ratios = {name: session.runs.ratio(PREEMPTION, STOCK_FCFS, name, CROWDED) for name in wanted}
    for name, found in ratios.items():
        session.goal(f"{name} of preemption over stock, {CROWDED}", wanted[name], found)
    return {name: found.rounded() for name, found in ratios.items()}


async def measure(session: Session) -> dict[str, Any]:
    if session.options.only_preemption:
        return await crowded(session)
    benchmark, runs = Benchmark(session), session.runs
    await benchmark.run()
    preemption = await crowded(session)
    session.table("Strategies", benchmark.text(), COLUMNS, STOCK_FCFS)
    ratios = {name: runs.ratio(DEFAULT, STOCK_FCFS, figure, JUDGED) for name, figure in RATIOS.items()}
    wanted = {"itl_p99": "<= 0.5", "ttot_p99": "<= 0.5", "ttfvt_p99": "<= 1.05", "throughput": ">= 0.97"}
    for name, found in ratios.items():
        session.goal(f"{name} of {DEFAULT} over stock, {JUDGED}", wanted[name], found)

    def preempted(arm: str) -> int:
        return int(sum(runs.values(arm, "answers_preempted", JUDGED).values()))

    lost = float(preempted(DEFAULT))
    session.goal(f"answers of {DEFAULT} preempted, {JUDGED}", "<= 0", Interval(lost, lost, lost), 0)
    names = {**RATIOS, "itl_p50": "itl_p50_ms", "ttft_p50": "ttft_p50_ms", "qoe": "qoe"}
    arms = {
        arm: {name: runs.median(arm, figure, JUDGED).rounded() for name, figure in names.items()}
        | {"answers_preempted": preempted(arm)}
        for arm in runs.arms(JUDGED)
        if arm != PLAIN
    }
    told = {name: found.rounded() for name, found in ratios.items()}
    return {"arms": arms, "ratios": told | {"answers_preempted": preempted(DEFAULT)}, "preemption": preemption}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--repetitions", type=int, default=3, help="runs of each arm in each case, each with its own seed")
    add("--counted", type=int, default=64, help="requests of a run that count in the latencies")
    add("--crowded", type=int, default=10, help="short requests of a run while thinking has all places")
    add("--only-preemption", action="store_true", help="measure preemption alone")
    add("--quick", action="store_true", help="run one short repetition of the Poisson cases")


def check(_: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    if given.quick:
        given.repetitions, given.counted, given.crowded = 1, min(given.counted, 24), min(given.crowded, 8)


if __name__ == "__main__":
    harness.main("scheduling", "The order of requests", __doc__, options, measure, calm=True, check=check)
