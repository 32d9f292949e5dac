"""Measure the time that the agent costs an engine: `make bench-cost`, protocol in tests/bench/README.md.

The module owns the order of events and the report. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import cost_throughput, program
from tests.bench.cost_steps import SIZES, Row, Steps
from tests.bench.machine import machine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.cost_throughput import Throughput

RESULTS = Path(__file__).parent / "results"
STEP_MS = 10.0
PAIRS, ROUNDS = 3, 10


def step_table(rows: Sequence[Row]) -> list[str]:
    """Return the table per batch size: the agent's time in the engine-core thread and in the worker, beside stock's."""
    lines = [
        "| running requests | stock schedule + update, us | agent, us | agent over stock | waited for, us "
        "| waited for over stock | processor time: agent in us, over stock | in the worker, us | share of the worker's "
        "step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        cells = (
            str(r.requests),
            f"{r.stock_us:.0f}",
            f"{r.agent_us:.1f}",
            f"{r.ratio:.3f}",
            f"{r.critical_us:.1f}",
            f"{r.critical_us / r.stock_us:.3f}",
            f"{r.agent_cpu_us:.1f}, {r.agent_cpu_us / r.stock_cpu_us:.3f}",
            f"{r.observe_us:.0f}",
            f"{r.observe_us / r.worker_us:.3f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def hook_table(rows: Sequence[Row]) -> list[str]:
    """Return the table of the agent's time by hook."""
    hooks = list(rows[0].hooks_us)
    head = ["requests", "thinking", *hooks, "step, ms", "round trip, ms"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in rows:
        numbers = [*(r.hooks_us[hook] for hook in hooks), r.step_ms, r.round_trip_ms]
        cells = [f"{r.requests}", "long" if r.long else "short", *(f"{number:.1f}" for number in numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def throughput_table(found: Throughput) -> list[str]:
    """Return the table of all arms: tokens per second, the ratio to stock, and processor time by process."""
    names = list(found.cpu_us["governed"])
    head = [
        "engine",
        "tokens per second",
        "throughput over stock, 95 % interval",
        *(f"{name}, us per token" for name in names),
    ]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for arm, rate in found.tokens_per_s.items():
        ratio = found.ratio.get(arm)
        over = f"{ratio.value:.4f} ({ratio.low:.4f} to {ratio.high:.4f})" if ratio else "1"
        lines.append(f"| {' | '.join([arm, f'{rate:.0f}', over, *(f'{found.cpu_us[arm][n]:.0f}' for n in names)])} |")
    return lines


def report(rows: Sequence[Row], found: Throughput) -> str:
    return "\n".join(
        [
            "# What the agent costs",
            "",
            f"Measured on {datetime.now(UTC):%Y-%m-%d} on {machine()} ([protocol](../cost.md)).",
            "",
            f"## Per step, steps of {STEP_MS:.0f} ms or more",
            "",
            "### Short requests that begin together",
            "",
            *step_table([r for r in rows if not r.long]),
            "",
            "### Long thinking, requests that begin one after another",
            "",
            *step_table([r for r in rows if r.long]),
            "",
            "The next table shows the time by hook in us per step. The hook `mask` runs while the workers compute.",
            "",
            *hook_table(rows),
            "",
            "## Throughput",
            "",
            f"The run had {found.rounds} rounds with steps of {found.step_ms:.1f} ms; other programs used "
            f"{found.others_cores:.2f} cores. `every step` is the governed engine with "
            "`telemetry.report_interval_steps = 1`; `stock again` is a second stock engine.",
            "",
            *throughput_table(found),
            "",
        ]
    )


def summary(rows: Sequence[Row], found: Throughput) -> dict[str, Any]:
    """Return the last line: the agent's time over stock's by running requests, and the throughput over stock."""
    ratio = found.ratio["governed"]
    return {
        "agent_of_stock": {str(r.requests): round(r.ratio, 3) for r in rows if r.long},
        "agent_of_stock_short": {str(r.requests): round(r.ratio, 3) for r in rows if not r.long},
        "throughput": round(ratio.value, 4),
        "throughput_interval": [round(ratio.low, 4), round(ratio.high, 4)],
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tests.bench.cost", description=__doc__)
    parser.add_argument("--pairs", type=int, default=PAIRS, help="pairs of windows per batch size")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="windows of each arm in the throughput measurement")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="running requests")
    parser.add_argument("--save", action="store_true", help=f"keep the report in {RESULTS}")
    return parser.parse_args()


def run() -> None:
    """Run the whole benchmark. Raises BenchError."""
    options, folder = arguments(), Path(tempfile.mkdtemp(prefix="meridian-cost-"))
    # The throughput runs in a process of its own: vLLM loads its plugins once per process, so after stock's engine the
    # governed one would run without the agent's plugin.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        found = apart.submit(cost_throughput.measure, folder / "throughput", options.rounds).result()
    (folder / "steps").mkdir()
    steps = Steps(folder / "steps", STEP_MS)
    try:
        kinds = [(size, long) for long in (False, True) for size in options.sizes]
        rows = [steps.measure(size, options.pairs, long=long) for size, long in kinds]
    finally:
        steps.close()
    text = report(rows, found)
    plain = {"rows": [asdict(r) | {"ratio": r.ratio} for r in rows], "throughput": asdict(found), "machine": machine()}
    if options.save:
        (RESULTS / "cost.md").write_text(text)
        (RESULTS / "cost.json").write_text(json.dumps(plain, indent=1) + "\n")
    print(text)
    print(json.dumps(summary(rows, found)))


if __name__ == "__main__":
    program.main(run)
