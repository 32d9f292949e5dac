"""Run stock and governed vLLM side by side while faults begin and end: engines, windows of steps, and their pairs.

The module owns two engines under the same load, of which one at a time runs. A window has the same steps of the load in
both arms. The protocol is in tests/bench/README.md.
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

# Requests always in flight, the number of different requests, which repeat, and the seed. Prompts and lengths are those
# of bench-scheduling.
IN_FLIGHT, REQUESTS, SEED = 16, 96, 7
ENGINE: dict[str, Any] = {
    "served_model_name": "random",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": 2 * IN_FLIGHT,
    "num_gpu_blocks_override": 1024,
    "block_size": BLOCK_TOKENS,
    "worker_cls": "tests.bench.metered.MeteredWorker",
    # vLLM's server runs the worker in its own process; with the engine core in the caller's process, vLLM's default
    # would not.
    "distributed_executor_backend": "mp",
}
# The budgets are so large that no request is left out of a step. The leases are so short that they end in each fault
# that silences the control plane.
POLICY: dict[str, Any] = {
    "scheduler": {"output_tpot_budget_ms": 100_000.0, "think_tpot_budget_ms": 100_000.0},
    "fallback": {"lease_ms": 2000},
}
# Turns off the pace of tests.demo.pace, from which the metered worker derives, so that steps have their own duration.
# The variable is named here, because tests.demo.pace imports all of vLLM.
UNPACED = {"MERIDIAN_DEMO_STEP_MS": "0"}
# After WARM_STEPS enough requests have ended and begun that those in flight are at all stages of their lengths.
WARM_STEPS, BACK_S = 300, 90.0
# One round is two pairs of windows; each arm comes first in one of them.
ROUND = ("governed", "stock"), ("stock", "governed")


@dataclass(frozen=True)
class Window:
    """Some steps of one arm. cpu_s: processor time of the arm's processes. longest_s: longest gap between two steps'
    tokens."""

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
    """One fault: the pairs of windows during the fault and after it.

    back_s: time from the end of the fault until decisions were in force again. others_cores: processor cores that other
    programs used.
    """

    name: str
    during: list[Pair] = field(default_factory=list)
    after: list[Pair] = field(default_factory=list)
    back_s: float = 0.0
    others_cores: float = 0.0

    def states(self) -> list[str]:
        """Return the states that the agent was in during the fault, in the order in which they were first seen."""
        return list(dict.fromkeys(state for pair in self.during for state in pair["governed"].states))

    def unlike(self) -> int:
        """Return the number of pairs whose arms generated different numbers of tokens, which the same steps do not."""
        return sum(pair["governed"].tokens != pair["stock"].tokens for pair in (*self.during, *self.after))

    def longest_s(self, arm: str) -> float:
        """Return the longest time without a token during the fault."""
        return max((pair[arm].longest_s for pair in self.during), default=float("nan"))


def ratios(pairs: Sequence[Pair], of: str) -> NDArray[np.float64]:
    """Return one ratio of governed to stock for each round, in the Window's figure `of`; the order within pairs cancels
    out."""
    logs = np.log([getattr(pair["governed"], of) / getattr(pair["stock"], of) for pair in pairs])
    rounds: NDArray[np.float64] = np.exp(logs.reshape(-1, len(ROUND)).mean(axis=1))
    return rounds


def cases() -> list[dict[str, Any]]:
    """Return requests that think and answer for a given number of tokens, whether governed or not."""

    def case(request: Any) -> dict[str, Any]:
        own = {"meridian_max_think_tokens": request.think_tokens}
        length = request.think_tokens + 1 + request.answer_tokens
        return {"prompt_ids": list(request.prompt), "sampling": {"max_tokens": length, "extra_args": own}}

    return [case(request) for request in load.requests(SEED, REQUESTS)]


class Arm:
    """One engine, whose worker is stopped between the windows, because it would otherwise poll for work for a
    second."""

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
        """Let the engine go on until decisions are in force; return the time at which they were first seen to be."""
        self._signal(signal.SIGCONT)
        seen_s = 0.0

        def governed() -> bool:
            nonlocal seen_s
            # The newest state of the report is the agent's present state.
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
    """Both arms, and the network and control plane of the governed one."""

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
        """Return the seconds from now until decisions are in force again, and let stock do the steps taken in that
        time."""
        began_s, stock, governed = time.monotonic(), self._arms["stock"], self._arms["governed"]
        back_s = max(0.0, governed.until_governed() - began_s)
        stock.window(governed.stepped - stock.stepped)
        return back_s


@contextlib.contextmanager
def sides(folder: Path) -> Iterator[Sides]:
    """Yield both arms, warmed up. Raises NoNamespacesError if the network cannot be emulated."""
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
