"""The demo's course: start everything, send the load, change the policy half-way, let the control plane find a rule by
itself, report.

The demo has one event loop. The caller stops the processes through `Children`.
"""

from __future__ import annotations

import asyncio
import sys
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from meridian.v1 import fleet_pb2
from rich.console import Console

from tests.data import maze
from tests.demo import report, timeline
from tests.demo.fleet import ENGINE_ID, Fleet, PolicyChange, meridianctl
from tests.demo.load import Load
from tests.demo.processes import HOST, Children, DemoError, tail
from tests.demo.progress import shown
from tests.engine.pools import STEP_MS
from tests.engine.served import APART, Served
from tests.processes import Process

HERE = Path(__file__).resolve().parent
CONTROL_START_S, ENGINE_START_S, CONNECT_S = 30.0, 240.0, 30.0
SETTLE_S = 10.0
# Longest time for which the control plane looks for a rule by itself, and more questions than are answered meanwhile.
# Its second attempt comes after some 620 requests; five are answered in a second.
FIND_S, FIND_REQUESTS = 150.0, 5000
CHECK_S = 0.25
PROBE_PLACES = 8

T = TypeVar("T")


async def run(options: Namespace, children: Children, store: Path) -> int:
    """Run the whole demo and return the exit status. Raises DemoError."""
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console = Console(width=100, soft_wrap=True)
    fleet = Fleet(options.control)
    await _start(console, options, children, fleet, store)
    findings = await _watched(children, fleet, _measure(console, options, fleet))
    return _report(console, options, findings)


# ------------------------------------------------------------------------------------------------------------- start


async def _start(console: Console, options: Namespace, children: Children, fleet: Fleet, store: Path) -> None:
    for log in options.output.glob("*.log"):
        log.unlink()
    children["meridian-control"] = Process(_control_command(options, store), options.output / "control.log")
    async with _waiting(console, children):
        await _until(children, fleet.reachable, CONTROL_START_S)
    server = _served(options, str(store.parent))
    children["vllm"] = server.process
    async with _waiting(console, children):

        async def serving() -> bool:
            return await asyncio.to_thread(server.ready)

        async def governed() -> bool:
            seen = await fleet.refresh()
            fleet.check()
            return seen.state == fleet_pb2.CONNECTION_STATE_CONNECTED and seen.acked_revision > 0

        await _until(children, serving, ENGINE_START_S)
        await _until(children, governed, CONNECT_S)
    console.print(
        f"{ENGINE_ID}: vLLM {fleet.engine.vllm_version}, agent {fleet.engine.agent_version}, "
        f"policy revision {fleet.engine.acked_revision} in force",
        highlight=False,
    )


def _control_command(options: Namespace, store: Path) -> list[str]:
    return [
        *(sys.executable, "-m", "meridian_control"),
        *("--listen", options.control),
        *("--metrics-listen", f"{HOST}:{options.metrics_port}"),
        *("--page-listen", f"{HOST}:{options.page_port}"),
        *("--policy", str(HERE / "before.toml")),
        *("--store", str(store)),
    ]


def _served(options: Namespace, state: str) -> Served:
    # Probes are internal requests and need places of their own.
    more = ["--model", str(options.model.resolve()), "--max-num-seqs", str(options.concurrency + PROBE_PLACES)]
    more += ["--worker-cls", "tests.demo.pace.PacedWorker"] if options.step_ms else []
    own = {"MERIDIAN_ENGINE_ID": ENGINE_ID, "MERIDIAN_STATE_DIR": state, STEP_MS: str(options.step_ms)}
    return Served(options.output, options.control, options=more, more={**APART, **own}, port=options.http_port)


@asynccontextmanager
async def _waiting(console: Console, children: Children) -> AsyncIterator[None]:
    """Show that the newest process starts, while the block runs."""
    began, (name, child) = time.monotonic(), list(children.items())[-1]

    def line() -> str:
        return f"starting {name}, {time.monotonic() - began:.0f} s; its log is {child.log}"

    async with shown(console, line):
        yield
    console.print(f"{name} is up after {time.monotonic() - began:.0f} s, log {child.log}", highlight=False)


async def _until(children: Children, ready: Callable[[], Awaitable[bool]], within_s: float) -> None:
    """Wait until `ready` returns true. Raises DemoError if that takes the newest process too long, or any process
    ends."""
    deadline = time.monotonic() + within_s
    while True:
        children.check()
        if await ready():
            return
        if time.monotonic() > deadline:
            name, child = list(children.items())[-1]
            raise DemoError(f"{name} is not ready after {within_s:.0f} s; the end of {child.log}:\n{tail(child)}")
        await asyncio.sleep(CHECK_S)


# ----------------------------------------------------------------------------------------------------------- measure


async def _measure(console: Console, options: Namespace, fleet: Fleet) -> report.Findings:
    prompts = maze.prompts(options.requests, options.seed)
    load = Load(f"{options.http}/v1", prompts)
    following = asyncio.create_task(fleet.follow())
    sending = asyncio.create_task(load.run(options.concurrency))
    try:
        async with shown(console, lambda: _line(load, fleet)):
            await load.first_round()
            change = await fleet.apply_policy(HERE / "after.toml")
            load.send_rest()
            _announce(console, change, await meridianctl(fleet.server, "wait"))
            await sending
        engine = await fleet.settled(SETTLE_S)
        ends = await fleet.ends(sample.completion_id for sample in load.samples if sample.completion_id)
        found = await _find(console, options, fleet)
    finally:
        following.cancel()
        sending.cancel()
        await asyncio.gather(following, sending, return_exceptions=True)
    return report.Findings(load.samples, ends, change, engine, found)


async def _find(console: Console, options: Namespace, fleet: Fleet) -> fleet_pb2.SelfCalibration:
    """Let the control plane look for a rule by itself, and return what it has found, or why it has found none."""
    await fleet.apply_policy(HERE / "self.toml")
    load = Load(f"{options.http}/v1", maze.prompts(FIND_REQUESTS, options.seed + 1))
    sending = asyncio.create_task(load.run(options.concurrency))
    deadline = time.monotonic() + FIND_S
    try:
        async with shown(console, lambda: f"the control plane looks for a rule by itself | {_line(load, fleet)}"):
            while not (found := await fleet.self_calibration()).rule and time.monotonic() < deadline:
                await asyncio.sleep(CHECK_S)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    return found


def _announce(console: Console, change: PolicyChange, converged: str) -> None:
    console.print(
        f"policy revision {change.revision} applied in {change.duration_ms:.1f} ms; meridianctl wait: {converged}",
        highlight=False,
    )


def _line(load: Load, fleet: Fleet) -> str:
    sent, done = len(load.samples), sum(s.finished for s in load.samples)
    failed = sum(bool(s.error) for s in load.samples)
    live = ", ".join(f"{name} {count}" for name, count in fleet.phases().items())
    ends = ", ".join(f"{reason} {count}" for reason, count in sorted(fleet.engine.ends.items())) or "none"
    return (
        f"requests: sent {sent}, done {done}, failed {failed} | live: {live} | ends: {ends}"
        f" | policy revision {fleet.engine.acked_revision}"
    )


async def _watched(children: Children, fleet: Fleet, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`; give up if a process ends or the agent steps aside. Raises DemoError and the errors of `work`."""
    task = asyncio.create_task(work)
    try:
        while not (await asyncio.wait([task], timeout=CHECK_S))[0]:
            children.check()
            fleet.check()
        if task.exception() is not None:
            # An error is often caused by a process that is about to end, and the process's own error says more.
            await asyncio.sleep(CHECK_S)
        children.check()
        return task.result()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# ------------------------------------------------------------------------------------------------------------ report


def _report(console: Console, options: Namespace, findings: report.Findings) -> int:
    picture = options.output / "timeline.png"
    timeline.draw(findings, picture)
    (options.output / "requests.jsonl").write_text("".join(f"{line}\n" for line in report.request_lines(findings)))
    console.print()
    console.print(report.table(findings))
    for line in report.notes(findings):
        console.print(line, highlight=False, markup=False)
    for line in report.inconsistencies(findings):
        console.print(f"does not add up: {line}", style="red", highlight=False, markup=False)
    for error in sorted({sample.error for sample in findings.failed}):
        console.print(f"failed: {error}", style="red", highlight=False, markup=False)
    console.print(f"timeline: {picture}", highlight=False, markup=False)
    for paragraph in report.verdict(findings):
        console.print(f"\n{paragraph}", highlight=False, markup=False)
    line = report.json_line(findings)
    (options.output / "result.json").write_text(line + "\n")
    print(line, flush=True)
    return 1 if findings.failed else 0
