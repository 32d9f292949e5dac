"""Measure the time that the agent and the control plane cost: `make bench-cost`.

The protocol is in tests/bench/cost.md. Each part runs in a process of its own, because vLLM loads its plugins once per
process: after stock's engine, a governed one would run without the agent.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

from tests.bench import cost_control, cost_process, cost_steps, cost_throughput, harness
from tests.bench.harness import BenchError, Session

PARTS: dict[str, Callable[[Session], Awaitable[dict[str, Any]]]] = {
    "process": cost_process.measure,
    "throughput": cost_throughput.measure,
    "control": cost_control.measure,
    "steps": cost_steps.measure,
}
# The keys of the last line; the figures of parts that have not run are null.
KEYS = (
    *("extra_us", "extra_us_rule", "extra_us_off", "extra_us_frozen", "throughput", "interval", "meter_of_truth"),
    *("agent_of_stock", "agent_of_stock_short", "throughput_slow", "throughput_slow_interval"),
    *("token_events_per_core_s", "engines_per_core", "engines_per_core_before", "of_echo", "probe_time_share"),
)


async def measure(session: Session) -> dict[str, Any]:
    parts: list[str] = session.options.parts
    if len(parts) == 1:
        return dict.fromkeys(KEYS) | await PARTS[parts[0]](session)
    found, failed = dict[str, Any].fromkeys(KEYS), list[str]()
    for part in parts:
        # The last of an option's values counts.
        command = [sys.executable, "-m", "tests.bench.cost", *sys.argv[1:], "--parts", part]
        line = ""
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
        if process.returncode:
            failed.append(part)
        else:
            found |= {key: value for key, value in json.loads(line).items() if value is not None}
    session.store.read()
    if failed:
        print(json.dumps(found), flush=True)
        raise BenchError(", ".join(failed))
    return found


def parts(text: str) -> list[str]:
    chosen = text.split(",")
    if unknown := set(chosen) - set(PARTS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not one of {', '.join(PARTS)}")
    return [name for name in PARTS if name in chosen]


def options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--parts", type=parts, default=",".join(PARTS), help="parts to run, separated by commas")
    add("--process-rounds", type=int, default=16, help="process: rounds of each case")
    add("--pairs", type=int, default=3, help="steps: rounds of windows per batch size")
    add("--sizes", type=int, nargs="+", default=list(cost_steps.SIZES), help="process and steps: running requests")
    add("--starts", type=int, default=3, help="throughput: how often to start the engines at least")
    add("--rounds", type=int, default=20, help="throughput: rounds of each start")
    add("--throughput-interval", type=float, help="throughput: go on until the interval reaches at most so far from "
        "the ratio, for example 0.005")  # fmt: skip
    add("--most-minutes", type=float, default=30.0, help="throughput: minutes after which to go on no longer")
    add("--control-rounds", type=int, default=3, help="control: windows of each server")
    add("--control-s", type=float, default=cost_control.MEASURE_S, help="control: seconds of a window")
    add("--engines", type=int, default=cost_control.ENGINES, help="control: simulated engines")
    add("--before", default=cost_control.BEFORE, help="control: the older commit")


if __name__ == "__main__":
    harness.main("cost", "Cost of the agent and of the control plane", __doc__, options, measure)
