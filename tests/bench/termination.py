"""Measure what ending thinking saves and costs, on a real engine: `make bench-termination`.

The protocol is in tests/bench/termination.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench import arms, harness
from tests.bench.arms import NATURAL as NATURAL_POLICY
from tests.bench.arms import Arm
from tests.bench.calibrate import Calibrated, calibrate
from tests.bench.cuts import Cuts, Reference, oracle
from tests.bench.driver import Batch, Completion, Engine
from tests.bench.harness import BenchError, Column, Interval, Session
from tests.bench.tasks import CALIBRATION_SEED, CHAIN, MAZE, RUNNING, Task
from tests.bench.third_task import answered, broken

NATURAL, ORACLE, ORACLE_TOKEN = "natural", "oracle", "oracle, any token"
RECOMMENDED, CALIBRATED, EQUAL = "recommended", "calibrated", "fixed budget of equal compute"
PREFIXED, FOREIGN, LOOPS = "recommended, answer prefix", "the maze's policy", "loop breaker"
NO_RESERVE, RESERVE = "max_tokens below the thinking", "answer reserve"
# Tokens of a short request, of which the second number is kept for the answer.
SHORT_TOKENS, RESERVED_TOKENS = 48, 8
# Fixed budgets that form a curve, in addition to the budget of equal compute.
BUDGETS = {"maze": (16, 32, 64, 96, 160), "chain": (32, 64, 96)}
# Requests of one seed that count as a round of the harness.
BLOCK = 100
COST_REQUESTS, ENFORCED_REPETITIONS = 96, 3
COLUMNS = (
    Column("think_tokens", "thinking", 1),
    Column("probe_tokens", "probes", 1),
    Column("saved", "saved, %", 1, factor=100),
    Column("accuracy", "accuracy, points", 1, "difference", 100),
    Column("expected", "expected", 1, factor=100),
    Column("compute_tokens", "thinking and probes", 1, "ratio"),
    Column("late_tokens", "tokens after a paragraph's end", 1),
)


class Measurement:
    """Runs the arms of one task on one engine. about: each arm's rule, and what ended the thinking."""

    def __init__(self, session: Session, running: Engine, folder: Path) -> None:
        given = session.options
        self.session, self.engine, self.folder, self.task = session, running, folder, running.task
        self.samples = self.task.measured(given.seeds, given.requests)
        self.batches: dict[str, Batch] = {}
        self.about: list[str] = []
        self.reference = Reference(running.task)
        self.cuts: list[Cuts] = []

    @property
    def natural(self) -> list[Completion]:
        return self.batches[NATURAL].completions

    def median(self, arm: str, figure: str = "compute_tokens") -> Interval:
        return self.session.runs.median(arm, figure, self.task.name)

    def run(self, arm: Arm) -> None:
        batch = self.engine.run(self.samples, arm.policy, arm.budget, arm.max_tokens)
        self.batches[arm.name] = batch
        if not self.cuts:
            self.cuts = [self.reference.cuts(*pair) for pair in zip(self.samples, batch.completions, strict=True)]
        done, natural = batch.completions, self.natural
        probes = batch.probe_tokens / len(done)
        late = [
            c.late_tokens if c.think_tokens < n.think_tokens else np.nan for c, n in zip(done, natural, strict=True)
        ]
        self._add(
            arm.name,
            think_tokens=[c.think_tokens for c in done],
            probe_tokens=[probes] * len(done),
            answer_tokens=[c.answer_tokens for c in done],
            accuracy=[c.right for c in done],
            expected=self._expected(done),
            late_tokens=late,
        )
        ends = [f"{count} {name}" for name, count in batch.ends.items()]
        unended = sum(not c.ended for c in done)
        ends += [f"{unended} without"] if unended else []
        self.about.append(f"{arm.name}: {arm.note or 'no rule'} (ends: {', '.join(ends)})")

    def _add(self, arm: str, **columns: Sequence[float]) -> None:
        """Note the figures of an arm, each as means over blocks of requests of one seed."""
        values = {name: np.array(column, float) for name, column in columns.items()}
        spent = values["compute_tokens"] = values["think_tokens"] + values["probe_tokens"]
        lengths = np.array([c.think_tokens for c in self.natural], float)
        rounds = [sample.round for sample in self.samples]
        blocks = [
            range(first, min(first + BLOCK, stop))
            for begin, stop in ((rounds.index(n), len(rounds) - rounds[::-1].index(n)) for n in sorted(set(rounds)))
            for first in range(begin, stop, BLOCK)
        ]
        for number, block in enumerate(blocks):
            at = list(block)
            figures = {name: float(np.nanmean(v[at])) for name, v in values.items() if not np.isnan(v[at]).all()}
            figures["saved"] = float(1 - spent[at].sum() / lengths[at].sum())
            figures["probe_share"] = float(
                values["probe_tokens"][at].sum() / (spent[at].sum() + values["answer_tokens"][at].sum())
            )
            self.session.add(arm, figures, number, self.task.name)

    def _expected(self, done: Sequence[Completion]) -> list[float]:
        """Return the probability of the right answer where the thinking of each request ended.

        Most often the thinking is a cut of the natural thinking, whose probability is known already.
        """
        found = []
        for sample, c, natural, cut in zip(self.samples, done, self.natural, self.cuts, strict=True):
            kept = len(c.tokens) - c.answer_tokens - 1
            if not c.ended:
                found.append(0.0)
            elif c.tokens[:kept] == natural.tokens[:kept]:
                found.append(cut.chance[c.think_tokens])
            else:
                found.append(self.reference.cuts(sample, c).chance[-1])
        return found

    def run_natural(self) -> None:
        """Run natural stopping, and compute the oracles from its tokens."""
        self.run(Arm(NATURAL))
        for name, anywhere in ((ORACLE, False), (ORACLE_TOKEN, True)):
            ideals = [oracle(c, cut, anywhere) for c, cut in zip(self.natural, self.cuts, strict=True)]
            self._add(
                name,
                think_tokens=[ideal.think_tokens for ideal in ideals],
                probe_tokens=[0.0] * len(ideals),
                answer_tokens=[c.answer_tokens for c in self.natural],
                accuracy=[ideal.right for ideal in ideals],
                expected=[ideal.chance for ideal in ideals],
            )

    def calibrate(self) -> Calibrated:
        requests = self.session.options.calibration
        self.session.say(f"{self.task.name}: recording {requests} requests twice and calibrating on them")
        samples = self.task.samples(CALIBRATION_SEED, requests)
        found = calibrate(self.engine, self.reference, samples, self.folder)
        self.about.append(f"calibration on {requests} other requests: {found.rule}")
        return found

    def run_budgets(self) -> int:
        """Run the fixed budget of equal compute, which is returned, and the curve.

        It is the smallest budget whose mean thinking is at least the recommended policy's thinking and probes, so that
        rounding favours the budget.
        """
        lengths = np.array([c.think_tokens for c in self.natural])
        longest, wanted = int(lengths.max()), self._mean(RECOMMENDED)
        equal = next((b for b in range(1, longest) if np.minimum(lengths, b).mean() >= wanted), longest)
        self.run(arms.budget(equal, EQUAL))
        for tokens in BUDGETS[self.task.name]:
            self.run(arms.budget(tokens))
        return equal

    def _mean(self, arm: str) -> float:
        batch = self.batches[arm]
        return batch.mean_think_tokens() + batch.probe_tokens / len(batch.completions)

    def write(self, *more: str) -> None:
        """Store the table, and a line per request and arm."""
        given = self.session.options
        about = (
            f"{given.seeds} seeds of {given.requests} requests, rounds of up to {BLOCK}, temperature 1, steps of "
            f"{given.step_ms:g} ms, vLLM {self.engine.control.engine().vllm_version}."
        )
        text = "\n\n".join([about, "\n".join(f"- {line}" for line in (*self.about, *more))])
        self.session.table(self.task.name, text, COLUMNS, NATURAL, [self.task.name])
        with (self.folder / "requests.jsonl").open("w") as file:
            for name, batch in self.batches.items():
                for sample, c in zip(self.samples, batch.completions, strict=True):
                    row = {"arm": name, "request": sample.name, "think_tokens": c.think_tokens, "ended": c.ended}
                    file.write(json.dumps(row | {"answer_tokens": c.answer_tokens, "right": c.right}) + "\n")

    def short(self, arm: str) -> dict[str, float]:
        """Return the arm's figures for the last line; thinking tokens include probes."""
        return {"think_tokens": self.median(arm).rounded(2), "accuracy": self.median(arm, "accuracy").rounded()}


def probe_time_share(made: Measurement, policy: dict[str, Any], repetitions: int) -> float:
    """Return the share of decode time that probes take under a policy in force.

    The policy in shadow, probing until thinking ends by itself, is compared with the same policy without probes. Both
    generate the same tokens. They alternate, after one pair to warm up. Times are decode times as in `driver.Batch`.
    """
    samples = made.samples[:COST_REQUESTS]
    pairs: list[dict[bool, Batch]] = []
    for repetition in range(repetitions + 1):
        order = (False, True) if repetition % 2 else (True, False)
        pairs.append({probes: made.engine.run(samples, arms.shadowed(policy, probes=probes)) for probes in order})
    if not all(pair[True].probes for pair in pairs):
        raise BenchError("no probe ran under the policy in shadow")
    per_probe_s = [(pair[True].decode_s - pair[False].decode_s) / pair[True].probes for pair in pairs[1:]]
    enforced = [made.engine.run(samples, policy) for _ in range(ENFORCED_REPETITIONS)]
    decode_s, probes = (statistics.median(getattr(b, name) for b in enforced) for name in ("decode_s", "probes"))
    found = harness.interval([probes * one_s / decode_s for one_s in per_probe_s])
    made.session.goal("probes' share of decode time, %", "< 2", found, 1, 100)
    made.about.append(
        f"a probe takes {statistics.median(per_probe_s) * 1e6:.0f} us of decode time, and in force {probes:.0f} probes "
        f"of {len(samples)} requests take {found.value:.1%}"
    )
    return found.value


def first_task(session: Session) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run all arms on the maze, and measure there what probes cost; return the last line's part and the policy."""
    given, runs, folder = session.options, session.runs, session.folder / MAZE.name
    with closing(Engine(MAZE, folder, given.step_ms)) as running:
        made = Measurement(session, running, folder)
        made.run_natural()
        calibrated = None if given.policy else made.calibrate()
        policy = calibrated.policy if calibrated else arms.load(given.policy)
        made.run(Arm(RECOMMENDED, policy, None, calibrated.rule if calibrated else str(given.policy)))
        equal = made.run_budgets()
        singles = arms.single_rules(calibrated.report, calibrated.natural_tokens) if calibrated else []
        for arm in (arms.hard_cap(equal), *singles, arms.published_ranks()):
            made.run(arm)
        share = probe_time_share(made, policy, given.repetitions) if given.repetitions else None
        made.write()
    saved = made.median(RECOMMENDED, "saved")
    session.goal("thinking saved, probes included, %", ">= 50", saved, 1, 100)
    session.goal("share of the oracle's saving, %", ">= 75", saved.over(made.median(ORACLE, "saved")), 1, 100)
    for base, wanted in ((NATURAL, ">= -1 point"), (EQUAL, ">= 5 points")):
        found = runs.difference(RECOMMENDED, base, "accuracy", MAZE.name)
        session.goal(f"accuracy against {base}, points", wanted, found, 1, 100)
    keys = {"natural": NATURAL, "fixed_budget": EQUAL, "recommended": RECOMMENDED, "oracle": ORACLE}
    last: dict[str, Any] = {key: made.short(arm) for key, arm in keys.items()}
    last["probe_token_share"] = made.median(RECOMMENDED, "probe_share").rounded()
    return last | {"probe_time_share": None if share is None else round(share, 4)}, policy


def second_task(session: Session, policy: dict[str, Any]) -> dict[str, Any]:
    """Run the second task, for which the policy was not made; return its part of the last line."""
    given = session.options
    task: Task = replace(CHAIN, model=given.second_model or CHAIN.model)
    folder = session.folder / task.name
    keys = {"natural": NATURAL, "recommended": RECOMMENDED, "recommended_with_answer_prefix": PREFIXED}
    with closing(Engine(task, folder, given.step_ms)) as running:
        made = Measurement(session, running, folder)
        made.run_natural()
        made.run(Arm(RECOMMENDED, policy, None, "the maze's policy, unchanged"))
        prefixed = arms.with_answer_prefix(policy, task.name, task.answer_prefix)
        made.run(Arm(PREFIXED, prefixed, None, "the maze's policy with this model's answer prefix"))
        if not given.policy:
            calibrated = made.calibrate()
            made.run(Arm(CALIBRATED, calibrated.policy, None, calibrated.rule))
            keys["calibrated"] = CALIBRATED
        made.run_budgets()
        made.write()
    change = session.runs.difference(RECOMMENDED, NATURAL, "accuracy", task.name)
    session.goal("accuracy on the second task, same policy, points", ">= -1 point", change, 1, 100)
    return {key: made.short(arm) for key, arm in (keys | {"fixed_budget": EQUAL, "oracle": ORACLE}).items()}


def third_task(session: Session, foreign: dict[str, Any]) -> dict[str, Any]:
    """Run the third task, whose trial answers are wrong until its thinking ends, so that no rule may be recommended;
    loop breaker and answer reserve must still work. foreign: a policy made for another task."""
    folder = session.folder / RUNNING.name
    with closing(Engine(RUNNING, folder, session.options.step_ms)) as running:
        made = Measurement(session, running, folder)
        made.run_natural()
        calibrated = made.calibrate()
        foreign = arms.with_answer_prefix(foreign, RUNNING.name, RUNNING.answer_prefix)
        made.run(Arm(FOREIGN, foreign, None, "a policy that was calibrated on another task"))
        made.run(Arm(LOOPS, {**NATURAL_POLICY, "loop": {"shadow": False}}, None, "loop.shadow = false, no other rule"))
        reserve = {"min_think_tokens": 0, "answer_reserve_tokens": RESERVED_TOKENS, "answer_reserve_for": "all"}
        short = f"max_tokens = {SHORT_TOKENS}"
        made.run(Arm(NO_RESERVE, NATURAL_POLICY, None, short, SHORT_TOKENS))
        note = f"{short}, scheduler.answer_reserve_tokens = {RESERVED_TOKENS}"
        made.run(Arm(RESERVE, {**NATURAL_POLICY, "scheduler": reserve}, None, note, SHORT_TOKENS))
        loops = broken(made.natural, made.batches[LOOPS])
        shares = [round(answered(made.batches[name].completions), 4) for name in (NO_RESERVE, RESERVE)]
        made.write(f"loops: {loops}", f"short requests answered without a reserve and with it: {shares}")
    keys = {"natural": NATURAL, "policy_of_the_first_task": FOREIGN, "loop_breaker": LOOPS}
    told: dict[str, Any] = {key: made.short(arm) for key, arm in keys.items()}
    told["recommended"] = calibrated.rule if calibrated.recommends else "nothing"
    told |= {"answered_without_reserve": shares[0], "answered_with_reserve": shares[1]}
    return {"third_task": told, "loops": {"ended": loops.ended, "of": loops.of, "false": loops.false}}


def measure(session: Session) -> dict[str, Any]:
    last, policy = first_task(session)
    if session.options.second:
        last["second_task"] = second_task(session, policy)
    if session.options.third:
        last |= third_task(session, policy)
    return last | {"seeds": session.options.seeds}


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--requests", type=int, default=400, help="per seed")
    add("--seeds", type=int, default=3)
    add("--calibration", type=int, default=800, help="requests per task for the calibration")
    add("--step-ms", type=float, default=20.0, help="least duration of a step in ms; 0 for no least duration")
    add("--repetitions", type=int, default=6, help="repetitions of the probe cost measurement; 0 leaves it out")
    add("--policy", type=Path, help="recommended policy (TOML) to use instead of calibrating")
    add("--no-second", dest="second", action="store_false", help="leave the second task out")
    add("--no-third", dest="third", action="store_false", help="leave the third task out")
    add("--second-model", type=Path, help="the second task's model, instead of the shipped one")


if __name__ == "__main__":
    harness.main("termination", "Ending thinking", __doc__, options, measure)
