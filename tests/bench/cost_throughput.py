"""Compare the throughput and the processor time of stock and governed vLLM, side by side.

The module owns the engines, of which one at a time runs, and their windows of steps. The protocol is in
tests/bench/cost.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meridian.v1 import agent_pb2

from tests.bench import random_model
from tests.bench import scheduling_load as load
from tests.bench.gate import GATE, Keeper
from tests.bench.harness import Column, Figures, Interval, Session
from tests.bench.machine import LARGE_PAGES, TICKS_PER_S, ticks_of
from tests.bench.streamed import PLACES, Request, Setup, StreamedEngine

BLOCKS = 1024
# Requests that wait for a place, so that each place is taken in the step after it falls empty, whenever the client
# learns of that.
WAITING = 16
# A window has as many steps as the default policy merges into a report.
STEPS, WARM_STEPS = 24, 48
# All features have their defaults, but no prompt is held back, so that all arms compute the same steps.
NEUTRAL: dict[str, Any] = {"scheduler": {"min_prefill_tokens": 1 << 20}}
# The governed engine starts last, so that it never stands still for as long as a start takes.
ARMS = STOCK, GOVERNED = "stock", "governed"
# Starts from which an interval says something.
FEWEST = 6
PROCESSES = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker"}
CONTROL = "control plane"
# Time for a client to take in what the engine has sent, after which the client has nothing to do.
CLIENT_S = 0.02
# Seeds of one start; each seed is the seed of BATCH requests.
SEEDS, BATCH = 10_000, 64
COLUMNS = (
    Column("tokens_per_s", "tokens per second", 0, "ratio"),
    Column("control_us", "control plane, us per token", 0),
    Column("client_us", "client, us per token", 0),
    Column("between_ms", "worker waits for its next step, ms per step", 2, "difference"),
    Column("starved_ms", "worker has a step but no core", 2, "difference"),
    Column("computing_ms", "worker works on a step", 2, "difference"),
)


@dataclass(frozen=True)
class Plan:
    """How often to start the engines: `starts` times, then again until the ratio's interval reaches at most
    `half_width` to either side, or another start would take more than `most_s` seconds in all. half_width: None for no
    more starts."""

    starts: int
    half_width: float | None
    most_s: float

    def go_on(self, done: int, took_s: float, ratio: Interval) -> bool:
        """Return whether another start follows `done` starts, which took `took_s` seconds, with this ratio of the
        governed engine to stock."""
        if self.half_width is None or done < self.starts:
            return done < self.starts
        if took_s * (done + 1) / done > self.most_s:
            return False
        return done < FEWEST or max(ratio.high - ratio.value, ratio.value - ratio.low) > self.half_width


async def measure(session: Session) -> dict[str, Any]:
    """Measure all arms; return the part's figures of the last line. Raises BenchError."""
    os.environ.update(LARGE_PAGES)
    given, runs, folder, began_s = session.options, session.runs, session.fresh(), time.monotonic()
    model = random_model.make(folder / "model")
    plan = Plan(given.starts, given.throughput_interval, given.most_minutes * 60)
    counted: Counter[str] = Counter()
    for start in itertools.count():
        session.say(f"starting both engines, start {start + 1}")
        counted += await _start(model, folder, session, start)
        ours, theirs = (
            {name: runs.values(arm, name) for name in ("tokens", "prompt_tokens")} for arm in (GOVERNED, STOCK)
        )
        unlike = sum(any(ours[name][at] != theirs[name][at] for name in ours) for at in ours["tokens"])
        steps = max(1, counted["steps"])
        text = (
            f"{random_model.MEDIUM.parameters() / 1e6:.0f} M random weights, {start + 1} starts of both engines, "
            f"{given.rounds} rounds of each. In {unlike} rounds the engines did not compute the same prompts and "
            f"tokens. A step had {counted['probe_tokens'] / steps:.2f} tokens of EAT probes, and "
            f"{counted['calm_steps'] / steps:.0%} of the steps were calm."
        )
        session.table("Throughput", text, COLUMNS, STOCK)
        ratio = runs.ratio(GOVERNED, STOCK, "tokens_per_s")
        if not plan.go_on(start + 1, time.monotonic() - began_s, ratio):
            break
    session.goal("tokens per second over stock's", ">= 0.99", ratio)
    return {"throughput_slow": ratio.rounded(), "throughput_slow_interval": [round(ratio.low, 4), round(ratio.high, 4)]}


async def _start(model: Path, folder: Path, session: Session, start: int) -> Counter[str]:
    """Start all engines and run the rounds; return what the governed engine's agent has counted."""
    async with contextlib.AsyncExitStack() as stack:
        setups = {name: Setup(model, BLOCKS, governed=name == GOVERNED, writes_sentences=True) for name in ARMS}
        arms = {
            name: await stack.enter_async_context(_arm(setup, folder / f"{name} {start}", SEEDS * start))
            for name, setup in setups.items()
        }
        await session.rounds(
            ARMS, lambda arm, _: arms[arm].window(STEPS), session.options.rounds, start=start, mirrored=True
        )
        counted: Counter[str] = Counter()
        for arm in arms.values():
            if (counters := await arm.end()) is not None:
                counted["steps"] = counters.calm_steps + counters.full_steps
                counted["calm_steps"], counted["probe_tokens"] = counters.calm_steps, counters.probe_tokens
        return counted


@contextlib.asynccontextmanager
async def _arm(setup: Setup, folder: Path, seed: int) -> AsyncIterator[Measured]:
    folder.mkdir()
    before, keeper = _named(), Keeper(folder / "gate")
    os.environ[GATE] = str(folder / "gate")
    engine = StreamedEngine(dataclasses.replace(setup, extra={"worker_cls": "tests.bench.gated.GatedWorker"}), folder)
    processes = {pid: name for pid, name in _named().items() if pid not in before}
    if engine.control is not None:
        pid = engine.control.process.popen.pid
        _keep_off_workers(pid, processes)
        processes[pid] = CONTROL
    arm = Measured(engine, keeper, processes)
    try:
        await arm.begin(NEUTRAL if setup.governed else {}, seed)
        yield arm
    finally:
        arm.release()
        engine.close()
        keeper.close()


class Measured:
    """One engine and its processes, which run during the windows only."""

    def __init__(self, engine: StreamedEngine, keeper: Keeper, processes: dict[int, str]) -> None:
        self._engine, self._keeper, self._processes = engine, keeper, processes
        self._stopped = [pid for pid, name in processes.items() if name != PROCESSES["VLLM::Worker"]]
        self._places: list[asyncio.Task[None]] = []

    async def begin(self, policy: dict[str, Any], seed: int) -> None:
        """Take all places of the engine by requests at all stages of their lengths."""
        await self._engine.begin(policy)
        waiting = _endless(seed)

        async def place() -> None:
            for request in waiting:
                await self._engine.stream(request)

        # The first step has one request in each arm; all others arrive before the second step.
        self._places.append(asyncio.create_task(place()))
        await self._keeper.reached()
        self._places += [asyncio.create_task(place()) for _ in range(PLACES + WAITING - 1)]
        await asyncio.sleep(CLIENT_S * PLACES)
        await self.window(WARM_STEPS)

    async def window(self, steps: int) -> Figures:
        """Run some steps. Raises BenchError if a request went wrong."""
        for place in self._places:
            if place.done():
                place.result()
        before_s, own_s = self._control_s(), time.process_time()
        passed = await self._keeper.opened(steps, self._stopped)
        control_s = self._control_s() - before_s
        await asyncio.sleep(CLIENT_S)
        return {
            "tokens_per_s": passed.tokens / passed.took_s,
            "control_us": control_s / passed.tokens * 1e6,
            "client_us": (time.process_time() - own_s) / passed.tokens * 1e6,
            "between_ms": passed.between_s / steps * 1e3,
            "starved_ms": passed.starved_s / steps * 1e3,
            "computing_ms": passed.computing_s / steps * 1e3,
            **{"tokens": passed.tokens, "prompt_tokens": passed.prompt_tokens},
        }

    async def end(self) -> agent_pb2.AgentCounters | None:
        """Abort the requests, and return the agent's counters. Raises BenchError if the agent is no longer in force."""
        self.release()
        for place in self._places:
            place.cancel()
        await asyncio.wait(self._places)
        return await asyncio.to_thread(self._engine.counters)

    def release(self) -> None:
        """Let the engine's processes go on without windows."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._keeper.leave_open(())

    def _control_s(self) -> float:
        return sum(ticks_of(pid) for pid, name in self._processes.items() if name == CONTROL) / TICKS_PER_S


def _endless(seed: int) -> Iterator[Request]:
    """Return requests without end. Those of the first PLACES have a part of their thinking left, drawn uniformly."""
    arrivals = load.open_loop("poisson", 1.0, seed, PLACES, BATCH)
    yield from (arrival.request for arrival in arrivals)
    for number in itertools.count(seed + 1):
        yield from load.requests(number, BATCH)


def _named() -> dict[int, str]:
    """Return the vLLM processes that descend from this one, by pid, with the names that they give themselves."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            title = path.read_text().split("\0")[0].strip()
            pid = int(path.parent.name)
            name = next((n for prefix, n in PROCESSES.items() if title.startswith(prefix)), None)
            if name is not None and _descends(pid):
                found[pid] = name
    return found


def _keep_off_workers(pid: int, processes: dict[int, str]) -> None:
    """Keep the control plane, process `pid`, off the cores to which vLLM has bound its workers, if others are left: in
    a fleet, the control plane takes no core of an engine's workers."""
    bound = [os.sched_getaffinity(worker) for worker, name in processes.items() if name == PROCESSES["VLLM::Worker"]]
    if left := os.sched_getaffinity(0).difference(*bound):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), left)


def _descends(pid: int) -> bool:
    """Return whether the process `pid` is this process or descends from it."""
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()
