"""Compute the figures of one run from its timelines, and the figures of one arm from its runs. Pure."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.bench.scheduling_load import Process
    from tests.bench.streamed import Timeline


@dataclass(frozen=True)
class Case:
    """One situation of the engine. load: the arrival rate as a fraction of capacity."""

    process: Process
    load: float
    pressure: bool

    def __str__(self) -> str:
        return f"{self.process} {self.load:g}, {'with' if self.pressure else 'without'} pressure"


@dataclass(frozen=True)
class Run:
    """One run: an arm in a case with one seed. figures: by name, with the unit in the name."""

    arm: str
    case: Case
    seed: int
    figures: dict[str, float]


@dataclass(frozen=True)
class Spread:
    """The median of the repetitions' figures, and the lowest and the highest."""

    median: float
    low: float
    high: float


def qoe(answer_s: Sequence[float], thinking_ended_s: float, pace_s: float) -> float:
    """Return the quality of experience (Andes, arXiv 2404.16283) of one answer: area read divided by area expected.

    The reader expects one token per pace_s from the end of thinking on. The reader reads a token when it has arrived,
    when the tokens before it have been read at pace_s each, and no sooner than expected. Both areas reach to the time
    at which the last token has been read.
    """
    expected = thinking_ended_s + pace_s * np.arange(1, len(answer_s) + 1)
    read, at = np.empty(len(answer_s)), -np.inf
    for i, (arrived, due) in enumerate(zip(answer_s, expected.tolist(), strict=True)):
        at = read[i] = max(arrived, due, at + pace_s)
    until = at + pace_s
    return float((until - read).sum() / (until - expected).sum())


def _percentiles(name: str, seconds: Iterable[float], levels: Sequence[int]) -> dict[str, float]:
    values_ms = np.fromiter(seconds, float) * 1e3
    found = np.percentile(values_ms, levels)
    return {f"{name}_p{level}_ms": float(v) for level, v in zip(levels, found, strict=True)}


def figures(
    counted: Sequence[Timeline], everything: Sequence[Timeline], began_s: float, pace_s: float
) -> dict[str, float]:
    """Return the figures of one run. Latencies are those of the counted requests; throughput is that of all requests.

    pace_s: the reader's pace. ttft: due time to first token of any kind. ttot: end marker to first answer token. ttfvt:
    due time to first answer token. itl: gaps between answer tokens, over all of them.
    """
    gaps = np.concatenate([np.diff(t.answer_s) for t in counted])
    finished_s = max(t.times_s[-1] for t in everything)
    tokens = sum(len(t.tokens) for t in everything)
    return {
        **_percentiles("ttft", (t.times_s[0] - t.due_s for t in counted), (50, 95, 99)),
        **_percentiles("ttot", (t.answer_s[0] - t.end_s for t in counted), (50, 95, 99)),
        **_percentiles("ttfvt", (t.answer_s[0] - t.due_s for t in counted), (50, 95, 99)),
        **_percentiles("itl", gaps, (50, 95, 99)),
        "qoe": statistics.fmean(qoe(t.answer_s, t.end_s, pace_s) for t in counted),
        "throughput_tokens_per_s": tokens / (finished_s - began_s),
        "wall_s": finished_s - began_s,
    }


def spread(runs: Sequence[Run], name: str) -> Spread:
    """Return the spread of one figure over the repetitions; runs without the figure are left out."""
    values = [run.figures[name] for run in runs if name in run.figures]
    if not values:
        return Spread(float("nan"), float("nan"), float("nan"))
    return Spread(statistics.median(values), min(values), max(values))


def of(runs: Iterable[Run], arm: str, case: Case) -> list[Run]:
    return [run for run in runs if run.arm == arm and run.case == case]


def ratio(runs: Sequence[Run], arm: str, base: str, case: Case, name: str) -> Spread:
    """Return the spread of an arm's figure divided by another arm's in the run with the same seed."""
    below = {run.seed: run.figures[name] for run in of(runs, base, case)}
    values = [run.figures[name] / below[run.seed] for run in of(runs, arm, case) if below.get(run.seed)]
    if not values:
        return Spread(float("nan"), float("nan"), float("nan"))
    return Spread(statistics.median(values), min(values), max(values))
