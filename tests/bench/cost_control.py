"""Measure the processor time of a whole control-plane process per token event, beside an older one and a bare echo.

Each of the three servers gets the same tapes from engines at full speed (`fleet_engines`), one server at a time. The
protocol is in tests/bench/cost.md.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.bench.fleet_engines import STEP_MS, Counts
from tests.bench.fleet_rig import Rig, Windows
from tests.bench.fleet_tape import Report, made
from tests.bench.harness import BenchError, Column, Figures, Session
from tests.bench.machine import TICKS_PER_S
from tests.processes import ROOT, Control, Process, free_port

COLUMNS = (
    Column("token_events_per_core_s", "token events per core-second", 0, "ratio"),
    Column("engines_per_core", "engines per core", 0),
    Column("messages_per_s", "reports per second", 0),
    Column("us_per_message", "processor time of a report, us", 0),
    Column("cores", "cores used", 3),
    Column("pace", "pace of the load", 3),
    Column("received", "share of events that arrived", 3),
    Column("latency_p50_ms", "answer to a report, P50, ms", 1),
    Column("latency_p99_ms", "P99, ms", 1),
)
# The commit whose control plane is measured beside today's.
BEFORE = "8206ef5"
FOLDERS = ("proto", "kernels")
PROTO = "proto/meridian/v1/agent.proto"
TODAY, OLD, ECHO = "today", "before", "echo"
ENGINES, REQUESTS, TAPES = 32, 64, 4
BEGIN_S, MEASURE_S = 5.0, 15.0
# Share of the token events sent in a window that must arrive in it. Less means that streams are broken; the page shows
# a server that is only starved.
ARRIVED = 0.1


@dataclass(frozen=True)
class Load:
    """The load of every window."""

    engines: int = ENGINES
    begin_s: float = BEGIN_S
    measure_s: float = MEASURE_S


def tapes(**how: Any) -> list[list[Report]]:
    """Return the tapes of engines in turn. how: as `fleet_tape.made` has it."""
    return [made(seed, REQUESTS, STEP_MS, **how) for seed in range(TAPES)]


def python_path(tree: Path) -> str:
    return os.pathsep.join(str(path) for path in (tree, *(tree / folder for folder in FOLDERS)))


def tree_of(commit: str, folder: Path) -> str:
    """Write the files of a commit into `folder`; return why that is impossible, or an empty text."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    command = ["git", "-C", str(ROOT), "archive", "--output", str(archive), commit]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"git does not run: {error}"
    if made.returncode:
        return f"this clone has no commit {commit}; `git fetch --unshallow` brings it if the clone is shallow"
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    return ""


class Echo(Control):
    """A bare gRPC server in place of a control plane."""

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.bench.cost_echo", self.target]
        self.process = Process(command, self.folder / "echo.log", {"PYTHONPATH": python_path(ROOT)})
        if self.cores is not None:
            os.sched_setaffinity(self.process.popen.pid, self.cores)


class Servers:
    """Runs windows of the arms, each with a fresh server on a core of its own and fresh engines on the others."""

    def __init__(self, folder: Path, load: Load, before: str = BEFORE) -> None:
        folder.mkdir(parents=True)
        self.no_before = tree_of(before, folder / "before")
        self.arms = [TODAY, ECHO] if self.no_before else [TODAY, OLD, ECHO]
        self._folder, self._load, self._number = folder, load, 0
        self._tapes = dict.fromkeys(self.arms, tapes())
        if OLD in self.arms and "SparseColumns" not in (folder / "before" / PROTO).read_text():
            self._tapes[OLD] = tapes(sparse=False)

    def _server(self, arm: str, folder: Path, cores: set[int]) -> Control:
        if arm == ECHO:
            return Echo(folder, free_port(), (), cores)
        tree = ROOT if arm == TODAY else self._folder / "before"

        class Within(Control):
            within = ("env", "-C", str(tree), f"PYTHONPATH={python_path(tree)}")

        return Within(folder, None, (), cores)

    async def window(self, arm: str, _: int = 0) -> Figures:
        """Measure one window. Raises BenchError."""
        self._number += 1
        (folder := self._folder / f"{self._number}-{arm}").mkdir()
        usable = sorted(os.sched_getaffinity(0))
        rig = Rig(self._load.engines, 1, usable, Windows(), self._tapes[arm])
        try:
            rig.begin([await asyncio.to_thread(self._server, arm, folder, rig.cores)])
            os.sched_setaffinity(0, set(usable) - rig.cores or set(usable))
            await rig.connect(decided=arm != ECHO)
            rig.fleet.play(STEP_MS / 1e3)
            await asyncio.sleep(self._load.begin_s)
            return await self._measured(rig, arm)
        finally:
            os.sched_setaffinity(0, usable)
            await rig.close()

    async def _measured(self, rig: Rig, arm: str) -> Figures:
        received_s = 0.0 if arm == ECHO else await rig.received()
        before, counts = rig.usage(), Counts()
        rig.fleet.counts = counts
        await asyncio.sleep(self._load.measure_s)
        used, latencies_s = rig.usage().since(before), list(counts.latencies_s)
        reports, sent_s = counts.reports, counts.steps * STEP_MS / 1e3
        # Seconds of engines at full speed; the echo takes in all that is sent.
        engine_s = sent_s if arm == ECHO else await rig.received() - received_s
        if engine_s < ARRIVED * sent_s:
            raise BenchError(f"the server received {engine_s:.1f} s of {sent_s:.1f} s of engines that were sent")
        cpu_s = max(sum(used.replicas), 1 / TICKS_PER_S)
        figures = {
            "token_events_per_core_s": engine_s / cpu_s * REQUESTS * 1e3 / STEP_MS,
            "engines_per_core": engine_s / cpu_s,
            "us_per_message": cpu_s / max(reports, 1) * 1e6,
            "messages_per_s": reports / used.at_s,
            "cores": cpu_s / used.at_s,
            "pace": sent_s / (rig.engines * used.at_s),
            "received": engine_s / sent_s,
        }
        if latencies_s:
            p50, p99 = (1e3 * np.percentile(latencies_s, [50, 99])).tolist()
            figures |= {"latency_p50_ms": p50, "latency_p99_ms": p99}
        return figures


async def measure(session: Session) -> dict[str, Any]:
    """Measure all servers; return the part's figures of the last line. Raises BenchError."""
    given, runs = session.options, session.runs
    load = Load(engines=given.engines, measure_s=given.control_s)
    servers = Servers(session.fresh() / "control", load, given.before)
    session.say(f"warming up; {servers.no_before or 'the older commit is there'}")
    await servers.window(TODAY)
    text = (
        f"{load.engines} engines with {REQUESTS} running requests each. `{OLD}` is the control plane of commit "
        f"{given.before}, `{ECHO}` a bare gRPC server; all get the same reports, in columns that they read."
    )
    text += f" `{OLD}` is missing: {servers.no_before}." if servers.no_before else ""
    for number in range(given.control_rounds):
        await session.rounds(servers.arms, servers.window, [number])
        session.table("The control plane", text, COLUMNS, TODAY)
    over_echo = runs.ratio(TODAY, ECHO, "token_events_per_core_s")
    session.goal("token events per core-second over the echo's", ">= 0.4", over_echo)
    return {
        "token_events_per_core_s": runs.median(TODAY, "token_events_per_core_s").rounded(0),
        "engines_per_core": runs.median(TODAY, "engines_per_core").rounded(1),
        "engines_per_core_before": None if servers.no_before else runs.median(OLD, "engines_per_core").rounded(1),
        "of_echo": over_echo.rounded(3),
    }
