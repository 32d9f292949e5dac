"""Render the findings of the termination benchmark as Markdown, JSON, a picture and the last line. Owns the wording."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import third_task
from tests.bench.driver import IN_FLIGHT
from tests.bench.tasks import RUNNING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.axes import Axes

    from tests.bench.probe_cost import ProbeCost
    from tests.bench.results import Interval, Result

NATURAL, ORACLE, ORACLE_TOKEN = "natural", "oracle", "oracle, any token"
RECOMMENDED, CALIBRATED, EQUAL = "recommended", "calibrated", "fixed budget of equal compute"
PREFIXED = "recommended, answer prefix"
# Arms of the second task that the last line shows, by their key.
SECOND = {
    "natural": NATURAL,
    "recommended": RECOMMENDED,
    "recommended_with_answer_prefix": PREFIXED,
    "calibrated": CALIBRATED,
    "fixed_budget": EQUAL,
    "oracle": ORACLE,
}
COLOURS = ("#4c78a8", "#54a24b", "#b279a2", "#9d755d", "#f58518", "#72b7b2", "#eeca3b", "#ff9da6", "#79706e")
MARKS = "svPXD^<>ph"
# The picture's accuracy axis begins this far below the lowest of the most important arms.
BELOW = 0.08


@dataclass(frozen=True)
class TaskFindings:
    """All arms of one task, in the order of the table.

    budgets: names of the fixed budgets. curve: tokens and accuracy of every fixed budget, computed offline. rule: the
    rule that the calibration chose, empty without one.
    """

    task: str
    results: list[Result]
    budgets: list[str]
    curve: list[tuple[float, float]]
    rule: str
    calibration_requests: int
    recommended_over_fixed: Interval
    policies: dict[str, Any] = field(default_factory=dict)

    def of(self, name: str) -> Result:
        return next(r for r in self.results if r.name == name)

    def has(self, name: str) -> bool:
        return any(r.name == name for r in self.results)


@dataclass(frozen=True)
class Findings:
    """All findings of the benchmark. probe_cost is None if it was not measured."""

    first: TaskFindings
    second: TaskFindings | None
    third: third_task.ThirdFindings | None
    probe_cost: ProbeCost | None
    seeds: int
    requests: int
    step_ms: float
    vllm_version: str


# ---------------------------------------------------------------------------------------------------------------- aims


@dataclass(frozen=True)
class Aim:
    name: str
    wanted: str
    measured: str
    met: bool


def aims(found: Findings) -> list[Aim]:
    """Return the aims and whether they are met."""
    first = found.first
    recommended, change = first.of(RECOMMENDED), first.of(RECOMMENDED).accuracy_change
    over, of_oracle = first.recommended_over_fixed, recommended.saved.value / first.of(ORACLE).saved.value
    made = [
        Aim("thinking saved, probes included", ">= 50 %", percent(recommended.saved), recommended.saved.value >= 0.5),
        Aim("accuracy against natural stopping", ">= -1 point", points(change), change.value >= -0.01),
        Aim("accuracy over the fixed budget of equal compute", ">= 5 points", points(over), over.value >= 0.05),
        Aim("share of the oracle's saving", ">= 75 %", f"{of_oracle:.1%}", of_oracle >= 0.75),
    ]
    if found.probe_cost is not None:
        share = found.probe_cost.time_share
        made.append(Aim("probes' share of decode time", "< 2 %", f"{share:.1%}", share < 0.02))
    if found.second is not None:
        second = found.second.of(RECOMMENDED).accuracy_change
        made.append(
            Aim("accuracy on the second task, same policy", ">= -1 point", points(second), second.value >= -0.01)
        )
    return made


# ------------------------------------------------------------------------------------------------------------ Markdown


def markdown(found: Findings) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Findings) -> Iterator[str]:
    yield "# Ending thinking: its savings and its cost"
    yield ""
    yield from _protocol(found)
    yield ""
    yield "| figure | goal | measured | met |"
    yield "|---|---|---|---|"
    for aim in aims(found):
        yield f"| {aim.name} | {aim.wanted} | {aim.measured} | {'yes' if aim.met else 'no'} |"
    for findings in filter(None, (found.first, found.second)):
        yield ""
        yield from _task(findings)
    if found.third is not None:
        yield ""
        yield f"## {RUNNING.name}"
        yield ""
        yield from _table(found.third.results)
        yield ""
        yield from third_task.lines(found.third)
    if found.probe_cost is not None:
        yield ""
        yield from _probe_cost(found.probe_cost)
    yield ""
    yield "![frontier](termination.png)"


def _protocol(found: Findings) -> Iterator[str]:
    tasks = " and ".join(f"`{t.task}`" for t in (found.first, found.second) if t is not None)
    yield (
        f"The run has {found.seeds} seeds (new prompts, new sampling seeds) of {found.requests} requests each on "
        f"{tasks}; "
        "every arm has the same prompts with the same sampling seeds, at temperature 1. Each task has one vLLM engine "
        f"(float32, eager, {_machine()}, vLLM {found.vllm_version}), whose core is a separate process, under a real "
        f"`meridian-control`, with {IN_FLIGHT} requests in flight and steps stretched to {found.step_ms:g} ms. Tokens "
        "are means per request. Brackets are 95 % bootstrap intervals over pairs (prompt, sampling seed). The "
        "benchmark "
        "asserts nothing."
    )


def _machine() -> str:
    model = next(
        (line.partition(":")[2].strip() for line in _cpuinfo().splitlines() if line.startswith("model name")),
        platform.machine(),
    )
    return f"{len(os.sched_getaffinity(0))} cores, {model}"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def _task(found: TaskFindings) -> Iterator[str]:
    yield f"## {found.task}"
    yield ""
    if found.rule:
        yield f"Calibration on {found.calibration_requests} other requests chose this rule: {found.rule}."
        yield ""
    yield from _table(found.results)
    yield ""
    over = points(found.recommended_over_fixed)
    yield f"The recommended rule's accuracy exceeds the fixed budget's by {over} points."
    if (late := found.of(RECOMMENDED).late_tokens) is not None:
        yield f"The recommended rule ended thinking {late:.1f} tokens after the newest end of a paragraph, on average."


def _table(arms: Sequence[Result]) -> Iterator[str]:
    columns = ("arm", "thinking", "probes", "saved", "accuracy", "expected", "against natural, points", "stopped")
    yield f"| {' | '.join((*columns, 'wall, s', 'decode, s', 'rule of the arm'))} |"
    yield "|---" * (len(columns) + 3) + "|"
    for r in arms:
        stopped = ", ".join(f"{n} {name}" for name, n in r.ends.items())
        if r.unended:
            stopped += f", {r.unended} without end"
        yield (
            f"| {r.name} | {r.think_tokens:.1f} | {r.probe_tokens:.1f} | {percent(r.saved)} | {r.accuracy:.1%} "
            f"| {r.expected:.1%} "
            f"| {points(r.accuracy_change)} | {stopped} | {r.wall_s:.0f} | {r.decode_s:.1f} | {r.note} |"
        )


def _probe_cost(cost: ProbeCost) -> Iterator[str]:
    yield "## The time that probes take"
    yield ""
    low, high = min(cost.throughput_ratios), max(cost.throughput_ratios)
    yield (
        f"With {cost.requests} requests and {cost.repetitions} alternating repetitions, in decode time without the "
        "pace, "
        f"the engine generates {cost.tokens_per_s_with:.0f} tokens/s with {cost.probes_with:.0f} probes and "
        f"{cost.tokens_per_s_without:.0f} tokens/s without probes, a ratio of {cost.throughput_ratio:.3f} ({low:.3f} "
        "to "
        f"{high:.3f}). A probe takes {cost.us_per_probe:.0f} µs, and a generated token {cost.us_per_token:.0f} µs. In "
        f"force, the recommended policy asks for {cost.enforced_probes:.0f} probes in {cost.enforced_s:.1f} s of "
        f"decoding, which is {cost.time_share:.1%} of the time."
    )


def percent(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} % [{100 * interval.low:.1f}, {100 * interval.high:.1f}]"


def points(interval: Interval) -> str:
    """Format a difference of accuracies in percentage points."""
    return f"{100 * interval.value + 0.0:+.1f} [{100 * interval.low + 0.0:+.1f}, {100 * interval.high + 0.0:+.1f}]"


# ---------------------------------------------------------------------------------------------------------------- JSON


def as_json(found: Findings) -> dict[str, Any]:
    """Return all figures as plain values."""
    return {
        "seeds": found.seeds,
        "requests_per_seed": found.requests,
        "step_ms": found.step_ms,
        "vllm": found.vllm_version,
        "machine": _machine(),
        "aims": [asdict(aim) for aim in aims(found)],
        "tasks": [_task_json(t) for t in (found.first, found.second) if t is not None],
        "third_task": third_task.plain(found.third) if found.third is not None else None,
        "probe_cost": asdict(found.probe_cost) if found.probe_cost is not None else None,
        "summary": summary(found),
    }


def _task_json(found: TaskFindings) -> dict[str, Any]:
    return {
        "task": found.task,
        "rule": found.rule,
        "calibration_requests": found.calibration_requests,
        "recommended_over_fixed": asdict(found.recommended_over_fixed),
        "arms": [r.plain() for r in found.results],
        "policies": found.policies,
    }


def summary(found: Findings) -> dict[str, Any]:
    """Return the last line; its thinking tokens include probes."""
    first, cost = found.first, found.probe_cost
    line: dict[str, Any] = {
        "natural": first.of(NATURAL).short(),
        "fixed_budget": first.of(EQUAL).short(),
        "recommended": first.of(RECOMMENDED).short(),
        "oracle": first.of(ORACLE).short(),
    }
    if found.second is not None:
        second = found.second
        line["second_task"] = {key: second.of(name).short() for key, name in SECOND.items() if second.has(name)}
    if found.third is not None:
        line["third_task"] = third_task.summary(found.third)
        line["loops"] = third_task.loops(found.third)
    line["probe_token_share"] = round(first.of(RECOMMENDED).probe_share, 4)
    line["probe_time_share"] = round(cost.time_share, 4) if cost is not None else None
    return line | {"seeds": found.seeds}


def write(found: Findings, folder: Path) -> list[Path]:
    """Write the report's three files and return their paths."""
    paths = [folder / f"termination.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_text(json.dumps(as_json(found), indent=1) + "\n")
    paths[1].write_text(markdown(found))
    draw(found, paths[2])
    return paths


# ------------------------------------------------------------------------------------------------------------- picture


def draw(found: Findings, path: Path) -> None:
    """Draw the frontier of each task: tokens, probes included, against accuracy."""
    from matplotlib.figure import Figure

    tasks = [t for t in (found.first, found.second) if t is not None]
    figure = Figure(figsize=(7.5 * len(tasks), 6.5), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        _draw_task(axes, task)
    figure.savefig(path, dpi=110)


def _draw_task(axes: Axes, found: TaskFindings) -> None:
    budgets = [found.of(name) for name in found.budgets]
    low = max(0.0, min(found.of(name).accuracy for name in (NATURAL, RECOMMENDED, EQUAL)) - BELOW)
    axes.plot(*zip(*found.curve, strict=True), "--", color="grey", lw=1, label="fixed budgets, offline", zorder=1)
    _points(axes, budgets, "o", "grey", "fixed budgets, run")
    _points(axes, [found.of(NATURAL)], "o", "black", NATURAL)
    _points(axes, [found.of(ORACLE)], "d", "#d9a400", "oracle, at a sentence end")
    _points(axes, [found.of(RECOMMENDED)], "*", "#b0163a", RECOMMENDED, size=15)
    named = {NATURAL, RECOMMENDED, ORACLE, ORACLE_TOKEN, *found.budgets}
    others = [r for r in found.results if r.name not in named]
    for index, r in enumerate(others):
        label = r.name if r.accuracy > low else f"{r.name} (below: {r.accuracy:.0%})"
        _points(axes, [r], MARKS[index % len(MARKS)], COLOURS[index % len(COLOURS)], label, size=7)
    axes.set(
        title=f"{found.task}: accuracy against thinking",
        xlabel="thinking tokens per request, probes included",
        ylabel="accuracy",
        ylim=(low, 1 + 0.08 * (1 - low)),
        xlim=(0, 1.08 * max(r.compute_tokens for r in found.results)),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", loc="lower right")


def _points(axes: Axes, results: Sequence[Result], mark: str, colour: str, label: str, *, size: float = 6) -> None:
    """Draw arms with the interval of their paired difference to natural stopping, placed around their own accuracy."""
    below = [r.accuracy_change.value - r.accuracy_change.low for r in results]
    above = [r.accuracy_change.high - r.accuracy_change.value for r in results]
    axes.errorbar(
        [r.compute_tokens for r in results],
        [r.accuracy for r in results],
        [below, above],
        fmt=mark,
        color=colour,
        ms=size,
        lw=1,
        capsize=2,
        label=label,
        zorder=3,
    )
