"""Measure what ending thinking saves and costs, on a real engine: `make bench-termination`.

The protocol is in tests/bench/README.md. The module owns the order of events. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import arms, probe_cost, program, report, results, third_task
from tests.bench.arms import Arm
from tests.bench.calibrate import Calibrated, calibrate
from tests.bench.cuts import Reference, oracle
from tests.bench.driver import engine
from tests.bench.report import CALIBRATED, EQUAL, NATURAL, ORACLE, ORACLE_TOKEN, PREFIXED, RECOMMENDED
from tests.bench.tasks import CALIBRATION_SEED, CHAIN, MAZE, RUNNING
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.cuts import Cuts
    from tests.bench.driver import Batch, Engine, Sample
    from tests.bench.results import Result
    from tests.bench.tasks import Task

RESULTS = Path(__file__).parent / "results"
# Fixed budgets that form a curve, in addition to the budget of equal compute.
BUDGETS = {"maze": (16, 32, 64, 96, 160), "chain": (32, 64, 96)}
COST_REQUESTS = 96


@dataclass(frozen=True)
class Options:
    """The command line. policy: a recommended policy, which replaces the calibration."""

    requests: int
    seeds: int
    calibration: int
    step_ms: float
    repetitions: int
    output: Path
    save: bool
    policy: Path | None
    second: bool
    second_model: Path | None
    third: bool


class Measurement:
    """Runs the arms of one task on one engine."""

    def __init__(self, running: Engine, samples: Sequence[Sample], folder: Path) -> None:
        self.engine, self.samples, self.folder = running, samples, folder
        self.batches: dict[str, Batch] = {}
        self.results: list[Result] = []
        self.policies: dict[str, Any] = {}
        self.reference = Reference(running.task)
        self.cuts: list[Cuts] = []

    @property
    def natural(self) -> Batch:
        return self.batches[NATURAL]

    def run(self, arm: Arm) -> Result:
        batch = self.engine.run(self.samples, arm.policy, arm.budget, arm.max_tokens)
        self.batches[arm.name] = batch
        if not self.cuts:
            self.cuts = [self.reference.cuts(*pair) for pair in zip(self.samples, batch.completions, strict=True)]
        found = results.result(arm, batch, self.natural, self.samples, self._expected(batch))
        self.results.append(found)
        self.policies[arm.name] = arm.policy
        say(
            f"{self.engine.task.name}, {arm.name}: {found.think_tokens:.1f} + {found.probe_tokens:.1f} tokens, "
            f"{found.accuracy:.1%} right, {found.wall_s:.0f} s"
        )
        return found

    def _expected(self, batch: Batch) -> float:
        """Return the mean probability of the right answer where thinking ended.

        Most often the thinking is a cut of the natural thinking, whose probability is known already.
        """
        total = 0.0
        for sample, c, natural, cut in zip(
            self.samples, batch.completions, self.natural.completions, self.cuts, strict=True
        ):
            kept = len(c.tokens) - c.answer_tokens - 1
            if c.ended and c.tokens[:kept] == natural.tokens[:kept]:
                total += cut.chance[c.think_tokens]
            elif c.ended:
                total += self.reference.cuts(sample, c).chance[-1]
        return total / len(self.samples)

    def run_natural(self) -> None:
        """Run natural stopping, and compute the oracles from its tokens."""
        self.run(Arm(NATURAL))
        completions = self.natural.completions
        for name, anywhere, place in ((ORACLE, False, "sentence end"), (ORACLE_TOKEN, True, "token")):
            ideals = [oracle(c, cut, anywhere) for c, cut in zip(completions, self.cuts, strict=True)]
            note = f"offline: the first {place} where the likeliest answer is right"
            self.results.append(results.oracle(name, note, ideals, self.natural, self.samples))

    def calibrate(self, requests: int) -> Calibrated:
        task = self.engine.task
        say(f"{task.name}: recording {requests} requests twice and calibrating on them")
        return calibrate(self.engine, self.reference, task.samples(CALIBRATION_SEED, requests), self.folder)

    def equal_budget(self, recommended: Result) -> Arm:
        tokens = results.equal_budget(self.natural.completions, recommended.compute_tokens)
        return arms.budget(tokens, EQUAL)

    def findings(self, calibrated: Calibrated | None, budgets: Sequence[str]) -> report.TaskFindings:
        recommended, fixed = ([c.right for c in self.batches[name].completions] for name in (RECOMMENDED, EQUAL))
        return report.TaskFindings(
            task=self.engine.task.name,
            results=self.results,
            budgets=[*budgets, EQUAL],
            curve=results.cut_curve(self.natural.completions, self.cuts, max(BUDGETS[self.engine.task.name])),
            rule=calibrated.rule if calibrated else "",
            calibration_requests=calibrated.requests if calibrated else 0,
            recommended_over_fixed=results.paired(recommended, fixed),
            policies=self.policies,
        )

    def write_requests(self) -> None:
        """Write one line per request and arm."""
        with (self.folder / "requests.jsonl").open("w") as file:
            for name, batch in self.batches.items():
                for sample, c in zip(self.samples, batch.completions, strict=True):
                    row = {
                        "arm": name,
                        "request": sample.name,
                        "think_tokens": c.think_tokens,
                        "answer_tokens": c.answer_tokens,
                        "ended": c.ended,
                        "right": c.right,
                    }
                    file.write(json.dumps(row) + "\n")


def say(line: str) -> None:
    print(line, flush=True)


@dataclass(frozen=True)
class First:
    """Results of the first task: its findings, and the values that the rest of the benchmark needs."""

    findings: report.TaskFindings
    policy: dict[str, Any]
    cost: probe_cost.ProbeCost | None
    vllm_version: str


def measure_first(options: Options) -> First:
    """Run all arms on the maze, and measure there what probes cost."""
    folder = options.output / MAZE.name
    with engine(MAZE, folder, options.step_ms) as running:
        made = Measurement(running, MAZE.measured(options.seeds, options.requests), folder)
        made.run_natural()
        calibrated = None if options.policy else made.calibrate(options.calibration)
        policy = calibrated.policy if calibrated else arms.load(options.policy or Path())
        recommended = made.run(Arm(RECOMMENDED, policy, None, calibrated.rule if calibrated else str(options.policy)))
        equal = made.equal_budget(recommended)
        made.run(equal)
        curve = [arms.budget(tokens) for tokens in BUDGETS[MAZE.name]]
        singles = arms.single_rules(calibrated.report, calibrated.natural_tokens) if calibrated else []
        for arm in (*curve, arms.hard_cap(equal.budget or 1), *singles, arms.published_ranks()):
            made.run(arm)
        made.write_requests()
        cost = None
        if options.repetitions:
            say(f"maze: what probes cost, {options.repetitions} repetitions of {COST_REQUESTS} requests")
            cost = probe_cost.measure(running, made.samples[:COST_REQUESTS], policy, options.repetitions)
        version = running.control.engine().vllm_version
        return First(made.findings(calibrated, [arm.name for arm in curve]), policy, cost, version)


def measure_second(options: Options, policy: dict[str, Any]) -> report.TaskFindings:
    """Run the second task, for which the policy was not made."""
    task: Task = replace(CHAIN, model=options.second_model or CHAIN.model)
    folder = options.output / task.name
    with engine(task, folder, options.step_ms) as running:
        made = Measurement(running, task.measured(options.seeds, options.requests), folder)
        made.run_natural()
        recommended = made.run(Arm(RECOMMENDED, policy, None, "the maze's policy, unchanged"))
        prefixed = arms.with_answer_prefix(policy, task.name, task.answer_prefix)
        note = "the maze's policy with the first words of this model's answers as answer prefix"
        made.run(Arm(PREFIXED, prefixed, None, note))
        calibrated = None if options.policy else made.calibrate(options.calibration)
        if calibrated:
            made.run(Arm(CALIBRATED, calibrated.policy, None, calibrated.rule))
        made.run(made.equal_budget(recommended))
        curve = [arms.budget(tokens) for tokens in BUDGETS[task.name]]
        for arm in curve:
            made.run(arm)
        made.write_requests()
        return made.findings(calibrated, [arm.name for arm in curve])


def measure_third(options: Options, policy: dict[str, Any]) -> third_task.ThirdFindings:
    """Run the third task, on which no rule may be recommended."""
    folder = options.output / RUNNING.name
    with engine(RUNNING, folder, options.step_ms) as running:
        made = Measurement(running, RUNNING.measured(options.seeds, options.requests), folder)
        return third_task.measure(made, options.calibration, policy)


def run(options: Options) -> None:
    """Run the whole benchmark. Raises BenchError."""
    options.output.mkdir(parents=True, exist_ok=True)
    first = measure_first(options)
    second = measure_second(options, first.policy) if options.second else None
    third = measure_third(options, first.policy) if options.third else None
    found = report.Findings(
        first.findings, second, third, first.cost, options.seeds, options.requests, options.step_ms, first.vllm_version
    )
    paths = report.write(found, options.output)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        for path in paths:
            shutil.copy(path, RESULTS / path.name)
    print(f"\n{report.markdown(found)}\nwritten: {', '.join(map(str, paths))}")
    print(json.dumps(report.summary(found)))


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--requests", type=int, default=400, help="per seed")
    add("--seeds", type=int, default=3)
    add("--calibration", type=int, default=800, help="requests per task for the calibration")
    add("--step-ms", type=float, default=20.0, help="least duration of a step in ms; 0 for no least duration")
    add("--repetitions", type=int, default=6, help="repetitions of the probe cost measurement; 0 leaves it out")
    add("--output", type=Path, default=ROOT / "build" / "bench-termination")
    add("--save", action="store_true", help="copy the results to tests/bench/results")
    add("--policy", type=Path, help="recommended policy (TOML) to use instead of calibrating")
    add("--no-second", dest="second", action="store_false", help="leave the second task out")
    add("--no-third", dest="third", action="store_false", help="leave the third task out")
    add("--second-model", type=Path, help="the second task's model, instead of the shipped one")
    return Options(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    program.main(lambda: run(parse()))
