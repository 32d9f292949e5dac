"""Judge recorded thinking of real models by the rules that decide live: `make bench-replay`.

The protocol is in tests/bench/replay.md. The module owns the figures and their order. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from meridian_control.offline.calibration import Goal, calibrate
from meridian_control.offline.correctness import RIGHT
from meridian_control.offline.halves import TooFewRequests, halved
from meridian_control.offline.rule_replay import CAP, GIVE_UP, StoppingRule, Stops
from meridian_control.offline.statistics import Interval, percentiles, resampled
from meridian_control.offline.trace_file import FileError
from tests.bench import program, replay_data, replay_report
from tests.bench.program import BenchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from meridian_control.offline.calibration import Calibration, Figures, Point
    from meridian_control.offline.rule_replay import Replay
    from tests.bench.replay_data import Recording

RESULTS = Path(__file__).parent / "results"
RESAMPLES, CONFIDENCE = 2000, 0.95
# The yardstick without a rule of ours: so many samples of one problem agree at so many places in a row.
SIBLINGS, TIMES = 4, 2
# Number of fixed caps that are tried on a recording whose trial answers have no regular places.
CAPS = 60
# Names of rows.
FIRST_RIGHT, NEVER_RIGHT = "first right", "first right, never right"
CAP_IN_SAMPLE, CAP_HELD_OUT = "fixed cap, in sample", "fixed cap, held out"


@dataclass(frozen=True)
class Options:
    """The command line. data: folder of the public set's files. pairs: our own traces, each with its labels."""

    data: Path | None
    pairs: list[tuple[Path, Path]]
    max_loss: float
    splits: int
    save: bool


@dataclass(frozen=True)
class Row:
    """The effect of one way to end thinking, over all requests or over those that did not choose it.

    saved: share of the thinking, less the probes' tokens. accuracy_change: a difference of shares. recommended: number
    of splits on which calibration put the rule into force; None for what is no rule.
    """

    name: str
    saved: float
    accuracy_change: float
    accuracy_interval: Interval | None
    recommended: int | None = None
    note: str = ""


@dataclass(frozen=True)
class Chosen:
    """What calibration chooses on one split: a rule with its figures on the half that did not choose it, and whether it
    recommends the rule; "" for none."""

    rule: str
    held_out: Figures | None
    recommended: bool


@dataclass(frozen=True)
class Findings:
    """All figures of one recording. chosen: what calibration recommends on each split."""

    name: str
    requests: int
    groups: int
    accuracy: float
    think_tokens: float
    headroom: list[Row]
    rows: list[Row]
    chosen: list[Chosen] = field(default_factory=list)
    seconds: float = 0.0


class Evaluation:
    """Computes the figures of one recording; stops that the judge cannot judge are left out with their requests."""

    def __init__(self, recording: Recording, options: Options) -> None:
        self.recording, self.options = recording, options
        judge, ids = recording.replay.judge, recording.replay.episodes.ids
        self.judged = ~np.isnan(judge.natural)
        names = np.array(judge.groups or ids)[self.judged]
        self._unit = np.unique(names, return_inverse=True)[1]
        self._weights = resampled(int(self._unit.max()) + 1, RESAMPLES)
        self.tokens = recording.replay.episodes.natural_tokens[self.judged].astype(float)
        self.natural = judge.natural[self.judged]

    # -------------------------------------------------------------------------------------------------------- figures

    def row(
        self, name: str, at: NDArray[np.float64], right: NDArray[np.float64], cost: float = 0.0, **more: Any
    ) -> Row:
        """Return the figures of ends at these numbers of tokens, infinite for natural ends. at, right: [judged]."""
        spent, change = np.minimum(at, self.tokens).sum() + cost, right - self.natural
        sums, sizes = np.bincount(self._unit, change), np.bincount(self._unit).astype(float)
        interval = percentiles((self._weights @ sums) / (self._weights @ sizes), CONFIDENCE)
        return Row(name, float(1 - spent / self.tokens.sum()), float(change.mean()), interval, **more)

    def stops(self, replay: Replay, rule: StoppingRule, name: str, **more: Any) -> Row:
        stops = replay.stops(rule)
        cost = float((stops.probes[self.judged] * replay.cost_tokens).sum())
        return self.row(name, stops.at_tokens[self.judged], stops.right[self.judged], cost, **more)

    def headroom(self) -> Iterator[Row]:
        """Yield what ends at the right places would save: at the first right trial answer, and also, where none is
        right, at the first of all."""
        judge = self.recording.replay.judge
        count = len(judge.natural)
        known = judge.think_tokens < self.recording.replay.episodes.natural_tokens[judge.owner]
        owner, places, right = judge.owner[known], judge.think_tokens[known], judge.right[known] >= RIGHT
        first, first_right = np.full(count, np.inf), np.full(count, np.inf)
        np.minimum.at(first, owner, places)
        np.minimum.at(first_right, owner[right], places[right])
        after = np.where(np.isfinite(first_right), 1.0, judge.natural)[self.judged]
        yield self.row(FIRST_RIGHT, first_right[self.judged], after)
        never = ~np.isfinite(first_right) & (judge.natural < RIGHT)
        both = np.where(never, first, first_right)[self.judged]
        yield self.row(NEVER_RIGHT, both, after)

    def caps(self) -> Iterator[Row]:
        """Yield the best fixed cap within the allowed loss, in sample, and chosen on one half of the groups."""
        replay, siblings = self.recording.replay, self.recording.siblings
        step = siblings.interval if siblings is not None else max(1, int(self.tokens.max()) // CAPS)
        caps = np.arange(step, int(self.tokens.max()) + step, step)
        rules = [StoppingRule(CAP, {}, {"max_think_tokens": int(cap)}) for cap in caps]
        tried = [replay.stops(rule) for rule in rules]
        best = self._best_cap(tried, self.judged)
        yield self.stops(replay, rules[best], CAP_IN_SAMPLE, recommended=0, note=str(rules[best]))
        found = []
        for split in range(self.options.splits):
            fit, held_out, _ = halved(replay.episodes.ids, replay.judge, split)
            chosen = tried[self._best_cap(tried, fit)]
            found.append(self._effect(chosen, held_out))
        saved, change = np.mean(found, axis=0).tolist()
        worst = min(change for _, change in found)
        note = f"mean of {len(found)} splits; the worst split changes accuracy by {100 * worst:+.1f}"
        yield Row(CAP_HELD_OUT, saved, change, None, 0, note)

    def _best_cap(self, tried: list[Stops], where: NDArray[Any]) -> int:
        effects = [self._effect(stops, where) for stops in tried]
        within = [n for n, (_, change) in enumerate(effects) if change >= -self.options.max_loss]
        return max(within, key=lambda n: effects[n][0], default=len(tried) - 1)

    def _effect(self, stops: Stops, where: NDArray[Any]) -> tuple[float, float]:
        replay = self.recording.replay
        natural = replay.episodes.natural_tokens[where]
        saved = 1 - np.minimum(stops.at_tokens[where], natural).sum() / natural.sum()
        return float(saved), float((stops.right[where] - replay.judge.natural[where]).mean())

    # ------------------------------------------------------------------------------------------------------------ rules

    def families(self, found: Calibration, in_force: list[str]) -> Iterator[Row]:
        """Yield the best rule of each family on the half that did not choose it."""
        for family, points in found.fronts.items():
            if family != CAP and not points[0].rule.either:
                best = _best(points, self.options.max_loss)
                figures, times = best.held_out, in_force.count(str(best.rule))
                interval = figures.accuracy_interval
                yield Row(family, figures.saved, figures.accuracy_change, interval, times, str(best.rule))

    def second_threshold(self, found: Sequence[Calibration]) -> Iterator[Row]:
        """Yield the give-up rule of the first split together with the rule that it acts with, on the half that chose
        neither."""
        if (second := found[0].second) is not None:
            figures, times = second.together.held_out, sum(c.second is not None and c.second.in_force for c in found)
            interval = figures.accuracy_interval
            yield Row(GIVE_UP, figures.saved, figures.accuracy_change, interval, times, str(second.together.rule))

    def consensus(self) -> Iterator[Row]:
        if (siblings := self.recording.siblings) is not None:
            at, right = replay_data.consensus(siblings, SIBLINGS, TIMES)
            asked = np.minimum(at, siblings.tokens) // siblings.interval
            cost = float(asked.sum() * replay_data.WHOLE_TOKENS)
            note = f"a yardstick, no rule of ours: all agree {TIMES} times in a row"
            yield self.row(f"{SIBLINGS} siblings", at, right, cost, note=note)


def _best(points: Sequence[Point], max_loss: float) -> Point:
    """Return the point that saves most within half the allowed loss, or else the point that loses least."""
    within = [p for p in points if p.fit.accuracy_change >= -max_loss / 2]
    if within:
        return max(within, key=lambda p: p.fit.saved)
    return max(points, key=lambda p: p.fit.accuracy_change)


def evaluate(recording: Recording, options: Options) -> Findings:
    """Compute all figures of a recording. Raises BenchError if it has too few requests or groups."""
    began, goal = time.monotonic(), Goal(options.max_loss)
    try:
        found = [calibrate(recording.replay, goal, number) for number in range(options.splits)]
    except TooFewRequests as error:
        raise BenchError(f"{recording.name}: {error}") from error
    chosen = [_chosen(calibration) for calibration in found]
    in_force = [choice.rule for choice in chosen if choice.recommended]
    made = Evaluation(recording, options)
    rows = [
        *made.caps(),
        *made.families(found[0], in_force),
        *made.second_threshold(found),
        *made.consensus(),
    ]
    return Findings(
        recording.name,
        len(made.tokens),
        found[0].groups,
        float(made.natural.mean()),
        float(made.tokens.mean()),
        list(made.headroom()),
        rows,
        chosen,
        time.monotonic() - began,
    )


def _chosen(found: Calibration) -> Chosen:
    if found.best is None:
        return Chosen("", None, recommended=False)
    return Chosen(str(found.best.rule), found.best.held_out, found.confirmed)


def recordings(options: Options) -> Iterator[Recording]:
    """Yield the recordings one after the other. Raises BenchError."""
    if options.data is not None:
        files = sorted(options.data.glob("*.json"))
        if not files:
            raise BenchError(f"{options.data}: has no .json files. {replay_data.HOW_TO_GET}")
        yield from map(replay_data.public, files)
    for trace, labels in options.pairs:
        try:
            yield replay_data.own(trace, labels)
        except FileError as error:
            raise BenchError(str(error)) from error


def run(options: Options) -> None:
    """Judge all recordings. Raises BenchError."""
    if options.data is None:
        print(replay_data.HOW_TO_GET)
    found = []
    for recording in recordings(options):
        found.append(evaluate(recording, options))
        print(f"{recording.name}: {found[-1].requests} requests in {found[-1].seconds:.0f} s", flush=True)
    text = replay_report.markdown(found, options.max_loss, options.splits)
    if found:
        print(f"\n{text}")
    if found and options.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "replay.md").write_text(text)
    print(json.dumps(replay_report.summary(found)))


def parse(arguments: Sequence[str] | None = None) -> Options:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, help=f"folder with files of the public set {replay_data.PUBLIC}")
    add("--trace", type=Path, action="append", default=[], help="a trace of ours; give --labels once for each trace")
    add("--labels", type=Path, action="append", default=[], help="the labels of a trace, in the order of the traces")
    add("--max-loss", type=float, default=0.01, help="largest allowed loss of accuracy, as a fraction")
    add("--splits", type=int, default=10, help="number of splits into halves")
    add("--save", action="store_true", help="write the results to tests/bench/results/replay.md")
    given = parser.parse_args(arguments)
    if len(given.trace) != len(given.labels):
        parser.error(f"--trace and --labels go together; got {len(given.trace)} traces and {len(given.labels)} labels")
    if given.splits < 1:
        parser.error(f"--splits must be at least 1; got {given.splits}")
    pairs = list(zip(given.trace, given.labels, strict=True))
    return Options(given.data, pairs, given.max_loss, given.splits, given.save)


if __name__ == "__main__":
    program.main(lambda: run(parse()))
