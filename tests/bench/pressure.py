"""Measure what thinking that yields under load gains, on a real engine: `make bench-pressure`.

The protocol is in tests/bench/pressure.md. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import time
import tomllib
from collections import deque
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench import program
from tests.bench.driver import FINISHED, PLACES, Engine
from tests.bench.machine import Calm, add_calm_options
from tests.bench.program import BenchError
from tests.bench.scheduling_runs import STOCK as STOCK_POLICY
from tests.bench.tasks import CALIBRATION_SEED, MAZE
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tests.bench.driver import Completion, Sample

RESULTS = Path(__file__).parent / "results"
LOADS = (0.8, 1.2, 1.6)
STOCK, DEFAULT, STATIC, PRESSURE = ARMS = ("stock", "default", "static_cap", "pressure")
# The target of an answer's first token, as a multiple of its median on an engine with hardly any load, and that of the
# longest gap between two answer tokens, in steps.
TARGET, GAP_STEPS = 2.0, 6.0
# Share of the target at which the policy aims, so that a window that has just missed it did not miss the target.
AIM = 0.7
FLOOR_TOKENS, CAP_TOKENS, SOFT_TOKENS, WINDOW_S = 16, 128, 128, 2
# The calibrated rule of the demo, in shadow until a target is missed.
RULES = {**tomllib.loads((ROOT / "tests" / "demo" / "after.toml").read_text())["entropy"], "shadow": True}
FEW = 16


@dataclass(frozen=True)
class Options:
    """The command line. seconds: time for which requests arrive in a run."""

    seconds: float
    repetitions: int
    loads: Sequence[float]
    step_ms: float
    output: Path
    save: bool
    quiet_cores: float
    patience_s: float


@dataclass(frozen=True)
class Answer:
    """One request: seconds from the time when it was due to its first answer token, NaN if it has none; the longest
    gap between two answer tokens in seconds; its thinking tokens, and whether its answer is right."""

    first_s: float
    gap_s: float
    think_tokens: int
    right: bool


@dataclass(frozen=True)
class Figures:
    """The figures of a run: answers per second within both targets, the share of right answers, mean thinking."""

    goodput: float
    accuracy: float
    think_tokens: float


def figures(answers: Sequence[Answer], seconds: float, target_s: float, gap_s: float) -> Figures:
    """Return a run's figures. seconds: time for which requests arrived."""
    good = sum(answer.first_s <= target_s and answer.gap_s <= gap_s for answer in answers)
    right = sum(answer.right for answer in answers) / len(answers)
    return Figures(good / seconds, right, float(np.mean([answer.think_tokens for answer in answers])))


def equal_cap(lengths: Sequence[int], mean: float) -> int:
    """Return the cap, at least 1, under which thinking of these lengths has a mean nearest to `mean`."""
    caps = np.arange(1, max(lengths) + 1)
    means = np.minimum(np.array(lengths)[None, :], caps[:, None]).mean(axis=1)
    return int(caps[np.abs(means - mean).argmin()])


def median(runs: Sequence[Figures]) -> Figures:
    rows = np.array([list(asdict(run).values()) for run in runs])
    return Figures(*np.median(rows, axis=0).tolist())


def summary(found: Mapping[float, Mapping[str, Sequence[Figures]]]) -> dict[str, Any]:
    """Return the medians by load and arm, and the medians over repetitions of goodput and accuracy of pressure against
    stock and the static cap."""
    told: dict[str, Any] = {
        f"{load:g}": {name: asdict(median(runs)) for name, runs in arms.items()} for load, arms in found.items()
    }
    told["ratios"] = {
        f"{load:g}": {other: ratio(arms[PRESSURE], arms[other]) for other in (STOCK, STATIC)}
        for load, arms in found.items()
    }
    return told


def ratio(ours: Sequence[Figures], other: Sequence[Figures]) -> float | None:
    """Return the median over repetitions of the ratio of goodputs; None if the other arm had none."""
    ratios = [a.goodput / b.goodput for a, b in zip(ours, other, strict=True) if b.goodput]
    return round(float(np.median(ratios)), 3) if len(ratios) == len(other) else None


class OpenEngine(Engine):
    """The engine of the task, with requests that arrive at times of their own."""

    def serve(self, samples: Sequence[Sample], policy: dict[str, Any], due_s: Sequence[float]) -> list[Answer]:
        """Run requests under one policy. due_s: seconds from the beginning at which each is sent. Raises
        BenchError."""
        self.control.apply(policy)
        self._llm.reset_prefix_cache()
        prompts = [self.prompt_ids(sample.prompt) for sample in samples]
        engine = self._llm.llm_engine
        waiting = deque(zip(samples, prompts, due_s, strict=True))
        tokens: dict[str, list[int]] = {sample.name: [] for sample in samples}
        times_s: dict[str, list[float]] = {sample.name: [] for sample in samples}
        live, began_s = 0, time.perf_counter()
        while waiting or live:
            while waiting and (waiting[0][2] <= time.perf_counter() - began_s or not live):
                sample, ids, due = waiting.popleft()
                time.sleep(max(0.0, began_s + due - time.perf_counter()))
                engine.add_request(sample.name, {"prompt_token_ids": ids}, self._params(sample))
                live += 1
            for output in engine.step():
                completion = output.outputs[0]
                tokens[output.request_id] += completion.token_ids
                times_s[output.request_id] += [time.perf_counter() - began_s] * len(completion.token_ids)
                if output.finished and completion.finish_reason not in FINISHED:
                    raise BenchError(f"request {output.request_id} ended with {completion.finish_reason!r}")
                live -= output.finished
        self._engine()
        return [
            _answer(self._completion(sample, tuple(tokens[sample.name])), times_s[sample.name], due)
            for sample, due in zip(samples, due_s, strict=True)
        ]

    def _params(self, sample: Sample) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=1.0,
            max_tokens=self.task.max_tokens,
            seed=sample.seed,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )


def _answer(done: Completion, times_s: Sequence[float], due_s: float) -> Answer:
    answer_s = times_s[len(times_s) - done.answer_tokens :] if done.answer_tokens else []
    first_s = answer_s[0] - due_s if answer_s else float("nan")
    gap_s = float(np.max(np.diff(answer_s), initial=0.0))
    return Answer(first_s, gap_s, done.think_tokens, done.right)


class Benchmark:
    """Runs all arms at all loads on one engine."""

    def __init__(self, options: Options, engine: OpenEngine) -> None:
        self.options, self.engine = options, engine
        self.calm = Calm(options.quiet_cores, options.patience_s)
        self.lengths: list[int] = []
        self.rate = self.target_s = 0.0

    def prepare(self) -> None:
        """Measure the target, the capacity, and the lengths of thinking that nothing shortens."""
        self._closed(2 * PLACES)
        few = self.engine.serve(MAZE.samples(CALIBRATION_SEED, FEW), STOCK_POLICY, np.arange(FEW).tolist())
        self.target_s = TARGET * float(np.median([answer.first_s for answer in few]))
        self.rate = self._closed(6 * PLACES)
        say(f"capacity {self.rate:.2f} requests per second, target {self.target_s:.2f} s")

    def _closed(self, count: int) -> float:
        """Return the requests per second while every place is taken: all requests arrive at once, and the last ones,
        which leave places free, do not count."""
        began_s = time.perf_counter()
        answers = self.engine.serve(MAZE.samples(CALIBRATION_SEED + 1, count), STOCK_POLICY, [0.0] * count)
        self.lengths = [answer.think_tokens for answer in answers]
        ended_s = sorted(answer.first_s for answer in answers)
        say(f"{count} requests at once took {time.perf_counter() - began_s:.1f} s")
        return (count - PLACES) / ended_s[count - PLACES - 1]

    def policy(self, arm: str, cap_tokens: int) -> dict[str, Any]:
        floor = {"scheduler": {"min_think_tokens": FLOOR_TOKENS}}
        entry = {"name": "all", "ttfvt_p99_ms": 1e3 * AIM * self.target_s, "window_s": WINDOW_S, "shadow": False}
        entry |= {"soft_think_tokens": SOFT_TOKENS, "max_think_tokens": CAP_TOKENS, "entropy_in_force": True}
        entry["min_think_tokens"] = FLOOR_TOKENS
        capped = {"min_think_tokens": min(FLOOR_TOKENS, cap_tokens), "max_think_tokens": cap_tokens}
        policies: dict[str, dict[str, Any]] = {
            STOCK: STOCK_POLICY,
            DEFAULT: {},
            PRESSURE: {**floor, "entropy": RULES, "pressure": [entry]},
            STATIC: {"scheduler": capped, "entropy": {"holdout_share": 0.0}},
        }
        return policies[arm]

    async def run(self) -> dict[float, dict[str, list[Figures]]]:
        found: dict[float, dict[str, list[Figures]]] = {load: {arm: [] for arm in ARMS} for load in self.options.loads}
        for seed in range(self.options.repetitions):
            for load in self.options.loads:
                cap_tokens = 1
                # The static cap follows from the run under pressure, so it comes after it; the others take turns.
                first = [STOCK, DEFAULT, PRESSURE]
                for arm in (*first[seed % 3 :], *first[: seed % 3], STATIC):
                    made, others = await self.calm.measure(partial(self._one, arm, load, seed, cap_tokens))
                    say(f"load {load:g}, seed {seed}, {arm}, others {others:.2f} cores: {made}")
                    found[load][arm].append(made)
                    if arm == PRESSURE:
                        cap_tokens = equal_cap(self.lengths, made.think_tokens)
        return found

    async def _one(self, arm: str, load: float, seed: int, cap_tokens: int) -> Figures:
        rng = np.random.default_rng([seed, round(10 * load)])
        count = max(1, round(self.rate * load * self.options.seconds))
        due_s = np.sort(rng.uniform(0.0, self.options.seconds, count)).tolist()
        samples = MAZE.samples(9_000 + seed, count)
        answers = self.engine.serve(samples, self.policy(arm, cap_tokens), due_s)
        return figures(answers, self.options.seconds, self.target_s, GAP_STEPS * self.options.step_ms / 1e3)


def markdown(found: Mapping[float, Mapping[str, Sequence[Figures]]], options: Options) -> str:
    """Return the table of medians by load and arm."""
    lines = [
        "# Thinking under pressure: results",
        "",
        f"[Protocol](../pressure.md); {options.repetitions} repetitions of {options.seconds:g} s.",
        "",
        "| load | arm | answers per second within targets | right | thinking tokens |",
        "|---|---|---|---|---|",
    ]
    for load, arms in found.items():
        for name, runs in arms.items():
            of = median(runs)
            lines.append(f"| {load:g} | {name} | {of.goodput:.2f} | {of.accuracy:.1%} | {of.think_tokens:.1f} |")
    return "\n".join(lines) + "\n"


def say(line: str) -> None:
    print(line, flush=True)


def run(options: Options) -> None:
    """Run the whole benchmark. Raises BenchError."""
    options.output.mkdir(parents=True, exist_ok=True)
    engine = OpenEngine(MAZE, options.output / "engine", options.step_ms)
    try:
        benchmark = Benchmark(options, engine)
        benchmark.prepare()
        found = asyncio.run(benchmark.run())
    finally:
        engine.close()
    text, last = markdown(found, options), json.dumps(summary(found))
    (options.output / "pressure.md").write_text(text)
    if options.save:
        RESULTS.mkdir(exist_ok=True)
        shutil.copy(options.output / "pressure.md", RESULTS / "pressure.md")
    print(f"\n{text}\n{last}")


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="time for which requests arrive in a run")
    add("--repetitions", type=int, default=3, help="runs of each arm at each load, each with its own seed")
    add("--loads", type=float, nargs="+", default=LOADS, help="arrivals relative to the capacity")
    add("--step-ms", type=float, default=20.0, help="least duration of a step, to which the worker stretches it")
    add("--output", type=Path, default=ROOT / "build" / "bench-pressure")
    add("--save", action="store_true", help="copy the results to tests/bench/results")
    add_calm_options(parser)
    return Options(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    program.main(lambda: run(parse()))
