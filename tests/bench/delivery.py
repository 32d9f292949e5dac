"""Measure how long a changed policy takes to be applied on the whole fleet: `make bench-delivery`.

The protocol is in tests/bench/README.md. The module owns the order of events and the figures. The last line printed is
JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from meridian.v1 import policy_pb2, policy_pb2_grpc

from tests.bench import program
from tests.bench.delivery_agents import REPORT_S, REQUESTS
from tests.bench.machine import TICKS_PER_S, Calm, machine, rss_mb, ticks_of
from tests.bench.program import BenchError
from tests.processes import ROOT, Control

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS = Path(__file__).parent / "results"
SIZES = (10, 100, 1000)
AIMS_S = {100: 1.0, 1000: 5.0}
SHARE = 0.95
PROCESSES = 4
# Pause between two updates: delivery waits until the policy has not changed for a while, so each update gets this wait.
PAUSE_S = 1.0
IDLE_S = 5.0
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Size:
    """The figures of one fleet size.

    p*_s: percentiles over the updates, each measured from the call until 95 % of the agents had applied it.
    server_cpu_s: the server's processor time per update, reports left out; server_report_cores: cores for the reports
    alone.
    """

    agents: int
    updates: int
    p50_s: float
    p95_s: float
    p99_s: float
    server_cpu_s: float
    server_report_cores: float
    server_rss_mb: float
    agents_cores: float


class Agents:
    """The processes that run the simulated agents."""

    def __init__(self, processes: list[asyncio.subprocess.Process], cores: set[int]) -> None:
        self._processes = processes
        for process in processes:
            os.sched_setaffinity(process.pid, cores)

    @classmethod
    async def start(cls, target: str, agents: int, cores: set[int]) -> Agents:
        each = math.ceil(agents / min(PROCESSES, math.ceil(agents / 10)))
        processes = []
        for first in range(0, agents, each):
            command = ("-m", "tests.bench.delivery_agents", target, str(first), str(min(each, agents - first)))
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=asyncio.subprocess.PIPE, cwd=ROOT, limit=1 << 20
            )
            processes.append(process)
        return cls(processes, cores)

    async def applied(self, revision: int) -> list[float]:
        """Wait until all agents have applied a revision; return their times in ascending order. Raises BenchError."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                found = await asyncio.gather(*(self._applied(process, revision) for process in self._processes))
        except TimeoutError:
            raise BenchError(f"revision {revision} was not applied by all agents within {TIMEOUT_S} s") from None
        return sorted(at_s for times in found for at_s in times)

    async def _applied(self, process: asyncio.subprocess.Process, revision: int) -> list[float]:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = json.loads(line)
            if said["revision"] == revision:
                return list(said["at_s"])
        raise BenchError("a process with agents has ended")

    def ticks(self) -> int:
        return sum(ticks_of(process.pid) for process in self._processes)

    async def stop(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def measure(agents: int, updates: int) -> Size:
    """Measure one fleet of this size under a server of its own, which has a core to itself."""
    folder = Path(tempfile.mkdtemp(prefix="bench-delivery-"))
    server_core, *other_cores = sorted(os.sched_getaffinity(0))
    control = await asyncio.to_thread(Control, folder, cores={server_core})
    fleet = await Agents.start(control.target, agents, set(other_cores or [server_core]))
    try:
        await fleet.applied(1)
        return await _updates(control, fleet, agents, updates)
    finally:
        await fleet.stop()
        await asyncio.to_thread(control.process.stop)
        shutil.rmtree(folder)


async def _updates(control: Control, fleet: Agents, agents: int, updates: int) -> Size:
    pid = control.process.popen.pid
    delays_s = []
    async with grpc.aio.insecure_channel(control.target) as channel:
        stub: Any = policy_pb2_grpc.PolicyServiceStub(channel)
        await _update(stub, fleet, 2)
        await asyncio.sleep(PAUSE_S)
        report_cores = await _cores(pid)
        server_ticks, agents_ticks, began_s = ticks_of(pid), fleet.ticks(), time.monotonic()
        for revision in range(3, 3 + updates):
            called_s, applied_s = await _update(stub, fleet, revision)
            delays_s.append(applied_s[math.ceil(SHARE * agents) - 1] - called_s)
            await asyncio.sleep(PAUSE_S)
        wall_s = time.monotonic() - began_s
        server_s = (ticks_of(pid) - server_ticks) / TICKS_PER_S - report_cores * wall_s
        agents_cores = (fleet.ticks() - agents_ticks) / TICKS_PER_S / wall_s
    p50, p95, p99 = np.percentile(delays_s, [50, 95, 99]).tolist()
    return Size(agents, updates, p50, p95, p99, server_s / updates, report_cores, rss_mb(pid), agents_cores)


async def _update(stub: Any, fleet: Agents, revision: int) -> tuple[float, list[float]]:
    """Send an update and return its time and the times at which the agents applied it; it changes every request's
    cap."""
    policy = policy_pb2.Policy(scheduler=policy_pb2.SchedulerPolicy(max_think_tokens=10_000 + revision))
    called_s = time.monotonic()
    answer = await stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy))
    if answer.revision.revision != revision:
        raise BenchError(f"revision {answer.revision.revision} was stored, not {revision}")
    return called_s, await fleet.applied(revision)


async def _cores(pid: int) -> float:
    """Return the cores that the server uses for the agents' reports alone."""
    before, began_s = ticks_of(pid), time.monotonic()
    await asyncio.sleep(IDLE_S)
    return (ticks_of(pid) - before) / TICKS_PER_S / (time.monotonic() - began_s)


# ---------------------------------------------------------------------------------------------------------- reporting


def markdown(sizes: Sequence[Size]) -> str:
    lines = [
        "# Delivery of a policy",
        "",
        f"Times are from the call of UpdatePolicy until {SHARE:.0%} of the agents had applied the policy, on "
        f"{machine()}. "
        "The server has a core to itself, and the agents and the client share the other cores. Every agent has "
        f"{REQUESTS} thinking requests and reports a step of them every {REPORT_S:g} s. The times include the 100 ms "
        "for which the server waits for further changes.",
        "",
        "| agents | updates | P50, s | P95, s | P99, s | goal, s | server, CPU s per update | server, cores for "
        "reports "
        "| server RSS, MB | agents, cores |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for size in sizes:
        aim = f"< {AIMS_S[size.agents]:g}" if size.agents in AIMS_S else ""
        lines.append(
            f"| {size.agents} | {size.updates} | {size.p50_s:.3f} | {size.p95_s:.3f} | {size.p99_s:.3f} | {aim} | "
            f"{size.server_cpu_s:.3f} | {size.server_report_cores:.2f} | {size.server_rss_mb:.0f} | "
            f"{size.agents_cores:.2f} |"
        )
    return "\n".join([*lines, ""])


def plain(size: Size) -> dict[str, Any]:
    return {name: round(value, 4) for name, value in asdict(size).items()}


def run(options: argparse.Namespace) -> None:
    """Run the whole benchmark. Raises BenchError."""
    sizes = asyncio.run(_run(options))
    written = {"delivery.md": markdown(sizes), "delivery.json": json.dumps([plain(size) for size in sizes], indent=1)}
    for folder in [options.output, *([RESULTS] if options.save else [])]:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in written.items():
            (folder / name).write_text(text.rstrip("\n") + "\n")
    print(f"\n{written['delivery.md']}")
    print(json.dumps({str(size.agents): plain(size) for size in sizes}))


async def _run(options: argparse.Namespace) -> list[Size]:
    calm, sizes = Calm(options.quiet_cores, options.patience_s), []
    for agents in options.sizes:
        size, _ = await calm.measure(partial(measure, agents, options.updates))
        sizes.append(size)
        print(plain(size), flush=True)
    return sizes


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--sizes", type=int, nargs="+", default=SIZES, help="numbers of agents")
    add("--updates", type=int, default=100, help="measured updates of each fleet size")
    add("--output", type=Path, default=ROOT / "build" / "bench-delivery")
    add("--save", action="store_true", help="write the results to tests/bench/results too")
    add(
        "--quiet-cores",
        type=float,
        default=0.3,
        help="processor cores that other programs may use before a size is measured again",
    )
    add(
        "--patience-s",
        type=float,
        default=600.0,
        help="longest total time to wait for a quiet machine and to measure again, in seconds",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    program.main(lambda: run(parse()))
