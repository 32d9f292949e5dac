"""Render the findings of the scheduling benchmark as Markdown, JSON, a picture and the last line. Owns the wording."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from tests.bench import random_model, scheduling_load
from tests.bench.machine import machine
from tests.bench.scheduling_arms import DEFAULT, PLAIN, STOCK_FCFS, STOCK_PRIORITY
from tests.bench.scheduling_metrics import Case, Spread, of, ratio, spread
from tests.bench.scheduling_runs import FEW, PRESENT
from tests.bench.streamed import PLACES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from matplotlib.axes import Axes

    from tests.bench.scheduling_metrics import Run
    from tests.bench.scheduling_runs import Capacity, Costs, Plan

JUDGED = Case("poisson", 1.0, True)
RATIOS = {
    "itl_p99": "itl_p99_ms",
    "ttot_p99": "ttot_p99_ms",
    "ttfvt_p99": "ttfvt_p99_ms",
    "throughput": "throughput_tokens_per_s",
}
# Each column has a heading, a figure, its digits, and whether extremes are shown.
COLUMNS = (
    ("ITL P50", "itl_p50_ms", 1, False),
    ("P95", "itl_p95_ms", 1, False),
    ("P99", "itl_p99_ms", 1, True),
    ("TTOT P50", "ttot_p50_ms", 1, False),
    ("P99", "ttot_p99_ms", 1, True),
    ("TTFT P50", "ttft_p50_ms", 0, False),
    ("P99", "ttft_p99_ms", 0, False),
    ("TTFVT P50", "ttfvt_p50_ms", 0, False),
    ("P99", "ttfvt_p99_ms", 0, True),
    ("QoE", "qoe", 3, False),
    ("tokens/s", "throughput_tokens_per_s", 0, True),
    ("preempted thinking", "think_preempted", 0, False),
    ("preempted answers", "answers_preempted", 0, False),
    ("preempted in all", "preempted", 0, False),
    ("KV peak", "kv_peak", 2, False),
    ("mean of waiting requests", "waiting_mean", 1, False),
)
COLOURS = {
    STOCK_FCFS: "black",
    STOCK_PRIORITY: "#79706e",
    PLAIN: "#bab0ac",
    "reasoning_first": "#4c78a8",
    "output_first": "#b0163a",
    "deadline": "#54a24b",
}


@dataclass(frozen=True)
class Findings:
    """All findings of the benchmark."""

    runs: list[Run]
    policies: dict[str, Any]
    costs: Costs
    capacities: dict[str, Capacity]
    plan: Plan
    repetitions: int
    blocks: dict[str, int]
    token_budget: int

    def arms(self, case: Case) -> list[str]:
        return list(dict.fromkeys(run.arm for run in self.runs if run.case == case))

    def cases(self) -> list[Case]:
        return list(dict.fromkeys(run.case for run in self.runs))

    def figure(self, arm: str, case: Case, name: str) -> Spread:
        return spread(of(self.runs, arm, case), name)

    def ratio(self, name: str, case: Case = JUDGED, base: str = STOCK_FCFS, arm: str = DEFAULT) -> Spread:
        return ratio(self.runs, arm, base, case, name)

    def answers_preempted(self, arm: str = DEFAULT, case: Case = JUDGED) -> int:
        """Return the number of preempted answers over all repetitions."""
        return int(sum(run.figures.get("answers_preempted", 0) for run in of(self.runs, arm, case)))


def brief(run: Run) -> str:
    f = run.figures
    preempted = f"{f.get('think_preempted', f['preempted']):.0f} + {f.get('answers_preempted', 0):.0f}"
    return (
        f"ITL P99 {f['itl_p99_ms']:.1f} ms, TTOT P99 {f['ttot_p99_ms']:.1f} ms, TTFVT P99 {f['ttfvt_p99_ms']:.0f} ms, "
        f"{f['throughput_tokens_per_s']:.0f} tokens/s, preempted {preempted}, KV peak {f['kv_peak']:.2f}, "
        f"{f['wall_s']:.0f} s, others {f['others_cores']:.1f} cores"
    )


# ---------------------------------------------------------------------------------------------------------------- aims


@dataclass(frozen=True)
class Aim:
    name: str
    wanted: str
    measured: str
    met: bool


def aims(found: Findings) -> list[Aim]:
    """Return the aims of the default strategy against stock FCFS, at capacity and with pressure on the KV cache."""
    limits = {"itl_p99": ("<= 0.5", 0.5), "ttot_p99": ("<= 0.5", 0.5), "ttfvt_p99": ("<= 1.05", 1.05)}
    made = []
    for name, (wanted, limit) in limits.items():
        value = found.ratio(RATIOS[name])
        made.append(Aim(f"{name} against stock", wanted, shown(value, 2), value.median <= limit))
    throughput = found.ratio(RATIOS["throughput"])
    made.append(Aim("throughput against stock", ">= 0.97", shown(throughput, 3), throughput.median >= 0.97))
    preempted = found.answers_preempted()
    made.append(Aim("answering requests preempted", "0", str(preempted), preempted == 0))
    return made


def shown(value: Spread, digits: int, *, extremes: bool = True) -> str:
    if math.isnan(value.median):
        return ""
    text = f"{value.median:.{digits}f}"
    return f"{text} ({value.low:.{digits}f} to {value.high:.{digits}f})" if extremes else text


# ------------------------------------------------------------------------------------------------------------ Markdown


def markdown(found: Findings) -> str:
    return "\n".join(_lines(found)) + "\n"


def _lines(found: Findings) -> Iterator[str]:
    yield "# Scheduling: the order of requests and its cost"
    yield ""
    yield from _protocol(found)
    yield ""
    yield f"The table compares the default strategy, `{DEFAULT}`, with stock FCFS under {JUDGED}."
    yield ""
    yield "| figure | goal | measured | met |"
    yield "|---|---|---|---|"
    for aim in aims(found):
        yield f"| {aim.name} | {aim.wanted} | {aim.measured} | {'yes' if aim.met else 'no'} |"
    for case in found.cases():
        yield ""
        yield f"## {case}"
        yield ""
        yield from _table(found, case)
    if found.arms(JUDGED) and PLAIN in found.arms(JUDGED):
        yield ""
        pairs = ", ".join(f"{k} {shown(found.ratio(v, arm=STOCK_FCFS, base=PLAIN), 2)}" for k, v in RATIOS.items())
        yield f"Figures of stock FCFS under the agent divided by the figures of vLLM without the agent: {pairs}."
    yield ""
    yield "![frontier](scheduling.png)"


def _protocol(found: Findings) -> Iterator[str]:
    import vllm

    costs, own, few = found.costs, found.capacities, FEW
    others = [run.figures["others_cores"] for run in found.runs]
    think, answer = scheduling_load.THINK, scheduling_load.ANSWER
    yield (
        f"vLLM {vllm.__version__} on {machine()}, float32, eager, one thread; a Qwen3 of "
        f"{random_model.parameters() / 1e6:.0f} M random weights; {PLACES} places, {found.token_budget} tokens per "
        "step at most. Engine core, worker, client and `meridian-control` are separate processes. Other programs used "
        f"{statistics.median(others):.2f} cores in the median run, and at most {max(others):.2f}."
    )
    yield ""
    yield (
        f"Requests: thinking log-normal, median {think[0]:.0f} (sigma {think[1]}, {think[2]} to {think[3]}), answers "
        f"median {answer[0]:.0f} (sigma {answer[1]}, {answer[2]} to {answer[3]}), prompts uniform "
        f"{scheduling_load.PROMPT[0]} to {scheduling_load.PROMPT[1]} tokens without shared prefixes. Phases have fixed "
        "lengths, the same in every arm. Arrivals are open-loop, Poisson or Gamma with a coefficient of variation of "
        f"{scheduling_load.GAMMA_CV:g}. Each run begins with {PRESENT} requests part of the way through, which are not "
        f"counted, and then has {found.plan.counted} requests that are counted. Figures are medians of "
        f"{found.repetitions} repetitions, with the lowest and the highest value in brackets. Times are in "
        "milliseconds."
    )
    yield ""
    yield (
        f"Measured first: a decode step takes {costs.few_ms:.1f} ms with {few} sequences and {costs.full_ms:.1f} ms "
        "with "
        f"{PLACES}, and a prompt token takes {costs.prompt_token_ms:.2f} ms. The capacity in a closed loop with "
        f"{PLACES} "
        f"requests in flight and {found.blocks['ample']} KV blocks is {own['ample'].requests_per_s:.2f} requests/s, or "
        f"{own['ample'].tokens_per_s:.0f} generated tokens/s, with at most {own['ample'].kv_peak_blocks} blocks in "
        "use. "
        f"Loads are fractions of this capacity. With pressure the engine has {found.blocks['pressure']} blocks, half "
        "of "
        f"that use; the same closed loop then gives {own['pressure'].requests_per_s:.2f} requests/s with "
        f"{own['pressure'].preempted} preemptions, so a load of 1 is "
        f"{own['ample'].requests_per_s / own['pressure'].requests_per_s:.2f} times the capacity under pressure."
    )
    yield ""
    paced = found.policies["reasoning_first"]["scheduler"]
    yield (
        "Policies are the defaults, whose budgets follow the engine, with entropy rules off. `reasoning_first` gives "
        f"answers a token every {paced['output_tpot_budget_ms']:g} ms, the reading pace, and demotes thinking past "
        f"{paced['long_think_tokens']} tokens. The arms named `{DEFAULT} at x` have an explicit budget for answers: "
        "the "
        "first of the step times above plus x times the difference to the second. Thinking has four times that budget, "
        "and prompts have at least half of it."
    )
    yield ""
    yield (
        "TTFT is the time from a request's due time to the first token, TTOT from the end marker to the first answer "
        "token, and TTFVT from the due time to the first answer token. ITL is the gap between answer tokens, over all "
        "gaps. QoE (Andes) is the area under the curve of read tokens divided by the area under the curve of expected "
        f"tokens, for a reader who expects a token every {found.plan.pace_s * 1e3:.1f} ms from the end of thinking on, "
        "as the mean over requests. Stock FCFS is the strategy `stock` under the agent. Stock priority is vLLM's "
        "`priority` policy with all priorities equal; a request's priority is set at submission, so this policy cannot "
        "schedule answers before thinking."
    )


def _table(found: Findings, case: Case) -> Iterator[str]:
    names = [c for c in COLUMNS if any(c[1] in run.figures for run in found.runs)]
    yield f"| arm | {' | '.join(name for name, *_ in names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for arm in found.arms(case):
        cells = [shown(found.figure(arm, case, name), digits, extremes=both) for _, name, digits, both in names]
        yield f"| {arm} | {' | '.join(cells)} |"


# ---------------------------------------------------------------------------------------------------------------- JSON


def plain(run: Run) -> dict[str, Any]:
    return {"arm": run.arm, **asdict(run.case), "seed": run.seed, **run.figures}


def as_json(found: Findings) -> dict[str, Any]:
    """Return all figures as plain values."""
    import vllm

    return {
        "vllm": vllm.__version__,
        "machine": machine(),
        "repetitions": found.repetitions,
        "costs": asdict(found.costs),
        "capacities": {name: asdict(capacity) for name, capacity in found.capacities.items()},
        "blocks": found.blocks,
        "plan": asdict(found.plan),
        "policies": found.policies,
        "aims": [asdict(aim) for aim in aims(found)],
        "runs": [plain(run) for run in found.runs],
        "summary": summary(found),
    }


def summary(found: Findings) -> dict[str, Any]:
    """Return the last line: the arms at capacity with pressure under Poisson arrivals, and the default divided by
    stock."""
    arms = {
        arm: {
            name: round(found.figure(arm, JUDGED, figure).median, 4)
            for name, figure in {**RATIOS, "itl_p50": "itl_p50_ms", "ttft_p50": "ttft_p50_ms", "qoe": "qoe"}.items()
        }
        | {"answers_preempted": found.answers_preempted(arm)}
        for arm in found.arms(JUDGED)
        if arm != PLAIN
    }
    ratios = {name: round(found.ratio(figure).median, 4) for name, figure in RATIOS.items()}
    return {"arms": arms, "ratios": ratios | {"answers_preempted": found.answers_preempted()}}


def write(found: Findings, folder: Path) -> list[Path]:
    """Write the report's three files and return their paths."""
    paths = [folder / f"scheduling.{suffix}" for suffix in ("json", "md", "png")]
    paths[0].write_text(json.dumps(as_json(found), indent=1) + "\n")
    paths[1].write_text(markdown(found))
    draw(found, paths[2])
    return paths


# ------------------------------------------------------------------------------------------------------------- picture


def draw(found: Findings, path: Path) -> None:
    """Draw output ITL P99 against throughput at capacity, by strategy; explicit budgets are one line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5.5), layout="constrained")
    for axes, case in zip(figure.subplots(1, 2), (JUDGED, Case("poisson", 1.0, False)), strict=True):
        _draw_case(axes, found, case)
    figure.savefig(path, dpi=110)


def _draw_case(axes: Axes, found: Findings, case: Case) -> None:
    budgets: list[tuple[float, str]] = []
    for arm in found.arms(case):
        at = arm.removeprefix(f"{DEFAULT} at ")
        if at != arm:
            budgets.append((float(at), arm))
            axes.annotate(f" {at}", _point(found, arm, case), fontsize="small", color=COLOURS[DEFAULT])
        else:
            _mark(axes, found, arm, case)
    line = [_point(found, arm, case) for _, arm in sorted(budgets)]
    axes.plot(*zip(*line, strict=True), "-o", ms=4, lw=1, color=COLOURS[DEFAULT], zorder=1)
    axes.set(title=str(case), xlabel="generated tokens/s", ylabel="output ITL P99, ms", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _point(found: Findings, arm: str, case: Case) -> tuple[float, float]:
    return tuple(found.figure(arm, case, n).median for n in ("throughput_tokens_per_s", "itl_p99_ms"))  # type: ignore[return-value]


def _mark(axes: Axes, found: Findings, arm: str, case: Case) -> None:
    x, y = (found.figure(arm, case, n) for n in ("throughput_tokens_per_s", "itl_p99_ms"))
    axes.errorbar(
        [x.median],
        [y.median],
        [[y.median - y.low], [y.high - y.median]],
        [[x.median - x.low], [x.high - x.median]],
        fmt="*" if arm == DEFAULT else "o",
        ms=13 if arm == DEFAULT else 7,
        color=COLOURS[arm],
        lw=1,
        capsize=2,
        label=arm,
    )
