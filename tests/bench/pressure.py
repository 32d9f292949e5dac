"""Measure what thinking that yields under load gains, on a real engine: `make bench-pressure`.

The protocol is in tests/bench/pressure.md.
"""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.bench import harness
from tests.bench.driver import PLACES, Completion, Engine, Sample
from tests.bench.harness import Column, Figures, Session
from tests.bench.scheduling_runs import STOCK as STOCK_POLICY
from tests.bench.tasks import CALIBRATION_SEED, MAZE
from tests.processes import ROOT

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
COLUMNS = (
    Column("goodput", "answers per second within targets", 2, "ratio"),
    Column("accuracy", "right, %", 1, "difference", 100),
    Column("think_tokens", "thinking tokens", 1),
)


@dataclass(frozen=True)
class Answer:
    """One request: seconds from the time when it was due to its first answer token, NaN if it has none; the longest
    gap between two answer tokens in seconds; its thinking tokens, and whether its answer is right."""

    first_s: float
    gap_s: float
    think_tokens: int
    right: bool


def figures(answers: Sequence[Answer], seconds: float, target_s: float, gap_s: float) -> Figures:
    """Return a run's figures. goodput: answers per second within both targets. seconds: time for which requests
    arrived."""
    good = sum(answer.first_s <= target_s and answer.gap_s <= gap_s for answer in answers)
    right = sum(answer.right for answer in answers) / len(answers)
    mean = float(np.mean([answer.think_tokens for answer in answers]))
    return {"goodput": good / seconds, "accuracy": right, "think_tokens": mean}


def equal_cap(lengths: Sequence[int], mean: float) -> int:
    """Return the cap, at least 1, under which thinking of these lengths has a mean nearest to `mean`."""
    caps = np.arange(1, max(lengths) + 1)
    means = np.minimum(np.array(lengths)[None, :], caps[:, None]).mean(axis=1)
    return int(caps[np.abs(means - mean).argmin()])


def serve(engine: Engine, samples: Sequence[Sample], policy: dict[str, Any], due_s: Sequence[float]) -> list[Answer]:
    """Run requests under one policy. due_s: seconds from the beginning at which each is sent. Raises BenchError."""
    engine.begin(policy)
    found = engine.generate(samples, engine.task.max_tokens, due_s=due_s)
    engine.state()
    return [
        _answer(engine.completion(sample, tuple(found[sample.name][0])), found[sample.name][1], due)
        for sample, due in zip(samples, due_s, strict=True)
    ]


def _answer(done: Completion, times_s: Sequence[float], due_s: float) -> Answer:
    answer_s = times_s[len(times_s) - done.answer_tokens :] if done.answer_tokens else []
    first_s = answer_s[0] - due_s if answer_s else float("nan")
    gap_s = float(np.max(np.diff(answer_s), initial=0.0))
    return Answer(first_s, gap_s, done.think_tokens, done.right)


class Benchmark:
    """Runs all arms at all loads on one engine. cap_tokens: the static cap."""

    def __init__(self, session: Session, engine: Engine) -> None:
        self.session, self.options, self.engine = session, session.options, engine
        self.lengths, self.cap_tokens = list[int](), 1
        self.rate = self.target_s = 0.0

    def prepare(self) -> None:
        """Measure the target, the capacity, and the lengths of thinking that nothing shortens."""
        self._closed(2 * PLACES)
        few = serve(self.engine, MAZE.samples(CALIBRATION_SEED, FEW), STOCK_POLICY, np.arange(FEW).tolist())
        self.target_s = TARGET * float(np.median([answer.first_s for answer in few]))
        self.rate = self._closed(6 * PLACES)
        self.session.say(f"capacity {self.rate:.2f} requests per second, target {self.target_s:.2f} s")

    def _closed(self, count: int) -> float:
        """Return the requests per second while every place is taken: all requests arrive at once, and the last ones,
        which leave places free, do not count."""
        answers = serve(self.engine, MAZE.samples(CALIBRATION_SEED + 1, count), STOCK_POLICY, [0.0] * count)
        self.lengths = [answer.think_tokens for answer in answers]
        ended_s = sorted(answer.first_s for answer in answers)
        return (count - PLACES) / ended_s[count - PLACES - 1]

    def policy(self, arm: str) -> dict[str, Any]:
        cap_tokens, floor = self.cap_tokens, {"scheduler": {"min_think_tokens": FLOOR_TOKENS}}
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

    async def run(self) -> None:
        for seed in range(self.options.repetitions):
            for load in self.options.loads:

                def run(arm: str, seed: int, load: float = load) -> Figures:
                    return self._one(arm, load, seed)

                case = f"{load:g}"
                await self.session.rounds([STOCK, DEFAULT, PRESSURE], run, [seed], case=case)
                # The static cap follows from the run under pressure, so it comes after it; the others take turns.
                mean = self.session.runs.values(PRESSURE, "think_tokens", case)[0, seed]
                self.cap_tokens = equal_cap(self.lengths, mean)
                await self.session.rounds([STATIC], run, [seed], case=case)

    def _one(self, arm: str, load: float, seed: int) -> Figures:
        rng = np.random.default_rng([seed, round(10 * load)])
        count = max(1, round(self.rate * load * self.options.seconds))
        due_s = np.sort(rng.uniform(0.0, self.options.seconds, count)).tolist()
        answers = serve(self.engine, MAZE.samples(9_000 + seed, count), self.policy(arm), due_s)
        return figures(answers, self.options.seconds, self.target_s, GAP_STEPS * self.options.step_ms / 1e3)


async def measure(session: Session) -> dict[str, Any]:
    given, runs = session.options, session.runs
    with closing(Engine(MAZE, session.folder / "engine", given.step_ms)) as running:
        benchmark = Benchmark(session, running)
        benchmark.prepare()
        await benchmark.run()
    text = (
        f"Maze model, steps of {given.step_ms:g} ms, {given.repetitions} repetitions of {given.seconds:g} s, by load."
    )
    session.table("Loads", text, COLUMNS, STOCK)
    names = [column.figure for column in COLUMNS]
    last: dict[str, Any] = {
        case: {arm: {name: runs.median(arm, name, case).value for name in names} for arm in ARMS}
        for case in runs.cases()
    }
    ratios = {case: {o: runs.ratio(PRESSURE, o, "goodput", case) for o in (STOCK, STATIC)} for case in runs.cases()}
    if "1.2" in ratios:
        session.goal("goodput over stock at 1.2 of capacity", ">= 2", ratios["1.2"][STOCK], 2)
        session.goal("goodput over the static cap at 1.2 of capacity", ">= 1.3", ratios["1.2"][STATIC], 2)
    # A ratio is null if the other arm had no answer within its targets.
    told = {c: {o: r.rounded(3) if r.value == r.value else None for o, r in of.items()} for c, of in ratios.items()}
    return last | {"ratios": told}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=float, default=60.0, help="time for which requests arrive in a run")
    add("--repetitions", type=int, default=3, help="runs of each arm at each load, each with its own seed")
    add("--loads", type=float, nargs="+", default=LOADS, help="arrivals relative to the capacity")
    add("--step-ms", type=float, default=20.0, help="least duration of a step, to which the worker stretches it")


if __name__ == "__main__":
    harness.main("pressure", "Thinking under pressure", __doc__, options, measure, calm=True)
