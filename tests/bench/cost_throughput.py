"""Compare the throughput and the processor time of stock and governed vLLM, side by side.

The module owns the engines, of which one at a time runs, their windows of steps, and the rounds. The protocol is in
tests/bench/cost.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import operator
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.bench import random_model
from tests.bench import scheduling_load as load
from tests.bench.cost_report import STEP_PARTS
from tests.bench.gate import GATE, Keeper, Passed
from tests.bench.machine import LARGE_PAGES, TICKS_PER_S, Others, ticks_of
from tests.bench.results import Interval, between, mean_between
from tests.bench.streamed import PLACES, Setup, StreamedEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from meridian.v1 import agent_pb2

    from tests.bench.streamed import Request

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
CONTROL, CLIENT = "control plane", "client"
# Time for a client to take in what the engine has sent, after which the client has nothing to do.
CLIENT_S = 0.02
# Seeds of one start; each seed is the seed of BATCH requests.
SEEDS, BATCH = 10_000, 64


@dataclass(frozen=True)
class Window:
    """Some steps of one arm. cpu_s: processor seconds of the control plane and of the client."""

    passed: Passed
    cpu_s: dict[str, float]

    def __add__(self, other: Window) -> Window:
        return Window(self.passed + other.passed, {name: s + other.cpu_s[name] for name, s in self.cpu_s.items()})

    @property
    def tokens_per_s(self) -> float:
        return self.passed.tokens / self.passed.took_s

    def parts_ms(self, steps: int) -> dict[str, float]:
        """Return the milliseconds of each part of a step. steps: number of steps in this window."""
        seconds = self.passed.between_s, self.passed.starved_s, self.passed.computing_s
        return {part: s / steps * 1e3 for part, s in zip(STEP_PARTS, seconds, strict=True)}


# Two windows of each arm, as one.
Round = dict[str, Window]


@dataclass
class Start:
    """The rounds of one start of all engines. unlike: rounds in which the arms did not have the same tokens to generate
    and the same prompts to read. others_cores: cores that other programs used. steps, calm_steps, probe_tokens: counted
    by the governed engine's agent."""

    rounds: list[Round] = field(default_factory=list)
    others_cores: float = 0.0
    steps: int = 0
    calm_steps: int = 0
    probe_tokens: int = 0

    @property
    def unlike(self) -> int:
        return sum(
            len({(window.passed.tokens, window.passed.prompt_tokens) for window in found.values()}) > 1
            for found in self.rounds
        )


@dataclass(frozen=True)
class Throughput:
    """The figures of the governed engine against stock.

    starts, rounds: how often all engines were started, and how many rounds there were in all. ratio: geometric mean
    over the starts, with an interval that contains the differences between starts. cpu_us: processor microseconds per
    generated token, by arm and process. parts_ms: milliseconds of a step, by arm and part; more_ms: how many more of
    them the governed engine's step takes, by part. ratios: the ratios of the rounds of each start, by arm.
    probe_tokens: tokens of EAT probes per step. calm_share: share of the steps that were calm.
    """

    starts: int
    rounds: int
    unlike: int
    ratio: dict[str, Interval]
    tokens_per_s: dict[str, float]
    step_ms: float
    cpu_us: dict[str, dict[str, float]]
    parts_ms: dict[str, dict[str, float]]
    more_ms: dict[str, Interval]
    others_cores: float
    ratios: dict[str, list[list[float]]]
    probe_tokens: float
    calm_share: float


@dataclass(frozen=True)
class Plan:
    """How often to start the engines: `starts` times, then again until the ratio's interval reaches at most
    `half_width` to either side, or another start would take more than `most_s` seconds in all. half_width: None for no
    more starts. rounds: rounds of each start."""

    starts: int
    half_width: float | None
    most_s: float
    rounds: int

    def go_on(self, done: int, took_s: float, ratio: Interval) -> bool:
        """Return whether another start follows `done` starts, which took `took_s` seconds, with this ratio of the
        governed engine to stock."""
        if self.half_width is None or done < self.starts:
            return done < self.starts
        if took_s * (done + 1) / done > self.most_s:
            return False
        return done < FEWEST or max(ratio.high - ratio.value, ratio.value - ratio.low) > self.half_width


def measure(folder: Path, plan: Plan, said: Callable[[str, Throughput], None]) -> Throughput:
    """Measure all arms; `said` gets the figures so far after each start. Raises BenchError."""
    os.environ.update(LARGE_PAGES)
    model, began_s = random_model.make(folder / "model"), time.monotonic()
    starts: list[Start] = []
    while True:
        starts.append(asyncio.run(_start(model, folder, len(starts), plan.rounds)))
        so_far = summary(starts)
        said(f"start {len(starts)}", so_far)
        if not plan.go_on(len(starts), time.monotonic() - began_s, so_far.ratio[GOVERNED]):
            return so_far


async def _start(model: Path, folder: Path, number: int, rounds: int) -> Start:
    """Start all engines, and run the rounds."""
    async with contextlib.AsyncExitStack() as stack:
        setups = {name: Setup(model, BLOCKS, governed=name == GOVERNED, writes_sentences=True) for name in ARMS}
        arms = {
            name: await stack.enter_async_context(_arm(setup, folder / f"{name} {number}", SEEDS * number))
            for name, setup in setups.items()
        }
        found, others, began_s = Start(), Others(), time.monotonic()
        for turn in range(rounds):
            order = [*ARMS[turn % len(ARMS) :], *ARMS[: turn % len(ARMS)]]
            first = {name: await arms[name].window(STEPS) for name in order}
            found.rounds.append({name: first[name] + await arms[name].window(STEPS) for name in reversed(order)})
        found.others_cores = others.cores(time.monotonic() - began_s)
        for arm in arms.values():
            if (counters := await arm.end()) is not None:
                found.steps, found.calm_steps = counters.calm_steps + counters.full_steps, counters.calm_steps
                found.probe_tokens = counters.probe_tokens
        return found


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

    async def window(self, steps: int) -> Window:
        """Run some steps. Raises BenchError if a request went wrong."""
        for place in self._places:
            if place.done():
                place.result()
        before_s, own_s = self._control_s(), time.process_time()
        passed = await self._keeper.opened(steps, self._stopped)
        cpu_s = {CONTROL: self._control_s() - before_s}
        await asyncio.sleep(CLIENT_S)
        return Window(passed, cpu_s | {CLIENT: time.process_time() - own_s})

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


def summary(starts: Sequence[Start]) -> Throughput:
    """Return the figures over all starts."""
    rounds = [found for start in starts for found in start.rounds]
    whole = {arm: functools.reduce(operator.add, (found[arm] for found in rounds)) for arm in ARMS}
    steps = max(1, sum(start.steps for start in starts))
    ratios = {
        arm: [[found[arm].tokens_per_s / found[STOCK].tokens_per_s for found in start.rounds] for start in starts]
        for arm in ARMS[1:]
    }
    parts_ms = [
        [{arm: w.parts_ms(2 * STEPS) for arm, w in found.items()} for found in start.rounds] for start in starts
    ]
    return Throughput(
        starts=len(starts),
        rounds=len(rounds),
        unlike=sum(start.unlike for start in starts),
        ratio={arm: between(values) for arm, values in ratios.items()},
        tokens_per_s={arm: window.tokens_per_s for arm, window in whole.items()},
        step_ms=whole[STOCK].passed.took_s / (2 * STEPS * len(rounds)) * 1e3,
        cpu_us={
            arm: {name: cpu_s / window.passed.tokens * 1e6 for name, cpu_s in window.cpu_s.items()}
            for arm, window in whole.items()
        },
        parts_ms={arm: window.parts_ms(2 * STEPS * len(rounds)) for arm, window in whole.items()},
        more_ms={
            part: mean_between([[ms[GOVERNED][part] - ms[STOCK][part] for ms in start] for start in parts_ms])
            for part in STEP_PARTS
        },
        others_cores=max(start.others_cores for start in starts),
        ratios=ratios,
        probe_tokens=sum(start.probe_tokens for start in starts) / steps,
        calm_share=sum(start.calm_steps for start in starts) / steps,
    )
