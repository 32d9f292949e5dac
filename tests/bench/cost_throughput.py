"""Compare the throughput and the processor time of stock and governed vLLM, side by side.

The module owns the engines, of which one at a time has work, the windows and their rounds. The protocol is in
tests/bench/README.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench import random_model
from tests.bench import scheduling_load as load
from tests.bench.machine import TICKS_PER_S, Others, ticks_of
from tests.bench.results import Interval, geometric
from tests.bench.streamed import PLACES, Setup, StreamedEngine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tests.bench.streamed import Request

BLOCKS = 1024
# Each place of the engine is taken about twice in a window. The last steps, in which places fall empty, are the same in
# all arms.
REQUESTS = 2 * PLACES
# After its last work, a vLLM worker polls for more without a pause for about a second.
SPIN_S = 1.2
# All features have their defaults, but the budgets are so large that no request is left out of a step.
NEUTRAL: dict[str, Any] = {"scheduler": {"output_tpot_budget_ms": 100_000.0, "think_tpot_budget_ms": 100_000.0}}
POLICIES = {
    "stock": {},
    "stock again": {},
    "governed": NEUTRAL,
    "every step": NEUTRAL | {"telemetry": {"report_interval_steps": 1}},
}
ARMS = tuple(POLICIES)
# The last arm uses the governed engine under another policy, so it needs no engine of its own.
ENGINES = ARMS[:-1]
# Rounds from which an interval says something.
FEWEST = 6
# The arms of the rounds that only narrow the interval.
COMPARED = ("stock", "governed")
PROCESSES = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker"}


@dataclass(frozen=True)
class Window:
    """One window of one arm. cpu_s: processor seconds by process; others_cores: cores that other programs used."""

    tokens_per_s: float
    step_ms: float
    cpu_s: dict[str, float]
    tokens: int
    others_cores: float


@dataclass(frozen=True)
class Throughput:
    """The figures of all arms against stock: a second stock engine, the governed engine with defaults, and the governed
    engine with a report for each step.

    rounds: windows of stock and of the governed engine; the other arms may have fewer. ratio: geometric mean over the
    rounds, with a bootstrap interval. cpu_us: processor microseconds per generated token, by arm and process. ratios:
    the ratio of each round, by arm.
    """

    rounds: int
    ratio: dict[str, Interval]
    tokens_per_s: dict[str, float]
    step_ms: float
    cpu_us: dict[str, dict[str, float]]
    others_cores: float
    ratios: dict[str, list[float]]


@dataclass(frozen=True)
class Rounds:
    """How many rounds to run: `least` with all arms, then more with stock and the governed engine alone until the
    ratio's interval reaches at most `half_width` to either side, or `most` rounds are over. half_width: None for no
    more rounds. requests: requests of each window."""

    least: int
    half_width: float | None
    most: int
    requests: int = REQUESTS

    @property
    def limit(self) -> int:
        """The largest number of rounds."""
        return self.least if self.half_width is None else max(self.least, self.most)

    def go_on(self, done: int, ratio: Interval) -> bool:
        """Return whether another round follows `done` rounds with this ratio of the governed engine to stock."""
        if self.half_width is None or done < self.least or done >= self.limit:
            return done < self.least
        return done < FEWEST or max(ratio.high - ratio.value, ratio.value - ratio.low) > self.half_width


def measure(folder: Path, rounds: Rounds, said: Callable[[str, Throughput], None]) -> Throughput:
    """Measure all arms after a round to warm up; `said` gets the figures so far after each round. Raises BenchError."""
    return asyncio.run(_measure(folder, rounds, said))


async def _measure(folder: Path, rounds: Rounds, said: Callable[[str, Throughput], None]) -> Throughput:
    model = random_model.make(folder / "model")
    setups = {name: Setup(model, BLOCKS, governed=name == "governed") for name in ENGINES}
    with contextlib.ExitStack() as stack:
        engines = {name: stack.enter_context(_engine(setup, folder / name)) for name, setup in setups.items()}

        async def one(arms: Sequence[str], seed: int) -> dict[str, Window]:
            turned = seed % len(arms)
            order = [*arms[turned:], *arms[:turned]][:: 1 if seed // len(arms) % 2 else -1]
            waiting = load.requests(seed, rounds.requests)
            return {arm: await engines.get(arm, engines["governed"]).window(POLICIES[arm], waiting) for arm in order}

        await one(ARMS, 0)
        found: list[dict[str, Window]] = []
        while True:
            found.append(await one(ARMS if len(found) < rounds.least else COMPARED, len(found) + 1))
            so_far = summary(found)
            said(f"round {len(found)}, of {rounds.limit} at most", so_far)
            if not rounds.go_on(len(found), so_far.ratio["governed"]):
                return so_far


@contextlib.contextmanager
def _engine(setup: Setup, folder: Path) -> Iterator[Measured]:
    before = _named()
    engine = StreamedEngine(setup, folder)
    try:
        processes = {pid: name for pid, name in _named().items() if pid not in before}
        if engine.control is not None:
            processes[engine.control.process.popen.pid] = "control plane"
        yield Measured(engine, processes)
    finally:
        engine.close()


class Measured:
    """One engine and its processes."""

    def __init__(self, engine: StreamedEngine, processes: dict[int, str]) -> None:
        self._engine, self._processes = engine, processes

    async def window(self, policy: dict[str, Any], requests: Sequence[Request]) -> Window:
        """Run the requests of a round, which all arms share, with every place of the engine taken."""
        engine = self._engine
        await engine.begin(policy)
        await asyncio.sleep(SPIN_S)
        before, own_s, others = self._ticks(), time.process_time(), Others()
        waiting, began_s = iter(requests), time.perf_counter()
        tokens = 0

        async def place() -> None:
            nonlocal tokens
            for request in waiting:
                done = await engine.stream(request)
                tokens += len(done.tokens)

        await asyncio.gather(*(place() for _ in range(PLACES)))
        took_s = time.perf_counter() - began_s
        cpu_s = dict.fromkeys((*PROCESSES.values(), "control plane"), 0.0)
        for pid, ticks in self._ticks().items():
            cpu_s[self._processes[pid]] += (ticks - before[pid]) / TICKS_PER_S
        cpu_s["client"] = time.process_time() - own_s
        steps = max(1, engine.meter.steps)
        return Window(tokens / took_s, took_s / steps * 1e3, cpu_s, tokens, others.cores(took_s))

    def _ticks(self) -> dict[int, int]:
        return {pid: ticks_of(pid) for pid in self._processes}


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


def _descends(pid: int) -> bool:
    """Return whether the process `pid` is this process or descends from it."""
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def summary(rounds: Sequence[dict[str, Window]]) -> Throughput:
    """Return the figures over all rounds."""

    def of(arm: str, value: Callable[[Window], float]) -> float:
        return float(np.median([value(found[arm]) for found in rounds if arm in found]))

    def cpu_us(arm: str, process: str) -> float:
        return of(arm, lambda window: window.cpu_s[process] / window.tokens) * 1e6

    ratios = {
        arm: [found[arm].tokens_per_s / found["stock"].tokens_per_s for found in rounds if arm in found]
        for arm in ARMS[1:]
    }
    return Throughput(
        rounds=len(rounds),
        ratio={arm: geometric(values) for arm, values in ratios.items()},
        tokens_per_s={arm: of(arm, lambda window: window.tokens_per_s) for arm in ARMS},
        step_ms=of("stock", lambda window: window.step_ms),
        cpu_us={arm: {p: cpu_us(arm, p) for p in rounds[0][arm].cpu_s} for arm in ARMS},
        others_cores=max(of(arm, lambda window: window.others_cores) for arm in ARMS),
        ratios=ratios,
    )
