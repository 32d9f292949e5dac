"""Measure the time that the agent and the control plane cost: `make bench-cost`, protocol in tests/bench/cost.md.

The module owns the order of the parts and the command line. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import cost_control, cost_report, cost_throughput, program
from tests.bench.cost_steps import SIZES, Steps
from tests.bench.program import BenchError
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tests.bench.cost_control import Comparison
    from tests.bench.cost_throughput import Throughput

RESULTS, UNSAVED = Path(__file__).parent / "results", ROOT / "build" / "bench-cost"
STEP_MS = 10.0
PAIRS, STARTS, MOST_MINUTES, ROUNDS, CONTROL_ROUNDS = 3, 3, 30.0, 20, 3


class Progress:
    """Prints what a part does, and stores its figures so far, so that an interruption loses none."""

    def __init__(self, name: str, stored: cost_report.Stored) -> None:
        self._name, self._stored, self._began_s = name, stored, time.monotonic()

    def say(self, text: str) -> None:
        took_s = int(time.monotonic() - self._began_s)
        print(f"[{self._name} {took_s // 60}:{took_s % 60:02}] {text}", flush=True)

    def keep(self, part: dict[str, Any]) -> None:
        self._stored.put(self._name, part | {"took_s": round(time.monotonic() - self._began_s)})


def throughput(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Run the part in a process of its own: vLLM loads its plugins once per process, so after stock's engine the
    governed one would run without the agent's plugin."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
        apart.submit(_throughput, options, folder, progress).result()


def _throughput(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    def said(where: str, so_far: Throughput) -> None:
        progress.keep(asdict(so_far))
        ratio = so_far.ratio["governed"]
        progress.say(f"{where}: {ratio.value:.4f} of stock so far ({ratio.low:.4f} to {ratio.high:.4f})")

    progress.say("starting both engines")
    plan = cost_throughput.Plan(options.starts, options.throughput_interval, options.most_minutes * 60, options.rounds)
    cost_throughput.measure(folder, plan, said)


def control(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    def keep(so_far: Comparison) -> None:
        progress.keep(asdict(so_far))
        found = (f"{arm} {a.token_events_per_core_s:,.0f}" for arm, a in so_far.arms.items())
        progress.say(f"token events per core-second so far: {', '.join(found)}")

    load = cost_control.Load(engines=options.engines, measure_s=options.control_s)
    cost_control.measure(folder, options.control_rounds, load, progress.say, keep)


def steps(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    folder.mkdir()
    progress.say("starting the engine")
    running, rows = Steps(folder, STEP_MS), []
    try:
        for long in (False, True):
            for size in options.sizes:
                rows.append(running.measure(size, options.pairs, progress.say, long=long))
                progress.say(f"{size} running, {'long' if long else 'short'}: {rows[-1].ratio:.3f} of stock")
                progress.keep({"rows": [asdict(row) | {"ratio": row.ratio} for row in rows]})
    finally:
        running.close()


# The part with the engine in this process comes last, because it changes this process's environment.
PARTS: dict[str, Callable[[argparse.Namespace, Path, Progress], None]] = {
    "throughput": throughput,
    "control": control,
    "steps": steps,
}


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tests.bench.cost", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--parts", type=_parts, default=",".join(PARTS), help="parts to run, separated by commas")
    add("--pairs", type=int, default=PAIRS, help="steps: pairs of windows per batch size in wall time")
    add("--sizes", type=int, nargs="+", default=list(SIZES), help="steps: running requests")
    add("--starts", type=int, default=STARTS, help="throughput: how often to start the engines at least")
    add("--rounds", type=int, default=ROUNDS, help="throughput: rounds of each start")
    add("--throughput-interval", type=float, help="throughput: go on until the interval reaches at most so far from "
        "the ratio, for example 0.005")  # fmt: skip
    add("--most-minutes", type=float, default=MOST_MINUTES, help="throughput: minutes after which to go on no longer")
    add("--control-rounds", type=int, default=CONTROL_ROUNDS, help="control: windows of each server")
    add("--control-s", type=float, default=cost_control.MEASURE_S, help="control: seconds of a window")
    add("--engines", type=int, default=cost_control.ENGINES, help="control: simulated engines")
    add("--save", action="store_true", help=f"keep the report in {RESULTS.relative_to(ROOT)}")
    return parser.parse_args(given)


def _parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    return [name for name in PARTS if name in chosen]


def run() -> None:
    """Run the parts one after another. Raises BenchError if one failed, after the others have run."""
    options, folder = arguments(), Path(tempfile.mkdtemp(prefix="meridian-cost-"))
    stored = cost_report.Stored(RESULTS if options.save else UNSAVED)
    before, failed = stored.parts(), []
    for number, name in enumerate(options.parts, 1):
        progress = Progress(name, stored)
        progress.say(f"part {number} of {len(options.parts)}")
        try:
            PARTS[name](options, folder / name, progress)
        except Exception:
            traceback.print_exc()
            failed.append(name)
    # Parts that an earlier run has stored are no figures of this run.
    found = {name: part for name, part in stored.parts().items() if part != before.get(name)}
    if not failed:
        shutil.rmtree(folder)
    print(cost_report.report(found))
    print(json.dumps(cost_report.summary(found)), flush=True)
    if failed:
        raise BenchError(f"{', '.join(failed)}; the logs are in {folder}{os.sep}")


if __name__ == "__main__":
    program.main(run)
