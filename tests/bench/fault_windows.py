"""Stock and governed vLLM side by side while faults come and go: engines, windows of steps, their pairs.

Owns two engines under the same load, of which one at a time runs. Each window has the same steps of it in both arms.
Protocol: tests/bench/README.md.
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
from tests.bench.streamed import BLOCK_TOKENS, MAX_MODEL_LEN
from tests.chaos.driver import Engine
from tests.chaos.engine import children
from tests.chaos.scene import TARGET, Scene
from tests.processes import wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tests.chaos.reports import Report

# In flight all the time, of so many that come again and again; prompts and lengths are those of bench-scheduling.
IN_FLIGHT, REQUESTS, SEED = 16, 96, 7
ENGINE: dict[str, Any] = {
    "served_model_name": "random",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 2 * IN_FLIGHT,
    "num_gpu_blocks_override": 1024,
    "block_size": BLOCK_TOKENS,
    "worker_cls": "tests.bench.metered.MeteredWorker",
    # As servers have it; with the engine core in the caller's process vLLM would have the worker there, too.
    "distributed_executor_backend": "mp",
}
# Nobody is left out, nothing is held back; leases so short that each fault that silences the control plane ends them.
POLICY: dict[str, Any] = {
    "scheduler": {"output_tpot_budget_ms": 100_000.0, "think_tpot_budget_ms": 100_000.0},
    "fallback": {"lease_ms": 2000},
}
# As the metered worker reads it, see tests.demo.pace, which imports all of vLLM: steps are as long as they are.
UNPACED = {"MERIDIAN_DEMO_STEP_MS": "0"}
# By then requests have come and gone often enough to be in all parts of their lengths.
WARM_STEPS, BACK_S = 300, 90.0
# Two pairs of windows, each arm first in one of them.
ROUND = ("governed", "stock"), ("stock", "governed")


@dataclass(frozen=True)
class Window:
    """One arm for some steps. cpu_s: processor time that its processes worked. longest_s: between two steps' tokens."""

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

    def unlike(self) -> int:
        """Pairs whose arms did not do the same: as many tokens is what the same steps have."""
        return sum(pair["governed"].tokens != pair["stock"].tokens for pair in (*self.during, *self.after))

    def longest_s(self, arm: str) -> float:
        """The longest time without a token while it lasted."""
        return max((pair[arm].longest_s for pair in self.during), default=float("nan"))


def ratios(pairs: Sequence[Pair], of: str) -> NDArray[np.float64]:
    """Governed over stock in a Window's figure, one number for each round: coming first is no advantage in it."""
    logs = np.log([getattr(pair["governed"], of) / getattr(pair["stock"], of) for pair in pairs])
    rounds: NDArray[np.float64] = np.exp(logs.reshape(-1, len(ROUND)).mean(axis=1))
    return rounds


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
        self.stepped = 0

    def window(self, steps: int) -> Window:
        self._signal(signal.SIGCONT)
        before = self._engine.pause()
        report = self._noted(self._engine.steps(steps))
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
            at_s, state, decided = (self._noted(self._engine.run()).states or [(0.0, "", False)])[-1]
            seen_s = at_s
            return state == "READY" and decided

        wait_for(governed, BACK_S, "decisions to be in force again")
        self._noted(self._engine.pause())
        self._signal(signal.SIGSTOP)
        return seen_s

    def _noted(self, report: Report) -> Report:
        self.stepped += report.steps
        return report

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
            arm.window(WARM_STEPS)
        self.back_s()

    def pairs(self, rounds: int, steps: int, course: Course) -> list[Pair]:
        others, began_s = Others(), time.monotonic()
        found = [{name: self._arms[name].window(steps) for name in order} for order in ROUND * rounds]
        course.others_cores = max(course.others_cores, others.cores(time.monotonic() - began_s))
        return found

    def back_s(self) -> float:
        """How long from now until decisions are in force. Stock then does the steps that were taken meanwhile."""
        began_s, stock, governed = time.monotonic(), self._arms["stock"], self._arms["governed"]
        back_s = max(0.0, governed.until_governed() - began_s)
        stock.window(governed.stepped - stock.stepped)
        return back_s


@contextlib.contextmanager
def sides(folder: Path) -> Iterator[Sides]:
    """Raises NoNamespacesError where there can be no bad network."""
    model = random_model.make(folder / "model")
    scene = Scene(folder, SEED)
    started: list[Engine] = []
    arms: dict[str, Arm] = {}
    wanted: dict[str, Any] = {"cases": cases(), "in_flight": IN_FLIGHT, "sampling": {"ignore_eos": True}}
    wanted |= {"metered": True, "salted": True}
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
