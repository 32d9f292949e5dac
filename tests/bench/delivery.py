"""Measure how long a changed policy takes to be applied on a whole fleet: `make bench-delivery`.

The protocol is in tests/bench/fleet.md.
"""

from __future__ import annotations

import asyncio
import math
import os
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench import harness
from tests.bench.fleet_engines import STEP_MS
from tests.bench.fleet_rig import CAP_TOKENS, Rig, Windows
from tests.bench.fleet_tape import made
from tests.bench.harness import Column

if TYPE_CHECKING:
    import argparse

    from tests.bench.harness import Figures, Session

SIZES, GOALS_S = (10, 100, 1000), {100: 1.0, 1000: 5.0}
# Share of the engines that must have applied a policy; running requests of an engine; and the step with which an engine
# sends about a report a second.
SHARE, REQUESTS, STEP_S = 0.95, 8, 1 / 24
# Pause after an update: delivery waits until the policy has not changed for a while.
PAUSE_S, IDLE_S = 1.0, 5.0
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


async def deliver(session: Session, agents: int, updates: int) -> Figures:
    """Measure one fleet under a server of its own, which has a core to itself. Raises BenchError."""
    usable = sorted(os.sched_getaffinity(0))
    rig = Rig(agents, 1, usable, Windows(), [made(seed, REQUESTS, STEP_MS) for seed in range(4)])
    try:
        await rig.start(session.fresh())
        os.sched_setaffinity(0, set(usable) - rig.cores or set(usable))
        await rig.connect()
        rig.fleet.play(STEP_S)
        await rig.update()
        await asyncio.sleep(PAUSE_S)
        # The cores that the server uses for the reports alone.
        report_cores = (await rig.used(IDLE_S)).cores
        before, delays_s = rig.usage(), list[float]()
        for number in range(updates):
            times_s = await rig.update(CAP_TOKENS + 1 + number)
            delays_s.append(times_s[math.ceil(SHARE * agents) - 1])
            await asyncio.sleep(PAUSE_S)
        used = rig.usage().since(before)
        memory_mb = rig.rss_mb()
    finally:
        os.sched_setaffinity(0, usable)
        await rig.close()
    p50, p95, p99 = np.percentile(delays_s, [50, 95, 99]).tolist()
    return {
        "agents": agents,
        "updates": updates,
        **{"p50_s": p50, "p95_s": p95, "p99_s": p99},
        "server_cpu_s": (sum(used.replicas) - report_cores * used.at_s) / updates,
        "server_report_cores": report_cores,
        "server_rss_mb": memory_mb,
        "agents_cores": used.engines / used.at_s,
    }


async def measure(session: Session) -> dict[str, Any]:
    for agents in session.options.sizes:
        run = partial(deliver, session, agents, session.options.updates)
        session.add(f"{agents} agents", await session.measured(run))
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
