"""Measure what a fleet of thousands of engines costs the control plane: `make bench-fleet`.

The module owns the settings, each a number of engines under a number of replicas, and the command line. The protocol is
in tests/bench/fleet.md. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench import cost_control, fleet_report, program
from tests.bench.fleet_report import STEP_MS, Beside, Setting
from tests.bench.fleet_rig import Rig, Windows, measure
from tests.bench.fleet_tape import made
from tests.bench.machine import machine
from tests.bench.program import BenchError
from tests.postgres import Postgres
from tests.processes import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

RESULTS = Path(__file__).parent / "results"
REQUESTS, TAPES = 64, 4
# Files that are open beside the engines' streams.
FILES = 1000
QUICK = ["--engines", "200", "--replicas", "1", "2", "--seconds", "8", "--idle-s", "3", "--before-rounds", "0"]


def beside(folder: Path, rounds: int, say: Callable[[str], None]) -> Beside:
    """Compare the control plane with the one of commit 8206ef5, both with their own agents and at full speed."""
    folder.mkdir(parents=True)
    missing = cost_control.tree_of(cost_control.BEFORE, folder / "before") if rounds else "the comparison was left out"
    if missing:
        return Beside(missing)
    load, windows = cost_control.Load(), []
    rig, arms = cost_control.Rig(folder, load), [cost_control.TODAY, cost_control.OLD]
    for number in range(rounds):
        found = {}
        for arm in arms[:: -1 if number % 2 else 1]:
            say(f"round {number + 1} of {rounds} beside {cost_control.BEFORE}: {arm}")
            found[arm] = rig.window(arm)
        windows.append(found)
    compared = cost_control.compare(windows, load, "")
    today, before = (compared.arms[arm].engines_per_core for arm in arms)
    return Beside("", load.engines, today, before, compared.ratios[cost_control.OLD])


def allow_files(engines: int) -> None:
    """Raise this process's limit of open files, which the replicas inherit. Raises BenchError if that is too little."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = engines + FILES
    if wanted > most:
        raise BenchError(f"{engines} engines need {wanted} open files, and the limit is {most}: see `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run(options: argparse.Namespace) -> None:
    """Run the whole benchmark. Raises BenchError."""
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"[{time.monotonic() - began_s:4.0f} s] {text}", flush=True)

    allow_files(max(options.engines))
    computer = machine()
    folder = Path(tempfile.mkdtemp(prefix="bench-fleet-"))
    compared = beside(folder / "beside", options.before_rounds, say)
    settings = _measured(options, folder, say)
    measured = fleet_report.measured_on(computer, options.seconds, time.monotonic() - began_s)
    for output in [options.output, *([RESULTS] if options.save else [])]:
        output.mkdir(parents=True, exist_ok=True)
        fleet_report.write(settings, compared, measured, output)
    shutil.rmtree(folder)
    print(f"\n{(options.output / 'fleet.md').read_text()}")
    print(fleet_report.last_line(settings[-1]))


def _measured(options: argparse.Namespace, folder: Path, say: Callable[[str], None]) -> list[Setting]:
    """Return the figures of all settings, the largest last."""
    tapes = [made(seed, REQUESTS, STEP_MS) for seed in range(TAPES)]
    # Collecting garbage among the tapes would stop the engines for long, and would show as a late answer.
    gc.freeze()
    usable, windows = sorted(os.sched_getaffinity(0)), Windows(options.slower, options.seconds, options.idle_s)
    # Engines and PostgreSQL leave the replicas' cores alone, as far as there are others.
    os.sched_setaffinity(0, usable[max(1, min(max(options.replicas), len(usable) - 1)) :] or usable)
    postgres, settings = Postgres(), list[Setting]()
    try:
        for engines in sorted(options.engines):
            for replicas in sorted(options.replicas):
                say(f"{engines} engines, {replicas} replicas")
                rig = Rig(engines, replicas, usable, windows, tapes)
                settings.append(asyncio.run(measure(rig, folder / f"{engines}-{replicas}", postgres, say)))
                say(f"{asdict(settings[-1])}")
    finally:
        postgres.stop()
    return settings


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, windows = parser.add_argument, Windows()
    add("--engines", type=int, nargs="+", default=[1000, 5000], help="numbers of engines")
    add("--replicas", type=int, nargs="+", default=[1, 2, 4], help="numbers of replicas")
    add("--slower", type=float, default=windows.slower, help="factor by which engines are slower; 0 to measure it")
    add("--seconds", type=float, default=windows.seconds, help="length of the measured window")
    add("--idle-s", type=float, default=windows.idle_s, help="length of the window with silent engines, in seconds")
    add("--before-rounds", type=int, default=2, help="rounds beside commit 8206ef5; 0 for none")
    add("--output", type=Path, default=ROOT / "build" / "bench-fleet", help="folder of the results")
    add("--save", action="store_true", help="write the results to tests/bench/results too")
    add("--quick", action="store_true", help=f"the same as {' '.join(QUICK)}")
    given = sys.argv[1:] if arguments is None else list(arguments)
    # Later options win.
    return parser.parse_args([*QUICK, *given] if "--quick" in given else given)


if __name__ == "__main__":
    program.main(lambda: run(parse()))
