"""Compare scheduling strategies on a real engine, and their effect on latency and throughput: `make bench-scheduling`.

The protocol is in tests/bench/README.md. The module owns the order of events. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench import program, random_model, scheduling_arms, scheduling_report, scheduling_runs
from tests.bench.machine import Calm, add_calm_options
from tests.bench.scheduling_arms import DEFAULT, PLAIN, STOCK_FCFS, STOCK_PRIORITY
from tests.bench.scheduling_metrics import Case
from tests.bench.scheduling_runs import STOCK, Arm, Plan
from tests.bench.streamed import PLACES, Setup, engine
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.scheduling_metrics import Run
    from tests.bench.scheduling_runs import Capacity, Costs
    from tests.bench.streamed import StreamedEngine

RESULTS = Path(__file__).parent / "results"
# A number of KV blocks that a full batch never uses up.
AMPLE_BLOCKS = 1024
# Under pressure the engine has this share of the blocks that the same load uses if blocks are ample.
PRESSURE = 0.5
OTHER_LOADS = (0.7, 1.3)
CAPACITY_REQUESTS = 4 * PLACES
WARM_REQUESTS = 8


@dataclass(frozen=True)
class Options:
    """The command line. counted: number of requests of a run that count in the latencies."""

    repetitions: int
    counted: int
    quick: bool
    output: Path
    save: bool
    quiet_cores: float
    patience_s: float


class Benchmark:
    """Runs all cases on one engine after the other."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.model = random_model.make(options.output / "model")
        self.runs: list[Run] = []
        self.capacities: dict[str, Capacity] = {}
        self.calm = Calm(options.quiet_cores, options.patience_s)
        self.costs: Costs
        self.plan: Plan
        self.token_budget = 0

    async def run(self) -> scheduling_report.Findings:
        ample = Setup(self.model, AMPLE_BLOCKS)
        with engine(ample, self.options.output / "ample") as running:
            await self._measure(running)
            arms = scheduling_arms.main(self.costs)
            await self._runs(running, arms, self._cases(pressure=False))
            await self._runs(running, self._frontier(), [Case("poisson", 1.0, False)], repetitions=1)
        blocks = math.ceil(PRESSURE * self.capacities["ample"].kv_peak_blocks) + 1
        await self._under_pressure(Setup(self.model, blocks), arms)
        priority = [Arm(STOCK_PRIORITY, STOCK)]
        for pressure, size in (False, AMPLE_BLOCKS), (True, blocks):
            setup = Setup(self.model, size, policy="priority")
            with engine(setup, self.options.output / f"priority-{size}") as running:
                await self._warm(running)
                await self._runs(running, priority, self._cases(pressure=pressure))
        if not self.options.quick:
            with engine(Setup(self.model, blocks, governed=False), self.options.output / "plain") as running:
                await self._warm(running)
                await self._runs(running, [Arm(PLAIN, {})], [Case("poisson", 1.0, True)])
        policies = {arm.name: arm.policy for arm in (*arms, *self._frontier())}
        return scheduling_report.Findings(
            runs=self.runs,
            policies=policies,
            costs=self.costs,
            capacities=self.capacities,
            plan=self.plan,
            repetitions=self.options.repetitions,
            blocks={"ample": AMPLE_BLOCKS, "pressure": blocks},
            token_budget=self.token_budget,
        )

    def _cases(self, *, pressure: bool) -> list[Case]:
        both = [Case("poisson", 1.0, pressure), Case("gamma", 1.0, pressure)]
        return both[:1] if self.options.quick else both

    def _frontier(self) -> list[Arm]:
        return scheduling_arms.frontier(self.costs)

    async def _warm(self, running: StreamedEngine) -> None:
        """Send some requests first, because the first requests of an engine are slower than all others."""
        await scheduling_runs.warm(running, WARM_REQUESTS)

    async def _measure(self, running: StreamedEngine) -> None:
        await self._warm(running)
        self.token_budget = running.token_budget
        self.costs, _ = await self.calm.measure(partial(scheduling_runs.measure_costs, running))
        self.capacities["ample"] = capacity = await self._capacity(running)
        pace_ms = scheduling_arms.budget_ms(self.costs, scheduling_arms.READER)
        self.plan = Plan(capacity.requests_per_s, self.options.counted, pace_ms / 1e3)
        say(f"{self.costs}, {capacity}, reader {pace_ms:.1f} ms")

    async def _capacity(self, running: StreamedEngine) -> Capacity:
        measure = partial(scheduling_runs.measure_capacity, running, CAPACITY_REQUESTS)
        capacity, _ = await self.calm.measure(measure)
        return capacity

    async def _under_pressure(self, setup: Setup, arms: Sequence[Arm]) -> None:
        with engine(setup, self.options.output / "pressure") as running:
            await self._warm(running)
            self.capacities["pressure"] = await self._capacity(running)
            await self._runs(running, arms, self._cases(pressure=True))
            await self._runs(running, self._frontier(), [Case("poisson", 1.0, True)], repetitions=1)
            if not self.options.quick:
                pair = [arm for arm in arms if arm.name in (STOCK_FCFS, DEFAULT)]
                await self._runs(running, pair, [Case("poisson", load, True) for load in OTHER_LOADS])

    async def _runs(
        self, running: StreamedEngine, arms: Sequence[Arm], cases: Sequence[Case], repetitions: int | None = None
    ) -> None:
        """Run all arms in all cases, in turns, so that a drift of the machine's speed affects all of them."""
        for seed in range(repetitions or self.options.repetitions):
            for case in cases:
                for arm in (*arms[seed % len(arms) :], *arms[: seed % len(arms)]):
                    one = partial(scheduling_runs.run, running, arm, case, self.plan, seed)
                    found, others = await self.calm.measure(one)
                    found.figures["others_cores"] = others
                    self.runs.append(found)
                    self._write(found)
                    say(f"{arm.name}, {case}, seed {seed}: {scheduling_report.brief(found)}")

    def _write(self, run: Run) -> None:
        with (self.options.output / "runs.jsonl").open("a") as file:
            file.write(json.dumps(scheduling_report.plain(run)) + "\n")


def say(line: str) -> None:
    print(line, flush=True)


def run(options: Options) -> None:
    """Run the whole benchmark. Raises BenchError."""
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "runs.jsonl").unlink(missing_ok=True)
    found = asyncio.run(Benchmark(options).run())
    paths = scheduling_report.write(found, options.output)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        for path in paths:
            shutil.copy(path, RESULTS / path.name)
    print(f"\n{scheduling_report.markdown(found)}\nwritten: {', '.join(map(str, paths))}")
    print(json.dumps(scheduling_report.summary(found)))


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--repetitions", type=int, default=3, help="runs of each arm in each case, each with its own seed")
    add("--counted", type=int, default=64, help="requests of a run that count in the latencies")
    add("--quick", action="store_true", help="run one short repetition of the Poisson cases")
    add("--output", type=Path, default=ROOT / "build" / "bench-scheduling")
    add("--save", action="store_true", help="copy the results to tests/bench/results")
    add_calm_options(parser)
    given = parser.parse_args(arguments)
    if given.quick:
        given.repetitions, given.counted = 1, min(given.counted, 24)
    return Options(**vars(given))


if __name__ == "__main__":
    program.main(lambda: run(parse()))
