"""Stock and governed vLLM side by side while faults come and go: engines, windows of wall-clock time, their pairs.

Owns two engines under the same load, of which one at a time runs. Protocol: tests/bench/README.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.bench import random_model
from tests.bench import scheduling_load as load
from tests.bench.machine import Others
from tests.bench.results import CONFIDENCE, resampled
from tests.bench.streamed import BLOCK_TOKENS, MAX_MODEL_LEN
from tests.chaos.driver import Engine
from tests.chaos.engine import children
from tests.chaos.scene import TARGET, Scene
from tests.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# In flight all the time, of so many that come again and again; prompts and lengths are those of bench-scheduling.
IN_FLIGHT, REQUESTS, SEED = 16, 96, 7
ENGINE: dict[str, Any] = {
    "served_model_name": "random",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 2 * IN_FLIGHT,
    "num_gpu_blocks_override": 1024,
    "block_size": BLOCK_TOKENS,
    "worker_cls": "tests.bench.metered.MeteredWorker",
}
# Nobody is left out, nothing is held back; leases so short that each fault that silences the control plane ends them.
POLICY: dict[str, Any] = {
    "scheduler": {"output_tpot_budget_ms": 100_000.0, "think_tpot_budget_ms": 100_000.0},
    "fallback": {"lease_ms": 2000},
}
# As the metered worker reads it, see tests.demo.pace, which imports all of vLLM: steps are as long as they are.
UNPACED = {"MERIDIAN_DEMO_STEP_MS": "0"}
WARM_S, BACK_S = 3.0, 90.0


@dataclass(frozen=True)
class Window:
    """One arm for a while. cpu_s: processor time that its processes worked. longest_s: between two steps' tokens."""

    tokens: int
    busy_s: float
    cpu_s: float
    longest_s: float
    states: tuple[str, ...] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.busy_s

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.tokens / self.cpu_s


Pair = dict[str, Window]


@dataclass(frozen=True)
class Ratio:
    """Governed over stock: the geometric mean over pairs of windows, with a bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass
class Course:
    """One fault: the pairs of windows while it lasted and once it was past. back_s: from its end until decisions were
    in force again; others_cores: what other programs used of the processors."""

    name: str
    during: list[Pair] = field(default_factory=list)
    after: list[Pair] = field(default_factory=list)
    back_s: float = 0.0
    others_cores: float = 0.0

    def states(self) -> list[str]:
        """The states that the agent was in while it lasted, in the order in which they were first seen."""
        return list(dict.fromkeys(state for pair in self.during for state in pair["governed"].states))

    def longest_s(self, arm: str) -> float:
        """The longest time without a token while it lasted."""
        return max((pair[arm].longest_s for pair in self.during), default=float("nan"))


def ratio(pairs: Sequence[Pair], of: str) -> Ratio:
    """Of a Window's figure."""
    logs = np.log([getattr(pair["governed"], of) / getattr(pair["stock"], of) for pair in pairs])
    means = logs[resampled(len(logs))].mean(axis=1)
    low, high = np.exp(np.quantile(means, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))).tolist()
    return Ratio(float(np.exp(logs.mean())), low, high)


def cases() -> list[dict[str, Any]]:
    """Requests that think and answer for as long as they were told, governed or not."""

    def case(request: Any) -> dict[str, Any]:
        own = {"meridian_max_think_tokens": request.think_tokens}
        length = request.think_tokens + 1 + request.answer_tokens
        return {"prompt_ids": list(request.prompt), "sampling": {"max_tokens": length, "extra_args": own}}

    return [case(request) for request in load.requests(SEED, REQUESTS)]


class Arm:
    """One engine. Between its windows its worker is stopped, which would look for work for a second otherwise."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        engine.ready()
        self._workers = children(engine.process.popen.pid)

    def window(self, seconds: float) -> Window:
        self._signal(signal.SIGCONT)
        before = self._engine.run()
        time.sleep(seconds)
        report = self._engine.pause()
        self._signal(signal.SIGSTOP)
        states = tuple(state for _, state, _ in (*before.states, *report.states))
        return Window(report.tokens, report.busy_s, report.cpu_s - before.cpu_s, report.longest_s, states)

    def until_governed(self) -> float:
        """Go on until decisions are in force; returns when they were seen to be."""
        self._signal(signal.SIGCONT)
        seen_s = 0.0

        def governed() -> bool:
            nonlocal seen_s
            # The newest state is the one that the agent is in.
            at_s, state, decided = (self._engine.run().states or [(0.0, "", False)])[-1]
            seen_s = at_s
            return state == "READY" and decided

        wait_for(governed, BACK_S, "decisions to be in force again")
        self._engine.pause()
        self._signal(signal.SIGSTOP)
        return seen_s

    def log(self) -> str:
        return self._engine.log()

    def close(self) -> None:
        self._signal(signal.SIGCONT)
        self._engine.stop()

    def _signal(self, number: int) -> None:
        for pid in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


class Sides:
    """Both arms, and what is around the governed one."""

    def __init__(self, scene: Scene, arms: dict[str, Arm]) -> None:
        self.scene, self._arms = scene, arms

    def warm_up(self) -> None:
        for arm in self._arms.values():
            arm.window(WARM_S)
        self._arms["governed"].until_governed()

    def pairs(self, count: int, seconds: float, course: Course) -> list[Pair]:
        """Which arm comes first changes with every pair."""
        found, others, began_s = [], Others(), time.monotonic()
        for number in range(count):
            order = ("governed", "stock") if number % 2 == 0 else ("stock", "governed")
            found.append({name: self._arms[name].window(seconds) for name in order})
        course.others_cores = max(course.others_cores, others.cores(time.monotonic() - began_s))
        return found

    def back_s(self) -> float:
        """How long from now until decisions are in force."""
        began_s = time.monotonic()
        return max(0.0, self._arms["governed"].until_governed() - began_s)


@contextlib.contextmanager
def sides(folder: Path) -> Iterator[Sides]:
    """Raises NoNamespacesError where there can be no bad network."""
    model = random_model.make(folder / "model")
    scene = Scene(folder, SEED)
    started: list[Engine] = []
    arms: dict[str, Arm] = {}
    wanted = {"cases": cases(), "in_flight": IN_FLIGHT, "sampling": {"ignore_eos": True}, "metered": True}
    more: dict[str, Any] = {"load": wanted, "engine": {**ENGINE, "model": str(model)}, "environment": UNPACED}
    try:
        scene.control.start()
        within = scene.network.within("engine")
        for name, target, before in (("governed", TARGET, within), ("stock", "", ())):
            started.append(Engine(folder, name, target, before, **more))
        for name, one in zip(("governed", "stock"), started, strict=True):
            arms[name] = Arm(one)
        scene.control.apply(POLICY)
        made = Sides(scene, arms)
        made.warm_up()
        yield made
    finally:
        for arm in arms.values():
            arm.close()
        for one in started:
            one.process.stop()
        scene.stop()
