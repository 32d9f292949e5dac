"""Measure how long a changed policy takes to be applied on a whole fleet: `make bench-delivery`.

The protocol is in tests/bench/fleet.md; `delivery_agents` has the simulated agents.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from meridian.v1 import policy_pb2, policy_pb2_grpc

from tests.bench import harness
from tests.bench.harness import BenchError, Column
from tests.bench.machine import TICKS_PER_S, rss_mb, ticks_of
from tests.processes import ROOT, Control

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from tests.bench.harness import Figures, Session

SIZES, GOALS_S = (10, 100, 1000), {100: 1.0, 1000: 5.0}
# Share of the agents that must have applied a policy.
SHARE = 0.95
PROCESSES = 4
# Pause after an update: delivery waits until the policy has not changed for a while.
PAUSE_S, IDLE_S, TIMEOUT_S = 1.0, 5.0, 120.0
COLUMNS = (
    Column("updates", "updates", 0),
    Column("p50_s", "P50, s", 3),
    Column("p95_s", "P95, s", 3),
    Column("p99_s", "P99, s", 3),
    Column("server_cpu_s", "server, CPU s per update", 3),
    Column("server_report_cores", "server, cores for reports", 2),
    Column("server_rss_mb", "server RSS, MB", 0),
    Column("agents_cores", "agents, cores", 2),
)


class Agents:
    """The processes that run the simulated agents."""

    def __init__(self, processes: list[asyncio.subprocess.Process]) -> None:
        self._processes = processes

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
            message = json.loads(line)
            if message["revision"] == revision:
                return list(message["at_s"])
        raise BenchError("a process with agents has ended")

    def ticks(self) -> int:
        return sum(ticks_of(process.pid) for process in self._processes)


@contextlib.asynccontextmanager
async def started(target: str, agents: int, cores: set[int]) -> AsyncIterator[Agents]:
    each = math.ceil(agents / min(PROCESSES, math.ceil(agents / 10)))
    processes = []
    try:
        for first in range(0, agents, each):
            command = ("-m", "tests.bench.delivery_agents", target, str(first), str(min(each, agents - first)))
            process = await asyncio.create_subprocess_exec(
                sys.executable, *command, stdout=asyncio.subprocess.PIPE, cwd=ROOT, limit=1 << 20
            )
            processes.append(process)
            os.sched_setaffinity(process.pid, cores)
        yield Agents(processes)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def deliver(agents: int, updates: int) -> Figures:
    """Measure one fleet under a server of its own, which has a core to itself. Raises BenchError."""
    server_core, *other_cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="bench-delivery-") as folder:
        control = await asyncio.to_thread(Control, Path(folder), cores={server_core})
        try:
            async with started(control.target, agents, set(other_cores or [server_core])) as fleet:
                await fleet.applied(1)
                return await _updates(control, fleet, agents, updates)
        finally:
            await asyncio.to_thread(control.process.stop)


async def _updates(control: Control, fleet: Agents, agents: int, updates: int) -> Figures:
    pid, delays_s = control.process.popen.pid, []
    async with grpc.aio.insecure_channel(control.target) as channel:
        stub: Any = policy_pb2_grpc.PolicyServiceStub(channel)
        await _update(stub, fleet, 2)
        await asyncio.sleep(PAUSE_S)
        ticks, began_s = ticks_of(pid), time.monotonic()
        await asyncio.sleep(IDLE_S)
        # The cores that the server uses for the agents' reports alone.
        report_cores = (ticks_of(pid) - ticks) / TICKS_PER_S / (time.monotonic() - began_s)
        ticks, agents_ticks, began_s = ticks_of(pid), fleet.ticks(), time.monotonic()
        for revision in range(3, 3 + updates):
            called_s, applied_s = await _update(stub, fleet, revision)
            delays_s.append(applied_s[math.ceil(SHARE * agents) - 1] - called_s)
            await asyncio.sleep(PAUSE_S)
        wall_s = time.monotonic() - began_s
        server_s = (ticks_of(pid) - ticks) / TICKS_PER_S - report_cores * wall_s
        agents_cores = (fleet.ticks() - agents_ticks) / TICKS_PER_S / wall_s
    p50, p95, p99 = np.percentile(delays_s, [50, 95, 99]).tolist()
    return {
        "agents": agents,
        "updates": updates,
        **{"p50_s": p50, "p95_s": p95, "p99_s": p99},
        "server_cpu_s": server_s / updates,
        "server_report_cores": report_cores,
        "server_rss_mb": rss_mb(pid),
        "agents_cores": agents_cores,
    }


async def _update(stub: Any, fleet: Agents, revision: int) -> tuple[float, list[float]]:
    """Change every request's cap; return the time of the call and the times at which the agents applied it."""
    policy = policy_pb2.Policy(scheduler=policy_pb2.SchedulerPolicy(max_think_tokens=10_000 + revision))
    called_s = time.monotonic()
    answer = await stub.UpdatePolicy(policy_pb2.UpdatePolicyRequest(policy=policy))
    if answer.revision.revision != revision:
        raise BenchError(f"revision {answer.revision.revision} was stored, not {revision}")
    return called_s, await fleet.applied(revision)


async def measure(session: Session) -> dict[str, Any]:
    for agents in session.options.sizes:
        session.add(f"{agents} agents", await session.measured(partial(deliver, agents, session.options.updates)))
        if agents in GOALS_S:
            found = session.runs.median(f"{agents} agents", "p95_s")
            session.goal(f"P95 of {agents} agents, s", f"< {GOALS_S[agents]:g}", found)
    text = f"Seconds from the call of UpdatePolicy until {SHARE:.0%} of the agents had applied the policy."
    session.table("Delivery of a policy", text, COLUMNS, "")
    return {f"{run.figures['agents']:g}": {n: round(v, 4) for n, v in run.figures.items()} for run in session.runs.all}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of agents")
    parser.add_argument("--updates", type=int, default=100, help="measured updates of each fleet size")


if __name__ == "__main__":
    harness.main("delivery", "Delivery of a policy", __doc__, options, measure, calm=True)
