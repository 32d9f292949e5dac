"""What the agent takes of an engine's throughput, and what each process used: stock and governed vLLM side by side.

Owns two engines, of which one at a time has work, the windows and their pairs. Protocol: tests/bench/README.md.
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
from tests.bench.results import geometric
from tests.bench.streamed import PLACES, Setup, StreamedEngine

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 1024
# In a window each place is taken about twice; its last steps, when places fall empty, are the same in both arms.
REQUESTS = 2 * PLACES
# vLLM's workers look for work without a pause for a second after the last.
SPIN_S = 1.2
# Nobody is left out, nothing is held back, no rule ends thinking; all else is on as it comes.
NEUTRAL: dict[str, Any] = {"scheduler": {"output_tpot_budget_ms": 100_000.0, "think_tpot_budget_ms": 100_000.0}}
PROCESSES = {"VLLM::EngineCore": "engine core", "VLLM::Worker": "worker"}


@dataclass(frozen=True)
class Window:
    """One window of one arm. cpu_s: processor seconds by process; others_cores: what other programs used."""

    tokens_per_s: float
    step_ms: float
    cpu_s: dict[str, float]
    tokens: int
    others_cores: float


@dataclass(frozen=True)
class Throughput:
    """The governed engine against stock. ratio: geometric mean over the pairs of windows, with a bootstrap interval.

    cpu_us: processor microseconds per generated token, by arm and process.
    """

    pairs: int
    ratio: float
    low: float
    high: float
    stock_tokens_per_s: float
    governed_tokens_per_s: float
    step_ms: float
    cpu_us: dict[str, dict[str, float]]
    others_cores: float
    ratios: list[float]


def measure(folder: Path, pairs: int) -> Throughput:
    """Raises BenchError."""
    return asyncio.run(_measure(folder, pairs))


async def _measure(folder: Path, pairs: int) -> Throughput:
    model = random_model.make(folder / "model")
    setups = {name: Setup(model, BLOCKS, governed=name == "governed") for name in ("stock", "governed")}
    with contextlib.ExitStack() as stack:
        arms = {name: stack.enter_context(_arm(setup, folder / name)) for name, setup in setups.items()}
        found: list[dict[str, Window]] = []
        for pair in range(pairs + 1):
            order = ("stock", "governed") if pair % 2 else ("governed", "stock")
            found.append({name: await arms[name].window(pair) for name in order})
    return summary(found[1:])


@contextlib.contextmanager
def _arm(setup: Setup, folder: Path) -> Iterator[Arm]:
    before = _named()
    engine = StreamedEngine(setup, folder)
    try:
        processes = {pid: name for pid, name in _named().items() if pid not in before}
        if engine.control is not None:
            processes[engine.control.process.popen.pid] = "control plane"
        yield Arm(engine, processes)
    finally:
        engine.close()


class Arm:
    """One engine and its processes."""

    def __init__(self, engine: StreamedEngine, processes: dict[int, str]) -> None:
        self._engine, self._processes = engine, processes

    async def window(self, seed: int) -> Window:
        """The same requests in both arms, a new one whenever one is done."""
        engine = self._engine
        await engine.begin(NEUTRAL)
        await asyncio.sleep(SPIN_S)
        before, own_s, others = self._ticks(), time.process_time(), Others()
        waiting, began_s = iter(load.requests(seed, REQUESTS)), time.perf_counter()
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
    """vLLM's processes that this one started, by what they call themselves."""
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
    """Whether this process started that one, or one that did."""
    while pid > 1 and pid != os.getpid():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid == os.getpid()


def summary(pairs: list[dict[str, Window]]) -> Throughput:
    """What the pairs of windows come to."""
    ratios = [pair["governed"].tokens_per_s / pair["stock"].tokens_per_s for pair in pairs]
    ratio = geometric(ratios)

    def of(arm: str, name: str) -> float:
        return float(np.median([getattr(pair[arm], name) for pair in pairs]))

    def cpu_us(arm: str, process: str) -> float:
        return float(np.median([pair[arm].cpu_s[process] / pair[arm].tokens for pair in pairs])) * 1e6

    return Throughput(
        pairs=len(pairs),
        ratio=ratio.value,
        low=ratio.low,
        high=ratio.high,
        stock_tokens_per_s=of("stock", "tokens_per_s"),
        governed_tokens_per_s=of("governed", "tokens_per_s"),
        step_ms=of("stock", "step_ms"),
        cpu_us={arm: {p: cpu_us(arm, p) for p in pairs[0][arm].cpu_s} for arm in ("stock", "governed")},
        others_cores=max(of(arm, "others_cores") for arm in ("stock", "governed")),
        ratios=ratios,
    )
