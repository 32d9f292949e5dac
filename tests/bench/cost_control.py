"""Measure the processor time of a whole control-plane process per token event, beside an older one and a bare echo.

The module owns the three servers, of which one at a time runs, their load and the windows. `cost_load` is the load and
`cost_echo` the echo; both run in processes of their own. The protocol is in tests/bench/cost.md.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench import cost_load
from tests.bench.harness import BenchError, Column
from tests.bench.machine import TICKS_PER_S, ticks_of
from tests.processes import ROOT, Control, free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.bench.harness import Figures, Session

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
# The commit whose control plane and agent are measured beside today's.
BEFORE = "8206ef5"
FOLDERS = ("proto", "kernels")
TODAY, OLD, ECHO = "today", "before", "echo"
STEP_MS, REQUESTS = 20.0, 64
# Engines in all and in each process of the load. One engine has a process of its own, for the latency of decisions.
ENGINES, PER_PROCESS = 32, 8
BEGIN_S, MEASURE_S = 5.0, 15.0
START_S = 120.0
# Share of the token events sent in a window that must arrive in it. Less means that streams are broken; the report
# shows a server that is only starved.
ARRIVED = 0.1
# The processes that share a core with the engine whose latency counts yield to it, because a real engine's link shares
# its core with no other engine.
NICE = ("nice", "-n", "5")


@dataclass(frozen=True)
class Load:
    """The load of every window. requests: running requests of each engine."""

    engines: int = ENGINES
    requests: int = REQUESTS
    begin_s: float = BEGIN_S
    measure_s: float = MEASURE_S

    @property
    def events_per_s(self) -> float:
        """Return the token events per second of one engine."""
        return self.requests * 1e3 / STEP_MS


class Cores:
    """The server has the first usable core to itself; its load has the others."""

    def __init__(self, usable: set[int]) -> None:
        first, *others = sorted(usable)
        self.server, self.load = {first}, set(others) or {first}


class Program:
    """A program in the tree of some commit, on some cores, that speaks JSON on its standard input and output."""

    def __init__(self, tree: Path, cores: set[int], log: Path, *command: str, prefix: Sequence[str] = ()) -> None:
        self._log = log
        with log.open("ab") as errors:
            self.popen = subprocess.Popen(
                [*prefix, sys.executable, "-m", *command],
                cwd=tree,
                env=os.environ | {"PYTHONPATH": python_path(tree)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        os.sched_setaffinity(self.popen.pid, cores)

    def ask(self, line: str = "go") -> None:
        """Write a line to the program. Raises BenchError if the program has ended."""
        assert self.popen.stdin is not None
        try:
            print(line, file=self.popen.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None

    def answer(self) -> Any:
        """Return the program's next line. Raises BenchError if the program has ended."""
        assert self.popen.stdout is not None
        if line := self.popen.stdout.readline():
            return json.loads(line)
        raise self._ended()

    def _ended(self) -> BenchError:
        return BenchError(f"a program of the load has ended: {self._log.read_text()[-2000:]}")

    def end(self) -> None:
        """End the program's input and wait until the program has ended."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()
        self.popen.wait(START_S)

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.wait()
        for pipe in (self.popen.stdin, self.popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def python_path(tree: Path) -> str:
    return os.pathsep.join(str(path) for path in (tree, *(tree / folder for folder in FOLDERS)))


def tree_of(commit: str, folder: Path, repository: Path = ROOT) -> str:
    """Write the files of a commit into `folder`, with today's load if it has none; return why that is impossible, or an
    empty text."""
    folder.mkdir()
    archive = folder.with_suffix(".tar")
    command = ["git", "-C", str(repository), "archive", "--output", str(archive), commit]
    try:
        made = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"git does not run: {error}"
    if made.returncode:
        return f"this clone has no commit {commit}; `git fetch --unshallow` brings it if the clone is shallow"
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    archive.unlink()
    if not (load := folder / "tests" / "bench" / "cost_load.py").exists():
        shutil.copy(cost_load.__file__, load)
    return ""


class Rig:
    """Runs windows of the arms, each with a fresh server and a fresh load."""

    def __init__(self, folder: Path, load: Load, before: str = BEFORE) -> None:
        folder.mkdir(parents=True)
        self.no_before = tree_of(before, folder / "before")
        self._folder, self._load, self._number = folder, load, 0
        self._cores = Cores(os.sched_getaffinity(0))
        self._trees = {TODAY: ROOT, OLD: folder / "before"}
        # The recording that the echo receives, a file for each process of the load, and its window.
        self._recordings: list[Path] = []
        self._recorded: Figures = {}

    def window(self, arm: str, _: int = 0, *, record: bool = False) -> Figures:
        """Measure one window. record: keep its messages for the echo. Raises BenchError."""
        self._number += 1
        folder = self._folder / f"{self._number}-{arm}"
        folder.mkdir()
        return self._echo(folder) if arm == ECHO else self._governed(folder, self._trees[arm], record)

    def _shares(self) -> list[range]:
        """Return the numbers of the engines of each process of the load; the first engine has a process of its own."""
        many = range(1, self._load.engines)
        return [range(1), *(many[first : first + PER_PROCESS] for first in range(0, len(many), PER_PROCESS))]

    def _governed(self, folder: Path, tree: Path, record: bool) -> Figures:
        load, shares = self._load, self._shares()
        recordings = [folder / f"sent-{share.start}" for share in shares] if record else []
        with contextlib.ExitStack() as stack:
            control, metrics = stack.enter_context(self._control(folder, tree))
            programs = []
            for number, share in enumerate(shares):
                engines = (control.target, str(share.start), str(len(share)), str(load.requests), str(STEP_MS))
                command = ("tests.bench.cost_load", *engines, *map(str, recordings[number : number + 1]))
                prefix = NICE if number else ()
                made = Program(tree, self._cores.load, folder / "load.log", *command, prefix=prefix)
                programs.append(stack.enter_context(made))
            for program in programs:
                program.answer()
            time.sleep(load.begin_s)
            window = self._measured(control.process.popen.pid, metrics, programs)
            for program in programs:
                program.end()
        if record:
            self._recordings, self._recorded = recordings, window
        return window

    def _measured(self, pid: int, metrics: str, programs: Sequence[Program]) -> Figures:
        counts_of(programs)
        seen, began_s, ticks = _totals(metrics), time.monotonic(), ticks_of(pid)
        time.sleep(self._load.measure_s)
        cpu_s, wall_s = (ticks_of(pid) - ticks) / TICKS_PER_S, time.monotonic() - began_s
        events, reports = (now - before for now, before in zip(_totals(metrics), seen, strict=True))
        counts = counts_of(programs)
        sent = sum(c["rows"] for c in counts)
        if events < ARRIVED * sent:
            raise BenchError(f"the control plane received {events:.0f} token events of {sent} that were sent")
        due = self._load.engines * counts[0]["took_s"] * 1e3 / STEP_MS
        pace = sum(c["steps"] for c in counts) / due
        found = self._figures(events, sent, cpu_s, wall_s, reports)
        if trips_ms := counts[0]["trips_ms"]:
            found["latency_p50_ms"], found["latency_p99_ms"] = np.percentile(trips_ms, [50, 99]).tolist()
        return found | {"pace": pace}

    def _figures(self, events: float, sent: float, cpu_s: float, wall_s: float, messages: float) -> Figures:
        """Return the figures of a window. events: token events that the server received; sent: those that the load
        sent; messages: reports."""
        per_core_s = events / max(cpu_s, 1 / TICKS_PER_S)
        return {
            "token_events_per_core_s": per_core_s,
            "engines_per_core": per_core_s / self._load.events_per_s,
            "us_per_message": cpu_s / max(messages, 1) * 1e6,
            "messages_per_s": messages / wall_s,
            "cores": cpu_s / wall_s,
            "received": events / sent,
            **{"sent": sent, "messages": messages, "wall_s": wall_s},
        }

    @contextlib.contextmanager
    def _control(self, folder: Path, tree: Path) -> Iterator[tuple[Control, str]]:
        """Yield a control plane of this tree, and the URL of its metrics."""
        address = f"127.0.0.1:{free_port()}"

        class Within(Control):
            within = ("env", "-C", str(tree), f"PYTHONPATH={python_path(tree)}")

        control = Within(folder, options=["--metrics-listen", address], cores=self._cores.server)
        try:
            yield control, f"http://{address}/metrics"
        finally:
            control.process.stop()

    def _echo(self, folder: Path) -> Figures:
        target, recorded, log = f"127.0.0.1:{free_port()}", self._recorded, folder / "echo.log"
        with contextlib.ExitStack() as stack:
            command = ("tests.bench.cost_echo", "serve", target)
            server = stack.enter_context(Program(ROOT, self._cores.server, log, *command))
            server.answer()
            senders = [
                stack.enter_context(
                    Program(ROOT, self._cores.load, log, "tests.bench.cost_echo", "send", target, str(path))
                )
                for path in self._recordings
            ]
            for sender in senders:
                sender.answer()
            began_s, ticks = time.monotonic(), ticks_of(server.popen.pid)
            for sender in senders:
                sender.ask()
            answers = sum(sender.answer()["answers"] for sender in senders)
            cpu_s, wall_s = (ticks_of(server.popen.pid) - ticks) / TICKS_PER_S, time.monotonic() - began_s
        if answers < ARRIVED * recorded["messages"]:
            raise BenchError(f"the echo received {answers} of {recorded['messages']:.0f} recorded reports")
        found = self._figures(recorded["sent"], recorded["sent"], cpu_s, wall_s, answers)
        return found | {"pace": recorded["wall_s"] / wall_s}


def counts_of(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """Return the counts of each process of the load since the last call."""
    for program in programs:
        program.ask()
    return [program.answer() for program in programs]


def _totals(metrics: str) -> tuple[float, float]:
    """Return the token events and the reports that a control plane has received."""
    with urllib.request.urlopen(metrics, timeout=START_S) as answer:
        lines = answer.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith(("meridian_token", "meridian_reports")))
    return float(values["meridian_token_events_total"]), float(values["meridian_reports_total"])


async def measure(session: Session) -> dict[str, Any]:
    """Measure all servers; return the part's figures of the last line. Raises BenchError."""
    given, runs = session.options, session.runs
    load = Load(engines=given.engines, measure_s=given.control_s)
    rig = Rig(session.fresh() / "control", load, given.before)
    session.say(f"warming up, and recording the reports for the echo; {rig.no_before or 'the older commit is there'}")
    rig.window(TODAY, record=True)
    text = (
        f"{load.engines} engines with {load.requests} running requests each. `{OLD}` is the control plane of commit "
        f"{given.before} with its own agents, `{ECHO}` a bare gRPC server that receives today's reports. "
        f"{f'`{OLD}` is missing: {rig.no_before}.' if rig.no_before else ''}"
    )
    for number in range(given.control_rounds):
        await session.rounds([TODAY, ECHO] if rig.no_before else [TODAY, OLD, ECHO], rig.window, [number])
        session.table("The control plane", text.strip(), COLUMNS, TODAY)
    over_echo = runs.ratio(TODAY, ECHO, "token_events_per_core_s")
    session.goal("token events per core-second over the echo's", ">= 0.4", over_echo)
    before = runs.median(OLD, "engines_per_core")
    return {
        "token_events_per_core_s": runs.median(TODAY, "token_events_per_core_s").rounded(0),
        "engines_per_core": runs.median(TODAY, "engines_per_core").rounded(1),
        "engines_per_core_before": None if rig.no_before else before.rounded(1),
        "of_echo": over_echo.rounded(3),
    }
