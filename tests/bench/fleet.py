"""Measure what a fleet of thousands of engines costs the control plane: `make bench-fleet`.

The protocol is in tests/bench/fleet.md; `fleet_rig` measures one setting, which is a number of engines under a number
of replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import resource
import sys
from functools import partial
from typing import Any

from meridian_control.policy.model import Policy
from tests.bench import harness
from tests.bench.cost_control import tapes
from tests.bench.fleet_engines import STEP_MS
from tests.bench.fleet_rig import Rig, Windows, measure
from tests.bench.harness import BenchError, Column, Session
from tests.postgres import Postgres

# Share of the requests that engines measure under the default policy, whose rules are in shadow.
SHARE = Policy().telemetry.shadow_sample_ratio
# Files that are open beside the engines' streams.
FILES = 1000
QUICK = ["--engines", "200", "--replicas", "1", "2", "--seconds", "8", "--idle-s", "3"]
COLUMNS = {
    "Load": (
        Column("slower", "slower by", 0),
        Column("cpu_ms", "processor time per engine and second, ms", 1),
        Column("idle_ms", "of it a silent stream", 2),
        Column("engines_per_core", "engines per core", 0),
        Column("cores", "cores: replicas", 2),
        Column("busiest", "busiest one", 2),
        Column("postgres_cores", "PostgreSQL", 2),
        Column("own_cores", "engines", 2),
        Column("pace", "pace", 3),
        Column("received", "share received", 3),
        Column("latency_p50_ms", "answer to a report, P50, ms", 1),
        Column("latency_p99_ms", "P99, ms", 1),
    ),
    "Memory and traffic": (
        Column("base_mb", "empty replica, MB", 0),
        Column("base_cores", "cores", 3),
        Column("mb_per_engine", "per engine, MB", 3),
        Column("kb_per_request", "per request, KB", 2),
        Column("reports_s", "reports per engine and second", 1),
        Column("answered", "share answered", 2),
        Column("decisions_s", "decisions", 1),
        Column("up_bytes_s", "bytes up", 0),
        Column("down_bytes_s", "bytes down", 0),
        Column("rows_s", "PostgreSQL rows per replica and second", 1),
        Column("wal_bytes_s", "bytes of WAL", 0),
        Column("connections", "connections", 0),
        Column("connect_ms", "to connect an engine, ms of processor time", 1),
    ),
    "A changed policy and a killed replica": (
        Column("delivery_p95_s", "delivery, P95, s", 2),
        Column("delivery_all_s", "all engines, s", 2),
        Column("delivery_ms", "ms of processor time per engine", 1),
        Column("moved", "engines of the killed replica", 0),
        Column("moved_p95_s", "governed again, P95, s", 2),
        Column("moved_all_s", "all, s", 2),
        Column("cut", "decisions without an outcome at the kill", 0),
        Column("lost", "lost", 0),
    ),
}


def allow_files(engines: int) -> None:
    """Raise this process's limit of open files, which the replicas inherit. Raises BenchError if that is too little."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = engines + FILES
    if wanted > most:
        raise BenchError(f"{engines} engines need {wanted} open files, and the limit is {most}: see `ulimit -Hn`")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def bench(session: Session) -> dict[str, Any]:
    given, runs, folder = session.options, session.runs, session.fresh()
    allow_files(max(given.engines))
    least, sampled = min(given.engines), tapes(measured_share=SHARE)
    kinds = [(f"{least:,} engines, all measured", least, tapes())]
    kinds += [(f"{engines:,} engines", engines, sampled) for engines in sorted(given.engines)]
    # Collecting garbage among the tapes would stop the engines for long, and would show as a late answer.
    gc.freeze()
    usable, windows = sorted(os.sched_getaffinity(0)), Windows(given.slower, given.seconds, given.idle_s)
    # Engines and PostgreSQL leave the replicas' cores alone, as far as there are others.
    os.sched_setaffinity(0, usable[max(1, min(max(given.replicas), len(usable) - 1)) :] or usable)
    postgres = await asyncio.to_thread(Postgres)
    try:
        for case, engines, played in kinds:
            for replicas in sorted(given.replicas):
                rig, arm = Rig(engines, replicas, usable, windows, played), f"{replicas} replicas"
                path = folder / str(len(runs.all))
                found = await session.measured(partial(measure, rig, path, postgres, session.say))
                session.add(arm, found, case=case)
    finally:
        await asyncio.to_thread(postgres.stop)
        # The page names the cores of the whole run.
        os.sched_setaffinity(0, usable)
    text = (
        f"Windows of {given.seconds:g} s; a step of an engine at full speed takes {STEP_MS:g} ms. "
        f"{SHARE:.0%} of the requests are measured unless a row says otherwise."
    )
    measured, *cases = (case for case, *_ in kinds)
    for title, columns in COLUMNS.items():
        session.table(title, text, columns, "", [*cases, measured])
    for case, *_ in kinds:
        for replicas in given.replicas:
            for figure, wanted, digits in (("engines_per_core", ">= 150", 0), ("mb_per_engine", "<= 0.3", 3)):
                arm = f"{replicas} replicas"
                session.goal(f"{figure}, {case}, {arm}", wanted, runs.median(arm, figure, case), digits)
    last = runs.all[-1].figures
    return {
        "engines": max(given.engines),
        "replicas": max(given.replicas),
        "engines_per_core": round(last["engines_per_core"], 1),
        "mb_per_engine": round(last["mb_per_engine"], 3),
        "decision_steps_p99": round(last["latency_p99_ms"] / STEP_MS, 2),
        "delivery_p95_s": round(last["delivery_p95_s"], 2),
        "lost": last["lost"],
    }


def options(parser: argparse.ArgumentParser) -> None:
    add, windows = parser.add_argument, Windows()
    add("--engines", type=int, nargs="+", default=[1000, 5000], help="numbers of engines")
    add("--replicas", type=int, nargs="+", default=[1, 2, 4], help="numbers of replicas")
    add("--slower", type=float, default=windows.slower, help="factor by which engines are slower; 0 to measure it")
    add("--seconds", type=float, default=windows.seconds, help="length of the measured window")
    add("--idle-s", type=float, default=windows.idle_s, help="length of the window with silent engines, in seconds")
    add("--quick", action="store_true", help=f"the same as {' '.join(QUICK)}")


if __name__ == "__main__":
    if "--quick" in sys.argv:
        # Later options win.
        sys.argv[1:1] = QUICK
    harness.main("fleet", "A fleet under several replicas", __doc__, options, bench)
